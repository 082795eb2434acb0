"""The results file: records as they are measured, and medians over repeats."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.lib.paths import ROOT
from scripts.lib.run_record import machine, plain

Record = dict[str, Any]


class Results:
    """Results of a comparison, written after each part so that a run can go on later.

    Args:
        settings: must be equal for records to be comparable.
        resume: take the records of the file, if its settings are equal. Engines that could not
            be installed are tried again.

    Raises:
        ValueError: the file was measured with other settings, or on another machine.
    """

    def __init__(self, path: Path, settings: dict[str, Any], resume: bool) -> None:
        self._path = path
        self.data: dict[str, Any] = {
            "settings": settings,
            "machine": machine(),
            "runs": [],
            "engines": {},
            "records": [],
        }
        if resume and path.exists():
            found = read_results(path)
            for name in ("settings", "machine"):
                if found[name] != json.loads(json.dumps(self.data[name])):
                    raise ValueError(
                        f"{path} was measured with other {name}: {found[name]}, here "
                        f"{self.data[name]}; leave out --resume, or name another file with --json"
                    )
            self.data = {"runs": []} | found
            engines = self.data["engines"].items()
            self.data["engines"] = {
                name: facts for name, facts in engines if "missing" not in facts
            }

    def begin(self, command: str) -> None:
        """Begin a run: its records follow, and carry its number."""
        self.data["runs"].append(
            {"command": plain(command), "began": time.strftime("%Y-%m-%d %H:%M"), **_source()}
        )

    def note(self, name: str, title: str, versions: dict[str, str], settings: str) -> None:
        """Note title, versions and settings of an engine.

        Raises:
            ValueError: the file's records are of other versions.
        """
        before = self.data["engines"].get(name, {}).get("versions", versions)
        if before != versions and any(r["engine"] == name for r in self.records):
            raise ValueError(
                f"{title} was measured as {before}, and is {versions} now; leave out --resume"
            )
        self.data["engines"][name] = {"title": title, "versions": versions, "settings": settings}

    @property
    def records(self) -> list[Record]:
        return self.data["records"]

    def has(self, key: Record) -> bool:
        """Return whether a part was measured. A part that failed was not."""
        return any("error" not in r and key.items() <= r.items() for r in self.records)

    def add(self, record: Record) -> None:
        key = {name: record[name] for name in ("model", "engine", "part", "repeat")}
        self.data["records"] = [r for r in self.records if not key.items() <= r.items()]
        if "error" in record:
            record = record | {"error": plain(record["error"])}
        run = {"run": len(self.data["runs"]) - 1}
        self.records.append(run | record | {"load": round(os.getloadavg()[0], 2)})
        self.save()

    def save(self) -> None:
        """Write one record a line: a file that is easy to read and to compare."""
        self.data["date"] = time.strftime("%Y-%m-%d")
        head = {name: value for name, value in self.data.items() if name != "records"}
        lines = ",\n".join(json.dumps(record, separators=(",", ":")) for record in self.records)
        text = json.dumps(head, indent=1)[:-2] + ',\n "records": [\n' + lines + "\n ]\n}\n"
        partial = self._path.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(self._path)


def read_results(path: Path) -> dict[str, Any]:
    """Read a results file.

    Raises:
        ValueError: it has another format. The message has its name and the reason.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no results file: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no results file: it holds no JSON object")
    kinds = {"date": str, "settings": dict, "machine": dict, "engines": dict, "records": list}
    kinds |= {"runs": list} if "runs" in found else {}
    for name, kind in kinds.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{path} is no results file: it has no {name!r} as they have")
    keys = {"model", "engine", "part", "repeat"}
    if not all(isinstance(record, dict) and keys <= record.keys() for record in found["records"]):
        raise ValueError(f"{path} is no results file: not all records have {', '.join(keys)}")
    return found


def _source() -> dict[str, str]:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    return {"commit": done.stdout.strip()} if done.returncode == 0 else {}


def chosen(records: Iterable[Record], model: str, engine: str, part: str) -> list[Record]:
    """Select records of one part that did not fail, by repeat."""
    key = {"model": model, "engine": engine, "part": part}.items()
    found = [r for r in records if key <= r.items() and "error" not in r]
    return sorted(found, key=lambda record: record["repeat"])


def middle(records: Iterable[Record], name: str) -> tuple[float, float, float] | None:
    """Compute (median, least, most) of a number over repeats, or None without any."""
    values = [r[name] for r in records if r.get(name) is not None]
    return (statistics.median(values), min(values), max(values)) if values else None


def ratio(
    records: list[Record], model: str, pair: tuple[str, str], part: str, name: str
) -> tuple[float, float, float] | None:
    """Compute (median, least, most) of one engine's number over another's, repeat by repeat."""
    ours, theirs = (
        {r["repeat"]: r[name] for r in chosen(records, model, engine, part) if r.get(name)}
        for engine in pair
    )
    ratios = [ours[n] / theirs[n] for n in sorted(ours.keys() & theirs.keys())]
    return (statistics.median(ratios), min(ratios), max(ratios)) if ratios else None
