"""Source that programs are traced from: the functions that ran meanwhile, and a digest of them.

Programs depend on a tenth of the files that their modules import. So the functions that run while
they are traced are recorded. The digest covers these functions, and the module-level code of their
files and of files that these import, because constants may come from there. Comments, docstrings,
layout and the annotations of functions do not count.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from scripts.lib.paths import ROOT
from tests.machine_code.freshness import plain_tree

PACKAGES = ("jaxserve", "pallas_kernels")

Sources = Mapping[str, list[str]]
"""Functions and methods that ran ("Decoder.logits"), by their file within the checkout."""


@contextlib.contextmanager
def noting_functions(ran: dict[str, set[str]]) -> Iterator[None]:
    """Add the functions of the packages that this thread runs, by their file, to `ran`."""
    folders = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders):
            # A nested definition belongs to its function.
            name = code.co_qualname.partition(".<locals>")[0]
            ran.setdefault(code.co_filename, set()).add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def sources_of(ran: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Return the sources of functions that ran, with the files that theirs import."""
    found = {name: sorted(functions) for name, functions in ran.items()}
    for path in map(Path, ran):
        for imported in _imported_files(path):
            found.setdefault(str(imported), [])
    return {str(Path(name).relative_to(ROOT)): found[name] for name in sorted(found)}


def _imported_files(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
            if name.split(".")[0] in PACKAGES and file.is_file():
                yield file


def digest(sources: Sources, others: Any, root: Path = ROOT) -> str:
    """Return the digest of sources as they are now.

    Args:
        sources: functions by their file.
        others: other dependencies of programs, as JSON values.
        root: of the checkout.
    """
    parts = [json.dumps(others, sort_keys=True)]
    for name, functions in sorted(sources.items()):
        path = root / name
        if path.is_file():
            tree = ast.parse(path.read_text())
            prune(tree, set(functions))
            tree = WithoutAnnotations().visit(tree)
            parts.append(f"{name} {plain_tree(tree)!r}")
        else:
            parts.append(f"{name} is gone")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def prune(node: ast.Module | ast.ClassDef, functions: set[str], prefix: str = "") -> None:
    """Remove functions that did not run, and imports, from a module or a class.

    An imported name is defined in its own file, which counts by itself.
    """
    kept: list[ast.stmt] = []
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if f"{prefix}{child.name}" not in functions:
                continue
        elif isinstance(child, ast.Import | ast.ImportFrom):
            continue
        elif isinstance(child, ast.ClassDef):
            prune(child, functions, f"{prefix}{child.name}.")
        kept.append(child)
    node.body = kept


class WithoutAnnotations(ast.NodeTransformer):
    """Removal of types from functions, whose code does not depend on them."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        """Keep the fields of a class as they are: a dataclass is made of them."""
        node.body = [
            self.visit(child) if isinstance(child, ast.FunctionDef) else child
            for child in node.body
        ]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        if node.value is None:
            return None
        return ast.Assign([node.target], node.value, lineno=node.lineno)
