"""Small tokenizers of the kinds that published ones have, over the letters of ASCII and bytes."""

from __future__ import annotations

import itertools
import string
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.plain_tokenizer import PlainTokenizer
from jaxserve.text.tokenizer import Tokenizer as OurTokenizer

BLANK = "\u2581"
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")
NOT_SPECIAL = "<tool>"
# The template's own special tokens come around each message.
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}[INST]({{ m.content }}){{ eos_token }}{% endfor %}"
)
_LETTERS = [BLANK, *string.ascii_letters, *string.digits, *string.punctuation]
_WORDS = ["ol", "old", "</", f"{BLANK}<", BLANK * 2]


def _pieces() -> list[str]:
    return [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, *_WORDS]


def _merged() -> models.BPE:
    vocab = {piece: number for number, piece in enumerate(_pieces())}
    merges = [("o", "l"), ("ol", "d"), ("<", "/"), (BLANK, "<"), (BLANK, BLANK)]
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def _unigram() -> models.Unigram:
    scores = [0.0] * len(SPECIAL) + [-9.0] * (len(_pieces()) - len(SPECIAL))
    return models.Unigram(list(zip(_pieces(), scores, strict=True)), 0, byte_fallback=True)


def _of_pieces(
    model: Any, normalizer: Any = None, pre_tokenizer: Any = None, *, strips: bool = True
) -> Tokenizer:
    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    steps += [decoders.Strip(" ", left=1)] if strips else []
    backend.decoder = decoders.Sequence(steps)
    return backend


def _blanks(*before: Any) -> Any:
    return normalizers.Sequence([*before, normalizers.Replace(" ", BLANK)])


def _of_bytes(add_prefix_space: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _metaspace(scheme: Any) -> Any:
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)


def _of_gguf() -> Tokenizer:
    pieces = [*_pieces(), "s>", "<s", "/s>"]
    kinds = [2, 3, 3, 3, *[6] * 256, *[1] * (len(pieces) - 260)]
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.array([0.0] * 260 + [-1.0] * (len(pieces) - 260), np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    return gguf_tokenizer(fields, "m.gguf").backend_tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = MappingProxyType(
    {
        "llama": lambda: _of_pieces(_merged(), _blanks(normalizers.Prepend(BLANK))),
        "gemma": lambda: _of_pieces(_merged(), _blanks(), strips=False),
        "metaspace, first": lambda: _of_pieces(_merged(), None, _metaspace("first")),
        "metaspace, always": lambda: _of_pieces(_merged(), None, _metaspace("always")),
        "metaspace, never": lambda: _of_pieces(_merged(), None, _metaspace("never"), strips=False),
        "unigram": lambda: _of_pieces(_unigram(), None, _metaspace("always")),
        "unigram, first": lambda: _of_pieces(_unigram(), normalizers.NFKC(), _metaspace("first")),
        "bytes": lambda: _of_bytes(False),
        "bytes after a blank": lambda: _of_bytes(True),
        "gguf": _of_gguf,
    }
)
FLAGS: list[Any] = [
    dict(zip(("lstrip", "rstrip", "normalized"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=3)
]


def small_tokenizer(kind: str, flags: Mapping[str, bool] | None = None) -> OurTokenizer:
    """Return a tokenizer with a chat template, whose added tokens have flags."""
    backend, flags = KINDS[kind](), flags or {"normalized": False}
    backend.add_special_tokens([AddedToken(text, **flags, special=True) for text in SPECIAL])
    backend.add_tokens([AddedToken(NOT_SPECIAL, **flags)])
    named = {"unk_token": SPECIAL[0], "bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    backend.post_processor = TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
    plain = PlainTokenizer(backend, named, [], TEMPLATE)
    return OurTokenizer.of(plain, kind, backend.get_vocab_size())
