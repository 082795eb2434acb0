"""Seeded bugs fit the sources, and tests notice them: see mutants, which tries each bug."""

from __future__ import annotations

from collections import Counter

from scripts.lib.paths import ROOT
from tests.scheduling.mutants import try_bug
from tests.scheduling.seeded_bugs import BUGS, DEVICE_BUGS
from tests.scheduling.seeded_device_bugs import PLACE_BUGS
from tests.scheduling.seeded_latent_bugs import LATENT_BUGS
from tests.scheduling.seeded_state_bugs import STATE_FAULTS


def test_each_bug_replaces_one_text_of_its_source() -> None:
    sources = {bug.file: (ROOT / bug.file).read_text() for bug in BUGS}
    counts = {bug.name: sources[bug.file].count(bug.old) for bug in BUGS}
    assert {name: count for name, count in counts.items() if count != 1} == {}
    assert all(bug.old != bug.new for bug in BUGS)
    assert max(Counter(bug.name for bug in BUGS).values()) == 1


def test_each_fault_of_states_has_bugs_and_tests() -> None:
    assert {bug.letter for bug in BUGS if bug.letter} == set(STATE_FAULTS)
    assert all(bug.letter and (ROOT / bug.tests[0]).is_file() for bug in DEVICE_BUGS)
    assert all((ROOT / bug.tests[0]).is_file() for bug in LATENT_BUGS)


def test_a_bug_on_the_device_is_noticed() -> None:
    outcome = try_bug(PLACE_BUGS[0])
    assert outcome.killed_by == "tests" and "AssertionError" in outcome.evidence
