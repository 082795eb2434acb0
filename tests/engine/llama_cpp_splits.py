"""Every split of llama.cpp's byte-level vocabularies against llama.cpp itself.

`python -m tests.engine.llama_cpp_splits --llamacpp FILE` loads the module of the package
`xllamacpp` (2026.10 was used: `pip download xllamacpp`, unpack, FILE is its xllamacpp.abi3.so) and
compares 1,000 hard texts under every name; with --model FILE.gguf, over that file's vocabulary.
Without, over one of merges across all boundaries, in which any other split gives other tokens.
--write stores digests of llama.cpp's results for the test that runs without it.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.gguf_vocabulary import SPLITS
from jaxserve.weights import read_gguf
from tests.support.gguf_files import finish

STORED = Path(__file__).parent / "data" / "llama_cpp_splits.json"
SPECIAL = ("<|bos|>", "<|im_end|>")
KEPT = 540  # as many texts, up to U+3200, are compared without llama.cpp
WORDS = (
    *("Hello", "don't", "WE'LL", "iPhone15", "café", "naïve", "Straße", "ÉTÉ", "ǅungla", "日本語"),
    *("中文字符", "한국어", "ไทย", "हिन्दी", "বাংলা", "العربية", "עברית", "ελληνικά", "русский"),
    *("👩‍👩‍👧‍👦", "🇫🇷", "❤️", "x\u0301", "e\u0301tude", "foo_bar", "a.b.c", "3.14", "1234567"),
    *("１２３", "²³½", "Ⅷ", "٣٤٥", "<|im_end|>", "<s>", "</s>", "$100", "#include", "`code`", "…"),
    *("—", "“q”", "؟", "。", "、", "\u00a0", "\u2003", "\u3000", "\u200b", "\u0085", "\t", "\n"),
    *("\r\n", "\n\n\n", "  ", "    ", " ", "'S", "'LL", "'d", "'", "\\", "/", "//", "{}", "[]("),
    *(")", "\u2028", "\x1b", "\x00", "\x7f", "ﬁ", "ſ", "İstanbul", "IMGIMGAZ", "<sentinel:12>"),
)


def hard_texts() -> list[str]:
    """Return a thousand texts: Unicode's blocks up to U+20000, runs, and mixed kinds of words."""
    generator, texts = random.Random(7), []
    for size in (*range(1, 40), 63, 64, 65, 127, 128, 129, 255, 256, 511, 512, 513):
        texts.append(" " * size + "x")
    for size in range(1, 13):
        digits = "9" * size
        texts += [digits, f"a{digits} b", "\n" * size + "x", "\t" * size]
    while len(texts) < 490:
        words = generator.choices(WORDS, k=generator.randint(1, 14))
        texts.append("".join(word + generator.choice(["", "", " ", "  ", "\n"]) for word in words))
    for first in range(0, 0x20000, 256):
        block = (chr(c) for c in range(first, first + 256) if not 0xD800 <= c <= 0xDFFF)
        texts.append("".join(block))
    return [text for text in texts if text][:1000]


def vocabulary() -> dict[str, Any]:
    """Return metadata of merges that were learned across all boundaries of words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        initial_alphabet=alphabet,
        special_tokens=list(SPECIAL),
        show_progress=False,
        max_token_length=12,
    )
    backend.train_from_iterator(hard_texts()[:490], trainer)
    made = json.loads(backend.to_str())["model"]
    return {
        "tokens": sorted(made["vocab"], key=made["vocab"].get),
        "merges": [" ".join(pair) for pair in made["merges"]],
    }


def metadata(made: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tokenizer metadata of a GGUF file with this vocabulary and this split."""
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": made["tokens"],
        "tokenizer.ggml.token_type": np.int32([3 if t in SPECIAL else 1 for t in made["tokens"]]),
        "tokenizer.ggml.merges": made["merges"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write_vocabulary(path: Path, fields: Mapping[str, Any]) -> Path:
    """Write a GGUF file that holds no weights."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(len(fields["tokenizer.ggml.tokens"]))
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
        add(64)
    writer.add_head_count(1)
    writer.add_feed_forward_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in fields.items():
        if isinstance(value, np.ndarray | list):
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key.startswith("tokenizer."):
            writer.add_string(key, value)
    finish(writer)
    return path


class _Settings(ctypes.Structure):
    """The settings of llama.cpp's loader, of which one counts here."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("devices", "overrides")),
        *((name, ctypes.c_int32) for name in ("layers", "split", "load", "lazy", "main")),
        *((name, ctypes.c_void_p) for name in ("share", "call", "data", "fields")),
        *((name, ctypes.c_bool) for name in ("vocab_only", "a", "b", "c", "d", "e")),
    )


class LlamaCpp:
    """llama.cpp's tokenizers, by its C interface."""

    def __init__(self, library: Path) -> None:
        self._code = code = ctypes.CDLL(str(library))
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._quiet = quiet(lambda level, text, data: None)
        code.llama_log_set(self._quiet, None)
        code.llama_backend_init()
        pointer = ctypes.c_void_p
        code.llama_model_default_params.restype = _Settings
        code.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _Settings]
        code.llama_model_load_from_file.restype = pointer
        code.llama_model_get_vocab.argtypes = code.llama_model_free.argtypes = [pointer]
        code.llama_model_get_vocab.restype = pointer
        code.llama_vocab_n_tokens.argtypes = [pointer]
        code.llama_vocab_is_eog.argtypes = [pointer, ctypes.c_int32]
        code.llama_vocab_is_eog.restype = ctypes.c_bool
        code.llama_tokenize.argtypes = [
            *(pointer, ctypes.c_char_p, ctypes.c_int32, pointer, ctypes.c_int32),
            *(ctypes.c_bool, ctypes.c_bool),
        ]

    def read(self, path: Path, texts: Iterable[str]) -> tuple[list[list[int]], list[int]]:
        """Return the token ids of texts, with special tokens, and the ids that end answers."""
        settings = self._code.llama_model_default_params()
        settings.vocab_only = True
        model = self._code.llama_model_load_from_file(str(path).encode(), settings)
        if not model:
            raise ValueError(f"llama.cpp cannot load {path}")
        vocabulary = self._code.llama_model_get_vocab(model)
        found = []
        for text in texts:
            data = text.encode()
            room = (ctypes.c_int32 * (len(data) + 16))()
            arguments = (vocabulary, data, len(data), room, len(room), True, True)
            found.append(list(room[: self._code.llama_tokenize(*arguments)]))
        size = self._code.llama_vocab_n_tokens(vocabulary)
        ends = [token for token in range(size) if self._code.llama_vocab_is_eog(vocabulary, token)]
        self._code.llama_model_free(model)
        return found, ends


def digest(ids: Sequence[list[int]], apart: Sequence[int]) -> str:
    """Return a digest of the kept texts' token ids, without the texts `apart`."""
    kept = [ids[number] for number in range(KEPT) if number not in set(apart)]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]


def compare(
    library: Path, names: Iterable[str], fields: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    """Print differences; return a digest for each name, and the numbers of texts apart."""
    code, texts, found = LlamaCpp(library), hard_texts(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = write_vocabulary(Path(folder) / "m.gguf", fields(name))
            theirs, _ = code.read(path, texts)
            made = gguf_tokenizer(fields(name), name)
            ours = [made.encode(text) for text in texts]
            pairs = enumerate(zip(theirs, ours, strict=True))
            apart = [number for number, (a, b) in pairs if a != b]
            found[name] = {"digest": digest(theirs, apart), "apart": apart}
            example = repr(texts[apart[0]])[:60] if apart else ""
            print(f"{name:24} {len(apart):4} of {len(texts)} differ {example}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llamacpp", type=Path, metavar="FILE", required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    names = arguments.names or list(SPLITS)
    if arguments.model is not None:
        whole = dict(read_gguf(arguments.model).metadata)
        own = {key: value for key, value in whole.items() if key.startswith("tokenizer.")}
        own = {key: value for key, value in own.items() if "add_" not in key}
        own["general.architecture"] = "llama"
        compare(arguments.llamacpp, names, lambda name: own | {"tokenizer.ggml.pre": name})
        return
    made = vocabulary()
    found = compare(arguments.llamacpp, names, lambda name: metadata(made, name))
    if arguments.write:
        text = json.dumps({"vocabulary": made, "splits": found}, ensure_ascii=False, indent=0)
        STORED.write_text(text + "\n")


if __name__ == "__main__":
    main()
