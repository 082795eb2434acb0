"""XLA's list of thunks, with the lists inside branches and loops."""

from __future__ import annotations

import dataclasses
import re

from scripts.machine_code.hlo_text import UnreadableHlo

INDENTATION = 4
"""Spaces by which a list stands further in than what it belongs to."""
THUNK = re.compile(r"(\s*)(\d+): (\w+)\s*(?:\[([^\]]*)\])?\s*(.*)")
EMPTY = "No thunks."
LABEL = re.compile(r"(\s*)(\w+):\s*$")
GEOMETRY = re.compile(
    r"([\w$.\-]+) grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]"
    r".*shared_memory: (\d+)"
)


@dataclasses.dataclass
class Thunk:
    """A launch, copy, branch or loop in XLA's list.

    Attributes:
        kind: "kCustomKernel", "kCopy", "kConditional", "kWhile" or another of XLA's names.
        instruction: name of the HLO instruction, or "" if XLA states none.
        kernel: name of its kernel, or "" without a kernel of XLA's own.
        grid, threads, shared_memory: of a kernel.
        predecessor: distance in the list to the nearest thunk that it waits for, or 0.
        lists: the lists inside it, by XLA's names of them.
        line: as XLA wrote it.
    """

    kind: str
    instruction: str
    line: str
    predecessor: int
    kernel: str = ""
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: tuple[int, int, int] = (1, 1, 1)
    shared_memory: int = 0
    lists: dict[str, list[Thunk]] = dataclasses.field(default_factory=dict)


def read_thunks(sequence: str, metadata: str) -> list[Thunk]:
    """Read the list of a program.

    Args:
        sequence: XLA's dump of the list.
        metadata: its dump of which instruction each thunk is of.
    """
    names = read_names(metadata)
    lists: dict[int, list[Thunk]] = {0: []}  # the open list at each indentation
    last: dict[int, Thunk] = {}
    loop: tuple[int, Thunk] | None = None
    for line in sequence.splitlines():
        found, label = THUNK.match(line), LABEL.match(line)
        if found is not None:
            indent, thunk = len(found[1]), _thunk(found, names)
            lists[indent].append(thunk)
            last[indent] = thunk
            loop = (indent, thunk) if thunk.kind == "kWhile" else loop
        elif label is not None:
            # XLA writes the label of a loop's condition at the start of the line. All other labels
            # are two spaces to the right of their thunk.
            indent = len(label[1]) - 2
            if label[2] == "condition" and loop is not None:
                indent, owner = loop
            else:
                owner = last[indent]
            lists[indent + INDENTATION] = owner.lists[label[2]] = []
        elif line.strip() not in ("", EMPTY):
            raise UnreadableHlo(f"a line of the list of thunks has another form: {line!r}")
    return lists[0]


def read_names(metadata: str) -> dict[int, str]:
    """Return the HLO instruction of each thunk by its number."""
    names = {}
    for block in metadata.split("thunk_metadata {"):
        number = re.search(r"thunk_id: (\d+)", block)
        name = re.search(r'profile_annotation: "([^"]*)"', block)
        if number is not None and name is not None:
            names[int(number[1])] = name[1]
    return names


def _thunk(found: re.Match[str], names: dict[int, str]) -> Thunk:
    back = re.search(r"prev=\d+ \((\d+)\)", found[4] or "")
    thunk = Thunk(
        kind=found[3],
        instruction=names.get(int(found[2]), ""),
        line=found[0].strip(),
        predecessor=int(back[1]) if back is not None else 0,
    )
    geometry = GEOMETRY.search(found[5])
    if geometry is not None:
        x, y, z, *threads, shared_memory = (int(number) for number in geometry.groups()[1:])
        thunk.kernel, thunk.grid = geometry[1], (x, y, z)
        thunk.threads, thunk.shared_memory = tuple(threads), shared_memory  # type: ignore[assignment]
    return thunk
