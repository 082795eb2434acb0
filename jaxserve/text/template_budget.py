"""Budget: limits on the work and CPU time of rendering a chat template."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.errors import InvalidRequest

# Maximum elements of a list that a template creates, and largest number as an argument.
MAX_ITEMS = MAX_NUMBER = 100_000
# Maximum characters of one step. A call of C code cannot be interrupted, so each has a limit.
_MAX_STEP = 1 << 24
# Maximum number and nesting of values within one value that a step reads.
_MAX_VALUES = 500_000
_MAX_DEPTH = 256
# Maximum bits of an integer.
_MAX_BITS = 2048
# The clock is read after _CHECK_EVERY steps. A step of n characters counts n >> _CHECK_BITS more.
_CHECK_EVERY = 64
_CHECK_BITS = 12
# Weight of a list or mapping without its elements: its time, expressed in characters.
_ENTRY = 64
# Weight of an element copied into a list: the size of a reference.
ELEMENT = 8
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS = (list, tuple, set, frozenset, *_VIEWS)


class TemplateTooLong(InvalidRequest):
    """Error: the rendering of a chat template exceeded its limit on time, work or output."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the chat template was stopped: {message}", "messages")


def weigh(value: Any, most: int) -> int:
    """Return the weight of a template value: its characters, plus `_ENTRY` for each list or
    mapping.

    Nested values count as often as they occur. The result may be too low if it exceeds `most`,
    since counting then stops.
    """
    total, pending = 0, [value]
    while pending and total <= most:
        size, inner = _parts(pending.pop())
        total += size
        pending += inner
    return total


def _parts(value: Any) -> tuple[int, Iterable[Any]]:
    if isinstance(value, str | bytes):
        return len(value) + 1, ()
    if isinstance(value, dict):
        return _ENTRY + 1, itertools.chain(value.keys(), value.values())
    if isinstance(value, _LISTS):
        return _ENTRY + 1, value
    if isinstance(value, int):
        return value.bit_length() // 3 + 2, ()
    return (len(value) if isinstance(value, range) else 1) + 1, ()


class Budget:
    """Remaining work and CPU time for one rendering of a chat template.

    Args:
        size: maximum number of characters that are processed, plus one per step.
        seconds: maximum CPU time of the rendering thread.
    """

    def __init__(self, size: int, seconds: float) -> None:
        self._left = size
        self._seconds = seconds
        self._end = time.thread_time() + seconds
        self._until_check = _CHECK_EVERY

    def spend(self, size: int = 1) -> None:
        """Subtract one step and `size` characters from the budget, and sometimes check the CPU
        time.

        Raises:
            TemplateTooLong: the budget is exhausted, or the step has too many characters.
        """
        self._left -= size + 1
        if self._left < 0 or size > _MAX_STEP:
            raise TemplateTooLong("it makes too much text")
        self._until_check -= 1 + (size >> _CHECK_BITS)
        if self._until_check <= 0:
            self.check()

    def check(self) -> None:
        """Check the CPU time used by the rendering so far.

        Raises:
            TemplateTooLong: the CPU time is used up.
        """
        self._until_check = _CHECK_EVERY
        if time.thread_time() > self._end:
            raise TemplateTooLong(f"it takes more than {self._seconds:g} s")

    def read(self, value: Any) -> int:
        """Charge the budget for reading a whole value, and return the weight of the value.

        The value is counted level by level, since C code compares, hashes and prints nested values
        by recursion.

        Raises:
            TemplateTooLong: the budget is exhausted, or the value is too large or nested too
                deeply.
        """
        if type(value) is str:
            self.spend(len(value))
            return len(value)
        total, count, level = 0, 0, [value]
        for _ in range(_MAX_DEPTH):
            size, below = 0, []
            for part in level:
                weight, inner = _parts(part)
                size += weight
                if inner:
                    below += inner
                    if count + len(below) > _MAX_VALUES:
                        raise TemplateTooLong(f"it reads more than {_MAX_VALUES} values at once")
            self.spend(size)
            total += size
            if not below:
                return total
            count += len(below)
            level = below
        raise TemplateTooLong("it nests values too deep")

    def listed(self, values: Any) -> Any:
        """Charge the budget for the elements of an iterable, and return them as a list.

        A list or a tuple is returned unchanged.

        Raises:
            TemplateTooLong: there are more than MAX_ITEMS elements, or the budget is exhausted.
        """
        if not isinstance(values, list | tuple):
            values = list(itertools.islice(values, MAX_ITEMS + 1))
        self.items(len(values))
        return values

    def items(self, count: int) -> None:
        """Charge the budget for a list of `count` elements.

        Raises:
            TemplateTooLong: `count` exceeds MAX_ITEMS, or the budget is exhausted.
        """
        if count > MAX_ITEMS:
            raise TemplateTooLong(f"it makes a list of more than {MAX_ITEMS} elements")
        self.spend(ELEMENT * count)

    def settle(self, result: Any) -> Any:
        """Charge the budget for the result of a filter, operator or call, and return the result.

        A lazy iterator is wrapped in `Paid`, which charges for each of its values.

        Raises:
            TemplateTooLong: the result is too large, or the budget is exhausted.
        """
        if isinstance(result, str):
            self.spend(len(result))
        elif isinstance(result, list | tuple | dict):
            self.items(len(result))
        elif isinstance(result, int):
            if result.bit_length() > _MAX_BITS:
                raise TemplateTooLong(f"it makes a number of more than {_MAX_BITS} bits")
        elif hasattr(result, "__next__") and type(result).__module__ == "builtins":
            return Paid(result, self)
        return result


class Paid:
    """Iterator over `values` that charges a template's budget for each value.

    It is a class, not a generator, because Python frees a long chain of generators by unlimited
    recursion.
    """

    def __init__(self, values: Iterable[Any], budget: Budget) -> None:
        self._values = iter(values)
        self._budget = budget

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        value = next(self._values)
        self._budget.spend(ELEMENT * len(value) if isinstance(value, list | tuple) else 1)
        return value
