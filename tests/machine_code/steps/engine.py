"""Engine on the CPU whose programs are recorded while it serves a schedule."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.execution.buckets import LOAD_SLOT, SET_ROWS, STATE, SmallProgram
from jaxserve.execution.runner import CompileCounter, Programs, Runner
from jaxserve.execution.state import DeviceState
from jaxserve.request import SamplingParams
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.placement import use_panels
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.machine_code.steps.models import BUNDLED, END, MODELS, VOCAB, leaves_of
from tests.machine_code.steps.programs import Setup
from tests.machine_code.steps.recording import Call, Recorder, arrays
from tests.machine_code.steps.schedules import Schedule

MOST_STEPS = 1000


@dataclasses.dataclass
class Recording:
    """Recording of an engine that served a schedule.

    Attributes:
        setup: the engine.
        weights: the model's arrays as a card takes them.
        empty_state: the device state before the first call.
        calls: of its programs.
        answers: token ids by request and completion.
    """

    setup: Setup
    weights: list[np.ndarray]
    empty_state: list[np.ndarray]
    calls: list[Call]
    answers: dict[tuple[str, int], list[int]]


class RecordedEngine:
    """Engine of a setup on the CPU, which may serve several schedules.

    Attributes:
        decoder: the model as the CPU runs it.
    """

    def __init__(self, setup: Setup, num_steps: int = 1) -> None:
        """Start the engine.

        Args:
            setup: the model, and sizes.
            num_steps: most decode steps of a launch: 1, or the setup's `launch_steps`.
        """
        self.setup = setup
        self._tokenizer = Tokenizer(BUNDLED, VOCAB)
        self._recorder = Recorder()
        model = MODELS[setup.model]
        self.decoder = model.build()
        self._weights = leaves_of(self.decoder)
        use_panels(self.decoder)
        model_config = model.config().for_length(setup.max_len)
        self._plan = plan_of_model(setup.config(num_steps), model_config, self.decoder)
        supplier = Compiling(self._plan, ProgramStore(None, {}, {}))
        self._compiler, self._leaves = supplier.compiler, model_leaves(self.decoder)
        buckets = setup.buckets(num_steps)
        supply = supplier.supply
        programs = Programs(
            buckets=buckets,
            steps={bucket: supply(bucket) for bucket in buckets},
            samplers={},  # a card's programs have theirs inside
            score=None,
            make_state=supply(STATE),
            load_slot=supply(LOAD_SLOT),
            set_rows=supply(SET_ROWS),
            set_allowed={
                count: supply(SmallProgram("set allowed", count)) for count in setup.mask_counts()
            },
        )
        self._programs = self._recorder.watch(programs)

    def serve(self, schedule: Schedule) -> Recording:
        """Serve a schedule to its end, from an empty state."""
        self._recorder.calls = []
        state = self._programs.make_state()
        empty = arrays(state)
        if schedule.begins_with_padding:
            state = self._run_padding(state)
        runner = self._runner(state)
        limits = Limits(VOCAB, self.setup.max_len, (END,), seed=0, launch_steps=runner.max_steps)
        config = self._plan.config
        engine = Engine(Loaded(config, runner, self._tokenizer, limits, SamplingParams()))
        if schedule.most_pages is not None:
            engine.pool.__init__(schedule.most_pages, config.block_size)
        answers = answers_of(engine, schedule)
        engine.close()
        return Recording(self.setup, self._weights, empty, self._recorder.calls, answers)

    def _run_padding(self, state: DeviceState) -> DeviceState:
        """Run each program once on padding, as every start does."""
        compiler = self._compiler
        for bucket, step in self._programs.steps.items():
            state, _ = step(self._leaves, state, compiler.null_batch(bucket))
        sampler = self._programs.load_slot(state.sampler, compiler.null_load())
        page_table = self._programs.set_rows(state.page_table, *compiler.null_rows())
        return dataclasses.replace(state, sampler=sampler, page_table=page_table)

    def _runner(self, state: DeviceState) -> Runner:
        plan = self._plan
        programs, counter = self._programs, CompileCounter()
        return Runner(plan.model_config, plan.memory, self._leaves, programs, state, counter)


def answers_of(engine: Engine, schedule: Schedule) -> dict[tuple[str, int], list[int]]:
    """Drive an engine through a schedule. Return token ids by request and completion."""
    answers: dict[tuple[str, int], list[int]] = {}

    def sink(delta: Delta) -> None:
        if delta.error is not None:
            raise AssertionError(f"request {delta.request_id} ended: {delta.error}")
        answers.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)

    waiting = dict(enumerate(schedule.arrivals))
    for step in range(MOST_STEPS):
        for number in [n for n, arrival in waiting.items() if arrival.step <= step]:
            arrival = waiting.pop(number)
            prompt = arrival.prompt if isinstance(arrival.prompt, str) else [*arrival.prompt]
            request = engine.requests.make(
                prompt, arrival.sampling, request_id=str(number), number=number
            )
            engine.add(request, sink)
        if not waiting and not engine.has_work:
            if engine.stats().num_failed_steps:
                raise AssertionError("a step failed on the CPU")
            return answers
        engine.step()
    raise AssertionError(f"the schedule did not end within {MOST_STEPS} steps")
