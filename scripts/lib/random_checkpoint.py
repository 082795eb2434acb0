"""Random checkpoints as Hugging Face folders, written tensor by tensor, of any size."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from scripts.lib.model_shapes import COMMON, SHAPES

# Below are <unk>, <s>, </s> and room for tokens that engines treat as special.
FIRST_ORDINARY_ID = 16
SPECIAL = ("<unk>", "<s>", "</s>")
# Odd: rows, whose lengths are even, begin at another place of the block each.
BLOCK = (1 << 22) - 3
# By their names in files of safetensors.
DTYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}
NAMES = {np.dtype(dtype).name: name for name, dtype in DTYPES.items()}
Shape = tuple[int, ...]
# Names of LFM2's tensors in Transformers, by parts of the names that every family has.
LFM2_NAMES = {
    "model.norm.": "model.embedding_norm.",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
INTO_RESIDUAL = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "feed_forward.w2.weight")


def config_of(shape: str) -> dict[str, Any]:
    return COMMON | {"bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"} | SHAPES[shape]


def random_checkpoint(shape: str, folder: Path) -> Path:
    """Write a model in float32, which every engine reads or converts. Return its folder.

    The checkpoint is not written again where it is there already. Logits are of about unit size,
    so that answers do not repeat themselves.
    """
    folder, config = folder / f"{shape}-0", config_of(shape)
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 2, "do_sample": False})
    )
    _write_tokenizer(folder, config["vocab_size"])
    return write_checkpoint(config, folder, "float32")


def tensor_shapes(config: dict[str, Any]) -> dict[str, Shape]:
    """Return the shapes of the tensors of a config.json's model by name."""
    # Imported here: it imports JAX, for which some processes must be prepared first.
    from jaxserve.models import checkpoint_weights, parse_model_config
    from jaxserve.models.weight_table import dimensions

    parsed = parse_model_config(config)
    letters = dimensions(parsed)
    shapes = {weight.name: weight.shape(letters) for weight in checkpoint_weights(parsed)}
    if config["model_type"] == "lfm2":
        return {published(name): shape for name, shape in shapes.items()}
    return shapes


def published(name: str) -> str:
    """Return the name of an LFM2 tensor in its published checkpoints."""
    for part, replacement in LFM2_NAMES.items():
        name = name.replace(part, replacement)
    return name


def write_checkpoint(
    config: dict[str, Any], folder: Path, dtype: str, shard_bytes: float = math.inf
) -> Path:
    """Write config.json and the weights, without a tokenizer, unless they are there.

    Args:
        config: contents of the config.json, which is written last.
        folder: made if missing, and returned.
        dtype: "float32", "bfloat16" or "float16".
        shard_bytes: a file ends with the tensor with which it reaches this size.
    """
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Shape]] = [{}]
    size = 0
    for name, shape in tensor_shapes(config).items():
        if size >= shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += math.prod(shape) * np.dtype(dtype).itemsize
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{number:05}.safetensors" for number in range(1, len(shards) + 1)]
        pairs = zip(files, shards, strict=True)
        index = {"metadata": {}, "weight_map": {name: file for file, s in pairs for name in s}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    rng, depth = np.random.default_rng(0), (2 * config["num_hidden_layers"]) ** -0.5
    for file, shapes in zip(files, shards, strict=True):
        _write(folder / file, shapes, dtype, depth, rng)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def _write(
    path: Path, shapes: dict[str, Shape], dtype: str, depth: float, rng: np.random.Generator
) -> None:
    """Write a file in the format of safetensors. Tensors with one axis are ones.

    Matrices repeat one block of normal numbers: a program takes no longer with others, and drawing
    them would take longer than writing them. Every projection has variance 1 / inputs, as in
    `jaxserve.weights.random_weights`. Projections into the residual stream are scaled by `depth`.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    normal, ones = rng.standard_normal(BLOCK, np.float32), np.ones(BLOCK, np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            scale = depth if name.endswith(INTO_RESIDUAL) else 1.0
            block = ones if len(shape) == 1 else normal * (scale * shape[-1] ** -0.5)
            numbers = block.astype(dtype)
            place, left = int(rng.integers(BLOCK)), math.prod(shape)
            while left:
                part = numbers[place : place + left]
                file.write(part.view(np.uint8).data)
                place, left = 0, left - len(part)


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
