"""Changes of the prefix cache in the form of vLLM's KV events."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b

import msgspec
import numpy as np

from jaxserve.scheduling.page_index import Change, RemovedPages, StoredPages

# vLLM's name for the memory of any device.
MEDIUM = "GPU"


class KVCacheEvent(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Base class of vLLM's KV events, each of which describes a change of the prefix cache."""


class BlockStored(KVCacheEvent):
    """KV event: consecutive pages (blocks) of one prefix were added to the prefix cache."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(KVCacheEvent):
    """KV event: the pages with these hashes were removed from the prefix cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent):
    """KV event: all pages were removed from the prefix cache."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The payload of one message: KV events, the time of sending and the rank of the engine."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


def block_hashes(keys: np.ndarray) -> list[int]:
    """Return public 64-bit digests of page keys as a list of integers.

    Page keys themselves are not published, because they would reveal the secret from which they are
    computed.

    Args:
        keys: uint64[n, WORDS], the keys of n pages.
    """
    data = keys.astype("<u8").tobytes()
    size = keys.shape[1] * 8
    return [
        int.from_bytes(blake2b(data[i : i + size], digest_size=8).digest(), "big")
        for i in range(0, len(data), size)
    ]


def events_of(change: Change, block_size: int, window: int | None) -> Iterator[Event]:
    """Yield the KV events of one change of the prefix cache.

    Stored pages give a BlockStored for each run of consecutive pages of a prefix. Removed pages
    give one BlockRemoved, and a cleared cache gives AllBlocksCleared.

    Args:
        block_size: number of tokens of a page.
        window: the attention window if all layers have the same, otherwise None.
    """
    if isinstance(change, StoredPages):
        kind = "full_attention" if window is None else "sliding_window"
        hashes, parents = block_hashes(change.keys), block_hashes(change.parents)
        salts = iter(change.salts)
        extra = [
            (salt,) if nth == 0 and (salt := next(salts)) else None for nth in change.nth.tolist()
        ]
        follows = (np.diff(change.slots) == 0) & (np.diff(change.nth) == 1)
        ends = [*((~follows).nonzero()[0] + 1).tolist(), len(hashes)]
        for first, end in itertools.pairwise([0, *ends]):
            yield BlockStored(
                block_hashes=hashes[first:end],
                parent_block_hash=parents[first] if change.nth[first] else None,
                token_ids=change.tokens[first:end].ravel().tolist(),
                block_size=block_size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=None,
                extra_keys=extra[first:end],
                group_idx=0,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
    elif isinstance(change, RemovedPages):
        yield BlockRemoved(block_hashes(change.keys), MEDIUM, group_idx=0)
    else:
        yield AllBlocksCleared()


def batch_of(changes: Iterable[Change], block_size: int, window: int | None) -> bytes:
    """Return the KV events of a list of cache changes as one message payload in msgpack."""
    events = [event for change in changes for event in events_of(change, block_size, window)]
    return msgspec.msgpack.encode(KVEventBatch(time.time(), events, 0))
