"""Compiling for a card that is not there: targets, faults, and a kernel of each kind for two."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path

import pytest

from jaxserve.start.programs.described_card import CLASSES
from pallas_kernels.devices import find_card
from scripts.gpu import compile_offline, offline_environment
from scripts.gpu.card_table import card_faults, card_table
from scripts.gpu.cases import card_cases, case_lists, long_cases, short_cases
from scripts.gpu.offline_environment import NoEnvironment
from scripts.gpu.targets import CLAIMED, ONE_OF_EACH, Target


def test_one_card_of_each_class_and_each_that_readme_names() -> None:
    capabilities = [Target.of(name).card.capability for name in ONE_OF_EACH]
    assert sorted(capabilities) == sorted(CLASSES)
    assert {find_card(name).capability for name in CLAIMED} < set(capabilities)
    assert not Target.of("B300").is_claimed and Target.of("RTX 3070").is_claimed
    for capability, group in CLASSES.items():
        assert find_card(group.pallas_name).capability == capability


def test_a_target_describes_its_card() -> None:
    text = Target.of("RTX 3060").description
    for line in (
        "core_count: 28",
        "shared_memory_per_block_optin: 101376",
        "shared_memory_per_core: 102400",
        "major: 8 minor: 6 feature_extension: NONE",
        'device_description_str: "NVIDIA GeForce RTX 3060"',
    ):
        assert line in text
    assert Target.of("L4").arch == "sm_89"
    for name in ("H100", "B200", "B300", "Thor"):
        assert "ACCELERATED_FEATURES" in Target.of(name).description
        assert Target.of(name).arch.endswith("a")


def test_a_card_that_is_not_compiled_for_is_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"V100.* is not compiled for; allowed: .*7\.5, 8\.0"):
        Target.of("V100")


def test_names_of_cases_differ_and_xla_alone_compiles_steps() -> None:
    for cases in (long_cases(), case_lists("card", (8, 6)), case_lists("card", (7, 5))):
        names = [case.name for case in cases]
        assert len(names) == len(set(names))
    assert all(case.name.startswith("step") for case in case_lists("card", (7, 5)))
    assert {case.name.split()[0] for case in short_cases()} == {
        case.name.split()[0] for case in card_cases()
    }


KERNEL = {"name": "kv_write", "registers": 40, "spill_bytes": 0, "shared_memory": 1024}
DECODE = {
    "name": "step 8b decode 32 rows, 2 layers",
    "kernels": [KERNEL],
    "launches": 45,
    "command_buffers": 1,
    "launches_outside": 0,
    "kv_copies": 0,
    "temp_mib": 15.9,
    "alias_mib": 1.0,
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, None),
        ({"command_buffers": 2}, "is not one graph"),
        ({"launches_outside": 1}, "is not one graph"),
        ({"kv_copies": 1}, "1 copies of KV"),
        ({"kernels": []}, "has no kernel of ours"),
        ({"kernels": [KERNEL | {"spill_bytes": 8}]}, "8 bytes spilled"),
        ({"kernels": [KERNEL | {"shared_memory": 101_377}]}, "takes 101377 bytes"),
        ({"error": "RuntimeError: no\n  way"}, "RuntimeError: no way"),
    ],
)
def test_faults_are_found(change: dict, fault: str | None) -> None:
    found = card_faults([copy.deepcopy(DECODE) | change], find_card("RTX 3090").limits)
    assert (found == []) if fault is None else (len(found) == 1 and fault in found[0])


def test_a_card_without_triton_has_neither_kernels_nor_one_graph() -> None:
    row = DECODE | {"kernels": [], "command_buffers": 5, "launches_outside": 2}
    assert card_faults([row], find_card("T4").limits) == []


def write_rows(monkeypatch: pytest.MonkeyPatch, rows: dict[str, list]) -> None:
    monkeypatch.setattr(
        compile_offline, "compile_cases", lambda interpreter, card, which, only: rows[card]
    )


def test_a_report_has_all_cards_and_fails_for_those_that_are_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"command": "x", "date": "2026-01-01", "target": "t", "versions": [], "ptxas": "V13"}
    broken = DECODE | {"kernels": [KERNEL | {"spill_bytes": 8}]}

    def run(card: str, row: dict, only: str = "") -> int:
        target, own = Target.of(card), about | {"command": only or "x"}
        write_rows(monkeypatch, {target.card.name: [row]})
        return compile_offline.report_cards(
            tmp_path / "python", own, [target], "card", only, tmp_path
        )

    assert run("B300", broken) == 0  # no entry of `CLAIMED` has its capability
    assert run("RTX 3090", broken) == 1
    assert run("A100", DECODE) == 0
    other = DECODE | {"name": "step 8b mixed 512 tokens, 2 layers"}
    assert run("RTX 3090", DECODE, only="decode") == 0  # takes the place of the broken one
    assert run("RTX 3090", other, only="mixed") == 0
    assert run("RTX 3090", DECODE, only="decode") == 0
    recorded = json.loads((tmp_path / "cards.json").read_text())
    about, cards = recorded["about"], recorded["cards"]
    assert [len(card["rows"]) for card in cards.values()] == [1, 2, 1]
    assert cards["NVIDIA B300"]["faults"] and not cards["NVIDIA GeForce RTX 3090"]["faults"]
    text = (tmp_path / "cards.md").read_text()
    assert text == card_table(about, cards)
    dated = [f"`{command}`, 2026-01-01" for command in ("x", "mixed", "decode")]
    assert f"{', and '.join(dated)}: t." in text
    assert "45 / 1 / 0 / 15.9, **8 B spilled**" in text
    assert re.search(r"\| case \| A100-SXM4-80GB \| RTX 3090 \| B300 \|", text)
    assert "8 bytes spilled" in capsys.readouterr().out


def test_a_compiler_that_ends_its_process_costs_one_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "b", "c"]

    def run(command: list[str], env: dict) -> subprocess.CompletedProcess:
        assert not [name for name in env if name.startswith("JAX_COMP")]
        out = Path(command[-1])
        rows = json.loads(out.read_text())
        for name in names[len(rows) :]:
            rows.append({"name": name, "error": "the compiler ended the process"})
            if name == "b":
                break
            rows[-1] = {"name": name}
        out.write_text(json.dumps(rows))
        return subprocess.CompletedProcess(command, -6 if rows[-1]["name"] == "b" else 0)

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "x")
    monkeypatch.setattr(compile_offline.subprocess, "run", run)
    monkeypatch.setattr(offline_environment, "with_ptxas", lambda folder: {})
    rows = compile_offline.compile_cases(tmp_path / "bin/python", "L4", "card")
    assert [row["name"] for row in rows] == names
    assert [row["name"] for row in rows if "error" in row] == ["b"]


def test_an_environment_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironment, match=r"python -m venv .*: "):
        offline_environment.make_environment(tmp_path / "env", str(tmp_path / "python"))


@pytest.mark.parametrize(
    ("name", "only"),
    [
        ("RTX 3090", ""),
        ("L4", "float8"),  # which has instructions of its own
        pytest.param("L4", "ragged|int4", marks=pytest.mark.long),
    ],
)
def test_a_kernel_of_each_kind_compiles(offline_compiler: Path, name: str, only: str) -> None:
    """The kernels have no spills, and fit the smallest shared memory of cards from 8.0 on."""
    target = Target.of(name)
    rows = compile_offline.compile_cases(offline_compiler, target.card.name, "short", only)
    assert [row["name"] for row in rows] == [
        case.name for case in short_cases() if re.search(only, case.name)
    ]
    assert card_faults(rows, target.card.limits) == []
