"""A GGUF file of random blocks in the shape of Llama 3.2 1B, for servers to be timed on.

Its vocabulary is a word a token, so its text has no meaning. Codes are random, and scales are those
of weights whose standard deviation is about 0.02.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from scripts.compare.write_gguf import add_fields, add_tokenizer, finish
from scripts.lib.model_shapes import COMMON, sizes

CONFIG = COMMON | sizes(
    16, 2048, 32, 8, 8192, vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0
)
HIDDEN, MLP, VOCAB = 2048, 8192, 128256
SIZE = 0.02
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 4, HIDDEN),
    "attn_v": (HIDDEN // 4, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (MLP, HIDDEN),
    "ffn_up": (MLP, HIDDEN),
    "ffn_down": (HIDDEN, MLP),
}
# Of the block: where its scale lies, and its minimum, as parts of `SIZE`. Sums of 6-bit scales and
# codes are about 32 times 8 in the mean.
FIELDS = {
    "Q4_0": {0: 1 / 4.6},
    "Q4_1": {0: 1 / 4.6, 2: -7.5 / 4.6},
    "Q8_0": {0: 1 / 74},
    "Q4_K": {0: 1 / 147, 2: 7.5 / 147},
    "Q6_K": {208: 1 / 1300},
}


def random_blocks(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Return a matrix [outputs, bytes of its rows]."""
    values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    rng = np.random.default_rng(seed)
    count = shape[1] // values
    blocks = rng.integers(0, 256, (shape[0], count, num_bytes), dtype=np.uint8)
    for start, factor in FIELDS[kind].items():
        steps = np.full((shape[0], count, 1), SIZE * factor, np.float16)
        blocks[..., start : start + 2] = steps.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write_random(path: Path, kind: str) -> None:
    """Write the file, its matrices in blocks of a kind, and the embedding in Q8_0 or Q6_K."""
    writer = gguf.GGUFWriter(path, "llama")
    add_fields(writer, CONFIG)
    # After the tokens that llama.cpp expects: unknown, begin, end, and every byte.
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    first = ["<unk>", "<s>", "</s>", *bytes_]
    words = [f"\u2581w{number}" for number in range(VOCAB - len(first))]
    add_tokenizer(writer, [*first, *words], [gguf.TokenType.BYTE] * len(bytes_))
    embedding = "Q6_K" if kind.endswith("_K") else "Q8_0"
    _add(writer, "token_embd", embedding, (VOCAB, HIDDEN), 0)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(CONFIG["num_hidden_layers"]):
        for number, (name, shape) in enumerate(SHAPES.items()):
            _add(writer, f"blk.{layer}.{name}", kind, shape, 8 * layer + number + 1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    finish(writer)


def _add(writer: gguf.GGUFWriter, name: str, kind: str, shape: tuple[int, int], seed: int) -> None:
    raw = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(f"{name}.weight", random_blocks(kind, shape, seed), raw_dtype=raw)
