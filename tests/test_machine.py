"""Cards that a driver lists, and the one that JAX is made to open."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jaxlib import xla_client

from jaxserve.settings import cards, environment, machine
from jaxserve.settings.cards import DriverCard, VisibleCard, driver_cards, visible_card
from jaxserve.settings.environment import card_to_open, claimed, memory_fraction
from jaxserve.settings.machine import host_memory
from tests.support.host_files import (
    UNLIMITED_V1,
    V1_MOUNT,
    V2_MOUNT,
    write_host,
    write_v1,
    write_v2,
)
from tests.support.nvml import GB10, MIB, RTX_4090, T4, PlayedCard, play_driver

FIRST = DriverCard("GPU-aa11", "NVIDIA GeForce RTX 3090", (8, 6), 24 << 30, 20 << 30)
SECOND = replace(FIRST, uuid="GPU-bb22", free=22 << 30)
OLD = DriverCard("GPU-cc33", "Quadro RTX 8000", (7, 5), 48 << 30, 47 << 30)
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("CUDA_VISIBLE_DEVICES", "JAX_CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    for name in (*names, *FRACTIONS, "XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)


LIST = """
import dataclasses, json
from jaxserve.settings.cards import driver_cards
print(json.dumps([list(dataclasses.astuple(card)) for card in driver_cards()]))
"""


def listed(environment: dict[str, str]) -> list:
    done = subprocess.run(
        [sys.executable, "-c", LIST], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_cards_are_listed_as_cuda_will_see_them(tmp_path: Path) -> None:
    """The driver's reserved memory is left out, and slices replace their card."""
    whole = PlayedCard("NVIDIA H100 80GB HBM3", (9, 0), 81559, 80000, uuid="GPU-h100")
    part = PlayedCard("NVIDIA H100 80GB HBM3 MIG 3g.40gb", (9, 0), 40448, 40000, slice_of=1)
    part = replace(part, uuid="MIG-1")
    found = listed(play_driver(tmp_path, RTX_4090, whole, part, GB10))
    assert found == [
        ["GPU-4090", RTX_4090.name, [8, 9], (24564 - 456) * MIB, 23000 * MIB],
        ["MIG-1", part.name, [9, 0], 40448 * MIB, 40000 * MIB],
        ["GPU-spark", GB10.name, [12, 1], 0, 0],
    ]


def test_a_driver_that_fails_or_is_absent_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert listed(play_driver(tmp_path, T4, init=9)) == []
    monkeypatch.setattr(cards, "LIBRARY", "libnone-such.so.1")
    assert driver_cards() == []


def test_of_several_cards_the_one_with_most_room_is_opened() -> None:
    assert visible_card([], None) is None
    assert visible_card([FIRST, SECOND], None) == VisibleCard("GPU-bb22", (SECOND,))
    # Kernels run on it, though the other has more memory.
    assert visible_card([OLD, FIRST], None) == VisibleCard("GPU-aa11", (FIRST,))


def test_several_cards_are_of_one_name_and_at_most_as_many_as_there_are() -> None:
    both = VisibleCard("GPU-bb22,GPU-aa11", (SECOND, FIRST))
    assert visible_card([FIRST, SECOND], None, count=2) == both
    assert visible_card([OLD, FIRST, SECOND], None, count=3) == both
    assert visible_card([FIRST, SECOND], "1,0", True, 2) == VisibleCard("1,0", (SECOND, FIRST))
    assert visible_card([FIRST, SECOND], "0,7,1", True, 3) == VisibleCard("0", (FIRST,))


@pytest.mark.parametrize(
    ("setting", "by_bus", "cards"),
    [
        ("1,0", False, (SECOND,)),
        ("GPU-aa", False, (FIRST,)),
        ("0", True, (FIRST,)),
        ("2", False, None),
        ("", False, None),
        ("-1", False, None),
        ("GPU-nn", False, None),
    ],
)
def test_a_choice_of_the_users_stays(
    setting: str, by_bus: bool, cards: tuple[DriverCard, ...] | None
) -> None:
    found = visible_card([FIRST, SECOND], setting, by_bus)
    assert (found.cards if found else None) == cards
    assert found is None or found.setting == setting.split(",")[0]


def test_a_number_that_may_be_any_card_counts_the_fullest() -> None:
    """CUDA's numbers are not the driver's where cards differ."""
    found = visible_card([OLD, FIRST], "0")
    assert found is not None and found.cards == (OLD, FIRST) and found.card == FIRST
    by_bus = visible_card([OLD, FIRST], "0", by_bus=True)
    assert by_bus is not None and by_bus.cards == (OLD,)


@pytest.mark.parametrize(
    ("platforms", "opened"), [("", True), ("cpu", False), ("cuda,cpu", True), ("tpu", False)]
)
def test_no_card_is_looked_for_where_jax_runs_on_cpu(
    platforms: str, opened: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(environment, "driver_cards", lambda: [FIRST])
    assert (card_to_open() is not None) == opened


def test_jax_takes_a_part_of_one_card_and_nothing_stays_set() -> None:
    before = dict(os.environ)
    with claimed(VisibleCard("GPU-aa11", (FIRST,)), 0.75, preallocate=True):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-aa11"
        options = xla_client.generate_pjrt_gpu_plugin_options()
        assert options["memory_fraction"] == 0.75 and "preallocate" not in options
    with claimed(VisibleCard("0", (FIRST,)), 0.5, preallocate=False):
        assert xla_client.generate_pjrt_gpu_plugin_options()["preallocate"] is False
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", FRACTIONS)
def test_a_part_that_the_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX refuses to start with both names."""
    monkeypatch.setenv(name, "0.4")
    monkeypatch.setenv("JAX_CUDA_VISIBLE_DEVICES", "1")
    assert memory_fraction() == 0.4
    with claimed(VisibleCard("0", (FIRST,)), 0.9, preallocate=True):
        assert xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"] == 0.4
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert os.environ[name] == "0.4"


def test_the_hosts_memory_is_read() -> None:
    total, available = host_memory()
    assert 0 < available <= total


HOST = (64 << 30, 48 << 30)


def test_a_host_without_limits_is_taken_as_it_is(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == (0, 0)
    root = write_host(tmp_path / "bare", *HOST)
    assert host_memory(root) == HOST
    root = write_host(tmp_path / "host", *HOST, "0::/user.slice\n", V2_MOUNT)
    write_v2(root / "sys/fs/cgroup/user.slice", "max", 3 << 30)  # the root group has no such files
    assert host_memory(root) == HOST
    write_v2(root / "sys/fs/cgroup/user.slice", 128 << 30, 3 << 30)
    assert host_memory(root) == HOST


def test_every_group_above_the_process_limits_it(tmp_path: Path) -> None:
    """Pages of files are counted as free: the kernel drops them before it kills."""
    root = write_host(tmp_path, *HOST, "0::/pod/box\n", V2_MOUNT)
    mount = root / "sys/fs/cgroup"
    write_v2(mount / "pod/box", 8 << 30, 3 << 30, files=2 << 30)
    assert host_memory(root) == (8 << 30, 7 << 30)
    write_v2(mount / "pod", 10 << 30, 6 << 30)  # including the memory of its other groups
    assert host_memory(root) == (8 << 30, 4 << 30)
    write_v2(mount / "pod", "max", 6 << 30, high=str(7 << 30))
    assert host_memory(root) == (7 << 30, 1 << 30)
    write_v2(mount / "pod", 4 << 30, 5 << 30)  # lowered below the memory in use
    assert host_memory(root) == (4 << 30, 0)
    (mount / "pod/memory.max").write_text("damaged")
    assert host_memory(root) == (8 << 30, 7 << 30)


@pytest.mark.parametrize("top", ["/", "/docker/1f", "/../elsewhere"])
def test_groups_of_version_1_count_too(tmp_path: Path, top: str) -> None:
    """Includes a container that sees its group as the mount, under the name that it has outside."""
    texts = "9:name=systemd:/\n4:cpu,memory:/docker/1f\n0::/\n"
    unified = V2_MOUNT.replace("cgroup rw", "cgroup/unified rw")
    root = write_host(tmp_path, *HOST, texts, f"{unified}\n{V1_MOUNT.format(top=top)}\n")
    mount = root / "sys/fs/cgroup/memory"
    write_v1(mount, UNLIMITED_V1, 20 << 30)
    assert host_memory(root) == HOST
    write_v1(mount / "docker/1f" if top == "/" else mount, 6 << 30, 5 << 30, files=1 << 30)
    assert host_memory(root) == (6 << 30, 2 << 30)


@pytest.mark.parametrize(
    ("platforms", "plugin", "cards", "tuned"),
    [
        ("cpu", True, [FIRST], True),
        ("", False, [FIRST], True),
        ("", True, [], True),
        ("", True, [FIRST], False),
        ("cuda", True, [FIRST], False),
    ],
)
def test_the_heap_is_tuned_only_where_jax_runs_on_cpu(
    platforms: str,
    plugin: bool,
    cards: list[DriverCard],
    tuned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    monkeypatch.setattr(environment, "allocate_from_heap", lambda: calls.append(1))
    monkeypatch.setattr(environment, "has_cuda_plugin", lambda: plugin)
    monkeypatch.setattr(environment, "driver_cards", lambda: cards)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    for name in ("TRANSFORMERS_VERBOSITY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "error")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=here")
    environment.prepare_process()
    assert bool(calls) == tuned
    added = [] if tuned else machine.gpu_flags()
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=here", *added]


def test_flags_that_the_user_gave_win() -> None:
    assert machine.with_gpu_flags("") == " ".join(machine.gpu_flags())
    given = "--xla_gpu_enable_command_buffer=FUSION --xla_gpu_enable_pdl_launch=true"
    assert machine.with_gpu_flags(given) == given


@pytest.mark.parametrize(("version", "count"), [("0.10.2", 1), ("0.11.2", 2), ("0.12.0.1", 2)])
def test_flags_are_those_that_the_version_knows(version: str, count: int) -> None:
    """XLA ends the process at a flag that it does not know."""
    assert len(machine.gpu_flags(version)) == count
