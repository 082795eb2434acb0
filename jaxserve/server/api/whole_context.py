"""WholeContextGeneration: log-probabilities of prompts as long as the context.

The engine samples at least one token within the context. Of a prompt that fills the context, it
gets all tokens except the last, and then samples the last token as the only allowed token. The
log-probability of this token is the model's own, like the log-probabilities of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Listing

import numpy as np

from jaxserve.engine.delta import Delta
from jaxserve.engine.prompts import check_token_ids
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.api.generation import ChoicePart, Generation
from jaxserve.server.schema.openai import Usage
from jaxserve.server.served.models import ServedModel


def fills_context(model: ServedModel, prompt: list[int]) -> bool:
    """Return whether a prompt is as long as the model's context and the engine can score it.

    The engine cannot if it reports processed log-probabilities, which depend on the allowed tokens.

    Raises:
        InvalidRequest: the prompt has a value that is not a token id.
    """
    # Processed log-probabilities depend on the allowed tokens.
    if len(prompt) != model.limits.max_model_len or len(prompt) < 2:
        return False
    check_token_ids(prompt, model.limits.vocab_size)
    return not model.llm.config.logprobs_mode.startswith("processed")


def draw_last(prompt: list[int], sampling: SamplingParams) -> SamplingParams:
    """Return sampling parameters with which the engine generates the last token of a prompt.

    The token is the only allowed one, and gets a log-probability.

    Args:
        prompt: token ids, of which the engine gets all except the last.
        sampling: sampling parameters of the request.
    """
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
    """Generation for requests that only score prompts, some of which are as long as the context.

    The engine generates the last token of such a prompt. The results show it as a prompt token.

    Args:
        requests: the engine's requests, one for each prompt.
        filling: prompts as long as the context, by the numbers of their requests. The requests have
            these prompts without their last tokens.
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

    def _apply(self, delta: Delta, parts: dict[int, ChoicePart]) -> None:
        is_filling = self.choices[self._first[delta.request_id]].prompt in self._filling
        if is_filling and delta.prompt_logprobs is not None and delta.logprobs is not None:
            delta.prompt_logprobs = _joined(delta.prompt_logprobs, delta.logprobs)
        super()._apply(delta, parts)

    def usage(self, sent: Listing[int] | None = None) -> Usage:
        """Return the token counts of the request. The last token of a long prompt counts as prompt.

        `sent` is the number of generated tokens of each choice that count, by default all.
        """
        usage = super().usage(sent)
        usage.prompt_tokens += len(self._filling)
        usage.total_tokens += len(self._filling)
        return usage


def _joined(prompt: TokenLogprobs, last: TokenLogprobs) -> TokenLogprobs:
    if not len(prompt.rank):
        return last
    pairs = zip(prompt[:4], last[:4], strict=True)
    return TokenLogprobs(*(np.concatenate(pair) for pair in pairs))
