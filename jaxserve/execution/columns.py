# pyright: reportUnknownMemberType=false
"""Argmax over the vocabulary, which may be sharded over devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models import ModelConfig
from jaxserve.models.collectives import (
    axis_size,
    device_index,
    of_all,
    rows_for_columns,
)
from jaxserve.scheduling.slot_table import NO_TOKEN
from pallas_kernels import greatest, has_greatest

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32

LANES = 128
T = TypeVar("T")


def in_groups(x: Float[Array, "R V"], fill: float) -> Float[Array, "R groups 128"]:
    """Reshape columns into groups of 128: [R, V] to [R, ceil(V / 128), 128], padded with `fill`."""
    pad = -x.shape[1] % LANES
    if pad:
        x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=fill)
    return x.reshape(x.shape[0], -1, LANES)


def argmax(logits: Float[Array, "R V"]) -> Int32[Array, " R"]:
    """Return int32[R]: for each row the first column with its greatest value (see `best`)."""
    return best(logits)[0]


def best(logits: Float[Array, "R V"]) -> tuple[Int32[Array, " R"], Float[Array, " R"]]:
    """Return for each row the first column with its greatest value, and that value: int32[R], [R].

    XLA's argmax on CPU takes 13 to 57 times as long as its max over a vocabulary. Here the column
    is searched among the maxima of groups of 128 columns, and then within one group.
    """
    groups = in_groups(logits, -jnp.inf)
    tops = groups.max(axis=-1)
    group = jnp.argmax(tops, axis=-1)
    lane = jnp.argmax(jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0], axis=-1)
    return (group * LANES + lane).astype(jnp.int32), tops.max(axis=-1)


def is_finite(logits: Float[Array, "R V"]) -> Bool[Array, " R"]:
    """Return bool[R]: whether all values of a row are finite.

    NaN and infinity propagate through the maximum of absolute values. XLA on CPU vectorizes a
    maximum, but not a conjunction.
    """
    return jnp.isfinite(jnp.abs(logits).max(axis=1))


@dataclass(frozen=True)
class Columns:
    """The division of the columns of logits over the devices of a mesh axis, in order.

    Attributes:
        vocab_size: the number of columns without padding.
        axis: the mesh axis, or None if one device has all columns.
    """

    vocab_size: int
    axis: str | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> Columns:
        """Return how a model's logits are divided over devices, by the model's configuration."""
        return cls(config.vocab_size, config.split.axis)

    def greatest(
        self, logits: Float[Array, "R V"], implementation: str
    ) -> tuple[Int32[Array, " R"], Float[Array, " R"], Bool[Array, " R"]]:
        """Find the most likely token of each row of logits whose columns are sharded over devices.

        Devices exchange one token and one number per row. Ties go to the lowest token id. Padded
        columns are ignored.

        Args:
            logits: this device's columns.
            implementation: the choice of kernels.

        Returns:
            For each row the token id, its logit, and whether all logits of the row are finite. They
            are equal on all devices.
        """
        assert self.axis is not None
        size, index = logits.shape[1], device_index(self.axis)
        first = index * size
        padded = axis_size(self.axis) * size > self.vocab_size
        if not padded and has_greatest(logits, implementation):  # -1 is NO_TOKEN
            ids = greatest(logits, implementation=implementation)
            ok = ids != NO_TOKEN
            ids = jnp.maximum(ids, 0)
            values = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0]
        else:
            ok, unpadded = is_finite(logits), logits
            if padded:
                is_token = first + jnp.arange(size) < self.vocab_size
                unpadded = jnp.where(is_token, logits, -jnp.inf)
            ids, values = best(unpadded)
        bits = lax.bitcast_convert_type(values, jnp.int32).reshape(len(values), -1)
        ids = jnp.where(ok, first + ids, NO_TOKEN)
        pairs = of_all(jnp.concatenate([ids[:, None], bits], axis=1), self.axis)  # [N, R, 2 or 3]
        ids, bits = pairs[:, :, 0], pairs[:, :, 1:]
        values = lax.bitcast_convert_type(
            bits[:, :, 0] if bits.shape[2] == 1 else bits, values.dtype
        )
        ok = (ids != NO_TOKEN).all(axis=0)
        winner = jnp.argmax(values, axis=0)[None]
        ids, values = (jnp.take_along_axis(part, winner, axis=0)[0] for part in (ids, values))
        return ids, values, ok

    def by_rows(
        self,
        compute: Callable[[Float[Array, "r V"], Any], T],
        logits: Float[Array, "R V"],
        rows: Any,
    ) -> T:
        """Apply a function to whole rows of logits, with the rows sharded over the devices.

        Each device sends its columns of all rows, and receives all columns of its share of the
        rows. The devices then exchange their results. If one device has all columns, the function
        is applied once to all rows.

        Args:
            compute: a function of whole rows of logits and of the matching part of `rows`. It
                returns arrays with the same number of rows. The result of a row depends on that row
                only.
            logits: this device's columns of R rows of logits.
            rows: a tree of arrays of R rows, replicated on the devices.

        Returns:
            The results of `compute` for all R rows, on every device.
        """
        if self.axis is None:
            return compute(logits, rows)
        num_rows, devices = len(logits), axis_size(self.axis)
        each = -(-num_rows // devices)
        start = device_index(self.axis) * each

        def padded(array: Array) -> Array:
            return jnp.pad(array, ((0, devices * each - num_rows), *[(0, 0)] * (array.ndim - 1)))

        def local(array: Array) -> Array:
            return lax.dynamic_slice_in_dim(padded(array), start, each)

        whole = rows_for_columns(padded(logits), self.axis)[:, : self.vocab_size]
        results = compute(whole, jax.tree.map(local, rows))
        return jax.tree.map(
            lambda array: of_all(array, self.axis, tiled=True)[:num_rows],  # pyright: ignore
            results,
        )
