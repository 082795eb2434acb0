"""Settings: the sampling settings of rows as columns of one array of 32-bit words."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from jaxserve.request import MAX_STOP_TOKEN_IDS

# A NumPy array on the host, a JAX array in a program.
AnyArray = TypeVar("AnyArray")

# Dtype and number of words of each field of `Settings`, in order. 0 stands for a scalar.
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
# The format of a row without its last field.
_HEAD = struct.Struct(
    "=" + "".join(f"{max(1, words)}{np.dtype(dtype).char}" for dtype, words in _PARTS[:-1])
)


def put_settings(words: memoryview, row: int, *values: float) -> None:
    """Write the sampling settings of one row into the settings array i32[R, W].

    One call to `struct` takes less time than single assignments to NumPy arrays, which would be
    most of the cost of a new sequence. The caller keeps the memoryview for the same reason.

    Args:
        words: the memory of i32[R, W].
        row: the row to write.
        values: the scalar fields of `Settings` in order, with all elements of its vectors and
            without stop_token_ids.
    """
    _HEAD.pack_into(words, row * words.itemsize * WIDTH, *values)


class Settings(NamedTuple, Generic[AnyArray]):
    """The sampling settings of R rows, as columns of one array i32[R, W].

    The columns are copied together and reach the device as one array.
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
        """Build Settings from the columns of an array i32[R, W] of 32-bit words.

        Args:
            read: a function of columns (a slice, or one index) and a dtype. It returns these
                columns of the array with their bits as that dtype.
        """
        parts: list[AnyArray] = []
        first = 0
        for dtype, count in _PARTS:
            parts.append(read(slice(first, first + count) if count else first, dtype))
            first += max(1, count)
        return cls(*parts)
