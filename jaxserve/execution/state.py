# pyright: reportUnknownMemberType=false
"""DeviceState: the arrays that stay on the device between steps."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxserve.errors import InvalidRequest
from jaxserve.execution.logprobs import DeviceLogprobs
from jaxserve.execution.sampler_state import SamplerState, make_sampler_state
from jaxserve.models import ModelConfig
from jaxserve.models.expert_places import place_counts
from jaxserve.models.linear import accumulator
from jaxserve.models.mixers import Kept
from jaxserve.models.paged import LayerPages
from jaxserve.models.shards import AXIS
from pallas_kernels.arguments import FP8, FP8_BITS, INT8
from pallas_kernels.implementation import FOUR_GIB, TWO_GIB

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt32

SCALE = np.dtype(np.float32)
"""Dtype of the scales of int8 pages, one for each token and kv head."""
PAGES, SAMPLER = "KV cache", "sampler state"
"""Names of the kinds of memory that every model has."""
STATES = "recurrent state"
"""Name of the states by slot of layers that have them, with snapshots behind the null slot."""


@dataclass(frozen=True)
class MemoryKind:
    """A part of the device state that consists of equal units: KV pages, or rows of slots.

    Attributes:
        name: `PAGES`, `SAMPLER`, or a further name, under which reports and metrics show the
            memory.
        layers: number of transformer layers with this memory, or 0 if it belongs to no layer.
        unit: "page" or "slot".
        bytes_per_unit: bytes of one unit on each device, over all of its layers.
        count: number of units, the null page or the null slot included.
        arrays: tree of the shapes of one unit in one layer, over all devices.
        devices: devices over which an axis of each of `arrays` is divided.
        divided: for each of `arrays` that axis, if it is not the first of all of them.
    """

    name: str
    layers: int
    unit: Literal["page", "slot"]
    bytes_per_unit: int
    count: int
    arrays: Any = ()
    devices: int = 1
    divided: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        unit: Literal["page", "slot"],
        arrays: Any,
        count: int,
        *,
        layers: int = 0,
        devices: int = 1,
        divided: tuple[int, ...] = (),
    ) -> MemoryKind:
        """Return a MemoryKind, with its bytes per unit computed from the shapes of its arrays."""
        leaves = jax.tree.leaves(arrays)
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) * max(1, layers) // devices
        return cls(name, layers, unit, size, count, arrays, devices, divided)

    @property
    def num_bytes(self) -> int:
        """Bytes of all units of this kind of memory on each device."""
        return self.bytes_per_unit * self.count

    def zeros(self) -> Any:
        """Create the arrays of all units, filled with zeros. Their first axis is the unit.

        Returns:
            A list with one tree of arrays for each layer, or one tree for memory without layers.
        """

        def units(unit: Any) -> Any:
            return jnp.zeros((self.count, *unit.shape), unit.dtype)

        layers = [jax.tree.map(units, self.arrays) for _ in range(max(1, self.layers))]
        return layers if self.layers else layers[0]

    def specs(self) -> Any:
        """Return the partition specs of `zeros`, as a prefix of its tree."""
        spec: Any = PartitionSpec()
        if self.devices > 1:
            spec = PartitionSpec(None, AXIS)
            if self.divided:
                spec = tuple(PartitionSpec(*[None] * (1 + axis), AXIS) for axis in self.divided)
        return [spec] * self.layers if self.layers else spec


@dataclass(frozen=True)
class DeviceState:
    """All arrays that stay on the device between steps: KV cache, page table, last tokens, sampler.

    Every step takes the state as a donated argument and returns the new state, so there is never a
    second copy. The pages start as zeros, so that an unused cell never contains a NaN.
    """

    kv: list[LayerPages]  # one per layer of a group (see `PageLayout`)
    page_table: Int32[Array, "slots_plus_1 W"]  # the entries sent so far (see `page_table`)
    last_token: Int32[Array, " slots_plus_1"]  # the newest sampled token of each slot
    sampler: SamplerState
    # Rows that each device's experts have computed, modulo 2**32, by layer and place if experts
    # are placed explicitly. None if they are not counted.
    expert_rows: UInt32[Array, "N ..."] | None = None
    # Arrays of the kinds of memory beside pages and sampler state, by name.
    others: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class StepOutput:
    """Results of a launch, as device arrays: sampled tokens, log-probabilities and logits.

    The host reads them while the next launch runs.
    """

    # [R], or [most steps, R] for a launch of several steps. NO_TOKEN if logits were not finite or
    # excluded all tokens.
    token_ids: Int32[Array, "*steps R"]
    # Of each token's successor, where requested. None if greedy.
    logprobs: DeviceLogprobs | None
    # For each row's last token, and for all tokens, if a sampler follows the launch.
    logits: Float[Array, "R V"] | None = None
    hidden: Float[Array, "T D"] | None = None
    expert_rows: UInt32[Array, "N ..."] | None = None  # the counters of the state after the launch


for _type in (DeviceState, StepOutput):
    jax.tree_util.register_dataclass(
        _type, data_fields=[f.name for f in fields(_type)], meta_fields=[]
    )


def kv_dtype(setting: str, activations: DTypeLike, platform: str) -> np.dtype:
    """Return the dtype of the pages of the KV cache for a value of `kv_cache_dtype`.

    On CPU 16-bit keys and values are stored in float32, and 8-bit floats as their bits: XLA on CPU
    scatters into narrow floats by converting the whole cache in every step.

    Args:
        setting: "auto" (the dtype of activations), "fp8" or "int8_per_token_head".
        activations: the dtype of activations.
        platform: "cpu" or "gpu".

    Raises:
        InvalidRequest: the platform does not support the setting.
    """
    if setting == "int8_per_token_head":
        if platform != "cpu":
            raise InvalidRequest(
                "kv_cache_dtype 'int8_per_token_head' is for CPUs, where its kernels are; "
                "allowed on a GPU: auto, fp8",
                "kv_cache_dtype",
            )
        return INT8
    if setting == "fp8":
        return FP8_BITS if platform == "cpu" else FP8
    return accumulator(activations) if platform == "cpu" else jnp.dtype(activations)


def memory_kinds(
    config: ModelConfig,
    page_size: int,
    dtype: DTypeLike,
    num_slots: int,
    num_pages: int = 0,
    num_snapshots: int = 0,
) -> tuple[MemoryKind, ...]:
    """Return the kinds of memory of a model's device state.

    These are pages, sampler state by slot, and states by slot if layers have states.

    Args:
        config: the configuration of the model.
        page_size: tokens per page.
        dtype: the dtype of the pages. Pages of int8 also contain float32 scales.
        num_slots: the slots, without the null slot.
        num_pages: the pages of the cache, including the null page.
        num_snapshots: the states of prefixes beside those of the slots.
    """
    # A head that is replicated, or whose positions are sharded, counts once per device.
    devices, layout = config.split.devices, config.page_layout
    page: tuple[jax.ShapeDtypeStruct, ...] = ()
    depth = layout.depth if layout.kinds else 0
    if layout.kinds:  # else pages have no bytes, and the scheduler counts tokens by them
        kind, size = layout.kinds[0], page_size // layout.splits(0)
        cells = max(1, kind.heads // devices) * devices, size // config.split.context
        page = tuple(jax.ShapeDtypeStruct((*cells, size), dtype) for size in kind.sizes)
        if dtype == INT8:
            page += (jax.ShapeDtypeStruct(cells, SCALE),) * len(page)
    row = jax.tree.map(_unit, jax.eval_shape(lambda: make_sampler_state(0, config.vocab_size)))
    kinds = (
        MemoryKind.of(PAGES, "page", page, num_pages, layers=depth, devices=devices),
        MemoryKind.of(SAMPLER, "slot", row, num_slots + 1),
    )
    if config.recurrent is None:
        return kinds
    shapes, exact = config.recurrent.states, np.dtype(np.float32)
    if jnp.dtype(dtype) == jnp.float64:
        exact = np.dtype(np.float64)
    states = MemoryKind.of(
        STATES,
        "slot",
        tuple(jax.ShapeDtypeStruct(part.shape, exact) for part in shapes),
        num_slots + 1 + num_snapshots,
        layers=config.num_state_layers,
        devices=devices,
        divided=tuple(part.divided for part in shapes),
    )
    return *kinds, states


def kept_by_layers(config: ModelConfig, state: DeviceState) -> list[Kept]:
    """Return the arrays of each layer: its states, and its pages if no other layer shares them."""
    pages, states = iter(state.kv), iter(state.others.get(STATES, ()))
    is_shared = config.page_layout.is_shared
    return [
        Kept(
            next(pages) if config.has_pages(layer) and not is_shared else (),
            next(states) if config.states_of(layer) else (),
        )
        for layer in range(config.num_hidden_layers)
    ]


def with_states(others: dict[str, Any], kept: Iterable[Kept]) -> dict[str, Any]:
    """Return the kinds of memory `others` with new states."""
    if STATES not in others:
        return others
    return others | {STATES: [layer.states for layer in kept if layer.states]}


def _unit(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape[1:], array.dtype)


def addressable_pages(pages: int, layer_page_bytes: int, dtype: np.dtype, platform: str) -> int:
    """Return `pages`, or fewer if GPU kernels could not address the arrays of a layer.

    GPU kernels cannot address arrays of one-byte values with 2 to 4 GiB (see
    `pallas_kernels.implementation`). The result then fits below 2 GiB.

    Args:
        pages: number of pages of the KV cache.
        layer_page_bytes: bytes of one page in one layer.
        dtype: dtype of the pages.
        platform: "cpu" or "gpu".
    """
    size = pages * layer_page_bytes
    if platform == "cpu" or dtype.itemsize > 1 or not TWO_GIB <= size <= FOUR_GIB:
        return pages
    return (TWO_GIB - 1) // layer_page_bytes


def make_state(config: ModelConfig, memory: Iterable[MemoryKind], max_pages: int) -> DeviceState:
    """Create a device state in which all arrays are zeros.

    Args:
        config: the configuration of the model.
        memory: the kinds of memory, with their counts.
        max_pages: the number of columns of the page table (`SlotTable.num_columns`).
    """
    kinds = {kind.name: kind for kind in memory}
    pages, sampler = kinds.pop(PAGES), kinds.pop(SAMPLER)
    rows: tuple[int, ...] | None = None
    if config.split.counts_rows and config.experts is not None:
        rows = (config.split.devices, *place_counts(config))
    return DeviceState(
        kv=list(pages.zeros()),
        page_table=jnp.zeros((sampler.count, max_pages), np.int32),
        last_token=jnp.zeros(sampler.count, np.int32),
        sampler=sampler.zeros(),
        expert_rows=None if rows is None else jnp.zeros(rows, np.uint32),
        others={name: kind.zeros() for name, kind in kinds.items()},
    )


def state_specs(memory: Iterable[MemoryKind]) -> DeviceState:
    """Return a DeviceState of the partition specs of its arrays.

    Counters of expert rows are sharded over the devices, page table and last tokens are replicated,
    and other arrays have the specs of their kind of memory.

    Args:
        memory: the kinds of memory.
    """
    kinds: dict[str, Any] = {kind.name: kind.specs() for kind in memory}
    whole: Any = PartitionSpec()
    rows: Any = PartitionSpec(AXIS)
    pages, sampler = kinds.pop(PAGES), kinds.pop(SAMPLER)
    return DeviceState(pages, whole, whole, sampler, rows, kinds)


def release(state: DeviceState | None, error: Exception | None) -> None:
    """Wait until the device has computed `state`, so that its memory is free for a new state.

    The frames of the error's traceback, which hold arrays of the state, are cleared. Errors of
    running steps are ignored.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    with suppress(Exception):  # another step may fail too
        jax.block_until_ready(state)
