"""Compilation of cases for cards that are not there, by a worker in the offline environment."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from scripts.gpu.offline_environment import compiler_variables, default_folder, make_environment
from scripts.machine_code.compiled_program import Program, from_json
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS


class NotCompiled(Exception):
    """Reason why a case has no program."""


class OfflineCompiler:
    """Compiler for the card of one capability: a process that is started when it is needed.

    It is started again where the compiler ends it: LLVM does where it lacks an instruction.
    """

    def __init__(self, capability: Capability, environment: Path | None = None):
        """Describe the compiler.

        Args:
            capability: one of those that have a card.
            environment: folder of the environment; made where it is not there.
        """
        self.capability = capability
        self._interpreter = make_environment(environment or default_folder())
        self._folder = tempfile.TemporaryDirectory(prefix="jaxserve-compile-")
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> OfflineCompiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end_process()
        self._folder.cleanup()

    def compile(self, case: Case) -> Program:
        """Compile the call of a case.

        Raises:
            NotCompiled: it cannot be.
        """
        out = Path(self._folder.name) / "program.json"
        if self.process is None:
            self.process = self._start(out)
        process = self.process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(case.describe()) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline().strip()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self.end_process()
            raise NotCompiled(f"{case.name}: the compiler ended the process")
        if answer != "compiled":
            raise NotCompiled(f"{case.name}: {answer}")
        data = json.loads(out.read_text())
        return from_json(data, data["modules"])

    def _start(self, out: Path) -> subprocess.Popen[str]:
        work = Path(self._folder.name)
        variables = compiler_variables(self._interpreter.parents[1], work, whole_constants=True)
        command = [str(self._interpreter), "-m", "tests.machine_code.compile_worker"]
        return subprocess.Popen(
            [*command, CARDS[self.capability], str(work), str(out)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def end_process(self) -> None:
        """End the process; the next case starts another."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # of a line that it never read
                        pipe.close()
            self.process = None
