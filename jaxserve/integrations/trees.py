"""Weights of one model in three trees: Hugging Face names, our Decoder, and modules of Tunix.

The names of Hugging Face link the trees. A `WeightName` describes the place of each tensor in a
tree, so one table serves both directions. All functions work inside `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import ModelConfig, abstract_model, checkpoint_weights
from jaxserve.models.weight_names import of_layer
from jaxserve.models.weight_table import WeightName, dimensions
from jaxserve.weights.fused_parameters import by_path
from jaxserve.weights.memory import parameters_of_state
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.traced import arranged, replicated, values_of

LORA_A, LORA_B = "_lora_a", "_lora_b"
# Paths of parameters of a multimodal model of Tunix that its text does not use.
TOWERS = ("vision_encoder.", "embedder.mm_")

_MLP = (
    WeightName("mlp.gate_proj.weight", "F D -> D F", "mlp.gate_proj.kernel"),
    WeightName("mlp.up_proj.weight", "F D -> D F", "mlp.up_proj.kernel"),
    WeightName("mlp.down_proj.weight", "D F -> F D", "mlp.down_proj.kernel"),
)
_LLAMA = (
    *_MLP,
    WeightName("self_attn.q_proj.weight", "(N H) D -> D N H", "attn.q_proj.w"),
    WeightName("self_attn.k_proj.weight", "(K H) D -> D K H", "attn.k_proj.w"),
    WeightName("self_attn.v_proj.weight", "(K H) D -> D K H", "attn.v_proj.w"),
    WeightName("self_attn.o_proj.weight", "D (N H) -> N H D", "attn.o_proj.w"),
    WeightName("input_layernorm.weight", "D -> D", "input_layernorm.w"),
    WeightName("post_attention_layernorm.weight", "D -> D", "post_attention_layernorm.w"),
)
_QWEN2 = (
    *_LLAMA,
    WeightName("self_attn.q_proj.bias", "NH -> NH", "attn.q_bias"),
    WeightName("self_attn.k_proj.bias", "KH -> KH", "attn.k_bias"),
    WeightName("self_attn.v_proj.bias", "KH -> KH", "attn.v_bias"),
)
_QWEN3 = (
    *_LLAMA,
    WeightName("self_attn.q_norm.weight", "H -> H", "attn.q_norm.w"),
    WeightName("self_attn.k_norm.weight", "H -> H", "attn.k_norm.w"),
)
_ROUTER = WeightName("mlp.gate.weight", "E D -> D E", "mlp.router.kernel")
_EXPERT = (
    WeightName("mlp.experts.{}.gate_proj.weight", "M D -> D M", "mlp.gate_proj"),
    WeightName("mlp.experts.{}.up_proj.weight", "M D -> D M", "mlp.up_proj"),
    WeightName("mlp.experts.{}.down_proj.weight", "D M -> M D", "mlp.down_proj"),
)
_GEMMA = (
    *_MLP,
    WeightName("self_attn.o_proj.weight", "D (N H) -> N H D", "attn.attn_vec_einsum.w"),
    WeightName("input_layernorm.weight", "D -> D", "pre_attention_norm.scale"),
    WeightName("pre_feedforward_layernorm.weight", "D -> D", "pre_ffw_norm.scale"),
    WeightName("post_feedforward_layernorm.weight", "D -> D", "post_ffw_norm.scale"),
)
_GEMMA_FUSED = (
    WeightName("self_attn.q_proj.weight", "(N H) D -> N D H", "attn.qkv_einsum.w", (0,)),
    WeightName("self_attn.k_proj.weight", "(N H) D -> N D H", "attn.qkv_einsum.w", (1,)),
    WeightName("self_attn.v_proj.weight", "(N H) D -> N D H", "attn.qkv_einsum.w", (2,)),
)
_GEMMA_GROUPED = (
    WeightName("self_attn.q_proj.weight", "(N H) D -> N D H", "attn.q_einsum.w"),
    WeightName("self_attn.k_proj.weight", "(K H) D -> K D H", "attn.kv_einsum.w", (0,)),
    WeightName("self_attn.v_proj.weight", "(K H) D -> K D H", "attn.kv_einsum.w", (1,)),
)
_GEMMA2 = (
    *_GEMMA,
    WeightName("post_attention_layernorm.weight", "D -> D", "post_attn_norm.scale"),
)
_GEMMA3 = (
    *_GEMMA,
    WeightName("post_attention_layernorm.weight", "D -> D", "post_attention_norm.scale"),
    WeightName("self_attn.q_norm.weight", "H -> H", "attn._query_norm.scale"),
    WeightName("self_attn.k_norm.weight", "H -> H", "attn._key_norm.scale"),
)
# Tensors of one layer by architecture, for Tunix's modules llama3, qwen2, qwen3, gemma and gemma3.
TUNIX: Mapping[str, tuple[WeightName, ...]] = MappingProxyType(
    {
        "LlamaForCausalLM": _LLAMA,
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": _QWEN3,
        "Qwen3MoeForCausalLM": (*_QWEN3, _ROUTER, *_EXPERT),
        "Gemma2ForCausalLM": _GEMMA2,
        "Gemma3ForCausalLM": _GEMMA3,
    }
)


@dataclass(frozen=True)
class Tree:
    """The parameters of a model's modules, and the tensors of Hugging Face that they consist of.

    Attributes:
        name: name of the tree in error messages.
        table: the tensors, each with its parameter.
        dims: sizes of the dimensions that the table names.
        shapes: shape of each parameter, by path.
    """

    name: str
    table: tuple[WeightName, ...]
    dims: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]

    def from_names(self, tensors: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Return the parameters, by path, from tensors by the names of Hugging Face.

        Raises:
            CheckpointError: tensors are missing, unexpected or of a wrong shape.
        """
        expected = {part.name: part.shape(self.dims) for part in self.table}
        _check("the names of Hugging Face", tensors, expected)
        arrays = {name: replicated(array) for name, array in tensors.items()}
        dtypes = {part.path: arrays[part.name].dtype for part in self.table}
        parameters: dict[str, Any] = {
            path: jax.ShapeDtypeStruct(shape, dtypes[path]) for path, shape in self.shapes.items()
        }
        return arranged(arrays, self.table, self.dims, parameters)

    def to_names(self, values: Mapping[str, Any], is_part: bool = False) -> dict[str, jax.Array]:
        """Return tensors by the names of Hugging Face from parameters by path.

        Args:
            values: the parameters.
            is_part: whether parameters may be missing, and with them their tensors.

        Raises:
            CheckpointError: parameters are missing, unexpected or of a wrong shape.
        """
        self.check(values, is_part)
        parts: dict[str, dict[tuple[int, int], Any]] = {}
        for part in self.table:
            if part.path in values:
                value: Any = replicated(values[part.path])[part.index]
                place = (part.rows[0] if part.rows is not None else 0, part.part)
                parts.setdefault(part.name, {})[place] = part.restore(value, self.dims)
        return {
            name: jnp.concatenate([rows[place] for place in sorted(rows)])
            if len(rows) > 1
            else next(iter(rows.values()))
            for name, rows in parts.items()
        }

    def check(self, values: Mapping[str, Any], is_part: bool = False) -> None:
        """Check the paths and shapes of parameters.

        Raises:
            CheckpointError: see `to_names`.
        """
        _check(self.name, values, self.shapes, is_part)


def decoder_tree(config: ModelConfig) -> Tree:
    """Return the tree of our Decoder."""
    config = _with_single_experts(config)
    parameters = parameters_of(abstract_model(config, jnp.float32))
    shapes = {path: tuple(parameter.shape) for path, parameter in parameters.items()}
    return Tree("a Decoder", tuple(checkpoint_weights(config)), dimensions(config), shapes)


def tunix_tree(config: ModelConfig) -> Tree:
    """Return the tree of Tunix's module for a model.

    Raises:
        UnsupportedModel: Tunix has no module for the model. The message names the architecture, or
            the tensor that the module lacks.
    """
    config = _with_single_experts(config)
    layer = TUNIX.get(config.architecture)
    if layer is None:
        raise UnsupportedModel(
            f"{config.architecture} is no model of Tunix; allowed: {', '.join(TUNIX)}"
        )
    if config.architecture.startswith("Gemma"):
        is_fused = config.num_attention_heads == config.num_key_value_heads
        layer = (*layer, *(_GEMMA_FUSED if is_fused else _GEMMA_GROUPED))
    norm = "final_norm.scale" if config.architecture.startswith("Gemma") else "final_norm.w"
    rows = [
        WeightName("model.embed_tokens.weight", "V D -> V D", "embedder.input_embedding"),
        WeightName("model.norm.weight", "D -> D", norm),
        WeightName("lm_head.weight", "V D -> D V", "lm_head.w"),
        *(
            of_layer(row, i)
            for i in range(config.num_hidden_layers)
            for row in _rows(layer, config)
        ),
    ]
    names = {weight.name for weight in checkpoint_weights(config)}
    table = tuple(row for row in rows if row.name in names)
    for name in sorted(names - {row.name for row in table}):
        raise UnsupportedModel(f"{config.architecture}: Tunix's module has no place for {name!r}")
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    dims = dimensions(config) | {"N": heads, "NH": heads * size, "KH": groups * size}
    return Tree("the state of Tunix's module", table, dims, _shapes(table, dims))


def decoder_from_names(
    params: Mapping[str, Any], config: ModelConfig, dtype: DTypeLike
) -> nnx.State:
    """Return `nnx.state` of our Decoder from arrays by the names of Hugging Face.

    Args:
        params: the arrays, in any float dtype.
        config: configuration of the model.
        dtype: dtype of the parameters.

    Raises:
        CheckpointError, UnsupportedModel: see `jaxserve.weights.traced.values_of`.
    """
    model = abstract_model(config, dtype)
    values = values_of(params, config, parameters_of(model))
    return nnx.split(filled(model, values))[1]


def names_from_decoder(
    state: nnx.State, config: ModelConfig, dtype: DTypeLike
) -> dict[str, jax.Array]:
    """Return arrays by the names of Hugging Face from `nnx.state` of our Decoder.

    Args:
        state: the state, perhaps in panels for CPU products, without quantized parameters.
        config: configuration of the model, for one device.
        dtype: dtype of the results.

    Raises:
        CheckpointError, UnsupportedModel: see `jaxserve.weights.traced.values_of`.
    """
    values = values_of(state, config, parameters_of(abstract_model(config, dtype)))
    return decoder_tree(config).to_names(values)


def tunix_from_names(params: Mapping[str, Any], config: ModelConfig) -> dict[str, jax.Array]:
    """Return the parameters of Tunix's module by path, such as "layers.0.attn.q_proj.w".

    Args:
        params: arrays by the names of Hugging Face.
        config: configuration of the model.

    Raises:
        CheckpointError, UnsupportedModel: see `Tree.from_names` and `tunix_tree`.
    """
    return tunix_tree(config).from_names(params)


def names_from_tunix(state: Any, config: ModelConfig) -> dict[str, jax.Array]:
    """Return arrays by the names of Hugging Face from the state of Tunix's module.

    Args:
        state: see `flat`.
        config: configuration of the model.

    Raises:
        CheckpointError, UnsupportedModel: see `Tree.to_names` and `tunix_tree`.
    """
    return tunix_tree(config).to_names(flat(state))


def flat(state: Any) -> dict[str, Any]:
    """Return the parameters of Tunix's state by path, without parameters of towers.

    Args:
        state: an `nnx.State`, whose variables that are no `nnx.Param` are left out, or nested or
            flat mappings with arrays. Arrays in pinned host memory become arrays of NumPy.
    """
    state = nnx.filter_state(state, nnx.Param) if isinstance(state, nnx.State) else state
    values = parameters_of_state(state)
    return {p: _readable(value) for p, value in values.items() if not p.startswith(TOWERS)}


def _readable(value: Any) -> Any:
    sharding = getattr(value, "sharding", None)
    is_pinned = getattr(sharding, "memory_kind", None) == "pinned_host"
    return np.asarray(value) if is_pinned else value


def with_lora(
    values: Mapping[str, Any], base: Mapping[str, Any], tree: Tree, alpha: float
) -> dict[str, Any]:
    """Return parameters into which their LoRA parameters are merged: w + a b alpha / rank.

    Args:
        values: parameters by path. The LoRA parameters of path "w" are "w_lora_a", whose last
            dimension is the rank, and "w_lora_b", whose first dimension is the rank.
        base: parameters by path that `values` may lack.
        tree: the tree of the parameters.
        alpha: the factor that LoRA calls alpha.

    Raises:
        CheckpointError: a LoRA parameter lacks the other of its pair or its base, or has a wrong
            shape.
    """
    merged = {p: value for p, value in values.items() if not p.endswith((LORA_A, LORA_B))}
    paths = {p.removesuffix(LORA_A).removesuffix(LORA_B) for p in values.keys() - merged.keys()}
    order = _axes(tree.table)
    for path in sorted(paths):
        a, b = values.get(path + LORA_A), values.get(path + LORA_B)
        weight = merged.get(path, base.get(path))
        if a is None or b is None or weight is None or path not in order:
            raise CheckpointError(
                f"params: {path} has LoRA parameters; it needs {path}{LORA_A}, {path}{LORA_B} and "
                f"{path} in {tree.name}"
            )
        inputs, axes = order[path]
        dims = {**tree.dims, "Parts": tree.shapes[path][0]}
        outputs = [axis for axis in axes if axis not in inputs]
        rank = a.shape[-1]
        if a.size != rank * prod(dims[axis] for axis in inputs) or b.size != rank * prod(
            dims[axis] for axis in outputs
        ):
            raise CheckpointError(
                f"params: LoRA parameters of {path} have shapes {list(a.shape)} and "
                f"{list(b.shape)}, which do not fit {list(tree.shapes[path])}"
            )
        change = jnp.tensordot(
            replicated(a).astype(jnp.float32).reshape(*(dims[axis] for axis in inputs), rank),
            replicated(b).astype(jnp.float32).reshape(rank, *(dims[axis] for axis in outputs)),
            1,
        )
        change = change.transpose([[*inputs, *outputs].index(axis) for axis in axes])
        total = replicated(weight).astype(jnp.float32) + change * (alpha / rank)
        merged[path] = total.astype(weight.dtype)
    return merged


def _axes(table: Iterable[WeightName]) -> dict[str, tuple[list[str], list[str]]]:
    """Return the input dimensions and all dimensions of each matrix of a tree, by path.

    They are in the order of the parameter. "Parts" are the tensors in one parameter.
    """
    sides: dict[str, tuple[list[str], list[str]]] = {}
    for part in table:
        stored, arranged_as = (side.strip() for side in part.layout.split("->"))
        axes = arranged_as.split()
        if len(axes) > 1:
            inputs = stored.removesuffix(")").rpartition("(" if stored.endswith(")") else " ")[2]
            order = axes if part.index == (...,) else ["Parts", *axes]
            sides[part.path] = ([axis for axis in axes if axis in inputs.split()], order)
    return sides


def _rows(layer: Iterable[WeightName], config: ModelConfig) -> Iterable[WeightName]:
    for row in layer:
        if "{}" not in row.name:
            yield row
            continue
        for expert in range(config.experts.count if config.experts is not None else 0):
            yield replace(row, name=row.name.format(expert), index=(expert,))


def _shapes(table: Iterable[WeightName], dims: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for path, parts in by_path(table).items():
        tensor = np.broadcast_to(np.int8(0), parts[0].shape(dims))
        shape = parts[0].arrange(tensor, dims).shape
        shapes[path] = shape if parts[0].index == (...,) else (len(parts), *shape)
    return shapes


def _with_single_experts(config: ModelConfig) -> ModelConfig:
    # The names of files: Transformers stacks experts in memory only.
    if config.experts is None or not config.experts.stacked:
        return config
    return replace(config, experts=replace(config.experts, stacked=False))


def _check(
    name: str,
    arrays: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    is_part: bool = False,
) -> None:
    for path in sorted(arrays.keys() - shapes.keys()):
        raise CheckpointError(f"params: {path!r} is not among {name} of this model")
    for path in sorted(shapes.keys() - arrays.keys()):
        if not is_part:
            raise CheckpointError(f"params: {path!r} of {name} is missing")
    for path, array in arrays.items():
        if tuple(array.shape) != shapes[path]:
            raise CheckpointError(
                f"params: {path!r} has the shape {list(array.shape)}; expected {list(shapes[path])}"
            )
