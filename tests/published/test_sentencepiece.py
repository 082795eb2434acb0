"""Mistral's SentencePiece vocabularies at full size, as GGUF files hold them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from sentencepiece import SentencePieceProcessor

from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.tokenizer import Tokenizer
from tests.published.conftest import cache
from tests.published.models import texts
from tests.published.packages import ensure


def metadata(model: SentencePieceProcessor) -> dict[str, Any]:
    """Return the metadata that llama.cpp's converter would write of a vocabulary."""
    ids = range(model.get_piece_size())
    kinds = [
        2
        if model.is_unknown(at)
        else 3
        if model.is_control(at)
        else 6
        if model.is_byte(at)
        else 4
        if re.fullmatch(r"\[/?[A-Z_]+\]", model.id_to_piece(at))  # user-defined
        else 1
        for at in ids
    ]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [model.id_to_piece(at) for at in ids],
        "tokenizer.ggml.scores": np.float32([model.get_score(at) for at in ids]),
        "tokenizer.ggml.token_type": np.int32(kinds),
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }


@pytest.mark.parametrize("package", ["mistral_v1", "mistral_v3", "mistral_v7"])
def test_texts_are_tokenized_as_sentencepiece_does(
    package: str, pytestconfig: pytest.Config
) -> None:
    model = SentencePieceProcessor(model_file=str(ensure(package, cache(pytestconfig))))
    size = model.get_piece_size()
    ours = Tokenizer.of(gguf_tokenizer(metadata(model), "m.gguf"), "m.gguf", size)
    for text in texts():
        want = model.encode(text)
        assert ours.encode(text) == [1, *want], text
        assert ours.decode(want) == model.decode(want) == text
    if package != "mistral_v1":
        assert ours.encode("[INST]a")[1] == model.piece_to_id("[INST]")
