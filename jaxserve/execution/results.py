"""Results of a launch on the host: tokens, log-probabilities, and prompts that the host scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxserve.execution.buckets import Bucket
from jaxserve.execution.logprobs import BLOCK
from jaxserve.execution.state import StepOutput
from jaxserve.scheduling.logprobs import StepLogprobs, TokenLogprobs, score_tokens
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import NO_TOKEN, SlotTable

if TYPE_CHECKING:
    from jaxtyping import Bool, Int32

# Called with (leaves, hidden states, first position, tokens of the step).
Project = Callable[[list[jax.Array], jax.Array, np.ndarray, np.ndarray], jax.Array]


@dataclass(frozen=True)
class InFlight:
    """A submitted launch whose results the host has not read yet."""

    plan: LaunchPlan
    output: StepOutput
    bucket: Bucket
    num_logprobs: Int32[np.ndarray, " R"] | None  # requested alternatives, None without requests
    has_positions: bool  # whether log-probabilities are by token instead of by row
    has_alternatives: bool  # whether a row requests alternatives
    submitted: float  # time.perf_counter at submission
    logits: jax.Array | None = None  # of each row's sampled token, if the host scores one
    # Log-probabilities of prompts that the host has computed, by row.
    prompts: Mapping[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    expert_rows: jax.Array | None = None  # see `StepOutput`

    def read(
        self, vocab_size: int
    ) -> tuple[Int32[np.ndarray, "*steps R"], Bool[np.ndarray, "*steps R"], StepLogprobs | None]:
        """Wait for the launch, and return its tokens and requested log-probabilities.

        Padding is removed. The arrays are [R], or [num_steps, R] for a launch of several steps.

        Args:
            vocab_size: the columns of logits without padding.

        Returns:
            Token ids, booleans that are False where the token id is NO_TOKEN, and
            log-probabilities, or None if no row requests them.
        """
        num_rows, num_steps = len(self.plan), self.plan.num_steps
        token_ids = np.asarray(self.output.token_ids)[..., :num_rows]
        if token_ids.ndim == 2:
            token_ids = token_ids[slice(num_steps) if num_steps > 1 else 0]
        ok = token_ids != NO_TOKEN
        if self.num_logprobs is None:
            return token_ids, ok, None
        # A vocabulary that is sharded over devices has padding at its end.
        logits = None if self.logits is None else np.asarray(self.logits)[:, :vocab_size]
        logprobs, of_step = self._logprobs()
        tokens = self.plan.num_tokens if self.has_positions else np.ones(num_rows, np.int32)
        ends = np.cumsum(tokens)
        return (
            token_ids,
            ok,
            StepLogprobs(self.num_logprobs, ends, logprobs, logits, self.prompts, of_step),
        )

    def _logprobs(self) -> tuple[TokenLogprobs | None, int]:
        # The log-probabilities of all steps one after another, and the number of a step.
        if self.output.logprobs is None:
            return None, 0
        tokens, others = self.output.logprobs[:2], self.output.logprobs[2:]
        columns = [np.asarray(leaf).reshape(-1) for leaf in tokens]
        if self.has_alternatives:
            columns += [np.asarray(leaf).reshape(-1, leaf.shape[-1]) for leaf in others]
        else:  # they stay on the device
            columns += [np.zeros((len(columns[0]), 0), leaf.dtype) for leaf in others]
        return TokenLogprobs(*columns), tokens[0].shape[-1]


def score_prompts(
    plan: LaunchPlan,
    slots: SlotTable,
    hidden: jax.Array,
    project: Project,
    leaves: list[jax.Array],
    vocab_size: int,
) -> dict[int, TokenLogprobs]:
    """Compute log-probabilities of prompt tokens on the host, for the rows whose prompts need it.

    The device computes the logits of `BLOCK` positions at a time, because the logits of a whole
    chunk may take gigabytes. The function waits for the device.

    Args:
        plan: the rows of the step.
        slots: the slot table, which has the prompts' tokens.
        hidden: [T, D], the step's hidden states.
        project: the program `Programs.project`.
        leaves: the model's placed arrays.
        vocab_size: columns of logits without padding.

    Returns:
        By row of the plan, the log-probability of each prompt token that follows a token of the
        step.
    """
    scored: dict[int, TokenLogprobs] = {}
    ends = np.cumsum(plan.num_tokens)
    total = np.array(ends[-1], np.int32)
    is_requested = slots.wants_logprob(plan.slots, plan.starts)
    for row in np.flatnonzero(is_requested).tolist():
        sequence, start = slots.sequences[plan.slots[row]], int(plan.starts[row])
        prompt = sequence.prompt_logprobs
        if not prompt.by_host:
            continue
        first = int(ends[row] - plan.num_tokens[row])
        count = min(int(plan.num_tokens[row]), sequence.num_prompt - 1 - start)
        targets = slots.tokens[plan.slots[row], start + 1 : start + 1 + count]
        parts: list[TokenLogprobs] = []
        for done in range(0, count, BLOCK):
            position = np.array(first + done, np.int32)
            logits = np.asarray(project(leaves, hidden, position, total))[:, :vocab_size]
            skipped = max(0, first + done + len(logits) - len(hidden))
            chunk = targets[done : done + BLOCK]
            logits = logits[skipped : skipped + len(chunk)]
            parts.append(score_tokens(logits, chunk, prompt.width, (), prompt.as_logits))
        columns = zip(*(part[:4] for part in parts), strict=True)
        scored[row] = TokenLogprobs(*map(np.concatenate, columns))
    return scored
