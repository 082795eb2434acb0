"""Log-probabilities of prompt tokens that the host computes from logits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxserve.execution.logprobs import BLOCK
from jaxserve.scheduling.logprobs import TokenLogprobs, score_tokens
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.slot_table import SlotTable

# Called with (leaves, hidden states, first position, tokens of the step).
Project = Callable[[list[jax.Array], jax.Array, np.ndarray, np.ndarray], jax.Array]


def score_prompts(
    plan: LaunchPlan,
    slots: SlotTable,
    hidden: jax.Array,
    project: Project,
    leaves: list[jax.Array],
    vocab_size: int,
) -> dict[int, TokenLogprobs]:
    """Score the prompt tokens that the host has to score, and wait for the device.

    A few positions are computed at once, because the logits of a whole chunk may take gigabytes.

    Args:
        plan: the plan of the step.
        slots: the slot table, which has the prompts' tokens.
        hidden: [T, D], the step's hidden states.
        project: the program `Programs.project`.
        leaves: the model's placed arrays.
        vocab_size: columns of logits without padding.

    Returns:
        The log-probabilities by row of the plan.
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
