"""Positions of a sequence over several devices: against the oracle, their bytes, refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequest, UnsupportedModel
from jaxserve.execution.state import memory_kinds
from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split, check_split
from jaxserve.settings.config import EngineConfig, bundled_model
from jaxserve.start.plan.make_plan import plan_model
from tests.equivalence import TINY
from tests.execution.over_positions import PAGE
from tests.support.last_line import found_by

LAYERS = 2
# Keys and values of the bundled model's 4 layers, in float32: 16 tokens of a head of 32.
PLANNED_PAGE = 2 * 4 * 16 * 32 * 4


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("tests.execution.over_positions")


def test_schedules_of_latents_over_positions_equal_the_oracle(found: dict[str, Any]) -> None:
    """Each of two devices has half of the positions of the only head, and half of the bytes."""
    assert found["schedules of latents"]["tokens"] > 50
    # Two layers of cells of 32 numbers of 8 bytes, for half of 4 positions.
    assert found["bytes of latents"] == {"planned": 2 * 2 * 32 * 8, "held": 2 * 2 * 32 * 8}


def test_random_schedules_over_positions_equal_the_oracle(found: dict[str, Any]) -> None:
    schedules = found["schedules"]
    assert schedules["requests"] > 20
    assert schedules["prefix_hits"] and schedules["preemptions"]


def test_a_page_takes_half_the_bytes_where_two_devices_divide_it(found: dict[str, Any]) -> None:
    config = replace(parse_model_config(TINY), split=Split(4))
    whole = memory_kinds(config, PAGE, np.float64, 1)[0].bytes_per_unit
    assert found["page bytes"] == found["held bytes"] == whole // 2


def test_a_layer_exchanges_queries_and_results_and_no_keys(found: dict[str, Any]) -> None:
    for name, counts in found["programs"].items():
        assert counts["all-reduce"] == 2 * LAYERS + 1, name
        assert counts["all-to-all"] >= LAYERS, name
        assert counts.get("collective-permute", 0) == 0, name
        # Queries of the two devices of a kv head, or the values that the sampler gathers for each
        # row.
        assert 0 < counts["largest gather"] <= 64 * 2 * 8 + 32 * 24 * 4, name
        assert counts["taken over"] >= 2 * LAYERS + 2, name


@pytest.mark.long
def test_other_divisions_equal_the_oracle() -> None:
    found = found_by("tests.execution.over_positions", "--long")
    assert found["schedules, 2 and 2"]["requests"] > 100
    assert found["schedules, 4 and 4"]["requests"] > 100


def test_a_context_that_one_devices_bytes_do_not_hold_is_served(found: dict[str, Any]) -> None:
    """A prompt of 44 tokens and 12 drawn: 14 pages, and the null page."""
    served = found["long request"]
    assert served["undivided pages"] < 15 <= served["pages"] == 16
    assert len(served["tokens"]) == 12 and served["tokens"] == served["in a large cache"]


def test_plans_see_what_positions_that_are_divided_take() -> None:
    tokens: list[int] = []
    for size in (1, 2):
        config = EngineConfig(
            bundled_model(),
            dtype="float32",
            tensor_parallel_size=4,
            decode_context_parallel_size=size,
            kv_cache_memory_bytes=40 * PLANNED_PAGE,
        )
        tokens.append(plan_model(config, "cpu").plans[0].longest)
    assert tokens == [39 * 16, 1024]  # 79 pages hold 1,264 tokens, and the model has 1,024


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensor_parallel_size": 4}, "is 3, of 4 devices .*allowed: a divisor of 4"),
        (
            {"tensor_parallel_size": 3, "block_size": 16},
            "is 3, and a page has 16 tokens .*allowed: a divisor of 16",
        ),
        (
            {"tensor_parallel_size": 3, "block_size": 3, "attention_backend": "triton"},
            "attention_backend is triton.*allowed with decode_context_parallel_size: auto, xla",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        EngineConfig(decode_context_parallel_size=3, **fields)


def test_heads_that_no_two_devices_have_are_refused() -> None:
    config = parse_model_config(TINY)
    check_split(replace(config, split=Split(4, context=2)))
    with pytest.raises(UnsupportedModel, match=r"2 kv heads .* lies on 2; allowed: 1, 2, or"):
        check_split(replace(config, split=Split(4, context=4)))
