"""The file of a report that many runs fill, with the state of each item."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

TRIES = 2
"""Runs that an item may fail to end in before it is given up."""
UNENDED = "did not end"
SAME = ("device", "jax", "dry_run")
"""What of a report's "about" must be the same in every run that fills it."""


class ReportError(Exception):
    """Error of a report that cannot be continued. Its message is the reason, in a line."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Item of a part, and the seconds after which it is held to hang."""

    part: str
    name: str
    job: Callable[[], dict[str, Any]]
    patience: float = 600.0


def save_text(path: pathlib.Path, text: str) -> None:
    """Write a file so that a process killed meanwhile leaves the old one or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def save(path: pathlib.Path, report: dict[str, Any]) -> None:
    save_text(path, json.dumps(report, indent=1) + "\n")


def read_report(path: pathlib.Path) -> dict[str, Any]:
    """Read a report that an earlier run left.

    Raises:
        ReportError: the file holds anything else.
    """
    try:
        report = json.loads(path.read_text())
        items = [item for part in report["parts"].values() for item in part.values()]
        is_report = isinstance(report["about"], dict) and all(isinstance(i, dict) for i in items)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        is_report = False
    if not is_report:
        raise ReportError(f"{path} is no report")
    return report


def open_report(path: pathlib.Path, resume: bool, about: dict[str, Any]) -> dict[str, Any]:
    """Open the report to fill: a new one, or with ``resume`` that in the file, if any.

    Args:
        about: settings of this run, as the report has them.

    Raises:
        ReportError: it would be lost, or mixed with measurements of other settings.
    """
    if not path.is_file() or path.stat().st_size == 0:
        return {"about": about, "parts": {}}
    if not resume:
        raise ReportError(f"{path} is there: go on with it with --resume, or name another by --out")
    report = read_report(path)
    before, now = (_made_with(run) for run in (report["about"], about))
    if before != now:
        raise ReportError(f"--resume: {path} was made with {before}, and this is {now}")
    return {**report, "about": about}


def _made_with(about: dict[str, Any]) -> str:
    device, version, dry = (about.get(name) for name in SAME)
    return f"{device} and jax {version}{', a dry run' if dry else ''}"


def run_tasks(
    tasks: Sequence[Task],
    report: dict[str, Any],
    path: pathlib.Path,
    until: float,
    alive: Callable[[], bool] = lambda: True,
    tries: int = TRIES,
) -> bool:
    """Do the missing items. Return False if time ran out, or an item broke the device.

    New items come first, then failed ones, and last the items that ended earlier runs. They are
    given up after `tries`. An item is in the file from before it begins.

    Args:
        until: of the monotonic clock. No item is begun later.
        alive: returns whether the device still works. Called after an item that failed.
    """

    def result_of(task: Task) -> dict[str, Any]:
        return report["parts"].get(task.part, {}).get(task.name, {})

    def turn(task: Task) -> int:
        return 2 if "tries" in result_of(task) else int("error" in result_of(task))

    for task in sorted(tasks, key=turn):
        before = result_of(task)
        if before and "error" not in before:
            continue
        if before.get("tries", 0) >= tries:
            print(f"{task.part} / {task.name}: given up, {UNENDED} {tries} times", flush=True)
            continue
        if time.monotonic() > until:
            print(f"out of time before {task.part} / {task.name}; go on with --resume", flush=True)
            return False
        _run(task, before, report, path)
        if "error" in result_of(task) and not alive():
            result_of(task)["tries"] = before.get("tries", 0) + 1
            save(path, report)
            print(f"{task.part} / {task.name}: the device is lost; go on with --resume", flush=True)
            return False
    return True


def _run(task: Task, before: dict[str, Any], report: dict[str, Any], path: pathlib.Path) -> None:
    items = report["parts"].setdefault(task.part, {})
    items[task.name] = {"error": UNENDED, "tries": before.get("tries", 0) + 1}
    save(path, report)
    begin = time.monotonic()
    # A kernel that hangs holds the interpreter: only a thread outside of it can end the process.
    faulthandler.dump_traceback_later(task.patience, exit=True, file=2)
    try:
        result = task.job()
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    except (KeyboardInterrupt, SystemExit):  # no result of the item
        items[task.name] = before or {"error": "interrupted"}
        save(path, report)
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
    items[task.name] = {**result, "took_s": round(time.monotonic() - begin, 1)}
    save(path, report)
    gc.collect()  # before the next item takes memory
    print(f"{task.part} / {task.name}: {items[task.name]}", flush=True)
