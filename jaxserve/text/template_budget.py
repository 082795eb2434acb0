"""Budget: the work and the CPU time that the rendering of a chat template may take."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jaxserve.errors import InvalidRequest

# Elements of a list that a template makes, and the largest number that a call may take.
MAX_ITEMS = MAX_NUMBER = 100_000
# Characters of one step. No call of C code can be stopped, so each is bounded by itself.
_MAX_STEP = 1 << 24
# Values within the one value that a step reads, and their nesting.
_MAX_VALUES = 500_000
_MAX_DEPTH = 256
# Bits of a whole number.
_MAX_BITS = 2048
# The clock is read after this many steps, or steps of this many characters.
_CHECK_EVERY = 64
_CHECK_BITS = 12
# The weight of a list or a mapping by itself: about the time that it takes, in characters.
_ENTRY = 64
# The weight of an element that is copied into a list: the size of a reference.
ELEMENT = 8
_VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
_LISTS = (list, tuple, set, frozenset, *_VIEWS)


class TemplateTooLong(InvalidRequest):
    """Refusal of a template that did more work, or made more text, than it may."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the chat template was stopped: {message}", "messages")


def weigh(value: Any, most: int) -> int:
    """Weigh a value: count its characters, and `_ENTRY` for each list or mapping.

    Nested values count as often as they occur. The count stops above `most`.
    """
    total, pending = 0, [value]
    while pending and total <= most:
        size, inner = _parts(pending.pop())
        total += size
        pending += inner
    return total


def _parts(value: Any) -> tuple[int, Iterable[Any]]:
    """Return the weight of a value by itself, and the values within it."""
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
    """Budget of a rendering: the characters and steps, and seconds of CPU time, that are left."""

    def __init__(self, size: int, seconds: float) -> None:
        self._left = size
        self._seconds = seconds
        self._end = time.thread_time() + seconds
        self._until_check = _CHECK_EVERY

    def spend(self, size: int = 1) -> None:
        """Charge an amount and a step; raise TemplateTooLong when the budget is spent."""
        self._left -= size + 1
        if self._left < 0 or size > _MAX_STEP:
            raise TemplateTooLong("it makes too much text")
        self._until_check -= 1 + (size >> _CHECK_BITS)
        if self._until_check <= 0:
            self.check()

    def check(self) -> None:
        """Read the clock; raise TemplateTooLong when no time is left."""
        self._until_check = _CHECK_EVERY
        if time.thread_time() > self._end:
            raise TemplateTooLong(f"it takes more than {self._seconds:g} s")

    def read(self, value: Any) -> int:
        """Take the weight of a value, which is about to be read as a whole, and return it.

        It is counted level by level: C code compares, hashes and writes nested values by recursion.
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
        """Return values as a list or a tuple, paid for.

        Raises:
            TemplateTooLong: there are more than MAX_ITEMS.
        """
        if not isinstance(values, list | tuple):
            values = list(itertools.islice(values, MAX_ITEMS + 1))
        self.items(len(values))
        return values

    def items(self, count: int) -> None:
        """Charge for a list of so many elements.

        Raises:
            TemplateTooLong: it is more than MAX_ITEMS.
        """
        if count > MAX_ITEMS:
            raise TemplateTooLong(f"it makes a list of more than {MAX_ITEMS} elements")
        self.spend(ELEMENT * count)

    def settle(self, result: Any) -> Any:
        """Return the result of a step, paid for; one that makes its values later pays for each."""
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
    """Iterator that pays for each of its values.

    A class and no generator: Python frees a long chain of generators by recursion, without a limit.
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
