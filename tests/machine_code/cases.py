"""The kernel calls that are compiled, kept and executed, several of each kernel.

Each has adversarial arguments (`arguments`), the call of the kernel (`call`) and the results of its
plain specification (`expected`). `attention_cases.py` and similar modules define them. Arguments
and expected results are made from a seed when they are needed: only machine code is kept.
"""

from __future__ import annotations

from typing import Any

from tests.machine_code.attention_cases import AttentionCase, KvWriteCase
from tests.machine_code.case import Capability, Case
from tests.machine_code.few_row_cases import few_row_cases
from tests.machine_code.greatest_cases import greatest_cases
from tests.machine_code.latent_cases import latent_cases
from tests.machine_code.norm_cases import add_norm_cases
from tests.machine_code.product_cases import GroupedCase, QuantizedCase, QuantizedGroupedCase
from tests.machine_code.qkv_cases import rope_kv_write_cases
from tests.machine_code.state_cases import state_chunk_cases
from tests.machine_code.state_step_cases import state_step_cases

CARDS: dict[Capability, str] = {
    (8, 0): "NVIDIA A100-SXM4-80GB",
    (8, 9): "NVIDIA GeForce RTX 4090",
    (9, 0): "NVIDIA H200",
    (10, 0): "NVIDIA B200",
    (12, 0): "NVIDIA GeForce RTX 5090",
}
"""The card that each capability's programs are compiled for."""
FAMILIES = (
    *("decode", "ragged", "mosaic", "kv_write", "rope_kv_write", "add_norm"),
    *("greatest", "few_rows", "grouped", "quantized", "quantized_grouped"),
    *("causal_conv", "state_chunks", "channel_chunks", "state_steps", "latent"),
)


def all_cases() -> list[Case]:
    """List every case, family by family."""
    return [
        *decode_cases(),
        *ragged_cases(),
        *mosaic_cases(),
        *kv_write_cases(),
        *rope_kv_write_cases(),
        *add_norm_cases(),
        *greatest_cases(),
        *few_row_cases(),
        *grouped_cases(),
        *quantized_cases(),
        *quantized_grouped_cases(),
        *state_chunk_cases(),
        *state_step_cases(),
        *latent_cases(),
    ]


# Queries' dtype and pages' dtype, with the name of the two.
ATTENTION_DTYPES = (
    ("bf16", "bf16", ""),
    ("f16", "f16", ""),
    ("f32", "f32", ""),
    ("fp8", "bf16", "fp8"),
)
EVERYTHING = {"soft_cap": 5.0, "has_sinks": True, "spread": 3.0}


def decode_cases() -> list[Case]:
    """List decodes: lengths about the sizes of pages, of blocks and of a row's splits."""
    edges = (0, 1, 16, 17, 63, 64, 65, 300, 600)
    at_window = (0, 1, 40, 99, 100, 101, 500)
    found: list[Case] = []
    for label, dtype, page_dtype in ATTENTION_DTYPES:
        kind = {"dtype": dtype, "page_dtype": page_dtype}
        found.append(AttentionCase(f"decode-{label}-h64", "decode", edges, **kind))
        found.append(
            AttentionCase(
                f"decode-{label}-h128-window-cap-sinks",
                *("decode", at_window),
                **(kind | EVERYTHING),
                head_dim=128,
                table_width=32,
                window=100,
            )
        )

    def more(name: str, lengths: tuple[int, ...], **fields: Any) -> None:
        found.append(AttentionCase(f"decode-{name}", "decode", lengths, **fields))

    more("bf16-h128-g7", (1, 33, 300), head_dim=128, group=7, table_width=20)
    window = {"group": 16, "window": 150, "has_sinks": True, "table_width": 48}
    more("bf16-h64-g16-window", (1, 33, 70, 300, 700), **window)
    # More splits than the merging kernel reads at a time.
    more("bf16-h16-long", (2048, 8500, 1, 5000), head_dim=16, kv_heads=1, table_width=540)
    # More blocks than programs of a kv head, so that a program has several, of several rows too.
    many_heads = {"head_dim": 16, "group": 1, "kv_heads": 33, "table_width": 20}
    more("bf16-h16-many-heads", (5, 130, 0, 64, 300, 17), **many_heads)
    more("bf16-h48-shared", (70, 64, 200), head_dim=48, is_shared=True, table_width=20)
    more("bf16-h80", (0, 1, 33, 290), head_dim=80, table_width=20)
    more("bf16-h96-g1", (5, 130), head_dim=96, group=1, table_width=20)
    more("bf16-h112-scale", (5, 130), head_dim=112, scale=0.3, table_width=20)
    more("bf16-h256", (5, 130), head_dim=256, kv_heads=1, table_width=20)
    more("fp8-h256", (5, 130), head_dim=256, kv_heads=1, table_width=20, page_dtype="fp8")
    more("f32-h256", (5, 130), head_dim=256, kv_heads=1, table_width=20, dtype="f32")
    more("bf16-h64-p32", (1, 32, 33, 400), page_size=32, table_width=16)
    more("bf16-h128-p64", (0, 1, 64, 65, 400), head_dim=128, page_size=64, table_width=8)
    more("bf16-h64-p128", (1, 128, 129, 400), page_size=128, table_width=4)
    more("f16-over-fp8-h64", (1, 33, 300), dtype="f16", page_dtype="fp8", table_width=20)
    more("f32-over-bf16-h64", (1, 33, 300), dtype="f32", page_dtype="bf16", table_width=20)
    more("f32-over-fp8-h80", (1, 33, 300), dtype="f32", page_dtype="fp8", head_dim=80)
    return found


def ragged_cases() -> list[Case]:
    """List steps of prompts, chunks and decodes. Rows of one query use the split kernel."""
    found: list[Case] = []
    for label, dtype, page_dtype in ATTENTION_DTYPES:
        kind = {"dtype": dtype, "page_dtype": page_dtype}
        name = f"ragged-{label}-h64"
        rows = ((300, 5, 0, 140, 1, 64, 210), (1, 5, 0, 40, 1, 17, 70))
        at_window = ((3, 140, 199, 150), (3, 1, 60, 20))
        if dtype == "f32":  # which takes the most instructions, without tensor cores
            rows, at_window = ((100, 5, 0, 60, 64), (1, 5, 0, 20, 9)), ((3, 140, 80), (3, 1, 20))
        found.append(AttentionCase(name, "ragged", *rows, table_width=20, **kind))
        found.append(
            AttentionCase(
                f"ragged-{label}-h128-window-cap-sinks",
                *("ragged", *at_window),
                **(kind | EVERYTHING),
                head_dim=128,
                table_width=16,
                window=50,
            )
        )

    def more(name: str, lengths: tuple[int, ...], counts: tuple[int, ...], **fields: Any) -> None:
        found.append(AttentionCase(f"ragged-{name}", "ragged", lengths, counts, **fields))

    few, long = (3, 1, 30), (3, 1, 50)
    more("bf16-h128-g7", (3, 40, 99), few, head_dim=128, group=7, table_width=8)
    more("bf16-h48-shared", (90, 40, 99), (30, 1, 35), head_dim=48, is_shared=True, table_width=8)
    more("bf16-h80", (3, 40, 99), few, head_dim=80, table_width=8)
    more("bf16-h96-p32", (70, 40, 99), few, head_dim=96, page_size=32, table_width=4)
    more("bf16-h256", (70, 40, 99), long, head_dim=256, kv_heads=1, table_width=8)
    more("fp8-h256", (70, 40, 99), long, head_dim=256, kv_heads=1, table_width=8, page_dtype="fp8")
    more("bf16-h64-p64-g16", (130, 40, 150), (3, 1, 20), page_size=64, group=16, table_width=4)
    more("bf16-h128-p128", (130, 40, 256), long, head_dim=128, page_size=128, table_width=2)
    more("bf16-h64-g1-window", (130, 40, 256), (129, 2, 50), group=1, window=16, table_width=16)
    more("f16-over-fp8-h64", (70, 40, 99), few, dtype="f16", page_dtype="fp8", table_width=8)
    more("f32-over-bf16-h64", (70, 40, 50), (5, 1, 10), dtype="f32", page_dtype="bf16")
    return found


def mosaic_cases() -> list[Case]:
    """List calls of the Hopper kernel."""
    counts, lengths = (1, 5, 0, 40, 1, 17, 70), (300, 5, 0, 140, 1, 64, 210)
    found: list[Case] = []

    def more(name: str, lengths: tuple[int, ...], counts: tuple[int, ...], **fields: Any) -> None:
        found.append(AttentionCase(f"mosaic-{name}", "mosaic", lengths, counts, **fields))

    more("bf16-h64", lengths, counts, table_width=20)
    more("f16-h64", (300, 5, 70), (40, 5, 1), dtype="f16", table_width=20)
    everything = EVERYTHING | {"head_dim": 128, "table_width": 16, "window": 50}
    more("bf16-h128-window-cap-sinks", (3, 140, 199, 150), (3, 1, 60, 20), **everything)
    more("bf16-h128-g7", (3, 40, 99), (3, 1, 30), head_dim=128, group=7, table_width=8)
    more("bf16-h256", (70, 40, 99), (3, 1, 50), head_dim=256, kv_heads=1, table_width=8)
    more("bf16-h64-p64", (130, 40, 150), (3, 1, 20), page_size=64, table_width=4)
    more("bf16-h128-p128", (130, 256), (3, 50), head_dim=128, page_size=128, table_width=2)
    return found


def kv_write_cases() -> list[Case]:
    """List writes in every dtype, scaled and not."""
    found: list[Case] = [
        KvWriteCase(f"kv_write-{label}-h64", dtype, page_dtype)
        for label, dtype, page_dtype in ATTENTION_DTYPES
    ]
    return [
        *found,
        KvWriteCase("kv_write-fp8-h80-scales", "bf16", "fp8", 80, 16, 3, is_scaled=True),
        KvWriteCase("kv_write-f32-to-fp8-h64-p64", "f32", "fp8", 64, 64, 1, is_scaled=True),
        KvWriteCase("kv_write-f16-to-fp8-h128", "f16", "fp8", 128),
        KvWriteCase("kv_write-f32-to-bf16-h256-p128", "f32", "bf16", 256, 128, 1),
        KvWriteCase("kv_write-bf16-h16-p32", "bf16", "", 16, 32, 5),
    ]


def grouped_cases() -> list[Case]:
    """List grouped products: tiles of 16, 64 and 128 rows, sizes that they divide and not."""
    found: list[Case] = [
        GroupedCase(f"grouped-{dtype}", dtype=dtype) for dtype in ("bf16", "f16", "f32")
    ]
    return [
        *found,
        GroupedCase("grouped-bf16-few", (5, 0, 9, 2), 20),
        GroupedCase("grouped-bf16-whole", (20, 0, 1, 40), 61, 128, 128),
        GroupedCase("grouped-bf16-many", (150, 0, 1, 129), 290, 264),
        GroupedCase("grouped-bf16-wide", (0, 100, 1, 129), 240, 264, 200),
        GroupedCase("grouped-f32-whole", (20, 0, 1, 40), 61, 128, 128, "f32"),
    ]


def quantized_cases() -> list[Case]:
    """List products of every form for few, some and many tokens, with groups of every kind."""
    found: list[Case] = []
    for form in ("int8", "fp8", "int4"):
        found.append(QuantizedCase(f"quantized-{form}-bf16", form))
        found.append(QuantizedCase(f"quantized-{form}-bf16-40-tokens", form, 40))
        found.append(QuantizedCase(f"quantized-{form}-bf16-130-tokens", form, 130))
        found.append(QuantizedCase(f"quantized-{form}-f16", form, 5, 264, 200, dtype="f16"))
        found.append(QuantizedCase(f"quantized-{form}-f32", form, 20, 72, 100, dtype="f32"))

    def int4(name: str, *sizes: int, **fields: Any) -> None:
        found.append(QuantizedCase(f"quantized-int4-{name}", "int4", *sizes, **fields))

    int4("bf16-g32-zeros", group=32, zeros="points")
    int4("bf16-g128-zeros", 17, 256, 72, group=128, zeros="points", scale_dtype="bf16")
    int4("bf16-zeros", 17, 128, 72, zeros="points")
    int4("bf16-g32-minima", 17, 128, 72, group=32, zeros="minima", scale_dtype="f16")
    int4("f16-g32-minima", 40, 96, 72, group=32, zeros="minima", dtype="f16", scale_dtype="f16")
    int4("f16-g64", 70, 192, 136, group=64, dtype="f16", scale_dtype="f16")
    int4("f32-g24", 7, 264, 200, group=24, dtype="f32")
    found.append(QuantizedCase("quantized-fp8-bf16-g64", "fp8", 9, 192, 40, group=64))
    # Blocks of GGUF files of 8, 6 and 5 bits.
    for group, zeros in ((32, ""), (16, ""), (32, "minima")):
        name = f"quantized-int8-bf16-g{group}{zeros and '-minima'}"
        fields: Any = {"group": group, "zeros": zeros, "scale_dtype": "f16"}
        found.append(QuantizedCase(name, "int8", 40, 96, 72, **fields))
    return found


def quantized_grouped_cases() -> list[Case]:
    """List grouped products of every form."""
    found: list[Case] = [
        QuantizedGroupedCase(f"quantized_grouped-{form}-bf16", form)
        for form in ("int8", "fp8", "int4")
    ]

    def more(name: str, form: str, *fields: Any, **named: Any) -> None:
        found.append(QuantizedGroupedCase(f"quantized_grouped-{name}", form, *fields, **named))

    int4 = {"group": 32, "zeros": "points", "scale_dtype": "bf16"}
    more("int4-bf16-g32-zeros", "int4", **int4)
    more("int4-bf16-many", "int4", (150, 0, 1, 129), 290, 192, 136, **int4)
    minima = {"group": 32, "zeros": "minima", "scale_dtype": "f16"}
    more("int4-bf16-g32-minima", "int4", **minima)
    more("int8-bf16-g16", "int8", group=16, scale_dtype="f16")
    more("int4-f16-g64", "int4", (5, 0, 9, 2), 20, 192, 136, group=64, dtype="f16")
    more("int8-f32", "int8", (5, 0, 9, 2), 20, dtype="f32")
    more("fp8-bf16-many", "fp8", (150, 0, 1, 129), 290, 264, 200)
    return found
