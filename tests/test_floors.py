"""The structure of the code base: who may import whom, and how large things may grow."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.fast_compile import FAST

ROOT = Path(__file__).parent.parent
PACKAGES = ("jaxserve", "pallas_kernels")

# The floor of each package or module. An import goes to a lower floor or stays in its package.
FLOORS = {
    "pallas_kernels": 0,
    "jaxserve.errors": 1,
    "jaxserve.structured": 1,
    "jaxserve.request": 1,
    "jaxserve.outputs": 1,
    "jaxserve.settings": 1,
    "jaxserve.start.garbage": 1,
    "jaxserve.start.interrupts": 1,
    "jaxserve": 1,  # names are resolved on first use, so it imports no module itself
    "jaxserve.scheduling": 2,
    "jaxserve.models": 2,
    "jaxserve.weights": 3,
    "jaxserve.text": 3,
    "jaxserve.execution": 4,
    "jaxserve.pure": 5,
    "jaxserve.start": 5,
    "jaxserve.engine": 6,
    "jaxserve.integrations": 7,
    "jaxserve.server": 7,
    "jaxserve.fleet": 8,
    "jaxserve.ray_app": 9,
    "jaxserve.commands": 9,
    "jaxserve.__main__": 10,
}
BASE = (
    *("jaxserve.errors", "jaxserve.structured", "jaxserve.request", "jaxserve.outputs"),
    *("jaxserve.settings", "jaxserve", "jaxserve.start.garbage", "jaxserve.start.interrupts"),
)
# All that crosses from the host half to the device half.
SEAM = tuple(f"jaxserve.scheduling.{name}" for name in ("plan", "logprobs", "slot_table"))
# Which modules may import a library. The prefix of a package stands for all of its modules.
HOMES = {
    "jax": (
        *("pallas_kernels", "jaxserve.models", "jaxserve.weights", "jaxserve.execution"),
        *("jaxserve.pure", "jaxserve.start", "jaxserve.integrations"),
    ),
    "starlette": ("jaxserve.server", "jaxserve.fleet"),
    "tunix": ("jaxserve.integrations.tunix",),
    "ray": ("jaxserve.fleet", "jaxserve.ray_app"),
    "python_multipart": ("jaxserve.server.api.upload",),
    "uvicorn": ("jaxserve.server",),
    "h11": ("jaxserve.server.http",),
    "msgspec": (
        *("jaxserve.server", "jaxserve.commands.batch_file", "jaxserve.commands.terminal"),
        *("jaxserve.commands.bench", "jaxserve.engine.kv_events"),
        # Only where it is installed: the engine runs without the server's libraries.
        "jaxserve.text.tokenizer_parts",
    ),
    "zmq": ("jaxserve.engine.event_peer", "jaxserve.engine.event_publisher"),
    "prometheus_client": ("jaxserve.server",),
    "opentelemetry": ("jaxserve.server.served.tracing",),
    "httpx2": (
        "jaxserve.start.sources.hub",
        "jaxserve.commands.terminal",
        "jaxserve.commands.bench",
    ),
    "transformers": ("jaxserve.text",),
    "tokenizers": ("jaxserve.text",),
    "huggingface_hub": ("jaxserve.start.sources.hub",),
    "gguf": ("jaxserve.weights.gguf",),
    "orbax": ("jaxserve.weights.converted",),
    "llvmlite": ("pallas_kernels.cpu",),
    "llguidance": ("jaxserve.text.grammars",),
    "rich": ("jaxserve.commands",),
    "yaml": ("jaxserve.commands.parser",),
    "torch": (),
}
HOMES |= dict.fromkeys(("jaxlib", "flax", "jaxtyping", "ml_dtypes"), HOMES["jax"])
# Third-party libraries that whole packages are limited to.
ONLY = {
    "pallas_kernels": {"jax", "jaxlib", "numpy", "llvmlite"},
    "jaxserve.scheduling": {"numpy"},
    "jaxserve.errors": set(),
    "jaxserve.structured": set(),
    "jaxserve.request": set(),
    "jaxserve.outputs": set(),
    "jaxserve.settings": set(),
    "jaxserve.start.garbage": set(),
    "jaxserve.start.interrupts": set(),
}
FORBIDDEN_ENDINGS = ("Manager", "Handler", "Helper", "Mixin")
MOST_LINES = {"jaxserve": 500, "pallas_kernels": 600}
MOST_FUNCTION_LINES = 60
# Share of the files that have at most 300 lines.
SHORT_FILE_LINES, SHORT_FILES = 300, 0.8
# Fewest lines of a module with one importer, except families and commands.
FEWEST_LINES = 60
ROOT_MODULES = {"__init__", "__main__", "errors", "outputs", "ray_app", "request", "structured"}
MOST_READER_LINES = 150

Modules = dict[str, str]


@cache
def modules() -> Modules:
    """Return the sources of modules by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def home_of(name: str) -> str:
    """Return the entry of FLOORS for a module: the longest that fits."""
    if name == "jaxserve":
        return name
    homes = [home for home in FLOORS if home != "jaxserve" and within(name, home)]
    assert homes, f"{name} has no floor: put it in a package, or in FLOORS"
    return max(homes, key=len)


def walk(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield every node below, and whether it stands in a function."""
    for child in ast.iter_child_nodes(node):
        yield child, inside
        function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from walk(child, inside or function)


@cache
def nodes_of(source: str) -> list[tuple[ast.AST, bool]]:
    """Return every node of a source, and whether it stands in a function."""
    return list(walk(ast.parse(source)))


@cache
def importing(source: str) -> list[tuple[ast.AST, bool]]:
    """Return the nodes that may name a module: checks read them once, and some once a folder."""
    kinds = ast.Import | ast.ImportFrom | ast.Constant
    return [(node, inside) for node, inside in nodes_of(source) if isinstance(node, kinds)]


def imports(name: str, known: Modules) -> Iterator[tuple[str, bool]]:
    """Yield the imports of a module, as dotted names, and whether each is in a function.

    Imports for type checkers count too, except in jaxserve/__init__, which has no others. A text
    that is the name of a module is an import for the sake of a fast start.
    """
    if name == "jaxserve":
        return
    for node, inside in importing(known[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module), inside
        elif isinstance(node, ast.Constant) and node.value in known and "." in str(node.value):
            yield str(node.value), False


def floor_faults(known: Modules) -> Iterator[str]:
    for name in known:
        home = home_of(name)
        for target, inside in imports(name, known):
            if target.split(".")[0] not in PACKAGES:
                continue
            if inside:
                yield f"{name} imports {target} in a function"
            to = home_of(target)
            if FLOORS[to] >= FLOORS[home] and to != home and not {to, home} <= set(BASE):
                yield f"{name} (floor {FLOORS[home]}) imports {target} (floor {FLOORS[to]})"
            if home == "jaxserve.execution" and to == "jaxserve.scheduling" and target not in SEAM:
                yield f"{name} imports {target}; execution may only import {', '.join(SEAM)}"


def library_faults(known: Modules) -> Iterator[str]:
    for name in known:
        for target, _ in imports(name, known):
            library = target.split(".")[0]
            homes = HOMES.get(library)
            if homes is not None and not any(within(name, home) for home in homes):
                yield f"{name} imports {library}, which belongs in {', '.join(homes) or 'tests'}"
            for package, allowed in ONLY.items():
                ours = library in sys.stdlib_module_names or library in PACKAGES
                if within(name, package) and not ours and library not in allowed:
                    yield f"{name} imports {library}; {package} may only import {allowed or '-'}"


def cycle_faults(known: Modules) -> Iterator[str]:
    edges = {n: {t for t, _ in imports(n, known) if t in known and t != n} for n in known}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        yield f"a cycle of imports: {' -> '.join(error.args[1])}"


def rooms(folder: str, known: Modules) -> dict[str, set[str]]:
    """Return the imports between a folder's rooms: a room is a module or a folder in it."""

    def room(name: str) -> str:
        return ".".join(name.split(".")[: folder.count(".") + 2])

    graph: dict[str, set[str]] = {}
    for name in (name for name in known if name.startswith(folder + ".")):
        targets = {target for target, _ in imports(name, known) if target in known}
        found = {room(target) for target in targets if target.startswith(folder + ".")}
        graph.setdefault(room(name), set()).update(found - {room(name)})
    return graph


def room_faults(known: Modules) -> Iterator[str]:
    """Yield rooms that import each other, in any folder."""
    parts = [name.split(".") for name in known]
    for folder in sorted({".".join(p[:at]) for p in parts for at in range(1, len(p))}):
        try:
            TopologicalSorter(rooms(folder, known)).prepare()
        except CycleError as error:
            yield f"a cycle of rooms in {folder}: {' -> '.join(error.args[1])}"


def environment_faults(known: Modules) -> Iterator[str]:
    for name, source in known.items():
        for node, _ in nodes_of(source):
            named = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
            if named and name != "jaxserve.settings.environment":
                yield f"{name} reads the environment; only jaxserve.settings.environment may"


def name_faults(known: Modules) -> Iterator[str]:
    for name, source in known.items():
        for node, _ in nodes_of(source):
            if isinstance(node, ast.ClassDef) and node.name.endswith(FORBIDDEN_ENDINGS):
                yield f"{name}: class {node.name} says nothing by its ending"


def size_faults(known: Modules) -> Iterator[str]:
    for name, source in known.items():
        package, lines = name.split(".")[0], source.count("\n")
        if lines > MOST_LINES[package]:
            yield f"{name} has {lines} lines; at most {MOST_LINES[package]}"
        if package == "pallas_kernels":
            continue
        for node, _ in nodes_of(source):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MOST_FUNCTION_LINES:
                    yield f"{name}.{node.name} has {length} lines; at most {MOST_FUNCTION_LINES}"


def fragment_faults(known: Modules) -> Iterator[str]:
    """Yield the short modules with one importer, which should be part of it."""
    importers: dict[str, set[str]] = {}
    for name in known:
        for target, _ in imports(name, known):
            if target in known and target != name:
                importers.setdefault(target, set()).add(name)
    apart = ("jaxserve.models.families", "jaxserve.commands")
    for name, others in importers.items():
        if any(within(name, package) for package in apart) or known[name].count("\n") < 2:
            continue
        if len(others) == 1 and known[name].count("\n") < FEWEST_LINES:
            yield f"{name} has {known[name].count(chr(10))} lines and one importer, {min(others)}"


CHECKS = {
    check.__name__: check
    for check in (
        *(floor_faults, library_faults, cycle_faults, room_faults),
        *(environment_faults, name_faults, size_faults, fragment_faults),
    )
}


@pytest.mark.parametrize("check", CHECKS)
def test_structure(check: str) -> None:
    assert list(CHECKS[check](modules())) == []


def test_most_files_are_short() -> None:
    short = [source.count("\n") <= SHORT_FILE_LINES for source in modules().values()]
    assert sum(short) / len(short) >= SHORT_FILES


def test_the_root_has_the_values_of_callers() -> None:
    assert {path.stem for path in (ROOT / "jaxserve").glob("*.py")} == ROOT_MODULES


def test_one_short_reader_answers_names_that_are_not_served() -> None:
    assert modules()["jaxserve.settings.compat"].count("\n") <= MOST_READER_LINES
    assert [
        name for name, source in modules().items() if re.search(r"\bUNSUPPORTED\b", source)
    ] == []


def test_sizes_of_a_step_are_read_where_the_start_is_planned() -> None:
    pattern = re.compile(r"\b(?:config|resolved)\.max_(?:num_seqs|model_len)\b")
    readers = {name for name, source in modules().items() if pattern.search(source)}
    planners = ("jaxserve.settings", "jaxserve.start.plan")
    assert [name for name in readers if not any(within(name, p) for p in planners)] == []


QUICK = {"XLA_FLAGS": " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items())}
LONG = "def f():\n" + "    pass\n" * 60
# Sources with one fault each, and the check that must find it.
FAULTY: list[tuple[str, Modules]] = [
    ("floor_faults", {"jaxserve.request": "from jaxserve.engine.llm import LLM"}),
    ("floor_faults", {"jaxserve.scheduling.x": "from jaxserve.models import Decoder"}),
    ("floor_faults", {"jaxserve.models.x": "import jaxserve.scheduling.plan"}),
    ("floor_faults", {"jaxserve.engine.x": "from jaxserve.server import app"}),
    ("floor_faults", {"jaxserve.engine.x": "import jaxserve.commands.cli"}),
    ("floor_faults", {"jaxserve.execution.x": "import jaxserve.scheduling.scheduler"}),
    ("floor_faults", {"pallas_kernels.x": "import jaxserve"}),
    ("floor_faults", {"jaxserve.engine.x": "def f():\n    from jaxserve.engine import y"}),
    ("library_faults", {"jaxserve.scheduling.x": "import jax.numpy as jnp"}),
    ("library_faults", {"jaxserve.scheduling.x": "from scipy import stats"}),
    ("library_faults", {"jaxserve.engine.x": "def f():\n    import jax"}),
    ("library_faults", {"jaxserve.engine.x": "from transformers import AutoTokenizer"}),
    ("library_faults", {"jaxserve.engine.x": "import starlette"}),
    ("library_faults", {"pallas_kernels.x": "import flax"}),
    ("library_faults", {"jaxserve.weights.x": "import torch"}),
    ("library_faults", {"jaxserve.engine.x": "from huggingface_hub import HfApi"}),
    ("library_faults", {"jaxserve.engine.x": "import orbax.checkpoint"}),
    ("library_faults", {"jaxserve.models.x": "import gguf"}),
    ("library_faults", {"jaxserve.request": "import numpy"}),
    (
        "cycle_faults",
        {
            "jaxserve.engine.x": "import jaxserve.engine.y",
            "jaxserve.engine.y": "import jaxserve.engine.x",
        },
    ),
    (
        "room_faults",
        {
            "jaxserve.server.api.x": "import jaxserve.server.y",
            "jaxserve.server.api.z": "",
            "jaxserve.server.y": "import jaxserve.server.api.z",
        },
    ),
    ("floor_faults", {"jaxserve.engine.x": "A = 'jaxserve.server.y'", "jaxserve.server.y": ""}),
    ("environment_faults", {"jaxserve.engine.x": "import os\nos.environ['A']"}),
    ("environment_faults", {"jaxserve.engine.x": "import os\nos.getenv('A')"}),
    ("name_faults", {"jaxserve.engine.x": "class CacheManager: ..."}),
    ("size_faults", {"jaxserve.engine.x": "\n" * 501}),
    ("size_faults", {"pallas_kernels.x": "\n" * 601}),
    ("size_faults", {"jaxserve.engine.x": LONG}),
    (
        "fragment_faults",
        {"jaxserve.engine.x": "import jaxserve.engine.y", "jaxserve.engine.y": "\n" * 59},
    ),
]


@pytest.mark.parametrize(("check", "known"), FAULTY)
def test_checks_find_faults(check: str, known: Modules) -> None:
    assert list(CHECKS[check](known))


def test_checks_allow_what_is_right() -> None:
    known = {
        "jaxserve.engine.x": "import numpy, jaxserve.engine.y\nfrom jaxserve.errors import E",
        "jaxserve.engine.y": "from jaxserve.scheduling.scheduler import Scheduler",
        "jaxserve.execution.x": "import jax\nfrom jaxserve.scheduling.plan import Row",
        "jaxserve.models.x": "import jax\nfrom pallas_kernels import ops",
        "pallas_kernels.x": LONG,
    }
    assert [fault for check in CHECKS.values() for fault in check(known)] == []


def loads(statement: str, blocked: tuple[str, ...]) -> None:
    """Run a statement in a fresh interpreter in which importing any of `blocked` fails."""
    names = sorted(modules())
    code = f"import sys\nfor name in {blocked}: sys.modules[name] = None\n{statement}"
    run = [sys.executable, "-c", code.replace("ALL", repr(names))]
    result = subprocess.run(
        run, cwd=ROOT, env=os.environ | QUICK, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


EVERY_SCHEDULING_MODULE = (
    "import importlib\n"
    "for name in ALL:\n"
    "    if name.startswith('jaxserve.scheduling'): importlib.import_module(name)"
)


def test_scheduling_runs_without_jax() -> None:
    loads(EVERY_SCHEDULING_MODULE, ("jax", "jaxlib", "flax", "torch", "transformers"))


def test_importing_jaxserve_loads_no_large_library() -> None:
    loads("import jaxserve", ("jax", "jaxlib", "torch", "starlette", "transformers", "numpy"))


def test_blocking_an_import_is_noticed() -> None:
    with pytest.raises(AssertionError, match="import of jax halted"):
        loads("import jaxserve.models", ("jax",))


SERVER_LIBRARIES = (
    *("starlette", "uvicorn", "h11", "msgspec", "prometheus_client", "python_multipart"),
)
ANSWER = """
import jaxserve
small = dict(max_num_seqs=1, max_num_batched_tokens=16, decode_sizes=(1,), token_sizes=(16,))
with jaxserve.LLM(max_model_len=64, compilation_cache_dir="none", **small) as llm:
    [output] = llm.generate("a", jaxserve.SamplingParams(max_tokens=2, ignore_eos=True))
assert len(output.outputs[0].token_ids) == 2, output
"""


def test_the_engine_needs_only_jax_flax_and_transformers_with_what_they_bring() -> None:
    """A machine with a GPU may have no more than that."""
    blocked = ("jaxtyping", "llguidance", "llvmlite", "gguf", "orbax", "torch")
    loads("import jaxserve.engine.llm", blocked + SERVER_LIBRARIES)


def test_a_model_answers_without_the_libraries_of_the_server_and_of_gguf() -> None:
    loads(ANSWER, ("gguf", *SERVER_LIBRARIES))
