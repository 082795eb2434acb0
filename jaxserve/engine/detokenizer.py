"""Detokenizer: token ids to text, incrementally."""

from __future__ import annotations

from collections.abc import Sequence as Listing

from tokenizers.decoders import DecodeStream

from jaxserve.engine.text import Tokenizer
from jaxserve.request import SamplingParams

_CONTEXT_TOKENS = 8


class Detokenizer:
    """One sequence's text, token by token.

    Never emits half a character: bytes that do not make one yet wait for the next token. Never
    emits what may turn out to be the beginning of a stop string.

    Attributes:
        text: everything decoded, cut at the stop string once one was found.
        stop: the stop string that was found, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Listing[int], sampling: SamplingParams
    ) -> None:
        self._backend = tokenizer.backend
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._skip_special = sampling.skip_special_tokens
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)
        self._before = self._decode(self._context)
        # The stream begins with the context itself, where that ends in U+FFFD: it may be a
        # character that is not whole yet, and what completes it would change the context's text.
        self._repeats_context = self._before.endswith("\ufffd")
        self._stops = sampling.stop or ()
        self._longest_stop = max(map(len, self._stops), default=0)
        self._beginnings_of_stops = sampling.beginnings_of_stops
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._token_ids: list[int] = []
        self._search_from = 0
        self._num_emitted = 0
        self._incomplete = False
        self.text = ""
        self.stop: str | None = None

    def add(self, token_id: int) -> bool:
        """Take one more token; True if its text completes a stop string."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._backend, token_id)
        self._incomplete = piece is None
        if piece is None:
            return False
        if self._repeats_context:
            self._repeats_context, piece = False, self._after_context(piece)
        return self._extend(piece)

    def finish(self) -> None:
        """No more tokens will come: characters left incomplete become U+FFFD."""
        if self._incomplete and self.stop is None:
            whole = self._decode(self._context + self._token_ids)
            self._extend(self._after_context(whole)[len(self.text) :])
        self._longest_stop = 0

    def _decode(self, token_ids: Listing[int]) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=self._skip_special)

    def _after_context(self, whole: str) -> str:
        """What follows the context in a text that begins with it. A character that the context
        began and other tokens completed is theirs."""
        pairs = enumerate(zip(self._before, whole, strict=False))
        same = min(len(self._before), len(whole))
        return whole[next((at for at, (one, two) in pairs if one != two), same) :]

    def _extend(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if not self._stops:
            return False
        if len(self._token_ids) <= self._min_tokens:
            self._search_from = len(self.text)
            return False
        start = max(self._search_from, before - self._longest_stop + 1)
        found = [(self.text.find(stop, start), stop) for stop in self._stops]
        found = [(at, len(stop), stop) for at, stop in found if at >= 0]
        if not found:
            return False
        at, length, self.stop = min(found)
        self.text = self.text[: at + length if self._include_stop else at]
        return True

    def take(self) -> str:
        """The text that is certain by now and was not taken before."""
        end = len(self.text)
        if self.stop is None and self._longest_stop:
            end -= self._held_back()
        piece = self.text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        limit = min(self._longest_stop - 1, len(self.text) - self._search_from)
        for length in range(limit, 0, -1):
            if self.text[-length:] in self._beginnings_of_stops:
                return length
        return 0
