"""Names of vLLM's arguments that are not served: each error names an alternative."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest

from jaxserve import LLM, AsyncLLM, EngineConfig
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.options import engine_settings
from jaxserve.errors import InvalidRequest
from jaxserve.settings.compat import (
    BENCH,
    ENGINE,
    SERVER,
    check_fields,
    endpoint_fields,
    refuse_unsupported,
    served,
    table,
    unserved,
)
from jaxserve.settings.config import usual_value
from jaxserve.start.loaded import Loaded

FIELDS = EngineConfig.__dataclass_fields__


def test_none_of_them_is_a_setting() -> None:
    assert not unserved(ENGINE).keys() & FIELDS.keys()


@pytest.mark.parametrize("name", unserved(ENGINE))
def test_values_that_ask_for_nothing_pass(name: str) -> None:
    for value in (None, *(unserved(ENGINE)[name].neutral or ())):
        assert served({name: value, "seed": 1}, FIELDS) == {"seed": 1}
    shown = name if name == "hf_token" else f"{name}='x'"  # a log may hold no token
    with pytest.raises(InvalidRequest, match=f"^{shown} is not supported: .+"):
        LLM("/no/such", **{name: "x"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: served({"swap_space": 4}, FIELDS),
            "swap_space=4 is not supported: weights and cache stay on the device: set "
            "kv_cache_memory_bytes, or quantization",
        ),
        (
            lambda: served({"grpc": True}, (), SERVER),
            "grpc=True is not supported: only HTTP is served",
        ),
        (
            lambda: check_fields({"typical_p": 0.5, "top_n_sigma": 1}, ()),
            "top_n_sigma is not supported: temperature, top_k, top_p, min_p, repetition_penalty, "
            "presence_penalty and frequency_penalty choose tokens here; leave it out",
        ),
        (
            lambda: refuse_unsupported({"n": 1.0}, endpoint_fields("infill"), " by this server"),
            "n is not supported by this server",
        ),
        (
            lambda: usual_value("nvfp4", "kv_cache_dtype"),
            "kv_cache_dtype='nvfp4' is not supported: 8 bits are 'fp8' (e4m3) or, on a CPU, "
            "'int8_per_token_head'",
        ),
    ],
)
def test_texts_of_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidRequest) as problem:
        call()
    assert str(problem.value) == message


def test_endpoints_have_fields_that_they_refuse() -> None:
    rows = table()["endpoint_fields"]
    for endpoint in {name for row in rows.values() for name in row["endpoints"]}:
        for name, neutral in endpoint_fields(endpoint).items():
            refuse_unsupported({name: neutral[-1]}, endpoint_fields(endpoint))
            with pytest.raises(InvalidRequest, match=f"^{name} is not supported$"):
                refuse_unsupported({name: object()}, endpoint_fields(endpoint))


def test_the_table_is_read_only_where_a_name_is_not_served() -> None:
    for cached in (table, unserved):
        cached.cache_clear()
    EngineConfig(dtype="float32", quantization="int8", kv_cache_dtype="auto")
    served({"seed": 1}, FIELDS)
    engine_settings(make_parser().parse_args(["serve", "--port", "1", "-tp", "2"]))
    assert check_fields({"prompt": ""}, {"prompt"}) == []
    assert table.cache_info().currsize == 0
    served({"sead": 1}, FIELDS)
    assert table.cache_info().currsize == 1


def test_a_flag_is_no_number() -> None:
    for name, value in (("data_parallel_size", True), ("enforce_eager", 0)):
        with pytest.raises(InvalidRequest, match=name):
            served({name: value}, FIELDS)


def test_a_name_of_nobody_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="enforce_eagerly"):
        LLM("/no/such", enforce_eagerly=True)


@pytest.mark.parametrize("command", ["serve", "generate hi", "compile"])
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--enforce-eager", "enforce_eager=True"),
        ("--data-parallel-size 2", "--data-parallel-size=2"),
        ('--speculative-config {"a":1}', "speculative_config="),
        ("--tokenizer-mode slow", "tokenizer_mode='slow'"),
    ],
)
def test_an_option_is_refused_in_one_line(
    command: str, flag: str, name: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command.split(), *flag.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jaxserve: error: {name}") and err.count("\n") == 1


def test_an_option_of_a_benchmark_is_refused_with_a_suggestion(
    capsys: pytest.CaptureFixture,
) -> None:
    for name in ("lora_modules", "no_stream"):
        flag = "--" + name.replace("_", "-")
        with pytest.raises(SystemExit, match="2"):
            main(["bench", "serve", flag, "x"])
        suggestion = unserved(BENCH)[name].instead
        assert f"error: {flag} is not supported: {suggestion} (see" in capsys.readouterr().err


def test_options_that_ask_for_nothing_pass() -> None:
    words = "serve --data-parallel-size 1 --no-enforce-eager --swap-space 0 --seed 3"
    assert engine_settings(make_parser().parse_args(words.split())) == {"seed": 3}


def test_an_engine_cannot_be_pickled(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers both kinds of engine, over the same loaded model."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    refuse_copies(LLM(loaded))
    refuse_copies(AsyncLLM(loaded))


def refuse_copies(llm: LLM | AsyncLLM) -> None:
    try:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied: it holds"):
                attempt(llm)
    finally:
        llm.close()
