"""Mixtures of experts by the CPU's own products equal Transformers."""

import json
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from jaxserve.models import experts, read_model_config
from jaxserve.models.placed_weight import FULL
from jaxserve.weights import gguf_config, load_weights, read_gguf
from jaxserve.weights.placement import use_panels
from tests.models.cases import CASES
from tests.models.tiny_models import reference_logits, relative_error
from tests.support.gguf_files import Type, exact_tensors, raw_config, write_gguf
from tests.support.paged_runner import PagedRunner

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek")
PRODUCT = re.compile(r"target_name=jaxserve_(?:quantized_)?product_")


@pytest.fixture(autouse=True)
def only_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every other product by experts fail."""
    monkeypatch.setattr(experts, "grouped_matmul", None)


# These cases differ in windows, rotations and weights of experts, and not in products. The usual
# run covers them with models in plain JAX.
AS_OTHERS = frozenset(
    """
    mixtral_top1_window_tied qwen3_moe_weights_as_they_are gpt_oss_alternate
    deepseek_v2_bias_wide_values deepseek_v3_halves_as_they_are deepseek_v3_bias_yarn_tied
    """.split()
)
# One token of each family has a program of its own, with products of few rows.
ALONE = {"mixtral_top2", "qwen3_moe_one_dense", "gpt_oss_top1_types", "deepseek_v2_groups"}


def cases() -> list[Any]:
    """Return each case with the padded size of one token: that of the prompt, or None."""
    found = []
    for case in (case for case in CASES if case.startswith(FAMILIES)):
        for pad_to in (36, 0):
            usual = (pad_to == 0) == (case in ALONE) and case not in AS_OTHERS
            marks = [] if usual else [pytest.mark.long]
            found.append(pytest.param(case, pad_to, marks=marks))
    return found


@pytest.mark.parametrize(("case", "pad_to"), cases())
def test_experts_in_panels_give_what_transformers_gives(checkpoints, case, pad_to):
    """A prompt, with padding behind it, and one token."""
    directory, reference = checkpoints[case]
    model = load_weights(directory, read_model_config(directory), jnp.float32, panels=True)
    sparse = [layer.mlp for layer in model.layers if isinstance(layer.mlp, experts.SparseMLP)]
    assert all(mlp.gate_up[...].layout == "panels" for mlp in sparse) and sparse
    runner, tokens = PagedRunner(model), np.random.default_rng(1).integers(0, 96, 30).tolist()
    got = [runner.run([tokens[:-1]], pad_to=36)[0], runner.run([tokens[-1:]], pad_to)[0]]
    together = 29 if "dynamic" in case else 0
    want = reference_logits(reference, tokens, together)
    assert relative_error(np.concatenate(got), want) < 1e-4
    assert len(PRODUCT.findall(runner.program())) >= 2 * len(sparse)


@pytest.fixture(scope="module")
def logits_of_plain(checkpoints) -> Callable[[str, str, list[int]], np.ndarray]:
    """Return a function that computes the logits of a quantized case's codes once."""
    kept: dict[tuple[str, str], np.ndarray] = {}

    def logits(case: str, form: str, tokens: list[int]) -> np.ndarray:
        if (case, form) not in kept:
            directory, _ = checkpoints[case]
            config = read_model_config(directory)
            plain = load_weights(directory, config, jnp.float32, quantization=form)
            kept[case, form] = PagedRunner(plain).run([tokens])[0]
        return kept[case, form]

    return logits


def quantized() -> list[Any]:
    """Return cases with a dtype, an error and a form: the usual ones have each form in each dtype.

    The first case has padded inputs in int4. The other uses all experts, so that none is swapped.
    """
    forms, found = ("int8", "fp8", "int4"), []
    for case, dtype, error, usual in [
        ("qwen3_moe_window_bias", jnp.float32, 1e-5, ("int8", "int4")),
        ("gpt_oss_truncated_tied", jnp.float32, 1e-5, ("fp8",)),
        ("gpt_oss_truncated_tied", jnp.bfloat16, 0.1, forms),
    ]:
        for form in forms:
            marks = [] if form in usual else [pytest.mark.long]
            found.append(pytest.param(case, dtype, error, form, marks=marks))
    return found


@pytest.mark.parametrize(("case", "dtype", "error", "form"), quantized())
def test_quantized_experts_in_panels_give_what_they_give_as_they_are(
    checkpoints, logits_of_plain, case, dtype, error, form
):
    directory, _ = checkpoints[case]
    config, tokens = read_model_config(directory), list(range(20))
    in_panels = form != "int4"  # where all but experts would be other blocks than codes in panels
    model = load_weights(directory, config, dtype, quantization=form, panels=in_panels)
    if not in_panels:
        use_panels(model)
        error = max(2 * error, 2e-4)  # activations of 16 bits, and codes that are searched for
    found = [layer.mlp.down[...] for layer in model.layers]
    assert any(one.in_panels and one.form != FULL and one.values.ndim == 4 for one in found)
    logits = PagedRunner(model).run([tokens])[0]
    assert relative_error(logits, logits_of_plain(case, form, tokens)) < error


def test_sixteen_bit_experts_in_panels(checkpoints):
    directory, reference = checkpoints["gpt_oss_truncated_tied"]
    tokens = np.random.default_rng(0).integers(0, 96, 20).tolist()
    want = reference_logits(reference, tokens)
    for dtype in (jnp.bfloat16, jnp.float16):
        model = load_weights(directory, read_model_config(directory), dtype, panels=True)
        got = PagedRunner(model).run([tokens])[0]
        assert relative_error(got, want) < 16 * float(jnp.finfo(dtype).eps)


def test_experts_in_mxfp4_give_what_transformers_gives(checkpoints):
    """Reads the blocks of a Hugging Face checkpoint. Activations have 16 bits."""
    directory, reference = checkpoints["gpt_oss_mxfp4"]
    config, tokens = read_model_config(directory), list(range(20))
    model = load_weights(directory, config, jnp.float32, panels=True, packed=True)
    assert all(layer.mlp.down[...].layout == "block_panels" for layer in model.layers)
    got = PagedRunner(model).run([tokens], pad_to=24)[0]
    assert relative_error(got, reference_logits(reference, tokens)) < 1e-3


@pytest.mark.parametrize("kind", [Type.MXFP4, Type.Q8_0])
def test_stacked_experts_of_a_gguf_file_give_what_transformers_gives(tmp_path, kind):
    """Values are exactly representable in their blocks. Activations have 16 bits."""
    raw = raw_config("gptoss")
    tensors = exact_tensors(raw)
    for name, tensor in tensors.items():
        if ".experts." in name and kind == Type.Q8_0:
            tensors[name] = np.float32(np.round(tensor * 127 / 6) / 16)
        if tensor.ndim > 1:
            tensors[name] /= 8  # large scores would amplify the rounding of activations
    file = read_gguf(write_gguf(tmp_path / "model.gguf", "gptoss", tensors, kind))
    model = load_weights(file, gguf_config(file), jnp.float32, panels=True, packed=True)
    assert all(layer.mlp.gate_up[...].form == kind.name for layer in model.layers)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "gpt_oss"}))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    flags = {"attn_implementation": "eager", "dtype": torch.float32}
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, **flags).eval()
    tokens = list(range(20))
    got = PagedRunner(model).run([tokens], pad_to=24)[0]
    assert relative_error(got, reference_logits(reference, tokens)) < 1e-3
