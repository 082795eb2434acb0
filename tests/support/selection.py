"""Selects the tests of a change, by the graph of imports.

Nodes are files of the repository. A file depends on the modules that it imports, and on files and
modules that it names in a text (`"jaxserve.commands.cli"`, `"scripts/bootstrap"`). A test depends
on the conftest.py files of its folders too. `from package import Name` leads to the module that
defines `Name`, and not to everything that the package's __init__.py imports.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jaxserve", "pallas_kernels", "scripts", "tests")
DAY = "day"  # in place of a commit: the newest one that is more than a day old
STORE = Path.home() / ".cache/jaxserve-tests/references.json"
# A change of one of these files concerns every test.
EVERYWHERE = (
    "pyproject.toml",
    "scripts/bootstrap",
    "scripts/constraints.txt",
    "tests/conftest.py",
    "tests/support/selection.py",
)
# After a change of one of these files the weekly tests run too: it may change all libraries.
LIBRARIES = frozenset({"pyproject.toml", "scripts/constraints.txt"})
# These tests read the whole tree and take seconds, so every selection has them.
READ_THE_TREE = tuple(
    f"tests/test_{name}.py" for name in ("floors", "style", "pages", "installation", "selection")
)
# A text that may name a module or a file of the repository.
NAMES = re.compile(r"[\w.-]*[./][\w./-]*|[A-Z]+")
# Files that the code reads by their folder, and the module that knows the folder.
DATA = {"jaxserve/demo_model/": "jaxserve/settings/config.py"}


class NoHistory(Exception):
    """There is no git, no repository, or no such commit: a tarball, or a clone of depth 1."""


def git(*words: str, root: Path = ROOT) -> str:
    """Run a command of git and return its output.

    Raises:
        NoHistory: it failed.
    """
    try:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise NoHistory(said.strip().splitlines()[-1] if said.strip() else "git failed") from error
    return done.stdout


def day_old_commit(root: Path = ROOT) -> str:
    """Return the newest commit of HEAD's history that is more than a day old.

    Raises:
        NoHistory: no commit is that old, or the clone does not have one.
    """
    before = int(time.time()) - 24 * 60 * 60
    commit = git("rev-list", "-1", f"--before={before}", "HEAD", root=root).strip()
    if not commit:
        raise NoHistory("no commit here is more than a day old")
    return commit


def changed_files(ref: str, root: Path = ROOT) -> frozenset[str]:
    """Return the files that differ from a commit's, with deleted, uncommitted and new ones.

    A Python file of which only comments and docstrings differ has not changed.

    Raises:
        NoHistory: there is no such commit.
    """
    git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}", root=root)
    names = git("diff", "--name-only", "--no-renames", "-z", ref, "--", root=root)
    new = git("ls-files", "--others", "--exclude-standard", "-z", root=root)
    changed = {name for name in (names + new).split("\0") if name}
    python = [name for name in names.split("\0") if name.endswith(".py") and (root / name).exists()]
    before = _texts(ref, python, root)
    return frozenset(
        changed - {name for name in before if _is_same(before[name], (root / name).read_text())}
    )


def _texts(ref: str, names: Iterable[str], root: Path) -> dict[str, str]:
    """Return the texts that a commit has of files, without files that it does not have."""
    names = list(names)
    asked = "".join(f"{ref}:{name}\n" for name in names).encode()
    command = ["git", "cat-file", "--batch"]
    answer = subprocess.run(command, cwd=root, input=asked, capture_output=True, check=True).stdout
    texts, at = {}, 0
    for name in names:
        end = answer.index(b"\n", at)
        head, at = answer[at:end], end + 1
        if head.endswith(b" missing"):
            continue
        size = int(head.rsplit(b" ", 1)[1])
        texts[name], at = answer[at : at + size].decode(), at + size + 1
    return texts


def _is_same(before: str, after: str) -> bool:
    """Return whether two sources are the same code, with other comments and docstrings."""
    try:
        trees = ast.parse(before), ast.parse(after)
    except SyntaxError:
        return False
    for tree in trees:
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            match body:
                case [ast.Expr(value=ast.Constant()), *rest]:
                    node.body = rest  # type: ignore[attr-defined]
    return ast.dump(trees[0]) == ast.dump(trees[1])


class References(NamedTuple):
    """The modules and files that a source may refer to.

    Attributes:
        imports: of each import statement its level, or -1 for `import module`, the module, and the
            imported names with the names that they get.
        texts: texts that match `NAMES`.
        started: modules that a list of words starts, such as [python, "-m", "jaxserve"].
    """

    imports: list[tuple[int, str, list[tuple[str, str]]]]
    texts: list[str]
    started: list[str]


def references(source: str) -> References:
    """Return the references of a Python source."""
    imports: list[tuple[int, str, list[tuple[str, str]]]] = []
    texts, started = set(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and NAMES.fullmatch(node.value):
                texts.add(node.value)
        elif isinstance(node, ast.List | ast.Tuple):
            words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            started += [
                word for before, word in pairwise(words) if before == "-m" and isinstance(word, str)
            ]
        elif isinstance(node, ast.Import):
            imports += [(-1, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(alias.name, alias.asname or alias.name) for alias in node.names]
            imports.append((node.level, node.module or "", names))
    return References(imports, sorted(texts), started)


class KnownReferences:
    """The references of sources, which processes share in a file: parsing the tree takes seconds.

    Args:
        path: the file, or None to keep the references in memory.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        self._has_new = False
        # Of another Python or another version of `references`, the file holds nothing.
        self._version = [sys.version, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
        with suppress(OSError, ValueError):
            version, known = json.loads(path.read_text()) if path is not None else ([], {})
            self._known = known if version == self._version else {}

    def of(self, source: str) -> References:
        """Return the references of a source."""
        key = hashlib.sha256(source.encode()).hexdigest()
        if key not in self._known:
            self._known[key], self._has_new = references(source), True
        return References(*self._known[key])

    def keep(self, sources: Iterable[str]) -> None:
        """Write the references of the sources, if some of them are new, for other processes."""
        if self._path is None or not self._has_new:
            return
        keys = [hashlib.sha256(source.encode()).hexdigest() for source in sources]
        known = {key: self._known[key] for key in keys if key in self._known}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        part.write_text(json.dumps([self._version, known]))
        part.replace(self._path)
        self._has_new = False


def files_of(since: str | None, changed: str | None) -> frozenset[str]:
    """Return the files that changed since one of two commits, of which `DAY` names the day-old one.

    Raises:
        NoHistory: there is no such commit.
    """
    ref = since if changed is None else changed
    if ref is None:
        raise NoHistory("no commit was named")
    return changed_files(day_old_commit() if ref == DAY else ref)


@dataclass
class Graph:
    """Files of the repository, and the files that each depends on.

    Attributes:
        sources: text of each Python file, by its path from the root.
        others: paths of all other files.
        known: the references of the sources.
    """

    sources: Mapping[str, str]
    others: frozenset[str] = frozenset()
    known: KnownReferences = field(default_factory=KnownReferences)
    _edges: dict[str, frozenset[str]] = field(default_factory=dict)
    _closures: dict[str, frozenset[str]] = field(default_factory=dict)

    @classmethod
    def of_tree(cls, root: Path = ROOT) -> Graph:
        """Read all files of the four folders, and the names of the files beside the folders."""
        sources: dict[str, str] = {}
        others = [path.name for path in root.iterdir() if path.is_file()]
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*")):
                name = path.relative_to(root).as_posix()
                if "__pycache__" in name or not path.is_file():
                    continue
                if path.suffix == ".py":
                    sources[name] = path.read_text()
                else:
                    others.append(name)
        graph = cls(sources, frozenset(others), KnownReferences(STORE))
        for source in sources.values():
            graph.known.of(source)
        graph.known.keep(sources.values())
        return graph

    @cached_property
    def modules(self) -> dict[str, str]:
        """Return the path of each module, by its dotted name."""
        dotted = (
            (path.removesuffix(".py").removesuffix("/__init__").replace("/", "."), path)
            for path in self.sources
        )
        return dict(dotted)

    @cached_property
    def homes(self) -> dict[str, dict[str, str]]:
        """Return, by package, the module from which its __init__.py has each name."""
        homes: dict[str, dict[str, str]] = {}
        for package, path in self.modules.items():
            if path.endswith("/__init__.py"):
                homes[package] = {
                    named: self._absolute(level, module, path)
                    for level, module, names in self.known.of(self.sources[path]).imports
                    for _, named in names
                }
        return homes

    def _absolute(self, level: int, module: str, path: str) -> str:
        if not level:
            return module
        package = path.split("/")[:-level]
        return ".".join([*package, module] if module else package)

    def _named(self, module: str, name: str, most: int = 5) -> Iterator[str]:
        # The files that `from module import name` depends on.
        whole = f"{module}.{name}"
        if whole in self.modules:
            yield self.modules[whole]
        elif module in self.modules:
            yield self.modules[module]
            home = self.homes.get(module, {}).get(name)
            if home is not None and home != module and most:
                yield from self._named(home, name, most - 1)

    def _imports(self, path: str) -> Iterator[str]:
        found = self.known.of(self.sources[path])
        is_package = path.endswith("/__init__.py")
        for level, module, names in found.imports:
            if level < 0:
                yield self.modules.get(module, "")
            elif not is_package:  # an importer of a package's name goes to the name's home
                for name, _ in names:
                    yield from self._named(self._absolute(level, module, path), name)
        for text in found.texts:
            yield from self._told(text)
        for module in found.started:
            yield self.modules.get(f"{module}.__main__", self.modules.get(module, ""))

    def _told(self, text: str) -> Iterator[str]:
        # The files that a text names: a module, all modules of a package, a path, or a folder.
        if "." in text and text in self.modules:
            yield self.modules[text]
            yield self.modules.get(f"{text}.__main__", "")
        elif text.endswith(".") and text[:-1] in self.modules:  # f"package.{name}"
            yield from (path for name, path in self.modules.items() if name.startswith(text))
        elif text in self.sources or text in self.others:
            if text not in self.tests:  # which lists of tests name
                yield text
        elif text.startswith("scripts/"):  # a folder
            yield from (name for name in self.others if name.startswith(f"{text}/"))

    def edges(self, path: str) -> frozenset[str]:
        """Return the files that a file depends on directly."""
        if path not in self._edges:
            targets = set(self._imports(path)) if path in self.sources else set()
            if path.startswith("tests/") and path not in EVERYWHERE:
                parents = Path(path).parents
                targets |= {f"{parent}/conftest.py" for parent in parents if str(parent) != "tests"}
            known = self.sources.keys() | self.others
            self._edges[path] = frozenset(targets & known) - {path, "tests/conftest.py"}
        return self._edges[path]

    def reached(self, path: str) -> frozenset[str]:
        """Return the file and all that it depends on, directly or not."""
        if path not in self._closures:
            seen, open_ = {path}, [path]
            while open_:
                for target in self.edges(open_.pop()):
                    if target not in seen:
                        seen.add(target)
                        open_.append(target)
            self._closures[path] = frozenset(seen)
        return self._closures[path]

    def standing_for(self, changed: Iterable[str]) -> frozenset[str]:
        """Return the changed files, and the modules that may read a changed data file.

        A data file stands for the modules of its folder, or of the nearest folder above that has
        modules. So does a module that was deleted.
        """
        files = set()
        for path in changed:
            files.add(path)
            if path in self.sources or path.endswith(".md") or not path.startswith(FOLDERS):
                continue
            data = next((to for folder, to in DATA.items() if path.startswith(folder)), None)
            if data is not None:
                files.add(data)
                continue
            for parent in map(str, Path(path).parents):
                beside = {name for name in self.sources if str(Path(name).parent) == parent}
                if beside:
                    files |= beside
                    break
        return frozenset(files)

    @cached_property
    def tests(self) -> list[str]:
        return [name for name in self.sources if "/test_" in name and name.startswith("tests/")]

    def concerned(self, changed: Iterable[str]) -> list[str]:
        """Return the files of tests that depend on a changed file, and READ_THE_TREE."""
        changed = frozenset(changed)
        if not changed.isdisjoint(EVERYWHERE):
            return self.tests
        stand = self.standing_for(changed)
        return [
            path
            for path in self.tests
            if path in READ_THE_TREE or not self.reached(path).isdisjoint(stand)
        ]


@dataclass(frozen=True)
class Subject:
    """The subject of tests that run only in the weekly job, or after a change of the subject.

    Attributes:
        name: of the group, for the count that a run prints.
        of: path prefixes. A changed file counts if a test depends on it and it is below one.
    """

    name: str
    of: tuple[str, ...]


class Selection:
    """Decides for each test of a run whether it is selected.

    Args:
        changed: the changed files. None selects all tests, because changes are not known.
        only_concerned: select only tests that depend on a changed file (`--changed`).
    """

    def __init__(
        self, graph: Graph, changed: frozenset[str] | None, only_concerned: bool = False
    ) -> None:
        self._graph, self._changed = graph, changed
        self._stand = frozenset() if changed is None else graph.standing_for(changed)
        self._reasons: dict[tuple[str, Subject], str | None] = {}
        self._concerned = None
        if only_concerned and changed is not None:
            self._concerned = frozenset(graph.concerned(changed))

    def reason(self, path: str, subject: Subject | None) -> str | None:
        """Return why a test of a file is left out, or None if it is selected.

        Args:
            subject: of a test that is weekly.
        """
        if self._changed is None:
            return None
        if self._concerned is not None and path not in self._concerned:
            return "nothing that they import changed"
        if subject is None or not LIBRARIES.isdisjoint(self._changed):
            return None
        if (path, subject) not in self._reasons:
            changed = self._graph.reached(path) & self._stand if self._stand else frozenset()
            about = any(name == path or name.startswith(subject.of) for name in changed)
            self._reasons[path, subject] = None if about else f"{subject.name}: unchanged"
        return self._reasons[path, subject]
