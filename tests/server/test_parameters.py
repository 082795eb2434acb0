"""Parameters of requests: an error names the wrong one, and the server's state is unchanged."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.live_server import Server

USER = [{"role": "user", "content": "Reverse: s-t-o-n-e"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "temperature": 0},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2, "temperature": 0},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
    "/v1/completions/render": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions/render": {"messages": USER, "max_tokens": 2},
    "/v1/messages/render": {"messages": USER, "max_tokens": 2},
    "/v1/responses": {"input": "Reverse: a-b", "max_output_tokens": 2, "temperature": 0},
    "/v1/messages": {"messages": USER, "max_tokens": 2, "temperature": 0},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
VOCABULARY, LONGEST = 511, 640  # of the model, and of its small cache: 40 pages of 16


def refuse(server: Server, path: str, fields: dict[str, Any], status: int = 400) -> dict[str, Any]:
    answer = server.request(path, GOOD[path] | fields)
    assert answer.status == status, answer.body[:500]
    return answer.error


@pytest.mark.parametrize("path", GOOD)
def test_good_requests_are_good(server: Server, path: str) -> None:
    assert server.request(path, GOOD[path]).status == 200


EMPTY = [
    ("/v1/completions", {"prompt": value}) for value in ("", [], [[]], ["a", ""], [[5], []], None)
]
EMPTY += [("/v1/chat/completions", {"messages": value}) for value in ([], None, [{}], "a")]
EMPTY += [("/v1/messages", {"messages": value}) for value in ([], None, "a")]
EMPTY += [("/v1/responses", {"input": value}) for value in ("", [], None, 7)]


@pytest.mark.parametrize(("path", "fields"), EMPTY, ids=str)
def test_empty_prompts(server: Server, path: str, fields: dict[str, Any]) -> None:
    [name] = fields
    error = refuse(server, path, fields)
    assert error["param"] == (name if fields != {"messages": [{}]} else error["param"])


@pytest.mark.parametrize(
    "prompt",
    [
        *([-1], [VOCABULARY], [2**31], [2**70], [1.5], [5, "a"], ["a", 5], [[5, "a"]], [[5], "a"]),
        *([[VOCABULARY]], [[5], [-1]], [[[5]]], [True]),
    ],
    ids=json.dumps,
)
def test_bad_token_ids(server: Server, prompt: list) -> None:
    assert refuse(server, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


@pytest.mark.parametrize("tokens", [[-1], [VOCABULARY], [2**70], [1.5], ["a"], "a", None])
def test_bad_token_ids_to_detokenize(server: Server, tokens: Any) -> None:
    assert refuse(server, "/detokenize", {"tokens": tokens})["param"] == "tokens"


def test_prompts_up_to_the_context(server: Server) -> None:
    """The KV cache is the limit here: a request that can never get its pages is refused at once."""
    for length, status in ((LONGEST - 1, 200), (LONGEST, 400), (LONGEST + 1, 400), (1023, 400)):
        answer = server.request("/v1/completions", {"prompt": [5] * length, "max_tokens": 1})
        assert answer.status == status
        if status == 400:
            assert answer.error["code"] == "context_length_exceeded"
            assert answer.error["param"] == "prompt"
    long = [{"role": "user", "content": "a " * LONGEST}]
    error = refuse(server, "/v1/chat/completions", {"messages": long})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_text_that_can_never_fit_is_refused_unread(server: Server) -> None:
    began = time.monotonic()
    error = refuse(server, "/v1/completions", {"prompt": "z" * 8_000_000})
    assert error["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 30  # it would take minutes of work, not of waiting


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANTHROPIC, GENERATE = "/v1/messages", "/inference/v1/generate"
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
BAD_OUTPUTS = (5, {"effort": "most"}, {"format": {}}, {"format": {"schema": {"type": "foo"}}})
RANGES: list[tuple[str, dict[str, Any]]] = [
    *((TEXT, {"max_tokens": value}) for value in (0, -2, 10**12)),
    *((CHAT, {"max_completion_tokens": value}) for value in (0, -2, 10**12)),
    *(("/v1/messages", {"max_tokens": value}) for value in (0, -2, None, "a")),
    *(("/v1/responses", {"max_output_tokens": value}) for value in (0, -2, "a")),
    ("/v1/responses", {"max_tool_calls": -1}),
    *((path, {"n_predict": value}) for path in (TEXT, CHAT) for value in (0, -2, "a", 1.5)),
    *((path, {"n_predict": 0}) for path in ("/v1/messages", "/v1/responses")),
    *((TEXT, {"min_tokens": value}) for value in (-1, 3, 10**12)),
    *((TEXT, {"n": value}) for value in (0, -1, 129, 10**9)),
    *((TEXT, {"temperature": value}) for value in (-1, -1e-9, 1e300)),
    *((TEXT, {"top_p": value}) for value in (-1, -1e-9, 1.0001, 2)),
    *((TEXT, {"min_p": value}) for value in (-0.1, 1.1)),
    *((TEXT, {"top_k": value}) for value in (-2, 2**63)),
    *((TEXT, {"seed": value}) for value in (-(2**63) - 1, 2**64)),
    *((TEXT, {"priority": value}) for value in (2**40, -(2**40))),
    *((TEXT, {"stop": value}) for value in ("", [""], ["a"] * 129, "a" * 1_000_000)),
    *((TEXT, {"stop_token_ids": value}) for value in ([-1], [VOCABULARY], [5] * 100, ["a"])),
    *(("/v1/messages", {"stop_sequences": value}) for value in ([""], ["a"] * 129, "a")),
    *((TEXT, {"cache_salt": value}) for value in ("a" * 129, "a" * 1_000_000, "\x07", "a\nb")),
    *((TEXT, {"truncate_prompt_tokens": value}) for value in (0, -2, 10**6)),
    *((TEXT, {"logprobs": value}) for value in (-2, -1, 21, 2**40)),
    *((CHAT, {"top_logprobs": value, "logprobs": True}) for value in (-2, -1, 21, 2**40)),
    (TEXT, {"best_of": 2}),
    *((path, {"suffix": value}) for path in (TEXT, CHAT, "/v1/messages") for value in ("b", 5)),
    *((CHAT, {"continue_final_message": True, "add_generation_prompt": True}) for _ in range(1)),
    *(
        (path, {"request_id": value})
        for path in (CHAT, TEXT)
        for value in ("", "a b", "a" * 129, 5)
    ),
    *((CHAT, {"mm_payload": value}) for value in ("a", 5)),
    *(
        (CHAT, {"tools": [{"function": {"name": "f", "parameters": parameters}}]})
        for parameters in ({"required": 5}, {"required": [5]}, {"properties": ["a"]})
    ),
    *((CHAT, {"return_prompt_text": "yes"}), (TEXT, {"return_token_offsets": 5})),
    *(
        (CHAT, {"functions": value})
        for value in (["a"], {}, [{"name": "a b"}], [{"name": "f"}] * 2)
    ),
    *((CHAT, {"function_call": value}) for value in ("f", {"name": "f"}, 5)),
    (CHAT, {"functions": [{"name": "f"}], "tools": [{"function": {"name": "g"}}]}),
    *((CHAT, {"function_call": {"name": "g"}, "functions": [{"name": "f"}]}) for _ in range(1)),
    *((GENERATE, {"token_ids": value}) for value in ([], [-1], [VOCABULARY], "a", [1.5], None)),
    *((GENERATE, {"sampling_params": value}) for value in (5, None, "a")),
    *((GENERATE, {"output_mode": "derender"}), (GENERATE, {"features": {"mm_hashes": {}}})),
    (GENERATE, {"content_parts": [{}]}),
    *((f"{TEXT}/render", {"n": 2000}), (f"{CHAT}/render", {"messages": []})),
    *((ANTHROPIC, {"output_config": value}) for value in BAD_OUTPUTS),
    *((ANTHROPIC, {"output_format": value}) for value in (5, {"type": "text"}, {"schema": 5})),
    (ANTHROPIC, {"output_format": {"schema": {"type": "foo"}}}),
    (ANTHROPIC, {"output_format": SCHEMA, "output_config": {"format": SCHEMA}}),
    *((ANTHROPIC, {"tools": [{"type": kind, "name": "a"}]}) for kind in ("bash_20250124", 5)),
    *((ANTHROPIC, {"chat_template_kwargs": value}) for value in (5, {"tools": []})),
    *((ANTHROPIC, {"context_management": 5}), (ANTHROPIC, {"cache_salt": "a" * 129})),
    *((ANTHROPIC, {"mcp_servers": [{}]}), (ANTHROPIC, {"container": "a"})),
]


@pytest.mark.parametrize(("path", "fields"), RANGES, ids=lambda value: str(value)[:40])
def test_values_out_of_range_are_named(server: Server, path: str, fields: dict[str, Any]) -> None:
    assert refuse(server, path, fields)["param"] == next(iter(fields))


UNSERVED: dict[str, tuple[Any, ...]] = {
    "prompt_embeds": ("a",),
    "lora_path": ("../../etc",),
    "watermarking": (True,),
    "media_io_kwargs": ({"image": {}},),
    "vllm_xargs": ({"a": 1},),
    "ec_transfer_params": ({},),
    "repetition_detection": ({"max_pattern_size": 5},),
    "return_weight_versions": (True,),
    "routed_experts_prompt_start": (1,),
    "stream_interval": (2,),
    "chat_template": ("{{ messages }}",),
    "documents": ([{}],),
}


REFUSED: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (1e9, -2.5, "1"),
    "frequency_penalty": (-1e9, 2.5),
    "repetition_penalty": (0, -1, 1e9),
    "logit_bias": (
        *({"-1": 1}, {"1e3": 1}, {"x": 1}, {"": 1}, {"99999999": 1}, {"5": 1e9}, {"5": "1"}),
        {str(token): -100 for token in range(301)},
        [5],
    ),
    "allowed_token_ids": ([], [-1], [VOCABULARY], [2**31], ["5"], [5] * (VOCABULARY + 1)),
    "bad_words": ([""], ["x" * 10_000], ["a"] * 10_001, "a"),
    "response_format": (
        *(
            5,
            {},
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {}},
        ),
        {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}, "strict": True}},
        {"type": "json_schema", "schema": {"$ref": "http://a/b"}, "strict": True},
        *({"type": kind, "schema": 5} for kind in ("text", "json_object", "json_schema")),
        {"type": "text", "schema": {"type": "object"}},
        {"type": "json_schema", "schema": {}, "json_schema": {"schema": {"type": "object"}}},
        *({"type": "structural_tag"}, {"type": "structural_tag", "format": {"type": "x"}}),
        {"type": "structural_tag", "structures": [{"begin": "a", "end": "b"}], "triggers": ["c"]},
        {"type": "structural_tag", "format": "any_text"},
    ),
    "prompt_logprobs": (-2, -1, 21, 2**40, 1.5, "3", [3]),
    "truncation_side": ("middle", "", 5, True, ["left"]),
    "spaces_between_special_tokens": ("yes", 1, [True]),
    "use_beam_search": ("yes", 1, {}, True),
    "length_penalty": (2.0, "1", [1]),
    "guided_json": (5, "{", {"type": "foo"}, [1]),
    "guided_regex": ("(", "", 5, "a" * 5000),
    "guided_choice": ([], [""], "a", [5]),
    "guided_grammar": ("start: nothing", "", 5),
    "guided_whitespace_pattern": (5,),
    "guided_decoding_backend": (5,),
    "structured_outputs": (
        *({}, {"regex": "("}, {"regex": "a", "json_object": True}, {"json": "{"}, {"choice": []}),
        *({"regex": "a" * 5000}, {"grammar": "start: nothing"}, {"json": {"type": 5}}, "json"),
        *({"structural_tag": "{}"}, {"json": "{}", "disable_any_whitespace": "yes"}),
        *({"structural_tag": 5}, {"structural_tag": {"format": {"type": "x"}}, "regex": "a"}),
    ),
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_the_sampler_are_checked(server: Server, path: str, name: str) -> None:
    for value in REFUSED[name]:
        named = refuse(server, path, {name: value})["param"]
        assert named is not None and named.partition(".")[0] == name, value


LISTED: tuple[Any, ...] = (
    *([-1], [VOCABULARY], [2**31], [2**70], ["5"], [1.5], [True], [None], 5, "5"),
    *([5] * 129, {"5": 1}, [[5]]),
)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_lists_of_tokens_to_score_are_checked(server: Server, path: str) -> None:
    name, logprobs = "logprob_token_ids", True if path == CHAT else 1
    for value in LISTED:
        named = refuse(server, path, {name: value, "logprobs": logprobs})["param"]
        assert named is not None and named.partition("[")[0] == name, value
    assert refuse(server, path, {name: [5]})["param"] == name  # it needs logprobs
    assert refuse(server, path, {name: [5] * 200_000, "logprobs": logprobs})["param"] == name


@pytest.mark.parametrize("path", [CHAT, TEXT, ANTHROPIC, "/v1/responses"])
def test_a_beam_search_is_refused_with_what_is_allowed(server: Server, path: str) -> None:
    message = refuse(server, path, {"use_beam_search": True, "n": 2})["message"]
    assert message == (
        "use_beam_search is not supported: beam search is LLM.beam_search of the Python API, and n "
        "samples several answers; leave it out"
    )
    for value in (False, None):
        assert server.request(path, GOOD[path] | {"use_beam_search": value}).status == 200
    assert refuse(server, path, {"length_penalty": 2.0})["param"] == "length_penalty"
    assert server.request(path, GOOD[path] | {"length_penalty": 1}).status == 200


def test_an_answer_has_the_form_that_was_asked_for(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "word": {"type": "string", "maxLength": 5}},
        "required": ["ok", "word"],
        "additionalProperties": False,
    }
    openai = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    more = {"temperature": 1, "seed": 3, "max_tokens": 200}
    chat = server.request(CHAT, GOOD[CHAT] | more | {"response_format": openai}).json()
    answer = json.loads(chat["choices"][0]["message"]["content"])
    assert set(answer) == {"ok", "word"} and chat["choices"][0]["finish_reason"] == "stop"
    form = {"type": "json_schema", "name": "answer", "schema": schema}
    body = {"input": "hello", "temperature": 1, "seed": 3, "max_output_tokens": 200}
    response = server.request("/v1/responses", body | {"text": {"format": form}}).json()
    assert set(json.loads(response["output"][0]["content"][0]["text"])) == {"ok", "word"}
    bad: dict[str, Any] = {"name": "bad", "schema": {"type": "foo"}, "strict": True}
    asked: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": bad}}
    message = refuse(server, CHAT, asked)["message"]
    assert message == "response_format: #/type: Invalid type: foo"
    choice = {"structured_outputs": {"choice": ["left", "right"]}}
    text = server.request(TEXT, GOOD[TEXT] | more | choice).json()["choices"][0]["text"]
    assert text in ("left", "right")
    small = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    tight = {"json": small, "disable_any_whitespace": True, "disable_additional_properties": True}
    asked = GOOD[TEXT] | more | {"structured_outputs": tight | {"regex": None}}
    text = server.request(TEXT, asked).json()["choices"][0]["text"]
    assert text in ('{"ok":true}', '{"ok":false}')


GUIDED: list[tuple[dict[str, Any], str]] = [
    ({"guided_json": {"enum": [1, 2]}}, "[12]"),
    ({"guided_json": '{"enum": [1, 2]}', "guided_decoding_backend": "xgrammar"}, "[12]"),
    ({"guided_regex": "ab|c"}, "ab|c"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'root ::= "x" | "y"'}, "x|y"),
    (
        {
            "guided_json": {"type": "array", "items": {"const": 1}, "maxItems": 1, "minItems": 1},
            "guided_whitespace_pattern": "_?",
        },
        r"\[_?1_?\]",
    ),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("fields", "pattern"), GUIDED, ids=str)
def test_forms_in_the_fields_of_older_clients(
    server: Server, path: str, fields: dict[str, Any], pattern: str
) -> None:
    asked = GOOD[path] | {"temperature": 1, "seed": 5, "max_tokens": 30} | fields
    choice = server.request(path, asked).json()["choices"][0]
    text = choice["text"] if path == TEXT else choice["message"]["content"]
    assert re.fullmatch(pattern, text) and choice["finish_reason"] == "stop"
    [name, *_] = fields
    for other in (
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
    ):
        error = refuse(server, path, fields | other)
        assert error["param"] == name and "exclude each other" in error["message"]
    for more in GUIDED:
        if name not in more[0]:
            assert refuse(server, path, fields | more[0])["param"] in (name, next(iter(more[0])))


def test_forms_of_older_clients_are_no_fields_elsewhere(server: Server) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        assert refuse(server, path, {"guided_regex": "a"})["param"] == "guided_regex"


def test_an_answer_takes_a_form_where_a_trigger_begins_a_tag(server: Server) -> None:
    content = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    tag = {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f"], "tags": [tag]}
    form |= {"at_least_one": True, "stop_after_first": True}
    newer = {"type": "structural_tag", "format": form}
    more = {"temperature": 1, "seed": 3, "max_tokens": 60}
    answers = [
        server.request(CHAT, GOOD[CHAT] | more | fields).json()["choices"][0]
        for fields in (
            {"response_format": newer},
            {"structured_outputs": {"structural_tag": newer}},
            {"structured_outputs": {"structural_tag": json.dumps(newer)}},
        )
    ]
    assert answers[0]["message"]["content"] in ("<f>1</f>", "<f>2</f>")
    assert answers[1:] == answers[:1] * 2 and answers[0]["finish_reason"] == "stop"
    structure = {"begin": "a(", "schema": {"enum": [1, 2]}, "end": ")"}
    older = {"type": "structural_tag", "structures": [structure], "triggers": ["a"]}
    asked = GOOD[TEXT] | more | {"response_format": older, "n": 4}
    texts = [choice["text"] for choice in server.request(TEXT, asked).json()["choices"]]
    called = "".join(re.sub(r"a(\(([12](\)|\Z)|\Z)|\Z)", "!", text) for text in texts)
    assert "!" in called and "a" not in called


def test_settings_of_the_sampler_are_obeyed(server: Server) -> None:
    only = {"allowed_token_ids": [70, 71], "max_tokens": 8, "ignore_eos": True}
    asked = GOOD[TEXT] | only | {"return_token_ids": True}
    tokens = server.request(TEXT, asked).json()["choices"][0]["token_ids"]
    assert set(tokens) <= {70, 71} and len(tokens) == 8
    biased = asked | {"logit_bias": {str(tokens[0]): -100}, "temperature": 0}
    others = server.request(TEXT, biased).json()["choices"][0]["token_ids"]
    assert set(others) == {70, 71} - {tokens[0]}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_the_engine_cannot_do_is_refused_not_ignored(server: Server, name: str) -> None:
    for value in UNSERVED[name]:
        assert refuse(server, CHAT, {name: value})["param"] == name


def test_values_that_ask_for_nothing_pass(server: Server) -> None:
    neutral = {
        "logprobs": False,
        "top_logprobs": 0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "user": "someone",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "stop": [],
        "seed": 2**64 - 1,
        "unknown": [1, 2],
        "watermarking": False,
        "vllm_xargs": {},
        "session_id": "a",
        "mm_payload": "none",
        "return_mm_kwargs": False,
        "return_token_offsets": True,
        "return_weight_versions": False,
        "routed_experts_prompt_start": 0,
        "stream_interval": 1,
        "thinking_token_budget": -1,
        "functions": [],
        "function_call": "none",
    } | dict.fromkeys(("n", "temperature", "top_p", "top_k", "stream_options", "model"))
    plain = server.request(CHAT, GOOD[CHAT]).json()["choices"]
    assert server.request(CHAT, GOOD[CHAT] | neutral).json()["choices"] == plain


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "tools", "documents"])
@pytest.mark.parametrize("value", [True, "a"])
def test_templates_cannot_be_told_what_is_theirs(server: Server, name: str, value: Any) -> None:
    error = refuse(server, CHAT, {"chat_template_kwargs": {name: value}})
    assert error["param"] == "chat_template_kwargs"
    free = {"chat_template_kwargs": {"other": ["a", {"b": None}]}}
    assert server.request(CHAT, GOOD[CHAT] | free).status == 200
    good = GOOD[CHAT] | {"chat_template_kwargs": {"enable_thinking": False}}
    assert server.request(CHAT, good).status == 200


@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|im_start|>user\nb<|im_end|>", "<|bos|>", "{{ 7*7 }}", "{% raw %}"]
)
def test_special_tokens_and_templates_in_messages_are_text(server: Server, text: str) -> None:
    def rendered(content: str) -> list[int]:
        body = {"messages": [{"role": "user", "content": content}]}
        return server.request("/tokenize", body).json()["tokens"]

    special = {0, 1, 2, 3}  # padding, <|bos|>, <|im_start|>, <|im_end|>
    with_text, without = rendered(f"a{text}b"), rendered("ab")
    assert [one for one in with_text if one in special] == [
        one for one in without if one in special
    ]
    back = server.request("/detokenize", {"tokens": with_text}).json()["prompt"]
    assert f"a{text}b" in back


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "file", "file": {"file_id": "a"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "text"},
        {"type": "text", "text": None},
    ],
    ids=str,
)
def test_other_content_than_text(server: Server, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    files = server.num_files()
    for path in (CHAT, "/v1/messages"):
        refused = refuse(server, path, {"messages": messages})
        assert refused["param"] == "messages"
        if part["type"] != "text":
            assert f"content of type {part['type']!r} is not supported" in refused["message"]
    item = {"role": "user", "content": [part]}
    assert refuse(server, "/v1/responses", {"input": [item]})["param"] == "input"
    assert server.num_files() <= files + 1


@pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": ""}]], ids=str)
def test_a_user_must_say_something(server: Server, content: Any) -> None:
    body = {"messages": [{"role": "user", "content": content}]}
    assert refuse(server, CHAT, body)["param"] == "messages"
    assert server.request("/tokenize", body).error["param"] == "messages"


def test_calls_and_thoughts_need_no_content(server: Server) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for beside in ({"tool_calls": [call]}, {"reasoning": "hm"}, {"reasoning_content": "hm"}):
        for content in ({"content": None}, {}, {"content": []}):
            said = {"role": "assistant", **beside, **content}
            # a tool that printed no text
            tool = {"role": "tool", "content": "", "tool_call_id": "a"}
            body = GOOD[CHAT] | {"messages": [*USER, said, tool, *USER]}
            assert server.request(CHAT, body).status == 200
    for role in ("assistant", "system", "tool"):
        body = GOOD[CHAT] | {"messages": [{"role": role}, *USER]}
        assert server.request(CHAT, body).status == 200


def test_roles_are_the_templates_matter(server: Server) -> None:
    for role in ("ipython", "critic", "developer"):
        body = GOOD[CHAT] | {"messages": [{"role": role, "content": "a"}, *USER]}
        assert server.request(CHAT, body).status == 200
    for role in ("", "a" * 65):
        refuse(server, CHAT, {"messages": [{"role": role, "content": "a"}]})


def test_min_tokens_end_with_the_context(server: Server) -> None:
    for path in (TEXT, CHAT):
        body = GOOD[path] | {"min_tokens": 100_000, "max_tokens": 100_000}
        answer = server.request(path, body | {"ignore_eos": False}).json()
        assert answer["usage"]["total_tokens"] == LONGEST
        assert answer["choices"][0]["finish_reason"] == "length"


def test_text_parts_are_joined_by_a_line_break(server: Server) -> None:
    parts = [{"type": "text", "text": "Reverse:"}, {"type": "text", "text": "s-t-o-n-e"}]
    body = GOOD[CHAT] | {"max_tokens": 20, "return_prompt_text": True}
    plain, joined = (
        server.request(CHAT, body | {"messages": [{"role": "user", "content": content}]}).json()
        for content in ("Reverse:\ns-t-o-n-e", parts)
    )
    assert joined["choices"] == plain["choices"]
    assert "Reverse:\ns-t-o-n-e" in joined["prompt_text"]


@pytest.mark.parametrize("model", ["nothing", "../../etc/passwd", "", "a" * 100_000])
@pytest.mark.parametrize("path", GOOD)
def test_unknown_models(server: Server, path: str, model: str) -> None:
    error = refuse(server, path, {"model": model}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_strict_servers_refuse_unknown_fields(narrow: Server) -> None:
    error = refuse(narrow, TEXT, {"temprature": 0})
    assert (error["code"], error["param"]) == ("unknown_field", "temprature")
    assert narrow.request(TEXT, GOOD[TEXT] | {"top_k": 5}).status == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["a"] * 100_000},
        {"prompt": ["a"] * 129},
        {"prompt": ["a"] * 5, "n": 32},
        {"prompt": [[5]] * 129},
    ],
    ids=lambda fields: f"{len(fields['prompt'])}x{fields.get('n', 1)}",
)
def test_nothing_is_made_before_it_is_counted(server: Server, fields: dict[str, Any]) -> None:
    before = server.memory()
    refuse(server, TEXT, fields)
    assert server.memory() - before < 32 << 20


def test_stream_options_need_a_stream(server: Server) -> None:
    options = {"stream_options": {"include_usage": True}}
    for path in (TEXT, CHAT):
        assert refuse(server, path, options)["param"] == "stream_options"


def test_prompts_are_cut_on_the_left(server: Server) -> None:
    ids = list(range(10, 30))
    whole = GOOD[TEXT] | {"prompt": ids[-5:], "return_token_ids": True}
    cut = GOOD[TEXT] | {"prompt": ids, "truncate_prompt_tokens": 5, "return_token_ids": True}
    choices = server.request(TEXT, cut).json()["choices"]
    assert choices == server.request(TEXT, whole).json()["choices"]
    assert choices[0]["prompt_token_ids"] == ids[-5:]
    long = {"prompt": [5] * 1000, "truncate_prompt_tokens": -1, "max_tokens": 5}
    usage = server.request(TEXT, long).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (LONGEST - 1, 1)


def test_special_tokens_can_be_left_out(server: Server) -> None:
    def count(**fields: Any) -> list[int]:
        body = {"prompt": "What", **fields}
        return server.request("/tokenize", body).json()["tokens"]

    assert count() == count(add_special_tokens=True)
    assert count(add_special_tokens=False) == count()[-len(count(add_special_tokens=False)) :]


def test_nothing_bad_is_echoed_at_length(server: Server) -> None:
    for fields in ({"model": "x" * 100_000}, {"stop": ["y" * 100_000]}, {"z" * 10_000: 1, "n": 0}):
        body = json.dumps(refuse(server, TEXT, fields, 404 if "model" in fields else 400))
        assert len(body) < 1000


def test_bad_requests_change_nothing_for_their_neighbours(server: Server) -> None:
    prompts = [[number + 10] * 12 for number in range(7)]
    good = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    good |= {"return_token_ids": True}

    def draw() -> list[list[int]]:
        choices = server.request(TEXT, good).json()["choices"]
        return [choice["token_ids"] for choice in choices]

    alone = draw()
    bad = [{name: value} for name in ("allowed_token_ids", "logit_bias") for value in REFUSED[name]]
    bad += [{"prompt": ids} for ids in ([-1], [VOCABULARY], [5] * LONGEST)]
    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(draw)
        count = 0
        while count < len(bad) or not beside.done():
            refuse(server, TEXT, bad[count % len(bad)])
            count += 1
        assert beside.result() == alone


# Settings that let no token through once some were drawn, and the one to blame.
STUCK: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [40], "bad_words": ["$$"], "max_tokens": 5},
    "structured_outputs": {"structured_outputs": {"regex": "(a?){1000}a{1000}"}, "max_tokens": 5},
}
MULTIPLES = {"type": "integer", "multipleOf": 99_991, "minimum": 0, "maximum": 10**15}


@pytest.mark.parametrize("name", STUCK)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_what_leads_nowhere_is_the_requests_fault(server: Server, path: str, name: str) -> None:
    error = refuse(server, path, STUCK[name])
    assert (error["param"], error["code"]) == (name, "invalid_value")
    assert error["message"].startswith(name)


def test_what_leads_nowhere_is_named_as_it_was_asked(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": MULTIPLES}}
    asked = {"response_format": form, "max_tokens": 30}
    error = refuse(server, CHAT, asked)
    assert error["param"] == "response_format"
    assert error["message"].startswith("response_format: ")
    # The status of a stream is out by then, or it is not.
    streamed = server.request(CHAT, GOOD[CHAT] | asked | {"stream": True})
    last = streamed.error if streamed.status == 400 else streamed.events()[-2]["error"]
    assert last == error


def test_seeds_may_be_negative(server: Server) -> None:
    drawn = {"max_tokens": 12, "temperature": 1.0}
    texts = [
        server.request(TEXT, GOOD[TEXT] | drawn | {"seed": seed}).json()["choices"][0]["text"]
        for seed in (-7, 2**64 - 7)
    ]
    assert texts[0] == texts[1]
    assert server.request(CHAT, GOOD[CHAT] | {"seed": -1}).status == 200


def test_refusals_are_text_of_the_history(server: Server) -> None:
    said = "I will not."

    def usage(path: str, name: str, part: dict[str, Any]) -> int:
        history = [*USER, {"role": "assistant", "content": [part]}, *USER]
        answer = server.request(path, GOOD[path] | {name: history})
        assert answer.status == 200, answer.body
        usage = answer.json()["usage"]
        return usage.get("prompt_tokens", usage.get("input_tokens"))

    refusal = {"type": "refusal", "refusal": said}
    for path, name, kind in ((CHAT, "messages", "text"), ("/v1/responses", "input", "output_text")):
        assert usage(path, name, refusal) == usage(path, name, {"type": kind, "text": said})
    nothing = usage(CHAT, "messages", {"type": "text", "text": ""})
    assert usage(CHAT, "messages", {"type": "refusal"}) == nothing
