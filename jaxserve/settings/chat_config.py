"""ChatConfig: the settings of conversations, under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from jaxserve.errors import InvalidRequest

ContentFormat = Literal["auto", "string", "openai"]


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Settings of conversations.

    Args:
        chat_template_content_format: how the chat template receives content: "string" as text,
            "openai" as a list of parts, "auto" in the form that it shows.
    """

    chat_template_content_format: ContentFormat = "auto"


def check_chat(config: Any) -> None:
    """Check the settings of conversations in an `EngineConfig`.

    Raises:
        InvalidRequest: naming the field and the allowed values.
    """
    check_content_format(config.chat_template_content_format)


def check_content_format(given: Any) -> None:
    """Check a form of content that a setting or an argument names.

    Raises:
        InvalidRequest: it is none.
    """
    if given not in get_args(ContentFormat):
        names = ", ".join(get_args(ContentFormat))
        raise InvalidRequest(
            f"chat_template_content_format must be one of {names}; got {str(given)[:60]!r}",
            "chat_template_content_format",
        )
