"""Compilation for an absent card, and readers of the compiler's dumps.

Runs inside the environment that ``compile_offline.py`` makes. XLA and ptxas leave files in a dump
directory, from which this module reads registers, spills, shared memory, instruction counts,
launches, command buffers (CUDA graphs) and copies. They have no execution times.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from scripts.gpu.launch_order import memory_micros, neighbours, order_faults, read_order
from scripts.gpu.targets import Target

INSTRUCTIONS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS")
"""Warpgroup matrix product, warp matrix product, TMA load, asynchronous copy to shared memory."""


@dataclasses.dataclass(frozen=True)
class Dumps:
    """Folders of the compilers' dumps, as XLA_FLAGS and MOSAIC_GPU_DUMP_TO name them."""

    xla: pathlib.Path
    mosaic: pathlib.Path

    def clear(self) -> None:
        for folder in (self.xla, self.mosaic):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)


@dataclasses.dataclass
class Compiled:
    """Result of compiling one jitted function."""

    kernels: list[dict[str, Any]]
    launches: int
    command_buffers: int
    launches_outside: int
    kv_copies: int
    temp_mib: float
    alias_mib: float


@dataclasses.dataclass(frozen=True)
class Compiler:
    """Compiler for one card, which is not there.

    Attributes:
        target: the card.
        dumps: where it leaves its traces.
        disassembles: count instructions too, which takes longer than compiling.
        orders: read the order of loads of every kernel, XLA's too.
    """

    target: Target
    dumps: Dumps
    disassembles: bool = False
    orders: bool = False

    def compile(
        self,
        function: Callable[..., Any],
        shapes: tuple[Any, ...],
        donate: tuple[int, ...] = (),
        keep_unused: bool = False,
    ) -> Any:
        """Compile ``function`` on trees of ShapeDtypeStruct.

        Args:
            donate: arguments whose memory the program takes over.
            keep_unused: keep arguments that the program does not read.
        """
        return self.target.lower(function, shapes, donate, keep_unused).compile()

    def row(
        self,
        name: str,
        function: Callable[..., Any],
        shapes: tuple[Any, ...],
        kernels: tuple[str, ...],
        copied: tuple[int, ...],
        donate: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """Compile a case and describe the result.

        Args:
            function, shapes, donate: as in `compile`.
            kernels: parts of names of the kernels to assemble and report.
            copied: shape of the page arrays, or of weights. Copies of this shape are counted.
        """
        self.dumps.clear()
        executable = self.compile(function, shapes, donate)
        assemble = functools.partial(
            _assemble, arch=self.target.arch, disassembles=self.disassembles
        )
        result = analyse(executable, self.dumps, assemble, copied, kernels)
        described = {"name": name, **dataclasses.asdict(result)}
        if self.orders:
            described |= _read_orders(executable.as_text(), self.dumps, self.target.arch)
        return described


def _disassembler() -> str | None:
    found = shutil.which("nvdisasm")
    if found:
        return found
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    path = pathlib.Path(triton.origin).parent / "backends/nvidia/bin/nvdisasm"
    return str(path) if path.is_file() else None


def _assemble(ptx: pathlib.Path, arch: str, disassembles: bool) -> dict[str, Any]:
    """Read registers, spills and instruction counts of the one kernel in a PTX file."""
    cubin = ptx.with_suffix(".assembled")
    run = subprocess.run(
        ["ptxas", "-v", f"-arch={arch}", str(ptx), "-o", str(cubin)],
        capture_output=True,
        text=True,
        check=True,
    )
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", run.stderr)
    report: dict[str, Any] = {
        "registers": max(int(r) for r in re.findall(r"Used (\d+) registers", run.stderr)),
        "spill_bytes": sum(int(s) for s in spills),
    }
    tool = _disassembler() if disassembles else None
    if tool is not None:
        sass = subprocess.run(
            [tool, "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
        for name in INSTRUCTIONS:
            report[name] = len(re.findall(rf"\b{name}\b", sass))
    return report


def _read_orders(hlo: str, dumps: Dumps, arch: str) -> dict[str, Any]:
    """Read the order of loads of every kernel that was made, by its name."""
    tool, found = _disassembler(), {}
    assert tool is not None
    for ptx in [*dumps.xla.glob("*.ptx"), *dumps.mosaic.glob("*.ptx")]:
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx.read_text())
        if entry is None:
            continue
        cubin = ptx.with_suffix(".ordered")
        subprocess.run(["ptxas", f"-arch={arch}", str(ptx), "-o", str(cubin)], check=True)
        run = subprocess.run([tool, "-c", str(cubin)], capture_output=True, text=True, check=True)
        found[entry[1]] = read_order(run.stdout)
    thunks = "\n".join(p.read_text() for p in dumps.xla.glob("*.thunk_sequence.txt"))
    return {
        "order": found,
        "order_faults": order_faults(found, neighbours(thunks)),
        "memory_us": memory_micros(hlo),
    }


def _shared_memory(dumps: Dumps, kernel: str, thunks: str) -> int | None:
    launch = re.search(rf"\b{re.escape(kernel)} grid: .*shared_memory: (\d+) bytes", thunks)
    if launch:
        return int(launch[1])
    sizes = [
        int(m[1])
        for path in dumps.mosaic.glob("*.resources.txt")
        if (m := re.search(r"smem_scratch_bytes=(\d+)", path.read_text()))
    ]
    return max(sizes, default=None)


def _launches(text: str) -> list[str]:
    return [
        line
        for line in text.splitlines()
        if re.search(r": k(?!CommandBuffer|Sequential|WaitForStreams)\w+", line)
    ]


def analyse(
    executable: Any,
    dumps: Dumps,
    assemble: Callable[[pathlib.Path], dict[str, Any]],
    copied: tuple[int, ...],
    kernels: tuple[str, ...],
) -> Compiled:
    """Read the dumps of the one compilation made since ``dumps.clear()``.

    Args:
        assemble: reads registers and spills of the kernel in a PTX file.
        copied, kernels: see `Compiler.row`.
    """
    before = "\n".join(p.read_text() for p in dumps.xla.glob("*.thunk_sequence.txt"))
    after = "\n".join(
        p.read_text() for p in dumps.xla.glob("*.thunk_sequence_after_thunk_passes.txt")
    )
    found = {}
    for ptx in [*dumps.xla.glob("*.ptx"), *dumps.mosaic.glob("*.ptx")]:
        entry = re.search(r"\.entry\s+([\w$]+)\s*\(", ptx.read_text())
        if entry and any(name in entry[1] for name in kernels):
            size = _shared_memory(dumps, entry[1], before)
            found[entry[1]] = {"name": entry[1], "shared_memory": size, **assemble(ptx)}
    hlo = executable.as_text()
    shape = re.escape(",".join(map(str, copied)))
    copies = len(re.findall(rf"= [^=\n]*\[{shape}\][^=\n]* copy(?:-start)?\(", hlo))
    memory = executable.memory_analysis()
    outside = [line for line in _launches(after) if not line.startswith("    ")]
    return Compiled(
        kernels=sorted(found.values(), key=lambda k: k["name"]),
        launches=len(_launches(before)),
        command_buffers=len(re.findall(r"kCommandBuffer", after)),
        launches_outside=len(outside),
        kv_copies=copies,
        temp_mib=round(memory.temp_size_in_bytes / 2**20, 2),
        alias_mib=round(memory.alias_size_in_bytes / 2**20, 2),
    )
