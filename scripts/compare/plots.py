"""Plots of the comparison, from its records.

Each is written to `path`. Without the data for it, the plot of an earlier run is deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.compare.results import Record, chosen

COLORS = {
    "jaxserve": "#2a78d6",
    "transformers": "#eb6834",
    "transformers-cb": "#c79a00",
    "llama.cpp": "#1baf7a",
    "vllm": "#8e5bd0",
    "openvino": "#d6457f",
}
OTHER = "#6b6b6b"


def _figure(columns: int, height: float = 3.8) -> tuple[Any, Any]:
    # Imported here: only plots need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, columns, figsize=(4.3 * columns, height), constrained_layout=True, squeeze=False
    )
    for axis in axes[0]:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def _with(data: dict[str, Any], part: str) -> list[tuple[str, str, Record]]:
    """Find (engine, title, record) of one part, on the first model that has it."""
    for model in dict.fromkeys(record["model"] for record in data["records"]):
        found = [
            (name, engine["title"], records[-1])
            for name, engine in data["engines"].items()
            if (records := chosen(data["records"], model, name, part))
        ]
        if found:
            return found
    return []


def _legend(figure: Any, axis: Any) -> None:
    lines, titles = axis.get_legend_handles_labels()
    figure.legend(lines, titles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _save(figure: Any, path: Path) -> None:
    # Imported here: only plots need it.
    from matplotlib import pyplot

    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def curve(data: dict[str, Any], path: Path) -> None:
    """Plot throughput, and time per token, against the number of clients."""
    found = _with(data, "curve")
    if not found:
        path.unlink(missing_ok=True)
        return
    figure, axes = _figure(2)
    for name, title, record in found:
        clients = sorted(map(int, record["points"]))
        points = [record["points"][str(count)] for count in clients]
        style = {"color": COLORS.get(name, OTHER), "marker": "o", "markersize": 4, "label": title}
        axes[0].plot(clients, [p["output_throughput"] for p in points], **style)
        axes[1].plot(clients, [p["median_tpot_ms"] for p in points], **style)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xticks(clients, [str(count) for count in clients])
        axis.set_xlabel("clients at once (64 tokens in, 32 out)")
        axis.set_ylim(0, None)
    axes[0].set_ylabel("output tokens a second")
    axes[1].set_ylabel("time per output token, ms (median)")
    _legend(figure, axes[0])
    _save(figure, path)


def latency(data: dict[str, Any], path: Path) -> None:
    """Plot distributions of latencies under load."""
    found = _with(data, "serve")
    if not found:
        path.unlink(missing_ok=True)
        return
    titles = {
        "ttft": "time to first token, ms",
        "tpot": "time per output token, ms",
        "itl": "between tokens, ms",
    }
    figure, axes = _figure(len(titles))
    for axis, (metric, label) in zip(axes, titles.items(), strict=True):
        for name, title, record in found:
            values = record["cdf"].get(metric, [])
            if values:
                share = np.linspace(0, 1, len(values))
                color = COLORS.get(name, OTHER)
                axis.plot(np.maximum(values, 0.1), share, color=color, label=title, lw=1.4)
        axis.set(xlabel=label, ylabel="share", ylim=(0, 1), xscale="log")
        axis.xaxis.set_minor_formatter("")
    _legend(figure, axes[0])
    _save(figure, path)


def slots(data: dict[str, Any], path: Path) -> None:
    """Plot the stays of the same requests, continuous above and padded static below.

    Rows are the places that `parts.spans` gave the stays, not slots.
    """
    rows = data["settings"]["rows"]
    found = _with(data, "schedules")
    table = found[0][2]["schedules"] if found else {}
    charts = {name: table.get(f"{name} {rows}") for name in ("continuous", "S0")}
    charts = {name: chart for name, chart in charts.items() if chart and "timeline" in chart}
    if len(charts) < 2:
        path.unlink(missing_ok=True)
        return
    # Imported here: only plots need it.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True, constrained_layout=True)
    titles = {"continuous": "continuous", "S0": "padded static (S0)"}
    for axis, (name, record) in zip(axes, charts.items(), strict=True):
        _chart(axis, record["timeline"], rows)
        speed = record["output_throughput"]
        axis.set_title(f"{titles[name]}: {speed:.0f} output tokens/s", loc="left", fontsize=10)
    figure.suptitle(
        "A bar is one request's stay, its prompt included; white: nobody there", fontsize=11
    )
    axes[-1].set_xlabel(f"seconds; the same requests, {rows} at once, one engine")
    _save(figure, path)


def _chart(axis: Any, timeline: Sequence[Sequence[float]], rows: int) -> None:
    blues = ("#2a78d6", "#74aee8")
    stays = [0] * rows  # so that neighbours in a place differ
    for place, begin, end in timeline:
        color = blues[stays[int(place)] % 2]
        stays[int(place)] += 1
        axis.barh(place, end - begin, left=begin, height=0.86, color=color, linewidth=0)
    axis.set(
        ylim=(-0.6, rows - 0.4),
        ylabel="place in the picture",
        yticks=range(0, rows, max(1, rows // 4)),
    )
    axis.spines[["top", "right"]].set_visible(False)
