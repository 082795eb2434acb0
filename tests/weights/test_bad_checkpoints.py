"""Damaged, lying and hostile checkpoints end in one error that names the file, soon."""

import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import Decoder, read_model_config
from jaxserve.weights import load_weights
from jaxserve.weights.model_weights import parameter_values
from jaxserve.weights.safetensors import read_header

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
SHARD = "model-00001-of-00003.safetensors"


def load(directory: Path) -> Decoder:
    return load_weights(directory, read_model_config(directory), np.float32)


def refused(directory: Path, *names: str) -> str:
    """Return the message of a load's one error, which must name `names` within 5 s of work."""
    started = time.process_time()  # whatever else the machine does
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert time.process_time() - started < 5
    message = str(caught.value)
    assert all(name in message for name in names), message
    assert len(message) < 8000
    return message


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of a safetensors file and leave its data alone."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    write_raw(path, json.dumps(header).encode(), content[8 + length :])


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def set_tensor(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


def overlap(header: dict[str, Any]) -> None:
    """Let the last tensor start with the first one's bytes."""
    entries = sorted((v["data_offsets"], k) for k, v in header.items() if k != "__metadata__")
    (begin, end), name = entries[-1]
    header[name]["data_offsets"] = [begin - 4, end - 4]


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "overlap": (overlap, "overlaps"),
    "hole": (lambda header: header.pop(DOWN), "gap"),
    "overflowing_shape": (set_tensor(NORM, shape=[1 << 40, 1 << 40]), NORM),
    "huge_size": (set_tensor(NORM, shape=[1 << 70]), NORM),
    "negative_size": (set_tensor(NORM, shape=[-4, -4]), NORM),
    "size_that_is_no_integer": (set_tensor(NORM, shape=[16.0]), NORM),
    "size_that_is_a_flag": (set_tensor(NORM, shape=[True, 16]), NORM),
    "offsets_past_the_end": (set_tensor(NORM, data_offsets=[10**9, 10**9 + 64]), NORM),
    "offsets_reversed": (set_tensor(NORM, data_offsets=[64, 0]), NORM),
    "three_offsets": (set_tensor(NORM, data_offsets=[0, 32, 64]), NORM),
    "offsets_are_text": (set_tensor(NORM, data_offsets="00"), NORM),
    "unknown_dtype": (set_tensor(NORM, dtype="Q4"), "Q4"),
    "dtype_that_is_a_list": (set_tensor(NORM, dtype=["F32"]), NORM),
    "float8_without_scales": (set_tensor(NORM, dtype="F8_E4M3"), "F8_E4M3"),
    "integers": (set_tensor(NORM, dtype="I32"), "I32"),
    "unknown_field": (set_tensor(NORM, code="import os"), NORM),
    "no_dtype": (lambda header: header[NORM].pop("dtype"), NORM),
    "tensor_that_is_a_list": (lambda header: header.update({NORM: [1]}), NORM),
}


@pytest.mark.parametrize("case", HEADERS)
def test_header_that_contradicts_itself(single, case):
    change, named = HEADERS[case]
    rewrite(single / FILE, change)
    refused(single, FILE, named)


LIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "shape": set_tensor(DOWN, shape=[20, 16]),
    "flat_shape": set_tensor(DOWN, shape=[320]),
    "dtype_and_shape": set_tensor(DOWN, dtype="F16", shape=[16, 40]),
}


@pytest.mark.parametrize("case", LIES)
def test_header_that_lies_consistently(single, case):
    """The safetensors library reads these without complaint."""
    rewrite(single / FILE, LIES[case])
    load_file(single / FILE)
    refused(single, DOWN, "[16, 20]")


def damaged(content: bytes) -> dict[str, bytes]:
    header = content[8 : 8 + struct.unpack("<Q", content[:8])[0]]
    data = content[8 + len(header) :]
    twice = header.rstrip()[:-1] + b"," + header[1:]
    nested = b'{"a":' + b"[" * 200_000
    return {
        "empty": b"",
        "seven_bytes": content[:7],
        "header_cut": content[:100],
        "data_cut": content[:-1],
        "header_only": content[: 8 + len(header)],
        "trailing_bytes": content + b"\0",
        "huge_length": struct.pack("<Q", 1 << 63) + content[8:],
        "length_past_the_end": struct.pack("<Q", len(content)) + content[8:],
        "length_zero": struct.pack("<Q", 0) + content[8:],
        "not_json": struct.pack("<Q", len(header)) + b"{" * len(header) + data,
        "a_list": struct.pack("<Q", 2) + b"[]",
        "duplicate_keys": struct.pack("<Q", len(twice)) + twice + data,
        "not_utf8": struct.pack("<Q", len(header)) + header[:5] + b"\xff" + header[6:] + data,
        "nested": struct.pack("<Q", len(nested)) + nested,
        "git_lfs_pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "zip_pickle": b"PK\x03\x04" + content,
        "pickle": b"\x80\x02}q\x00." + content,
    }


DAMAGED = list(damaged(struct.pack("<Q", 2) + b"{}"))
HINTS = {"empty": "empty", "git_lfs_pointer": "git lfs pull", "zip_pickle": "pickle"}
HINTS |= {"pickle": "pickle", "trailing_bytes": "after the last", "data_cut": "truncated"}
HINTS |= {"duplicate_keys": "twice"}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file(single, case):
    path = single / FILE
    path.write_bytes(damaged(path.read_bytes())[case])
    refused(single, FILE, HINTS.get(case, ""))


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_shard(sharded, case):
    path = sharded / SHARD
    path.write_bytes(damaged(path.read_bytes())[case])
    refused(sharded, SHARD, HINTS.get(case, ""))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 0), (1, 0)])
def test_what_the_library_refuses_is_refused(tmp_path, edits):
    """The only error is CheckpointError, whichever bytes are damaged."""
    path = tmp_path / "file.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}, path)
    content = bytearray(path.read_bytes())
    for place, byte in edits:
        content[place % len(content)] = byte
    path.write_bytes(content)
    try:
        with safe_open(path, "numpy") as file:
            want = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except SafetensorError:
        with pytest.raises(CheckpointError):
            read_header(path)
        return
    try:
        got = {entry.name: entry.shape for entry in read_header(path)}
    except CheckpointError:
        return  # stricter than the library: duplicate keys, dtypes that no model has
    assert got == want


def test_all_wrong_names_are_listed_in_one_error(single, tensors):
    del tensors[NORM], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["lm_head.bias"] = np.ones(3, np.float32)
    tensors["model.layers.1.mlp.surprise.weight"] = np.ones(3, np.float32)
    tensors[DOWN] = np.ones((16, 21), np.float32)
    tensors["lm_head.weight"] = np.ones((25, 16), np.float32)
    save_file(tensors, single / FILE)
    message = refused(single, str(single))
    missing, unexpected, misshapen = message.splitlines()[1:]
    assert "2 missing" in missing and NORM in missing and "layers.1.mlp.up_proj" in missing
    assert "2 unexpected" in unexpected and "surprise" in unexpected and "head.bias" in unexpected
    assert "2 of the wrong shape" in misshapen
    assert f"{DOWN} [16, 21] (config.json implies [16, 20])" in misshapen
    assert "lm_head.weight [25, 16] (config.json implies [24, 16])" in misshapen


def test_a_long_list_of_names_is_cut(single):
    names = [f"model.layers.0.{i}" + "x" * 5000 for i in range(500)]
    save_file({name: np.ones(1, np.float32) for name in names}, single / FILE)
    message = refused(single, "500 unexpected", "and 480 more", "21 missing", "and 1 more")
    assert len(message) < 7000


def test_tensors_of_nothing_that_the_model_has_are_named_and_left_out(single, tensors, caplog):
    """Layers after the last, other heads: the rest is served as it would be without them."""
    want = parameter_values(load(single))
    for name in ("score.weight", "model.layers.2.mlp.up_proj.weight", "model.vision.bias"):
        tensors[name] = np.full(3, np.nan, np.float32)
    tensors |= {f"extra.{i}": np.ones(1, np.float16) for i in range(30)}
    save_file(tensors, single / FILE)
    got = parameter_values(load(single))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[path], want[path]) for path in want)
    (record,) = caplog.records
    message = record.getMessage()
    assert "33 tensor(s)" in message and "extra.0" in message and "and 13 more" in message


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.self_attn.q_norm.weight",
        "model.norm.bias",
        "model.embed_tokens.weight_scale",
    ],
)
def test_tensors_that_would_change_what_is_computed_are_refused(single, tensors, name):
    tensors[name] = np.ones(3, np.float32)
    save_file(tensors, single / FILE)
    refused(single, "1 unexpected", name)


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((directory / INDEX).read_text())
    change(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


OUTSIDE = [
    "../x.safetensors",
    "/etc/passwd",
    "/x.safetensors",
    "a/../x.safetensors",
    "sub/x.safetensors",
    "x\0.safetensors",
    "..",
    "",
    "config.json",
    None,
    7,
    ["x.safetensors"],
]


@pytest.mark.parametrize("file", OUTSIDE, ids=repr)
def test_index_that_names_no_plain_file(sharded, file):
    edit_index(sharded, lambda weight_map: weight_map.update({NORM: file}))
    refused(sharded, INDEX, NORM)


INDEXES: dict[str, bytes] = {
    "empty": b"",
    "a_list": b"[]",
    "no_map": b"{}",
    "empty_map": b'{"weight_map": {}}',
    "map_that_is_a_list": b'{"weight_map": ["a"]}',
    "duplicate": b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
    "nested": b'{"weight_map": ' + b"[" * 200_000,
    "too_large": b'{"weight_map": "' + b" " * (64 << 20) + b'"}',
}


@pytest.mark.parametrize("case", INDEXES)
def test_malformed_index(sharded, case):
    (sharded / INDEX).write_bytes(INDEXES[case])
    refused(sharded, INDEX)


def test_index_of_a_million_entries(sharded):
    entries = ",".join(f'"t{i}":"s{i}.safetensors"' for i in range(1_000_000))
    (sharded / INDEX).write_text(f'{{"weight_map":{{{entries}}}}}')
    refused(sharded, INDEX, "1000000 tensors")


def test_index_of_more_files_than_there_are(sharded):
    extra = {f"t{i}": f"s{i}.safetensors" for i in range(100_000)}
    edit_index(sharded, lambda weight_map: weight_map.update(extra))
    refused(sharded, "s0.safetensors", "and 99980 more", "missing")


def test_header_of_a_million_tensors(single):
    entry = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = "{" + ",".join(f'"{i}":{entry}' for i in range(1_000_000)) + "}"
    write_raw(single / FILE, header.encode(), b"")
    refused(single, FILE, f"its header would take {len(header)} bytes")


def test_missing_shard(sharded):
    (sharded / SHARD).unlink()
    refused(sharded, SHARD, "missing")


def test_shard_that_is_a_broken_link(sharded):
    (sharded / SHARD).unlink()
    (sharded / SHARD).symlink_to("nowhere")
    refused(sharded, SHARD, "broken link")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_shard_that_is_no_file(sharded, kind):
    (sharded / SHARD).unlink()
    (os.mkfifo if kind == "pipe" else os.mkdir)(sharded / SHARD)
    refused(sharded, SHARD, "not a regular file")


def test_link_out_of_the_folder(sharded, tmp_path):
    shutil.move(sharded / SHARD, tmp_path / "elsewhere.safetensors")
    (sharded / SHARD).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(sharded, SHARD, "outside")


def test_single_file_that_links_out_of_the_folder(single, tmp_path):
    shutil.move(single / FILE, tmp_path / "elsewhere.safetensors")
    (single / FILE).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(single, FILE, "outside")


def test_tensor_missing_in_its_shard(sharded):
    tensors = load_file(sharded / SHARD)
    name, _ = tensors.popitem()
    save_file(tensors, sharded / SHARD)
    refused(sharded, INDEX, name, SHARD)


def test_tensor_in_another_shard_than_the_index_says(sharded):
    edit_index(sharded, lambda weight_map: weight_map.update({NORM: SHARD}))
    refused(sharded, INDEX, NORM)


SECOND = "model-00002-of-00003.safetensors"


def in_both(sharded: Path, name: str, value: float) -> None:
    """Put a tensor of the first shard, with another value, into the second."""
    tensor = np.full_like(load_file(sharded / SHARD)[name], value)
    save_file(load_file(sharded / SECOND) | {name: tensor}, sharded / SECOND)


def first_of(shard: Path) -> str:
    return sorted(load_file(shard))[0]


def unlisted(sharded: Path) -> str:
    """Put a tensor that every model has, and one of no model, into a shard beside the index."""
    save_file(load_file(sharded / SHARD) | {"a.b": np.ones(1, np.float32)}, sharded / SHARD)
    in_both(sharded, first_of(sharded / SHARD), np.nan)
    return "2 tensor"


def stray_file(sharded: Path, content: bytes = b"no safetensors") -> str:
    (sharded / FILE).write_bytes(content)
    return f"1 tensor.* are ignored: {re.escape(FILE)}$"


def many(sharded: Path) -> str:
    extra = {f"extra.{i:03}": np.ones(1, np.float32) for i in range(100)}
    save_file(load_file(sharded / SHARD) | extra, sharded / SHARD)
    return "100 tensor.*extra.000.*and 80 more"


STRAYS = {
    "same": lambda sharded: in_both(sharded, first_of(sharded / SHARD), 1.0) or SECOND,
    "nan": lambda sharded: in_both(sharded, first_of(sharded / SHARD), np.nan) or SECOND,
    "unlisted": unlisted,
    "many": many,
    "single": stray_file,
    "single_link": lambda sharded: (sharded / FILE).symlink_to("/etc/hostname") or FILE,
}


@pytest.mark.parametrize("name", STRAYS)
def test_the_index_decides_and_one_line_names_the_rest(sharded, caplog, name):
    want = parameter_values(load(sharded))
    caplog.clear()
    said = STRAYS[name](sharded)
    got = parameter_values(load(sharded))
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[path], want[path]) for path in want)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and re.search(said, record.getMessage())


def test_an_index_that_lists_only_one_file_decides_too(sharded, single):
    shutil.copy(single / FILE, sharded / FILE)
    want = parameter_values(load(sharded))
    edit_index(sharded, lambda weight_map: weight_map.update(dict.fromkeys(weight_map, FILE)))
    got = parameter_values(load(sharded))
    assert all(np.array_equal(got[path], want[path]) for path in want)


def test_a_tensor_that_only_a_file_beside_the_index_has_is_missing(sharded, single):
    """Whether the index lists it, for a file that has it not, or leaves it out."""
    shutil.copy(single / FILE, sharded / FILE)
    tensors = load_file(sharded / SHARD)
    name, _ = tensors.popitem()
    save_file(tensors, sharded / SHARD)
    refused(sharded, INDEX, name, SHARD)
    edit_index(sharded, lambda weight_map: weight_map.pop(name))
    refused(sharded, "1 missing", name)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_only_pickles(single, file):
    (single / FILE).rename(single / file)
    refused(single, file, "convert")


def test_no_weights_at_all(single):
    (single / FILE).rename(single / "adapter.safetensors")
    refused(single, str(single), FILE, "adapter.safetensors")
    with pytest.raises(CheckpointError, match="no such folder"):
        load_weights(single / "absent", read_model_config(single), np.float32)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("change", ["truncate", "rewrite", "replace", "remove"])
def test_file_that_changes_during_the_load(sharded, change, late):
    """Whether the change comes after the first tensor is read or after the last."""
    path = sharded / SHARD
    changed = False

    def progress(done: int, total: int) -> None:
        nonlocal changed
        if changed or (done == total) != late:
            return
        content, changed = path.read_bytes(), True
        if change in ("replace", "remove"):
            path.unlink()
        if change != "remove":
            path.write_bytes(content[:-8] if change == "truncate" else content)
            os.utime(path, ns=(1, 1))

    started = time.monotonic()
    with pytest.raises(CheckpointError, match=SHARD):
        load_weights(sharded, read_model_config(sharded), np.float32, on_progress=progress)
    assert time.process_time() - started < 5
