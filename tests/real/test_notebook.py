"""The notebook, every cell of it on the CPU, with the model that it fetches."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.quick_code import compile_quickly

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = ROOT / "scripts/examples/colab.ipynb"
HOSTS = ("COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "JAX_COMPILATION_CACHE_DIR")


@pytest.mark.long
def test_every_cell_of_the_notebook_runs(real_models: dict[str, Path], tmp_path: Path) -> None:
    models = real_models["smollm2"].parent
    environment = {name: value for name, value in os.environ.items() if name not in HOSTS}
    compile_quickly(environment)
    # Programs are kept from run to run, as in the other tests here.
    environment |= {"JAX_PLATFORMS": "cpu", "MPLBACKEND": "Agg", "XDG_CACHE_HOME": str(models)}
    figure = tmp_path / "figure.png"
    command = [sys.executable, "-m", "tests.support.notebook"]
    result = subprocess.run(
        [*command, str(NOTEBOOK), str(figure), str(models)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    printed = result.stdout
    assert printed.startswith("Runs on cpu\n")
    assert 'What is gravity?\n    "Gravity is a fundamental concept in physics' in printed
    [answer] = re.findall(r"^\{.*\}$", printed, re.MULTILINE)
    assert ast.literal_eval(answer) == {"city": "Paris", "continent": "Europe"}
    speeds = re.findall(r"^ *(\d+) rows: +([\d.]+) tokens/s$", printed, re.MULTILINE)
    assert [int(rows) for rows, _ in speeds] == [1, 4, 16]
    assert float(speeds[-1][1]) > float(speeds[0][1])
    assert figure.read_bytes().startswith(b"\x89PNG") and figure.stat().st_size > 5000
