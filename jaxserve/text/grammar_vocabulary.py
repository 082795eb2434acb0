"""Conversion of a tokenizer.json to the vocabulary that llguidance needs.

A tokenizer recognizes added tokens in any text. llguidance treats special tokens, and added tokens
of the form `<...>`, as signs without text. If a constrained answer must contain such a text, it
tokenizes the text into these tokens, and then finds that they do not spell it. In the converted
vocabulary, text never becomes a special token, and every other token has the text that it adds to
an answer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from typing import Any

from jaxserve.text.tokenizer import byte_letters

# Replacement for U+2581, with which SentencePiece vocabularies write spaces, but which may also
# occur in text.
_BLANK = "\ufdd0"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def vocabulary_for_grammars(source: str, vocab_size: int) -> tuple[str, dict[str, int]]:
    """Convert a tokenizer.json to the form in which llguidance reads each token as the text that
    the token adds to an answer.

    Tokens keep their ids. Special tokens get random names, so that a grammar names them only as
    `<[id]>`. Other added tokens become vocabulary entries. Normalizers are removed, since
    constrained text must stay unchanged.

    Args:
        source: JSON text of a tokenizer.json.
        vocab_size: number of logits. Higher ids are removed, and missing ids become special tokens.

    Returns:
        The JSON text of the converted tokenizer.json, and the ids of the added tokens by text.
    """
    tokenizer = json.loads(source)
    entries = _Entries(tokenizer["model"])
    is_byte_level = '"ByteLevel"' in json.dumps(tokenizer["decoder"])
    special, named = [], {}
    for token in tokenizer["added_tokens"]:
        number, text = token["id"], token["content"]
        if number < vocab_size:
            named[text] = number
        if token["special"] or not entries.rename(number, text, _spell(text, is_byte_level)):
            special.append(number)
    entries.cut(vocab_size)
    special = [number for number in special if number < vocab_size]
    special += [number for number in range(vocab_size) if number not in entries.names]
    # Random names, so that requests cannot contain one.
    secret = secrets.token_hex(8)
    names = {number: f"<{secret} {number}>" for number in sorted(set(special))}
    for number, name in names.items():
        entries.rename(number, entries.names.get(number, ""), name)
    entries.write()
    flags = dict.fromkeys(_FLAGS, False) | {"special": True}
    tokenizer |= {
        "added_tokens": [{"id": number, "content": names[number], **flags} for number in names],
        "normalizer": _only_blanks(tokenizer.get("normalizer")),
        "pre_tokenizer": _without_prefix(tokenizer.get("pre_tokenizer")),
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    text = json.dumps(tokenizer, ensure_ascii=False)
    return text if is_byte_level else text.replace("\u2581", _BLANK), named


class _Entries:
    """Editable vocabulary of a tokenizer's model: the name of each entry, by id.

    Args:
        model: `model` object of a tokenizer.json. BPE has a mapping, Unigram a list of pieces and
            scores.
    """

    def __init__(self, model: dict[str, Any]) -> None:
        self._model = model
        vocab = model["vocab"]
        self._scores: dict[int, float] = {}
        if isinstance(vocab, list):
            self.names = {number: piece for number, (piece, _) in enumerate(vocab)}
            self._scores = {number: score for number, (_, score) in enumerate(vocab)}
        else:
            self.names = {number: piece for piece, number in vocab.items()}
        self._numbers = {piece: number for number, piece in self.names.items()}
        self._lost: set[str] = set()

    def rename(self, number: int, before: str, after: str) -> bool:
        """Rename a vocabulary entry, or add one. Return False, without a change, if the name is
        taken.

        Args:
            number: id of the entry.
            before: current name of the entry, "" for a new one.
            after: new name.
        """
        if self._numbers.get(after, number) != number:
            return False
        if self._numbers.get(before) == number and before != after:
            self._forget(number)
        self.names[number], self._numbers[after] = after, number
        return True

    def _forget(self, number: int) -> None:
        name = self.names.pop(number)
        del self._numbers[name]
        self._lost.add(name)

    def cut(self, size: int) -> None:
        """Remove the vocabulary entries with ids of `size` or more."""
        for number in [number for number in self.names if number >= size]:
            self._forget(number)

    def write(self) -> None:
        """Write the entries back to the `model` object of the tokenizer.json.

        Merges of removed entries are removed, too.
        """
        if isinstance(self._model["vocab"], list):
            worst = min(self._scores.values(), default=0.0) - 100.0
            self._model["vocab"] = [
                [self.names[number], self._scores.get(number, worst)]
                for number in range(len(self.names))
            ]
            return
        self._model["unk_token"] = None
        self._model["vocab"] = {name: number for number, name in self.names.items()}
        if self._lost and "merges" in self._model:
            merges: Iterable[Any] = self._model["merges"]
            self._model["merges"] = [merge for merge in merges if not self._is_lost(merge)]

    def _is_lost(self, merge: str | list[str]) -> bool:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        return not self._lost.isdisjoint((first, second, first + second))


def _spell(text: str, is_byte_level: bool) -> str:
    if not is_byte_level:
        return text.replace(" ", "\u2581")
    letters = byte_letters()
    # The decoder maps byte letters to bytes in added tokens too.
    if set(text) <= set(letters):
        return text
    return "".join(letters[byte] for byte in text.encode())


def _only_blanks(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    parts = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    steps = [part for part in parts if part.get("pattern") == {"String": " "}]
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
    if part is None:
        return None
    inner = part.get("pretokenizers")
    if inner is not None:
        return {**part, "pretokenizers": [_without_prefix(each) for each in inner]}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part
