"""Results of loads, stores, atomics and exchanges within a warp."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.machine_code.faults import Fault
from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.launch import Geometry, launch
from scripts.machine_code.ptx import read_module
from tests.machine_code.snippets import kernel, run

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 2**32, 256, dtype=np.uint32)
LANES = np.arange(32)


@pytest.mark.parametrize("space", ["shared", "local", "shared::cta"])
@pytest.mark.parametrize(
    "kind", ["b8", "u16", "b32", "b64", "v2.b16", "v2.b32", "v4.u32", "v2.b64"]
)
def test_a_store_is_loaded_again(space: str, kind: str) -> None:
    """Words of every size through another memory and back, backwards within a warp."""
    vector, element = kind.split(".") if "." in kind else ("", kind)
    count, bits = int(vector[1:] or 1), int(element[1:])
    size = count * bits // 8
    letter = {8: "h", 16: "h", 32: "r", 64: "d"}[bits]
    names = [f"%{letter}{index + 5}" for index in range(count)]
    registers = names[0] if count == 1 else "{" + ", ".join(names) + "}"
    other = 31 if space.startswith("shared") else 0
    declared = "shared" if space.startswith("shared") else "local"
    total = 32 * size if declared == "shared" else size
    place = f"mul.lo.u32 %r3, %r0, {size if declared == 'shared' else 0};"
    body = f"""
    .{declared} .align 16 .b8 array[{total}];
    mad.wide.u32 %d2, %r0, {size}, %d0;
    ld.global.{kind} {registers}, [%d2];
    mov.u32 %r2, array;
    {place}
    add.u32 %r3, %r3, %r2;
    st.{space}.{kind} [%r3], {registers};
    bar.sync 0;
    xor.b32 %r4, %r0, {other};
    mul.lo.u32 %r4, %r4, {size if declared == "shared" else 0};
    add.u32 %r4, %r4, %r2;
    ld.{space}.{kind} {registers}, [%r4];
    mad.wide.u32 %d3, %r0, {size}, %d1;
    st.global.{kind} [%d3], {registers};
    """
    values = RANDOM.integers(0, 256, (32, size), dtype=np.uint8)
    [got] = run(body, [values], [(32 * size, np.uint8)])
    want = values[::-1] if other else values
    assert (got.reshape(32, size) == want).all()


@pytest.mark.parametrize("kind", ["v8.b32", "v8.f32", "v4.b64"])
def test_32_bytes_at_once(kind: str) -> None:
    """Global memory alone is accessed so, and aligned to as much."""
    letter = "d" if kind.endswith("64") else "r"
    names = [f"%{letter}{index + 5}" for index in range(int(kind[1]))]
    registers = "{" + ", ".join(names) + "}"
    body = f"""
    mad.wide.u32 %d2, %r0, 32, %d0;
    mad.wide.u32 %d3, %r0, 32, %d1;
    ld.global.nc.{kind} {registers}, [%d2+OFFSET];
    st.global.{kind} [%d3], {registers};
    """
    words = np.arange(512, dtype=np.uint32)
    [got] = run(body.replace("OFFSET", "32"), [words], [(256, np.uint32)])
    assert got.tolist() == words[8:264].tolist()
    with pytest.raises(Fault, match="misaligned"):
        run(body.replace("OFFSET", "16"), [words], [(256, np.uint32)])


@pytest.mark.parametrize(
    ("kind", "value"), [("s8", -1), ("u8", 255), ("s16", -1), ("u16", 65535), ("b8", 255)]
)
def test_a_narrow_load_extends_to_its_register(kind: str, value: int) -> None:
    body = f"ld.global.{kind} %r1, [%d0]; st.global.b32 [%d1], %r1;"
    [got] = run(body, [np.array([-1], np.int64)], [(1, np.int32)], threads=1)
    assert got[0] == value


@pytest.mark.parametrize(
    "modifiers", ["", ".nc", ".L1::evict_last", ".nc.L1::no_allocate.L2::128B", ".L2::256B"]
)
def test_hints_of_loads_change_nothing(modifiers: str) -> None:
    body = f"""
    mad.wide.u32 %d2, %r0, 4, %d0;
    ld.global{modifiers}.b32 %r1, [%d2+128];
    mad.wide.u32 %d2, %r0, 4, %d1;
    st.global.cs.L1::evict_first.b32 [%d2], %r1;
    """
    [got] = run(body, [WORDS], [(32, np.uint32)])
    assert (got == WORDS[32:64]).all()


def test_fences_and_hints_change_nothing() -> None:
    """Run instructions that order memory between threads, or that only save time."""
    body = """
    prefetch.global.L2 [%d0];
    griddepcontrol.launch_dependents;
    mad.wide.u32 %d2, %r0, 4, %d0;
    ld.global.b32 %r1, [%d2];
    membar.gl;
    fence.acq_rel.gpu;
    fence.sc.cta;
    setmaxnreg.dec.sync.aligned.u32 40;
    mad.wide.u32 %d2, %r0, 4, %d1;
    st.global.b32 [%d2], %r1;
    """
    [got] = run(body, [WORDS], [(32, np.uint32)])
    assert (got == WORDS[:32]).all()


def test_only_used_bytes_of_a_load_are_read() -> None:
    """The others may lie outside of the array."""
    body = """
    .pragma "used_bytes_mask 0xff0f";
    ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%d0];
    st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};
    """
    memory = GlobalMemory(1 << 20)
    source, target = memory.allocate(16, "source"), memory.allocate(16, "target")
    memory.write(source, np.arange(1, 2, dtype=np.uint32))
    memory.write(source + 8, np.arange(3, 5, dtype=np.uint32))
    memory.permit([(source, 4), (source + 8, 8)], [(target, 16)])
    launch(kernel(body, 2), memory, Geometry((1, 1, 1), (32, 1, 1)), [source, target])
    assert memory.read(target, 16).view(np.uint32).tolist() == [1, 0xFFFFFFFF, 3, 4]


def test_loads_from_padding_get_ones() -> None:
    """Also where an earlier launch stored values. Beyond the padding they are refused."""
    body = "mad.wide.u32 %d2, %r0, 4, %d0; ld.global.b32 %r1, [%d2];"
    body += "mad.wide.u32 %d2, %r0, 4, %d1; st.global.b32 [%d2], %r1;"
    memory = GlobalMemory(1 << 20)
    source, target = memory.allocate(128, "source"), memory.allocate(128, "target")
    memory.write(source, np.arange(24, dtype=np.uint32))
    memory.permit([(source, 80)], [(target, 128)], padding=[(source + 80, 48)])
    geometry = Geometry((1, 1, 1), (32, 1, 1))
    launch(kernel(body, 2), memory, geometry, [source, target])
    loaded = memory.read(target, 128).view(np.uint32).tolist()
    assert loaded == [*range(20), *[0xFFFFFFFF] * 12]
    memory.permit([(source, 80)], [(target, 128)], padding=[(source + 80, 44)])
    with pytest.raises(Fault, match=r"load not allowed: source\[124\]"):
        launch(kernel(body, 2), memory, geometry, [source, target])


def test_parameters_are_numbers_and_bytes() -> None:
    module = read_module("""
    .visible .entry snippet(.param .u64 .ptr .global .align 16 out, .param .s32 number,
                            .param .align 64 .b8 raw[128], .param .f32 real)
    {
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    ld.param.u64 %d0, [out];
    ld.param::entry.s32 %d1, [number];
    ld.param.v2.b32 {%r1, %r2}, [raw+8];
    ld.param.f32 %r3, [real];
    st.global.b64 [%d0], %d1;
    st.global.v2.b32 [%d0+8], {%r1, %r2};
    st.global.f32 [%d0+16], %r3;
    ret;
    }""")
    memory = GlobalMemory(1 << 20)
    target = memory.allocate(24, "target")
    memory.permit([], [(target, 24)])
    raw = bytes(range(128))
    real = np.float32(1.5).tobytes()
    geometry = Geometry((1, 1, 1), (1, 1, 1))
    report = launch(module["snippet"], memory, geometry, [target, -3, raw, real])
    got = memory.read(target, 20)
    assert got[:8].view(np.int64)[0] == -3
    assert got[8:16].tobytes() == raw[8:16]
    assert got[16:].view(np.float32)[0] == 1.5
    assert report.instructions == 8
    assert "ld.param.v2.b32" in report.names


def test_constants_of_a_module_are_read() -> None:
    module = """
    .global .align 4 .b8 table[6] = {1, 2, 0xff};
    .const .align 4 .u32 number[2] = {7, 4294967295};
    """
    body = """
    mov.u64 %d1, table;
    ld.global.v2.b8 {%h1, %h2}, [%d1+2];
    mov.u64 %d2, number;
    ld.global.b32 %r1, [%d2+4];
    st.global.v2.b8 [%d0], {%h1, %h2};
    st.global.b32 [%d0+4], %r1;
    """
    [got] = run(body, [], [(8, np.uint8)], threads=1, module=module)
    assert got.tolist() == [255, 0, 255, 255, 255, 255, 255, 255]


def test_threads_and_ctas_have_their_numbers() -> None:
    names = ("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z", "ntid.y", "nctaid.z")
    body = """
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, %ctaid.z;
    mad.lo.u32 %r7, %r3, 3, %r2; mad.lo.u32 %r7, %r7, 5, %r1;
    mad.lo.u32 %r8, %r6, 3, %r5; mad.lo.u32 %r8, %r8, 2, %r4;
    mad.lo.u32 %r9, %r8, 30, %r7;
    mad.wide.u32 %d1, %r9, 32, %d0;
    mov.u32 %r10, %ntid.y; mov.u32 %r11, %nctaid.z;
    st.global.v4.b32 [%d1], {%r1, %r2, %r3, %r4};
    st.global.v4.b32 [%d1+16], {%r5, %r6, %r10, %r11};
    """
    memory = GlobalMemory(1 << 20)
    target = memory.allocate(30 * 12 * 32, "target")
    memory.permit([], [(target, 30 * 12 * 32)])
    code = kernel(body)
    code.threads = None
    launch(code, memory, Geometry((2, 3, 2), (5, 3, 2)), [target])
    got = memory.read(target, 30 * 12 * 32).view(np.uint32).reshape(2, 3, 2, 2, 3, 5, len(names))
    z, y, x, tz, ty, tx = np.indices(got.shape[:-1])
    for index, want in enumerate((tx, ty, tz, x, y, z, 3, 2)):
        assert (got[..., index] == want).all(), names[index]


# Atomics

ATOMICS = {
    "add": (lambda a, b: (a + b) % 2**32, ["u32", "s32"]),
    "min": (min, ["u32"]),
    "max": (max, ["u32"]),
    "and": (lambda a, b: a & b, ["b32"]),
    "or": (lambda a, b: a | b, ["b32"]),
    "xor": (lambda a, b: a ^ b, ["b32"]),
    "exch": (lambda a, b: b, ["b32"]),
}


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("operation", ATOMICS)
def test_atomics_take_one_thread_after_another(operation: str, space: str) -> None:
    function, kinds = ATOMICS[operation]
    place = "%d1" if space == "global" else "%r2"
    for kind in kinds:
        body = f"""
        .shared .align 4 .b8 cell[4];
        mov.u32 %r2, cell;
        mov.u32 %r3, {WORDS[100]};
        setp.eq.u32 %p1, %r0, 0;
        @%p1 st.{space}.b32 [{place}], %r3;
        bar.sync 0;
        mad.wide.u32 %d3, %r0, 4, %d0;
        ld.global.b32 %r4, [%d3];
        atom.{space}.{operation}.{kind} %r5, [{place}], %r4;
        mad.wide.u32 %d3, %r0, 4, %d2;
        st.global.b32 [%d3], %r5;
        bar.sync 0;
        @%p1 ld.{space}.b32 %r6, [{place}];
        @%p1 st.global.b32 [%d1], %r6;
        """
        memory = GlobalMemory(1 << 20)
        source, cell, old = (memory.allocate(128, name) for name in ("source", "cell", "old"))
        memory.write(source, WORDS[:32])
        memory.permit([(source, 128), (cell, 4)], [(cell, 4), (old, 128)])
        geometry = Geometry((1, 1, 1), (32, 1, 1))
        launch(kernel(body, 3), memory, geometry, [source, cell, old])
        now, found = int(WORDS[100]), memory.read(old, 128).view(np.uint32).tolist()
        for value, before in zip(WORDS[:32].tolist(), found, strict=True):
            assert before == now
            now = function(now, value)
        assert memory.read(cell, 4).view(np.uint32)[0] == now


def test_atomics_of_other_types_and_orders() -> None:
    """Reductions, signed numbers, floats, 64 bits, compare-and-swap. Every order gives the same."""
    body = """
    red.relaxed.gpu.global.add.f32 [%d0], 0f40000000;
    red.global.add.f64 [%d0+8], 0d3FF8000000000000;
    red.global.max.s32 [%d0+16], %r0;
    red.global.min.s32 [%d0+20], -5;
    atom.global.gpu.acq_rel.add.u64 %d2, [%d0+24], 4294967296;
    atom.acq_rel.sys.global.cas.b32 %r2, [%d0+32], %r0, 77;
    red.global.max.s64 [%d0+40], -1;
    """
    memory = GlobalMemory(1 << 20)
    cells = memory.allocate(64, "cells")
    memory.write(cells, np.array([0.5], np.float32))
    memory.write(cells + 8, np.array([0.5], np.float64))
    memory.write(cells + 16, np.array([-9, 3], np.int32))
    memory.write(cells + 24, np.array([5], np.uint64))
    memory.write(cells + 32, np.array([31], np.uint32))
    memory.write(cells + 40, np.array([-7], np.int64))
    memory.permit([(cells, 64)], [(cells, 64)])
    launch(kernel(body), memory, Geometry((1, 1, 1), (32, 1, 1)), [cells])
    got = memory.read(cells, 64)
    assert got[:4].view(np.float32)[0] == 64.5
    assert got[8:16].view(np.float64)[0] == 48.5
    assert got[16:24].view(np.int32).tolist() == [31, -5]
    assert got[24:32].view(np.uint64)[0] == 32 * 2**32 + 5
    assert got[32:36].view(np.uint32)[0] == 77
    assert got[40:48].view(np.int64)[0] == -1


# Within a warp


def shuffled(mode: str, distance: int, limits: int) -> list[tuple[int, bool]]:
    """Follow the description of shfl, lane by lane."""
    clamp, segment = limits & 31, limits >> 8 & 31
    found = []
    for lane in range(32):
        highest = lane & segment | clamp & ~segment
        lowest = lane & segment
        if mode == "up":
            source = lane - distance
            valid = source >= highest
        elif mode == "down":
            source = lane + distance
            valid = source <= highest
        elif mode == "bfly":
            source = lane ^ distance
            valid = source <= highest
        else:
            source = lowest | distance & ~segment
            valid = source <= highest
        found.append((source if valid else lane, valid))
    return found


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("distance", [0, 1, 5, 16])
@pytest.mark.parametrize("segment", [0, 0x18])
def test_shuffles(mode: str, distance: int, segment: int) -> None:
    limits = segment << 8 | (0 if mode == "up" else 31)
    body = f"""
    mad.wide.u32 %d3, %r0, 4, %d0;
    ld.global.b32 %r1, [%d3];
    shfl.sync.{mode}.b32 %r2|%p1, %r1, {distance}, {limits}, -1;
    selp.b32 %r3, 1, 0, %p1;
    mad.wide.u32 %d3, %r0, 8, %d1;
    st.global.v2.b32 [%d3], {{%r2, %r3}};
    """
    [got] = run(body, [WORDS], [(128, np.uint32)], threads=64)
    want = [
        [int(WORDS[warp * 32 + source]), int(valid)]
        for warp in range(2)
        for source, valid in shuffled(mode, distance, limits)
    ]
    assert got.reshape(64, 2).tolist() == want


def test_reductions_of_floats() -> None:
    """A NaN counts only where the name says so. Of two zeros the positive one is greater."""
    body = """
    .reg .b32 %o<4>;
    mad.wide.u32 %d3, %r0, 4, %d0;
    ld.global.b32 %r1, [%d3];
    redux.sync.max.f32 %o0, %r1, -1;
    redux.sync.min.f32 %o1, %r1, -1;
    redux.sync.max.NaN.f32 %o2, %r1, -1;
    redux.sync.min.NaN.f32 %o3, %r1, -1;
    mad.wide.u32 %d3, %r0, 16, %d1;
    st.global.v4.b32 [%d3], {%o0, %o1, %o2, %o3};
    """
    numbers = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    numbers[1, 5] = np.nan
    numbers[2] = -0.0
    numbers[2, 7] = 0.0
    [got] = run(body, [numbers], [(96 * 4, np.float32)], threads=96)
    for warp, row in enumerate(numbers):
        nan = np.isnan(row).any()
        least, most = np.nanmin(row), np.nanmax(row)
        if warp == 2:
            least, most = np.float32(-0.0), np.float32(0.0)
        want = [most, least, np.nan if nan else most, np.nan if nan else least]
        found = got.reshape(3, 32, 4)[warp]
        np.testing.assert_array_equal(found, np.tile(want, (32, 1)))
        assert (np.signbit(found[:, :2]) == np.signbit([most, least])).all()


def test_votes_reductions_and_elections() -> None:
    body = """
    .reg .b32 %o<16>;
    mad.wide.u32 %d3, %r0, 4, %d0;
    ld.global.b32 %r1, [%d3];
    and.b32 %r2, %r1, 1;
    setp.eq.u32 %p1, %r2, 1;
    vote.sync.ballot.b32 %o0, %p1, -1;
    vote.sync.any.pred %p2, %p1, -1;
    vote.sync.all.pred %p3, %p1, -1;
    vote.sync.uni.pred %p4, !%p1, -1;
    selp.b32 %o1, 1, 0, %p2;
    selp.b32 %o2, 1, 0, %p3;
    selp.b32 %o3, 1, 0, %p4;
    redux.sync.add.u32 %o4, %r1, -1;
    redux.sync.min.s32 %o5, %r1, -1;
    redux.sync.max.u32 %o6, %r1, -1;
    redux.sync.and.b32 %o7, %r1, -1;
    redux.sync.or.b32 %o8, %r1, -1;
    redux.sync.xor.b32 %o9, %r1, -1;
    elect.sync %o10|%p5, -1;
    selp.b32 %o11, 1, 0, %p5;
    activemask.b32 %o12;
    bar.warp.sync -1;
    mad.wide.u32 %d3, %r0, 64, %d1;
    st.global.v4.b32 [%d3], {%o0, %o1, %o2, %o3};
    st.global.v4.b32 [%d3+16], {%o4, %o5, %o6, %o7};
    st.global.v4.b32 [%d3+32], {%o8, %o9, %o10, %o11};
    st.global.b32 [%d3+48], %o12;
    """
    [got] = run(body, [WORDS], [(64 * 16, np.uint32)], threads=64)
    for warp in range(2):
        words = WORDS[warp * 32 : warp * 32 + 32]
        odd = [bool(word & 1) for word in words.tolist()]
        reduced = [
            sum(words.tolist()) % 2**32,
            int(words.view(np.int32).min()) % 2**32,
            int(words.max()),
            int(np.bitwise_and.reduce(words)),
            int(np.bitwise_or.reduce(words)),
            int(np.bitwise_xor.reduce(words)),
        ]
        ballot = sum(1 << lane for lane, is_odd in enumerate(odd) if is_odd)
        for lane in range(32):
            want = [ballot, any(odd), all(odd), len(set(odd)) == 1, *reduced, 0, lane == 0]
            assert got.reshape(64, 16)[warp * 32 + lane, :13].tolist() == [*want, 2**32 - 1]


def test_threads_part_and_meet_again() -> None:
    """Loops of different lengths, guarded instructions, an early return, an inner scope's names."""
    body = """
    mov.u32 %r1, 0;
    mov.u32 %r2, 0;
$again:
    {
    .reg .pred %q;
    .reg .b32 inner;
    setp.ge.u32 %q, %r1, %r0;
    @%q bra $done;
    mov.u32 inner, %r1;
    add.u32 %r2, %r2, inner;
    add.u32 %r1, %r1, 1;
    bra.uni $again;
    }
$done:
    setp.gt.u32 %p1, %r0, 20;
    @%p1 add.u32 %r2, %r2, 1000;
    @!%p1 sub.u32 %r2, %r2, 1;
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.b32 [%d1], %r2;
    setp.gt.u32 %p2, %r0, 5;
    @%p2 ret;
    st.global.b32 [%d1], 7;
    """
    [got] = run(body, [], [(40, np.uint32)], threads=40)
    want = [thread * (thread - 1) // 2 + (1000 if thread > 20 else -1) for thread in range(40)]
    assert got.tolist() == [7] * 6 + want[6:]


def test_pages_that_nobody_touches_cost_nothing() -> None:
    """An array of 9 GiB, of which a kernel adds to both ends."""
    size = 9 << 30
    memory = GlobalMemory(10 << 30)
    array = memory.allocate(size, "array")
    memory.write(array, np.array([1], np.uint32))
    memory.write(array + size - 4, np.array([5], np.uint32))
    memory.permit([(array, size)], [(array, size)])
    body = f"""
    mov.u64 %d1, {size - 4};
    add.u64 %d1, %d0, %d1;
    ld.global.b32 %r1, [%d0];
    ld.global.b32 %r2, [%d1];
    add.u32 %r1, %r1, %r2;
    st.global.b32 [%d1], %r1;
    """
    launch(kernel(body, threads=1), memory, Geometry((1, 1, 1), (1, 1, 1)), [array])
    assert memory.read(array + size - 4, 4).view(np.uint32)[0] == 6
    assert memory.is_written(array, 4) and not memory.is_written(array, 8)
