"""The pre-norm decoder that Llama and its many relatives share."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jaxserve.models.attention import Attention
from jaxserve.models.config import ModelConfig
from jaxserve.models.layers import CosSin, Embedding, GatedMLP, RMSNorm, rope_cos_sin
from jaxserve.models.paged import KVPages, PagedStep


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and inside a residual connection.

    A function of its own weights and its own pages and of nothing else, and the same structure for
    every layer of a model, so one trace serves them all.
    """

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, *, qk_norm: bool
    ) -> None:
        embed, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(embed, "embed", eps, dtype)
        self.attention = Attention(config, dtype, rngs, qk_norm=qk_norm)
        self.mlp_norm = RMSNorm(embed, "embed", eps, dtype)
        self.mlp = GatedMLP(config, dtype, rngs)

    def __call__(
        self, x: Float[Array, "T D"], cos_sin: CosSin, step: PagedStep, kv: KVPages
    ) -> tuple[Float[Array, "T D"], KVPages]:
        """The residual stream after this layer, and its pages with this step's K and V written."""
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.attention_norm(x), cos_sin, step, kv)
            x = x + attended
        with jax.named_scope("mlp"):
            x = x + self.mlp(self.mlp_norm(x))
        return x, kv


class Decoder(nnx.Module):
    """A causal language model over a ragged batch of tokens.

    Leaves: 6 a layer (2 more with query and key norms, 2 more with each kind of bias), the final
    norm, and the embedding (1 if tied, else 2).
    """

    def __init__(
        self, config: ModelConfig, dtype: DTypeLike, rngs: nnx.Rngs, *, qk_norm: bool = False
    ) -> None:
        self.config = config
        self.embedding = Embedding(config, dtype, rngs)
        self.layers = nnx.List(
            DecoderLayer(config, dtype, rngs, qk_norm=qk_norm)
            for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, "embed", config.rms_norm_eps, dtype)

    def __call__(
        self, tokens: Int32[Array, " T"], step: PagedStep, kv: Sequence[KVPages]
    ) -> tuple[Float[Array, "T D"], list[KVPages]]:
        """Hidden states after the final norm, and the pages with this step's K and V written.

        The layers are unrolled: a scan would copy the whole cache, or every layer's weights, in
        each step.
        """
        with jax.named_scope("embedding"):
            x = self.embedding(tokens)
            cos_sin = rope_cos_sin(step.positions, self.config.rope, self.config.head_dim, x.dtype)
        written: list[KVPages] = []
        for index, (layer, pages) in enumerate(zip(self.layers, kv, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, pages = layer(x, cos_sin, step, pages)
            written.append(pages)
        return self.norm(x), written

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Scores of every token after the given hidden states, in at least float32."""
        with jax.named_scope("logits"):
            return self.embedding.logits(hidden)
