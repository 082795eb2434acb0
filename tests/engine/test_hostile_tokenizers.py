"""Tokenizer files that take gigabytes, or make the library panic: refused, one by one, in time."""

from __future__ import annotations

import base64
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import CheckpointError, InvalidRequest, SamplingParams
from jaxserve.text import tokenizer as tokenizer_module
from jaxserve.text import tokenizer_parts
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.gguf_vocabulary import SPLITS
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizer_calls import TokenizerFailure
from tests.support.checkpoint import byte_tokenizer

pytestmark = pytest.mark.usefixtures("quick_code")

SIZE = 260
FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
MILLION = 1_000_000
FILE = "tokenizer.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def write(sound: Path, tmp_path: Path) -> Callable[..., Path]:
    """Write a tokenizer whose tokenizer.json, or another file, has other fields."""

    def written(name: str = FILE, **fields: Any) -> Path:
        for path in sound.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes())
        path = tmp_path / name
        kept = json.loads(path.read_text()) if path.exists() else {}
        model = kept.get("model", {}) | fields.pop("model", {})
        path.write_text(json.dumps(kept | ({"model": model} if model else {}) | fields))
        return tmp_path

    return written


def refused(directory: Path, match: str) -> None:
    """Check that a folder is refused within a second of CPU time, of all threads."""
    started = time.process_time()
    with pytest.raises(CheckpointError, match=match) as raised:
        Tokenizer(directory, SIZE)
    assert time.process_time() - started < 1
    assert len(str(raised.value)) < 1000 and "\n" not in str(raised.value)


def added(*texts: str) -> list[dict[str, Any]]:
    made = enumerate(texts)
    return [{"id": SIZE + at, "content": text, "special": False, **FLAGS} for at, text in made]


def chain(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def nested(kind: str, depth: int) -> str:
    return f'{{"type": "Sequence", "{kind}": [' * depth + "]}" * depth


TEN = replace({"String": "a"}, "a" * 10)
ANY = replace({"Regex": "."}, "ab" * 5)
BEFORE = replace({"Regex": "(?=a)"}, "aaa")
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"x": {"id": "x", "ids": [1] * 99_999, "tokens": ["x"] * 99_999}},
}
PIECES = TEMPLATE | {"single": TEMPLATE["single"][:1] * 2000, "special_tokens": {}}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a token of 5 MB": ({"added_tokens": added("x" * 5 * MILLION)}, "added token.*5000000"),
    "many long tokens": (
        {"added_tokens": added(*(f"{at}".ljust(1000, "x") for at in range(300)))},
        "300 added tokens",
    ),
    "100,000 added tokens": (
        {"added_tokens": added(*map(str, range(100_000)))},
        "100000 tokens.*logits for 260",
    ),
    "six rules": ({"normalizer": chain("normalizers", *[TEN] * 6)}, "normalizer.*1e\\+06"),
    "six rules of patterns": ({"normalizer": chain("normalizers", *[ANY] * 6)}, "normalizer.*1e"),
    "rules of empty matches": ({"normalizer": chain("normalizers", *[BEFORE] * 6)}, "normalizer"),
    "old-style rules": ({"normalizer": {"normalizers": [TEN] * 6}}, "normalizer"),
    "a long beginning": (
        {"normalizer": {"type": "Prepend", "prepend": "x" * 100_000}},
        "normalizer.*100000 characters",
    ),
    "beginnings in a row": (
        {"normalizer": chain("normalizers", *[{"type": "Prepend", "prepend": "x" * 99}] * 5)},
        "normalizer",
    ),
    "a long content": ({"normalizer": replace({"String": "a"}, "b" * MILLION)}, "normalizer"),
    "a rule for nothing": ({"normalizer": replace({"String": ""}, "x" * 999)}, "normalizer"),
    "many steps": ({"normalizer": chain("normalizers", *[{"type": "NFC"}] * 999)}, "256 steps"),
    "decoders": ({"decoder": chain("decoders", *[TEN] * 6)}, "decoder.*1e\\+06"),
    "a long suffix": ({"decoder": {"type": "BPEDecoder", "suffix": "x" * MILLION}}, "decoder"),
    "a long pattern": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "a|" * MILLION}}},
        "pre_tokenizer.*2000000",
    ),
    "tokens around a text": ({"post_processor": TEMPLATE}, "post_processor.*tokens to a text"),
    "many pieces": ({"post_processor": PIECES}, "post_processor"),
    "words of no length": (
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        "pre_tokenizer.*length 0",
    ),
    "a token that is not there": (
        {"post_processor": TEMPLATE | {"special_tokens": {}}},
        "post_processor adds 'x'",
    ),
    "long words": ({"model": {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word"),
    "snowmen": (
        {"model": {"continuing_subword_prefix": "☃" * 10, "merges": ["a b"]}},
        "merge 'a b'.*continuing_subword_prefix",
    ),
    "half a snowman": (
        {"model": {"continuing_subword_prefix": "x", "merges": [["a", "☃"]]}},
        "merge.*continuing_subword_prefix",
    ),
}
CHARSMAPS = {
    "no base64": "%%%",
    "empty": "",
    "no trie": base64.b64encode(struct.pack("<I", 4) + b"\0" * 4).decode(),
    "too short": base64.b64encode(b"abc").decode(),
    "a trie beyond the end": base64.b64encode(struct.pack("<I", 100) + b"x").decode(),
    "no UTF-8": base64.b64encode(struct.pack("<I", 8) + b"\0" * 8 + b"\xff\xfe").decode(),
    "a list": [1],
    "huge": "A" * (9 << 20),
}


@pytest.mark.parametrize("case", FIELDS)
def test_a_file_beyond_its_limits_is_refused(case: str, write: Callable[..., Path]) -> None:
    fields, match = FIELDS[case]
    refused(write(**fields), match)


@pytest.mark.parametrize("case", CHARSMAPS)
def test_a_broken_table_of_characters_is_refused(
    case: str, write: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    step = {"type": "Precompiled", "precompiled_charsmap": CHARSMAPS[case]}
    refused(write(normalizer=chain("normalizers", step)), "precompiled_charsmap")
    assert capfd.readouterr().err == ""


def test_what_would_panic_prints_nothing(
    write: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    refused(write(**FIELDS["snowmen"][0]), "continuing_subword_prefix")
    assert capfd.readouterr().err == ""


def test_a_panic_at_loading_is_an_error_of_the_file(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that no check foresees."""
    monkeypatch.setattr(tokenizer_module, "check_tokenizer_files", lambda *_: False)
    directory = write(**FIELDS["snowmen"][0])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a readable.*out of range"):
        Tokenizer(directory, SIZE)


WORDS = {
    "words": lambda: ",".join(f'"w{at}": {at}' for at in range(2 * MILLION)).join("{}"),
    "spaced words": lambda: ",".join(f'"w{at}"  :{at}' for at in range(100_000)).join("{}"),
    "pieces": lambda: ",".join(f'["w{at}",-1]' for at in range(100_000)).join("[]"),
    "a long word": lambda: f'{{"{"x" * 5 * MILLION}": 0}}',
    "quotation marks": lambda: f'{{"{chr(92) + chr(34)}": 0, "{"x" * 5 * MILLION}": 1}}',
}


@pytest.mark.parametrize(
    ("kind", "has_msgspec"), [*((kind, True) for kind in WORDS), ("pieces", False)]
)
def test_a_vocabulary_of_another_size_is_refused_unread(
    kind: str, has_msgspec: bool, write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without msgspec the whole file is parsed, which is slower."""
    directory = write()
    text = json.dumps(json.loads((directory / FILE).read_text())["model"] | {"vocab": "HERE"})
    (directory / FILE).write_text(f'{{"model": {text.replace(json.dumps("HERE"), WORDS[kind]())}}}')
    if not has_msgspec:
        monkeypatch.setitem(sys.modules, "msgspec", None)
    refused(directory, r"holds more than 324 words.*logits for 260|bytes of vocabulary")


@pytest.mark.parametrize("merge", ['"a b"', '["a","b"]'])
def test_merges_by_the_million_are_refused(merge: str, write: Callable[..., Path]) -> None:
    directory = write(model={"merges": ["HERE"]})
    text = (directory / FILE).read_text().replace('"HERE"', ",".join([merge] * MILLION))
    (directory / FILE).write_text(text)
    refused(directory, "merges or more")


@pytest.mark.parametrize("kind", ["normalizers", "decoders", "pretokenizers", "processors"])
@pytest.mark.parametrize("depth", [10_000, 300])
def test_sequences_in_sequences_are_refused(
    kind: str, depth: int, write: Callable[..., Path]
) -> None:
    name = {"normalizers": "normalizer", "decoders": "decoder", "pretokenizers": "pre_tokenizer"}
    directory = write(**{name.get(kind, "post_processor"): "HERE"})
    path = directory / FILE
    path.write_text(path.read_text().replace('"HERE"', nested(kind, depth)))
    refused(directory, r"tokenizer\.json")


TOKEN = {"content": "x" * 5 * MILLION, "special": True, **FLAGS}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "a long name": ("tokenizer_config.json", {"bos_token": "x" * 5 * MILLION}),
    "a long token": ("tokenizer_config.json", {"pad_token": TOKEN}),
    "listed tokens": (
        "tokenizer_config.json",
        {"added_tokens_decoder": {str(at): {"content": str(at)} for at in range(100_000)}},
    ),
    "other tokens": ("tokenizer_config.json", {"extra_special_tokens": ["x" * 5 * MILLION]}),
    "named tokens": ("tokenizer_config.json", {"extra_special_tokens": {"x": "x" * 5 * MILLION}}),
    "a long file": ("tokenizer_config.json", {"other": "x" * 17 * MILLION}),
    "the map": ("special_tokens_map.json", {"additional_special_tokens": [TOKEN]}),
    "added tokens": ("added_tokens.json", {str(at): at for at in range(100_000)}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_files_beside_it_have_limits_too(case: str, write: Callable[..., Path]) -> None:
    name, fields = CONFIGS[case]
    refused(write(name, **fields), name)


def test_a_long_template_is_refused_unread(write: Callable[..., Path]) -> None:
    directory = write()
    (directory / "chat_template.jinja").write_text("x" * 5 * MILLION)
    refused(directory, r"chat_template\.jinja")


def test_settings_for_training_change_no_prompt(write: Callable[..., Path]) -> None:
    padding = {
        "strategy": {"Fixed": 1 << 31},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|bos|>",
    }
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer(write(padding=padding, truncation=truncation), SIZE)
    assert len(tokenizer.encode("abc")) == 3


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


LETTERS = {"<|bos|>": 0, "<|end|>": 1, "<|user|>": 2, "<|bot|>": 3, "a": 4}
PIECES_OF = [[text, -1.0] for text in LETTERS]
# Tokenizers that the library cannot run, by fields of tokenizer.json.
FAILING: dict[str, dict[str, Any]] = {
    "backtracking": {"pre_tokenizer": split("(a+)+$")},
    "backtracking in a rule": {"normalizer": replace({"Regex": "(a+)+$"}, "b")},
    "a table that points beyond its end": {
        "normalizer": {
            "type": "Precompiled",
            "precompiled_charsmap": base64.b64encode(
                struct.pack("<I", 1024) + b"\xff" * 1024
            ).decode(),
        }
    },
    "Unigram": {"model": {"type": "Unigram", "vocab": PIECES_OF, "unk_id": None}},
    "WordLevel": {"model": {"type": "WordLevel", "vocab": LETTERS, "unk_token": "<unk>"}},
    "WordPiece": {
        "model": {
            "type": "WordPiece",
            "vocab": LETTERS,
            "unk_token": "<unk>",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        }
    },
    "BPE": {"model": {"type": "BPE", "vocab": LETTERS, "merges": [], "unk_token": "<unk>"}},
}
HARD = "a" * 30 + "b"


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("case", FAILING)
def test_a_text_that_the_library_cannot_tokenize_is_refused(
    case: str, write: Callable[..., Path], sound: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write()
    fields = json.loads((sound / FILE).read_text()) | FAILING[case]
    (directory / FILE).write_text(json.dumps(fields))
    tokenizer = Tokenizer(directory, SIZE)
    for call, param in (
        (lambda: tokenizer.encode(HARD), "prompt"),
        (lambda: tokenizer.encode(HARD * 300), "prompt"),
        (lambda: tokenizer.encode_data(HARD), "prompt"),
        (lambda: tokenizer.encode_word(HARD), "prompt"),
        (lambda: tokenizer.render_chat([{"role": "user", "content": HARD}]), "messages"),
        (
            lambda: tokenizer.render_chat([{"role": "user", "content": "<|end|>" + HARD}]),
            "messages",
        ),
    ):
        caplog.clear()
        with pytest.raises(InvalidRequest, match=f"cannot encode {param}") as raised:
            call()
        [record] = caplog.records
        assert record.exc_info is None and "\n" not in record.getMessage()
        assert raised.value.parameter == param and len(str(raised.value)) < 500


def test_a_panic_prints_nothing_and_hides_nothing(
    write: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """Rust's own messages are left out, with any RUST_BACKTRACE. Other output appears."""
    tokenizer = Tokenizer(write(pre_tokenizer=split("(a+)+$")), SIZE)
    ended, writers = threading.Event(), []

    def write_lines(number: int) -> None:
        count = 0
        while not ended.is_set():
            os.write(2, f"line {number} {count}\n".encode())
            count += 1
            time.sleep(0.001)
        writers.append((number, count))

    threads = [threading.Thread(target=write_lines, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for text in [HARD, "abc"] * 3:
        with suppress(InvalidRequest):
            tokenizer.encode(text)
    ended.set()
    for thread in threads:
        thread.join()
    lines = capfd.readouterr().err.splitlines()
    assert sorted(lines) == sorted(f"line {n} {at}" for n, count in writers for at in range(count))


def test_only_the_first_panic_of_an_unsuspected_tokenizer_prints(
    write: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(write(pre_tokenizer=split("(a+)+$")), SIZE)
    tokenizer.calls.may_panic = False
    for is_silent in (False, True):
        with pytest.raises(InvalidRequest):
            tokenizer.encode(HARD)
        assert (capfd.readouterr().err == "") is is_silent


def test_few_published_patterns_are_suspected() -> None:
    """One has repetitions in repetitions, of letters with marks between blanks."""
    patterns = {pattern for found in SPLITS.values() for pattern in found.patterns}
    suspected = [text for text in patterns if tokenizer_parts.may_panic({"Regex": text})]
    assert len(patterns) > 20 and len(suspected) <= 1


def test_tokens_that_the_library_cannot_decode_end_one_request(write: Callable[..., Path]) -> None:
    """The library's Strip decoder panics on a token shorter than the text that it strips."""
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 5}
    tokenizer = Tokenizer(write(decoder=strip), SIZE)
    [token] = tokenizer.encode("a")
    with pytest.raises(InvalidRequest, match="cannot decode"):
        tokenizer.decode([token])
    with pytest.raises(TokenizerFailure):
        Detokenizer(tokenizer, [token], SamplingParams())
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    with pytest.raises(TokenizerFailure):
        detokenizer.add(token)


def listed(tokens: list[str], kinds: list[int], **fields: Any) -> dict[str, Any]:
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(len(tokens), np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        **fields,
    }


GGUF: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a long word": (lambda: listed(["a", "x" * 5 * MILLION], [1, 1]), "5000000 characters"),
    "a long control token": (
        lambda: (
            listed(["a", "x" * 5 * MILLION], [1, 3])
            | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": []}
        ),
        "5000000 characters",
    ),
    "many words": (
        lambda: listed([str(at) for at in range(100_000)], [1] * 100_000),
        "100000 words.*logits for 260",
    ),
    "many merges": (
        lambda: (
            listed(["a"], [1])
            | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a a"] * MILLION}
        ),
        "merges or more",
    ),
}


@pytest.mark.parametrize("case", GGUF)
def test_vocabularies_of_gguf_files_have_the_same_limits(case: str) -> None:
    make, match = GGUF[case]
    metadata = make()
    started = time.thread_time()
    with pytest.raises(CheckpointError, match=match):
        gguf_tokenizer(metadata, "m.gguf", SIZE)
    assert time.thread_time() - started < 1


def test_published_rules_are_within_the_limits() -> None:
    """The chains of published normalizers that lengthen a text most."""
    blank = [{"type": "Prepend", "prepend": "▁"}, replace({"String": " "}, "▁")]
    quotes = [replace({"String": "``"}, '"'), replace({"String": "''"}, '"'), {"type": "NFKD"}]
    spaces = [replace({"Regex": " {2,}"}, "▁"), replace({"Regex": r"[\n\r\t]+"}, " ")]
    lines = [replace({"Regex": r"\s*\n\s*"}, "\n"), {"type": "Strip"}]
    rules = chain("normalizers", *blank, *quotes, *spaces, *lines)
    assert tokenizer_parts.growth(rules) <= 8
