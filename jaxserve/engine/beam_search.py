"""Beam search over `LLM.generate`: the most likely continuations of prompts, by vLLM's rules.

Each step generates one token for every beam and compares twice as many candidates as there are
beams; the prefix cache holds the pages of earlier tokens. A candidate that ends its sequence is
complete. The best other candidates are the beams of the next step, up to the last token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Listing
from dataclasses import replace
from typing import Any

from jaxserve.engine.request_factory import check_logprobs
from jaxserve.errors import EngineDead, InvalidRequest
from jaxserve.outputs import BeamSearchOutput, BeamSearchSequence, Logprob, RequestOutput
from jaxserve.request import BeamSearchParams, Request, SamplingParams
from jaxserve.settings.checks import exact_int
from jaxserve.start.plan.limits import Limits


class BeamSearch:
    """The state of the beam search for one prompt: unfinished beams and complete sequences.

    `run_searches` scores the beams of each step, and `advance` chooses the beams of the next step.

    Args:
        request: a request with the prompt, the cache salt and the priority that all beams use.
    """

    def __init__(self, request: Request, params: BeamSearchParams, limits: Limits) -> None:
        self.request = request
        self._params = params
        prompt = request.prompt_token_ids.tolist()
        self._num_prompt, self._length = len(prompt), 0
        self._most = min(params.max_tokens, limits.max_model_len - len(prompt))
        self._ends = frozenset(() if params.ignore_eos else limits.eos_token_ids)
        self.beams = [BeamSearchSequence(prompt, [], 0.0)]
        self._complete: list[BeamSearchSequence] = []

    @property
    def is_done(self) -> bool:
        return self._length == self._most or not self.beams

    def advance(self, scores: Listing[dict[int, Logprob]]) -> None:
        """Extend the beams by one token each, to the `beam_width` best candidates.

        The candidates of a beam are its `2 * beam_width` most likely next tokens, or the allowed
        tokens. A candidate whose token ends the sequence becomes a complete sequence instead of a
        beam. Only the best `beam_width` complete sequences are kept.

        Args:
            scores: for each beam in order, the Logprobs of its next tokens by token id.
        """
        width = self._params.beam_width
        self._length += 1
        candidates = [
            (beam.cum_logprob + score.logprob, beam, token, row)
            for beam, row in zip(self.beams, map(self._candidates, scores), strict=True)
            for token, score in row.items()
            if score.logprob > -math.inf
        ]
        # Candidates of one step are equally long. Among equals, those of the first beam lead.
        candidates.sort(key=lambda candidate: -candidate[0] / self._divisor(self._length))
        ended = [candidate for candidate in candidates if candidate[2] in self._ends]
        going = [candidate for candidate in candidates if candidate[2] not in self._ends]
        complete = [_longer(*candidate, is_end=True) for candidate in ended[:width]]
        self._complete = self._best([*self._complete, *complete])
        self.beams = [_longer(*candidate) for candidate in going[:width]]

    def _candidates(self, row: dict[int, Logprob]) -> dict[int, Logprob]:
        allowed, width = self._params.allowed_token_ids, 2 * self._params.beam_width
        tokens = sorted(allowed or row, key=lambda token: -row[token].logprob)
        # A sampled token is added to the requested number of best tokens, and dropped here.

        return {token: row[token] for token in tokens[: None if allowed else width]}

    def _divisor(self, length: int) -> float:
        return length**self._params.length_penalty

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        def rank(sequence: BeamSearchSequence) -> float:
            length = len(sequence.tokens) - self._num_prompt
            return sequence.cum_logprob / self._divisor(length)

        return sorted(sequences, key=rank, reverse=True)[: self._params.beam_width]

    def output(self, tokenizer: Any) -> BeamSearchOutput:
        """Return the best `beam_width` sequences among complete sequences and present beams.

        A tokenizer decodes their texts. With None, the sequences have no texts.
        """
        best = self._best([*self._complete, *self.beams])
        if tokenizer is None:
            return BeamSearchOutput(best)
        for sequence in best:
            sequence.text = tokenizer.decode(sequence.tokens, self._params.skip_special_tokens)
            sequence.logprobs = [
                {t: replace(s, decoded_token=tokenizer.decode([t], False)) for t, s in row.items()}
                for row in sequence.logprobs
            ]
        return BeamSearchOutput(best)


def _longer(
    total: float,
    beam: BeamSearchSequence,
    token: int,
    row: dict[int, Logprob],
    is_end: bool = False,
) -> BeamSearchSequence:
    tokens, rows = [*beam.tokens, token], [*beam.logprobs, row]
    reason, end = ("stop", token) if is_end else ("length", None)
    return BeamSearchSequence(tokens, rows, total, None, reason, end)


def run_searches(
    searches: Listing[BeamSearch],
    step: SamplingParams,
    generate: Callable[..., list[RequestOutput]],
) -> None:
    """Run beam searches to their ends, with all beams of one step in one call of `generate`.

    Args:
        step: sampling settings for one token of a beam, from `step_settings`.
        generate: `LLM.generate`.

    Raises:
        EngineDead: a request of a beam failed or was aborted.
    """
    while active := [search for search in searches if not search.is_done]:
        beams = [(search.request, beam) for search in active for beam in search.beams]
        prompts = [
            {"prompt_token_ids": beam.tokens, "cache_salt": request.cache_salt}
            for request, beam in beams
        ]
        priorities = [request.priority for request, _ in beams]
        outputs = generate(prompts, step, priority=priorities, use_tqdm=False)
        for output in outputs:
            if output.outputs[0].finish_reason not in ("stop", "length"):
                raise EngineDead(f"the beam search failed: {output.error or 'it was ended'}")
        scores = iter([(output.outputs[0].logprobs or [{}])[0] for output in outputs])
        for search in active:
            search.advance([next(scores) for _ in search.beams])


def step_settings(params: BeamSearchParams, temperature: float, limits: Limits) -> SamplingParams:
    """Return the sampling settings of a request that generates and scores one token of a beam.

    Args:
        temperature: temperature of the request, which affects only processed log-probabilities.

    Raises:
        InvalidRequest: an allowed token id of the search is not in the vocabulary, or the engine's
            max_logprobs is below the number of candidates.
    """
    name, listed = "allowed_token_ids", params.allowed_token_ids
    for token in listed or ():
        exact_int(token, name, 0, limits.vocab_size - 1)
    count = min(2 * params.beam_width, limits.vocab_size) if listed is None else None
    step = SamplingParams(max_tokens=1, seed=0, ignore_eos=True, detokenize=False, logprobs=count)
    step = replace(step, temperature=temperature, logprob_token_ids=listed)
    try:
        check_logprobs(step, limits)
    except InvalidRequest:
        need = "an engine that was started with max_logprobs above 20, or -1"
        if listed is None:
            name, most = "beam_width", limits.max_logprobs
            need = f"twice as many candidates, and the engine's max_logprobs is {most}"
        raise InvalidRequest(f"{name} needs {need}", name) from None
    return step
