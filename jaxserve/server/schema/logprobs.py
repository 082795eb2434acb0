"""Logprobs as OpenAI's endpoints word them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import msgspec

from jaxserve.scheduling.logprobs import TokenLogprobs

# JSON has no infinities.
LEAST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """Of a completion's tokens; of its prompt's too where that is echoed.

    `text_offset` is where a token's first whole character stands in the text.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str | None


class Row(NamedTuple):
    """One token's scores: its own, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    rank: int
    best: list[tuple[int, float]]


def rows(token_ids: Iterable[int], scores: Iterable[TokenLogprobs]) -> Iterator[Row]:
    """The scores of tokens, one by one; together the scores have as many rows as there are."""
    ids = iter(token_ids)
    for piece in scores:
        columns = (
            piece.logprob.clip(min=LEAST).tolist(),
            piece.rank.tolist(),
            piece.top_ids.tolist(),
            piece.top_logprobs.clip(min=LEAST).tolist(),
        )
        for logprob, rank, others, values in zip(*columns, strict=True):
            yield Row(next(ids), logprob, rank, list(zip(others, values, strict=True)))


class TokenTexts:
    """Tokens as answers spell them.

    Args:
        tokenizer: spells them; None spells them as `token_id:5`.
        as_ids: spell them so anyway.
    """

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes = tokenizer
        self._known: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return a token's text; U+FFFD stands for bytes that are no whole character."""
        text = self._known.get(token)
        if text is None:
            text = f"token_id:{token}"
            if self._tokenizer is not None:
                text = self._tokenizer.token_bytes(token).decode(errors="replace")
            self._known[token] = text
        return text

    def data(self, token: int) -> bytes:
        """Return a token's bytes; none where there is no tokenizer."""
        return b"" if self._bytes is None else self._bytes.token_bytes(token)

    def is_shown(self, token: int, skip_special_tokens: bool) -> bool:
        """Return whether a token is part of the text."""
        special = self._bytes is not None and token in self._bytes.special_ids
        return not (special and skip_special_tokens)

    def chat(self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs]) -> list[TokenLogprob]:
        """As chat completions and responses have them."""
        return [
            TokenLogprob(
                self.text(row.token),
                row.logprob,
                list(self.data(row.token)),
                [
                    TopLogprob(self.text(one), value, list(self.data(one)))
                    for one, value in row.best
                ],
            )
            for row in rows(token_ids, scores)
        ]

    def prompt(
        self, token_ids: Listing[int], scores: TokenLogprobs, width: int
    ) -> list[dict[int, PromptLogprob] | None]:
        """As vLLM has those of a prompt: by token ids, nothing for the first token."""
        answer: list[dict[int, PromptLogprob] | None] = [None]
        for row in rows(token_ids[1:], [scores]):
            entry = {row.token: PromptLogprob(row.logprob, row.rank, self.text(row.token))}
            for rank, (one, value) in enumerate(row.best[:width], 1):
                entry.setdefault(one, PromptLogprob(value, rank, self.text(one)))
            answer.append(entry)
        return answer


class CompletionTokens:
    """One completion's tokens, worded as they come.

    Args:
        texts: spells tokens.
        skip_special_tokens: whether the text leaves special tokens out.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, token_ids: Listing[int], scores: TokenLogprobs, width: int
    ) -> CompletionLogprobs:
        """Return the prompt's, which come first; nothing is known of its first token."""
        answer = CompletionLogprobs([], [], [], [])
        self._append(answer, token_ids[0], None, None)
        for row in rows(token_ids[1:], [scores]):
            self._append_row(answer, row, width)
        return answer

    def drawn(
        self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs], width: int
    ) -> CompletionLogprobs:
        """Those of what was drawn."""
        answer = CompletionLogprobs([], [], [], [])
        for row in rows(token_ids, scores):
            self._append_row(answer, row, width)
        return answer

    def _append_row(self, answer: CompletionLogprobs, row: Row, width: int) -> None:
        best = {self._texts.text(one): value for one, value in reversed(row.best[:width])}
        # Unlike tokens may be spelled alike; the best of them counts, and the token's own last.
        best = dict(reversed(best.items())) | {self._texts.text(row.token): row.logprob}
        self._append(answer, row.token, row.logprob, best)

    def _append(
        self,
        answer: CompletionLogprobs,
        token: int,
        logprob: float | None,
        best: dict[str, float] | None,
    ) -> None:
        text, came = self._texts.text(token), 0
        if self._texts.is_shown(token, self._skip):
            came = len(self._decoder.decode(self._texts.data(token)))
        self._offset += came
        # Bytes before it that turn out to be no character stand before it, as one of their own.
        is_whole = 0 < len(text) <= came and "\ufffd" not in text
        answer.text_offset.append(self._offset - (len(text) if is_whole else came))
        answer.tokens.append(text)
        answer.token_logprobs.append(logprob)
        answer.top_logprobs.append(best)


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    if first is None:
        return then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )
