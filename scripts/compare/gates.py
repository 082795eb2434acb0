"""Gates of the comparison: ratios against goals, and faults that must be reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.compare.results import Record, chosen, middle, ratio
from scripts.lib.model_shapes import dtype_of

OURS = "jaxserve"
MODEL_TITLES = {
    "wide": "137M Llama",
    "wide-bf16": "137M Llama, bf16",
    "deep": "SmolLM-135M shape",
    "small": "14M Llama",
    "small-bf16": "14M Llama, bf16",
    "lfm2": "LFM2-350M shape",
    "lfm2-bf16": "LFM2-350M shape, bf16",
    "tiny": "tiny Llama",
    "tiny-bf16": "tiny Llama, bf16",
}
LFM2 = ("lfm2", "lfm2-bf16")
# (words, part, rival, wanted ratio at least, models or None for any)
GATES = (
    ("trace, over Transformers padded static", "trace", "transformers", 4.0, ("wide",)),
    ("single stream, over Transformers", "single", "transformers", 1.5, ("wide",)),
    ("mixed, over vLLM's CPU build", "mixed", "vllm", 1.0, None),
    ("mixed, over llama.cpp's server", "mixed", "llama.cpp", 1.0, None),
    ("mixed, over OpenVINO GenAI", "mixed", "openvino", 0.9, None),
    ("single stream, over llama.cpp", "single", "llama.cpp", 0.8, ("wide", "wide-bf16", "small")),
    ("trace, over Transformers padded static", "trace", "transformers", 1.0, ("wide-bf16",)),
    ("trace, over vLLM's CPU build", "trace", "vllm", 1.0, ("wide-bf16",)),
    ("trace, over llama.cpp's server", "trace", "llama.cpp", 1.0, ("wide-bf16",)),
    ("trace, over OpenVINO GenAI", "trace", "openvino", 1.0, ("wide-bf16",)),
    ("single stream, over Transformers", "single", "transformers", 1.0, LFM2),
    ("16 rows, over Transformers padded static", "rows", "transformers", 3.0, LFM2),
    ("prompts of 1,024, over Transformers", "prompts", "transformers", 2.0, LFM2),
    ("single stream, over llama.cpp", "single", "llama.cpp", 0.8, LFM2),
    ("16 rows, over llama.cpp's server", "rows", "llama.cpp", 2.0, LFM2),
)
# Of logits of about unit size. A wrong model is off by far more.
ROUNDING = {"float32": 1e-3, "bfloat16": 0.1}
S0_GATES = {16: 2.4, 32: 3.1}
# Requests of these gates. The answers of the trace's first ones are shorter than the rest.
S0_TRACE = 512


# Its ratios are not gated: an engine that answers otherwise may be faster for it.
DIFFERS = "answers differ"


def span(found: tuple[float, float, float] | None, form: str, scale: float = 1.0) -> str:
    """Format `median (least to most)`, or the median alone where there is no spread."""
    if found is None:
        return "-"
    middle_, least, most = (format(value * scale, form) for value in found)
    return middle_ if least == most else f"{middle_} ({least} to {most})"


def models_of(data: dict[str, Any]) -> list[str]:
    measured = {record["model"] for record in data["records"]}
    return [model for model in MODEL_TITLES if model in measured]


@dataclass(frozen=True)
class Gate:
    """A ratio that is to be reached. `found` is (median, least, most) of the measured ones."""

    words: str
    model: str
    wanted: float
    found: tuple[float, float, float]
    fault: str = ""

    @property
    def shown(self) -> str:
        return self.fault or span(self.found, ".2f")

    @property
    def is_met(self) -> bool:
        return not self.fault and self.found[0] >= self.wanted


def gates(data: dict[str, Any]) -> list[Gate]:
    rows = []
    records = data["records"]
    for model in models_of(data):
        for count, wanted in S0_GATES.items() if data["settings"]["trace"] >= S0_TRACE else ():
            found = _schedule_gain(chosen(records, model, "jaxserve-schedules", "schedules"), count)
            if found:
                words = f"trace, continuous over padded static (S0), {count} rows"
                rows.append(Gate(words, model, wanted, found))
        for words, part, rival, wanted, only in GATES:
            if only is not None and model not in only:
                continue
            found = ratio(records, model, (OURS, rival), part, "output_throughput")
            fault = _fault(data, model, (rival, OURS), part, bool(found))
            if found or fault:
                rows.append(Gate(words, model, wanted, found or (0.0, 0.0, 0.0), fault))
    return rows


def _fault(
    data: dict[str, Any], model: str, engines: tuple[str, str], part: str, is_measured: bool
) -> str:
    """Explain why a ratio of this part has no meaning. Empty if it has one."""
    mine = [r for r in data["records"] if r["model"] == model and r["engine"] in engines]
    failed = [r["engine"] for r in mine if r["part"] in (part, "start") and "error" in r]
    if failed:
        return f"{data['engines'][failed[0]]['title']} failed"
    return DIFFERS if is_measured and any(map(is_unlike, mine)) else ""


def is_unlike(record: Record) -> bool:
    """Return whether judged answers are not the judge's, but for rounding."""
    return max(record.get("gaps") or [0.0]) >= ROUNDING[dtype_of(record["model"])]


def faults(data: dict[str, Any]) -> list[str]:
    """List the faults of a run: parts that failed, other answers, missed goals."""
    said = [line.removeprefix("- ") for line in failed_lines(data) + unlike_lines(data)]
    missed = [gate for gate in gates(data) if not gate.is_met]
    return said + [
        f"not met: {g.words}, {MODEL_TITLES[g.model]}: {g.shown}, wanted {g.wanted:g}"
        for g in missed
    ]


def failed_lines(data: dict[str, Any]) -> list[str]:
    return [
        f"- {data['engines'].get(r['engine'], {}).get('title', r['engine'])}, {r['part']}, "
        f"{MODEL_TITLES[r['model']]}: **failed**: {r['error']}"
        for r in data["records"]
        if "error" in r
    ]


def unlike_lines(data: dict[str, Any]) -> list[str]:
    """List engines whose greedy answers are not the judge's, but for rounding."""
    return [
        f"- {data['engines'][r['engine']]['title']}, {MODEL_TITLES[r['model']]}: **{DIFFERS}** "
        f"from float64's by up to {max(r['gaps']):.2g}"
        for r in data["records"]
        if is_unlike(r)
    ]


def _schedule_gain(records: list[Record], rows: int) -> tuple[float, float, float] | None:
    gains = []
    for record in records:
        table = record["schedules"]
        if f"S0 {rows}" in table:
            ours = table[f"continuous {rows}"]["output_throughput"]
            gains.append({"gain": ours / table[f"S0 {rows}"]["output_throughput"]})
    return middle(gains, "gain")
