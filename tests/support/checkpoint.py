"""A tiny checkpoint: random Llama weights and a byte-level tokenizer, as Transformers saves it."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|bot|>"]
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bot|>' }}"
    "{{ m.content }}{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token a byte, so that other characters than ASCII are several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def save_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    positions: int = 256,
    end: int = 1,
) -> Path:
    """Write a two-layer model, by default of 260 tokens and 256 positions.

    Its answers end with the token `end`.
    """
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer() if tokenizer is None else tokenizer
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=end,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
