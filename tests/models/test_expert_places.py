"""Places of experts on devices: who gets several, and where they lie."""

from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import parse_model_config
from jaxserve.models.expert_places import balanced_places, chosen_places, place_tables, spread
from jaxserve.models.shards import Split, check_split, parts_of
from tests.equivalence import EXPERTS


def test_every_expert_has_a_place_and_no_device_has_it_twice() -> None:
    rng = np.random.default_rng(0)
    for _ in range(400):
        devices, each = (int(n) for n in rng.integers(2, 6, 2))
        places = devices * each
        # The last have as many places as fit, and as few, so that full devices must pass on.
        count = int(rng.integers(each, places + 1))
        load = rng.zipf(1.3, count).clip(max=10**6) * rng.integers(0, 2, count)
        found = np.array(balanced_places(load.tolist(), devices, places)).reshape(devices, each)
        assert set(found.ravel()) == set(range(count))
        assert all(len(set(own)) == each for own in found.tolist())


def test_a_full_device_passes_on_what_others_have_room_for() -> None:
    """The last expert has two places, and all the room that is left is on one device."""
    held = spread([3.0, 1.0, 1.0, 0.9, 0.5], [1, 1, 1, 1, 2], 2, 3)
    assert sorted(map(len, held)) == [3, 3]
    assert all(4 in own for own in held)
    assert sorted(held[0] + held[1]) == [0, 1, 2, 3, 4, 4]


def test_the_busiest_expert_is_divided_among_devices() -> None:
    load = [90, 1, 2, 30, 3, 4]
    found = np.array(balanced_places(load, 2, 8)).reshape(2, 4)
    copies = Counter(found.ravel().tolist())
    assert copies == {0: 2, 3: 2, 1: 1, 2: 1, 4: 1, 5: 1}
    each = [sum(load[expert] / copies[expert] for expert in own) for own in found.tolist()]
    assert each == [65, 65]
    # The work of each place counts: the second replica goes to the second expert.
    three = Counter(balanced_places([60, 40, 1, 2, 3, 4, 5], 3, 9))
    assert three[0] == three[1] == 2
    # Without replicas the busiest is alone with the lightest.
    assert balanced_places([9, 5, 4, 1], 2, 4) == (0, 3, 1, 2)


def test_the_work_of_devices_is_even_where_chance_makes_it_uneven() -> None:
    """256 experts over 8 devices, with loads as uneven as a text's: 32 replicas make it even."""
    load = np.random.default_rng(1).lognormal(0, 1.2, 256)

    def busiest(places: tuple[int, ...]) -> float:
        copies = Counter(places)
        each = [load[expert] / copies[expert] for expert in places]
        return np.reshape(each, (8, -1)).sum(axis=1).max() / load.sum() * 8

    assert busiest(tuple(range(256))) > 1.2
    assert busiest(balanced_places(load.tolist(), 8, 288)) < 1.01


def test_a_token_goes_to_a_place_of_its_expert_whatever_the_batch() -> None:
    places = ((), (0, 1, 2, 3, 0, 4, 5, 3))
    config = replace(parse_model_config(EXPERTS), split=Split(2, True, places))
    check_split(config)
    tables = place_tables(config)
    assert tables is not None and not tables[0].size and tables[1].shape == (6, 3)
    rng = np.random.default_rng(2)
    chosen = np.stack([rng.permutation(6)[:2] for _ in range(64)])
    positions = rng.integers(0, 50, 64)
    table = jnp.asarray(tables[1])
    found = np.asarray(chosen_places(jnp.asarray(chosen), jnp.asarray(positions), table))
    assert (np.array(places[1])[found] == chosen).all()
    used = Counter(found.ravel().tolist())
    assert set(used) == set(range(8)) and abs(used[0] - used[4]) < used[0]
    for token in range(8):
        alone = chosen_places(jnp.asarray(chosen[[token]]), jnp.asarray(positions[[token]]), table)
        assert (np.asarray(alone)[0] == found[token]).all()


@pytest.mark.parametrize("devices", [2, 4])
def test_parts_are_the_experts_of_a_devices_places(devices: int) -> None:
    own = balanced_places([9, 1, 8, 1, 1, 1], devices, 8)
    config = replace(parse_model_config(EXPERTS), split=Split(devices, True, ((), own)))
    check_split(config)  # six experts do not divide over four devices, their places do
    for axes, shape in (
        (("experts", "embed", "gate_up", "mlp"), (6, 3, 2, 4)),
        (("experts", "embed"), (6, 3)),
    ):
        whole = np.arange(np.prod(shape)).reshape(shape)
        parts = parts_of(config, axes, shape, "layers.1.mlp.down")
        joined = np.concatenate([part.cut(whole) for part in parts])
        np.testing.assert_array_equal(joined, whole[np.array(own)])
        unnamed = parts_of(config, axes, shape)
        assert [p.own_shape for p in unnamed] == [p.own_shape for p in parts]
    assert all(part.is_whole for part in parts_of(config, ("embed", "experts"), (3, 6), "x"))
