"""Live: a sequence being served, and what is said about it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.detokenizer import Detokenizer
from jaxserve.request import Ask
from jaxserve.scheduling.scores import Scores
from jaxserve.scheduling.sequence import Sequence


@dataclass(eq=False)
class Live:
    """A sequence being served and where its output goes."""

    sequence: Sequence
    sink: Sink
    detokenizer: Detokenizer | None

    def delta(self, token_ids: list[int], logprobs: Scores | None = None) -> Delta:
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

    def why_none(self) -> str:
        """Why no token could be drawn."""
        if self.sequence.request.sampling.asks & (Ask.ALLOWED | Ask.BANNED):
            return (
                "allowed_token_ids, bad_words and min_tokens left no token to draw, or the "
                "model's logits were not finite"
            )
        return "the model's logits were not finite"
