"""Compiling for a card that this machine does not have: errors, and the advice in each."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve import EngineConfig
from jaxserve.errors import DeviceError, InvalidRequest, UnsupportedModel
from jaxserve.models import abstract_model, parse_model_config
from jaxserve.start.absent_device import compile_ahead, compile_for_card
from jaxserve.start.jax_start import CudaParts, plugin_remedy
from jaxserve.start.programs import described_card
from jaxserve.start.programs.described_card import DescribedCard
from jaxserve.start.programs.fingerprint import open_store
from jaxserve.start.programs.settling import CACHE_NOTES, estimated
from scripts.gpu.models import MODELS
from scripts.lib.placed_model import plan_of_model

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def config(folder: Path, model: str = "8b", **fields: Any) -> EngineConfig:
    """Return the settings of a model that consists of its config.json."""
    found = MODELS[model].config() | fields.pop("model_fields", {})
    (folder / "config.json").write_text(json.dumps(found))
    return EngineConfig(model=str(folder), compilation_cache_dir=str(folder / "kept"), **fields)


def refused(settings: EngineConfig, card: str = "NVIDIA H100") -> str:
    with pytest.raises((ValueError, DeviceError)) as caught:
        compile_for_card(settings, card, lambda *_: pytest.fail("something was compiled"))
    return str(caught.value)


def test_a_card_that_is_not_in_the_table_is_refused_with_those_that_are(tmp_path: Path) -> None:
    said = refused(config(tmp_path), "H1000")
    assert "there is no card 'H1000'" in said and "H100 PCIe" in said
    assert "allowed: capability 7.5, 8.0" in refused(config(tmp_path), "V100")


def test_a_model_that_does_not_fit_is_refused_before_anything_is_compiled(tmp_path: Path) -> None:
    said = refused(config(tmp_path, "70b"), "RTX 4090")
    assert "does not fit on NVIDIA GeForce RTX 4090" in said


def test_shapes_that_only_the_weights_say_are_refused(tmp_path: Path) -> None:
    stored = {"quantization_config": FP8}
    assert "weights are 'fp8'" in refused(config(tmp_path, model_fields=stored))
    experts = MIXTRAL | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    assert "experts are quantized to int8" in refused(
        config(tmp_path, "tiny", model_fields=experts, quantization="int8")
    )
    with pytest.raises(UnsupportedModel):
        compile_for_card(config(tmp_path, model_fields=stored), "H100", lambda *_: None)


def test_over_several_cards_weights_are_in_full_and_on_one_host(tmp_path: Path) -> None:
    said = refused(config(tmp_path, tensor_parallel_size=2, quantization="int8"))
    assert "over several cards weights are quantized to int8; allowed: weights in full" in said
    hosts: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "nodes_secret": "file"}
    assert "nnodes is 2" in refused(config(tmp_path, **hosts))


def test_programs_that_are_not_kept_are_of_no_use(tmp_path: Path) -> None:
    settings = config(tmp_path)
    object.__setattr__(settings, "compilation_cache_dir", "none")
    with pytest.raises(InvalidRequest, match="allowed: a folder"):
        compile_for_card(settings, "H100", lambda *_: None)


def test_the_plugin_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        described_card, "find_parts", lambda _: CudaParts(False, False, None, {}, "0.11.2")
    )
    said = refused(config(tmp_path))
    assert "needs JAX's plugin for CUDA: it is not installed" in said
    assert "pip install -e '.[cuda13]'" in said


@pytest.mark.usefixtures("no_jax_cache")
def test_programs_that_are_there_are_not_compiled_again(tmp_path: Path) -> None:
    """The largest program, whose memory decides the size of the cache, is also reused."""
    model_config = parse_model_config(MODELS["tiny"].config())
    settings = EngineConfig(decode_sizes=(2,), token_sizes=(16,), max_model_len=64)
    settings = settings.resolve("gpu", 64, (2, 16))
    card = DescribedCard.of("NVIDIA H100")
    model = abstract_model(model_config, jnp.bfloat16)
    plan = plan_of_model(settings, model_config, model, device=card.memory)
    store = open_store(tmp_path / "programs", plan, card)
    plan = estimated(plan, store)
    pages = plan.num_pages
    names = [plan.program_name(key) for key in plan.programs]
    assert names[0] == f"16 tokens, 2 rows, {pages} pages" and len(set(names)) == len(names) == 8
    found = store.fingerprint
    assert found["platform"] is None and found["device"] == f"gpu {card.card.name}"
    for name in names:  # any program does
        store.get(name, lambda: jax.jit(lambda x: x + 1).lower(1.0))
    store.note({"pages": pages}, CACHE_NOTES)
    report = compile_ahead(plan, card, tmp_path / "programs", 0, lambda *_: None)
    assert report.plan is not None and report.plan.num_pages == pages
    assert report.store is not None and report.store.num_built == 0
    assert store.num_built == len(names)
    assert f"for {card.card.name}, {pages} pages of cache" in str(report)


def test_a_plugin_of_another_version_is_none() -> None:
    def remedy(plugins: dict[str, str]) -> str | None:
        return plugin_remedy(CudaParts(False, False, None, plugins, "0.11.2"))

    assert remedy({"cuda13": "0.11.2"}) is None
    assert "jax-cuda13-plugin 0.11.1 does not fit jaxlib 0.11.2" in (
        remedy({"cuda13": "0.11.1"}) or ""
    )


def test_kernels_of_a_card_are_imported_while_weights_are_read() -> None:
    code = """
        import sys
        from jaxserve.start.device import importing_kernels
        from pallas_kernels.devices import find_card
        assert importing_kernels(find_card("T4").limits) is None
        for card, module in (("A100", "triton_ragged"), ("H100", "hopper_ragged")):
            assert f"pallas_kernels.gpu.{module}" not in sys.modules
            importing_kernels(find_card(card).limits).join()
            assert f"pallas_kernels.gpu.{module}" in sys.modules
        assert "jaxlib.mlir.dialects.tt" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
