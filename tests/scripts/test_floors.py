"""The structure of the scripts: which package may import which, and how."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Whom each package imports besides `lib` and the project itself.
ROOMS: dict[str, tuple[str, ...]] = {
    "lib": (),
    "bench": ("simulate", "demo_model"),
    "serving": (),
    "compare": ("serving",),
    "vllm_tests": ("compare",),
    "simulate": (),
    "gpu": (),
    "demo_model": (),
    "live_demo": ("demo_model",),
    "examples": ("demo_model",),
    "deploy": (),
    "machine_code": (),
}
# Packages that import only themselves, the standard library and these libraries.
ALONE = {"machine_code": {"numpy", "ml_dtypes"}}
# Outside of the packages: two are run by scripts/bootstrap with a bare Python, one writes pages.
LOOSE = ("scripts", "scripts.find_device", "scripts.try_cuda", "scripts.write_pages")

Sources = dict[str, str]


def sources() -> Sources:
    """Return the text of every module below scripts/, by its dotted name."""
    found = {}
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


def imports(source: str) -> Iterator[tuple[str, int, bool]]:
    """Yield (module, line, whether inside a function) of every import."""

    def walk(node: ast.AST, inside: bool) -> Iterator[tuple[str, int, bool]]:
        if isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), node.lineno, inside
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, inside) for alias in node.names)
        inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(ast.parse(source), inside=False)


def room(name: str) -> str:
    """Return the package of a module below `scripts`."""
    return name.split(".")[1] if "." in name else ""


def room_faults(known: Sources) -> Iterator[str]:
    """Yield modules outside the packages, and imports that no package may have."""
    siblings = {name.rpartition(".")[2] for name in known}
    for name, source in known.items():
        if name not in LOOSE and room(name) not in ROOMS:
            yield f"{name} is in none of {', '.join(ROOMS)}"
            continue
        for target, line, _ in imports(source):
            package, to = target.split(".")[0], room(target)
            if package == "tests":
                yield f"{name}:{line} imports {target}; scripts import nothing of the tests"
            if not package or (package == target and package in siblings & set(ROOMS)):
                yield f"{name}:{line} imports {target!r}; write scripts.PACKAGE.MODULE"
            if package == "scripts" and to not in ("lib", room(name), *ROOMS.get(room(name), ())):
                yield f"{name}:{line} imports {target}"


def alone_faults(known: Sources) -> Iterator[str]:
    """Yield imports of a package in `ALONE` from elsewhere, the project's other code included."""
    for name, source in known.items():
        if room(name) not in ALONE:
            continue
        libraries = ALONE[room(name)]
        for target, line, _ in imports(source):
            library = target.split(".")[0]
            is_own = library == "scripts" and room(target) == room(name)
            if not is_own and library not in sys.stdlib_module_names | libraries:
                yield f"{name}:{line} imports {target}; it may import {', '.join(libraries)}"


def cycle_faults(known: Sources) -> Iterator[str]:
    """Yield cycles of packages."""
    edges: dict[str, set[str]] = {}
    for name, source in known.items():
        found = {room(target) for target, *_ in imports(source) if target.startswith("scripts.")}
        edges.setdefault(room(name), set()).update(found - {room(name)})
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        yield f"a cycle of packages: {' -> '.join(error.args[1])}"


def path_faults(known: Sources) -> Iterator[str]:
    """Yield uses of `sys.path`."""
    for name, source in known.items():
        for node in ast.walk(ast.parse(source)):
            is_path = isinstance(node, ast.Attribute) and node.attr == "path"
            if is_path and isinstance(node.value, ast.Name) and node.value.id == "sys":
                yield f"{name}:{node.lineno} uses sys.path"


def late_faults(known: Sources) -> Iterator[str]:
    """Yield functions whose first import has no comment above it that says why."""
    for name, source in known.items():
        lines = source.splitlines()
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                found = [
                    n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)
                ]
                line = min((node.lineno for node in found), default=0)
                if line and not lines[line - 2].strip().startswith("#"):
                    yield f"{name}:{line} imports in a function; a comment must say why"


def docstring_faults(known: Sources) -> Iterator[str]:
    """Yield packages without a docstring of one line."""
    for name in ("scripts", *(f"scripts.{room}" for room in ROOMS)):
        text = ast.get_docstring(ast.parse(known[name])) if name in known else "absent"
        if not text or "\n" in text:
            yield f"{name} must say in one line what it holds"


CHECKS = {
    check.__name__: check
    for check in (
        room_faults,
        alone_faults,
        cycle_faults,
        path_faults,
        late_faults,
        docstring_faults,
    )
}
FAULTY: list[tuple[str, Sources]] = [
    ("room_faults", {"scripts.new.x": ""}),
    ("room_faults", {"scripts.x": ""}),
    ("room_faults", {"scripts.bench.x": "from tests.support import oracle"}),
    ("room_faults", {"scripts.lib.x": "from scripts.bench import offline"}),
    ("room_faults", {"scripts.serving.x": "import scripts.compare.report"}),
    ("room_faults", {"scripts.bench.x": "def f():\n    from scripts.compare import report"}),
    ("room_faults", {"scripts.bench.x": "from .offline import plot"}),
    ("alone_faults", {"scripts.machine_code.x": "import jaxserve.errors"}),
    ("alone_faults", {"scripts.machine_code.a.x": "from pallas_kernels import ops"}),
    ("alone_faults", {"scripts.machine_code.x": "def f():\n    from tests import oracle"}),
    ("alone_faults", {"scripts.machine_code.x": "from scripts.lib import paths"}),
    ("cycle_faults", {"scripts.a.x": "import scripts.b.y", "scripts.b.y": "import scripts.a.x"}),
    ("path_faults", {"scripts.bench.x": "import sys\nsys.path.insert(0, '.')"}),
    ("late_faults", {"scripts.bench.x": "def f():\n    import jax"}),
    ("docstring_faults", {"scripts.bench": "", "scripts": "'''A.'''"}),
]


@pytest.mark.parametrize("check", CHECKS)
def test_structure(check: str) -> None:
    assert list(CHECKS[check](sources())) == []


@pytest.mark.parametrize(("check", "known"), FAULTY)
def test_checks_find_faults(check: str, known: Sources) -> None:
    assert list(CHECKS[check](known))


def test_checks_allow_what_is_right() -> None:
    known = {
        "scripts.bench.x": "import jax\nfrom scripts.bench import offline\nimport jaxserve.errors",
        "scripts.bench.y": "from scripts.lib import paths\nfrom scripts.simulate import loop",
        "scripts.machine_code.x": "import ast, numpy\nfrom scripts.machine_code.a import b",
        "scripts.gpu.x": "def f():\n    # It is slow.\n    import torch\n    import tests_of_torch",
    }
    assert [fault for check in list(CHECKS.values())[:5] for fault in check(known)] == []
