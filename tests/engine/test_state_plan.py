"""Memory plans of models whose layers keep states: slots, snapshots, refusals and step times.

Sizes are of published configurations, and figures are computed by hand. No model is loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.commands.cli import main
from jaxserve.errors import InvalidRequest
from jaxserve.execution.state import STATES
from jaxserve.models import parse_model_config
from jaxserve.models.config.split import Split
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import named_device, this_device
from jaxserve.start.plan.make_plan import plan_model, plan_start
from jaxserve.start.plan.memory import SLACK, Sizes, temporary_bytes
from jaxserve.start.plan.memory_plan import plan_memory
from jaxserve.start.plan.refusal import refusal, slots_refusal
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.plan.step_time import StepTimes
from jaxserve.start.plan.weights import Weights
from jaxserve.start.programs import settling
from jaxserve.start.programs.settling import CACHE_NOTES, settled
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.sources.find import find_source
from pallas_kernels.devices import GIB, DeviceLimits
from tests.engine.test_state_serving import TINY
from tests.models.test_published_states import PUBLISHED
from tests.support.host_files import MIB, limited_host

pytestmark = pytest.mark.usefixtures("shapes_once")

MIXED = "Qwen3.6-35B-A3B (defaults of the class)"
STATE = 65_863_680  # bytes of the states of one of its sequences
TOKEN = 20_480  # bytes of a token's keys and values in its 10 layers with attention
BANDWIDTH, FLOPS = 4.8e12, 989e12  # an H200's data sheet


@cache
def weights_of(name: str = MIXED, devices: int = 1) -> Weights:
    weights = Weights(parse_model_config(PUBLISHED[name][0]), "bfloat16")
    return weights if devices == 1 else weights.divided(Split(devices))


def plan(card: str, form: str | None = None, devices: int = 1, **settings: Any) -> StartPlan:
    config = EngineConfig(**settings)
    return plan_memory(config, weights_of(devices=devices), form, named_device(card))


def test_states_of_a_published_model_by_hand() -> None:
    found = plan("H200")
    assert found.state_bytes == STATE == 30 * (32 * 128 * 128 + 3 * 8192) * 4
    assert found.page_bytes == 16 * TOKEN and found.state_tokens == 3216
    assert found.sizes == Sizes(0.9, 256, 8192) and round(256 * STATE / GIB, 1) == 15.7
    # A tenth of the cache that there would be without snapshots, and the null slot.
    states, snapshots = found.states, found.num_snapshots
    assert states is not None and snapshots and states.count == 256 + 1 + snapshots
    whole = found.pages.num_bytes + snapshots * STATE
    assert whole / 10 - STATE < snapshots * STATE <= whole / 10
    others = found.weight_bytes + found.step_bytes + states.num_bytes
    used = (others + found.pages.num_bytes) / (1 - SLACK)
    assert used <= found.budget < used + 2 * found.page_bytes
    halves = plan("H200", devices=2)
    assert (halves.state_bytes * 2, halves.state_tokens) == (STATE, 3216)


# A card, a form of the weights, and the slots and tokens of a step that the plan takes.
SLOTS = [
    ("H200", None, 256, 8192),
    ("H100", "int8", 256, 8192),
    ("H100", None, 64, 8192),
    ("L40S", "int8", 64, 8192),
    ("RTX 5090", "int4", 64, 8192),
    ("RTX 4090", "int4", 1, 512),
]


@pytest.mark.parametrize(("card", "form", "seqs", "tokens"), SLOTS)
def test_slots_are_fewer_if_states_leave_too_little_cache(
    card: str, form: str | None, seqs: int, tokens: int
) -> None:
    found = plan(card, form)
    assert (found.sizes.seqs, found.sizes.tokens) == (seqs, tokens)
    assert found.config.max_num_seqs == found.max_num_seqs == seqs
    assert found.starts and found.cache_tokens >= 8192
    if seqs < 256 and tokens == 8192:  # the next larger number of slots leaves too little
        more = {"max_num_seqs": 2 * seqs, "max_num_batched_tokens": tokens}
        assert plan(card, form, gpu_memory_utilization=0.9, **more).cache_tokens < 8192


@pytest.mark.parametrize(
    ("card", "form", "settings"),
    [
        ("H100", "int8", {}),
        ("H100", None, {"max_model_len": 2048}),
        ("H100", "int8", {"state_cache_bytes": 8 * GIB}),
    ],
)
def test_too_many_slots_are_refused_with_the_most_that_fit(
    card: str, form: str | None, settings: dict[str, Any]
) -> None:
    def refused(seqs: int) -> str | None:
        found = plan(card, form, max_num_seqs=seqs, **settings)
        config = EngineConfig(max_num_seqs=seqs, **settings)
        return slots_refusal(config, weights_of(), found, named_device(card))

    text = refused(2000)
    assert text is not None and text.startswith("max_num_seqs (2000) does not fit on NVIDIA")
    assert "the recurrent state of a sequence takes 62.8 MiB" in text
    words = re.search(r"at most (\d+) sequences .* \(--max-num-seqs \1\)$", text)
    assert words is not None, text
    most = int(words[1])
    assert refused(most) is None and refused(most + 1) is not None
    found = plan(card, form, max_num_seqs=most, **settings)
    assert found.starts and found.max_num_seqs == most
    assert found.cache_tokens >= min(8192, found.max_model_len)


def test_a_cache_that_is_named_needs_no_fewer_slots() -> None:
    config = EngineConfig(max_num_seqs=256, num_gpu_blocks_override=40)
    found = plan_memory(config, weights_of(), None, named_device("H200"))
    assert found.starts and found.cache_tokens == 39 * 16
    assert slots_refusal(config, weights_of(), found, named_device("H200")) is None
    # Weights alone are too large: the refusal is that of every model, and of one slot.
    config = EngineConfig(max_num_seqs=256)
    found = plan_memory(config, weights_of(), None, named_device("RTX 4090"))
    assert slots_refusal(config, weights_of(), found, named_device("RTX 4090")) is None
    found = plan("RTX 4090")
    assert not found.starts and found.max_num_seqs == 1
    text = refusal(EngineConfig(), weights_of(), found, named_device("RTX 4090"))
    assert "the recurrent state 0.2 GiB" in text and "int4 fits, with 1" in text


def test_bytes_of_snapshots_are_a_setting() -> None:
    for size, snapshots in ((0, 0), (STATE, 1), (2 * STATE - 1, 1), (9 * STATE, 9)):
        assert plan("H200", state_cache_bytes=size).num_snapshots == snapshots
    off = plan("H200", enable_prefix_caching=False, state_cache_bytes=9 * STATE)
    assert off.num_snapshots == 0
    both = plan("H200", state_cache_bytes=0).pages.num_bytes
    nine = plan("H200", state_cache_bytes=9 * STATE).pages.num_bytes
    assert both - nine == pytest.approx(9 * STATE, abs=16 * TOKEN)
    with pytest.raises(InvalidRequest, match=f"allowed: 0, .* at least {STATE:,}$") as refused:
        plan("H200", state_cache_bytes=STATE - 1)
    assert refused.value.parameter == "state_cache_bytes"
    # Of two engines each has its share.
    shares: dict[str, Any] = {"memory_share": 0.5, "gpu_memory_utilization": 0.9}
    shared = plan("H200", "int4", state_cache_bytes=8 * STATE, **shares)
    assert shared.num_snapshots == 4
    with pytest.raises(InvalidRequest, match=f"at least {2 * STATE:,}$"):
        plan("H200", "int4", state_cache_bytes=2 * STATE - 1, **shares)
    halves = plan("H200", devices=2, state_cache_bytes=9 * STATE // 2)
    assert halves.num_snapshots == 9
    with pytest.raises(ValueError, match="state_cache_bytes must be from 0 to"):
        EngineConfig(state_cache_bytes=-1)


def test_a_model_without_attention_has_pages_of_no_bytes() -> None:
    """Its pages count tokens. The states of prefixes take the memory that pages would take."""
    state = 64 * (3 * (8192 + 2 * 8 * 128) + 128 * 128 * 64) * 4
    weights = weights_of("Mamba-Codestral-7B-v0.1")
    card, host = named_device("H200"), named_device("cpu")

    def made(device: Any = card, **settings: Any) -> StartPlan:
        return plan_memory(EngineConfig(**settings), weights, None, device)

    found = made()
    assert (found.state_bytes, found.page_bytes, found.state_tokens) == (state, 0, 0)
    assert found.starts and found.max_num_seqs == 256
    assert found.num_pages == found.full_pages == 1 << 18 and found.longest == 1 << 20
    states, snapshots = found.states, found.num_snapshots
    assert states is not None and snapshots and states.count == 256 + 1 + snapshots
    used = found.weight_bytes + found.step_bytes + states.num_bytes
    assert used <= found.budget * (1 - SLACK) < used + state
    assert found.needed == int((used - (snapshots - 1) * state) / (1 - SLACK))
    # Few sequences of few tokens need few pages, and no more snapshots than pages.
    few = made(max_num_seqs=2, max_model_len=160)
    assert (few.num_pages, few.num_snapshots) == (2 * 2 * (10 + 1) + 1, 2 * 2 * (10 + 1))
    assert made(max_num_seqs=2, max_model_len=64, enable_prefix_caching=False).num_snapshots == 0
    assert made(num_gpu_blocks_override=40).num_pages == 40
    assert made(state_cache_bytes=3 * state).num_snapshots == 3
    assert made(kv_cache_memory_bytes=5 * state).num_snapshots == 5
    assert made(kv_cache_memory_bytes=5 * state).starts
    assert not made(kv_cache_memory_bytes=1000 * state, max_num_seqs=1).starts
    # A host keeps states of 1 GiB, and serves all lengths that the model has.
    small = made(replace(host, free=64 * GIB, total=64 * GIB))
    assert (small.num_snapshots, small.max_num_seqs) == (GIB // state, 32)
    assert small.longest == 1 << 20 and small.is_whole
    text = slots_refusal(EngineConfig(max_num_seqs=4000), weights, made(max_num_seqs=4000), card)
    words = re.search(r"at most (\d+) sequences ", text or "")
    assert words is not None, text
    assert (
        made(max_num_seqs=int(words[1])).starts and not made(max_num_seqs=int(words[1]) + 1).starts
    )


def test_too_many_snapshots_are_refused() -> None:
    settings: dict[str, Any] = {"state_cache_bytes": 100 * GIB, "max_num_seqs": 8}
    found, device = plan("H100", "int8", **settings), named_device("H100")
    config = EngineConfig(**settings)
    assert not found.starts and slots_refusal(config, weights_of(), found, device) is None
    text = refusal(config, weights_of(), found, device)
    assert text.endswith("it fits with the default of state_cache_bytes: lower that")


def test_arrays_of_pages_are_those_of_layers_with_attention() -> None:
    """A layer's keys of 8 bits take 8,192 bytes a page, so 2.5 GiB are not addressable."""
    pages = 5 * GIB // 2 // 8192
    found = plan("H200", "int8", kv_cache_dtype="fp8", num_gpu_blocks_override=pages)
    assert found.page_bytes == 10 * 2 * 8192 and found.num_pages == (2 * GIB - 1) // 8192
    fewer = plan("H200", "int8", kv_cache_dtype="fp8", num_gpu_blocks_override=pages // 2)
    assert fewer.num_pages == pages // 2


def test_step_times_count_states_and_layers_with_attention() -> None:
    weights = weights_of()
    times = StepTimes(weights, None, TOKEN, "NVIDIA H200", BANDWIDTH, STATE)
    step, rows, context = times.decode(32, 1024), 32, 1024
    moved = weights.read(None, rows) + rows * (context * TOKEN + 2 * STATE)
    assert step.memory == pytest.approx(moved / BANDWIDTH)
    each, drawn = weights.multiplied
    work = rows * (2 * (each + drawn) + 4 * 10 * 16 * 256 * context)
    assert step.compute == pytest.approx(work / FLOPS) and step.sums == 0
    # A layer of Nemotron-H has one part, whose results are summed once.
    nemotron = weights_of("Nemotron-H-8B", 2)
    assert nemotron.config.num_hidden_layers == 52
    sums = StepTimes(nemotron, None, 1.0, "NVIDIA H200", BANDWIDTH).decode(32, 1024).sums
    assert sums == pytest.approx(53 * (6e-6 + 32 * 4096 * 4 / 450e9))


# Bytes that XLA needs on CPU for 256 tokens of two layers, one with a state, one with attention.
TEMPORARIES: list[tuple[str, dict[str, Any], int]] = [
    (
        "Qwen3.5-0.8B",
        {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "hidden_size": 256,
            "intermediate_size": 512,
            "linear_num_key_heads": 16,
        },
        15_010_456,
    ),
    (
        "Nemotron-H-8B",
        {
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"],
            "hidden_size": 256,
            "intermediate_size": 512,
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "n_groups": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
        4_459_032,
    ),
]


@pytest.mark.parametrize(("name", "fields", "compiled"), TEMPORARIES)
def test_temporaries_of_layers_with_states(
    name: str, fields: dict[str, Any], compiled: int
) -> None:
    raw = PUBLISHED[name][0] | fields | {"vocab_size": 512}
    config, limits = parse_model_config(raw), DeviceLimits("cpu", "CPU")
    found = temporary_bytes(config, "float32", Sizes(1.0, 8, 256), limits)
    assert found == pytest.approx(compiled, rel=0.1)


def test_a_card_takes_the_snapshots_of_programs_that_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Programs that were compiled for the absent card have a number of pages and of snapshots."""
    start = plan("H100", "int8")
    analysis = SimpleNamespace(temp_size_in_bytes=start.temporary_bytes)
    program = SimpleNamespace(memory_analysis=lambda: analysis)
    supplier = SimpleNamespace(supply=lambda _: program)
    monkeypatch.setattr(settling, "Compiling", lambda *_: supplier)
    store = ProgramStore(tmp_path / "programs", {}, {})
    fitting = settled(start, store)[0].counts
    assert set(fitting) == {"pages", "snapshots"} and fitting["snapshots"] == start.num_snapshots
    fewer = {"pages": int(0.95 * fitting["pages"]), "snapshots": fitting["snapshots"] - 1}
    more = {"pages": fewer["pages"], "snapshots": fitting["snapshots"] + 1}
    for noted, taken in ((fewer, fewer), (more, fitting), (fitting, fitting)):
        store.note(noted, CACHE_NOTES)
        assert settled(start, store)[0].counts == taken
    names = [start.with_counts(counts).program_name(start.buckets.largest) for counts in
             (fitting, fewer, fitting | {"snapshots": 0})]  # fmt: skip
    assert len(set(names)) == 3


def folder_of(tmp_path: Path, fields: dict[str, Any]) -> Path:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path


WIDE = TINY | {
    "hidden_size": 256, "vocab_size": 32768, "linear_num_key_heads": 16, "torch_dtype": "bfloat16",
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "max_position_embeddings": 1024, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def test_a_host_with_little_memory_serves_fewer_sequences(tmp_path: Path) -> None:
    """A sequence has 2 MiB of states. Weights are in bfloat16 if this leaves room for more."""
    folder = folder_of(tmp_path / "wide", WIDE)
    slots = {}
    for free in (400, 160, 120, 80):
        root = limited_host(tmp_path / str(free), (600 + free) * MIB)
        config = EngineConfig(model=folder)
        source = find_source(config, config_only=True)
        found = plan_start(config, source, this_device(root))
        assert found.states is not None and found.cache_tokens >= 1024
        slots[free] = found.max_num_seqs, found.dtype.name
        assert plan_model(config, None, root).plans[0].max_num_seqs == found.max_num_seqs
        if found.max_num_seqs < 32:
            with pytest.raises(InvalidRequest, match=r"^max_num_seqs \(100\) does not") as refused:
                plan_start(replace(config, max_num_seqs=100), source, this_device(root))
            assert refused.value.parameter == "max_num_seqs"
    bfloat16 = {160: (32, "bfloat16"), 120: (16, "bfloat16"), 80: (4, "bfloat16")}
    assert slots == {400: (32, "float32")} | bfloat16
    # Pages without states are of no use, so that none are kept.
    off = replace(config, state_cache_bytes=0)
    assert not plan_start(off, source, this_device(root)).config.enable_prefix_caching
    assert found.config.enable_prefix_caching
    # Slots alone decide if the cache has a size.
    sized = replace(config, kv_cache_memory_bytes=8 * MIB)
    root = limited_host(tmp_path / "sized", 750 * MIB)
    narrow, exact = (
        plan_model(setting, None, root).plans[0]
        for setting in (sized, replace(sized, dtype="float32"))
    )
    assert (narrow.dtype.name, narrow.max_num_seqs, exact.max_num_seqs) == ("bfloat16", 32, 16)
    assert narrow.num_pages == exact.num_pages and exact.starts
    wide = replace(config, dtype="float32")
    assert plan_model(wide, None, tmp_path / "160").plans[0].max_num_seqs == 16


def test_plain_models_have_no_states(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32}
    raw |= {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 48}
    raw |= {"vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-5}
    config = EngineConfig(model=folder_of(tmp_path, raw), state_cache_bytes=7)
    found = plan_start(config, find_source(config, config_only=True), this_device(Path("/")))
    assert (found.states, found.state_bytes, found.state_tokens) == (None, 0, 0)
    assert found.num_snapshots is None and found.counts == {"pages": found.num_pages}
    assert "state_cache_bytes has no effect: the layers of this model keep no" in caplog.text


def test_the_command_tells_of_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    fields = {name: value for name, value in PUBLISHED[MIXED][0].items() if value is not None}
    fields |= {"num_hidden_layers": 4, "layer_types": fields["layer_types"][:4], "num_experts": 32}
    command = ["plan", str(folder_of(tmp_path, fields)), "--device", "RTX 3060"]
    command += ["--quantization", "int8"]
    assert main([*command, "--json"]) == 0
    [numbers] = json.loads(capsys.readouterr().out)["plans"]
    assert (numbers["state_bytes"], numbers["state_tokens"]) == (STATE // 10, 3216)
    [states] = [kind for kind in numbers["memory"] if kind["name"] == STATES]
    assert states["layers"] == 3 and states["count"] == 65 + numbers["snapshots"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    for row, cell in (
        ("state of a sequence", "6.3 MiB"),
        ("equal to tokens", "3,216"),
        ("snapshots of prefixes", f"{numbers['snapshots']}"),
        ("rows of a step", "64"),
    ):
        assert re.search(rf"{row} +│ +{cell} │", shown), shown
    assert main([*command, "--max-num-seqs", "5000"]) == 1
    assert re.search(r"at most \d+ sequences leave enough", capsys.readouterr().out)
    assert main([*command, "--state-cache-bytes", "6m"]) == 2
    assert "--state-cache-bytes is 6,000,000, less than" in capsys.readouterr().err
