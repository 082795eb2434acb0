"""Layers of several kinds see their own cells of arrays that they share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.config.page_kinds import PageKind, PageLayout
from jaxserve.models.paged import GroupCells, PagedStep, PageGroups

PAGES, BLOCK = 5, 8
# Layers 1 and 4 see all positions, with one head of 16. Layers 0, 2, 3 and 5 have a window, with
# two heads of 16 in pages of half as many tokens. Layers 6 and 7 read the pages of layers 5 and 4.
KINDS = (
    PageKind("window 4", (0, 2, 3, 5), 2, 16, 16, 4),
    PageKind("attention", (1, 4), 1, 16, 16, None),
)
LAYOUT = PageLayout.of(KINDS, 8, (0, 1, 2, 3, 4, 5, 5, 4))


def empty_step() -> PagedStep:
    none = jnp.zeros(0, jnp.int32)
    return PagedStep(none, none, none, none, none, False, "xla")


def groups() -> PageGroups:
    """Return pages whose numbers all differ, and cells that name their group."""
    shape = PAGES, 1, BLOCK, 16
    pages = [
        tuple(
            jnp.arange(np.prod(shape)).reshape(shape) + 1e6 * (2 * array + part) for part in (0, 1)
        )
        for array in range(LAYOUT.depth)
    ]
    cells = [
        GroupCells(jnp.full((1, 2), group), jnp.full(1, group))
        for group in range(sum(map(LAYOUT.groups, range(len(LAYOUT.kinds)))))
    ]
    return PageGroups(LAYOUT, pages, cells)


@pytest.mark.parametrize("layer", range(8))
def test_a_layer_has_the_cells_of_its_group_and_the_shape_of_its_kind(layer: int) -> None:
    source = {6: 5, 7: 4}.get(layer, layer)
    place = LAYOUT.places[layer]
    assert place is not None and place == LAYOUT.places[source]
    is_full = source in (1, 4)
    assert LAYOUT.kinds[place.kind].window == (None if is_full else 4)
    pages, step = groups().of_layer(layer, empty_step())
    assert [page.shape for page in pages] == [(PAGES, *((1, 8) if is_full else (2, 4)), 16)] * 2
    first = [float(page.ravel()[0]) for page in pages]
    assert first == [1e6 * 2 * place.array, 1e6 * (2 * place.array + 1)]
    assert step.page_table.tolist() == [[place.group] * 2]
    assert step.slot_mapping.tolist() == [place.group]


def test_groups_of_layers_differ() -> None:
    assert LAYOUT.depth == 2
    places = [LAYOUT.places[layer] for layer in range(6)]
    assert len({(place.group, place.array) for place in places if place is not None}) == 6


def test_a_layer_sees_what_the_layer_of_its_pages_wrote() -> None:
    kept = groups()
    pages, _ = kept.of_layer(5, empty_step())
    kept.put(5, tuple(page + 0.5 for page in pages))
    seen, _ = kept.of_layer(6, empty_step())
    np.testing.assert_array_equal(seen[0], pages[0] + 0.5)
