"""Conversion of a Hugging Face Llama or LFM2 with a word a token: write_gguf.py FOLDER FILE DTYPE.

Runs in llama.cpp's environment (packages gguf and safetensors).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
from safetensors import safe_open

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
# As llama.cpp's converter names them. The last norm is the embedding's there.
LFM2_NAMES = {
    "model.embedding_norm": "token_embd_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows of each head into pairs (i, i + half): llama.cpp's Llama rotates neighbours."""
    outputs, inputs = weight.shape
    return (
        weight.reshape(heads, 2, outputs // heads // 2, inputs)
        .swapaxes(1, 2)
        .reshape(outputs, inputs)
    )


def gguf_name(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    if parts[1] == "layers":
        return f"blk.{parts[2]}.{(NAMES | LFM2_NAMES)['.'.join(parts[3:])]}.weight"
    return f"{(NAMES | LFM2_NAMES)['.'.join(parts)]}.weight"


def mlp_size(config: dict) -> int:
    """Return the width of the MLP. LFM2's is two thirds of its field, rounded up."""
    if config["model_type"] != "lfm2":
        return config["intermediate_size"]
    multiple = config["block_multiple_of"]
    return -(-(2 * config["intermediate_size"] // 3) // multiple) * multiple


def heads_of_layers(config: dict) -> int | list[int]:
    """Return the number of heads of keys, by layer where some layers have no attention."""
    heads = config["num_key_value_heads"]
    if config["model_type"] != "lfm2":
        return heads
    attention = config["full_attn_idxs"]
    return [heads if index in attention else 0 for index in range(config["num_hidden_layers"])]


def add_fields(writer: gguf.GGUFWriter, config: dict) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(mlp_size(config))
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(heads_of_layers(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"] or config["norm_eps"])
    if config["model_type"] == "lfm2":
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def add_tokenizer(
    writer: gguf.GGUFWriter, words: list[str], kinds: Sequence[gguf.TokenType] = ()
) -> None:
    """Add a vocabulary, which begins with <unk>, <s> and </s>. `kinds` are of the words behind."""
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *kinds]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([*types, *[kind.NORMAL] * (len(words) - len(types))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    folder, path, dtype = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = json.loads((folder / "config.json").read_text())
    partial = path.with_suffix(".partial")
    is_llama = config["model_type"] == "llama"
    writer = gguf.GGUFWriter(partial, config["model_type"])
    types = gguf.LlamaFileType
    writer.add_file_type(types.ALL_F32 if dtype == "float32" else types.MOSTLY_BF16)
    add_fields(writer, config)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    add_tokenizer(writer, sorted(vocabulary, key=vocabulary.__getitem__))
    with safe_open(folder / "model.safetensors", "np") as tensors:
        for name in tensors.keys():  # noqa: SIM118 (not a dict)
            values = tensors.get_tensor(name)
            for projection, heads in (
                ("q_proj", config["num_attention_heads"]),
                ("k_proj", config["num_key_value_heads"]),
            ):
                if is_llama and projection in name:
                    values = interleaved(values, heads)
            if "conv.conv" in name:
                values = values[:, 0]
            kind = None
            if dtype == "bfloat16" and values.ndim > 1 and "conv.conv" not in name:
                kind = gguf.GGMLQuantizationType.BF16
                values = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), values, raw_dtype=kind)
    finish(writer)
    partial.rename(path)


if __name__ == "__main__":
    main()
