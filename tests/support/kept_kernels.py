"""Machine code of CPU kernels in files of a run, so that LLVM compiles each kernel once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import llvmlite

from pallas_kernels.cpu import ffi


def keep_machine_code(folder: Path) -> None:
    """Read machine code from a folder in this process from now on, and add to it.

    The name of a file is a digest of all that determines the code: the text that LLVM compiles, the
    processor, the options and LLVM's version.
    """
    compile_module = ffi.machine_code

    def machine_code(module: Any, cpu: Any, *options: Any, **named: Any) -> bytes:
        asked = f"{llvmlite.__version__} {cpu!r} {options} {named} {module}"
        path = folder / hashlib.sha256(asked.encode()).hexdigest()
        if path.exists():
            return path.read_bytes()
        code = compile_module(module, cpu, *options, **named)
        part = folder / f".{path.name}.{os.getpid()}"
        part.write_bytes(code)
        part.replace(path)
        return code

    ffi.machine_code = machine_code
