"""Readers of answers that were generated without a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.server.tool_calls.answer import AnswerReader, readers_of
from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS, ThoughtState
from jaxserve.server.tool_calls.tools import CallUse


def answer_reader(
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    tools: Sequence[dict[str, Any]],
    start: ThoughtState,
    parallel: bool = True,
) -> AnswerReader:
    """Return a reader of an answer that was generated without a grammar.

    Args:
        tool_call_parser: name of the call format, None for answers without calls.
        reasoning_parser: name of the thinking format, None for answers without thoughts.

    Raises:
        KeyError: there is no format of this name.
    """
    use = None
    if tool_call_parser is not None:
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        use = CallUse(CALL_FORMATS[tool_call_parser], schemas, False, parallel)
    thinking = None if reasoning_parser is None else THINKING_FORMATS[reasoning_parser]
    return readers_of(use, thinking, start)
