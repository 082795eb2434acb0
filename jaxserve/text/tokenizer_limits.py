"""Size limits of tokenizer files, checked before a library loads them.

A short file may describe a tokenizer that takes gigabytes or minutes: long tokens, rules that
multiply a text, millions of words. Only sizes, and rules that make the tokenizers library panic,
are checked here. The libraries check the rest.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.text.tokenizer_parts import growth, may_panic, nodes, num_strings, read_parts

MAX_TOKENIZER_BYTES = 64 << 20
MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 4 << 20
# With more tokens without logits, the tokenizer belongs to another model.
MAX_TOKENS_BEYOND = 64
# Limits on the length of an added token, and on the sum of squared lengths: all prefixes of added
# tokens are stored.
MAX_TOKEN_CHARS = 1024
MAX_TOKEN_SQUARES = 1 << 27
# Maximum factor by which normalizers or decoders lengthen a text.
MAX_GROWTH = 64
MAX_NORMALIZED_CHARS = 16 << 20
MAX_STEPS = 256
MAX_TEMPLATE_TOKENS = 1024
MAX_WORD_CHARS = 1000
_MAX_STRING_CHARS = 16 << 10
_MAX_CHARSMAP_CHARS = 8 << 20
_SMALLEST_TRIE = 4 * 256
# Limit on merges per word. Published vocabularies have at most three.
_MERGES_PER_WORD, _MORE_MERGES = 16, 100_000
_BYTES_PER_WORD, _MORE_BYTES = 256, 1 << 20
_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/*.jinja")


def check_tokenizer_files(directory: Path, vocab_size: int) -> bool:
    """Check the sizes of the tokenizer files in a folder, and of the values in them.

    Returns:
        Whether tokenizer.json has rules by which a text may make the tokenizers library panic.

    Raises:
        CheckpointError: a size exceeds its limit, or tokenizer.json is not a JSON object.
    """
    most = vocab_size + MAX_TOKENS_BEYOND
    for pattern in _TEMPLATES:
        for path in directory.glob(pattern):
            _check_bytes(path, MAX_TEMPLATE_BYTES)
    for name in _CONFIGS:
        path = directory / name
        if path.is_file():
            _check_bytes(path, MAX_CONFIG_BYTES)
            _check_config(path, most)
    path = directory / "tokenizer.json"
    _check_bytes(path, MAX_TOKENIZER_BYTES)
    try:
        return _check_tokenizer(path.read_bytes(), most)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # values of other types lead to various errors
        detail = str(error)[:200] or type(error).__name__
        raise CheckpointError(f"{path}: not a readable tokenizer ({detail})") from None


def check_listed_words(
    words: Listing[str], added: Iterable[str], num_merges: int, vocab_size: int | None
) -> None:
    """Check the sizes of a tokenizer's vocabulary in a GGUF file.

    Args:
        words: all tokens of the vocabulary.
        added: tokens whose prefixes are stored, so that the sum of squared lengths is limited.
        vocab_size: number of the model's logits, None if unknown.

    Raises:
        CheckpointError: a size exceeds its limit.
    """
    most = len(words) if vocab_size is None else vocab_size + MAX_TOKENS_BEYOND
    if len(words) > most:
        raise CheckpointError(
            f"holds {len(words)} words, and the model has logits for {vocab_size}"
        )
    _check_added(added, most)
    _check_merges(num_merges, most)


def _check_bytes(path: Path, most: int) -> None:
    if path.stat().st_size > most:
        raise CheckpointError(f"{path}: larger than {most} bytes")


def _check_config(path: Path, most: int) -> None:
    """Raise CheckpointError if a JSON file adds too many or too long tokens. Invalid JSON is
    ignored.
    """
    try:
        loaded = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return
    if not isinstance(loaded, dict):
        return
    loaded.pop("chat_template", None)
    tokens = list(loaded) if path.name == "added_tokens.json" else list(_texts_of(loaded))
    try:
        _check_added(tokens, most)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _texts_of(config: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of the tokens that the content of tokenizer_config.json or a similar file
    adds.
    """
    listed = config.get("added_tokens_decoder")
    values = list(listed.values()) if isinstance(listed, dict) else []
    for name, value in config.items():
        if name.endswith("_token"):
            values.append(value)
        elif name.endswith("special_tokens") and isinstance(value, list | dict):
            values += value if isinstance(value, list) else value.values()
    for value in values:
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            yield text


def _check_tokenizer(raw: bytes, most: int) -> bool:
    """Check a tokenizer.json. Return whether a text may make the tokenizers library panic.

    Args:
        raw: content of the file.

    Raises:
        CheckpointError: a size exceeds its limit. The message does not name the file.
        ValueError, RecursionError: the content is not JSON.
    """
    parts = read_parts(raw)
    _check_words(parts.vocab, most)
    # A merge is a string or a pair of strings.
    most_merges = _most_merges(most)
    _check_merges(num_strings(parts.merges, 2 * most_merges) // 2, most)
    small = parts.small
    for name in ("normalizer", "decoder", "pre_tokenizer"):
        _check_part(name, small.get(name))
    _check_part("post_processor", small.get("post_processor"), steps=16 * MAX_STEPS)
    _check_template(small.get("post_processor"))
    factors = {name: growth(small.get(name)) for name in ("normalizer", "decoder")}
    for name, factor in factors.items():
        if factor > MAX_GROWTH:
            raise CheckpointError(
                f"the {name} makes texts up to {factor:.3g} times as long; allowed: {MAX_GROWTH}"
            )
    _check_added([str(text) for text, _ in parts.added], most)
    normalized = factors["normalizer"] * sum(len(str(text)) for text, flag in parts.added if flag)
    if normalized > MAX_NORMALIZED_CHARS:
        raise CheckpointError(
            f"the normalizer makes up to {normalized:.3g} characters of the added tokens; "
            f"allowed: {MAX_NORMALIZED_CHARS}"
        )
    _check_model(parts.model, parts.merges)
    return any(may_panic(value) for value in nodes(small))


def _most_merges(most: int) -> int:
    return _MERGES_PER_WORD * most + _MORE_MERGES


def _check_merges(num_merges: int, most: int) -> None:
    if num_merges >= _most_merges(most):
        raise CheckpointError(f"holds {_most_merges(most)} merges or more for at most {most} words")


def _check_words(vocab: memoryview, most: int) -> None:
    if num_strings(vocab, most) > most:
        raise CheckpointError(
            f"holds more than {most} words, and the model has logits for {most - MAX_TOKENS_BEYOND}"
        )
    if len(vocab) > _BYTES_PER_WORD * most + _MORE_BYTES:
        raise CheckpointError(f"has {len(vocab)} bytes of vocabulary for at most {most} words")


def _check_added(tokens: Iterable[str], most: int) -> None:
    lengths = [len(text) for text in tokens]
    if len(lengths) > most:
        raise CheckpointError(
            f"adds {len(lengths)} tokens, and the model has logits for {most - MAX_TOKENS_BEYOND}"
        )
    longest = max(lengths, default=0)
    if longest > MAX_TOKEN_CHARS:
        raise CheckpointError(
            f"an added token has {longest} characters; allowed: {MAX_TOKEN_CHARS}"
        )
    if sum(length * length for length in lengths) > MAX_TOKEN_SQUARES:
        raise CheckpointError(
            f"{len(lengths)} added tokens of up to {longest} characters are too much text"
        )


def _check_part(name: str, part: Any, steps: int = MAX_STEPS) -> None:
    """Raise CheckpointError if a part of a tokenizer.json has too many steps or too long texts.

    The normalizer's `precompiled_charsmap` is checked, too, and removed.
    """
    num_steps = 0
    for value in nodes(part):
        if isinstance(value, dict):
            num_steps += 1
            charsmap = value.pop("precompiled_charsmap", None)
            if charsmap is not None:
                _check_charsmap(name, charsmap)
            if value.get("type") == "FixedLength" and value.get("length") == 0:
                raise CheckpointError(f"the {name} cuts words of length 0")
        elif isinstance(value, str) and len(value) > _MAX_STRING_CHARS:
            raise CheckpointError(
                f"the {name} holds a text of {len(value)} characters; allowed: {_MAX_STRING_CHARS}"
            )
        if num_steps > steps:
            raise CheckpointError(f"the {name} has more than {steps} steps")


def _check_charsmap(name: str, charsmap: Any) -> None:
    """Raise CheckpointError if a normalizer's table of characters (base64) has an invalid
    structure.

    It consists of the size of a trie, the trie, and UTF-8 text.
    """
    try:
        if not isinstance(charsmap, str) or len(charsmap) > _MAX_CHARSMAP_CHARS:
            raise ValueError(f"no text of at most {_MAX_CHARSMAP_CHARS} characters")
        table = base64.b64decode(charsmap, validate=True)
        size = int.from_bytes(table[:4], "little") // 4 * 4
        if len(table) < 4 or size > len(table) - 4:
            raise ValueError(f"{len(table)} bytes cannot hold its trie")
        table[4 + size :].decode()
        if size < _SMALLEST_TRIE:
            raise ValueError(f"its trie has {size} bytes; every byte has a place in one")
    except (ValueError, binascii.Error) as error:
        raise CheckpointError(f"the {name}'s precompiled_charsmap is broken: {error}") from None


def _check_template(part: Any) -> None:
    """Raise CheckpointError if a post-processor adds too many or undefined tokens around a text."""
    for value in nodes(part):
        if not isinstance(value, dict) or not isinstance(value.get("special_tokens"), dict):
            continue
        special = value["special_tokens"]
        lists = [token.get("ids") for token in special.values() if token]
        longest = max((len(ids) for ids in lists if isinstance(ids, list)), default=0)
        pieces = max(len(value.get(name) or ()) for name in ("single", "pair"))
        if pieces * max(1, longest) > MAX_TEMPLATE_TOKENS:
            raise CheckpointError(
                f"the post_processor adds up to {pieces * longest} tokens to a text; allowed: "
                f"{MAX_TEMPLATE_TOKENS}"
            )
        named = (node.get("SpecialToken") for node in nodes(value) if isinstance(node, dict))
        unknown = [token["id"] for token in named if token and token["id"] not in special]
        if unknown:
            raise CheckpointError(f"the post_processor adds {unknown[0]!r:.80}, which it lacks")


def _check_model(model: dict[str, Any], merges: memoryview) -> None:
    """Check the settings and merges of the model in a tokenizer.json.

    With a continuing_subword_prefix, the tokenizers library cuts as many bytes as the prefix has
    from the second part of each merge. The part must have them, and the cut may not split a
    character.

    Raises:
        CheckpointError: a merge does not allow the cut, or a setting is out of its bounds.
    """
    _check_part("model", model)
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MAX_WORD_CHARS:
        raise CheckpointError(
            f"max_input_chars_per_word is {longest}; allowed: at most {MAX_WORD_CHARS}"
        )
    prefix = model.get("continuing_subword_prefix")
    if not isinstance(prefix, str) or not prefix:
        return
    start = len(prefix.encode())
    for merge in json.loads(bytes(merges)) or ():
        right = merge.split(" ")[-1] if isinstance(merge, str) else merge[-1]
        encoded = str(right).encode()
        # The library removes the prefix length from the second part without checking for the
        # prefix.
        if len(encoded) < start or (encoded[start : start + 1] > b"\x7f" and encoded[start] < 0xC0):
            raise CheckpointError(
                f"the merge {str(merge)[:80]!r} is shorter than continuing_subword_prefix "
                f"{prefix[:80]!r}"
            )
