# pyright: reportUnknownMemberType=false
"""DeviceState: the arrays that stay on the device between steps."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

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
from jaxserve.models.paged import KVPages, States
from jaxserve.models.shards import AXIS, local_kv_heads
from pallas_kernels.arguments import FP8, FP8_BITS, INT8
from pallas_kernels.implementation import FOUR_GIB, TWO_GIB

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt32

SCALE = np.dtype(np.float32)
"""Dtype of the scales of int8 pages, one for each token and kv head."""


@dataclass(frozen=True)
class DeviceState:
    """The state of the device, which is donated to every step and replaced by its result.

    There is never a second copy. The pages start as zeros, so that an unused cell never contains
    a NaN.
    """

    kv: list[KVPages | tuple[()]]  # one per layer, () for a layer without attention
    page_table: Int32[Array, "slots_plus_1 M"]  # the entries sent so far (see `page_table`)
    last_token: Int32[Array, " slots_plus_1"]  # the newest sampled token of each slot
    sampler: SamplerState
    # Rows that each device's experts have computed, modulo 2**32, by layer and place if experts
    # are placed explicitly. None if they are not counted.
    expert_rows: UInt32[Array, "N ..."] | None = None
    # One per layer: arrays whose rows are the states of the slots, the null slot, and snapshots.
    # () for a layer without states.
    states: list[States] = field(default_factory=list)


@dataclass(frozen=True)
class StepOutput:
    """Results of a launch, which the host reads while the next one runs."""

    # [R], or [most steps, R] for a launch of several steps. NO_TOKEN if logits were not finite or
    # excluded all tokens.
    token_ids: Int32[Array, "*steps R"]
    logprobs: DeviceLogprobs | None  # of each token's successor, where requested; None if greedy
    # For each row's last token, and for all tokens, if a sampler follows the launch.
    logits: Float[Array, "R V"] | None = None
    hidden: Float[Array, "T D"] | None = None
    expert_rows: UInt32[Array, "N ..."] | None = None  # the counters of the state after the launch


for _type in (DeviceState, StepOutput):
    jax.tree_util.register_dataclass(
        _type, data_fields=[f.name for f in fields(_type)], meta_fields=[]
    )


def kv_dtype(setting: str, activations: DTypeLike, platform: str) -> np.dtype:
    """Return the dtype of pages for a setting of `kv_cache_dtype`.

    On CPU 16-bit keys and values are stored in float32, and 8-bit floats as their bits: XLA on CPU
    scatters into narrow floats by converting the whole cache in every step.

    Args:
        setting: the value of `kv_cache_dtype`.
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


def page_bytes(config: ModelConfig, page_size: int, dtype: DTypeLike) -> int:
    """Return the bytes of one page of KV cache on each device, over all layers, with scales."""
    head = config.head_dim * jnp.dtype(dtype).itemsize
    if dtype == INT8:
        head += SCALE.itemsize
    cells = page_size // config.split.context
    return 2 * config.num_page_layers * cells * local_kv_heads(config) * head


def addressable_pages(pages: int, layer_page_bytes: int, dtype: np.dtype, platform: str) -> int:
    """Return `pages`, or fewer if GPU kernels could not address the arrays of a layer.

    Kernels cannot address arrays of one-byte values with 2 to 4 GiB (see
    `pallas_kernels.implementation`).
    """
    size = pages * layer_page_bytes
    if platform == "cpu" or dtype.itemsize > 1 or not TWO_GIB <= size <= FOUR_GIB:
        return pages
    return (TWO_GIB - 1) // layer_page_bytes


def make_state(
    config: ModelConfig,
    num_pages: int,
    page_size: int,
    num_slots: int,
    dtype: DTypeLike,
    *,
    max_pages: int,
    num_snapshots: int = 0,
) -> DeviceState:
    """Create a device state with zeros in all pages and tables.

    Args:
        config: the configuration of the model.
        num_pages: the pages of the cache, including the null page.
        page_size: tokens per page.
        num_slots: the slots, without the null slot.
        dtype: the dtype of the pages.
        max_pages: the most pages of a slot.
        num_snapshots: the number of states at page borders.
    """
    # A head that is replicated, or whose positions are sharded, counts once per device.
    heads = local_kv_heads(config) * config.split.devices
    cells = (num_pages, heads, page_size // config.split.context)
    shape = (*cells, config.head_dim)
    rows: tuple[int, ...] | None = None
    if config.split.counts_rows and config.experts is not None:
        rows = (config.split.devices, *place_counts(config))

    def layer() -> KVPages:
        pages = jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
        if dtype != INT8:
            return pages
        return *pages, jnp.zeros(cells, SCALE), jnp.zeros(cells, SCALE)

    exact, places = accumulator(jnp.float64 if dtype == jnp.float64 else jnp.float32), num_slots + 1

    def states(layer: int) -> States:
        rows = places + num_snapshots
        return tuple(jnp.zeros((rows, *part.shape), exact) for part in config.states_of(layer))

    layers = range(config.num_hidden_layers)
    return DeviceState(
        kv=[layer() if config.has_pages(index) else () for index in layers],
        states=[states(index) for index in layers],
        page_table=jnp.zeros((num_slots + 1, max_pages), np.int32),
        last_token=jnp.zeros(num_slots + 1, np.int32),
        sampler=make_sampler_state(num_slots, config.vocab_size),
        expert_rows=None if rows is None else jnp.zeros(rows, np.uint32),
    )


def state_specs(config: ModelConfig, dtype: DTypeLike) -> DeviceState:
    """Return the partition specs of the device state.

    Pages and their scales are sharded by head, states by head or channel. Each device has its own
    counters of expert rows. All other arrays are replicated.

    Args:
        config: the configuration of the model.
        dtype: the dtype of the pages. int8 pages have scales.
    """
    kv, whole = PartitionSpec(None, AXIS), PartitionSpec()
    specs: Any = {"page_table": whole, "last_token": whole, "sampler": whole}
    specs["expert_rows"] = PartitionSpec(AXIS)
    arrays: Any = (kv,) * (4 if dtype == INT8 else 2)
    layers = range(config.num_hidden_layers)
    specs["kv"] = [arrays if config.has_pages(index) else () for index in layers]
    specs["states"] = [
        tuple(PartitionSpec(*[None] * (1 + part.divided), AXIS) for part in config.states_of(index))
        for index in layers
    ]
    return DeviceState(**specs)


def release(state: DeviceState | None, error: Exception | None) -> None:
    """Wait for running steps and clear an error's frames, which hold the memory of a state.

    The memory is then free for another state.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    with suppress(Exception):  # another step may fail too
        jax.block_until_ready(state)
