"""Log-probabilities in the form of OpenAI's answers."""

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
    """Logprobs of a completion's tokens; of its prompt's too where that is echoed.

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
    """Logprobs of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str | None


class Row(NamedTuple):
    """Scores of one token: its own, and the most likely tokens with theirs, best first."""

    token: int
    logprob: float
    rank: int
    best: list[tuple[int, float]]

    @property
    def whole(self) -> list[tuple[int, float]]:
        """The alternatives, behind the token itself where it is none of them."""
        is_among = any(token == self.token for token, _ in self.best)
        return self.best if is_among else [(self.token, self.logprob), *self.best]


def rows(token_ids: Iterable[int], scores: Iterable[TokenLogprobs]) -> Iterator[Row]:
    """Yield the scores of each token; the pieces have one row for each token in total."""
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


def shown(width: int) -> int | None:
    """Return how many alternatives are shown where -1 stands for all: the end of a slice."""
    return None if width < 0 else width


class TokenTexts:
    """Texts of tokens, as answers spell them.

    Args:
        tokenizer: spells the tokens; without one they are spelled like `token_id:5`.
        as_ids: whether to spell them like that in any case.
    """

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return a token's text; U+FFFD stands for bytes that are no whole character."""
        text = self._texts.get(token)
        if text is None:
            text = f"token_id:{token}"
            if self._tokenizer is not None:
                text = self._tokenizer.token_bytes(token).decode(errors="replace")
            self._texts[token] = text
        return text

    def data(self, token: int) -> bytes:
        """Return a token's bytes; none where there is no tokenizer."""
        return b"" if self._bytes is None else self._bytes.token_bytes(token)

    def is_shown(self, token: int, skip_special_tokens: bool) -> bool:
        """Return whether a token is part of the text."""
        special = self._bytes is not None and token in self._bytes.special_ids
        return not (special and skip_special_tokens)

    def chat(
        self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs], with_own: bool = False
    ) -> list[TokenLogprob]:
        """Return the logprobs of tokens in the form of chat completions and responses.

        Args:
            token_ids, scores: of the tokens.
            with_own: whether a token is among its alternatives in any case.
        """
        return [
            TokenLogprob(
                self.text(row.token),
                row.logprob,
                list(self.data(row.token)),
                [
                    TopLogprob(self.text(token), value, list(self.data(token)))
                    for token, value in (row.whole if with_own else row.best)
                ],
            )
            for row in rows(token_ids, scores)
        ]

    def prompt(
        self, token_ids: Listing[int], scores: TokenLogprobs | None, width: int | None
    ) -> list[dict[int, PromptLogprob] | None] | None:
        """Return a prompt's logprobs by ids, None for its first token; None if there are none."""
        if scores is None or width is None:
            return None
        answer: list[dict[int, PromptLogprob] | None] = [None]
        for row in rows(token_ids[1:], [scores]):
            entry = {row.token: PromptLogprob(row.logprob, row.rank, self.text(row.token))}
            for rank, (token, value) in enumerate(row.best[: shown(width)], 1):
                entry.setdefault(token, PromptLogprob(value, rank, self.text(token)))
            answer.append(entry)
        return answer


class CompletionTokens:
    """Logprobs of one completion's tokens, made as the tokens come.

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
        """Return those of the prompt, which come first; its first token has none."""
        answer = CompletionLogprobs([], [], [], [])
        self._append(answer, token_ids[0], None, None)
        for row in rows(token_ids[1:], [scores]):
            self._append_row(answer, row, width)
        return answer

    def drawn(
        self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs], width: int
    ) -> CompletionLogprobs:
        """Return those of drawn tokens."""
        answer = CompletionLogprobs([], [], [], [])
        for row in rows(token_ids, scores):
            self._append_row(answer, row, width)
        return answer

    def _append_row(self, answer: CompletionLogprobs, row: Row, width: int) -> None:
        listed = reversed(row.best[: shown(width)])
        best = {self._texts.text(token): value for token, value in listed}
        # Several tokens may have one spelling: the best counts, but the row's own token before all.
        best = dict(reversed(best.items())) | {self._texts.text(row.token): row.logprob}
        self._append(answer, row.token, row.logprob, best)

    def _append(
        self,
        answer: CompletionLogprobs,
        token: int,
        logprob: float | None,
        best: dict[str, float] | None,
    ) -> None:
        text, num_new = self._texts.text(token), 0
        if self._texts.is_shown(token, self._skip):
            num_new = len(self._decoder.decode(self._texts.data(token)))
        self._offset += num_new
        # Bytes before it that make no character after all stand before it, as their own U+FFFD.
        is_whole = 0 < len(text) <= num_new and "\ufffd" not in text
        answer.text_offset.append(self._offset - (len(text) if is_whole else num_new))
        answer.tokens.append(text)
        answer.token_logprobs.append(logprob)
        answer.top_logprobs.append(best)


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """Join the logprobs of successive tokens."""
    if first is None:
        return then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )
