# pyright: reportUnknownMemberType=false
"""Random numbers of rows, equal to the numbers of jax.random.

JAX runs the rounds of Threefry in a loop on CPU, which takes XLA 0.3 seconds to compile in every
program. This code compiles in a quarter of that, and is one kernel on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from jaxserve.execution.typed_jax import fori_loop
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float32, Int32, UInt32

    Words = UInt32[Array, "*sizes"]
    Pairs = UInt32[Array, "2 R"]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_ONE = 0x3F800000  # the bits of 1.0


def threefry(key: tuple[Words, Words], count: tuple[Words, Words]) -> tuple[Words, Words]:
    """Return two uint32 arrays: Threefry-2x32 with 20 rounds (Salmon et al., SC 2011), elementwise.

    Args:
        key: the two words of the key.
        count: the two words of the counter.
    """
    first, second = key
    words = (first, second, first ^ second ^ jnp.uint32(_PARITY))
    x, y = count[0] + first, count[1] + second
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def _rehash(_: Int32[Array, ""], words: tuple[Pairs, Pairs]) -> tuple[Pairs, Pairs]:
    # Returns the next key and a zero counter.
    key, count = words
    return jnp.stack(threefry((key[0], key[1]), (count[0], count[1]))), jnp.zeros_like(count)


def uniform(seed: UInt32[Array, "R 2"], position: Int32[Array, " R"]) -> Float32[Array, " R"]:
    """Return a random number in [0, 1) for each row: jax.random.uniform(fold_in(seed, position)).

    Args:
        seed: the two words of each row's threefry key.
        position: the position of each row's new token.
    """
    zero = jnp.zeros(position.shape, jnp.uint32)
    key, count = (seed[:, 0], seed[:, 1]), (zero, position.astype(jnp.uint32))
    if target_device().is_gpu:  # a loop would keep the step from being one graph
        high, low = threefry(threefry(key, count), (zero, zero))
    else:
        # XLA on CPU recomputes the words for each use, unless they are the result of a loop.

        high, low = fori_loop(0, 2, _rehash, (jnp.stack(key), jnp.stack(count)))[0]
    mantissa = ((high ^ low) >> 9) | jnp.uint32(_ONE)
    return lax.bitcast_convert_type(mantissa, jnp.float32) - 1
