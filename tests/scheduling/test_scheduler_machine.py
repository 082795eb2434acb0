"""Random schedules over a ghost device; see scheduler_machine for the long form."""

from tests.scheduling.scheduler_machine import run


def test_random_schedules_serve_every_request_as_if_alone():
    run(examples=500, derandomize=True)
