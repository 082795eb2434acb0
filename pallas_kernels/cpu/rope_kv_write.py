"""Norms of heads, rotation, and the write of keys and values on CPU, in one operation.

Plain JAX uses about 65 operations of XLA per layer for it, and each is compiled and launched. Each
head of a token is computed alone, and its squares are added in the order of `row_sums.py`. So the
result is the same to the bit for any other tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from llvmlite import ir

from pallas_kernels.arguments import ARRIVALS, Case
from pallas_kernels.cpu.arithmetic import float_type, stored_type
from pallas_kernels.cpu.ffi import NAMES, registered
from pallas_kernels.cpu.handler import Field, part_bounds
from pallas_kernels.cpu.ir_builder import I32, I64, Code, const
from pallas_kernels.cpu.norm_kernel import NormKernel
from pallas_kernels.cpu.row_sums import Vectors
from pallas_kernels.qkv_arguments import QkvOptions

K_PAGES, V_PAGES, COS = 1, 2, 4  # numbers of operands. Queries, keys and values are results
FACTOR = ir.FloatType()  # dtype of the scales of stored numbers


@dataclass(frozen=True)
class RopeKVWrite(NormKernel):
    """CPU kernel (generator of LLVM IR) of ``rope_kv_write``.

    It normalizes and rotates queries and keys, and writes keys and values to their pages.
    """

    page_dtype: str  # of the pages: `dtype`, or "bfloat16" or "float32" for the other of the two
    qkv_dtype: str  # of qkv: `dtype`, or a wider one that is rounded first
    rotates: bool  # whether there are cosines and sines
    interleaved: bool  # whether pairs are neighbours
    norms: bool  # whether queries and keys are normalized
    own_scales: bool  # whether each head has its own norm scales
    given_means: bool  # whether the mean squares over all heads of a token are an operand
    divides: bool  # whether stored numbers are divided by a scale per kv head

    @property
    def name(self) -> str:
        flags = self.rotates, self.interleaved, self.norms, self.own_scales, self.given_means
        form = "".join(str(int(flag)) for flag in (*flags, self.divides))
        numbers = [self.options.eps] if self.norms else []
        if self.norms and self.options.rounds_last:
            numbers.append(self.options.offset)
        bits = "".join(f"_{struct.pack('>d', number).hex()}" for number in numbers)
        dtypes = f"{self.dtype}_{self.qkv_dtype}_{self.page_dtype}"
        return f"{NAMES}rope_kv_write_{dtypes}_{form}{bits}_{self.cpu.vector_bytes}"

    @property
    def operands(self) -> int:
        return 4 + 2 * (self.rotates + self.norms + self.divides) + self.given_means

    @property
    def fields(self) -> Sequence[Field]:
        pages = Field(K_PAGES, 0), Field(K_PAGES, 2)
        pairs = [Field(COS, 1)] if self.rotates else []
        buffers = map(Field, range(self.operands + 3))
        return *(Field(0, nth) for nth in range(4)), *pages, *pairs, *buffers

    def parts(self, code: Code, fields: Sequence[Any]) -> Any:
        tokens, kv_heads, heads, width = fields[:4]
        return self.parts_of(code, tokens, code.mul(code.mul(kv_heads, heads), width))

    def part(self, code: Code, fields: Sequence[Any], index: Any, parts: Any) -> None:
        """Emit LLVM IR that computes ``rope_kv_write`` for the tokens of part `index`.

        Keys and values of a token whose slot is outside the pages are not written. `fields` are IR
        values: the addresses and sizes of the operands and results.
        """
        tokens, kv_heads, heads, width, num_pages, page_size, *rest = fields
        pairs = rest.pop(0) if self.rotates else None
        qkv, _, _, slots, *rest, queries, keys, values = rest
        tables = [rest.pop(0) for _ in range(2 * self.rotates)]
        scales = [rest.pop(0) if self.norms else None for _ in range(2)]
        means = rest.pop(0) if self.given_means else None
        divisors = [rest.pop(0) if self.divides else None for _ in range(2)]
        stored, paged = stored_type(self.dtype), stored_type(self.page_dtype)
        qkv_type = stored_type(self.qkv_dtype)
        group = code.sub(heads, const(2))
        begin, end = part_bounds(code, tokens, index, parts)
        with code.loop(begin, end) as (token, _):
            row = code.mul(token, pairs) if self.rotates else None
            turns = [code.at(table, row, float_type(self.sums)) for table in tables]
            slot = code.sext(code.read(slots, token, I32), I64)
            page, offset = code.udiv(slot, page_size), code.urem(slot, page_size)
            with code.loop(const(0), kv_heads) as (kv_head, _):
                first = code.add(code.mul(token, kv_heads), kv_head)

                def at_head(base: Any, number: Any, kind: ir.Type) -> Any:
                    return code.at(base, code.mul(number, width), kind)

                def of_head(nth: Any, number: Any, which: int) -> Vectors:
                    source = at_head(qkv, code.add(code.mul(first, heads), nth), qkv_type)
                    scale = scales[which]
                    if self.own_scales:
                        scale = at_head(scale, number, stored)
                    mean = None
                    if means is not None:
                        place = code.add(code.mul(token, const(2)), const(which))
                        mean = code.read(means, place, float_type(self.sums))
                    numbers = self.read_rounded(code, source, self.qkv_dtype)
                    return self._normed_head(code, numbers, width, scale, mean)

                with code.loop(const(0), group) as (nth, _):
                    query = of_head(nth, code.add(code.mul(kv_head, group), nth), 0)
                    target = at_head(queries, code.add(code.mul(first, group), nth), stored)
                    self._turn(code, query, width, pairs, turns, self._writer(code, target))
                # As an unsigned number, a negative slot is very large.
                cells = code.mul(num_pages, page_size)
                with code.if_then(code.icmp_unsigned("<", slot, cells)):
                    row = code.add(code.mul(page, kv_heads), kv_head)
                    cell = code.add(code.mul(row, page_size), offset)
                    writers = [
                        self._writer(
                            code,
                            at_head(pages, cell, paged),
                            self.page_dtype,
                            None if divisor is None else code.read(divisor, kv_head, FACTOR),
                        )
                        for pages, divisor in zip((keys, values), divisors, strict=True)
                    ]
                    key = of_head(group, kv_head, 1)
                    self._turn(code, key, width, pairs, turns, writers[0])
                    last = code.add(code.mul(first, heads), code.add(group, const(1)))
                    value = self.read_rounded(code, at_head(qkv, last, qkv_type), self.qkv_dtype)
                    self._turn(code, value, width, None, [], writers[1])

    def _normed_head(
        self, code: Code, numbers: Vectors, width: Any, scale: Any, mean_square: Any
    ) -> Vectors:
        if not self.norms:
            return numbers
        if mean_square is None:
            mean_square = self.mean_square(code, numbers, width)
        return self.normed(code, self.inverse(code, mean_square), numbers, scale)

    def _turn(
        self, code: Code, numbers: Vectors, width: Any, pairs: Any, turns: Sequence[Any], write: Any
    ) -> None:
        """Emit LLVM IR that rotates the first 2 * pairs numbers of a head, and writes the head.

        Args:
            code: builder of the IR.
            numbers: function that emits the loads of the head's numbers.
            width, pairs: numbers of a head, and pairs to rotate (i64s).
            turns: addresses of the cosines and sines. Empty for no rotation.
            write: function (numbers, index) that emits the stores.
        """
        done = const(0)
        if turns:
            real = float_type(self.sums)
            done = code.mul(pairs, const(2))

            def turn(index: Any, lanes: int) -> None:
                cos, sin = (code.read_vector(table, index, real, lanes) for table in turns)
                if self.interleaved:
                    both = numbers(code.mul(index, const(2)), 2 * lanes)
                    first, second = (
                        code.lanes_of(both, both, range(nth, 2 * lanes, 2)) for nth in (0, 1)
                    )
                else:
                    first, second = numbers(index, lanes), numbers(code.add(pairs, index), lanes)
                turned = code.fsub(code.fmul(first, cos), code.fmul(second, sin))
                write(turned, index)
                turned = code.fadd(code.fmul(second, cos), code.fmul(first, sin))
                write(turned, code.add(pairs, index))

            self.for_each(code, const(0), pairs, turn)
        self.for_each(code, done, width, lambda index, lanes: write(numbers(index, lanes), index))

    def _writer(
        self, code: Code, address: Any, dtype: str | None = None, divisor: Any = None
    ) -> Any:
        # `divisor` is a float32. The returned function generates code that writes numbers.

        def write(number: Any, index: Any) -> None:
            if dtype not in (None, self.dtype) or divisor is not None:
                number = self.rounded(code, number)
            if divisor is not None:
                factor = divisor
                if number.type.element != factor.type:
                    factor = code.fpext(factor, number.type.element)
                number = code.fdiv(number, code.splat(factor, number.type.count))
            self.written(code, number, address, index, dtype)

        return write


def rope_kv_write(
    qkv: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array] | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    slot_mapping: jax.Array,
    options: QkvOptions,
    case: Case,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Normalize and rotate queries and keys, and store keys and values, with the CPU kernel.

    Arguments are as in ``pallas_kernels.rope_kv_write``, with the `case` of the call. The pages are
    written in place if they are donated.

    Returns:
        Queries [T,N,H], the new k_pages and v_pages, and counters i32[ARRIVALS] of zeros.
    """
    tokens, dtype = len(slot_mapping), case.query_dtype
    if qkv.ndim == 5:
        qkv = (qkv[0] if len(qkv) == 1 else qkv.sum(axis=0))[:tokens]
        qkv = qkv if options.bias is None else qkv + options.bias.astype(qkv.dtype)
    norms = [] if options.query_norm is None else [options.query_norm, options.key_norm]
    means = [] if options.mean_squares is None or not norms else [options.mean_squares]
    scales = [] if options.k_scale is None else [options.k_scale, options.v_scale]
    own_scales = bool(norms) and norms[0].ndim == 3
    if own_scales != (bool(norms) and norms[1].ndim == 2):  # only one of both has scales per head
        heads, count, width = qkv.shape[1:]
        norms[0] = jnp.broadcast_to(norms[0], (heads, count - 2, width))
        norms[1], own_scales = jnp.broadcast_to(norms[1], (heads, width)), True
    kernel = RopeKVWrite(
        dtype=dtype.name,
        options=options.norm,
        page_dtype=case.page_dtype.name,
        qkv_dtype=qkv.dtype.name,
        rotates=cos_sin is not None,
        interleaved=options.interleaved,
        norms=bool(norms),
        own_scales=own_scales,
        given_means=bool(means),
        divides=bool(scales),
    )
    operands = [qkv, k_pages, v_pages, slot_mapping, *(cos_sin or ()), *norms, *means, *scales]
    _, heads, count, width = qkv.shape
    pages = (jax.ShapeDtypeStruct(array.shape, array.dtype) for array in (k_pages, v_pages))
    query, keys, values = jax.ffi.ffi_call(
        registered(kernel),
        [jax.ShapeDtypeStruct((tokens, heads, count - 2, width), dtype), *pages],
        input_output_aliases={K_PAGES: 1, V_PAGES: 2},
        vmap_method="sequential",
    )(*operands)
    return query.reshape(tokens, -1, width), keys, values, jnp.zeros(ARRIVALS, jnp.int32)
