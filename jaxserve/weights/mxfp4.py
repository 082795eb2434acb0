"""Read MXFP4 tensors (Open Compute Project, Microscaling Formats 1.0), used by gpt-oss's experts.

Each group of 32 values has one power of two (E8M0). A value has 4 bits (E2M1), and the low half of
a byte holds the even one. A matrix is stored as two tensors: `NAME_blocks`, [..., inputs / 32, 16]
bytes, and `NAME_scales`, [..., inputs / 32].
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors import SharedFile, TensorEntry

BLOCKS, SCALES = "_blocks", "_scales"
WIDTH = 32  # values of a block
NOT_A_NUMBER = 255  # NaN in E8M0
_POSITIVE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)  # both values of each byte


@dataclass(frozen=True)
class PackedEntry(TensorEntry):
    """A tensor stored as MXFP4 blocks and scales, read as float32; `shape` is the unpacked one."""

    blocks: TensorEntry
    scales: TensorEntry

    def read_rows(
        self,
        first: int,
        last: int,
        memory: np.ndarray | None = None,
        file: SharedFile | None = None,
    ) -> np.ndarray:
        """Read and dequantize the rows [first, last) to float32; see `TensorEntry.read_rows`."""
        blocks = self.blocks.read_rows(first, last, memory, file)
        return dequantize(blocks, self.scales.read_rows(first, last, file=file))


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Dequantize MXFP4 blocks to float32, without rounding.

    Args:
        blocks: uint8 [..., G, 16].
        scales: uint8 [..., G], exponents of two with a bias of 127; 255 is NaN.

    Returns:
        [..., G * 32].
    """
    values = PAIRS[blocks].reshape(*scales.shape, WIDTH)
    with np.errstate(over="ignore"):  # NaN is set next
        powers = np.ldexp(np.float32(1), scales.astype(np.int32) - 127)
    powers[scales == NOT_A_NUMBER] = np.nan
    values *= powers[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def rows_of_pairs(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Convert MXFP4 rows to the block layout of `pallas_kernels.cpu.blocks`.

    Args:
        blocks: uint8 [O, G, 16].
        scales: uint8 [O, G].

    Returns:
        uint8 [O, G, 17]: the scale, then 32-bit words with inverted bits. The lower half of a word
        has the codes of even inputs, the upper half the codes of odd inputs.
    """
    words = ~np.ascontiguousarray(blocks).view(np.uint32)
    whole = np.zeros_like(words)
    for start, place in ((0, 0), (4, 16)):
        half = words >> start & 0x0F0F0F0F
        half = (half | half >> 4) & 0x00FF00FF
        whole |= ((half | half >> 8) & 0xFFFF) << place
    return np.concatenate([scales[..., None], whole.view(np.uint8)], axis=-1)


def unpacked(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return a checkpoint's tensors with each pair of MXFP4 blocks and scales joined to one entry.

    The entry, a PackedEntry, has the name of the blocks.

    Raises:
        CheckpointError: scales are missing, or a shape or dtype is wrong.
    """
    entries = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith(BLOCKS):
            continue
        other = name.removesuffix(BLOCKS) + SCALES
        scales = entries.pop(other, None)
        if scales is None:
            raise CheckpointError(f"{blocks.shard.path}: tensor {name!r} has no {other!r}")
        if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
            raise CheckpointError(f"{blocks.shard.path}: tensor {name!r} or its scales are not U8")
        if blocks.shape != (*scales.shape, WIDTH // 2):
            raise CheckpointError(
                f"{blocks.shard.path}: tensor {name!r} has shape {list(blocks.shape)}; its scales "
                f"imply {[*scales.shape, WIDTH // 2]}"
            )
        entries[name] = PackedEntry(
            name=name,
            shard=blocks.shard,
            dtype=np.dtype(np.float32),
            shape=(*scales.shape[:-1], scales.shape[-1] * WIDTH),
            offset=blocks.offset,
            num_bytes=blocks.num_bytes + scales.num_bytes,
            blocks=blocks,
            scales=scales,
        )
    return entries
