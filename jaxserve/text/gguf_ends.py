"""End-of-answer tokens of a GGUF file, named by its metadata or known by their text.

The texts are those of llama.cpp's src/llama-vocab.cpp (MIT licence, ggml authors). Many files name
only the end-of-text token. A model that ends its turns with another token would then continue with
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
# If a file does not name the token, the first of these texts in its vocabulary applies.
_CODE = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_USER_DEFINED = 4  # type of a token
_NAMED = ("eos", "eot", "eom", *_CODE)


def end_texts(types: Mapping[str, int]) -> set[str]:
    """Return the texts in a vocabulary that end an answer regardless of the metadata.

    Args:
        types: token types by text.
    """
    found = set(TEXTS.intersection(types))
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        found.discard("<|end|>")  # ends only a part of an answer
    if types.get("</s>") == _USER_DEFINED:
        found.discard("</s>")  # an HTML tag, for which Gemma has a token
    return found


def gguf_ends(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the ids of tokens that end an answer, without checking them, the metadata's ids
    first.
    """
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
