"""`jaxserve collect-env`: the facts, from machines that a test makes up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.commands.cli import main
from jaxserve.settings.installation import collect_environment
from tests.support.host_files import V2_MOUNT, write_host, write_v2
from tests.support.nvml import RTX_4090, play_driver


def test_it_says_what_a_report_needs_on_a_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_private")
    monkeypatch.setenv("JAXSERVE_API_KEY", "sk-private")
    monkeypatch.setenv("HF_ENDPOINT", "https://someone:private@mirror.example/hub")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=private")
    assert main(["collect-env"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "os", "cpu", "cores", "memory", "driver", "cards", "device", "programs"):
        assert f"\n{name}:" in text
    assert "jax 0." in text and "private" not in text
    assert "HF_ENDPOINT=https://...mirror.example/hub" in text
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) < 200
    assert main(["collect-env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"].startswith("jax ")


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_control_groups_are_told(tmp_path: Path, version: int) -> None:
    facts = collect_environment(tmp_path)
    assert "no limit by a control group" in facts["cores"]
    folder = tmp_path / "sys/fs/cgroup"
    if version == 2:
        folder.mkdir(parents=True)
        (folder / "cpu.max").write_text("150000 100000\n")
    else:
        (folder / "cpu").mkdir(parents=True)
        (folder / "cpu/cpu.cfs_quota_us").write_text("150000\n")
        (folder / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert collect_environment(tmp_path)["cores"].endswith("the control group allows 1.5")


def test_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    root = write_host(tmp_path, 64 << 30, 48 << 30, "0::/box\n", V2_MOUNT)
    assert collect_environment(root)["memory"] == (
        "48.0 of 64.0 GiB available, no limit by a control group"
    )
    write_v2(root / "sys/fs/cgroup/box", 8 << 30, 3 << 30)
    assert collect_environment(root)["memory"] == (
        "5.0 of 8.0 GiB available, limited by a control group; the machine has 64.0"
    )


def test_cards_are_named_and_none_is_opened(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxserve", "collect-env", "--json"]
    environment = play_driver(tmp_path, RTX_4090)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert facts["cards"] == "NVIDIA GeForce RTX 4090 (8.9), 22.5 of 23.5 GiB free"
    assert facts["driver"] == "580.65.06" and facts["device"] == "NVIDIA GeForce RTX 4090"
