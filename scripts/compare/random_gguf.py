"""A GGUF file of random blocks in the shape of Llama 3.2 1B, for servers to be timed on.

Its vocabulary is a word a token, so its text has no meaning. Codes are random, and scales are those
of weights whose standard deviation is about 0.02.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP, VOCAB, CONTEXT = 2048, 16, 32, 8, 8192, 128256, 8192
SIZE = 0.02
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
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
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCAB)
    _add_tokenizer(writer)
    embedding = "Q6_K" if kind.endswith("_K") else "Q8_0"
    _add(writer, "token_embd", embedding, (VOCAB, HIDDEN), 0)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    for layer in range(LAYERS):
        for number, (name, shape) in enumerate(SHAPES.items()):
            _add(writer, f"blk.{layer}.{name}", kind, shape, 8 * layer + number + 1)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, kind: str, shape: tuple[int, int], seed: int) -> None:
    raw = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(f"{name}.weight", random_blocks(kind, shape, seed), raw_dtype=raw)


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """Add words, after the tokens that llama.cpp expects: unknown, begin, end, and every byte."""
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    words = [f"\u2581w{number}" for number in range(VOCAB - len(special) - len(bytes_))]
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *bytes_, *words])
    writer.add_token_scores([0.0] * VOCAB)
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * len(bytes_)]
    writer.add_token_types([*types, *[kinds.NORMAL] * len(words)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
