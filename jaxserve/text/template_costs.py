"""Costs of filters, tests and methods in chat templates, and of calls.

Each is charged before it runs, for its time and for the memory of its result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import SecurityError

from jaxserve.text.template_budget import MAX_ITEMS, MAX_NUMBER, Budget, TemplateTooLong

# Formats such as `%99999999d`, `{:99999999}` and `%*d` produce long texts from short arguments.
_WIDE = re.compile(r"\d{6,}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*\{")
_NUMBERS = re.compile(r"\d+")
_NAMED = re.compile(r"%\(|\{[^{}:!]")
_MAX_FORMAT = 100_000
# Disabled filters: chat templates do not need them, or their time is hard to bound.
NO_FILTERS = (
    "center filesizeformat forceescape pprint random striptags sum urlize wordwrap xmlattr".split()
)
# Filters that read a whole list before they return.
_LISTING = frozenset("batch groupby join list max min slice sort unique".split())
# Lazy filters, which read one element at a time.
_PASSING = frozenset("dictsort items map reject rejectattr select selectattr".split())
# Filters that read a value without the values nested in it.
_SHALLOW = frozenset("attr batch count d default first last length list reverse slice".split())
_SHALLOW |= _PASSING - {"dictsort"}
_SORTING = frozenset("dictsort groupby sort".split())
# Filters that run Python or slow C code for each character.
_SLOW = frozenset("float int title urlencode wordcount".split())
_SHALLOW_TESTS = frozenset(
    "boolean callable defined escaped false float integer iterable mapping none number sameas "
    "sequence string true undefined".split()
)
_NUMBER_TESTS = frozenset("divisibleby even odd".split())
# Attributes that templates may read. Excluded are methods that modify a value, give access to
# Python internals, or take more than linear time.
ATTRIBUTES: tuple[tuple[type | tuple[type, ...], frozenset[str]], ...] = tuple(
    (types, frozenset(names.split()))
    for types, names in (
        (
            str,
            "capitalize casefold center count endswith expandtabs find format format_map index "
            "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
            "isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix "
            "replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
            "swapcase title upper zfill",
        ),
        (dict, "copy get items keys values"),
        (list, "copy count index"),
        (tuple, "count grouper index list"),
        (range, "count index start step stop"),
        ((int, float), "bit_length conjugate denominator imag is_integer numerator real"),
    )
)
_WIDTHS = frozenset("center ljust rjust zfill".split())
# Methods that compare each character with each character of their argument.
_SQUARE = frozenset("lstrip rfind rindex rpartition rsplit rstrip strip".split())
_LINE_ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


def pay_for_filter(
    budget: Budget, name: str, data: tuple[Any, ...], more: dict[str, Any]
) -> tuple[Any, ...]:
    """Charge a template's budget for a Jinja filter before it runs, and return its positional
    arguments.

    A lazy first argument is returned as a list if the filter reads the whole of it.

    Args:
        name: name of the filter.
        data: positional arguments, the filtered value first.
        more: keyword arguments.

    Raises:
        TemplateTooLong: the cost exceeds the budget.
        jinja2.SecurityError: a number or format among the arguments is too large.
    """
    check_numbers(data[1:], more)
    value: Any = data[0] if data else None
    if name in _LISTING:
        value = budget.listed(value)
    elif name in _PASSING and hasattr(value, "__len__"):
        budget.items(len(value))
    data = (value, *data[1:])
    budget.spend(len(data) + len(more))
    if name in _SHALLOW:
        return data
    weight = budget.read([data, more])
    if name in _SORTING:
        count = len(value) if hasattr(value, "__len__") else 0
        budget.spend(weight * count.bit_length())
    elif name in _SLOW and isinstance(value, str) and len(value) > MAX_ITEMS:
        raise TemplateTooLong(f"it filters a text of more than {MAX_ITEMS} characters by {name}")
    elif name == "replace":
        named = dict(zip(("s", "old", "new"), data, strict=False)) | more
        _pay_for_replace(budget, *(str(named.get(key, "")) for key in ("s", "old", "new")))
    elif name == "join":
        between = data[1] if len(data) > 1 else more.get("d", "")
        budget.spend(len(str(between)) * len(value))
    elif name == "indent":
        width = data[1] if len(data) > 1 else more.get("width", 4)
        budget.spend(_lines(value) * (len(width) if isinstance(width, str) else max(0, width)))
    elif name == "trim":
        chars = data[1] if len(data) > 1 else more.get("chars")
        budget.spend(len(str(value)) * len(chars or "") // 8)
    elif name == "format":
        pay_for_format(budget, str(value), more or data[1:])
    return data


def pay_for_test(budget: Budget, name: str, data: tuple[Any, ...]) -> None:
    """Charge a template's budget for a Jinja test before it runs.

    Args:
        name: name of the test.
        data: arguments, the tested value first.

    Raises:
        TemplateTooLong: the cost exceeds the budget.
        TypeError: a numeric test got a string or a list (`%` would format the string).
    """
    budget.spend(len(data))
    if name in _NUMBER_TESTS:
        if any(isinstance(value, str | bytes | list | tuple) for value in data):
            raise TypeError(f"the test {name} is of numbers")
    elif name == "in" and len(data) == 2:
        budget.read(data[0])
        pay_for_search(budget, data[1])
    elif name not in _SHALLOW_TESTS:
        budget.read(data)


def pay_for_search(budget: Budget, values: Any) -> None:
    """Charge a template's budget for the search of an element in `values`: one step for a mapping,
    otherwise the reading of all values.

    Raises:
        TemplateTooLong: the cost exceeds the budget.
    """
    if isinstance(values, dict):
        budget.spend()
    else:
        budget.read(values)


def pay_for_method(
    budget: Budget, name: str, text: str, data: tuple[Any, ...], more: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Charge a template's budget for a string method before it runs.

    Args:
        name: name of the method.
        text: string whose method is called.
        data: positional arguments.
        more: keyword arguments.

    Returns:
        The positional and the keyword arguments for the call. For `split` and `rsplit` they limit
            the number of parts.

    Raises:
        TemplateTooLong: the cost exceeds the budget.
        jinja2.SecurityError: a number or format among the arguments is too large.
    """
    check_numbers(data, more)
    first: Any = data[0] if data else None
    if name == "join" and data:
        first = budget.listed(first)
        data = (first, *data[1:])
        budget.spend(len(text) * len(first))
    words = budget.read([data, more])
    budget.spend(len(text))
    if name in ("format", "format_map"):
        pay_for_format(budget, text, more or (first if name == "format_map" else data))
    elif name == "replace" and len(data) > 1:
        _pay_for_replace(budget, text, str(first), str(data[1]))
    elif name == "expandtabs":
        width = first if data else more.get("tabsize", 8)
        budget.spend(text.count("\t") * max(0, int(width)))
    elif name in _WIDTHS and isinstance(first, int):
        budget.spend(max(0, first))
    elif name in _SQUARE:
        budget.spend(len(text) * words // 16 if words > 256 else 1)
    if name in ("split", "rsplit"):
        apart = first if data else more.get("sep")
        most = data[1] if len(data) > 1 else more.get("maxsplit", -1)
        is_all = isinstance(most, int) and most < 0
        return (apart, MAX_ITEMS if is_all else most, *data[2:]), {}
    if name == "splitlines":
        budget.items(_lines(text))
    return data, more


def _pay_for_replace(budget: Budget, text: str, old: str, new: str) -> None:
    budget.spend(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _lines(text: Any) -> int:
    return sum(map(text.count, _LINE_ENDS)) + 1 if isinstance(text, str) else 0


def pay_for_format(budget: Budget, form: str, values: Any) -> None:
    """Charge a template's budget for inserting values into a format string.

    Args:
        form: format string, in the notation of `%` or of `str.format`.
        values: inserted values, a mapping if they have names.

    Raises:
        TemplateTooLong: the cost exceeds the budget.
        jinja2.SecurityError: the format string is too long or has too wide a field.
    """
    check_widths(form)
    size = budget.read(values) + sum(map(int, _NUMBERS.findall(form)))
    # A named value may be used several times.
    is_named = isinstance(values, Mapping) or _NAMED.search(form) is not None
    budget.spend(size * (form.count("%") + form.count("{")) if is_named else size)


def check_widths(form: str) -> None:
    """Raise SecurityError if the format string `form` is too long or has too wide a field."""
    if len(form) > _MAX_FORMAT or _WIDE.search(form):
        raise SecurityError("a format asks for too wide a text")


def check_numbers(data: tuple[Any, ...], more: Mapping[str, Any]) -> None:
    """Raise SecurityError if an argument is an integer beyond ±MAX_NUMBER, such as a width or
    count.

    Args:
        data: positional arguments of a filter, method or function.
        more: keyword arguments.
    """
    for value in (*data, *more.values()):
        if isinstance(value, int) and abs(value) > MAX_NUMBER:
            raise SecurityError(f"numbers given to functions are {MAX_NUMBER} at most")
