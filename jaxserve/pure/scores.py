# pyright: reportUnknownMemberType=false
"""Log-probabilities of tokens by their hidden states, in the blocks of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.logprobs import BLOCK, logprobs_of
from jaxserve.execution.sampling import kept_probabilities
from jaxserve.execution.typed_jax import cond
from jaxserve.models.config.rules import Scales
from jaxserve.models.decoder import scaled_logits
from jaxserve.models.linear import accumulator, matmul
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.request import SamplingParams
from pallas_kernels import DrawSettings
from pallas_kernels.gradients import varying_as

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32

BACKWARD_BLOCK = 256  # positions whose logits the backward pass has at a time


class Processing(NamedTuple):
    """Settings of `SamplingParams` that change the distribution of tokens."""

    temperature: float
    min_p: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams | None) -> Processing | None:
        """Return the settings, or None if they leave the distribution of the logits."""
        if params is None or params.temperature == 0:
            return None
        return cls(params.temperature, params.min_p, max(params.top_k, 0), params.top_p)

    def __call__(self, logits: Float[Array, "N V"]) -> Float[Array, "N V"]:
        """Return logits divided by the temperature, and -inf for excluded tokens."""
        rows = len(logits)
        settings = DrawSettings(
            jnp.full(rows, self.temperature, jnp.float32),
            jnp.full(rows, self.min_p, jnp.float32),
            jnp.full(rows, self.top_k, jnp.int32),
            jnp.full(rows, self.top_p, jnp.float32),
            jnp.zeros((rows, 2), jnp.uint32),
            jnp.zeros(rows, jnp.int32),
        )
        fixed = lax.stop_gradient(logits)
        warm = settings.temperature > 0
        kept = kept_probabilities(fixed, fixed.max(axis=1), settings, warm) > 0
        divisor = settings.temperature.astype(logits.dtype)[:, None]
        return jnp.where(kept, logits / divisor, -jnp.inf)


@dataclass(frozen=True)
class Scorer:
    """Computes the log-probability of a token for each hidden state.

    Attributes:
        scales: the factors and the cap of the model's logits.
        processing: changes of the distribution, or None.
    """

    scales: Scales
    processing: Processing | None

    def scores(
        self,
        project: PlacedWeight | Float[Array, "D V"],
        hidden: Float[Array, "N D"],
        targets: Int32[Array, " N"],
    ) -> Float[Array, " N"]:
        """Return the log-probability of each target, and 0 where the target is negative.

        Blocks have as many positions as those of an engine, because XLA rounds a logarithm
        differently in arrays of other sizes.

        Args:
            project: the output projection.
            hidden: hidden states after the final norm.
            targets: token ids.
        """
        function = jax.custom_vjp(self._forward)
        function.defvjp(
            lambda *operands: (self._forward(*operands), operands),
            lambda operands, g: (*self._backward(operands, g), None),
        )
        return function(project, hidden, targets)

    def _forward(self, project: Any, hidden: Array, targets: Array) -> Array:
        laid_out = project.laid_out() if isinstance(project, PlacedWeight) else project
        exact = accumulator(hidden.dtype)

        def block(operands: tuple[Array, Array]) -> Array:
            here, wanted = operands

            def scored() -> Array:
                logits = scaled_logits(matmul(here, laid_out, out_dtype=exact), self.scales)
                logits = logits if self.processing is None else self.processing(logits)
                found = logprobs_of(logits, jnp.maximum(wanted, 0)).logprob
                return jnp.where(wanted >= 0, found, 0)

            none = varying_as(jnp.zeros(BLOCK, exact), here, wanted, laid_out)
            return cond(jnp.any(wanted >= 0), scored, lambda: none)

        return lax.map(block, _blocks(hidden, targets, BLOCK)).reshape(-1)[: len(targets)]

    def _backward(self, operands: tuple[Any, Array, Array], g: Array) -> tuple[Any, Array]:
        """Return the derivatives by the projection and by the hidden states.

        The logits of a block are computed again, so they are never in memory as a whole.
        """
        project, hidden, targets = operands
        exact = accumulator(hidden.dtype)
        weight = project.values if isinstance(project, PlacedWeight) else project
        wide = weight.astype(exact)

        def plain(wide: Array, here: Array, wanted: Array) -> Array:
            logits = scaled_logits(here.astype(exact) @ wide, self.scales)
            logits = logits if self.processing is None else self.processing(logits)
            column = jnp.maximum(wanted, 0)[:, None]
            chosen = jnp.take_along_axis(logits, column, axis=1)[:, 0]
            return jnp.where(wanted >= 0, chosen - jax.nn.logsumexp(logits, axis=1), 0)

        def block(total: Array, operands: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            here, wanted, change = operands
            backward = jax.vjp(lambda wide, here: plain(wide, here, wanted), wide, here)[1]
            by_weight, by_hidden = backward(change)
            return total + by_weight, by_hidden

        size = min(BACKWARD_BLOCK, max(-(-len(targets) // BLOCK), 1) * BLOCK)
        blocks = *_blocks(hidden, targets, size), _in_blocks(g, size)
        zeros = varying_as(jnp.zeros_like(wide), wide, blocks)
        total, by_hidden = lax.scan(block, zeros, blocks)
        by_hidden = by_hidden.reshape(-1, hidden.shape[1])[: len(hidden)]
        total = total.astype(weight.dtype)
        if isinstance(project, PlacedWeight):
            total = jax.tree.map(lambda _: total, project)
        return total, by_hidden


def _blocks(hidden: Array, targets: Array, size: int) -> tuple[Array, Array]:
    return _in_blocks(hidden, size), _in_blocks(targets, size, -1)


def _in_blocks(array: Array, size: int, fill: int = 0) -> Array:
    """Return an array [N, ...] as [blocks, size, ...], with `fill` after its entries."""
    pad = ((0, -len(array) % size), *((0, 0) for _ in array.shape[1:]))
    padded = jnp.pad(array, pad, constant_values=fill)
    return padded.reshape(-1, size, *array.shape[1:])
