"""The live scene: requests are served as they arrive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from jaxserve.engine.engine import Engine
from scripts.live_demo.asks import Ask
from scripts.live_demo.scene import Scene


def play(
    engine: Engine,
    scene: Scene[Any],
    speed: float,
    steps_per_second: float,
    draw: Callable[[], None],
) -> float:
    """Serve the requests as they arrive. Return the seconds. `draw` is called after each step."""
    waiting = deque(scene.asks)
    start = next_step = time.perf_counter()
    while waiting or engine.has_work:
        now = time.perf_counter()
        while waiting and (not speed or now - start >= waiting[0].arrival / speed):
            _add(engine, scene, waiting.popleft())
        if engine.has_work:
            engine.step()
        draw()
        if steps_per_second:
            next_step = max(next_step + 1 / steps_per_second, now)
            time.sleep(max(0.0, next_step - time.perf_counter()))
        elif not engine.has_work:
            time.sleep(0.005)
    return time.perf_counter() - start


def _add(engine: Engine, scene: Scene[Any], ask: Ask) -> None:
    ask.added = time.perf_counter()
    request = engine.requests.make(
        ask.token_ids, ask.sampling, request_id=str(ask.number), number=ask.number
    )
    scene.running[request.request_id] = ask
    engine.add(request, scene.receive)
