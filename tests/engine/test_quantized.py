"""Quantized weights and a cache in fp8 through the engine, and in its compiled programs."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.config import bundled_model
from jaxserve.engine.loading import choose_quantization
from jaxserve.errors import UnsupportedModel
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.runner import Runner
from jaxserve.execution.state import addressable_pages
from jaxserve.models import ModelConfig, read_model_config
from jaxserve.weights import random_weights

# Every matrix of a block has several blocks of 256 outputs.
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
SMALLEST = 512 * 512  # weights in the projection after attention
BITS = {"int8": 8 + 32 / 512, "fp8": 8 + 32 / 512, "int4": 4 + 24 / 32}
# The decode step is greedy, since the sampler, which takes longest to compile, holds no weights.
PROGRAMS = [("int8", Bucket(1, 1, True, greedy=True)), ("int4", Bucket(16, 4, False))]


def runner_of(quantization: str | None, dtype: Any = np.float32) -> Runner:
    config = ModelConfig.from_dict(RAW)
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=8)
    model = random_weights(config, dtype, 0, quantization)
    return Runner(settings.resolve("cpu", 64), config, model)


@pytest.mark.parametrize(("form", "bucket"), PROGRAMS, ids=lambda x: str(x))
def test_no_program_holds_a_weight_in_full_precision(form, bucket):
    runner = runner_of(form)
    compiled = runner._compile(bucket, num_pages=8)
    # What a fusion computes inside is no buffer; everything else is.
    text = re.sub(r"^%?fused_computation.*?^\}", "", compiled.as_text(), flags=re.M | re.S)
    sizes = [
        int(np.prod([int(size) for size in shape.split(",")]))
        for shape in re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", text)
    ]
    assert max(sizes) < SMALLEST, "a float array is as large as a weight"
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * SMALLEST * 1.5
    matrices = 512 * (16 * 64 + 512 + 3 * 768)
    plain = 4 * (2 * 512 * 40 + 3 * 512)  # embedding, output projection and norms
    assert runner.weight_bytes - plain <= matrices * BITS[form] / 8
    assert 4 * matrices == runner_of(None).weight_bytes - plain


def test_requests_together_equal_each_alone_in_int4_over_fp8(checkpoint):
    prompts = ["Reverse: s-t-o-n-e", "What is 4 + 5?", "Copy this: the red house is in the garden"]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    sizes |= {"decode_sizes": (4,), "token_sizes": (16,)}
    with LLM(checkpoint, quantization="int4", kv_cache_dtype="fp8", **sizes) as llm:
        runner = llm._thread.engine.runner
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
        alone = [llm.generate(prompt, greedy)[0].outputs[0].token_ids for prompt in prompts]
        assert together == alone
        assert llm.stats().num_compiles == 0
        config = runner.model_config
        assert runner.kv_dtype == jnp.float8_e4m3fn
        cell = config.num_key_value_heads * config.head_dim  # a byte each
        assert runner.page_bytes == 2 * config.num_hidden_layers * 16 * cell
        pages = jax.tree.leaves(runner._state.kv)
        assert sum(page.nbytes for page in pages) == runner.num_pages * runner.page_bytes


def test_a_form_that_the_checkpoint_is_not_in_is_refused():
    plain = read_model_config(bundled_model())
    awq = ModelConfig.from_dict(
        RAW | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}
    )
    assert choose_quantization("int8", plain) == "int8"
    assert choose_quantization(None, awq) is None is choose_quantization("awq", awq)
    for asked, config in (("awq", plain), ("int8", awq), ("gptq", awq)):
        with pytest.raises(UnsupportedModel, match="quantization"):
            choose_quantization(asked, config)
    with pytest.raises(ValueError, match="quantization"):
        EngineConfig(quantization="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        EngineConfig(kv_cache_dtype="int8")  # pyright: ignore[reportArgumentType]


def test_fp8_pages_stay_addressable_on_a_gpu():
    fp8, page = jnp.dtype(jnp.float8_e4m3fn), 1 << 14
    assert addressable_pages(2**31 // page, page, fp8, "gpu") == 2**31 // page - 1
    assert addressable_pages(2**32 // page + 1, page, fp8, "gpu") == 2**32 // page + 1
    assert addressable_pages(2**31 // page, page, fp8, "cpu") == 2**31 // page
    assert addressable_pages(2**31 // page, page, jnp.dtype(jnp.bfloat16), "gpu") == 2**31 // page
