"""Worker that compiles an engine's programs for an absent card.

    python -m tests.machine_code.steps.compile_worker CARD FOLDER SETUP PROGRAM ...

Runs inside the offline environment. SETUP is JSON. Results are written to FOLDER: a file for each
program in their order, and the sources that they were traced from.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.gpu.offline_compiler import Compiler, Dumps
from scripts.gpu.targets import Target
from scripts.machine_code.compiled_program import to_json
from scripts.machine_code.xla_reader import read_program
from tests.machine_code.steps.programs import Setup, StepProgram
from tests.machine_code.steps.sources import noting_functions, sources_of


def main() -> int:
    card, folder, setup = sys.argv[1], Path(sys.argv[2]), Setup(**json.loads(sys.argv[3]))
    compiler = Compiler(Target.of(card), Dumps(folder / "xla", folder / "mosaic"))
    ran: dict[str, set[str]] = {}
    for number, name in enumerate(sys.argv[4:]):
        traced = StepProgram(setup, name).trace(compiler.target.mesh)
        compiler.dumps.clear()
        with noting_functions(ran):
            # An argument is there whether or not a program reads it, so that all take the same.
            compiler.compile(traced.call, traced.shapes, traced.donated, keep_unused=True)
        program = read_program(compiler.dumps.xla)
        data = {"modules": program.modules, **to_json(program)}
        (folder / f"program_{number}.json").write_text(json.dumps(data))
        print(f"{card}, {setup.name}: {name}", file=sys.stderr, flush=True)
    (folder / "sources.json").write_text(json.dumps(sources_of(ran)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
