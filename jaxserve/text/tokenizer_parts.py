"""TokenizerParts: the parts of a tokenizer.json, vocabulary and merges unparsed, and its rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

_CHUNK = 1 << 18
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_PARTS = tuple("normalizer pre_tokenizer post_processor decoder truncation padding".split())
_BIG = ("vocab", "merges")
_SETTINGS = ("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word")
# Nested repetitions, which can make the library's search panic.
_NESTED = re.compile(r"(?:[*+]|\{\d*,\d*\})[^(]*\)[*+{]")
# Signs with which a pattern may match empty text at any position.
_MAY_BE_EMPTY = re.compile(r"[*?|^$]|\\[bBAzZG]|\{0?,")


class TokenizerParts(NamedTuple):
    """Content of a tokenizer.json. The vocabulary and the merges are unparsed JSON text."""

    # Normalizer, pre-tokenizer, post-processor, decoder, truncation and padding.
    small: dict[str, Any]
    added: list[tuple[Any, Any]]  # texts of added tokens, and whether they are normalized
    model: dict[str, Any]
    vocab: memoryview  # JSON text of the vocabulary
    merges: memoryview  # JSON text of the merges


def read_parts(raw: bytes) -> TokenizerParts:
    """Return the parts of the content of a tokenizer.json.

    Vocabulary and merges, most of the file, stay JSON text: parsing them would take half as long as
    loading the tokenizer.

    Raises:
        ValueError, TypeError, RecursionError: the content is not JSON, or has another structure.
    """
    try:
        import msgspec
    except ImportError:  # a dependency of the server; the standard library takes ten times as long
        parts = _object(json.loads(raw))
        model = _object(parts.pop("model", {}))
        big = [memoryview(json.dumps(model.pop(name, [])).encode()) for name in _BIG]
        tokens = [token for token in parts.get("added_tokens") or () if isinstance(token, dict)]
        added = [(token.get("content"), token.get("normalized")) for token in tokens]
        return TokenizerParts(parts, added, model, *big)
    none, define = msgspec.Raw(b"null"), msgspec.defstruct

    def fields(names: Iterable[str]) -> list[tuple[str, Any, Any]]:
        return [(name, msgspec.Raw, none) for name in names]

    token = define("Token", [("content", Any, None), ("normalized", Any, None)])
    model = define("Model", fields((*_SETTINGS, *_BIG)))
    own_fields: list[Any] = [("model", model), ("added_tokens", list[token] | None, None)]
    try:
        file: Any = msgspec.json.decode(raw, type=define("File", [*own_fields, *fields(_PARTS)]))
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None
    big = [memoryview(getattr(file.model, name)) for name in _BIG]
    parts = {name: bytes(getattr(file, name)) for name in _PARTS}
    settings = {name: bytes(getattr(file.model, name)) for name in _SETTINGS}
    return TokenizerParts(
        {name: json.loads(part) for name, part in parts.items()},
        [(token.content, token.normalized) for token in file.added_tokens or ()],
        {name: json.loads(part) for name, part in settings.items()},
        *big,
    )


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{type(value).__name__} in place of an object")
    return value


def num_strings(source: memoryview, most: int) -> int:
    """Return about how many strings JSON text contains, counting at most slightly beyond `most`.

    A result up to `most` may be inexact: text too short for more strings counts as 0, and quotation
    marks within strings also count, since exact counting takes as long as parsing.
    """
    if len(source) // 3 <= most:  # each takes at least two quotes and a comma
        return 0
    starts = range(0, len(source), _CHUNK)
    pairs = sum(bytes(source[start : start + _CHUNK]).count(b'"') for start in starts) // 2
    if pairs <= most + most // 64 + 4096:
        return min(pairs, most)
    return sum(1 for _ in islice(_STRING.finditer(source), most + 2))


def nodes(part: Any) -> Iterator[Any]:
    pending = [part]
    while pending:
        value = pending.pop()
        yield value
        if isinstance(value, dict):
            pending += reversed(value.values())
        elif isinstance(value, list):
            pending += reversed(value)


def may_panic(rule: Any) -> bool:
    if not isinstance(rule, dict):
        return False
    strips = rule.get("type") == "Strip" and rule.get("stop")
    return bool(strips or _NESTED.search(str(rule.get("Regex", ""))))


def growth(part: Any) -> float:
    """Return the largest factor by which a normalizer or decoder may lengthen a text, 1.0 or more.

    Unicode normalization forms are ignored: Unicode bounds their growth per character.

    Args:
        part: normalizer or decoder as in tokenizer.json, or None.
    """
    factor = 1.0
    for value in nodes(part):
        if not isinstance(value, dict):
            continue
        for name in ("prepend", "append"):
            factor *= 1 + len(str(value.get(name) or ""))
        content, pattern = value.get("content"), value.get("pattern")
        if isinstance(content, str) and isinstance(pattern, dict):
            text, regex = pattern.get("String"), pattern.get("Regex")
            if isinstance(text, str) and text:
                factor *= max(1.0, len(content) / len(text))
            elif isinstance(regex, str) and regex and not _MAY_BE_EMPTY.search(regex):
                factor *= max(1, len(content))
            else:
                factor *= 1 + len(content)
    return factor
