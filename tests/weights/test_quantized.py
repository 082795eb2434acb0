"""Quantizing while loading, and checkpoints that are quantized already."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Decoder, checkpoint_weights, parse_model_config, read_model_config
from jaxserve.models.linear import matmul
from jaxserve.models.placed_weight import PlacedWeight, SplitWeight
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.settings.config import bundled_model
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import load_weights, random_weights
from jaxserve.weights.block_codes import codes_of
from jaxserve.weights.fused_parameters import fused_experts, quantized_experts
from jaxserve.weights.gguf.blocks import rows_of_blocks
from jaxserve.weights.host_matrix import HostMatrix
from jaxserve.weights.model_weights import filled
from jaxserve.weights.quantize import FORMS, quantize
from pallas_kernels.cpu import blocks
from tests.models.tiny_models import relative_error
from tests.support.fast_compile import FAST
from tests.support.gguf_blocks import random_blocks, unpacked
from tests.support.paged_runner import PagedRunner
from tests.support.quick_operations import quick_operations
from tests.support.tiny_config import TINY
from tests.weights import packing

RAW: dict[str, Any] = {"architectures": ["Qwen2ForCausalLM"], **TINY}
PHI = RAW | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
EXPERTS = RAW | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DEEPSEEK = RAW | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
COHERE = {key: value for key, value in RAW.items() if key != "rms_norm_eps"} | {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "attention_bias": True,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.5,
    "use_qk_norm": True,
}
FP8_CODES = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
        }
    },
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}


def compressed(form: str, activations: Any = None, **weights: Any) -> dict[str, Any]:
    """Return the configuration of a format of compressed-tensors."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
    }


GROUPS = {"type": "int", "strategy": "group", "group_size": 16}
BY_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
CHANNELS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}

# quantization_config, and the function that writes a matrix for it.
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8_tensor": (FP8, functools.partial(packing.write_fp8, block=None, suffix="weight_scale")),
    "fp8_blocks": (
        FP8 | {"weight_block_size": [24, 40]},
        functools.partial(packing.write_fp8, block=(24, 40), suffix="weight_scale_inv"),
    ),
    "compressed": (
        COMPRESSED,
        functools.partial(packing.write_fp8, block=None, suffix="weight_scale"),
    ),
    "awq": (AWQ, functools.partial(packing.write_awq, group=16)),
    "gptq": (GPTQ, functools.partial(packing.write_gptq, group=16, act_order=False)),
    "gptq_v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        functools.partial(packing.write_gptq, group=16, act_order=False, version=2),
    ),
    "gptq_act_order": (
        GPTQ | {"desc_act": True},
        functools.partial(packing.write_gptq, group=16, act_order=True),
    ),
    "gptq_8": (
        GPTQ | {"bits": 8, "sym": True},
        functools.partial(packing.write_gptq, group=16, act_order=False, bits=8, symmetric=True),
    ),
    "gptq_8_asymmetric": (
        GPTQ | {"bits": 8, "desc_act": True},
        functools.partial(packing.write_gptq, group=16, act_order=True, bits=8),
    ),
    "awq_gemv": (
        AWQ | {"version": "gemv", "group_size": 32},
        functools.partial(packing.write_awq_gemv, group=32),
    ),
    "packed": (
        compressed("pack-quantized", **GROUPS, num_bits=4, symmetric=True),
        functools.partial(packing.write_packed, group=16, bits=4, act_order=False),
    ),
    "packed_act_order": (
        compressed("pack-quantized", **GROUPS, num_bits=4, symmetric=False, actorder="group"),
        functools.partial(packing.write_packed, group=16, bits=4, act_order=True),
    ),
    "packed_8": (
        compressed("pack-quantized", **GROUPS, num_bits=8, symmetric=True),
        functools.partial(packing.write_packed, group=16, bits=8, act_order=False),
    ),
    "int8": (
        compressed("int-quantized", **CHANNELS),
        functools.partial(packing.write_int8, scale="weight_scale", dtype=ml_dtypes.bfloat16),
    ),
    "w8a8": (
        compressed("int-quantized", BY_TOKEN, **CHANNELS),
        functools.partial(packing.write_int8, scale="weight_scale", dtype=ml_dtypes.bfloat16),
    ),
    "w4a8": (
        compressed("pack-quantized", BY_TOKEN, **GROUPS, num_bits=4, symmetric=True),
        functools.partial(packing.write_packed, group=16, bits=4, act_order=False),
    ),
    "nvfp4": (
        compressed(
            *("nvfp4-pack-quantized", BY_TOKEN | {"num_bits": 4, "type": "float"}),
            num_bits=4,
            type="float",
            strategy="tensor_group",
            group_size=16,
        ),
        functools.partial(packing.write_nvfp4, modelopt=False),
    ),
    "mxfp4": (
        compressed(
            "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32
        ),
        packing.write_mxfp4,
    ),
    "nvfp4_modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        functools.partial(packing.write_nvfp4, modelopt=True),
    ),
    "nf4": (BNB, packing.write_nf4),
    "llm_int8": (
        BNB | {"load_in_4bit": False, "load_in_8bit": True},
        functools.partial(packing.write_int8, scale="SCB"),
    ),
}


def is_matrix(name: str) -> bool:
    return "_proj.weight" in name


def checkpoint(
    directory: Path, form: str, raw: dict[str, Any] = RAW, change: Any = None
) -> tuple[Path, dict[str, np.ndarray]]:
    """Write a quantized checkpoint, and return it with all dequantized tensors."""
    quantization, write = FORMATS[form]
    rng, config = np.random.default_rng(0), parse_model_config(raw)
    tensors, plain = {}, {}
    for weight in checkpoint_weights(config):
        if weight.name in plain:
            continue
        value = 0.3 * rng.normal(size=weight.shape(dimensions(config))).astype(np.float32)
        if is_matrix(weight.name):
            packed, value = write(weight.name.removesuffix(".weight"), value, rng=rng)
            tensors |= packed
        else:
            tensors[weight.name] = value
        plain[weight.name] = value.astype(np.float32)
    raw = raw | {"quantization_config": quantization}
    if change is not None:
        change(tensors)
    return packing.save(directory, raw, tensors), plain


@pytest.fixture(scope="module", autouse=True)
def operations_are_compiled_quickly() -> Generator[None]:
    """Compile quickly: models are drawn and codes unpacked by operations of many shapes."""
    with quick_operations():
        yield


@pytest.fixture(scope="module")
def logits() -> Any:
    """Return a model's logits after each of seven tokens. Equally stored models share a program."""
    runners: dict[Any, PagedRunner] = {}

    def run(model: Decoder) -> np.ndarray:
        leaves, treedef = jax.tree.flatten(nnx.split(model)[1])
        alike = treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if alike not in runners:
            runners[alike] = PagedRunner(model, max_tokens=8)
        runner = runners[alike]
        runner._leaves, runner.tokens = leaves, [[]]
        return runner.run([[3, 1, 4, 1, 5, 9, 2]])[0]

    return run


def parameters(model: Decoder) -> dict[str, Any]:
    return {
        ".".join(map(str, path)): leaf[...]
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }


def load(directory: Path, **options: Any) -> Decoder:
    return load_weights(directory, read_model_config(directory), np.float32, **options)


@pytest.mark.parametrize("form", [form for form in FORMATS if not form.endswith("a8")])
def test_a_quantized_checkpoint_equals_the_one_it_stands_for(form, tmp_path, logits):
    seen: list[tuple[int, int]] = []
    # AutoGPTQ gives layers without a bias one of zeros.
    bias = {"model.layers.0.self_attn.o_proj.bias": np.zeros(64, np.float16)}
    extra = bias if form == "gptq" else {}
    directory, plain = checkpoint(
        tmp_path / "quantized", form, change=lambda tensors: tensors.update(extra)
    )
    quantized = load(directory, on_progress=lambda *step: seen.append(step))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    dequantized = load(packing.save(tmp_path / "plain", RAW, plain))
    assert relative_error(logits(quantized), logits(dequantized)) < 1e-5
    kept = quantized.config.quantization.form
    for path, value in parameters(quantized).items():
        whole = parameters(dequantized)[path]
        if whole.ndim == 1 or "embedding" in path or path.endswith("bias") or kept == "full":
            assert value.dtype == np.float32
            continue
        width = 0.5 if kept == "int4" else 1
        codes = value.weights if isinstance(value, SplitWeight) else [value]
        rows = sum(code.values.nbytes for code in codes)
        padding = 80 / 64 if form == "fp8_blocks" else 1  # to whole blocks of 40 inputs, at most
        assert whole.size * width <= rows <= whole.size * width * padding


@pytest.mark.parametrize("form", ["fp8_blocks", "awq", "gptq_act_order"])
def test_norms_of_heads_are_no_matrices(form, tmp_path, logits):
    """Command R+'s have two dimensions, as matrices have, and stay in full."""
    directory, plain = checkpoint(tmp_path / "quantized", form, COHERE)
    quantized = load(directory)
    whole = load(packing.save(tmp_path / "plain", COHERE, plain))
    assert relative_error(logits(quantized), logits(whole)) < 1e-5
    scale = plain["model.layers.0.self_attn.q_norm.weight"].reshape(2, 2, 16)
    for model in (quantized, whole):
        np.testing.assert_array_equal(model.layers[0].attention.query_norm.scale[...], scale)


def test_stacked_tensors_are_taken_apart(tmp_path):
    directory, plain = checkpoint(tmp_path / "quantized", "awq", PHI)
    layers = [
        load(folder).layers[0]
        for folder in (directory, packing.save(tmp_path / "plain", PHI, plain))
    ]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64)), jnp.float32)
    product = jax.jit(matmul, compiler_options=FAST)
    for products in (
        [product(x, layer.attention.qkv[...]) for layer in layers],
        [product(x, layer.mlp.gate_up[...]) for layer in layers],
    ):
        np.testing.assert_allclose(*products, rtol=1e-4, atol=1e-5)


def in_full(value: Any) -> np.ndarray:
    """Return a parameter's dequantized values, [..., I, O] with all outputs in one."""
    if not isinstance(value, PlacedWeight):
        return np.asarray(value)
    codes, scales = np.asarray(value.values), np.asarray(value.scales, np.float32)
    if value.form == "int4":
        numbers = np.stack([codes & 15, codes >> 4], axis=-2).astype(np.float32)
        numbers = numbers.reshape(*codes.shape[:-2], -1, codes.shape[-1])
        zeros = np.full(scales.shape, 8) if value.zeros is None else np.asarray(value.zeros)
    else:
        numbers = codes.view(np.int8 if value.form == "int8" else FP8_CODES).astype(np.float32)
        zeros = np.zeros(scales.shape) if value.zeros is None else np.asarray(value.zeros)
    each = numbers.shape[-2] // scales.shape[-2]
    minima = zeros if value.zeros is not None and zeros.dtype != np.uint8 else None
    scales, zeros = (part.astype(np.float32).repeat(each, axis=-2) for part in (scales, zeros))
    whole = (numbers - zeros) * scales if minima is None else numbers * scales + zeros
    return whole[..., : value.inputs, :]


@pytest.mark.parametrize(
    "form", ["fp8_blocks", "awq", "gptq", "gptq_act_order", "packed", "nvfp4", "nf4"]
)
def test_experts_of_a_quantized_checkpoint_stay_so(form, tmp_path):
    """Experts lie side by side, and are widened if their inputs have an order of their own."""
    directory, plain = checkpoint(tmp_path / "quantized", form, EXPERTS)
    got = parameters(load(directory))
    want = parameters(load(packing.save(tmp_path / "plain", EXPERTS, plain)))
    for name in ("gate_up", "down", "router"):
        value, whole = got[f"layers.0.mlp.{name}"], want[f"layers.0.mlp.{name}"]
        kept = name != "router" and form not in ("gptq_act_order", "nf4")
        assert isinstance(value, PlacedWeight) == kept
        np.testing.assert_allclose(in_full(value).reshape(whole.shape), whole, rtol=1e-6, atol=1e-7)
        if kept:
            width = {"fp8_blocks": 1.25, "nvfp4": 1}.get(form, 0.5)
            assert value.values.nbytes <= whole.size * width


def test_experts_with_zero_points_and_without_lie_side_by_side():
    """As where all zero points of one expert are the middle of the range."""
    rng = np.random.default_rng(0)
    first, second = (quantize(rng.normal(size=(64, 6)).astype(np.float32), "int4") for _ in "ab")
    points = rng.integers(0, 16, second.scales.shape, np.uint8)
    codes = [dataclasses.replace(first, zeros=None), dataclasses.replace(second, zeros=points)]
    names = [WeightName(f"{index}", "M D -> D M", "down", (index,)) for index in range(2)]
    parts = list(zip(names, codes, strict=True))
    got = fused_experts(parts[::-1], (2, 64, 6), {"D": 64, "M": 6})
    want = np.stack([one.dequantized() for one in codes])
    np.testing.assert_allclose(in_full(got), want, rtol=1e-6)
    for other in (quantize(want[0], "int8"), first):  # the latter has minima
        others = [(names[0], other), parts[1]]
        assert fused_experts(others, (2, 64, 6), {"D": 64, "M": 6}) is None


def test_scales_of_the_cache_are_read_where_it_is_fp8(tmp_path):
    scales = {
        "model.layers.0.self_attn.k_scale": np.float32(0.5).reshape(()),
        "model.layers.0.self_attn.v_scale": np.float32(0.25).reshape(1),
    }
    directory, _ = checkpoint(
        tmp_path / "quantized", "fp8_tensor", change=lambda tensors: tensors.update(scales)
    )
    assert load(directory).layers[0].attention.kv_scales is None
    read = load(directory, kv_scales=True).layers[0].attention.kv_scales
    assert read is not None
    np.testing.assert_array_equal(read[...], [[0.5, 0.5], [0.25, 0.25]])


@pytest.mark.parametrize("suffix", ["input_scale", "activation_scale"])
def test_scales_of_activations_are_left_aside(tmp_path, suffix):
    """Activations stay in their dtype, whatever static scale a checkpoint has for them."""
    scale = {f"model.layers.0.mlp.down_proj.{suffix}": np.ones((), np.float32)}
    directory, _ = checkpoint(
        tmp_path / "quantized", "fp8_tensor", change=lambda tensors: tensors.update(scale)
    )
    load(directory)


def damage(name: str, change: Any) -> Any:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = change(tensors[name])

    return apply


def replaced(old: bytes, new: bytes) -> Any:
    """Return a function that changes the text in a tensor's bytes."""
    return lambda x: np.frombuffer(x.tobytes().replace(old, new), np.uint8)


Q = "model.layers.0.self_attn.q_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGED: dict[str, tuple[str, Any, str]] = {
    "no scale": ("fp8_blocks", lambda t: t.pop(f"{Q}.weight_scale_inv"), f"{Q}.weight"),
    "scales of another shape": (
        "fp8_blocks", damage(f"{Q}.weight_scale_inv", lambda x: x[1:]), "weight_scale_inv",
    ),
    "scale that is not finite": (
        "fp8_tensor", damage(f"{Q}.weight_scale", lambda x: x * np.nan), "weight_scale",
    ),
    "codes that are NaN": (
        "fp8_tensor", damage(f"{Q}.weight", lambda x: (x * np.nan).astype(x.dtype)), f"{Q}.weight",
    ),
    "no zero points": ("awq", lambda t: t.pop(f"{Q}.qzeros"), f"{Q}.qzeros"),
    "codes of another shape": ("awq", damage(f"{Q}.qweight", lambda x: x[:-1]), f"{Q}.qweight"),
    "scales that are integers": (
        "gptq", damage(f"{Q}.scales", lambda x: x.astype(np.int32)), f"{Q}.scales",
    ),
    "groups of unequal sizes": ("gptq", damage(f"{Q}.g_idx", lambda x: x * 0), f"{Q}.g_idx"),
    "half of a fused weight": (
        "awq",
        lambda t: [
            t.update({f"{Q}.weight": np.zeros((64, 64), np.float32)}),
            *(t.pop(f"{Q}.{part}") for part in ("qweight", "qzeros", "scales")),
        ],
        f"{Q}.weight",
    ),
    "no scales of int8": ("int8", lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_scale"),
    "zero points of int8": (
        "int8",
        lambda t: t.update({f"{Q}.weight_zero_point": np.ones((64, 1), np.int8)}),
        f"{Q}.weight_zero_point",
    ),
    "another shape than the codes'": (
        "packed", damage(f"{Q}.weight_shape", lambda x: x[::-1] * 2), f"{Q}.weight_shape",
    ),
    "words of another width": (
        "packed", damage(f"{Q}.weight_packed", lambda x: x.astype(np.int64)), f"{Q}.weight_packed",
    ),
    "order that is none": (
        "packed_act_order", damage(f"{Q}.weight_g_idx", lambda x: x - 1), f"{Q}.weight_g_idx",
    ),
    "zero points of a channel": (
        "packed_act_order",
        damage(f"{Q}.weight_zero_point", lambda x: x[:, :1]),
        f"{Q}.weight_zero_point",
    ),
    "scales without padding": (
        "awq_gemv", damage(f"{Q}.scales", lambda x: x[:, :2]), f"{Q}.scales",
    ),
    "numbers that overflow": (
        "nf4",
        lambda t: [
            damage(f"{Q}.weight.{part}", lambda x: x * np.float32(1e30))(t)
            for part in ("nested_absmax", "quant_map")
        ],
        f"{Q}.weight",
    ),
    "a global scale of zero": (
        "nvfp4", damage(f"{Q}.weight_global_scale", lambda x: x * 0), f"{Q}.weight_global_scale",
    ),
    "a global scale that overflows": (
        "nvfp4", damage(f"{Q}.weight_global_scale", lambda x: x * 1e-40), f"{Q}.weight_scale",
    ),
    "narrow scales that are NaN": (
        "nvfp4_modelopt",
        damage(f"{Q}.weight_scale", lambda x: (x * np.nan).astype(x.dtype)),
        f"{Q}.weight_scale",
    ),
    "no global scale": (
        "nvfp4_modelopt", lambda t: t.pop(f"{Q}.weight_scale_2"), f"{Q}.weight_scale_2",
    ),
    "E8M0 that is NaN": (
        "mxfp4", damage(f"{Q}.weight_scale", lambda x: x | 255), f"{Q}.weight_scale",
    ),
    "no state": ("nf4", lambda t: t.pop(f"{Q}.{STATE}"), f"{Q}.{STATE}"),
    "a state that is no JSON": ("nf4", damage(f"{Q}.{STATE}", lambda x: x[1:]), f"{Q}.{STATE}"),
    "a state without end": ("nf4", damage(f"{Q}.{STATE}", lambda x: x.repeat(99)), f"{Q}.{STATE}"),
    "a state of blocks of none": (
        "nf4", damage(f"{Q}.{STATE}", replaced(b'"blocksize": 64', b'"blocksize": 0')), "blocksize",
    ),
    "a state of another shape": (
        "nf4", damage(f"{Q}.{STATE}", replaced(b"[64, 64]", b"[64, 32]")), f"{Q}.{STATE}",
    ),
    "no offset": (
        "nf4", damage(f"{Q}.{STATE}", replaced(b"nested_offset", b"offset")), "nested_offset",
    ),
    "too few blocks": ("nf4", damage(f"{Q}.weight.absmax", lambda x: x[1:]), f"{Q}.weight.absmax"),
    "numbers that are NaN": (
        "nf4", damage(f"{Q}.weight.quant_map", lambda x: x * np.nan), f"{Q}.weight.quant_map",
    ),
    "no SCB": ("llm_int8", lambda t: t.pop(f"{Q}.SCB"), f"{Q}.SCB"),
    "codes in tiles": (
        "llm_int8",
        lambda t: t.update({f"{Q}.weight_format": np.uint8(2).reshape(())}),
        f"{Q}.weight_format",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_tensors_are_refused_by_name(case, tmp_path):
    form, change, named = DAMAGED[case]
    directory, _ = checkpoint(tmp_path / "quantized", form, change=change)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert named in str(caught.value)


def test_a_part_in_full_beside_one_that_is_widened(tmp_path, logits):
    """As Unsloth leaves some: one of a fused parameter, which is in full anyway."""
    value = np.random.default_rng(5).normal(size=(64, 64)).astype(np.float32)

    def restore(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith(f"{Q}.weight")]:
            del tensors[name]
        tensors[f"{Q}.weight"] = value

    directory, plain = checkpoint(tmp_path / "quantized", "nf4", change=restore)
    plain[f"{Q}.weight"] = value
    want = logits(load(packing.save(tmp_path / "plain", RAW, plain)))
    assert relative_error(logits(load(directory)), want) < 1e-5


def test_codes_without_a_quantization_config_are_refused(tmp_path):
    directory, _ = checkpoint(tmp_path / "quantized", "fp8_tensor")
    config = read_model_config(directory)
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_weights(directory, parse_model_config(RAW), np.float32)
    assert config.quantization is not None and config.quantization.method == "fp8"


def test_every_field_that_is_not_understood_is_named():
    quantization = AWQ | {"bits": 3, "group_size": "all", "unheard_of": 1}
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(RAW | {"quantization_config": quantization})
    for name in ("bits", "group_size", "unheard_of"):
        assert f"quantization_config.{name}" in str(caught.value)


# ------------------------------------------------------------------ quantized while loading


def extreme_weights() -> np.ndarray:
    """Return columns of every size, with zeros, one outlier, one sign only, and huge numbers."""
    rng = np.random.default_rng(0)
    weight = rng.standard_t(2, size=(100, 40)).astype(np.float32)
    weight *= np.float32(10.0) ** np.linspace(-30, 30, 40, dtype=np.float32)
    weight[:, 3] = 0
    weight[:, 4] = np.abs(weight[:, 4])
    weight[:, 5] = 1e-44  # not a normal number
    weight[:, 6] = 3e38
    weight[50, 7] = 1e6 * np.abs(weight[:, 7]).max()
    return weight


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_the_error_of_each_weight_is_within_the_bound(form):
    weight = extreme_weights()
    error = np.abs(quantize(weight, form).dequantized() - weight.astype(np.float64))
    top = np.abs(weight).max(axis=0).astype(np.float64)
    tiny = 2e-38  # below float32's normal numbers the result is unspecified
    if form == "int8":
        bound = np.broadcast_to(top / 127 / 2, weight.shape)
    else:
        bound = np.maximum(np.abs(weight) / 16, top / 448 / 1024)
    assert (error <= bound * (1 + 1e-5) + tiny).all()
    assert (error > 0.8 * bound).any(), "the bound is far from what happens"


def test_int4_errs_less_than_rounding_between_extremes_does():
    """Measured by the squares of a group's errors.

    The last group has 4 inputs, and float16's are cut.
    """
    weight = np.random.default_rng(0).standard_t(4, size=(100, 40)).astype(np.float32)
    weight[:, 3], weight[:, 4] = 0, np.abs(weight[:, 4])
    weight[:, 5] *= np.float32(1e-3)
    weight[:, 6] = np.float32(1e30) * (1 + np.arange(100) % 2)
    got = quantize(weight, "int4")
    assert got.scales.dtype == np.float16 and got.has_minima and got.values.max() == 15
    number = np.arange(100) // 32
    mine, plain = np.zeros((2, 4, 40))
    for group in range(4):
        rows = weight[number == group].astype(np.float64)
        low, high = rows.min(axis=0), rows.max(axis=0)
        step = np.maximum(high - low, 1e-30) / 15
        nearest = low + np.clip(np.rint((rows - low) / step), 0, 15) * step
        plain[group] = np.square(nearest - rows).sum(axis=0)
        mine[group] = np.square(got.dequantized()[number == group] - rows).sum(axis=0)
    usual = np.arange(40) != 6
    assert (mine <= plain * 1.1 + 1e-6)[:, usual].all()
    assert mine[:, usual].sum() < 0.9 * plain[:, usual].sum()
    np.testing.assert_array_equal(got.dequantized()[:, 6], np.float32(65504))


@pytest.mark.parametrize("name", blocks.FORMATS)
def test_blocks_as_codes_are_the_blocks_numbers(name):
    """Equal to the bit if a run has scales of its own, else within float16's rounding."""
    made = blocks.FORMATS[name]
    raw = random_blocks(name, outputs=6, inputs=512)
    want = unpacked(raw, name)
    codes = codes_of(HostMatrix(name, rows_of_blocks(raw, name)))
    assert codes.form == ("int4" if name.startswith(("Q2", "Q3", "Q4")) else "int8")
    assert codes.group == made.run and codes.scales.dtype == np.float16
    largest = np.abs(want).reshape(6, -1, made.run).max(axis=2).repeat(made.run, axis=1)
    rounding = 2**-9 * largest + 2**-19 if made.scaled else 0
    assert (np.abs(codes.dequantized().T - want) <= rounding).all()
    placed = codes.as_weight((6,))
    np.testing.assert_array_equal(in_full(placed), codes.dequantized())
    described = codes_of(HostMatrix.described(name, (want.shape[1], 6)))
    assert described.joins(codes) and codes.joins(described)
    shapes = described.as_weight((6,))
    assert jax.tree.structure(shapes) == jax.tree.structure(placed)
    for shape, array in zip(jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True):
        assert (shape.shape, shape.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("raw", [RAW, DEEPSEEK, COHERE], ids=["qwen2", "deepseek", "cohere"])
def test_the_blocks_matrices_are_quantized_and_nothing_else(form, raw):
    config = parse_model_config(raw)
    plain = parameters(random_weights(config, np.float32))
    matrices = (".qkv", ".out", ".gate_up", ".down", ".query", ".query_down")
    matrices += ".key_up", ".value_up"
    for path, value in parameters(random_weights(config, np.float32, 0, form)).items():
        matrix = path.endswith(matrices)
        assert isinstance(value, PlacedWeight) == matrix, path
        if not matrix:
            np.testing.assert_array_equal(value, plain[path])
            continue
        is_experts = "mlp" in path and value.values.ndim == 3
        is_four = form == "int4" and is_experts  # other rows are short
        bits = 4 if is_four else 8
        rows = value.inputs if form != "int4" else -(-value.inputs // 32) * 32
        assert value.values.nbytes * 8 == plain[path].size // value.inputs * rows * bits


@pytest.mark.parametrize("form", FORMS)
def test_each_expert_is_quantized_alone(form):
    """The bounds above hold for each expert's scales, even if another expert's are larger."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 40, 2, 5)).astype(np.float32)
    values *= np.float32([1e-3, 1, 1e3])[:, None, None, None]
    got = quantized_experts(values, form)
    assert got.outputs == (2, 5) and got.scales.shape == (3, 2 if form == "int4" else 1, 10)
    for expert, whole in zip(values, in_full(got), strict=True):
        want = quantize(expert.reshape(40, 10), form).dequantized()
        np.testing.assert_array_equal(whole.reshape(40, 10), want)


def test_quantized_experts_and_latents_give_what_they_stand_for(logits):
    """In int4, with inputs that groups do not divide: as the same model in full does."""
    model = random_weights(parse_model_config(DEEPSEEK), np.float32, 0, "int4")
    plain = random_weights(model.config, np.float32)
    whole = {
        path: jnp.asarray(in_full(value)).reshape(parameters(plain)[path].shape)
        for path, value in parameters(model).items()
    }
    exact = logits(filled(plain, whole))
    assert relative_error(logits(model), exact) < 1e-5
    assert relative_error(logits(plain), exact) > 1e-2


TURN = """<|bos|><|im_start|>user
Reverse: k-w-p-e-a<|im_end|>
<|im_start|>assistant
a-e-p-w-k<|im_end|>"""


@functools.cache
def bundled_logits(form: str | None) -> np.ndarray:
    """Return the bundled model's logits after each token of a question and its answer."""
    directory = bundled_model()
    tokens = Tokenizer(directory, 511).encode_word(TURN)
    model = load(directory, quantization=form)
    return PagedRunner(model, max_tokens=64).run([tokens])[0]


# Mean difference of a logit over the mean logit, at most: twice the measured value. In this small
# model few weights carry most of the result, so that rounding has a larger effect than in a large
# one.
LOGIT_BOUNDS = {"int8": 0.08, "fp8": 0.15, "int4": 0.045}


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_the_bundled_model_stay_close(form):
    exact = bundled_logits(None)
    error = np.abs(bundled_logits(form) - exact).mean() / np.abs(exact).mean()
    assert LOGIT_BOUNDS[form] / 4 < error < LOGIT_BOUNDS[form]


def test_a_checkpoint_is_quantized_as_it_is_read(tmp_path):
    _, plain = checkpoint(tmp_path / "quantized", "awq")
    whole = packing.save(tmp_path / "plain", RAW, plain)
    placed: list[str] = []

    def place(path: str, values: np.ndarray) -> jax.Array:
        placed.append(path)
        return jnp.asarray(values)

    model = load(whole, quantization="int8", place=place)
    down = parameters(model)["layers.0.mlp.down"]
    want = quantize(plain["model.layers.0.mlp.down_proj.weight"].T, "int8")
    np.testing.assert_array_equal(down.values, want.values)
    # No matrix went to the device in full.
    assert not [path for path in placed if path.endswith((".qkv", ".out", ".gate_up", ".down"))]
    assert down.values.dtype == np.int8 and down.scales.dtype == np.float32
    assert load(whole, quantization="int4").layers[0].mlp.down[...].scales.dtype == np.float16
