"""PageKeys: equal prefixes under one salt share keys, and nothing else does."""

import numpy as np

from jaxserve.scheduling.page_keys import LANES, PageKeys

KEYS = PageKeys(64, 4)


def prefix(tokens: list[int], salt: str = "") -> list[bytes]:
    return [key.tobytes() for key in KEYS.prefix(salt, np.array(tokens, np.int32)).keys]


def test_a_key_stands_for_all_tokens_up_to_its_end():
    one = prefix([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len(one) == 2 and len(one[0]) == 4 * LANES
    assert prefix([1, 2, 3, 4, 5, 6, 7, 9])[0] == one[0]
    assert prefix([1, 2, 3, 4, 5, 6, 7, 9])[1] != one[1]
    assert prefix([0, 2, 3, 4, 5, 6, 7, 8])[1] != one[1]
    assert prefix([5, 6, 7, 8])[0] not in one


def test_pages_of_equal_tokens_have_different_keys():
    for token in (0, 1, 7, 2**31 - 1):
        keys = prefix([token] * 64)
        assert len(set(keys)) == 16


def test_order_counts():
    assert prefix([1, 2, 3, 4]) != prefix([4, 3, 2, 1])
    assert prefix([1, 2, 3, 4, 5, 6, 7, 8])[1] != prefix([5, 6, 7, 8, 1, 2, 3, 4])[1]


def test_the_salt_keeps_prefixes_apart():
    keys = [prefix([1, 2, 3, 4], salt)[0] for salt in ("", "a", "b", "ab", "\x00")]
    assert len(set(keys)) == len(keys)
    assert prefix([1, 2, 3, 4], "a") == prefix([1, 2, 3, 4], "a")


def test_every_lane_depends_on_every_token():
    base = np.frombuffer(prefix([1, 2, 3, 4])[0], np.uint32)
    for place in range(4):
        tokens = [1, 2, 3, 4]
        tokens[place] += 1
        assert np.all(np.frombuffer(prefix(tokens)[0], np.uint32) != base)


def test_extending_page_by_page_is_the_same_as_all_at_once():
    tokens = np.arange(20, dtype=np.int32).reshape(5, 4)
    for salt in ("", "salt"):
        state = KEYS.prefix(salt, tokens[:0].ravel()).state[None]
        for page, row in enumerate(tokens):
            key, state = KEYS.extend(state, np.array([page]), row[None])
            assert key.tobytes() == prefix(tokens.ravel().tolist(), salt)[page]


def test_two_processes_do_not_share_keys():
    other = PageKeys(64, 4).prefix("", np.arange(4, dtype=np.int32)).keys
    assert other[0].tobytes() != prefix([0, 1, 2, 3])[0]
