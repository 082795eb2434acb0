"""Chat templates of a checkpoint, which may have a second one for conversations with tools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text.template import ChatTemplate

# Tools to test templates that render only conversations with tools.
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
    }
]


def read_templates(
    tokenizer: Any, where: str, fit: Callable[[ChatTemplate, Any], ChatTemplate]
) -> dict[bool, ChatTemplate]:
    """Return the chat templates for conversations without tools (False) and with tools (True).

    Args:
        tokenizer: tokenizer of Transformers, or an object with the same methods.
        where: path that errors name.
        fit: function that sets the form of content that a template expects.

    Raises:
        CheckpointError: a template is invalid, does not end, or does not show user messages.
    """
    if tokenizer.chat_template is None:
        return {}
    sources: dict[bool, str] = {}
    for with_tools in (False, True):
        # Named templates without a default serve only one kind of conversation.
        with suppress(ValueError):
            sources[with_tools] = tokenizer.get_chat_template(tools=_TOOLS if with_tools else None)
    found: dict[bool, ChatTemplate] = {}
    try:
        for with_tools, source in sources.items():
            same = [template for template in found.values() if template.source == source]
            found[with_tools] = same[0] if same else ChatTemplate(source)
            if not same:
                fit(found[with_tools], _TOOLS if with_tools else None)
    except Exception as error:
        raise CheckpointError(f"{where}: the chat template is not usable: {error}") from error
    return found
