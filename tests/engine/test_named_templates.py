"""Chat templates by name, each against its format's own documentation; files, and texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, InvalidRequest
from jaxserve.commands.cli import main
from jaxserve.text import NAMED_TEMPLATES
from jaxserve.text.template import MAX_SOURCE_CHARS, find_template
from tests.support.checkpoint import save_checkpoint

pytestmark = pytest.mark.usefixtures("quick_code")

SYSTEM = {"role": "system", "content": "Be kind."}
HELLO = {"role": "user", "content": "Hello"}
HI = {"role": "assistant", "content": "Hi there"}
WHO = {"role": "user", "content": "Who are you?"}
TALK: list[Any] = [SYSTEM, HELLO, HI, WHO]
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
)
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
# Name: where the format is documented, the text of TALK, and the text of TALK without its system
# message. `<s>` and `</s>` are the tokenizer's own first and last tokens.
FORMATS: dict[str, tuple[str, str, str]] = {
    "chatml": (
        "OpenAI's chatml.md, and the template in Transformers' chat_templating documentation",
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n"
        "<|im_start|>assistant\n",
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi there<|im_end|>\n"
        "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama2": (
        "huggingface.co/blog/llama2, how to prompt Llama 2",
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHello [/INST] Hi there </s>"
        "<s>[INST] Who are you? [/INST]",
        "<s>[INST] Hello [/INST] Hi there </s><s>[INST] Who are you? [/INST]",
    ),
    "llama3": (
        "Meta's prompt formats of Llama 3",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<s><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho are you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": (
        "the model card of Mistral-7B-Instruct-v0.2, and Transformers' chat_templating page",
        "<s>[INST] Be kind.\n\nHello [/INST]Hi there</s> [INST] Who are you? [/INST]",
        "<s>[INST] Hello [/INST]Hi there</s> [INST] Who are you? [/INST]",
    ),
    "alpaca": (
        "the README of tatsu-lab/stanford_alpaca",
        "Be kind.\n\n### Instruction:\nHello\n\n### Response:\nHi there</s>\n\n"
        "### Instruction:\nWho are you?\n\n### Response:\n",
        f"{ALPACA}### Instruction:\nHello\n\n### Response:\nHi there</s>\n\n"
        "### Instruction:\nWho are you?\n\n### Response:\n",
    ),
    "vicuna": (
        "FastChat's conversation vicuna_v1.1, whose separators are a blank and the last token",
        "<s>Be kind. USER: Hello ASSISTANT: Hi there</s>USER: Who are you? ASSISTANT:",
        f"<s>{VICUNA}USER: Hello ASSISTANT: Hi there</s>USER: Who are you? ASSISTANT:",
    ),
    "zephyr": (
        "the model card of zephyr-7b-beta",
        "<|system|>\nBe kind.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi there</s>\n"
        "<|user|>\nWho are you?</s>\n<|assistant|>\n",
        "<|user|>\nHello</s>\n<|assistant|>\nHi there</s>\n<|user|>\nWho are you?</s>\n"
        "<|assistant|>\n",
    ),
    "gemma": (
        "ai.google.dev/gemma/docs/formatting; its system instructions begin the user's turn",
        "<s><start_of_turn>user\nBe kind.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi there<end_of_turn>\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n",
        "<s><start_of_turn>user\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi there<end_of_turn>\n"
        "<start_of_turn>user\nWho are you?<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi3": (
        "the model card of Phi-3-mini-4k-instruct",
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n"
        "<|user|>\nWho are you?<|end|>\n<|assistant|>\n",
        "<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n<|user|>\nWho are you?<|end|>\n"
        "<|assistant|>\n",
    ),
}


def render(name: str, messages: list[Any], **more: Any) -> str:
    inputs = {"messages": messages, "add_generation_prompt": True, "tools": None, **more}
    return find_template(name).render(inputs)


def test_all_shipped_templates_are_compared() -> None:
    assert set(FORMATS) == set(NAMED_TEMPLATES)


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_template_writes_its_format(name: str) -> None:
    _, whole, without_system = FORMATS[name]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert render(name, TALK, **tokens) == whole
    assert render(name, TALK[1:], **tokens) == without_system
    # An answer to be continued ends the prompt: no header of an assistant's next turn follows it.
    answered = render(name, TALK[1:3], add_generation_prompt=False, **tokens)
    assert without_system.startswith(answered.rstrip())


@pytest.mark.parametrize("name", FORMATS)
def test_a_tokenizer_without_special_tokens_will_do(name: str) -> None:
    expected = FORMATS[name][1].replace("<s>", "").replace("</s>", "")
    assert render(name, TALK) == expected


@pytest.mark.parametrize("name", ["llama2", "mistral", "alpaca", "vicuna", "gemma"])
def test_a_role_that_a_format_has_not_is_refused(name: str) -> None:
    with pytest.raises(Exception, match=f"{name} has no role tool"):
        render(name, [HELLO, {"role": "tool", "content": "4"}])


def test_files_names_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    path.write_text("file {{ messages | length }}")
    assert render(str(path), TALK) == "file 4"
    assert find_template(path).source == path.read_text()
    assert render("text {{ messages | length }}", TALK) == "text 4"
    assert find_template("chatml", may_read=False).source.startswith("{#- ChatML")
    for given in (str(path), "no/such", "llama9", ""):
        with pytest.raises(InvalidRequest, match="is neither a template nor a file, or a name of"):
            find_template(given, may_read=False)
    with pytest.raises(InvalidRequest, match="is neither a template nor a file, or a name of"):
        find_template(tmp_path / "other")
    with pytest.raises(InvalidRequest, match="is neither a template"):
        find_template("x" * 100_000)


def test_files_that_are_no_templates(tmp_path: Path) -> None:
    path = tmp_path / "a.jinja"
    for data, message in (
        (b"\xff", "is no text in UTF-8"),
        (b"{% for %}", f"chat_template {path}: Expected"),
        (b" " * (MAX_SOURCE_CHARS + 1), "has more than 1048576 characters"),
    ):
        path.write_bytes(data)
        with pytest.raises(InvalidRequest, match=message) as refused:
            find_template(str(path))
        assert refused.value.parameter == "chat_template"


@pytest.mark.own_engine
def test_a_base_model_chats_through_a_template_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = save_checkpoint(tmp_path)
    (folder / "chat_template.jinja").unlink()
    small: dict[str, Any] = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
        "decode_sizes": (2,),
        "token_sizes": (16,),
        "max_model_len": 256,
    }
    with LLM(folder, **small) as llm:
        with pytest.raises(InvalidRequest, match=r"LLM\.generate, or chat_template: a file"):
            llm.chat([HELLO])
        for name in ("chatml", "phi3"):
            [output] = llm.chat([HELLO], chat_template=name, use_tqdm=False)
            text = llm.get_tokenizer().decode(output.prompt_token_ids, False)
            assert text == render(name, [HELLO])
        given = {"chat_template": "{{ x }}", "chat_template_kwargs": {"x": "hey"}}
        [output] = llm.chat([HELLO], use_tqdm=False, **given)
        assert llm.get_tokenizer().decode(output.prompt_token_ids) == "hey"
        with pytest.raises(InvalidRequest, match="chat_template: Expected"):
            llm.chat([HELLO], chat_template="{% for %}")
        with pytest.raises(InvalidRequest, match="stopped"):
            llm.chat([HELLO], chat_template="{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}")
        with pytest.raises(InvalidRequest, match="the chat template knows no 'y'"):
            llm.chat([HELLO], chat_template="{{ x }}", y=1)
        with pytest.raises(InvalidRequest, match="the chat template knows no 'documents'"):
            llm.chat([HELLO], chat_template="chatml", documents=[{"text": "a"}])
    flags = [f"--{n.replace('_', '-')}={str(v).strip('(,)')}" for n, v in small.items()]
    words = ["generate", "--model", str(folder), *flags, "--json", "--max-tokens", "2", "hi"]
    assert main([*words, "--chat-template", "chatml", "--chat"]) == 0
    assert main([*words, "--chat-template", "none such"]) == 2
    assert "--chat-template: 'none such' is neither" in capsys.readouterr().err
