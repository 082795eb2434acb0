"""Engine on the CPU whose programs are recorded while it serves a schedule."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.engine.loading import Loaded
from jaxserve.engine.request_factory import Limits
from jaxserve.engine.text.tokenizer import Tokenizer
from jaxserve.execution.runner import CompileCounter, Programs, Runner
from jaxserve.execution.start.compiler import Compiler
from jaxserve.execution.start.programs import ProgramStore
from jaxserve.execution.state import page_bytes
from jaxserve.request import SamplingParams
from jaxserve.weights.placement import use_panels
from tests.machine_code.steps.models import BUNDLED, END, MODELS, VOCAB, leaves_of
from tests.machine_code.steps.programs import Setup
from tests.machine_code.steps.recording import Call, Recorder, arrays
from tests.machine_code.steps.schedules import Schedule

MOST_STEPS = 1000


@dataclasses.dataclass
class Recording:
    """What the engine did with a schedule.

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
        self._recorder = Recorder()
        model = MODELS[setup.model]
        decoder = model.build()
        self._weights = leaves_of(decoder)
        use_panels(decoder)
        self.decoder = decoder
        config = setup.config(num_steps)
        model_config = model.config().for_length(setup.max_len)
        compiler = Compiler(config, model_config, decoder)
        compiler.store = ProgramStore(None, {}, {})
        buckets, pages = setup.buckets(num_steps), setup.num_pages
        programs = Programs(
            {bucket: compiler.step(bucket, pages) for bucket in buckets},
            compiler.make_state(pages),
            compiler.load_slot(),
            {count: compiler.set_allowed(count) for count in setup.mask_counts()},
        )
        self._empty = arrays(programs.make_state())
        self._runner = Runner(
            config,
            model_config,
            compiler.leaves,
            self._recorder.watch(programs),
            buckets,
            num_pages=pages,
            kv_dtype=compiler.kv_dtype,
            page_bytes=page_bytes(model_config, config.block_size, compiler.kv_dtype),
            state=programs.make_state(),
            counter=CompileCounter(),
        )
        limits = Limits(VOCAB, setup.max_len, (END,), seed=0, launch_steps=self._runner.max_steps)
        tokenizer = Tokenizer(BUNDLED, VOCAB)
        self._loaded = Loaded(config, self._runner, tokenizer, limits, SamplingParams())

    def serve(self, schedule: Schedule) -> Recording:
        """Serve a schedule to its end, from an empty state."""
        self._runner.reset()
        self._recorder.calls = []
        engine = Engine(self._loaded)
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
                return Recording(
                    self.setup, self._weights, self._empty, self._recorder.calls, answers
                )
            engine.step()
        raise AssertionError(f"the schedule did not end within {MOST_STEPS} steps")
