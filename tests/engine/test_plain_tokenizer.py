"""The tokenizer that is read without Transformers, against Transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxserve.settings.config import bundled_model
from jaxserve.text.plain_tokenizer import PlainTokenizer, read_plain
from jaxserve.text.tokenizer import Tokenizer, byte_letters
from tests.support.checkpoint import byte_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain")
    backend = byte_tokenizer()
    backend.chat_template = "{{ messages }}"
    backend.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["bundled", "bytes"])
def both(request: pytest.FixtureRequest, folder: Path) -> tuple[PlainTokenizer, Any]:
    directory = bundled_model() if request.param == "bundled" else folder
    plain = read_plain(directory)
    assert plain is not None
    return plain, AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


def test_what_the_engine_reads_is_the_same(both: tuple[PlainTokenizer, Any]) -> None:
    plain, whole = both
    assert plain.get_vocab() == whole.get_vocab()
    assert plain.get_added_vocab() == whole.get_added_vocab()
    assert plain.eos_token_id == whole.eos_token_id
    assert plain.convert_ids_to_tokens([0, 7, 200]) == whole.convert_ids_to_tokens([0, 7, 200])
    assert sorted(plain.all_special_ids) == sorted(whole.all_special_ids)
    assert plain.special_tokens_map == whole.special_tokens_map
    assert plain.all_special_tokens == whole.all_special_tokens
    for tools in (None, [{}]):
        assert plain.get_chat_template(tools=tools) == whole.get_chat_template(tools=tools)


TEXTS = st.lists(
    st.sampled_from(["<|im_end|>", "<|end|>", "<|bos|>", " ", "\n", "the", "é", "☕", "7"])
    | st.text(max_size=5),
    max_size=8,
).map("".join)


@settings(max_examples=100)
@given(TEXTS, st.booleans())
def test_texts_are_encoded_alike(both: tuple[PlainTokenizer, Any], text: str, special: bool):
    plain, whole = both
    ids = whole.encode(text, add_special_tokens=special)
    assert plain.encode(text, add_special_tokens=special) == ids
    assert plain.backend_tokenizer.decode(ids) == whole.backend_tokenizer.decode(ids)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"add_bos_token": True},
        {"add_prefix_space": True},
        {"clean_up_tokenization_spaces": True},
        {"bos_token": "<|new|>"},
        {"eos_token": {"content": "<|end|>"}},
        {"added_tokens_decoder": {"3": {"content": "x"}}},
        {"chat_template": [{"name": "default", "template": ""}]},
        {"extra_special_tokens": {"image_token": "<|end|>"}},
        {"extra_special_tokens": ["<|new|>"]},
        {"something_new": 1},
    ],
    ids=str,
)
def test_whatever_else_is_said_is_left_to_transformers(
    folder: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | change))
    assert read_plain(tmp_path) is None


def test_bytes_are_written_as_transformers_does() -> None:
    assert dict(enumerate(byte_letters())) == bytes_to_unicode()


def test_the_bundled_model_needs_no_transformers() -> None:
    code = (
        "import sys\n"
        "from jaxserve.settings.config import bundled_model\n"
        "from jaxserve.text.tokenizer import Tokenizer\n"
        "one = Tokenizer(bundled_model(), 4096)\n"
        "assert one.render_chat([{'role': 'user', 'content': 'hi'}])\n"
        "print([m for m in ('jax', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert Tokenizer(bundled_model(), 4096).encode("a")
