"""Writer of the tables of pages that follow from the code: kernels and line counts.

    python -m scripts.write_pages           # write the pages
    python -m scripts.write_pages --check   # exit with 1 if a page is stale

The table of kernels, in `pallas_kernels/README.md`, shows the module that "auto" selects for
typical calls on four devices. Line counts, in `jaxserve/README.md`, are rounded to hundreds. They
are stale if one differs by more than a tenth.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import quantized_grouped_matmul, quantized_matmul
from pallas_kernels.arguments import Case, GroupedCase
from pallas_kernels.devices import DeviceLimits, find_card
from pallas_kernels.implementation import AnyCase, choose, module_of
from pallas_kernels.latent_arguments import LatentCase
from pallas_kernels.row_arguments import ProductCase, RowsCase
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import ROOT
from scripts.lib.run_main import run_main

DEVICES = {
    "CPU": DeviceLimits("cpu", "cpu"),
    "T4": find_card("T4").limits,
    "A100": find_card("A100").limits,
    "H200": find_card("H200").limits,
}
SUFFIXES = (".py", ".js", ".css", ".html")
STALE = 0.1
"""Share by which a line count of a page may differ from the code."""

BFLOAT16, FLOAT32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def paged(op: str, dtype: jnp.dtype, head_dim: int = 128) -> Callable[[DeviceLimits], Case]:
    """Return a function that describes a paged call of 64 rows, with 8 kv heads, on a device."""
    return lambda device: Case(op, device, dtype, dtype, 64, 64, 999, 16, 99, 32, 8, head_dim)


CASES: dict[str, Callable[[DeviceLimits], AnyCase]] = {
    "attention of prompts, bfloat16": paged("ragged", BFLOAT16),
    "attention of prompts, float32 or head dim 80": paged("ragged", FLOAT32, 80),
    "attention of decodes": paged("decode", BFLOAT16),
    "attention over latents": lambda device: LatentCase(
        "latent_attention", device, BFLOAT16, BFLOAT16, 64, 64, 999, 16, 99, 16, 1, 576, 512
    ),
    "write of keys and values": paged("kv_write", BFLOAT16),
    "norms, rotation and that write": paged("rope_kv_write", BFLOAT16),
    "addition to the residual stream and norm": lambda device: RowsCase(
        "add_norm", device, BFLOAT16, 64, 4096
    ),
    "grouped product (experts)": lambda device: GroupedCase(device, BFLOAT16, 64, 8, 4096, 1024),
    "product of few rows, in parts or gated": lambda device: ProductCase(
        "gated_matmul", device, BFLOAT16, 16, 4096, 1024
    ),
    "argmax of logits": lambda device: RowsCase("greatest", device, FLOAT32, 64, 128000),
}
"""A call of each operation. Its implementation is chosen by `pallas_kernels.implementation`."""

QUANTIZED = {
    "product with int8, fp8 or int4 codes": quantized_matmul,
    "the same, grouped": quantized_grouped_matmul,
}
ON_CPU = {
    "weights in panels (the usual layout)": "panel_product",
    "int4 or GGUF weights: blocks in panels": "block_product",
    "int8, fp8, GPTQ or AWQ weights: codes in panels": "quantized_panel_product",
}
"""Products that only a CPU has: rows of the table, and operations."""
ROW_KERNELS = {
    "draw of tokens (min_p, top_k, top_p)": "draw",
    "activation of a gated MLP": "gated",
    "sums of rows, softmax, sigmoid": "row_sums",
    "gated delta rule and Mamba-2; convolutions: `cpu/causal_conv.py`": "recurrence",
}
"""Operations over rows whose CPU kernel lies in the module of that name. Others use XLA."""


def file_of(module: str) -> str:
    """Return a module of `pallas_kernels` as a quoted path within it."""
    return f"`{module.removeprefix('pallas_kernels.').replace('.', '/')}.py`"


def quantized_module(operation: Callable[..., jax.Array], device: DeviceLimits) -> str:
    """Return the module that multiplies bfloat16 rows by a quantized weight on a device."""
    module = operation.__module__.removeprefix("pallas_kernels.")
    if device.runs_triton:
        return "gpu.triton_quantized_matmul"
    # Models store transposed codes on a GPU without Triton.
    return "gpu.xla_quantized_matmul" if device.is_gpu and module == "quantized_matmul" else module


def kernel_table() -> str:
    """Return the table of kernels: operations by device, with the module that "auto" selects."""
    rows = [["operation", *DEVICES], ["---"] * (1 + len(DEVICES))]
    for label, case_for in CASES.items():
        cases = [case_for(device) for device in DEVICES.values()]
        modules = [module_of(case.op, choose("auto", case), case.platform) for case in cases]
        rows.append([label, *map(file_of, modules)])
    for label, operation in QUANTIZED.items():
        modules = [quantized_module(operation, device) for device in DEVICES.values()]
        rows.append([label, *map(file_of, modules)])
    for label, name in ON_CPU.items():
        module, _ = getattr(pallas_kernels, name).args
        rows.append([label, file_of(module), *["-"] * (len(DEVICES) - 1)])
    for label, name in ROW_KERNELS.items():
        rows.append([label, file_of(f"cpu.{name}"), *["XLA"] * (len(DEVICES) - 1)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


ENGINE = {
    "`engine/`": ("engine/**/*.py", "the loop (`engine.py`), its thread, delivery, front ends"),
    "`execution/`": (
        "execution/**/*.py",
        "`step.py` is the program, `batch.py` its input, `runner.py` the owner",
    ),
    "`scheduling/`": (
        "scheduling/**/*.py",
        "`scheduler.py`, over `slot_table.py` and `page_pool.py`",
    ),
    "modules of `models/`": ("models/*.py", "`decoder.py`, `attention.py`"),
    "modules of `weights/`": ("weights/*.py", "`model_weights.py` is the entry"),
}
WINGS = {
    "`server/`": ("server/**/*.*", "HTTP APIs, tool call formats, files and batches, the web page"),
    "`commands/`, `fleet/`": ("[cf]*[st]/**/*.py", "the command line, and replicas on Ray"),
    "`start/`": ("start/**/*.py", "model files, memory plan, compiled programs"),
    "`text/`": ("text/**/*.py", "templates, tokenizers, grammars"),
    "folders of `models/`": ("models/*/**/*.py", "config.json, GGUF names, one file per family"),
    "`weights/gguf/`": ("weights/gguf/**/*.py", "GGUF files"),
    "`settings/`": ("settings/**/*.py", "settings, and checks of them"),
}
"""Rows of the tables of `jaxserve/README.md`: patterns of files, and notes."""


def lines_of(pattern: str) -> int:
    """Count the lines of the files of `jaxserve` that a pattern matches, rounded to hundreds."""
    paths = [path for path in (ROOT / "jaxserve").glob(pattern) if path.suffix in SUFFIXES]
    return round(sum(len(path.read_text().splitlines()) for path in paths) / 100) * 100


def line_tables() -> str:
    whole = lines_of("**/*.*")
    counts = {name: lines_of(pattern) for name, (pattern, _) in (ENGINE | WINGS).items()}
    engine = sum(counts[name] for name in ENGINE)
    text = [
        f"Of about {whole:,} lines, {engine:,} are the engine, to be read from the top:",
        "",
        "| the engine | lines | |",
        "|---|---|---|",
    ]
    for title, rows in (("", ENGINE), ("| **the wings** | | |", WINGS)):
        text += [title] if title else []
        text += [f"| {name} | {counts[name]:,} | {note} |" for name, (_, note) in rows.items()]
    return "\n".join(text)


PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "pallas_kernels/README.md": ("kernels", kernel_table),
    "jaxserve/README.md": ("lines", line_tables),
}
"""Pages with the mark of their generated part and the function that writes it."""


def marked(mark: str) -> re.Pattern[str]:
    """Return a pattern of the part of a page between the begin and the end of a mark."""
    begin, end = (rf"<!-- {mark}: {edge} -->\n" for edge in ("begin", "end"))
    return re.compile(rf"(?<={begin})(.*?)(?={end})", re.DOTALL)


def is_stale(page: str, text: str) -> bool:
    """Return whether a generated part differs from `text`, beyond what counts may differ."""
    number = re.compile(r"\d[\d,]*")
    if number.sub("", page) != number.sub("", text):
        return True
    pairs = zip(number.findall(page), number.findall(text), strict=True)
    counts = ([int(count.replace(",", "")) for count in pair] for pair in pairs)
    return any(abs(old - new) > max(STALE * new, 100 * (new > 100)) for old, new in counts)


def stale_pages(root: Path = ROOT) -> Iterator[str]:
    """Yield the names of the pages whose generated part is stale."""
    for name, (mark, write) in PAGES.items():
        match = marked(mark).search((root / name).read_text())
        if match is None or is_stale(match[1], write() + "\n"):
            yield name


def main() -> int:
    parser = script_parser("scripts.write_pages", __doc__)
    parser.add_argument("--check", action="store_true", help="only report stale pages")
    if parser.parse_args().check:
        stale = list(stale_pages())
        for name in stale:
            print(f"{name} is stale: run `python -m scripts.write_pages`", file=sys.stderr)
        return int(bool(stale))
    for name, (mark, write) in PAGES.items():
        path, text = ROOT / name, write() + "\n"
        path.write_text(marked(mark).sub(lambda _, text=text: text, path.read_text()))
    return 0


if __name__ == "__main__":
    run_main(main)
