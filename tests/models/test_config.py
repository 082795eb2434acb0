"""config.json is read strictly: every field is either used or known not to matter."""

import json
import shlex
import time
from typing import Any

import pytest
import transformers

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Llama3Scaling, Rope, parse_model_config, read_model_config
from jaxserve.models.config.model_config import NEUTRAL
from jaxserve.models.config.rope import LinearScaling, YarnScaling
from jaxserve.models.registry import ARCHITECTURES, FAMILIES, GGUF_RULES
from jaxserve.settings.overrides import overridden
from tests.models.cases import FULL, LLAMA3_SCALING, LONGROPE, SLIDING, YARN

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
SCALING = {key: value for key, value in LLAMA3_SCALING.items() if key != "rope_theta"}


def test_no_two_families_declare_the_same_architecture():
    declared = [name for family in FAMILIES for name in family.architectures]
    assert declared == list(ARCHITECTURES)
    assert [name for family in FAMILIES for name in family.gguf] == list(GGUF_RULES)


def test_gguf_files_are_read_as_architectures_that_exist():
    assert {rules.name for rules in GGUF_RULES.values()} <= ARCHITECTURES.keys()


# Architectures whose configuration in Transformers is that of the text in a wrapper.
TEXTS = (
    "Gemma3",
    "Gemma4",
    "Gemma4Unified",
    "Qwen3_5",
    "Qwen3_5Moe",
    "MuseGlimmer",
    "Glm4v",
    "Glm4vMoe",
)
# Required settings of latent attention and experts.
NEEDED = {
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 16},
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 32, "num_experts_per_tok": 2},
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "Mamba2ForCausalLM": {"num_key_value_heads": None},
    "OlmoHybridForCausalLM": {"num_key_value_heads": 30},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 128},
    "SarvamMLAForCausalLM": {"num_key_value_heads": 64},
    "Gemma4ForCausalLM": {"vocab_size_per_layer_input": 300_000},
    "Glm4MoeLiteForCausalLM": {"num_key_value_heads": 20},
    "Mistral4ForCausalLM": {"num_key_value_heads": 32},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "NanoChatForCausalLM": {"num_key_value_heads": 6},
    "Glm4vMoeForCausalLM": {"num_key_value_heads": 8, "num_attention_heads": 64},
    "Dots1ForCausalLM": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 32,
        "head_dim": 144,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_transformers_writes_is_read(architecture, tmp_path):
    """Reads the sizes that Transformers fills in, except fields that belong to one model only."""
    name = architecture.removesuffix("ForCausalLM")
    name += "Text" if name in TEXTS else ""
    needed = {"num_key_value_heads": 4} | NEEDED.get(architecture, {})
    written = getattr(transformers, f"{name}Config")(
        architectures=[architecture], dtype="bfloat16", vocab_size=300_000, **needed
    )
    written.save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    assert config.architecture == architecture
    for field in ("hidden_size", "num_hidden_layers", "tie_word_embeddings"):
        assert getattr(config, field) == getattr(written, field, False)
    assert config.rms_norm_eps == getattr(written, ARCHITECTURES[architecture].config.norm_eps)
    assert config.dtype == "bfloat16"
    if config.local_rope is None and any(config.layers.rotary):
        assert config.rope.theta == written.rope_parameters["rope_theta"]
        scaled = written.rope_parameters["rope_type"] != "default"
        assert (config.rope.scaling is not None) == scaled
    sliding = [window is not None for window in config.layers.windows]
    if getattr(written, "layer_types", None) is not None:
        assert sliding == [kind == "sliding_attention" for kind in written.layer_types]


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500.0, "rope_scaling": SCALING},
        {"rope_theta": 500.0, "rope_scaling": SCALING | {"type": "llama3"}},
        {"rope_theta": 500, "rope_scaling": {"type": "llama3"} | SCALING},
        {"rope_theta": None, "rope_parameters": LLAMA3_SCALING},
        {"rope_theta": 500.0, "rope_parameters": LLAMA3_SCALING | {"partial_rotary_factor": 1.0}},
    ],
)
def test_both_spellings_of_rope_mean_the_same(change):
    want = Rope(500.0, Llama3Scaling(8.0, 1.0, 4.0, 16))
    assert parse_model_config(LLAMA | change).rope == want


def older_kinds():
    """Return every kind of scaling, in the older spelling."""
    return [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 1.5},
        YARN | {"rope_theta": None},
        LONGROPE | {"rope_theta": None, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        SCALING,
    ]


@pytest.mark.parametrize("scaling", older_kinds(), ids=lambda scaling: scaling["rope_type"])
def test_every_kind_means_the_same_in_both_spellings(scaling):
    older = {"rope_theta": 500.0, "rope_scaling": scaling}
    newer = {"rope_theta": None, "rope_parameters": scaling | {"rope_theta": 500.0}}
    rope = parse_model_config(LLAMA | older).rope
    assert rope.theta == 500.0 and rope.scaling is not None
    assert parse_model_config(LLAMA | newer).rope == rope


def test_defaults():
    without = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    config = parse_model_config(without | {"num_key_value_heads": None, "eos_token_id": [2, 5]})
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert (config.rope, config.dtype) == (Rope(10000.0), "float32")
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 5), 1)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    none = parse_model_config(LLAMA | {"eos_token_id": None, "bos_token_id": None})
    assert (none.eos_token_ids, none.bos_token_id) == ((), None)


CYCLIC: dict[str, Any] = {"rope_type": "llama3"}
CYCLIC["itself"] = CYCLIC
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]

BAD_FIELDS = [
    ("hidden_size", -1),
    ("hidden_size", 0),
    ("hidden_size", 1 << 40),
    ("hidden_size", 10**5000),
    ("hidden_size", "4096"),
    ("hidden_size", True),
    ("hidden_size", 32.0),
    ("hidden_size", None),
    ("hidden_size", 34),  # no multiple of 4 heads, and no head_dim
    ("intermediate_size", 1 << 30),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 0),
    ("num_attention_heads", 1 << 20),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 8),
    ("head_dim", 7),
    ("head_dim", 1 << 20),
    ("vocab_size", 1 << 40),
    ("max_position_embeddings", 10**12),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("rms_norm_eps", "1e-5"),
    ("hidden_act", "gelu"),
    ("tie_word_embeddings", "false"),
    ("tie_word_embeddings", 0),
    ("attention_bias", 1),
    ("mlp_bias", "yes"),
    ("pretraining_tp", 2),
    ("sliding_window", 4096),
    ("quantization_config", {"quant_method": "bitsandbytes"}),
    ("quantization_config", {"quant_method": "fp8", "fmt": "e5m2"}),
    ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128]}),
    ("quantization_config", {"quant_method": "fp8", "scale_fmt": "e4m3"}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 64, "exllama": 1}),
    ("quantization_config", {"quant_method": "fp8", "unheard_of": 1}),
    ("quantization_config", {"quant_method": "awq", "bits": 3, "group_size": 128}),
    ("quantization_config", {"quant_method": "awq", "bits": 4, "group_size": 0}),
    ("quantization_config", {"quant_method": "awq", "bits": 4, "version": "gemv_fast"}),
    ("quantization_config", {"quant_method": "gptq", "bits": 3, "group_size": 128}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4, "group_size": 64, "lm_head": True}),
    ("quantization_config", {"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}),
    ("quantization_config", {"quant_method": "compressed-tensors", "format": "pack-quantized"}),
    ("quantization_config", {"quant_method": "hqq"}),
    ("quantization_config", "fp8"),
    ("is_encoder_decoder", True),
    ("model_type", "mistral"),
    ("torch_dtype", "int8"),
    ("dtype", "float32"),  # disagrees with torch_dtype
    ("eos_token_id", 96),
    ("eos_token_id", -1),
    ("eos_token_id", [1, 96]),
    ("eos_token_id", [True]),
    ("eos_token_id", "</s>"),
    ("eos_token_id", list(range(96)) * 100),
    ("bos_token_id", 96),
    ("layer_types", ["sliding_attention"] * 2),
    ("layer_types", ["full_attention"]),
    ("rope_theta", 0),
    ("rope_theta", float("inf")),
    ("rope_theta", 10**5000),
    ("rope_scaling", "linear"),
    ("rope_scaling", {}),
    ("rope_scaling", {"rope_type": "ntk", "factor": 2.0}),
    ("rope_scaling", {"rope_type": "yarn"}),
    ("rope_scaling", YARN | {"beta_fast": 0.1}),
    ("rope_scaling", YARN | {"attention_factor": "1"}),
    ("rope_scaling", YARN | {"mscale": -1.0}),
    ("rope_scaling", YARN | {"truncate": 1}),
    ("rope_scaling", YARN | {"low_freq_factor": 1.0}),
    ("rope_scaling", {"rope_type": "linear"}),
    ("rope_scaling", {"rope_type": "linear", "factor": 0.5}),
    ("rope_scaling", {"rope_type": "dynamic", "factor": float("inf")}),
    ("rope_scaling", LONGROPE),  # for another number of pairs
    ("rope_scaling", LONGROPE | {"long_factor": [1.0, 1.0, 1.0, "1"], "short_factor": [1.0] * 4}),
    ("rope_scaling", LONGROPE | {"short_factor": [1.0, 1.0, 0.0, 1.0], "long_factor": [1.0] * 4}),
    ("partial_rotary_factor", 0.5),  # no field of Llama
    ("rope_scaling", SCALING | {"type": "default"}),
    ("rope_scaling", {"rope_type": "llama3"}),
    ("rope_scaling", SCALING | {"factor": 0.5}),
    ("rope_scaling", SCALING | {"factor": None}),
    ("rope_scaling", SCALING | {"high_freq_factor": 1.0}),
    ("rope_scaling", SCALING | {"low_freq_factor": -1.0}),
    ("rope_scaling", SCALING | {"original_max_position_embeddings": 16.0}),
    ("rope_scaling", SCALING | {"beta_fast": 32}),
    ("rope_scaling", SCALING | {"partial_rotary_factor": 0.5}),
    ("rope_scaling", CYCLIC),
    ("rope_scaling", DEEP),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5.0}),
    ("attention_multiplier", 0.1),
    ("sliding_window_pattern", 2),  # no field of Llama
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=lambda v: str(type(v).__name__)[:20])
def test_a_bad_field_is_refused_by_name(field, value):
    started = time.process_time()
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(LLAMA | {field: value}, "some/config.json")
    assert field in str(caught.value) or field == "dtype"
    assert "some/config.json" in str(caught.value) and "allowed" in str(caught.value)
    assert len(str(caught.value)) < 2000
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head_dim", None),
        ("num_key_value_heads", None),
        ("use_sliding_window", True),
        ("mlp_bias", True),
        ("model_type", "llama"),
    ],
)
def test_a_bad_field_of_qwen3_is_refused(field, value):
    parse_model_config(QWEN3)
    with pytest.raises(UnsupportedModel, match=field.removeprefix("use_")):
        parse_model_config(QWEN3 | {field: value})


OLMO3 = LLAMA | {
    "architectures": ["Olmo3ForCausalLM"],
    "model_type": "olmo3",
    "sliding_window": 8,
    "rope_theta": 500.0,
}
GEMMA3 = OLMO3 | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
}
MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS = MIXTRAL | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 8,
    "sliding_window": 8,
    "attention_bias": True,
    "rope_scaling": YARN | {"rope_theta": None},
    "rope_theta": 500.0,
}
DEEPSEEK = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
SMOLLM3 = LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
MINISTRAL3 = MISTRAL | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
MINISTRAL3 |= {"head_dim": 8, "sliding_window": None, "rope_theta": 500.0}
COHERE = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {
    "architectures": ["CohereForCausalLM"],
    "model_type": "cohere",
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
}
COHERE2 = COHERE | {
    "architectures": ["Cohere2ForCausalLM"],
    "model_type": "cohere2",
    "sliding_window": 8,
}
DEFAULT = {"rope_type": "default"}
LINEAR_FACTORS = {"type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("raw", "change", "named"),
    [
        (MISTRAL, {}, "sliding_window missing"),
        (MISTRAL, {"sliding_window": 0}, "sliding_window is 0"),
        (MISTRAL, {"sliding_window": 4, "layer_types": ["full_attention"] * 2}, "layer_types"),
        (MISTRAL, {"sliding_window": 4, "num_key_value_heads": None}, "num_key_value_heads"),
        (MISTRAL, {"sliding_window": 4, "attention_bias": True}, "attention_bias"),
        (MIXTRAL, {"num_local_experts": None}, "num_local_experts"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL, {"num_local_experts": 1 << 20}, "num_local_experts"),
        (QWEN3_MOE, {"num_local_experts": 7}, "num_local_experts is 7"),
        (QWEN3_MOE, {"mlp_only_layers": [2]}, "mlp_only_layers"),
        (QWEN3_MOE, {"mlp_only_layers": 0}, "mlp_only_layers"),
        (QWEN3_MOE, {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (GPT_OSS, {"rope_scaling": None}, "rope_parameters"),
        (GPT_OSS, {"attention_bias": None}, "attention_bias"),
        (GPT_OSS, {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        (GPT_OSS, {"quantization_config": {"quant_method": "mxfp4"}}, "multiple of 32"),
        (DEEPSEEK, {"n_group": 3}, "n_group"),
        (DEEPSEEK, {"n_group": 8, "topk_group": 4}, "n_group"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group"),
        (DEEPSEEK, {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        (DEEPSEEK, {"head_dim": 20}, "head_dim"),
        (DEEPSEEK, {"qk_head_dim": 8}, "qk_head_dim"),
        (DEEPSEEK, {"num_key_value_heads": 1}, "num_key_value_heads"),
        (DEEPSEEK, {"qk_rope_head_dim": 7}, "whole pairs"),
        (OLMO3, {"sliding_window": None}, "sliding_window"),
        (OLMO3, {"layer_types": "full_attention"}, "layer_types"),
        (OLMO3, {"layer_types": [[], {}]}, "layer_types"),
        (OLMO3, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "sliding_att"),
        (GEMMA3, {"rope_parameters": {FULL: DEFAULT, SLIDING: {"rope_type": "yarn"}}}, "sliding"),
        (MINISTRAL3, {"rope_parameters": YARN}, "llama_4_scaling_beta missing"),
        (
            MINISTRAL3,
            {"rope_parameters": YARN | {"llama_4_scaling_beta": -1}},
            "beta is -1",
        ),
        (GEMMA3, {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (GEMMA3, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (GEMMA3, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3, {"final_logit_softcapping": 0}, "final_logit_softcapping"),
        (GEMMA3, {"hidden_act": "silu"}, "hidden_act"),
        (GEMMA3, {"hidden_activation": "gelu"}, "hidden_activation"),
        (PHI3, {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.75}, "original_max_position"),
        (PHI3, {"rope_scaling": LINEAR_FACTORS}, "linear"),
        (PHI3, {"partial_rotary_factor": 0.1}, "head_dim"),
        (PHI3, {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (PHI3, {"lm_head_bias": True}, "lm_head_bias"),
        (COHERE, {"layer_norm_eps": None}, "layer_norm_eps"),
        (COHERE, {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        (COHERE, {"logit_scale": None}, "logit_scale"),
        (COHERE, {"use_qk_norm": 1}, "use_qk_norm"),
        (COHERE, {"model_max_length": 0}, "model_max_length"),
        (COHERE, {"sliding_window": 8}, "sliding_window"),
        (COHERE2, {"sliding_window": None}, "sliding_window"),
        (COHERE2, {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        (COHERE2, {"use_qk_norm": True}, "use_qk_norm"),
        (COHERE2, {"use_parallel_block": False}, "use_parallel_block"),
        (COHERE2, {"use_embedding_sharing": False}, "use_embedding_sharing"),
        (COHERE2, {"use_gated_activation": False}, "use_gated_activation"),
        (COHERE2, {"rotary_pct": 0.5}, "rotary_pct"),
        (COHERE2, {"position_embedding_type": "rope_neox"}, "position_embedding_type"),
        (COHERE2, {"order_of_interleaved_layers": "global_attn_first"}, "order_of_interleaved"),
        (SMOLLM3, {"no_rope_layers": [1]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layers": [1, 2]}, "no_rope_layers"),
        (SMOLLM3, {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
)
def test_a_bad_field_of_a_family_is_refused(raw, change, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse_model_config(raw | change)


def test_what_changes_nothing_is_left_aside():
    """Code that ships with a checkpoint is not run; settings of other loaders have no effect."""
    code = {"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}
    assert parse_model_config(LLAMA | code) == parse_model_config(LLAMA)
    stored = {"quant_method": "gptq", "bits": 4, "group_size": 64}
    settings = {"disable_exllama": True, "dataset": "c4", "model_seqlen": 2048}
    plain, other = (
        parse_model_config(LLAMA | {"quantization_config": each})
        for each in (stored, stored | settings)
    )
    assert plain == other and plain.quantization is not None


# What `PretrainedConfig.to_dict` of Transformers 4.31 and 4.57 holds, but for fields that are read:
# by the field, the values that files are known to hold.
PRETRAINED: dict[str, list[Any]] = {
    "_attn_implementation": ["sdpa", "eager", None],
    "_attn_implementation_autoset": [True],
    "_attn_implementation_internal": ["flash_attention_2"],
    "_commit_hash": ["0" * 40],
    "_flash_attn_2_enabled": [True],
    "_name_or_path": ["org/name", ""],
    "_output_attentions": [False],
    "add_cross_attention": [False, None],
    "attn_implementation": ["flash_attention_2"],
    "bad_words_ids": [None, [[3]]],
    "begin_suppress_tokens": [None, [1]],
    "chunk_size_feed_forward": [0],
    "cross_attention_hidden_size": [None, 64],
    "decoder_start_token_id": [None, 1],
    "diversity_penalty": [0.0],
    "do_sample": [False, True],
    "early_stopping": [False, "never"],
    "encoder_no_repeat_ngram_size": [0],
    "exponential_decay_length_penalty": [None, [5, 1.1]],
    "finetuning_task": [None],
    "forced_bos_token_id": [None],
    "forced_eos_token_id": [None, 2],
    "gradient_checkpointing": [False, True],
    "id2label": [{"0": "LABEL_0", "1": "LABEL_1"}],
    "is_decoder": [False, True],
    "is_encoder_decoder": [False, None],
    "label2id": [{"LABEL_0": 0, "LABEL_1": 1}],
    "length_penalty": [1.0],
    "max_length": [20],
    "min_length": [0],
    "name_or_path": ["org/name"],
    "no_repeat_ngram_size": [0, 3],
    "num_beam_groups": [1],
    "num_beams": [1, 4],
    "num_labels": [2],
    "num_return_sequences": [1],
    "output_attentions": [False],
    "output_hidden_states": [False],
    "output_past": [True],
    "output_scores": [False],
    "pad_token_id": [None, -1, 0],
    "prefix": [None, ""],
    "problem_type": [None],
    "pruned_heads": [{}, None],
    "remove_invalid_values": [False],
    "repetition_penalty": [1.0, 1.1],
    "return_dict": [True],
    "return_dict_in_generate": [False],
    "sep_token_id": [None],
    "suppress_tokens": [None],
    "task_specific_params": [None, {"text-generation": {"max_length": 50}}],
    "temperature": [1.0, 0.6],
    "tf_legacy_loss": [False],
    "tie_encoder_decoder": [False],
    "tokenizer_class": [None, "LlamaTokenizer"],
    "top_k": [50],
    "top_p": [1.0],
    "torchscript": [False],
    "transformers_version": ["4.31.0"],
    "typical_p": [1.0],
    "use_bfloat16": [False],
    "use_cache": [True],
    "xla_device": [None, True],
}
WHOLE = {"partial_rotary_factor": [1.0, 1, None], "neftune_noise_alpha": [None, 5.0]}


@pytest.mark.parametrize("field", PRETRAINED | WHOLE)
def test_a_field_of_transformers_4_is_read_and_changes_nothing(field):
    """In each family, and in the text of wrappers, nested and flat."""
    flat = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    families = [LLAMA, QWEN3, QWEN3_MOE, GEMMA3, GPT_OSS, DEEPSEEK, PHI3, COHERE2, QWEN2 | flat]
    for raw in families:
        want = parse_model_config(raw)
        for value in (PRETRAINED | WHOLE)[field]:
            assert parse_model_config(raw | {field: value}) == want, (raw["model_type"], value)
    wrapper = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    want = parse_model_config(wrapper | {"text_config": LLAMA})
    for value in (PRETRAINED | WHOLE)[field]:
        nested = wrapper | {"text_config": LLAMA | {field: value}}
        assert parse_model_config(nested) == want, value


def test_every_setting_of_generation_is_known():
    """The library takes these settings out of a config.json."""
    settings = transformers.GenerationConfig._get_default_generation_params()
    assert parse_model_config(LLAMA | settings) == parse_model_config(LLAMA)


@pytest.mark.parametrize("raw", [LLAMA, QWEN3, GEMMA3, GPT_OSS, PHI3, COHERE2], ids=str)
def test_null_is_absent(raw):
    """Checks an unknown field, and one for which a single value is computed."""
    want = parse_model_config(raw)
    rules = ARCHITECTURES[raw["architectures"][0]].config
    neutral = {**NEUTRAL, **rules.neutral}.keys() - raw.keys()
    for field in ["unheard_of", "quantization_config", *neutral]:
        assert parse_model_config(raw | {field: None}) == want, field
    scaling = {"rope_type": "linear", "factor": 2.0}
    scaled = LLAMA | {"rope_scaling": scaling}
    other = LLAMA | {"rope_scaling": scaling | {"unheard_of": None, "partial_rotary_factor": None}}
    assert parse_model_config(scaled) == parse_model_config(other)


@pytest.mark.parametrize("raw", [LLAMA, QWEN3, OLMO3, GEMMA3, MIXTRAL, QWEN3_MOE, GPT_OSS], ids=str)
def test_null_is_absent_for_every_field(raw):
    """Both give the same result or are both refused, except for a window, where null is a size."""

    def parsed(fields: dict[str, Any]) -> Any:
        try:
            return parse_model_config(fields)
        except UnsupportedModel:
            return None

    for field in raw.keys() - {"sliding_window"}:
        absent = {name: value for name, value in raw.items() if name != field}
        assert parsed(absent) == parsed(raw | {field: None}), field


def test_null_under_one_name_of_a_field_leaves_the_other():
    exaone = {"architectures": ["ExaoneForCausalLM"], "model_type": "exaone"}
    plain = LLAMA | exaone
    named = {key: value for key, value in plain.items() if key != "num_hidden_layers"}
    want = parse_model_config(plain)
    assert parse_model_config(named | {"num_layers": 2, "num_hidden_layers": None}) == want
    assert parse_model_config(plain | {"num_layers": None}) == want
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        parse_model_config(plain | {"num_layers": 3})


def test_unknown_fields_are_named_together_with_the_option_that_leaves_them_out():
    unknown = {"b_factor": 0.5, "a'b": [1], "c": {"d": 2}, "e": None}
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(LLAMA | unknown)
    (line,) = str(caught.value).splitlines()[1:]
    assert all(f"{name} is {unknown[name]}" in line for name in ("b_factor", "a'b", "c"))
    words = shlex.split(line[line.index("--hf-overrides") :])
    fields = json.loads(words[1])
    assert fields == {"b_factor": None, "a'b": None, "c": None}
    want = parse_model_config(LLAMA)
    assert parse_model_config(overridden(LLAMA | unknown, words[1])) == want


def test_unknown_fields_of_a_nested_model_are_left_out_by_the_option_too():
    outer = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}
    raw = outer | {"text_config": LLAMA | {"unheard_of": 1}}
    with pytest.raises(UnsupportedModel, match=r"text_config\.unheard_of is 1") as caught:
        parse_model_config(raw)
    option = shlex.split(str(caught.value).partition("--hf-overrides ")[2])[0]
    want = parse_model_config(outer | {"text_config": LLAMA})
    assert parse_model_config(overridden(raw, option)) == want


def test_a_thousand_unknown_fields_make_a_short_message():
    many = {f"field_{index:04}_" + "x" * 500: "y" * 500 for index in range(1000)}
    with pytest.raises(UnsupportedModel, match=r"field_0000.*field_0019.*980 more") as caught:
        parse_model_config(LLAMA | many)
    assert len(str(caught.value)) < 20_000


def test_an_unknown_field_of_an_object_that_is_replaced_whole_is_named():
    scaling = {"rope_type": "linear", "factor": 2.0, "unheard_of": 1, "also": 2}
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(LLAMA | {"rope_scaling": scaling})
    (line,) = str(caught.value).splitlines()[1:]
    assert "rope_scaling.also is 2, rope_scaling.unheard_of is 1" in line
    assert "--hf-overrides can replace rope_scaling as a whole" in line


def test_older_spellings_mean_what_they_meant():
    """Gemma 3 and OLMo 3 scale the layers without a window, and Phi-3 called LongRoPE "su"."""
    gemma = parse_model_config(
        GEMMA3 | {"rope_scaling": LINEAR_FACTORS, "rope_local_base_freq": 20.0}
    )
    assert (gemma.rope, gemma.local_rope) == (Rope(500.0, LinearScaling(2.0)), Rope(20.0))
    assert parse_model_config(GEMMA3).local_rope == Rope(10_000.0)
    olmo = parse_model_config(OLMO3 | {"rope_scaling": YARN | {"rope_theta": None}})
    assert isinstance(olmo.rope.scaling, YarnScaling) and olmo.local_rope == Rope(500.0)
    assert olmo.layers.windows == (8, 8)
    factors = {key: LONGROPE[key] for key in ("short_factor", "long_factor")}
    outside = {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32}
    old = parse_model_config(PHI3 | outside | {"rope_scaling": {"type": "su"} | factors})
    inside = LONGROPE | {"rope_theta": 1e4, "partial_rotary_factor": 0.75}
    new = parse_model_config(PHI3 | outside | {"rope_parameters": inside})
    assert old.rope == new.rope and old.rope.dimensions(8) == 6


def test_windows_of_cohere_2_alone_rotate():
    """In both spellings. Every fourth layer has no window if config.json does not set one."""
    raw = COHERE2 | {"num_hidden_layers": 5}
    plain = parse_model_config(raw)
    assert plain.layers.windows == (8, 8, 8, None, 8)
    assert plain.layers.rotary == (True, True, True, False, True)
    two = parse_model_config(raw | {"sliding_window_pattern": 2})
    kinds = [SLIDING, FULL, SLIDING, FULL, SLIDING]
    assert two == parse_model_config(raw | {"layer_types": kinds, "sliding_window_pattern": 3})
    assert [two.rope_of(layer) is None for layer in range(5)] == [False, True, False, True, False]


def test_spellings_of_experts_mean_the_same():
    want = parse_model_config(QWEN3_MOE).experts
    other = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert parse_model_config(other | {"num_local_experts": 8}).experts == want
    for raw in (MIXTRAL, GPT_OSS, DEEPSEEK):
        assert parse_model_config(raw).experts is not None
    config = parse_model_config(DEEPSEEK)
    assert (config.head_dim, config.rotary_dim, config.num_key_value_heads) == (24, 8, 4)


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 256),
        (SCALING, 256),
        ({"type": "linear", "factor": 2.0}, 512),
        ({"type": "dynamic", "factor": 1.5}, 384),
        ({"type": "yarn", "factor": 2.0}, 512),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 256),
        ({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 32}, 512),
    ],
)
def test_a_scaled_embedding_reaches_further(scaling, length):
    raw = LLAMA | {"rope_theta": 500.0, "rope_scaling": scaling}
    assert parse_model_config(raw).context_length == length


def test_all_bad_fields_are_listed_at_once():
    bad = {"hidden_size": -1, "vocab_size": "x", "quantization_config": {}, "unheard_of": 1}
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(LLAMA | bad)
    assert all(field in str(caught.value) for field in bad)
    assert "4 field(s)" in str(caught.value) or "5 field(s)" in str(caught.value)


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [3], {}, 5, [None]])
def test_architectures_are_a_list_of_names(names):
    with pytest.raises(UnsupportedModel, match=r"architectures is .*; allowed: a list of names"):
        parse_model_config(LLAMA | {"architectures": names})


def test_model_type_decides_where_no_architecture_does():
    """The first supported architecture of several decides, as in vLLM."""
    want = parse_model_config(LLAMA)
    absent = {key: value for key, value in LLAMA.items() if key != "architectures"}
    for raw in (absent, LLAMA | {"architectures": []}, LLAMA | {"architectures": None}):
        assert parse_model_config(raw) == want
    for names in (["LlamaForCausalLM"] * 2, ["MyModel", "LlamaForCausalLM", "GPT2LMHeadModel"]):
        assert parse_model_config(LLAMA | {"architectures": names}) == want
    for kind in (None, "gpt2", 3):
        with pytest.raises(UnsupportedModel, match="architectures is missing, and model_type is"):
            parse_model_config(absent | {"model_type": kind})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("LlamaModel", "base class, which gives embeddings"),
        ("LlamaForSequenceClassification", "it classifies"),
        ("LlamaForTokenClassification", "it classifies"),
        ("LlamaForRewardModel", "it gives rewards"),
    ],
)
def test_a_class_without_next_tokens_says_what_to_do(name, what):
    said = rf"{name}.*{what}.*--hf-overrides '{{\"architectures\": \[\"LlamaForCausalLM\"\]}}'"
    with pytest.raises(UnsupportedModel, match=said):
        parse_model_config(LLAMA | {"architectures": [name]})


ALIASES = [
    ("InternLM3ForCausalLM", "internlm3", {"bias": False, "qkv_bias": False}, LLAMA),
    ("IQuestCoderForCausalLM", "iquestcoder", {"clip_qkv": None, "max_window_layers": 0}, LLAMA),
    ("LLaMAForCausalLM", "llama", {}, LLAMA),
    ("DeepseekV3ForCausalLM", "kimi_k2", {}, DEEPSEEK),
]


@pytest.mark.parametrize(("name", "kind", "own", "raw"), ALIASES)
def test_other_names_of_the_same_code(name, kind, own, raw):
    want = parse_model_config(raw)
    other = {"architectures": [name], "model_type": kind}
    assert parse_model_config(raw | own | other) == want
    assert parse_model_config(raw | own | {"architectures": None, "model_type": kind}) == want


@pytest.mark.parametrize(
    "field", [{"bias": True}, {"qkv_bias": True}, {"clip_qkv": 8.0}, {"use_sliding_window": True}]
)
def test_what_an_alias_could_say_and_is_not_computed(field):
    with pytest.raises(UnsupportedModel, match=next(iter(field))):
        parse_model_config(LLAMA | {"model_type": "internlm3"} | field)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe{}",
        b'{"hidden_size": 1, "hidden_size": 2}',
        b'{"rms_norm_eps": NaN}',
        b'{"rms_norm_eps": -Infinity}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a": "' + b"x" * (1 << 20) + b'"}',
    ],
)
def test_a_malformed_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_model_config(tmp_path)


def test_an_infinite_number_in_a_file_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA).replace("1e-05", "1e999"))
    with pytest.raises(UnsupportedModel, match="rms_norm_eps is not a finite number"):
        read_model_config(tmp_path)


def test_layers_may_all_have_states_but_not_all_an_mlp():
    mamba = transformers.Mamba2Config(architectures=["Mamba2ForCausalLM"]).to_dict()
    config = parse_model_config(mamba)
    assert (config.num_page_layers, config.num_state_layers) == (0, 64)
    assert config.context_length == 1 << 20
    assert parse_model_config(mamba | {"max_position_embeddings": 64}).context_length == 64
    bamba = transformers.BambaConfig(architectures=["BambaForCausalLM"]).to_dict()
    assert parse_model_config(bamba).num_page_layers == 0
    assert parse_model_config(bamba | {"attn_layer_indices": [3]}).num_page_layers == 1
    mlps: dict[str, Any] = {"hybrid_override_pattern": "---"}
    nemotron = transformers.NemotronHConfig(**mlps).to_dict()
    with pytest.raises(UnsupportedModel, match=r"1 field.*\n.*no layer has attention or a state"):
        parse_model_config(nemotron | {"architectures": ["NemotronHForCausalLM"]})
