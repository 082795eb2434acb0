# pyright: reportMissingImports=false
"""Tunix's modules of the random models in `families.py`, loaded by Tunix's own loaders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from transformers import AutoTokenizer
from tunix.models.gemma import model as gemma
from tunix.models.gemma import params_safetensors as gemma_params
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma3 import params_safetensors as gemma3_params
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen2 import params as qwen2_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl import common

import jaxserve
from tests.integrations.families import arrays_of, fields_of

DEMO = Path(jaxserve.__file__).parent / "demo_model"
LOCAL, GLOBAL = gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def write(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint with the tokenizer of the bundled model."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(DEMO / name, folder)
    (folder / "config.json").write_text(json.dumps(fields_of(family)))
    save_file(arrays_of(family, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def config_of(fields: dict[str, Any]) -> tuple[Any, Any]:
    """Return Tunix's configuration of a model, and the module with its loader."""
    sizes = {
        "num_layers": fields["num_hidden_layers"],
        "embed_dim": fields["hidden_size"],
        "hidden_dim": fields["intermediate_size"],
        "num_heads": fields["num_attention_heads"],
        "num_kv_heads": fields["num_key_value_heads"],
        "head_dim": fields["head_dim"],
    }
    plain = {
        **sizes,
        "vocab_size": fields["vocab_size"],
        "rope_theta": fields["rope_theta"],
        "norm_eps": fields["rms_norm_eps"],
    }
    tied = fields["tie_word_embeddings"]
    match fields["architectures"][0]:
        case "LlamaForCausalLM":
            return llama3.ModelConfig(**plain, weight_tying=tied), llama3_params
        case "Qwen2ForCausalLM":
            return qwen2.ModelConfig(**plain, use_tied_embedding=tied), qwen2_params
        case "Qwen3ForCausalLM":
            return qwen3.ModelConfig(**plain, use_tied_embedding=tied), qwen3_params
        case "Qwen3MoeForCausalLM":
            experts = {key: fields[key] for key in ("num_experts", "num_experts_per_tok")}
            plain["hidden_dim"] = fields["moe_intermediate_size"]
            return qwen3.ModelConfig(**plain, **experts, use_tied_embedding=tied), qwen3_params
        case "Gemma2ForCausalLM":
            sizes["num_embed"] = fields["vocab_size"]
            return gemma.ModelConfig(
                **sizes,
                final_logit_softcap=fields["final_logit_softcapping"],
                attn_logits_soft_cap=fields["attn_logit_softcapping"],
                use_post_attn_norm=True,
                use_post_ffw_norm=True,
                attention_types=(LOCAL, GLOBAL) * (fields["num_hidden_layers"] // 2),
                sliding_window_size=fields["sliding_window"],
            ), gemma_params
        case _:
            sizes["num_embed"] = fields["vocab_size"]
            return gemma3.ModelConfig(
                **sizes,
                sliding_window_size=fields["sliding_window"],
                local_base_frequency=int(fields["rope_local_base_freq"]),
                global_base_frequency=int(fields["rope_theta"]),
                param_dtype=jnp.float32,
            ), gemma3_params


def module_of(folder: Path, mesh: Any = None) -> Any:
    """Return Tunix's module of a checkpoint, in float32."""
    config, params = config_of(json.loads((folder / "config.json").read_text()))
    return params.create_model_from_safe_tensors(str(folder), config, mesh, jnp.float32)


def scores_of(module: nnx.Module, prompts: Any, completions: Any, pad_id: int) -> np.ndarray:
    """Return Tunix's own log-probabilities of completions, row by row without padding at the left.

    With such padding, the windows of its Gemma 2 cover other positions.
    """
    graph, state = nnx.split(module)
    rows: list[np.ndarray] = []
    for prompt, completion in zip(np.asarray(prompts), np.asarray(completions), strict=True):
        body = jnp.asarray(prompt[np.argmax(prompt != pad_id) :])[None]
        scores = common.compute_per_token_logps(
            graph, state, body, jnp.asarray(completion)[None], pad_id, 3
        )
        rows.append(np.asarray(scores)[0])
    return np.array(rows)
