"""Starts and failed starts: the errors, and the files that remain between starts."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, AsyncLLM, CheckpointError, EngineConfig, SamplingParams, UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.start import weights
from jaxserve.start.garbage import collection_paused
from jaxserve.start.plan import make_plan
from jaxserve.start.plan.memory import cpu_page_budget
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs import fingerprint as fingerprint_module
from jaxserve.start.programs.autotuning import prepare_cache
from jaxserve.start.programs.fingerprint import fingerprint
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import CheckpointSource
from tests.support.checkpoint import save_checkpoint
from tests.support.quick_code import compile_quickly
from tests.support.tiny_config import TINY

pytestmark = [pytest.mark.own_engine, pytest.mark.usefixtures("quick_code")]

SMALL: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "decode_sizes": (2,),
    "token_sizes": (16,),
    "max_model_len": 64,
    "compilation_cache_dir": None,
}


def test_a_closed_engine_leaves_nothing_behind(checkpoint: Path) -> None:
    before = {id(array) for array in jax.live_arrays()}
    # Python's search for cycles counts objects, not bytes: weights could wait long for it.
    with collection_paused():
        # As many pages as in a test below, whose programs these are then.
        llm = LLM(checkpoint, **SMALL, num_gpu_blocks_override=3)
        assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)) == 2
        llm.close()
        del llm
        left = [array for array in jax.live_arrays() if id(array) not in before]
    assert not [array for array in left if array.size > 64]


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_num_seqs": 2.5}, "max_num_seqs"),
    ({"max_num_seqs": 40, "max_num_batched_tokens": 20}, "max_num_batched_tokens"),
    ({"block_size": 0}, "block_size"),
    ({"dtype": "int8"}, "dtype"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"),
    ({"attention_backend": "cudnn"}, "attention_backend"),
    ({"attention_backend": "triton"}, "attention_backend: triton needs a GPU"),
    ({"seed": -1}, "seed"),
    ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override"),
    ({"max_model_len": 10**6}, "max_model_len"),
    ({"kv_cache_memory_bytes": 100}, "KV cache"),
    ({"dtype": "float64"}, "float64"),
    ({"decode_sizes": (1,)}, "decode_sizes"),
]


@pytest.mark.parametrize(("settings", "named"), BAD_SETTINGS, ids=lambda value: str(value)[:40])
def test_bad_settings_are_refused_before_anything_compiles(
    checkpoint: Path, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        LLM(checkpoint, **(SMALL | settings))


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        EngineConfig(max_seqs=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("eos", [260, -1, "1", 1.5, [1, 999], list(range(33))])
def test_ends_outside_the_vocabulary_or_too_many_are_refused(tmp_path: Path, eos: Any) -> None:
    save_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(CheckpointError, match="eos_token_id"):
        LLM(tmp_path, **SMALL)


def test_missing_and_foreign_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        LLM(tmp_path / "nowhere", **SMALL)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM"):
        LLM(tmp_path, **SMALL)


def test_weights_that_differ_from_what_was_expected_have_their_own_programs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(weights, "_LONG_READ", 0)
    prompt, sampling = [[5] * 9], SamplingParams(max_tokens=8, temperature=0)
    with LLM(checkpoint, **SMALL) as llm:
        [expected] = llm.generate(prompt, sampling)
        assert "another model" not in caplog.text
    plan_start = make_plan.plan_start

    def plan_narrow(config: EngineConfig, *given: Any) -> StartPlan:
        narrow = plan_start(replace(config, dtype="bfloat16"), *given)
        return replace(plan_start(config, *given), model=narrow.model)

    monkeypatch.setattr(make_plan, "plan_start", plan_narrow)
    with LLM(checkpoint, **SMALL) as llm:
        assert "another model than was planned" in caplog.text
        assert "embedding.project.value.values is float32[" in caplog.text
        [found] = llm.generate(prompt, sampling)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


def test_programs_are_compiled_while_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, compiles = CheckpointSource.load, threading.Event()

    def slow_load(*given: Any, **more: Any) -> Any:
        assert compiles.wait(60), "no program is compiled before the weights are there"
        return read(*given, **more)

    class Store(ProgramStore):
        def _compile(self, *given: Any) -> Any:
            compiles.set()
            return super()._compile(*given)

    monkeypatch.setattr(weights, "_LONG_READ", 0)
    monkeypatch.setattr(CheckpointSource, "load", slow_load)
    monkeypatch.setattr(fingerprint_module, "ProgramStore", Store)
    prompt, sampling = [[5] * 9], SamplingParams(max_tokens=8, temperature=0)
    with LLM(checkpoint, **SMALL) as llm:
        [found] = llm.generate(prompt, sampling)
    monkeypatch.undo()
    with LLM(checkpoint, **SMALL) as llm:
        assert llm.generate(prompt, sampling)[0].outputs[0].token_ids == found.outputs[0].token_ids


def test_a_damaged_file_is_refused_while_programs_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_LONG_READ", 0)
    save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(tmp_path, **SMALL)


def test_requests_beyond_a_small_cache_are_refused(checkpoint: Path, caplog: Any) -> None:
    """The request fits the model's context but not the cache: it is refused and never queued."""
    llm = LLM(checkpoint, **(SMALL | {"num_gpu_blocks_override": 3}))
    assert "holds 32 tokens" in caplog.text
    with pytest.raises(ValueError, match="at most 31"):
        llm.generate([[5] * 40], use_tqdm=False)
    [one] = llm.generate([[5] * 20], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(one.outputs[0].token_ids) == 12
    llm.close()


def test_the_cache_on_cpu_stops_at_what_slots_can_use() -> None:
    """A cache larger than the slots can fill would only take memory."""
    settings: dict[str, Any] = {"max_num_seqs": 3, "block_size": 16}
    plain = EngineConfig(**settings, enable_prefix_caching=False).resolve("cpu", 64)
    cached = EngineConfig(**settings).resolve("cpu", 64)
    model = parse_model_config({**TINY, "architectures": ["LlamaForCausalLM"]})
    slots = 3 * (64 // 16 + 1)  # each with the page to spare that admission asks for
    assert cpu_page_budget(plain, 1 << 10, model) == slots + 1
    assert cpu_page_budget(cached, 1 << 10, model) == 2 * slots + 1
    assert cpu_page_budget(cached, 1 << 27, model) == 8


def test_importing_loads_no_heavy_library() -> None:
    code = (
        "import sys, jaxserve, jaxserve.scheduling.scheduler\n"
        "print([m for m in ('jax', 'torch', 'transformers', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def long(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.long)


# In a process of its own: once JAX has read programs from a cache of its own, programs compiled
# later may fail to run from our files (jaxlib 0.10.2 on CPU).
STARTS = """
import json, sys
from jaxserve import LLM, SamplingParams
from jaxserve.commands.cli import main

checkpoint, settings = sys.argv[1], json.loads(sys.argv[2])
sampling = SamplingParams(max_tokens=5, temperature=0.7, seed=3, logit_bias={"5": 1.0})
starts = []
for _ in range(2):
    with LLM(checkpoint, **settings) as llm:
        outputs = llm.generate(["a", "bc"], sampling, use_tqdm=False)
        runner = llm._thread.engine.runner
        store = llm._thread.engine.loaded.start.store
        starts.append([store.num_built, store.num_loaded, runner.num_compiles > 0])
        starts[-1].append([one.outputs[0].token_ids for one in outputs])
print(json.dumps(starts))
del settings["wait_for_all_programs"]  # as the command does
values = {name: v[0] if isinstance(v, list) else v for name, v in settings.items()}
options = [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
sys.exit(main(["compile", checkpoint, *options]))
"""


def environment_without_jax() -> dict[str, str]:
    """Return an environment without JAX's own cache, in which programs compile quickly."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    compile_quickly(environment)
    return environment


@pytest.mark.parametrize("steps", [long(1), 4])
def test_a_second_start_compiles_nothing_and_answers_alike(
    checkpoint: Path, tmp_path: Path, steps: int
) -> None:
    """`jaxserve compile` with the same options has no work left either.

    The same holds for a process with another number of devices.
    """
    cache = {"compilation_cache_dir": str(tmp_path / "cache"), "num_scheduler_steps": steps}
    cache |= {"wait_for_all_programs": True}
    command = [sys.executable, "-c", STARTS, str(checkpoint), json.dumps(SMALL | cache)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment_without_jax(), check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout.splitlines()[0])
    assert first[:3] == [10, 0, True] and second[:3] == [0, 10, False]
    assert first[3] == second[3] and all(len(tokens) > 0 for tokens in first[3])
    assert "a step failed" not in done.stderr
    assert "0 programs compiled, 10 read" in done.stdout
    assert "jaxserve: weights" in done.stderr  # the command says how far it is
    assert start_once(checkpoint, cache, 2) == [2, 0, 10, first[3]]


ONCE = """
import json, sys, jax
from jaxserve import LLM, SamplingParams

sampling = SamplingParams(max_tokens=5, temperature=0.7, seed=3, logit_bias={"5": 1.0})
with LLM(sys.argv[1], **json.loads(sys.argv[2])) as llm:
    outputs = llm.generate(["a", "bc"], sampling, use_tqdm=False)
    store = llm._thread.engine.loaded.start.store
    found = [jax.device_count(), store.num_built, store.num_loaded]
print(json.dumps([*found, [one.outputs[0].token_ids for one in outputs]]))
"""


def start_once(checkpoint: Path, cache: dict[str, Any], devices: int) -> list[Any]:
    """Start an engine in a process with so many devices.

    Returns:
        devices, programs compiled, programs read, and tokens drawn.
    """
    environment = environment_without_jax()
    if devices > 1:
        environment["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, "-c", ONCE, str(checkpoint), json.dumps(SMALL | cache)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "a step failed" not in done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("counts", [long((2, 1, 2)), (2, 1), long((1, 2))], ids=str)
def test_kept_programs_are_one_devices_however_many_there_are(
    checkpoint: Path, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    """Changes from one device to two. The test of a second start covers the rest."""
    cache = {"compilation_cache_dir": str(tmp_path / "cache"), "num_scheduler_steps": 1}
    cache |= {"wait_for_all_programs": True}
    tokens = []
    for turn, count in enumerate(counts):
        devices, built, loaded, drawn = start_once(checkpoint, cache, count)
        assert (devices, built, loaded) == ((count, 10, 0) if turn == 0 else (count, 0, 10))
        tokens.append(drawn)
    assert all(drawn == tokens[0] for drawn in tokens)


EXIT = """
import json, sys, threading
from jaxserve import LLM, SamplingParams

llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
endless = SamplingParams(max_tokens=None, ignore_eos=True)


def work():
    while True:
        llm.generate(["a", "b"], endless, use_tqdm=False)


threading.Thread(target=work, daemon=True).start()
while llm.stats().num_running == 0:
    pass
"""


@pytest.mark.parametrize("times", [1, long(9)])
def test_a_program_may_end_without_closing(checkpoint: Path, times: int) -> None:
    """In the middle of a step: its thread must not meet the end of the interpreter."""
    command = [sys.executable, "-c", EXIT, str(checkpoint), json.dumps(SMALL)]
    environment = dict(os.environ)
    compile_quickly(environment)
    for _ in range(times):
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=False, timeout=120
        )
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert "terminate" not in done.stderr


def test_garbage_waits_for_the_programs(checkpoint: Path) -> None:
    collects: dict[str, list[bool]] = {}

    def progress(stage: str, *_: int) -> None:
        collects.setdefault(stage, []).append(gc.isenabled())

    llm = AsyncLLM(EngineConfig(checkpoint, **SMALL), progress)
    llm.close()
    assert gc.isenabled()
    assert all(collects["weights"])
    assert not any(collects["programs"])


def test_a_cache_can_be_left_out(checkpoint: Path) -> None:
    """Includes the word "none", the only form on a command line."""
    with LLM(checkpoint, **(SMALL | {"compilation_cache_dir": "none"})) as llm:
        assert llm._thread.engine.loaded.start.store.folder is None
    assert not Path("none").exists()


@pytest.mark.usefixtures("no_jax_cache")
def test_a_cache_that_the_user_set_up_in_jax_stays(tmp_path: Path) -> None:
    assert prepare_cache(tmp_path) == tmp_path / "programs"
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "own"))
    try:
        assert prepare_cache(tmp_path) is None
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_the_fingerprint_names_what_programs_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint()
    assert before == fingerprint()
    names = ("jax", "jaxlib", "flax", "device", "platform", "cpu", "compiler_settings", "source")
    assert set(before) == set(names) and all(before.values())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert fingerprint()["compiler_settings"] != before["compiler_settings"]


def test_a_source_that_has_moved_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its edits would leave the fingerprint, and programs of older ones be loaded."""
    for package in ("jaxserve", "pallas_kernels"):
        shutil.copytree(fingerprint_module._PACKAGES / package, tmp_path / package)
    monkeypatch.setattr(fingerprint_module, "_PACKAGES", tmp_path)
    before = fingerprint()["source"]
    kept = tmp_path / "jaxserve/execution/step.py"
    kept.write_text(kept.read_text() + "# another line\n")
    assert fingerprint()["source"] != before
    listed = tmp_path / "jaxserve/scheduling/row_settings.py"
    listed.rename(listed.with_name("moved.py"))
    with pytest.raises(FileNotFoundError, match=r"settings\.py"):
        fingerprint()


@pytest.mark.parametrize("kind", ["link out", "broken link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_text_file_that_is_none_or_lies_elsewhere_is_refused(
    checkpoint: Path, tmp_path: Path, name: str, kind: str
) -> None:
    folder, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    shutil.copytree(checkpoint, folder)
    elsewhere.write_text((checkpoint / name).read_text() if (checkpoint / name).exists() else "")
    (folder / name).unlink(missing_ok=True)
    make = {
        "link out": lambda path: path.symlink_to(elsewhere),
        "broken link": lambda path: path.symlink_to("nowhere"),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }
    make[kind](folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: (links to|not a regular file)"):
        LLM(folder, **SMALL)


def test_text_files_in_the_cache_of_the_hub_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    home = tmp_path / "models--some--model"
    snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(checkpoint.iterdir()):
        shutil.copy(file, blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    config = EngineConfig(model=snapshot)
    assert find_source(config).tokenizer(config).encode("hello")
