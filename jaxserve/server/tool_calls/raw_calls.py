"""Calls of custom tools whose text has a Lark grammar: raw text, which ends with the answer.

A grammar for text within JSON would need its terminals escaped, and a lexer cannot separate two
terminals that both begin with a backslash. The raw text stands where a call has its arguments.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence

from jaxserve.server.tool_calls.bodies import JsonCall
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.grammar_parts import Function
from jaxserve.server.tool_calls.pieces import CallPart, Piece
from jaxserve.server.tool_calls.reader import CallReader

# The texts around the raw text in the arguments of a call.
INPUT = ('{"input": "', '"}')


def escaped_input(text: str) -> str:
    """Return raw text as it stands in the arguments of a call."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def takes_raw_text(form: CallFormat) -> bool:
    """Return whether calls may hold raw text: each is an object between two marks."""
    body = form.body
    is_plain = isinstance(body, JsonCall) and not body.is_keyed and not body.number
    is_list = form.is_array or form.is_optional_mark or bool(form.section[0])
    return is_plain and not is_list and bool(form.close) and form.id_length is None


def _head(form: CallFormat, name: str) -> str:
    """Return the text between a mark, its line end and the raw text."""
    body = form.body
    assert isinstance(body, JsonCall)
    return f'{{"{body.name}": "{name}", "{body.arguments}": '


def input_rule(index: int, function: Function) -> str:
    """Return the rule of the raw text of a function."""
    return f"input{index}: %lark {{\n{function.lark}\n}}"


def raw_grammar(
    form: CallFormat,
    raw: Sequence[Function],
    others: str,
    mark: str,
    before: str,
) -> str:
    """Return a grammar to which calls with raw text are added, one at the end of an answer.

    Args:
        form: of the calls.
        raw: functions with raw text.
        others: the grammar of other calls and of the answer; "" where there are none.
        mark: of the calls, in Lark.
        before: the rule of a text in front of a call, up to its mark.
    """
    rules = [re.sub(r"(?m)^start:", "plain:", others)] if others else []
    for index, function in enumerate(raw):
        head = json.dumps(_head(form, function.name))
        # The line end is a lexeme of its own in other calls, so it must be one here.
        rules.append(f'raw{index}: "\\n" {head} input{index}')
        rules.append(input_rule(index, function))
    calls = " | ".join(f"raw{index}" for index in range(len(raw)))
    rules.append(f"start: {'plain | ' if others else ''}{before or mark} ({calls})")
    return "\n".join(rules)


class RawCallReader:
    """Reader of an answer that may end with a call that has raw text.

    Args:
        form: of the calls.
        names: of the tools that take raw text.
        calls: reads the text before.
    """

    def __init__(self, form: CallFormat, names: Iterable[str], calls: CallReader) -> None:
        self._heads = {f"{form.mark}\n{_head(form, name)}": name for name in names}
        self._calls = calls
        self._waiting = ""
        self._num_calls = 0
        self._is_raw = False

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new pieces that are certain by now."""
        if self._is_raw:
            return [self._part(text, final)]
        self._waiting += text
        found = [(self._waiting.find(head), head) for head in self._heads if head in self._waiting]
        if not found:
            kept = 0 if final else self._num_open()
            place = len(self._waiting) - kept
            before, self._waiting = self._waiting[:place], self._waiting[place:]
            return self._before(before, final)
        place, head = min(found)
        pieces = self._before(self._waiting[:place].rstrip(), True)
        self._is_raw = True
        name, rest = self._heads[head], self._waiting[place + len(head) :]
        opened = CallPart(self._num_calls, INPUT[0], f"call_{secrets.token_hex(12)}", name)
        return [*pieces, opened, self._part(rest, final)]

    def _num_open(self) -> int:
        """Return how many of the last characters may be space and the beginning of a head."""
        text, size = self._waiting, 0
        for start in range(max(0, len(text) - max(map(len, self._heads))), len(text)):
            if any(head.startswith(text[start:]) for head in self._heads):
                size = len(text) - start
                break
        return len(text) - len(text[: len(text) - size].rstrip())

    def _before(self, text: str, final: bool) -> list[Piece]:
        pieces = [*self._calls.feed(text, final)]
        self._num_calls += sum(isinstance(p, CallPart) and p.id is not None for p in pieces)
        return pieces

    def _part(self, text: str, final: bool) -> CallPart:
        return CallPart(self._num_calls, escaped_input(text) + (INPUT[1] if final else ""))
