"""Plans and predictions of models divided over devices, against arithmetic by hand.

Sizes are of published configurations. The tests load, compile and time no model.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxserve.commands.cli import main
from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.shards import Split, check_split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import named_device
from jaxserve.start.plan.memory_plan import plan_memory
from jaxserve.start.plan.step_time import StepTimes, sum_seconds
from jaxserve.start.plan.weights import Weights
from tests.models.test_published_configs import DEEPSEEK_V3, LLAMA_3, shape

pytestmark = pytest.mark.usefixtures("shapes_once")

MODELS: dict[str, Any] = {
    "8B": LLAMA_3,
    "70B": LLAMA_3 | shape(8192, 28672, 80, 64, 8, 128256),
    "DeepSeek-V3": DEEPSEEK_V3,
}
BANDWIDTH, FLOPS, LINK = 4.8e12, 989e12, 450e9  # an H200's data sheet


@cache
def whole(name: str) -> Weights:
    return Weights(parse_model_config(MODELS[name]), "bfloat16")


def weights_of(name: str, devices: int, experts: bool = False) -> Weights:
    weights = whole(name).divided(Split(devices, experts))
    check_split(weights.config)
    return weights


def llama(sizes: tuple[int, int, int, int, int], devices: int) -> tuple[int, int]:
    """Count the weights of a device that each token is multiplied with, and that each row is."""
    hidden, mlp, layers, heads, kv = sizes
    attention = hidden * (2 * heads + 2 * kv) * 128 // devices
    return layers * (attention + 3 * hidden * mlp // devices), hidden * 128256 // devices


@pytest.mark.parametrize(
    ("name", "devices", "sizes", "kv_heads"),
    [
        ("8B", 2, (4096, 14336, 32, 32, 8), 4),
        ("70B", 8, (8192, 28672, 80, 64, 8), 1),
        ("8B", 16, (4096, 14336, 32, 32, 16), 1),  # two devices have each kv head
    ],
)
def test_a_llama_by_hand(name: str, devices: int, sizes: Any, kv_heads: int) -> None:
    hidden, _, layers, heads, _ = sizes
    each, drawn = llama(sizes, devices)
    norms = (2 * layers + 1) * hidden
    weights = weights_of(name, devices)
    held, read = weights.sizes(None)
    assert weights.multiplied == (each, drawn)
    assert read == 2 * (each + drawn + norms) and held == read + 2 * drawn
    int8 = weights.sizes("int8")[0]
    # A scale in float32 for each output: for out and down every device has the scales of all
    # outputs.
    outputs = heads * 128 // devices + 2 * kv_heads * 128 + 2 * sizes[1] // devices + 2 * hidden
    assert int8 == each + layers * 4 * outputs + 2 * (2 * drawn + norms)
    plan = plan_memory(EngineConfig(), weights, None, named_device("H200"))
    token = 2 * 2 * layers * kv_heads * 128
    assert plan.page_bytes == plan.block_size * token and plan.starts
    times = StepTimes(weights, None, token, "NVIDIA H200", BANDWIDTH)
    step = times.decode(32, 1024)
    assert step.memory == pytest.approx((read + 32 * 1024 * token) / BANDWIDTH)
    attention = 4 * layers * heads // devices * 128
    work = 32 * (2 * (each + drawn) + attention * 1024)
    assert step.compute == pytest.approx(work / FLOPS)
    latency = {2: 6e-6, 8: 20e-6, 16: 40e-6}[devices]
    moved = 2 * (devices - 1) / devices * 32 * hidden * 4
    assert step.sums == pytest.approx((2 * layers + 1) * (latency + moved / LINK))
    assert step.seconds == pytest.approx(max(step.memory, step.compute) + step.sums)
    prompt = times.prefill(8192)
    work = 2 * (8192 * each + drawn) + attention * 8192**2 / 2
    assert prompt.compute == pytest.approx(work / FLOPS) and prompt.compute > prompt.memory


def test_positions_that_two_devices_divide_by_hand() -> None:
    """A device has half the bytes of a token.

    In a layer two devices exchange 4 heads' queries and results.
    """
    whole_one, halves = weights_of("8B", 16), whole("8B").divided(Split(16, context=2))
    check_split(halves.config)
    config, device = EngineConfig(), named_device("H200")
    plans = [plan_memory(config, weights, None, device) for weights in (whole_one, halves)]
    assert plans[1].page_bytes * 2 == plans[0].page_bytes
    assert plans[1].weight_bytes == plans[0].weight_bytes
    assert plans[1].cache_tokens == pytest.approx(2 * plans[0].cache_tokens, rel=0.01)
    steps = [
        StepTimes(weights, None, plan.page_bytes / 16, "NVIDIA H200", BANDWIDTH).decode(32, 1024)
        for weights, plan in zip((whole_one, halves), plans, strict=True)
    ]
    token = plans[0].page_bytes / 16
    assert steps[0].memory - steps[1].memory == pytest.approx(32 * 1024 * token / 2 / BANDWIDTH)
    moved = 32 * 4 * (128 + 2) * 4 / 2
    assert steps[1].sums - steps[0].sums == pytest.approx(2 * 32 * (6e-6 + moved / LINK))
    assert steps[1].compute == steps[0].compute


@pytest.mark.parametrize("experts", [False, True])
def test_deepseek_v3_on_16_devices_by_hand(experts: bool) -> None:
    """In fp8 as published, with a scale in float32 for 128 inputs of an output."""
    weights, devices = weights_of("DeepSeek-V3", 16, experts), 16
    hidden, latent, heads = 7168, 512, 128 // devices
    whole = hidden * (1536 + latent + 64)  # down to latents, on every device
    heads_own = heads * (1536 * 192 + latent * 256 + 128 * hidden)
    one_expert = 3 * hidden * 2048
    dense, sparse = 3 * hidden * 18432 // devices, one_expert // devices  # the shared one
    router = hidden * 256  # stays in 16 bits
    routed = 8 * one_expert // devices
    each = 61 * (whole + heads_own) + 3 * dense + 58 * (sparse + router + routed)
    assert weights.multiplied == (each, hidden * 129280 // devices)
    held, read = weights.sizes(None)
    assert held == pytest.approx(
        58 * 256 * one_expert / devices + 61 * (whole + heads_own), rel=0.06
    )
    assert read == pytest.approx(each, rel=0.15) and held > 40e9
    # Of 32 tokens chance misses an expert with (1 - 8 / 256)^32.
    chosen = 256 * (1 - (248 / 256) ** 32)
    more = 58 * (chosen - 8) * one_expert / devices * (1 + 4 / 128)
    assert weights.read(None, 32) - read == pytest.approx(more, rel=1e-6)
    plan = plan_memory(EngineConfig(), weights, None, named_device("H200"))
    assert plan.starts and plan.page_bytes == plan.block_size * 70_272  # of 2 * 61 * (512 + 64)
    step = StepTimes(weights, None, 1.0, "NVIDIA H200", BANDWIDTH).decode(1, 1024)
    assert step.sums == pytest.approx(123 * 40e-6, rel=0.01) and step.sums > step.memory
    pairs = 61 * heads * (576 + 512) * 1024
    assert step.compute == pytest.approx(2 * (each + hidden * 129280 // devices + pairs) / 989e12)


def test_sums_take_no_time_on_one_device_and_more_over_slower_links() -> None:
    assert sum_seconds(1, 1e6, "NVIDIA H200") == 0
    assert sum_seconds(8, 2**21, "NVIDIA H200") == pytest.approx(20e-6 + 1.75 * 2**21 / LINK)
    assert sum_seconds(2, 2**21, "NVIDIA L4") == pytest.approx(6e-6 + 2**21 / 32e9)


def test_more_devices_hold_more_and_each_holds_less() -> None:
    plans = [
        plan_memory(EngineConfig(), weights_of("70B", devices), None, named_device("H200"))
        for devices in (1, 2, 4, 8)
    ]
    assert [plan.starts for plan in plans] == [False, True, True, True]
    assert plans[1].weight_bytes > 1.9 * plans[2].weight_bytes > 3.6 * plans[3].weight_bytes
    assert plans[1].cache_tokens < plans[2].cache_tokens < plans[3].cache_tokens
    assert plans[1].temporary_bytes >= plans[2].temporary_bytes >= plans[3].temporary_bytes


@pytest.mark.parametrize(("name", "devices"), [("8B", 3), ("70B", 24), ("DeepSeek-V3", 7)])
def test_what_cannot_be_divided_is_refused_by_name(name: str, devices: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel_size is {devices}.*allowed"):
        weights_of(name, devices)


def test_the_command_says_what_each_device_holds_and_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = LLAMA_3 | shape(1024, 4096, 2, 8, 4, 512) | {"eos_token_id": 2, "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    command = ["plan", str(tmp_path), "--device", "H200", "--quantization", "int8"]
    plans = {}
    for devices in (1, 2):
        assert main([*command, "--json", "-tp", str(devices)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["devices"] == devices
        plans[devices] = found["plans"][0]
    assert plans[2]["page_bytes"] * 2 == plans[1]["page_bytes"]
    assert plans[2]["weights"] < 0.6 * plans[1]["weights"]
    one, two = (plans[devices]["predicted"]["decode, 32 of 1,024"] for devices in (1, 2))
    assert one["sums"] == 0 < two["sums"] and two["memory"] < 0.6 * one["memory"]
    assert main([*command, "-tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "each of 2 devices: NVIDIA H200" in shown and "decode, 1 of 1,024, predicted" in shown
    assert main([*command, "-tp", "3"]) == 2
    assert "num_attention_heads is 8; allowed: a multiple of 3" in capsys.readouterr().err
