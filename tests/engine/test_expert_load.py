"""Settings of experts' places, and the files of rows that they are chosen by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import CheckpointError, InvalidRequest, UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split, check_split
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.eplb import EplbConfig
from jaxserve.start.plan.weights import Weights
from jaxserve.start.sources.expert_load import placement_of
from tests.equivalence import EXPERTS, TINY
from tests.models.test_published_configs import DEEPSEEK_V3

MODEL = parse_model_config(EXPERTS)
LOAD = [[], [9, 1, 8, 1, 1, 1]]


def config_of(devices: int = 2, **eplb: Any) -> EngineConfig:
    text = json.dumps(eplb, default=str)
    own: Any = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": text}
    return EngineConfig(tensor_parallel_size=devices, **own)


@pytest.fixture
def load_path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": LOAD}))
    return path


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"window_size": 10}, "window_size is '10': experts are placed once"),
        ({"step_interval": 1}, "step_interval is '1': experts are placed once"),
        ({"log_balancedness": True}, "log_balancedness.*jaxserve:expert_rows_total"),
        ({"policy": "swap"}, "policy is 'swap'"),
        ({"replicas": 2}, " has no field 'replicas'; its fields are num_redundant_experts, load"),
        ({"num_redundant_experts": -1}, "num_redundant_experts"),
        ({"num_redundant_experts": 2}, "num_redundant_experts needs load_path"),
        ({"load_path": 7}, "load_path must be a file's name"),
        ({"record_path": ""}, "record_path must be a file's name"),
    ],
)
def test_bad_settings_are_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^eplb_config.?{said.lstrip('.')}"):
        config_of(**fields)


def test_what_the_settings_need_is_said() -> None:
    with pytest.raises(InvalidRequest, match=r"eplb_config needs enable_eplb"):
        EngineConfig(eplb_config={"record_path": "x"})
    for devices, experts in ((1, True), (2, False)):
        with pytest.raises(InvalidRequest, match="needs enable_expert_parallel and a tensor_par"):
            EngineConfig(
                tensor_parallel_size=devices, enable_expert_parallel=experts, enable_eplb=True
            )
    hosts: Any = {"nnodes": 2, "nodes_secret": "x", "enable_expert_parallel": True}
    with pytest.raises(InvalidRequest, match="enable_eplb with nnodes 2"):
        EngineConfig(tensor_parallel_size=2, enable_eplb=True, **hosts)


def test_vllms_own_values_pass() -> None:
    text = '{"window_size": 1000, "step_interval": 3000, "use_async": true, "policy": "default"}'
    config = config_of(**json.loads(text))
    assert config.eplb == EplbConfig() and EngineConfig(eplb_config="{}").eplb is None


def test_places_follow_the_file(load_path: Path) -> None:
    assert placement_of(EngineConfig(), MODEL) == ()
    assert placement_of(config_of(), MODEL) == ((), (0, 1, 2, 3, 4, 5))
    dense, own = placement_of(config_of(load_path=load_path, num_redundant_experts=2), MODEL)
    assert dense == () and len(own) == 8 and own.count(0) == own.count(2) == 2


@pytest.mark.parametrize(
    ("devices", "redundant", "allowed"),
    [(2, 3, "0 and every 2 more up to 6"), (4, 0, "2 and every 4 more up to 18"), (2, 8, "up to")],
)
def test_places_that_do_not_divide_are_refused_with_those_that_do(
    devices: int, redundant: int, allowed: str, load_path: Path
) -> None:
    config = config_of(devices, load_path=load_path, num_redundant_experts=redundant)
    with pytest.raises(UnsupportedModel, match=f"is {redundant}, of 6 experts.*{allowed}"):
        placement_of(config, MODEL)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Qwen3ForCausalLM has no experts"):
        placement_of(config_of(), parse_model_config(TINY))


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"rows": 3},
        {"rows": [LOAD[1], []]},
        {"rows": [[], LOAD[1][:5]]},
        {"rows": [[], [1, 2, 3, 4, 5, -6]]},
        {"rows": [[], [1, 2, 3, 4, 5, 6.5]]},
        {"rows": [[], "123456"]},
    ],
)
def test_a_file_of_another_model_is_refused(found: Any, load_path: Path) -> None:
    load_path.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=r"rows.json: has no 'rows' of 2 layers, 1 of them"):
        placement_of(config_of(load_path=load_path), MODEL)
    load_path.unlink()
    with pytest.raises(CheckpointError, match=r"rows\.json"):
        placement_of(config_of(load_path=load_path), MODEL)


def test_replicas_are_held_and_not_read_twice() -> None:
    """DeepSeek-V3 over 32 devices, with 32 replicas: 9 experts a layer on each in place of 8."""
    whole = Weights(parse_model_config(DEEPSEEK_V3), "bfloat16")
    assert whole.config.experts is not None
    order = tuple(range(256)) + tuple(range(32))
    places = tuple(order if has else () for has in whole.config.experts.layers)
    plain, more = whole.divided(Split(32, True)), whole.divided(Split(32, True, places))
    check_split(more.config)
    (held, read), (held_more, read_more) = plain.sizes(None), more.sizes(None)
    # In 8 bits, as the checkpoint has them, with scales of 4 bytes for each 128 inputs.
    assert held_more - held == 58 * 3 * 7168 * 2048 * 33 // 32
    assert read_more == pytest.approx(read, rel=1e-6)
    assert more.multiplied == plain.multiplied
