"""Compilation of kernels, steps, sums and starts for NVIDIA cards on a machine without a GPU.

    python -m scripts.gpu.compile_offline [--only REGEX] [--out DIR]    everything, for an H200
    python -m scripts.gpu.compile_offline --order                       loads before launches end
    python -m scripts.gpu.compile_offline --card all                    a card of each capability
    python -m scripts.gpu.compile_offline --card "RTX 3060" --card L4 --full
    python -m scripts.gpu.compile_offline --sums                        over 2, 4 and 8 H200s
    python -m scripts.gpu.compile_offline --start 8b                    programs of a start

Makes an environment for the compilers (`offline_environment.py`), and runs `offline_worker.py`
there. The first form writes a table of registers, spills, shared memory, instruction counts,
launches, command buffers, copies of KV and temporary memory to compile_offline.json and .txt.
`--order` reads the machine code of every kernel of an engine's steps: whether each waits before it
loads where launches may overlap, and the memory time of XLA's cost model. It writes
launch_order.json and .md. `--card` compiles the kernels and steps that every card must run, into
cards.json and cards.md. `--sums` compiles decode steps of an 8B Llama, and single sums, for each
choice of `all_reduce`, into collectives.md. `--start` lists the programs that a start without
stored programs compiles, with the seconds of Python and of XLA for each, into start_MODEL.json and
.md.

Exits with 1 if a case that is required does not compile, spills registers or copies KV, or a decode
step is more than one graph. With `--card`, only the cards of `fits.md` count.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
from typing import Any

from jaxserve.commands.argument_types import integer_from_0, positive_integer
from jaxserve.settings.machine import with_gpu_flags
from scripts.gpu import start_table, sum_table
from scripts.gpu.card_table import card_faults, card_table
from scripts.gpu.launch_order import summary
from scripts.gpu.models import MODELS
from scripts.gpu.offline_environment import (
    JAX,
    add_environment,
    compiler_variables,
    open_environment,
    with_ptxas,
)
from scripts.gpu.targets import ONE_OF_EACH, Target
from scripts.lib.argument_types import new_folder, pattern, script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run

REQUIRED = (
    r"^(decode|ragged|mosaic_ragged) (bfloat16 h(64|128|256) |float8_e4m3fn h128 )p16$"
    r"|^kv_write|^step|^launch|^(grouped|quantized|quantized_grouped)_matmul (.+ )?bfloat16 "
    r"|^(causal_conv|gated_delta|channel_delta|mamba2|recurrent|latent) "
)
"""Cases that may not spill and may not copy KV."""
H200, WORKER = "NVIDIA H200", "scripts.gpu.offline_worker"
COST_FLAGS = (
    "--xla_gpu_collect_cost_model_stats=true "
    "--xla_gpu_experimental_cost_model_gemm_tiling_default=true"
)
ORDER_HEAD = """# Order of loads

`{command}`, {date}, for an H200. Nothing here was run or timed.
Kernels of steps whose launches may overlap: how many there are, wait for the launch before them,
load or store before they wait, let the next one begin early, and have read-only loads; and the
microseconds that XLA's cost model takes the memory of its own kernels to need (ours are not in it).

| step | launches | kernels | wait | access before it | launch early | read-only loads | XLA's us |
|---|---|---|---|---|---|---|---|"""
ONE_GRAPH = "step 8b decode"
"""Cases that the host launches at once, and waits for nothing in."""


def table(rows: list[dict[str, Any]]) -> str:
    """Format kernels one a line, then the numbers of whole calls."""
    columns = ("registers", "spill_bytes", "shared_memory", "HGMMA", "HMMA", "UTMALDG", "LDGSTS")
    lines = ["case | kernel | " + " | ".join(columns)]
    for row in rows:
        for kernel in row.get("kernels", []):
            values = " | ".join(str(kernel.get(c, "-")) for c in columns)
            lines.append(f"{row['name']} | {kernel['name'].split('_mosaic')[0]} | {values}")
        if "error" in row:
            lines.append(f"{row['name']} | FAILED: {row['error'][:150]}")
    whole = "launches command_buffers launches_outside kv_copies temp_mib alias_mib".split()
    lines += ["", "case | " + " | ".join(whole)]
    for row in rows:
        if "error" not in row:
            lines.append(f"{row['name']} | " + " | ".join(str(row[c]) for c in whole))
    return "\n".join(lines)


def faults(rows: list[dict[str, Any]], required: str = REQUIRED) -> list[str]:
    found = [f"{row['name']}: {row['error'][:200]}" for row in rows if "error" in row]
    for row in rows:
        if "error" in row or not re.search(required, row["name"]):
            continue
        is_graph = row["command_buffers"] == 1 and not row["launches_outside"]
        if row["name"].startswith(ONE_GRAPH) and not is_graph:
            found.append(f"{row['name']}: is not one graph")
        spills = sum(kernel["spill_bytes"] for kernel in row["kernels"])
        if not row["kernels"] or spills or row["kv_copies"]:
            found.append(f"{row['name']}: {spills} bytes spilled, {row['kv_copies']} copies of KV")
    return found


def with_kept(rows: list[dict[str, Any]], report: pathlib.Path) -> list[dict[str, Any]]:
    """Keep the rows of an earlier report in its order, replaced by these or followed by them."""
    new = {row["name"]: row for row in rows}
    kept = json.loads(report.read_text())["rows"] if report.is_file() else []
    return [new.pop(row["name"], row) for row in kept] + list(new.values())


def compile_cases(
    interpreter: pathlib.Path, card: str, which: str, only: str = "", flags: str = ""
) -> list[dict[str, Any]]:
    """Compile cases for a card, in a process of their own. Return their rows.

    Args:
        which: name of a list of cases (see `case_lists`).
        only: regular expression of the cases' names.
        flags: of XLA, besides.

    A compiler that ends its process (LLVM does where it lacks an instruction) costs its case alone.
    """
    with tempfile.TemporaryDirectory() as work:
        partial = pathlib.Path(work) / "rows.json"
        partial.write_text("[]")
        environment = compiler_variables(interpreter.parents[1], pathlib.Path(work))
        environment["XLA_FLAGS"] = with_gpu_flags(f"{environment['XLA_FLAGS']} {flags}", JAX)
        inside = ["-m", WORKER, "cases", card, which, only, work, str(partial)]
        while True:
            before = partial.read_text()
            code = subprocess.run([str(interpreter), *inside], env=environment).returncode
            rows = json.loads(partial.read_text())
            if code == 0:
                return rows
            if partial.read_text() == before:
                raise SystemExit(f"the worker for {card} ended with status {code}")


def run_worker(interpreter: pathlib.Path, *words: str, dumps: bool) -> Any:
    """Run the worker in a process of its own. Return the result that it writes.

    Args:
        words: of the worker's command line, without folder and file.
        dumps: let the compilers write dumps. Without them the times are those of a start.
    """
    with tempfile.TemporaryDirectory() as work:
        out = pathlib.Path(work) / "found.json"
        environment = compiler_variables(interpreter.parents[1], pathlib.Path(work))
        flags = environment["XLA_FLAGS"]
        if not dumps:
            flags = "--xla_gpu_force_compilation_parallelism=1"
            del environment["MOSAIC_GPU_DUMP_TO"]
        environment["XLA_FLAGS"] = with_gpu_flags(flags, JAX)
        folder = [work] if dumps else []
        command = [str(interpreter), "-m", WORKER, *words, *folder, str(out)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(out.read_text())


def describe(interpreter: pathlib.Path, command: str) -> dict[str, Any]:
    versions = subprocess.run(
        [str(interpreter), "-m", "pip", "freeze"], capture_output=True, text=True, check=True
    ).stdout
    ptxas = subprocess.run(
        ["ptxas", "--version"],
        env={**os.environ, **with_ptxas(interpreter.parents[1])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "target": "compiled without a GPU: nothing here was run or timed",
        "versions": re.findall(r"^(?:jax|triton|flax)\S*==\S+", versions, re.MULTILINE),
        "ptxas": re.findall(r"V[\d.]+", ptxas)[0],
    }


def report_h200(interpreter: pathlib.Path, about: dict[str, Any], only: str, out: Any) -> int:
    """Compile everything for an H200, and write its report."""
    rows = compile_cases(interpreter, H200, "long", only)
    if only:
        rows = with_kept(rows, out / "compile_offline.json")
    wrong = faults(rows)
    about |= {"target": f"NVIDIA H200, sm_90a, {about['target']}", "faults": wrong}
    out.mkdir(parents=True, exist_ok=True)
    report = json.dumps({"about": about, "rows": rows}, indent=1)
    (out / "compile_offline.json").write_text(report + "\n")
    head = "\n".join(f"{key}: {value}" for key, value in about.items())
    text = f"{head}\n\n{table(rows)}\n"
    (out / "compile_offline.txt").write_text(text)
    print(text)
    return 1 if wrong else 0


def report_order(
    interpreter: pathlib.Path, about: dict[str, Any], only: str, out: pathlib.Path
) -> int:
    """Compile the engine's steps for an H200, and write in which order their kernels load."""
    rows = compile_cases(interpreter, H200, "order", only, COST_FLAGS)
    wrong = [f"{r['name']}: {r['error'][:200]}" for r in rows if "error" in r]
    rows = [row for row in rows if "error" not in row]
    wrong += [f"{row['name']}: {fault}" for row in rows for fault in row["order_faults"]]
    about["faults"] = wrong
    out.mkdir(parents=True, exist_ok=True)
    report = json.dumps({"about": about, "rows": rows}, indent=1)
    (out / "launch_order.json").write_text(report + "\n")
    lines = [ORDER_HEAD.format(**about)]
    lines += [f"| {' | '.join(map(str, summary(row['name'], row)))} |" for row in rows]
    text = "\n".join([*lines, "", *(f"- {fault}" for fault in wrong or ["No faults."])]) + "\n"
    (out / "launch_order.md").write_text(text)
    print(text)
    return 1 if wrong else 0


def earlier_parts(recorded: dict[str, Any], about: dict[str, Any]) -> list[dict[str, str]]:
    """Return the commands and dates of the recorded parts, without that of this run."""
    last = recorded.get("about", {})
    parts = [*last.get("earlier", []), *([last] if last else [])]
    return [
        {name: part[name] for name in ("command", "date")}
        for part in parts
        if part["command"] != about["command"]
    ]


def report_cards(
    interpreter: pathlib.Path,
    about: dict[str, Any],
    targets: list[Target],
    which: str,
    only: str,
    out: pathlib.Path,
) -> int:
    """Compile cases for some cards, and write the table after each card.

    With `only`, other cases stay as recorded, and the table names their commands too.
    """
    file = out / "cards.json"
    recorded = json.loads(file.read_text()) if file.is_file() else {"cards": {}}
    cards = recorded["cards"]
    about = about | {"earlier": earlier_parts(recorded, about) if only else []}
    for target in targets:
        rows = compile_cases(interpreter, target.card.name, which, only)
        new = {row["name"] for row in rows}
        kept = cards.get(target.card.name, {"rows": []})["rows"] if only else []
        rows = [row for row in kept if row["name"] not in new] + rows
        cards[target.card.name] = {
            "capability": ".".join(map(str, target.card.capability)),
            "shared_memory": target.card.limits.shared_memory,
            "named_in_readme": target.is_claimed,
            "faults": card_faults(rows, target.card.limits),
            "rows": rows,
        }
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"about": about, "cards": cards}, indent=1) + "\n")
        (out / "cards.md").write_text(card_table(about, cards))
    made = [cards[target.card.name] for target in targets]
    for target, card in zip(targets, made, strict=True):
        print(f"{target.card.limits}: {'; '.join(card['faults']) or 'no faults'}")
    return 1 if any(card["faults"] and card["named_in_readme"] for card in made) else 0


def report_sums(interpreter: pathlib.Path, command: str, layers: int, out: pathlib.Path) -> int:
    found = run_worker(interpreter, "sums", str(layers), dumps=True)
    wrong = sum_table.write(found, out, command, JAX, layers)
    print(*wrong or ["no faults"], sep="\n")
    return 1 if wrong else 0


def report_start(
    interpreter: pathlib.Path,
    about: dict[str, Any],
    card: str,
    arguments: argparse.Namespace,
) -> int:
    model, devices = arguments.start, arguments.tensor_parallel_size
    numbers = arguments.rows, arguments.tokens, arguments.first, devices
    report = run_worker(interpreter, "start", card, model, *map(str, numbers), dumps=False)
    sizes = {"rows": arguments.rows, "tokens": arguments.tokens, "devices": devices}
    report["about"] |= about | sizes | {"model": model, "card": card}
    report["about"]["cores"] = f"{os.cpu_count()} cores"
    start_table.write(report, arguments.out)
    return 0


def find_targets(names: list[str]) -> list[Target]:
    """Find the cards that were named, "all" standing for one of each compute capability.

    Raises:
        ValueError: there is no such card.
    """
    expanded = [card for name in names for card in (ONE_OF_EACH if name == "all" else (name,))]
    found = [Target.of(name) for name in expanded]
    return list(dict.fromkeys(found))


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser("scripts.gpu.compile_offline", __doc__)
    add_environment(parser)
    parser.add_argument("--python", help="a Python 3.12; default: this one or python3.12")
    parser.add_argument(
        "--card", action="append", default=[], help='a card, or "all"; may be repeated'
    )
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--full", action="store_true", help="steps of all 32 layers, for cards")
    forms.add_argument("--order", action="store_true", help="the order of loads in steps")
    forms.add_argument("--short", action="store_true", help="a kernel of each kind, for cards")
    sums = "sums over H200s, in a model of this many layers; default %(const)s"
    forms.add_argument(
        "--sums", type=positive_integer, nargs="?", const=2, metavar="LAYERS", help=sums
    )
    forms.add_argument("--start", choices=sorted(MODELS), help="programs of a start of this model")
    parser.add_argument(
        "--only",
        type=pattern,
        default="",
        help="regular expression: only these cases; others stay as recorded",
    )
    parser.add_argument("--out", type=new_folder, default=str(RESULTS))
    start = parser.add_argument_group("--start", "of one --card, by default an H200")
    start.add_argument("--tensor-parallel-size", "-tp", type=positive_integer, default=1)
    start.add_argument("--rows", type=positive_integer, default=256)
    start.add_argument("--tokens", type=positive_integer, default=8192)
    start.add_argument(
        "--first", type=integer_from_0, default=0, help="this many programs; 0 for all"
    )
    return parser


def main() -> int:
    parser = make_parser()
    arguments, command = parser.parse_args(), about_run()["command"]
    if arguments.python and shutil.which(arguments.python) is None:
        parser.error(f"--python: there is no {arguments.python}")
    try:
        targets = find_targets(arguments.card)
    except ValueError as error:
        parser.error(f"--card: {error}")
    if (arguments.full or arguments.short) and not targets:
        parser.error("--full and --short: need --card")
    if arguments.start and len(targets) > 1:
        parser.error("--start: takes one --card")
    interpreter = open_environment(arguments)
    if arguments.sums:
        return report_sums(interpreter, command, arguments.sums, arguments.out)
    about = describe(interpreter, command)
    if arguments.start:
        card = targets[0].card.name if targets else H200
        return report_start(interpreter, about, card, arguments)
    if arguments.order:
        return report_order(interpreter, about, arguments.only, arguments.out)
    if not targets:
        return report_h200(interpreter, about, arguments.only, arguments.out)
    which = "full" if arguments.full else "short" if arguments.short else "card"
    return report_cards(interpreter, about, targets, which, arguments.only, arguments.out)


if __name__ == "__main__":
    run_main(main)
