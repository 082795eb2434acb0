"""One engine over several devices, against the same model on one and against the oracle."""

from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.execution.mesh import make_mesh
from tests.execution.over_devices import DEVICES, FEW
from tests.support.last_line import found_by

LAYERS = 2


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("tests.execution.over_devices")


def test_families_compute_over_devices_what_they_do_on_one(found: dict[str, Any]) -> None:
    assert set(found["differences"]) == {f"{case}, {DEVICES}" for case in FEW}
    assert max(found["differences"].values()) < 1e-9


def test_families_exchange_two_sums_a_layer_and_one_for_the_embedding(
    found: dict[str, Any],
) -> None:
    """Norms over all heads take one more a layer, and blocks side by side one less."""
    beyond = dict.fromkeys(FEW, 0) | {
        "olmo2_gqa": LAYERS,
        "cohere_qk_norm_bias_head_dim": -LAYERS,
    }
    want = {f"{case}, {DEVICES}": {"all-reduce": count} for case, count in beyond.items()}
    assert found["exchanges"] == want


def test_whole_experts_on_each_device_compute_the_same(found: dict[str, Any]) -> None:
    assert found["expert parallel"] < 1e-9


def test_experts_with_several_places_compute_the_same(found: dict[str, Any]) -> None:
    assert found["replicas"] < 1e-9
    assert found["with replicas"]["schedules"]["requests"] > 10


def test_replicas_take_rows_and_rows_are_recorded_by_expert(found: dict[str, Any]) -> None:
    own = found["with replicas"]
    dense, places = own["placement"]
    assert dense == [] and len(places) == 8 and places.count(0) == places.count(2) == 2
    first, launched, after = own["rows"]
    assert sum(first) == (7 + 4) * 2 and launched == first and after == first
    # Each device has two places: with one for each expert, that of the busiest two had 20 of 22.
    assert len(first) == DEVICES and max(first) <= 11
    assert [len(rows) for rows in own["by expert"]] == [0, 6]
    assert sum(own["by expert"][1]) == sum(own["by device"]) > 3 * sum(first)


def test_rows_of_each_devices_experts_are_counted(found: dict[str, Any]) -> None:
    """Two experts a token in one layer, whatever a launch takes, and on after a reset."""
    first, launched, after = found["rows of experts"]
    assert len(first) == 2 and min(first) > 0 and sum(first) == (7 + 4) * 2
    assert launched == first and after == first
    assert found["schedules of experts"]["requests"] > 0


def test_random_schedules_over_devices_equal_the_oracle(found: dict[str, Any]) -> None:
    assert found["schedules"]["requests"] > 20
    assert found["after a reset"]["requests"] > 0


def test_a_step_sums_twice_a_layer_and_once_for_the_embedding(found: dict[str, Any]) -> None:
    for name, counts in found["programs"].items():
        # A part of a prompt's log-probabilities needs no sums of its own.
        assert counts["all-reduce"] == 2 * LAYERS + 1, name
        assert counts.get("collective-permute", 0) == 0, name
        # Pages of every layer, the page table, the last tokens.
        assert counts["taken over"] >= 2 * LAYERS + 2, name


def test_nothing_as_large_as_pages_or_weights_is_gathered(found: dict[str, Any]) -> None:
    for name, counts in found["programs"].items():
        # A few numbers of each row from each device: 5 rows, of 32 positions 20 log-probabilities.
        assert 0 < counts["largest gather"] <= 32 * 24 * DEVICES, name


def test_a_second_start_reads_every_program(found: dict[str, Any]) -> None:
    starts = found["starts"]
    assert starts["compiled first"] > 5 and starts["compiled second"] == 0
    assert starts["read second"] == starts["compiled first"]


def test_the_process_that_compiles_traces_the_same_programs(found: dict[str, Any]) -> None:
    assert found["starts"]["copies equal"] == 1


def test_more_devices_than_there_are_is_refused_with_what_to_set() -> None:
    with pytest.raises(InvalidRequest, match="xla_force_host_platform_device_count=64"):
        make_mesh(64)
    assert make_mesh(1) is None
