"""BeamSearch: the most likely continuations of a prompt, by vLLM's rules.

Every step draws one token for each beam, with twice as many candidates as there are beams; pages of
the prefix cache hold what was computed before. A candidate that ends the text is complete; the best
others are the beams of the next step. The search goes on to the last token, and ranks all by their
sum of log-probabilities over a power of their length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxserve.engine.request_factory import RequestFactory, check_logprobs, check_token_ids
from jaxserve.errors import InvalidRequest, PromptTooLong
from jaxserve.outputs import BeamSearchOutput, BeamSearchSequence, Logprob
from jaxserve.request import BeamSearchParams, Request, SamplingParams
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.settings.checks import exact_int
from jaxserve.start.plan.limits import Limits


@dataclass
class Beam:
    """A sequence of the search.

    Attributes:
        token_ids: those generated, one that ended it included.
        scores: the candidates at the place of each.
        cum_logprob: the sum of their log-probabilities.
        end: the token that ended it, or None.
    """

    token_ids: list[int]
    scores: list[TokenLogprobs]
    cum_logprob: float
    end: int | None = None


class BeamSearch:
    """The search for one prompt. Whoever runs it serves `requests` and hands in what they drew.

    Args:
        prompt_token_ids: of the prompt.
        params: its settings.
        requests: makes the requests of each step.
        limits: of the engine.
        is_processed: whether the engine's log-probabilities depend on the temperature.
        stop_token_ids: more tokens that end a sequence, beside the model's.
        options: of every request: priority and cache_salt.

    Raises:
        InvalidRequest: the engine compares fewer candidates, or the prompt cannot be served.
    """

    def __init__(
        self,
        prompt_token_ids: Any,
        params: BeamSearchParams,
        requests: RequestFactory,
        limits: Limits,
        is_processed: bool = False,
        stop_token_ids: Listing[int] = (),
        **options: Any,
    ) -> None:
        self.params = params
        self.prompt_token_ids = check_token_ids(prompt_token_ids, limits.vocab_size).tolist()
        room = limits.max_model_len - len(self.prompt_token_ids)
        if room < 1:
            raise PromptTooLong(
                f"prompt has {len(self.prompt_token_ids)} tokens; at most "
                f"{limits.max_model_len - 1} leave room for an answer",
                "prompt",
            )
        self._left = min(params.max_tokens, room)
        self._requests = requests
        self._options = options
        self._ends = [*stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)]
        self._sampling = _sampling(params, limits, is_processed)
        self._beams = [Beam([], [], 0.0)]
        self._complete: list[Beam] = []

    @property
    def is_done(self) -> bool:
        """Return whether there is no further step."""
        return not (self._left and self._beams)

    def requests(self) -> list[Request]:
        """Return the requests of the next step, one for each beam."""
        make = self._requests.make
        return [
            make(self.prompt_token_ids + beam.token_ids, self._sampling, **self._options)
            for beam in self._beams
        ]

    def advance(self, drawn: Listing[TokenLogprobs]) -> None:
        """Take what the requests drew: the candidates of each beam.

        All candidates are ranked as numbers; sequences are made of the best of them alone.
        """
        tokens = np.concatenate([scores.top_ids for scores in drawn])
        logprobs = np.concatenate([scores.top_logprobs for scores in drawn], dtype=np.float64)
        if self.params.allowed_token_ids is not None:
            best_first = np.argsort(-logprobs, axis=1, kind="stable")
            tokens = np.take_along_axis(tokens, best_first, axis=1)
            logprobs = np.take_along_axis(logprobs, best_first, axis=1)
        totals = logprobs + np.array([[beam.cum_logprob] for beam in self._beams])
        ranks = totals / self._divisor(len(self._beams[0].token_ids) + 1)
        order = np.argsort(-ranks, axis=None, kind="stable")  # of equals, the first beam's first
        order = order[logprobs.flat[order] > -np.inf]
        ends = np.isin(tokens, self._ends).flat[order]

        def followed(places: np.ndarray, is_end: bool) -> Iterator[Beam]:
            for place in places[: self.params.beam_width].tolist():
                parent, token = place // tokens.shape[1], int(tokens.flat[place])
                beam = self._beams[parent]
                token_ids, scores = [*beam.token_ids, token], [*beam.scores, drawn[parent]]
                end = token if is_end else None
                yield Beam(token_ids, scores, float(totals.flat[place]), end)

        self._complete = self._ranked([*self._complete, *followed(order[ends], True)])
        self._beams = list(followed(order[~ends], False))
        self._left -= 1

    def _divisor(self, length: int) -> float:
        return max(length, 1) ** self.params.length_penalty

    def _ranked(self, beams: list[Beam]) -> list[Beam]:
        """Return the best of some sequences, as many as there are beams, the best first."""

        def rank(beam: Beam) -> float:
            return beam.cum_logprob / self._divisor(len(beam.token_ids))

        return sorted(beams, key=rank, reverse=True)[: self.params.beam_width]

    def best(self) -> list[Beam]:
        """Return the best sequences so far, at most as many as there are beams, best first."""
        return self._ranked([*self._complete, *self._beams])

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        """Return the best sequences in the form of vLLM's Python API.

        Args:
            tokenizer: makes the texts; None for none.
        """

        def decode(token: int) -> str | None:
            return None if tokenizer is None else tokenizer.decode([token], False)

        sequences: list[BeamSearchSequence] = []
        for beam in self.best():
            tokens = self.prompt_token_ids + beam.token_ids
            text = None
            if tokenizer is not None:
                text = tokenizer.decode(tokens, self.params.skip_special_tokens)
            dicts = [_by_id(row, decode) for row in beam.scores]
            reason = "length" if beam.end is None else "stop"
            sequences.append(
                BeamSearchSequence(tokens, dicts, beam.cum_logprob, text, reason, beam.end)
            )
        return BeamSearchOutput(sequences)


def _by_id(scores: TokenLogprobs, decode: Callable[[int], str | None]) -> dict[int, Logprob]:
    columns = (scores.top_ids[0], scores.top_logprobs[0], scores.ranks()[0])
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return {token: Logprob(value, rank, decode(token)) for token, value, rank in rows}


def _sampling(params: BeamSearchParams, limits: Limits, is_processed: bool) -> SamplingParams:
    """Return the settings of one step of one beam.

    Raises:
        InvalidRequest: the engine compares fewer candidates.
    """
    settings: dict[str, Any] = {"max_tokens": 1, "detokenize": False, "ignore_eos": True, "seed": 0}
    settings["temperature"] = params.temperature if is_processed else 0.0
    if params.allowed_token_ids is not None:
        for token in params.allowed_token_ids:
            exact_int(token, "allowed_token_ids", 0, limits.vocab_size - 1)
        settings["logprob_token_ids"] = params.allowed_token_ids
    else:
        settings["logprobs"] = min(2 * params.beam_width, limits.vocab_size)
    sampling = SamplingParams(**settings)
    try:
        check_logprobs(sampling, limits)
    except InvalidRequest:
        if params.allowed_token_ids is None:
            raise InvalidRequest(
                "beam_width needs twice as many candidates, and the engine's max_logprobs is "
                f"{limits.max_logprobs}",
                "beam_width",
            ) from None
        raise InvalidRequest(
            "allowed_token_ids needs an engine that was started with max_logprobs above 20, or -1",
            "allowed_token_ids",
        ) from None
    return sampling


ServeStep = Callable[[list[Request]], list[TokenLogprobs]]


def run_searches(searches: Listing[BeamSearch], serve: ServeStep) -> None:
    """Run searches to their ends, all of their beams in one step after the other.

    Args:
        serve: returns what each of some requests drew.
    """
    while active := [search for search in searches if not search.is_done]:
        steps = [search.requests() for search in active]
        drawn = iter(serve([request for step in steps for request in step]))
        for search, step in zip(active, steps, strict=True):
            search.advance([next(drawn) for _ in step])
