"""Memory that is given back: free heap, and pages of libraries that are the file's own."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.start import garbage
from jaxserve.start.garbage import return_memory

HEADER = re.compile(r"([0-9a-f]+)-[0-9a-f]+ \S+ \S+ \S+ \d+")


def resident(kind: str) -> int:
    """Return kB of the process's memory of one kind."""
    found = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def elf(path: Path, *segments: tuple[int, int, int]) -> str:
    """Write an ELF file that only has these program headers: kind, flags, offset."""
    header = bytearray(64)
    header[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<Q", header, 32, 64)
    struct.pack_into("<HH", header, 54, 56, len(segments))
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, 0, 0, 9, 9, 4096)
        for kind, flags, offset in segments
    )
    path.write_bytes(bytes(header) + table)
    return str(path)


def test_libraries_lose_their_pages_and_work_on() -> None:
    twice = jax.jit(lambda x: jnp.sin(x) * 2)
    before = twice(jnp.arange(5.0))
    pages = resident("RssFile")
    return_memory()
    assert resident("RssFile") < pages / 2
    assert (twice(jnp.arange(5.0)) == before).all()
    # The compiler too.
    assert jax.jit(lambda x: jnp.cos(x).sum())(jnp.zeros(7)) == 7


def test_no_mapping_with_pages_of_its_own_is_given_back() -> None:
    jax.jit(jnp.sin)(1.0)
    chosen = {first for first, _ in garbage._unchanged_mappings()}
    own: dict[int, int] = {}
    place = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if header := HEADER.match(line):
            place = int(header[1], 16)
        elif line.startswith("Anonymous:"):
            own[place] = int(line.split()[1])
    assert len(chosen) > 3
    assert [own[first] for first in chosen] == [0] * len(chosen)


def test_the_free_heap_goes_back() -> None:
    blocks = [bytes(2000) for _ in range(50_000)]
    kept = bytes(2000)  # at the end of the heap, which keeps the C library from shrinking it
    full = resident("RssAnon")
    del blocks
    return_memory()
    assert full - resident("RssAnon") > 50_000
    assert len(kept) == 2000


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([(1, 4, 0), (1, 5, 0x3000), (1, 6, 0x9000)], {0, 0x3000}),
        # The end of one segment and the begin of a written one share a page.
        ([(1, 4, 0), (1, 5, 0x3010), (1, 6, 0x3F00)], {0}),
        # Parts that are not loaded, such as RELRO, which lists the pages that the loader closes
        # afterwards.
        ([(1, 4, 0), (0x6474E552, 4, 0x9000), (1, 6, 0x9000)], {0}),
        ([], set()),
    ],
)
def test_only_segments_that_are_never_written_are_unchanged(
    tmp_path: Path, segments: list[tuple[int, int, int]], expected: set[int]
) -> None:
    assert garbage._unchanged_offsets(elf(tmp_path / "lib.so", *segments)) == expected


@pytest.mark.parametrize(
    "content", [b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + b"\0" * 99]
)
def test_what_is_no_elf_file_has_no_segments(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert garbage._unchanged_offsets(str(tmp_path / "file")) == set()
    assert garbage._unchanged_offsets(str(tmp_path / "missing")) == set()
