"""A converted folder is read back bit for bit, or refused."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import parse_model_config, read_model_config
from jaxserve.weights import (
    load_converted,
    load_weights,
    open_converted,
    parameter_values,
    random_weights,
    write_converted,
)
from jaxserve.weights.converted import CARD, WEIGHTS
from tests.support.gguf_files import random_tensors
from tests.weights.conftest import RAW
from tests.weights.test_quantized import DEEPSEEK, checkpoint

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


def restore(folder: Path) -> dict[str, Any]:
    model = load_converted(open_converted(folder), read_model_config(folder))
    return jax.tree.map(np.asarray, parameter_values(model))


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


def test_float64_comes_back_where_this_thread_alone_has_it(single, tmp_path):
    with jax.enable_x64(True):
        convert(single, tmp_path / "to", "float64")
        got = restore(tmp_path / "to")
    assert all(value.dtype == np.float64 for value in got.values())


def write_quantized(directory: Path, kind: str) -> tuple[Path, dict[str, Any], int]:
    """Write a converted folder; return it, its original, and its number of quantized parameters.

    "int4" has experts and latents in groups with padding; "gptq_act_order" projections whose parts
    differ, and scales of a cache.
    """
    if kind == "int4":
        raw = DEEPSEEK | {"torch_dtype": "float32"}
        model = random_weights(parse_model_config(raw), jnp.float32, 0, kind)
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(raw))
    else:
        scale = {"model.layers.0.self_attn.k_scale": np.float32(0.5).reshape(1)}
        checkpoint(directory, kind, change=lambda tensors: tensors.update(scale))
        config = read_model_config(directory)
        model = load_weights(directory, config, jnp.float32, kv_scales=True)
    values, to = parameter_values(model), directory / "to"
    want = jax.tree.map(np.asarray, values)
    asked = kind if kind == "int4" else None
    write_converted(
        values, model.config, to, lambda folder: copy_config(directory, folder), "float32", asked
    )
    assert not values and open_converted(to).quantization == asked
    return to, want, {"int4": 18, "gptq_act_order": 4}[kind]


@pytest.mark.parametrize("kind", ["int4", "gptq_act_order"])
def test_every_bit_of_quantized_parameters_comes_back(kind, tmp_path):
    to, want, count = write_quantized(tmp_path / "from", kind)
    assert len(open_converted(to).forms) == count
    config = read_model_config(to)
    got = parameter_values(load_converted(open_converted(to), config, kv_scales=True))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == other.tobytes()
    scales = "layers.0.attention.kv_scales"
    assert (scales in want) == (kind != "int4") and scales not in restore(to)


def test_damaged_descriptions_of_quantized_parameters(tmp_path):
    """A card may say anything: it is refused before anything of its sizes is made."""
    to, _, _ = write_quantized(tmp_path / "from", "gptq_act_order")
    card = json.loads((to / CARD).read_text())
    qkv, down = "layers.0.attention.qkv", "layers.0.mlp.down"
    arrays = f"{qkv}.weights.0."

    def part(place: object, form: object = "int4") -> dict[str, Any]:
        return {"forms": {qkv: [[form, place], *card["forms"][qkv][1:]]}}

    def described(**changed: object) -> dict[str, Any]:
        return {"parameters": {arrays + name: value for name, value in changed.items()}}

    def kind(name: str, **changed: object) -> dict[str, object]:
        return card["parameters"][arrays + name] | changed

    place = card["forms"][qkv][0][1]
    for change, named in (
        ({"forms": []}, "forms"),
        ({"forms": {"norm.scale": "int4"}}, "norm.scale"),
        ({"forms": {"no.such": "int4"}}, "no.such"),
        ({"forms": {down: "int3"}}, "int3"),
        ({"forms": {qkv: "int4"}}, f"{qkv}.values"),
        ({"forms": {qkv: card["forms"][qkv][:1]}}, "do not fill"),
        ({"forms": {qkv: [[]]}}, "needs a form"),
        ({"forms": {down: {"token_rounded": "int4"}}}, f"{down}.weight.values"),
        ({"forms": {down: {"rounded": "int4"}}}, "token_rounded"),
        ({"forms": {down: {"token_rounded": {"token_rounded": "int4"}}}}, "token_rounded"),
        (part(place, "int3"), "int3"),
        (part(place[1:]), "needs a form"),
        (part([[0, 1 << 60], *place[1:]]), "needs a form"),
        (part([[-1, 1], *place[1:]]), "needs a form"),
        (described(values=kind("values", shape=[1 << 60, 1])), f"{arrays}values"),
        (described(scales=kind("scales", shape=[3, 64])), "which does not fit"),
        (described(scales=kind("scales", dtype="int32")), f"{arrays}scales"),
        (described(order=kind("order", shape=[1])), f"{arrays}order"),
        (
            described(zeros=kind("zeros", dtype="float16"), scales=kind("scales", dtype="float32")),
            "zeros are float16",
        ),
        ({"quantization": "int3"}, "quantization"),
    ):
        changed = {
            name: {**card[name], **value} if isinstance(value, dict) else value
            for name, value in change.items()
        }
        (to / CARD).write_text(json.dumps(card | changed))
        with pytest.raises(CheckpointError) as caught:
            restore(to)
        assert str(to) in str(caught.value) and named in str(caught.value), change
    assert {"forms", "quantization"} < card.keys()
    (to / CARD).write_text(json.dumps({**card, "forms": {}}))
    with pytest.raises(CheckpointError, match="not those of config"):
        restore(to)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a converted folder, to copy and damage."""
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


def test_the_event_loop_of_the_caller_stays_its_own(whole, single, tmp_path):
    """Be it one that runs, as in a notebook, or one that was only set."""

    async def both() -> None:
        restore(whole)
        convert(single, tmp_path / "to")

    asyncio.run(both())
    with closing(asyncio.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)
        try:
            restore(whole)
            assert asyncio.get_event_loop_policy().get_event_loop() is loop
        finally:
            asyncio.set_event_loop(None)


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
from jaxserve.models import parse_model_config, read_model_config
from jaxserve.weights import converted, load_converted, open_converted, parameter_values
whole, quantized, to = map(Path, sys.argv[1:])
mesh = Mesh(np.array(jax.devices()), ("x",))
def sharding_of(path, shape):
    axes = [i for i, size in enumerate(shape) if size % 4 == 0][-1:]
    names = ["x" if i in axes else None for i in range(len(shape))]
    return NamedSharding(mesh, PartitionSpec(*names))
for folder in (quantized, whole):
    config = read_model_config(folder)
    one = parameter_values(load_converted(open_converted(folder), config))
    many = parameter_values(load_converted(open_converted(folder), config, sharding_of))
    pairs = list(zip(jax.tree.leaves(one), jax.tree.leaves(many), strict=True))
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    assert sum(not value.is_fully_replicated for _, value in pairs) > 10
print("equal", flush=True)
converted._sync_all = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
converted.write_converted(many, config, to, lambda folder: None, "float32")
"""


def test_four_devices_and_a_kill_in_the_middle(whole, tmp_path, tmp_path_factory):
    """A folder is restored to any sharding. One killed between weights and card is incomplete."""
    quantized, _, _ = write_quantized(tmp_path_factory.mktemp("quantized") / "from", "int4")
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(whole), str(quantized), str(tmp_path / "to")],
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
