"""PageIndex: pages by their keys, in batches."""

import numpy as np

from jaxserve.scheduling.page_index import PageIndex


def keys(*firsts: int, second: int = 7) -> np.ndarray:
    """Return keys with these numbers as tags.

    Small numbers that differ by a multiple of 1024 share a bucket.
    """
    return np.array([(first << 32 | first, second) for first in firsts], np.uint64)


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.intp)


def test_it_does_what_a_dictionary_does():
    random = np.random.default_rng(0)
    index, model = PageIndex(400), {}
    names = random.integers(1, 2**64, (600, 2), np.uint64)
    free = list(range(1, 400))
    for _ in range(2000):
        if free and random.integers(2):
            count = int(random.integers(1, min(len(free), 40) + 1))
            offered, free = free[:count], free[count:]
            chosen = random.integers(0, len(names), count)
            kept = index.add(pages(*offered), names[chosen]).tolist()
            for page, name in zip(offered, chosen.tolist(), strict=True):
                if model.setdefault(name, page) != page:
                    free.append(page)
            assert sorted(kept) == sorted(set(offered) - set(free))
        elif model:
            gone = random.permutation(list(model))[: random.integers(1, 60)].tolist()
            left = [model.pop(name) for name in gone]
            index.remove(pages(*left))
            free += left
        expected = [model.get(name, 0) for name in range(len(names))]
        assert index.find(names).tolist() == expected
        assert index.pages().tolist() == sorted(model.values())


def test_of_equal_keys_in_one_batch_the_first_counts():
    index = PageIndex(16)
    assert index.add(pages(3, 4, 5, 6), keys(1, 2, 1, 2)).tolist() == [3, 4]
    assert index.find(keys(1, 2)).tolist() == [3, 4]


def test_a_bucket_that_is_full_keeps_what_it_has():
    index = PageIndex(256)
    same = keys(*range(5, 5 + 12 * 1024, 1024))
    kept = index.add(np.arange(1, 13), same)
    assert kept.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert index.find(same).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0]
    index.remove(pages(2))
    assert index.add(pages(20), same[-1:]).tolist() == [20]
    assert index.find(same).tolist() == [1, 0, 3, 4, 5, 6, 7, 8, 0, 0, 0, 20]


def test_half_a_key_finds_nothing():
    index = PageIndex(16)
    index.add(pages(3), keys(1))
    assert index.find(keys(1, second=8)).tolist() == [0]
    assert index.add(pages(4), keys(1, second=8)).tolist() == []
    assert index.find(keys(1)).tolist() == [3] and index.pages().tolist() == [3]


def test_what_was_forgotten_is_not_found():
    index = PageIndex(16)
    index.add(pages(1, 2, 3), keys(1, 2, 3))
    index.remove(pages(2))
    assert index.find(keys(1, 2, 3)).tolist() == [1, 0, 3]
    index.clear()
    assert not index.find(keys(1, 2, 3)).any() and not len(index.pages())
