"""The paged batch of a step, as transformer layers see it, and the names of parameter axes.

`jaxserve.execution` maps the logical axes of parameters to mesh axes. A parameter carries its axes
as metadata, set when it is created (`linear.weight`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import jax
from flax import nnx

from jaxserve.models.config.page_kinds import PageLayout
from pallas_kernels import StateRows

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, Shaped

    Pages = Shaped[Array, "P K S H"]
    Scales = Float32[Array, "P K S"]
    # One layer's k_pages and v_pages, and the scales of each if pages are int8.
    KVPages = tuple[Pages, Pages] | tuple[Pages, Pages, Scales, Scales]
    # With latent attention, the pages of latents, and their scales if pages are int8.
    LatentPages = tuple[Pages] | tuple[Pages, Scales]
    LayerPages = KVPages | LatentPages
    States = tuple[Shaped[Array, "places ..."], ...]
else:  # for modules that run without jaxtyping
    KVPages = LatentPages = LayerPages = States = tuple[jax.Array, ...]

# "group": the query heads that share a kv head (in the fused projection also its key and value).
LogicalAxis = Literal[
    "vocab",
    "embed",
    "kv_heads",
    "group",
    "head_dim",
    "gate_up",
    "mlp",
    "experts",
    "latent",
    "taps",
    "state_parts",
    "state_heads",
]
LogicalAxes = tuple[LogicalAxis, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedStep:
    """One step's ragged batch as transformer layers see it: T tokens in R rows.

    A row is the consecutive tokens of one sequence, and the rows follow each other. Padding follows
    the real tokens and the real rows.
    """

    positions: Int32[Array, " T"]  # absolute position of each token in its sequence
    # page * S + offset of the cell for each token's K and V; -1 writes no cell (padding).
    slot_mapping: Int32[Array, " T"]
    page_table: Int32[Array, "R M"]
    # Row r has tokens query_start[r]:query_start[r + 1].
    query_start: Int32[Array, " R_plus_1"]
    # Tokens of each row in the cache after this step's write, or 0 for a padded row.
    kv_len: Int32[Array, " R"]
    # Promises that T == R and that row r is token r or padding, so that the decode kernel applies.
    decode_only: bool = field(metadata={"static": True})
    # Attention implementation: "auto" | "xla" | "triton" | "mosaic_gpu" | "llvm".
    implementation: str = field(metadata={"static": True})
    # For a layer whose experts have places: the number of places of each expert, then the places.
    places: Int32[Array, "E W"] | None = None
    # For a layer with an input of its own (`LayerInput`): that input.
    layer_input: Float[Array, "T P"] | None = None
    # Tokens and places of each row's states, for layers that keep states.
    state_rows: StateRows | None = None

    @property
    def others(self) -> str:
        """Name of the implementation of all kernels except attention.

        The name is "auto" if that of attention is "mosaic_gpu" or "llvm", which lack some of these
        kernels, else the same as that of attention.
        """
        is_special = self.implementation in ("mosaic_gpu", "llvm")
        return "auto" if is_special else self.implementation


class GroupCells(NamedTuple):
    """The cells of a step in the pages of a group of layers (see `PagedStep`)."""

    page_table: Int32[Array, "R M"]
    slot_mapping: Int32[Array, " T"]


class LayersPages(Protocol):
    """The cache pages of all layers, of which a layer may read those of another."""

    def of_layer(self, layer: int, step: PagedStep) -> tuple[LayerPages | tuple[()], PagedStep]:
        """Return the pages of a layer after the layers before it, and the step with its cells."""
        ...

    def put(self, layer: int, pages: LayerPages) -> None:
        """Replace the pages of a layer by pages with the keys and values of the step."""
        ...


class PageGroups:
    """The cache pages of a program whose layers share arrays (see `PageLayout`).

    The layers are computed in their order, and each sees the arrays as the layers before it have
    changed them.

    Args:
        layout: the layout of the model.
        pages: the arrays, as the first kind of pages sees them.
        cells: the cells of the step, for each group of layers.
        devices: number of devices over which kv heads are divided.
    """

    def __init__(
        self,
        layout: PageLayout,
        pages: Sequence[LayerPages],
        cells: Sequence[GroupCells],
        devices: int = 1,
    ) -> None:
        self._layout, self._cells, self._devices = layout, cells, devices
        self.pages = list(pages)

    def of_layer(self, layer: int, step: PagedStep) -> tuple[LayerPages | tuple[()], PagedStep]:
        """Return the pages of a layer after the layers before it, and the step with its cells."""
        place = self._layout.places[layer]
        if place is None:
            return (), step
        pages = self.pages[place.array]
        return self._as_kind(pages, place.kind), replace(step, **self._cells[place.group]._asdict())

    def put(self, layer: int, pages: LayerPages) -> None:
        """Replace the pages of a layer by pages with the keys and values of the step."""
        place = self._layout.places[layer]
        if place is not None:
            self.pages[place.array] = self._as_kind(pages, 0)

    def _as_kind(self, pages: LayerPages, kind: int) -> LayerPages:
        """Return pages in the shape of a kind, of whose pages all have as many numbers."""
        if self._layout.is_uniform:
            return pages
        described = self._layout.kinds[kind]
        heads = max(1, described.heads // self._devices)
        shaped: Any = tuple(
            page.reshape(page.shape[0], heads, -1, size)
            for page, size in zip(pages, described.sizes, strict=True)
        )
        return shaped


def logical_axes(module: nnx.Module) -> dict[str, LogicalAxes]:
    """Return the logical axes of every parameter, by its path, such as "layers.0.attention.qkv".

    The order is that of the leaves of `nnx.split(module)[1]`. Works on abstract modules.
    """
    parameters = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {
        ".".join(map(str, path)): parameter.get_metadata()["axes"] for path, parameter in parameters
    }
