"""A server's settings before it starts, and the messages that it prints."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from jaxserve.commands.cli import make_parser
from jaxserve.commands.options import field_help
from jaxserve.engine.metrics import ValueCounts
from jaxserve.errors import CheckpointError, InvalidRequest, Overloaded
from jaxserve.server import page
from jaxserve.server.http.head_checks import OPEN_PATHS
from jaxserve.server.http.logs import BURST, JsonLines, RateLimit
from jaxserve.server.schema.decode import parse_json
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.admission import Admission
from jaxserve.server.served.specs import check_models, memory_shares, plan_models
from jaxserve.server.settings import ServerConfig


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org"])
def test_hosts_that_others_reach_need_a_key(host: str) -> None:
    with pytest.raises(InvalidRequest, match="--api-key, or --insecure"):
        ServerConfig(host=host)
    assert not ServerConfig(host=host, api_key=("key",)).is_local
    assert not ServerConfig(host=host, insecure=True).is_local


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_local_hosts_need_none(host: str) -> None:
    assert ServerConfig(host=host).is_local


@pytest.mark.parametrize(
    "setting",
    [
        {"port": 65536},
        {"port": -1},
        {"max_connections": 0},
        {"queue_timeout": 0},
        {"drain_timeout": float("nan")},
        {"api_key": ("",)},
        {"max_num_queued_reqs": -1},
        {"max_json_depth": True},
    ],
    ids=str,
)
def test_settings_out_of_range(setting: dict) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(setting))):
        ServerConfig(**setting)


def test_models_and_their_memory() -> None:
    one = plan_models([], {}, ServerConfig(served_model_name=("x", "y")))
    assert one[0].names == ["x", "y"] and one[0].config.model is None
    assert one[0].config.memory_share == 1.0
    config = ServerConfig(model_weights="a=3,b=1")
    a, b = plan_models(["a=some/dir", "b=other"], {"gpu_memory_utilization": 0.8}, config)
    assert (a.names, str(a.config.model), a.config.memory_share) == (["a"], "some/dir", 0.75)
    assert (b.root, b.config.memory_share) == ("other", 0.25)
    assert a.config.gpu_memory_utilization == b.config.gpu_memory_utilization == 0.8
    assert plan_models(["dir/a"], {}, ServerConfig())[0].names == ["dir/a"]


@pytest.mark.parametrize("names", [("a,b",), ("a", ""), ("a", "a")])
def test_names_that_are_none(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest, match="served_model_name: "):
        ServerConfig(served_model_name=names)
    with pytest.raises(InvalidRequest, match="names without commas"):
        plan_models(["a,b=x"], {}, ServerConfig())


def test_a_model_among_the_names_is_noticed() -> None:
    words = "serve --served-model-name a b jaxserve/demo_model".split()
    names = make_parser().parse_args(words).served_model_name
    with pytest.raises(InvalidRequest, match="give the model before it"):
        plan_models([], {}, ServerConfig(served_model_name=names))
    words = "serve jaxserve/demo_model --served-model-name a b --served-model-name c --port 5"
    parsed = make_parser().parse_args(words.split())
    config = ServerConfig(served_model_name=parsed.served_model_name)
    assert plan_models(parsed.models, {}, config)[0].names == ["a", "b", "c"]


def test_help_says_what_is_open_without_a_key() -> None:
    text = field_help(ServerConfig)["api_key"]
    assert (
        "/health, its other names /v1/health and /ping, /ready, and the files of the page" in text
    )
    assert {path for path in page.OPEN_PATHS if not path.startswith("/page/")} == {"/"}
    assert {"/health", "/v1/health", "/ping", "/ready"} == OPEN_PATHS


def test_models_that_cannot_be_told_apart() -> None:
    with pytest.raises(InvalidRequest, match="two models are named 'a'"):
        plan_models(["a=x", "a=y"], {}, ServerConfig())
    with pytest.raises(InvalidRequest, match="NAME=MODEL"):
        plan_models(["a=x", "b=y"], {}, ServerConfig(served_model_name=("c",)))


@pytest.mark.parametrize("text", ["", "a=", "=x", "="])
def test_models_without_a_folder(text: str) -> None:
    with pytest.raises(InvalidRequest, match="MODEL or NAME=MODEL"):
        plan_models([text], {}, ServerConfig())


def test_a_missing_model_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "m.bin").touch()
    there = ["a=jaxserve/demo_model", f"b={tmp_path}/m.gguf", "org/name", "c=org/name/m.gguf"]
    check_models(plan_models(there, {}, ServerConfig()))
    for missing in (f"{tmp_path}/m.bin", f"{tmp_path}/other.gguf", "name", "../name"):
        with pytest.raises(CheckpointError, match=f"'{missing}' is not a folder"):
            check_models(plan_models([*there, f"d={missing}"], {}, ServerConfig()))


@pytest.mark.parametrize("weights", ["c=1", "a=0", "a=-1", "a", "a=x", "a=nan", "a=1;b=2"])
def test_weights_that_mean_nothing(weights: str) -> None:
    with pytest.raises(InvalidRequest, match="model_weights must be like"):
        memory_shares(["a", "b"], weights)


def test_weights_left_out_are_one() -> None:
    assert memory_shares(["a", "b", "c"], " a=2, ") == {"a": 0.5, "b": 0.25, "c": 0.25}


def test_admission_counts_completions_and_prompt_tokens() -> None:
    admission = Admission(num_slots=2, max_queued=1, max_prompt_tokens=10)
    admission.check(3, 1000)  # larger than the bound, and alone
    with pytest.raises(Overloaded, match="of 3"):
        admission.check(4)
    admission.num_live, admission.num_prompt_tokens = 1, 5
    admission.check(2, 5)
    with pytest.raises(Overloaded, match="5 prompt tokens"):
        admission.check(2, 6)
    assert not admission.is_full and admission.num_refused == 2


def test_log_lines_are_json_and_few() -> None:
    nasty = 'a\r\n{"b": "\x1b[31m%s"}'
    try:
        raise ValueError(nasty)
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "file.py", 7, "%s", (nasty,), error)
    line = JsonLines().format(record)
    assert "\n" not in line and "\x1b" not in line
    assert json.loads(line)["message"] == nasty
    limit = RateLimit()
    assert sum(limit.filter(record) for _ in range(1000)) == BURST
    other = logging.LogRecord("x", logging.ERROR, "file.py", 8, "a", (), None)
    assert limit.filter(other)


def test_histograms_add_up() -> None:
    histogram = ValueCounts((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    histogram.add(2.0, times=3)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 6.0), ("+Inf", 7.0)]
    assert histogram.sum == 18.0


@pytest.mark.parametrize(
    "text",
    ['{"a": "x: y, {[", "b": [1, {"c": "\\\\"}], "d": {}}', "[]", "{}", "7", '"a:b"', '[{"a": 1}]'],
)
def test_good_json_is_taken(text: str) -> None:
    assert parse_json(text.encode(), 64, 1000) == json.loads(text)


@pytest.mark.parametrize(("text", "depth"), [("7", 0), ("[]", 1), ('{"a": [{}, []]}', 3)])
def test_json_is_nested_at_most_as_deep_as_the_limit(text: str, depth: int) -> None:
    assert parse_json(text.encode(), depth, 1000) == json.loads(text)
    with pytest.raises(ApiError, match=f"nested deeper than {depth}$"):
        parse_json(f"[{text}]".encode(), depth, 1000)
