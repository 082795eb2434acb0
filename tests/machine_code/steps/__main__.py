"""The long form of the tests of whole steps: every family and form of weights.

    python -m tests.machine_code.steps [--family F ...] [--model M ...] [--capability C ...]
        [--schedule S ...] [--precision high] [--warps] [--seed N]

Programs are compiled in the environment of `scripts.gpu.compile_offline`, and executed in a random
order of launches. With `--warps`, blocks and warps are in random order too, which takes ten times
as long. Results go
to scripts/results/machine_code_steps.md. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses

import jax
import numpy as np

from jaxserve.commands.argument_types import integer_from_0
from scripts.gpu.offline_environment import NoEnvironment
from scripts.lib.run_main import run_main
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.case import Capability
from tests.machine_code.cases import CARDS
from tests.machine_code.kept import parse_capability, spell
from tests.machine_code.offline import NotCompiled
from tests.machine_code.steps.compilation import compile_programs
from tests.machine_code.steps.engine import RecordedEngine, Recording
from tests.machine_code.steps.execution import Execution
from tests.machine_code.steps.models import FAMILIES, MODELS
from tests.machine_code.steps.near_ties import NearTies, noise_of
from tests.machine_code.steps.programs import STATE, Setup
from tests.machine_code.steps.schedules import EVERYWHERE, SCHEDULES
from tests.machine_code.steps.table import Row, write_table


@dataclasses.dataclass(frozen=True)
class Served:
    """Schedule that an engine has served on the CPU.

    Attributes:
        name: the schedule's.
        recording: of the engine's calls.
        ties: judge of its tokens.
    """

    name: str
    recording: Recording
    ties: NearTies


def serve(setup: Setup, schedules: list[str]) -> list[Served]:
    """Serve schedules with engines on the CPU, one a length of launches."""
    served = []
    for has_long_launches in (False, True):
        named = [n for n in schedules if SCHEDULES[n].has_long_launches == has_long_launches]
        if named:
            engine = RecordedEngine(setup, setup.launch_steps if has_long_launches else 1)
            ties = NearTies(engine.decoder)
            served += [Served(name, engine.serve(SCHEDULES[name]), ties) for name in named]
            jax.clear_caches()
    return served


def execute(
    setup: Setup, capability: Capability, served: list[Served], seed: int, orders_warps: bool
) -> Row:
    """Compile the programs that engines called for a capability, and execute the calls."""
    called = {call.program for schedule in served for call in schedule.recording.calls}
    names = [name for name in setup.programs() if name in called | {STATE}]
    compiled = compile_programs(setup, capability, names).programs
    executables = {name: Executable.of(program) for name, program in compiled.items()}
    noise = noise_of(MODELS[setup.model], setup.precision)
    row = Row(spell(capability), setup.name)
    for schedule in served:
        order, ties = np.random.default_rng(seed), schedule.ties if noise else None
        recording = schedule.recording
        outcome = Execution(recording, executables, order, orders_warps, ties, noise).run()
        row.add(schedule.name, outcome)
        compared = outcome.compared
        print(
            f"{setup.name} {spell(capability)} {schedule.name}: {outcome.calls} calls, "
            f"{outcome.launches} launches, {outcome.instructions / 1e6:.0f} M instructions "
            f"in {outcome.seconds:.0f} s; {compared.tokens} tokens, log-probabilities "
            f"{compared.logprobs:.1e}, pages {compared.pages:.1e}",
            *(f"  near tie: {tie}" for tie in compared.near_ties),
            *(f"  WRONG: {fault}" for fault in compared.faults),
            sep="\n",
            flush=True,
        )
        jax.clear_caches()
    return row


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machine_code.steps", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--family", nargs="+", choices=list(FAMILIES), help="all forms of families")
    parser.add_argument("--model", nargs="+", choices=list(MODELS), metavar="MODEL")
    parser.add_argument(
        "--capability",
        nargs="+",
        type=parse_capability,
        choices=list(CARDS),
        default=[(9, 0), (8, 0)],
        help="compute capabilities; 9.0 and 8.0 by default",
    )
    parser.add_argument(
        "--schedule",
        nargs="+",
        choices=list(SCHEDULES),
        default=list(EVERYWHERE),
        help=f"{' and '.join(EVERYWHERE)} by default",
    )
    parser.add_argument("--precision", choices=("highest", "high"), default="highest")
    parser.add_argument(
        "--warps",
        action="store_true",
        help="random order of blocks and warps too: ten times as long",
    )
    parser.add_argument("--seed", type=integer_from_0, default=0, help="of the random order")
    arguments = parser.parse_args()
    chosen = [
        name
        for name, model in MODELS.items()
        if (arguments.model is None and arguments.family is None)
        or name in (arguments.model or ())
        or model.family in (arguments.family or ())
    ]
    wrong = 0
    for name in chosen:
        setup = Setup(name, arguments.precision)
        served = serve(setup, arguments.schedule)
        for capability in arguments.capability:
            try:
                row = execute(setup, capability, served, arguments.seed, arguments.warps)
            except NoEnvironment as error:
                raise SystemExit(str(error)) from error
            except NotCompiled as error:
                print(f"WRONG: {error}", flush=True)
                wrong += 1
                continue
            write_table([row])
            wrong += bool(row.outcome.compared.faults)
    print(f"{len(chosen)} models, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
