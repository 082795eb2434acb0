"""Live: a sequence being served, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.text.detokenizer import Detokenizer
from jaxserve.errors import InvalidRequest
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.scheduling.sequence import Sequence
from jaxserve.structured import NAME as STRUCTURED


@dataclass(eq=False)
class LiveSequence:
    """A sequence being served and where its output goes."""

    sequence: Sequence
    sink: Sink
    detokenizer: Detokenizer | None

    def delta(self, token_ids: list[int], logprobs: TokenLogprobs | None = None) -> Delta:
        """What is new: these tokens, the text that is certain by now, a prompt's scores once."""
        sequence, text, prompt = self.sequence, self.detokenizer, self.sequence.prompt_scores
        return Delta(
            sequence.request.request_id,
            sequence.index,
            "" if text is None else text.take(),
            token_ids,
            max(sequence.num_cached, 0),
            logprobs=logprobs,
            prompt_logprobs=(
                prompt.take()
                if prompt and token_ids and prompt.is_complete and not prompt.is_sent
                else None
            ),
        )

    @property
    def hides_last(self) -> bool:
        """Whether the newest token is a stop id: it ends the text before itself, unless that text
        is asked for."""
        sampling = self.sequence.request.sampling
        return self.sequence.stop_token is not None and not sampling.include_stop_str_in_output

    def why_none(self, vocab_size: int) -> str | InvalidRequest:
        """Why no token could be drawn: for want of one that the request lets through, or for logits
        that say nothing. Only once the sequence has ended.

        Args:
            vocab_size: width of the logits.
        """
        if _allowed(self.sequence, vocab_size).any():
            return "the model's logits were not finite"
        sampling = self.sequence.request.sampling
        excluding = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            "bad_words": bool(sampling.bad_words),
            STRUCTURED: sampling.structured_outputs is not None,
            "thinking_token_budget": sampling.thinking_token_budget is not None,
            "min_tokens": sampling.min_tokens > 0,
        }
        names = [name for name, excludes in excluding.items() if excludes]
        return InvalidRequest(f"{', '.join(names)} left no token to draw", names[0])


def _allowed(sequence: Sequence, vocab_size: int) -> np.ndarray:
    """bool[V]: what a sequence's request lets through next, as `logit_edits` has it."""
    request = sequence.request
    listed = request.sampling.allowed_token_ids
    allowed = np.full(vocab_size, listed is None)
    if listed is not None:
        allowed[list(listed)] = True
    if sequence.constraint is not None:
        words = sequence.constraint.words.view(np.uint8)
        allowed &= np.unpackbits(words, bitorder="little")[:vocab_size].astype(bool)
    drawn = tuple(sequence.output_token_ids())
    for *before, last in request.bad_words_token_ids:
        if drawn[len(drawn) - len(before) :] == tuple(before):
            allowed[last] = False
    if len(drawn) < request.sampling.min_tokens:
        allowed[list(request.stop_token_ids)] = False
    return allowed
