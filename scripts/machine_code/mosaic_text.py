"""Reader of the host code of a Mosaic kernel, from the log of its compiler's passes.

The host code makes the tensor descriptors and launches the kernel. The log is the only readable
form of it, because it is compiled for the host.
"""

from __future__ import annotations

import dataclasses
import re

from scripts.machine_code.compiled_program import Descriptor
from scripts.machine_code.hlo_text import UnreadableHlo

ITEMSIZES = {"bf16": 2, "f16": 2, "f32": 4}
MAKE_MAP = "call @mosaic_gpu_init_tma_desc"
TENSOR = re.compile(r"extract_strided_metadata %\S+ : memref<([\dx]+)x(\w+), strided<\[([\d, ]+)\]")
LAUNCH = re.compile(
    r"gpu\.launch_func .* blocks in \((.*?)\) threads in \((.*?)\)"
    r"\s+dynamic_shared_memory_size %(\S+) args\((.*?)\) "
)


@dataclasses.dataclass(frozen=True)
class HostCode:
    """The launch of a Mosaic kernel, as its host code makes it.

    Attributes:
        grid, threads, shared_memory: sizes.
        arrays: which array of the call each pointer parameter is.
        descriptors: the tensor descriptors in the parameter after the pointers.
    """

    grid: tuple[int, int, int]
    threads: tuple[int, int, int]
    shared_memory: int
    arrays: tuple[int, ...]
    descriptors: tuple[Descriptor, ...]


def read_host_code(log: str) -> HostCode:
    """Read the launch and its descriptors.

    Raises:
        UnreadableHlo: the log has another form.
    """
    stages = re.split(r"^(?=// -----// IR Dump|module @)", log, flags=re.M)
    making = [stage for stage in stages if MAKE_MAP in stage]
    before_lowering = [stage for stage in making if "memref.extract_strided_metadata" in stage]
    launching = [stage for stage in making if "gpu.launch_func" in stage]
    if not before_lowering or not launching:
        raise UnreadableHlo("the log of Mosaic's passes shows no launch with tensor maps")
    # The first stage, before passes take the computation of shapes apart.
    stage, launch = before_lowering[0], launching[0]
    found = LAUNCH.search(launch)
    if found is None:
        raise UnreadableHlo("the launch in the log of Mosaic's passes has another form")
    grid, threads = (
        tuple(_number(launch, name.strip().lstrip("%")) for name in part.split(","))
        for part in (found[1], found[2])
    )
    pointers = re.findall(r"%(\S+) : !llvm\.ptr", found[4])
    return HostCode(
        grid=grid,  # type: ignore[arg-type]
        threads=threads,  # type: ignore[arg-type]
        shared_memory=_number(launch, found[3]),
        arrays=tuple(_array(launch, pointer) for pointer in pointers),
        descriptors=tuple(_descriptors(stage)),
    )


def launch_arrays(log: str) -> tuple[int, ...]:
    """Return which array of the call each parameter of a launch without descriptors is.

    Raises:
        UnreadableHlo: the log has another form.
    """
    stages = re.split(r"^(?=// -----// IR Dump|module @)", log, flags=re.M)
    for stage in reversed(stages):
        found = LAUNCH.search(stage)
        if found is not None and "llvm.load" in stage:
            pointers = re.findall(r"%(\S+) : !llvm\.ptr", found[4])
            return tuple(_array(stage, pointer) for pointer in pointers)
    raise UnreadableHlo("the log of Mosaic's passes shows no launch")


def _number(text: str, name: str) -> int:
    """Return a constant by the name of its value."""
    constant = rf"^\s*%{re.escape(name)} = (?:arith|llvm)\.(?:mlir\.)?constant\(?\s*(-?\d+)"
    found = re.search(constant, text, re.M)
    if found is None:
        raise UnreadableHlo(f"%{name} is no constant in the log of Mosaic's passes")
    return int(found[1])


def _array(text: str, pointer: str) -> int:
    """Return which array of the call a pointer is: its place in the array of pointers."""
    loaded = re.search(rf"%{re.escape(pointer)} = llvm\.load %(\S+) :", text)
    if loaded is None:
        raise UnreadableHlo(f"%{pointer} is not loaded in the log of Mosaic's passes")
    element = re.search(rf"%{re.escape(loaded[1])} = llvm\.getelementptr %\S+?\[(\d+)\]", text)
    return int(element[1]) if element is not None else 0


def _descriptors(stage: str) -> list[Descriptor]:
    """Read the arguments of each call that makes a descriptor."""
    maps, start = [], 0
    for call in re.finditer(re.escape(MAKE_MAP) + r"\((.*?)\)", stage):
        before, start = stage[start : call.start()], call.end()
        arguments = [argument.strip().lstrip("%") for argument in call[1].split(",")]
        shape, dtype, strides = TENSOR.findall(before)[-1]
        sizes = tuple(int(size) for size in shape.split("x"))
        source = re.findall(r"= memref\.transpose %(\S+) \(", before)[0]
        index = re.search(rf"%{re.escape(source)} = .*from_kernel_arg_idx = (\d+)", stage)
        stored = re.findall(r"llvm\.store %(\S+), %\S+ : i64", before)[-len(sizes) :]
        if index is None:
            raise UnreadableHlo(f"%{source} is no argument in the log of Mosaic's passes")
        maps.append(
            Descriptor(
                array=int(index[1]),
                sizes=sizes,
                strides=tuple(int(stride) for stride in strides.split(",")),
                window=tuple(_number(stage, name) for name in stored),
                itemsize=ITEMSIZES[dtype],
                swizzle=_number(stage, arguments[6]),
            )
        )
    return maps
