"""Several kinds of pages in one pool: blocks, prefixes, windows and reserves."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.execution.page_table import places_of_parts, put_pages, set_rows
from jaxserve.models.config.page_kinds import PageKind, PageLayout
from jaxserve.scheduling.page_kinds import PoolKind, longest_held, most_pages, steady_pages
from jaxserve.scheduling.page_pool import PagePool
from tests.scheduling.harness import Served, prompt

KINDS = (PoolKind(groups=2), PoolKind(8, groups=3))


def layout_of(*counts: int, shapes=((2, 4, 4), (2, 4, 4), (2, 4, 4))) -> PageLayout:
    """Return a layout of layers without a window, and of others with windows."""
    first, kinds = 0, []
    for number, (count, shape) in enumerate(zip(counts, shapes, strict=False)):
        layers = tuple(range(first, first + count))
        kinds.append(PageKind(str(number), layers, *shape, window=8 * number or None))
        first += count
    return PageLayout.of(tuple(kinds), first)


@pytest.mark.parametrize(
    ("counts", "depth", "groups"),
    [
        ((26,), 26, [1]),
        ((18, 18), 18, [1, 1]),  # gpt-oss 120B
        ((8, 40), 8, [1, 5]),  # Gemma 3 12B
        ((10, 52), 5, [2, 11]),  # Gemma 3 27B
        ((5, 29), 5, [1, 6]),  # Gemma 3 4B
        ((3, 15), 3, [1, 5]),  # Gemma 3 270M
        ((16, 29), 2, [8, 15]),
        ((7, 3), 1, [7, 3]),
    ],
)
def test_layers_form_few_groups_that_waste_little(counts, depth, groups):
    layout = layout_of(*counts)
    assert layout.depth == depth
    assert [layout.groups(kind) for kind in range(len(counts))] == groups
    places = [(place.group, place.array) for place in layout.places if place is not None]
    assert len(set(places)) == len(places) == sum(counts), "two layers share a page"
    assert sum(groups) == layout.parts


def test_pages_of_larger_layers_have_fewer_tokens():
    layout = layout_of(5, 25, shapes=((2, 512, 512), (8, 256, 256)))
    assert [layout.splits(0), layout.splits(1)] == [1, 2]
    assert layout.parts == 1 + 2 * 5
    with pytest.raises(UnsupportedModel, match="same multiple of the smallest"):
        layout_of(5, 25, shapes=((2, 512, 512), (3, 256, 256)))
    with pytest.raises(UnsupportedModel, match="same multiple of the smallest"):
        layout_of(5, 25, shapes=((4, 192, 128), (8, 192, 64)))


def test_a_block_takes_the_pages_of_its_kind_and_gives_them_back():
    pool = PagePool(12, 4, KINDS)
    first, second = pool.allocate(2)
    assert pool.num_free == 1 and len({*first, *second}) == 4
    pages = np.concatenate([pool.block_pages[first, :2].ravel(), pool.block_pages[second].ravel()])
    assert sorted(pages.tolist()) == list(range(1, 11))
    pool.release(second)
    assert pool.num_free == 7
    pool.release(first)
    pool.check(np.zeros(12, np.int32))


def test_eviction_frees_blocks_of_any_kind():
    pool, keys = PagePool(11, 4, KINDS), np.arange(1, 5, dtype=np.uint64).reshape(2, 2) << 33
    first, second = pool.allocate(2)
    pool.publish(first, keys)
    pool.publish(second, keys, kind=1)
    pool.release(second, first)
    assert pool.find(keys, 1).tolist() == second.tolist() and pool.num_free == 10
    pool.allocate(1)  # 5 pages, and a block of kind 1 has 3
    assert pool.match(keys).tolist() == first.tolist() and not pool.find(keys, 1).any()
    assert pool.num_free == 5


def test_a_prefix_ends_where_each_kind_has_the_blocks_of_its_window():
    pool, size = PagePool(60, 4, KINDS), 4
    keys = (np.arange(16, dtype=np.uint64).reshape(8, 2) + np.uint64(1)) << np.uint64(33)
    first, second = pool.allocate(8)
    pool.publish(first, keys)
    pool.publish(second[[1, 2, 5, 6, 7]], keys[[1, 2, 5, 6, 7]], kind=1)
    prefix = pool.prefix(keys)
    # The token after n blocks sees 7 earlier ones, in 2 blocks.
    assert prefix.is_end is not None
    assert prefix.is_end.tolist() == [False, False, True, False, False, False, True, True]
    assert [len(blocks) for blocks in prefix.blocks] == [8, 8] and size == pool.page_size


def test_a_sequence_holds_its_window_and_all_blocks_of_other_kinds():
    served = Served(pages=200, kinds=KINDS, budget=8)
    sequence = served.add(40, max_tokens=12)
    for _ in range(5):
        served.step()
    assert len(served.slots.pages(sequence.slot)) == 10
    # The next token is at position 40 and sees the one at 33, in block 8.
    assert served.slots.first_pages[:, sequence.slot].tolist() == [0, 8]
    assert served.pool.num_usable - served.pool.num_free == 2 * 10 + 3 * 2
    for _ in range(8):
        served.step()
    assert served.slots.first_pages[:, sequence.slot].tolist() == [0, 10]
    served.run()


def test_a_hit_needs_no_blocks_before_the_window():
    served = Served(pages=84, kinds=KINDS, budget=16)
    served.serve(40, max_tokens=1)
    served.serve(prompt(40, 1000), max_tokens=1)  # takes what outlived the window
    again = served.add(np.concatenate([prompt(40), prompt(4, 500)]), max_tokens=1)
    served.step()
    assert again.num_cached == 40 and served.pool.num_evictions
    served.run()


def test_keys_are_published_for_every_kind():
    served = Served(pages=64, kinds=KINDS)
    served.serve(24, max_tokens=1)
    assert [len(served.pool.cached(kind)) for kind in (0, 1)] == [6, 6]


def test_the_second_prompt_with_a_prefix_keeps_its_end():
    """Under pressure the window of a prefix that several prompts share survives."""
    served = Served(pages=76, kinds=KINDS, budget=16)
    cached = []
    for number in range(4):
        tail = prompt(48, 1000 * (number + 1))
        cached.append(served.serve(np.concatenate([prompt(24), tail]), max_tokens=1).num_cached)
    assert cached == [0, 0, 24, 24]


def test_many_sequences_with_one_prefix_end_in_one_step():
    """Each of them moves the same blocks to the end of the eviction order."""
    served = Served(pages=400, slots=60, kinds=(PoolKind(), PoolKind(64)), budget=1024)
    prefix = prompt(160)
    served.serve(prefix, max_tokens=2)
    served.serve(np.concatenate([prefix, prompt(8, 500)]), max_tokens=2)
    rows = [
        served.add(np.concatenate([prefix, prompt(4, 1000 + 10 * number)]), max_tokens=2)
        for number in range(60)
    ]
    assert len(served.run()) == 60
    assert {row.num_cached for row in rows} == {160}


@pytest.mark.parametrize("seed", range(8))
def test_the_upper_bound_of_the_reserve(seed):
    """Rows in every state: within a prompt, after a hit, before and beyond their window."""
    generator = np.random.default_rng(seed)
    served, checks = Served(pages=900, slots=8, kinds=KINDS, budget=32), 0
    for number in range(12):
        lengths = generator.integers(1, 60, 2)
        tokens = [prompt(lengths[0]), prompt(lengths[1], 1000 * number)]
        served.add(np.concatenate(tokens), max_tokens=20)
    windows = served.scheduler.windows
    while served.scheduler.has_work:
        running = np.array([one.slot for one in served.scheduler.running_sequences()], np.intp)
        for known in (1, 100, 1000):
            assert windows.reserve(known, running) <= windows.upper_bound(running)
            checks += len(running) > 0
        served.step()
    assert checks > 60


def test_chunks_shorten_before_a_sequence_is_preempted():
    served = Served(pages=5 * 13, kinds=KINDS, budget=64, slots=2, enable_prefix_caching=False)
    served.add(30, max_tokens=18)
    for _ in range(3):
        served.step()
    served.add(20, max_tokens=2)
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_a_step_of_two_chunks_is_reserved():
    """A prompt waits until the chunks of two steps fit beside those that run."""
    waits = []
    for pages in range(40, 60):
        served = Served(pages=pages, kinds=KINDS, budget=4, slots=2, enable_prefix_caching=False)
        served.scheduler.windows.reserve_divisor = 1
        served.add(16, max_tokens=8)
        for _ in range(6):
            served.step()
        served.add(16, max_tokens=8)
        served.step()
        waits.append(served.scheduler.num_waiting)
    # Of the first row 6 blocks without a window and 4 with one, of the second 4 and 4, and 8 tokens
    # of chunks take 2 blocks.
    assert 40 + waits.index(0) == 2 * (6 + 4) + 3 * (4 + 4 + 2)


def test_sizes_of_sequences():
    assert steady_pages(KINDS, 100, 4) == 2 * 25 + 3 * 4
    assert most_pages(KINDS, 100, 4, 8) == 2 * 25 + 3 * 7
    assert most_pages(KINDS, 12, 4, 8) == 2 * 3 + 3 * 3
    assert longest_held(KINDS, 71, 4, 8, 1000) == 100
    assert longest_held(KINDS, 1000, 4, 8, 100) == 100


def test_the_device_has_the_pages_of_each_group():
    kinds = (PoolKind(), PoolKind(8, groups=2, splits=2))
    layout = layout_of(4, 8, shapes=((2, 4, 4), (4, 4, 4)))
    assert [layout.groups(1), layout.splits(1)] == [2, 2]
    served = Served(pages=60, kinds=kinds)
    sequence = served.add(14, max_tokens=9)
    served.step()
    slots, slot = served.slots, sequence.slot
    table = jnp.zeros((slots.num_slots + 1, slots.num_columns), jnp.int32)
    places = slots.take_unsent(np.array([slot]))
    flat = places_of_parts(jnp.asarray(places), layout, slots.num_columns)
    sent = put_pages(table, flat, jnp.asarray(slots.pool_pages(places)).ravel())
    rows = np.zeros((8, slots.num_columns), np.int32)
    rows[0] = slots.device_rows(np.array([slot]))
    owners = np.full(8, slots.num_slots + 1, np.int32)
    owners[0] = slot
    assert np.array_equal(sent, set_rows(table, owners, rows))
    row, most = np.asarray(sent)[slot], slots.max_pages
    first, second = slots.page_tables[:, slot, :4]
    second = served.pool.block_pages[second]
    assert row[:4].tolist() == first.tolist()
    assert row[most : most + 8].tolist() == second[:, :2].ravel().tolist()
    assert row[3 * most : 3 * most + 8].tolist() == second[:, 2:].ravel().tolist()
