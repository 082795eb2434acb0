"""The tokenizer of a GGUF file.

Transformers' own reader of these files maps them and needs torch, so the metadata comes from ours,
and Transformers turns it into a tokenizer. What it leaves out is added here, as llama.cpp does it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from tokenizers import decoders, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import CheckpointError

LIBRARY = "transformers.integrations.gguf.gguf_tokenizer_mapping"
# Those that begin every text with a token and take whole words that are tokens as they are.
LLAMA3 = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"})
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
    splits = ("gpt-2", *library.GGUF_PRE_TOKENIZER_SPLITS)
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
    backend, _ = library.convert_gguf_tokenizer(metadata["general.architecture"], parts)
    if kind == "gpt2":
        backend.model.ignore_merges = split in LLAMA3
    elif parts.get("add_prefix_space") is False and not _is_gemma(metadata):
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
