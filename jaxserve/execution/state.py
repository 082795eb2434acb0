# pyright: reportUnknownMemberType=false
"""DeviceState: the arrays that stay on the device from step to step."""

from __future__ import annotations

import traceback
from contextlib import suppress
from dataclasses import dataclass, fields
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
from jaxserve.models.paged import KVPages
from jaxserve.models.shards import AXIS, local_kv_heads
from pallas_kernels.arguments import FP8, FP8_BITS, INT8
from pallas_kernels.implementation import FOUR_GIB, TWO_GIB

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, UInt32

SCALE = np.dtype(np.float32)
"""Dtype of the scale that int8 pages have for each token and kv head."""


@dataclass(frozen=True)
class DeviceState:
    """Donated to every step and replaced by its result; there is never a second copy.

    The pages start as zeros, so that no cell ever holds a NaN which no request put there.
    """

    kv: list[KVPages]  # one a layer
    page_table: Int32[Array, "slots_plus_1 M"]  # as far as it was sent (see `page_table`)
    last_token: Int32[Array, " slots_plus_1"]  # the newest token drawn for each slot
    sampler: SamplerState
    # Modulo 2**32, what each device's experts have computed, by layer and place where they have
    # places; None where that is not counted.
    expert_rows: UInt32[Array, "N ..."] | None = None


@dataclass(frozen=True)
class StepOutput:
    """Results of a launch, which the host reads while the next one runs."""

    # Steps: as many as a launch of several may take. NO_TOKEN where logits were not finite or left
    # nothing to draw.
    token_ids: Int32[Array, "*steps R"]
    logprobs: DeviceLogprobs | None  # of what follows each token, for rows that ask; None if greedy
    # Of each row's last token and of all tokens, where a sampler behind the launch needs them.
    logits: Float[Array, "R V"] | None = None
    hidden: Float[Array, "T D"] | None = None
    expert_rows: UInt32[Array, "N ..."] | None = None  # the state's, after the launch


for _type in (DeviceState, StepOutput):
    jax.tree_util.register_dataclass(
        _type, data_fields=[f.name for f in fields(_type)], meta_fields=[]
    )


def kv_dtype(setting: str, activations: DTypeLike, platform: str) -> np.dtype:
    """Return the dtype of pages for a setting of `kv_cache_dtype`.

    On CPU 16-bit keys and values are kept as the same numbers in float32, and 8-bit ones as their
    bits: XLA there scatters into narrow floats by converting the whole cache, in every step.

    Raises:
        InvalidRequest: there is no such cache on this platform.
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
    """Return the bytes of one page of KV cache over all layers, on each device.

    The scales of int8 pages are part of them.
    """
    head = config.head_dim * jnp.dtype(dtype).itemsize
    if dtype == INT8:
        head += SCALE.itemsize
    cells = page_size // config.split.context
    return 2 * config.num_hidden_layers * cells * local_kv_heads(config) * head


def addressable_pages(pages: int, layer_page_bytes: int, dtype: np.dtype, platform: str) -> int:
    """Return pages, or fewer if a layer's arrays would have a size that GPU kernels cannot address.

    Those are arrays of one-byte values of 2 to 4 GiB (see `pallas_kernels.implementation`).
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
) -> DeviceState:
    """Make a cache of zeros for every layer, and tables without entries.

    Args:
        config: of the model.
        num_pages, page_size, dtype: of the cache.
        num_slots: beside the null slot.
        max_pages: most pages of a slot.
    """
    # A head that several devices have is several here, also where each has some positions of it.
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

    return DeviceState(
        kv=[layer() for _ in range(config.num_hidden_layers)],
        page_table=jnp.zeros((num_slots + 1, max_pages), np.int32),
        last_token=jnp.zeros(num_slots + 1, np.int32),
        sampler=make_sampler_state(num_slots, config.vocab_size),
        expert_rows=None if rows is None else jnp.zeros(rows, np.uint32),
    )


def state_specs(layers: int, dtype: DTypeLike) -> DeviceState:
    """Return how the state lies on a mesh.

    Pages are divided by their heads, each device has its count of rows, and the rest lies whole on
    each.

    Args:
        layers: of the model.
        dtype: of the pages; those of int8 have scales, divided as they are.
    """
    kv, whole = PartitionSpec(None, AXIS), PartitionSpec()
    specs: Any = {"page_table": whole, "last_token": whole, "sampler": whole}
    specs["expert_rows"] = PartitionSpec(AXIS)
    arrays: Any = (kv,) * (4 if dtype == INT8 else 2)
    return DeviceState(kv=[arrays] * layers, **specs)


def release(state: DeviceState | None, error: Exception | None) -> None:
    """Make the memory of a state free before another one is made.

    Steps that still run hold it, and so do the frames of the error that ended one.
    """
    if error is not None:
        traceback.clear_frames(error.__traceback__)
    with suppress(Exception):  # of a step that fails too
        jax.block_until_ready(state)
