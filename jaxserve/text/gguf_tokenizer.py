"""Construction of a tokenizer from the metadata of a GGUF file.

The tokenizer contains only the tokens in the file. It is built here as llama.cpp and the
tokenizer.json of such models define it, not by Transformers' classes, which add special tokens of
their own.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from jaxserve.errors import CheckpointError
from jaxserve.text.gguf_vocabulary import IN_CHARACTERS, SPLITS, TextSplit, end_texts
from jaxserve.text.plain_tokenizer import PlainTokenizer
from jaxserve.text.tokenizer import byte_letters
from jaxserve.text.tokenizer_calls import LibraryCalls
from jaxserve.text.tokenizer_limits import check_listed_words

_log = logging.getLogger(__name__)

# Vocabulary kinds that llama.cpp supports and this module does not, with the missing feature.
_MISSING = {
    "t5": "a vocabulary of unigrams",
    "bert": "WordPiece",
    "rwkv": "RWKV's greedy search for the longest token",
    "plamo2": "PLaMo-2's search for the best path",
    "hybriddna": "merges beside words of DNA",
    "whitespace": "whole words between blanks",
}
_MERGED = ("gpt2", "gemma4")  # kinds with a list of merges
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types that are recognized as whole texts
_WHOLE = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_PER_TOKEN = ("tokens", "scores", "token_type")
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
MAX_TEMPLATE_CHARS = 1 << 20
_BLANK = "▁"  # how SentencePiece vocabularies write a space


def gguf_tokenizer(
    metadata: Mapping[str, Any], where: str, vocab_size: int | None = None
) -> PlainTokenizer:
    """Return the tokenizer that the metadata of a GGUF file describes. Errors name the file
    `where`.

    Raises:
        CheckpointError: the tokenizer is missing, of an unsupported kind, or inconsistent.
    """
    try:
        with LibraryCalls():
            return _tokenizer(metadata, vocab_size)
    except Exception as error:  # inconsistent vocabularies lead to various errors
        raise CheckpointError(
            f"{where}: its tokenizer cannot be built ({str(error)[:500]}); pass tokenizer=DIR"
        ) from error


def save_tokenizer(metadata: Mapping[str, Any], where: str, folder: Path) -> None:
    """Write the tokenizer of a GGUF file to a folder, as tokenizer files of Transformers.

    Raises:
        CheckpointError: the tokenizer is missing, of an unsupported kind, or inconsistent.
    """
    plain = gguf_tokenizer(metadata, where)
    transformers = importlib.import_module("transformers")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        chat_template=plain.chat_template,
        **plain.special_tokens_map,
    ).save_pretrained(folder)


def _tokenizer(metadata: Mapping[str, Any], vocab_size: int | None) -> PlainTokenizer:
    kind, tokens = _kind(metadata), _plain(metadata["tokenizer.ggml.tokens"])
    types, split = _types(metadata, tokens, kind), _split(metadata) if kind == "gpt2" else None
    names = _special(metadata, tokens)
    whole = [token for token, token_type in zip(tokens, types, strict=True) if token_type in _WHOLE]
    merges = metadata.get("tokenizer.ggml.merges") if kind in _MERGED else ()
    if merges is None:
        raise CheckpointError(
            f'tokenizer.ggml.merges is missing, which a vocabulary of model "{kind}" needs'
        )
    # Vocabularies with scores have no merges, so all prefixes of every token are looked up.
    check_listed_words(tokens, whole if kind in _MERGED else tokens, len(merges), vocab_size)
    if split is not None:
        backend = _byte_level(merges, tokens, types, split)
    elif kind == "gemma4":
        backend = _in_characters(merges, tokens, names.get("unk_token"))
    else:
        backend, tokens = _with_scores(metadata, tokens, names.get("unk_token"))
    begins = split is None or split.begins
    # Phi-3's templates write a line break after each special token, and its tokenizer removes it.
    strips = kind == "llama" and metadata["general.architecture"] == "phi3"
    _add_whole(backend, tokens, types, set(names.values()), strips=strips)
    ends = [
        names.get(token) if metadata.get(f"tokenizer.ggml.add_{token[:3]}_token", default) else None
        for token, default in (("bos_token", begins), ("eos_token", False))
    ]
    if any(ends):
        bos, eos = ends
        backend.post_processor = TemplateProcessing(
            single=[part for part in (bos, "$A", eos) if part],
            special_tokens=[(token, tokens.index(token)) for token in ends if token],
        )
    template = metadata.get("tokenizer.chat_template")
    if template is not None and (
        not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARS
    ):
        raise CheckpointError(
            f"tokenizer.chat_template must be text of at most {MAX_TEMPLATE_CHARS} characters"
        )
    return PlainTokenizer(backend, names, [], template)


def _kind(metadata: Mapping[str, Any]) -> str:
    """Return the kind of a GGUF file's vocabulary: "gpt2" (byte-level), "llama" (SentencePiece) or
    "gemma4" (merges of characters).
    """
    kind: Any = metadata.get("tokenizer.ggml.model")
    if kind in _MISSING:
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}, which needs {_MISSING[kind]}, and that is not "
            "built here; 'gpt2', 'llama' and 'gemma4' are"
        )
    if kind not in ("llama", *_MERGED) or "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(
            f"tokenizer.ggml.model is {str(kind)[:80]!r}, which is not 'gpt2', 'llama' or "
            "'gemma4' with its tokens"
        )
    return kind


def _types(metadata: Mapping[str, Any], tokens: list[str], kind: str) -> list[int]:
    """Return the GGUF type of each token: control for a token that ends answers, whatever the file
    says.
    """
    lists = {name: _plain(metadata.get(f"tokenizer.ggml.{name}")) for name in _PER_TOKEN}
    sizes = {name: len(value) for name, value in lists.items() if isinstance(value, list)}
    if len({*sizes.values(), len(tokens)}) > 1 or (kind == "llama" and "scores" not in sizes):
        raise CheckpointError(f"tokenizer.ggml: tokens, scores and types do not fit: {sizes}")
    types = lists["token_type"] or [1] * len(tokens)
    ends = end_texts(dict(zip(tokens, types, strict=True)))
    return [
        _CONTROL if token in ends else token_type
        for token, token_type in zip(tokens, types, strict=True)
    ]


def _split(metadata: Mapping[str, Any]) -> TextSplit:
    """Return the rules by which a byte-level vocabulary splits text into words before merging."""
    name = metadata.get("tokenizer.ggml.pre")
    if not name:
        _log.warning("tokenizer.ggml.pre is missing: text is split as llama.cpp does by default")
        name = "default"
    if name in IN_CHARACTERS:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, which needs merges of characters in place of bytes, "
            "and these are not built here"
        )
    split = SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {str(name)[:80]!r}; allowed: {', '.join(sorted(SPLITS))}"
        )
    return split


def _byte_level(merges: Any, tokens: list[str], types: list[int], split: TextSplit) -> Tokenizer:
    """Return a tokenizer of a byte-level BPE vocabulary with the given merges and rules for words.

    Control and user-defined tokens keep their spelling. Other tokens with characters outside the
    byte alphabet, which encoding never produces, are respelled in bytes so that they decode
    correctly.
    """
    letters = byte_letters()
    alphabet = set(letters)
    vocab = {
        token
        if kind in _WHOLE or alphabet.issuperset(token)
        else "".join(letters[byte] for byte in token.encode()): index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
    }
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Tokenizer(models.BPE(vocab, pairs, ignore_merges=split.ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _in_characters(merges: Any, tokens: list[str], unknown: str | None) -> Tokenizer:
    """Return a tokenizer of a BPE vocabulary in characters, which falls back on bytes (Gemma 4)."""
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
    backend = Tokenizer(
        models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", _BLANK)
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps)
    return backend


def _with_scores(
    metadata: Mapping[str, Any], tokens: list[str], unknown: str | None
) -> tuple[Tokenizer, list[str]]:
    """Return a tokenizer of a SentencePiece vocabulary, and its tokens in their internal spelling.

    Files contain scores instead of merges: a token can be merged from any two others, the best
    score first. Gemma's scores are not usable: its tokens merge in the order of the file, except
    that in Gemma 3 the longest runs of spaces come first. Files contain these runs as real spaces,
    and tokenizer.json as U+2581.
    """
    scores: list[float] = _plain(metadata["tokenizer.ggml.scores"])
    architecture = str(metadata["general.architecture"])
    is_gemma = architecture.startswith("gemma")
    if is_gemma:
        tokens = [token if token.strip(" ") else _BLANK * len(token) for token in tokens]
        by_place = architecture in ("gemma", "gemma2")
        scores = [
            -index if by_place or token.strip(_BLANK) else len(token)
            for index, token in enumerate(tokens)
        ]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(vocab, scores)
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    steps = [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        # Each part between whole tokens begins with a space.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_BLANK), normalizers.Replace(" ", _BLANK)]
        )
        steps.append(decoders.Strip(" ", left=1))
    else:
        backend.normalizer = normalizers.Replace(" ", _BLANK)
    backend.decoder = decoders.Sequence(steps)
    return backend, tokens


def _merges(vocab: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that merge, by best score, then by longest left part."""
    # Tokens are usually in order, so sorting is fast.
    tokens = sorted(zip(scores, vocab, strict=True), key=itemgetter(0), reverse=True)
    merges = [
        (score, end, (first, second))
        for score, token in tokens
        for end in range(len(token) - 1, 0, -1)
        if (first := token[:end]) in vocab and (second := token[end:]) in vocab
    ]
    merges.sort(key=itemgetter(0, 1), reverse=True)
    return [pair for _, _, pair in merges]


def _add_whole(
    backend: Tokenizer, tokens: list[str], types: list[int], named: set[str], *, strips: bool
) -> None:
    """Add special and user-defined tokens to a tokenizer, which recognizes them as whole texts.

    Args:
        named: tokens that the file names as beginning of sequence and so on, which are special
            regardless of their type.
        strips: True if special tokens absorb white space after them, except tokens that end a text.
    """
    ends = ("<unk>", "<s>", "<|endoftext|>")
    added = [
        AddedToken(
            token,
            normalized=False,
            special=kind != _USER_DEFINED,
            rstrip=strips and token not in ends,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in _WHOLE or token in named
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _special(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, key in SPECIAL.items():
        token = metadata.get(f"tokenizer.ggml.{key}")
        if token is None:
            continue
        if type(token) is not int or not 0 <= token < len(tokens):
            raise CheckpointError(
                f"tokenizer.ggml.{key} is {str(token)[:80]}; allowed: an id below {len(tokens)}"
            )
        special[name] = tokens[token]
    return special


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
