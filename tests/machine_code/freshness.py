"""Digests that show whether stored machine code is current.

A digest covers the kernel's module with its imports from `pallas_kernels`, the tables of block
sizes, the card, the compiler's version, and the case. Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pallas_kernels.gpu.tuning import TABLES
from scripts.gpu.offline_environment import JAX
from scripts.lib.paths import ROOT
from tests.machine_code.case import Capability, Case
from tests.machine_code.cases import CARDS

PACKAGE = "pallas_kernels"
# Fields of syntax trees that differ between versions of Python for the same source.
UNSTEADY = frozenset(("ctx", "kind", "type_comment", "type_ignores", "type_params"))


def case_digest(case: Case, capability: Capability, root: Path = ROOT) -> str:
    """Return the digest of everything that a case's machine code depends on."""
    signature = [(shape, str(np.dtype(dtype))) for shape, dtype in case.shapes()]
    tables = sorted((TABLES / ".".join(map(str, capability))).glob("*.json"))
    parts = [
        kernel_digest(case.kernel_module, root),
        JAX,
        CARDS[capability],
        *(path.read_text() for path in tables),
        json.dumps(case.describe()),
        repr(signature),
        repr(call_tree(type(case))),
    ]
    return _digest(parts)


def call_tree(kind: type[Case]) -> Any:
    """Return the tree of the method with which cases of a type call their kernel."""
    source = Path(inspect.getfile(kind)).read_text()
    [body] = [n.body for n in ast.parse(source).body if getattr(n, "name", "") == kind.__name__]
    return plain_tree(next(node for node in body if getattr(node, "name", "") == "call"))


@functools.cache
def kernel_digest(module: str, root: Path = ROOT) -> str:
    """Return the digest of a module with all that it imports from its package."""
    trees = [repr(plain_tree(ast.parse(path.read_text()))) for path in modules_of(module, root)]
    return _digest(trees)


def modules_of(module: str, root: Path = ROOT) -> list[Path]:
    """List the files of a module and of its direct and indirect imports from `pallas_kernels`.

    The package's own `__init__` is left out: it imports all modules, and has no definitions.
    """
    found: set[Path] = set()
    waiting = [module]
    while waiting:
        path = _file_of(waiting.pop(), root)
        if path is None or path in found:
            continue
        found.add(path)
        waiting += imported_names(path.read_text())
    return sorted(found)


def imported_names(source: str) -> Iterator[str]:
    """Yield names of the package that may be modules."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name.startswith(f"{PACKAGE}."))


def _file_of(module: str, root: Path) -> Path | None:
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    return path if path.is_file() else None


def plain_tree(node: Any) -> Any:
    """Convert a syntax tree to nested tuples, the same in every version of Python."""
    if isinstance(node, list):
        return [plain_tree(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = _without_docstring(value)
        if name not in UNSTEADY and value is not None and value != []:
            fields.append((name, plain_tree(value)))
    return type(node).__name__, fields


def _without_docstring(body: list[Any]) -> list[Any]:
    """Leave out the texts that stand by themselves in a body."""
    return [
        node
        for node in body
        if not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
    ]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
