"""The comparison's plots, its GGUF files, and the options that its adapters pass to engines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.models import read_model_config
from jaxserve.weights import gguf_config, load_weights, read_gguf
from scripts.compare import plots, write_gguf
from scripts.compare.command import ENGINES
from scripts.compare.engine import Setting
from scripts.lib.random_checkpoint import random_checkpoint

PLOTS = {"curve": plots.curve, "latency": plots.latency, "slots": plots.slots}
SPEEDS = {"output_throughput": 9.0, "median_tpot_ms": 2.0}
TIMELINE = {"output_throughput": 9.0, "timeline": [[0, 0.0, 1.0], [1, 0.0, 2.0], [0, 1.0, 2.0]]}
RECORDS = {
    "curve": {"points": {"1": SPEEDS, "4": SPEEDS}},
    "serve": {"cdf": {name: [1.0, 2.0, 3.0] for name in ("ttft", "tpot", "itl")}},
    "schedules": {"schedules": {"continuous 2": TIMELINE, "S0 2": TIMELINE}},
}


def data(**records: dict[str, Any]) -> dict[str, Any]:
    key = {"model": "tiny", "engine": "jaxserve", "repeat": 0}
    return {
        "settings": {"rows": 2},
        "engines": {"jaxserve": {"title": "jaxserve"}},
        "records": [key | {"part": part} | record for part, record in records.items()],
    }


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("curve", data()),
        ("latency", data()),
        ("slots", data()),
        ("slots", data(schedules={"schedules": {"continuous 2": TIMELINE}})),
        ("slots", data(schedules={"schedules": {"continuous 4": TIMELINE, "S0 4": TIMELINE}})),
    ],
)
def test_a_plot_that_lost_its_data_does_not_stay(
    name: str, without: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "plot.png"
    PLOTS[name](without, path)
    assert not path.exists()
    PLOTS[name](data(**RECORDS), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    PLOTS[name](without, path)
    assert not path.exists()


def test_the_picture_of_stays_says_what_its_rows_and_its_white_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    plots.slots(data(**RECORDS), tmp_path / "plot.png")
    [figure] = drawn
    assert "white: nobody there" in figure.get_suptitle()
    assert [axis.get_ylabel() for axis in figure.axes] == ["place in the picture"] * 2
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x()) for bar in figure.axes[0].patches]
    assert bars == [(0, 0.0), (1, 0.0), (0, 1.0)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gguf_files_hold_what_the_checkpoint_holds(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values equal to the bit, read by the project's own reader, which turns rotated rows back."""
    folder, path = random_checkpoint("tiny", tmp_path), tmp_path / "tiny.gguf"
    monkeypatch.setattr(
        sys, "argv", ["scripts/compare/write_gguf.py", str(folder), str(path), dtype]
    )
    write_gguf.main()
    file, config = read_gguf(path), read_model_config(folder)
    found = load_weights(file, gguf_config(file), jnp.dtype(dtype))
    wanted = load_weights(folder, config, jnp.dtype(dtype))
    leaves, tree = jax.tree.flatten(nnx.state(wanted))
    others, same = jax.tree.flatten(nnx.state(found))
    assert tree == same and len(leaves) > 10
    for one, other in zip(leaves, others, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_told_its_model_port_rows_and_threads(name: str, tmp_path: Path) -> None:
    engine, python = ENGINES[name], tmp_path / "environment" / "bin" / "python"
    setting = Setting(tmp_path / "tiny-0", 7, 1023, 3, "bfloat16", tmp_path)
    command = engine.command(python, setting, 45678)
    at = {word: command[n + 1] for n, word in enumerate(command[:-1]) if word.startswith("-")}
    assert at["--port"] == "45678"
    assert any("tiny-0" in word for word in command)
    rows = {"vllm": "--max-num-seqs", "jaxserve": "--max-num-seqs", "llama.cpp": "--parallel"}
    assert at[rows.get(name, "--rows")] == "7"
    if name == "llama.cpp":
        assert at["--threads-batch"] == "3"
        assert at["--ctx-size"] == str(7 * 1023)
        assert at["-m"] == str(setting.converted / "model.gguf")
    if name == "vllm":  # its threads follow the cores that it is bound to
        bound = engine.environment(python, setting)["VLLM_CPU_OMP_THREADS_BIND"].split(",")
        assert len(bound) == min(3, len(os.sched_getaffinity(0)))
    elif name != "jaxserve":  # which takes the cores of its process
        assert at["--threads"] == "3"
