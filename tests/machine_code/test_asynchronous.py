"""Asynchronous work beside the threads: copies, barriers, mbarriers and bulk copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from scripts.machine_code.global_memory import GlobalMemory
from scripts.machine_code.launch import Geometry, TensorMap, launch
from scripts.machine_code.ptx import read_module
from tests.machine_code.snippets import REGISTERS, run

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, 4096, dtype=np.uint8)
SHARED = """
.shared .align 128 .b8 tile[4096];
.shared .align 8 .b8 bars[32];
mov.u32 %r1, tile;
mov.u32 %r2, bars;
setp.eq.u32 %p1, %r0, 0;
"""


# cp.async


@pytest.mark.parametrize(("form", "size"), [("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)])
@pytest.mark.parametrize("given", [None, 0, 3])
def test_a_copy_fills_what_it_does_not_read_with_zeros(
    form: str, size: int, given: int | None
) -> None:
    count, operand = (size, "") if given is None else (given, f", {given}")
    body = f"""
    {SHARED}
    mad.wide.u32 %d2, %r0, {size}, %d0;
    mad.lo.u32 %r3, %r0, {size}, %r1;
    cp.async.{form}.shared.global.L2::128B [%r3], [%d2], {size}{operand};
    cp.async.commit_group;
    cp.async.wait_group 0;
    ld.shared.b32 %r4, [%r3];
    mad.wide.u32 %d2, %r0, 4, %d1;
    st.global.b32 [%d2], %r4;
    """
    [got] = run(body, [BYTES], [(128, np.uint8)])
    want = BYTES[: 32 * size].reshape(32, size).copy()
    want[:, count:] = 0
    assert (got.reshape(32, 4) == want[:, :4]).all()


def test_groups_arrive_in_order_and_the_last_may_stay() -> None:
    body = f"""
    {SHARED}
    mad.wide.u32 %d2, %r0, 4, %d0;
    mad.lo.u32 %r3, %r0, 4, %r1;
    cp.async.ca.shared.global [%r3], [%d2], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r3+128], [%d2+128], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r3+256], [%d2+256], 4;
    cp.async.wait_group 1;
    ld.shared.b32 %r4, [%r3];
    cp.async.wait_group 0;
    ld.shared.b32 %r5, [%r3+128];
    cp.async.wait_all;
    ld.shared.b32 %r6, [%r3+256];
    mad.wide.u32 %d2, %r0, 4, %d1;
    st.global.b32 [%d2], %r4;
    st.global.b32 [%d2+128], %r5;
    st.global.b32 [%d2+256], %r6;
    """
    [got] = run(body, [BYTES], [(384, np.uint8)])
    assert (got == BYTES[:384]).all()


# Barriers


def test_named_barriers_of_a_part_of_the_warps() -> None:
    """Two pairs of warps hand over values at barriers of their own, which a register names."""
    body = f"""
    {SHARED}
    shr.u32 %r3, %r0, 6;
    add.u32 %r3, %r3, 1;
    mad.lo.u32 %r4, %r0, 4, %r1;
    st.shared.b32 [%r4], %r0;
    bar.sync %r3, 64;
    xor.b32 %r5, %r0, 63;
    mad.lo.u32 %r5, %r5, 4, %r1;
    ld.shared.b32 %r6, [%r5];
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.b32 [%d1], %r6;
    """
    [got] = run(body, [], [(128, np.uint32)], threads=128)
    assert got.tolist() == [thread ^ 63 for thread in range(128)]


@pytest.mark.parametrize("kind", ["bar", "barrier.cta"])
def test_a_producer_arrives_and_a_consumer_waits(kind: str) -> None:
    body = f"""
    {SHARED}
    and.b32 %r3, %r0, 31;
    mad.lo.u32 %r4, %r3, 4, %r1;
    setp.ge.u32 %p2, %r0, 32;
    @%p2 bra $consume;
    st.shared.b32 [%r4], %r0;
    {kind}.arrive 3, 64;
    ret;
$consume:
    {kind}.sync 3, 64;
    ld.shared.b32 %r5, [%r4];
    mad.wide.u32 %d1, %r3, 4, %d0;
    st.global.b32 [%d1], %r5;
    """
    [got] = run(body, [], [(32, np.uint32)], threads=64)
    assert got.tolist() == list(range(32))


def test_a_barrier_does_not_wait_for_threads_that_have_ended() -> None:
    body = f"""
    {SHARED}
    setp.ge.u32 %p2, %r0, 32;
    @%p2 ret;
    bar.sync 0;
    barrier.sync.aligned 1;
    mad.wide.u32 %d1, %r0, 4, %d0;
    st.global.b32 [%d1], %r0;
    """
    [got] = run(body, [], [(32, np.uint32)], threads=64)
    assert got.tolist() == list(range(32))


# mbarriers


WAIT = """
{{
.reg .pred %done;
$wait:
mbarrier.try_wait.parity.shared::cta.b64 %done, [{address}], {parity};
@%done bra $ready;
bra $wait;
$ready:
}}
"""


def wait(address: str, parity: str) -> str:
    return WAIT.format(address=address, parity=parity)


def test_phases_of_an_mbarrier() -> None:
    """Two warps take turns through three phases: one writes, the other reads."""
    body = f"""
    {SHARED}
    @%p1 mbarrier.init.shared.b64 [%r2], 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r2+8], 1;
    @%p1 fence.mbarrier_init.release.cluster;
    bar.sync 0;
    and.b32 %r3, %r0, 31;
    mad.lo.u32 %r4, %r3, 4, %r1;
    mov.u32 %r10, 0;
    setp.ge.u32 %p2, %r0, 32;
    @%p2 bra $reader;
$writer:
    mad.lo.u32 %r5, %r10, 100, %r3;
    st.shared.b32 [%r4], %r5;
    mbarrier.arrive.shared.b64 %d20, [%r2];
    and.b32 %r6, %r10, 1;
    {wait("%r2+8", "%r6")}
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 3;
    @%p3 bra $writer;
    ret;
$reader:
    and.b32 %r6, %r10, 1;
    {wait("%r2", "%r6")}
    ld.shared.b32 %r5, [%r4];
    mad.lo.u32 %r7, %r10, 32, %r3;
    mad.wide.u32 %d1, %r7, 4, %d0;
    st.global.b32 [%d1], %r5;
    bar.warp.sync -1;
    elect.sync _|%p4, -1;
    @%p4 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2+8], 1;
    add.u32 %r10, %r10, 1;
    setp.lt.u32 %p3, %r10, 3;
    @%p3 bra $reader;
    @%p4 mbarrier.inval.shared.b64 [%r2];
    """
    for seed in range(5):
        order = np.random.default_rng(seed)
        [got] = run(body, [], [(96, np.uint32)], threads=64, order=order)
        assert got.tolist() == [100 * turn + lane for turn in range(3) for lane in range(32)]


# Bulk copies


def tensor_launch(
    body: str, arrays: list[np.ndarray], maps: list[TensorMap], output: int
) -> np.ndarray:
    """Run a warp with tensor maps of arrays and, as the last one, of the output's bytes."""
    memory = GlobalMemory(1 << 22)
    addresses = [memory.allocate(array.nbytes, "array") for array in arrays]
    for address, array in zip(addresses, arrays, strict=True):
        memory.write(address, array)
    target = memory.allocate(output, "output")
    sizes = [(a, array.nbytes) for a, array in zip(addresses, arrays, strict=True)]
    memory.permit(sizes, [(target, output)])
    places = zip(maps, [*addresses, target], strict=True)
    placed = [replace(tensor, address=address) for tensor, address in places]
    text = f"""
    .visible .entry snippet(.param .u64 out, .param .align 64 .b8 maps[{128 * len(maps)}])
    {{
    {REGISTERS}
    ld.param.b64 %d0, [out];
    mov.b64 %d1, maps;
    mov.u32 %r0, %tid.x;
    {body}
    ret;
    }}
    """
    raw = bytes(128 * len(maps))
    geometry = Geometry((1, 1, 1), (32, 1, 1))
    kernel = read_module(text)["snippet"]
    launch(kernel, memory, geometry, [target, raw], tensor_maps=tuple(placed))
    return memory.read(target, output)


BOX = "cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes"
LOAD = f"""
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {{size}};
@%p1 {BOX} [%r1], [%d1, {{{{{{corner}}}}}}], [%r2];
"""


def test_a_box_of_a_tensor_is_loaded_with_zeros_outside_of_it() -> None:
    """A box that begins before the tensor and ends after it, in its outer dimension."""
    array = RANDOM.integers(0, 2**16, (5, 7, 64), dtype=np.uint16)
    tensor = TensorMap(0, (5, 7, 64), (7 * 64, 64, 1), (2, 4, 32), 2)
    body = f"""
    {SHARED}
    mov.s32 %r10, 16;
    mov.s32 %r11, -1;
    mov.s32 %r12, 4;
    {LOAD.format(size=512, rank=3, corner="%r10, %r11, %r12")}
    {wait("%r2", "0")}
    mad.lo.u32 %r4, %r0, 16, %r1;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r4];
    mad.wide.u32 %d2, %r0, 16, %d0;
    st.global.v4.b32 [%d2], {{%r20, %r21, %r22, %r23}};
    """
    got = tensor_launch(body, [array], [tensor, TensorMap(0, (1,), (1,), (1,), 1)], 512)
    want = np.zeros((2, 4, 32), np.uint16)
    want[0, 1:] = array[4, :3, 16:48]
    assert (got.view(np.uint16) == want.reshape(-1)).all()


@pytest.mark.parametrize("width", [32, 64, 128])
def test_a_swizzled_box_goes_in_and_out_again(width: int) -> None:
    """Loaded with a swizzle, read piece by piece where it must lie, and stored with it."""
    columns = width // 2
    array = RANDOM.integers(0, 2**16, (16, columns), dtype=np.uint16)
    maps = [
        TensorMap(0, (16, columns), (columns, 1), (16, columns), 2, width),
        TensorMap(0, (12, columns), (columns, 1), (16, columns), 2, width),
    ]
    size = array.nbytes
    body = f"""
    {SHARED}
    mov.s32 %r10, 0;
    {LOAD.format(size=size, rank=2, corner="%r10, %r10")}
    {wait("%r2", "0")}
    add.s64 %d2, %d1, 128;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%d2, {{%r10, %r10}}], [%r1];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group.read 0;
    bar.sync 0;
    mov.u32 %r5, %r0;
$copy:
    mad.lo.u32 %r4, %r5, 16, %r1;
    ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r4];
    mad.wide.u32 %d3, %r5, 16, %d0;
    st.global.v4.b32 [%d3+{size}], {{%r20, %r21, %r22, %r23}};
    add.u32 %r5, %r5, 32;
    setp.lt.u32 %p5, %r5, {size // 16};
    @%p5 bra $copy;
    """
    got = tensor_launch(body, [array], maps, 2 * size)
    kept = got[: 12 * width].view(np.uint16).reshape(12, columns)
    assert (kept == array[:12]).all()
    assert (got[12 * width : size] == 255).all()
    raw = got[size:].reshape(-1, 8, 16)
    lines = array.view(np.uint8).reshape(-1, 8, 16)
    for line in range(len(lines)):
        for piece in range(8):
            assert (raw[line, piece ^ line % (width // 16)] == lines[line, piece]).all()


def test_bytes_are_stored_in_bulk() -> None:
    body = f"""
    {SHARED}
    mad.lo.u32 %r4, %r0, 4, %r1;
    st.shared.b32 [%r4], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0], [%r1+16], 64;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.global.shared::cta.bulk_group [%d0+64], [%r1], 16;
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 1;
    @%p1 cp.async.bulk.wait_group 0;
    """
    [got] = run(body, [], [(20, np.uint32)])
    assert got.tolist() == [*range(4, 20), *range(4)]
