"""Grammars of answers with calls, in llguidance's Lark dialect. They enforce well-formed calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.server.tool_calls import call_rules
from jaxserve.server.tool_calls.call_bodies import KeyedCall, PythonCalls, XmlCall
from jaxserve.server.tool_calls.custom_tools import raw_head, takes_raw_text
from jaxserve.server.tool_calls.formats import CallFormat
from jaxserve.server.tool_calls.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

MAX_CALLS = 16


def grammar_of_calls(
    form: CallFormat,
    functions: Sequence[call_rules.Function],
    spell: Callable[[str], str],
    *,
    most: int = MAX_CALLS,
    may_answer: bool = False,
    answer_schema: dict[str, Any] | None = None,
    may_think: bool = True,
) -> str:
    """Return a Lark grammar of answers that call some functions.

    Args:
        functions: functions that may be called, at least one.
        spell: function that returns a marker as a Lark term, a string or a token.
        most: maximum number of calls in an answer.
        may_answer: True if calls are optional and other text may surround them.
        answer_schema: JSON schema of an answer without calls, None for free text.
        may_think: True if the answer may begin with thoughts, in formats whose grammar includes
            them.

    Raises:
        Unformable: the format cannot express a schema exactly.
        InvalidRequest: the name of a property is not a valid Python keyword argument.
    """
    if not form.has_grammar:
        raise call_rules.Unformable
    if form.is_harmony:
        return _harmony_grammar(functions, spell, may_answer, answer_schema, may_think)
    if any(function.lark is not None for function in functions):
        return _raw_grammar(form, functions, spell, most, may_answer, answer_schema)
    if isinstance(form.body, XmlCall | KeyedCall):
        return _tagged_grammar(form, functions, spell, most, may_answer, answer_schema)
    rules = list(
        call_rules.python_rules(functions)
        if form.is_python
        else call_rules.object_rules(form, functions, spell)
    )
    listed = "call"
    if most > 1:
        listed += f" ({_between(form)} call){{0,{most - 1}}}"
    opener = spell(form.section[0] or form.mark)
    if form.is_optional_mark:
        rules.append("calls: " + (f'"[" {listed} "]"' if form.is_array else listed))
    else:
        rules.append(f"after: {_after(form, spell, listed, most)}")
        again = "" if _is_list(form) or most == 1 else f' ("\\n" {opener} after){{0,{most - 1}}}'
        rules.append(f"calls: {opener} after{again}")
    if not may_answer:
        rules.append("start: calls")
    elif answer_schema is not None:
        # An answer may begin like a call, so the otherwise optional marker is required.
        first = f"{opener} calls" if form.is_optional_mark else "calls"
        rules += [f"start: {first} | answer", f"answer: {call_rules.json_rule(answer_schema)}"]
    else:
        rules += _free_rules(form, spell, most)
    return "\n".join(rules)


def _raw_grammar(
    form: CallFormat,
    functions: Sequence[call_rules.Function],
    spell: Callable[[str], str],
    most: int,
    may_answer: bool,
    answer_schema: dict[str, Any] | None,
) -> str:
    """Return a grammar of calls of which some contain raw text."""
    if not takes_raw_text(form):
        raise call_rules.Unformable
    plain = [function for function in functions if function.lark is None]
    raw = [function for function in functions if function.lark is not None]
    mark, before, others = spell(form.mark), "", ""
    if may_answer and answer_schema is None:
        before = f"ANSWER {mark}" if mark.startswith("<") else "before"
    if plain:
        others = grammar_of_calls(
            form, plain, spell, most=most, may_answer=may_answer, answer_schema=answer_schema
        )
    elif answer_schema is not None:
        others = f"start: answer\nanswer: {call_rules.json_rule(answer_schema)}"
    elif may_answer:
        rules = _free_rules(form, spell, most)
        others = "\n".join(["start: ANSWER", *(r for r in rules if not r.startswith("start:"))])
    return raw_grammar(form, raw, others, mark, before)


def _tagged_grammar(
    form: CallFormat,
    functions: Sequence[call_rules.Function],
    spell: Callable[[str], str],
    most: int,
    may_answer: bool,
    answer_schema: dict[str, Any] | None,
) -> str:
    """Return a grammar of tagged calls. Line breaks between tags are as in the model's training."""
    before, behind = form.section
    parts = call_rules.spelled(form.starts[0], spell)
    if may_answer and len(parts) > 1 and any(part.startswith("<[") for part in parts):
        # Free text can end at one token, or at a string, but not at a mixture.
        raise call_rules.Unformable
    mark = " ".join(call_rules.spelled(form.mark, spell))
    rules = [*call_rules.tagged_rules(form, functions, spell), r"NL: /\n/"]
    call = f"call NL? {spell(form.close)}" if form.close else "call"
    again = f" (NL? {mark} {call}){{0,{most - 1}}}" if most > 1 else ""
    if not before:
        opener, inside = mark, call
    else:
        opener, closer = (" ".join(call_rules.spelled(text, spell)) for text in (before, behind))
        inside = f"NL? {mark} {call}{'' if form.has_own_section else again} NL? {closer}"
    rules.append(f"after: {inside}")
    repeats = form.has_own_section or not before
    more = f" (NL? {opener} after){{0,{most - 1}}}" if repeats and most > 1 else ""
    rules.append(f"calls: {opener} after{more}")
    if not may_answer:
        rules.append("start: calls")
    elif answer_schema is not None:
        rules += ["start: calls | answer", f"answer: {call_rules.json_rule(answer_schema)}"]
    else:
        rules += _free_rules(form, spell, most)
    return "\n".join(rules)


def _is_list(form: CallFormat) -> bool:
    return form.is_array or form.is_python or bool(form.section[0])


def _between(form: CallFormat) -> str:
    if form.is_python and not form.is_optional_mark and not form.is_array:
        return '", "' if form.body == PythonCalls() else r'"\n"'
    return json.dumps(f"{form.separators[:1]} ")


def _after(form: CallFormat, spell: Callable[[str], str], listed: str, most: int) -> str:
    """Return the right side of the rule for the text after a first marker.

    It consists of calls, their separators and their closing texts.
    """
    close = f" {spell(form.close)}" if form.close else ""
    if form.section[0]:
        mark, end = spell(form.mark), form.section[1]
        again = f" ({mark} call{close}){{0,{most - 1}}}" if end and most > 1 else ""
        return f"{mark} call{close}{again}" + (f" {spell(end)}" if end else "")
    if form.is_python and not form.is_array and form.body != PythonCalls():
        return listed + close
    if _is_list(form):
        return f'"[" {listed} "]"{close}'
    return rf'"\n" call "\n"{close}' if close else r'"\n" call'


def _free_rules(form: CallFormat, spell: Callable[[str], str], most: int) -> Iterator[str]:
    """Yield the rules of answers with free text between calls, the rule `start` first."""
    opener = form.section[0] or form.mark
    mark = spell(opener)
    # However it is tokenized, a marker within free text would be read as the beginning of a call.
    no_mark = rf"~/(.|\n)*{call_rules.escaped(opener)}(.|\n)*/"
    if form.is_optional_mark:
        # Text that begins like a call must be a call.
        opening = r"\[" if form.is_array else r"\{"
        close = f" {spell(form.close)}?" if form.close else ""
        yield f"start: calls | {mark} calls{close} | ANSWER"
        yield rf"ANSWER: /\s*([^\s{opening}](.|\n)*)?/ & {no_mark}"
        return
    if mark.startswith("<"):
        yield f"start: ANSWER ({mark} after ANSWER){{0,{most}}}"
    else:
        yield f"start: (before after){{0,{most}}} ANSWER"
        yield rf"before[lazy]: /(.|\n)*{call_rules.escaped(opener)}/"
    yield rf"ANSWER: /(.|\n)*/ & {no_mark}"


def _harmony_grammar(
    functions: Sequence[call_rules.Function],
    spell: Callable[[str], str],
    may_answer: bool,
    answer_schema: dict[str, Any] | None,
    may_think: bool,
) -> str:
    """Return a grammar of gpt-oss's messages: thoughts, then a call or an answer."""
    end = spell(END)
    is_token = end.startswith("<")
    free = "FREE" if is_token else "until_end"
    turn = f'{"" if not is_token else end} {spell(START)} "assistant"'
    message = spell(MESSAGE)
    names = " | ".join(f"call{index}" for index in range(len(functions)))
    rules = [
        f'call: {spell(CHANNEL)} "commentary to=functions." ({names})',
        rf"FREE: /(.|\n)*/ & ~/(.|\n)*{call_rules.escaped(END)}(.|\n)*/",
        rf"until_end[lazy]: /(.|\n)*{call_rules.escaped(END)}/",
        f'thoughts: {spell(CHANNEL)} "analysis" {message} {free} {turn}',
        f'preamble: {spell(CHANNEL)} "commentary" {message} {free} {turn}',
    ]
    for index, function in enumerate(functions):
        if function.lark is not None:
            rules.append(f"call{index}: {json.dumps(function.name)} {message} input{index}")
            rules.append(input_rule(index, function))
            continue
        name = json.dumps(function.name + " ")
        rules.append(f'call{index}: {name} {spell(CONSTRAIN)} "json" {message} args{index}')
        rules.append(f"args{index}: {call_rules.json_rule(call_rules.arguments_schema(function))}")
    before = "thoughts? " if may_think else ""
    if not may_answer:
        return "\n".join([*rules, f"start: {before}call"])
    if answer_schema is None:
        rules.append(f'answer: {spell(CHANNEL)} "final" {message} FREE')
    else:
        rules.append(f'answer: {spell(CHANNEL)} "final " {spell(CONSTRAIN)} "json" {message} json')
        rules.append(f"json: {call_rules.json_rule(answer_schema)}")
    return "\n".join([*rules, f"start: {before}(preamble? call | answer)"])


def input_rule(index: int, function: call_rules.Function) -> str:
    """Return the Lark rule for the raw text of the function with number `index`."""
    return f"input{index}: %lark {{\n{function.lark}\n}}"


def raw_grammar(
    form: CallFormat,
    raw: Sequence[call_rules.Function],
    others: str,
    mark: str,
    before: str,
) -> str:
    """Return a grammar that also allows one call with raw text at the end of an answer.

    Args:
        others: grammar of other calls and of the answer, "" for raw calls only.
        mark: marker of a call as a Lark term.
        before: rule for the text before a call that includes its marker, "" if the marker comes
            first.
    """
    rules = [re.sub(r"(?m)^start:", "plain:", others)] if others else []
    for index, function in enumerate(raw):
        head = json.dumps(raw_head(form, function.name))
        # Other calls have the line break as a separate lexeme, so it must be one here too.
        rules.append(f'raw{index}: "\\n" {head} input{index}')
        rules.append(input_rule(index, function))
    calls = " | ".join(f"raw{index}" for index in range(len(raw)))
    rules.append(f"start: {'plain | ' if others else ''}{before or mark} ({calls})")
    return "\n".join(rules)
