"""Read fields of a mapping strictly, and report all invalid fields at once."""

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any, Final

from jaxserve.settings.overrides import is_nested

MAX_POSITIONS = 1 << 27
MAX_SHOWN = 20  # unknown keys of one object that an error names
_ABSENT: Final = object()


class Fields:
    """Strict reader of the fields of one JSON object, which records the fields that were read.

    A method that finds an invalid value appends a message to `problems` and returns a valid
    substitute, so that the caller can continue and find further problems. No method raises.
    """

    def __init__(self, raw: Mapping[str, Any], problems: list[str], prefix: str = "") -> None:
        self.problems = problems
        self._raw = raw
        self._prefix = prefix
        self._left = set(raw)

    def refuse(self, key: str, allowed: str) -> None:
        """Append an error text to `problems`: the value of `key`, and the text `allowed`."""
        value = self._raw.get(key, _ABSENT)
        got = "missing" if value is _ABSENT else f"is {shown(value)}"
        self.problems.append(f"{self._prefix}{key} {got}; allowed: {allowed}")

    def has(self, key: str) -> bool:
        """Return whether the key is present and not null. The key is not marked as read."""
        return self._raw.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Return whether the key is present, even with null. The key is not marked as read."""
        return key in self._raw

    def take(self, key: str) -> Any:
        """Return the unchecked value of `key`, or None if absent, and mark the key as read."""
        self._left.discard(key)
        return self._raw.get(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """Return the integer value of `key`, which must be in [low, high].

        `default`, if given, replaces an absent or null value. Any other value is refused and gives
        `low`.
        """
        value = self.take(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
            return low
        return value

    def number(self, key: str, above: float, upto: float, default: float | None = None) -> float:
        """Return the value of `key` as a float, which must be finite and in (above, upto].

        `default`, if given, replaces an absent or null value. Any other value is refused and gives
        `upto`.
        """
        value = self.take(key)
        if value is None and default is not None:
            return default
        # Test the range before the conversion to float, which a huge integer would overflow.
        if isinstance(value, int | float) and type(value) is not bool and above < value <= upto:
            return float(value)
        self.refuse(key, f"a number above {above:g} and at most {upto:g}")
        return upto

    def optional(self, key: str, above: float, upto: float) -> float | None:
        """Return the value of `key` as a float in (above, upto], or None if it is absent or null.

        Any other value is refused and gives `upto`.
        """
        if self.has(key):
            return self.number(key, above, upto)
        self.take(key)
        return None

    def numbers(self, key: str, length: int, above: float, upto: float) -> tuple[float, ...]:
        """Return the list of `length` finite numbers in (above, upto] at `key`, as a tuple.

        Any other value is refused and gives `length` times `upto`.
        """
        value = self.take(key)
        numbers: list[float] = []
        for number in value if isinstance(value, list) and len(value) == length else ():
            # Test the range before the conversion to float, which a huge integer would overflow.
            if type(number) in (int, float) and above < number <= upto:
                numbers.append(float(number))
        if len(numbers) == length:
            return tuple(numbers)
        self.refuse(key, f"{length} numbers above {above:g} and at most {upto:g}")
        return (upto,) * length

    def flag(self, key: str, default: bool) -> bool:
        """Return the value of `key`, which must be exactly true or false.

        An absent or null value gives `default`. Any other value is refused and gives `default` too.
        """
        value = self.take(key)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(key, "true or false")
            return default
        return value

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        """Return the value of `key`, which must be one of the strings `allowed`.

        `default`, if given, replaces an absent or null value. Any other value is refused and gives
        the first allowed string.
        """
        options = tuple(allowed)
        value = self.take(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or value not in options:
            self.refuse(key, " or ".join(map(repr, options)))
            return options[0]
        return value

    def neutral(self, rules: Mapping[str, Any]) -> None:
        """Refuse each key of `rules` that is not absent, null, or equal to its rule (also in type).

        A rule that is a tuple lists several allowed values. All keys of `rules` are marked as read.
        """
        for key, allowed in rules.items():
            value = self.take(key)
            options = allowed if isinstance(allowed, tuple) else (allowed,)
            if value is not None and not any(
                type(value) is type(option) and value == option for option in options
            ):
                text = " or ".join(map(shown, options))
                self.refuse(key, f"{text} (anything else is not supported)")

    def finish(self, ignored: frozenset[str] = frozenset()) -> None:
        """Append one problem that names every key with a value that is neither read nor ignored."""
        unknown = sorted((key for key in self._left - ignored if self.has(key)), key=str)
        if not unknown:
            return
        first = unknown[:MAX_SHOWN]
        names = [f"{self._prefix}{key[:80]} is {shown(self._raw[key])}" for key in first]
        if len(unknown) > MAX_SHOWN:
            names.append(f"{len(unknown) - MAX_SHOWN} more")
        self.problems.append(
            f"{', '.join(names)}; unknown to jaxserve, and may change the result; allowed: null. "
            f"{self._override(first)}"
        )

    def _override(self, keys: list[str]) -> str:
        path = self._prefix.split(".")[:-1]
        if not all(map(is_nested, path)):
            return f"--hf-overrides can replace {self._prefix[:-1]} as a whole"
        value: dict[str, Any] = dict.fromkeys(keys)
        for name in reversed(path):
            value = {name: value}
        option = f"--hf-overrides {shlex.quote(json.dumps(value))}"
        return f"{option} leaves them out, where they change nothing"


def shown(value: Any) -> str:
    """Format any value for an error message, in at most about 80 characters."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    if isinstance(value, dict | list) and len(value) > 20:
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)} items"
    try:
        text = "null" if value is None else repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits, deep nesting
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
