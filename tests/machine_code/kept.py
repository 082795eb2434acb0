"""Compiled programs in files: one file a kernel, with its cases for every capability.

A file is compressed JSON. A module of several programs is stored once, and programs of
different cards differ little, so that together they take a tenth of the space of single files.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
import os
from pathlib import Path
from typing import Any, NamedTuple

from scripts.machine_code.compiled_program import Program, from_json, to_json
from tests.machine_code.case import Capability, Case
from tests.machine_code.freshness import case_digest

FOLDER = Path(__file__).parent / "kept"
MOST_BYTES = 3_000_000
"""Of all files together."""
COMMAND = "python -m tests.machine_code.compile"


class StaleProgram(Exception):
    """Kept machine code that is missing, or is not that of the source."""


class Execution(NamedTuple):
    """Outcome of executing a program.

    Attributes:
        instructions: executed, by all threads together.
        executed: names of the instructions.
        not_executed: names of instructions that its kernels hold, and that no thread executed.
    """

    instructions: int
    executed: list[str]
    not_executed: list[str]


@dataclasses.dataclass
class KeptFile:
    """Programs of one kernel.

    Attributes:
        path: where they are.
        modules: PTX by its digest.
        programs: by capability ("9.0") and case: digest of the source, the program, and the
            outcome of its execution when it was stored.
    """

    path: Path
    modules: dict[str, str]
    programs: dict[str, dict[str, dict[str, Any]]]

    @classmethod
    def read(cls, family: str, folder: Path = FOLDER) -> KeptFile:
        """Read the file of a kernel, or return an empty one."""
        path = folder / f"{family}.json.xz"
        if not path.is_file():
            return cls(path, {}, {})
        return cls(path, **json.loads(lzma.decompress(path.read_bytes())))

    def put(
        self, case: Case, capability: Capability, program: Program, execution: Execution
    ) -> None:
        """Add a program, or replace an earlier one of the case."""
        names = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in program.modules]
        self.modules.update(zip(names, program.modules, strict=True))
        self.programs.setdefault(spell(capability), {})[case.name] = {
            "digest": case_digest(case, capability),
            "modules": names,
            "program": to_json(program),
            **execution._asdict(),
        }

    def get(self, case: Case, capability: Capability) -> Program:
        """Return a case's program.

        Raises:
            StaleProgram: it is not there, or the source has changed since.
        """
        entry = self.programs.get(spell(capability), {}).get(case.name)
        if entry is None or entry["digest"] != case_digest(case, capability):
            why = "is not kept" if entry is None else "was compiled from other source"
            raise StaleProgram(
                f"{case.name} for {spell(capability)} {why}; make it with "
                f"{COMMAND} --capability {spell(capability)} --only '^{case.name}$'"
            )
        return from_json(entry["program"], [self.modules[name] for name in entry["modules"]])

    def executions(self, capability: Capability) -> dict[str, Execution]:
        """Return the stored outcome of executing each case's program."""
        return {
            name: Execution(*(entry[field] for field in Execution._fields))
            for name, entry in self.programs.get(spell(capability), {}).items()
        }

    def drop_others(self, capability: Capability, names: set[str]) -> None:
        """Drop programs of cases that there are no more."""
        programs = self.programs.get(spell(capability), {})
        for name in programs.keys() - names:
            del programs[name]

    def save(self) -> None:
        """Write the file, without modules that no program holds."""
        entries = [entry for programs in self.programs.values() for entry in programs.values()]
        held = {name for entry in entries for name in entry["modules"]}
        data = {
            "modules": {name: self.modules[name] for name in sorted(held)},
            "programs": {
                capability: dict(sorted(programs.items()))
                for capability, programs in sorted(self.programs.items())
            },
        }
        text = json.dumps(data, separators=(",", ":")).encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        os.replace(part, self.path)


@functools.cache
def kept_file(family: str) -> KeptFile:
    """Return the file of a kernel, read once."""
    return KeptFile.read(family)


def spell(capability: Capability) -> str:
    """Write a capability as NVIDIA does: "9.0"."""
    return ".".join(map(str, capability))


def parse_capability(text: str) -> Capability:
    """Read a capability."""
    major, _, minor = text.partition(".")
    return int(major), int(minor or 0)
