"""Fields of other servers' APIs: served under their names, refused with ours, or ignored aloud."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.server.api.endpoint_request import MAX_NAMES, Notices
from jaxserve.server.http.logs import RateLimit
from jaxserve.server.schema.openai import ChatRequest, CompletionRequest
from jaxserve.settings.compat import FIELDS, check_fields, unserved
from tests.server.conftest import Many
from tests.server.test_parameters import GOOD, LONGEST, USER, refuse
from tests.support.live_server import Server

TEXT, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, INFILL, GENERATE = "/v1/messages", "/infill", "/inference/v1/generate"
# The fields of /completion and /v1/chat/completions in llama.cpp's README.
LLAMA = """
prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep
n_cmpl n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty
frequency_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
dry_sequence_breakers xtc_probability xtc_threshold mirostat mirostat_tau mirostat_eta grammar
json_schema seed ignore_eos logit_bias n_probs min_keep t_max_predict_ms id_slot cache_prompt
return_tokens samplers post_sampling_probs lora top_n_sigma adaptive_target adaptive_decay messages
response_format chat_template_kwargs reasoning_effort reasoning_format reasoning_control
parallel_tool_calls tools tool_choice
""".split()
# The fields' additions to an answer are missing; its tokens are unchanged.
LOGGED = "timings_per_token return_progress sse_ping_interval response_fields".split()
# A request of a client that sends every setting of the sampler, all of them switched off.
NEUTRAL: dict[str, Any] = {
    "dry_multiplier": 0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ":"],
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "top_n_sigma": -1,
    "typical_p": 1.0,
    "repeat_penalty": 1,
    "repeat_last_n": 64,
    "dynatemp_range": 0,
    "dynatemp_exponent": 1.5,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "min_keep": 0,
    "n_probs": 0,
    "post_sampling_probs": True,
    "grammar": "",
    "format": "",
    "options": {},
    "lora": [],
    "cache_prompt": True,
    "skip_reading_prefix_cache": False,
    "moderation": None,
    "samplers": [],
    "id_slot": 3,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 5,
    "penalize_nl": False,
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "top_a": 0,
    "tfs_z": 1,
    "cache_control": {"type": "ephemeral"},
    "reasoning_format": "auto",
    "image_data": [],
    "store": True,
    "metadata": {"a": "b"},
    "safety_identifier": "a",
    "prompt_cache_key": "b",
}
REFUSED: list[tuple[str, Any, str]] = [
    ("moderation", {"model": "omni-moderation-latest"}, "leave it out"),
    ("skip_reading_prefix_cache", True, "cache_salt"),
    ("dry_multiplier", 0.8, "repetition_penalty"),
    ("xtc_probability", 0.5, "min_p"),
    ("top_n_sigma", 1.0, "min_p"),
    ("typical_p", 0.9, "min_p"),
    ("repeat_penalty", 1.1, "repetition_penalty"),
    ("mirostat", 2, "temperature"),
    ("dynatemp_range", 0.5, "temperature"),
    ("grammar", 'root ::= "a"', "structured_outputs"),
    ("format", "json", "response_format"),
    ("format", {"type": "object"}, "response_format"),
    ("options", {"temperature": 0}, "fields of the request"),
    ("samplers", ["top_k"], "order"),
    ("n_probs", 5, "logprobs"),
    ("max_new_tokens", 5, "max_tokens"),
    ("regex", "a+", "structured_outputs"),
]


def test_each_field_of_llama_cpp_is_known() -> None:
    rows = unserved(FIELDS)
    served = {*ChatRequest.__struct_encode_fields__, *CompletionRequest.__struct_encode_fields__}
    assert set(LLAMA) <= served | rows.keys() and not served & rows.keys()
    assert not set(LOGGED) & (served | rows.keys())


@pytest.mark.parametrize("name", unserved(FIELDS))
def test_a_field_passes_where_it_changes_nothing(name: str) -> None:
    row = unserved(FIELDS)[name]
    for value in (None, *(("anything", 7) if row.neutral is None else row.neutral)):
        assert check_fields({name: value, "temperature": 1, "other": 2}, {"temperature"}) == [
            "other"
        ]
    beyond = [row.below - 1, row.above + 1]
    assert all(row.passes(number, {}) for number in beyond if math.isfinite(number))
    penalized = {name: {"strange": [1]}, "presence_penalty": 1}
    assert check_fields(penalized, {name, "presence_penalty"}) == []  # an endpoint has the field
    if row.neutral is not None:
        with pytest.raises(InvalidRequest, match=f"^{name} is not supported: ") as problem:
            check_fields(penalized, {"presence_penalty"})
        assert problem.value.parameter == name and row.instead in str(problem.value)


def test_a_flag_is_no_number_and_a_number_no_flag() -> None:
    for fields in ({"dry_multiplier": False}, {"watermarking": 0}, {"typical_p": True}):
        with pytest.raises(InvalidRequest, match="is not supported"):
            check_fields(fields, ())


def test_the_sampler_that_is_switched_on_is_named_not_its_settings() -> None:
    for order in (1, -1):
        sent = list({"dry_base": 2.0, "dry_multiplier": 0.5, "dry_allowed_length": 1}.items())
        with pytest.raises(InvalidRequest) as problem:
            check_fields(dict(sent[::order]), ())
        assert problem.value.parameter == "dry_multiplier"


def test_a_window_of_penalties_needs_penalties() -> None:
    window = {"repeat_last_n": 64}
    off = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": None}
    assert check_fields(window | off, off) == []
    for name, value in (("presence_penalty", 0.5), ("repetition_penalty", 1.1)):
        with pytest.raises(InvalidRequest, match="repeat_last_n"):
            check_fields(window | off | {name: value}, off)
        check_fields({"repeat_last_n": -1, name: value}, off)  # all tokens, as here


def inner(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return settings nested as an endpoint expects them."""
    return {"sampling_params": fields} if path == GENERATE else fields


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, MESSAGES, INFILL, GENERATE])
def test_no_sampler_is_ignored_by_any_endpoint(server: Server, many: Many, path: str) -> None:
    good = {**GOOD, INFILL: {"input_prefix": "a", "n_predict": 2}}[path]
    asked = many.server if path == INFILL else server
    answer = asked.request(path, good | inner(path, {"max_tokens": 2} | NEUTRAL))
    assert answer.status == 200, answer.body
    for name, value, word in REFUSED:
        answer = asked.request(path, good | inner(path, {name: value}))
        assert answer.status == 400 and answer.error["param"] == name, answer.body
        assert word in answer.error["message"]


def test_neutral_settings_change_no_answer(server: Server) -> None:
    plain = server.request(CHAT, GOOD[CHAT]).json()["choices"]
    assert server.request(CHAT, GOOD[CHAT] | NEUTRAL).json()["choices"] == plain


def test_strict_servers_know_these_fields_too(narrow: Server) -> None:
    assert narrow.request(TEXT, GOOD[TEXT] | NEUTRAL).status == 200
    assert refuse(narrow, TEXT, {"dry_multiplier": 1})["param"] == "dry_multiplier"
    assert refuse(narrow, TEXT, {"keep_alive": "5m"})["param"] == "keep_alive"
    wrong = GOOD[GENERATE] | {"sampling_params": {"temprature": 1}}
    assert narrow.request(GENERATE, wrong).error["param"] == "sampling_params"


def test_unknown_fields_are_logged_once(server: Server) -> None:
    sent = {"keep_alive": "5m", 'a\n"level": "error"': 1, "\U0001f9ea" * 500: 2}
    for path in (TEXT, CHAT, RESPONSES, MESSAGES, CHAT):
        assert server.request(path, GOOD[path] | sent).status == 200
    server.request(GENERATE, {"token_ids": [5], "sampling_params": {"max_tokens": 1, "zeal": 1}})
    server.wait_until_idle()
    found = [json.loads(line) for line in server.log if "keep_alive" in line]
    assert len(found) == 1 and found[0]["level"] == "warning"
    assert len(found[0]["message"]) < 400 and "\n" not in found[0]["message"]
    assert sum("sampling_params.zeal" in line for line in server.log) == 1


def test_no_client_can_fill_the_log_with_names(caplog: pytest.LogCaptureFixture) -> None:
    notices, limit = Notices(), RateLimit()
    with caplog.at_level(logging.WARNING):
        for number in range(3 * MAX_NAMES):
            notices.unknown_fields([f"name-{number}", "\x00\u2028" * 10_000])
            notices.unknown_fields(f"more-{number}-{part}" for part in range(3))
        for _ in range(9):
            notices.once("said")
    names = [record for record in caplog.records if "unknown" in record.getMessage()]
    assert sum(record.getMessage().count("'") for record in names) == 2 * MAX_NAMES
    assert all(len(record.getMessage()) < 80 * MAX_NAMES for record in caplog.records)
    assert all(record.getMessage().isascii() for record in names)
    assert f"{MAX_NAMES} names were logged" in names[-1].getMessage()
    assert [record.getMessage() for record in caplog.records].count("said") == 1
    assert all(limit.filter(record) for record in caplog.records)  # whose number is bounded


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, MESSAGES, INFILL, GENERATE])
def test_n_predict_is_max_tokens_and_minus_one_no_bound(
    server: Server, many: Many, path: str
) -> None:
    own = {RESPONSES: "max_output_tokens"}.get(path, "max_tokens")
    good = {**GOOD, INFILL: {"input_prefix": "a"}}[path]
    good = {name: value for name, value in good.items() if name != own or path == MESSAGES}
    asked = many.server if path == INFILL else server
    # A form that has no end of its own.
    endless = {"structured_outputs": {"regex": "c{700}"}, "temperature": 0}
    if path == MESSAGES:
        endless = {"json_schema": {"type": "string", "minLength": 700}}

    def used(fields: dict[str, Any]) -> tuple[int, int]:
        answer = asked.request(path, good | inner(path, endless | fields))
        assert answer.status == 200, answer.body
        body = answer.json()
        if path == INFILL:
            return body["tokens_evaluated"], body["tokens_predicted"]
        usage = body["usage"]
        names = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
        prompt, drawn = (sum(usage.get(name, 0) for name in pair) for pair in names)
        return prompt + usage.get("cache_read_input_tokens", 0) + usage.get(
            "cache_creation_input_tokens", 0
        ), drawn

    names = [own, "n_predict", *(["max_completion_tokens"] if path == CHAT else [])]
    most = {own: -1} if path == MESSAGES else {}
    for name in names:
        assert used(most | {name: 5})[1] == 5
        prompt, drawn = used(most | {name: -1})
        assert prompt + drawn == LONGEST
    assert used({own: 7, "n_predict": 3})[1] == used({own: 3, "n_predict": 7})[1] == 3
    assert used({own: 4, "n_predict": -1})[1] == 4
    for name in ("n_predict", own):
        answer = asked.request(path, good | inner(path, most | {name: -2}))
        assert answer.status == 400 and answer.error["param"] == name, answer.body
        assert answer.error["message"] == f"{name} must be at least 1, or -1 for no bound, got -2"


SCHEMA = {"enum": ["left", "right"]}


@pytest.mark.parametrize("path", [TEXT, CHAT, RESPONSES, MESSAGES, INFILL, GENERATE])
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)], ids=["object", "text"])
def test_a_schema_at_the_top_is_the_form(
    server: Server, many: Many, path: str, schema: Any
) -> None:
    good = {**GOOD, INFILL: {"input_prefix": "a"}}[path]
    asked = many.server if path == INFILL else server
    more = {"max_output_tokens" if path == RESPONSES else "max_tokens": 30, "temperature": 0}

    def ask(fields: dict[str, Any]) -> Any:
        shown = {"output_mode": "text"} if path == GENERATE else {}
        return asked.request(path, good | shown | inner(path, more | fields))

    answer = ask({"json_schema": schema}).json()
    text = {
        TEXT: lambda: answer["choices"][0]["text"],
        CHAT: lambda: answer["choices"][0]["message"]["content"],
        RESPONSES: lambda: answer["output"][-1]["content"][0]["text"],
        MESSAGES: lambda: answer["content"][0]["text"],
        INFILL: lambda: answer["content"],
        GENERATE: lambda: answer["choices"][0]["text"],
    }[path]()
    assert json.loads(text) in ("left", "right")
    for wrong in ({"type": "foo"}, "{", 5, [1]):
        refusal = ask({"json_schema": wrong})
        assert refusal.status == 400 and refusal.error["param"] == "json_schema", refusal.body
    other = {"response_format": {"type": "json_object"}}
    if path == RESPONSES:
        other = {"text": {"format": {"type": "json_object"}}}
    if path == MESSAGES:
        other = {"output_format": {"schema": SCHEMA}}
    assert ask({"json_schema": schema} | other).error["param"] == "json_schema"


def test_enable_thinking_reaches_the_template(trusting: Server) -> None:
    def count(**fields: Any) -> int:
        return trusting.request("/tokenize", {"messages": USER} | fields).json()["count"]

    sizes = {flag: count(chat_template_kwargs={"enable_thinking": flag}) for flag in (True, False)}
    assert sizes[True] != sizes[False] == count()
    for flag, size in sizes.items():
        fields: dict[str, Any] = {"enable_thinking": flag}
        assert count(**fields) == size
        answer = trusting.request(CHAT, GOOD[CHAT] | fields).json()
        assert answer["usage"]["prompt_tokens"] == size
        answer = trusting.request(RESPONSES, GOOD[RESPONSES] | {"input": USER} | fields).json()
        assert answer["usage"]["input_tokens"] == size
        asked = {"input": USER} | fields
        assert trusting.request(f"{RESPONSES}/input_tokens", asked).json()["input_tokens"] == size
        counted = trusting.request(f"{MESSAGES}/count_tokens", {"messages": USER} | fields).json()
        assert counted["input_tokens"] == size
        both = {"enable_thinking": not flag, "chat_template_kwargs": {"enable_thinking": flag}}
        assert count(**both) == size
    assert refuse(trusting, CHAT, {"enable_thinking": "yes"})["param"] == "enable_thinking"


def test_a_budget_of_thoughts_is_dropped_where_thoughts_are_unknown(server: Server) -> None:
    """Claude Code sends one with every request (claude-code#9203)."""
    plain = server.request(MESSAGES, GOOD[MESSAGES]).json()
    for stream in (False, True):
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "stream": stream}
        answer = server.request(MESSAGES, GOOD[MESSAGES] | thinking)
        assert answer.status == 200, answer.body
        assert stream or answer.json()["content"] == plain["content"]
    counted = {"messages": USER, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert server.request(f"{MESSAGES}/count_tokens", counted).status == 200
    server.wait_until_idle()
    assert sum("budget_tokens has no effect" in line for line in server.log) == 1
    for thinking in ({"type": "enabled", "budget_tokens": -5}, {"type": "enabled"}):
        assert refuse(server, MESSAGES, {"thinking": thinking})["param"] == "thinking"
    # Fields of this server and vLLM only need a model whose marks of thoughts are known.
    assert refuse(server, CHAT, {"thinking_token_budget": 9})["param"] == "thinking_token_budget"


def test_the_document_has_the_other_names(server: Server) -> None:
    schemas = server.request("/openapi.json").json()["components"]["schemas"]
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "MessagesRequest"):
        assert {"n_predict", "json_schema"} <= schemas[name]["properties"].keys()
