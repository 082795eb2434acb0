"""Cases that ``offline_worker.py`` compiles: every kernel in the shapes of models."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    """Kernel call to compile: 32 query heads over 8 kv heads by default."""

    op: str
    dtype: str
    H: int
    S: int = 16
    group: int = 4
    extras: str = ""

    @property
    def name(self) -> str:
        parts = [f"{self.op} {self.dtype} h{self.H} p{self.S}"]
        parts += [f"group{self.group}"] if self.group != 4 else []
        return " ".join([*parts, *([self.extras] if self.extras else [])])


def cases() -> list[Case]:
    """List every dtype and head dim of the tuning table, then page sizes, groups and extras."""
    found = []
    for op in ("decode", "ragged"):
        for dtype in ("bfloat16", "float16", "float32", "float8_e4m3fn"):
            found += [Case(op, dtype, H) for H in (64, 80, 96, 128, 256)]
        found += [Case(op, "bfloat16", 128, S) for S in (32, 64, 128)]
        found += [Case(op, "bfloat16", 128, group=group) for group in (1, 7, 8, 16)]
        for dtype in ("bfloat16", "float8_e4m3fn"):
            found += [Case(op, dtype, 128, extras="window cap sinks")]
        found += [Case(op, "bfloat16", 256, extras="window cap sinks")]
    found += [
        Case("mosaic_ragged", dtype, H) for dtype in ("bfloat16", "float16") for H in (64, 128, 256)
    ]
    found += [Case("mosaic_ragged", "bfloat16", 128, S) for S in (64, 128)]
    found += [Case("mosaic_ragged", "bfloat16", 128, group=7)]
    found += [Case("mosaic_ragged", "bfloat16", H, extras="window cap sinks") for H in (128, 256)]
    found += [
        Case("kv_write", dtype, H) for dtype in ("bfloat16", "float8_e4m3fn") for H in (64, 80, 128)
    ]
    return found


KERNELS = {
    "decode": ("paged_decode",),
    "ragged": ("ragged_attention", "paged_decode"),
    "mosaic_ragged": ("ragged_attention_hopper",),
    "kv_write": ("kv_write",),
}


@dataclasses.dataclass(frozen=True)
class GroupedCase:
    """Experts of a model to compile: `rows` chosen experts of all tokens together."""

    model: str
    dtype: str
    E: int
    D: int
    F: int
    rows: int

    @property
    def name(self) -> str:
        return f"grouped_matmul {self.dtype} {self.model} {self.rows} rows"


def grouped_cases() -> list[GroupedCase]:
    """List a decode of 64 tokens and a step of 2048, gate and upward projections."""
    models = (
        ("Qwen3-30B-A3B", 128, 2048, 1536, 8),
        ("gpt-oss-20b", 32, 2880, 5760, 4),
        ("Mixtral-8x7B", 8, 4096, 28672, 2),
    )
    found = [
        GroupedCase(name, "bfloat16", E, D, F, chosen * tokens)
        for name, E, D, F, chosen in models
        for tokens in (64, 2048)
    ]
    uneven = GroupedCase("uneven", "float16", 8, 264, 200, 512)
    return [*found, uneven, GroupedCase("even", "float32", 8, 256, 256, 512)]


@dataclasses.dataclass(frozen=True)
class QuantizedCase:
    """Weight to compile a product with: groups of `group` inputs, 0 for one scale an output."""

    form: str
    dtype: str
    tokens: int
    inputs: int
    outputs: int
    group: int = 0
    zeros: bool = False

    @property
    def name(self) -> str:
        scales = f" g{self.group}" if self.group else ""
        shape = f"{self.inputs}x{self.outputs}{scales}{' zeros' if self.zeros else ''}"
        return f"quantized_matmul {self.form} {self.dtype} {shape} {self.tokens} tokens"


def quantized_cases() -> list[QuantizedCase]:
    """List the gate and upward projections of Llama-3.1-8B, as quantized at load, and as AWQ
    and GPTQ have them; then another dtype, and sizes that no block divides."""
    found = [
        QuantizedCase(form, "bfloat16", tokens, 4096, 28672, group, zeros)
        for form, group, zeros in (
            ("int8", 0, False),
            ("fp8", 0, False),
            ("int4", 128, False),
            ("int4", 128, True),
        )
        for tokens in (16, 64, 2048)
    ]
    found.append(QuantizedCase("int4", "float16", 64, 4096, 28672, 128, True))
    found.append(QuantizedCase("int8", "float32", 2048, 4096, 4096))
    return [*found, QuantizedCase("int4", "float32", 7, 264, 200, 24)]


@dataclasses.dataclass(frozen=True)
class QuantizedGroupedCase:
    """Experts of a model to compile, quantized as at load or as AWQ has them."""

    form: str
    experts: GroupedCase
    group: int = 0
    zeros: bool = False

    @property
    def name(self) -> str:
        case, scales = self.experts, f" g{self.group}" if self.group else ""
        kind = f"{self.form}{scales}{' zeros' if self.zeros else ''}"
        return f"quantized_grouped_matmul {kind} {case.dtype} {case.model} {case.rows} rows"


def quantized_grouped_cases() -> list[QuantizedGroupedCase]:
    """List the experts of `grouped_cases`: every form for one model, int4 for the others."""
    found = []
    for case in grouped_cases():
        first = case.model.startswith("Qwen")
        if first or case.dtype == "float32":
            found += [QuantizedGroupedCase(form, case) for form in ("int8", "fp8")]
        # 2880 inputs are padded to whole groups of 32 only; AWQ's are mostly of 128.
        group = 24 if case.model == "uneven" else 32
        found.append(QuantizedGroupedCase("int4", case, group, zeros=True))
        if first:
            found.append(QuantizedGroupedCase("int4", case, 128))
    return found
