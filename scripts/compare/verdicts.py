"""Logit gaps of the answers that engines gave, by Transformers in float64 (judge.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from scripts.compare import workloads
from scripts.compare.engine import module_command
from scripts.compare.environments import cache_folder
from scripts.compare.results import Record, Results
from scripts.lib.model_shapes import shape_of
from scripts.lib.paths import IN_CHECKOUT
from scripts.lib.random_checkpoint import config_of, random_checkpoint


def waiting(results: Results) -> list[Record]:
    """Select records of answers that were not judged yet."""
    return [
        record
        for record in results.records
        if record["part"] == "agreement" and "alone" in record and "gaps" not in record
    ]


def judge(results: Results, python: Path, threads: int, say: Callable[[str], None]) -> None:
    """Add `gaps` to every record of answers that lacks them."""
    found = waiting(results)
    for model in sorted({record["model"] for record in found}):
        records = [record for record in found if record["model"] == model]
        say(f"judging the answers of {len(records)} engines, {model}")
        _judge(results, python, threads, records)


def _judge(results: Results, python: Path, threads: int, records: list[Record]) -> None:
    shape = shape_of(records[0]["model"])
    works = workloads.agreement(config_of(shape)["vocab_size"])
    # Engines mostly agree, so that each answer is judged once.
    answers = {
        (tuple(work.prompt), tuple(tokens)): []
        for record in records
        for way in ("alone", "together")
        for work, tokens in zip(works, record[way], strict=True)
    }
    asked = [{"prompt": prompt, "tokens": tokens} for prompt, tokens in answers]
    folder = random_checkpoint(shape, cache_folder() / "models")
    command = [*module_command(python, "judge"), str(folder), str(threads)]
    done = subprocess.run(
        command,
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | IN_CHECKOUT,
    )
    verdicts = dict(zip(answers, json.loads(done.stdout), strict=True))
    for record in records:
        gaps = [
            gap
            for way in ("alone", "together")
            for work, tokens in zip(works, record[way], strict=True)
            for gap in verdicts[tuple(work.prompt), tuple(tokens)]
        ]
        results.add(record | {"gaps": [float(f"{gap:.3g}") for gap in gaps]})
