"""A few lines of PTX, run: a thread for each element of the inputs, a store for each output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.launch import Geometry, LaunchReport, launch
from scripts.machine_code.ptx import Kernel, read_module

MEMORY = 1 << 22
REGISTERS = """
.reg .pred %p<16>;
.reg .b16 %h<16>;
.reg .b32 %r<64>;
.reg .b64 %d<192>;
.reg .b64 %address;
"""


def kernel(body: str, parameters: int = 1, threads: int = 32, module: str = "") -> Kernel:
    """Return a kernel whose 64-bit parameters are in %d0, %d1 and so on. %r0 is the thread."""
    names = [f"parameter_{index}" for index in range(parameters)]
    declared = ", ".join(f".param .u64 {name}" for name in names)
    loads = "\n".join(f"ld.param.b64 %d{index}, [{name}];" for index, name in enumerate(names))
    text = f"""{module}
.visible .entry snippet({declared}) .reqntid {threads}, 1, 1
{{
{REGISTERS}
{loads}
mov.u32 %r0, %tid.x;
{body}
ret;
}}
"""
    return read_module(text)["snippet"]


def run(
    body: str,
    inputs: Sequence[np.ndarray] = (),
    outputs: Sequence[tuple[int, Any]] = (),
    *,
    threads: int = 32,
    grid: int = 1,
    dynamic_shared: int = 0,
    module: str = "",
    **options: Any,
) -> list[np.ndarray]:
    """Run a body that addresses its arrays itself: %d0 is the first input, outputs follow.

    `outputs` has counts and types of elements.
    """
    memory = GlobalMemory(MEMORY)
    reads, writes = [], []
    for index, values in enumerate(inputs):
        address = memory.allocate(values.nbytes, f"input {index}")
        memory.write(address, values)
        reads.append((address, values.nbytes))
    for index, (count, kind) in enumerate(outputs):
        size = count * np.dtype(kind).itemsize
        writes.append((memory.allocate(size, f"output {index}"), size))
    memory.permit(reads, writes)
    geometry = Geometry((grid, 1, 1), (threads, 1, 1), dynamic_shared)
    code = kernel(body, len(reads) + len(writes), threads, module)
    arguments = [address for address, _ in reads + writes]
    launch(code, memory, geometry, arguments, **options)
    return [
        memory.read(address, size).view(kind)
        for (address, size), (_, kind) in zip(writes, outputs, strict=True)
    ]


def compute(
    body: str, inputs: Sequence[np.ndarray], outputs: Sequence[Any], registers: str = ""
) -> list[np.ndarray]:
    """Run a body on each element of the inputs, in %a0, %a1 and so on. Results are in %o0 on."""
    count = len(inputs[0])
    lines = [registers]
    for index, values in enumerate(inputs):
        size = values.itemsize
        lines += [
            f".reg .b{max(16, 8 * size)} %a{index};",
            f"mad.wide.u32 %address, %r0, {size}, %d{index};",
            f"ld.global.b{8 * size} %a{index}, [%address];",
        ]
    sizes = [np.dtype(kind).itemsize for kind in outputs]
    lines += [f".reg .b{max(16, 8 * size)} %o{index};" for index, size in enumerate(sizes)]
    lines.append(body)
    for index, size in enumerate(sizes):
        lines += [
            f"mad.wide.u32 %address, %r0, {size}, %d{len(inputs) + index};",
            f"st.global.b{8 * size} [%address], %o{index};",
        ]
    targets = [(count, kind) for kind in outputs]
    return run("\n".join(lines), inputs, targets, threads=count)


__all__ = ["Geometry", "GlobalMemory", "LaunchReport", "compute", "kernel", "launch", "run"]
