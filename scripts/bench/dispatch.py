"""Cost of a call of a compiled program on the host, by how many arrays go in and come out.

    python -m scripts.bench.dispatch
    python -m scripts.bench.dispatch --json scripts/results/bench_dispatch.json

A step of an 8B model takes 195 arrays of weights, 72 of its state, which is donated and comes back,
and the words of the batch. The program here has the same number of tiny
arrays, and reads few of them: the time is that of the call, until it returns. On a GPU another
client of PJRT dispatches. Its times are in the report of a GPU.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from scripts.lib.argument_types import at_least, bench_parser
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

# Arrays of weights, and of the state, of Llama 3.1 8B, then either alone.
SHAPES = ((195, 72), (195, 0), (0, 72), (0, 0))
GOAL_US = 150.0


def call_us(num_weights: int, num_state: int, calls: int) -> float:
    """Return the median of the microseconds that a call takes the host."""
    weights = [jnp.zeros(8) for _ in range(num_weights)]
    state = [jnp.zeros(8, jnp.int32) for _ in range(num_state)]
    words = np.zeros(64, np.int32)

    def run(weights: list[Any], state: list[Any], words: Any) -> tuple[list[Any], Any]:
        return state, words[:2]

    lowered = jax.jit(run, donate_argnums=1, keep_unused=True).lower(weights, state, words)
    program, times = lowered.compile(), []
    for _ in range(calls):
        started = time.perf_counter()
        state, output = program(weights, state, words)
        times.append(time.perf_counter() - started)
        np.asarray(output)
    return 1e6 * statistics.median(times)


def main() -> int:
    parser = bench_parser("scripts.bench.dispatch", __doc__)
    parser.add_argument("--calls", type=at_least(10), default=2000, help="default %(default)d")
    arguments = parser.parse_args()
    about = about_run() | {"jax": jax.__version__}
    calls = {
        f"{weights} weights, {state} of state": round(call_us(weights, state, arguments.calls), 1)
        for weights, state in SHAPES
    }
    for name, microseconds in calls.items():
        print(f"{name:28}{microseconds:8.1f} us")
    if arguments.json:
        keep(arguments.json, {"call_us": calls}, about)
    most = max(calls.values())
    print(f"{'within' if most <= GOAL_US else 'above'} the goal of {GOAL_US:g} us")
    return 0 if most <= GOAL_US else 1


if __name__ == "__main__":
    run_main(main)
