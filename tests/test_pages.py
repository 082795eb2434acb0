"""The pages that explain the project: their trees, commands, paths and lengths are true.

A tree is a fenced block below `<!-- tree FOLDER: folders -->` or `<!-- tree FOLDER: modules -->`. A
line begins with names, commas between them, two spaces of indentation a level; a folder ends in a
slash. A level that is listed at all is complete: every folder, and with "modules" every module of
FOLDER itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
# Most lines of each page; None for pages that grow with their lists.
PAGES: dict[str, int | None] = {
    "README.md": 70,
    "BUILD.md": 200,
    "jaxserve/README.md": 60,
    "jaxserve/commands/README.md": 60,
    "jaxserve/engine/README.md": 60,
    "jaxserve/execution/README.md": 60,
    "jaxserve/fleet/README.md": 60,
    "jaxserve/models/README.md": 60,
    "jaxserve/scheduling/README.md": 60,
    "jaxserve/server/README.md": 80,
    "jaxserve/start/README.md": 60,
    "jaxserve/integrations/README.md": 60,
    "jaxserve/pure/README.md": 60,
    "jaxserve/weights/README.md": 60,
    "jaxserve/settings/README.md": 60,
    "pallas_kernels/README.md": 60,
    "pallas_kernels/gpu/README.md": 60,
    "scripts/README.md": 60,
    "scripts/gpu/README.md": 60,
    "scripts/deploy/README.md": 80,
    "scripts/machine_code/README.md": 60,
    "tests/README.md": 60,
    "tests/machine_code/README.md": 60,
    "tests/machine_code/steps/README.md": 60,
    "scripts/results/README.md": None,
    ".github/CONTRIBUTING.md": 60,
}
MOST_CHARACTERS = 120
# Pages with shorter lines.
NARROW_PAGES = ("README.md", "BUILD.md", "jaxserve/start/README.md")
MOST_NARROW_CHARACTERS = 88
GENERATED = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)
TREE = re.compile(r"<!-- tree (\S+): (folders|modules) -->\n```\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"python3? -m ([\w.]+)")
STALE_COMMAND = re.compile(r"python3? (?:scripts|tests)/\S+")
MACHINE_PATH = re.compile(r"(?<![\w.~}])/(?:root|work|tmp|home|mnt|Users)/\S*")
LINK = re.compile(r"\]\(([^)#:]+)\)")
QUOTED = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
# Something that only a path looks like: slashes between plain names, or a known ending.
PATH = re.compile(r"\.?[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|json|txt|toml|yml|yaml|csv|png))")
PATH_OF_NAMES = re.compile(r"\.?[\w-]+(?:/[\w.-]+)+")
# Words that resemble paths, and files that do not lie here.
NO_PATHS = frozenset(
    "org/name config.json tokenizer.json generation_config.json gpu_report.json engine_x.py "
    "scripts/compare/engine_x.py jaxserve/models/families/x.py families/x.py".split()
)


@cache
def files() -> frozenset[str]:
    """Return every file of the project, as a path from its root, except files that git ignores."""
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if not is_ignored(name)]
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
    return frozenset(found)


def is_ignored(folder: str) -> bool:
    hidden = folder.startswith(".") and folder not in (".github", ".ci")
    return hidden or folder in ("__pycache__", "build", "dist") or folder.endswith(".egg-info")


def page(name: str) -> str:
    return (ROOT / name).read_text()


def folders_of(names: frozenset[str], folder: str) -> set[str]:
    """Return the folders right in a folder ("." for the root), without hidden ones."""
    return {parts[0] + "/" for parts in below(names, folder) if len(parts) > 1}


def modules_of(names: frozenset[str], folder: str) -> set[str]:
    found = {parts[0] for parts in below(names, folder) if len(parts) == 1}
    return {name[:-3] for name in found if name.endswith(".py") and name != "__init__.py"}


def below(names: frozenset[str], folder: str) -> Iterator[tuple[str, ...]]:
    for name in names:
        path = PurePosixPath(name)
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).parts
            if not parts[0].startswith("."):
                yield parts


def tree_entries(folder: str, block: str) -> dict[str, set[str]]:
    """Return the names that a tree lists, by their folder."""
    entries: dict[str, set[str]] = {folder: set()}
    levels = [folder]
    for line in block.splitlines():
        if not line.strip():
            continue
        level = (len(line) - len(line.lstrip())) // 2
        names = [name.strip() for name in re.split(r"\s{2,}|(?<=/) ", line.strip())[0].split(",")]
        entries.setdefault(levels[level], set()).update(names)
        if names[-1].endswith("/"):
            levels[level + 1 :] = [str(PurePosixPath(levels[level]) / names[-1])]
    return entries


def tree_faults(text: str, names: frozenset[str]) -> Iterator[str]:
    for folder, kind, block in TREE.findall(text):
        for place, listed in tree_entries(folder, block).items():
            actual = folders_of(names, place)
            if kind == "modules" and place == folder:
                actual |= modules_of(names, place)
            for name in sorted(actual - listed):
                yield f"the tree of {folder} leaves out {place}/{name}"
            for name in sorted(listed - actual):
                yield f"the tree of {folder} lists {place}/{name}, which does not exist"


def command_faults(text: str, names: frozenset[str]) -> Iterator[str]:
    for module in COMMAND.findall(text):
        path = module.replace(".", "/")
        if module.split(".")[0] in ("jaxserve", "pallas_kernels", "scripts", "tests"):
            exists = f"{path}.py" in names or f"{path}/__main__.py" in names
        else:
            exists = find_spec(module.split(".")[0]) is not None
        if not exists:
            yield f"there is no module for `python -m {module}`"
    for command in STALE_COMMAND.findall(text):
        yield f"`{command}` is run as a module here: python -m ..."


def path_faults(text: str, names: frozenset[str], folder: str = ".") -> Iterator[str]:
    """Yield quoted paths and links that lead nowhere.

    A quoted path may leave out its first folders.
    """
    for link in LINK.findall(text):
        at = os.path.normpath(PurePosixPath(folder) / link)
        if at not in names and not any(n.startswith(f"{at}/") for n in names):
            yield f"the link to {link} leads nowhere"
    for quoted in QUOTED.findall(FENCE.sub("", text)):
        if quoted in NO_PATHS or not (PATH.fullmatch(quoted) or PATH_OF_NAMES.fullmatch(quoted)):
            continue
        wanted = quoted.rstrip("/")
        if not any(f"/{name}/".find(f"/{wanted}/") >= 0 for name in names):
            yield f"`{quoted}` does not exist"


def machine_faults(text: str) -> Iterator[str]:
    for path in MACHINE_PATH.findall(text):
        yield f"{path} is a path of one machine"


def length_faults(text: str, most: int | None) -> Iterator[str]:
    lines = text.count("\n")
    if most is not None and lines > most:
        yield f"{lines} lines; at most {most}"
    for number, line in enumerate(GENERATED.sub("", text).splitlines(), 1):
        is_bounded = not line.startswith(("|", "jaxserve generate "))
        if is_bounded and len(line) > MOST_CHARACTERS:
            yield f"line {number} has {len(line)} characters; at most {MOST_CHARACTERS}"


def width_faults(text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MOST_NARROW_CHARACTERS:
            yield f"line {number} has {len(line)} characters; at most {MOST_NARROW_CHARACTERS}"


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str) -> None:
    text, written = page(name), GENERATED.sub("", page(name))
    folder = str(PurePosixPath(name).parent)
    faults = [
        *tree_faults(text, files()),
        *command_faults(written, files()),
        *path_faults(written, files(), folder),
        *machine_faults(text),
        *length_faults(text, PAGES[name]),
        *(width_faults(text) if name in NARROW_PAGES else ()),
    ]
    assert faults == []


def test_every_page_is_checked() -> None:
    """Pages outside PAGES are cards and tables, which programs or other projects write."""
    others = {"jaxserve/demo_model/README.md", "scripts/traces/README.md"}
    pages = {name for name in files() if name.endswith(("README.md", "BUILD.md"))}
    assert pages - others <= PAGES.keys()


def test_readme_lists_what_the_rooms_list() -> None:
    """The four rooms of the tree have a page each."""
    rooms = folders_of(files(), ".")
    assert rooms == {"jaxserve/", "pallas_kernels/", "scripts/", "tests/"}
    assert {f"{room}README.md" for room in rooms} <= PAGES.keys()


NAMES = frozenset(["a/x.py", "a/b/y.py", "a/b/__init__.py", "a/c/z.py", "a/run/__main__.py"])
RIGHT = "<!-- tree a: modules -->\n```\nx       text\nb/      text\nc/, run/  text\n```"


def test_a_true_tree_passes() -> None:
    assert list(tree_faults(RIGHT, NAMES)) == []
    nested = "<!-- tree .: folders -->\n```\na/   text\n  b/, c/   text\n  run/\n```"
    assert list(tree_faults(nested, NAMES)) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("b/      text\n", "", "leaves out a/b/"),
        ("x       text\n", "", "leaves out a/x"),
        ("c/,", "c/, d/,", "lists a/d/, which"),
        ("x  ", "x, y  ", "lists a/y, which"),
        ("b/      text\n", "b/      text\n  d/    text\n", "lists a/b/d/, which"),
    ],
)
def test_a_false_tree_is_found(old: str, new: str, fault: str) -> None:
    [found] = tree_faults(RIGHT.replace(old, new), NAMES)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    ["python -m scripts.none", "python -m tests.none", "python -m nonesuch", "python3 -m a.b"],
)
def test_a_command_that_is_no_module_is_found(text: str) -> None:
    assert list(command_faults(text, files()))


def test_commands_that_are_modules_pass() -> None:
    assert list(command_faults("`python -m pytest`, python -m tests.equivalence -x", files())) == []
    assert list(command_faults("python scripts/bench.py", files()))


@pytest.mark.parametrize(
    "text", ["`a/none.py`", "`b/none`", "`none.py`", "[x](none.md)", "`x/b/y.py`", "`b/`, `d/`"]
)
def test_a_path_that_does_not_exist_is_found(text: str) -> None:
    assert len(list(path_faults(text, NAMES))) == 1


def test_paths_that_exist_pass() -> None:
    text = "`b/y.py`, `a/b`, `y.py`, `/health`, `n / k`, `org/name`, [y](b/y.py), [z](c)"
    assert list(path_faults(text, NAMES, "a")) == []


@pytest.mark.parametrize(
    "path", ["/home/someone/x", "`/mnt/disk`", "(/Users/someone)", "/home/someone/.cache"]
)
def test_a_path_of_one_machine_is_found(path: str) -> None:
    assert list(machine_faults(f"see {path}"))
    assert list(machine_faults("~/.cache/home/x and scripts/mnt/y")) == []


def test_long_pages_and_long_lines_are_found() -> None:
    assert list(length_faults("a\n" * 3, 2)) == ["3 lines; at most 2"]
    assert list(length_faults("a" * 121, None)) == ["line 1 has 121 characters; at most 120"]
    assert list(length_faults("|" + "a" * 200, 1)) == []
    assert len(list(width_faults("|" + "a" * 88))) == 1
