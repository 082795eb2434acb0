"""Contents in the form that a chat template shows: as text, or as a list of parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, CheckpointError, EngineConfig, InvalidRequest
from jaxserve.start.loaded import Loaded
from jaxserve.text import NAMED_TEMPLATES
from jaxserve.text.messages import plain_message
from jaxserve.text.template import ChatTemplate, find_template
from jaxserve.text.tokenizer import Tokenizer
from tests.support.checkpoint import byte_tokenizer, save_checkpoint

pytestmark = pytest.mark.usefixtures("quick_code")

SAID = {"role": "user", "content": [{"type": "text", "text": t} for t in ("one", "two")]}
LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>"
    "{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def each(body: str) -> str:
    """Return a template that writes each message's role, and a body."""
    return "{% for m in messages %}|{{ m.role }}:" + body + "{% endfor %}"


# Templates, and the text that each makes of SAID.
AS_PARTS = {
    "LLaVA's": (LLAVA, "USER: one two ASSISTANT:"),
    "a variable": (
        each("{% set c = m.content %}{% for p in c %}{{ p.text }},{% endfor %}"),
        "|user:one,two,",
    ),
    "a macro": (
        "{% macro show(c) %}{% for p in c %}{% if p.type == 'text' %}<{{ p['text'] }}>{% endif %}"
        "{% endfor %}{% endmacro %}" + each("{{ show(m.content) }}"),
        "|user:<one><two>",
    ),
    "map": (each("{{ m.content | map(attribute='text') | join('+') }}"), "|user:one+two"),
    "the first": (
        each("{% if m.content[0].type == 'text' %}{{ m.content[0].text }}{% endif %}"),
        "|user:one",
    ),
    "one that cannot read text": (each("{{ m.content[0]['text'].strip() }}"), "|user:one"),
    "one for system messages as text": (
        "{% if messages[0].role == 'system' %}{{ messages[0]['content'] | trim }}"
        "{% set messages = messages[1:] %}{% endif %}" + each("{{ m.content[0].text }}"),
        "|user:one",
    ),
}
AS_TEXT = {
    "plain": (each("{{ m.content }}"), "|user:one\ntwo"),
    "both": (
        each(
            "{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}"
        ),
        "|user:one\ntwo",
    ),
    "JSON": (each("{{ m.content | tojson }}"), '|user:"one\\ntwo"'),
    "Python": ("{{ messages }}", "[{'role': 'user', 'content': 'one\\ntwo'}]"),
    "one that needs a system message": (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}"
        + each("{{ m.content }}"),
        None,
    ),
    "one that takes users alone": (
        "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
        "one\ntwo",
    ),
    "one of other roles": (
        "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}",
        "",
    ),
    "one that refuses all": ("{{ raise_exception('no') }}", None),
    "one for another form of parts": ("{{ messages[0].content[0].source_lang.code }}", None),
}
LOST = {
    "the role alone": each(""),
    "another field": each("{{ m.text }}"),
    "other parts": each("{% for p in m.content %}{{ p.image }}{% endfor %}"),
    "the system message alone": (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    ),
}


def tokenizer_of(tmp_path: Path, source: str, form: str = "auto") -> Tokenizer:
    made = byte_tokenizer()
    made.chat_template = source
    made.save_pretrained(tmp_path)
    return Tokenizer(tmp_path, 260, form)


def prompt(tokenizer: Tokenizer, *messages: Any, **options: Any) -> str:
    ids = tokenizer.render_chat([plain_message(message) for message in messages], **options)
    return tokenizer.decode(ids, False)


@pytest.mark.parametrize("name", AS_PARTS)
def test_a_template_that_reads_parts_receives_parts(tmp_path: Path, name: str) -> None:
    source, shown = AS_PARTS[name]
    tokenizer = tokenizer_of(tmp_path, source)
    assert prompt(tokenizer, SAID) == shown
    assert "hello" in prompt(tokenizer, {"role": "user", "content": "hello"})
    system = {"role": "system", "content": "be kind"}
    if name != "one that cannot read text":
        both = prompt(tokenizer, system, SAID)
        assert "be kind" in both and "one" in both and "'text'" not in both


@pytest.mark.parametrize("name", AS_TEXT)
def test_any_other_template_receives_text(tmp_path: Path, name: str) -> None:
    source, shown = AS_TEXT[name]
    tokenizer = tokenizer_of(tmp_path, source)
    if shown is None:
        with pytest.raises(InvalidRequest, match="refuses the messages"):
            prompt(tokenizer, SAID)
    else:
        assert prompt(tokenizer, SAID) == shown


@pytest.mark.parametrize("name", LOST)
def test_a_template_that_loses_the_users_words_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="shows nothing that a user says"):
        tokenizer_of(tmp_path, LOST[name])
    for form in ("string", "openai"):
        prompt(tokenizer_of(tmp_path, LOST[name], form), SAID)


def test_a_form_may_be_forced(tmp_path: Path) -> None:
    both = AS_TEXT["both"][0]
    assert prompt(tokenizer_of(tmp_path, both, "openai"), SAID) == "|user:[one][two]"
    assert prompt(tokenizer_of(tmp_path, LLAVA, "string"), SAID) == "USER: ASSISTANT:"
    auto = tokenizer_of(tmp_path, both)
    assert prompt(auto.with_content_format("openai"), SAID) == "|user:[one][two]"
    assert prompt(auto, SAID) == "|user:one\ntwo"
    with pytest.raises(CheckpointError, match="not usable"):
        tokenizer_of(tmp_path, "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "string")
    with pytest.raises(ValueError, match="must be one of auto, string, openai; got 'text'"):
        EngineConfig(chat_template_content_format="text")  # type: ignore[arg-type]


def test_templates_for_tools_have_a_form_of_their_own(tmp_path: Path) -> None:
    sources = {"default": each("{{ m.content }}"), "tool_use": "{{ tools | length }}" + LLAVA}
    made = byte_tokenizer()
    made.chat_template = sources
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path, 260)
    assert prompt(tokenizer, SAID) == "|user:one\ntwo"
    assert prompt(tokenizer, SAID, tools=[{}]) == "1USER: one two ASSISTANT:"


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_shipped_templates_receive_text(tmp_path: Path, name: str) -> None:
    tokenizer = tokenizer_of(tmp_path, each("{{ m.content }}"))
    assert tokenizer.fit(find_template(name)).text_roles is None


def test_a_message_without_words_has_no_parts(tmp_path: Path) -> None:
    source = each("{{ m.content | length }}{% for p in m.content %}{{ p.text }}{% endfor %}")
    tokenizer = tokenizer_of(tmp_path, source)
    call = {"function": {"name": "f", "arguments": {}}}
    said = prompt(tokenizer, SAID, {"role": "assistant", "content": None, "tool_calls": [call]})
    assert said == "|user:2onetwo|assistant:0"


@pytest.mark.parametrize("form", ["string", "openai"])
def test_the_last_message_is_continued_in_either_form(tmp_path: Path, form: str) -> None:
    tokenizer = tokenizer_of(
        tmp_path, AS_TEXT["both"][0].replace("]", "").replace("[{{", "{{"), form
    )
    answer = {"role": "assistant", "content": "I am "}
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(tokenizer, SAID, answer, **options).endswith("|assistant:I am ")


def test_special_tokens_in_parts_are_texts(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, LLAVA)
    ids = tokenizer.render_chat([plain_message({"role": "user", "content": "<|end|>"})])
    assert tokenizer.token_id("<|end|>") not in ids
    assert "<|end|>" in tokenizer.decode(ids, False)


def test_parts_are_joined_by_line_breaks() -> None:
    assert plain_message(SAID)["content"] == "one\ntwo"
    parts = [{"type": "text", "text": text} for text in ("", "one", "", "two", "")]
    assert plain_message({"role": "user", "content": parts})["content"] == "one\ntwo"
    assert plain_message({"role": "user", "content": ["a", "b"]})["content"] == "a\nb"


def test_a_processors_template_alone_is_the_template(tmp_path: Path) -> None:
    made = byte_tokenizer()
    made.chat_template = None
    made.save_pretrained(tmp_path)
    path = tmp_path / "chat_template.json"
    for given in (LLAVA, [{"name": "default", "template": LLAVA}], {"default": LLAVA}):
        path.write_text(json.dumps({"chat_template": given}))
        assert prompt(Tokenizer(tmp_path, 260), SAID) == "USER: one two ASSISTANT:"
    (tmp_path / "added_tokens.json").write_text("{}")  # Transformers reads the tokenizer then
    assert prompt(Tokenizer(tmp_path, 260), SAID) == "USER: one two ASSISTANT:"
    for text in ("{", "[]", "{}", '{"chat_template": 1}', '{"chat_template": {"rag": "a"}}'):
        path.write_text(text)
        with pytest.raises(
            CheckpointError, match=r"chat_template\.json: there is no chat_template"
        ):
            Tokenizer(tmp_path, 260)
    # The tokenizer's own comes first.
    (tmp_path / "chat_template.jinja").write_text(each("{{ m.content }}"))
    assert prompt(Tokenizer(tmp_path, 260), SAID) == "|user:one\ntwo"


def test_a_chat_names_a_form(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text(AS_TEXT["both"][0])
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    with LLM(replace(loaded, tokenizer=Tokenizer(folder, loaded.limits.vocab_size))) as llm:

        def chat(**options: Any) -> str:
            [output] = llm.chat([SAID], use_tqdm=False, **options)
            return llm.get_tokenizer().decode(output.prompt_token_ids, False)

        assert chat() == chat(chat_template_content_format="auto") == "|user:one\ntwo"
        assert chat(chat_template_content_format="openai") == "|user:[one][two]"
        assert chat(chat_template=LLAVA) == "USER: one two ASSISTANT:"
        form = {"chat_template_content_format": "string"}
        assert chat(chat_template=LLAVA, **form) == "USER: ASSISTANT:"
        with pytest.raises(InvalidRequest, match="must be one of auto, string, openai"):
            chat(chat_template_content_format="vision")


def test_a_template_knows_its_names_without_being_parsed_again() -> None:
    template = ChatTemplate("{% for t in tools %}{{ t.name }}{% endfor %}")
    assert template.reads("tools") and not template.reads("documents")
