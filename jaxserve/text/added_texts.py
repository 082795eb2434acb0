"""AddedTexts: texts of added tokens, which must not be recognized within untrusted data."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import Any

_MOST_NESTED = 40  # limit on nested groups, since the `re` compiler is recursive
_NOTHING = r"(?!)"


def pattern_of_any(texts: Collection[str]) -> str:
    """Return a regular expression that matches any of some texts, the longest one at each position.

    It matches no text if `texts` is empty. Common prefixes are factored out: Gemma 3 has 6,414
    added tokens, nearly all of which begin with "<". As plain alternatives, all of them would be
    tried at each "<".
    """
    return _alternatives(sorted({text for text in texts if text}), _MOST_NESTED) or _NOTHING


def _alternatives(texts: list[str], deepest: int) -> str:
    """Return a regular expression that matches any of some sorted, distinct texts.

    Args:
        deepest: maximum nesting of groups. Below it, texts are plain alternatives, longest first.
    """
    if not deepest:
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    alternatives: list[str] = []
    for _, group in groupby(texts, key=lambda text: text[0]):
        members = list(group)
        first, last = (
            members[0],
            members[-1],
        )  # sorted: all share the prefix of these two
        pairs = enumerate(zip(first, last, strict=False))
        size = next((place for place, (a, b) in pairs if a != b), len(first))
        shared, longer = first[:size], [text[size:] for text in members if text[size:]]
        rest = f"(?:{_alternatives(longer, deepest - 1)})" if longer else ""
        alternatives.append(re.escape(shared) + rest + "?" * (0 < len(longer) < len(members)))
    return "|".join(alternatives)


class AddedTexts:
    """Texts of a tokenizer's added tokens, which must stay ordinary text in untrusted data."""

    def __init__(self, texts: Collection[str]) -> None:
        # Runs of spaces are not markers.
        added = [text for text in texts if len(text.strip()) > 1]
        self._pattern = re.compile(pattern_of_any(added))
        self._beginnings = {text[:end] for text in added for end in range(1, len(text))}
        self._longest = max(map(len, added), default=1)

    def cut(self, value: Any, mark: str) -> Any:
        """Return a copy of a value with `mark` inserted into each text of an added token in its
        strings.

        Strings in nested lists and mappings are changed too. A string that ends with the beginning
        of such a text gets `mark` at its end. Values that JSON does not have become strings.
        """
        if isinstance(value, Mapping):
            # Templates look up identifiers as names, and added texts are never identifiers.
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
            value = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        # The next text may also be data and complete an added text.
        ends = (value[-size:] for size in range(1, self._longest))
        return value + mark if any(end in self._beginnings for end in ends) else value
