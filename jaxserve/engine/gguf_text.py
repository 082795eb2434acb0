"""The tokenizer of a GGUF file.

Transformers' own reader of these files maps them and needs torch, so the metadata comes from ours,
and Transformers turns it into a tokenizer. What it leaves out is added here, as llama.cpp does it.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import CheckpointError

LIBRARY = "transformers.integrations.gguf.gguf_tokenizer_mapping"
# Those that begin every text with a token and take whole words that are tokens as they are.
LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"})
# Letters with a case, as DeepSeek-V2's tokenizer lists them.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟"
    "𞤀-𞥃"
)
DIGITS = (  # each digit alone, the rest as in GPT-2
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)
# Splits that the library does not know, one after the other: DeepSeek's, V2 and V3, Granite's and
# Command R's.
SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "deepseek-llm": (
            r"[\r\n]",
            rf"\s?[{CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ),
        "deepseek-v3": (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        "refact": DIGITS,
        "command-r": DIGITS,
    }
)
WHOLE = (3, 4)  # types of tokens that are found in a text as they are: control and user-defined
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
MAX_TEMPLATE_CHARS = 1 << 20
PER_TOKEN = ("tokens", "scores", "token_type")


def gguf_tokenizer(metadata: Mapping[str, Any], where: str) -> Any:
    """The tokenizer that a GGUF file's metadata describes, as one of Transformers'.

    Raises:
        CheckpointError: there is none, one of an unknown kind, or one that contradicts itself.
    """
    try:
        return _tokenizer(metadata)
    except Exception as error:  # whatever a vocabulary that contradicts itself leads to
        raise CheckpointError(
            f"{where}: its tokenizer cannot be built ({str(error)[:500]}); pass tokenizer=DIR"
        ) from error


def _tokenizer(metadata: Mapping[str, Any]) -> Any:
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind not in ("gpt2", "llama") or "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(
            f"tokenizer.ggml.model is {str(kind)[:80]!r}, which is not 'gpt2' or 'llama' with its "
            "tokens"
        )
    library = importlib.import_module(LIBRARY)  # brings many tokenizers, and few need it
    # How a byte-level vocabulary splits text before merging; the first is the library's default.
    splits = ("gpt-2", *library.GGUF_PRE_TOKENIZER_SPLITS, *SPLITS)
    if kind == "gpt2" and split not in splits:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {str(split)[:80]!r}; allowed: {', '.join(splits)}"
        )
    parts = {
        name: _plain(metadata[f"tokenizer.{key}"])
        for key, name in library.GGUF_TOKENIZER_MAPPING["tokenizer"].items()
        if f"tokenizer.{key}" in metadata
    }
    sizes = {name: len(parts[name]) for name in PER_TOKEN if isinstance(parts.get(name), list)}
    if len(set(sizes.values())) > 1 or (kind == "llama" and "scores" not in sizes):
        raise CheckpointError(f"tokenizer.ggml: tokens, scores and types do not fit: {sizes}")
    if kind == "gpt2":
        backend = _byte_level(library, metadata["general.architecture"], parts)
        backend.model.ignore_merges = split in LLAMA3
    else:
        backend, _ = library.convert_gguf_tokenizer(metadata["general.architecture"], parts)
    if kind == "llama" and parts.get("add_prefix_space") is False and not _is_gemma(metadata):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
    names = _special(metadata, parts["tokens"])
    ends = [
        names.get(token) if metadata.get(f"tokenizer.ggml.add_{token[:3]}_token", default) else None
        for token, default in (
            ("bos_token", kind == "llama" or split in LLAMA3),
            ("eos_token", False),
        )
    ]
    if any(ends):
        bos, eos = ends
        backend.post_processor = TemplateProcessing(
            single=[part for part in (bos, "$A", eos) if part],
            special_tokens=[(token, parts["tokens"].index(token)) for token in ends if token],
        )
    template = metadata.get("tokenizer.chat_template")
    if template is not None and (
        not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS
    ):
        raise CheckpointError(
            f"tokenizer.chat_template must be text of at most {MAX_TEMPLATE_CHARS} characters"
        )
    transformers = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, **names
    )


def _byte_level(library: Any, architecture: str, parts: Mapping[str, Any]) -> Tokenizer:
    """A byte-level vocabulary; tokens such as <｜User｜> are whole, as in any other.

    The library takes those that are not spelled in the letters that stand for bytes for words. So
    they go through it under other names.
    """
    letters, tokens = set(pre_tokenizers.ByteLevel.alphabet()), list(parts["tokens"])
    types = parts.get("token_type") or [1] * len(tokens)
    names = {
        f"<|jaxserve-{index}|>": token
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in WHOLE and not letters.issuperset(token)
    }
    for name, token in names.items():
        tokens[tokens.index(token)] = name
    backend, _ = library.convert_gguf_tokenizer(architecture, {**parts, "tokens": tokens})
    if names:
        text = re.sub(
            r'"(<\|jaxserve-\d+\|>)"',
            lambda found: json.dumps(names.get(found[1], found[1])),
            backend.to_str(),
        )
        backend = Tokenizer.from_str(text)
    splits = SPLITS.get(str(parts.get("pre_tokenizer_type")))
    if splits is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(split), "isolated") for split in splits),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    return backend


def _is_gemma(metadata: Mapping[str, Any]) -> bool:
    return str(metadata["general.architecture"]).startswith("gemma")


def _special(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key} is {str(token)[:80]}; allowed: an id below {len(tokens)}"
            )
        found[name] = tokens[token]
    return found


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
