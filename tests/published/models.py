"""Models of two layers around published tokenizers: configurations, weights, GGUF files."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.test_published_configs import PUBLISHED
from tests.published.packages import FILES
from tests.support.gguf_files import DEEPSEEK, random_tensors

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
GPT_OSS = {"num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]}
# The model whose configuration is shrunk, and the other changes that this needs.
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen3": ("Qwen3-8B", {}),
        "llama3_1": ("Llama-3.1-8B-Instruct", {}),
        "llama3": ("Llama-3.1-8B-Instruct", {}),
        "llama2": ("Llama-2-7b", {}),
        "gemma3": ("gemma-3-1b-it", {}),
        "gemini": ("gemma-2-2b-it", {}),
        "gptoss": ("gpt-oss-20b", GPT_OSS | {"tie_word_embeddings": False}),
        "gpt4o": ("Llama-3.1-8B-Instruct", {"vocab_size": 200064, "eos_token_id": 199999}),
        "deepseek_v3": ("DeepSeek-V3", DEEPSEEK | {"num_key_value_heads": 4}),
    }
)
# llama.cpp's converter's names of their splits; the other vocabularies have scores.
SPLIT_NAMES = MappingProxyType(
    {
        "qwen3": "qwen2",
        "llama3_1": "llama-bpe",
        "llama3": "llama-bpe",
        "gptoss": "gpt-4o",
        "gpt4o": "gpt-4o",
        "deepseek_v3": "deepseek-v3",
    }
)


def small_config(name: str) -> dict[str, Any]:
    """Return a published configuration with two layers, and its whole vocabulary."""
    published, changes = CONFIGS[name]
    config = {**PUBLISHED[published][0], **SMALL, **changes}
    config.pop("quantization_config", None)
    return config


def write_model(name: str, source: Path, folder: Path) -> Path:
    """Write a checkpoint of random weights with a published tokenizer."""
    folder.mkdir(parents=True)
    for file in FILES:
        shutil.copyfile(source / file, folder / file)
    config = small_config(name)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config)
    scaled = {key: value * np.float32(0.1) for key, value in tensors.items()}
    save_file(scaled, folder / "model.safetensors", {"format": "pt"})
    return folder


def gguf_metadata(name: str, source: Path) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter would write of a published tokenizer."""
    made = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    added = {token["id"]: token for token in made["added_tokens"]}
    words = {index: word for word, index in made["model"]["vocab"].items()}
    size = min(max([*words, *added]) + 1, small_config(name)["vocab_size"])
    tokens, kinds = [], []
    for index in range(size):
        if index in added:
            text = added[index]["content"]
            special = added[index]["special"] or text == "<unk>"
            tokens.append(text if special else text.replace("▁", " "))
            kinds.append(3 if special else 4)
        else:
            tokens.append(words.get(index, f"[PAD{index}]"))
            is_byte = tokens[-1].startswith("<0x") and name not in SPLIT_NAMES
            kinds.append(6 if is_byte else 1 if index in words else 5)
    fields = {
        "general.architecture": {"gemma3": "gemma3", "gemini": "gemma2"}.get(name, "llama"),
        "tokenizer.ggml.model": "gpt2" if name in SPLIT_NAMES else "llama",
        "tokenizer.ggml.pre": SPLIT_NAMES.get(name, "default"),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.int32(kinds),
        "tokenizer.ggml.add_bos_token": config.get("add_bos_token", "llama3" in name),
        "tokenizer.ggml.add_space_prefix": name == "llama2",
    }
    for key, kind in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown")):
        text = config.get(key)
        text = text["content"] if isinstance(text, Mapping) else text
        if text is not None:
            fields[f"tokenizer.ggml.{kind}_token_id"] = tokens.index(text)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in made["model"]["merges"]]
    if name in SPLIT_NAMES:
        return fields | {"tokenizer.ggml.merges": [" ".join(pair) for pair in pairs]}
    # Merges are in the order of the scores of their results.
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    scores = [-float(ranks.get(token, 1e6)) for token in tokens]
    return fields | {"tokenizer.ggml.scores": np.float32(scores)}


LANGUAGES = (
    "The quick brown fox doesn't jump over 1,234,567 lazy dogs; it's 3.14 o'clock.",
    "Les élèves naïfs mangent où? Ça coûte 12 € à l'hôtel.",
    "Die Straße führt über die Brücke nach Köln.",
    "El niño comió piñas; ¿qué más quería?",
    "В чащах юга жил бы цитрус? Да, но фальшивый экземпляр!",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "我能吞下玻璃而不伤身体。今天是2026年。",
    "いろはにほへと ちりぬるを。カタカナも。",
    "키스의 고유조건은 입술끼리 만나야 한다.",
    "نص حكيم له سر قاطع وذو شأن عظيم ١٢٣",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า",
    "👩‍👩‍👧‍👦 🇫🇷 ❤️‍🔥 👍🏽 1️⃣ 🏴󠁧󠁢󠁿",
)
CODE = (
    "def f(x):\n    if x:\n\treturn {'a': [1, 2]}\r\n\r\n\n\n# end",
    *(" " * size + "x" for size in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 119)),
    *("\n" * size + "\t" * size + "y" for size in (1, 2, 5, 31, 33)),
    "IT'S we'Ll iPhone15Pro snake_case CamelCase https://a.b/c?d=e&f=%20",
    "\u00a0a\u3000b\u2003c\u200bd\u2028e\u0085f",
    "",
    " ",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is 2 + 2?"}],
    [
        {"role": "user", "content": "  Bonjour 👋🏽\n\n\tça va? "},
        {"role": "assistant", "content": "Très bien."},
        {"role": "user", "content": "日本語で答えて。"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Sum the list [1, 2, 3]."},
    ],
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town.",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["town"],
            },
        },
    }
]


def texts() -> list[str]:
    """Return hard texts of many languages, alone and side by side."""
    pairs = itertools.pairwise(LANGUAGES)
    return [*LANGUAGES, *CODE, *(f"{a}  {b}" for a, b in pairs)]
