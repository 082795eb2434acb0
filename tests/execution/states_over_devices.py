"""Models whose layers keep states, over two devices of one process (see test_state_parallel).

    python -m tests.execution.states_over_devices

Prints, as one line of JSON, the differences from the same models on one device, the division of
the states, and counts of random schedules that equal the oracle.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial
from types import MappingProxyType
from typing import Any

import jax

from jaxserve.execution.state import STATES
from jaxserve.models.shards import Split
from tests.equivalence import LARGEST, Bench, fields_of_case, run_schedule
from tests.execution.over_devices import differences
from tests.support.quick_code import compile_quickly

DEVICES = 2
DELTA = MappingProxyType({"linear_num_key_heads": 4, "linear_num_value_heads": 8})
# Each device has several heads and groups. The widths of experts divide by the devices.
CASES = MappingProxyType(
    {
        "lfm2_bias_wide": {},
        "qwen3_5_two_a_key": DELTA,
        "qwen3_5_moe_two_a_key": DELTA,
        "qwen3_next_two_a_key": DELTA,
        "nemotron_h_all_kinds": {"n_groups": 2},
        "nemotron_h_dense_biases": {"mamba_num_heads": 8, "n_groups": 4},
        "mamba2_two_groups": {},
        "kimi_linear_low_rank": {"linear_num_heads": 4},
        "bailing_hybrid_bounded": {},
    }
)
# With a state of heads, a state of channels, and a projection of keys, values and gates in one.
ENGINE = "qwen3_next_two_a_key"
SEEDS = range(6)


def divisions(bench: Bench) -> list[list[list[int]]]:
    """Return the shape over all devices and the shape on one device, for each state of a layer."""
    state = bench.loaded[4].runner._state
    assert state is not None
    return [
        [list(array.shape), list(array.sharding.shard_shape(array.shape))]
        for array in state.others[STATES][0]
    ]


def main() -> int:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_enable_x64", True)
    compile_quickly()
    found: dict[str, Any] = {"differences": {}, "exchanges": {}}
    for case, sizes in CASES.items():
        [(value, counts)] = differences(case, [Split(DEVICES)], sizes)
        found["differences"][case], found["exchanges"][case] = value, counts
        print(f"{case}: {value:.1e}, {counts}", file=sys.stderr, flush=True)
    experts = [Split(DEVICES, expert_parallel=True)]
    [(found["expert parallel"], _)] = differences("qwen3_5_moe_two_a_key", experts)
    bench = Bench(fields_of_case(ENGINE), (4,), split=Split(DEVICES), sizes=LARGEST)
    found["divisions"] = divisions(bench)
    found["schedules"] = dict(sum(map(partial(run_schedule, bench), SEEDS), Counter()))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
