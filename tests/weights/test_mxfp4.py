"""MXFP4 tensors: every code, and invalid pairs. `tests/models` compares whole models."""

from pathlib import Path

import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights.mxfp4 import dequantize, unpacked
from jaxserve.weights.safetensors import Shard, TensorEntry

SHARD = Shard(Path("model.safetensors"), (0, 0, 0, 0))


def test_every_code_of_the_format():
    """E2M1 has these values, the low half of a byte comes first, E8M0 is a power of two."""
    codes = np.arange(16, dtype=np.uint8)
    values = dequantize((codes | codes[::-1] << 4)[None], np.array([128], np.uint8))
    positive = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    every = np.concatenate([positive, -positive])
    np.testing.assert_array_equal(values[::2], 2 * every)
    np.testing.assert_array_equal(values[1::2], 2 * every[::-1])
    ends = dequantize(np.full((3, 16), 2, np.uint8), np.array([0, 254, 255], np.uint8))
    assert ends[0] == 2.0**-127 and ends[32] == 2.0**127 and np.isnan(ends[64:]).all()


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (((2, 4, 3, 16), np.uint8), None, "has no"),
        (((2, 4, 3, 8), np.uint8), ((2, 4, 3), np.uint8), "has shape"),
        (((2, 4, 3, 16), np.uint8), ((2, 4, 4), np.uint8), "has shape"),
        (((2, 4, 3, 16), np.float32), ((2, 4, 3), np.uint8), "not U8"),
        (((2, 4, 3, 16), np.uint8), ((2, 4, 3), np.float16), "not U8"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_name(blocks, scales, message):
    tensors = {
        name: TensorEntry(name, SHARD, np.dtype(pair[1]), pair[0], 0, 0)
        for name, pair in (("w_blocks", blocks), ("w_scales", scales))
        if pair is not None
    }
    with pytest.raises(CheckpointError, match=f"w_blocks.*{message}"):
        unpacked(tensors)
