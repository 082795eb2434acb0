"""Tables of the comparison: Markdown beside the results, and README's section."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.compare import plots
from scripts.compare.gates import (
    MODEL_TITLES,
    OURS,
    Gate,
    failed_lines,
    gates,
    is_unlike,
    models_of,
    span,
    unlike_lines,
)
from scripts.compare.results import Record, chosen, middle, ratio

BEGIN, END = "<!-- compare_engines: begin -->", "<!-- compare_engines: end -->"

# (part, number, heading, scale, format)
COLUMNS = (
    ("start", "seconds", "start, s", 1.0, ".1f"),
    ("single", "output_throughput", "single stream, tok/s", 1.0, ".1f"),
    ("rows", "output_throughput", "16 at once, tok/s", 1.0, ".1f"),
    ("prompts", "median_ttft_ms", "prompt of 1,024, ms", 1.0, ".0f"),
    ("trace", "output_throughput", "trace, tok/s", 1.0, ".1f"),
    ("mixed", "output_throughput", "mixed, tok/s", 1.0, ".1f"),
    ("mixed", "output_tokens_per_cpu_second", "mixed, tok/CPU-s", 1.0, ".1f"),
    ("serve", "median_ttft_ms", "TTFT p50, ms", 1.0, ".0f"),
    ("serve", "p99_ttft_ms", "TTFT p99, ms", 1.0, ".0f"),
    ("serve", "median_tpot_ms", "TPOT p50, ms", 1.0, ".0f"),
    ("serve", "p99_itl_ms", "ITL p99, ms", 1.0, ".0f"),
    ("serve", "request_goodput", "goodput, req/s", 1.0, ".2f"),
    (None, "peak_bytes", "peak memory, MiB", 2.0**-20, ".0f"),
)
# Of the others less is better.
SPEEDS = ("output_throughput", "output_tokens_per_cpu_second", "request_goodput")
# Less than this is no lead.
LEVEL = 1.02


def engines_of(data: dict[str, Any], model: str) -> list[str]:
    """List the engines that were measured, in the order of their kind, ours first."""
    names = [
        name
        for name in data["engines"]
        if name != "jaxserve-schedules"
        and any(r["engine"] == name and r["model"] == model for r in data["records"])
    ]
    return sorted(names, key=lambda name: name != OURS)


def _number(data: dict[str, Any], model: str, engine: str, part: str | None, name: str):
    records = data["records"]
    if part is not None:
        return middle(chosen(records, model, engine, part), name)
    mine = [r for r in records if r["model"] == model and r["engine"] == engine]
    most = max((r.get(name, 0) for r in mine), default=0)
    return (most, most, most) if most else None


def model_table(data: dict[str, Any], model: str) -> list[str]:
    """Tabulate one row an engine. Columns without any value are left out."""
    engines = engines_of(data, model)
    cells = {
        heading: [span(_number(data, model, e, part, name), form, scale) for e in engines]
        for part, name, heading, scale, form in COLUMNS
    }
    cells = {heading: column for heading, column in cells.items() if set(column) != {"-"}}
    lines = ["| | " + " | ".join(cells) + " |", "|---" * (len(cells) + 1) + "|"]
    for row, engine in enumerate(engines):
        title = data["engines"][engine]["title"]
        lines.append(f"| {title} | " + " | ".join(c[row] for c in cells.values()) + " |")
    return lines


def gate_table(data: dict[str, Any]) -> list[str]:
    lines = ["| output tokens/s, ratio | measured | wanted | |", "|---|---|---|---|"]
    for gate in gates(data):
        verdict = "met" if gate.is_met else "**not met**"
        words = f"{gate.words}, {MODEL_TITLES[gate.model]}"
        lines.append(f"| {words} | {gate.shown} | {gate.wanted:g} | {verdict} |")
    return lines if len(lines) > 2 else []


def gate_grid(data: dict[str, Any]) -> list[str]:
    """Tabulate a row a ratio, a column a model. "-" stands for no goal, or no measurement."""
    found = {(gate.words, gate.wanted, gate.model): gate for gate in gates(data)}
    models = [model for model in models_of(data) if any(key[2] == model for key in found)]
    titles = " | ".join(MODEL_TITLES[model] for model in models)
    lines = [f"| output tokens/s, ratio | goal | {titles} |", "|---" * (2 + len(models)) + "|"]
    for words, wanted in dict.fromkeys(key[:2] for key in found):
        row = [found.get((words, wanted, model)) for model in models]
        cells = ["-" if g is None else g.shown if g.is_met else _missed(g) for g in row]
        lines.append(f"| {words} | {wanted:g} | {' | '.join(cells)} |")
    return lines if models else []


def _missed(gate: Gate) -> str:
    return f"**not met**: {gate.shown}"


def behind(data: dict[str, Any], rivals: int | None = None) -> list[str]:
    """List, a line a model, where others are ahead of ours, which, and how many times.

    Args:
        rivals: number of engines, the farthest ahead first. None means all.
    """
    lines = []
    for model in models_of(data):
        losses = []
        for part, name, heading, *_ in COLUMNS:
            leads = {
                data["engines"][rival]["title"]: _lead(data, model, rival, part, name)
                for rival in engines_of(data, model)
                if rival != OURS
            }
            ahead = sorted((-factor, title) for title, factor in leads.items() if factor > LEVEL)
            if ahead:
                shown = ", ".join(f"{title} {_times(-factor)}" for factor, title in ahead[:rivals])
                losses.append(f"{heading.partition(', ms')[0].replace(', s', '')} ({shown})")
        if losses:
            lines.append(f"- {MODEL_TITLES[model]}: {'; '.join(losses)}.")
    return lines


def _times(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 10 else f"{factor:.0f}x"


def behind_words(data: dict[str, Any], rivals: int | None = None) -> list[str]:
    lines = behind(data, rivals)
    who = "the farthest of those" if rivals == 1 else "those"
    head = f"Where jaxserve is behind, with {who} ahead of it and how many times they are better:"
    return [head, "", *lines] if lines else []


def _lead(data: dict[str, Any], model: str, rival: str, part: str | None, name: str) -> float:
    """Compute how many times better the rival's number is than ours, or 0 where one is missing."""
    if part is not None:
        found = ratio(data["records"], model, (rival, OURS), part, name)
    else:
        ours, theirs = (_number(data, model, engine, part, name) for engine in (OURS, rival))
        found = (theirs[0] / ours[0],) if ours and theirs else None
    if found is None or not found[0]:
        return 0.0
    return found[0] if name in SPEEDS else 1 / found[0]


def agreement_table(data: dict[str, Any]) -> list[str]:
    """Tabulate how many greedy tokens of each engine are the judge's best, and the largest gap."""
    lines = []
    for model in models_of(data):
        for engine in engines_of(data, model):
            for record in chosen(data["records"], model, engine, "agreement"):
                lines.append(_agreement_row(data, model, engine, record))
    if not lines:
        return []
    head = "| | model | best by float64 | alike alone and together | first gap | largest gap | |"
    return [head, "|---" * 7 + "|", *lines]


def _agreement_row(data: dict[str, Any], model: str, engine: str, record: Record) -> str:
    same = sum(a == b for a, b in zip(record["alone"], record["together"], strict=True))
    gaps, answers = record.get("gaps"), len(record["alone"])
    cells = ["not judged", f"{same} of {answers}", "-", "-", ""]
    if gaps:
        cells[0] = f"{sum(gap == 0 for gap in gaps)} of {len(gaps)} tokens"
        if max(gaps):
            # All answers are of one length. The first place where one differs from the best.
            place = gaps.index(next(gap for gap in gaps if gap))
            length = len(gaps) // (2 * answers)
            cells[2] = f"{gaps[place]:.2g} at token {place % length + 1}"
            cells[3] = f"{max(gaps):.2g}"
        cells[4] = "**differs**" if is_unlike(record) else "agrees"
    title = data["engines"][engine]["title"]
    return f"| {title} | {MODEL_TITLES[model]} | {' | '.join(cells)} |"


def _agreement_words(data: dict[str, Any]) -> str:
    judged = [r for r in data["records"] if r.get("gaps")]
    engines = {record["engine"] for record in judged if record["engine"] in data["engines"]}
    wrong = len(unlike_lines(data))
    if not judged:
        return "Answers were not judged."
    said = f"Greedy answers of {len(engines)} engines were judged in float64"
    return f"{said}: {'all agree' if not wrong else f'{wrong} differ'}, but for rounding."


def _when(run: dict[str, str]) -> str:
    commit = f", commit {run['commit']}" if "commit" in run else ""
    return run["began"] + commit


def _engine_lines(data: dict[str, Any]) -> list[str]:
    lines = []
    for engine in data["engines"].values():
        if "missing" in engine:
            lines.append(f"- {engine['title']}: **not installed**: {engine['missing']}")
            continue
        versions = ", ".join(f"{name} {version}" for name, version in engine["versions"].items())
        words = "; ".join(filter(None, (versions, engine["settings"])))
        lines.append(f"- {engine['title']}: {words}")
    return lines + failed_lines(data)


def _words(data: dict[str, Any]) -> str:
    settings, machine = data["settings"], data["machine"]
    return (
        f"{settings['threads']} threads, {settings['rows']} rows; "
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {data['date']}"
    )


def _repeats(data: dict[str, Any], model: str) -> int:
    return 1 + max((r["repeat"] for r in data["records"] if r["model"] == model), default=0)


def _repeats_words(data: dict[str, Any]) -> str:
    each = [f"{_repeats(data, model)} of {MODEL_TITLES[model]}" for model in models_of(data)]
    return f"Repeats: {', '.join(each)}"


def table(data: dict[str, Any]) -> str:
    settings = data["settings"]
    text = [
        "# Engines compared",
        "",
        *(f"- `{run['command']}`, {_when(run)}" for run in data["runs"]),
        "",
        f"{_words(data)}. {_repeats_words(data)}. Random weights, the same for all. Numbers are "
        "medians over repeats, with the least and the most; ratios are taken within a repeat. "
        "Peak memory is the most of a run, over all processes of a server, pages that they share "
        "counted in each. The client runs on the same cores. Prefix caches are off. Transformers "
        "and OpenVINO, which have no server that takes token ids, stand behind a small one of this "
        "project, and make no text. A gap between tokens is one between events, which may bring "
        "several. Quantized weights are not compared.",
        "",
        *_engine_lines(data),
        "",
        "## Ratios",
        "",
        *gate_table(data),
        "",
        *behind_words(data),
    ]
    for model in models_of(data):
        text += ["", f"## {MODEL_TITLES[model]}", "", *model_table(data, model)]
    text += ["", "## Do they say the same?", "", *agreement_table(data), ""]
    text += [
        "Trace: the first "
        f"{settings['trace']} requests of the Azure conversation trace, lengths divided by 8, all "
        f"at once. Mixed: {settings['mixed']} requests of 16 to 512 tokens in and 8 to 256 out, "
        "all at once. Single stream: 32 tokens in, 64 out. Latencies and goodput: "
        f"{settings['served']} requests of the trace, Poisson arrivals of {settings['rate']:g} a "
        f"second; good is {' and '.join(settings['goodput'])} ms.",
        "",
    ]
    return "\n".join(text)


def readme_part(data: dict[str, Any], results: str) -> list[str]:
    """Format the lines of the README's block for one results file."""
    missing = [e["title"] for e in data["engines"].values() if "missing" in e]
    count = len(data["runs"])
    runs = "One run" if count == 1 else f"One run in {count} slices"
    served = any(record["part"] == "serve" for record in data["records"])
    return [
        f"{runs} of `python -m scripts.compare`:",
        f"{_words(data)}.",
        f"{_repeats_words(data)}. {_agreement_words(data)}",
        f"All of it, with versions{', spread and latencies' if served else ' and spread'}: "
        f"`{results}`.",
        *failed_lines(data),
        *unlike_lines(data),
        *([f"Not installed here: {', '.join(missing)}."] if missing else []),
        "",
        *(gate_grid(data) or ["Nothing in it can be held against a goal yet."]),
        "",
        *behind_words(data, 1),
        "",
    ]


def paths(json_path: Path) -> tuple[Path, dict[str, Path]]:
    names = ("curve", "latency", "slots")
    return json_path.with_suffix(".md"), {
        name: json_path.with_name(f"{json_path.stem}_{name}.png") for name in names
    }


def write(data: dict[str, Any], json_path: Path) -> None:
    markdown, images = paths(json_path)
    markdown.write_text(table(data))
    plots.curve(data, images["curve"])
    plots.latency(data, images["latency"])
    plots.slots(data, images["slots"])


def stored(folder: Path) -> list[Path]:
    """Find the results files of a folder: one, and one for each other machine."""
    return sorted(folder.glob("compare_engines*.json"))


def section_of(json_paths: list[Path]) -> str:
    """Make the text between the markers of the README beside these results files."""
    lines = [BEGIN]
    for json_path in json_paths:
        markdown, images = paths(json_path)
        data = json.loads(json_path.read_text())
        lines += readme_part(data, markdown.name)
        image = images["slots"]
        if json_path == json_paths[0] and image.exists():
            lines += [f"![{image.stem}]({image.name})", ""]
    lines.append('"-": no goal there, or not measured.')
    return "\n".join([*lines, END])


def replaced(readme: str, section: str) -> str:
    """Replace the section of README between the markers.

    Raises:
        ValueError: it has no markers.
    """
    before, found, rest = readme.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not (found and closed):
        raise ValueError(f"README.md has no lines {BEGIN} and {END}")
    return before + section + after
