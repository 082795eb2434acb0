"""Messages and inputs of chat templates, as they come from Python and over HTTP."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.errors import InvalidRequest

MAX_ROLE_CHARS = 64
# Names that are no inputs of a caller's choice to a template: arguments of the rendering itself,
RENDERING_ARGUMENTS = frozenset(("messages", "chat_template", "tokenize", "seconds", "self"))
# inputs that every template receives,
COMMON_INPUTS = frozenset(("tools", "documents", "add_generation_prompt", "continue_final_message"))
# and, over HTTP, other arguments of Transformers' apply_chat_template besides.
RESERVED_INPUTS = (
    RENDERING_ARGUMENTS
    | COMMON_INPUTS
    | frozenset(
        "conversation add_special_tokens padding truncation max_length return_tensors return_dict "
        "tokenizer_kwargs return_assistant_tokens_mask".split()
    )
)
_TEXT = ("text", "input_text", "output_text")
# What a message may hold in place of content.
_BESIDES = ("tool_calls", "reasoning", "reasoning_content", "thinking")


class PartedText(str):
    """A text of several parts, joined by line breaks.

    Attributes:
        parts: the texts.
    """

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: Iterable[str]) -> str:
        """Return the text of parts; empty ones say nothing."""
        found = tuple(filter(None, parts))
        if len(found) < 2:
            return "".join(found)
        made = cls("\n".join(found))
        made.parts = found
        return made


def plain_message(message: Any) -> dict[str, Any]:
    """Return a message with its content as one text; its other fields stay.

    Content is text or a list of parts, {"type": "text", "text": ...}, which line breaks join. A
    user's must say something; any other role's may be an empty text, which tools and empty system
    prompts are. An assistant's may be missing beside calls or thoughts.

    Raises:
        InvalidRequest: no role, or content that is missing or no text.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise InvalidRequest("each message must be a dict with a role and content", "messages")
    if not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequest(f"a role must have 1 to {MAX_ROLE_CHARS} characters", "messages")
    content = message.get("content")
    besides = role == "assistant" and any(message.get(name) for name in _BESIDES)
    if content is None or content == []:
        if not besides:
            raise InvalidRequest(f"a message of role {role!r} needs content", "messages")
        content = ""
    text = _text(content)
    if not text and role == "user":
        raise InvalidRequest("the content of a user's message is empty", "messages")
    # Templates have the older name of the role.
    return {**message, "role": "system" if role == "developer" else role, "content": text}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise InvalidRequest(f"content must be text or a list of parts, got {kind}", "messages")
    return PartedText.of(map(_words, content))


def _words(part: Any) -> str:
    """Return what a part of a content says, a refusal's included."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest("a part of a content must be a dict with a type", "messages")
    words, kind = None, part.get("type")
    if kind in _TEXT:
        words = part.get("text")
    elif kind == "refusal":
        words = part.get("text") if part.get("refusal") is None else part["refusal"]
    if not isinstance(words, str):
        raise InvalidRequest(
            f"content of type {str(kind)[:40]!r} is not supported: only text is", "messages"
        )
    return words
