"""CacheSize: the pages of KV cache that a start has room for."""

from __future__ import annotations

from dataclasses import replace

from jax.stages import Compiled

from jaxserve.errors import InvalidRequest
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.mesh import local_bytes
from jaxserve.execution.typed_jax import devices
from jaxserve.models import ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import DeviceMemory, started_device
from jaxserve.start.plan.memory_plan import (
    DEFAULT_SHARE,
    SLACK,
    Sizes,
    cache_pages,
    sampler_bytes,
    temporary_bytes,
)
from jaxserve.start.programs.compiler import Compiler
from pallas_kernels.devices import target_device

CACHE_NOTES = "cache"
"""Name of the notes of what compiles for a card that is not there: the pages of its cache."""
_ENOUGH = 0.9


class CacheSize:
    """The size of a cache beside placed weights.

    Args:
        config: resolved.
        model_config: of the model.
        compiler: of its programs.
        page_bytes: of one page, in all layers.
        largest: the bucket whose launch takes the most memory.
        memory: of a card that is not there, in place of that of JAX's device.

    Attributes:
        program: of the largest bucket, if it was compiled for as many pages as `pages` returned.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        compiler: Compiler,
        page_bytes: int,
        largest: Bucket,
        memory: DeviceMemory | None = None,
    ) -> None:
        self._memory = memory
        self.config = config
        self.model_config = model_config
        self.compiler = compiler
        self.page_bytes = page_bytes
        self.program: Compiled | None = None
        self._largest = largest

    @property
    def _platform(self) -> str:
        return devices()[0].platform if self._memory is None else "gpu"

    def pages(self) -> int:
        """Return how many pages the configured memory holds.

        On a GPU that depends on the largest program, which is compiled for a cache of a certain
        size: it is the size that an estimate of its temporaries leaves, unless they take more.

        Raises:
            InvalidRequest: there is no memory for two pages.
        """
        config, platform = self.config, self._platform
        sized = config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes
        pages = self.within(0) if platform == "cpu" or sized else self._beside_largest()
        if pages < 2:
            raise InvalidRequest(
                f"no memory for the KV cache: a page takes {self.page_bytes} bytes; "
                "raise gpu_memory_utilization or kv_cache_memory_bytes",
                "kv_cache_memory_bytes",
            )
        return pages

    def estimated_pages(self) -> int:
        """Return the pages that an estimate of the largest launch leaves room for."""
        return self._compiled_for(self.within(self.room(self._estimate())))

    def _estimate(self) -> int:
        """Return the bytes that the largest launch is not expected to exceed."""
        seqs, tokens = self.config.max_num_seqs, self.config.max_num_batched_tokens
        assert seqs and tokens
        sizes = Sizes(DEFAULT_SHARE, seqs, tokens)
        estimate = temporary_bytes(self.model_config, self.compiler.dtype, sizes, target_device())
        return estimate + estimate // 8  # it is right within a tenth

    def _beside_largest(self) -> int:
        """Compile the largest program; return the pages that it leaves room for."""
        pages = self.estimated_pages()
        program = self.compiler.step(self._largest, max(2, pages))
        needed = temporary_bytes_of(program)
        if pages < 2 or needed > self._estimate():
            left = self._compiled_for(self.within(self.room(needed)))
            if left != pages:
                return left
        self.program = program
        return pages

    def _compiled_for(self, pages: int) -> int:
        """Return the pages that programs were compiled for without the card, if they fit as well.

        A cache that is a tenth smaller is worth less than minutes of compiling, a smaller one more.
        """
        noted = self.compiler.store.notes(CACHE_NOTES)
        made = pages if noted is None else int(noted["pages"])
        return made if _ENOUGH * pages <= made <= pages else pages

    def within(self, room: int) -> int:
        """Return the pages that so many bytes hold, or that the settings name."""
        return cache_pages(
            *(self.config, self.model_config.num_hidden_layers, self.page_bytes),
            *(self.compiler.kv_dtype, room, self._platform),
        )

    def room(self, temporary: int) -> int:
        """Return the bytes of a GPU that weights, sampler and the largest launch leave.

        Args:
            temporary: bytes that the launch takes beside weights and cache.
        """
        own = sum(map(local_bytes, self.compiler.leaves))
        memory = self._memory or started_device(count=self.model_config.split.devices)
        if not memory.is_limit:  # what is free is what the weights have left
            memory = replace(memory, free=memory.free + own, in_use=own)
        budget = memory.budget(self.config.gpu_memory_utilization, DEFAULT_SHARE)
        sampler = sampler_bytes(self.config.max_num_seqs or 1, self.model_config.vocab_size)
        left = min(int(budget * self.config.memory_share) - own, budget - memory.in_use)
        return left - int(budget * SLACK) - temporary - sampler


def temporary_bytes_of(program: Compiled) -> int:
    """Return the bytes that a launch of a program takes beside its arguments and results."""
    analysis = program.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
