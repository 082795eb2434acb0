"""StopStrings: the stop strings of a request, ready to be found at the end of a growing text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class StopStrings:
    """Index of stop strings, in which one more token costs little, however many strings there are.

    A match must end in the text's newest piece, so each of its characters selects the strings that
    end with it, and only these are compared. The index holds the strings and no parts of them.

    Args:
        strings: at least one, none of them empty.

    Attributes:
        longest: length of the longest string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._sorted = sorted(set(strings))
        self.longest = max(map(len, self._sorted))
        self._first_characters = frozenset(string[0] for string in self._sorted)
        self._by_end: dict[str, tuple[str, ...]] = {}
        for string in self._sorted:
            self._by_end[string[-1]] = (*self._by_end.get(string[-1], ()), string)

    def find(self, text: str, start: int, settled: int) -> tuple[int, str] | None:
        """Return the place and the string of the match that begins first, the shortest of several.

        Args:
            text: to search.
            start: the first place where a match may begin.
            settled: length of the text without its newest piece, in which there is no match.
        """
        if self._by_end.keys().isdisjoint(text[settled:]):
            return None
        best: tuple[int, int] | None = None
        for end in range(settled + 1, len(text) + 1):
            if best is not None and end - self.longest > best[0]:
                break  # all further matches begin behind it
            strings = self._by_end.get(text[end - 1])
            if strings is not None and text.endswith(strings, start, end):
                found = [(end - len(s), len(s)) for s in strings if text.endswith(s, start, end)]
                best = min(found) if best is None else min(best, *found)
        if best is None:
            return None
        place, length = best
        return place, text[place : place + length]

    def first_beginning(self, text: str, start: int) -> int:
        """Return the first place from which the rest of a text begins a string; its end for none.

        A place that is passed over begins no string in any longer text either: the next search
        may start at the result.

        Args:
            text: to search.
            start: the first place that counts.
        """
        for place in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[place] not in self._first_characters:
                continue
            rest = text[place:]
            # The strings that begin with the rest, and are longer, follow it in order.
            following = bisect_right(self._sorted, rest)
            if following < len(self._sorted) and self._sorted[following].startswith(rest):
                return place
        return len(text)
