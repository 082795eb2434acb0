"""A random Llama as a Hugging Face folder, which every engine reads or converts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scripts.lib.model_shapes import COMMON, SHAPES

# Below are <unk>, <s>, </s> and room for tokens that engines treat as special.
FIRST_ORDINARY_ID = 16
SPECIAL = ("<unk>", "<s>", "</s>")


def config_of(shape: str) -> dict[str, Any]:
    return COMMON | {"bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"} | SHAPES[shape]


def random_checkpoint(shape: str, folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint unless it is there. Return its folder.

    Every projection has variance 1 / inputs. Projections into the residual stream are divided by
    their number, 2 * layers, as `jaxserve.weights.random_weights` draws them: logits of about unit
    size, and answers that do not repeat themselves.
    """
    folder = folder / f"{shape}-{seed}"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    )
    _write_tokenizer(folder, config["vocab_size"])
    partial = folder / "model.partial"
    save_file(_tensors(config, np.random.default_rng(seed)), partial, {"format": "pt"})
    partial.rename(folder / "model.safetensors")
    return folder


def _tensors(config: dict[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    width, mlp, layers = (
        config[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    depth = (2 * layers) ** -0.5

    def draw(outputs: int, inputs: int, scale: float = 1.0) -> np.ndarray:
        return rng.standard_normal((outputs, inputs), np.float32) * np.float32(scale * inputs**-0.5)

    tensors = {
        "model.embed_tokens.weight": draw(config["vocab_size"], width),
        "model.norm.weight": np.ones(width, np.float32),
    }
    for layer in range(layers):
        parts = {
            "self_attn.q_proj": draw(width, width),
            "self_attn.k_proj": draw(kv, width),
            "self_attn.v_proj": draw(kv, width),
            "self_attn.o_proj": draw(width, width, depth),
            "mlp.gate_proj": draw(mlp, width),
            "mlp.up_proj": draw(mlp, width),
            "mlp.down_proj": draw(width, mlp, depth),
            "input_layernorm": np.ones(width, np.float32),
            "post_attention_layernorm": np.ones(width, np.float32),
        }
        for name, tensor in parts.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    return tensors


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write a word for each id, `w` and its number, so that text shows which ids were drawn."""
    words = [*SPECIAL, *(f"▁w{number}" for number in range(len(SPECIAL), vocabulary))]
    tokenizer = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048} | named
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
