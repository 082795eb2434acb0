"""Compiler options that `all_reduce` sets, and the cases in which they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.settings.machine import gpu_flags
from jaxserve.start.plan.sum_options import sum_options
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.store import ProgramStore
from pallas_kernels.devices import DeviceLimits, find_card
from scripts.gpu.offline_engine import strategies_of, thunk_counts

H200 = find_card("H200").limits
KERNELS = "xla_gpu_experimental_use_collective_kernels"
GRAPHS = "xla_gpu_enable_command_buffer"


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setenv("XLA_FLAGS", " ".join(gpu_flags()))


def options(chosen: Any, devices: int = 2, device: DeviceLimits = H200) -> dict[str, str]:
    return sum_options(EngineConfig(all_reduce=chosen, tensor_parallel_size=devices), device)


def test_xla_decides_by_default_and_where_there_is_nothing_to_sum() -> None:
    assert EngineConfig().all_reduce == "auto"
    assert options("auto") == options("nccl", 1) == options("pallas", 1) == {}


def test_nccl_and_our_kernel_lie_in_graphs_with_their_sums() -> None:
    assert options("nccl")[KERNELS] == options("pallas")[KERNELS] == ""
    assert options("nccl")[GRAPHS].split(",")[-2:] == ["WHILE", "COLLECTIVES"]
    assert options("xla_kernels") == {KERNELS: "COLLECTIVE_KERNEL_ALL_REDUCE"}


def test_what_the_user_says_of_graphs_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--{GRAPHS}=")
    assert options("nccl") == {KERNELS: ""}


@pytest.mark.parametrize(
    ("chosen", "devices", "card", "reason"),
    [
        ("xla_kernels", 2, "A100", "XLA has such kernels from capability 9.0 on"),
        ("xla_kernels", 3, "H200", "2, 4, 8, ... devices, and there are 3"),
        ("pallas", 2, "B200", "needs capability 9.0"),
        ("pallas", 16, "H200", "allowed: 2 to 8"),
    ],
)
def test_a_card_without_such_sums_is_refused(
    chosen: str, devices: int, card: str, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason) as error:
        options(chosen, devices, find_card(card).limits)
    assert error.value.parameter == "all_reduce" and str(error.value).endswith("allowed: auto")


def test_a_cpu_and_older_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match="concerns GPUs"):
        options("nccl", device=DeviceLimits("cpu", "cpu"))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
    with pytest.raises(InvalidRequest, match=r"needs jax 0\.11\.2"):
        options("nccl")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="all_reduce must be one of auto, nccl"):
        EngineConfig(all_reduce="fast")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="cards of one host; allowed with nnodes: auto, nccl"):
        EngineConfig(all_reduce="pallas", nnodes=2, tensor_parallel_size=2)
    EngineConfig(all_reduce="nccl", nnodes=2, tensor_parallel_size=2)


def test_programs_are_compiled_with_the_options_and_kept_apart(tmp_path: Path) -> None:
    """The option exists on every backend. Another option, or its absence, makes another program."""
    given: list[Any] = []

    def lower() -> Any:
        lowered = jax.jit(lambda x: x + 1).lower(1.0)
        compile_it = lowered.compile

        def noted(**named: Any) -> Any:
            given.append(named.get("compiler_options"))
            return compile_it(**named)

        lowered.compile = noted  # type: ignore[method-assign]
        return lowered

    option = {"xla_embed_ir_in_executable": "True"}
    for chosen in ({}, option, {}, option):
        ProgramStore(tmp_path / "kept", {"its": chosen}, {}, options=chosen).get("sum", lower)
    assert given == [None, option]


def test_cards_are_described_with_their_links_where_there_are_several() -> None:
    links = {count: DescribedCard.of("H200", count).description for count in (1, 2)}
    assert "active_links: 18" in links[2] and "device_interconnect_info" not in links[1]
    assert "device_interconnect_info" not in DescribedCard.of("L4", 2).description


def test_thunks_are_counted_inside_graphs_and_outside() -> None:
    text = """\
001: kPartitionId   [source | next=002 (1)] kPartitionId
003: kAsyncStart    [prev=002 (1)] stream=computation_stream[0], async_id=3
    004: kCollectiveKernel [source | sink] kCollectiveKernel
005: kAsyncDone     [source | sink] async_id=3
000: kCommandBuffer [prev=006 (2)]
    008: kCustomKernel [source] add_norm
    009: kAllReduce    [prev=008 (1)] kAllReduce
    010: kCustomCall   [prev=009 (1)] kCustomCall
011: kCustomKernel  [prev=010 (1)] copy
"""
    assert thunk_counts(text) == {
        "graphs": 1,
        "inside": 3,
        "outside": 2,
        "sums inside": 2,
        "sums outside": 1,
    }
    lines = [
        f'%sum = f32[8] all-reduce(%x), backend_config={{"kernel_strategy":"{name}"}}'
        for name in ("KERNEL_STRATEGY_DEFAULT", "KERNEL_STRATEGY_TRITON_ONE_SHOT")
    ]
    assert strategies_of("\n".join(lines)) == ["nccl", "triton_one_shot"]
    assert strategies_of(lines[0].replace("all-reduce", "all-gather")) == []
