"""Check products and loads on eight devices for `test_tensor_parallel.py`, and print JSON.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.weights.divided_forms FOLDER
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGMLQuantizationType
from jax import lax
from jax.sharding import Mesh

from jaxserve.execution.mesh import make_mesh, spec_of
from jaxserve.models import (
    Decoder,
    ModelConfig,
    abstract_model,
    checkpoint_weights,
    parse_model_config,
    read_model_config,
)
from jaxserve.models.experts import _product
from jaxserve.models.linear import matmul
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.shards import AXIS, Split, parts_of
from jaxserve.models.weight_table import dimensions
from jaxserve.weights import (
    block_reader,
    load_converted,
    load_weights,
    open_converted,
    open_gguf,
    random_weights,
    write_converted,
)
from jaxserve.weights.converted_parts import load_converted_parts
from jaxserve.weights.cutting import cut
from jaxserve.weights.layouts import aligned_empty
from jaxserve.weights.model_weights import parameter_values, parameters_of
from jaxserve.weights.shapes import PLAIN, RANDOM, DeviceLayout
from jaxserve.weights.tensors import open_arrays
from jaxserve.weights.updates import ParameterReader
from tests.support.gguf_files import random_tensors, raw_config, write_gguf
from tests.support.shape_gaps import gap
from tests.weights.divided_memory import RAW as SHARDS
from tests.weights.divided_memory import write as write_shards

RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 70,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "mlp_only_layers": [0],
}
DEVICES = 4
LARGEST = 512 * 2 * 2048 * 4  # bytes of the largest parameter where memory is counted
CASES = {"bfloat16": ("bfloat16", None), "int8": ("float32", "int8"), "int4": ("float32", "int4")}
"""Number forms that a checkpoint is read into, as dtype and quantization."""


def products(dtype: str, form: str | None, panels: bool) -> float:
    """Return how far products over devices are from products on one, relative to the largest."""
    whole = random_weights(parse_model_config(RAW), dtype, 0, form, panels)
    config = replace(whole.config, split=Split(DEVICES))
    mesh = make_mesh(DEVICES)
    divided = random_weights(config, dtype, 0, form, panels, mesh)
    assert gap(divided, config, dtype, form, DeviceLayout(panels), RANDOM) is None
    pieces = parameter_values(divided)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 256)), dtype)
    hidden = jnp.asarray(rng.normal(size=(6, 128)), dtype)

    def compute(values: dict[str, Any], axis: str | None) -> list[Any]:
        device = 0 if axis is None else lax.axis_index(axis)
        layer, sparse = "layers.0", "layers.1.mlp"
        sizes = jnp.array([1, 0, 3, 2], jnp.int32)

        def summed(y: Any) -> Any:
            return y if axis is None else lax.psum(y, axis)

        def own(hidden: Any, width: int) -> Any:
            return lax.dynamic_slice_in_dim(hidden, device * width, width, 1)

        gate_up = matmul(x, values[f"{layer}.mlp.gate_up"], out_dtype=jnp.float32)
        down = matmul(jnp.square(gate_up[:, 0]).astype(x.dtype), values[f"{layer}.mlp.down"])
        rows = _product(jnp.repeat(x, 2, 0), values[f"{sparse}.gate_up"], sizes, "auto")
        width = rows.shape[-1]
        added = _product(own(hidden, width), values[f"{sparse}.down"], sizes, "auto")
        qkv = matmul(x, values[f"{layer}.attention.qkv"])
        attended = qkv[:, :, :-2]
        out = matmul(attended, values[f"{layer}.attention.out"], contract=3)
        return [summed(part.astype(jnp.float32)) for part in (down, added, out)]

    one = parameter_values(whole)
    want = jax.jit(lambda values: compute(values, None))(one)
    specs = jax.tree.map(spec_of, pieces)
    mapped = jax.shard_map(
        lambda values: compute(values, AXIS),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=jax.sharding.PartitionSpec(),
        check_vma=False,
    )
    got = jax.jit(mapped)(pieces)
    pairs = zip(got, want, strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def differences(config: ModelConfig, one: Decoder, several: Decoder) -> list[str]:
    """Name the parameters whose arrays, on some device, are not the cut of the whole's."""
    wrong: list[str] = []
    whole, got = parameter_values(one), parameter_values(several)
    for path, parameter in parameters_of(abstract_model(config, np.float32)).items():
        axes = parameter.get_metadata()["axes"]
        if isinstance(whole[path], PlacedWeight) and whole[path].layout == "panels":
            continue  # floats, which `products` compares
        for device, part in enumerate(parts_of(config, axes, tuple(parameter.shape))):
            leaves = jax.tree.leaves(cut(whole[path], axes, part, path))
            found = [leaf.addressable_shards[device].data for leaf in jax.tree.leaves(got[path])]
            same = len(leaves) == len(found) and all(
                np.array_equal(np.asarray(mine), np.asarray(theirs))
                for mine, theirs in zip(leaves, found, strict=True)
            )
            if not same:
                wrong.append(f"{path} on {device}")
    return wrong


def stored(directory: Path, mesh: Mesh) -> list[str]:
    """Read a quantized checkpoint on one device and on two, as a GPU's products take it."""
    config = read_model_config(directory)
    one = load_weights(directory, config, np.float32)
    config = replace(config, split=Split(2))
    several = load_weights(directory, config, np.float32, mesh=mesh)
    planned = gap(several, config, np.float32, None, PLAIN, directory)
    return differences(config, one, several) + ([planned] if planned else [])


def folders(folder: Path, mesh: Mesh) -> dict[str, list[str]]:
    """Read folders that one device wrote: converted folders, and blocks of GGUF files."""
    found: dict[str, list[str]] = {}
    config = parse_model_config(RAW)
    divided = replace(config, split=Split(2))
    for name, form in (("converted", None), ("converted int4", "int4")):
        one = random_weights(config, np.float32, 0, form)
        values = parameter_values(one)
        write_converted(values, config, folder / name, lambda _: None, "float32", form)
        opened = open_converted(folder / name)
        several = load_converted_parts(opened, divided, mesh, panels=False)
        found[name] = differences(divided, load_converted(opened, config), several)
        planned = gap(several, divided, np.float32, None, PLAIN, opened)
        found[name] += [planned] if planned else []
    for case, form in (("llama", "Q8_0"), ("llama", "Q4_0"), ("gptoss", "MXFP4")):
        kind = GGMLQuantizationType[form]
        raw = raw_config(case) | {"hidden_size": 64, "intermediate_size": 128}
        path = write_gguf(folder / f"{form}.gguf", case, random_tensors(raw), kind, raw=raw)
        file = open_gguf(path)
        config = parse_model_config(raw)
        flags: Any = {"packed": True, "panels": True}
        one = load_weights(file, config, np.float32, **flags)
        whole_experts = (False, True) if case == "gptoss" else (False,)
        for split in (Split(2, expert_parallel=whole) for whole in whole_experts):
            divided = replace(config, split=split)
            several = load_weights(file, divided, np.float32, mesh=mesh, **flags)
            name = f"gguf {form}{', whole experts' if split.expert_parallel else ''}"
            found[name] = differences(divided, one, several)
            layout = DeviceLayout(panels=True, keeps_blocks=True)
            planned = gap(several, divided, np.float32, None, layout, file)
            found[name] += [planned] if planned else []
    return found


def updated(mesh: Mesh) -> dict[str, list[str]]:
    """Replace all weights of a divided model by arrays, then a third of its tensors.

    The names of parameters that differ from those of a model that is read with the arrays, by form.
    """
    config = replace(parse_model_config(RAW), split=Split(2))
    first, second = random_arrays(config, 0), random_arrays(config, 1)
    some = {name: second[name] for name in list(second)[::3]}
    found: dict[str, list[str]] = {}
    for form, panels in ((None, True), (None, False), ("int8", False)):

        def values(params: Any, form: str | None = form, panels: bool = panels) -> dict[str, Any]:
            flags: Any = {"quantization": form, "panels": panels, "mesh": mesh}
            return parameter_values(
                load_weights(open_arrays(params, config), config, "f4", **flags)
            )

        reader = ParameterReader(config, np.float32, form, DeviceLayout(panels=panels), mesh)
        current = values(first)
        pairs = [
            (reader.read(second, current), values(second)),
            (current | reader.read(some, current), values(first | some)),
        ]
        found[f"{form}, panels {panels}"] = [
            path
            for got, want in pairs
            for path in want
            if not all(map(same_parts, jax.tree.leaves(got[path]), jax.tree.leaves(want[path])))
        ]
    return found


def same_parts(one: jax.Array, other: jax.Array) -> bool:
    """Return whether two arrays have the same parts on the same devices."""
    parts = zip(one.addressable_shards, other.addressable_shards, strict=True)
    return one.sharding == other.sharding and all(
        np.array_equal(np.asarray(mine.data), np.asarray(theirs.data)) for mine, theirs in parts
    )


def random_arrays(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Return an array for each tensor of a model, by its name in checkpoint files."""
    generator, dims = np.random.default_rng(seed), dimensions(config)
    return {
        weight.name: generator.standard_normal(weight.shape(dims)).astype(np.float32)
        for weight in checkpoint_weights(config)
    }


def held_at_once(folder: Path, mesh: Mesh) -> float:
    """Return how many of its largest parameter the host holds while a checkpoint is read.

    Pieces are not counted. Blocks are as small beside it as they are beside one of a real model.
    """
    raw = SHARDS | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    raw |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    config = replace(parse_model_config(raw), split=Split(2))
    write_shards(folder, config)
    block_reader.BLOCK_BYTES = 1 << 16
    pieces = most = 0

    def place(_: str, values: np.ndarray) -> Any:
        nonlocal pieces, most
        most = max(most, tracemalloc.get_traced_memory()[0] - pieces)
        piece = aligned_empty(values.shape, values.dtype)  # which JAX takes over
        piece[...] = values
        pieces += values.nbytes
        return jax.device_put(piece)

    tracemalloc.start()
    load_weights(folder, config, np.float32, mesh=mesh, place=place)
    tracemalloc.stop()
    assert pieces > 6 * LARGEST
    return most / LARGEST


def main() -> None:
    """Compute everything and print it."""
    folder, mesh = Path(sys.argv[1]), make_mesh(2)
    assert mesh is not None
    (folder / "shards").mkdir()
    found = {
        "held": held_at_once(folder / "shards", mesh),
        "products": {name: products(*case, panels=True) for name, case in CASES.items()},
        "stored": {path.name: stored(path, mesh) for path in (folder / "stored").iterdir()},
        "folders": folders(folder, mesh),
        "updated": updated(mesh),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
