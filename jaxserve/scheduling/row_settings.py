"""Settings: the sampling settings of rows, side by side in 32-bit words."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxserve.request import MAX_STOP_TOKEN_IDS

# An array: of numpy on the host, of JAX in a program.
AnyArray = TypeVar("AnyArray")

# Type and words of each setting, in the order of `Settings`; 0 words for a single number.
_PARTS = (
    (np.int32, 0),
    (np.int32, 0),
    (np.float32, 0),
    (np.float32, 0),
    (np.float32, 0),
    (np.int32, 0),
    (np.uint32, 2),
    (np.float32, 3),
    (np.int32, 0),
    (np.int32, MAX_STOP_TOKEN_IDS),
)


# W, the words of a row.
WIDTH = sum(max(1, words) for _, words in _PARTS)
# A row without its last part.
_HEAD = struct.Struct(
    "=" + "".join(f"{max(1, words)}{np.dtype(dtype).char}" for dtype, words in _PARTS[:-1])
)


def put_settings(words: memoryview, row: int, *values: float) -> None:
    """Write a row of i32[R, W], in the order of `Settings`, but for its stop_token_ids.

    At once, and through a view made before: a number at a time costs numpy more than the rest of
    what a new sequence takes, and so does such a view.
    """
    _HEAD.pack_into(words, row * words.itemsize * WIDTH, *values)


class Settings(NamedTuple, Generic[AnyArray]):
    """The settings of R rows, each a part of one array i32[R, W].

    Rows of one array are copied together, and reach the device as one.
    """

    stop_length: AnyArray  # i32[R], known tokens at which the sequence ends for length
    min_length: AnyArray  # i32[R], known tokens before which it may not end, or 0
    temperature: AnyArray  # f32[R], 0 for greedy
    top_p: AnyArray  # f32[R], neutral 1
    min_p: AnyArray  # f32[R], neutral 0
    top_k: AnyArray  # i32[R], neutral 0
    seed: AnyArray  # u32[R, 2], the words of a threefry key
    penalties: AnyArray  # f32[R, 3], repetition, frequency, presence; neutral 1, 0, 0
    features: AnyArray  # i32[R], flags of `SamplerFeature`; neutral 0
    stop_token_ids: AnyArray  # i32[R, E], NO_TOKEN where unused

    @classmethod
    def of(cls, read: Callable[[slice | int, type[np.generic]], AnyArray]) -> Settings[AnyArray]:
        """Collect the parts of i32[R, W].

        Args:
            read: returns columns, or a single one, with their 32-bit words read as another type.
        """
        parts: list[AnyArray] = []
        first = 0
        for dtype, count in _PARTS:
            parts.append(read(slice(first, first + count) if count else first, dtype))
            first += max(1, count)
        return cls(*parts)
