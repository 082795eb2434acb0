"""Study of a token that differs in 16 bits: whether rounding explains it.

    python -m tests.machine_code.steps.rounding [--model M] [--schedule S] [--capability C]

A card and the CPU are both compared with float32 arithmetic on the same weights, call by call, up
to the first token in which the two differ. Where both are as far from float32, layer by layer, and
the two tokens' log-probabilities are closer than that moves them, it is a near tie.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.execution.batch import unpack
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.state import StepOutput, make_state, memory_kinds
from jaxserve.execution.step import model_step
from jaxserve.models import abstract_model
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.cases import CARDS
from tests.machine_code.kept import parse_capability, spell
from tests.machine_code.steps.compilation import compile_programs
from tests.machine_code.steps.engine import RecordedEngine
from tests.machine_code.steps.judgement import differing_tokens
from tests.machine_code.steps.models import MODELS
from tests.machine_code.steps.programs import STATE, Setup
from tests.machine_code.steps.recording import Call
from tests.machine_code.steps.replay import Replay
from tests.machine_code.steps.schedules import SCHEDULES, scored


class Float32Twin:
    """The same weights, computed with in float32 on the CPU."""

    def __init__(self, setup: Setup) -> None:
        decoder = MODELS[setup.model].build()
        config = decoder.config
        twin = abstract_model(config, jnp.float32)
        self._graphdef, state = nnx.split(twin)
        _, self._treedef = jax.tree.flatten(state)
        narrow = jax.tree.leaves(nnx.split(decoder)[1])
        self._leaves = [jnp.asarray(np.asarray(leaf).astype(np.float32)) for leaf in narrow]
        page_size = setup.config().block_size
        counts = setup.num_slots, setup.num_pages
        memory = memory_kinds(config, page_size, jnp.float32, *counts)
        self.state = make_state(config, memory, -(-setup.max_len // page_size))
        self._steps: dict[Bucket, Any] = {}

    def run(self, call: Call, bucket: Bucket) -> StepOutput:
        """Compute a step of the recording."""
        if bucket not in self._steps:

            def step(leaves: Any, state: Any, words: Any) -> Any:
                batch = unpack(words, bucket.num_tokens, bucket.num_rows)
                options: Any = {"greedy": bucket.greedy, "implementation": "xla"}
                return model_step(
                    *(self._graphdef, self._treedef, leaves, state, batch),
                    decode_only=bucket.decode_only,
                    **options,
                )

            self._steps[bucket] = jax.jit(step)
        self.state, output = self._steps[bucket](self._leaves, self.state, call.arguments[0])
        return output


def rms_error(got: np.ndarray, exact: np.ndarray) -> float:
    """Return the error of the cells that are written, over their root mean square."""
    exact = exact.astype(np.float64)
    written = exact != 0
    difference = (got.astype(np.float64) - exact)[written]
    return float(np.sqrt(np.mean(difference**2) / np.mean(exact[written] ** 2)))


def gap(output: StepOutput, position: int, token: int, other: int) -> float:
    """Return by how much a token's log-probability exceeds another's."""
    assert output.logprobs is not None
    ids = np.asarray(output.logprobs.top_ids)[position].tolist()
    scores = np.asarray(output.logprobs.top_logprobs)[position]
    return float(scores[ids.index(token)] - scores[ids.index(other)])


@dataclasses.dataclass
class Study:
    """Rounding errors of a card and of the CPU, and a near tie.

    Attributes:
        calls: made before and with the token that differs.
        errors: by array of pages, from the first layer's keys on: root mean square errors of the
            card and of the CPU against float32.
        token: drawn by the card, by the CPU, and in float32.
        gaps: log-probability of the CPU's token less that of the card's, in each of the three.
    """

    calls: int = 0
    errors: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    token: tuple[int, int, int] | None = None
    gaps: tuple[float, float, float] | None = None

    def summary(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        names = ("card", "cpu", "float32")
        found: dict[str, Any] = {
            "calls": self.calls,
            "page_errors": [[float(f"{error:.2g}") for error in both] for both in self.errors],
        }
        if self.token is not None and self.gaps is not None:
            found["token"] = dict(zip(names, self.token, strict=True))
            found["gap"] = dict(zip(names, (round(gap, 4) for gap in self.gaps), strict=True))
        return found


def study(setup: Setup, schedule: str, capability: tuple[int, int]) -> Study:
    """Execute a schedule up to the first token that differs."""
    recording = RecordedEngine(setup).serve(scored(SCHEDULES[schedule]))
    called = {call.program for call in recording.calls}
    names = [name for name in setup.programs() if name in called | {STATE}]
    compiled = compile_programs(setup, capability, names).programs
    card = Replay({name: Executable.of(p) for name, p in compiled.items()}, recording.weights)
    twin, steps, found = Float32Twin(setup), setup.steps(), Study()
    for call in recording.calls:
        bucket = steps[call.program]
        output, exact = card.run(call), twin.run(call, bucket)
        found.calls += 1
        pages = jax.tree.leaves(twin.state.kv)
        found.errors = [
            (rms_error(ours, np.asarray(true)), rms_error(cpu, np.asarray(true)))
            for ours, cpu, true in zip(card.state, call.state, pages, strict=False)
        ]
        differs, _ = differing_tokens(call, bucket, output, setup.num_slots)
        if differs.any():
            row = int(np.flatnonzero(differs[0])[0])
            batch = unpack(call.arguments[0], bucket.num_tokens, bucket.num_rows)
            position = row if bucket.decode_only else int(batch.sample_index[row])
            outputs = (output, call.output, exact)
            drawn = [int(np.asarray(part.token_ids).reshape(-1)[row]) for part in outputs]
            found.token = (drawn[0], drawn[1], drawn[2])
            ours, cpu, true = (gap(part, position, drawn[1], drawn[0]) for part in outputs)
            found.gaps = (ours, cpu, true)
            break
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code.steps.rounding", description=__doc__.splitlines()[0]
    )
    narrow = [name for name, model in MODELS.items() if model.dtype != "float32"]
    parser.add_argument("--model", choices=narrow, default="bundled-bfloat16")
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="spoken")
    parser.add_argument("--capability", type=parse_capability, choices=list(CARDS), default=(9, 0))
    arguments = parser.parse_args()
    found = study(Setup(arguments.model), arguments.schedule, arguments.capability).summary()
    print(json.dumps(found, indent=2))
    name = f"{arguments.model} {spell(arguments.capability)}, {arguments.schedule}"
    keep(RESULTS / "machine_code_rounding.json", {name: found}, about_run())
    return 0


if __name__ == "__main__":
    run_main(main)
