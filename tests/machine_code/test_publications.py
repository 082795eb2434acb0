"""CTAs that combine the results of all: right, and with every part of the order missing."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.machine_code.faults import Fault
from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.launch import Geometry, launch
from tests.machine_code.snippets import kernel

CTAS, THREADS = 4, 64
# The last CTA to count goes on.
COUNT = """
mov.u32 %r3, found;
setp.eq.u32 %p1, %r0, 0;
@%p1 atom.global.gpu.acq_rel.add.u32 %r4, [%d1], 1;
@%p1 st.shared.b32 [%r3], %r4;
bar.sync 0;
ld.shared.b32 %r4, [%r3];
setp.ne.u32 %p2, %r4, 3;
@%p2 bra $done;
"""
# Every thread stores a number, and the last CTA adds up those of all CTAs, thread by thread.
BODY = (
    """
mov.u32 %r1, %ctaid.x;
mad.lo.u32 %r2, %r1, 64, %r0;
mad.wide.u32 %d3, %r2, 4, %d0;
st.global.b32 [%d3], %r2;
bar.sync 0;
mad.wide.u32 %d6, %r1, 4, %d1;
"""
    + COUNT
    + """
xor.b32 %r6, %r0, 32;
mad.wide.u32 %d4, %r6, 4, %d0;
ld.global.b32 %r10, [%d4];
ld.global.b32 %r11, [%d4+256];
ld.global.b32 %r12, [%d4+512];
ld.global.b32 %r13, [%d4+768];
add.u32 %r10, %r10, %r11;
add.u32 %r12, %r12, %r13;
add.u32 %r10, %r10, %r12;
mad.wide.u32 %d5, %r0, 4, %d2;
st.global.b32 [%d5], %r10;
$done:
"""
)
ATOMIC = "atom.global.gpu.acq_rel.add.u32"
BARRIER = "st.global.b32 [%d3], %r2;\nbar.sync 0;"
# Missing parts: the replaced text, its replacement, and the text of the refusal.
BUGS = {
    "a barrier before": (BARRIER, BARRIER.replace("bar.sync 0;", ""), "not ordered after"),
    "the order": (ATOMIC, ATOMIC.replace(".acq_rel", ".relaxed"), "load not allowed"),
    "the release": (ATOMIC, ATOMIC.replace("acq_rel", "acquire"), "load not allowed"),
    "the acquisition": (ATOMIC, ATOMIC.replace("acq_rel", "release"), "not ordered after"),
    "the scope": (ATOMIC, ATOMIC.replace(".gpu", ".cta"), "not ordered after"),
    "the wait for the last": ("@%p2 bra", "setp.ne.u32 %p2, %r4, 2; @%p2 bra", "not ordered after"),
    "the same place": ("[%d1], 1", "[%d6], 1", "not ordered after"),
}

# All CTAs read the same numbers, and the last one overwrites them.
OVERWRITING = (
    """
xor.b32 %r6, %r0, 32;
mad.wide.u32 %d3, %r0, 4, %d0;
mad.wide.u32 %d4, %r6, 4, %d0;
ld.global.b32 %r10, [%d4];
bar.sync 0;
"""
    + COUNT
    + """
add.u32 %r10, %r10, 7;
st.global.b32 [%d3], %r10;
mad.wide.u32 %d5, %r0, 4, %d2;
st.global.b32 [%d5], %r10;
$done:
"""
)
READ = "[%d4];\nbar.sync 0;"
LOST = {
    "a barrier before": (READ, READ.replace("bar.sync 0;", "")),
    "the order": (ATOMIC, ATOMIC.replace(".acq_rel", ".relaxed")),
    "the release": (ATOMIC, ATOMIC.replace("acq_rel", "acquire")),
    "the acquisition": (ATOMIC, ATOMIC.replace("acq_rel", "release")),
    "the scope": (ATOMIC, ATOMIC.replace(".gpu", ".cta")),
    "the wait for the last": ("@%p2 bra", "setp.ne.u32 %p2, %r4, 2; @%p2 bra"),
}


def run(body: str, order: np.random.Generator | None) -> np.ndarray:
    memory = GlobalMemory(1 << 20)
    stored, counter, sums = (memory.allocate(size, "bytes") for size in (1024, 16, 256))
    counts = range(4) if "[%d6], 1" in body else [0] * 4  # so that the last one is still the last
    memory.write(counter, np.array(counts, np.uint32))
    memory.write(stored, np.arange(256, dtype=np.uint32))
    read = [(stored, 1024)] if body.startswith("\nxor") else []
    memory.permit([(counter, 16), *read], [(stored, 1024), (counter, 16), (sums, 256)])
    code = kernel(body, 3, THREADS, ".shared .align 4 .b8 found[4];")
    geometry = Geometry((CTAS, 1, 1), (THREADS, 1, 1))
    launch(code, memory, geometry, [stored, counter, sums], order=order)
    return memory.read(sums, 256).view(np.uint32)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_last_cta_may_read_what_all_have_published(seed: int | None) -> None:
    order = None if seed is None else np.random.default_rng(seed)
    other = np.arange(THREADS) ^ 32
    np.testing.assert_array_equal(run(BODY, order), 4 * other + 64 * 6)


@pytest.mark.parametrize("name", BUGS)
def test_nothing_of_the_order_may_be_missing(name: str) -> None:
    old, new, refusal = BUGS[name]
    assert old in BODY
    with pytest.raises(Fault, match=refusal):
        run(BODY.replace(old, new), None)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_last_cta_may_overwrite_what_all_have_read(seed: int | None) -> None:
    order = None if seed is None else np.random.default_rng(seed)
    np.testing.assert_array_equal(run(OVERWRITING, order), (np.arange(THREADS) ^ 32) + 7)


@pytest.mark.parametrize("name", LOST)
def test_nothing_may_be_missing_before_an_overwriting_store(name: str) -> None:
    old, new = LOST[name]
    assert old in OVERWRITING
    with pytest.raises(Fault, match="two CTAs touch"):
        run(OVERWRITING.replace(old, new), None)
