"""A device without a model: each KV cell holds a digest of the prefix it was computed from.

The cells that a real step would read from the cache are compared, position by position, with the
digests of the sequence's own prefix. If layers keep states, a row's state is such a digest too.
There are no floats and no programs, so thousands of schedules take a minute. A page that is lost,
shared wrongly or reused too early shows at the first read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from jaxserve.execution.batch import StepBatch, pack, unpack
from jaxserve.execution.buckets import Bucket, BucketSet
from jaxserve.execution.page_table import room_for_pages, take_new_pages
from jaxserve.request import Request
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

EMPTY = 0
GARBAGE = 1
NO_PAGE = -1
ALPHABET = (0, 1)


def root_digest(cache_salt: str) -> int:
    """Return the digest of the empty prefix under a salt."""
    return hash((crc32(cache_salt.encode()), 7))


def extend(digest: int, token: int) -> int:
    """Return the digest of a prefix with one more token; garbage remains garbage."""
    return GARBAGE if digest in (EMPTY, GARBAGE) else hash((digest, token))


def draw(seed: int, digest: int, banned: tuple[int, ...]) -> int:
    """Return the next token: a pure function of seed and prefix, over two tokens.

    With two tokens, prefixes of different sequences often meet.
    """
    token = hash((seed, digest, 3)) >> 11 & 1
    return 1 - token if token in banned and 1 - token not in banned else token


@dataclass(frozen=True)
class Expected:
    """A request served alone, by iterating `draw`.

    Attributes:
        tokens: prompt and output.
        digests: int64[len(tokens)], the value that each position's cell must hold.
        stopped: whether a stop token ended it, not its length.
    """

    tokens: list[int]
    digests: np.ndarray
    stopped: bool


def oracle(request: Request) -> Expected:
    """Serve a request alone, without pages, steps or neighbours."""
    prompt = request.prompt_token_ids.tolist()
    tokens, digests, stopped = list(prompt), [], False
    digest = root_digest(request.cache_salt)
    for token in prompt:
        digest = extend(digest, token)
        digests.append(digest)
    while not stopped and len(tokens) < request.max_length:
        early = len(tokens) < len(prompt) + request.sampling.min_tokens
        token = draw(request.seed, digest, request.stop_token_ids if early else ())
        tokens.append(token)
        digest = extend(digest, token)
        digests.append(digest)
        stopped = token in request.stop_token_ids and not early
    return Expected(tokens, np.array(digests, np.int64), stopped)


@dataclass(frozen=True)
class GhostStep:
    """A submitted step: its plan, i32[R] tokens and bool[R] ok, [S, R] for a launch of several."""

    plan: LaunchPlan
    token_ids: np.ndarray
    ok: np.ndarray


class GhostRunner:
    """Executes packed steps in the order of their submission.

    Args:
        slots: the slot table, where the runner looks up whose prefix a row must read.
        buckets: padded shapes.
        num_pages: pages of the ghost cache, the null page included.
    """

    def __init__(self, slots: SlotTable, buckets: BucketSet, num_pages: int) -> None:
        self.slots = slots
        self.buckets = buckets
        self.num_cells = num_pages * slots.page_size
        self.expected: dict[object, Expected] = {}
        self.reset()

    def reset(self, error: Exception | None = None) -> None:
        self._cells = np.full(self.num_cells, EMPTY, np.int64)
        self._last_token = np.full(self.slots.num_slots + 1, NO_TOKEN, np.int32)
        # The pages of every block, of each kind one after the other.
        self._table = np.full((self.slots.num_parts, *self.slots.page_table.shape), NO_PAGE)
        self._table[:, -1] = 0
        places = self.slots.num_slots + 1 + self.slots.num_snapshots
        self._states = np.full(places, EMPTY, np.int64)
        self._poisoned: set[tuple[int, int]] = set()

    def submit(self, plan: LaunchPlan, poison: int | None = None) -> GhostStep:
        """Run a step, or a launch of several; `poison` is a row whose values become NaN from this
        step on, or from one of the launch's."""
        bucket = self.buckets.pick(plan)
        batch = self._pack(plan, bucket)
        assert len(batch.tokens) == bucket.num_tokens and len(batch.slots) == bucket.num_rows
        owners = list(zip(plan.slots.tolist(), plan.generations.tolist(), strict=True))
        _check_padding(batch, len(plan), self.slots.num_slots, bucket.decode_only)
        # A padding row's results are ignored; any result must be harmless.
        padding = plan.slots == self.slots.num_slots
        active = np.ones(len(plan), bool)
        results = []
        for step in range(plan.num_steps):
            if poison is not None and step == poison % plan.num_steps:
                self._poisoned.add(owners[poison])
            poisoned = np.array([owner in self._poisoned for owner in owners])
            if batch.states is not None and step == 0:
                self._check_places(batch, len(plan))
            now = batch if step == 0 else _later(batch, step)
            self._write(now, poisoned, active)
            token_ids = self._read(now, poisoned, active)
            drawn = np.flatnonzero(active)
            self._last_token[batch.sample_slots[drawn]] = token_ids[drawn]
            results.append((token_ids, ~poisoned & ~padding))
            if plan.row_steps is not None:
                assert np.all(step < plan.row_steps[active]), "a row goes on beyond its share"
                active &= ~poisoned & ~_ends(now, token_ids)
        token_ids, ok = map(np.array, zip(*results, strict=True))
        return GhostStep(plan, *((token_ids, ok) if plan.num_steps > 1 else results[0]))

    def _pack(self, plan: LaunchPlan, bucket: Bucket) -> StepBatch:
        """Pack a plan, and put its new pages into the page table."""
        room = room_for_pages(bucket, self.slots.page_size)
        new, whole = take_new_pages(plan, self.slots, room)
        for owners, rows in whole:
            used = owners <= self.slots.num_slots
            self._table[:, owners[used]] = _by_part(rows[used], self.slots)
        words = pack(plan, self.slots, bucket, new)
        keeps = self.slots.keeps_states
        batch = unpack(words, bucket.num_tokens, bucket.num_rows, keeps, self.slots.num_parts)
        used = batch.page_places < self.slots.page_table.size
        flat = self._table.reshape(len(self._table), -1)
        flat[:, batch.page_places[used]] = np.atleast_2d(batch.page_ids)[:, used]
        assert not self._table[:, -1].any(), "the null slot got a page"
        return batch

    def _cells_of(self, batch: StepBatch, row: int, positions: np.ndarray, part=0) -> np.ndarray:
        """Return the cells of a row's positions, int32[len(positions)], through its page table."""
        size = self.slots.page_size
        pages = self._table[part, batch.slots[row], positions // size]
        null = batch.slots[row] == self.slots.num_slots
        assert np.all((pages == 0) == null), "a real row uses the null page, or a null row another"
        return pages * size + positions % size

    def _oldest(self, first: int) -> list[int]:
        """Return the oldest position that a token at `first` reads, for each part of a block."""
        oldest = []
        for kind in self.slots.kinds:
            position = 0 if kind.window is None else max(0, first - kind.window + 1)
            oldest += [position] * kind.num_pages
        return oldest

    def _write(self, batch: StepBatch, poisoned: np.ndarray, active: np.ndarray) -> None:
        """Compute and store all tokens of all rows, which see the cache as it was before."""
        writes: dict[int, int] = {}
        states: dict[int, int] = {}
        for row in np.flatnonzero(active).tolist():
            first, last = int(batch.query_start[row]), int(batch.query_start[row + 1])
            slot, kv_len = int(batch.slots[row]), int(batch.kv_len[row])
            positions = batch.positions[first:last]
            assert last > first, "a row without tokens"
            assert np.array_equal(positions, np.arange(kv_len - last + first, kv_len))
            assert np.all(batch.row_of_token[first:last] == row)
            parts = range(self.slots.num_parts)
            cells = [self._cells_of(batch, row, positions, part) for part in parts]
            if slot == self.slots.num_slots:
                continue
            digest = self._digest_before(batch, row, int(positions[0]))
            if batch.states is not None:
                state = self._state_before(batch, row, digest)
                known = len(self.expected[self.slots.sequences[slot]].digests)
                # A row whose last token the host does not know yet goes on from another state.
                if not poisoned[row] and positions[0] < known:
                    assert state == digest, f"slot {slot} has another prefix's state"
                digest = state
            if poisoned[row]:
                digest = GARBAGE
            tokens = batch.tokens[first:last]
            tokens = np.where(tokens == NO_TOKEN, self._last_token[slot], tokens)
            assert np.isin(tokens, ALPHABET).all(), "a token from nowhere"
            before = len(writes)
            for column, token in zip(np.transpose(cells).tolist(), tokens.tolist(), strict=True):
                digest = extend(digest, token)
                for cell in column:
                    assert cell not in writes, "two tokens of one step in one cell"
                    writes[cell] = digest
                position = int(positions[0]) + (len(writes) - before) // len(column)
                if batch.states is not None and position == int(batch.states[1, row]):
                    states[int(batch.states[2, row])] = digest
            if batch.states is not None:
                states[slot] = digest
        self._states[list(states.keys())] = list(states.values())
        self._cells[list(writes.keys())] = list(writes.values())

    def _digest_before(self, batch: StepBatch, row: int, position: int) -> int:
        if position == 0:
            sequence = self.slots.sequences[int(batch.slots[row])]
            return root_digest(sequence.request.cache_salt)
        return int(self._cells[self._cells_of(batch, row, np.array([position - 1]))[0]])

    def _state_before(self, batch: StepBatch, row: int, digest: int) -> int:
        """Return the state that a row starts from. At position 0 it is the empty prefix."""
        if batch.positions[batch.query_start[row]] == 0:
            return digest
        restored = int(batch.states[0, row])
        return int(self._states[restored if restored >= 0 else batch.slots[row]])

    def _check_places(self, batch: StepBatch, num_rows: int) -> None:
        """Check that a launch writes no snapshot twice, and none that it reads."""
        restored, border, saved = batch.states
        assert np.all(restored[num_rows:] == -1) and not border[num_rows:].any()
        read, written = restored[restored >= 0], saved[border > 0]
        first = self.slots.num_slots + 1
        assert np.all(read >= first) and np.all(written >= first), "a slot's state as a snapshot"
        assert len(np.unique(written)) == len(written), "a snapshot is written twice"
        assert not np.isin(written, read).any(), "a launch writes a snapshot that it reads"

    def _read(self, batch: StepBatch, poisoned: np.ndarray, active: np.ndarray) -> np.ndarray:
        """Check every position that the rows attend to, and return the drawn tokens, int32[R]."""
        token_ids = np.zeros(len(poisoned), np.int32)
        for row in np.flatnonzero(active).tolist():
            slot, kv_len = int(batch.slots[row]), int(batch.kv_len[row])
            if slot == self.slots.num_slots or poisoned[row]:
                continue
            expected = self.expected[self.slots.sequences[slot]]
            # The first of its queries sees the oldest position that the row reads.
            first = kv_len - int(batch.query_start[row + 1] - batch.query_start[row])
            assert kv_len < self.slots.stop_length[slot], "computed what only a next token needs"
            # After a stop token, unknown as yet to the host, the results are not read. A launch
            # that it ended within has not even computed the stop token.
            known = len(expected.digests)
            length = kv_len if kv_len <= known else known - 1
            for part, oldest in enumerate(self._oldest(first)):
                found = self._cells[self._cells_of(batch, row, np.arange(oldest, kv_len), part)]
                prefix = expected.digests[oldest:length]
                assert np.array_equal(found[: max(0, length - oldest)], prefix), (
                    f"slot {slot} reads what is not its prefix: {found} for {prefix}"
                )
            early = kv_len < batch.min_length[row]
            stops = tuple(batch.stop_token_ids[row].tolist()) if early else ()
            seed = int(batch.seed[row, 0]) << 32 | int(batch.seed[row, 1])
            token_ids[row] = draw(seed, int(found[-1]), stops)
        return token_ids


def _by_part(rows: np.ndarray, slots: SlotTable) -> np.ndarray:
    """Return rows of the device's page table by the parts of a block, [parts, rows, M]."""
    first, parts = 0, []
    for kind in slots.kinds:
        for _ in range(kind.groups):
            last = first + slots.max_pages * kind.splits
            columns = rows[:, first:last].reshape(len(rows), slots.max_pages, kind.splits)
            parts += [columns[..., split] for split in range(kind.splits)]
            first = last
    assert first == rows.shape[1]
    return np.array(parts)


def _later(batch: StepBatch, steps: int) -> StepBatch:
    """Return the batch of a later step in a launch; the step before has drawn its input tokens."""
    none = np.full_like(batch.slots, -1)
    return replace(
        batch,
        tokens=np.full_like(batch.tokens, NO_TOKEN),
        positions=batch.positions + steps,
        kv_len=batch.kv_len + steps,
        states=None if batch.states is None else np.vstack([none, batch.states[1:]]),
    )


def _ends(batch: StepBatch, token_ids: np.ndarray) -> np.ndarray:
    """Return bool[R]: whether the token drawn is the row's last."""
    rows = slice(len(token_ids))
    is_stop = (token_ids[:, None] == batch.stop_token_ids[rows]).any(axis=1)
    is_stop &= batch.kv_len[rows] >= batch.min_length[rows]
    return is_stop | (batch.kv_len[rows] + 1 >= batch.stop_length[rows])


def _check_padding(batch: StepBatch, num_rows: int, null_slot: int, decode_only: bool) -> None:
    """Check that rows past the plan's rows have no pages, read no cell and keep no token."""
    num_tokens = int(batch.query_start[num_rows])
    assert np.all(batch.query_start[num_rows:] == num_tokens)
    assert np.all(batch.slots[num_rows:] == null_slot)
    assert np.all(batch.sample_slots[num_rows:] == null_slot)
    assert np.all(batch.kv_len[num_rows:] == 0)
    assert np.array_equal(batch.sample_index[:num_rows], batch.query_start[1 : num_rows + 1] - 1)
    if decode_only:
        assert np.array_equal(batch.query_start[:num_rows], np.arange(num_rows))
