"""Calls of the kernels with random shapes, dtypes and options."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.machine_code.attention_cases import AttentionCase, KvWriteCase
from tests.machine_code.case import Capability, Case
from tests.machine_code.few_row_cases import FewRowsCase
from tests.machine_code.greatest_cases import GreatestCase
from tests.machine_code.latent_cases import LatentAttentionCase
from tests.machine_code.norm_cases import AddNormCase
from tests.machine_code.product_cases import GroupedCase, QuantizedCase, QuantizedGroupedCase
from tests.machine_code.qkv_cases import RopeKvWriteCase
from tests.machine_code.state_cases import KINDS as CHUNK_KINDS
from tests.machine_code.state_cases import StateChunkCase
from tests.machine_code.state_step_cases import KINDS as STEP_KINDS
from tests.machine_code.state_step_cases import StateStepCase

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 192, 224, 256)
PAGE_SIZES = (16, 16, 32, 64, 128)
# Queries' dtype and pages' dtype.
DTYPES = (
    *(("bf16", ""), ("bf16", ""), ("bf16", "fp8"), ("f16", ""), ("f16", "fp8")),
    *(("f32", ""), ("f32", "bf16"), ("f32", "fp8")),
)
MOST_POSITIONS, MOST_QUERIES = 420, 90


class Draw:
    """Source of random choices."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def pick(self, *values: Any) -> Any:
        """Return any one of the values."""
        return values[self.rng.integers(len(values))]

    def number(self, least: int, most: int) -> int:
        """Return an integer from `least` to `most`."""
        return int(self.rng.integers(least, most + 1))

    def truth(self) -> bool:
        """Return true or false."""
        return bool(self.rng.integers(2))

    def near(self, *marks: int) -> int:
        """Return a number at one of the marks or next to it, from 0 on."""
        return max(0, self.pick(*marks) + self.number(-1, 1))


def random_case(seed: int, number: int, capability: Capability) -> Case:
    """Draw a case that runs for a capability. The same seed and number give the same one."""
    draw = Draw(np.random.default_rng([seed, number]))
    kinds = [_attention] * 4 + [_kv_write, _grouped, _quantized, _quantized, _quantized_grouped]
    kinds += [_mosaic, _add_norm, _rope_kv_write, _few_rows, _greatest]
    kinds += [_state_steps, _causal_conv, _state_chunks, _latent, _latent]
    while True:
        case: Case = draw.pick(*kinds)(f"random-{seed}-{number}", draw)
        if case.runs_on(capability):
            return case


def _rows(
    draw: Draw, size: int, is_decode: bool, most: int, most_queries: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the lengths of rows, and the queries of each, which are () for decodes.

    Args:
        draw: source of random choices.
        size: positions of a page.
        is_decode: whether each row has one query.
        most: most positions that are drawn evenly.
        most_queries: most queries of a row.
    """
    lengths = [
        draw.pick(draw.near(0, 16, size, 64, 128, 2 * size, 256), draw.number(0, most))
        for _ in range(draw.number(1, 6))
    ]
    if is_decode:
        return tuple(lengths), ()
    wanted = [draw.pick(0, 1, 1, 2, 15, 16, 17, 31, 33, 64, most_queries) for _ in lengths]
    return tuple(lengths), tuple(min(pair) for pair in zip(lengths, wanted, strict=True))


def _latent(name: str, draw: Draw) -> Case:
    dtype, page_dtype = draw.pick(*DTYPES)
    size, is_decode = draw.pick(*PAGE_SIZES), draw.truth()
    lengths, counts = _rows(draw, size, is_decode, 150, 40)
    padding = draw.pick(0, 1, 3)
    rank, others = draw.pick(16, 32, 48, 64, 96, 128), draw.pick(0, 16, 32, 48)
    # Tiles of the exact products of float32 have few rows.
    heads = draw.number(1, 20) if dtype == "f32" else draw.pick(draw.number(1, 20), 40, 64, 80)
    return LatentAttentionCase(
        *(name, "latent", lengths, counts, dtype, page_dtype, rank + others, size, heads),
        table_width=max(1, -(-max(lengths) // size)) + draw.number(0, 2),
        rank=rank,
        one_query=is_decode,
        # Exact products round large scores by more than the tolerance.
        scale=None if dtype == "f32" else draw.pick(None, 0.3),
        is_shared=draw.pick(False, False, True),
        spread=draw.pick(0.5, 1.0) if dtype == "f32" else draw.pick(0.5, 1.0, 3.0),
        padding=padding if is_decode or sum(counts) else max(padding, 1),
        seed=draw.number(0, 2**30),
    )


def _attention(name: str, draw: Draw, family: str = "", **fixed: Any) -> Case:
    family = family or draw.pick("decode", "ragged", "ragged")
    dtype, page_dtype = draw.pick(*DTYPES)
    size = draw.pick(*PAGE_SIZES)
    lengths, counts = _rows(draw, size, family == "decode", MOST_POSITIONS, MOST_QUERIES)
    options = {
        "dtype": dtype,
        "page_dtype": page_dtype,
        "head_dim": draw.pick(*HEAD_DIMS),
        "group": draw.pick(1, 2, 3, 4, 7, 8, 12, 16),
        "kv_heads": draw.number(1, 3),
        "window": draw.pick(None, None, 1, 16, 33, 100, 128),
        "soft_cap": draw.pick(None, None, 5.0, 50.0),
        "scale": draw.pick(None, None, 0.3),
        "has_sinks": draw.truth(),
        "spread": draw.pick(0.5, 1.0, 3.0),
        "padding": draw.pick(0, 1, 3, 70),
        "seed": draw.number(0, 2**30),
    } | fixed
    if options["window"] is None:
        options["is_shared"] = draw.pick(False, False, True)
    width = max(1, -(-max(lengths) // size)) + draw.number(0, 2)
    if family != "decode" and sum(counts) + options["padding"] == 0:
        options["padding"] = 1
    return AttentionCase(
        name, family, lengths, counts, page_size=size, table_width=width, **options
    )


def _mosaic(name: str, draw: Draw) -> Case:
    head_dim, dtype = draw.pick(64, 128, 256), draw.pick("bf16", "f16")
    return _attention(name, draw, "mosaic", head_dim=head_dim, dtype=dtype, page_dtype="")


def _kv_write(name: str, draw: Draw) -> Case:
    dtype, page_dtype = draw.pick(*DTYPES)
    return KvWriteCase(
        *(name, dtype, page_dtype, draw.pick(*HEAD_DIMS), draw.pick(*PAGE_SIZES)),
        kv_heads=draw.number(1, 5),
        is_scaled=page_dtype == "fp8" and draw.truth(),
        seed=draw.number(0, 2**30),
    )


def _add_norm(name: str, draw: Draw) -> Case:
    parts = draw.pick(None, 0, 1, 2, 4, 8)
    has_norm = parts is None or draw.truth()
    return AddNormCase(
        *(name, draw.number(1, 40), draw.pick(1, 16, draw.number(1, 600), 8 * draw.number(1, 700))),
        parts=parts,
        offset=draw.pick(0.0, 1.0),
        rounds_last=draw.truth(),
        dtype=draw.pick("bf16", "bf16", "f16", "f32"),
        factor=1.0 if parts is None else draw.pick(1.0, 1.0, 0.3),
        has_norm=has_norm,
        has_delta_norm=parts is not None and draw.truth(),
        seed=draw.number(0, 2**30),
    )


def _rope_kv_write(name: str, draw: Draw) -> Case:
    dtype, page_dtype = draw.pick(*DTYPES)
    head_dim, parts = draw.pick(*HEAD_DIMS), draw.pick(0, 0, 1, 2, 4, 8)
    return RopeKvWriteCase(
        *(name, draw.number(1, 5), draw.number(1, 16), head_dim),
        pairs=draw.pick(None, head_dim // 2, head_dim // 2, draw.number(1, head_dim // 2)),
        parts=parts,
        norm=draw.pick("", "head", "own"),
        offset=draw.pick(0.0, 1.0),
        rounds_last=draw.truth(),
        interleaved=draw.truth(),
        has_bias=parts > 0 and draw.truth(),
        is_scaled=page_dtype == "fp8" and draw.truth(),
        dtype=dtype,
        page_dtype=page_dtype,
        page_size=draw.pick(*PAGE_SIZES),
        seed=draw.number(0, 2**30),
    )


def _few_rows(name: str, draw: Draw) -> Case:
    parts = draw.pick(0, 1, 2, 4)
    return FewRowsCase(
        *(name, draw.number(1, 200), 8 * draw.number(1, 40) * max(parts, 1)),
        *(draw.pick(draw.number(1, 200), 8 * draw.number(1, 20)), parts),
        activation=draw.pick("silu", "gelu_tanh"),
        dtype=draw.pick("bf16", "bf16", "f16"),
        seed=draw.number(0, 2**30),
    )


def _greatest(name: str, draw: Draw) -> Case:
    columns = draw.pick(draw.number(1, 300), draw.near(4096, 8192), draw.number(1, 20_000))
    return GreatestCase(name, draw.number(1, 20), max(columns, 1), draw.number(0, 2**30))


def _groups(draw: Draw) -> tuple[tuple[int, ...], int]:
    """Draw sizes of groups, and how many rows there are."""
    most = draw.pick(4, 20, 70, 150)
    sizes = tuple(draw.pick(0, 1, draw.number(0, most)) for _ in range(draw.number(1, 8)))
    return sizes, max(1, sum(sizes) + draw.pick(0, 0, 1, 40))


def _grouped(name: str, draw: Draw) -> Case:
    sizes, rows = _groups(draw)
    inputs, outputs = (8 * draw.number(1, 40) for _ in range(2))
    dtype = draw.pick("bf16", "bf16", "f16", "f32")
    return GroupedCase(name, sizes, rows, inputs, outputs, dtype, draw.number(0, 2**30))


def _codes(draw: Draw) -> dict[str, Any]:
    """Draw the form, group and zero points of a quantized weight."""
    form = draw.pick("int8", "fp8", "int4", "int4")
    group = draw.pick(0, 24, 32, 64, 128) if form == "int4" else draw.pick(0, 0, 64)
    inputs = (group or 8) * draw.number(1, 4 if group else 30)
    return {
        "form": form,
        "inputs": inputs,
        "outputs": draw.number(1, 250),
        "group": group if group < inputs else 0,
        "zeros": draw.pick("", "points", "minima") if form == "int4" else "",
        "dtype": draw.pick("bf16", "bf16", "f16", "f32"),
        "scale_dtype": draw.pick("f32", "f32", "bf16", "f16"),
        "seed": draw.number(0, 2**30),
    }


def _quantized(name: str, draw: Draw) -> Case:
    return QuantizedCase(name, tokens=draw.pick(1, 7, 16, 17, 64, 65, 130), **_codes(draw))


def _quantized_grouped(name: str, draw: Draw) -> Case:
    sizes, rows = _groups(draw)
    return QuantizedGroupedCase(name, sizes=sizes, rows=rows, **_codes(draw))


def _recurrence(draw: Draw, most: int) -> tuple[str, tuple[int, ...]]:
    """Draw a recurrence, and its groups, heads, inputs and outputs. A state is not much larger."""
    groups = draw.number(1, 3)
    inputs = draw.pick(draw.number(4, 40), 64, 96, 128)
    outputs = draw.number(1, max(1, min(130, most // inputs)))
    return draw.pick("delta", "channels", "mamba2"), (
        groups,
        groups * draw.number(1, 3),
        inputs,
        outputs,
    )


def _state_steps(name: str, draw: Draw) -> Case:
    kind, sizes = draw.pick(("conv", (draw.number(1, 300),)), *2 * [_recurrence(draw, 8000)])
    rows = draw.rng.permutation(list(STEP_KINDS))[: draw.number(1, len(STEP_KINDS))]
    # Programs share a group only if it has several parts.
    is_shared = kind != "conv" and (sizes[1] > sizes[0] or sizes[3] > 16)
    return StateStepCase(
        *(name, kind, sizes, draw.number(2, 8), tuple(rows.tolist())),
        has_bias=draw.truth(),
        has_spare=is_shared and draw.truth(),
        absent=draw.number(0, 2),
        dtype=draw.pick("bf16", "f16", "f32"),
        seed=draw.number(0, 2**30),
    )


def _causal_conv(name: str, draw: Draw) -> Case:
    return _state_case(name, draw, "conv", (draw.number(2, 8), draw.number(1, 300)))


def _state_chunks(name: str, draw: Draw) -> Case:
    return _state_case(name, draw, *_recurrence(draw, 4000))


def _state_case(name: str, draw: Draw, kind: str, sizes: tuple[int, ...]) -> Case:
    kinds = draw.rng.permutation(list(CHUNK_KINDS))[: draw.number(1, len(CHUNK_KINDS))].tolist()
    lengths = [draw.pick(0, 1, 2, draw.near(16, 32, 64), draw.number(1, 80)) for _ in kinds]
    return StateChunkCase(
        *(name, kind, sizes, tuple(lengths)),
        borders=tuple(draw.number(0, draw.pick(length, min(length, 8))) for length in lengths),
        kinds=tuple(kinds),
        # A step has at least one token.
        last=draw.pick(0, 1, 5) or int(not any(lengths)),
        has_bias=draw.truth(),
        dtype=draw.pick("bf16", "f16", "f32"),
        seed=draw.number(0, 2**30),
    )
