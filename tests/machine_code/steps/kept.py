"""The programs that tests execute, compiled before and kept in one compressed file."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import lzma
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pallas_kernels.gpu.tuning import TABLES
from scripts.gpu.offline_environment import JAX
from scripts.lib.paths import ROOT
from scripts.machine_code.compiled_program import Program, from_json, to_json
from scripts.machine_code.xla_programs import Executable
from tests.machine_code.case import Capability
from tests.machine_code.cases import CARDS
from tests.machine_code.kept import StaleProgram, spell
from tests.machine_code.steps.models import FAMILIES, MODELS
from tests.machine_code.steps.programs import LOAD_SLOT, SET_ROWS, STATE, Setup, mask_program
from tests.machine_code.steps.sources import Sources, digest

FILE = Path(__file__).parent / "kept.json.xz"
MOST_BYTES = 1_000_000
COMMAND = "python -m tests.machine_code.steps.compile"
SETUP = Setup("llama-float32")
_ALWAYS = (STATE, LOAD_SLOT, SET_ROWS, "32 tokens, 4 rows")
PROGRAMS: Mapping[Capability, tuple[str, ...]] = MappingProxyType(
    {
        (9, 0): (*_ALWAYS, "decode 4, up to 4 steps"),
        (8, 0): (*_ALWAYS, mask_program(1), "greedy decode 4", "decode 4"),
    }
)
"""Names of the programs that are kept for each capability."""


@dataclasses.dataclass
class KeptPrograms:
    """Programs of the setup for each capability.

    Attributes:
        modules: PTX by its digest. Most modules are in several programs.
        programs: by capability ("9.0") and name, without modules.
        sources: functions that they were traced from, by file.
        digest: of the sources, and of all other dependencies.
    """

    modules: dict[str, str]
    programs: dict[str, dict[str, dict[str, Any]]]
    sources: dict[str, list[str]]
    digest: str

    @classmethod
    def read(cls, path: Path = FILE) -> KeptPrograms:
        """Read the file.

        Raises:
            StaleProgram: it is not there.
        """
        if not path.is_file():
            raise StaleProgram(f"{path.name} is not there; make it with {COMMAND}")
        return cls(**json.loads(lzma.decompress(path.read_bytes())))

    @classmethod
    def of(
        cls, compiled: Mapping[Capability, Mapping[str, Program]], sources: Sources
    ) -> KeptPrograms:
        """Build the file's contents of programs that were just compiled."""
        modules: dict[str, str] = {}
        programs: dict[str, dict[str, dict[str, Any]]] = {}
        for capability, named in compiled.items():
            entries = programs[spell(capability)] = {}
            for name, program in named.items():
                keys = [hashlib.sha256(text.encode()).hexdigest()[:12] for text in program.modules]
                modules.update(zip(keys, program.modules, strict=True))
                entries[name] = {"modules": keys, "program": to_json(program)}
        return cls(modules, programs, dict(sources), digest(sources, dependencies()))

    def check(self, root: Path = ROOT) -> None:
        """Compare with the source as it is now.

        Raises:
            StaleProgram: the programs were compiled from other source.
        """
        if self.digest != digest(self.sources, dependencies(), root):
            raise StaleProgram(
                f"{FILE.name} was compiled from other source; make it anew with {COMMAND}"
            )

    def executables(self, capability: Capability) -> dict[str, Executable]:
        """Read the programs for a capability, by name."""
        entries = self.programs[spell(capability)]
        return {
            name: Executable.of(
                from_json(entry["program"], [self.modules[key] for key in entry["modules"]])
            )
            for name, entry in entries.items()
        }

    def save(self, path: Path = FILE) -> int:
        """Write the file. Return its size in bytes."""
        text = json.dumps(dataclasses.asdict(self), separators=(",", ":")).encode()
        part = path.with_name(f"{path.name}.part")
        part.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        os.replace(part, path)
        return path.stat().st_size


def dependencies() -> dict[str, Any]:
    """Return the dependencies of programs beside the source that they are traced from."""
    model = MODELS[SETUP.model]
    tables = {
        f"{spell(capability)}/{path.name}": path.read_text()
        for capability in PROGRAMS
        for path in sorted((TABLES / spell(capability)).glob("*.json"))
    }
    return {
        "setup": dataclasses.asdict(SETUP),
        "programs": list(PROGRAMS.values()),
        "model": [dataclasses.asdict(model), FAMILIES[model.family]],
        "cards": [CARDS[capability] for capability in PROGRAMS],
        "jax": JAX,
        "tables": tables,
    }
