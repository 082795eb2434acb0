"""Near ties: tokens that differ because rounding moved logits, and not because of a fault.

Where numbers have 16 bits or fewer, a card and the CPU round at different places, and a token whose
choice hangs on that may differ. Whether it does is tried out: the CPU computes the row's logits
once more, moves them at random by as much as rounding does, and draws from each. A token that is
never drawn so is a fault.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.execution.batch import StepBatch, slot_mapping, unpack
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.sampler_state import SamplerState
from jaxserve.execution.sampling import sample
from jaxserve.models import Decoder
from jaxserve.models.paged import PagedStep
from jaxserve.models.placed_weight import with_implementation, with_num_rows
from tests.machine_code.steps.models import TinyModel
from tests.machine_code.steps.recording import Call

TRIES = 200
NOISE = {"float32": 0.0, "bfloat16": 0.02, "float16": 0.004}
"""How far rounding moves a model's logits, over how far they are spread; float32 by too little."""
TF32_NOISE = 0.002
FP8_PAGES_NOISE = 0.02


def noise_of(model: TinyModel, precision: str) -> float:
    """Return by how much of their spread a card's logits may differ from the CPU's."""
    return max(
        NOISE[model.dtype],
        TF32_NOISE if precision == "high" else 0.0,
        FP8_PAGES_NOISE if model.kv_cache_dtype == "fp8" else 0.0,
    )


@dataclasses.dataclass(frozen=True)
class Difference:
    """A token that a card drew in place of another.

    Attributes:
        row, step: where in the call.
        token, expected: the card's, and the CPU's.
        gap: by how much the CPU's logits prefer its own token.
        share: of tries with moved logits that drew the card's token.
    """

    row: int
    step: int
    token: int
    expected: int
    gap: float
    share: float

    def __str__(self) -> str:
        return (
            f"row {self.row} drew {self.token} for {self.expected} in step {self.step}: logits "
            f"are {self.gap:.4f} apart, and moved ones draw it in {self.share:.0%} of tries"
        )


class NearTies:
    """Judge of tokens that differ.

    Args:
        decoder: the model as the CPU runs it.
    """

    def __init__(self, decoder: Decoder) -> None:
        graphdef, state = nnx.split(decoder)
        self._leaves, treedef = jax.tree.flatten(state)

        def logits(
            leaves: Any, kv: Any, table: Any, batch: StepBatch[Any], decode_only: bool
        ) -> Any:
            num_tokens = batch.query_start[-1]
            parameters = with_implementation(jax.tree.unflatten(treedef, leaves), "auto")
            model = nnx.merge(graphdef, with_num_rows(parameters, num_tokens))
            rows = table[batch.slots]
            step = PagedStep(
                positions=batch.positions,
                slot_mapping=slot_mapping(batch, rows, kv[0][0].shape[2]),
                page_table=rows,
                query_start=batch.query_start,
                kv_len=batch.kv_len,
                decode_only=decode_only,
                implementation="auto",
            )
            hidden, _ = model(batch.tokens, step, kv)
            last = hidden if decode_only else hidden.at[batch.sample_index].get(mode="clip")
            return model.logits(last)

        self._logits = jax.jit(logits, static_argnums=4)
        self._sample = jax.jit(sample)

    def judge(
        self,
        call: Call,
        bucket: Bucket,
        before: list[np.ndarray],
        token_ids: np.ndarray,
        differs: np.ndarray,
        noise: float,
    ) -> list[Difference]:
        """Try out the first token of each row that differs.

        Args:
            call: as the CPU made it.
            bucket: of its program.
            before: the state before it, on the CPU.
            token_ids: the card's, [steps, R].
            differs: bool[steps, R].
            noise: standard deviation by which logits are moved, over their own.
        """
        found = []
        rng = np.random.default_rng(0)
        expected = call.output.token_ids.reshape(differs.shape)  # type: ignore[union-attr]
        for row in np.flatnonzero(differs.any(axis=0)).tolist():
            step = int(differs[:, row].argmax())
            batch, sampler = self._at_step(call, bucket, before, step)
            *pages, table, _ = call.state[: len(before) - len(jax.tree.leaves(sampler))]
            kv = list(zip(pages[::2], pages[1::2], strict=True))
            logits = self._logits(self._leaves, kv, table, batch, bucket.decode_only)
            own = np.asarray(logits[row])
            moves = noise * own.std() * rng.standard_normal((TRIES, len(own)), np.float32)
            drawn = self._sample(own + moves, repeated(batch, row), sampler).tolist()
            token, wanted = int(token_ids[step, row]), int(expected[step, row])
            gap = float(own[wanted] - own[token])
            share = drawn.count(token) / TRIES
            found.append(Difference(row, step, token, wanted, gap, share))
        return found

    def _at_step(
        self, call: Call, bucket: Bucket, before: list[np.ndarray], step: int
    ) -> tuple[StepBatch[Any], SamplerState]:
        """Return a call's batch as it is at one of its steps, with all tokens, and the sampler."""
        batch = unpack(call.arguments[0], bucket.num_tokens, bucket.num_rows)
        *_, last_token, history, allowed, bias_ids, bias_values, banned, recent = (
            array.copy() for array in before
        )
        tokens = np.where(
            batch.tokens >= 0, batch.tokens, last_token[batch.slots][batch.row_of_token]
        )
        drawn = call.output.token_ids.reshape(-1, bucket.num_rows)  # type: ignore[union-attr]
        for number in range(step):
            tokens = drawn[number]
            np.add.at(history, (batch.slots, tokens), 2)
            recent[batch.slots] = np.concatenate([recent[batch.slots, 1:], tokens[:, None]], axis=1)
        sampler = SamplerState(history, allowed, bias_ids, bias_values, banned, recent)
        now = dataclasses.replace(
            batch, tokens=tokens, positions=batch.positions + step, kv_len=batch.kv_len + step
        )
        return jax.tree.map(jnp.asarray, now), jax.tree.map(jnp.asarray, sampler)


def repeated(batch: StepBatch[Any], row: int) -> StepBatch[Any]:
    """Return a batch whose rows are all the same one, as many as there are tries."""
    own = {
        field.name: jnp.repeat(getattr(batch, field.name)[row : row + 1], TRIES, axis=0)
        for field in dataclasses.fields(batch)
        if field.name not in ("tokens", "positions", "row_of_token", "targets", "query_start")
        and getattr(batch, field.name) is not None
        and getattr(batch, field.name).ndim > 0
    }
    return dataclasses.replace(batch, **own)
