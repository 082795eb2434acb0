"""Chat templates of a checkpoint, which may have a second one for conversations with tools."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text.template import ChatTemplate

# Tools for templates that render conversations with tools alone.
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
    }
]


def read_templates(
    tokenizer: Any, where: str, fit: Callable[[ChatTemplate, Any], ChatTemplate]
) -> dict[bool, ChatTemplate]:
    """Return the chat template without tools and with them, which may be another.

    Args:
        tokenizer: of Transformers, or like them.
        where: it was read from.
        fit: finds the form in which a template receives content with such tools.

    Raises:
        CheckpointError: a template has no meaning, does not end, or shows no user's words.
    """
    if tokenizer.chat_template is None:
        return {}
    sources: dict[bool, str] = {}
    for with_tools in (False, True):
        # Several named templates without a default serve only conversations of their kind.
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
