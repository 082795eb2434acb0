"""Models that one server has beside each other, each with something of its own in its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken

from jaxserve.server.api.infill import MARKS
from jaxserve.settings.config import bundled_model
from tests.support.checkpoint import CHAT_TEMPLATE, SPECIAL, byte_tokenizer, save_checkpoint

CODER_MARKS = (*MARKS[0][:3], "<|fim_pad|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
# Says how to call, so that the format is known, and shows the tools.
CALL_TEMPLATE = (
    "{% if tools %}{{ '<|user|>' }}{% for t in tools %}{{ t.function.name }}{% endfor %}"
    "{{ '<tool_call>' }}{% endif %}" + CHAT_TEMPLATE
)
CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>")
START, CHANNEL, MESSAGE, CALL, RETURN = range(260, 265)
END = SPECIAL.index("<|end|>")
# Names the channels and the recipient, so that the format is known, and shows the tools.
CHANNEL_TEMPLATE = (
    "{% if tools %}{{ '<|channel|>analysis to=functions.' }}{% for t in tools %}"
    "{{ t.function.name + t.function.description }}{% endfor %}{% endif %}" + CHAT_TEMPLATE
)
# It shows efforts and thoughts, and takes a system message at the beginning alone.
STRANGE_TEMPLATE = """{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system') }}{%- endif -%}
[{{ m.role }}] {{ m.content }}
{% endfor -%}
[{{ reasoning_effort }} {{ enable_thinking }} {{ style }}]"""


def model_with(folder: Path, *texts: str) -> list[int]:
    """Save the bundled model with these texts in place of its last tokens. Return their ids."""
    shutil.copytree(bundled_model(), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    lost = sorted(vocab, key=vocab.__getitem__)[-len(texts) :]
    ids = [vocab.pop(piece) for piece in lost]
    tokenizer["model"]["merges"] = [
        merge
        for merge in tokenizer["model"]["merges"]
        if "".join(merge if isinstance(merge, list) else merge.split(" ")) not in lost
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, text in zip(ids, texts, strict=True):
        token = {"id": number, "content": text, "special": True, **flags}
        tokenizer["added_tokens"].append(token)
    begin = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    return ids


def write_coder(folder: Path) -> list[int]:
    """Save a model with marks for gaps. Return the ids of these marks."""
    return model_with(folder, *CODER_MARKS)


def write_marked(folder: Path) -> None:
    """Save random weights, with the opening mark as an added token and the closing one special."""
    tokenizer = byte_tokenizer()
    for mark, special in zip(CALL_MARKS, (False, True), strict=True):
        tokenizer.add_tokens([AddedToken(mark, special=special, normalized=False)])
    tokenizer.chat_template = CALL_TEMPLATE
    save_checkpoint(folder, tokenizer=tokenizer, positions=1024)


def write_channels(folder: Path) -> None:
    """Save random weights, and the tokens of gpt-oss's channels."""
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(mark, special=True, normalized=False) for mark in CHANNEL_MARKS]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.chat_template, tokenizer.eos_token = CHANNEL_TEMPLATE, CHANNEL_MARKS[-1]
    save_checkpoint(folder, tokenizer=tokenizer, positions=1024, end=RETURN)


def write_strange(folder: Path) -> None:
    """Save the bundled model with a template that shows its inputs."""
    shutil.copytree(bundled_model(), folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("chat_template", None)
    path.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(STRANGE_TEMPLATE)


def write_short(folder: Path) -> None:
    """Save the bundled model with a length of its own."""
    shutil.copytree(bundled_model(), folder)
    (folder / "generation_config.json").write_text(json.dumps({"max_new_tokens": 2}))
