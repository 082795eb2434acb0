"""Tokens of a GGUF file that end an answer: named by its metadata, or known by their text.

The texts are those that llama.cpp's src/llama-vocab.cpp (MIT licence, ggml authors) ends at.
Many files name the end of a text only, and a model that ends its turns otherwise would go on with
both sides of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
# Where a file does not name the token, the first of these that it holds.
_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_USER_DEFINED = 4  # a type of tokens
_NAMED = ("eos", "eot", "eom", *_CODE)


def end_texts(types: Mapping[str, int]) -> set[str]:
    """Return the texts in a vocabulary that end an answer whatever the metadata say.

    Args:
        types: of tokens, by their text.
    """
    found = set(TEXTS.intersection(types))
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        found.discard("<|end|>")  # ends a part of an answer
    if types.get("</s>") == _USER_DEFINED:
        found.discard("</s>")  # HTML, which Gemma has tokens for
    return found


def gguf_ends(metadata: Mapping[str, Any]) -> list[Any]:
    """Return unchecked ids of the tokens that end an answer, those of the metadata first."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    types = metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, np.ndarray | list) else [1] * len(tokens)
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED}
    places = {token: index for index, token in enumerate(tokens)}
    texts = end_texts(dict(zip(tokens, types, strict=False)))
    for name, spellings in _CODE.items():
        if named[name] is None:
            texts.update([text for text in spellings if text in places][:1])
    by_text = sorted(places[text] for text in texts)
    return list(dict.fromkeys([*(end for end in named.values() if end is not None), *by_text]))
