"""Mistral's tekken vocabulary at full size, as llama.cpp's converter puts it into GGUF files.

The reference is the vocabulary's own definition: a text is split by the pattern, and in each piece
the two neighbours whose bytes together have the lowest rank are joined, again and again.
"""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex

from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.gguf_vocabulary import SPLITS
from jaxserve.text.tokenizer import Tokenizer, byte_letters
from tests.published.conftest import cache
from tests.published.models import texts
from tests.published.packages import ensure

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
LETTERS = byte_letters()


class Tekken:
    """The vocabulary as it is published, and its own tokenization.

    Args:
        path: of the JSON file.
    """

    def __init__(self, path: Path) -> None:
        source = json.loads(path.read_text())
        config = source["config"]
        self.num_special = config["default_num_special_tokens"]
        size = config["default_vocab_size"] - self.num_special
        self.words = [base64.b64decode(word["token_bytes"]) for word in source["vocab"][:size]]
        self.ranks = {word: rank for rank, word in enumerate(self.words)}
        self.pattern = config["pattern"]

    def parts(self, piece: bytes, below: int | None = None) -> list[bytes]:
        """Join neighbours, lowest rank first, as far as there are ranks, or ranks below one."""
        parts = [bytes((byte,)) for byte in piece]
        while len(parts) > 1:
            pairs = itertools.pairwise(parts)
            ranks = [self.ranks.get(left + right, len(self.words)) for left, right in pairs]
            least = min(ranks)
            if least >= (len(self.words) if below is None else below):
                break
            first = ranks.index(least)
            parts[first : first + 2] = [parts[first] + parts[first + 1]]
        return parts

    def encode(self, text: str) -> list[int]:
        pieces = [piece.encode() for piece in regex.findall(self.pattern, text)]
        assert b"".join(pieces) == text.encode()
        return [self.num_special + self.ranks[p] for piece in pieces for p in self.parts(piece)]

    def metadata(self) -> dict[str, Any]:
        """Return the tokenizer metadata of a GGUF file."""
        spelled = ["".join(LETTERS[byte] for byte in word) for word in self.words]
        special = [*SPECIAL, *(f"<SPECIAL_{at}>" for at in range(len(SPECIAL), self.num_special))]
        joined = [self.parts(word, rank) for rank, word in enumerate(self.words) if len(word) > 1]
        merges = [
            " ".join("".join(LETTERS[byte] for byte in part) for part in parts) for parts in joined
        ]
        return {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "tekken",
            "tokenizer.ggml.tokens": [*special, *spelled],
            "tokenizer.ggml.token_type": np.int32([3] * len(special) + [1] * len(spelled)),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
        }


@pytest.mark.parametrize("package", ["tekken"])
def test_tekken_is_tokenized_as_it_is_defined(package: str, pytestconfig: pytest.Config) -> None:
    tekken = Tekken(ensure(package, cache(pytestconfig)))
    assert SPLITS["tekken"].patterns == (tekken.pattern,)
    metadata = tekken.metadata()
    size = len(metadata["tokenizer.ggml.tokens"])
    ours = Tokenizer.of(gguf_tokenizer(metadata, "m.gguf"), "m.gguf", size)
    for text in texts():
        want = tekken.encode(text)
        assert ours.encode(text) == [1, *want], text
        assert ours.decode(want) == text
    assert ours.encode("[INST]a")[1] == 3
