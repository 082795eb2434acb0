"""Random schedules of the real scheduler over a ghost device: a Hypothesis state machine.

Every rule may come at any moment, with one step in flight as in the engine. Every position that
a step reads is compared with the sequence's own prefix (see ghost_runner), every sequence that
ends with the same request served alone, and after each rule every invariant is verified, and
that a subscriber of the prefix cache's events knows all that it holds.

The short form runs with the other tests. The long form, with fresh random examples:

    PYTHONPATH=. python tests/scheduling/scheduler_machine.py --examples 10000
"""

from __future__ import annotations

import argparse
import secrets
import sys
from functools import partial

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as use_seed
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxserve.errors import InvalidRequest
from jaxserve.execution.buckets import BucketSet
from jaxserve.request import FinishReason, Request, SamplingParams
from jaxserve.scheduling.commit_result import StepResult
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slot_table import SlotTable
from tests.scheduling.ghost_runner import GhostRunner, GhostStep, oracle
from tests.scheduling.scheduler_setups import MAX_MODEL_LEN, SETUPS, STATE_SETUPS, Setup
from tests.scheduling.subscriber import Subscriber

# Prompts are cut from these, so that exact repeats and common prefixes are frequent.
TAPES = tuple(np.random.default_rng(n).integers(0, 2, MAX_MODEL_LEN, np.int32) for n in range(2))


PICK = st.integers(0, 63)


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, failures and steps in any order, checked against a request served alone."""

    @initialize(setup=SETUPS)
    def start(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = PagePool(setup.num_pages, setup.page_size, setup.kinds)
        self.subscriber = Subscriber()
        self.pool.on_change = partial(self.subscriber.take, block_size=setup.page_size)
        self.slots = SlotTable(
            setup.num_slots,
            MAX_MODEL_LEN,
            setup.page_size,
            setup.kinds,
            keeps_states=setup.keeps_states,
        )
        self.slots.num_snapshots = setup.num_snapshots or 0
        self.scheduler = setup.scheduler(self.pool, self.slots)
        buckets = BucketSet(setup.num_slots, setup.budget, num_steps=setup.num_steps)
        self.scheduler.token_sizes = buckets.token_sizes
        self.runner = GhostRunner(self.slots, buckets, setup.num_pages)
        self.in_flight: GhostStep | None = None
        self.sequences: list[Sequence] = []
        self.live: list[Sequence] = []
        self.precedences: dict[Sequence, int] = {}
        self.streamed: dict[Sequence, list[int]] = {}
        self.text_stops: set[Sequence] = set()
        self.num_arrivals = 0

    # Rules.

    @rule(
        tape=st.integers(0, len(TAPES) - 1),
        length=st.integers(1, 32),
        aligned=st.booleans(),
        flip=st.integers(0, 40),
        max_tokens=st.sampled_from([1, 2, 3, 5, 8, 12, 16, 20]),
        seed=st.integers(0, 1),
        salt=st.sampled_from(["", "", "", "a"]),
        priority=st.integers(0, 2),
        stops=st.sampled_from([(), (), (), (0,), (1,), (0, 1)]),
        min_tokens=st.integers(0, 4),
        copies=st.sampled_from([1, 1, 2, 4]),
        together=st.booleans(),
    )
    def add(
        self,
        tape,
        length,
        aligned,
        flip,
        max_tokens,
        seed,
        salt,
        priority,
        stops,
        min_tokens,
        copies,
        together,
    ) -> None:
        """Add a prompt from a tape; a flipped token puts equal later pages under another prefix."""
        if aligned:
            length = -(-length // self.setup.page_size) * self.setup.page_size
        prompt = TAPES[tape][:length].copy()
        if flip < len(prompt):
            prompt[flip] ^= 1
        least = min(min_tokens, max_tokens)
        for count in [copies] if together else [1] * copies:
            self._add(prompt, max_tokens, seed, salt, priority, stops, least, count)

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK, max_tokens=st.integers(1, 8), more=st.integers(0, 5))
    def follow_up(self, pick, max_tokens, more) -> None:
        """Add a prompt that continues another sequence's prompt and answer."""
        before = self.sequences[pick % len(self.sequences)]
        tokens = before.request.prompt_token_ids.tolist() + self.streamed[before]
        prompt = np.array(tokens + [1] * more, np.int32)
        self._add(prompt, max_tokens, before.seed, before.request.cache_salt, 1, (), 0)

    @precondition(lambda self: self.live)
    @rule(count=st.integers(1, 6))
    def step(self, count) -> None:
        for _ in range(count):
            self._step()

    @precondition(lambda self: self.sequences)
    @rule(pick=PICK)
    def abort(self, pick) -> None:
        """Abort any sequence, also one that has ended."""
        self._abort(pick)
        self._check()

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def abort_inside_step(self, pick) -> None:
        """Abort a sequence between the submission of a step and the commit of the one before."""
        self._step(abort=pick)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def stop_by_text(self, pick) -> None:
        """Let the next token of a sequence complete a stop string."""
        self.text_stops.add(self.live[pick % len(self.live)])

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def poison_row(self, pick) -> None:
        """Make the logits of one row of the next step not finite."""
        self._step(poison=pick)

    @precondition(lambda self: self.live)
    @rule(read=st.booleans(), levels=st.integers(1, 3))
    def fail_step(self, read, levels) -> None:
        """Submit the next step or only schedule it, lose it, and reset the cache."""
        plan = self._schedule()
        if read and plan is not None:
            self.runner.submit(plan)
        self.in_flight = None
        self.runner.reset()
        self.precedences = {one: int(one.request.request_id) % levels for one in self.live}
        self.scheduler.preempt_all(self.precedences.__getitem__)
        self.pool.clear_cache()
        assert self.scheduler.num_running == 0
        self._check()

    @rule()
    def drain(self) -> None:
        """Run without new work, and check that every sequence ends soon and frees its resources."""
        bound = 10 + 2 * sum(sequence.request.max_length + 3 for sequence in self.live)
        while self.live or self.in_flight is not None:
            assert bound > 0, "no end in sight"
            bound -= 1
            self._step()
        assert not self.scheduler.has_work
        assert self.pool.num_free == self.pool.num_usable
        assert self.slots.num_free == self.slots.num_slots
        for sequence in self.sequences:
            assert sequence.finish_reason is not None
            assert sequence.output_token_ids() == self.streamed[sequence], "changed after its end"

    def teardown(self) -> None:
        # After a failure no further check helps, and a second error would hide the first.
        if hasattr(self, "setup") and sys.exc_info()[0] is None:
            self.drain()

    # The engine's part.

    def _add(
        self, prompt, max_tokens, seed, salt, priority, stops, min_tokens, completions=1
    ) -> None:
        request = Request(
            request_id=str(self.num_arrivals),
            prompt_token_ids=prompt,
            sampling=SamplingParams(n=completions, max_tokens=max_tokens, min_tokens=min_tokens),
            seed=seed,
            stop_token_ids=stops,
            max_length=len(prompt) + max_tokens,
            priority=priority,
            cache_salt=salt,
        )
        for index in range(completions):
            self._add_completion(request, seed, index)

    def _add_completion(self, request: Request, seed: int, index: int) -> None:
        prompt = request.prompt_token_ids
        sequence = Sequence(request, self.num_arrivals, prompt, index, seed)
        self.num_arrivals += 1
        pages = self.setup.most_pages(request.max_length)
        fits = pages < self.setup.num_pages and request.max_length <= MAX_MODEL_LEN
        try:
            self.scheduler.add(sequence)
        except InvalidRequest:
            assert not fits, "refused, but it could have run"
        else:
            assert fits, "accepted, but it can never run"
            self.runner.expected[sequence] = oracle(request)
            self.sequences.append(sequence)
            self.live.append(sequence)
            self.streamed[sequence] = []
        self._check()

    def _abort(self, pick: int) -> None:
        sequence = self.sequences[pick % len(self.sequences)]
        reason = sequence.finish_reason
        assert self.scheduler.finish(sequence, FinishReason.ABORT) == (sequence in self.live)
        if reason is None:
            self._ended(sequence, FinishReason.ABORT)
        else:
            assert sequence.finish_reason is reason, "it ended twice"

    def _step(self, abort: int | None = None, poison: int | None = None) -> None:
        """Schedule and submit a step, and commit the one before, as `Engine.step` does."""
        plan = self._schedule()
        submitted = None
        if plan is not None:
            real = np.flatnonzero(plan.slots < self.setup.num_slots)
            row = int(real[poison % len(real)]) if poison is not None and len(real) else None
            submitted = self.runner.submit(plan, row)
        before, self.in_flight = self.in_flight, submitted
        if abort is not None:
            self._abort(abort)
        if before is not None:
            self._commit(before)
        if not self.setup.asynchronous and self.in_flight is not None:
            step, self.in_flight = self.in_flight, None
            self._commit(step)
        self._check()

    def _commit(self, step: GhostStep) -> None:
        owners = {}
        for row, (slot, generation) in enumerate(
            zip(step.plan.slots.tolist(), step.plan.generations.tolist(), strict=True)
        ):
            if self.slots.generation[slot] == generation:
                owners[self.slots.sequences[slot]] = row
        result = self.scheduler.commit(step.plan, step.token_ids, step.ok)
        self._check_result(step, owners, result)

    def _check_result(
        self, step: GhostStep, owners: dict[Sequence, int], result: StepResult
    ) -> None:
        """Check that only live sequences of the step get tokens, and failed rows get errors."""
        ok = np.atleast_2d(step.ok)
        draws = {s for s, row in owners.items() if step.plan.samples[row] and ok[0, row]}
        assert set(result.sequences) == draws
        for sequence in draws:
            steps = step.plan.row_steps
            most = 1 if steps is None else int(steps[owners[sequence]])
            count = sum(last - first for s, first, last in result.rows() if s is sequence)
            assert count == most or (count < most and sequence in result.finished)
        assert len(set(result.sequences)) == len(result.sequences)
        for sequence, first, last in result.rows():
            known = sequence.num_prompt + len(self.streamed[sequence])
            tokens = result.token_ids[first:last]
            self.streamed[sequence] += tokens
            expected = self.runner.expected[sequence].tokens[known : known + len(tokens)]
            assert tokens == list(expected), "other tokens than when served alone"
        errors = {
            s for s, row in owners.items() if not ok[: self._steps_of(s, step, row), row].all()
        }
        assert {s for s in result.finished if s.finish_reason is FinishReason.ERROR} == errors
        for sequence in result.finished:
            assert sequence.finish_reason is not None
            self._ended(sequence, sequence.finish_reason)
        for sequence in self.text_stops & set(result.sequences) & set(self.live):
            assert self.scheduler.finish(sequence, FinishReason.STOP)
            self._ended(sequence, FinishReason.ABORT)

    def _steps_of(self, sequence: Sequence, step: GhostStep, row: int) -> int:
        """Return how many of a launch's steps a row took part in, its last draw included."""
        if step.plan.num_steps == 1:
            return 1
        known = sequence.num_prompt + len(self.streamed[sequence])
        expected = self.runner.expected[sequence].tokens
        is_over = known == len(expected)
        return known - int(step.plan.starts[row]) - 1 + (not is_over)

    def _ended(self, sequence: Sequence, reason: FinishReason) -> None:
        assert sequence in self.live, "it ended twice"
        self.live.remove(sequence)
        expected = self.runner.expected[sequence]
        output = sequence.output_token_ids()
        assert output == self.streamed[sequence], "streamed other tokens than were kept"
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output == expected.tokens[sequence.num_prompt :], "ended early"
            assert expected.stopped == (reason is FinishReason.STOP)
            assert sequence.stop_token == (output[-1] if expected.stopped else None)

    # Invariants of a step, and of the state at any time.

    def _rank(self, sequence: Sequence) -> tuple[int, int, int]:
        by_priority = self.setup.kind == "continuous" and self.setup.policy == "priority"
        # Not `arrival`, which the scheduler could change.
        number = int(sequence.request.request_id) + sequence.index
        priority = sequence.request.priority if by_priority else 0
        return (-self.precedences.get(sequence, 0), priority, number)

    def _schedule(self) -> LaunchPlan | None:
        before = self.scheduler.running_sequences()
        plan = self.scheduler.schedule(self.setup.num_steps)
        after = self.scheduler.running_sequences()
        assert [self._rank(s) for s in after] == sorted(self._rank(s) for s in after)
        preempted = [s for s in before if s.slot == NO_SLOT]
        assert preempted == before[len(before) - len(preempted) :], "not the worst was preempted"
        assert not preempted or len(preempted) < len(before), "the head was preempted"
        assert not preempted or self.setup.kind == "continuous", "a static batch was preempted"
        admitted = [self._rank(s) for s in after if s not in before]
        waiting = [self._rank(s) for s in self._waiting()]
        assert not admitted or not waiting or max(admitted) < min(waiting), "out of order"
        if plan is not None:
            self._check_plan(plan)
        if self.setup.kind == "continuous" and not preempted:
            self._check_admission(plan)
        if self.setup.kind != "padded":
            slots = [] if plan is None else plan.slots.tolist()
            idle = [s for s in after if s.slot not in slots]
            assert all(self._last_in_flight(s) for s in idle), "a running sequence stands still"
        return plan

    def _waiting(self) -> list[Sequence]:
        """Return the sequences that wait, except for pages that another completion computes."""
        size, table = self.setup.page_size, self.slots
        computing, complete = set(), set()
        for sequence in self.scheduler.running_sequences():
            slot, shared = sequence.slot, (sequence.num_prompt - 1) // size * size
            done = max(table.num_committed[slot], table.num_published[slot] * size)
            (computing if done < shared else complete).add(sequence.request.request_id)
        computing -= complete
        if not self.setup.prefix_caching or self.setup.kind != "continuous":
            computing.clear()
        return [
            sequence
            for sequence in self.live
            if sequence.slot == NO_SLOT
            and not (sequence.index and sequence.request.request_id in computing)
        ]

    def _check_admission(self, plan: LaunchPlan | None) -> None:
        """Check that no sequence waits while slots, budget and pages (with spare ones) suffice."""
        waiting = self._waiting()
        spent = 0 if plan is None else plan.total_tokens
        if waiting and self.slots.num_free and spent < self.setup.budget:
            first = min(waiting, key=self._rank)
            if any(kind.window for kind in self.setup.kinds):
                needed = sum(map(self._most_pages, [first, *self.scheduler.running_sequences()]))
                # Blocks that chunks take outside the windows until two steps are read.
                chunks = -(-2 * self.setup.budget // self.setup.page_size)
                needed += sum(chunks * kind.num_pages for kind in self.setup.kinds if kind.window)
                assert needed > self.pool.num_usable, "the next sequence waits for nothing"
                return
            needed = -(-len(first.token_ids) // self.setup.page_size) + self.scheduler.num_running
            needed *= self.slots.num_parts
            assert needed > self.pool.num_free, "the next sequence waits for nothing"

    def _most_pages(self, sequence: Sequence) -> int:
        """Return the pages of a sequence with its last token and one more block of each kind."""
        blocks = -(-sequence.request.max_length // self.setup.page_size) + 1
        return blocks * self.slots.num_parts

    def _last_in_flight(self, sequence: Sequence) -> bool:
        """Return whether the step in flight draws the last token that its length allows."""
        if self.in_flight is None:
            return False
        plan = self.in_flight.plan
        mine = plan.generations == self.slots.generation[sequence.slot]
        known = sequence.num_prompt + len(self.streamed[sequence])
        draws = plan.samples if plan.row_steps is None else plan.row_steps
        return known + int(draws[mine].sum()) >= sequence.request.max_length

    def _check_plan(self, plan: LaunchPlan) -> None:
        real = plan.slots < self.setup.num_slots
        assert len(plan) and (self.setup.kind == "padded" or real.all())
        assert len(plan) <= self.setup.num_slots and plan.total_tokens <= self.setup.budget
        assert np.all(plan.num_tokens >= 1)
        assert len(set(plan.slots[real].tolist())) == real.sum(), "a slot has two rows"
        assert not plan.samples[~real].any()
        assert 1 <= plan.num_steps <= self.setup.num_steps
        if plan.num_steps > 1:
            assert plan.samples.all() and plan.row_steps.max() == plan.num_steps
            if self.scheduler.num_waiting:
                assert not self.slots.num_free, "who waits for a launch could have been admitted"
                all_the_way = len(plan) == self.setup.num_slots and plan.row_steps.min()
                assert all_the_way == plan.num_steps, "a launch outlasts a row while others wait"
        elif self.setup.threshold and self.setup.kind == "continuous":
            assert plan.num_tokens.max() <= self.setup.threshold

    def _check(self) -> None:
        self.scheduler.check()
        self.subscriber.check(self.pool, self.scheduler.publisher.page_keys)
        running = self.scheduler.running_sequences()
        assert len(running) == self.scheduler.num_running
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.live)
        assert all(s.finish_reason is None and s in self.live for s in running)
        assert all(sequence.slot == NO_SLOT for sequence in self.live if sequence not in running)
        for sequence in self.live:
            cached = sequence.num_cached
            assert cached == -1 or 0 <= cached < sequence.num_prompt
            assert cached == -1 or cached % self.setup.page_size == 0


class StateMachine(SchedulerMachine):
    """The same for models whose layers keep states: each schedule has snapshots to reuse."""

    @initialize(setup=STATE_SETUPS)
    def start(self, setup: Setup) -> None:
        super().start(setup)


def run(
    examples: int,
    seed: int | None = None,
    steps: int = 40,
    shrink: bool = True,
    base: type[SchedulerMachine] = SchedulerMachine,
) -> None:
    """Run the machine, and raise its first failure.

    Args:
        examples: number of schedules.
        seed: of random examples. None runs the same examples each time.
        steps: most rules of a schedule.
        shrink: whether to look for a smaller schedule that fails too.
        base: the machine.
    """
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    machine = type("SeededMachine", (base,), {})
    if seed is not None:
        use_seed(seed)(machine)  # type: ignore[arg-type]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=seed is None,
            deadline=None,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=10000)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--derandomize", action="store_true", help="the same examples each time")
    parser.add_argument("--seed", type=int, help="of the examples; a random one without this")
    parser.add_argument("--states", action="store_true", help="only models that keep states")
    parser.add_argument("--no-shrink", action="store_true", help="report a failure as found")
    arguments = parser.parse_args()
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    seed = None if arguments.derandomize else seed
    print(f"seed {seed}", flush=True)
    base = StateMachine if arguments.states else SchedulerMachine
    run(arguments.examples, seed, arguments.steps, not arguments.no_shrink, base)
    print(f"{arguments.examples} examples: clean")
