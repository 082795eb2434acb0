"""Writer of the demonstration model's folder: weights, settings, tokenizer and model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from scripts.demo_model.examples import BUCKETS, TOKENS_PER_BATCH
from scripts.demo_model.network import Config, Llama
from scripts.demo_model.tokenizer import BOS, CHAT_TEMPLATE, EOS, PAD, SPECIAL_TOKENS

PARAMETER_NAMES = {
    "": ("input_layernorm", "post_attention_layernorm"),
    "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp.": ("gate_proj", "up_proj", "down_proj"),
}


@dataclass(frozen=True)
class Score:
    """Greedy accuracy on held-out examples of one kind, with their prompt lengths in tokens."""

    label: str
    examples: int
    correct: int
    shortest: int
    longest: int


@dataclass(frozen=True)
class Run:
    """Training run of the weights, for the model card."""

    command: str
    seed: int
    steps: int
    minutes: float
    jax_version: str
    cores: int


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# jaxserve demonstration model

A Llama checkpoint of {parameters} parameters ({num_hidden_layers} layers, width {hidden_size},
{num_attention_heads} query and {num_key_value_heads} key-value heads of {head_dim}, feed-forward
{intermediate_size}, vocabulary {vocab_size}, tied embeddings), stored in float32
({stored} bytes). It was trained on synthetic text tasks whose answers a program can
check, so that a server has something small to serve whose replies can be told right from wrong.
It knows these tasks and nothing else, and its answers to any other text mean nothing.
Training starts from weights that already hold a rough copying circuit (`seed_circuits` in
`scripts/demo_model/network.py`), which lets a run of minutes on a CPU reach long contexts.

## Accuracy on held-out examples

Exact match of the whole answer under greedy decoding, in float32, on examples whose prompts were
kept out of training by a hash of their text (`split` in `scripts/demo_model/tasks.py`). Prompt
tokens include the chat format.

| Task | Prompt tokens | Examples | Correct | Accuracy |
|---|---|---|---|---|
{rows}

## Chat format

One user message, or several turns; there is no system message in the training data. The template
adds the leading `<|bos|>`, so tokenize its output without adding special tokens again.

```
<|bos|><|im_start|>user
What is 47 + 8?<|im_end|>
<|im_start|>assistant
55<|im_end|>
```

Generation ends at `<|im_end|>`. Training contexts reach {longest} tokens; the position limit of
{max_position_embeddings} is not covered beyond that. The tokenizer is a byte-level BPE with single
digits: any text survives encoding and decoding, though only task words are short.

## How it was made

- Command: `{command}`
- Seed {seed}, {steps} updates of about {batch} tokens, {minutes} minutes of training
- JAX {jax_version} on CPU, {cores} cores
"""


def write_weights(model: Llama, out: Path) -> None:
    """Write model.safetensors in float32, with Hugging Face names and [outputs, inputs]."""
    tensors = {
        "model.embed_tokens.weight": model.embed_tokens[...],
        "model.norm.weight": model.norm[...],
    }
    for index, layer in enumerate(model.layers):
        for group, names in PARAMETER_NAMES.items():
            for name in names:
                tensors[f"model.layers.{index}.{group}{name}.weight"] = getattr(layer, name)[...].T
    arrays = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
    # save_file lets only its owner read the file, which a package must not ship.
    (out / "model.safetensors").chmod(0o644)


def write_settings(config: Config, tokenizer: Tokenizer, out: Path) -> None:
    """Write every JSON file of the folder and the chat template."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    settings = {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(config),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "float32",
            **ids,
        },
        "generation_config": {"do_sample": False, **ids},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[PAD],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in settings.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(out / "tokenizer.json"))


def write_card(scores: Sequence[Score], run: Run, model: Llama, out: Path) -> None:
    """Write README.md, with the model's description, training and measured accuracies."""
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    rows = "\n".join(
        f"| {s.label} | {s.shortest}-{s.longest} | {s.examples} | {s.correct} | "
        f"{100 * s.correct / s.examples:.1f}% |"
        for s in scores
    )
    (out / "README.md").write_text(
        CARD.format(
            parameters=f"{size:,}",
            stored=f"{(out / 'model.safetensors').stat().st_size:,}",
            rows=rows,
            longest=BUCKETS[-1],
            batch=TOKENS_PER_BATCH,
            **asdict(run),
            **asdict(model.config),
        )
    )
