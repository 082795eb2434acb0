"""One jaxserve engine behind HTTP whose schedule is changed between runs by POST /schedule.

Weights and programs are loaded once, so that continuous and static batching differ only in
their schedule. GET /timeline lists the holder of each slot in every step since the last change.
"""

from __future__ import annotations

import time
from typing import Any

from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import prepare_process

prepare_process()

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine, make_scheduler
from jaxserve.request import SamplingParams
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from scripts.compare.worker_http import Front, Job, arguments
from scripts.lib.static_scheduler import static

CONTINUOUS, S0, S1 = "continuous", "S0", "S1"


class Schedules:
    """Schedules of the engine that runs now, and a record of its steps."""

    def __init__(self, loaded: Loaded, rows: int) -> None:
        self._loaded = loaded
        self._rows = rows
        self.timeline: list[tuple[float, list[int]]] = []
        self._started = 0.0
        self.change({"schedule": CONTINUOUS, "rows": rows})

    def change(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Change {"schedule": continuous, S0 or S1, "rows": at most --rows} of the idle engine."""
        name, rows = wish["schedule"], int(wish.get("rows", self._rows))
        if name not in (CONTINUOUS, S0, S1) or not 1 <= rows <= self._rows:
            raise ValueError(f"no such schedule: {wish}")

        def make(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
            if name == CONTINUOUS:
                scheduler = make_scheduler(config, pool, slots)
                scheduler.max_running = rows
                return scheduler
            return static(rows, name == S0)(config, pool, slots)

        self.engine = Engine(self._loaded, scheduler=make)
        self.timeline = []
        return {"schedule": name, "rows": rows}

    def add(self, job: Job, number: int) -> None:
        params = SamplingParams(
            temperature=0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
        )

        def sink(delta: Delta) -> None:
            if delta.error:
                job.fail(delta.error)
            job.write(list(delta.token_ids))

        self.engine.add(
            self.engine.requests.make(np.array(job.prompt), params, request_id=str(number)), sink
        )

    def step(self) -> None:
        if not self.timeline:
            self._started = time.perf_counter()
        self.engine.step()
        held = self.engine.slots.generation.tolist()
        self.timeline.append((time.perf_counter() - self._started, held))


def main() -> None:
    options = arguments()
    rows = options.rows
    loaded = load(
        EngineConfig(
            model=options.model,
            dtype=options.dtype,
            max_num_seqs=2 * rows,
            max_model_len=options.max_len,
            enable_prefix_caching=False,
            decode_sizes=tuple(sorted({1, max(1, rows // 4), max(1, rows // 2), rows, 2 * rows})),
            wait_for_all_programs=True,
        )
    )
    schedules = Schedules(loaded, rows)
    front = Front(
        options.port,
        {"/schedule": schedules.change, "/timeline": lambda _: schedules.timeline},
    )
    number = 0
    while True:
        # A static batch must not start with the first of many that were sent together.
        for job in front.batch(1 << 20):
            schedules.add(job, number)
            number += 1
        while schedules.engine.has_work:
            for job in front.waiting():
                schedules.add(job, number)
                number += 1
            schedules.step()


if __name__ == "__main__":
    main()
