"""Starting, and starting badly: what is refused, and what is kept between starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM, CheckpointError, EngineConfig, SamplingParams, UnsupportedModel
from jaxserve.execution.compilation import keep_compiled_programs
from tests.engine.checkpoint import save_checkpoint

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
    llm = LLM(checkpoint, **SMALL)
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=3), use_tqdm=False)) == 2
    llm.close()
    del llm
    assert not [array for array in jax.live_arrays() if id(array) not in before and array.size > 64]


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


@pytest.mark.parametrize("eos", [260, -1, "1", 1.5, [1, 999]])
def test_ends_outside_the_vocabulary_are_refused(tmp_path: Path, eos: Any) -> None:
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


def test_requests_beyond_a_small_cache_are_refused(checkpoint: Path, caplog: Any) -> None:
    """It fits the model's context but not the cache: refused, never queued for ever."""
    llm = LLM(checkpoint, **(SMALL | {"num_gpu_blocks_override": 3}))
    assert "holds 32 tokens" in caplog.text
    with pytest.raises(ValueError, match="at most 31"):
        llm.generate([[5] * 40], use_tqdm=False)
    [one] = llm.generate([[5] * 20], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(one.outputs[0].token_ids) == 12
    llm.close()


def test_importing_loads_no_heavy_library() -> None:
    code = (
        "import sys, jaxserve, jaxserve.scheduling.scheduler\n"
        "print([m for m in ('jax', 'torch', 'transformers', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_compiled_programs_are_only_kept_in_a_private_folder(tmp_path: Path) -> None:
    """JAX's settings are read as of now and put back, since all tests share one such folder."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o777)
    (tmp_path / "file").write_text("")
    assert before[names[0]] is None or keep_compiled_programs(shared)
    assert {name: getattr(jax.config, name) for name in names} == before
    try:
        jax.config.update(names[0], None)
        assert not keep_compiled_programs(shared)
        assert not keep_compiled_programs(tmp_path / "file")
        assert jax.config.jax_compilation_cache_dir is None
        assert keep_compiled_programs(tmp_path / "private")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "private")
        assert (tmp_path / "private").stat().st_mode & 0o777 == 0o700
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
