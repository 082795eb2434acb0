"""Grammars of answers with calls, in llguidance's Lark dialect. They enforce well-formed calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.server.tool_calls import call_rules
from jaxserve.server.tool_calls.call_bodies import KeyedCall, PythonCalls, XmlCall
from jaxserve.server.tool_calls.call_rules import Function, json_rule, spelled
from jaxserve.server.tool_calls.custom_tools import raw_head, takes_raw_text
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

MAX_CALLS = 16


@dataclass(frozen=True)
class CallGrammar:
    """Lark grammar of answers that call functions in one format of tool calls."""

    form: CallFormat
    functions: Sequence[Function]  # functions that may be called, at least one
    # Function that returns a marker as a Lark term, a string or a token.
    spell: Callable[[str], str]
    most: int = MAX_CALLS  # maximum number of calls in an answer
    may_answer: bool = False  # True if calls are optional and other text may surround them
    # JSON schema of an answer without calls, None for free text.
    answer_schema: dict[str, Any] | None = None
    # True if the answer may begin with thoughts, in formats whose grammar includes them.
    may_think: bool = True

    def text(self) -> str:
        """Return the source of the Lark grammar, whose rule `start` matches a whole answer.

        Raises:
            Unformable: the format of tool calls cannot express a schema exactly.
            InvalidRequest: the name of a property is not a valid Python keyword argument.
        """
        if not self.form.has_grammar:
            raise call_rules.Unformable
        if self.form.is_harmony:
            return self._harmony()
        if any(function.lark is not None for function in self.functions):
            return self._with_raw_text()
        if isinstance(self.form.body, XmlCall | KeyedCall):
            return self._tagged()
        return self._plain()

    def _times(self, text: str) -> str:
        # Terms for further calls. "" if only one call is allowed.
        return f" ({text}){{0,{self.most - 1}}}" if self.most > 1 else ""

    def _start(self, calls: str = "calls") -> Iterator[str]:
        if not self.may_answer:
            yield "start: calls"
        elif self.answer_schema is not None:
            yield f"start: {calls} | answer"
            yield f"answer: {json_rule(self.answer_schema)}"
        else:
            yield from self._free()

    def _plain(self) -> str:
        """Return a Lark grammar of answers with calls as JSON, as a name with JSON, or in Python
        syntax.
        """
        form = self.form
        if form.is_python:
            rules = list(call_rules.python_rules(self.functions))
        else:
            rules = list(call_rules.object_rules(form, self.functions, self.spell))
        listed = "call" + self._times(f"{self._between()} call")
        opener = self.spell(form.section[0] or form.mark)
        if form.is_optional_mark:
            rules.append("calls: " + (f'"[" {listed} "]"' if form.is_array else listed))
        else:
            rules.append(f"after: {self._after(listed)}")
            again = "" if self._is_list else self._times(f'"\\n" {opener} after')
            rules.append(f"calls: {opener} after{again}")
        # An answer may begin like a call, so the otherwise optional marker is required.
        first = f"{opener} calls" if form.is_optional_mark else "calls"
        return "\n".join([*rules, *self._start(first)])

    @property
    def _is_list(self) -> bool:
        return self.form.is_array or self.form.is_python or bool(self.form.section[0])

    def _between(self) -> str:
        form = self.form
        if form.is_python and not form.is_optional_mark and not form.is_array:
            return '", "' if form.body == PythonCalls() else r'"\n"'
        return json.dumps(f"{form.separators[:1]} ")

    def _after(self, listed: str) -> str:
        """Return the Lark terms for the text after the first marker: calls, separators and closing
        texts.

        Args:
            listed: terms for one call or several calls with separators.
        """
        form, spell = self.form, self.spell
        close = f" {spell(form.close)}" if form.close else ""
        if form.section[0]:
            mark, end = spell(form.mark), form.section[1]
            again = self._times(f"{mark} call{close}") if end else ""
            return f"{mark} call{close}{again}" + (f" {spell(end)}" if end else "")
        if form.is_python and not form.is_array and form.body != PythonCalls():
            return listed + close
        if self._is_list:
            return f'"[" {listed} "]"{close}'
        return rf'"\n" call "\n"{close}' if close else r'"\n" call'

    def _tagged(self) -> str:
        """Return a Lark grammar of answers with tool calls that have a tag per argument.

        Line breaks between tags are as in the training data of the models.

        Raises:
            Unformable: free text must end at a marker that is only partly a token, or the format
                cannot express a schema exactly.
        """
        form, spell = self.form, self.spell
        before, behind = form.section
        parts = spelled(form.starts[0], spell)
        if self.may_answer and len(parts) > 1 and any(part.startswith("<[") for part in parts):
            # Free text can end at one token, or at a string, but not at a mixture.
            raise call_rules.Unformable
        mark = " ".join(spelled(form.mark, spell))
        rules = [*call_rules.tagged_rules(form, self.functions, spell), r"NL: /\n/"]
        call = f"call NL? {spell(form.close)}" if form.close else "call"
        again = self._times(f"NL? {mark} {call}")
        if not before:
            opener, inside = mark, call
        else:
            opener, closer = (" ".join(spelled(text, spell)) for text in (before, behind))
            inside = f"NL? {mark} {call}{'' if form.has_own_section else again} NL? {closer}"
        rules.append(f"after: {inside}")
        repeats = form.has_own_section or not before
        more = self._times(f"NL? {opener} after") if repeats else ""
        rules.append(f"calls: {opener} after{more}")
        return "\n".join([*rules, *self._start()])

    def _free(self) -> Iterator[str]:
        """Yield the Lark rules of answers with free text between tool calls, the rule `start`
        first.
        """
        form = self.form
        opener = form.section[0] or form.mark
        mark = self.spell(opener)
        # However it is tokenized, a marker in free text would be read as the beginning of a call.
        no_mark = rf"~/(.|\n)*{call_rules.escaped(opener)}(.|\n)*/"
        if form.is_optional_mark:
            # Text that begins like a call must be a call.
            opening = r"\[" if form.is_array else r"\{"
            close = f" {self.spell(form.close)}?" if form.close else ""
            yield f"start: calls | {mark} calls{close} | ANSWER"
            yield rf"ANSWER: /\s*([^\s{opening}](.|\n)*)?/ & {no_mark}"
            return
        if mark.startswith("<"):
            yield f"start: ANSWER ({mark} after ANSWER){{0,{self.most}}}"
        else:
            yield f"start: (before after){{0,{self.most}}} ANSWER"
            yield rf"before[lazy]: /(.|\n)*{call_rules.escaped(opener)}/"
        yield rf"ANSWER: /(.|\n)*/ & {no_mark}"

    def _with_raw_text(self) -> str:
        """Return a Lark grammar that also allows one call with raw text as its input, at the end of
        the answer.

        Raises:
            Unformable: the format of tool calls does not allow raw text.
        """
        if not takes_raw_text(self.form):
            raise call_rules.Unformable
        plain = [function for function in self.functions if function.lark is None]
        raw = [function for function in self.functions if function.lark is not None]
        # The text before a call with its marker, or the marker alone.
        before = mark = self.spell(self.form.mark)
        if self.may_answer and self.answer_schema is None:
            before = f"ANSWER {mark}" if mark.startswith("<") else "before"
        others = ""  # grammar of other calls and of the answer
        if plain:
            others = replace(self, functions=plain).text()
        elif self.answer_schema is not None:
            others = f"start: answer\nanswer: {json_rule(self.answer_schema)}"
        elif self.may_answer:
            rules = (rule for rule in self._free() if not rule.startswith("start:"))
            others = "\n".join(["start: ANSWER", *rules])
        rules = [re.sub(r"(?m)^start:", "plain:", others)] if others else []
        for index, function in enumerate(raw):
            head = json.dumps(raw_head(self.form, function.name))
            # Other calls have the line break as a separate lexeme, so it must be one here too.
            rules.append(f'raw{index}: "\\n" {head} input{index}')
            rules.append(_input_rule(index, function))
        calls = " | ".join(f"raw{index}" for index in range(len(raw)))
        rules.append(f"start: {'plain | ' if others else ''}{before} ({calls})")
        return "\n".join(rules)

    def _harmony(self) -> str:
        """Return a Lark grammar of the messages in an answer of gpt-oss.

        If the model may think, an answer may begin with thoughts. A tool call or, if allowed,
        answer text follows. Where answer text is allowed, a preamble may precede the call.
        """
        spell, end = self.spell, self.spell(END)
        is_token = end.startswith("<")
        free = "FREE" if is_token else "until_end"
        turn = f'{"" if not is_token else end} {spell(START)} "assistant"'
        message = spell(MESSAGE)
        names = " | ".join(f"call{index}" for index in range(len(self.functions)))
        rules = [
            f'call: {spell(CHANNEL)} "commentary to=functions." ({names})',
            rf"FREE: /(.|\n)*/ & ~/(.|\n)*{call_rules.escaped(END)}(.|\n)*/",
            rf"until_end[lazy]: /(.|\n)*{call_rules.escaped(END)}/",
            f'thoughts: {spell(CHANNEL)} "analysis" {message} {free} {turn}',
            f'preamble: {spell(CHANNEL)} "commentary" {message} {free} {turn}',
        ]
        for index, function in enumerate(self.functions):
            if function.lark is not None:
                rules.append(f"call{index}: {json.dumps(function.name)} {message} input{index}")
                rules.append(_input_rule(index, function))
                continue
            name = json.dumps(function.name + " ")
            rules.append(f'call{index}: {name} {spell(CONSTRAIN)} "json" {message} args{index}')
            schema = call_rules.arguments_schema(function)
            rules.append(f"args{index}: {json_rule(schema)}")
        before = "thoughts? " if self.may_think else ""
        if not self.may_answer:
            return "\n".join([*rules, f"start: {before}call"])
        final = f'{spell(CHANNEL)} "final'
        if self.answer_schema is None:
            rules.append(f'answer: {final}" {message} FREE')
        else:
            rules.append(f'answer: {final} " {spell(CONSTRAIN)} "json" {message} json')
            rules.append(f"json: {json_rule(self.answer_schema)}")
        return "\n".join([*rules, f"start: {before}(preamble? call | answer)"])


def _input_rule(index: int, function: Function) -> str:
    return f"input{index}: %lark {{\n{function.lark}\n}}"
