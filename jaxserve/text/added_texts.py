"""AddedTexts: the texts of tokens that are found whole in any text, kept out of data."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any

_MOST_NESTED = 40  # groups in a pattern; Python's compiler of patterns is recursive too
_NOTHING = r"(?!)"


def pattern_of_any(texts: Collection[str]) -> str:
    """Return a pattern that finds any of some texts, the longest of those in one place.

    What texts have in common is in it once. Gemma 3 has 6,414 added tokens, nearly all of which
    begin with "<": as alternatives, all of them would be tried wherever a text has that letter.
    """
    return _alternatives(sorted({text for text in texts if text}), _MOST_NESTED) or _NOTHING


def _alternatives(texts: list[str], deepest: int) -> str:
    """Return a pattern of sorted texts, in which groups are nested at most so deep."""
    if not deepest:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    found: list[str] = []
    for _, group in groupby(texts, key=lambda text: text[0]):
        members = list(group)
        first, last = members[0], members[-1]  # sorted: no two differ earlier than these
        pairs = enumerate(zip(first, last, strict=False))
        size = next((place for place, (left, right) in pairs if left != right), len(first))
        shared, longer = first[:size], [text[size:] for text in members if text[size:]]
        rest = f"(?:{_alternatives(longer, deepest - 1)})" if longer else ""
        found.append(re.escape(shared) + rest + "?" * (0 < len(longer) < len(members)))
    return "|".join(found)


class AddedTexts:
    """Texts of added tokens, which data may hold and must not say.

    Args:
        texts: of the tokens.
    """

    def __init__(self, texts: Collection[str]) -> None:
        # Runs of spaces mark nothing.
        added = [text for text in texts if len(text.strip()) > 1]
        self._pattern = re.compile(pattern_of_any(added))
        self._beginnings = {text[:end] for text in added for end in range(1, len(text))}
        self._longest = max(map(len, added), default=1)

    def cut(self, value: Any, mark: str) -> Any:
        """Put a mark into every added text in a value, so that none is left whole."""
        if isinstance(value, Mapping):
            # Templates look for names that are identifiers, and no added text is one.
            return {
                name if name.isidentifier() else self.cut(name, mark): self.cut(inner, mark)
                for name, inner in ((str(name), inner) for name, inner in value.items())
            }
        if isinstance(value, list | tuple):
            return [self.cut(inner, mark) for inner in value]
        if value is None or isinstance(value, bool | int | float):
            return value
        value = str(value)
        while self._pattern.search(value):
            value = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        # The text after it may be data too, and would make an added text whole.
        ends = (value[-size:] for size in range(1, self._longest))
        return value + mark if any(end in self._beginnings for end in ends) else value
