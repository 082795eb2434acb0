"""Compiles the programs that tests execute, and keeps them.

    python -m tests.machine_code.steps.compile

Takes some minutes, in the environment of `scripts.gpu.compile_offline`. Exits with 1 if a program
does not compile, or if the file is too large.
"""

from __future__ import annotations

import argparse

from scripts.gpu.offline_environment import NoEnvironment
from scripts.lib.run_main import run_main
from scripts.machine_code.compiled_program import Program
from tests.machine_code.case import Capability
from tests.machine_code.offline import NotCompiled
from tests.machine_code.steps.compilation import compile_programs
from tests.machine_code.steps.kept import FILE, MOST_BYTES, PROGRAMS, SETUP, KeptPrograms


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m tests.machine_code.steps.compile", description=__doc__.splitlines()[0]
    ).parse_args()
    programs: dict[Capability, dict[str, Program]] = {}
    sources: dict[str, set[str]] = {}
    for capability, names in PROGRAMS.items():
        try:
            compiled = compile_programs(SETUP, capability, names)
        except (NoEnvironment, NotCompiled) as error:
            raise SystemExit(str(error)) from error
        programs[capability] = compiled.programs
        for file, functions in compiled.sources.items():
            sources.setdefault(file, set()).update(functions)
    named = {file: sorted(functions) for file, functions in sorted(sources.items())}
    size = KeptPrograms.of(programs, named).save()
    print(f"{size:,} bytes in {FILE.name}; at most {MOST_BYTES:,} are allowed")
    return 1 if size > MOST_BYTES else 0


if __name__ == "__main__":
    run_main(main)
