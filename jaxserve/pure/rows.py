# pyright: reportUnknownMemberType=false
"""A model over whole rows of tokens: one ragged step over cache pages of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.execution.state import kv_dtype
from jaxserve.models import Decoder, ModelConfig, PagedStep
from jaxserve.models.layers import Residual
from jaxserve.models.mixers import Kept
from jaxserve.models.paged import LayerPages
from jaxserve.settings.config import PAGE_TOKENS
from pallas_kernels import StateRows
from pallas_kernels.devices import target_device

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32


class OwnPages:
    """The cache pages of each layer that has some. Other layers read those of their source.

    Args:
        config: configuration of the model.
        step: the step, with the cells of its tokens.
        dtype: dtype of the activations.
    """

    def __init__(self, config: ModelConfig, step: PagedStep, dtype: DTypeLike) -> None:
        self._sources = config.layers.sources or tuple(range(config.num_hidden_layers))
        stored = kv_dtype("auto", dtype, target_device().platform)
        layout, count = config.page_layout, step.page_table.size

        def zeros(layer: int) -> LayerPages:
            place = layout.places[layer]
            assert place is not None
            kind = layout.kinds[place.kind]
            pages: Any = tuple(
                jnp.zeros((count, kind.heads, PAGE_TOKENS, size), stored) for size in kind.sizes
            )
            return pages

        self._pages = {
            layer: zeros(layer) for layer in set(self._sources) if config.has_pages(layer)
        }

    def of_layer(self, layer: int, step: PagedStep) -> tuple[LayerPages | tuple[()], PagedStep]:
        """Return the pages that a layer reads, and the step."""
        return self._pages.get(self._sources[layer], ()), step

    def put(self, layer: int, pages: LayerPages) -> None:
        """Replace the pages that a layer reads."""
        if self._sources[layer] in self._pages:
            self._pages[self._sources[layer]] = pages


def rows_step(rows: int, length: int, has_states: bool) -> PagedStep:
    """Return the step of `rows` rows of `length` tokens each, from position 0 on.

    Row r has pages of its own, one after the other, and the states at place r.

    Args:
        rows: number of rows.
        length: tokens of a row.
        has_states: whether layers keep states.
    """
    pages = -(-length // PAGE_TOKENS)
    position, row = np.tile(np.arange(length), rows), np.repeat(np.arange(rows), length)
    starts, own = np.arange(rows + 1) * length, np.arange(rows)
    states = None
    if has_states:
        nowhere = np.zeros(rows)
        places = starts, nowhere - 1, own, nowhere, nowhere, np.asarray(rows)
        states = StateRows(*(jnp.asarray(array, jnp.int32) for array in places))
    return PagedStep(
        positions=jnp.asarray(position, jnp.int32),
        slot_mapping=jnp.asarray(row * pages * PAGE_TOKENS + position, jnp.int32),
        page_table=jnp.asarray(np.arange(rows * pages).reshape(rows, pages), jnp.int32),
        query_start=jnp.asarray(starts, jnp.int32),
        kv_len=jnp.full(rows, length, jnp.int32),
        decode_only=False,
        implementation="auto",
        state_rows=states,
    )


def over_rows(
    model: Decoder,
    tokens: Int32[Array, "B L"],
    on_layer: Callable[[Residual], None] = lambda _: None,
) -> Float[Array, "B L D"]:
    """Return the hidden states after the final norm of all tokens of whole rows, [B, L, D].

    Padding at the right of a row is computed like tokens, which do not change those before them.

    Args:
        model: the model.
        tokens: token ids. Those outside the vocabulary are clamped.
        on_layer: see `Decoder.advance`.
    """
    config, dtype = model.config, model.norm.dtype
    rows, length = tokens.shape
    step = rows_step(rows, length, config.recurrent is not None)
    exact = np.float64 if dtype == np.float64 else np.float32
    kept = [
        Kept((), tuple(jnp.zeros((rows + 1, *s.shape), exact) for s in config.states_of(layer)))
        for layer in range(config.num_hidden_layers)
    ]
    pages = OwnPages(config, step, dtype)
    flat = jnp.clip(tokens, 0, config.vocab_size - 1).reshape(-1)
    _, _, hidden = model.advance(flat.astype(jnp.int32), step, kept, pages, on_layer)
    return hidden.reshape(rows, length, -1)


def added_stream(model: Decoder, residual: Residual) -> Float[Array, "T D"]:
    """Return the residual stream [T, D] with its update added."""
    return residual.normed(None, model.norm.options, "auto")[1]


def first_without_gradient(config: ModelConfig) -> tuple[int, str] | None:
    """Return the number and the mixer of the first layer that cannot be differentiated, or None."""
    kinds: dict[str, int] = {}
    for layer in range(config.num_hidden_layers):
        for mixer in config.mixers_of(layer):
            kinds.setdefault(mixer, layer)
    others = [(layer, mixer) for mixer, layer in kinds.items() if mixer != "attention"]
    return min(others, default=None)


def without_gradient(params: Any, config: ModelConfig, error: Callable[[str], Exception]) -> Any:
    """Return parameters whose differentiation raises an error if a layer has no derivatives.

    Args:
        params: tree of arrays.
        config: configuration of the model.
        error: makes the error from its message, which names the layer.
    """
    found = first_without_gradient(config)
    if found is None:
        return params

    def forward(params: Any) -> Any:
        layer, mixer = found
        raise error(
            f"layer {layer} ({mixer}) has no derivatives; allowed: layers of attention, with a "
            "dense MLP or experts"
        )

    function = jax.custom_vjp(lambda params: params)
    function.defvjp(forward, lambda _, g: (g,))
    return function(params)
