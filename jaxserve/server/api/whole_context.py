"""WholeContextGeneration: prompts that fill the context, scored without an answer.

The engine draws at least one token within the context. Of a prompt that fills it, the engine gets
all tokens but the last, and draws this one, as the only token that is allowed. Its log-probability
is the model's own, as those of the prompt are.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.request_factory import check_token_ids
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.api.generation import Generation, Part
from jaxserve.server.schema.openai import Usage
from jaxserve.server.served.models import ServedModel


def fills_context(model: ServedModel, prompt: list[int]) -> bool:
    """Return whether a prompt fills the context, and can be scored for all that.

    Raises:
        InvalidRequest: it holds a value that is no token.
    """
    # Log-probabilities of another mode depend on which tokens are allowed.
    if len(prompt) != model.limits.max_model_len or len(prompt) < 2:
        return False
    check_token_ids(prompt, model.limits.vocab_size)
    return not model.llm.config.logprobs_mode.startswith("processed")


def draw_last(prompt: list[int], sampling: SamplingParams) -> SamplingParams:
    """Return settings that draw the last token of a prompt behind the others, and score it."""
    return SamplingParams(
        n=sampling.n,
        temperature=0.0,
        max_tokens=1,
        allowed_token_ids=prompt[-1:],
        logprobs=sampling.prompt_logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        skip_special_tokens=sampling.skip_special_tokens,
    )


class WholeContextGeneration(Generation):
    """Generation whose answers are the scores of prompts alone.

    Args:
        model: scores them.
        requests: one for each prompt.
        filling: prompts that fill the context, by their places among the requests, which lack
            their last tokens.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Listing[Request],
        filling: Mapping[int, list[int]],
    ) -> None:
        super().__init__(model, requests)
        self._filling = filling
        for choice in self.choices:
            choice.prompt_token_ids = filling.get(choice.prompt, choice.prompt_token_ids)

    def _apply(self, delta: Delta, parts: dict[int, Part]) -> None:
        is_filling = self.choices[self._first[delta.request_id]].prompt in self._filling
        if is_filling and delta.prompt_logprobs is not None and delta.logprobs is not None:
            delta.prompt_logprobs = _joined(delta.prompt_logprobs, delta.logprobs)
        super()._apply(delta, parts)

    def usage(self, sent: Listing[int] | None = None) -> Usage:
        """Count tokens, the last ones of the prompts among them."""
        usage = super().usage(sent)
        usage.prompt_tokens += len(self._filling)
        usage.total_tokens += len(self._filling)
        return usage


def _joined(prompt: TokenLogprobs, last: TokenLogprobs) -> TokenLogprobs:
    """Return the log-probabilities of a prompt, its last token included."""
    if not len(prompt.rank):
        return last
    pairs = zip(prompt[:4], last[:4], strict=True)
    return TokenLogprobs(*(np.concatenate(pair) for pair in pairs))
