"""Everything that the interpreter refuses, each on a bug planted into code that is right."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from scripts.machine_code.faults import Fault, UnknownInstruction
from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.launch import Geometry, TensorMap, launch
from scripts.machine_code.ptx import read_module
from tests.machine_code.snippets import REGISTERS, kernel

SIZE = 4096
# Where the bodies begin in their modules.
LINE = 15


class Bug(NamedTuple):
    """Bug: code that runs, a replacement in it, and the text of the refusal.

    %d0 is an array that may be read, %d1 one that may be written, and %d2 one for both, of which
    only the first half is written; all of 4096 bytes.
    """

    refusal: str
    body: str
    old: str
    new: str
    options: Mapping[str, Any] = MappingProxyType({})


def run(bug: Bug, body: str) -> None:
    options = dict(bug.options)
    threads, grid = options.pop("threads", 32), options.pop("grid", 1)
    memory = GlobalMemory(1 << 20)
    source, target, both = (memory.allocate(SIZE, name) for name in ("source", "target", "both"))
    memory.write(source, np.arange(SIZE // 4, dtype=np.uint32))
    memory.write(both, np.arange(SIZE // 8, dtype=np.uint32))
    memory.permit([(source, SIZE), (both, SIZE)], [(target, SIZE), (both, SIZE)])
    geometry = Geometry((grid, 1, 1), (threads, 1, 1))
    launch(kernel(body, 3, threads), memory, geometry, [source, target, both], **options)


OFFSET = "mad.wide.u32 %d3, %r0, 4, %d0; mad.wide.u32 %d4, %r0, 4, %d1;"
LOAD = OFFSET + "ld.global.b32 %r1, [%d3]; st.global.b32 [%d4], %r1;"
CTA = "mov.u32 %r2, %ctaid.x; mad.wide.u32 %d3, %r2, 4, %d2;"
FIRST = "setp.eq.u32 %p1, %r0, 0;"

GLOBAL = {
    "a load past the end": Bug(
        "load not allowed: source.4096. of 4096", LOAD, "[%d3]", "[%d3+4096]"
    ),
    "a load before the array": Bug("load not allowed: source.-4.", LOAD, "[%d3]", "[%d3+-4]"),
    "a load of what may be written only": Bug("load not allowed: target", LOAD, "[%d3]", "[%d4]"),
    "a store to what may be read only": Bug("store not allowed: source", LOAD, "[%d4]", "[%d3]"),
    "an address of 32 bits": Bug(
        "load not allowed: no array",
        LOAD,
        "ld.global.b32 %r1, [%d3]",
        "cvt.u32.u64 %r5, %d3; ld.global.b32 %r1, [%r5]",
    ),
    "a misaligned load": Bug("load of 4 bytes at a misaligned", LOAD, "[%d3]", "[%d3+2]"),
    "a misaligned vector": Bug(
        "store of 8 bytes at a misaligned",
        FIRST + "@%p1 st.global.v2.b32 [%d1+8], {%r0, %r0};",
        "+8",
        "+4",
    ),
    "a load of what was never written": Bug(
        "load of what was never written: both.2048.",
        "ld.global.b32 %r1, [%d2+2044]; st.global.b32 [%d1], %r1;",
        "2044",
        "2048",
    ),
    "an atomic on what was never written": Bug(
        "atomic of what was never written", "red.global.add.u32 [%d2], 1;", "%d2", "%d2+2048"
    ),
    "an atomic on what may be read only": Bug(
        "atomic not allowed: source", "red.global.add.u32 [%d2], 1;", "%d2", "%d0"
    ),
    "a cached load of what was written": Bug(
        "ld.global.nc of what this launch wrote: both",
        FIRST + "@%p1 st.global.b32 [%d2], 1; ld.global.nc.b32 %r1, [%d2+4];",
        "%d2+4",
        "%d2",
    ),
    "different values in one place": Bug(
        "threads store different values to: target", LOAD, "[%d4]", "[%d1]"
    ),
    "two CTAs that write": Bug(
        "two CTAs write at once: both",
        CTA + FIRST + "@%p1 st.global.b32 [%d3], 5;",
        "%d3]",
        "%d2]",
        {"grid": 2},
    ),
    "a CTA that reads what another wrote": Bug(
        "two CTAs touch: both",
        CTA
        + FIRST
        + "setp.eq.u32 %p2, %r2, 0; @%p2 st.global.b32 [%d2], 5;"
        + "bar.sync 0; ld.global.b32 %r3, [%d3];",
        "%d3];",
        "%d2];",
        {"grid": 2},
    ),
    "a CTA that writes what another read": Bug(
        "two CTAs touch: both",
        CTA
        + FIRST
        + "ld.global.b32 %r3, [%d3]; bar.sync 0;"
        + "setp.eq.u32 %p2, %r2, 1; @%p2 st.global.b32 [%d3], 5;",
        "ld.global.b32 %r3, [%d3]",
        "ld.global.b32 %r3, [%d2+4]",
        {"grid": 2},
    ),
    "a load before the wait for the launch ahead": Bug(
        "load of global memory before griddepcontrol.wait",
        "griddepcontrol.wait;" + LOAD,
        "griddepcontrol.wait;" + LOAD,
        LOAD + "griddepcontrol.wait;",
    ),
    "no wait for the launch ahead": Bug(
        "load of global memory before griddepcontrol.wait",
        "griddepcontrol.wait;" + LOAD,
        "griddepcontrol.wait;",
        "",
        {"must_wait": True},
    ),
}

LOCAL = """
.local .align 8 .b8 own[16];
mov.u32 %r1, own;
st.local.b64 [%r1+8], %d0;
ld.local.b32 %r2, [%r1+8];
"""
TILE = """
.shared .align 128 .b8 tile[1024];
mov.u32 %r1, tile;
mad.lo.u32 %r2, %r0, 4, %r1;
xor.b32 %r3, %r0, 32;
mad.lo.u32 %r3, %r3, 4, %r1;
xor.b32 %r7, %r0, 1;
mad.lo.u32 %r7, %r7, 4, %r1;
"""
EXCHANGE = TILE + "st.shared.b32 [%r2], %r0; bar.sync 0; ld.shared.b32 %r4, [%r3];"
LANES = (
    TILE
    + "st.shared.b32 [%r2], %r0; bar.warp.sync -1; ld.shared.b32 %r4, [%r7];"
    + "bar.warp.sync -1; st.shared.b32 [%r2], 5;"
)
AGAIN = EXCHANGE + "bar.sync 1; st.shared.b32 [%r2], %r4;"
COPY = (
    TILE
    + "mad.wide.u32 %d3, %r0, 4, %d0; cp.async.ca.shared.global [%r2], [%d3], 4;"
    + "cp.async.commit_group;"
    + "cp.async.wait_group 0; bar.sync 0; ld.shared.b32 %r4, [%r3];"
)
TWO_WARPS = {"threads": 64}

SHARED = {
    "local memory past its end": Bug(
        "outside the 16 bytes of its own", LOCAL, "%r1+8], %d0", "%r1+16], %d0"
    ),
    "misaligned local memory": Bug(
        "misaligned access of 8 local", LOCAL, "%r1+8], %d0", "%r1+4], %d0"
    ),
    "local memory never written": Bug(
        "local memory never written", LOCAL, "%r2, [%r1+8]", "%r2, [%r1]"
    ),
    "shared memory past its end": Bug(
        "shared memory outside its 1024 bytes: 1024",
        TILE + "st.shared.b32 [%r2], 1;",
        "[%r2]",
        "[%r2+1024]",
    ),
    "shared memory before its begin": Bug(
        "outside its 1024 bytes: -128", TILE + "st.shared.b32 [%r2], 1;", "[%r2]", "[%r2+-128]"
    ),
    "misaligned shared memory": Bug(
        "misaligned access of 4 bytes of shared", EXCHANGE, "[%r3]", "[%r3+2]", TWO_WARPS
    ),
    "shared memory never written": Bug(
        "shared memory never written", EXCHANGE, "[%r3]", "[%r3+256]", TWO_WARPS
    ),
    "a read with no barrier before": Bug(
        "race: a read of shared memory that another warp wrote",
        EXCHANGE,
        "bar.sync 0;",
        "",
        TWO_WARPS,
    ),
    "a barrier of one warp each": Bug(
        "race: a read of shared memory that another warp wrote",
        EXCHANGE,
        "bar.sync 0;",
        "shr.u32 %r9, %r0, 5; bar.sync %r9, 32;",
        TWO_WARPS,
    ),
    "a write while another warp reads": Bug(
        "while another warp reads it", AGAIN, "bar.sync 1;", "", TWO_WARPS
    ),
    "two warps that write": Bug(
        "while another warp wrote it",
        TILE + "st.shared.b32 [%r2], %r0; bar.sync 0; st.shared.b32 [%r3], 7;",
        "bar.sync 0;",
        "",
        TWO_WARPS,
    ),
    "a read of what another lane wrote": Bug(
        "another lane wrote, no bar.warp.sync between",
        LANES,
        "bar.warp.sync -1; ld",
        "ld",
    ),
    "a write of what another lane reads": Bug(
        "another lane reads it, no bar.warp.sync between",
        LANES,
        "bar.warp.sync -1; st",
        "st",
    ),
    "a write by the last lane of what all lanes read": Bug(
        "another lane reads it, no bar.warp.sync between",
        TILE
        + "st.shared.b32 [%r2], %r0; bar.warp.sync -1; ld.shared.b32 %r4, [%r1];"
        + "setp.eq.u32 %p1, %r0, 31; bar.warp.sync -1; @%p1 st.shared.b32 [%r1], 5;",
        "bar.warp.sync -1; @%p1",
        "@%p1",
    ),
    "a write of what another lane wrote": Bug(
        "another lane wrote it, no bar.warp.sync between",
        TILE + "st.shared.b32 [%r2], %r0; bar.warp.sync -1; st.shared.b32 [%r7], 77;",
        "bar.warp.sync -1;",
        "",
    ),
    "ldmatrix of what lanes wrote": Bug(
        "another lane wrote, no bar.warp.sync between",
        TILE
        + "mad.lo.u32 %r8, %r0, 16, %r1; st.shared.v4.b32 [%r8], {%r0, %r0, %r0, %r0};"
        + "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r8];"
        + "st.shared.b32 [%r2+512], %r5;",
        "bar.warp.sync -1;",
        "",
    ),
    "an atomic on what another warp wrote": Bug(
        "an atomic on what another warp wrote",
        TILE + "st.shared.b32 [%r2], 0; bar.sync 0; red.shared.add.u32 [%r3], 1;",
        "bar.sync 0;",
        "",
        TWO_WARPS,
    ),
    "different values in one shared place": Bug(
        "different values to one place of shared",
        TILE + "st.shared.b32 [%r2], %r0;",
        "[%r2]",
        "[%r1]",
    ),
    "an atomic on shared memory never written": Bug(
        "atomic on shared memory never written",
        TILE + "st.shared.b32 [%r2], 0; bar.sync 0; red.shared.add.u32 [%r1], 1;",
        "[%r1], 1",
        "[%r1+512], 1",
    ),
    "a copy that is not waited for": Bug(
        "shared memory while a copy writes it|never written",
        COPY,
        "cp.async.wait_group 0;",
        "",
        TWO_WARPS,
    ),
    "a wait that lets the last copy be": Bug(
        "shared memory while a copy writes it|never written",
        COPY,
        "wait_group 0",
        "wait_group 1",
        TWO_WARPS,
    ),
    "a copy that is in no group": Bug(
        "shared memory while a copy writes it|never written",
        COPY,
        "cp.async.commit_group;",
        "",
        TWO_WARPS,
    ),
    "a copy that other warps read with no barrier": Bug(
        "race: a read of shared memory|never written",
        COPY,
        "bar.sync 0;",
        "",
        {**TWO_WARPS, "order": np.random.default_rng(1)},
    ),
    "a store where a copy will arrive": Bug(
        "while a copy writes it",
        COPY + "bar.sync 0; st.shared.b32 [%r2], 0;",
        "cp.async.wait_group 0;",
        "st.shared.b32 [%r2], 0; cp.async.wait_group 0;",
        TWO_WARPS,
    ),
    "an atomic where a copy will arrive": Bug(
        "atomic while a copy",
        TILE
        + "mad.wide.u32 %d3, %r0, 4, %d0; st.shared.b32 [%r2], 0;"
        + "cp.async.ca.shared.global [%r2], [%d3], 4;"
        + "cp.async.wait_all; red.shared.add.u32 [%r2], 1;",
        "cp.async.wait_all; red.shared.add.u32 [%r2], 1;",
        "red.shared.add.u32 [%r2], 1; cp.async.wait_all;",
    ),
    "a copy onto what another warp reads": Bug(
        "while another warp reads it",
        COPY + "bar.sync 0; cp.async.ca.shared.global [%r2], [%d3], 4; cp.async.wait_all;",
        "%r4, [%r3];bar.sync 0;",
        "%r4, [%r3];",
        TWO_WARPS,
    ),
    "a copy of more than its size": Bug(
        "cp.async of 4 bytes from more", COPY, "[%d3], 4;", "[%d3], 4, 5;", TWO_WARPS
    ),
    "a copy from a misaligned place": Bug(
        "cp.async of 4 bytes at a misaligned", COPY, "[%d3], 4;", "[%d3+2], 4, 2;", TWO_WARPS
    ),
    "a copy from what was never written": Bug(
        "cp.async of what was never written", COPY, "[%r2], [%d3]", "[%r2], [%d2+2048]", TWO_WARPS
    ),
}

SKIP_LANE = "setp.eq.u32 %p1, %r0, 31; @%p1 bra $after; {} $after:"
SHUFFLE = "shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;"
WARPS = {
    "a shuffle without every lane": Bug(
        "a shuffle without every lane", SHUFFLE, SHUFFLE, SKIP_LANE.format(SHUFFLE)
    ),
    "a shuffle by a lane that it does not name": Bug(
        "a shuffle not in its mask", SHUFFLE, "-1;", "0x7fffffff;"
    ),
    "a vote without every lane": Bug(
        "a vote without every lane",
        "vote.sync.any.pred %p2, %p3, -1;",
        "vote.sync.any.pred %p2, %p3, -1;",
        SKIP_LANE.format("vote.sync.any.pred %p2, %p3, -1;"),
    ),
    "a redux without every lane": Bug(
        "a redux without every lane",
        "redux.sync.add.u32 %r1, %r0, -1;",
        "redux.sync.add.u32 %r1, %r0, -1;",
        SKIP_LANE.format("redux.sync.add.u32 %r1, %r0, -1;"),
    ),
    "an election without every lane": Bug(
        "an election without every lane",
        "elect.sync _|%p2, -1;",
        "elect.sync _|%p2, -1;",
        SKIP_LANE.format("elect.sync _|%p2, -1;"),
    ),
    "a warp's barrier without every lane": Bug(
        "a bar.warp.sync without every lane",
        "bar.warp.sync -1;",
        "bar.warp.sync -1;",
        SKIP_LANE.format("bar.warp.sync -1;"),
    ),
    "registers given up by half a warp": Bug(
        "aligned instruction without its whole warp",
        "setmaxnreg.dec.sync.aligned.u32 40;",
        "setmaxnreg.dec.sync.aligned.u32 40;",
        SKIP_LANE.format("setmaxnreg.dec.sync.aligned.u32 40;"),
    ),
    "a barrier of half a warp": Bug(
        "aligned instruction without its whole warp",
        "bar.sync 0;",
        "bar.sync 0;",
        SKIP_LANE.format("bar.sync 0;"),
    ),
    "a barrier that a warp never reaches": Bug(
        "deadlock",
        "setp.lt.u32 %p1, %r0, 32; bar.sync 0; @%p1 bra $one; bar.sync 1; bra $two;"
        " $one: bar.sync 1; $two:",
        "bar.sync 1; $two:",
        "bar.sync 2; $two:",
        TWO_WARPS,
    ),
    "a barrier of more threads than there are": Bug(
        "deadlock", "bar.sync 1, 64;", "64", "96", TWO_WARPS
    ),
    "a barrier of too few threads": Bug(
        "more than 32 threads at a barrier", "bar.sync 1, 64;", "64", "32", TWO_WARPS
    ),
    "a barrier of a part of a warp": Bug(
        "a barrier opens by whole warps", "bar.sync 1, 64;", "64", "48", TWO_WARPS
    ),
    "a second arrival": Bug(
        "arrives twice at a barrier",
        "bar.arrive 1, 64; bar.sync 2;",
        "bar.sync 2;",
        "bar.arrive 1, 64;",
        {"threads": 32},
    ),
    "an endless loop": Bug(
        "no end within 50 blocks",
        "$again: setp.lt.u32 %p1, %r0, 0; @%p1 bra $again;",
        "%p1, %r0, 0",
        "%p1, %r0, 1",
        {"fuel": 50},
    ),
    "a trap": Bug("trap", "setp.lt.u32 %p1, %r0, 0; @%p1 trap;", "%p1, %r0, 0", "%p1, %r0, 1"),
}
ALL = GLOBAL | SHARED | WARPS


@pytest.mark.parametrize("name", ALL)
def test_a_bug_is_refused(name: str) -> None:
    bug = ALL[name]
    assert bug.old in bug.body
    run(bug, bug.body)
    with pytest.raises(Fault, match=bug.refusal):
        run(bug, bug.body.replace(bug.old, bug.new))


# A product of a warpgroup: 64 x 16 by 16 x 8, rows of 32 bytes.
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, "
    "%d60, %d61, %p3, 1, 1, 0, 0;"
)
WGMMA = f"""
.shared .align 1024 .b8 operands[4096];
mov.u32 %r1, operands;
mad.lo.u32 %r2, %r0, 16, %r1;
st.shared.v4.b32 [%r2], {{%r63, %r63, %r63, %r63}};
st.shared.v4.b32 [%r2+2048], {{%r63, %r63, %r63, %r63}};
fence.proxy.async.shared::cta;
bar.sync 0;
mov.u64 %d60, {1024 >> 4 | 16 << 32 | 3 << 62};
mov.u64 %d61, {3072 >> 4 | 16 << 32 | 3 << 62};
wgmma.fence.sync.aligned;
{PRODUCT}
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
bar.sync 1;
st.shared.b32 [%r2], %r20;
"""
FENCE, GROUP_WAIT = "wgmma.fence.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"
WARPGROUPS = {
    "a product that is not waited for": (
        "the kernel ends while a wgmma",
        GROUP_WAIT + "\nbar.sync 1;\nst.shared.b32 [%r2], %r20;",
        "",
    ),
    "a product that is in no group": (
        "the kernel ends while a wgmma|asynchronous operation reads",
        "wgmma.commit_group.sync.aligned;",
        "",
    ),
    "a wait that lets the product be": (
        "the kernel ends while a wgmma|asynchronous operation reads",
        "aligned 0;",
        "aligned 1;",
    ),
    "no fence of registers": ("no wgmma.fence before this wgmma", FENCE, ""),
    "registers written after their fence": (
        "no wgmma.fence since line",
        FENCE,
        FENCE + "mov.u32 %r21, 0;",
    ),
    "no fence for the asynchronous proxy": (
        "written without fence.proxy.async",
        "fence.proxy.async.shared::cta;",
        "",
    ),
    "no barrier before a product": (
        "race: a read of shared memory that another warp wrote",
        "bar.sync 0;",
        "",
    ),
    "an operand overwritten in flight": (
        "while an asynchronous operation reads it",
        "wgmma.wait_group",
        "st.shared.b32 [%r2], 1; wgmma.wait_group",
    ),
    "an accumulator written in flight": (
        "an accumulator was written while its wgmma",
        "wgmma.wait_group",
        "mov.u32 %r21, 5; wgmma.wait_group",
    ),
    "an accumulator taken by another product": (
        "holds some of these accumulators",
        PRODUCT,
        PRODUCT + PRODUCT.replace("%r23}", "%r24}"),
    ),
    "an operand past the end": (
        "wgmma reads outside shared memory",
        f"{3072 >> 4 | 16 << 32 | 3 << 62}",
        f"{5104 >> 4 | 16 << 32 | 3 << 62}",
    ),
    "an operand never written": (
        "never written",
        "st.shared.v4.b32 [%r2+2048], {%r63, %r63, %r63, %r63};",
        "",
    ),
    "a descriptor with no swizzle": (
        "not a swizzled matrix",
        f"{3072 >> 4 | 16 << 32 | 3 << 62}",
        f"{3072 >> 4 | 16 << 32}",
    ),
    "descriptors that differ": (
        "threads of a warpgroup name different matrices",
        "wgmma.fence",
        "cvt.u64.u32 %d62, %r0; add.s64 %d61, %d61, %d62; wgmma.fence",
    ),
    "a product of a part of a warpgroup": (
        "wgmma without its whole warpgroup",
        "wgmma.fence",
        "setp.lt.u32 %p5, %r0, 32; @%p5 ret; wgmma.fence",
    ),
}


@pytest.mark.parametrize("name", WARPGROUPS)
def test_a_bug_about_a_warpgroup_is_refused(name: str) -> None:
    refusal, old, new = WARPGROUPS[name]
    bug = Bug(refusal, WGMMA, old, new, {"threads": 128})
    assert old in WGMMA
    run(bug, WGMMA)
    with pytest.raises(Fault, match=refusal):
        run(bug, WGMMA.replace(old, new))


def test_a_product_needs_whole_warpgroups() -> None:
    bug = Bug("", "", "", "", {"threads": 96})
    with pytest.raises(Fault, match="no whole number of warpgroups"):
        run(bug, WGMMA)


# Copies of boxes, and their mbarriers.
BOX = """
.shared .align 128 .b8 tile[1024];
.shared .align 8 .b8 bar[8];
ld.param.b64 %d0, [out];
mov.b64 %d1, maps;
mov.u32 %r0, %tid.x;
mov.u32 %r1, tile;
mov.u32 %r2, bar;
mov.s32 %r10, 0;
setp.eq.u32 %p1, %r0, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;
@%p1 BOX_LOAD [%r1], [%d1, {%r10, %r10}], [%r2];
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
@!%p2 bra $wait;
mad.lo.u32 %r4, %r0, 4, %r1;
ld.shared.b32 %r5, [%r4];
xor.b32 %r5, %r5, %r5;
bar.sync 0;
st.shared.b32 [%r4], %r5;
fence.proxy.async.shared::cta;
bar.sync 0;
add.s64 %d2, %d1, 128;
@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%d2, {%r10, %r10}], [%r1];
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
@%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0+1024], [%r1], 64;
@%p1 cp.async.bulk.commit_group;
@%p1 cp.async.bulk.wait_group 0;
ret;
""".replace("BOX_LOAD", "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes")
BOXES = {
    "no wait for a box": ("while a copy writes it", "@!%p2 bra $wait;", ""),
    "a wait for the other phase": ("while a copy writes it", "[%r2], 0;\n@!", "[%r2], 1;\n@!"),
    "bytes that never come": ("deadlock", "_, [%r2], 512", "_, [%r2], 528"),
    "no arrival": ("deadlock", "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 512;", ""),
    "more arrivals than there are": (
        "more arrivals than an mbarrier takes",
        "@%p1 mbarrier.arrive",
        "mbarrier.arrive",
    ),
    "an mbarrier that is not there": (
        "an mbarrier that was not initialized",
        "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;",
        "",
    ),
    "an mbarrier of another warp": (
        "another warp initialized, no barrier between",
        "1;\nbar.sync 0;",
        "1;",
    ),
    "a map that is not there": (
        "a tensor map that the launch was not given",
        "add.s64 %d2, %d1, 128",
        "add.s64 %d2, %d1, 256",
    ),
    "an address inside a map": (
        "a tensor map that the launch was not given",
        "add.s64 %d2, %d1, 128",
        "add.s64 %d2, %d1, 64",
    ),
    "a box at a misaligned place": ("no multiple of 128 bytes", "[%r1], [%d1", "[%r1+64], [%d1"),
    "a box past the end": ("past the end of shared memory", "[%r1], [%d1", "[%r1+640], [%d1"),
    "coordinates of another rank": (
        "3 coordinates",
        "[%d1, {%r10, %r10}]",
        "[%d1, {%r10, %r10, %r10}]",
    ),
    "a box that may not be read": (
        "a tensor copy not allowed",
        "mov.b64 %d1, maps;",
        "mov.b64 %d1, maps; add.s64 %d1, %d1, 128;",
    ),
    "a box that may not be written": (
        "a tensor store not allowed",
        "add.s64 %d2, %d1, 128",
        "add.s64 %d2, %d1, 0",
    ),
    "a box stored without a fence": (
        "written without fence.proxy.async",
        "fence.proxy.async.shared::cta;",
        "",
    ),
    "a box stored without a barrier": (
        "another warp wrote, no barrier between",
        "fence.proxy.async.shared::cta;\nbar.sync 0;",
        "fence.proxy.async.shared::cta;",
    ),
    "a box overwritten while it is stored": (
        "while an asynchronous operation reads it",
        "[%r1];\n@%p1 cp.async.bulk.commit_group;",
        "[%r1]; st.shared.b32 [%r4], 9;\n@%p1 cp.async.bulk.commit_group;",
    ),
    "a store that is not waited for": (
        "ends while a tensor copy is in flight",
        "@%p1 cp.async.bulk.wait_group 0;\nret;",
        "ret;",
    ),
    "bytes at a misaligned place": ("a bulk copy that is misaligned", "[%d0+1024]", "[%d0+1032]"),
    "bytes past the end": ("past the end of shared memory", "[%r1], 64", "[%r1+992], 64"),
}


def run_box(body: str, swizzle: int = 0) -> None:
    memory = GlobalMemory(1 << 20)
    source, target = memory.allocate(1024, "source"), memory.allocate(2048, "target")
    memory.write(source, np.zeros(1024, np.uint8))
    memory.permit([(source, 1024)], [(target, 2048)])
    maps = [
        TensorMap(address, (16, 32), (32, 1), (8, 32), 2, swizzle) for address in (source, target)
    ]
    parameters = ".param .u64 out, .param .align 64 .b8 maps[256]"
    text = f".visible .entry snippet({parameters}) {{ {REGISTERS} {body} }}"
    geometry = Geometry((1, 1, 1), (64, 1, 1))
    code = read_module(text)["snippet"]
    launch(code, memory, geometry, [target, bytes(256)], tensor_maps=tuple(maps))


@pytest.mark.parametrize("name", BOXES)
def test_a_bug_about_a_box_is_refused(name: str) -> None:
    refusal, old, new = BOXES[name]
    assert old in BOX
    run_box(BOX)
    with pytest.raises(Fault, match=refusal):
        run_box(BOX.replace(old, new))


def test_rows_of_a_box_fit_their_swizzle() -> None:
    run_box(BOX, swizzle=64)
    with pytest.raises(Fault, match="rows wider than their swizzle"):
        run_box(BOX, swizzle=32)


# Launches, and text that is no launch


def test_an_unknown_instruction_is_named_with_its_line() -> None:
    for text in (
        "nanosleep.u32 5;",
        "add.rz.f32 %r1, %r2, %r3;",
        "ld.volatile.global.b32 %r1, [%d0];",
    ):
        with pytest.raises(UnknownInstruction) as caught:
            run(Bug("", "", "", ""), f"mov.u32 %r1, 0;\n{text}")
        assert caught.value.name == text.split()[0]
        assert caught.value.line == LINE + 1
        assert text[:-1] in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "add.u32 %r1, %r2;",
        "add.u32 %h1, %r2, %r3;",
        "add.u64 %d1, %r2, %d3;",
        "add.u32 %r1, %p1, %r3;",
        "add.f32 %r1, %r2, 1;",
        "mov.u32 %p1, %r1;",
        "ld.global.v2.b32 {%r1, %r2, %r3}, [%d0];",
        "ld.param.b64 %d1, [nothing];",
        "st.global.b32 [%d0], {%r1, %r2};",
        "setp.lo.s32 %p1, %r1, %r2;",
        "bar.arrive 1;",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.f16.f32 {%r1, %r1, %r1, %r1},"
        " {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1};",
        "bra $nowhere;",
    ],
)
def test_operands_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(UnknownInstruction, match=f"line {LINE}: "):
        run(Bug("", "", "", ""), text)


def test_a_module_that_is_not_understood_is_refused() -> None:
    for body, why in (
        (".branchtargets a, b;", "unknown directive"),
        (".reg .b128 %q;", "8 bytes at most"),
        ("{ ret;", "never closed"),
    ):
        with pytest.raises(Fault, match=why):
            read_module(f".visible .entry a() {{ {body} }}")


def test_a_launch_must_fit_its_kernel() -> None:
    memory = GlobalMemory(1 << 20)
    code = kernel("", 1, 32)
    for geometry, arguments, why in (
        (Geometry((1, 1, 1), (64, 1, 1)), [0], "runs .32, 1, 1. threads a CTA, not .64"),
        (Geometry((1, 1, 1), (32, 1, 1)), [], "takes 1 parameters, not 0"),
        (Geometry((1, 1, 1), (32, 1, 1)), [b"abc"], "has 8 bytes, not 3"),
    ):
        with pytest.raises(Fault, match=why):
            launch(code, memory, geometry, arguments)
    with pytest.raises(Fault, match="does not fit"):
        memory.allocate(1 << 30, "too much")


def test_what_hardware_allows_is_allowed() -> None:
    """Warps that store the same value, a scatter in which any store wins, an unchecked race."""
    run(Bug("", "", "", "", TWO_WARPS), TILE + "st.shared.b32 [%r1], 7;")
    run(Bug("", "", "", "", {"any_store_wins": True}), LOAD.replace("[%d4]", "[%d1]"))
    unchecked = {**TWO_WARPS, "checks_races": False}
    run(Bug("", "", "", "", unchecked), EXCHANGE.replace("bar.sync 0;", ""))
