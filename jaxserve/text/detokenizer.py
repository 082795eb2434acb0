"""Detokenizer: incremental conversion of token ids to text."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from collections.abc import Sequence as Listing

from tokenizers.decoders import DecodeStream

from jaxserve.request import SamplingParams
from jaxserve.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 8
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


class Detokenizer:
    """Incremental conversion of the generated tokens of one sequence to text.

    Incomplete characters and text that may begin a stop string are held back. The text ends at the
    first stop string.

    Args:
        prompt_token_ids: ids of the prompt, whose last tokens are the context of the first new
            token.
        sampling: sampling parameters, which have the stop strings and the treatment of special
            tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Listing[int], sampling: SamplingParams
    ) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._skip_special = sampling.skip_special_tokens
        self._run = tokenizer.calls.run
        self._stream = self._run(DecodeStream, self._context, self._skip_special)
        self._before = self._decode(self._context)
        # If the context ends with U+FFFD, the stream returns the context first: it may end with an
        # incomplete character, whose completion would change the text of the context.
        self._repeats_context = self._before.endswith("\ufffd")
        self._added: dict[int, str] = {}
        if not (sampling.skip_special_tokens or sampling.spaces_between_special_tokens):
            added = self._backend.get_added_tokens_decoder()
            self._added = {token: str(word.content) for token, word in added.items()}
        self._follows_added = False
        self._stops = sampling.stop_strings
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._num_tokens = 0
        self._waiting: list[int] = []  # tokens that have not produced text yet
        self._search_from = 0  # index from which a stop string may begin
        self._held_from = 0  # index at which text was last held back
        self._num_emitted = 0
        self.text = ""  # all decoded text, cut at the stop string once it is found
        self.stop: str | None = None  # the stop string that was found, or None

    def add(self, token_id: int) -> bool:
        """Decode the next generated token, and append its text to `text`. Return whether the text
        now contains a stop string, at which it is cut.
        """
        self._num_tokens += 1
        piece = self._run(self._stream.step, self._backend, token_id)
        if self._added:
            word = self._added.get(token_id)
            piece = word if word is not None and self._follows_added else piece
            self._follows_added = word is not None
        if piece is None:
            self._waiting.append(token_id)
            return False
        self._waiting.clear()
        if self._repeats_context:
            self._repeats_context, piece = False, _after(self._before, piece)
        return self._extend(piece)

    def finish(self) -> None:
        """End the text after the last generated token, so that `take` returns all of it.

        Invalid bytes become U+FFFD. An incomplete character at the end is dropped.
        """
        if self._waiting and self.stop is None:
            context = self._bytes(self._context if self._repeats_context else ())
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            whole = decoder.decode(context + self._bytes(self._waiting))
            # Python waits for the third byte of a surrogate, but surrogates are not valid
            # characters.
            if _SURROGATE.fullmatch(decoder.getstate()[0]):
                whole += 2 * "\ufffd"
            self._extend(_after(context.decode(errors="replace"), whole))
        self._stops = None

    def _bytes(self, token_ids: Iterable[int]) -> bytes:
        hidden = self._tokenizer.special_ids if self._skip_special else ()
        shown = (token for token in token_ids if token not in hidden)
        return b"".join(map(self._tokenizer.token_bytes, shown))

    def _decode(self, token_ids: Listing[int]) -> str:
        return self._run(self._backend.decode, list(token_ids), self._skip_special)

    def _extend(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if self._stops is None:
            return False
        if self._num_tokens <= self._min_tokens:
            self._search_from = len(self.text)
            return False
        stop = self._stops.find(self.text, self._search_from, before)
        if stop is None:
            return False
        place, self.stop = stop
        self.text = self.text[: place + len(self.stop) if self._include_stop else place]
        return True

    def take(self) -> str:
        """Return the new text since the last call, except a part that may begin a stop string."""
        end = len(self.text)
        if self.stop is None and self._stops is not None:
            start = max(self._held_from, self._search_from)
            end = self._held_from = self._stops.first_beginning(self.text, start)
        piece = self.text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece


def _after(before: str, whole: str) -> str:
    # A character that was incomplete in `before` belongs to the rest.
    pairs = enumerate(zip(before, whole, strict=False))
    same = min(len(before), len(whole))
    return whole[next((index for index, (a, b) in pairs if a != b), same) :]
