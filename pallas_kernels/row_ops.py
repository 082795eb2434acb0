"""Operations over rows that have a kernel on CPU, and are plain JAX elsewhere.

On CPU the result of a row is the same to the bit for any number of rows. XLA does not guarantee
this.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.gradients import differentiable
from pallas_kernels.implementation import deferred, has_llvm
from pallas_kernels.row_arguments import ACTIVATIONS, Activation

_draw = deferred("pallas_kernels.cpu.draw", "draw")
_gated = deferred("pallas_kernels.cpu.gated", "gated")
_row_sums = deferred("pallas_kernels.cpu.row_sums", "row_sums")
_row_shares = deferred("pallas_kernels.cpu.row_sums", "row_shares")


_Term = Literal["numbers", "squares", "exps"]


def row_sums(x: jax.Array, term: _Term = "numbers", implementation: str = "auto") -> jax.Array:
    """Sum each row (the last axis) of x, or the squares or exponentials of its numbers.

    On CPU the order of the sum depends only on the length of a row. So the sum of a row is the same
    to the bit for any number of rows, which XLA does not guarantee.

    Args:
        x: [..., D], bfloat16, float16, float32 or float64.
        term: the summand: the numbers, their squares, or exp(number - maximum of the row).
        implementation: "auto", "llvm" for the kernel, or another name for plain JAX.

    Returns:
        [...] of x's dtype, but at least float32.
    """
    plain = partial(_plain_sums, term=term)
    if runs_kernel(implementation) and x.size:
        return differentiable(partial(_row_sums, term=term), plain, x)
    return plain(x)


def _plain_sums(x: jax.Array, term: _Term) -> jax.Array:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if term == "exps":
        x = jnp.exp(x - x.max(axis=-1, keepdims=True))
    return jnp.sum(jnp.square(x) if term == "squares" else x, axis=-1)


def softmax(x: jax.Array, implementation: str = "auto") -> jax.Array:
    """Compute the softmax over the last axis of x [..., D]. Return an array of x's shape and dtype.

    On CPU the result of a row is the same to the bit for any number of rows. `implementation` is as
    in `row_sums`.

    Raises:
        ValueError: x is neither float32 nor float64.
    """
    return _shares(x, "softmax", jax.nn.softmax, implementation)


def sigmoid(x: jax.Array, implementation: str = "auto") -> jax.Array:
    """Compute 1 / (1 + exp(-x)) of every number of x. Return an array of x's shape and dtype.

    On CPU equal numbers have results of equal bits at any place of the array. `implementation` is
    as in `row_sums`.

    Raises:
        ValueError: x is neither float32 nor float64.
    """
    return _shares(x, "sigmoid", jax.nn.sigmoid, implementation)


def softplus(x: jax.Array, implementation: str = "auto") -> jax.Array:
    """Compute log(1 + exp(x)) of every number of x. Return an array of x's shape and dtype.

    On CPU equal numbers have results of equal bits at any place of the array. `implementation` is
    as in `row_sums`.

    Raises:
        ValueError: x is neither float32 nor float64.
    """
    return _shares(x, "softplus", jax.nn.softplus, implementation)


def _shares(
    x: jax.Array, shared: str, plain: Callable[[jax.Array], jax.Array], implementation: str
) -> jax.Array:
    if x.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"x is {x.dtype}; allowed: float32, float64")
    if runs_kernel(implementation) and x.size:
        return differentiable(partial(_row_shares, shared=shared), plain, x)
    return plain(x)


def runs_kernel(implementation: str) -> bool:
    """Return whether an operation over rows runs its CPU kernel.

    The caller's choice is "llvm", or "auto" for the kernel if it can run.
    """
    return implementation == "llvm" or (implementation == "auto" and has_llvm())


def gated(
    x: jax.Array,
    activation: Activation,
    dtype: DTypeLike | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Compute activation(gate) * up, the activation of a gated MLP, in float32 or wider.

    Args:
        x: [T,2,F] gate and up, any float.
        activation: "silu", or "gelu_tanh", the approximation of GELU with tanh.
        dtype: of the result. Gate and up are rounded to it first. None means the dtype of x.
        implementation: as in `row_sums`.

    Returns:
        [T,F] of `dtype`.

    Raises:
        ValueError: names the wrong argument and the allowed values.
    """
    if x.ndim != 3 or x.shape[1] != 2:
        raise ValueError(f"x has shape {x.shape}; expected [T,2,F]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; allowed: {', '.join(ACTIVATIONS)}")
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    exact = jnp.promote_types(dtype, jnp.float32)
    has_kernel = dtype != jnp.float16 and x.dtype in (dtype, exact)
    plain = partial(_plain_gated, activation=activation, dtype=dtype)
    if runs_kernel(implementation) and x.size and has_kernel:
        return differentiable(partial(_gated, activation=activation, dtype=dtype), plain, x)
    return plain(x)


def _plain_gated(x: jax.Array, activation: Activation, dtype: jnp.dtype) -> jax.Array:
    exact = jnp.promote_types(dtype, jnp.float32)
    gate, up = x[:, 0].astype(dtype), x[:, 1].astype(dtype)
    # In 16 bits every operation would round, which costs more.
    wide = gate.astype(exact)
    active = jax.nn.silu(wide) if activation == "silu" else jax.nn.gelu(wide)
    return (active * up).astype(dtype)


def has_draw(logits: jax.Array) -> bool:
    """Return whether the kernel of `draw`, which samples tokens, supports logits [R,V].

    The kernel needs a CPU with llvmlite, and float32 or float64 logits that are not empty.
    """
    return has_llvm() and logits.size > 0 and logits.dtype in (jnp.float32, jnp.float64)


class DrawSettings(NamedTuple):
    """Sampling settings of the rows of `draw`. 0 disables min_p and top_k, 1 disables top_p.

    Attributes:
        temperature: f32[R]. 0 selects the argmax.
        min_p: f32[R], smallest probability of a token relative to the likeliest token.
        top_k: i32[R], number of likeliest tokens to keep.
        top_p: f32[R], share of the probability to keep.
        seed: u32[R,2] the words of a threefry key.
        position: i32[R] of the token. Seed and position determine the random number.
    """

    temperature: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    seed: jax.Array
    position: jax.Array


def draw(
    logits: jax.Array, highest: jax.Array, greedy: jax.Array, settings: DrawSettings
) -> jax.Array:
    """Sample a token for each row of logits on CPU. Requires that ``has_draw`` is true.

    Tokens have probabilities exp((logit - highest) / temperature). Three filters follow. Tokens
    below min_p times the probability of the likeliest token are removed. Of the remaining tokens,
    all but the top_k likeliest are removed (ties with the last one stay). Of the remaining tokens,
    all but the smallest set of likeliest tokens with a share of at least top_p are removed. The
    likeliest token always stays.

    Args:
        logits: [R,V] float32 or float64.
        highest: [R] greatest logit of each row, of the dtype of logits.
        greedy: i32[R] argmax of each row, the result for rows with temperature 0.
        settings: temperature, filters and seed of each row.

    Returns:
        i32[R] tokens. The token of a row with a NaN or an infinity is arbitrary.
    """
    return _draw(logits, highest, greedy, *settings)
