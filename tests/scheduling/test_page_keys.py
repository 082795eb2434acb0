"""PageKeys: prefixes share keys if and only if they are equal and have the same salt."""

import subprocess
import sys
from hashlib import blake2b, shake_256
from pathlib import Path

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


SECRET = bytes(range(32))
MAKE_KEYS = """
import sys
import numpy as np
from jaxserve.scheduling.page_keys import PageKeys
secret = bytes.fromhex(sys.argv[1]) or None
keys = PageKeys(int(sys.argv[2]), 4, secret).prefix("salt", np.arange(9, dtype=np.int32)).keys
print(keys.tobytes().hex())
"""


def keys_of_a_process(secret: bytes = b"", max_tokens: int = 64) -> str:
    command = [sys.executable, "-c", MAKE_KEYS, secret.hex(), str(max_tokens)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def test_processes_share_keys_where_they_share_a_secret() -> None:
    shared = keys_of_a_process(SECRET)
    assert keys_of_a_process(SECRET, max_tokens=1000) == shared
    assert keys_of_a_process(SECRET[::-1]) != shared
    assert keys_of_a_process() != keys_of_a_process()


def test_keys_of_a_secret_are_those_that_version_1_made() -> None:
    """Computed once more, number by number: engines of two versions may share a secret."""
    page_size, tokens, salt = 4, [5, 0, 2**31 - 1, 7, 1, 2, 3, 4], "a"
    pages = len(tokens) // page_size
    label = b"jaxserve page keys, version 1" + bytes([page_size, 0, 0, 0])
    count = LANES + LANES * LANES + pages * LANES * page_size
    data = shake_256(label + SECRET).digest(8 * count)
    numbers = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(count)]
    words = blake2b(salt.encode(), digest_size=16).digest()
    keys = [b""] * pages
    for lane in range(LANES):
        total = numbers[lane]
        for i in range(LANES):
            word = int.from_bytes(words[4 * i : 4 * i + 4], "little")
            total += numbers[LANES + lane * LANES + i] * word
        for i, token in enumerate(tokens):
            page, place = divmod(i, page_size)
            where = LANES + LANES * LANES + (page * LANES + lane) * page_size + place
            total += numbers[where] * (token + 1)
            if place == page_size - 1:
                keys[page] += (total % 2**64 >> 32).to_bytes(4, "little")
    made = PageKeys(64, page_size, SECRET).prefix(salt, np.array(tokens, np.int32)).keys
    assert [key.tobytes() for key in made] == keys


def test_the_page_size_keeps_keys_apart() -> None:
    tokens = np.arange(8, dtype=np.int32)
    assert PageKeys(64, 4, SECRET).prefix("", tokens).keys[-1].tobytes() not in [
        key.tobytes() for key in PageKeys(64, 8, SECRET).prefix("", tokens).keys
    ]
