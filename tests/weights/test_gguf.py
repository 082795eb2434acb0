"""GGUF files arrive in the model as the Hugging Face checkpoint that they were made from."""

from __future__ import annotations

import inspect
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Decoder, parse_model_config
from jaxserve.models.rope import rope_cos_sin
from jaxserve.weights import gguf_config, gguf_fields, load_weights, read_gguf
from tests.support.gguf_files import (
    ARCHITECTURES,
    CASES,
    SHIFTED,
    Type,
    as_llama_cpp,
    exact_tensors,
    finish,
    random_tensors,
    raw_config,
    write_gguf,
)


def leaves(model: Decoder) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def hugging_face(folder: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Decoder:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return load_weights(folder, parse_model_config(raw), jnp.float32)


def assert_equal(one: Decoder, other: Decoder) -> None:
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert left.tobytes() == right.tobytes()


@pytest.mark.parametrize("case", CASES)
def test_every_architecture_is_what_it_was_made_from(tmp_path, case):
    """Compares every value, permuted rows and norms included, and the configuration."""
    raw, tensors = raw_config(case), random_tensors(raw_config(case))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, tensors))
    config, want = gguf_config(file), parse_model_config(raw)
    assert replace(config, dtype=want.dtype) == want
    if case in SHIFTED:  # 1 + w - 1 is not w in floating point
        for name, tensor in tensors.items():
            if name.endswith("norm.weight"):
                tensors[name] = as_llama_cpp(case, raw, name, tensor) - np.float32(1)
    got = load_weights(file, config, jnp.float32)
    assert_equal(got, hugging_face(tmp_path / "hf", raw, tensors))


@pytest.mark.parametrize("case", [case for case in CASES if case not in SHIFTED])
def test_every_architecture_in_blocks(tmp_path, case):
    """Values that Q8_0 and MXFP4 hold exactly, so that blocks may lie along any dimension."""
    raw, tensors = raw_config(case), exact_tensors(raw_config(case))
    kind = Type.MXFP4 if case == "gptoss" else Type.Q8_0
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, tensors, kind))
    encodings = {entry.encoding.name for entry in file.tensors.values()}
    assert encodings == ({"MXFP4", "BF16", "F32"} if case == "gptoss" else {"Q8_0", "F32"})
    config = gguf_config(file)
    assert config.dtype == ("bfloat16" if case == "gptoss" else "float16")
    got = load_weights(file, config, jnp.float32)
    assert_equal(got, hugging_face(tmp_path / "hf", raw, tensors))


@pytest.mark.parametrize("case", ["gptoss", "deepseek2", "mixtral", "commandr_norms_bias"])
def test_panels_are_the_same(tmp_path, monkeypatch, case):
    """The CPU's own products read the same panels from parts of a file as from a whole tensor."""
    monkeypatch.setattr("jaxserve.weights.block_reader.PANEL_BYTES", 512)
    raw, tensors = raw_config(case), random_tensors(raw_config(case))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, tensors))
    save_file(tensors, tmp_path / "model.safetensors")
    got = load_weights(file, gguf_config(file), jnp.float32, panels=True)
    want = load_weights(tmp_path, parse_model_config(raw), jnp.float32, panels=True)
    assert_equal(got, want)


@pytest.mark.parametrize("case", ["mixtral", "deepseek2_lite", "chatglm"])
def test_older_files(tmp_path, case):
    """Experts apart; one upward projection of latent attention, and a head's own sizes; one
    tensor of queries, keys and values."""
    raw, tensors = raw_config(case), random_tensors(raw_config(case))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, tensors, older=True))
    config, want = gguf_config(file), parse_model_config(raw)
    assert replace(config, dtype=want.dtype) == want
    got = load_weights(file, config, jnp.float32)
    assert_equal(got, hugging_face(tmp_path / "hf", raw, tensors))
    apart = {"mixtral": "ffn_down.3", "deepseek2_lite": "attn_kv_b", "chatglm": "attn_qkv"}
    assert f"blk.1.{apart[case]}.weight" in file.tensors


def test_parts_that_do_not_fit_are_refused(tmp_path):
    """Each by the names that the file has."""
    for case, name, named in (
        ("mixtral", "blk.1.ffn_up_exps.weight", "matrix for each of 4 experts"),
        ("gptoss", "blk.0.ffn_gate_exps.weight", "ffn_gate_exps.*ffn_up_exps"),
        ("deepseek2", "blk.0.attn_v_b.weight", "attn_v_b.*matrix for each of 4 heads"),
    ):
        tensors = random_tensors(raw_config(case))
        file = read_gguf(write_gguf(tmp_path / f"{case}.gguf", case, tensors))
        entry = file.tensors[name]
        cut = replace(
            entry, shape=(entry.shape[0] - 1, *entry.shape[1:]), num_bytes=entry.num_bytes // 2
        )
        file = replace(file, tensors={**file.tensors, name: cut})
        with pytest.raises(CheckpointError, match=named):
            load_weights(file, gguf_config(file), jnp.float32)


def dequantized(tensors: dict[str, np.ndarray], kind: Type) -> dict[str, np.ndarray]:
    """Return gguf's dequantized matrices of `tensors`; rows are packed one by one."""
    return {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim > 1 else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q5_1])
def test_every_encoding_is_unpacked(tmp_path, kind):
    tensors = random_tensors(raw_config("llama"))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "llama", tensors, kind))
    config = gguf_config(file)
    assert config.dtype == ("bfloat16" if kind == Type.BF16 else "float16")
    want = hugging_face(tmp_path / "hf", raw_config("llama"), dequantized(tensors, kind))
    assert_equal(load_weights(file, config, jnp.float32), want)


def random_blocks(kind: Type, rows: int, values: int) -> np.ndarray:
    """Return blocks of random bits, except for the blocks' scales, which are small."""
    per_block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(kind.value)
    blocks = generator.integers(0, 256, (rows, values // per_block, num_bytes), np.uint8)
    scale = generator.uniform(0.001, 0.01, (*blocks.shape[:2], 2)).astype(np.float16)
    raw = scale.view(np.uint8)
    if kind in (Type.Q6_K, Type.Q3_K, Type.TQ1_0, Type.TQ2_0):
        blocks[..., -2:] = raw[..., :2]
    elif kind == Type.Q2_K:
        blocks[..., -4:] = raw
    elif kind == Type.NVFP4:
        blocks[..., :4] = generator.integers(16, 64, (*blocks.shape[:2], 4))
    elif kind == Type.IQ1_M:  # the scale lies in the highest four bits of four words
        words = np.ascontiguousarray(blocks[..., -8:]).view(np.uint16) & 0x0FFF
        bits = scale.view(np.uint16)[..., :1] >> np.array([0, 4, 8, 12], np.uint16)
        blocks[..., -8:] = (words | (bits & 15) << 12).view(np.uint8)
    else:
        size = 2 if kind.name.startswith("IQ") else 4
        blocks[..., :size] = raw[..., :size]
    return blocks.reshape(rows, -1)


BLOCKS = [
    *(Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K),
    *(Type.IQ4_NL, Type.IQ4_XS),
]


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_that_gguf_does_not_write_are_unpacked(tmp_path, kind):
    """gguf cannot write these blocks, so their bits are random."""
    case = "qwen3"
    raw = raw_config(case) | {"hidden_size": 256}
    tensors = random_tensors(raw)
    path, name = tmp_path / "m.gguf", "model.layers.1.self_attn.q_proj.weight"
    blocks = random_blocks(kind, *tensors[name].shape)
    tensors[name] = gguf.dequantize(blocks, kind)
    base = tmp_path / "base.gguf"
    write_gguf(base, case, tensors, raw=raw)
    repack(base, path, {"blk.1.attn_q.weight": (blocks, kind)})
    file = read_gguf(path)
    assert file.tensors["blk.1.attn_q.weight"].encoding.name == kind.name
    want = hugging_face(tmp_path / "hf", raw, tensors)
    assert_equal(load_weights(file, gguf_config(file), jnp.float32), want)


WIDENED = {
    Type.IQ1_S: "attn_q",
    Type.IQ1_M: "attn_k",
    Type.IQ2_XXS: "attn_v",
    Type.IQ2_XS: "ffn_gate",
    Type.IQ2_S: "ffn_up",
    Type.IQ3_XXS: "attn_q",
    Type.IQ3_S: "attn_k",
    Type.TQ1_0: "attn_v",
    Type.TQ2_0: "ffn_gate",
    Type.NVFP4: "ffn_up",
}
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
}


def test_forms_that_no_product_takes_are_widened(tmp_path):
    """On CPU too, where other forms stay packed: each equals gguf's result to the bit."""
    raw = raw_config("qwen3") | {"hidden_size": 256}
    tensors = random_tensors(raw)
    repacked = {}
    for index, (kind, name) in enumerate(WIDENED.items()):
        layer = index // 5
        whole = f"model.layers.{layer}.{NAMES[name]}.weight"
        blocks = random_blocks(kind, *tensors[whole].shape)
        tensors[whole] = gguf.dequantize(blocks, kind)
        assert np.isfinite(tensors[whole]).all()
        repacked[f"blk.{layer}.{name}.weight"] = blocks, kind
    base, path = tmp_path / "base.gguf", tmp_path / "m.gguf"
    write_gguf(base, "qwen3", tensors, raw=raw)
    repack(base, path, repacked)
    file = read_gguf(path)
    want = hugging_face(tmp_path / "hf", raw, tensors)
    assert_equal(load_weights(file, gguf_config(file), jnp.float32), want)
    packed = load_weights(file, gguf_config(file), jnp.float32, panels=True, packed=True)
    for layer in packed.layers:
        kept = [layer.attention.qkv[...], layer.mlp.gate_up[...]]
        assert all(value.layout == "panels" for value in kept)


def repack(
    source: Path,
    target: Path,
    blocks: dict[str, tuple[np.ndarray, Type]],
    architecture: str = "qwen3",
) -> None:
    """Write the same file with some tensors stored in another way."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if tensor.name in blocks:
            array, kind = blocks[tensor.name]
            writer.add_tensor(tensor.name, array, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    finish(writer)


@pytest.mark.parametrize("case", ["llama", "llama_biases", "phi3", "gptoss", "deepseek2"])
def test_tensors_are_read_in_blocks(tmp_path, monkeypatch, case):
    """Rows of a tensor in many pieces: heads stay whole, values and stacked parts in place."""
    raw, tensors = raw_config(case), exact_tensors(raw_config(case))
    kind = Type.MXFP4 if case == "gptoss" else Type.Q8_0
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, tensors, kind))
    whole = load_weights(file, gguf_config(file), jnp.float32)
    monkeypatch.setattr("jaxserve.weights.block_reader.BLOCK_BYTES", 512)
    assert_equal(load_weights(file, gguf_config(file), jnp.float32), whole)
    assert_equal(hugging_face(tmp_path / "hf", raw, tensors), whole)


def test_our_reader_agrees_with_the_library(tmp_path):
    metadata = {"general.tags": ["a", "é"], "general.some": [1, 2, 3], "general.flag": True}
    path = write_gguf(
        tmp_path / "m.gguf",
        "qwen2",
        random_tensors(raw_config("qwen2")),
        Type.Q8_0,
        metadata,
    )
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert ours.metadata["general.tags"] == ["a", "é"] and ours.metadata["general.flag"] is True
    for field in theirs.fields.values():
        if not field.name.startswith("GGUF."):
            value, want = ours.metadata[field.name], field.contents()
            value = value.tolist() if isinstance(value, np.ndarray) else value
            assert value == (pytest.approx(want) if isinstance(want, float) else want)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (mine.offset, mine.num_bytes) == (tensor.data_offset, tensor.n_bytes)


def test_llama3_scaling_is_a_divisor_of_each_pair(tmp_path):
    """llama.cpp stores the result of the scaling, and not its parameters."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    raw = raw_config("llama")
    want = parse_model_config(raw | {"rope_scaling": scaling})
    factors = []
    for pair in range(8):
        wave = 2 * math.pi * raw["rope_theta"] ** (pair / 8)
        smooth = (64 / wave - 1) / 3
        between = 1 / ((1 - smooth) / 8 + smooth)
        factors.append(1.0 if wave < 64 / 4 else 8.0 if wave > 64 else between)
    assert len(set(factors)) > 2
    tensors = random_tensors(raw)
    path = tmp_path / "m.gguf"
    write_gguf(path, "llama", tensors)
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "scaled.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    writer.add_tensor("rope_freqs.weight", np.float32(factors))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    finish(writer)
    config = gguf_config(read_gguf(tmp_path / "scaled.gguf"))
    positions = jnp.arange(64)
    for got, expected in zip(
        rope_cos_sin(positions, config.rope, 16, jnp.float32),
        rope_cos_sin(positions, want.rope, 16, jnp.float32),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    load_weights(read_gguf(tmp_path / "scaled.gguf"), config, jnp.float32)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", [Type.F32, Type.F16, Type.Q8_0])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, kind, value):
    tensors = random_tensors(raw_config("qwen2"))
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    with np.errstate(all="ignore"):
        path = write_gguf(tmp_path / "m.gguf", "qwen2", tensors, kind)
    file = read_gguf(path)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*layers\.1\.mlp\.down_proj.*NaN"):
        load_weights(file, gguf_config(file), jnp.float32)


UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "experts": ({"llama.expert_count": 8}, "num_experts_per_tok"),
    "scaling": ({"llama.rope.scaling.type": "su"}, "scaling.type"),
    "clamp": ({"llama.attention.clamp_kqv": 3.0}, "clamp_kqv"),
    "more": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_ext_factor": 0.5},
        "ext_f",
    ),
}


# By the architecture and the key: values that are not supported, and values that are.
OTHER_VALUES: dict[tuple[str, str], tuple[list[Any], list[Any]]] = {
    ("llama", "attention.causal"): ([False, 0, 1, "true", [True, True]], [True]),
    ("qwen3", "attention.causal"): ([False], [True]),
    ("gemma3", "attention.causal"): ([False], [True]),
    ("cohere2", "attention.causal"): ([False], [True]),
    ("gptoss", "attention.causal"): ([False], [True]),
    ("deepseek2", "attention.causal"): ([False], [True]),
    ("llama", "use_parallel_residual"): ([True], [False]),
    ("commandr", "use_parallel_residual"): ([False], [True]),
    ("cohere2", "use_parallel_residual"): ([False], [True]),
    ("llama", "swin_norm"): ([True], [False]),
    ("mixtral", "expert_weights_norm"): ([False], [True]),
    ("qwen3moe", "expert_weights_norm"): ([False], [True]),
    ("qwen3vlmoe", "expert_weights_norm"): ([False], [True]),
    ("gptoss", "expert_weights_norm"): ([False], [True]),
    ("llama", "expert_weights_norm"): ([], [False]),
    ("qwen3moe", "expert_gating_func"): ([2], [0, 1, 3]),
    ("mixtral", "expert_weights_scale"): ([2.5], [0.0, 1.0]),
    ("phi3", "attention.sliding_window_pattern"): ([[False, False], 0], []),
    ("mixtral", "attention.sliding_window_pattern"): ([[True, False]], [[False, False]]),
    ("gemma2", "attention.sliding_window_pattern"): ([0, [False], [0.5]], [[True, False], 2]),
    ("phi3", "rope.scaling.factor"): ([2.0], [0.0, 1.0]),
    ("phi3", "rope.scale_linear"): ([2.0], [0.0, 1.0]),
    ("phi3", "rope.scaling.type"): (["linear", "yarn"], ["longrope", "none"]),
    ("llama", "rope.scaling.attn_factor"): ([1.5, 0.0], [1.0]),
    ("qwen2", "rope.scaling.attn_factor"): ([1.5, 0.0], [1.0]),
    ("llama", "tensor_data_layout"): ([1, ["reference"]], ["Meta AI original pth", "reference"]),
    ("llama", "pooling_type"): ([1, 2, 3, 4], [0]),
}


@pytest.mark.parametrize(("case", "key"), OTHER_VALUES, ids=str)
def test_a_key_is_read_for_what_is_computed_and_else_refused(tmp_path, case, key):
    """False and zero too, where they change the model: a file of embeddings is not causal."""
    tensors = random_tensors(raw_config(case))
    want = parse_model_config(raw_config(case))
    name = f"{gguf.MODEL_ARCH_NAMES[ARCHITECTURES[case]]}.{key}"
    refused, read = OTHER_VALUES[case, key]
    for value in refused:
        path = write_gguf(tmp_path / "m.gguf", case, tensors, metadata={name: value})
        with pytest.raises(UnsupportedModel, match=rf"(?s)m\.gguf.*{key.rpartition('.')[2]}|type"):
            gguf_config(read_gguf(path))
    for value in read:
        path = write_gguf(tmp_path / "m.gguf", case, tensors, metadata={name: value})
        config = gguf_config(read_gguf(path))
        assert replace(config, dtype=want.dtype) == want, value


def test_every_flag_that_a_model_may_have_is_in_the_table():
    """Exceptions: the switch of Granite's rotation, see below, and one of models with a state."""
    written = re.findall(r"add_bool\((Keys\.[\w.]+)\.format", inspect.getsource(gguf.GGUFWriter))
    flags = {eval(name, {"Keys": gguf.Keys}).removeprefix("{arch}.") for name in written}
    assert "attention.causal" in flags
    assert flags - {key for _, key in OTHER_VALUES} == {"rope.scaling.finetuned", "ssm.dt_b_c_rms"}


LINEAR: dict[str, tuple[dict[str, Any], float | None]] = {
    "older": ({"rope.scale_linear": 2.5}, 2.5),
    "both": ({"rope.scale_linear": 9.0, "rope.scaling.factor": 2.5}, 2.5),
    "typed": ({"rope.scaling.type": "linear", "rope.scale_linear": 2.5}, 2.5),
    "untyped": ({"rope.scaling.factor": 2.5}, 2.5),
    "none": ({"rope.scaling.type": "none", "rope.scale_linear": 2.5}, None),
    "one": ({"rope.scale_linear": 1.0}, None),
    "typed_one": ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
    "zero": ({"rope.scale_linear": 0.0}, None),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_factor_has_two_names_and_needs_no_type(tmp_path, name):
    """As in llama.cpp."""
    keys, factor = LINEAR[name]
    metadata = {f"llama.{key}": value for key, value in keys.items()}
    raw = raw_config("llama")
    path = write_gguf(tmp_path / "m.gguf", "llama", random_tensors(raw), metadata=metadata)
    config = gguf_config(read_gguf(path))
    if factor is not None:
        raw["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    assert replace(config, dtype="float32") == parse_model_config(raw)


@pytest.mark.parametrize("value", [float("nan"), -2.0, 0.5, "2", [2.0, 2.0]])
def test_a_linear_factor_that_is_none_is_refused(tmp_path, value):
    tensors = random_tensors(raw_config("llama"))
    metadata = {"llama.rope.scale_linear": value}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedModel), match=r"(?s)m\.gguf.*(factor|linear)"):
        gguf_config(read_gguf(path))


SIZES = {"feed_forward_length": 96, "attention.head_count": 4, "attention.head_count_kv": 2}


@pytest.mark.parametrize("key", SIZES)
def test_sizes_of_the_layers_may_be_listed_where_they_are_equal(tmp_path, key):
    case, size = "llama", SIZES[key]
    tensors, want = random_tensors(raw_config(case)), parse_model_config(raw_config(case))
    name = f"llama.{key}"
    path = write_gguf(tmp_path / "m.gguf", case, tensors, metadata={name: [size, size]})
    assert replace(gguf_config(read_gguf(path)), dtype=want.dtype) == want
    unequal = [[size, 2 * size], [2 * size, size], [size], [size] * 3, [True, True], ["4", "4"]]
    for sizes in [*unequal, [float(size)] * 2, [-size] * 2]:
        path = write_gguf(tmp_path / "m.gguf", case, tensors, metadata={name: sizes})
        with pytest.raises(UnsupportedModel, match=rf"(?s)m\.gguf.*{key}|size|heads"):
            gguf_config(read_gguf(path))


def test_windows_of_gemma_3_may_rotate_by_their_own_base(tmp_path):
    raw = raw_config("gemma3")
    metadata = {"gemma3.rope.freq_base_swa": 20000.0}
    path = write_gguf(tmp_path / "m.gguf", "gemma3", random_tensors(raw), metadata=metadata)
    config = gguf_config(read_gguf(path))
    assert config.local_rope is not None and config.local_rope.theta == 20000.0


# By the case: other keys of its files.
UNKNOWN_OF: dict[str, tuple[dict[str, Any], str]] = {
    "mixtral": ({"llama.expert_weights_scale": 2.5}, "expert_weights_scale"),
    "qwen3moe": ({"qwen3moe.expert_shared_count": 1}, "expert_shared_count"),
    "olmo2_windows": ({"olmo2.rope.freq_base_swa": 1e4}, "freq_base_swa"),
    "granite": ({"granite.rope.scaling.finetuned": False}, "not rotated"),
    "granite_": ({"granite.attention.scale": 0.0}, "attention.scale is missing"),
    "commandr": ({"command-r.logit_scale": 0.0}, "logit_scale"),
    "cohere2": ({"cohere2.rope.freq_base_swa": 1e4}, "freq_base_swa"),
    "cohere2_windows": ({"cohere2.attention.sliding_window": 0}, "sliding_window"),
    "gptoss": ({"gpt-oss.attention.sliding_window_pattern": [True]}, "each of 2 layers"),
    "deepseek2": ({"deepseek2.expert_gating_func": 3}, "gating_func"),
    "deepseek2_lite": ({"deepseek2.rope.scaling.yarn_log_multiplier": 0.0}, "log_multiplier"),
    "deepseek2_sigmoid": ({"deepseek2.expert_gating_func": 1}, "norm_topk_prob"),
    "deepseek2_": ({"deepseek2.attention.key_length_mla": 16}, "heads of 16"),
    "mistral3_small": ({"mistral3.attention.temperature_scale": 0.1}, "without YaRN"),
}


@pytest.mark.parametrize("name", UNKNOWN_OF)
def test_metadata_of_one_architecture_is_refused(tmp_path, name):
    metadata, named = UNKNOWN_OF[name]
    case = name.removesuffix("_")
    path = write_gguf(
        tmp_path / "m.gguf", case, random_tensors(raw_config(case)), metadata=metadata
    )
    with pytest.raises((CheckpointError, UnsupportedModel), match=rf"(?s)m\.gguf.*{named}"):
        gguf_config(read_gguf(path))


def test_an_architecture_that_is_not_read_is_refused(tmp_path):
    """The error names the nearest architecture of GGUF files."""
    tensors = random_tensors(raw_config("llama"))
    metadata = {"general.architecture": "glm-dsa"}
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, metadata=metadata)
    nearest = r"'glm-dsa': .*sparse.*DeepseekV3ForCausalLM \(in GGUF files: deepseek2\)"
    with pytest.raises(UnsupportedModel, match=nearest):
        gguf_config(read_gguf(path))


@pytest.mark.parametrize("name", UNKNOWN)
def test_metadata_that_changes_the_model_is_refused(tmp_path, name):
    metadata, named = UNKNOWN[name]
    tensors = random_tensors(raw_config("llama"))
    path = write_gguf(tmp_path / "m.gguf", "llama", tensors, metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedModel), match=named):
        gguf_config(read_gguf(path))


def test_what_is_zero_says_nothing(tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf",
        "llama",
        random_tensors(raw_config("llama")),
        metadata={"llama.expert_count": 0},
    )
    assert gguf_config(read_gguf(path)).hidden_size == 64


def test_half_of_the_factors_is_refused(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", "phi3", random_tensors(raw_config("phi3")))
    content = path.read_bytes().replace(b"rope_factors_short.weight", b"rope_factors_shore.weight")
    path.write_bytes(content)
    file = read_gguf(path)
    with pytest.raises(CheckpointError, match="2 unexpected: rope_factors_long"):
        load_weights(file, gguf_config(file), jnp.float32)


def test_missing_and_unknown_tensors_are_listed(tmp_path):
    tensors = random_tensors(raw_config("llama"))
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "llama", tensors))
    with pytest.raises(CheckpointError, match="2 missing") as caught:
        load_weights(file, gguf_config(file), jnp.float32)
    assert "up_proj" in str(caught.value) and "m.gguf" in str(caught.value)


def test_bfloat16_stays_bfloat16(tmp_path):
    tensors = random_tensors(raw_config("qwen2"))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "qwen2", tensors, Type.BF16))
    model = load_weights(file, gguf_config(file), jnp.bfloat16)
    want = tensors["model.layers.0.mlp.down_proj.weight"].astype(ml_dtypes.bfloat16).T
    assert np.asarray(model.layers[0].mlp.down[...]).tobytes() == want.tobytes()


CONVERTED = ["phi3", "gptoss", "olmo2_windows", "deepseek2_lite", "mistral3", "cohere2"]


@pytest.mark.parametrize("case", CONVERTED)
def test_config_json_of_a_file_reads_the_same(tmp_path, case):
    """As `jaxserve convert` writes it."""
    file = read_gguf(write_gguf(tmp_path / "m.gguf", case, random_tensors(raw_config(case))))
    fields = json.loads(json.dumps(gguf_fields(file)))
    assert parse_model_config(fields) == gguf_config(file)


def test_queries_keys_and_values_that_do_not_fit_are_refused(tmp_path):
    tensors = random_tensors(raw_config("chatglm"))
    file = read_gguf(write_gguf(tmp_path / "m.gguf", "chatglm", tensors, older=True))
    entry = file.tensors["blk.0.attn_qkv.weight"]
    cut = replace(entry, shape=(entry.shape[0] - 8, *entry.shape[1:]))
    file = replace(file, tensors={**file.tensors, entry.name: cut})
    with pytest.raises(CheckpointError, match=r"attn_qkv.weight' has 248 rows; expected 256"):
        load_weights(file, gguf_config(file), jnp.float32)


def test_a_projector_of_images_is_no_model(tmp_path):
    path = tmp_path / "mmproj.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_tensor("v.patch_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModel, match=r"mmproj\.gguf: is a projector of images"):
        gguf_config(read_gguf(path))
