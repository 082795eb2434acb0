"""Sums over devices by the public operations. The kernel's own tests are in tests/machine_code."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.device_sums import OLDEST_JAX, device_sum_limit
from pallas_kernels.devices import find_card
from tests.support.last_line import found_by
from tests.support.quick_code import FLAGS

H200 = find_card("H200").limits


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    flags = f"--xla_force_host_platform_device_count=4 {FLAGS}"
    return found_by("tests.kernels.sums_over_devices", XLA_FLAGS=flags)


def test_a_sum_is_that_in_the_order_of_the_devices_to_the_bit(found: dict[str, Any]) -> None:
    assert found["sums"]


def test_a_sum_within_a_norm_is_the_sum_before_it(found: dict[str, Any]) -> None:
    assert found["norms"] == {"xla": True, "triton_interpret": True}


def test_a_model_leaves_its_sums_to_norms_and_gives_the_same_bits(found: dict[str, Any]) -> None:
    """One layer has two, beside the embedding's, which no norm follows."""
    assert found["finite"] and found["logits"]
    assert found["counts"] == [
        {"norms with a sum": 0, "sums": 3},
        {"norms with a sum": 2, "sums": 3},
    ]


def test_the_report_times_sums_where_there_are_devices(found: dict[str, Any]) -> None:
    [(name, item)] = found["item"].items()
    assert name == "2 devices, 1 rows" and item["verdict"] == "right" and item["bytes"] == 1024
    assert item["micros"].keys() == {"auto", "nccl", "xla_kernels", "pallas"}
    assert all(isinstance(micros, float) for micros in item["micros"].values())


@pytest.mark.parametrize(
    ("card", "rows", "width", "devices", "reason"),
    [
        ("H200", 8, 4096, 8, None),
        ("H200", 73, 4096, 8, None),
        ("H200", 74, 4096, 8, "would read 8486912 bytes"),
        ("H200", 8, 2880, 8, "2880 numbers; allowed: multiples of 128"),
        ("H200", 1, 4096, 16, "16 devices; allowed: 2 to 8"),
        ("H200", 1, 4096, 1, "1 devices"),
        ("A100", 1, 4096, 2, "needs capability 9.0"),
        ("B200", 1, 4096, 2, "needs capability 9.0"),
    ],
)
def test_what_the_kernel_cannot_sum_is_xlas(
    card: str,
    rows: int,
    width: int,
    devices: int,
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jax.__version_info__", OLDEST_JAX)
    limit = device_sum_limit(find_card(card).limits, rows, width, devices)
    assert limit is None if reason is None else limit is not None and reason in limit


def test_older_versions_of_jax_have_no_barrier_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.__version_info__", (0, 11, 1))
    assert "needs jax 0.11.2 or newer" in str(device_sum_limit(H200, 1, 4096, 2))
