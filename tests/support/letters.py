"""A tokenizer of 60 tokens that can write JSON, and forms of answers short enough for it."""

from __future__ import annotations

import tempfile
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxserve.text.tokenizer import Tokenizer

END = 2
LETTERS = 'ab<cdefghijklmnopqrstuvwxyz0123456789{}[]":,.- \n'
# Several ways to write the same, as in real vocabularies. Each joins two tokens before it.
JOINED = ("ab", "cd", " a", "tr", "ue", "true", "12", '":', '{"', '",', "aba", "\n ")
TEXTS = [*LETTERS, *JOINED]
TEXTS[END] = ""
VOCAB = len(TEXTS)

FORMS: tuple[dict[str, Any], ...] = (
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"json": {"type": "array", "items": {"enum": ["ab", True, 12]}, "maxItems": 2}},
    {"json": {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]}},
    {"json_object": True},
    {"regex": "[ab]{2,6}c?"},
    {"regex": "(ab|cd)*12"},
    {"choice": ["ab", "aba", "12", "true"]},
    {"grammar": 'start: "a" pair\npair: "[" pair "]" | "ab"'},
)


def letter_tokenizer() -> Tokenizer:
    """Return a tokenizer with the end token `END`, which has no text, and the tokens of `TEXTS`."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)

    def symbols(text: str) -> str:
        return alphabet.pre_tokenize_str(text)[0][0]

    vocabulary = {symbols(text) if text else "<end>": token for token, text in enumerate(TEXTS)}
    merges = [_halves(text) for text in JOINED]
    backend = Backend(
        models.BPE(
            vocab=vocabulary, merges=[(symbols(one), symbols(other)) for one, other in merges]
        )
    )
    backend.pre_tokenizer = alphabet
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    with tempfile.TemporaryDirectory() as directory:
        tokenizer.save_pretrained(directory)
        return Tokenizer(directory, VOCAB)


def _halves(text: str) -> tuple[str, str]:
    halves = ((text[:at], text[at:]) for at in range(len(text) - 1, 0, -1))
    return next(both for both in halves if set(both) <= set(TEXTS))
