"""How a family's parameters are laid out in a Hugging Face checkpoint, as data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType

import numpy as np

from jaxserve.models.config import ModelConfig

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class WeightName:
    """One tensor of a checkpoint and its place in the model.

    Attributes:
        name: the tensor's name in the checkpoint.
        layout: how to rearrange it, "(N H) D -> D N H": the left side is its shape there, with
            the dimensions that are fused into one in brackets; the right side their order here.
        path: the parameter it belongs to.
        at: the part of the parameter that it fills; all of it unless several tensors are fused.
    """

    name: str
    layout: str
    path: str
    at: Index = (...,)

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """The tensor's shape in the checkpoint."""
        shape, group = [], None
        for token in self._side(0):
            if token == "(":
                group = 1
            elif token == ")":
                shape.append(group)
                group = None
            elif group is None:
                shape.append(dims[token])
            else:
                group *= dims[token]
        return tuple(shape)

    def arrange(self, tensor: np.ndarray, dims: Mapping[str, int]) -> np.ndarray:
        """A view of the tensor in the parameter's order of dimensions."""
        source = [token for token in self._side(0) if token not in "()"]
        view = tensor.reshape([dims[name] for name in source])
        return view.transpose([source.index(name) for name in self._side(1)])

    def _side(self, index: int) -> list[str]:
        side = self.layout.split("->")[index]
        return side.replace("(", "( ").replace(")", " )").split()


def dimensions(config: ModelConfig) -> dict[str, int]:
    """Sizes of the letters in `WeightName.layout`; G is the number of query heads per kv head."""
    return {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "K": config.num_key_value_heads,
        "G": config.num_attention_heads // config.num_key_value_heads,
        "H": config.head_dim,
    }


def embedding_weights(config: ModelConfig) -> list[WeightName]:
    """Where the embedding and the output projection come from."""
    embedding = "model.embed_tokens.weight"
    if config.tie_word_embeddings:
        return [WeightName(embedding, "V D -> D V", "embedding.project")]
    return [
        WeightName(embedding, "V D -> V D", "embedding.table"),
        WeightName("lm_head.weight", "V D -> D V", "embedding.project"),
    ]


def every_layer(layer: Sequence[WeightName], config: ModelConfig) -> list[WeightName]:
    """One layer's tensors, repeated for every layer under its prefix."""
    return [
        replace(
            tensor, name=f"model.layers.{index}.{tensor.name}", path=f"layers.{index}.{tensor.path}"
        )
        for index in range(config.num_hidden_layers)
        for tensor in layer
    ]
