"""The table of cards: names that people type, and the properties that a capability implies."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.devices import CARDS, SHARED_MEMORY, find_card, limits_of, target_device


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("RTX 4090", "NVIDIA GeForce RTX 4090"),
        ("rtx 4060", "NVIDIA GeForce RTX 4060"),
        ("NVIDIA H100", "NVIDIA H100 80GB HBM3"),
        ("t4", "Tesla T4"),
        ("L4", "NVIDIA L4"),
        ("DGX Spark", "NVIDIA GB10"),
        ("RTX PRO 6000", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition"),
        ("V100", "Tesla V100-SXM2-16GB"),
        *((card.name, card.name) for card in CARDS),
    ],
)
def test_names_are_found(name: str, found: str) -> None:
    assert find_card(name).name == found


def test_a_slice_has_its_share() -> None:
    whole, half = find_card("A100"), find_card("NVIDIA A100-SXM4-80GB MIG 3g.40gb")
    assert (half.capability, half.num_sms, half.memory) == (whole.capability, 46, 40 * 2**30)
    assert half.bandwidth == whole.bandwidth * 3 / 7


@pytest.mark.parametrize("name", ["", "GeForce", "RTX 9090", "Radeon"])
def test_an_unknown_card_is_a_sentence(name: str) -> None:
    with pytest.raises(ValueError, match=r"there is no card .* it has: .*RTX 4090.*GB10"):
        find_card(name)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({"device_kind": "cpu", "platform": "cpu"}, ("cpu", (0, 0), 0)),
        # Pallas has no such names, and the driver's answers are enough.
        (
            {"device_kind": "Quadro RTX 9", "compute_capability": "8.6", "core_count": 30},
            ("gpu", (8, 6), 30),
        ),
        (
            {
                "device_kind": "NVIDIA A100 MIG 1g.5gb",
                "compute_capability": "8.0",
                "core_count": 14,
            },
            ("gpu", (8, 0), 14),
        ),
        ({"device_kind": "AMD MI300X", "compute_capability": "gfx942"}, ("rocm", (0, 0), 0)),
        # An abstract device has its name, and perhaps its number of multiprocessors.
        ({"device_kind": "NVIDIA L4"}, ("gpu", (8, 9), 58)),
        ({"device_kind": "NVIDIA A10", "num_cores": 82}, ("gpu", (8, 6), 82)),
    ],
)
def test_a_driver_is_believed(reported: dict, expected: tuple) -> None:
    limits = limits_of(SimpleNamespace(**{"platform": "gpu", **reported}))
    assert (limits.platform, limits.capability, limits.num_sms) == expected


def test_a_mesh_of_real_cards_needs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "NVIDIA GeForce RTX 3050 Laptop GPU"
    card = SimpleNamespace(
        platform="gpu", device_kind=kind, compute_capability="8.6", core_count=20
    )
    described = jax.sharding.AbstractDevice(device_kind=kind, num_cores=20, platform="gpu")
    monkeypatch.setattr(jax, "devices", lambda *_: [card])
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((), (), abstract_device=described)
    ):
        limits = target_device()
    assert (limits.kind, limits.capability, limits.num_sms) == (kind, (8, 6), 20)


def test_every_card_has_a_known_capability() -> None:
    for card in CARDS:
        assert card.capability in SHARED_MEMORY and card.num_sms and card.memory > 2**32
    limits = {name: find_card(name).limits for name in ("T4", "A100", "RTX 4090", "H200", "B200")}
    assert [n for n, card in limits.items() if not card.runs_triton] == ["T4"]
    assert not find_card("Orin").limits.runs_triton  # Pallas does not know the name
    assert [n for n, card in limits.items() if card.widens_fp8] == ["RTX 4090", "H200", "B200"]
    assert [n for n, card in limits.items() if card.rounds_to_fp8] == ["H200", "B200"]
    assert [n for n, card in limits.items() if card.has_wgmma] == ["H200"]
    assert not any(card.shares_host_memory for card in limits.values())
    assert all(find_card(name).limits.shares_host_memory for name in ("Spark", "Thor", "Orin"))
