"""DrawScores: log-probabilities of sampled tokens that the host computes from logits.

The device scores the 20 most likely tokens of the model's distribution. NumPy computes all other
requests here (listed tokens, the whole vocabulary, processed log-probabilities) from logits that
the step returns, so no program changes. A step with such a row copies the logits of all its rows to
the host, and all rows wait for the copy.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

import numpy as np

from jaxserve.request import SamplerFeature, SamplingParams
from jaxserve.scheduling.commit_result import StepResult
from jaxserve.scheduling.logprobs import TokenLogprobs, score_tokens
from jaxserve.scheduling.sequence import NO_SLOT, Sequence
from jaxserve.scheduling.slot_table import SlotTable


class DrawScores:
    """Computation on the host of the log-probabilities that the device does not provide.

    They are computed from logits, for listed tokens, for more than 20 alternatives, and for all
    modes except raw log-probabilities.

    Args:
        slots: the slot table, which has the tokens of running sequences.
        mode: the engine's `logprobs_mode`: raw or processed, log-probabilities or logits.
    """

    def __init__(self, slots: SlotTable, mode: str, vocab_size: int) -> None:
        self._slots = slots
        self._is_processed = mode.startswith("processed")
        self._as_logits = mode.endswith("_logits")
        self.vocab_size = vocab_size

    def put(self, scores: dict[int, TokenLogprobs], result: StepResult, logits: np.ndarray) -> None:
        """Score the sampled tokens whose requests need the host, and put the results into `scores`.

        Args:
            scores: the results, by the number of the token.
            result: the sampled tokens of a launch of one step, and their sequences.
            logits: float[R, V], the logits of the R rows of the step's plan.
        """
        rows = np.flatnonzero(result.drawn).tolist()
        tokens = zip(rows, result.sequences, result.token_ids, strict=True)
        for place, (row, sequence, token) in enumerate(tokens):
            sampling = sequence.request.sampling
            if sampling.features & SamplerFeature.LOGITS or (
                self._slots.scores_on_host and sampling.features & SamplerFeature.LOGPROBS
            ):
                scores[place] = self._score(sequence, token, logits[row])

    def _score(self, sequence: Sequence, token: int, logits: np.ndarray) -> TokenLogprobs:
        sampling = sequence.request.sampling
        if self._is_processed:
            logits = self._processed(sequence, token, logits)
        width = sampling.logprobs or 0
        width = self.vocab_size if width == -1 else width
        listed = sampling.logprob_token_ids or ()
        tokens = np.array([token], np.int32)
        return score_tokens(logits[None], tokens, width, listed, self._as_logits)

    def _processed(self, sequence: Sequence, token: int, logits: np.ndarray) -> np.ndarray:
        """Return float[V]: the processed logits from which a sequence's newest token was sampled.

        Biases, penalties and the temperature are applied to `logits`, and tokens that could not be
        sampled have -inf. The sampled `token` itself always has a finite value.
        """
        request, sampling = sequence.request, sequence.request.sampling
        tokens = sequence.token_ids
        if sequence.slot != NO_SLOT:
            tokens = self._slots.tokens[sequence.slot, : self._slots.num_known[sequence.slot]]
        drawn = tokens[len(request.prompt_token_ids) : -1].tolist()
        processed = logits.copy()
        processed[~allowed_tokens(sequence, drawn, self.vocab_size)] = -np.inf
        for other, bias in (sampling.logit_bias or {}).items():
            processed[other] += np.float32(bias)
        if sampling.features & SamplerFeature.PENALTIES:
            _penalize(processed, sampling, tokens[:-1], drawn)
        if sampling.temperature > 0:
            processed = _truncated(processed, sampling)
        # Because of rounding, the device may have kept one token more for top_p.
        if processed[token] == -np.inf:
            temperature = np.float32(sampling.temperature or 1.0)
            processed[token] = logits[token] / temperature
        return processed


def allowed_tokens(sequence: Sequence, drawn: Listing[int], vocab_size: int) -> np.ndarray:
    """Return bool[V], True for each token that a request allows as the next token of a sequence.

    The mask combines allowed_token_ids, the grammar, bad_words and min_tokens.

    Args:
        drawn: the generated tokens so far.
    """
    request = sequence.request
    listed = request.sampling.allowed_token_ids
    allowed = np.full(vocab_size, listed is None)
    if listed is not None:
        allowed[list(listed)] = True
    if sequence.constraint is not None:
        words = sequence.constraint.words.view(np.uint8)
        allowed &= np.unpackbits(words, bitorder="little")[:vocab_size].astype(bool)
    for *before, last in request.bad_words_token_ids:
        if tuple(drawn[len(drawn) - len(before) :]) == tuple(before):
            allowed[last] = False
    if len(drawn) < request.sampling.min_tokens:
        allowed[list(request.stop_token_ids)] = False
    return allowed


def _penalize(
    logits: np.ndarray, sampling: SamplingParams, tokens: np.ndarray, drawn: Listing[int]
) -> None:
    """Apply repetition, frequency and presence penalties to float[V] logits in place.

    Args:
        tokens: token ids of the prompt and the output, for the repetition penalty.
        drawn: the generated tokens, for the frequency and presence penalties.
    """
    repetition, frequency, presence = (
        logits.dtype.type(np.float32(getattr(sampling, f"{name}_penalty")))
        for name in ("repetition", "frequency", "presence")
    )
    seen = np.unique(tokens)
    seen = seen[logits[seen] > -np.inf]
    most = np.finfo(logits.dtype).max
    with np.errstate(over="ignore"):
        values = logits[seen]
        changed = np.where(values > 0, values / repetition, values * repetition)
    logits[seen] = np.clip(changed, -most, most)
    ids, counts = np.unique(np.array(drawn, np.int64), return_counts=True)
    logits[ids] -= frequency * counts.astype(logits.dtype) + presence


def _truncated(logits: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """Return float[V]: logits / temperature, -inf for tokens outside min_p, top_k or top_p."""
    scaled = logits / logits.dtype.type(np.float32(sampling.temperature))
    probs = np.exp(scaled - scaled.max())
    likely = (logits > -np.inf) & (probs >= np.float32(sampling.min_p))
    if 0 < sampling.top_k < len(probs):
        least = np.partition(logits, len(logits) - sampling.top_k)[len(logits) - sampling.top_k]
        likely &= logits >= least
    if sampling.top_p < 1:
        order = np.argsort(-logits, kind="stable")
        mass = np.cumsum(np.where(likely, probs, 0)[order])
        last = int(np.argmax(mass >= np.float32(sampling.top_p) * mass[-1]))
        likely &= logits >= logits[order[last]]
    return np.where(likely, scaled, -np.inf).astype(logits.dtype)
