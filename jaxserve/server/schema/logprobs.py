"""Log-probabilities in the form of OpenAI's answers."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

import msgspec

from jaxserve.scheduling.logprobs import TokenLogprobs

# Used for -infinity, which JSON cannot represent.
LEAST = -9999.0


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities in an answer of the completions API: parallel lists with one entry per
    token.

    The tokens are those of the completion, after those of the prompt if it is echoed.
    """

    text_offset: list[int]  # index in the text of the first complete character of each token
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
    """Log-probabilities of the generated tokens of a chat message, one entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int
    decoded_token: str | None


class TokenScores(NamedTuple):
    """Log-probability and rank of one token, and the most likely tokens at its position, best
    first.
    """

    token: int
    logprob: float
    rank: int
    best: list[tuple[int, float]]

    @property
    def whole(self) -> list[tuple[int, float]]:
        """Most likely tokens with their log-probabilities, after the token itself if it is not
        among them.
        """
        is_among = any(token == self.token for token, _ in self.best)
        return self.best if is_among else [(self.token, self.logprob), *self.best]


def rows(token_ids: Iterable[int], scores: Iterable[TokenLogprobs]) -> Iterator[TokenScores]:
    """Yield the log-probability, rank and most likely tokens of each token as `TokenScores`.

    Log-probabilities below -9999 become -9999, since JSON has no infinity.

    Args:
        token_ids: ids of the scored tokens.
        scores: arrays of scores for successive groups of these tokens.
    """
    ids = iter(token_ids)
    for piece in scores:
        columns = (
            piece.logprob.clip(min=LEAST).tolist(),
            piece.rank.tolist(),
            piece.top_ids.tolist(),
            piece.top_logprobs.clip(min=LEAST).tolist(),
        )
        for logprob, rank, others, values in zip(*columns, strict=True):
            yield TokenScores(next(ids), logprob, rank, list(zip(others, values, strict=True)))


def shown(width: int) -> int | None:
    """Convert the requested number of alternatives to the end of a slice: None for -1, which means
    all.
    """
    return None if width < 0 else width


class TokenTexts:
    """Texts and bytes of single tokens, as log-probabilities in answers spell the tokens.

    Args:
        tokenizer: tokenizer of the model, or None to spell all tokens like `token_id:5`.
        as_ids: True to spell tokens like `token_id:5` even with a tokenizer.
    """

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer
        self._bytes = tokenizer
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Return the text of a token, with U+FFFD for bytes that are not a complete character."""
        text = self._texts.get(token)
        if text is None:
            text = f"token_id:{token}"
            if self._tokenizer is not None:
                text = self._tokenizer.token_bytes(token).decode(errors="replace")
            self._texts[token] = text
        return text

    def data(self, token: int) -> bytes:
        """Return the UTF-8 bytes of a token, b"" without a tokenizer."""
        return b"" if self._bytes is None else self._bytes.token_bytes(token)

    def is_shown(self, token: int, skip_special_tokens: bool) -> bool:
        """Return whether a token is part of an answer's text.

        It is, unless it is a special token and `skip_special_tokens` is True.
        """
        special = self._bytes is not None and token in self._bytes.special_ids
        return not (special and skip_special_tokens)

    def chat(
        self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs], with_own: bool = False
    ) -> list[TokenLogprob]:
        """Return the log-probabilities of tokens in the form of the chat and responses APIs.

        Args:
            scores: arrays of scores for successive groups of the tokens.
            with_own: True to put a token at the head of its alternatives if it is not one of them.
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
        """Return the log-probabilities at each position of a prompt, as a mapping from token id.

        The entry of the first position is None. Without scores or without `width`, return None.

        Args:
            token_ids: ids of all prompt tokens.
            width: number of alternatives beside the prompt's own token, -1 for all.
        """
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
    """Incremental conversion of the log-probabilities of one completion to the form of its API.

    It keeps the text offset from one group of tokens to the next.
    """

    def __init__(self, texts: TokenTexts, skip_special_tokens: bool) -> None:
        self._texts = texts
        self._skip = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(
        self, token_ids: Listing[int], scores: TokenLogprobs, width: int
    ) -> CompletionLogprobs:
        """Return the log-probabilities of an echoed prompt, None for its first token.

        Args:
            token_ids: ids of all prompt tokens.
            width: number of alternatives per token, -1 for all.
        """
        answer = CompletionLogprobs([], [], [], [])
        self._append(answer, token_ids[0], None, None)
        for row in rows(token_ids[1:], [scores]):
            self._append_row(answer, row, width)
        return answer

    def drawn(
        self, token_ids: Iterable[int], scores: Iterable[TokenLogprobs], width: int
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the next generated tokens.

        Args:
            scores: arrays of scores for successive groups of the tokens.
            width: number of alternatives per token, -1 for all.
        """
        answer = CompletionLogprobs([], [], [], [])
        for row in rows(token_ids, scores):
            self._append_row(answer, row, width)
        return answer

    def _append_row(self, answer: CompletionLogprobs, row: TokenScores, width: int) -> None:
        listed = reversed(row.best[: shown(width)])
        best = {self._texts.text(token): value for token, value in listed}
        # Several tokens may have the same text. The best one counts, but the row's own token has
        # priority.
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
        # Earlier bytes that turn out to be invalid become U+FFFD of their own before this token.
        is_whole = 0 < len(text) <= num_new and "\ufffd" not in text
        answer.text_offset.append(self._offset - (len(text) if is_whole else num_new))
        answer.tokens.append(text)
        answer.token_logprobs.append(logprob)
        answer.top_logprobs.append(best)


def joined(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """Return the log-probabilities of two successive groups of tokens as one group.

    Args:
        first: log-probabilities of the first group, or None.
        then: log-probabilities of the second group.
    """
    if first is None:
        return then
    return CompletionLogprobs(
        first.text_offset + then.text_offset,
        first.token_logprobs + then.token_logprobs,
        first.tokens + then.tokens,
        first.top_logprobs + then.top_logprobs,
    )
