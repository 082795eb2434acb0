"""Memory plans for each card, the devices that a start opens, and refusals before a weight is read.

No card was there: figures of compiled programs are XLA's own, for cards named to it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.commands.cli import main
from jaxserve.errors import InvalidRequest
from jaxserve.execution.buckets import Bucket, Sampler
from jaxserve.execution.state import SAMPLER
from jaxserve.models import ModelConfig, parse_model_config
from jaxserve.settings.cards import DriverCard, VisibleCard
from jaxserve.settings.config import EngineConfig
from jaxserve.start import device as device_module
from jaxserve.start.device import (
    DeviceMemory,
    named_device,
    open_device,
    started_device,
    this_device,
)
from jaxserve.start.plan import make_plan
from jaxserve.start.plan.make_plan import plan_model, plan_start
from jaxserve.start.plan.memory import SLACK, Sizes, temporary_bytes
from jaxserve.start.plan.memory_plan import plan_memory
from jaxserve.start.plan.refusal import refusal
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.weights import Weights
from jaxserve.start.programs import settling
from jaxserve.start.programs.settling import CACHE_NOTES, settled, temporary_bytes_of
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.start.sources.find import find_source
from jaxserve.start.start import load
from jaxserve.weights import random_weights
from jaxserve.weights.model_weights import parameter_values
from pallas_kernels.devices import GIB, DeviceLimits
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.models.test_published_configs import (
    DEEPSEEK_V3,
    GPT_OSS,
    LLAMA_3,
    PUBLISHED,
    QWEN_3,
    QWEN_3_MOE,
    shape,
)
from tests.support.nvml import GB10, RTX_4090, T4, play_driver

pytestmark = pytest.mark.usefixtures("shapes_once")

MODELS: dict[str, Any] = {
    "8B": LLAMA_3,
    "14B": QWEN_3 | shape(5120, 17408, 40, 40, 8, 151936) | {"max_window_layers": 40},
    "32B": QWEN_3 | shape(5120, 25600, 64, 64, 8, 151936) | {"max_window_layers": 64},
}


@cache
def weights_of(name: str) -> Weights:
    return Weights(parse_model_config(MODELS[name]), "bfloat16")


def plan(name: str, form: str | None, device: str | DeviceMemory, **settings: Any) -> StartPlan:
    memory = named_device(device) if isinstance(device, str) else device
    return plan_memory(EngineConfig(**settings), weights_of(name), form, memory)


@pytest.mark.parametrize(
    ("model", "form", "card", "least"),
    [
        ("8B", None, "RTX 4090", 40_000),
        ("8B", None, "RTX 3090", 40_000),
        ("8B", "int8", "T4", 30_000),
        ("8B", "int4", "RTX 3060", 30_000),
        ("8B", None, "NVIDIA H100", 400_000),
        ("14B", "int4", "T4", 10_000),
        ("14B", "int4", "RTX 4060 Ti", 15_000),
        ("32B", "int4", "RTX 4090", 3_000),
        ("32B", "int4", "RTX 3090", 4_000),
        ("32B", "int4", "RTX 5090", 20_000),
        ("8B", None, "T4", 0),
        ("14B", "int8", "T4", 0),
        ("32B", "int8", "RTX 4090", 0),
    ],
)
def test_what_fits(model: str, form: str | None, card: str, least: int) -> None:
    found = plan(model, form, card)
    assert found.starts == (least > 0) and found.cache_tokens >= least
    assert found.needed <= found.budget if least else found.needed > found.budget
    taken = found.weight_bytes + found.step_bytes + found.pages.num_bytes
    assert taken <= found.budget < named_device(card).free or not least


def test_sizes_follow_the_memory() -> None:
    """Steps are large if they cost the cache little, and the last share is used only if needed."""
    assert plan("8B", None, "H100").sizes == Sizes(0.9, 256, 8192)
    assert plan("8B", None, "RTX 4090").sizes == Sizes(0.9, 64, 2048)
    assert plan("32B", "int4", "RTX 4090").sizes == Sizes(0.95, 16, 512)
    assert plan("8B", None, "GB10").sizes == Sizes(0.8, 256, 8192)
    chosen = {"max_num_seqs": 100, "max_num_batched_tokens": 4096, "gpu_memory_utilization": 0.92}
    found = plan("8B", None, "RTX 4090", **chosen)
    assert found.sizes == Sizes(0.92, 100, 4096)
    assert found.budget == int(0.92 * named_device("RTX 4090").free)


def test_the_cache_is_all_of_the_memory_that_remains() -> None:
    """Tokens are counted without the null page, and no further page has room."""
    found = plan("8B", None, "RTX 4090", max_model_len=4096).settle(300 << 20)
    assert found.num_pages * found.page_bytes == found.pages.num_bytes
    sampler = next(kind.num_bytes for kind in found.memory if kind.name == SAMPLER)
    others = found.weight_bytes + sampler + (300 << 20)
    used = (others + found.pages.num_bytes) / (1 - SLACK)
    assert used <= found.budget < used + 2 * found.page_bytes
    assert found.needed == pytest.approx((others + 2 * found.page_bytes) / (1 - SLACK), abs=1)
    assert found.fits(int(used) + 1) and not found.fits(int(used) - 1)
    assert found.cache_tokens == found.num_pages * found.block_size - found.block_size
    five = plan("8B", None, "RTX 4090", num_gpu_blocks_override=5, block_size=16)
    assert (five.cache_tokens, five.longest, five.sequences) == (64, 64, 1)


@pytest.mark.parametrize(
    ("model", "tokens", "rows", "compiled"),
    [
        ("8B", 2048, 64, 237 << 20),  # A100
        ("8B", 8192, 256, 946 << 20),  # A100
        ("8B", 2048, 64, 227_568_032),  # H200, and all below
        ("8B", 512, 64, 170_438_560),
        ("8B", 512, 256, 669_116_832),
        ("8B", 2048, 256, 681_713_056),
        ("32B", 512, 16, 94_657_440),
        ("32B", 2048, 64, 378_560_160),
    ],
)
def test_temporaries_are_near_what_xla_says(
    model: str, tokens: int, rows: int, compiled: int
) -> None:
    """Compares steps that XLA compiled for an A100 and an H200 without the cards."""
    config = parse_model_config(MODELS[model])
    limits = named_device("A100").limits
    found = temporary_bytes(config, "bfloat16", Sizes(0.9, rows, tokens), limits)
    assert found == pytest.approx(compiled, rel=0.1)
    turing = temporary_bytes(config, "float16", Sizes(0.9, rows, tokens), named_device("T4").limits)
    assert turing == pytest.approx(1.4 * found, rel=0.01)


SMALL: Any = LLAMA_3 | shape(256, 704, 2, 4, 2, 4096) | {"head_dim": 64, "bos_token_id": 1}
SMALL |= {"eos_token_id": 2, "max_position_embeddings": 256, "rope_scaling": None}


def small_plan(
    form: str | None = None, device: DeviceMemory | None = None, **settings: Any
) -> tuple[StartPlan, list[Any]]:
    """Return the plan of a small model's start, and the model's arrays."""
    config = parse_model_config(SMALL)
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    sizes |= {"decode_sizes": (8,), "token_sizes": (64,), "num_gpu_blocks_override": 20}
    model = random_weights(config, jnp.float32, quantization=form)
    resolved = EngineConfig(**sizes | settings).resolve("cpu", 256)
    return plan_of_model(resolved, config, model, device=device), model_leaves(model)


def test_temporaries_are_near_what_xla_says_on_cpu() -> None:
    plan, _ = small_plan()
    largest = max(plan.buckets, key=lambda bucket: bucket.num_tokens)
    logits = 8 * SMALL["vocab_size"] * 4
    supply = Compiling(plan, ProgramStore(None, {}, {})).supply
    compiled = max(
        temporary_bytes_of(supply(largest)),
        temporary_bytes_of(supply(Sampler(8))) + logits,
        temporary_bytes_of(supply(min(plan.buckets))),
    )
    limits = DeviceLimits("cpu", "CPU")
    found = temporary_bytes(plan.model_config, "float32", Sizes(1.0, 8, 64), limits)
    assert found == pytest.approx(compiled, rel=0.35)


def small(raw: Any, layers: int = 2) -> ModelConfig:
    return parse_model_config(raw | {"num_hidden_layers": layers})


@pytest.mark.parametrize("form", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize(
    "raw",
    [SMALL, SMALL | {"tie_word_embeddings": True, "hidden_size": 200, "intermediate_size": 250}],
    ids=["plain", "tied, of odd sizes"],
)
def test_weights_are_counted_to_the_byte(form: str | None, raw: Any) -> None:
    config = parse_model_config(raw)
    made = parameter_values(random_weights(config, jnp.bfloat16, quantization=form))
    actual = sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    held, read = Weights(config, jnp.bfloat16).sizes(form)
    table = config.vocab_size * config.hidden_size * 2
    assert held == actual
    assert read == actual - (0 if config.tie_word_embeddings else table)


def test_experts_are_counted_whole_and_read_in_part() -> None:
    config = small(QWEN_3_MOE | {"num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 256})
    made = parameter_values(random_weights(config, jnp.bfloat16, quantization="int4"))
    held, read = Weights(config, jnp.bfloat16).sizes("int4")
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(made))
    experts = sum(leaf.nbytes for path, leaf in made.items() for leaf in jax.tree.leaves(leaf)
                  if path.endswith(("mlp.gate_up", "mlp.down")))  # fmt: skip
    assert read == held - experts * 6 // 8 - 151936 * 256 * 2


@pytest.mark.parametrize("raw", [GPT_OSS, DEEPSEEK_V3], ids=["gpt-oss", "DeepSeek"])
def test_other_families_have_plans(raw: Any) -> None:
    found = plan_memory(
        EngineConfig(), Weights(parse_model_config(raw), "bfloat16"), None, named_device("B200")
    )
    assert found.temporary_bytes > 0 and found.weight_bytes > 30 * GIB


def kinds() -> list[str]:
    """Return names of a published checkpoint for each architecture and stored form."""
    found: dict[tuple[str, str], str] = {}
    for name, (raw, _) in PUBLISHED.items():
        stored = raw.get("quantization_config", {}).get("quant_method", "")
        found.setdefault((raw["architectures"][0], stored), name)
    return list(found.values())


@pytest.mark.parametrize("name", kinds())
def test_every_family_and_stored_form_has_a_plan(name: str, tmp_path: Path) -> None:
    """The plan needs only config.json."""
    raw = PUBLISHED[name][0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stored = raw.get("quantization_config", {}).get("quant_method")
    form: Any = None if stored else "int8"
    found = plan_model(EngineConfig(model=str(tmp_path), quantization=form), "B200")
    assert found.stored == (None if stored == "mxfp4" else stored)  # read into another form
    for plan in found.plans:
        assert plan.read_bytes <= plan.weight_bytes and plan.page_bytes > 0
        assert plan.starts == (found.refusal is None) and (plan.num_pages > 0 or not plan.starts)
        assert plan.longest <= PUBLISHED[name][1]


def test_int8_pages_are_refused_on_a_card_before_anything_is_read(tmp_path: Path) -> None:
    """There is a config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3))
    config = EngineConfig(model=tmp_path, kv_cache_dtype="int8_per_token_head")
    with pytest.raises(InvalidRequest, match=r"'int8_per_token_head' is for CPUs.*: auto, fp8"):
        plan_model(config, "H200")


def refused(model: str, form: str | None, card: str, **settings: Any) -> str:
    weights, device = weights_of(model), named_device(card)
    config = EngineConfig(**settings)
    found = plan_memory(config, weights, form, device)
    assert not found.starts
    return refusal(config, weights, found, device)


def test_a_refusal_says_what_would_fit() -> None:
    text = refused("8B", None, "T4")
    assert "weights take 15.0 GiB" in text and "it may take 13.1 GiB" in text
    assert "int8 fits, with 3" in text
    assert "int4 fits" in refused("14B", "int8", "T4")
    text = refused("8B", "int4", "T4", gpu_memory_utilization=0.3)
    assert "default of gpu_memory_utilization: raise" in text
    text = refused("8B", "int4", "T4", max_num_batched_tokens=2**17)
    assert "default of max_num_batched_tokens: lower" in text
    assert "nor does any other form (int4: 21.1 GiB" in refused("32B", None, "T4")


CARD = DriverCard("GPU-1", "NVIDIA GeForce RTX 4090", (8, 9), int(23.5 * GIB), 20 * GIB)
FREE = DeviceMemory(
    DeviceLimits("gpu", CARD.name, CARD.capability),
    *(CARD.total, CARD.free),
    card=VisibleCard(CARD.uuid, (CARD,)),
)


def test_a_share_is_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setattr(device_module, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(device_module, "card_to_open", lambda: FREE.card)
    monkeypatch.setattr(device_module, "_platforms", lambda: "")
    found = this_device()
    assert found == replace(FREE, bandwidth=1008e9)
    assert plan("8B", "int4", found).budget == int(0.9 * 20 * GIB)
    monkeypatch.setattr(device_module, "memory_fraction", lambda: 0.5)
    assert plan("8B", "int4", this_device()).budget == CARD.total // 2
    # Without CUDA in JAX it is left alone, and so it is where the user chose another platform.
    monkeypatch.setattr(device_module, "has_cuda_plugin", lambda: False)
    assert not this_device().limits.is_gpu
    monkeypatch.setattr(device_module, "has_cuda_plugin", lambda: True)
    monkeypatch.setattr(device_module, "_platforms", lambda: "cpu")
    assert not this_device().limits.is_gpu


class Started:
    """A GPU as JAX has it after its start."""

    platform, device_kind, compute_capability, core_count = "gpu", CARD.name, "8.9", 128
    has_stats = True

    def memory_stats(self) -> dict[str, int] | None:
        return {"bytes_limit": 18 * GIB, "bytes_in_use": 3 * GIB} if self.has_stats else None


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> type[Started]:
    device_module.jax.devices()  # JAX has started in this process
    made = type("Made", (Started,), {})
    monkeypatch.setattr(device_module, "driver_cards", lambda: [CARD])
    monkeypatch.setattr(device_module.jax, "local_devices", lambda *_: [made()])
    return made


def test_a_jax_that_has_started_keeps_its_limit(started: type[Started]) -> None:
    found = this_device()
    assert found == started_device() and found.card is None
    assert (found.total, found.free, found.in_use) == (CARD.total, 18 * GIB, 3 * GIB)
    assert plan("8B", "int4", found).budget == 15 * GIB
    assert plan("8B", "int4", found, memory_share=0.5).budget == 9 * GIB
    half = plan("8B", "int4", found, gpu_memory_utilization=0.5)
    assert half.budget == CARD.total // 2 - 3 * GIB
    open_device(found, 1)  # all devices are open by now


def test_an_allocator_without_statistics_is_no_error(started: type[Started]) -> None:
    started.has_stats = False
    found = started_device()
    assert not found.is_limit and found.free == CARD.free
    assert plan("8B", "int4", found).budget == int(0.9 * CARD.free)


def test_a_start_takes_what_the_plan_says() -> None:
    memory = DeviceMemory(FREE.limits, 2 * GIB, GIB, is_limit=True)
    start, leaves = small_plan("int4", memory, num_gpu_blocks_override=None)
    assert start.weight_bytes == sum(leaf.nbytes for leaf in leaves)
    weights = Weights(start.model_config, "float32")
    found = plan_memory(start.config, weights, "int4", memory)
    assert found.weight_bytes == start.weight_bytes
    assert start.room == pytest.approx(found.pages.num_bytes, rel=0.01)
    # Of an engine that shares the memory, and of an allocator without statistics.
    shared, _ = small_plan("int4", memory, num_gpu_blocks_override=None, memory_share=0.5)
    assert start.room - shared.room == pytest.approx(GIB // 2, rel=0.02)
    bare = replace(memory, is_limit=False)
    unlimited, _ = small_plan("int4", bare, num_gpu_blocks_override=None)
    assert unlimited.room == pytest.approx(start.room - 0.1 * GIB, rel=0.01)


@pytest.fixture
def card_plan(monkeypatch: pytest.MonkeyPatch) -> tuple[StartPlan, list[tuple[Any, int]], Any]:
    """Return a plan on a card, the programs compiled for it with their pages, and their memory."""
    limits = DeviceLimits("gpu", "", (8, 9))
    memory = DeviceMemory(limits, 2 * GIB, GIB, is_limit=True)
    plan, _ = small_plan(None, memory, num_gpu_blocks_override=None)
    compiled: list[tuple[Any, int]] = []
    analysis = SimpleNamespace(temp_size_in_bytes=plan.temporary_bytes)

    def compiling(plan: StartPlan, *_: Any) -> Any:
        def supply(key: Any) -> Any:
            compiled.append((key, plan.num_pages))
            return SimpleNamespace(memory_analysis=lambda: analysis)

        return SimpleNamespace(supply=supply)

    monkeypatch.setattr(settling, "Compiling", compiling)
    return plan, compiled, analysis


@pytest.mark.parametrize(("needs", "compiled"), [(1.0, 1), (1.1, 1), (1.5, 2), (40.0, 2)])
def test_the_largest_program_is_compiled_once_if_the_estimate_was_enough(
    card_plan: Any, needs: float, compiled: int
) -> None:
    """Covers a start on a GPU, whose cache takes the memory that the largest program leaves."""
    start, asked, analysis = card_plan
    estimate = start.temporary_bytes
    analysis.temp_size_in_bytes = int(needs * estimate)
    found, program = settled(start, ProgramStore(None, {}, {}))
    pages = found.num_pages
    assert pages == start.settle(max(analysis.temp_size_in_bytes, estimate * 9 // 8)).num_pages
    largest = start.buckets.largest
    again = [] if program else [(largest, pages)]
    assert asked[0][0] == largest and len([*asked, *again]) == compiled
    assert (program is not None) == (asked == [(largest, pages)])


@pytest.mark.parametrize("needs", [1.0, 1.5])
def test_a_card_takes_the_pages_that_programs_were_compiled_for_if_they_fit(
    card_plan: Any, tmp_path: Path, needs: float
) -> None:
    start, _, analysis = card_plan
    analysis.temp_size_in_bytes = int(needs * start.temporary_bytes)
    store = ProgramStore(tmp_path / "programs", {}, {})
    fitting = settled(start, store)[0].num_pages
    for noted, taken in ((0.95, 0.95), (1.0, 1.0), (1.01, 1.0), (0.8, 1.0)):
        store.note({"pages": int(noted * fitting)}, CACHE_NOTES)
        assert settled(start, store)[0].num_pages == int(taken * fitting)
    store.note({"pages": int(0.95 * fitting)}, CACHE_NOTES)
    found, program = settled(start, store)
    assert found.num_pages == int(0.95 * fitting) and program is not None


def test_a_cache_of_less_than_two_pages_is_refused(card_plan: Any) -> None:
    start, _, analysis = card_plan
    analysis.temp_size_in_bytes = 2 * GIB
    with pytest.raises(InvalidRequest, match="no memory for the KV cache"):
        settled(start, ProgramStore(None, {}, {}))


@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_cache_is_made_once_all_is_compiled(is_gpu: bool) -> None:
    """On a GPU XLA tries kernels while it compiles, and on any machine that takes memory."""
    plan, leaves = small_plan(num_scheduler_steps=1)
    start = WarmUp(plan)
    start._compile_first = is_gpu
    compiled, supply = [], start.supplier.supply

    def watched(key: Any) -> Any:
        if isinstance(key, Bucket):
            compiled.append(start._state is None)
        return supply(key)

    start.supplier.supply = watched  # type: ignore[method-assign]
    runner = start.run(leaves)
    assert compiled == [True, True] and runner._state is not None
    runner.close()


def test_a_model_that_does_not_fit_is_refused_before_its_weights(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plan, "this_device", lambda *_: replace(FREE, free=1 << 16))
    monkeypatch.setattr(make_plan, "open_device", lambda *_: pytest.fail("the card was opened"))
    with pytest.raises(InvalidRequest, match="does not fit on NVIDIA GeForce RTX 4090"):
        load(EngineConfig(model=checkpoint))


def test_the_whole_share_is_opened_for_several_engines(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(make_plan, "this_device", lambda *_: FREE)
    monkeypatch.setattr(make_plan, "open_device", lambda _, budget: opened.append(budget))
    config = EngineConfig(model=checkpoint, memory_share=0.25)
    source = find_source(config)
    found = plan_start(config, source, FREE)
    make_plan.plan_on_this_device(config, source, Path("/"))
    assert opened == [int(0.9 * FREE.free)] and found.sizes == Sizes(0.9, 64, 2048)


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jaxserve", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an 8B model's configuration, without weights or tokenizer."""
    folder = tmp_path_factory.mktemp("8B")
    (folder / "config.json").write_text(json.dumps(LLAMA_3))
    return folder


def test_the_command_plans_for_the_card_that_is_here(folder: Path, tmp_path: Path) -> None:
    environment = play_driver(tmp_path, RTX_4090)
    done = run(environment, "plan", str(folder), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["device"] == {"name": RTX_4090.name, "total": 24108 << 20, "free": 23000 << 20}
    assert [plan["form"] for plan in found["plans"]] == ["bfloat16", "int8", "fp8", "int4"]
    first = found["plans"][0]
    assert first["budget"] == int(0.9 * (23000 << 20)) and first["cache_tokens"] > 35_000
    assert first["step_seconds"] == pytest.approx(first["read"] / 1008e9)


def test_a_start_is_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    environment = play_driver(tmp_path, T4)
    done = run(environment, "generate", "--model", str(folder), "--skip-tokenizer-init", "1")
    assert done.returncode == 2 and done.stdout == ""
    warning, line = done.stderr.splitlines()
    assert "has no bfloat16: the model runs in float16" in warning
    assert line.startswith("jaxserve: error: the model does not fit on Tesla T4")
    assert "int8 fits, with" in line


def test_memory_of_the_host_is_left_to_it(folder: Path, tmp_path: Path) -> None:
    environment = play_driver(tmp_path, GB10)
    done = run(environment, "plan", str(folder), "--json", "--quantization", "int4")
    found = json.loads(done.stdout)
    budget = found["plans"][0]["budget"]
    assert budget == int(0.8 * found["device"]["free"]) < found["device"]["total"]


def test_a_table_is_shown_for_a_named_card(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")

    def plan(*words: str) -> tuple[int, str, str]:
        return main(["plan", *words]), *capsys.readouterr()

    status, shown, _ = plan(str(folder), "--device", "t4")
    assert status == 1 and "Tesla T4 (compute capability 7.5), 14.6 GiB" in shown
    assert "too large" in shown and "int8 fits" in shown and "ms" in shown
    status, _, error = plan("--device", "RTX 9999")
    assert status == 2 and "no card 'RTX 9999'" in error and "L40S" in error
    status, shown, _ = plan()
    assert status == 0 and shown.startswith("CPU, ") and "float32" in shown
    status, _, error = plan("org/name/model.gguf")
    assert status == 2 and "has to be fetched first" in error
