"""Cases that ``offline_worker.py`` compiles: every kernel in the shapes of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

Zeros = Literal["", "points", "minima"]


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
    "decode": ("split_attention", "split_plan"),
    "ragged": ("ragged_attention", "split_attention", "split_plan"),
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
class ChunkCase:
    """Operation with a state per sequence to compile, in the sizes of a model.

    Attributes:
        op: "causal_conv", "gated_delta", "channel_delta" or "mamba2".
        sizes: taps and channels, or groups, heads, inputs and outputs.
        tokens, rows: of the step.
    """

    op: str
    dtype: str
    model: str
    sizes: tuple[int, ...]
    tokens: int = 2048
    rows: int = 64

    @property
    def name(self) -> str:
        return f"{self.op} {self.dtype} {self.model}"


def state_cases() -> list[ChunkCase]:
    """List the convolutions and recurrences of models, and sizes that are no powers of two."""
    found = []
    for dtype in ("bfloat16", "float32"):
        found += [
            ChunkCase("causal_conv", dtype, "Qwen3.5-0.8B", (4, 6144)),
            ChunkCase("gated_delta", dtype, "Qwen3.5-0.8B", (16, 16, 128, 128)),
            ChunkCase("gated_delta", dtype, "Qwen3.6-35B-A3B", (16, 32, 128, 128)),
            ChunkCase("channel_delta", dtype, "Kimi-Linear-48B-A3B", (32, 32, 128, 128)),
            ChunkCase("channel_delta", dtype, "uneven", (3, 6, 40, 72)),
            ChunkCase("mamba2", dtype, "Nemotron-H-8B", (8, 128, 128, 64)),
            ChunkCase("mamba2", dtype, "Nemotron-Nano-9B-v2", (8, 128, 128, 80)),
            ChunkCase("gated_delta", dtype, "uneven", (3, 6, 40, 72)),
            ChunkCase("mamba2", dtype, "wide", (1, 24, 256, 64)),
        ]
    return [*found, ChunkCase("causal_conv", "bfloat16", "LFM2-350M", (3, 1024))]


STATE_KERNELS = {
    "causal_conv": ("causal_conv",),
    "gated_delta": ("gated_delta_blocks", "gated_delta_rows"),
    "channel_delta": ("channel_delta_blocks", "channel_delta_rows"),
    "mamba2": ("mamba2_blocks", "mamba2_rows"),
}


@dataclasses.dataclass(frozen=True)
class QuantizedCase:
    """Weight to compile a product with: groups of `group` inputs, 0 for one scale an output."""

    form: str
    dtype: str
    tokens: int
    inputs: int
    outputs: int
    group: int = 0
    zeros: Zeros = ""

    @property
    def name(self) -> str:
        scales = f" g{self.group}" if self.group else ""
        shape = f"{self.inputs}x{self.outputs}{scales}{self.zeros and f' {self.zeros}'}"
        return f"quantized_matmul {self.form} {self.dtype} {shape} {self.tokens} tokens"


def quantized_cases() -> list[QuantizedCase]:
    """List the gate and upward projections of Llama-3.1-8B, as quantized at load, and as AWQ
    and GPTQ have them, then another dtype, and sizes that no block divides."""
    found = [
        QuantizedCase(form, "bfloat16", tokens, 4096, 28672, group, zeros)
        for form, group, zeros in (
            ("int8", 0, ""),
            ("int8", 16, ""),
            ("int8", 32, "minima"),
            ("fp8", 0, ""),
            ("int4", 128, ""),
            ("int4", 128, "points"),
            ("int4", 32, "minima"),
        )
        for tokens in (16, 64, 2048)
    ]
    found.append(QuantizedCase("int4", "float16", 64, 4096, 28672, 128, "points"))
    found.append(QuantizedCase("int8", "float32", 2048, 4096, 4096))
    return [*found, QuantizedCase("int4", "float32", 7, 264, 200, 24)]


@dataclasses.dataclass(frozen=True)
class QuantizedGroupedCase:
    """Experts of a model to compile, quantized as at load or as AWQ has them."""

    form: str
    experts: GroupedCase
    group: int = 0
    zeros: Zeros = ""

    @property
    def name(self) -> str:
        case, scales = self.experts, f" g{self.group}" if self.group else ""
        kind = f"{self.form}{scales}{self.zeros and f' {self.zeros}'}"
        return f"quantized_grouped_matmul {kind} {case.dtype} {case.model} {case.rows} rows"


def quantized_grouped_cases() -> list[QuantizedGroupedCase]:
    """List the experts of `grouped_cases`: every form for one model, int4 for the others."""
    found = []
    for case in grouped_cases():
        first = case.model.startswith("Qwen")
        if first or case.dtype == "float32":
            found += [QuantizedGroupedCase(form, case) for form in ("int8", "fp8")]
        # 2880 inputs are padded to whole groups of 32 only. AWQ's are mostly of 128.
        group = 24 if case.model == "uneven" else 32
        found.append(QuantizedGroupedCase("int4", case, group, "minima"))
        if first:
            found.append(QuantizedGroupedCase("int4", case, 128))
    return found


@dataclasses.dataclass(frozen=True)
class LatentCase:
    """Attention over latents to compile: 64 rows of up to 4096 positions.

    Attributes:
        op: "decode", or "ragged" for a step of 2048 tokens.
        dtype: of the pages. Queries over float8 pages are bfloat16.
        heads: of the queries.
        sizes: numbers of a value, and of a cell.
        S: positions of a page.
    """

    op: str
    dtype: str
    heads: int
    sizes: tuple[int, int] = (512, 576)
    S: int = 16

    @property
    def name(self) -> str:
        rank, cell = self.sizes
        size = f"{rank}+{cell - rank} p{self.S}"
        return f"latent {self.op} {self.dtype} {size} {self.heads} heads"


LATENT_KERNELS = ("latent_tiles", "latent_shares", "latent_merge", "split_plan")


def latent_cases() -> list[LatentCase]:
    """List DeepSeek's sizes in every dtype, with 16 to 128 heads, then smaller latents."""
    found = []
    for op in ("decode", "ragged"):
        for dtype in ("bfloat16", "float8_e4m3fn"):
            found += [LatentCase(op, dtype, heads) for heads in (16, 32, 64, 128)]
        found += [LatentCase(op, dtype, 16) for dtype in ("float16", "float32")]
        found += [
            LatentCase(op, "bfloat16", 20),
            LatentCase(op, "bfloat16", 16, S=64),
            LatentCase(op, "bfloat16", 32, (256, 320)),
        ]
    return found


RECURRENT_KERNELS = ("conv_step", "recurrence_step")


@dataclasses.dataclass(frozen=True)
class RecurrentCase:
    """Decode of a layer with a state per sequence, in the sizes of a model.

    Attributes:
        kind: "conv" (a convolution alone), "delta", "channels" (a delta rule with a decay for each
            number of a key) or "mamba2".
        sizes: channels of the convolution alone, or groups, heads, inputs and outputs.
        width: taps of the convolution.
    """

    kind: str
    model: str
    rows: int
    sizes: tuple[int, ...]
    width: int = 4
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"recurrent {self.kind} {self.dtype} {self.model} {self.rows} rows"


def recurrent_cases() -> list[RecurrentCase]:
    """List decodes of few and of many rows, of every kind of layer, in sizes of models."""
    models: tuple[tuple[str, str, tuple[int, ...], int], ...] = (
        ("conv", "LFM2-350M", (1024,), 3),
        ("delta", "Qwen3.5-0.8B", (16, 16, 128, 128), 4),
        ("delta", "Qwen3.5-27B", (16, 48, 128, 128), 4),
        ("channels", "Kimi-Linear-48B-A3B", (32, 32, 128, 128), 4),
        ("mamba2", "Nemotron-Nano-4B", (8, 96, 128, 80), 4),
        ("mamba2", "Granite-4.0-H-Small", (1, 128, 128, 64), 4),
    )
    found = [
        RecurrentCase(kind, model, rows, sizes, width)
        for kind, model, sizes, width in models
        for rows in (1, 64)
    ]
    return [
        *found,
        RecurrentCase("delta", "Qwen3.5-0.8B", 64, (16, 16, 128, 128), dtype="float32"),
        RecurrentCase("delta", "uneven", 5, (2, 6, 96, 80), 7, "float16"),
        RecurrentCase("channels", "uneven", 5, (2, 6, 96, 80), 7, "float16"),
        RecurrentCase("mamba2", "wide", 5, (1, 4, 512, 48), 5),
    ]


@dataclasses.dataclass(frozen=True)
class StepCase:
    """Step of an 8B Llama to compile, whole as the engine traces it.

    Attributes:
        tokens, rows: the bucket. As many tokens as rows are decodes.
        dtype: of weights and activations.
        page_dtype: of the pages, by default that of the weights.
        form: of quantized weights, or "".
        layers: how many of the model's. 0 means all.
        draws: take a decode's program that holds the sampler.
        num_steps: of a launch.
        context: positions that a row's pages hold.
    """

    tokens: int
    rows: int
    dtype: str = "bfloat16"
    page_dtype: str = ""
    form: str = ""
    layers: int = 0
    draws: bool = False
    num_steps: int = 1
    context: int = 1024
    model: str = "8b"

    @property
    def name(self) -> str:
        launch = f"launch of {self.num_steps} steps" if self.num_steps > 1 else "step"
        decodes = self.tokens == self.rows
        size = f"decode {self.rows} rows" if decodes else f"mixed {self.tokens} tokens"
        about = [self.dtype] if self.dtype != "bfloat16" else []
        about += [f"{self.form} weights"] if self.form else []
        about += [f"{self.page_dtype} pages"] if self.page_dtype else []
        about += [f"{self.layers} layers"] if self.layers else []
        about += ["drawn"] if self.draws and decodes and self.num_steps == 1 else []
        return ", ".join([f"{launch} {self.model} {size}", *about])


STEP_KERNELS = (
    *("split_attention", "split_plan", "ragged_attention", "kv_write", "add_norm", "greatest"),
    *("matmul_in_parts", "gated_matmul", "quantized_matmul", *RECURRENT_KERNELS),
)


def step_cases() -> list[StepCase]:
    """List the whole model's decodes, drawn and not, its mixed steps and a launch of 8 steps."""
    return [
        *(StepCase(rows, rows, context=4096) for rows in (1, 32, 64, 256)),
        StepCase(64, 64, context=4096, draws=True),
        *(StepCase(tokens, 64, context=8192, draws=True) for tokens in (2048, 8192)),
        StepCase(64, 64, context=4096, draws=True, num_steps=8),
    ]


def recurrent_steps(layers: int = 0) -> list[StepCase]:
    """List decodes of models with states, of one row and of 64.

    Args:
        layers: of the model, at least 4, so that one of them has attention. 0 means all.
    """
    return [
        StepCase(rows, rows, layers=layers and max(layers, 4), model=model)
        for model in ("Qwen3.5 0.8B", "Nemotron Nano 4B")
        for rows in (1, 64)
    ]


def long_cases() -> list[Any]:
    return [
        *cases(),
        *grouped_cases(),
        *quantized_cases(),
        *quantized_grouped_cases(),
        *recurrent_cases(),
        *state_cases(),
        *latent_cases(),
        *step_cases(),
        *recurrent_steps(),
    ]


def card_cases() -> list[Any]:
    """List the cases that every card from 8.0 on must compile: each kernel in sizes of models."""
    found: list[Any] = []
    for op in ("decode", "ragged"):
        for H in (64, 128, 256):
            found += [Case(op, dtype, H) for dtype in ("bfloat16", "float8_e4m3fn")]
        found += [Case(op, "float16", H) for H in (128, 256)]
        # Gemma 3 and gpt-oss.
        found += [Case(op, "bfloat16", H, group=2, extras="window cap sinks") for H in (64, 256)]
    found += [Case("kv_write", dtype, 128) for dtype in ("bfloat16", "float8_e4m3fn")]
    found += state_cases()
    sizes = (("bfloat16", 16), ("bfloat16", 2048), ("float16", 64))
    forms: tuple[tuple[str, int, Zeros], ...] = (
        ("int8", 0, ""),
        ("fp8", 0, ""),
        ("int4", 128, "points"),
        ("int4", 32, "minima"),
    )
    found += [
        QuantizedCase(form, dtype, tokens, 4096, 28672, group, zeros)
        for form, group, zeros in forms
        for dtype, tokens in sizes
    ]
    for experts in grouped_cases()[:2]:
        found.append(experts)
        found += [QuantizedGroupedCase(form, experts) for form in ("int8", "fp8")]
        found.append(QuantizedGroupedCase("int4", experts, 32, "minima"))
    latent = [case for case in latent_cases() if case.S == 16 and case.heads in (16, 32, 128)]
    return [*found, *recurrent_cases(), *latent]


def card_steps(dtype: str, layers: int) -> list[StepCase]:
    """List steps of decodes and of chunks, with quantized weights and narrow pages too."""
    decode = StepCase(32, 32, dtype, layers=layers)
    found = [StepCase(1, 1, dtype, layers=layers), decode]
    found += [dataclasses.replace(decode, form=form) for form in ("int8", "fp8", "int4")]
    found.append(dataclasses.replace(decode, page_dtype="float8_e4m3fn"))
    mixed = dataclasses.replace(decode, tokens=512, draws=True)
    return [*found, mixed, dataclasses.replace(mixed, form="int4")]


LAUNCHES = "launches: "
LAUNCH_ROWS, LAUNCH_LAYERS = (1, 32, 256), (2, 3)


def launch_case(model: str, rows: int, layers: int) -> StepCase:
    """Return the greedy decode of a model with few layers. The difference of two is one layer."""
    return StepCase(rows, rows, layers=layers, model=model)


def launch_cases(models: Iterable[str]) -> list[StepCase]:
    return [
        launch_case(model, rows, layers)
        for model in models
        for rows in LAUNCH_ROWS
        for layers in LAUNCH_LAYERS
    ]


def order_cases() -> list[StepCase]:
    """List the engine's own programs, with two layers: decodes, chunks, a launch of eight."""
    small = StepCase(32, 32, layers=2)
    found = [launch_case(model, rows, 2) for model in ("8b", "0.6b") for rows in LAUNCH_ROWS]
    found += [dataclasses.replace(small, draws=True), dataclasses.replace(small, num_steps=8)]
    return [*found, dataclasses.replace(small, tokens=2048, draws=True)]


def case_lists(which: str, capability: tuple[int, int]) -> list[Any]:
    """List the cases of a name.

    Args:
        which: "long", "card", "full" (with all layers), "short" or "order", or models' names
            after "launches: ", separated by a semicolon and a blank.
    """
    if which == "long":
        return long_cases()
    if which == "order":
        return order_cases()
    if which.startswith(LAUNCHES):
        return launch_cases(which.removeprefix(LAUNCHES).split("; "))
    layers = 0 if which == "full" else 2
    if capability < (8, 0):  # XLA alone: steps in the dtype that is native there
        return card_steps("float16", layers)
    if which == "short":
        return short_cases()
    halves = StepCase(32, 32, "float16", layers=layers)
    return [*card_cases(), *card_steps("bfloat16", layers), halves, *recurrent_steps(layers)]


def short_cases() -> list[Any]:
    """List a kernel of each kind, in the sizes that are the hardest to fit."""
    [experts, *_] = grouped_cases()
    return [
        Case("decode", "bfloat16", 256),
        Case("ragged", "bfloat16", 256, group=2, extras="window cap sinks"),
        Case("decode", "float8_e4m3fn", 128),
        Case("kv_write", "float8_e4m3fn", 128),
        QuantizedCase("int4", "bfloat16", 16, 4096, 4096, 32, "minima"),
        experts,
        QuantizedGroupedCase("int4", experts, 32, "minima"),
        RecurrentCase("delta", "Qwen3.5-0.8B", 64, (16, 16, 128, 128)),
        ChunkCase("causal_conv", "bfloat16", "Qwen3.5-0.8B", (4, 6144)),
        ChunkCase("gated_delta", "bfloat16", "Qwen3.6-35B-A3B", (16, 32, 128, 128)),
        ChunkCase("channel_delta", "bfloat16", "Kimi-Linear-48B-A3B", (32, 32, 128, 128)),
        ChunkCase("mamba2", "bfloat16", "Nemotron-Nano-9B-v2", (8, 128, 128, 80)),
        LatentCase("ragged", "bfloat16", 128),
        LatentCase("ragged", "float8_e4m3fn", 128),
    ]
