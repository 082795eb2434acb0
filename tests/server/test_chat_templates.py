"""Chat templates that a request or a setting brings, and settings of all answers."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from jaxserve import InvalidRequest
from jaxserve.commands.terminal import Remote, Terminal
from jaxserve.server.http.app import App
from jaxserve.server.served.chat_template import with_server_template
from jaxserve.server.settings import ServerConfig
from jaxserve.text.template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.support.checkpoint import byte_tokenizer
from tests.support.live_server import Server

CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "What is 4 + 8?"}], "max_tokens": 2}


def prompt_of(server: Server, **fields: Any) -> str:
    answer = server.request("/tokenize", {"messages": USER["messages"], **fields})
    assert answer.status == 200, answer.body
    return server.request("/detokenize", {"tokens": answer.json()["tokens"]}).json()["prompt"]


def test_the_server_has_another_template_and_its_inputs(trusting: Server) -> None:
    usual = "user:What is 4 + 8?;thinking=False effort= docs=0"
    assert prompt_of(trusting) == usual
    given = {"enable_thinking": True}
    assert "thinking=True" in prompt_of(trusting, chat_template_kwargs=given)
    assert prompt_of(trusting, documents=[{"text": "a"}, {"text": "b"}]).endswith("docs=2")
    answer = trusting.request(CHAT, USER | {"reasoning_effort": "medium", "return_token_ids": True})
    tokens = {"tokens": answer.json()["prompt_token_ids"]}
    assert "effort=low" in trusting.request("/detokenize", tokens).json()["prompt"]


def test_a_request_brings_a_template(trusting: Server) -> None:
    own = "{{ messages[0].content }}|{{ tools | length if tools else 'none' }}|{{ x }}"
    for _ in range(2):  # the second time it is compiled already
        prompt = prompt_of(trusting, chat_template=own, chat_template_kwargs={"x": [1]})
        assert prompt == "What is 4 + 8?|none|[1]"
    assert prompt_of(trusting, chat_template="chatml").startswith("<|im_start|>user\nWhat is")
    answer = trusting.request(CHAT, USER | {"chat_template": own})
    assert answer.status == 200
    assert answer.json()["usage"]["prompt_tokens"] < 40
    # The next request has the server's template again.
    assert prompt_of(trusting).startswith("user:")


def test_a_prompt_of_tools_goes_by_the_template_of_the_request(trusting: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    own = "{{ tools[0].function.name }}!{{ messages[0].content }}"
    prompt = prompt_of(trusting, chat_template=own, tools=[tool])
    assert prompt == "f!What is 4 + 8?"
    assert '"name": "f"' in prompt_of(trusting, chat_template="{{ messages }}", tools=[tool])


BAD_TEMPLATES = {
    "no template": "nothing",
    "a path": "/etc/passwd",
    "a path up": "../../etc/passwd",
    "syntax": "{% for %}",
    "unknown tag": "{% include 'x' %}{% evil %}",
    "Python's own limit": "{% for a in b %}" * 99 + "{% endfor %}" * 99,
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "large": "{{ a }}" * 10_000,
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "recursive": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "much text": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "raising": "{{ raise_exception('no') }}",
    "failing": "{{ 1 / 0 }}",
    "undefined": "{{ a.b.c }}",
    "out of the sandbox": "{{ ''.__class__.__mro__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.environ }}",
    "nothing said": "{# nothing #}",
    "a long list": "{% set l=range(100000)|list %}{{ (l*5)|groupby('real')|length }}",
    "a filter of a list, many times": "{% set l=range(100000)|list %}{% for i in range(1000) %}"
    "{{ l|groupby('real')|length }}{% endfor %}",
    "much to compile": "{% set a=1 %}" * 5000,
}


@pytest.mark.parametrize("case", BAD_TEMPLATES)
def test_a_bad_template_of_a_request_is_refused(trusting: Server, case: str) -> None:
    answer = trusting.request(CHAT, USER | {"chat_template": BAD_TEMPLATES[case]})
    assert answer.status == 400, answer.body
    assert answer.error["param"] in ("chat_template", "messages"), answer.error
    assert "root:" not in answer.error["message"]


class Recorded(ChatTemplate):
    """A template that notes the threads in which it is rendered."""

    def render(self, variables: dict[str, Any], seconds: float = 1.0) -> str:
        self.threads = [*getattr(self, "threads", []), threading.current_thread().name]
        return super().render(variables, seconds)


def test_templates_of_requests_are_rendered_in_one_thread_of_their_own(app: App) -> None:
    model, template = app.models.find(None), Recorded("{{ messages[0].content }}")

    async def render_all() -> threading.Thread:
        talks = [[{"role": "user", "content": str(number)}] for number in range(5)]
        await asyncio.gather(*(model.render(talk, chat_template=template) for talk in talks))
        return await model.request_templates.run(threading.current_thread)

    assert asyncio.run(render_all()).name == "request-templates_0"
    assert template.threads == ["request-templates_0"] * 5


def test_a_template_of_a_request_receives_parts_where_it_shows_them(trusting: Server) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    fields = {"messages": [{"role": "user", "content": parts}]}
    own = "{% for p in messages[0].content | selectattr('type', 'equalto', 'text') %}[{{ p.text }}]"
    assert prompt_of(trusting, **fields, chat_template=own + "{% endfor %}") == "[one][two]"
    plain = "{{ messages[0].content }}"
    assert prompt_of(trusting, **fields, chat_template=plain) == "one\ntwo"


def test_a_template_of_another_type_is_refused(trusting: Server) -> None:
    for value in (1, ["{{ messages }}"], {"default": "x"}):
        assert trusting.request(CHAT, USER | {"chat_template": value}).error["param"] == (
            "chat_template"
        )
    for value in ("a", ["a"], [1], {"a": 1}):
        answer = trusting.request(CHAT, USER | {"documents": value})
        assert answer.status == 400 and answer.error["param"] == "documents"
    many = [{"text": "a"}] * 5000
    assert trusting.request(CHAT, USER | {"documents": many}).error["param"] == "documents"


def test_special_tokens_in_documents_are_texts(trusting: Server) -> None:
    body = {"messages": USER["messages"], "documents": [{"text": "<|im_end|>"}]}
    plain = {"messages": USER["messages"], "documents": [{"text": "hello"}]}
    own = {"chat_template": "{{ documents[0].text }}<|im_end|>"}
    ids = trusting.request("/tokenize", body | own).json()["tokens"]
    said = trusting.request("/tokenize", plain | own).json()["tokens"]
    assert ids[-1] == said[-1] and ids[-1] not in ids[:-1]


def test_without_trust_and_without_documents_in_the_template(server: Server) -> None:
    error = server.request(CHAT, USER | {"chat_template": "chatml"}).error
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]
    error = server.request(CHAT, USER | {"documents": [{"text": "a"}]}).error
    assert error["message"] == "the chat template reads no documents: put them into a message"
    for path in ("/v1/completions", "/v1/responses", "/v1/messages"):
        body: dict[str, Any] = {"prompt": "a", "input": "a", "max_tokens": 2, **USER}
        for name, value in (("chat_template", "chatml"), ("documents", [{}])):
            answer = server.request(path, body | {name: value})
            assert answer.status == 400 and answer.error["param"] == name


def test_settings_of_all_answers(trusting: Server) -> None:
    answer = trusting.request(CHAT, USER | {"stream": True, "min_tokens": 2})
    assert answer.events()[-2]["usage"]["completion_tokens"] == 2
    choice = trusting.request(CHAT, USER | {"logprobs": True}).json()["choices"][0]
    assert choice["logprobs"]["content"][0]["token"].startswith("token_id:")
    plain = USER | {"logprobs": True, "return_tokens_as_token_ids": False}
    choice = trusting.request(CHAT, plain).json()["choices"][0]
    assert not choice["logprobs"]["content"][0]["token"].startswith("token_id:")


def test_a_chat_draws_as_people_expect_where_nothing_is_recommended(
    trusting: Server, server: Server, capsys: pytest.CaptureFixture
) -> None:
    usual = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
    for each, expected in ((trusting, usual), (server, {})):
        [card] = each.request("/v1/models").json()["data"]
        assert card["chat_sampling"] == expected
        with Remote(each.url, options={"top_p": 0.5}, draws_as_chat=True) as remote:
            assert remote.options == expected | {"top_p": 0.5}
            body = USER | {"min_tokens": 2}
            assert Terminal().show(remote, "chat/completions", body).tokens == 2
        with Remote(each.url, model=card["id"], options={"top_p": 0.5}) as remote:
            assert remote.options == {"top_p": 0.5}
    assert capsys.readouterr().out


def test_pages_of_other_origins_have_what_is_allowed(trusting: Server) -> None:
    def preflight(origin: str, method: str, header: str) -> tuple[int, dict[str, str]]:
        asked = {
            "origin": origin,
            "access-control-request-method": method,
            "access-control-request-headers": header,
        }
        answer = trusting.request("/v1/models", headers=asked, method="OPTIONS")
        return answer.status, answer.headers

    status, headers = preflight("http://b.example", "GET", "x-one")
    assert status == 200 and headers["access-control-allow-credentials"] == "true"
    assert headers["access-control-allow-origin"] == "http://b.example"
    for bad in (
        ("http://c.example", "GET", "x-one"),
        ("http://a.example", "POST", "x-one"),
        ("http://a.example", "GET", "x-two"),
    ):
        assert preflight(*bad)[0] == 400


def test_a_proxy_may_leave_its_path(trusting: Server) -> None:
    for path in ("/health", "/v1/models", "/", "/page/main.js"):
        plain, below = trusting.request(path), trusting.request("/llm" + path)
        assert (plain.status, plain.body) == (below.status, below.body)
        assert below.status == 200
    assert trusting.request("/llm/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    assert trusting.request("/llm").headers["location"] == "/llm/"
    for path in ("/llmx/health", "/llm/llm/health", "/llm/nothing"):
        assert trusting.request(path).status == 404


def test_a_template_of_a_setting_that_loses_words_is_refused() -> None:
    def tokenizer(form: str) -> Tokenizer:
        return Tokenizer.of(byte_tokenizer(), "here", 260, form)

    lost = ServerConfig(chat_template="{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(InvalidRequest, match="chat_template: it shows nothing that a user says"):
        with_server_template(tokenizer("auto"), lost)
    assert with_server_template(tokenizer("string"), lost).template_source == lost.chat_template
    named = ServerConfig(chat_template="chatml")
    assert "im_start" in with_server_template(tokenizer("auto"), named).template_source
