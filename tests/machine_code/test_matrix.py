"""Matrix instructions against products of whole matrices.

Where each element lies is written down here again, element by element, from the tables and figures
of NVIDIA's description: row and column of register, lane and position.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.machine_code.snippets import run

RANDOM = np.random.default_rng(0)
TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "tf32": np.float32,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


def matrix(kind: str, *shape: int) -> np.ndarray:
    """Return small numbers, whose sums of products are exact."""
    return RANDOM.integers(-4, 5, shape).astype(TYPES[kind])


def registers(letter: str, first: int, count: int) -> str:
    return "{" + ", ".join(f"%{letter}{first + index}" for index in range(count)) + "}"


def loads(first: int, count: int, address: str) -> str:
    """Return loads of 32-bit registers, `count` for each lane, one lane after another."""
    lines = [f"mad.wide.u32 %d100, %r0, {4 * count}, {address};"]
    for index in range(count):
        lines.append(f"ld.global.b32 %r{first + index}, [%d100+{4 * index}];")
    return "\n".join(lines)


def stores(first: int, count: int, address: str) -> str:
    lines = [f"mad.wide.u32 %d100, %r0, {4 * count}, {address};"]
    for index in range(count):
        lines.append(f"st.global.b32 [%d100+{4 * index}], %r{first + index};")
    return "\n".join(lines)


# ldmatrix and stmatrix


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_deals_out_rows(count: int, transposed: bool) -> None:
    """Lane l names row l % 8 of matrix l / 8. Rows lie backwards here."""
    rows = RANDOM.integers(0, 2**16, (8 * count, 8), dtype=np.uint16)
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' * transposed}.shared.b16"
    body = f"""
    .shared .align 16 .b8 tile[{128 * count}];
    mov.u32 %r1, tile;
    mad.lo.u32 %r2, %r0, 16, %r1;
    setp.lt.u32 %p1, %r0, {8 * count};
    mad.wide.u32 %d3, %r0, 16, %d0;
    @%p1 ld.global.v4.b32 {{%r3, %r4, %r5, %r6}}, [%d3];
    @%p1 st.shared.v4.b32 [%r2], {{%r3, %r4, %r5, %r6}};
    bar.sync 0;
    sub.u32 %r7, {8 * count - 1}, %r0;
    mad.lo.u32 %r8, %r7, 16, %r1;
    {name} {registers("r", 10, count)}, [%r8];
    {stores(10, count, "%d1")}
    """
    [got] = run(body, [rows], [(32 * count * 2, np.uint16)])
    got = got.reshape(32, count, 2)
    named = rows[::-1].reshape(count, 8, 8)
    for lane in range(32):
        for number in range(count):
            for position in range(2):
                row, column = lane // 4, lane % 4 * 2 + position
                want = named[number, column, row] if transposed else named[number, row, column]
                assert got[lane, number, position] == want


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse_of_ldmatrix(transposed: bool) -> None:
    words = RANDOM.integers(0, 2**32, (32, 4), dtype=np.uint32)
    suffix = ".trans" * transposed
    body = f"""
    .shared .align 16 .b8 tile[512];
    mov.u32 %r1, tile;
    {loads(10, 4, "%d0")}
    mad.lo.u32 %r2, %r0, 16, %r1;
    stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r2], {registers("r", 10, 4)};
    bar.sync 0;
    ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {registers("r", 20, 4)}, [%r2];
    ld.shared.b32 %r30, [%r2];
    {stores(20, 4, "%d1")}
    {stores(30, 1, "%d2")}
    """
    got, raw = run(body, [words], [(128, np.uint32), (32, np.uint32)])
    assert (got.reshape(32, 4) == words).all()
    halves = words.view(np.uint16).reshape(32, 4, 2)
    for row in range(32):
        # Its first two elements: of matrix row / 8, row row % 8.
        number, line = row // 8, row % 8
        if transposed:
            want = [halves[4 * column + line // 2, number, line % 2] for column in range(2)]
        else:
            want = halves[4 * line, number].tolist()
        assert [int(raw[row]) & 0xFFFF, int(raw[row]) >> 16] == want


# mma


MMA = [
    *(("bf16", "bf16", depth) for depth in (8, 16)),
    *(("f16", "f16", depth) for depth in (8, 16)),
    *(("tf32", "tf32", depth) for depth in (4, 8)),
    *((a, b, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    ("e4m3", "e4m3", 16),
]


@pytest.mark.parametrize(("left", "right", "depth"), MMA)
def test_mma_multiplies(left: str, right: str, depth: int) -> None:
    size = np.dtype(TYPES[left]).itemsize
    per = 4 // size
    a, b = matrix(left, 16, depth), matrix(right, depth, 8)
    c = RANDOM.integers(-9, 9, (16, 8)).astype(np.float32)
    count = 16 * depth // 32 // per
    a_words, b_words = np.zeros((32, count, per), a.dtype), np.zeros((32, count // 2, per), b.dtype)
    c_words = np.zeros((32, 4), np.float32)
    for lane in range(32):
        group, place = lane // 4, lane % 4
        for register in range(count):
            for element in range(per):
                row = group + (8 if register % 2 else 0)
                column = place * per + element + (4 * per if register >= 2 else 0)
                a_words[lane, register, element] = a[row, column]
        for register in range(count // 2):
            for element in range(per):
                row = place * per + element + 4 * per * register
                b_words[lane, register, element] = b[row, group]
        for register in range(4):
            c_words[lane, register] = c[group + 8 * (register // 2), place * 2 + register % 2]
    body = f"""
    {loads(10, count, "%d0")}
    {loads(20, count // 2, "%d1")}
    {loads(30, 4, "%d2")}
    mma.sync.aligned.m16n8k{depth}.row.col.f32.{left}.{right}.f32 {registers("r", 40, 4)},
        {registers("r", 10, count)}, {registers("r", 20, count // 2)}, {registers("r", 30, 4)};
    {stores(40, 4, "%d3")}
    """
    inputs = [words.view(np.uint32) for words in (a_words, b_words, c_words)]
    [got] = run(body, inputs, [(128, np.float32)])
    want = a.astype(np.float32) @ b.astype(np.float32) + c
    for lane in range(32):
        for register in range(4):
            row, column = lane // 4 + 8 * (register // 2), lane % 4 * 2 + register % 2
            assert got.reshape(32, 4)[lane, register] == want[row, column]


def test_mma_ignores_the_low_bits_of_tf32() -> None:
    body = f"""
    mov.b32 %r10, 0f3F800000;
    or.b32 %r10, %r10, 0x1fff;
    mov.b32 %r20, 0f40000000;
    mov.b32 %r30, 0f00000000;
    mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {registers("r", 40, 4)},
        {{%r10, %r10}}, {{%r20}}, {{%r30, %r30, %r30, %r30}};
    {stores(40, 4, "%d0")}
    """
    [got] = run(body, [], [(128, np.float32)])
    assert set(got.tolist()) == {8.0}


# wgmma

# Bytes of a swizzled row, and how a descriptor names it.
SWIZZLES = {128: 1, 64: 2, 32: 3}


def swizzled(offset: int, width: int) -> int:
    """Return where a byte goes: pieces of 16 bytes change places within lines of 128."""
    line, piece, byte = offset // 128, offset // 16 % 8, offset % 16
    return line * 128 + (piece ^ line % (width // 16)) * 16 + byte


def place_rows(values: np.ndarray, width: int, image: np.ndarray) -> int:
    """Lay [outer, depth] out with the depth along the rows. Return the stride of 8 rows."""
    size = values.itemsize
    for outer in range(values.shape[0]):
        for k in range(values.shape[1]):
            offset = outer // 8 * 8 * width + outer % 8 * width + k * size
            put(image, swizzled(offset, width), values[outer, k])
    return 8 * width


def place_columns(values: np.ndarray, width: int, image: np.ndarray) -> tuple[int, int]:
    """Lay [outer, depth] out with the outer dimension along the rows.

    Return the distance of blocks along the outer dimension, and that of eight rows.
    """
    size = values.itemsize
    per, blocks = width // size, -(-values.shape[0] * size // width)
    leading, stride = 8 * width, 8 * width * blocks
    for outer in range(values.shape[0]):
        for k in range(values.shape[1]):
            offset = outer % per * size + k % 8 * width
            offset += outer // per * leading + k // 8 * stride
            put(image, swizzled(offset, width), values[outer, k])
    return leading, stride


def put(image: np.ndarray, offset: int, value: np.generic) -> None:
    raw = np.frombuffer(value.tobytes(), np.uint8)
    image[offset : offset + raw.size] = raw


IMAGE = 8192
ADDRESS = 1024


def descriptor(start: int, leading: int, stride: int, width: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | SWIZZLES[width] << 62


FILL = f"""
.shared .align 1024 .b8 images[{2 * IMAGE}];
mov.u32 %r1, images;
mad.lo.u32 %r2, %r0, 16, %r1;
mad.wide.u32 %d10, %r0, 16, %d0;
mov.u32 %r3, 0;
$fill:
ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%d10];
st.shared.v4.b32 [%r2], {{%r4, %r5, %r6, %r7}};
add.u32 %r2, %r2, 2048;
add.s64 %d10, %d10, 2048;
add.u32 %r3, %r3, 1;
setp.lt.u32 %p1, %r3, {2 * IMAGE // 2048};
@%p1 bra $fill;
fence.proxy.async.shared::cta;
bar.sync 0;
"""
WGMMA = [
    (kind, width, columns, by_column)
    for kind, width, columns in (
        ("bf16", 128, 64),
        ("f16", 64, 32),
        ("bf16", 32, 8),
        ("tf32", 128, 24),
        ("e4m3", 64, 16),
        ("e5m2", 32, 16),
    )
    for by_column in ((False, False), (True, False), (False, True))
    if kind in ("bf16", "f16") or by_column == (False, False)
]


@pytest.mark.parametrize("from_registers", [False, True])
@pytest.mark.parametrize(("kind", "width", "columns", "by_column"), WGMMA)
def test_wgmma_multiplies(
    kind: str, width: int, columns: int, by_column: tuple[bool, bool], from_registers: bool
) -> None:
    """Both operands in shared memory in every layout, or the first one in registers."""
    size = np.dtype(TYPES[kind]).itemsize
    depth = 32 // size
    a, b = matrix(kind, 64, depth), matrix(kind, columns, depth)
    images = np.zeros((2, IMAGE), np.uint8)
    descriptors = []
    for values, image, transposed in zip((a, b), images, by_column, strict=True):
        leading, stride = 16, 0
        if transposed:
            leading, stride = place_columns(values, width, image)
        else:
            stride = place_rows(values, width, image)
        start = ADDRESS + IMAGE * len(descriptors)
        descriptors.append(descriptor(start, leading, stride, width))
    words = left_registers(a)
    narrow = kind in ("bf16", "f16")
    flags = ", ".join(str(int(flag)) for flag in by_column[from_registers:]) if narrow else ""
    first = registers("r", 10, 4) if from_registers else "%d60"
    count = columns // 2
    body = f"""
    {FILL}
    {loads(10, 4, "%d1")}
    mov.u64 %d60, {descriptors[0]};
    mov.u64 %d61, {descriptors[1]};
    {loads(20, count, "%d2")}
    mov.pred %p2, 1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind}
        {registers("r", 20, count)}, {first}, %d61, %p2, 1, 1{", " * bool(flags)}{flags};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores(20, count, "%d3")}
    """.replace(f"{kind}\n", f"{kind} ")
    before = RANDOM.integers(-9, 9, (128, count)).astype(np.float32)
    [got] = run(body, [images, words, before], [(128 * count, np.float32)], threads=128)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        for register in range(count):
            row = 16 * warp + lane // 4 + (8 if register % 4 >= 2 else 0)
            column = 8 * (register // 4) + 2 * (lane % 4) + register % 2
            sum_ = before[thread, register] + want[row, column]
            assert got.reshape(128, count)[thread, register] == sum_


def left_registers(a: np.ndarray) -> np.ndarray:
    """Return the registers of a 64-row operand, uint32[thread, 4]."""
    per = 4 // a.itemsize
    words = np.zeros((128, 4, per), a.dtype)
    for thread in range(128):
        warp, lane = thread // 32, thread % 32
        for register in range(4):
            for element in range(per):
                row = 16 * warp + lane // 4 + (8 if register % 2 else 0)
                column = lane % 4 * per + element + (4 * per if register >= 2 else 0)
                words[thread, register, element] = a[row, column]
    return words.view(np.uint32)


def test_wgmma_may_forget_what_it_adds_to_and_chains() -> None:
    """Products in a row into the same registers, of which the first overwrites them."""
    a, b = matrix("bf16", 64, 16), matrix("bf16", 8, 16)
    images = np.zeros((2, IMAGE), np.uint8)
    strides = [place_rows(values, 32, image) for values, image in zip((a, b), images, strict=True)]
    names = [descriptor(ADDRESS + IMAGE * n, 16, strides[n], 32) for n in range(2)]
    product = (
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r20, %r21, %r22, %r23}, "
        "%d60, %d61, %p3, 1, 1, 0, 0;"
    )
    body = f"""
    {FILL}
    mov.u64 %d60, {names[0]};
    mov.u64 %d61, {names[1]};
    mov.pred %p3, 0;
    mov.pred %p4, 1;
    wgmma.fence.sync.aligned;
    {product}
    {product.replace("%p3", "%p4")}
    wgmma.commit_group.sync.aligned;
    {product.replace("%p3", "%p4")}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores(20, 4, "%d1")}
    """
    [got] = run(body, [images], [(512, np.float32)], threads=128)
    want = 3 * (a.astype(np.float32) @ b.astype(np.float32).T)
    assert sorted(got.tolist()) == sorted(want.reshape(-1).tolist())
