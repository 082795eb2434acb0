"""PromptEncoder: tokenizes prompts so that untrusted text never becomes added tokens.

The tokenizers library recognizes the text of added tokens, such as `<s>`, anywhere. Where untrusted
data contains such text, a second tokenizer without added tokens encodes that part of the prompt.
Both share the model's vocabulary, so the second one takes no extra memory.
"""

from __future__ import annotations

import json
import secrets
from bisect import bisect_left
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Listing
from itertools import pairwise
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from jaxserve.text.tokenizer_calls import LibraryCalls, TokenizerFailure

_BLANK = "\u2581"  # how SentencePiece vocabularies write a space
# Longer texts use the library's batch function, which releases the GIL.
_SHORT_CHARS = 8192
_UNASSIGNED = "\U0010fffd"  # a character that vocabularies do not contain


class PromptEncoder:
    """Encoder of texts, and of rendered conversations, in which data never becomes added tokens.

    Args:
        backend: tokenizer of the tokenizers library.
        added: ids of added tokens by text.
        special: ids of special tokens.
        calls: wrapper for calls of the library.
    """

    def __init__(
        self,
        backend: Backend,
        added: Mapping[str, int],
        special: Collection[int],
        calls: LibraryCalls,
    ) -> None:
        self._backend, self._calls = backend, calls
        # Files may contain training settings, such as padding to a fixed length.
        backend.no_padding()
        backend.no_truncation()
        # Added tokens that are spaces or single characters are ordinary words, not markers.
        marks = {number: text.strip() for text, number in added.items()}
        self._marks = {
            number: text
            for number, text in marks.items()
            if len(text.replace(_BLANK, " ").strip()) > 1
        }
        self._special = frozenset(special)
        self._plain = Backend(backend.model)
        if backend.normalizer is not None:
            self._plain.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._plain.pre_tokenizer = backend.pre_tokenizer
        self._inner, self._begins_once = _without_prefix(self._plain)
        self._unknown = self._unknown_id()

    def _unknown_id(self) -> int | None:
        text: str | None = getattr(self._backend.model, "unk_token", None)
        if text is not None:
            return self._backend.token_to_id(text)
        try:
            ids = LibraryCalls(may_panic=True).run(self._inner.encode, _UNASSIGNED).ids
        except TokenizerFailure:  # the model has no unknown token
            return None
        return next((token for token in ids if token in self._marks), None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, in which the texts of added tokens are recognized.

        Args:
            add_special_tokens: True to add the special tokens that the model expects around a text.

        Raises:
            TokenizerFailure: the tokenizers library cannot encode the text.
        """
        return self._encoded(self._backend, text, add_special_tokens).ids

    def encode_data(self, text: str) -> list[int]:
        """Return the token ids of a text, in which the texts of added tokens are ordinary text.

        Raises:
            TokenizerFailure: the tokenizers library cannot encode the text.
        """
        return self._spelled(text, self._plain)

    def encode_pieces(self, pieces: Listing[str]) -> list[int]:
        """Return the token ids of the text that consists of some pieces, without special tokens
        around it.

        The texts of added tokens are recognized only within a piece. Ordinary words may cross piece
        boundaries: the pieces "<" and "s>" are tokenized as "<s>" would be without this added
        token.

        Raises:
            TokenizerFailure: the tokenizers library cannot encode the text.
        """
        if len(pieces) == 1:
            return self._joined(pieces[0], "")
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        try:
            return self._joined(mark.join(pieces), mark)
        except TokenizerFailure:  # the model may not be able to encode the mark
            return [token for piece in pieces for token in self.encode(piece, False)]

    def _joined(self, text: str, mark: str) -> list[int]:
        """Return the token ids of the text that consists of some pieces, joined by a separator.

        The separator has no token ids. Parts of the text with a separator, or with data that became
        an added token, are encoded without added tokens.

        Args:
            text: pieces, joined by `mark`.
            mark: separator that prevents added tokens across pieces, "" for a single piece.
        """
        encoding = self._encoded(self._backend, text)
        ids = encoding.ids
        whole: list[tuple[int, int, int]] = []
        mistaken: list[int] = []
        for place, token in enumerate(ids):
            if token not in self._marks:
                continue
            start, end = encoding.token_to_chars(place) or (0, 0)
            if text[start:end].strip() == self._marks[token]:
                whole.append((place, start, end))
            elif token != self._unknown:  # a normalizer turned data into this token
                mistaken.append(place)
        if not (mark or mistaken):
            return ids
        result: list[int] = []
        first_token = first_char = 0
        for place, start, end in [*whole, (len(ids), len(text), len(text))]:
            segment = text[first_char:start]
            following = bisect_left(mistaken, first_token)
            is_wrong = following < len(mistaken) and mistaken[following] < place
            if is_wrong or (mark and mark in segment):
                segment = segment.replace(mark, "") if mark else segment
                is_later = self._begins_once and first_char > 0
                result += self._spelled(segment, self._inner if is_later else self._plain)
            else:
                result += ids[first_token:place]
            result += ids[place : place + 1]
            first_token, first_char = place + 1, end
        return result

    def _encoded(self, backend: Backend, text: str, add_special_tokens: bool = False) -> Encoding:
        options, run = {"add_special_tokens": add_special_tokens}, self._calls.run
        if len(text) <= _SHORT_CHARS or self._calls.may_panic:
            return run(backend.encode, text, **options)
        return run(backend.encode_batch, [text], **options)[0]

    def _spelled(self, text: str, backend: Backend) -> list[int]:
        """Return the token ids of a text without added tokens among them.

        Some models also have the text of an added token as an ordinary word. The text is then cut
        within that word, and its parts are encoded separately.
        """
        if not text:
            return []
        encoding = self._encoded(backend, text)
        ids, cuts = encoding.ids, [(0, 0)]
        for place, token in enumerate(ids):
            if token in self._marks:
                start, end = encoding.token_to_chars(place) or (0, 0)
                cuts += self._cut(token, text[start:end], start)
        if len(cuts) == 1:
            return ids
        cuts.append((len(text), len(text)))
        result: list[int] = []
        for number, ((_, start), (end, _)) in enumerate(pairwise(cuts)):
            result += self._spelled(text[start:end], self._inner if number else backend)
        return result

    def _cut(self, token: int, word: str, start: int) -> list[tuple[int, int]]:
        # Each cut is (end of a part, start of the next part).
        place = word.find(self._marks[token])
        if place < 0 and (token == self._unknown or token not in self._special):
            return []  # unknown text, or a word with spaces around it
        if len(word) < 2:  # a normalizer turned one character into the token, so it is dropped
            return [(start, start + len(word))]
        place = start + max(place, 0) + 1
        return [(place, place)]


def _without_prefix(backend: Backend) -> tuple[Backend, bool]:
    """Return a tokenizer like `backend` that does not put a space before a text.

    Returns:
        The tokenizer, and whether `backend` puts a space only before the whole text, not after each
            added token.
    """
    try:
        parts = [_state(backend.normalizer), _state(backend.pre_tokenizer)]
    except Exception:  # parts implemented in Python have no JSON form
        return backend, False
    bare = [_bare(part) for part in parts]
    if bare == parts:
        return backend, False
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    source = {"model": empty, "normalizer": bare[0], "pre_tokenizer": bare[1]}
    with LibraryCalls():
        shaped = Backend.from_str(json.dumps(source))
    inner = Backend(backend.model)
    if shaped.normalizer is not None:
        inner.normalizer = shaped.normalizer
    if shaped.pre_tokenizer is not None:
        inner.pre_tokenizer = shaped.pre_tokenizer
    return inner, '"first"' in json.dumps(parts[1])


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


def _bare(part: Any) -> Any:
    """Return a normalizer or pre-tokenizer, as in tokenizer.json, without the space that it puts
    before a text. The result is None if it has no other effect.
    """
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "ByteLevel":
        return {**part, "add_prefix_space": False}
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            steps = [bare for inner in part[name] if (bare := _bare(inner)) is not None]
            return {**part, name: steps}
    return part
