"""PTX modules as kernels with their parameters, registers, symbols and basic blocks.

The reader understands the output of compilers for a kernel without calls. It refuses any other
directive.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from scripts.machine_code.faults import Fault
from scripts.machine_code.interpreter.instruction import Instruction, parse_instruction
from scripts.machine_code.interpreter.ptx_types import SIZE, UNSIGNED

# Start of a CTA's shared memory. Hardware reserves the first KiB.
SHARED_BASE = 0x400
# Where parameters lie, for kernels that take the address of one.
PARAMETER_BASE = 0x100_0000_0000
PARAMETER_ALIGNMENT = 64
# Instructions after which another block begins. Waiting for an mbarrier may put a thread to sleep.
BLOCK_ENDS = re.compile(r"(bra|ret|exit|trap)\b|bar\.(?!warp)|barrier\.|mbarrier\.(try|test)_wait")

RELEASE = re.compile(r"(atom|red)\..*\b(release|acq_rel)\b")
SHARED_ACCESS = re.compile(r"(?:ld|st|atom|red)\.(?:\w+\.)*shared")
# Wider accesses are made of pieces of this size, which is how swizzled layouts move them.
LARGEST_GRAIN = 16

TOKEN = re.compile(
    r"(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+):(?!:)|(?P<statement>[^;{}][^;]*);"
)
LABEL_IN_SCOPE = re.compile(r"(?:^|[\s;{}])([A-Za-z_$][\w$]*):(?!:)")
WORD = re.compile(r"%?[\w$]+")
REGISTERS = re.compile(r"\.reg\s+\.(pred|[bsuf]\d+)\s+(.*)")
SHARED = re.compile(r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+([\w$]+)(?:\[(\d+)\])?\s*$")
LOCAL = re.compile(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
USED_BYTES = re.compile(r'\.pragma\s+"used_bytes_mask\s+(0x[0-9a-fA-F]+|\d+)"')

EXTERN_SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[\]")
MODULE_SHARED = re.compile(r"^\s*(?:\.visible\s+|\.weak\s+)?(\.shared\s[^;]*);", re.MULTILINE)
CONSTANT = re.compile(
    r"^\s*(?:\.visible\s+)?\.(?:global|const)\s+\.align\s+\d+\s+\.[bus](\d+)\s+([\w$]+)"
    r"(?:\[(\d+)\])?\s*=\s*\{?([^};]*)\}?\s*;",
    re.MULTILINE,
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{]*)\{")
PARAMETER_TYPE = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([busf])(\d+)\s")
THREADS = re.compile(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


@dataclass(frozen=True)
class Register:
    """A register of every thread: its number, and its size in bytes, 0 for a predicate."""

    index: int
    size: int


@dataclass
class Kernel:
    """Kernel of a module, ready to be translated block by block."""

    name: str
    parameters: list[tuple[str, int]]
    # Threads of a CTA, required or at most. None if the kernel does not state it.
    threads: tuple[int, int, int] | None = None
    requires_threads: bool = False
    registers: dict[str, Register] = field(default_factory=dict)
    # Addresses of parameters, and of variables in shared and local memory.
    symbols: dict[str, int] = field(default_factory=dict)
    # Arrays in global memory that the module brings along.
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    static_shared: int = 0
    # Bytes of local memory that each thread has.
    local: int = 0
    blocks: list[list[Instruction]] = field(default_factory=list)
    # Label to number of the block that begins there.
    labels: dict[str, int] = field(default_factory=dict)
    # For each block, the registers that no other one uses. Computed when the first is translated.
    local_registers: list[set[str]] = field(default_factory=list)
    # Registers that an instruction reads, computed at their first use.
    read_registers: set[str] = field(default_factory=set)
    # Translated blocks, by number and whether a mask is applied.
    functions: dict[tuple[int, bool], object] = field(default_factory=dict)

    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block

    def has(self, prefix: str) -> bool:
        """Tell whether an instruction's name begins with `prefix`."""
        return any(instruction.name.startswith(prefix) for instruction in self.instructions())

    @functools.cached_property
    def has_grid_wait(self) -> bool:
        """Whether the kernel waits for the launch before it by itself."""
        return self.has("griddepcontrol.wait")

    @functools.cached_property
    def has_wgmma(self) -> bool:
        return self.has("wgmma")

    @functools.cached_property
    def releases(self) -> bool:
        """Whether it has atomic operations that publish earlier stores."""
        return any(RELEASE.match(instruction.name) for instruction in self.instructions())

    @functools.cached_property
    def shared_grain(self) -> int:
        """Size of the smallest access to shared memory, 16 bytes at most."""
        sizes = [LARGEST_GRAIN]
        for instruction in self.instructions():
            if SHARED_ACCESS.match(instruction.name):
                vector = re.search(r"\.v(\d)", instruction.name)
                sizes.append(SIZE[instruction.parts[-1]] * int(vector[1] if vector else 1))
            elif re.match(r"cp\.async\.c[ag]\b", instruction.name):
                sizes.append(int(instruction.operands[2], 0))
        return min(sizes)


def read_module(text: str) -> dict[str, Kernel]:
    """Read the kernels of a PTX module, by name."""
    text = re.sub(r"//[^\n]*", "", text)
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"^[ \t]*\.(loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    head = text[: text.find(".entry")] if ".entry" in text else text
    constants = {found[2]: constant_bytes(found) for found in CONSTANT.finditer(head)}
    kernels = {}
    for found in ENTRY.finditer(text):
        kernel = Kernel(found[1], list(read_parameters(found[2])), constants=constants)
        sizes = THREADS.search(found[3])
        if sizes:
            x, y, z = (int(size or 1) for size in sizes.groups())
            kernel.threads = (x, y, z)
            kernel.requires_threads = ".reqntid" in found[3]
        body = text[found.end() : closing_brace(text, found.end() - 1)]
        BodyReader(kernel).read(body, text.count("\n", 0, found.end()) + 1)
        for declaration in MODULE_SHARED.finditer(head):
            declare_shared(kernel, " ".join(declaration[1].split()))
        for alignment, name in EXTERN_SHARED.findall(head):
            kernel.static_shared = round_up(kernel.static_shared, int(alignment))
            kernel.symbols[name] = SHARED_BASE + kernel.static_shared
        kernels[kernel.name] = kernel
    return kernels


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def closing_brace(text: str, begin: int) -> int:
    """Return where the brace that opens at `begin` is closed."""
    depth = 0
    for found in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return begin + found.start()
    raise Fault(f"a brace of line {text.count(chr(10), 0, begin) + 1} is never closed")


def constant_bytes(found: re.Match[str]) -> np.ndarray:
    """Return the bytes of a constant array. Elements without an initial value are zero."""
    width = int(found[1]) // 8
    limit = 1 << 8 * width
    numbers = [int(word, 0) % limit for word in found[4].split(",")]
    numbers += [0] * (int(found[3] or 1) - len(numbers))
    return np.array(numbers, UNSIGNED[width]).view(np.uint8)


def read_parameters(text: str) -> Iterator[tuple[str, int]]:
    for piece in text.split(","):
        if not piece.strip():
            continue
        name = re.search(r"([\w$]+)\s*(?:\[(\d+)\])?\s*$", piece)
        kind = PARAMETER_TYPE.search(piece)
        if name is None or kind is None:
            raise Fault(f"not a parameter: {' '.join(piece.split())}")
        yield name[1], int(kind[2]) // 8 * int(name[2] or 1)


def declare_shared(kernel: Kernel, text: str) -> None:
    found = SHARED.match(text)
    if found is None:
        raise Fault(f"{kernel.name}: not a variable in shared memory: {text}")
    size = int(found[2]) // 8
    start = round_up(kernel.static_shared, int(found[1] or size))
    kernel.symbols[found[3]] = SHARED_BASE + start
    kernel.static_shared = start + size * int(found[4] or 1)


class BodyReader:
    """Reader of a kernel's body. Names that an inner scope declares are local to it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        # For each open scope, the names in the kernel by the names in the scope.
        self.scopes: list[dict[str, str]] = []
        self.used_bytes: int | None = None
        self.block: list[Instruction] = []

    def read(self, body: str, line: int) -> None:
        """Read all statements of a body whose first line is `line`."""
        place = 0
        for name, size in self.kernel.parameters:
            self.kernel.symbols[name] = PARAMETER_BASE + place
            place = round_up(place + size, PARAMETER_ALIGNMENT)
        position = 0
        while True:
            skipped = len(body) - len(body[position:].lstrip()) - position
            line += body.count("\n", position, position + skipped)
            position += skipped
            if position == len(body):
                break
            found = TOKEN.match(body, position)
            if found is None:
                raise Fault(f"{self.kernel.name} line {line}: not PTX: {body[position:][:60]}")
            self.take(found, body, line)
            line += body.count("\n", position, found.end())
            position = found.end()
        self.end_block()

    def take(self, found: re.Match[str], body: str, line: int) -> None:
        if found["open"]:
            inside = body[found.start() : closing_brace(body, found.start())]
            labels = LABEL_IN_SCOPE.findall(inside)
            self.scopes.append({label: f"{label}$scope{found.start()}" for label in labels})
        elif found["close"]:
            self.scopes.pop()
        elif found["label"]:
            self.end_block()
            self.kernel.labels[self.renamed(found["label"])] = len(self.kernel.blocks)
        else:
            self.statement(" ".join(found["statement"].split()), line)

    def renamed(self, text: str) -> str:
        """Replace the names of inner scopes by names in the kernel, the innermost scope first."""
        for scope in reversed(self.scopes):
            if scope:
                text = WORD.sub(lambda word, scope=scope: scope.get(word[0], word[0]), text)
        return text

    def end_block(self) -> None:
        if self.block:
            self.kernel.blocks.append(self.block)
            self.block = []

    def statement(self, text: str, line: int) -> None:
        if not text.startswith("."):
            instruction = parse_instruction(self.renamed(text), line, self.used_bytes)
            self.used_bytes = None
            self.block.append(instruction)
            if BLOCK_ENDS.match(instruction.name):
                self.end_block()
        elif text.startswith(".reg"):
            self.declare_registers(text, line)
        elif text.startswith(".shared"):
            declare_shared(self.kernel, text)
        elif text.startswith(".local"):
            self.declare_local(text, line)
        elif text.startswith(".pragma"):
            found = USED_BYTES.match(text)
            self.used_bytes = int(found[1], 0) if found else self.used_bytes
        else:
            raise Fault(f"{self.kernel.name} line {line}: unknown directive {text}")

    def declare_local(self, text: str, line: int) -> None:
        found = LOCAL.match(text)
        if found is None:
            raise Fault(f"{self.kernel.name} line {line}: not a local array: {text}")
        start = round_up(self.kernel.local, int(found[1]))
        self.kernel.symbols[found[2]] = start
        self.kernel.local = start + int(found[3])

    def declare_registers(self, text: str, line: int) -> None:
        """Add registers. 8-bit registers become 16-bit ones, because instructions read 16 bits."""
        found = REGISTERS.match(text)
        if found is None:
            raise Fault(f"{self.kernel.name} line {line}: unknown registers {text}")
        size = 0 if found[1] == "pred" else max(2, int(found[1][1:]) // 8)
        if size > 8:
            raise Fault(f"{self.kernel.name} line {line}: registers of 8 bytes at most, not {text}")
        for item in found[2].split(","):
            numbered = re.match(r"(%?[\w$]+)<(\d+)>", item.strip())
            names = [item.strip()]
            if numbered:
                names = [f"{numbered[1]}{number}" for number in range(int(numbered[2]))]
            for name in names:
                self.declare_register(name, size)

    def declare_register(self, name: str, size: int) -> None:
        registers = self.kernel.registers
        if self.scopes:
            own = f"%scoped{len(registers)}"
            self.scopes[-1][name] = own
            name = own
        registers[name] = Register(len(registers), size)
