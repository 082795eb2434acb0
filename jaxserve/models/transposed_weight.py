"""A quantized matrix for each head, multiplied from the side of its outputs.

A quantized matrix has a scale for each output and group of inputs. Latent attention multiplies
queries by the half of such a matrix that makes keys, transposed: its outputs become inputs. The
codes stay as they are, and the scales multiply the activations before the product. Each group of
former inputs is then a matrix of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from jaxserve.models.placed_weight import PlacedWeight
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TransposedWeight:
    """The transposed matrices [A, C] of N heads, from codes with scales for each of J groups of C.

    The weight of input a and output c is code * scale + offset, with scale and offset of a and of
    the group of c.

    Attributes:
        weight: the codes, as the matrices [A, C / J] of N * J experts with scales of one. The last
            group may have padding.
        scales: float32 [N, J, A].
        offsets: float32 [N, J, A], or None for codes without zero points or minima.
        places: i32[C], the column of the codes of each output, or None for an equal order.
        outputs: C.
    """

    weight: PlacedWeight
    scales: Float[Array, "N J A"]
    offsets: Float[Array, "N J A"] | None
    places: Int32[Array, " C"] | None
    outputs: int = field(metadata={"static": True})

    def __getitem__(self, index: EllipsisType) -> TransposedWeight:
        """Return self, so that `parameter[...]` reads this weight as it reads an array."""
        return self

    def by_head(self, x: Float[Array, "T N A"], implementation: str) -> Float[Array, "T N C"]:
        """Return the product of each head's activations and matrix, in at least float32.

        Args:
            x: activations.
            implementation: implementation of the grouped product, without effect in panels.
        """
        (tokens, heads, size), groups = x.shape, self.scales.shape[1]
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        scales = self.scales.astype(wide.dtype)
        rows = wide.transpose(1, 0, 2)[:, None] * scales[:, :, None]  # [N, J, T, A]
        rows = rows.reshape(-1, size)
        rows = rows.astype(x.dtype) if target_device().is_gpu else rows
        sizes = jnp.full(heads * groups, tokens, jnp.int32)
        y = self.weight.grouped(rows, sizes, implementation).astype(wide.dtype)
        y = y.reshape(heads, groups, tokens, -1)
        if self.offsets is not None:
            offsets = self.offsets.astype(wide.dtype)
            y = y + jnp.einsum("tna,nja->njt", wide, offsets, precision="highest")[..., None]
        y = y.transpose(2, 0, 1, 3).reshape(tokens, heads, -1)
        return y[..., : self.outputs] if self.places is None else y[..., self.places]
