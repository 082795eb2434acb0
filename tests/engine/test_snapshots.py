"""States on the device equal those of a prompt alone: of snapshots, and of ended sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.execution.state import STATES
from jaxserve.request import SamplingParams
from tests.equivalence import LARGEST, MOST_STEPS, Bench, fields_of_case
from tests.support.letters import VOCAB

PAGE, SHARED = 4, 21
# Requests as the number of tokens that a prompt shares, its length, and the length of its answer.
# The second wave starts from snapshots of the first, in full buckets and in launches of decodes.
WAVES = (
    ((0, 3, 9), (21, 37, 2), (8, 18, 13), (21, 21, 4), (0, 18, 1)),
    ((21, 21, 3), (21, 26, 14), (8, 12, 11), (21, 31, 2), (21, 40, 9), (0, 1, 5), (21, 21, 8)),
)

States = list[np.ndarray]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(fields_of_case("lfm2_bias_wide"), (PAGE,), dtype="float32", sizes=LARGEST)


class Follower:
    """Runs an engine's launches one by one, and reads states from the device in between."""

    def __init__(self, bench: Bench, **settings: Any) -> None:
        loaded = bench.loaded[PAGE]
        self.engine = Engine(replace(loaded, config=replace(loaded.config, **settings)))
        self.counts: Counter[str] = Counter()
        self._arrivals = 0

    def serve(
        self, prompts: Iterable[list[int]], lengths: Iterable[int]
    ) -> list[tuple[np.ndarray, States]]:
        """Serve requests to their end.

        Returns:
            For each sequence all its tokens, and its states at the end, in the order of ends.
        """
        engine, ended = self.engine, []
        for prompt, length in zip(prompts, lengths, strict=True):
            self._arrivals += 1
            sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
            request = engine.requests.make(prompt, sampling, request_id=str(self._arrivals))
            engine.add(request, lambda _: None)
        scheduler, slots = engine.scheduler, engine.slots
        while (plan := scheduler.schedule(MOST_STEPS)) is not None:
            places = {slots.sequences[slot]: int(slot) for slot in plan.slots}
            step = engine.runner.submit(plan, slots)
            tokens, ok, _ = engine.runner.read(step)
            self._count(plan)
            result = scheduler.commit(plan, tokens, ok)
            scheduler.check()
            ended += [(one.token_ids, self.states(places[one])) for one in result.finished]
        return ended

    def _count(self, plan: Any) -> None:
        if plan.states is None:
            return
        kind = "decodes" if plan.num_steps > 1 else "mixed"
        restored, border, _ = plan.states
        self.counts[f"{kind}, restored"] += np.count_nonzero(restored >= 0)
        self.counts[f"{kind}, saved"] += np.count_nonzero(border > 0)
        if plan.num_steps > 1:
            self.counts["shorter rows"] += np.count_nonzero(plan.row_steps < plan.num_steps)

    def states(self, place: int) -> States:
        """Return the states at a place, in the order of the layers that have some."""
        state = self.engine.runner._state
        assert state is not None
        return [np.asarray(leaf[place]) for leaf in jax.tree.leaves(state.others[STATES])]

    def snapshots(self, sequences: Iterable[np.ndarray]) -> list[tuple[np.ndarray, States]]:
        """Return the prefix and the states of each snapshot of the given sequences' pages."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        assert scheduler.states is not None
        page_of, found = scheduler.states.snapshots._page_of, []
        for tokens in sequences:
            pages = pool.index.find(scheduler.publisher.page_keys.prefix("", tokens).keys)
            for snapshot, page in enumerate(page_of):
                for nth in np.flatnonzero((pages == page) & (page > 0)):
                    place = self.engine.slots.num_slots + 1 + snapshot
                    found.append((tokens[: (nth + 1) * PAGE], self.states(place)))
        return found


@pytest.mark.parametrize("threshold", [0, 3])
def test_states_are_those_of_the_tokens_alone(bench: Bench, threshold: int) -> None:
    rng = np.random.default_rng(threshold)
    shared = rng.integers(0, VOCAB, SHARED).tolist()
    busy = Follower(bench, max_num_batched_tokens=17, long_prefill_token_threshold=threshold)
    alone = Follower(bench, enable_prefix_caching=False)
    for wave in WAVES:
        prompts = [
            [*shared[:count], *rng.integers(0, VOCAB, length - count).tolist()]
            for count, length, _ in wave
        ]
        ended = busy.serve(prompts, [answer for *_, answer in wave])
        assert len(ended) == len(wave)
        # The last token of an answer is not computed.
        computed = [(tokens[:-1], states) for tokens, states in ended]
        for tokens, states in [*computed, *busy.snapshots(tokens for tokens, _ in ended)]:
            [(_, expected)] = alone.serve([tokens.tolist()], [1])
            for part, want in zip(states, expected, strict=True):
                np.testing.assert_array_equal(part, want, err_msg=f"after {len(tokens)} tokens")
    kinds = {"mixed, restored", "mixed, saved", "decodes, saved", "shorter rows"}
    assert all(busy.counts[kind] for kind in kinds), busy.counts
