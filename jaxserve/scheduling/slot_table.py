"""SlotTable: one row per running sequence, kept as columns."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxserve.request import MAX_STOP_TOKEN_IDS, SamplerFeature
from jaxserve.scheduling.page_keys import LANES, WORDS
from jaxserve.scheduling.page_kinds import ONE_KIND, PoolKind
from jaxserve.scheduling.page_pool import NULL_PAGE
from jaxserve.scheduling.row_settings import WIDTH, Settings, put_settings
from jaxserve.scheduling.sequence import NO_SLOT, Sequence

if TYPE_CHECKING:
    from jaxserve.scheduling.page_pool import PagePool
    from jaxserve.scheduling.waiting import WaitingQueue

NO_TOKEN = -1
NO_PENALTIES = (1.0, 0.0, 0.0)
_NO_STOPS = (NO_TOKEN,) * MAX_STOP_TOKEN_IDS
# Plain integers, because an operation on an IntFlag takes a microsecond.
_EDITS, _PROMPT_LOGPROBS = int(SamplerFeature.EDITS), int(SamplerFeature.PROMPT_LOGPROBS)
_LOGPROBS, _LOGITS = int(SamplerFeature.LOGPROBS), int(SamplerFeature.LOGITS)
_ALTERNATIVES = int(SamplerFeature.ALTERNATIVES)
_PROMPT_ALTERNATIVES = int(SamplerFeature.PROMPT_ALTERNATIVES)


class SlotTable:
    """Pages, tokens, counters and sampling settings of the running sequences.

    Every column is a NumPy array with one entry per slot, so a step over all running sequences
    takes a few array operations, independent of their number. Slot `num_slots` is the null slot,
    the target of padding.

    Columns (i32 unless another dtype is given):
        page_tables [kinds, slots + 1, M], num_pages: the blocks of each kind of pages, in the order
            of their tokens (see `PagePool`). `page_table` is the part of the first kind.
        num_sent: the number of blocks of each kind that the device's page table contains.
        first_pages [kinds, slots + 1]: the number of blocks before the first one that is still
            held. Their entries in page_tables are the null page.
        tokens [slots + 1, max_model_len]: known token ids.
        num_known: tokens whose ids the host knows.
        length: num_known plus the tokens that steps in flight will sample.
        num_computed: tokens whose KV is in the cache after all submitted steps have run.
        num_committed: computed tokens of steps whose results the host has read.
        num_published: full pages that were added to the prefix cache.
        num_windowed: the same for the kinds of pages after the first.
        page_keys [u64, slots + 1, M, WORDS], num_keys: the computed keys of full pages.
        key_state [u64 x 4]: the hash state after the last key (see PageKeys).
        generation [i64]: a number that changes when the slot gets another sequence.
        settings: the settings of each row. The fields of `Settings` are attributes here too.
        num_logprobs: alternatives per sampled token, -1 for no log-probabilities.
        num_prompt: tokens of the prompt.
        is_guided [bool]: whether the row's next step needs the newest token on the host, because
            a grammar limits the next token.
        needs_mask [bool]: whether the token mask differs from the device's copy.
        needs_load [bool]: whether the request's sampler state is missing on the device.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        page_size: int,
        kinds: SequenceOf[PoolKind] = ONE_KIND,
        keeps_states: bool = False,
    ) -> None:
        self.keeps_states, self.num_snapshots = keeps_states, 0  # snapshots: states of prefixes
        self.num_slots = num_slots
        self.kinds = tuple(kinds)
        # Pages of a block of each kind together. If there are several, `block_pages` is the pool's.
        self.num_parts = sum(kind.num_pages for kind in kinds)
        self.block_pages = np.zeros((0, 1), np.int32)
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.max_pages = -(-max_model_len // page_size)
        rows = num_slots + 1

        def column(*shape: int, dtype: npt.DTypeLike = np.int32) -> np.ndarray:
            return np.zeros((rows, *shape), dtype)

        self.page_tables = np.zeros((len(self.kinds), rows, self.max_pages), np.int32)
        self.page_table = self.page_tables[0]
        self.tokens = column(max_model_len)
        self._flat_tokens = self.tokens.reshape(-1)
        self.num_pages, self.num_sent = column(), column()
        self.first_pages = np.zeros((len(self.kinds), rows), np.int32)
        self.num_known, self.length = column(), column()
        self.num_computed, self.num_committed = column(), column()
        self.num_published, self.num_windowed = column(), column()
        self.page_keys = column(self.max_pages, WORDS, dtype=np.uint64)
        self.num_keys = column()
        self.key_state = column(LANES, dtype=np.uint64)
        self.generation = column(dtype=np.int64)
        self.settings = words = column(WIDTH)
        self._settings_words = words.data
        views = Settings[np.ndarray].of(lambda part, dtype: words[:, part].view(dtype))
        self.stop_length, self.min_length = views.stop_length, views.min_length
        self.temperature, self.top_p, self.min_p = views.temperature, views.top_p, views.min_p
        self.top_k, self.seed, self.features = views.top_k, views.seed, views.features
        self.penalties, self.stop_token_ids = views.penalties, views.stop_token_ids
        self.stop_token_ids[:] = NO_TOKEN
        # Columns of stop_token_ids that have been used so far: usually few, and the only ones read.
        self.max_stops = 0
        self.top_p[:] = 1.0
        self.penalties[:] = NO_PENALTIES
        self.num_logprobs = column()
        self.num_prompt = column()
        self.is_guided = column(dtype=np.bool_)
        self.num_guided = 0
        # Whether a request so far needed log-probabilities of its prompt, which is rare.
        self.has_prompt_logprobs = False
        # Whether the host computes all log-probabilities of tokens drawn.
        self.scores_on_host = False
        self.needs_mask, self.needs_load = column(dtype=np.bool_), column(dtype=np.bool_)
        # None marks a free slot. Only slots of running sequences are read.
        self.sequences: Any = np.full(rows, None, object)
        self._free = list(range(num_slots - 1, -1, -1))
        self._generations = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, sequence: Sequence) -> int:
        """Assign a free slot to a waiting sequence, copy its tokens and settings, return the slot.

        The slot has no pages yet.
        """
        slot = self._free.pop()
        self._generations += 1
        self.generation[slot] = self._generations
        self.sequences[slot] = sequence
        sequence.slot = slot
        num_known = len(sequence.token_ids)
        self.tokens[slot, :num_known] = sequence.token_ids
        self.num_known[slot] = num_known
        self.num_pages[slot] = self.first_pages[:, slot] = self.num_sent[slot] = 0
        self.length[slot] = num_known
        self.num_computed[slot] = 0
        self.num_committed[slot] = 0
        self.num_published[slot] = self.num_windowed[slot] = 0
        prefix, sequence.prefix_keys = sequence.prefix_keys, None
        self.num_keys[slot] = 0
        if prefix is not None:
            self.num_keys[slot] = len(prefix.keys)
            self.page_keys[slot, : len(prefix.keys)] = prefix.keys
            self.key_state[slot] = prefix.state
        sampling = sequence.request.sampling
        self.num_prompt[slot] = sequence.num_prompt
        features = self._put_settings(slot, sequence)
        self.num_logprobs[slot] = sampling.logprobs if features & _LOGPROBS else -1
        self.needs_load[slot] = sampling.features & _EDITS != 0
        self.needs_mask[slot] = False
        self.is_guided[slot] = False
        if sequence.constraint is not None:
            self.guide(slot)
        return slot

    def _put_settings(self, slot: int, sequence: Sequence) -> int:
        """Write the sampling settings and stop tokens of a slot, and return `SamplerFeature` flags.

        The flags are those that the step on the device needs: the request's flags, without
        log-probabilities that the host computes, and with prompt log-probabilities that are still
        due. `max_stops` and `has_prompt_logprobs` are updated.
        """
        request = sequence.request
        sampling, stops = request.sampling, request.stop_token_ids
        features = sampling.features
        if self.scores_on_host and features & _LOGPROBS:
            features = features & ~(_LOGPROBS | _ALTERNATIVES) | _LOGITS
        prompt = sequence.prompt_logprobs
        if prompt is not None and not prompt.is_complete:
            has_alternatives = prompt.width > 0 and not prompt.by_host
            features |= _PROMPT_LOGPROBS | (_PROMPT_ALTERNATIVES if has_alternatives else 0)
            self.has_prompt_logprobs = True
        self.max_stops = max(self.max_stops, len(stops))
        put_settings(
            self._settings_words,
            slot,
            request.max_length,
            # 0 without min_tokens: a chunk shorter than its prompt samples no stop token.
            sequence.num_prompt + sampling.min_tokens if sampling.min_tokens else 0,
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.top_k,
            sequence.seed >> 32,
            sequence.seed & 0xFFFFFFFF,
            sampling.repetition_penalty,
            sampling.frequency_penalty,
            sampling.presence_penalty,
            features,
        )
        # Most requests have few. The columns beyond max_stops contain NO_TOKEN already.
        if used := self.max_stops:
            self.stop_token_ids[slot, :used] = (*stops, *_NO_STOPS[len(stops) : used])
        return features

    def put_tokens(self, slots: np.ndarray, where: np.ndarray, tokens: np.ndarray) -> None:
        """Write tokens[i] to position where[i] of the known token ids of slots[i]."""
        self._flat_tokens[slots * self.max_model_len + where] = tokens

    def guide(self, slot: int) -> None:
        """Update `is_guided` of a slot, and the count `num_guided`, from its grammar constraint."""
        constraint = self.sequences[slot].constraint
        is_guided = constraint is not None and constraint.is_guided
        self.num_guided += int(is_guided) - int(self.is_guided[slot])
        self.is_guided[slot] = is_guided

    def advance(self, sequence: Sequence, token: int) -> bool:
        """Advance the grammar constraint of a sequence, which must have one, by its newest token.

        If the sequence still has a slot, the slot is marked for a new token mask if the allowed
        tokens changed, and `is_guided` is updated. The result is whether the constrained text is
        complete.

        Raises:
            GrammarError: see `text.grammars.Constraint.advance`.
        """
        constraint, slot = sequence.constraint, sequence.slot
        words = constraint.words
        is_complete = constraint.advance(token)
        if slot != NO_SLOT:
            self.needs_mask[slot] |= constraint.words is not words
            self.guide(slot)
        return is_complete

    def wants_logprob(self, slots: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Return bool[n]: whether slots[i] needs the log-probability of its token at where[i] + 1.

        It is True for tokens of a prompt whose log-probabilities are requested and incomplete.
        """
        is_requested = self.features[slots] & _PROMPT_LOGPROBS != 0
        return is_requested & (where + 1 < self.num_prompt[slots])

    def pages(self, slot: int, kind: int = 0) -> np.ndarray:
        """Return a view of the blocks of a kind that a slot holds, in the order of its tokens."""
        return self.page_tables[kind, slot, self.first_pages[kind, slot] : self.num_pages[slot]]

    def all_pages(self, slot: int) -> np.ndarray:
        """Return the blocks of all kinds that a slot holds, in the order of its tokens."""
        if len(self.kinds) == 1:
            return self.pages(slot)
        blocks = self.page_tables[:, slot, : self.num_pages[slot]].T.ravel()
        return blocks[blocks != NULL_PAGE]

    def take_unsent(self, slots: np.ndarray) -> np.ndarray:
        """Return the positions in the flat page table whose entries the device does not have yet.

        Only the given slots are read, and their entries are marked as sent.
        """
        ends, sent = self.num_pages[slots], self.num_sent[slots]
        rows = (ends > sent).nonzero()[0]
        if not len(rows):
            return rows
        self.num_sent[slots] = ends
        owners, start = slots[rows], slots[rows] * self.max_pages
        return flat_ranges(owners, start + sent[rows], start + ends[rows])[1]

    def pool_pages(self, places: np.ndarray) -> np.ndarray:
        """Return the pages of the pool at positions of the flat page table, of all kinds.

        The result is [n], or [parts, n] if a block of each kind together has several pages.
        """
        if self.num_parts == 1:
            return self.page_table.reshape(-1).take(places)
        blocks = self.page_tables.reshape(len(self.kinds), -1).take(places, axis=1)
        if self.num_parts == len(self.kinds):
            return blocks
        parts = [
            self.block_pages[blocks[number], : kind.num_pages].T
            for number, kind in enumerate(self.kinds)
        ]
        return np.concatenate(parts)

    @property
    def num_columns(self) -> int:
        """Number of columns of the device's page table: the pages of all blocks of a sequence."""
        return self.max_pages * self.num_parts

    def device_rows(self, slots: np.ndarray) -> np.ndarray:
        """Return rows of the device's page table, int32[n, num_columns].

        A row has the pages of each group of layers of each kind, in the order of the tokens.
        """
        if self.num_parts == 1:
            return self.page_table[slots]
        columns: list[np.ndarray] = []
        for number, kind in enumerate(self.kinds):
            pages = self.block_pages[self.page_tables[number, slots], : kind.num_pages]
            groups = pages.reshape(*pages.shape[:2], kind.groups, kind.splits)
            columns.append(groups.swapaxes(1, 2).reshape(len(slots), -1))
        return np.concatenate(columns, axis=1)

    def drop_pages(
        self, slots: np.ndarray, last: np.ndarray, kind: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Remove the blocks of a kind before index last[i] from slots[i].

        Returns:
            The blocks, which the caller releases to the pool, and for each its slot and its index.
        """
        owner, nth = flat_ranges(slots, self.first_pages[kind, slots], last)
        blocks = self.page_tables[kind, owner, nth]
        self.page_tables[kind, owner, nth] = NULL_PAGE
        self.first_pages[kind, slots] = last
        return blocks.astype(np.intp), owner, nth

    def put_pages(self, slot: int, kind: int, first: int, pages: np.ndarray) -> None:
        """Make `pages` the blocks of a kind that a slot without blocks holds.

        Args:
            slot: the slot.
            kind: the kind.
            first: number of blocks of the sequence before these, which are outside the window.
            pages: the blocks. Every kind must end with the same block of the sequence.
        """
        end = first + len(pages)
        self.page_tables[kind, slot, :first] = NULL_PAGE
        self.page_tables[kind, slot, first:end] = pages
        self.first_pages[kind, slot], self.num_pages[slot] = first, end

    def release(self, slots: list[int]) -> list[np.ndarray]:
        """Free slots, and store the known tokens of their sequences in `Sequence.token_ids`.

        The result has for each slot its blocks of all kinds, which the caller releases to the pool.
        """
        ending = np.array(slots, np.intp)
        pages: list[np.ndarray] = []
        for slot, num_known in zip(slots, self.num_known[ending].tolist(), strict=True):
            sequence = self.sequences[slot]
            assert sequence is not None, "release of an empty slot"
            sequence.token_ids = self.tokens[slot, :num_known].copy()
            sequence.slot = NO_SLOT
            pages.append(self.all_pages(slot))
        if self.num_guided:
            self.num_guided -= int(np.count_nonzero(self.is_guided[ending]))
        self.sequences[ending] = None
        self.num_pages[ending] = 0
        self.generation[ending] = 0
        self._free.extend(slots)
        return pages

    def held(self, num_pages: int) -> np.ndarray:
        """Return int32[num_pages]: for each block the number of slots that hold it."""
        counts = np.zeros(num_pages, np.int32)
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                np.add.at(counts, self.all_pages(slot), 1)
        return counts


def flat_ranges(
    slots: np.ndarray, first: np.ndarray, last: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (slots[i], n) with first[i] <= n < last[i], in order of i, as two arrays."""
    counts = last - first
    if not np.count_nonzero(counts - 1):  # usual for decodes, and faster
        return slots, first
    owner = slots.repeat(counts)
    return owner, np.arange(len(owner)) + (last - counts.cumsum()).repeat(counts)


def check_invariants(
    pool: PagePool, table: SlotTable, waiting: WaitingQueue, running: np.ndarray
) -> None:
    """Check all invariants of a scheduler's pages, slots and counters between two steps.

    Args:
        pool: the page pool.
        table: the slot table.
        waiting: the waiting queue.
        running: the slots of running sequences, in rank order.

    Raises:
        AssertionError: an invariant is broken. The message names it.
    """
    pool.check(table.held(pool.num_pages))
    slots = running.tolist()
    assert len(set(slots)) == len(slots), "a slot runs twice"
    taken = [i for i, sequence in enumerate(table.sequences) if sequence is not None]
    assert sorted(slots) == taken, "slots held differ from slots running"
    assert table.num_free + len(taken) == table.num_slots, "slots were lost"
    ranks = [waiting.rank(table.sequences[slot]) for slot in slots]
    assert ranks == sorted(ranks), "running sequences are out of order"
    length = table.length[running]
    assert np.all(table.num_known[running] <= length), "a token was drawn that no step had to draw"
    assert np.all(table.num_computed[running] <= length), "computed beyond the last token"
    assert np.all(length <= table.stop_length[running]), "longer than max_length"
    assert np.all(table.num_computed[running] <= table.num_pages[running] * pool.page_size), (
        "tokens computed without a page"
    )
    for slot in taken:
        sequence = table.sequences[slot]
        assert sequence is not None and sequence.slot == slot, "slot and sequence disagree"
        assert sequence.finish_reason is None, "a finished sequence holds a slot"
        pages = table.all_pages(slot)
        assert len(np.unique(pages)) == len(pages), "a page stands twice in one table"
    for sequence in waiting:
        assert sequence.slot == NO_SLOT, "a waiting sequence holds a slot"
    if not slots and not len(waiting):
        assert pool.num_free == pool.num_usable, "idle, and pages are held"
