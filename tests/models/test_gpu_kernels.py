"""Whole models with the kernels of a GPU, interpreted, against plain JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models import parse_model_config
from jaxserve.weights import random_weights
from tests.support.paged_runner import PagedRunner

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
# Results of products reach norms in parts, as they are, scaled, normed first, or not at all.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Granite": {
        "residual_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
    },
    "Gemma2": {
        "query_pre_attn_scalar": 16,
        "sliding_window": 9,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Olmo2": {},
    "Cohere": {"logit_scale": 0.1, "layer_norm_eps": 1e-5},
}


def logits(family: str, dtype: Any, implementation: str) -> list[np.ndarray]:
    """Return the logits of a prompt, of two rows of one token each, and of chunks with padding.

    The chunks take the prompt's program: that of interpreted kernels takes seconds to compile.
    """
    fields = SIZES | FAMILIES[family]
    if "layer_norm_eps" in fields:
        del fields["rms_norm_eps"]
        del fields["head_dim"]
        fields["hidden_size"] = 64
    names = {"architectures": [f"{family}ForCausalLM"], "model_type": family.lower()}
    model = random_weights(parse_model_config(fields | names), dtype, 1)
    runner = PagedRunner(
        model, num_rows=2, page_size=16, max_tokens=48, implementation=implementation
    )
    steps = [[list(range(20)), [7]], [[5], [6]], [[1, 2, 3], [4]]]
    return [
        np.concatenate(runner.run(chunks, pad_to=pad_to))
        for chunks, pad_to in zip(steps, (0, 0, 21), strict=True)
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_interpreted_kernels_give_the_same_logits(family: str) -> None:
    plain, kernels = (logits(family, jnp.float32, name) for name in ("xla", "triton_interpret"))
    for want, got in zip(plain, kernels, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def test_one_row_comes_twice_where_products_are_in_parts() -> None:
    model = random_weights(
        parse_model_config(SIZES | {"architectures": ["LlamaForCausalLM"]}), jnp.float32
    )
    runs = [
        PagedRunner(model, page_size=16, max_tokens=32, implementation=name).run([[3]])[0]
        for name in ("xla", "triton_interpret")
    ]
    np.testing.assert_allclose(*runs, rtol=0, atol=2e-5 * np.abs(runs[0]).max())
