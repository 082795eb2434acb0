"""Parameters read straight into panels equal parameters read whole and laid out afterwards."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import checkpoint_weights, parse_model_config, read_model_config
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.weights import load_weights, safetensors
from jaxserve.weights.panel_rows import panel_plan
from jaxserve.weights.placement import use_panels
from jaxserve.weights.safetensors import Shard, TensorEntry

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 70,
    "hidden_size": 65,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
PHI = {"architectures": ["Phi3ForCausalLM"], "pad_token_id": 0, "sliding_window": None}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 3}
MIXTRAL |= {"num_experts_per_tok": 2, "sliding_window": None}
GPT_OSS = MIXTRAL | {"architectures": ["GptOssForCausalLM"], "sliding_window": 9}
GPT_OSS |= {"layer_types": ["sliding_attention"], "attention_bias": True, "swiglu_limit": 7.0}
GPT_OSS |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
VARIANTS = {
    "fused": {},
    "tied": {"tie_word_embeddings": True},
    "stacked": PHI,
    "heads of 16": {"head_dim": 16},
    "one kv head": {"num_key_value_heads": 1},
    "gates of 40": {"intermediate_size": 40},
    "few inputs": {"hidden_size": 4},
    "experts": MIXTRAL,
    "experts of 40": MIXTRAL | {"intermediate_size": 40},
    "experts together": GPT_OSS,
    "experts of 40 together": GPT_OSS | {"intermediate_size": 40},
}


def checkpoint(folder: Path, changes: dict[str, Any], dtype: Any) -> Path:
    raw = RAW | changes
    (folder / "config.json").write_text(json.dumps(raw))
    config, generator = parse_model_config(raw), np.random.default_rng(0)
    shapes = {one.name: one.shape(dimensions(config)) for one in checkpoint_weights(config)}
    tensors = {name: generator.normal(size=size).astype(dtype) for name, size in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def bits(model: Any) -> tuple[Any, list[tuple[Any, Any, bytes]]]:
    """Return a model's arrays, with the descriptions of its panels."""
    leaves, structure = jax.tree.flatten(nnx.state(model))
    found = map(np.asarray, leaves)
    return structure, [(leaf.shape, leaf.dtype, leaf.tobytes()) for leaf in found]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (np.float32, "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.bfloat16, "float32"),
        (np.float32, "bfloat16"),
        (np.float16, "float16"),
    ],
)
def test_panels_are_those_laid_out_afterwards(tmp_path, variant, stored, wanted, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.block_reader.PANEL_BYTES", 1)  # as many blocks as can be
    folder = checkpoint(tmp_path, VARIANTS[variant], stored)
    config = read_model_config(folder)
    want = load_weights(folder, config, wanted)
    use_panels(want)
    assert bits(load_weights(folder, config, wanted, panels=True)) == bits(want)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("experts")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_loading_needs_beside_the_model_does_not_grow_with_its_experts(
    tmp_path, variant, dtype
):
    """The threads' buffers decide it, each of one expert's matrix, and never of all experts."""

    def load(count: int) -> tuple[int, int]:
        """Return the bytes of the model's experts, and the peak of memory besides the model."""
        large = {"num_local_experts": count, "hidden_size": 128, "vocab_size": 8}
        (tmp_path / str(count)).mkdir(exist_ok=True)
        folder = checkpoint(tmp_path / str(count), VARIANTS[variant] | large, jnp.dtype(dtype))
        config = read_model_config(folder)
        tracemalloc.start()
        try:
            model = load_weights(folder, config, dtype, panels=True)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        mlp, leaves = model.layers[0].mlp, jax.tree.leaves(nnx.state(model))
        stack = mlp.gate_up[...].values.nbytes
        return stack, peak - sum(leaf.nbytes for leaf in leaves)

    load(16)  # kernels are compiled once
    few, many = load(16), load(80)
    assert many[1] - few[1] < (many[0] - few[0]) / 2


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("fused", "mlp.down_proj"),
        ("experts", "experts.1.w2"),
        ("experts of 40", "experts.1.w3"),
        ("experts together", "experts.gate_up_proj"),
    ],
)
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path, variant, name):
    folder = checkpoint(tmp_path, VARIANTS[variant], np.float32)
    config = read_model_config(folder)
    path = folder / "model.safetensors"
    (found,) = [
        one for one in safetensors.read_header(path) if one.name.endswith((name, f"{name}.weight"))
    ]
    whole, end = path.read_bytes(), found.offset + found.num_bytes
    path.write_bytes(whole[: end - 4] + np.array(np.nan, np.float32).tobytes() + whole[end:])
    with pytest.raises(CheckpointError, match=f"{name}.*NaN"):
        load_weights(folder, config, "float32", panels=True)


def entry(shape: tuple[int, ...]) -> TensorEntry:
    shard = Shard(Path("model.safetensors"), (0, 0, 0, 0))
    return TensorEntry("w", shard, np.dtype(np.float32), shape, 0, 4 * int(np.prod(shape)))


@pytest.mark.parametrize(
    ("layout", "contract", "rows"),
    [
        ("F D -> D F", 1, [(0, 0, 96)]),
        ("(K G H) D -> D K G H", 1, [(0, 0, 128)]),
        ("(G K H) D -> D K G H", 1, [(0, 0, 32), (2, 32, 64), (1, 64, 96), (3, 96, 128)]),
        ("(H K) D -> D K H", 1, None),  # rows of a panel lie apart
        ("D F -> D F", 1, None),  # rows are inputs
        ("D (G K H) -> K G H D", 3, None),  # inputs in another order
        ("E D F -> E F D", 1, None),
    ],
)
def test_rows_are_found_in_their_panels_or_not_at_all(layout, contract, rows):
    dims = {"F": 96, "D": 64, "K": 2, "G": 2, "H": 32, "E": 2}
    part = WeightName("w", layout, "p")
    shape = tuple(dims[name] for name in layout.split("->")[1].split())
    axes = tuple(range(contract)), tuple(range(contract, len(shape)))
    found = panel_plan(
        [part], {"w": entry(part.shape(dims))}, dims, shape, np.dtype(np.float32), axes
    )
    got = found and [(one.panel, *one.rows) for one in found.rows["w", 0]]
    assert got == rows
