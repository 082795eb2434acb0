"""Plans of the host's memory for a start on CPU, and refusals before a weight is read.

The host is a folder with the files of a kernel. Parser, planner and start are the real ones.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import InvalidRequest
from jaxserve.settings.config import EngineConfig
from jaxserve.start.device import this_device
from jaxserve.start.plan import make_plan
from jaxserve.start.plan.make_plan import ModelPlan, plan_model, plan_start
from jaxserve.start.plan.memory import HOST_RESERVE, cpu_page_budget, longest_sequence
from jaxserve.start.sources.find import find_source
from jaxserve.start.start import load
from tests.models.test_published_configs import LLAMA_3, LLAMA_32_ROPE, MISTRAL, QWEN_3, shape
from tests.support.host_files import MIB, limited_host, write_host
from tests.support.quick_code import compile_quickly

pytestmark = pytest.mark.usefixtures("quick_code", "shapes_once")

GB, GIB = 10**9, 2**30
LLAMA_32 = LLAMA_3 | {"rope_scaling": LLAMA_32_ROPE, "tie_word_embeddings": True}
LLAMA_32 |= {"torch_dtype": "bfloat16"}
MODELS: dict[str, Any] = {
    "0.6B": QWEN_3 | shape(1024, 3072, 28, 16, 8, 151936) | {"tie_word_embeddings": True},
    "1B": LLAMA_32 | shape(2048, 8192, 16, 32, 8, 128256) | {"head_dim": 64},
    "3B": LLAMA_32 | shape(3072, 8192, 28, 24, 8, 128256) | {"head_dim": 128},
    "8B": LLAMA_3 | {"torch_dtype": "bfloat16"},
    "windows": MISTRAL,
    "float64": LLAMA_32 | shape(2048, 8192, 16, 32, 8, 128256) | {"torch_dtype": "float64"},
}


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    raw = {"bos_token_id": 1, "eos_token_id": 2} | MODELS[name]
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def plans_of(tmp_path: Path, name: str, limit: int, used: int = 0, **settings: Any) -> ModelPlan:
    root = limited_host(tmp_path / "host", limit, used)
    return plan_model(EngineConfig(model=folder_of(tmp_path, name), **settings), None, root)


# The result of a start under a limit: its dtype, tokens of cache, and the longest sequence.
TAKEN: list[tuple[int, str, dict[str, Any], str, int, int]] = [
    (4, "0.6B", {}, "bfloat16", 4656, 4656),
    (8, "0.6B", {}, "float32", 4656, 4656),
    (16, "0.6B", {}, "float32", 4656, 4656),
    (4, "1B", {}, "bfloat16", 10224, 10224),
    (8, "1B", {}, "float32", 16368, 16368),
    (16, "1B", {}, "float32", 16368, 16368),
    (8, "3B", {}, "bfloat16", 2896, 2896),
    (16, "3B", {}, "float32", 4656, 4656),
    # Named settings are kept: a dtype, a length that takes more than the default, bytes of cache.
    (4, "0.6B", {"dtype": "float32"}, "float32", 2896, 2896),
    (8, "0.6B", {"max_model_len": 8192}, "float32", 8192, 8192),
    (8, "0.6B", {"max_model_len": 24576}, "bfloat16", 24576, 24576),
    (16, "3B", {"max_model_len": 1024}, "float32", 4656, 1024),
    (8, "1B", {"kv_cache_memory_bytes": 4 * GIB}, "bfloat16", 65520, 65520),
    (4, "3B", {"quantization": "int4"}, "float32", 4064, 4064),
    (8, "8B", {"quantization": "int4"}, "float32", 4080, 4080),
    (16, "8B", {"quantization": "int8"}, "float32", 4080, 4080),
    (64, "8B", {}, "float32", 4080, 4080),
    # Of several engines each counts on its share, and bfloat16 is no choice for a float64.
    (8, "1B", {"memory_share": 0.5}, "bfloat16", 8176, 8176),
    (8, "float64", {}, "float32", 16368, 16368),
    # A budget, whatever the window: it is not made larger for a sequence of 32,768.
    (64, "windows", {}, "float32", 4080, 4080),
]


@pytest.mark.parametrize(("limit", "model", "settings", "dtype", "tokens", "longest"), TAKEN)
def test_a_start_fits_into_what_is_free(
    limit: int,
    model: str,
    settings: dict[str, Any],
    dtype: str,
    tokens: int,
    longest: int,
    tmp_path: Path,
) -> None:
    found = plans_of(tmp_path, model, limit * GB, **settings)
    plan = found.plans[0]
    assert found.refusal is None and plan.starts
    assert (plan.dtype, plan.cache_tokens, plan.longest) == (dtype, tokens, longest)
    taken = plan.weight_bytes + plan.step_bytes + plan.pages.num_bytes
    assert taken + HOST_RESERVE <= limit * GB


# Settings that are refused, with the settings that fit.
REFUSED: list[tuple[int, str, dict[str, Any], str]] = [
    (4, "1B", {"dtype": "float32"}, "as float32 weights take 4.6 GiB, .* --dtype bfloat16 fits"),
    (4, "3B", {}, "as bfloat16 weights take 6.0 GiB, .*; --quantization int4 fits, with 4,064 tok"),
    (4, "3B", {"quantization": "int8"}, "as int8 weights take 3.4 GiB.* --quantization int4 fits"),
    (4, "8B", {}, r"nor does it with --quantization int4 \(5.3 GiB of weights\)"),
    (4, "8B", {"quantization": "int4"}, "a smaller model, or a machine with more memory"),
    (8, "8B", {}, "; --quantization int4 fits, with 4,080 tokens"),
    (16, "8B", {}, "; --quantization int8 fits, with 4,080 tokens"),
    (8, "8B", {"dtype": "float32"}, "; --quantization int4 fits, with 4,080 tokens"),
    (8, "3B", {"max_model_len": 8192}, r"at most (\d,\d+) tokens of context fit \(--max-model-len"),
    (
        8,
        "8B",
        {"max_model_len": 8192},
        "; with --quantization int4, at most 5,[0-9]+ tokens",
    ),
    (8, "3B", {"kv_cache_memory_bytes": 4 * GIB}, "at most [0-9,]+ bytes of KV cache fit, 3,088"),
    (8, "3B", {"num_gpu_blocks_override": 999}, "at most 1[0-9]+ pages of KV cache fit"),
    (8, "1B", {"max_num_batched_tokens": 2**20}, "default of max_num_batched_tokens: lower that"),
]


@pytest.mark.parametrize(("limit", "model", "settings", "words"), REFUSED)
def test_what_cannot_fit_is_refused_with_what_does(
    limit: int, model: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    found = plans_of(tmp_path, model, limit * GB, **settings)
    assert found.refusal is not None and not found.plans[0].starts
    assert found.refusal.startswith("the model does not fit on CPU, ")
    assert re.search(words, found.refusal), found.refusal


@pytest.mark.parametrize(
    ("model", "settings", "option"),
    [
        ("3B", {"max_model_len": 8192}, "max_model_len"),
        ("3B", {"kv_cache_memory_bytes": 4 * GIB}, "kv_cache_memory_bytes"),
        ("3B", {"num_gpu_blocks_override": 999}, "num_gpu_blocks_override"),
    ],
)
def test_the_number_that_is_named_fits(
    model: str, settings: dict[str, Any], option: str, tmp_path: Path
) -> None:
    """The number is also the largest that fits, up to a partially filled page."""
    text = plans_of(tmp_path, model, 8 * GB, **settings).refusal
    assert text is not None
    words = re.search(rf"--{option.replace('_', '-')} (\d+)\)", text)
    assert words is not None, text
    number, config = int(words[1]), EngineConfig(model=tmp_path / model)
    root, page = tmp_path / "host", 28 * 2 * 16 * 8 * 128 * 4
    step = {"max_model_len": 16, "kv_cache_memory_bytes": page}.get(option, 1)
    for value, fits in ((number, True), (number + step, False)):
        found = plan_model(replace(config, **{option: value}), None, root)
        assert found.plans[0].starts == fits


def test_what_is_in_use_is_not_free(tmp_path: Path) -> None:
    """A group of 16 GB, of which 12 are in use, gives an engine as much as a group of 4 GB."""
    found = plans_of(tmp_path, "1B", 16 * GB, 12 * GB)
    assert (found.device.total, found.device.free) == (16 * GB, 4 * GB)
    assert (found.plans[0].dtype, found.plans[0].cache_tokens) == ("bfloat16", 10224)
    assert plan_model(EngineConfig(model=tmp_path / "1B"), "cpu", tmp_path / "host") == found


def test_a_host_that_says_nothing_is_not_planned_for(tmp_path: Path) -> None:
    """The cache keeps its budget even there."""
    plan = plan_model(EngineConfig(model=folder_of(tmp_path, "8B")), None, tmp_path / "no").plans[0]
    assert (plan.dtype, plan.cache_tokens) == ("float32", 4080)


def test_the_bundled_model_keeps_its_programs(tmp_path: Path) -> None:
    """Programs are compiled for a number of pages, which ample memory must not change."""
    limited = limited_host(tmp_path / "limited", 2 * GIB)
    for root in (limited, write_host(tmp_path / "host", 64 * GIB, 48 * GIB)):
        config = EngineConfig()
        [plan, *_] = plan_model(config, None, root).plans
        resolved = config.resolve("cpu", 1024)
        budget = cpu_page_budget(resolved, plan.page_bytes, plan.model_config)
        assert plan.num_pages == plan.full_pages == budget == 4161
        assert (plan.dtype, plan.longest) == ("float32", 1024)
        source = find_source(config)
        assert plan_start(config, source, this_device(root)).config == replace(
            resolved, model=source.path
        )


def test_a_cache_that_holds_a_window_serves_every_position(tmp_path: Path) -> None:
    """The cache holds 16,368 tokens, and a sequence needs at most its window and two steps."""
    config = EngineConfig(model=folder_of(tmp_path, "windows"), kv_cache_dtype="fp8")
    [plan, *_] = plan_model(config, None, limited_host(tmp_path / "host", 64 * GB)).plans
    source = find_source(config, config_only=True)
    planned = plan_start(config, source, this_device(tmp_path / "host"))
    assert (planned.max_model_len, planned.num_pages) == (32768, plan.num_pages) == (32768, 1024)
    # A window that the cache does not hold limits the sequence like all positions would.
    assert longest_sequence(plan.config, plan.model_config, 256) == 4080


SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",
    "compilation_cache_dir": None,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_sizes": (2,),
    "token_sizes": (16,),
    "num_scheduler_steps": 1,
}
# Two layers of few weights, whose cache takes 2 GiB for the positions that they declare.
LONG: Any = LLAMA_3 | shape(256, 256, 2, 8, 8, 512) | {"head_dim": 128, "rope_scaling": None}
LONG |= {"bos_token_id": 1, "eos_token_id": 2}


@pytest.fixture
def long(tmp_path: Path) -> Path:
    (tmp_path / "long").mkdir()
    (tmp_path / "long/config.json").write_text(json.dumps(LONG))
    return tmp_path / "long"


def test_nothing_starts_before_a_refusal(
    long: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_plan, "open_device", lambda *_: pytest.fail("JAX was started"))
    root = limited_host(tmp_path / "host", HOST_RESERVE + 100 * MIB)
    config = EngineConfig(model=long, kv_cache_memory_bytes=GIB, **SETTINGS)
    with pytest.raises(InvalidRequest, match=r"bytes of KV cache fit, \d,\d+ tokens") as refused:
        load(config, root=root)
    assert refused.value.parameter == "kv_cache_memory_bytes"


def test_a_start_says_what_it_chose(long: Path, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "jaxserve.start")
    root = limited_host(tmp_path / "host", HOST_RESERVE + 100 * MIB)
    loaded = load(EngineConfig(model=long, **SETTINGS), root=root)
    assert loaded.runner.num_pages == 80 * MIB // (256 << 10)
    assert loaded.limits.max_model_len == loaded.config.max_model_len == 319 * 16
    loaded.runner.close()
    served = (
        "serves 5,104 of the model's 131,072 positions, which a KV cache of 0.08 GiB holds since"
    )
    assert caplog.text.count(served) == 1
    # Weights of 5 MB would not make room for more cache in another dtype.
    assert "bfloat16" not in caplog.text


def test_a_start_runs_in_bfloat16_where_float32_does_not_fit(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "wide").mkdir()
    wide = LONG | {"vocab_size": 65536, "max_position_embeddings": 1024}
    (tmp_path / "wide/config.json").write_text(json.dumps(wide))
    root = limited_host(tmp_path / "host", HOST_RESERVE + 150 * MIB)
    loaded = load(EngineConfig(model=tmp_path / "wide", **SETTINGS), root=root)
    assert "the model runs in bfloat16: in float32 its weights take 0.1 GiB, and 0.7" in caplog.text
    assert "serves" not in caplog.text and loaded.limits.max_model_len == 1024
    loaded.runner.close()


START = """
import sys
from pathlib import Path
from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.settings.environment import prepare_process
from tests.engine.test_host_plan import SETTINGS

prepare_process()
from jaxserve.start.start import load

def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

folder, root = sys.argv[1:]
before = resident("VmRSS")
llm = LLM(load(EngineConfig(model=folder, **SETTINGS), root=Path(root)))
longest = llm._thread.engine.limits.max_model_len
prompt = [[3 + i % 500 for i in range(600)]]
[output] = llm.generate(prompt, SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
assert len(output.outputs[0].token_ids) == 8
llm.close()
print(longest, before, resident("VmHWM"))
"""


def test_a_process_stays_within_what_was_free(long: Path, tmp_path: Path) -> None:
    """Measures the peak memory of a separate process, less its memory before the start.

    The cache by default would take 1 GiB, and one of the whole context 2.
    """
    free = HOST_RESERVE + 300 * MIB
    root = limited_host(tmp_path / "host", free)
    command = [sys.executable, "-c", START, str(long), str(root)]
    environment = dict(os.environ)
    compile_quickly(environment)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    longest, before, peak = map(int, done.stdout.split())
    # Pages of libraries that it had before are given back: the cache takes their place.
    assert longest == 16 * 1023 and before + 128 * MIB < peak < before + free
    assert "serves 16,368 of the model's 131,072 positions" in done.stderr
