"""Rollout: completions as NumPy arrays, for training."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxserve.engine.batch import StartedRequests
from jaxserve.engine.delta import Delta
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import InvalidRequest
from jaxserve.request import FinishReason, Request, SamplingParams
from jaxserve.text.detokenizer import Detokenizer


@dataclass(frozen=True, eq=False)
class Rollout:
    """Completions with their prompts, as arrays with one row per completion.

    B is the number of completions, in the order of the prompts.
    L is the length of the longest row. A row is a prompt, its completion, and padding.

    Attributes:
        tokens: int32[B, L], token ids, 0 in the padding.
        mask: bool[B, L], True for the tokens of completions.
        logprobs: float32[B, L], the log-probability of each token of a completion, at the token's
            own position, as `logprobs_mode` defines it. 0 outside the mask.
        lengths: int32[B], tokens of prompt and completion.
        prompt_lengths: int32[B], tokens of the prompt.
        versions: int32[B, L], the index in `version_names` of the weights that each token of a
            completion was sampled with. -1 outside the mask.
        version_names: the versions of weights in `versions`.
        finish_reasons: for each completion "stop", "length", "abort" or "error". A row that ended
            with "abort" or "error" has the tokens before.
    """

    tokens: np.ndarray
    mask: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    versions: np.ndarray
    version_names: tuple[str, ...]
    finish_reasons: tuple[str, ...]
    _requests: tuple[Request, ...] = field(repr=False)  # the request of each row
    _tokenizer: Any = field(repr=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def texts(self) -> list[str]:
        """Decode the completions, and return the texts that `LLM.generate` returns for them.

        Raises:
            InvalidRequest: the engine has no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequest("this engine has no tokenizer, which texts() needs")
        return [self._text(row) for row in range(len(self))]

    def _text(self, row: int) -> str:
        request, start = self._requests[row], int(self.prompt_lengths[row])
        tokens = self.tokens[row, start : self.lengths[row]].tolist()
        sampling = request.sampling
        has_stopped = self.finish_reasons[row] == FinishReason.STOP
        if has_stopped and tokens[-1] in request.stop_token_ids:
            tokens = tokens if sampling.include_stop_str_in_output else tokens[:-1]
        text = Detokenizer(self._tokenizer, request.prompt_token_ids[-16:].tolist(), sampling)
        for token in tokens:
            text.add(token)
        if self.finish_reasons[row] in (FinishReason.STOP, FinishReason.LENGTH):
            text.finish()
        return text.take()


def sampling_of_rollout(sampling: Any) -> Any:
    """Return the settings with which the completions of a rollout are generated.

    They request the log-probability of each token.

    Raises:
        InvalidRequest: the settings request values that a rollout does not have.
    """
    if not isinstance(sampling, SamplingParams):
        return sampling  # refused where requests are validated
    for name in ("prompt_logprobs", "logprob_token_ids"):
        if getattr(sampling, name) not in (None, ()):
            raise InvalidRequest(
                f"a rollout has the log-probabilities of generated tokens only: {name} must be "
                "None; LLM.generate returns them",
                name,
            )
    return sampling if sampling.logprobs == 0 else replace(sampling, logprobs=0)


@dataclass
class _Completion:
    """The tokens and log-probabilities of one completion, as one array per launch."""

    tokens: list[np.ndarray] = field(default_factory=list[np.ndarray])
    logprobs: list[np.ndarray] = field(default_factory=list[np.ndarray])
    # The index of the first token of each version of the weights, and the version.
    weight_versions: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    count: int = 0
    finish_reason: str = ""

    def add(self, delta: Delta) -> None:
        if delta.tokens is not None:
            assert delta.logprobs is not None
            if not self.weight_versions or self.weight_versions[-1][1] != delta.version:
                self.weight_versions.append((self.count, delta.version))
            self.tokens.append(delta.tokens)
            self.logprobs.append(delta.logprobs.logprob)
            self.count += len(delta.tokens)
        if delta.finish_reason is not None:
            self.finish_reason = str(delta.finish_reason)


class RolloutBatch(StartedRequests):
    """The requests of one call of `LLM.rollout`, and the arrays of their completions.

    The constructor starts all requests on the engine's thread.

    Raises:
        EngineClosed, EngineDead: the engine has ended. No request keeps running.
    """

    def __init__(self, thread: EngineThread, requests: Iterable[Request]) -> None:
        super().__init__(thread, requests, takes_arrays=True)
        self._tokenizer = thread.engine.tokenizer
        self._rows = {
            request.request_id: [_Completion() for _ in range(request.sampling.n)]
            for request in self.requests
        }

    def wait(self, use_tqdm: bool) -> Rollout:
        """Wait until all requests have ended, and return their completions.

        A failed request is logged. If the wait ends with an exception, the unfinished requests are
        aborted.

        Args:
            use_tqdm: whether to show a progress bar of finished prompts.

        Raises:
            EngineDead: the engine ended before all requests.
        """
        self.take_all(lambda delta: self._rows[delta.request_id][delta.index].add(delta), use_tqdm)
        return self._rollout()

    def _rollout(self) -> Rollout:
        pairs = [
            (request, row) for request in self.requests for row in self._rows[request.request_id]
        ]
        starts = np.array([len(request.prompt_token_ids) for request, _ in pairs], np.int32)
        lengths = starts + np.array([row.count for _, row in pairs], np.int32)
        places = np.arange(lengths.max(initial=0))
        mask = (places >= starts[:, None]) & (places < lengths[:, None])
        tokens, versions = np.zeros(mask.shape, np.int32), np.full(mask.shape, -1, np.int32)
        logprobs = np.zeros(mask.shape, np.float32)
        names: dict[str, int] = {}
        for number, (request, row) in enumerate(pairs):
            start, end = int(starts[number]), int(lengths[number])
            tokens[number, :start] = request.prompt_token_ids
            if not row.count:
                continue
            tokens[number, start:end] = np.concatenate(row.tokens)
            logprobs[number, start:end] = np.concatenate(row.logprobs)
            for first, name in row.weight_versions:  # later versions overwrite
                versions[number, start + first : end] = names.setdefault(name, len(names))
        return Rollout(
            tokens=tokens,
            mask=mask,
            logprobs=logprobs,
            lengths=lengths,
            prompt_lengths=starts,
            versions=versions,
            version_names=tuple(names),
            finish_reasons=tuple(row.finish_reason for _, row in pairs),
            _requests=tuple(request for request, _ in pairs),
            _tokenizer=self._tokenizer,
        )
