"""ChatTemplate: a checkpoint's Jinja template, rendered in a sandbox that counts its work.

A template comes with a checkpoint, so it is a foreign program. Jinja has no loop without an end,
but loops in loops, macros and doubled texts come close. No thread can be stopped from outside, so
every step that can repeat or enlarge anything pays from one budget.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxserve.errors import InvalidRequest

MAX_SOURCE_CHARS = 1 << 20
# The bound of a template's output is four times its input, and this much.
MORE_CHARS = 1 << 20
# The bound of all texts and lists made on the way, in multiples of the output's.
WORK_OF_OUTPUT = 16
MAX_NUMBER = 100_000
_CHECK_EVERY = 64
# The weight of a list or a mapping by itself: about the time that it takes, in characters.
_ENTRY = 64
# `%99999999d`, `{:99999999}` and `%*d` make long texts from short ones.
_WIDE = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*")
# Filters that make a text of all their inputs.
_TEXT_FILTERS = frozenset("tojson string join format replace indent escape e safe upper".split())
_NO_FILTERS = "center filesizeformat forceescape pprint random striptags sum urlize xmlattr".split()


class TemplateTooLong(InvalidRequest):
    """Refusal of a template that did more work, or made more text, than it may."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the chat template was stopped: {message}", "messages")


class _Budget:
    """Budget of a rendering: the characters and steps, and seconds of CPU time, that are left."""

    def __init__(self, size: int, seconds: float) -> None:
        self.left = size
        self._seconds = seconds
        self._end = time.thread_time() + seconds
        self._until_check = _CHECK_EVERY

    def spend(self, size: int = 1) -> None:
        """Take this much and a step; raise TemplateTooLong when nothing is left."""
        self.left -= size + 1
        if self.left < 0:
            raise TemplateTooLong("it makes too much text")
        self._until_check -= 1
        if self._until_check <= 0:
            self._until_check = _CHECK_EVERY
            if time.thread_time() > self._end:
                raise TemplateTooLong(f"it takes more than {self._seconds:g} s")


def weigh(value: Any, most: int) -> int:
    """Weigh a value: count its characters, and `_ENTRY` for each list or mapping.

    Nested values count as often as they occur. The count stops above `most`.
    """
    total, pending = 0, [value]
    while pending and total <= most:
        part = pending.pop()
        if isinstance(part, str | bytes):
            total += len(part)
        elif isinstance(part, dict):
            total += _ENTRY
            pending += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            total += _ENTRY
            pending += part
        elif isinstance(part, int) and not isinstance(part, bool):
            total += part.bit_length() // 3 + 1
        else:
            total += 1
        total += 1
    return total


class _Paid(NodeTransformer):
    """Transformer that sends loops and concatenations through filters that spend."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        text = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        size = [nodes.Const(text)]
        node.iter = nodes.Filter(node.iter, "_each", size, [], None, None).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes).set_lineno(node.lineno)
        joined = nodes.Filter(parts, "_concat", [], [], None, None)
        joined.set_lineno(node.lineno)
        return joined


class _Generation(Extension):
    """Tag `{% generation %}`: it marks an assistant's text for training, and does nothing here."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as Transformers sets it up for chat templates, with a budget."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=self._output,
        )
        self._now = threading.local()
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self.globals["namespace"] = _Namespace
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: self._paid(name, run) for name, run in self.filters.items()}
        self.filters |= {"_each": self._each, "_concat": self._concat}

    @property
    def budget(self) -> _Budget:
        return getattr(self._now, "budget", None) or _Budget(MORE_CHARS, 1.0)

    @budget.setter
    def budget(self, budget: _Budget | None) -> None:
        self._now.budget = budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Paid().visit(super()._parse(source, name, filename))

    def _each(self, values: Any, text: int) -> Iterator[Any]:
        for value in values:
            self.budget.spend(text)
            yield value

    def _concat(self, parts: list[Any]) -> str:
        self._pay_for(parts)
        return "".join(map(str, parts))

    def _output(self, value: Any) -> Any:
        self._pay_for(value)
        return value

    def _pay_for(self, value: Any) -> None:
        budget = self.budget
        budget.spend(weigh(value, budget.left))

    def _paid(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        skipped = 1 if hasattr(run, "jinja_pass_arg") else 0

        @functools.wraps(run)
        def paid(*args: Any, **kwargs: Any) -> Any:
            data = args[skipped:]
            _check_numbers(data[1:], kwargs)
            if name in _TEXT_FILTERS:
                self._pay_for(data)
            if name == "replace":
                self._pay_for_replace(*map(str, data[:3]))
            if name == "format":
                _check_widths(str(data[0]))
            if name == "join":
                data = [list(data[0]), *data[1:]]
                self._pay_for_join(str(data[1] if len(data) > 1 else ""), data[0])
            result = run(*args[:skipped], *data, **kwargs)
            self.budget.spend(_size(result))
            return result

        return paid

    def _pay_for_replace(self, text: str, old: str, new: str) -> None:
        self.budget.spend(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _pay_for_join(self, between: str, parts: list[Any]) -> None:
        self._pay_for(parts)
        self.budget.spend(len(between) * len(parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(n, int | float) and abs(n) <= 64 for n in (left, right)):
                raise SecurityError("numbers to a power are 64 at most")
        elif operator == "*":
            for part, times in ((left, right), (right, left)):
                if isinstance(part, str | bytes | list | tuple) and isinstance(times, int):
                    self.budget.spend(len(part) * max(0, times))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            self._pay_for([left, right])
        elif operator == "+":
            self.budget.spend(_size(left) + _size(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            self._pay_for(result)
        return result

    # Named so that no keyword of the called function is taken.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if __obj is not range and name != "range":
            _check_numbers(args, kwargs)
        if isinstance(text, str) and name == "replace" and len(args) >= 2:
            __self._pay_for_replace(text, str(args[0]), str(args[1]))
        if isinstance(text, str) and name == "join" and args:
            args = (list(args[0]),)
            __self._pay_for_join(text, args[0])
        if name in ("format", "format_map"):
            __self._pay_for([args, kwargs])
            # Jinja puts a function of its own around the method.
            method = getattr(__obj, "__wrapped__", __obj)
            _check_widths(str(getattr(method, "__self__", "")))
        if isinstance(text, str) and name == "translate":
            raise SecurityError("translate is not allowed here")
        result = super().call(__context, __obj, *args, **kwargs)
        __self.budget.spend(_size(result))
        return result


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, which lead into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"{name!r} may not be set")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def _check_numbers(args: Any, kwargs: dict[str, Any]) -> None:
    """Check widths and counts, by which a short call may make a long text."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"numbers given to functions are {MAX_NUMBER} at most")


def _check_widths(form: str) -> None:
    if _WIDE.search(form):
        raise SecurityError("a format asks for too wide a text")


def _refuse(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    _check_widths(form)
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Transformers does, without HTML escapes."""
    if isinstance(value, Undefined):
        raise TemplateError("tojson of something undefined")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """A compiled template. It is safe from any thread.

    Args:
        source: in Jinja.

    Raises:
        jinja2.TemplateError, ValueError: it has no meaning, or is too large.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the chat template has more than {MAX_SOURCE_CHARS} characters")
        self.source = source
        self._sandbox = _Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (RecursionError, MemoryError):
            raise ValueError("the chat template is nested too deep") from None

    def reads(self, name: str) -> bool:
        """Return whether the name of a variable occurs in it."""
        return any(
            node.name == name for node in self._sandbox.parse(self.source).find_all(nodes.Name)
        )

    def render(self, variables: dict[str, Any], seconds: float = 1.0) -> str:
        """Return the text.

        Args:
            variables: plain values, which the template cannot change.
            seconds: of CPU time that it may take.

        Raises:
            TemplateTooLong: it takes longer, or makes more than four times its input and 1 MiB.
            Exception: whatever the template raises.
        """
        most = 4 * weigh(variables, 1 << 30) + MORE_CHARS
        self._sandbox.budget = _Budget(WORK_OF_OUTPUT * most, seconds)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > most:
                    raise TemplateTooLong(f"it makes more than {most} characters")
                parts.append(part)
        except RecursionError:
            raise TemplateTooLong("it calls itself too often") from None
        finally:
            self._sandbox.budget = None
        return "".join(parts)
