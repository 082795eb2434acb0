"""The model's contract with the engine: shapes, dtypes, leaves, axes, one trace for all layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from jaxserve.models import (
    Decoder,
    PagedStep,
    abstract_model,
    build_model,
    logical_axes,
    parse_model_config,
    read_model_config,
)
from jaxserve.models.families import cohere, gemma, olmo
from jaxserve.models.family import LLAMA_TRAITS
from jaxserve.models.layers import Norm
from jaxserve.models.linear import matmul
from jaxserve.weights import random_weights
from tests.models.tiny_models import load, reference_logits, relative_error
from tests.support.fast_compile import EXACT, FAST
from tests.support.paged_runner import PagedRunner

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def leaves_of(model: Decoder) -> list[jax.Array]:
    return jax.tree.leaves(nnx.split(model)[1])


@pytest.fixture(scope="module")
def model() -> Decoder:
    return random_weights(parse_model_config(RAW), jnp.float32)


def test_leaves_are_few_and_abstract_ones_take_no_memory(model):
    assert len(leaves_of(model)) == 3 * 6 + 3
    alone = parse_model_config(RAW | {"num_hidden_layers": 1})
    # As one program: numbers are drawn by many small operations.
    build = jax.jit(lambda: leaves_of(build_model(alone, jnp.bfloat16)), compiler_options=FAST)
    assert [leaf.dtype for leaf in build()] == [jnp.bfloat16] * 9
    huge = parse_model_config(RAW | {"hidden_size": 1 << 17, "intermediate_size": 1 << 20})
    leaves = leaves_of(abstract_model(huge, jnp.bfloat16))
    assert len(leaves) == 3 * 6 + 3
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in leaves)


@pytest.mark.parametrize(
    "case",
    [
        *("llama_biases", "qwen3_tied_bias", "olmo3_yarn", "gemma3_two_bases"),
        *("qwen3_moe_window_bias", "gpt_oss_alternate", "deepseek_v3_bias_yarn_tied"),
        *("cohere_qk_norm_bias_head_dim", "cohere2_tied", "muse_glimmer_every_fourth"),
    ],
)
def test_every_parameter_names_its_axes(checkpoints, case):
    model = abstract_model(read_model_config(checkpoints[case][0]))
    axes, leaves = logical_axes(model), leaves_of(model)
    assert [len(names) for names in axes.values()] == [leaf.ndim for leaf in leaves]
    config = model.config
    sizes = {
        "vocab": {config.vocab_size},
        "embed": {config.hidden_size},
        "kv_heads": {config.num_key_value_heads},
        "head_dim": {config.head_dim},
        "mlp": {config.intermediate_size},
        "experts": {config.experts.count if config.experts else 0},
        "latent": set(),
        "gate_up": {2},
        "group": {g := config.num_attention_heads // config.num_key_value_heads, g + 2},
    }
    if config.experts is not None:
        sizes["mlp"] |= {config.experts.size, config.experts.shared}
    if (latent := config.latent) is not None:
        sizes["latent"] = {latent.query_rank, latent.rank, latent.rank + latent.rotary}
        sizes["head_dim"] = {latent.key, latent.plain, latent.value}
    for names, leaf in zip(axes.values(), leaves, strict=True):
        assert all(size in sizes[name] for name, size in zip(names, leaf.shape, strict=True))


WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention"] * 4 + ["full_attention"]}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [({"num_hidden_layers": 5}, 1), ({"num_hidden_layers": 5, **WINDOWS}, 2)],
    ids=["alike", "with windows and without"],
)
def test_a_program_has_one_function_for_each_kind_of_layer(fields, kinds):
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"} if kinds == 2 else {}
    config = parse_model_config(RAW | names | fields)
    model = random_weights(config, jnp.float32)
    one, two = jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32)
    step = PagedStep(one, one, one[None], two, one, decode_only=True, implementation="xla")
    pages = [(jnp.zeros((1, 2, 4, 8)),) * 2] * 5
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state: nnx.merge(graphdef, state)(one, step, pages)[0])
    text = run.lower(state).as_text()
    assert len(re.findall(r"func\.func private @run_layer", text)) == 1 + kinds  # and the first
    assert len(re.findall(r"call @run_layer", text)) == 5


@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe_window_bias"])
def test_padding_changes_nothing(checkpoints, case):
    model = load(checkpoints[case][0])
    plain, padded = PagedRunner(model), PagedRunner(model)
    prompt = list(range(10))
    np.testing.assert_allclose(
        plain.run([prompt])[0], padded.run([prompt], pad_to=16)[0], rtol=1e-5, atol=1e-5
    )
    # Page 0 has no owner and padding is not written: the page still holds its first contents.
    for (k, v), (k_padded, v_padded) in zip(
        *(jax.device_get([layer.pages for layer in run.kept]) for run in (plain, padded)),
        strict=True,
    ):
        assert np.isnan(k_padded[0]).all() and np.isnan(v_padded[0]).all()
        np.testing.assert_allclose(k[1:], k_padded[1:], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(v[1:], v_padded[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "dtype", "pad_to"),
    [
        # Once for each dtype the last step attends as a decode does, since a program takes seconds.
        ("llama_tied", jnp.bfloat16, 0),
        ("qwen3", jnp.float16, 0),
        ("gemma3_tied_linear", jnp.bfloat16, 19),
        ("cohere_qk_norm_untied", jnp.bfloat16, 19),
        ("cohere2_tied", jnp.float16, 19),
        ("muse_glimmer_tied_listed", jnp.bfloat16, 19),
        ("laguna_heads_by_layer", jnp.bfloat16, 19),
        ("gpt_oss_truncated_tied", jnp.bfloat16, 19),  # all experts: swapping is not allowed
    ],
)
def test_sixteen_bit_models(checkpoints, case, dtype, pad_to):
    directory, reference = checkpoints[case]
    runner = PagedRunner(load(directory, dtype))
    prompt = np.random.default_rng(0).integers(0, 96, 20).tolist()
    got = np.concatenate([runner.run([prompt[:-1]])[0], runner.run([prompt[-1:]], pad_to)[0]])
    assert got.dtype == np.float32  # logits are never rounded to 16 bits
    assert all(k.dtype == v.dtype == dtype for k, v in (layer.pages for layer in runner.kept))
    tolerance = 16 * float(jnp.finfo(dtype).eps)
    assert relative_error(got, reference_logits(reference, prompt)) < tolerance


@pytest.mark.parametrize(
    ("traits", "module"),
    [
        (LLAMA_TRAITS, LlamaRMSNorm),
        (olmo.TRAITS, Olmo2RMSNorm),
        (gemma.TRAITS, Gemma2RMSNorm),
        (cohere.TRAITS, CohereLayerNorm),
    ],
)
def test_norms_round_where_those_of_transformers_do(traits, module):
    """Equal to the bit, apart from the order of sums.

    A wrong place of scaling would change half.
    """
    x, scale = torch.randn(200, 64) * 3 + 1, torch.randn(64)
    reference = module(64, eps=1e-5).bfloat16()
    with torch.no_grad():
        reference.weight.copy_(scale)
        want = reference(x.bfloat16()).float().numpy()
    norm = Norm((64,), ("embed",), 1e-5, jnp.bfloat16, traits)
    assert norm.scale is not None
    norm.scale[...] = jnp.asarray(scale.numpy(), jnp.bfloat16)
    got = np.asarray(norm(jnp.asarray(x.numpy(), jnp.bfloat16)), np.float32)
    assert (got == want).mean() > 0.99


@pytest.mark.parametrize(
    "case",
    [
        *("llama3_rope", "deepseek_v3_groups", "cohere_qk_norm_untied"),
        *("laguna_tied_cap", "apertus_llama3", "nanochat_cap"),
        # Norms and rotations of the case before in three layers, of which one does not rotate.
        pytest.param("cohere2_tied", marks=pytest.mark.long),
    ],
)
def test_float64_is_float64_throughout(checkpoints, case):
    directory, reference = checkpoints[case]
    prompt = np.random.default_rng(0).integers(0, 96, 20).tolist()
    with jax.enable_x64(True):
        model = load(directory, jnp.float64)
        together, apart = PagedRunner(model), PagedRunner(model, page_size=16)
        got = together.run([prompt])[0]
        one_by_one = np.concatenate([apart.run([[token]])[0] for token in prompt])
        programs = [runner.program() for runner in (together, apart)]
    assert got.dtype == np.float64
    assert all("f64[" in text and "f32" not in text for text in programs)
    assert relative_error(one_by_one, got) < 1e-13
    assert relative_error(got, reference_logits(reference, prompt)) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_matmul_contracts_and_accumulates_in_float32(rows, dtype):
    generator = np.random.default_rng(rows)
    x = jnp.asarray(generator.normal(size=(rows, 3, 50)), dtype)
    w = jnp.asarray(generator.normal(size=(3, 50, 2, 4)), dtype)
    bias = jnp.asarray(generator.normal(size=(2, 4)), dtype)
    exact = np.einsum("rab,abcd->rcd", *(np.asarray(a, np.float64) for a in (x, w)))

    def product(x, w, bias):
        return matmul(x, w, bias=bias, contract=2, out_dtype=jnp.float32)

    got = jax.jit(product, compiler_options=EXACT)(x, w, bias)
    np.testing.assert_allclose(got, exact + np.asarray(bias, np.float64), rtol=1e-5, atol=1e-4)
    assert jax.eval_shape(lambda x, w: matmul(x, w, contract=2), x, w).dtype == dtype


def test_random_weights_give_logits_of_unit_size_and_follow_the_seed():
    config = parse_model_config(RAW | {"hidden_size": 64, "num_hidden_layers": 4})
    models = [random_weights(config, jnp.float32, seed) for seed in (0, 0, 1)]
    first, again, other = (leaves_of(model) for model in models)
    assert all(map(np.array_equal, first, again))
    assert not any(map(np.array_equal, first[2:4], other[2:4]))
    logits = PagedRunner(models[0], max_tokens=32).run([list(range(20))])[0]
    assert 0.3 < logits.std() < 3.0
    assert len(set(logits.argmax(axis=-1).tolist())) > 5
