"""What `jaxserve convert` writes comes back bit for bit, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import read_model_config
from jaxserve.weights import (
    load_converted,
    load_weights,
    open_converted,
    parameter_values,
    write_converted,
)
from jaxserve.weights.converted import CARD, WEIGHTS
from tests.weights.conftest import RAW
from tests.weights.gguf_files import random_tensors

ROOT = Path(__file__).parent.parent.parent


def convert(source: Path, to: Path, dtype: str = "float32") -> None:
    config = read_model_config(source)
    values = parameter_values(load_weights(source, config, jnp.dtype(dtype)))
    write_converted(
        values, config, to, lambda folder: copy_config(source, folder), str(jnp.dtype(dtype))
    )
    assert not values


def copy_config(source: Path, folder: Path) -> None:
    shutil.copyfile(source / "config.json", folder / "config.json")


def restore(folder: Path) -> dict[str, np.ndarray]:
    model = load_converted(open_converted(folder), read_model_config(folder))
    return {path: np.asarray(value) for path, value in parameter_values(model).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_comes_back(single, tmp_path, dtype):
    convert(single, tmp_path / "to", dtype)
    model = load_weights(single, read_model_config(single), jnp.dtype(dtype))
    want = {path: np.asarray(value) for path, value in parameter_values(model).items()}
    got = restore(tmp_path / "to")
    assert got.keys() == want.keys()
    for path, value in want.items():
        assert got[path].dtype == value.dtype and got[path].tobytes() == value.tobytes()
    assert [path.name for path in tmp_path.glob(".to*")] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted folder to copy and damage."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text(json.dumps(RAW))
    save_file(random_tensors(RAW), folder / "model.safetensors")
    convert(folder, folder / "to")
    return folder / "to"


def largest_file(folder: Path) -> Path:
    return max((folder / WEIGHTS).rglob("*"), key=lambda path: path.stat().st_size)


def edit_card(folder: Path, change: Callable[[dict], object]) -> None:
    card = json.loads((folder / CARD).read_text())
    change(card)
    (folder / CARD).write_text(json.dumps(card))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link_out(folder: Path) -> None:
    path = largest_file(folder)
    outside = folder.parent / "outside"
    shutil.move(path, outside)
    path.symlink_to(outside)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no_card": (lambda folder: (folder / CARD).unlink(), "did not end"),
    "cut_card": (lambda folder: (folder / CARD).write_text("{"), "JSON"),
    "other_format": (lambda f: edit_card(f, lambda card: card.update(format=2)), "format"),
    "unknown_field": (lambda f: edit_card(f, lambda card: card.update(code="x")), "code"),
    "files_a_list": (lambda f: edit_card(f, lambda card: card.update(files=[])), "not listed"),
    "parameters_a_list": (
        lambda f: edit_card(f, lambda card: card.update(parameters=[1])),
        "parameters",
    ),
    "no_digest": (
        lambda f: edit_card(f, lambda card: card["parameters"]["norm.scale"].pop("sha256")),
        "norm.scale",
    ),
    "hostile_path": (
        lambda f: edit_card(f, lambda card: card["files"].update({"../../etc/passwd": 10})),
        "'../../etc/passwd' missing",
    ),
    "missing_file": (lambda folder: largest_file(folder).unlink(), "missing"),
    "truncated_file": (lambda f: os.truncate(largest_file(f), 10), "another size"),
    "more_files": (lambda folder: (folder / "model.py").write_text("1"), "not listed"),
    "link_out": (link_out, "not a regular file"),
    "flipped_bit": (lambda folder: flip(largest_file(folder)), ""),
    "other_digest": (
        lambda f: edit_card(
            f, lambda card: card["parameters"]["norm.scale"].update(sha256="0" * 64)
        ),
        "bit for bit: norm.scale",
    ),
    "other_config": (
        lambda f: edit_config(f, hidden_act="silu", intermediate_size=24),
        "layers.0.mlp.down",
    ),
}


def edit_config(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    text = json.dumps(json.loads(path.read_text()) | fields)
    path.write_text(text)
    edit_card(folder, lambda card: card["files"].update({"config.json": len(text)}))


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_folder(whole, tmp_path, case):
    folder = tmp_path / "to"
    shutil.copytree(whole, folder)
    change, named = DAMAGE[case]
    change(folder)
    with pytest.raises(CheckpointError) as caught:
        restore(folder)
    assert str(folder) in str(caught.value) and named in str(caught.value)


def test_what_is_there_is_not_overwritten(whole, single):
    with pytest.raises(CheckpointError, match="exists already"):
        convert(single, whole)
    restore(whole)


def test_a_failure_leaves_nothing(single, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(single, tmp_path / "file" / "to")
    config = read_model_config(single)
    values = parameter_values(load_weights(single, config, jnp.float32))
    with pytest.raises(ZeroDivisionError):
        write_converted(values, config, tmp_path / "to", lambda folder: print(1 / 0), "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "single"]


PROGRAM = """
import os, signal, sys
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Mesh
from jaxserve.models import read_model_config
from jaxserve.weights import converted, load_converted, open_converted, parameter_values
whole, to = map(Path, sys.argv[1:])
config = read_model_config(whole)
mesh = Mesh(np.array(jax.devices()), ("x",))
def sharding_of(path, shape):
    axes = [i for i, size in enumerate(shape) if size % 4 == 0][-1:]
    names = ["x" if i in axes else None for i in range(len(shape))]
    return NamedSharding(mesh, PartitionSpec(*names))
one = parameter_values(load_converted(open_converted(whole), config))
many = parameter_values(load_converted(open_converted(whole), config, sharding_of))
assert all(np.asarray(one[path]).tobytes() == np.asarray(many[path]).tobytes() for path in one)
assert sum(not value.is_fully_replicated for value in many.values()) > 10
print("equal", flush=True)
converted._sync_all = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
converted.write_converted(many, config, to, lambda folder: None, "float32")
"""


def test_four_devices_and_a_kill_in_the_middle(whole, tmp_path):
    """Restored to any sharding; killed between the weights and the card, it is not whole."""
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(whole), str(tmp_path / "to")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-9, "equal\n"), done.stderr
    [partial] = tmp_path.iterdir()
    assert partial.name.startswith(".to.partial") and (partial / WEIGHTS).is_dir()
    with pytest.raises(CheckpointError, match="did not end"):
        restore(partial)
