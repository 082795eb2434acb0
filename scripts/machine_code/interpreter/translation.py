"""Translation of basic blocks to Python functions over numpy arrays.

A function gets the machine, its registers R and the mask of the threads that run the block (None
if all do). Instructions that compute are expressions of `forms.py`. The others call a part of the
machine. A register that only one block uses is a local variable there: it does not outlive the
block, so it needs no mask.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np

from scripts.machine_code.faults import Fault, UnknownInstruction
from scripts.machine_code.interpreter import arithmetic, conversions
from scripts.machine_code.interpreter.forms import FORMS
from scripts.machine_code.interpreter.instruction import Instruction
from scripts.machine_code.interpreter.instructions import find_instruction
from scripts.machine_code.interpreter.liveness import local_registers
from scripts.machine_code.interpreter.ptx_types import (
    NUMPY,
    SIZE,
    UNSIGNED,
    numpy_name,
    unsigned_name,
)
from scripts.machine_code.ptx import Kernel

# Instructions of two operands that from 10.0 on may have a third.
TAKES_THREE = re.compile(r"(min|max)(\.ftz)?(\.NaN)?\.f32")
ADDRESS = re.compile(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\w+))?\s*\]")

NAMES: dict[str, Any] = {
    "np": np,
    "where": np.where,
    **{np.dtype(kind).name: kind for kind in NUMPY.values() if kind is not np.bool_},
    **{name: value for name, value in vars(conversions).items() if callable(value)},
    **{name: value for name, value in vars(arithmetic).items() if callable(value)},
}


def block_function(kernel: Kernel, block: int, masked: bool) -> Any:
    """Return the function of a block. `masked`: only some of the threads run it."""
    key = block, masked
    if key not in kernel.functions:
        if block >= len(kernel.blocks):
            raise Fault(f"{kernel.name}: threads run past the kernel's last instruction")
        translator = Translator(kernel, block, masked)
        translator.translate()
        scope = NAMES | translator.constants
        code = compile("\n".join(translator.lines), f"<{kernel.name} block {block}>", "exec")
        exec(code, scope)
        kernel.functions[key] = scope["run"]
    return kernel.functions[key]


class Translator:
    """Translator of one block of a kernel."""

    def __init__(self, kernel: Kernel, block: int, masked: bool) -> None:
        self.kernel, self.number, self.masked = kernel, block, masked
        self.lines = ["def run(M, R, mask):"]
        self.constants: dict[str, Any] = {}
        if not kernel.local_registers:
            kernel.local_registers = local_registers(kernel)
        self.local = kernel.local_registers[block]
        # The numpy type that each local register's array has so far.
        self.held: dict[str, str] = {}
        self.instruction = kernel.blocks[block][0]
        # Whether the expression that is being made depends on the thread.
        self.varies = False

    def translate(self) -> None:
        """Translate all instructions into `lines`."""
        ended = False
        for position, instruction in enumerate(self.kernel.blocks[self.number]):
            self.instruction, self.position, self.varies = instruction, position, False
            ended = self.statement(instruction)
        if not ended:
            self.emit(f"M.jump(mask, {self.number + 1})")

    def statement(self, instruction: Instruction) -> bool:
        """Translate an instruction. Return whether it decides where its threads go on."""
        if instruction.name in FORMS:
            self.compute(instruction)
            return False
        pattern = find_instruction(instruction.name)
        if pattern is None:
            raise self.unknown()
        function, found = pattern
        return bool(function(self, instruction, found))

    def unknown(self) -> UnknownInstruction:
        instruction = self.instruction
        name, line, text = instruction.name, instruction.line, instruction.text
        return UnknownInstruction(self.kernel.name, name, line, text)

    def compute(self, instruction: Instruction) -> None:
        form = FORMS[instruction.name]
        target, *sources = instruction.operands
        if len(sources) == 3 and TAKES_THREE.fullmatch(instruction.name):
            *first, third = (self.value(text, form.result) for text in sources)
            both = form.expression.format(*first)
            self.put(target, form.expression.format(f"({both})", third), form.result)
            return
        if len(sources) != len(form.operands):
            raise self.unknown()
        values = [self.value(text, kind) for text, kind in zip(sources, form.operands, strict=True)]
        self.put(target, form.expression.format(*values), form.result)

    def emit(self, line: str) -> None:
        self.lines.append("    " + line)

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    # Operands

    def value(self, operand: str, kind: str) -> str:
        """Return an expression of an operand as an array, or scalar, of a PTX type."""
        if kind == "immediate":
            return str(int(operand, 0))
        if operand.startswith("!") and kind == "pred":
            return f"~{self.value(operand[1:], kind)}"
        if operand in self.kernel.registers:
            return self.register_value(operand, kind)
        if operand.startswith("%"):
            self.varies = True
            special = f"M.specials[{operand!r}]"
            return special if SIZE[kind] == 4 else f"{special}.astype({numpy_name(kind)})"
        if kind == "pred":
            return self.constant(np.bool_(int(operand)))
        if operand in self.kernel.symbols:
            return self.constant(NUMPY[kind](self.kernel.symbols[operand]))
        if operand in self.kernel.constants:
            return f"{numpy_name(kind)}(M.constants[{operand!r}])"
        return self.constant(self.immediate(operand, kind))

    def register_value(self, name: str, kind: str) -> str:
        self.varies = True
        size = self.kernel.registers[name].size
        text, held = self.read(name)
        if (kind == "pred") != (size == 0):
            raise self.unknown()
        if size == 0:
            return text
        if SIZE[kind] > size:
            raise self.unknown()
        if SIZE[kind] < size:
            if held != unsigned_name(size):
                text = f"{text}.view({unsigned_name(size)})"
            held = unsigned_name(SIZE[kind])
            text = f"{text}.astype({held})"
        return text if held == numpy_name(kind) else f"{text}.view({numpy_name(kind)})"

    def read(self, name: str) -> tuple[str, str]:
        """Return a register's expression, and the numpy type that it has."""
        register = self.kernel.registers[name]
        if name in self.local:
            return f"r{register.index}", self.held[name]
        kind = unsigned_name(register.size) if register.size else "bool"
        return f"R[{register.index}]", kind

    def immediate(self, text: str, kind: str) -> Any:
        """Return a number in the text as a numpy scalar."""
        if text[:2] in ("0f", "0F"):
            width, number = 4, int(text[2:], 16)
        elif text[:2] in ("0d", "0D"):
            width, number = 8, int(text[2:], 16)
        elif np.issubdtype(NUMPY[kind], np.floating):
            # A decimal number, which PTX reads as a double.
            width, number = 8, struct.unpack("<Q", struct.pack("<d", float(text)))[0]
            if kind != "f64":
                raise self.unknown()
        else:
            width, number = SIZE[kind], int(text.rstrip("U"), 0) % (1 << 8 * SIZE[kind])
        if width != SIZE[kind]:
            raise self.unknown()
        return np.array(number, UNSIGNED[width]).view(NUMPY[kind])[()]

    def address(self, operand: str) -> str:
        """Return an expression of the address that an operand in brackets names, in 64 bits."""
        found = ADDRESS.fullmatch(operand)
        if found is None:
            raise self.unknown()
        base, offset = found[1], int(found[2] or "0", 0)
        if base in self.kernel.registers:
            kind = f"b{8 * self.kernel.registers[base].size}"
            text = self.value(base, kind)
            if kind != "b64":
                text = f"{text}.astype(uint64)"
        elif base in self.kernel.symbols or base in self.kernel.constants:
            text = self.value(base, "b64")
        else:
            raise self.unknown()
        return f"{text} + {self.constant(np.uint64(offset % (1 << 64)))}" if offset else text

    def values(self, operands: list[str], kind: str) -> str:
        """Return an expression of a list of operands."""
        return f"[{', '.join(self.value(operand, kind) for operand in operands)}]"

    # Results

    def guard(self) -> str | None:
        """Return the expression of the instruction's own condition, if it has one."""
        if self.instruction.guard is None:
            return None
        name, negated = self.instruction.guard
        text, _ = self.read(name)
        return f"~{text}" if negated else text

    def mask(self) -> str:
        """Return the expression of the mask of the threads that execute the instruction."""
        guard = self.guard()
        if guard is None:
            return "mask"
        return f"(mask & {guard})" if self.masked else guard

    def put(self, target: str, expression: str, kind: str) -> None:
        """Assign an expression of a PTX type to a register, in the threads that execute it."""
        if target == "_":
            return
        register = self.kernel.registers.get(target)
        if register is None or (register.size == 0) != (kind == "pred"):
            raise self.unknown()
        held = numpy_name(kind)
        if SIZE[kind] > register.size:
            raise self.unknown()
        if SIZE[kind] < register.size:
            # A wider register gets the number extended by its sign.
            if kind[0] not in "sub":
                raise self.unknown()
            held = f"int{8 * register.size}" if kind[0] == "s" else unsigned_name(register.size)
            expression = f"({expression}).astype({held})"
        if not self.varies:
            expression = f"np.full(M.count, {expression})"
        if target in self.local:
            self.put_local(target, expression, held)
        else:
            self.put_kept(register.index, expression, held, register.size)

    def put_local(self, target: str, expression: str, held: str) -> None:
        name, before = f"r{self.kernel.registers[target].index}", self.held.get(target, held)
        guard = self.guard()
        if guard is None:
            self.held[target] = held
            self.emit(f"{name} = {expression}")
        else:
            if held != before:
                expression = f"({expression}).view({before})"
            self.emit(f"{name} = where({guard}, {expression}, {name})")

    def put_kept(self, index: int, expression: str, held: str, size: int) -> None:
        if size and held != unsigned_name(size):
            expression = f"({expression}).view({unsigned_name(size)})"
        if self.masked or self.instruction.guard is not None:
            expression = f"where({self.mask()}, {expression}, R[{index}])"
        self.emit(f"R[{index}] = {expression}")

    def call(
        self, method: str, *arguments: str, results: list[str] | None = None, kind: str = "b32"
    ) -> None:
        """Call a part of the machine, with the mask first. Registers get its results."""
        self.emit(f"M.threads.line = {self.instruction.line}")
        text = f"M.{method}({', '.join((self.mask(), *arguments))})"
        if results is None:
            self.emit(text)
            return
        self.varies = True
        self.emit(f"v = {text}")
        for index, target in enumerate(results):
            self.put(target, f"v[{index}]", kind)
