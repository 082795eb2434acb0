"""StartPlan: every decision of a start that precedes its arrays and programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from jaxserve.execution.buckets import (
    LOAD_SLOT,
    PROJECT,
    SCORE,
    SET_ROWS,
    STATE,
    Bucket,
    BucketSet,
    Key,
    Sampler,
    SmallProgram,
    few_sizes,
)
from jaxserve.execution.state import PAGES, STATES, MemoryKind
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory
from jaxserve.start.plan.bucket_plan import buckets_of, needs_logits
from jaxserve.start.plan.cache_kinds import CacheKind, CacheRoom, cache_kinds
from jaxserve.start.plan.memory import SLACK, Sizes, cache_budget, count_pages, room_of
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.weights import read_bytes


@dataclass(frozen=True)
class StartPlan:
    """The plan of a start: settings, shapes, memory and the programs to compile.

    The plan has no array and no JAX device, can be pickled, and is computed without a JAX backend.
    Sizes are in bytes on one device.

    Attributes:
        config: the settings, resolved (see `EngineConfig.resolve`).
        model_config: the model's configuration for `max_model_len`.
        model: the shapes of the placed model.
        dtype: dtype of activations, and of weights that are not quantized.
        kv_dtype: dtype of the pages of KV cache.
        form: the form that matrices are quantized to, now or by an earlier conversion, or None for
            the form of the checkpoint.
        device: description of the device, which need not be in this machine.
        greedy_decode: whether decode steps without a sampler are compiled.
        asked_length: max_model_len as the user set it, or None.
        share: share of the free memory.
        budget: bytes that the engine may allocate.
        temporary_bytes: bytes of the largest launch beside weights and cache.
        memory: kinds of memory of the device state.
        full_pages: pages of the cache if memory is ample. On CPU the cache may have fewer.
        least_pages: pages without which the engine does not start.
    """

    config: EngineConfig
    model_config: ModelConfig
    model: ModelShapes
    dtype: np.dtype
    kv_dtype: np.dtype
    form: str | None
    device: DeviceMemory
    greedy_decode: bool
    asked_length: int | None
    share: float
    budget: int
    temporary_bytes: int
    memory: tuple[MemoryKind, ...]
    full_pages: int
    least_pages: int

    @property
    def platform(self) -> str:
        """Platform of the device: "cpu" or "gpu"."""
        return "gpu" if self.device.limits.is_gpu else "cpu"

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once, the number of slots."""
        assert self.config.max_num_seqs is not None
        return self.config.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Most tokens of a step (max_num_batched_tokens)."""
        assert self.config.max_num_batched_tokens is not None
        return self.config.max_num_batched_tokens

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sequence (max_model_len)."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def block_size(self) -> int:
        """Number of tokens in a block of the KV cache."""
        assert self.config.block_size is not None
        return self.config.block_size

    @property
    def pages(self) -> MemoryKind:
        """The kind of memory of the KV cache, with its number of pages."""
        return next(kind for kind in self.memory if kind.name == PAGES)

    @property
    def num_pages(self) -> int:
        """Number of pages of the KV cache, the null page included."""
        return self.pages.count

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the KV cache on each device, in all layers of a group."""
        return self.pages.bytes_per_unit

    @property
    def page_kinds(self) -> tuple[CacheKind, ...]:
        """The kinds of cache pages, the one with the widest window first."""
        return cache_kinds(self.model_config, self.page_bytes, self.block_size)

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in the KV cache on each device, in all layers."""
        return sum(kind.token_bytes for kind in self.page_kinds)

    @property
    def held(self) -> CacheRoom:
        """The sequences that the pages of the KV cache hold."""
        return room_of(self.config, self.model_config, self.num_pages)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights on each device."""
        return self.model.num_bytes

    @property
    def buckets(self) -> BucketSet:
        """The padded sizes of steps that the settings name, or all candidates."""
        sizes = self.config.decode_sizes, self.config.token_sizes
        return buckets_of(self.config, self.platform, sizes, self.greedy_decode)

    @property
    def names_sizes(self) -> bool:
        """Whether the settings name padded sizes (decode_sizes or token_sizes)."""
        return bool(self.config.decode_sizes or self.config.token_sizes)

    @property
    def samplers(self) -> list[Sampler]:
        """Keys of the samplers that follow launches, smallest first. Empty if launches sample."""
        sizes = few_sizes(self.max_num_seqs)
        return list(map(Sampler, sizes)) if self.buckets.largest.keeps_logits else []

    @property
    def other_programs(self) -> list[Key]:
        """Keys of all programs but launches and the creation of device state, samplers first."""
        keys: list[Key] = [*self.samplers]
        if keys:
            keys.append(SCORE)
        if needs_logits(self.config):
            keys.append(PROJECT)
        masks = [SmallProgram("set allowed", size) for size in few_sizes(self.max_num_seqs)]
        return [*keys, LOAD_SLOT, SET_ROWS, *masks]

    @property
    def programs(self) -> list[Key]:
        """Keys of all programs of a start: launches from the largest, and then the others."""
        return [*sorted(self.buckets, reverse=True), *self.other_programs, STATE]

    def program_name(self, key: Key) -> str:
        """Return the name under which the program of a key is stored in the ProgramStore."""
        if isinstance(key, Bucket):
            sampler = ", sampler apart" if key.keeps_logits else ""
            return f"{key}{sampler}, {self._cache_name}"
        if key == STATE:
            return f"state, {self._cache_name}"
        return f"{key}, {self.buckets.largest}" if key in (SCORE, PROJECT) else str(key)

    @property
    def _cache_name(self) -> str:
        pages = f"{self.num_pages} pages"
        return pages if self.states is None else f"{pages} and {self.states.count} states"

    def with_pages(self, count: int) -> StartPlan:
        """Return a copy of the plan with another number of pages of KV cache."""
        memory = tuple(
            replace(kind, count=count) if kind.name == PAGES else kind for kind in self.memory
        )
        return replace(self, memory=memory)

    @property
    def counts(self) -> dict[str, int]:
        """Number of pages, and of snapshots if layers keep states, on which programs depend."""
        snapshots = self.num_snapshots
        return {"pages": self.num_pages} | ({} if snapshots is None else {"snapshots": snapshots})

    def with_counts(self, counts: Mapping[str, int]) -> StartPlan:
        """Return a copy of the plan with other numbers of pages and snapshots (see `counts`)."""
        plan = self.with_pages(int(counts["pages"]))
        return plan.with_snapshots(int(counts["snapshots"])) if "snapshots" in counts else plan

    def with_length(self, length: int) -> StartPlan:
        """Return a copy of the plan for sequences of at most `length` tokens (max_model_len)."""
        model_config = self.model_config.for_length(length)
        model = self.model
        if model_config != self.model_config:  # which is part of the model's structure
            model = model.for_config(model_config)
        config = replace(self.config, max_model_len=length)
        return replace(self, config=config, model_config=model_config, model=model)

    def with_settings(self, config: EngineConfig) -> StartPlan:
        """Return a copy of the plan with other resolved settings that keep programs and shapes."""
        assert config.max_model_len is not None
        return replace(self, config=config).with_length(config.max_model_len)

    @property
    def estimate(self) -> int:
        """Bytes that the largest launch is expected to need at most, beside weights and cache.

        It is an eighth more than `temporary_bytes`, which is right within a tenth before
        compilation.
        """
        return self.temporary_bytes + self.temporary_bytes // 8

    def settle(self, temporary_bytes: int) -> StartPlan:
        """Return a copy of the plan with the KV cache that fits beside the compiled largest launch.

        If the settings name the size of the cache, or on a CPU, only `temporary_bytes` changes.

        Args:
            temporary_bytes: bytes of the launch beside its arguments and results.
        """
        plan = replace(self, temporary_bytes=temporary_bytes)
        return plan if self.platform == "cpu" else plan.sized()

    def sized(self) -> StartPlan:
        """Return the plan with the cache that fits, or that the settings name.

        If layers keep states, a part of the cache's memory is for the states of prefixes.
        """
        plan = self._with_pages_for()
        if plan.states is None:
            return plan
        plan = self.with_snapshots(0)._with_pages_for()
        return plan.with_snapshots(plan.affordable_snapshots)._with_pages_for()

    @property
    def states(self) -> MemoryKind | None:
        """The states of layers that keep them, or None for a model without states."""
        return next((kind for kind in self.memory if kind.name == STATES), None)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence on each device. 0 for a model without states."""
        return 0 if self.states is None else self.states.bytes_per_unit

    @property
    def state_tokens(self) -> int:
        """Tokens whose cache pages take as many bytes as the states of one sequence, rounded.

        0 for a model without attention, whose pages take no memory.
        """
        return round(self.state_bytes / self.token_bytes) if self.page_bytes else 0

    @property
    def num_snapshots(self) -> int | None:
        """Number of states of prefixes, or None for a model without states."""
        return None if self.states is None else self.states.count - self.max_num_seqs - 1

    @property
    def affordable_snapshots(self) -> int:
        """Number of states of prefixes that `state_cache_bytes` holds.

        The default is a tenth of the memory of cache pages, and at least one snapshot. If pages
        take no memory, the default is the memory of the cache. Without the prefix cache it is 0.
        """
        assert self.states is not None
        if not self.config.enable_prefix_caching:
            return 0
        if self.config.state_cache_bytes is not None:
            size = int(self.config.state_cache_bytes * self.config.memory_share)
            return size // self.state_bytes
        if not self.page_bytes:
            size = cache_budget(self.config, self.room, self.platform == "gpu")
            return max(1, min(size // self.state_bytes, self.num_pages - 1))
        return max(1, self.pages.num_bytes // 10 // self.state_bytes)

    def with_snapshots(self, count: int) -> StartPlan:
        """Return the plan with another number of states of prefixes."""
        total = self.max_num_seqs + 1 + count
        memory = tuple(
            replace(kind, count=total) if kind.name == STATES else kind for kind in self.memory
        )
        return replace(self, memory=memory)

    def _with_pages_for(self) -> StartPlan:
        pages, full, least = count_pages(
            self.config,
            self.model_config,
            self.asked_length,
            self.page_bytes,
            self.kv_dtype,
            self.room,
            self.platform == "gpu",
        )
        return replace(self, full_pages=full, least_pages=least).with_pages(pages)

    @property
    def step_bytes(self) -> int:
        """Bytes of a step's temporaries and of the device state that belongs to no layer."""
        return self.temporary_bytes + sum(k.num_bytes for k in self.memory if not k.layers)

    @property
    def cache_kinds(self) -> list[MemoryKind]:
        """Kinds of memory of the device state that belong to layers, the KV cache last."""
        kinds = [kind for kind in self.memory if kind.layers and kind.name != PAGES]
        return [*kinds, self.pages]

    @property
    def _taken(self) -> int:
        others = sum(kind.num_bytes for kind in self.memory if kind.name != PAGES)
        return self.weight_bytes + self.temporary_bytes + others

    @property
    def room(self) -> int:
        """Bytes of the memory budget that remain for the KV cache."""
        return int(self.budget * (1 - SLACK)) - self._taken

    @property
    def needed(self) -> int:
        """Bytes that a start with the smallest possible KV cache needs."""
        least, sizes = self.least_pages * self.page_bytes, self.config
        has_size = (sizes.state_cache_bytes, sizes.kv_cache_memory_bytes) != (None, None)
        if self.num_snapshots and not self.page_bytes and not has_size:
            least = (1 - self.num_snapshots) * self.state_bytes  # they take the memory that is left
        return int((self._taken + least) / (1 - SLACK))

    @property
    def starts(self) -> bool:
        """Whether the engine starts: whether `needed` fits into the memory budget."""
        return self.needed <= self.budget

    @property
    def is_whole(self) -> bool:
        """Whether the engine starts with a KV cache as large as with ample memory."""
        return self.starts and self.num_pages >= self.full_pages

    def fits(self, free_bytes: int) -> bool:
        """Return whether weights, device state and the largest launch fit into `free_bytes`."""
        total = self._taken + self.pages.num_bytes
        return int(total / (1 - SLACK)) <= free_bytes

    @property
    def sizes(self) -> Sizes:
        """The memory share and the most sequences and tokens of a step."""
        return Sizes(self.share, self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def cache_tokens(self) -> int:
        """Tokens of one long sequence in the KV cache. 0 if the engine does not start."""
        return self.held.tokens if self.starts else 0

    @property
    def longest(self) -> int:
        """Most tokens of one sequence, by max_model_len and the KV cache."""
        return min(self.max_model_len, self.cache_tokens)

    @property
    def sequences(self) -> int:
        """Number of sequences of `longest` tokens that run at once."""
        return min(self.max_num_seqs, self.held.sequences(self.longest)) if self.starts else 0

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a step of one row reads on each device."""
        return read_bytes(self.model, self.model_config, 1)

    @property
    def step_seconds(self) -> float | None:
        """Seconds to read the weights of a step at the full bandwidth, or None if it is unknown."""
        return self.read_bytes / self.device.bandwidth if self.device.bandwidth else None
