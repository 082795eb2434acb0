"""Faults: behavior that the interpreter refuses."""

from __future__ import annotations


class Fault(Exception):
    """Behavior that a kernel must not have. The message names the place and the behavior."""


class UnknownInstruction(Fault):
    """Instruction whose meaning the interpreter does not implement."""

    def __init__(self, kernel: str, name: str, line: int, text: str) -> None:
        super().__init__(f"{kernel} line {line}: unknown instruction {name}: {text}")
        self.name, self.line = name, line
