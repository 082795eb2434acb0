"""Counts of the words, names and list literals that the style of this project limits.

`python -m tests.prose jaxserve/text` prints the counts of a folder or page, and each line that
adds to them.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# Counted in docstrings, comments and pages, per 1,000 words.
COUNTED = {
    "what": re.compile(r"\bwhat\b", re.IGNORECASE),
    "nothing": re.compile(r"\b(?:[Nn]othing|[Nn]obody|none)\b"),
    "those": re.compile(r"\b(?:those|whoever)\b", re.IGNORECASE),
    "semicolons": re.compile(";"),
}
VAGUE_NAMES = frozenset(("made", "found", "own", "left", "given", "kept", "wanted", "held"))
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# Generated parts of pages, and quotations of sentences that are advised against.
NOT_PROSE = re.compile(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", re.DOTALL)

Line = tuple[int, str]


def python_prose(source: str) -> Iterator[Line]:
    """Yield the lines of docstrings and comments of a module, with their numbers."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            continue
        if ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            for number in range(text.lineno, text.end_lineno + 1):
                yield number, lines[number - 1]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def page_prose(text: str) -> Iterator[Line]:
    """Yield the lines of a page that are neither code nor written by a command."""
    for pattern in (FENCE, NOT_PROSE):
        text = pattern.sub(lambda match: "\n" * match.group().count("\n"), text)
    yield from enumerate(text.splitlines(), 1)


def prose(path: Path) -> list[Line]:
    """Return the prose of a module or a page, line by line."""
    read = python_prose if path.suffix == ".py" else page_prose
    return list(read(path.read_text()))


def rates(paths: list[Path]) -> dict[str, float]:
    """Return how often each of COUNTED occurs in the prose of files, per 1,000 words."""
    texts = [line for path in paths for _, line in prose(path)]
    words = sum(len(WORD.findall(text)) for text in texts)
    counts = {name: sum(len(r.findall(t)) for t in texts) for name, r in COUNTED.items()}
    return {name: 1000 * count / max(words, 1) for name, count in counts.items()}


def vague_names(source: str) -> Iterator[Line]:
    """Yield the variables and parameters of a module that have one of VAGUE_NAMES."""
    for node in ast.walk(ast.parse(source)):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
        if name in VAGUE_NAMES:
            yield getattr(node, "lineno", 1), name


def starred_literals(source: str) -> Iterator[Line]:
    """Yield the tuple and list literals that are unpacked in place, as in `f(*(a, b))`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, "*(...)"


def long_signatures(source: str, most: int = 8) -> Iterator[Line]:
    """Yield the functions with more than `most` parameters, `self` and `cls` excluded."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            count = len([arg for arg in args if arg.arg not in ("self", "cls")])
            if count > most:
                yield node.lineno, f"{node.name} has {count} parameters"


def short_docstrings(source: str, most: int = 12) -> Iterator[Line]:
    """Yield the private functions of fewer than `most` lines that have a docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            private = node.name.startswith("_") and not node.name.startswith("__")
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if private and lines < most and ast.get_docstring(node) is not None:
                yield node.lineno, f"{node.name} has a docstring"


def main(names: list[str]) -> None:
    """Print counts and lines of the folders and files of `names`."""
    paths: list[Path] = []
    for name in names:
        path = Path(name)
        found = (
            [p for end in ("*.py", "*.md") for p in path.rglob(end)] if path.is_dir() else [path]
        )
        paths += sorted(found)
    checks = (vague_names, starred_literals, long_signatures, short_docstrings)
    for path in paths:
        for number, line in prose(path):
            hits = [name for name, pattern in COUNTED.items() if pattern.search(line)]
            if hits:
                print(f"{path}:{number}: {', '.join(hits)}: {line.strip()}")
        for check in checks if path.suffix == ".py" else ():
            for number, text in check(path.read_text()):
                print(f"{path}:{number}: {check.__name__}: {text}")
    print({name: round(rate, 2) for name, rate in rates(paths).items()})
    sources = [path.read_text() for path in paths if path.suffix == ".py"]
    print({check.__name__: sum(len(list(check(s))) for s in sources) for check in checks})


if __name__ == "__main__":
    main(sys.argv[1:])
