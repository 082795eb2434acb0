"""Random schedules over a ghost device. See scheduler_machine for the long form."""

from __future__ import annotations

import pytest

from tests.scheduling.scheduler_machine import StateMachine, run


def test_random_schedules_serve_every_request_as_if_alone() -> None:
    run(examples=100)


def test_random_schedules_of_models_with_states_serve_every_request_as_if_alone() -> None:
    run(examples=100, base=StateMachine)


def test_fresh_schedules_serve_every_request_as_if_alone(pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("schedule_seed")
    print(f"the schedules' seed: repeat them with --schedule-seed {seed}")
    run(examples=50, seed=seed)
