"""PagePool: allocation of pages, look-up of prefixes, and the order of evictions."""

import numpy as np
import pytest

from jaxserve.scheduling.page_keys import WORDS
from jaxserve.scheduling.page_pool import NULL_PAGE, PagePool


def keys(names: str) -> np.ndarray:
    """Return a key for each letter."""
    return np.array([[ord(name) << 32 | ord(name)] * WORDS for name in names], np.uint64)


def cached(pool: PagePool, names: str) -> np.ndarray:
    """Allocate a page for each letter, publish it under that letter, and release all at once."""
    pages = pool.allocate(len(names))
    pool.publish(pages, keys(names))
    pool.release(pages)
    return pages


def found(pool: PagePool, names: str) -> str:
    """Return the letters whose pages are cached."""
    return "".join(name for name in names if len(pool.match(keys(name))))


def test_the_null_page_is_never_handed_out_and_every_other_page_once():
    pool = PagePool(9, 4)
    assert pool.num_usable == pool.num_free == 8
    assert sorted(pool.allocate(8).tolist()) == list(range(1, 9))
    assert pool.num_free == 0 and NULL_PAGE == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)


def test_a_pool_of_the_null_page_alone_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(1, 4)


def test_blank_pages_go_before_cached_ones():
    pool = PagePool(7, 4)
    cached(pool, "abc")
    pool.allocate(3)
    assert found(pool, "abc") == "abc" and pool.num_evictions == 0
    pool.allocate(1)
    assert len(found(pool, "abc")) == 2 and pool.num_evictions == 1


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    pool = PagePool(4, 4)
    cached(pool, "abc")
    for left in ("ab", "a", ""):
        pool.allocate(1)
        assert found(pool, "abc") == left


def test_what_was_released_first_is_evicted_first():
    pool = PagePool(5, 4)
    cached(pool, "ab")
    cached(pool, "cd")
    pool.allocate(2)
    assert found(pool, "abcd") == "cd"


def test_a_large_cache_is_evicted_ahead_and_in_order():
    pool = PagePool(1001, 4)
    pages = pool.allocate(1000)
    names = np.random.default_rng(0).integers(1, 2**64, (1000, WORDS), np.uint64)
    pool.publish(pages, names)
    pool.release(pages[500:])
    pool.release(pages[:500])
    pool.allocate(1)
    assert pool.num_evictions == 1 + 999 // 64
    assert not pool.is_cached[pages[1000 - pool.num_evictions :]].any()
    assert pool.is_cached[pages[: 1000 - pool.num_evictions]].all()
    assert pool.num_free == 999


def test_the_queue_of_evictable_pages_survives_endless_sharing():
    pool = PagePool(5, 4)
    cached(pool, "abcd")
    for name in "abcd" * 20 + "dcb":
        pages = pool.match(keys(name))
        pool.share(pages)
        pool.release(pages)
        pool.check(np.zeros(5, np.int32))
    for left in ("bcd", "bc", "b", ""):
        pool.allocate(1)
        assert found(pool, "abcd") == left


def test_a_hit_renews_a_page():
    pool = PagePool(5, 4)
    cached(pool, "ab")
    cached(pool, "cd")
    pages = pool.match(keys("ab"))
    pool.share(pages)
    pool.release(pages)
    pool.allocate(2)
    assert found(pool, "abcd") == "ab"


def test_a_shared_page_is_free_only_when_the_last_holder_lets_go():
    pool = PagePool(3, 4)
    pages = pool.allocate(2)
    pool.publish(pages[:1], keys("a"))
    pool.share(pool.match(keys("a")))
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages[:1])
    assert pool.num_free == 2 and found(pool, "a") == "a"


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("shares", ["", "a", "ab"])
def test_pages_of_several_are_let_go_of_as_one_after_the_other(is_cached: bool, shares: str):
    """`shares` names the second sequence's shared pages; the third shares none of its pages."""
    pools = []
    for at_once in (True, False):
        pool = PagePool(9, 4)
        first = pool.allocate(3)
        if is_cached:
            pool.publish(first, keys("abc"))
        held = [first, np.concatenate([first[: len(shares)], pool.allocate(2)]), pool.allocate(2)]
        pool.share(first[: len(shares)])
        if at_once:
            pool.release(*held)
        else:
            for pages in held:
                pool.release(pages)
        pool.check(np.zeros(9, np.int32))
        pools.append(pool)
    for _ in range(8):
        assert pools[0].allocate(1) == pools[1].allocate(1)
        assert found(pools[0], "abc") == found(pools[1], "abc")


def test_sharing_takes_a_page_out_of_reach_of_eviction():
    pool = PagePool(4, 4)
    cached(pool, "abc")
    pages = pool.match(keys("c"))
    assert pool.num_evictable(pages) == 1
    pool.share(pages)
    assert pool.num_evictable(pages) == 0 and pool.num_free == 2
    assert pages[0] not in pool.allocate(2).tolist()
    assert found(pool, "abc") == "c"


def test_match_ends_at_the_first_page_that_is_missing():
    pool = PagePool(5, 4)
    pages = cached(pool, "ac").tolist()
    assert pool.match(keys("abc")).tolist() == pages[:1]


def test_a_key_keeps_its_first_page():
    pool = PagePool(5, 4)
    pages = pool.allocate(4)
    pool.publish(pages[:1], keys("a"))
    pool.publish(pages[1:], keys("abb"))
    assert pool.match(keys("ab")).tolist() == [pages[0], pages[2]]
    assert pool.is_cached[pages].tolist() == [True, False, True, False]
    pool.check(pool.ref_count.copy())


def test_clearing_the_cache_forgets_keys_and_keeps_holders():
    pool = PagePool(6, 4)
    cached(pool, "ab")
    held = pool.allocate(2)
    pool.publish(held[:1], keys("c"))
    pool.clear_cache()
    assert found(pool, "abc") == "" and pool.num_free == 3
    pool.check(pool.ref_count.copy())
    pool.release(held)
    assert pool.num_free == pool.num_usable and found(pool, "abc") == ""
    pool.check(pool.ref_count.copy())


def test_check_names_what_is_wrong():
    pool = PagePool(5, 4)
    pages = pool.allocate(2)
    with pytest.raises(AssertionError, match="reference counts differ"):
        pool.check(np.zeros(5, np.int32))
    pool.release(pages)
    pool.check(np.zeros(5, np.int32))
