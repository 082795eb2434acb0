"""BeamGeneration: the completions of a beam search."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Listing

import numpy as np

from jaxserve.engine.beam_search import Beam
from jaxserve.engine.stream import Stream
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.request import BeamSearchParams, Request, SamplingParams
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.api.generation import Choice, Generation, Part
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.openai import Sampling
from jaxserve.server.schema.sampling import form_field
from jaxserve.server.served.models import ServedModel
from jaxserve.server.tool_calls.dialect import AnswerFormat

# Settings that a search does not have, each with its neutral values.
_EXCLUDED = {
    "stop": (None, "", []),
    "stop_token_ids": (None, []),
    "min_tokens": (None, 0),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None, []),
}


def beam_params(body: Sampling, sampling: SamplingParams, longest: int) -> BeamSearchParams | None:
    """Return the settings of the search that a request wants; None if it wants none.

    Args:
        sampling: the request's settings as they are without a search.
        longest: tokens of an answer where the request sets no limit.

    Raises:
        InvalidRequest: naming a field, or one that a search excludes.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise InvalidRequest("length_penalty needs use_beam_search=true", "length_penalty")
        return None
    excluded = ["stream"] if body.stream else []
    excluded += [name for name, neutral in _EXCLUDED.items() if getattr(body, name) not in neutral]
    if sampling.structured_outputs is not None:
        excluded.append(form_field(body))
    if sampling.thinking_token_budget is not None:
        excluded.append("thinking_token_budget")
    if excluded:
        name = excluded[0]
        raise InvalidRequest(f"{name} is not supported with use_beam_search", name)
    return BeamSearchParams(
        beam_width=sampling.n,
        max_tokens=longest if sampling.max_tokens is None else sampling.max_tokens,
        ignore_eos=sampling.ignore_eos,
        temperature=sampling.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=sampling.include_stop_str_in_output,
        skip_special_tokens=sampling.skip_special_tokens,
        allowed_token_ids=sampling.allowed_token_ids,
    )


class BeamGeneration(Generation):
    """A generation whose choices are the best sequences of searches, one for each prompt.

    Args:
        model: draws them.
        requests: one for each prompt, which are never served: they say what the search is for.
        params: of every search.
        formats: of the answers' thoughts and calls, one for each request; none by default.

    Raises:
        InvalidRequest: the engine compares fewer candidates.
    """

    def __init__(
        self,
        model: ServedModel,
        requests: Listing[Request],
        params: BeamSearchParams,
        formats: Listing[AnswerFormat] = (),
    ) -> None:
        super().__init__(model, requests, formats)
        self._params = params
        self._searches = [
            model.llm.make_search(
                request.prompt_token_ids,
                params,
                stop_token_ids=request.sampling.stop_token_ids or (),
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for request in requests
        ]

    def _open_stream(self) -> Stream:
        return self.model.llm.open([])

    async def run(self) -> None:
        """Wait for the end of every search.

        Raises:
            ApiError: it took too long, or the engine failed.
        """
        searches = asyncio.ensure_future(self.model.llm.search_all(self._searches))
        failure = asyncio.ensure_future(self._stream.take())  # which ends by `fail` alone
        self._start_all()
        try:
            await asyncio.wait({searches, failure}, return_when=asyncio.FIRST_COMPLETED)
            if failure.done():
                failure.result()
            await searches
        except EngineDead as error:
            raise ApiError(500, str(error), code="engine_error") from None
        finally:
            searches.cancel()
            failure.cancel()
            await asyncio.gather(searches, failure, return_exceptions=True)
        self._answer()

    def _answer(self) -> None:
        """Fill the choices with what was found, and give back the places of those left over."""
        first, answered = 0, []
        for search, request in zip(self._searches, self.requests, strict=True):
            choices = self.choices[first : first + request.sampling.n]
            for choice, beam in zip(choices, search.best(), strict=False):
                choice.index = len(answered)
                self._fill(choice, beam)
                answered.append(choice)
            first += request.sampling.n
        self._admission.num_live -= self._live
        self.choices, self._live = answered, 0

    def _fill(self, choice: Choice, beam: Beam) -> None:
        tokens, shown = beam.token_ids, beam.token_ids
        if beam.end is not None:
            shown = tokens[:-1]  # the text has no place for it, as in vLLM
            tokens = tokens if self._params.include_stop_str_in_output else shown
        choice.token_ids = tokens
        tokenizer = self.model.llm.get_tokenizer()
        if tokenizer is not None:
            choice.text = tokenizer.decode(shown, self._params.skip_special_tokens)
        width = self.requests[choice.prompt].sampling.logprobs
        if width is not None:
            pairs = zip(tokens, beam.scores, strict=False)
            choice.logprobs = [_of_token(token, scores, width) for token, scores in pairs]
        choice.stop_reason = beam.end
        part = Part(choice.index, choice.text, tokens)
        part.finish_reason = "length" if beam.end is None else "stop"
        choice.read(part)
        self._end(choice, part.finish_reason)


def _of_token(token: int, scores: TokenLogprobs, width: int) -> TokenLogprobs:
    """Return the scores of one of the candidates, with the best ones of all of them.

    Args:
        width: of those, or -1 for all.
    """
    ranks, place = scores.ranks(), scores.top_ids[0].tolist().index(token)
    order = np.argsort(-scores.top_logprobs[0], kind="stable")
    best = order if width < 0 else order[:width]
    return TokenLogprobs(
        scores.top_logprobs[:, place],
        ranks[:, place],
        scores.top_ids[:, best],
        scores.top_logprobs[:, best],
        ranks[:, best],
    )
