"""Tokenizers built from GGUF metadata equal the tokenizers that the metadata was written from."""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from jaxserve import LLM, CheckpointError, EngineConfig
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import GgufSource
from jaxserve.text.gguf_tokenizer import gguf_tokenizer, save_tokenizer
from jaxserve.text.gguf_vocabulary import SPLITS, gguf_ends
from jaxserve.text.tokenizer import Tokenizer as OurTokenizer
from jaxserve.weights import GgufFile
from tests.engine.llama_cpp_splits import KEPT, STORED, digest, hard_texts
from tests.engine.llama_cpp_splits import metadata as fields_of
from tests.support.checkpoint import CHAT_TEMPLATE
from tests.support.gguf_files import random_tensors, raw_config, write_gguf

pytestmark = pytest.mark.usefixtures("quick_code")

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the cat sat on the mat",
    "a thing, the other thing; 1234567",
    "été là-bas où ça",
    "\n\n x",
]
TEXTS = [*CORPUS, "  leading", "tail  ", "日本語 🙂", "don't", "a<|user|>b", "", " "]
SPECIAL = ["<|bos|>", "<|end|>", "<|user|>", "<|bot|>"]


def ours(metadata: dict[str, Any], vocab_size: int) -> OurTokenizer:
    return OurTokenizer.of(gguf_tokenizer(metadata, "m.gguf"), "m.gguf", vocab_size)


def byte_level() -> tuple[Tokenizer, dict[str, Any]]:
    """Return a trained byte-level BPE, and the metadata that llama.cpp's converter would write."""
    backend = Tokenizer(models.BPE(ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=310, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokens = [backend.id_to_token(index) for index in range(backend.get_vocab_size())]
    merges = json.loads(backend.to_str())["model"]["merges"]
    return backend, {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.int32([3 if t in SPECIAL else 1 for t in tokens]),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def test_byte_level_vocabulary():
    backend, metadata = byte_level()
    tokenizer = ours(metadata, 310)
    for text in TEXTS:
        want = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == [0, *want]
        assert tokenizer.encode(text, add_special_tokens=False) == want
        assert tokenizer.decode(want, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == 1
    messages = [{"role": "user", "content": "the <|end|> cat"}]
    got = tokenizer.render_chat(messages)
    assert got[:2] == [0, 2] and got[-2:] == [1, 3] and 1 not in got[2:-2]


def test_special_tokens_in_other_letters():
    """DeepSeek's special tokens, with the metadata's usual size and without added tokens."""
    _, metadata = byte_level()
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[:4] = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think ▁>"]
    kinds = metadata["tokenizer.ggml.token_type"].copy()
    kinds[3] = 4
    tokenizer = ours(
        metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}, 310
    )
    text = "the<｜User｜>cat<think ▁><｜end▁of▁sentence｜>"
    plain = [tokenizer.encode(word, add_special_tokens=False) for word in ("the", "cat")]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [*plain[0], 2, *plain[1], 3, 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "thecat<think ▁>"
    assert tokenizer.eos_token_id == 1


# The pieces of a text under llama.cpp's splits, between bars.
PIECES = {
    "deepseek-llm": "the| cat|'|s| |12345| |日本|x| +=|\n|\n|;|a|1",
    "deepseek-v3": "the| cat|'s| |123|45| |日本|x| +=\n\n|;a|1",
    "refact": "the| cat|'s| |1|2|3|4|5| 日本x| +=|\n|\n|;|a|1",
    "command-r": "the| cat|'s| |1|2|3|4|5| 日本x| +=|\n|\n|;|a|1",
}


@pytest.mark.parametrize("split", PIECES)
def test_how_text_is_split(split):
    _, metadata = byte_level()
    made = gguf_tokenizer(metadata | {"tokenizer.ggml.pre": split}, "m.gguf")
    text = "the cat's 12345 日本x +=\n\n;a1"
    pieces = made.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert "|".join(text[first:last] for _, (first, last) in pieces) == PIECES[split]
    if split == "refact":
        granite = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
        )
        assert granite.pre_tokenize_str(text) == pieces


def test_every_split_is_llama_cpps():
    """Tokens of hard texts, over merges across all boundaries, as llama.cpp gave them.

    For the texts `apart`, llama.cpp only approximates the model's own pattern.
    """
    stored = json.loads(STORED.read_text())
    assert set(stored["splits"]) == set(SPLITS)
    texts, made = hard_texts()[:KEPT], {}
    for name, want in stored["splits"].items():
        if SPLITS[name] not in made:
            tokenizer = gguf_tokenizer(fields_of(stored["vocabulary"], name), name)
            made[SPLITS[name]] = [tokenizer.encode(text) for text in texts]
        assert digest(made[SPLITS[name]], want["apart"]) == want["digest"], name


def test_no_token_but_the_files_own():
    """Special tokens that such vocabularies commonly have are absent too."""
    _, of_bytes = byte_level()
    of_characters = sentencepiece()
    others = {"<s>": "<begin>", "</s>": "<stop>", "<unk>": "<none>"}
    renamed = [others.get(token, token) for token in of_characters["tokenizer.ggml.tokens"]]
    for fields in (of_bytes, of_characters | {"tokenizer.ggml.tokens": renamed}):
        tokens = fields["tokenizer.ggml.tokens"]
        tokenizer = gguf_tokenizer(fields, "m.gguf")
        assert tokenizer.get_vocab() == {token: index for index, token in enumerate(tokens)}
        for name in tokenizer.all_special_tokens:
            assert name in tokens
        assert ours(fields, len(tokens)).encode("the")


@pytest.mark.parametrize("kind", ["bytes", "characters"])
def test_transformers_reads_the_same_from_the_saved_files(kind, tmp_path):
    """The token that is named as padding has the type of a word."""
    fields = byte_level()[1] if kind == "bytes" else sentencepiece()
    size = len(fields["tokenizer.ggml.tokens"])
    fields = fields | {"tokenizer.ggml.padding_token_id": size - 1}
    made = ours(fields, size)
    save_tokenizer(fields, "m.gguf", tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    padding = fields["tokenizer.ggml.tokens"][size - 1]
    for text in [*TEXTS, f"a{padding}b"]:
        assert made.encode(text) == theirs.encode(text)
    assert made.special_ids >= set(theirs.all_special_ids) >= {size - 1}
    assert made.eos_token_id == theirs.eos_token_id


def test_a_file_is_read_without_transformers(tmp_path):
    _, fields = byte_level()
    code = (
        "import json, pathlib, sys\n"
        "from jaxserve.text.gguf_tokenizer import gguf_tokenizer\n"
        "gguf_tokenizer(json.loads(pathlib.Path(sys.argv[1]).read_text()), 'm.gguf')\n"
        "assert 'transformers' not in sys.modules"
    )
    path = tmp_path / "fields.json"
    path.write_text(json.dumps(fields, default=np.ndarray.tolist))
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


def test_a_missing_split_is_the_default():
    _, fields = byte_level()
    del fields["tokenizer.ggml.pre"]
    default = gguf_tokenizer(fields | {"tokenizer.ggml.pre": "default"}, "m.gguf")
    for text in TEXTS:
        assert gguf_tokenizer(fields, "m.gguf").encode(text) == default.encode(text)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model", "t5", "unigrams"),
        ("model", "bert", "WordPiece"),
        ("model", "rwkv", "RWKV"),
        ("model", "plamo2", "PLaMo-2"),
        ("pre", "gemma4", "characters in place of bytes"),
    ],
)
def test_kinds_that_are_not_built_say_what_is_missing(field, value, named):
    _, fields = byte_level()
    with pytest.raises(CheckpointError, match=rf"'{value}', which needs .*{named}"):
        gguf_tokenizer(fields | {f"tokenizer.ggml.{field}": value}, "m.gguf")


def in_characters() -> tuple[Tokenizer, dict[str, Any]]:
    """Return a trained BPE of characters like Gemma 4's, and its metadata."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|user|>"]
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special + letters)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    backend = Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<bos>", "<|user|>"])
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return backend, {
        "general.architecture": "gemma4",
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.full(len(tokens), -1000, np.float32),
        "tokenizer.ggml.token_type": np.int32([3] * 5 + [6] * 256 + [1] * (len(tokens) - 261)),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }


def test_merges_of_characters_of_gemma_4():
    backend, fields = in_characters()
    tokenizer = ours(fields, len(fields["tokenizer.ggml.tokens"]))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == backend.encode(text, add_special_tokens=False).ids, text
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text
        assert tokenizer.encode(text) == [2, *ids]
    with pytest.raises(CheckpointError, match=r'merges is missing.*"gemma4"'):
        gguf_tokenizer(fields | {"tokenizer.ggml.merges": None}, "m.gguf")


GEMMA_RUN = 7  # longest run of blanks that is a token (31 in Gemma's)


def gemma() -> dict[str, Any]:
    """Return a vocabulary with runs of blanks, spelled as in Gemma's files."""
    runs = [" " * size for size in range(2, GEMMA_RUN + 1)]
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *runs, "</s>", "a", "b", "▁a", "▁"]
    kinds = [3] * 4 + [4] * (len(runs) + 1) + [1] * 4
    return {
        "general.architecture": "gemma3",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.full(len(pieces), -1000, np.float32),
        "tokenizer.ggml.token_type": np.int32(kinds),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


def test_runs_of_blanks_of_gemma():
    """As its tokenizer.json: the longest first, and the blanks' sign in a text apart from them."""
    fields = gemma()
    tokens = fields["tokenizer.ggml.tokens"]
    tokenizer = ours(fields, len(tokens))
    for size in range(2, 4 * GEMMA_RUN):
        whole, rest = divmod(size, GEMMA_RUN)
        want = [tokens.index(" " * GEMMA_RUN)] * whole
        want += [tokens.index({0: "", 1: "▁"}.get(rest, " " * rest))] if rest else []
        ids = tokenizer.encode(" " * size + "b", add_special_tokens=False)
        assert ids == [*want, tokens.index("b")], size
        assert tokenizer.decode(ids) == " " * size + "b"
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == " " * size + "b"
    ids = tokenizer.encode("▁▁ a", add_special_tokens=False)
    assert ids == [tokens.index("  "), tokens.index("▁a")]


ENDS: dict[str, tuple[dict[str, int], list[int]]] = {
    "turns": ({"<|im_start|>": 3, "<|im_end|>": 3, "<end_of_turn>": 1, "<|eot_id|>": 3}, [1, 2, 3]),
    "of_text": ({"</s>": 3, "<|endoftext|>": 3, "[EOS]": 3}, [0, 1, 2]),
    "html": ({"</s>": 4, "<eos>": 3}, [1]),
    "harmony": ({"<|end|>": 3, "<|return|>": 3, "<|call|>": 3}, [1, 2]),
    "phi": ({"<|end|>": 3, "<|call|>": 3}, [0, 1]),
    "code": ({"<|fim_pad|>": 3, "<|repo_name|>": 3, "<|file_sep|>": 3, "<PAD>": 3}, [0, 1, 2]),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends_are_known_by_their_text(case):
    types, want = ENDS[case]
    fields = {
        "tokenizer.ggml.tokens": [*types, "x"],
        "tokenizer.ggml.token_type": np.int32([*types.values(), 1]),
    }
    assert gguf_ends(fields) == want
    named = fields | {"tokenizer.ggml.eos_token_id": len(types)}
    assert gguf_ends(named) == [len(types), *want]
    named = fields | {"tokenizer.ggml.fim_pad_token_id": len(types)}
    assert gguf_ends(named)[0] == len(types)


def test_an_end_marked_as_a_word_is_special():
    _, fields = byte_level()
    kinds = fields["tokenizer.ggml.token_type"].copy()
    tokens = list(fields["tokenizer.ggml.tokens"])
    tokens[3], kinds[3] = "<|im_end|>", 1
    changed = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = ours(fields | changed, len(tokens))
    ids = tokenizer.encode("the<|im_end|>", add_special_tokens=False)
    assert (ids[-1], tokenizer.decode(ids)) == (3, "the")


def sentencepiece() -> dict[str, Any]:
    """Return metadata of a vocabulary with scores, without merges, and with bytes as a fallback."""
    words = ["▁the", "▁cat", "the", "▁t", "he", "at", "▁c", "in", "ing", "th", "thing", "▁thing"]
    letters = sorted({*"▁abcdefghijklmnopqrstuvwxyz,;1234567-é"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0] * len(letters)
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": np.float32(scores),
        "tokenizer.ggml.token_type": np.int32(kinds),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def merged(text: str, metadata: dict[str, Any], prefix: str) -> list[int]:
    """Tokenize as SentencePiece does: join the neighbours with the best score, and repeat."""
    pieces = metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(pieces, metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(prefix + text.replace(" ", "▁"))
    while True:
        neighbours = enumerate(itertools.pairwise(symbols))
        pairs = [(scores.get(a + b), -i) for i, (a, b) in neighbours]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        spelled = [symbol] if symbol in scores else [f"<0x{b:02X}>" for b in symbol.encode()]
        ids += [pieces.index(piece) for piece in spelled]
    return ids


@pytest.mark.parametrize("prefix", [True, False])
def test_vocabulary_with_scores(prefix):
    metadata = sentencepiece() | ({} if prefix else {"tokenizer.ggml.add_space_prefix": False})
    tokenizer = ours(metadata, 400)
    for text in ["the cat", "thing", "a thing, the other thing; 12", "日本 é", "ththe", "in  in"]:
        want = merged(text, metadata, "▁" if prefix else "")
        assert tokenizer.encode(text) == [1, *want]
        assert tokenizer.decode(want) == text
    assert (tokenizer.eos_token_id, tokenizer.decode([1, 2])) == (2, "")


def test_parts_between_special_tokens():
    """Each part begins with a blank, as in llama.cpp.

    Special tokens of Phi-3 absorb the blanks that follow.
    """
    fields = sentencepiece()
    tokens = fields["tokenizer.ggml.tokens"]
    the, end = tokens.index("▁the"), 2
    assert ours(fields, 400).encode("the</s>the", add_special_tokens=False) == [the, end, the]
    text = "</s> \n the<s> the"
    assert ours(fields, 400).encode(text, add_special_tokens=False)[:2] == [end, tokens.index("▁")]
    phi3 = ours(fields | {"general.architecture": "phi3"}, 400)
    assert phi3.encode(text, add_special_tokens=False) == [end, the, 1, tokens.index("▁"), the]


@pytest.mark.parametrize("flags", [(True, True), (False, True), (False, False)])
def test_what_begins_and_ends_a_text(flags):
    begins, ends = flags
    metadata = sentencepiece() | {
        "tokenizer.ggml.add_bos_token": begins,
        "tokenizer.ggml.add_eos_token": ends,
    }
    ids = ours(metadata, 400).encode("the")
    assert (ids[0] == 1, ids[-1] == 2) == flags


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no_kind": ({"tokenizer.ggml.model": None}, "tokenizer=DIR"),
    "other_kind": ({"tokenizer.ggml.model": "bert"}, "'bert'"),
    "other_split": ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "x"}, "'x'"),
    "no_merges": (
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2"},
        "tokenizer.ggml.merges is missing",
    ),
    "end_beyond": ({"tokenizer.ggml.eos_token_id": 10**9}, "eos_token_id"),
    "end_is_text": ({"tokenizer.ggml.eos_token_id": "</s>"}, "eos_token_id"),
    "tokens_are_numbers": ({"tokenizer.ggml.tokens": np.int32([1, 2])}, "tokenizer"),
    "scores_cut": ({"tokenizer.ggml.scores": np.float32([0, 1])}, "do not fit"),
    "scores_are_text": ({"tokenizer.ggml.scores": "none"}, "do not fit"),
    "template_is_a_number": ({"tokenizer.chat_template": 5}, "chat_template"),
    "template_is_long": ({"tokenizer.chat_template": "x" * (2 << 20)}, "chat_template"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata(case):
    metadata, named = BAD[case]
    with pytest.raises(CheckpointError, match=named):
        ours(sentencepiece() | metadata, 400)


def test_vocabulary_beyond_the_logits():
    with pytest.raises(CheckpointError, match=r"m\.gguf.*logits for 20"):
        ours(sentencepiece(), 20)


def whole_model(folder: Path) -> tuple[Path, Tokenizer]:
    """Return a GGUF file with weights and a vocabulary, and the tokenizer that it must give."""
    backend, metadata = byte_level()
    raw = raw_config("llama") | {"vocab_size": 310}
    metadata = {key: value for key, value in metadata.items() if key.startswith("tokenizer")}
    metadata["tokenizer.ggml.token_type"] = metadata["tokenizer.ggml.token_type"].tolist()
    metadata["tokenizer.ggml.eot_token_id"] = 3
    tensors = random_tensors(raw)
    return write_gguf(folder / "m.gguf", "llama", tensors, metadata=metadata, raw=raw), backend


def test_a_file_is_a_model(tmp_path: Path):
    """Configuration, tokenizer and ends out of one file."""
    path, backend = whole_model(tmp_path)
    config = EngineConfig(model=path)
    source = find_source(config)
    assert source.generation_config == {"eos_token_id": [1, 3]}
    assert source.model_config.eos_token_ids == (1,)
    text = "the cat sat"
    assert source.tokenizer(config).encode(text)[1:] == backend.encode(text).ids


def test_the_words_are_not_held_while_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of Gemma 3 are 262,144 strings of Python."""
    path, _ = whole_model(tmp_path)
    held: list[list[str]] = []

    def load(source: GgufSource, *_: Any, **__: Any) -> None:
        gc.collect()
        files = [found for found in gc.get_objects() if type(found) is GgufFile]
        keys = [key for file in files if file.path == path for key in file.metadata]
        held.append([key for key in keys if "token" in key])
        assert keys
        raise CheckpointError("read no further")

    monkeypatch.setattr(GgufSource, "load", load)
    with pytest.raises(CheckpointError, match="read no further"):
        LLM(path)
    assert held == [[]]
