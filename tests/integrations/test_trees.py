"""Weights in three trees: both directions, inside `jit`, with the same log-probabilities."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxserve
from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.integrations import trees
from jaxserve.models import parse_model_config, read_model_config
from tests.integrations.families import FAMILIES, arrays_of, fields_of
from tests.models.tiny_models import hugging_face_model, save
from tests.weights.test_traced import FAMILIES as OTHERS
from tests.weights.test_traced import tensors_of


def equal(first: Any, second: Any) -> None:
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert array.dtype == second[name].dtype
        np.testing.assert_array_equal(array, second[name], err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tree_gives_the_arrays_back(family: str) -> None:
    config, arrays = parse_model_config(fields_of(family)), arrays_of(family)

    @jax.jit
    def through_tunix(arrays: Any) -> Any:
        return trees.names_from_tunix(trees.tunix_from_names(arrays, config), config)

    @jax.jit
    def through_decoder(arrays: Any) -> Any:
        state = trees.decoder_from_names(arrays, config, jnp.float32)
        return trees.names_from_decoder(state, config, jnp.float32)

    equal(arrays, through_tunix(arrays))
    equal(arrays, through_decoder(arrays))


@pytest.mark.parametrize("family", ["phi3", "gpt_oss", "deepseek_v3", "qwen3_5", "qwen3_moe"])
def test_a_decoder_of_other_families_gives_the_tensors_of_its_files(
    tmp_path: Any, family: str
) -> None:
    """Stacked tensors, experts, biases, latent attention and states."""
    case = OTHERS[family]
    save(case, hugging_face_model(case), tmp_path)
    config, arrays = read_model_config(tmp_path), tensors_of(tmp_path)
    state = trees.decoder_from_names(arrays, config, jnp.float32)
    found = trees.names_from_decoder(state, config, jnp.float32)
    equal({n: np.asarray(arrays[n], np.float32).reshape(found[n].shape) for n in found}, found)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma2", "gemma3_fused"])
def test_log_probabilities_of_all_trees_are_equal(family: str) -> None:
    fields, arrays = fields_of(family), arrays_of(family)
    config = parse_model_config(fields)
    tokens = np.random.default_rng(1).integers(0, 511, (3, 12))
    lengths = np.array([12, 7, 3])
    expected = jaxserve.logprobs(arrays, tokens, lengths, fields)
    state = trees.decoder_from_names(arrays, config, jnp.float32)
    tunix = trees.tunix_from_names(arrays, config)

    @jax.jit
    def scores(tunix: Any) -> jax.Array:
        return jaxserve.logprobs(trees.names_from_tunix(tunix, config), tokens, lengths, config)

    assert np.ptp(np.asarray(expected)) > 0.1
    np.testing.assert_array_equal(expected, jaxserve.logprobs(state, tokens, lengths, config))
    np.testing.assert_array_equal(expected, scores(tunix))


def test_places_in_tunix_are_those_of_its_einsums() -> None:
    """Tunix's own loader is the judge in `with_tunix`; this is the same by hand."""
    arrays = arrays_of("gemma2")
    tunix = trees.tunix_from_names(arrays, parse_model_config(fields_of("gemma2")))
    name = "model.layers.1.self_attn.{}_proj.weight"
    query, key, value, out = (arrays[name.format(letter)] for letter in "qkvo")
    # BTD,NDH->BTNH; BSD,CKDH->CBSKH; BTNH,NHD->BTD
    path = "layers.1.attn."
    np.testing.assert_array_equal(
        tunix[path + "q_einsum.w"], query.reshape(4, 16, 32).transpose(0, 2, 1)
    )
    both = [half.reshape(2, 16, 32).transpose(0, 2, 1) for half in (key, value)]
    np.testing.assert_array_equal(tunix[path + "kv_einsum.w"], np.stack(both))
    np.testing.assert_array_equal(tunix[path + "attn_vec_einsum.w"], out.T.reshape(4, 16, 32))
    llama, config = arrays_of("llama3"), parse_model_config(fields_of("llama3"))
    found = trees.tunix_from_names(llama, config)["layers.0.attn.q_proj.w"]  # BTD,DNH->BTNH
    query = llama["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(found, query.T.reshape(32, 4, 16))


def test_arrays_on_a_mesh_of_explicit_axes_are_read() -> None:
    config, arrays = parse_model_config(fields_of("qwen3")), arrays_of("qwen3")
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), (jax.sharding.AxisType.Explicit,) * 2)
    axes = {
        "layers.0.attn.q_proj.w": ("fsdp", "tp", None),
        "layers.0.mlp.up_proj.kernel": ("fsdp",),
    }
    tunix = {
        path: jax.device_put(
            array, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes.get(path, ())))
        )
        for path, array in trees.tunix_from_names(arrays, config).items()
    }
    equal(arrays, jax.jit(lambda tunix: trees.names_from_tunix(tunix, config))(tunix))


def test_other_trees_are_refused_by_name() -> None:
    config, arrays = parse_model_config(fields_of("qwen3")), arrays_of("qwen3")
    tunix = trees.tunix_from_names(arrays, config)
    name = "layers.1.attn.o_proj.w"
    less = {path: array for path, array in tunix.items() if path != name}
    wrong = {**tunix, name: tunix[name].T}
    for state, text in (
        (less, f"'{name}' of the state of Tunix's module is missing"),
        ({**tunix, "layers.1.attn.x": tunix[name]}, "'layers.1.attn.x' is not among"),
        (wrong, rf"'{name}' has the shape \[32, 16, 4\]; expected \[4, 16, 32\]"),
    ):
        with pytest.raises(CheckpointError, match=text):
            trees.names_from_tunix(state, config)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' of the names"):
        trees.tunix_from_names(
            {n: a for n, a in arrays.items() if n != "model.norm.weight"}, config
        )
    other = {**fields_of("llama3"), "architectures": ["Olmo2ForCausalLM"]}
    with pytest.raises(UnsupportedModel, match="Olmo2ForCausalLM is no model of Tunix; allowed"):
        trees.tunix_tree(parse_model_config(other))
    biased = parse_model_config({**fields_of("llama3"), "attention_bias": True})
    with pytest.raises(
        UnsupportedModel, match=r"no place for 'model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        trees.tunix_tree(biased)


def test_states_of_tunix_are_flattened() -> None:
    """Variables that are no parameters, and parameters of towers, are left out."""

    class Part(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2))
            self.w_lora_a = nnx.LoRAParam(jnp.ones(3))
            self.seen = nnx.BatchStat(jnp.ones(4))

    class Whole(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Part()])
            self.vision_encoder = Part()

    state = nnx.state(Whole())
    found = trees.flat(state)
    assert {path: array.shape for path, array in found.items()} == {
        "layers.0.w": (2,),
        "layers.0.w_lora_a": (3,),
    }
    equal(
        found,
        trees.flat(
            {"layers": {0: {"w": found["layers.0.w"]}}}
            | {"layers.0.w_lora_a": found["layers.0.w_lora_a"]}
        ),
    )


@pytest.mark.parametrize(
    ("family", "path", "subscripts"),
    [
        ("qwen3", "layers.0.attn.q_proj.w", "dr,rnh->dnh"),
        ("qwen3", "layers.1.attn.o_proj.w", "nhr,rd->nhd"),
        ("qwen3", "layers.1.mlp.down_proj.kernel", "fr,rd->fd"),
        ("gemma2", "layers.0.attn.q_einsum.w", "dr,rnh->ndh"),
        ("gemma2", "layers.0.attn.kv_einsum.w", "dr,rckh->ckdh"),
        ("gemma3_fused", "layers.0.attn.qkv_einsum.w", "dr,rsnh->sndh"),
        ("llama3", "lm_head.w", "dr,rv->dv"),
    ],
)
def test_lora_parameters_are_added(family: str, path: str, subscripts: str) -> None:
    """The shapes are those of qwix: inputs and rank, rank and the other dimensions."""
    config = parse_model_config(fields_of(family))
    tree = trees.tunix_tree(config)
    values: Any = trees.tunix_from_names(arrays_of(family), config)
    generator, rank, alpha = np.random.default_rng(0), 3, 6.0
    sides, result = subscripts.split("->")
    sizes = dict(zip(result, tree.shapes[path], strict=True)) | {"r": rank}
    a, b = (
        generator.standard_normal([sizes[axis] for axis in side]).astype(np.float32)
        for side in sides.split(",")
    )
    lora = {path + trees.LORA_A: a, path + trees.LORA_B: b}
    expected = values[path] + np.einsum(subscripts, a, b) * 2
    found = trees.with_lora({**values, **lora}, {}, tree, alpha)
    assert found.keys() == values.keys()
    np.testing.assert_allclose(found[path], expected, rtol=1e-5, atol=1e-5)
    assert trees.with_lora(lora, values, tree, alpha).keys() == {path}
    flat = {path + trees.LORA_A: a.reshape(-1, rank), path + trees.LORA_B: b.reshape(rank, -1)}
    np.testing.assert_array_equal(trees.with_lora(flat, values, tree, alpha)[path], found[path])
    for broken in (lora, {**lora, path + trees.LORA_A: a[:-1]}, {path + trees.LORA_A: a}):
        base = {} if broken is lora else values
        with pytest.raises(CheckpointError, match=path):
            trees.with_lora(broken, base, tree, alpha)
