"""The demonstration model's network, and the weights it starts training from.

Shape names: B batch, T tokens, L layers, D hidden, N query heads, K kv heads, H head dim,
F mlp, V vocab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

QUERY_CHUNK = 128
EMBEDDING_SCALE = 0.5


@dataclass(frozen=True)
class Config:
    """Sizes of the model, under the names of the Hugging Face configuration."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024


def rope_rates(head_dim: int, theta: float) -> jax.Array:
    """Turn per position, in radians, of each of the H / 2 pairs, fastest first."""
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotate ``x`` [B, T, heads, H] by its positions, the two halves of H paired."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * rope_rates(x.shape[-1], theta)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Block(nnx.Module):
    """Llama layer. Every projection is stored as [inputs, outputs]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = c = config
        heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def matrix(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Param:
            noise = jax.random.normal(rngs.params(), (inputs, outputs))
            return nnx.Param(noise * scale / math.sqrt(inputs))

        depth = 1 / math.sqrt(2 * c.num_hidden_layers)
        self.input_layernorm = nnx.Param(jnp.ones(c.hidden_size))
        self.q_proj = matrix(c.hidden_size, heads)
        self.k_proj = matrix(c.hidden_size, groups)
        self.v_proj = matrix(c.hidden_size, groups)
        self.o_proj = matrix(heads, c.hidden_size, depth)
        self.post_attention_layernorm = nnx.Param(jnp.ones(c.hidden_size))
        self.gate_proj = matrix(c.hidden_size, c.intermediate_size)
        self.up_proj = matrix(c.hidden_size, c.intermediate_size)
        self.down_proj = matrix(c.intermediate_size, c.hidden_size, depth)

    def norm(self, x: jax.Array, scale: nnx.Param) -> jax.Array:
        return rms_norm(x, scale[...], self.config.rms_norm_eps)

    def attend(self, x: jax.Array, rows: int) -> jax.Array:
        """Attend causally over ``rows`` sequences. ``x`` is [B * T, D], rows first.

        Queries go in chunks so that a chunk meets only the keys up to its own end, and the score
        matrix stays small: on a CPU both matter more than the number of operations.
        """
        c = self.config
        groups, heads = c.num_key_value_heads, c.num_attention_heads
        projections = (self.q_proj[...], self.k_proj[...], self.v_proj[...])
        joint = x @ jnp.concatenate(projections, axis=1)
        joint = joint.reshape(rows, -1, heads + 2 * groups, c.head_dim)
        length = joint.shape[1]
        turned = rotate(joint[:, :, : heads + groups], c.rope_theta).transpose(0, 2, 1, 3)
        value = joint[:, :, heads + groups :].transpose(0, 2, 1, 3).reshape(-1, length, c.head_dim)
        query = turned[:, :heads].reshape(rows * groups, -1, length, c.head_dim)
        key = turned[:, heads:].reshape(rows * groups, length, c.head_dim) / math.sqrt(c.head_dim)
        mixed = []
        for start in range(0, length, QUERY_CHUNK):
            part = query[:, :, start : start + QUERY_CHUNK]
            width, end = part.shape[2], start + part.shape[2]
            scores = part.reshape(rows * groups, -1, c.head_dim) @ key[:, :end].swapaxes(1, 2)
            scores = scores.reshape(rows * groups, -1, width, end)
            visible = jnp.arange(end) <= jnp.arange(start, end)[:, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            out = weights.reshape(rows * groups, -1, end) @ value[:, :end]
            mixed.append(out.reshape(rows, heads, width, c.head_dim))
        joined = jnp.concatenate(mixed, axis=2).transpose(0, 2, 1, 3)
        return joined.reshape(x.shape[0], -1) @ self.o_proj[...]

    def __call__(self, x: jax.Array, rows: int) -> jax.Array:
        x = x + self.attend(self.norm(x, self.input_layernorm), rows)
        y = self.norm(x, self.post_attention_layernorm)
        mlp = nnx.silu(y @ self.gate_proj[...]) * (y @ self.up_proj[...])
        return x + mlp @ self.down_proj[...]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


class Llama(nnx.Module):
    """Decoder whose output matrix is its embedding: tokens [B, T] to logits [B, T, V]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), shape) * EMBEDDING_SCALE)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.Param(jnp.full(config.hidden_size, 0.05 / EMBEDDING_SCALE))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens.reshape(-1)]
        for layer in self.layers:
            x = layer(x, tokens.shape[0])
        logits = rms_norm(x, self.norm[...], self.config.rms_norm_eps) @ self.embed_tokens[...].T
        return logits.reshape(*tokens.shape, -1)


def distance_wave(config: Config, distance: int) -> tuple[jax.Array, jax.Array]:
    """Make query and key [H] that, constant over tokens, make a head look ``distance`` back."""
    half = config.head_dim // 2
    fast = jnp.where(jnp.arange(half) < half // 2, 3.0, 0.0)
    angle = distance * rope_rates(config.head_dim, config.rope_theta)
    query = jnp.concatenate([fast * jnp.cos(angle), -fast * jnp.sin(angle)])
    return query, jnp.concatenate([fast, jnp.zeros(half)])


def seed_embeddings(model: Llama, pairs: Sequence[tuple[int, int]]) -> None:
    """Seed the constant and marking components of the embeddings.

    Component 0 is constant, so that heads can attend by distance alone. Component 1 tells the
    two tokens of a word, after a blank and without one, apart. The upper half starts empty.
    """
    bare, blank = np.array(pairs).T
    table = model.embed_tokens[...].at[:, model.config.hidden_size // 2 :].set(0)
    table = table.at[bare].set(table[blank]).at[:, :2].set(0)
    # Equal lengths, or the constant would depend on the token once it is normalized.
    table *= 8 * EMBEDDING_SCALE / jnp.linalg.norm(table, axis=1, keepdims=True)
    flag = jnp.zeros(len(table)).at[blank].set(1).at[bare].set(-1)
    table = table.at[:, 1].set(2 * EMBEDDING_SCALE * jnp.where(flag == 0, 1, flag))
    table = table.at[:, 0].set(4 * EMBEDDING_SCALE)
    model.embed_tokens[...] = table


def seed_circuits(model: Llama, asked: int) -> None:
    """Start with a rough copying circuit, which random weights take most of a short run to form.

    Layer 0: heads look one, two, ``asked`` (to the question's last word) and ``asked + 1`` tokens
    back and write a sketch of the tokens there into their own components of the upper half.  Layer
    1: each head finds where a sketch matches the current word, the previous one or the
    question's, and writes the token found there.  Content is matched in the slowly turning half
    of the rotary pairs only.
    """
    c, (first, second) = model.config, model.layers[:2]
    size, lower = c.head_dim, c.hidden_size // 2
    group = c.num_attention_heads // c.num_key_value_heads
    for layer in model.layers:
        layer.o_proj[...] *= 0.3
        layer.down_proj[...] *= 0.3
    query, key = jnp.zeros_like(first.q_proj[...]), jnp.zeros_like(first.k_proj[...])
    for head, distance in enumerate((1, 2, asked, asked + 1)):
        wave, level = distance_wave(c, distance)
        query = query.at[0, head * size : (head + 1) * size].set(wave)
        key = key.at[0, head // group * size : (head // group + 1) * size].set(level)
    first.q_proj[...], first.k_proj[...] = query, key
    slow = np.r_[size // 4 : size // 2, size // 2 + size // 4 : size]
    width = len(slow)
    # Both key-value groups sketch a token in the same way, so that all sketches can be compared.
    value = first.v_proj[...].at[:2].set(0).at[lower:].set(0)
    value = value.at[:, size:].set(value[:, :size])
    out, own = jnp.zeros_like(first.o_proj[...]), np.arange(width)
    for head in range(c.num_attention_heads):
        out = out.at[head * size + own, lower + head * width + own].set(0.8)
    first.v_proj[...], first.o_proj[...] = value, out
    one_back, two_back, question = (
        jnp.zeros((c.hidden_size, width)).at[lower + head * width + own, own].set(1.0)
        for head in range(3)
    )
    now = value[:, :width]
    seen = second.v_proj[...].at[:1].set(0).at[lower:].set(0)
    query, key = jnp.zeros_like(second.q_proj[...]), jnp.zeros_like(second.k_proj[...])
    out = jnp.zeros_like(second.o_proj[...])
    matches = ((now, one_back), (question, one_back), (one_back, two_back), (question, two_back))
    for head, (wanted, offered) in enumerate(matches):
        start, kv = head * size, head // group * size
        query = query.at[:, start + slow].set(4 * wanted)
        key = key.at[:, kv + slow].set(4 * offered)
        out = out.at[start : start + size].set(10 * seen[:, kv : kv + size].T)
    second.q_proj[...], second.k_proj[...] = query, key
    second.v_proj[...], second.o_proj[...] = seen, out
