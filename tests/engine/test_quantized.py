"""Quantized weights and a cache in fp8 through the engine, and in its compiled programs."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.errors import UnsupportedModel
from jaxserve.execution.buckets import Bucket
from jaxserve.execution.state import addressable_pages
from jaxserve.models import parse_model_config, read_model_config
from jaxserve.settings.config import bundled_model
from jaxserve.start.plan.forms import choose_quantization
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.programs.store import ProgramStore
from jaxserve.start.programs.suppliers import Compiling
from jaxserve.weights import random_weights
from scripts.lib.placed_model import plan_of_model
from tests.weights.test_quantized import checkpoint

pytestmark = pytest.mark.own_engine

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
SMALLEST, LARGEST = (
    512 * 512,
    512 * 2 * 768,
)  # weights of the projection after attention, of gate_up
MATRICES = 512 * (16 * 64 + 512 + 3 * 768)
PLAIN_BYTES = 4 * (2 * 512 * 40 + 3 * 512)  # embedding, output projection and norms
BITS = {"int8": 8 + 32 / 512, "int4": 4 + 2 * 16 / 32}


def check_program(compiled: Any) -> None:
    """Check that no float array of the program is as large as a weight."""
    # Values inside a fusion are not buffers; all others are.
    text = re.sub(r"^%?fused_computation.*?^\}", "", compiled.as_text(), flags=re.M | re.S)
    sizes = [
        int(np.prod([int(size) for size in shape.split(",")]))
        for shape in re.findall(r"\b(?:f64|f32|bf16|f16)\[([\d,]+)\]", text)
    ]
    assert max(sizes) < SMALLEST, "a float array is as large as a weight"
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * LARGEST * 0.8


def compiled(plan: StartPlan, bucket: Bucket) -> Any:
    return Compiling(plan, ProgramStore(None, {}, {})).supply(bucket)


def test_a_step_of_one_row_holds_no_weight_in_full_precision():
    config = parse_model_config(RAW)
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=8)
    model = random_weights(config, np.float32, 0, "int8")
    plan = plan_of_model(settings.resolve("cpu", 64), config, model)
    check_program(compiled(plan, Bucket(1, 1, True, greedy=True)))
    assert 0 <= MATRICES * BITS["int8"] / 8 - (plan.weight_bytes - PLAIN_BYTES) < MATRICES / 16


@pytest.mark.parametrize(
    ("form", "bucket"), [(None, Bucket(16, 4, False)), ("int8", Bucket(4, 4, True))], ids=str
)
def test_every_product_on_cpu_is_told_how_many_rows_count(form: str | None, bucket: Bucket) -> None:
    config = parse_model_config(RAW)
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=8)
    model = random_weights(config, np.float32, 0, form, panels=True)
    plan = plan_of_model(settings.resolve("cpu", 64), config, model)
    text = compiled(plan, bucket).as_text()
    products = re.findall(r"custom-call\((.*?)\), custom_call_target=\"jaxserve_\w*product", text)
    # Buffers of attention, after it, gate and up, down; the logits, and the logits that score a
    # prompt.
    assert len(products) == (5 if bucket.decode_only else 6)
    counts = [operands.split(", ")[-1] for operands in products]
    assert not [count for count in counts if "constant" in count]


# Four experts, each matrix as large as the smallest one of a projection, and latent attention.
EXPERTS: dict[str, Any] = RAW | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 512,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}


def test_a_step_of_experts_and_latents_holds_no_weight_in_full_precision():
    config = parse_model_config(EXPERTS)
    settings = EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, num_gpu_blocks_override=8)
    model = random_weights(config, np.float32, 0, "int4")
    plan = plan_of_model(settings.resolve("cpu", 64), config, model)
    check_program(compiled(plan, Bucket(4, 4, True, greedy=True)))
    attention = 512 * (8 * 64 + 544 + 8 * 96 + 8 * 64)
    plain = PLAIN_BYTES + 4 * (512 + 512 * 4)  # norm of the latent, router
    one_expert = 3 * 512 * 512
    codes = (4 * one_expert * BITS["int4"] + (attention + one_expert) * 8.5) / 8
    assert abs(plan.weight_bytes - plain - codes) < codes / 100


@pytest.mark.parametrize(
    ("form", "dtype"), [(None, "bfloat16"), ("int4", "bfloat16"), (None, "float16")]
)
def test_a_launch_of_several_steps_copies_and_widens_no_expert(form: str | None, dtype: str):
    config = parse_model_config(EXPERTS)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    settings = EngineConfig(dtype=dtype, num_gpu_blocks_override=8, **sizes)
    model = random_weights(config, jnp.dtype(dtype), 0, form, panels=True)
    plan = plan_of_model(settings.resolve("cpu", 64), config, model)
    assert plan.buckets.num_steps == 16
    program = compiled(plan, Bucket(4, 4, True, num_steps=16))
    check_program(program)
    text, one_expert = program.as_text(), 512 * 512
    # Of the layer's experts two, of its shared one two.
    products = re.findall(r'custom_call_target="jaxserve_\w*product', text)
    assert len(products) >= 2 + 2 and program.memory_analysis().temp_size_in_bytes < one_expert


@pytest.mark.usefixtures("quick_sampler")
@pytest.mark.parametrize(
    ("cache", "dtype", "head"),  # bytes of a head: codes of 64 numbers, and a scale
    [("fp8", jnp.uint8, 64), ("int8_per_token_head", jnp.int8, 64 + 4)],
)
def test_requests_together_equal_each_alone_in_int4_over_8_bits(cache, dtype, head, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 40, n).tolist()} for n in (23, 5, 14)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    sizes |= {"decode_sizes": (4,), "token_sizes": (16,), "num_scheduler_steps": 1}
    sizes |= {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(tmp_path, quantization="int4", kv_cache_dtype=cache, **sizes) as llm:
        runner = llm._thread.engine.runner
        for program in runner._steps.values():
            check_program(program)
        filled_up = 4 * 512 * (64 - 40)  # the output projection's last panel
        assert runner.weight_bytes - PLAIN_BYTES - filled_up <= MATRICES * BITS["int4"] / 8
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
        alone = [llm.generate(prompt, greedy)[0].outputs[0].token_ids for prompt in prompts]
        assert together == alone
        assert llm.stats().num_compiles == 0
        page = runner.memory[0].bytes_per_unit
        assert page == 2 * 4 * head * 16  # keys and values, heads, tokens
        assert runner._state is not None
        pages = jax.tree.leaves(runner._state.kv)
        assert pages[0].dtype == dtype  # of fp8 the bits
        assert sum(page.nbytes for page in pages) == runner.num_pages * page


@pytest.mark.usefixtures("quick_sampler")
@pytest.mark.parametrize("form", ["w8a8", "nvfp4"])
def test_requests_to_a_stored_form_together_equal_each_alone(form, tmp_path):
    """Compares every log-probability to the bit; the plan has counted the memory of the weights."""
    folder, _ = checkpoint(tmp_path / "stored", form)
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(0, 24, n).tolist()} for n in (23, 5, 14)]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    sizes |= {"decode_sizes": (1, 4), "token_sizes": (16,), "skip_tokenizer_init": True}
    sizes |= {"num_scheduler_steps": 1}
    with LLM(folder, **sizes) as llm:
        runner = llm._thread.engine.runner
        assert llm._thread.engine.loaded.plan.weight_bytes == runner.weight_bytes
        together = [output.outputs[0] for output in llm.generate(prompts, greedy)]
        alone = [llm.generate(prompt, greedy)[0].outputs[0] for prompt in prompts]
        assert repr(together) == repr(alone)
        assert llm.stats().num_compiles == 0


def test_a_form_that_the_checkpoint_is_not_in_is_refused():
    plain = read_model_config(bundled_model())
    awq = parse_model_config(
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
