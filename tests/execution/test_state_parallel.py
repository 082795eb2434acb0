"""Models whose layers keep states, over two devices: against one device and the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split, check_split, parts_of
from tests.equivalence import fields_of_case
from tests.execution.states_over_devices import CASES, DEVICES
from tests.models.cases import family_of
from tests.support.last_line import found_by

# Layers of these families have a mixer or an MLP, whose results are summed once: a difference of
# one sum for each layer.
ONE_SUM_A_LAYER = {"nemotron_h": 4, "mamba2": 2}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("tests.execution.states_over_devices")


def test_families_compute_over_devices_what_they_do_on_one(found: dict[str, Any]) -> None:
    """A second step continues a state, and one that the first step saved within a prompt."""
    assert found["differences"].keys() == CASES.keys()
    assert max(found["differences"].values()) < 1e-9


def test_whole_experts_on_each_device_compute_the_same(found: dict[str, Any]) -> None:
    assert found["expert parallel"] < 1e-9


def test_a_layer_with_states_takes_one_sum(found: dict[str, Any]) -> None:
    layers = {case: -ONE_SUM_A_LAYER.get(family_of(case), 0) for case in CASES}
    assert found["exchanges"] == {case: {"all-reduce": count} for case, count in layers.items()}


def test_states_are_divided_by_channels_and_by_heads(found: dict[str, Any]) -> None:
    channels, heads = found["divisions"]
    (rows, *whole), (_, *own) = channels
    assert whole == [3, 2 * 2 * 8 + 4 * 12] and own == [3, whole[1] // DEVICES]
    assert heads == [[rows, 4, 8, 12], [rows, 4 // DEVICES, 8, 12]]


def test_random_schedules_over_devices_equal_the_oracle(found: dict[str, Any]) -> None:
    counts = found["schedules"]
    assert counts["requests"] > 20 and counts["saved"] > 10
    assert counts["restored"] > 0 and counts["preemptions"] > 0


def test_queries_keys_and_values_are_each_divided() -> None:
    config = parse_model_config(fields_of_case("qwen3_5_two_a_key"))
    divided = replace(config, split=Split(DEVICES))
    parts = parts_of(divided, ("embed", "state_parts"), (8, 2 * 16 + 48))
    assert [part.spans[1] for part in parts] == [
        ((0, 8), (16, 24), (32, 56)),
        ((8, 16), (24, 32), (56, 80)),
    ]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        ("qwen3_next_two_a_key", "linear_num_key_heads is 2; allowed: a multiple of 4"),
        ("nemotron_h_all_kinds", "the number of groups is 2; allowed: a multiple of 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused(case: str, problem: str) -> None:
    config = parse_model_config(fields_of_case(case))
    with pytest.raises(UnsupportedModel, match=problem):
        check_split(replace(config, split=Split(4)))


@pytest.mark.parametrize("case", ["lfm2_tied", "qwen3_5_moe_two_a_key", "nemotron_h_all_kinds"])
def test_positions_are_not_divided(case: str) -> None:
    fields = fields_of_case(case)
    [architecture] = fields["architectures"]
    config = parse_model_config(fields)
    with pytest.raises(UnsupportedModel) as refused:
        check_split(replace(config, split=Split(2, context=2)))
    assert str(refused.value) == (
        "decode_context_parallel_size is 2; allowed: 1, since layers of this "
        f"{architecture} keep a state in place of positions"
    )


def test_a_model_without_attention_is_divided_by_groups() -> None:
    config = parse_model_config(fields_of_case("mamba2_two_groups"))
    check_split(replace(config, split=Split(2)))
    with pytest.raises(UnsupportedModel, match=r"divided: the number of groups is 2; .* of 4$"):
        check_split(replace(config, split=Split(4)))
