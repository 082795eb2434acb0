"""A model in several GGUF files equals the model in one, and an error names a bad part."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError
from jaxserve.weights import GgufFile, gguf_config, load_weights, open_gguf
from jaxserve.weights.gguf.parts import part_names
from tests.support.gguf_files import (
    Type,
    exact_tensors,
    finish,
    random_tensors,
    raw_config,
    write_gguf,
)
from tests.support.gguf_parts import split_gguf


def values(file: GgufFile, **options: Any) -> list[bytes]:
    model = load_weights(file, gguf_config(file), jnp.float32, **options)
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.mark.parametrize("case", ["llama", "qwen3moe"])
@pytest.mark.parametrize("bare", [False, True])
def test_parts_are_the_whole(tmp_path, case, bare):
    kind = Type.Q8_0 if bare else Type.F32
    tensors = exact_tensors(raw_config(case))
    whole = open_gguf(write_gguf(tmp_path / "m.gguf", case, tensors, kind))
    parts = split_gguf(whole.path, tmp_path, 4, bare_first=bare)
    assert len(parts) > 3 and [path.name for path in parts] == part_names(parts[2].name)
    file = open_gguf(parts[0])
    assert file.path == parts[0] and file.tensors.keys() == whole.tensors.keys()
    assert gguf_config(file) == gguf_config(whole)
    assert values(file) == values(whole)
    options = {"panels": True, "packed": bare}
    assert values(file, **options) == values(whole, **options)


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    whole = write_gguf(tmp_path / "m.gguf", "llama", random_tensors(raw_config("llama")))
    return split_gguf(whole, tmp_path, 8)


def other_part(folder: Path, part: Path, **changes: int) -> None:
    """Put a part of other counts, or of another model, in a part's place."""
    reader = gguf.GGUFReader(part)
    named = {f"split.{name.replace('_', '.')}": value for name, value in changes.items()}
    writer = gguf.GGUFWriter(folder / "new.gguf", "llama" if "arch" not in changes else "qwen2")
    for key in ("split.no", "split.count", "split.tensors.count"):
        value = named.get(key, int(reader.fields[key].contents()))
        kind = writer.add_uint16 if key != "split.tensors.count" else writer.add_int32
        kind(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    shutil.move(folder / "new.gguf", part)


def test_a_missing_part_is_named(parts):
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-0000.*missing beside it: m-00002-of-"):
        open_gguf(parts[0])


def test_the_first_part_is_the_one_to_name(parts):
    with pytest.raises(CheckpointError, match=r"m-00002.*name the first, m-00001-of-0000"):
        open_gguf(parts[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"no": 2}, "split.no is 2, not 1"),
        ({"count": 7}, "split.count is 7"),
        ({"tensors_count": 9}, "split.tensors.count is 9"),
        ({"arch": 1}, "general.architecture is qwen2, not llama"),
    ],
)
def test_a_foreign_part_is_named(parts, tmp_path, change, named):
    other_part(tmp_path, parts[1], **change)
    with pytest.raises(CheckpointError, match=rf"m-00002-of-.*is no part of this model: {named}"):
        open_gguf(parts[0])


def test_a_whole_file_in_the_place_of_a_part_is_named(parts, tmp_path):
    shutil.copyfile(tmp_path / "m.gguf", parts[1])
    with pytest.raises(CheckpointError, match=r"m-00002.*is no part.*split.no is None, not 1"):
        open_gguf(parts[0])


def test_a_part_that_holds_anothers_tensors_is_named(parts, tmp_path):
    shutil.copyfile(parts[1], tmp_path / "kept")
    shutil.copyfile(parts[0], parts[1])
    with pytest.raises(CheckpointError, match=r"m-00002.*split.no is 0, not 1"):
        open_gguf(parts[0])
    other_part(tmp_path, parts[1], no=1)
    with pytest.raises(CheckpointError, match=r"m-00002.*is also in m-00001"):
        open_gguf(parts[0])


def test_names_of_parts_say_how_many_there_are(parts, tmp_path):
    for name in ("alone.gguf", "m-00001-of-00009.gguf"):
        shutil.copyfile(parts[0], tmp_path / name)
        with pytest.raises(CheckpointError, match=rf"{name}: is one of \d parts, whose names"):
            open_gguf(tmp_path / name)
    assert part_names("m-00001-of-00000.gguf") is None is part_names("m-1-of-2.gguf")
    assert part_names("a/m-00002-of-00002.gguf") == [
        "a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf",
    ]  # fmt: skip


def test_a_count_that_nothing_meets_is_refused(tmp_path):
    tensors = random_tensors(raw_config("llama"))
    metadata = {"split.no": 0, "split.count": 2, "split.tensors.count": 99}
    path = tmp_path / "m-00001-of-00002.gguf"
    write_gguf(path, "llama", tensors, metadata=metadata)
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    for key, value in (metadata | {"split.no": 1}).items():
        writer.add_uint32(key, value)
    writer.add_tensor("more", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"hold 22 tensors; split.tensors.count says 99"):
        open_gguf(path)
