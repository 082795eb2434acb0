"""Calls of custom tools with a Lark grammar: raw text in place of arguments, up to the answer's
end.

A grammar for text inside a JSON string would need escaped terminals, and a lexer cannot separate
two terminals that both begin with a backslash. So the raw text takes the place of the arguments.
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

# Texts before and after the escaped raw text in the arguments that clients receive.
INPUT = ('{"input": "', '"}')


def escaped_input(text: str) -> str:
    """Return raw text escaped for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def takes_raw_text(form: CallFormat) -> bool:
    """Return whether calls of a format may contain raw text: each is one object between two
    markers.
    """
    body = form.body
    is_plain = isinstance(body, JsonCall) and not body.is_keyed and not body.number
    is_list = form.is_array or form.is_optional_mark or bool(form.section[0])
    return is_plain and not is_list and bool(form.close) and form.id_length is None


def _head(form: CallFormat, name: str) -> str:
    body = form.body
    assert isinstance(body, JsonCall)
    return f'{{"{body.name}": "{name}", "{body.arguments}": '


def input_rule(index: int, function: Function) -> str:
    """Return the Lark rule for the raw text of the function with number `index`."""
    return f"input{index}: %lark {{\n{function.lark}\n}}"


def raw_grammar(
    form: CallFormat,
    raw: Sequence[Function],
    others: str,
    mark: str,
    before: str,
) -> str:
    """Return a grammar that also allows one call with raw text at the end of an answer.

    Args:
        form: call format.
        raw: functions with raw text.
        others: grammar of other calls and of the answer, "" for raw calls only.
        mark: marker of a call as a Lark term.
        before: rule for the text before a call that includes its marker, "" if the marker comes
            first.
    """
    rules = [re.sub(r"(?m)^start:", "plain:", others)] if others else []
    for index, function in enumerate(raw):
        head = json.dumps(_head(form, function.name))
        # Other calls have the line break as a separate lexeme, so it must be one here too.
        rules.append(f'raw{index}: "\\n" {head} input{index}')
        rules.append(input_rule(index, function))
    calls = " | ".join(f"raw{index}" for index in range(len(raw)))
    rules.append(f"start: {'plain | ' if others else ''}{before or mark} ({calls})")
    return "\n".join(rules)


class RawCallReader:
    """Incremental reader of an answer that may end with a call with raw text.

    Args:
        form: call format.
        names: names of the tools that take raw text.
        calls: reader of the text before this call.
    """

    def __init__(self, form: CallFormat, names: Iterable[str], calls: CallReader) -> None:
        self._heads = {f"{form.mark}\n{_head(form, name)}": name for name in names}
        self._calls = calls
        self._waiting = ""
        self._num_calls = 0
        self._is_raw = False

    def feed(self, text: str, final: bool = False) -> list[Piece]:
        """Read more text. Return the new parts of the answer that are certain by now."""
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
        """Return the number of characters to hold back: white space and an incomplete head of a raw
        call.
        """
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
