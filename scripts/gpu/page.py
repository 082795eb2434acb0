"""Page of a report: results and plots in one file without other files."""

from __future__ import annotations

import html
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scripts.gpu.progress import save_text
from scripts.gpu.setting import APART, VARIANTS

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6673; --line: #d7dce2; --back: #fff;
  --bar: #3b6fb6; --mark: #c2410c; --good: #1f7a3d; --bad: #b42318;
  --c0: #3b6fb6; --c1: #2f9e8f; --c2: #c98a1b; --c3: #8a5fb0; --c4: #b4544a; --c5: #5f7f3f;
  --c6: #8b95a1; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --soft: #9aa4b1; --line: #343b44;
  --back: #14181d; --bar: #6c9ce0; --mark: #f59e5b; --good: #5fc27e; --bad: #f2776b;
  --c0: #6c9ce0; --c1: #56c2b3; --c2: #e0b252; --c3: #b493d6; --c4: #dd8479; --c5: #9abb72;
  --c6: #8b95a1; } }
body { font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p, summary { color: var(--soft); } summary { cursor: pointer; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; padding: .2rem .6rem .2rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; }
td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
th { color: var(--soft); font-weight: 600; }
svg { width: 100%; height: auto; display: block; margin: .4rem 0; } text { fill: var(--ink);
  font: 12px system-ui, sans-serif; } text.soft { fill: var(--soft); }
.ok { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
.key span { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
GOALS = {
    "8b decode B=1": 3.92,
    "8b decode B=32": 5.1,
    "8b decode B=256": 13.5,
    "1b decode B=1": 0.80,
    "0.6b decode B=1": 0.70,
    "bfloat16 B=64 context 4096": 275.0,
    "0.6b started twice, 256 requests": 28000,
    "8b started twice, 256 requests": 9800,
}
"""Milliseconds of steps, microseconds of attention, tokens a second of engines."""
BESIDE = {
    "output tokens/s": "started twice",
    "us": "^bfloat16 B=64 context 4096$|^prompt of 8192 h128",
}
"""Our items that are shown beside torch's and Transformers', by unit."""
WIDTH, LABEL, ROW = 940, 310, 24
Items = Mapping[str, dict[str, Any]]


def text(value: Any) -> str:
    return html.escape(f"{value:,.4g}" if isinstance(value, float) else str(value))


def table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Format a table. Verdicts have a colour."""

    def cell(value: Any) -> str:
        if isinstance(value, int | float):
            return f"<td>{text(value)}</td>"
        words = "" if value is None else str(value)
        bad = words.startswith(("WRONG", "FAILED", "OTHER"))
        kind = ' class="bad"' if bad else ' class="ok"' if words in ("ok", "the same bits") else ""
        return f"<td{kind}>{text(words)}</td>"

    lines = ["<tr>" + "".join(f"<th>{text(name)}</th>" for name in head) + "</tr>"]
    lines += ["<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def bars(rows: list[tuple[str, list[float], dict[str, float], str]]) -> str:
    """Draw a bar a row, of one part or of several on end, and marks across it.

    Args:
        rows: (label, parts, marks by their name, text at the end).
    """
    if not rows:
        return ""
    most = max(max([sum(parts), *marks.values()]) for _, parts, marks, _ in rows) or 1.0
    scale, lines = (WIDTH - LABEL - 270) / most, []
    for number, (label, parts, marks, words) in enumerate(rows):
        y, x = number * ROW, float(LABEL)
        lines.append(f'<text x="{LABEL - 8}" y="{y + 16}" text-anchor="end">{text(label)}</text>')
        for index, part in enumerate(parts):
            fill = "--bar" if len(parts) == 1 else f"--c{index % 7}"
            lines.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{max(part * scale, 0.5):.1f}" '
                f'height="{ROW - 8}" fill="var({fill})"/>'
            )
            x += part * scale
        for name, value in marks.items():
            at_x = LABEL + value * scale
            dashes = "" if name == "floor" else ' stroke-dasharray="3 2"'
            lines.append(
                f'<line x1="{at_x:.1f}" x2="{at_x:.1f}" y1="{y + 1}" y2="{y + ROW - 1}" '
                f'stroke="var(--mark)" stroke-width="2"{dashes}><title>{text(name)}</title></line>'
            )
        end = LABEL + max([sum(parts), *marks.values()]) * scale + 8
        lines.append(f'<text class="soft" x="{end:.1f}" y="{y + 16}">{text(words)}</text>')
    size = f"0 0 {WIDTH} {len(rows) * ROW + 4}"
    return f'<svg viewBox="{size}" role="img">{"".join(lines)}</svg>'


def key(names: Iterable[str]) -> str:
    spans = (
        f'<span style="background: var(--c{index % 7})"></span>{text(name)}'
        for index, name in enumerate(names)
    )
    return f'<p class="key">{"".join(spans)}</p>'


def good(items: Items) -> Items:
    """Leave out items that failed: they have a section of their own."""
    return {name: item for name, item in items.items() if "error" not in item}


def _described(item: dict[str, Any]) -> str:
    shown = [f"{item['value']:,} {item['unit']}"] if "unit" in item else []
    shown += [f"{item['share']} {item['of']}"] if "share" in item else []
    shown += [f"{item['tflops']} TFLOP/s"] if item.get("of") == "of matmul rate" else []
    return ", ".join(shown)


def timed(items: Items) -> str:
    rows = []
    for name, item in good(items).items():
        marks = {"floor": item["floor_ms"]} if "floor_ms" in item else {}
        marks |= {"goal": GOALS[name]} if name in GOALS else {}
        rows.append((name, [float(item["value"])], marks, _described(item)))
    return bars(rows)


def _checks(parts: Mapping[str, Items]) -> Iterator[str]:
    overlapping, apart = parts.get("essentials", {}), parts.get(f"essentials, {APART}", {})
    rows = []
    for name, item in {**overlapping, **parts.get("correctness", {})}.items():
        other = apart.get(name, {})
        verdict = item.get("verdict", "FAILED")
        then = other.get("verdict", "FAILED") if other else None
        rows.append((name, verdict, item.get("value"), item.get("unit"), then, other.get("note")))
    if rows:
        head = ("kernel", "verdict", "largest error", "allowed", APART, "beside overlapping ones")
        wrong = sum("ok" not in row[1] for row in rows) + sum(
            row[4] not in (None, "ok") for row in rows
        )
        yield f"<h2>Kernels against the reference: {len(rows)} checked, {wrong} wrong</h2>"
        yield table(head, rows)


def _served(parts: Mapping[str, Items]) -> Iterator[str]:
    found = {p: items for p, items in parts.items() if p.startswith("served")}
    if not found:
        return
    yield "<h2>Whole engines</h2>"
    rows = [
        (part.replace("served", "").strip(", ") or "as served", name, *_result(item))
        for part, items in found.items()
        for name, item in items.items()
    ]
    yield table(("variant", "engine", "verdict", "result", "note"), rows)
    engines = {n: i for n, i in found.get("served", {}).items() if "rates" in i}
    yield timed(engines)
    starts = [
        (f"{name.split()[0]}, {kind}", start)
        for name, item in engines.items()
        for kind, start in item.get("starts", {}).items()
    ]
    names = list(dict.fromkeys(n for _, start in starts for n in start if n != "ready"))
    if starts:
        yield "<p>Seconds of a start, by stage:</p>" + key(names)
        yield bars(
            [
                (label, [max(start.get(n, 0.0), 0.0) for n in names], {}, f"{start['ready']} s")
                for label, start in starts
            ]
        )


def _result(item: dict[str, Any]) -> tuple[Any, ...]:
    if "error" in item:
        return "FAILED", "", item["error"][:160]
    return item.get("verdict"), _described(item), item.get("note")


def _steps(parts: Mapping[str, Items]) -> Iterator[str]:
    items = good(parts.get("steps", {}))
    if not items:
        return
    yield "<h2>Whole steps</h2><p>Milliseconds; the line is the floor of measured ceilings, the "
    yield "dashed line the goal.</p>"
    yield timed(items)
    head = ("step", "ms", "kernels, ms", "launches", "dispatch, us", "trace, s", "compile, s")
    fields = ("dispatch_us", "trace_s", "compile_s")
    traced = good(parts.get("profiles", {}))
    yield table(
        head,
        [
            (n, i["value"], kernels.get("value"), kernels.get("launches"), *(map(i.get, fields)))
            for n, i in items.items()
            for kernels in (traced.get(n, {}),)
        ],
    )
    if traced:
        yield "<h2>Kernels of a step</h2><p>Share of a step's kernel time, under the profiler.</p>"
    for name, item in traced.items():
        whole = max(item["value"] * 1e3, 1e-9)
        rows = [
            (
                kind[:44],
                [micros],
                {},
                f"{micros:,.1f} us, {100 * micros / whole:.1f}%, {runs:g} runs",
            )
            for kind, runs, micros in item["kernels"]
        ]
        classes = {k: v for k, v in item.get("classes", {}).items() if v}
        yield f"<details><summary>{text(name)}: {whole / 1e3:,.3f} ms in {item['launches']:g} "
        yield f"launches</summary>{bars(rows)}{table(classes, [classes.values()])}</details>"


def _kernels(parts: Mapping[str, Items]) -> Iterator[str]:
    titles = {
        "decode": "Decode attention",
        "prefill": "Prefill attention",
        "products": "Products of few rows",
    }
    for part, title in titles.items():
        if items := good(parts.get(part, {})):
            yield f"<h2>{title}</h2><p>Microseconds; the dashed line is the goal.</p>{timed(items)}"


def _variants(parts: Mapping[str, Items]) -> Iterator[str]:
    found = {
        name: good(parts.get(f"variants, {name}", {}))
        for name in VARIANTS
        if parts.get(f"variants, {name}")
    }
    if not found:
        return
    found = {"beside other steps": good(parts.get("steps", {})), **found}
    yield "<h2>8B's steps with XLA's flags varied</h2><p>Milliseconds.</p>"
    varied = (items for name, items in found.items() if name in VARIANTS)
    for step in dict.fromkeys(step for items in varied for step in items):
        rows = [
            (name, [float(items[step]["value"])], {}, _described(items[step]))
            for name, items in found.items()
            if step in items
        ]
        yield f"<p>{text(step)}</p>{bars(rows)}"
    yield table(("variant", "flags"), [(name, VARIANTS.get(name) or "none") for name in found])


def _others(parts: Mapping[str, Items]) -> Iterator[str]:
    if others := good(parts.get("peers", {})):
        yield "<h2>torch and Transformers on the same card</h2>"
        ours = {n: i for p in ("served", "decode", "prefill") for n, i in parts.get(p, {}).items()}
        for unit, names in BESIDE.items():
            beside = {n: i for n, i in good(ours).items() if re.search(names, n)}
            theirs = {n: i for n, i in others.items() if i["unit"] == unit}
            if theirs:
                yield f"<p>{unit}</p>{timed({**beside, **theirs})}"
    if items := good(parts.get("tuning", {})):
        rows = [
            (name, _described(i), i.get("note"), str(i["entry"]["config"] or "the defaults"))
            for name, i in items.items()
        ]
        yield f"<h2>Tuning</h2>{table(('bucket', 'fastest', 'note', 'differs in'), rows)}"


def _failures(parts: Mapping[str, Items]) -> Iterator[str]:
    rows = [
        (part, name, item["error"])
        for part, items in parts.items()
        for name, item in items.items()
        if "error" in item
    ]
    if rows:
        yield f"<h2>{len(rows)} failed</h2>{table(('part', 'item', 'why'), rows)}"


def page(report: dict[str, Any]) -> str:
    about, parts = report["about"], report["parts"]
    dry = "; <b>a dry run: nothing here is a measurement</b>" if about.get("dry_run") else ""
    title = f"The first half hour on {about.get('device')}"
    ceilings = good(parts.get("bandwidth", {}))
    said = "; ".join(f"{name} {_described(item)}" for name, item in ceilings.items())
    versions = ", ".join(f"{name} {value}" for name, value in about.get("versions", {}).items())
    body = [
        f"<h1>{text(title)}</h1><p>{text(about.get('date'))}, {text(versions)}{dry}.</p>",
        f"<h2>Ceilings</h2><p>{text(said or 'Not measured: no shares are given')}.</p>",
    ]
    for section in (_checks, _served, _steps, _kernels, _variants, _others, _failures):
        body += section(parts)
    stages = [
        (name, {0: "ok", 4: "FAILED items"}.get(state["status"], "not ended"), state["seconds"])
        for name, state in report.get("stages", {}).items()
    ]
    body.append(f"<h2>What ran</h2>{table(('stage', 'ended', 'seconds'), stages)}")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{text(title)}</title><style>{STYLE}</style>"
    lines = "\n".join(body)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{lines}</body></html>\n'


def write_page(report: dict[str, Any], path: pathlib.Path) -> None:
    save_text(path, page(report))
