"""Transformers' own models and tokenizers of the two GGUF files, in float32.

This module is independent of jaxserve: gguf's reader gives the metadata and dequantized weights,
and the tokenizers are built as the tokenizer.json of each model spells them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AddedToken,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

Fields = dict[str, Any]
# llama.cpp's names of tensors, and Transformers'.
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NAMES = NAMES | {"ffn_norm": "post_attention_layernorm"}
GEMMA_NAMES = NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def metadata(reader: gguf.GGUFReader) -> Fields:
    """Return the metadata of a GGUF file by name."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_model(path: Path) -> Any:
    """Return Transformers' model with the file's weights, dequantized to float32."""
    reader = gguf.GGUFReader(path)
    found = metadata(reader)
    is_llama = found["general.architecture"] == "llama"
    with torch.device("meta"):  # no time goes into random weights that are replaced
        model: Any = _llama(found) if is_llama else _gemma(found)
    names = LLAMA_NAMES if is_llama else GEMMA_NAMES
    state = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        layer, name = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name).groups()  # type: ignore[union-attr]
        if is_llama and name in ("attn_q", "attn_k"):
            values = _unturned(values, model.config.head_dim)
        if not is_llama and name.endswith("_norm"):
            values -= 1  # llama.cpp stores the factor, to which Transformers adds 1
        prefix = "model." if layer is None else f"model.layers.{layer}."
        state[f"{prefix}{names[name]}.weight"] = torch.from_numpy(values)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True, assign=True)
    # The file holds no buffers, and the device above left them without values.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if not is_llama:
        embed = model.model.embed_tokens
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale)
    return model.eval()


def round_frequencies_once(model: Any) -> None:
    """Replace Gemma's rotary frequencies with values computed in float64 and rounded to float32.

    Transformers computes them in float32, and some are an ulp away from these. At position 8,000
    an ulp of a fast pair's frequency turns it by 5e-4 of a radian.
    """
    size = model.config.head_dim
    for kind, fields in model.config.rope_parameters.items():
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        frequencies = getattr(model.model.rotary_emb, f"{kind}_inv_freq")
        frequencies.copy_(fields["rope_theta"] ** -exponents)


def _unturned(values: np.ndarray, head: int) -> np.ndarray:
    """Return rows [N * H, D] of pairs, llama.cpp's order, as Transformers has them: in halves."""
    pairs = values.reshape(-1, head // 2, 2, values.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _shared(found: Fields, kind: str) -> Fields:
    return {
        "vocab_size": len(found["tokenizer.ggml.tokens"]),
        "hidden_size": found[f"{kind}.embedding_length"],
        "intermediate_size": found[f"{kind}.feed_forward_length"],
        "num_hidden_layers": found[f"{kind}.block_count"],
        "num_attention_heads": found[f"{kind}.attention.head_count"],
        "num_key_value_heads": found[f"{kind}.attention.head_count_kv"],
        "max_position_embeddings": found[f"{kind}.context_length"],
        "rms_norm_eps": found[f"{kind}.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
    }


def _llama(found: Fields) -> Any:
    theta = found["llama.rope.freq_base"]
    rope = {"rope_type": "default", "rope_theta": theta}
    return LlamaForCausalLM(LlamaConfig(**_shared(found, "llama"), rope_parameters=rope))


def _gemma(found: Fields) -> Any:
    """Build Gemma 3 270M. Its model card has the order of windowed layers and their RoPE."""
    fields = _shared(found, "gemma3") | {
        "head_dim": found["gemma3.attention.key_length"],
        "query_pre_attn_scalar": found["gemma3.attention.key_length"],
        "sliding_window": found["gemma3.attention.sliding_window"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "default",
                "rope_theta": found["gemma3.rope.freq_base"],
            },
        },
        "layer_types": [
            "sliding_attention" if (index + 1) % 6 else "full_attention"
            for index in range(found["gemma3.block_count"])
        ],
    }
    return Gemma3ForCausalLM(Gemma3TextConfig(**fields))


def smollm2_tokenizer(path: Path) -> Any:
    """Return SmolLM2's tokenizer: vocabulary and template of the file, the rest as it is known.

    Its tokenizer.json splits digits one by one, then text as GPT-2 does.
    """
    found = metadata(gguf.GGUFReader(path))
    tokens = found["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in found["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    types = found["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [
            AddedToken(token, special=True)
            for token, kind in zip(tokens, types, strict=True)
            if kind == 3
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=found["tokenizer.chat_template"]
    )
