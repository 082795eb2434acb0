"""Delivery: sends the tokens and texts of committed steps to the receivers of requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.draw_scores import DrawScores, allowed_tokens
from jaxserve.engine.metrics import SequenceTimes
from jaxserve.engine.recovery import Recovery
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason
from jaxserve.scheduling.commit_result import StepResult
from jaxserve.scheduling.logprobs import DrawLogprobs, StepLogprobs, TokenLogprobs
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.structured import NAME as STRUCTURED
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.grammars import GrammarError
from jaxserve.text.tokenizer_calls import TokenizerFailure

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class LiveSequence:
    """An unfinished sequence (one completion), its detokenizer and its output's receiver."""

    sequence: Sequence
    sink: Sink  # the receiver, called with each delta
    detokenizer: Detokenizer | None  # the detokenizer, or None if no text is requested
    # Whether the receiver takes the tokens of a launch as arrays, in one delta, without text.
    takes_arrays: bool = False
    arrived: float = 0.0  # the time of arrival (`time.monotonic`)
    first_token: float = 0.0  # the time at which the first token was read, 0 before

    def delta(
        self,
        tokens: list[int] | np.ndarray,
        logprobs: TokenLogprobs | None = None,
        version: str = "",
    ) -> Delta:
        """Return a Delta with new tokens of this sequence, their logprobs and all final text.

        It also contains the prompt's log-probabilities, once, when they are complete. A receiver of
        arrays gets no text.
        """
        sequence, text, prompt = self.sequence, self.detokenizer, self.sequence.prompt_logprobs
        return Delta(
            sequence.request.request_id,
            sequence.index,
            "" if text is None or self.takes_arrays else text.take(),
            tokens if isinstance(tokens, list) else [],
            max(sequence.num_cached, 0),
            version,
            logprobs=logprobs,
            prompt_logprobs=(
                prompt.take()
                if prompt and len(tokens) and prompt.is_complete and not prompt.is_sent
                else None
            ),
            tokens=None if isinstance(tokens, list) else tokens,
        )

    def times(self, now: float) -> SequenceTimes:
        """Return the SequenceTimes of this sequence, whose last token was read at `now`."""
        sequence = self.sequence
        return SequenceTimes(
            self.arrived, sequence.started, self.first_token, now, sequence.num_preemptions
        )

    @property
    def hides_last(self) -> bool:
        """Whether the sequence's newest token is a stop token that its text must not contain.

        The result is False for a request with `include_stop_str_in_output`.
        """
        sampling = self.sequence.request.sampling
        return self.sequence.stop_token is not None and not sampling.include_stop_str_in_output

    def why_none(self, vocab_size: int) -> str | InvalidRequest:
        """Return the reason why no next token could be sampled for this sequence.

        The reason is an InvalidRequest if the request's settings exclude all tokens. Otherwise it
        is a text: the model's logits were not finite.
        """
        drawn = self.sequence.output_token_ids()
        if allowed_tokens(self.sequence, drawn, vocab_size).any():
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


class Delivery:
    """The unfinished sequences of an engine, and the sending of their new tokens and text.

    Args:
        scheduler: the scheduler. `Delivery` finishes a sequence there if its text contains a stop
            string or its grammar is complete.
    """

    def __init__(
        self, scheduler: Scheduler, slots: SlotTable, recovery: Recovery, scores: DrawScores
    ) -> None:
        self._scheduler = scheduler
        self._slots = slots
        self._recovery = recovery
        self._scores = scores
        self._live: dict[Sequence, LiveSequence] = {}
        self._by_request: dict[str, list[LiveSequence]] = {}
        self.num_tokens = 0  # the number of tokens delivered since the start
        # The number of delivered tokens that were the first of their sequence.
        self.num_first_tokens = 0
        self.weights_version = "0"  # the weights that compute the tokens
        self._now = 0.0

    def add(self, request_id: str, lives: list[LiveSequence]) -> None:
        """Register the sequences of a request, after they have been added to the scheduler."""
        self._live.update((live.sequence, live) for live in lives)
        self._by_request[request_id] = lives

    def of_request(self, request_id: str) -> list[LiveSequence]:
        """Return a list of the unfinished sequences of a request, empty for an unknown id."""
        return list(self._by_request.get(request_id, ()))

    def all(self) -> Iterable[LiveSequence]:
        """Return a list of the unfinished sequences of all requests."""
        return list(self._live.values())

    def replace(self, live: LiveSequence, sequence: Sequence) -> None:
        """Make a live sequence use a new scheduler sequence, when its paused request resumes."""
        del self._live[live.sequence]
        live.sequence = sequence
        self._live[sequence] = live

    def keep_prompt_logprobs(self, plan: LaunchPlan, logprobs: StepLogprobs) -> None:
        """Store the log-probabilities of a launch's prompt chunks in their sequences.

        It must precede the commit of the launch, in which sequences can lose their slots.
        """
        live = self._slots.generation[plan.slots] == plan.generations
        is_requested = live & self._slots.wants_logprob(plan.slots, plan.starts)
        for row in np.flatnonzero(is_requested).tolist():
            sequence = self._slots.sequences[plan.slots[row]]
            prompt = sequence.prompt_logprobs
            start, first = int(plan.starts[row]), int(logprobs.ends[row] - plan.num_tokens[row])
            if row in logprobs.prompts:
                prompt.put(start, logprobs.prompts[row])
                continue
            assert logprobs.logprobs is not None
            last = min(int(logprobs.ends[row]), first + sequence.num_prompt - 1 - start)
            prompt.put(start, logprobs.logprobs.part(slice(first, last), prompt.width))

    def deliver(self, result: StepResult, logprobs: StepLogprobs | None) -> None:
        """Send the new tokens of a committed launch, and end the sequences that it has ended.

        Args:
            result: the effects of the launch.
            logprobs: its log-probabilities, or None if no row requests any.
        """
        self._now = time.monotonic()
        ended = {
            sequence
            for sequence in result.finished
            if sequence.finish_reason is not FinishReason.ERROR
        }
        drawn = None
        if logprobs is not None:
            drawn = logprobs.of_draws(result.drawn, result.counts)
            if logprobs.logits is not None:
                self._scores.put(drawn.by_host, result, logprobs.logits)
        for row, (sequence, first, last) in enumerate(result.rows()):
            live = self._live.get(sequence)
            if live is not None:
                self._deliver_row(live, result, (row, first, last), drawn, sequence in ended)
        for sequence in result.finished:
            live = self._live.get(sequence)
            if live is not None:  # it ended without a token
                self.end(live, FinishReason.ERROR, live.why_none(self._scores.vocab_size))

    def _deliver_row(
        self,
        live: LiveSequence,
        result: StepResult,
        places: tuple[int, int, int],
        drawn: DrawLogprobs | None,
        ended: bool,
    ) -> None:
        """Send the new tokens of one sequence: one by one, or together to a receiver of arrays.

        An error of the text library or the grammar ends this request only.

        Args:
            places: the number of the row in `result`, and the range of its tokens there.
            drawn: the log-probabilities of all rows, if a row requests some.
            ended: whether the last of the tokens ended the sequence.
        """
        row, first, last = places
        try:
            if live.takes_arrays:
                scores = None if drawn is None else drawn.of_row(row, first, last)
                self._deliver_tokens(live, result.tokens[first:last], scores, ended)
                return
            for place in range(first, last):
                scores = None if drawn is None else drawn.of_token(row, place)
                is_last = ended and place + 1 == last
                self._deliver_tokens(live, [result.token_ids[place]], scores, is_last)
                if live.sequence not in self._live:
                    return
        except GrammarError as error:
            self.end(live, FinishReason.ERROR, error.as_refusal())
        except Exception as error:
            is_library = isinstance(error, TokenizerFailure)
            _log.error("detokenization failed: %s", error, exc_info=not is_library)
            self.end(live, FinishReason.ERROR, error=f"detokenization failed: {error}")

    def _deliver_tokens(
        self,
        live: LiveSequence,
        tokens: list[int] | np.ndarray,
        logprobs: TokenLogprobs | None,
        ended: bool,
    ) -> None:
        """Send successive new tokens of a sequence in one delta, up to the end of its text.

        Args:
            live: the sequence.
            tokens: the tokens, as an array for a receiver of arrays.
            logprobs: their log-probabilities, if requested.
            ended: whether the last of the tokens ended the sequence.
        """
        sequence, text = live.sequence, live.detokenizer
        if not live.first_token:
            live.first_token = self._now
            self.num_first_tokens += 1
        stopped = complete = False
        count = len(tokens)
        if text is not None or sequence.constraint is not None:
            token_ids = tokens if isinstance(tokens, list) else tokens.tolist()
            for place, token in enumerate(token_ids, 1):
                is_last = ended and place == count
                if sequence.constraint is not None and not is_last:
                    complete = self._slots.advance(sequence, token)
                if text is not None and not (is_last and live.hides_last):
                    stopped = text.add(token)
                if (stopped or complete) and place < count:  # later tokens are dropped
                    ended, count, tokens = False, place, tokens[:place]
                    logprobs = None if logprobs is None else logprobs.first(place)
                    break
        self.num_tokens += count
        if (stopped or complete) and not ended:
            self._scheduler.finish(sequence, FinishReason.STOP)
        if not (stopped or complete or ended):
            self._send(live, live.delta(tokens, logprobs, self.weights_version))
            return
        if text is not None:
            text.finish()
        delta = live.delta(tokens, logprobs, self.weights_version)
        delta.finish_reason = FinishReason.STOP if stopped else sequence.finish_reason
        if stopped and text is not None:
            delta.stop_reason = text.stop
        elif ended and sequence.stop_token in (sequence.request.sampling.stop_token_ids or ()):
            delta.stop_reason = sequence.stop_token
        delta.times = live.times(self._now)
        self._forget(live)
        self._send(live, delta)

    def _send(self, live: LiveSequence, delta: Delta) -> None:
        try:
            live.sink(delta)
        except Exception:
            _log.exception("the receiver of request %s failed; aborting it", delta.request_id)
            live.sink = _nowhere
            if delta.finish_reason is None:
                self.end(live, FinishReason.ABORT)

    def end(
        self, live: LiveSequence, reason: FinishReason, error: str | InvalidRequest | None = None
    ) -> None:
        """End a sequence in the scheduler, and send its last delta with a reason and an error.

        It is used for aborts and errors, which no generated token causes.

        Args:
            error: message or InvalidRequest for the delta, or None.
        """
        self._scheduler.finish(live.sequence, reason)
        delta = live.delta([])
        delta.finish_reason = reason
        if error is not None:
            delta.fail(error)
        self._forget(live)
        self._send(live, delta)

    def _forget(self, live: LiveSequence) -> None:
        del self._live[live.sequence]
        self._recovery.forget(live.sequence)
        request_id = live.sequence.request.request_id
        lives = self._by_request[request_id]
        lives.remove(live)
        if not lives:
            del self._by_request[request_id]


def _nowhere(delta: Delta) -> None:
    """Ignore the output of a sequence whose receiver has raised an exception."""
