"""Incremental detokenization against decoding everything at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import CheckpointError, SamplingParams
from jaxserve.engine.text import Detokenizer, Tokenizer, default_sampling, read_generation_config
from tests.engine.checkpoint import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    return Tokenizer(directory, 260)


def stream(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> tuple[list[str], str]:
    """The pieces emitted, and the final text."""
    detokenizer = Detokenizer(tokenizer, [5, 6], sampling)
    pieces = []
    for token in ids:
        stopped = detokenizer.add(token)
        if stopped:
            break
        pieces.append(detokenizer.take())
    detokenizer.finish()
    pieces.append(detokenizer.take())
    return pieces, detokenizer.text


@settings(max_examples=300)
@given(st.text(max_size=30))
def test_text_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    if text:
        pieces, final = stream(tokenizer, tokenizer.encode(text), SamplingParams())
        assert "".join(pieces) == final == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=300)
@given(st.lists(st.integers(0, 259), min_size=1, max_size=40))
def test_any_ids_equal_decoding_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces, final = stream(tokenizer, ids, SamplingParams())
    context = tokenizer.decode([5, 6])
    assert "".join(pieces) == final == tokenizer.decode([5, 6, *ids])[len(context) :]


def naive_cut(text: str, stops: tuple[str, ...], include: bool) -> str:
    """Where the text first completes a stop string, as tokens of one byte see it."""
    for end in range(1, len(text) + 1):
        found = [(text.find(s, 0, end), len(s)) for s in stops if text.find(s, 0, end) >= 0]
        if found:
            at, length = min(found)
            return text[: at + length * include]
    return text


@settings(max_examples=500)
@given(
    st.text(alphabet="ab", min_size=1, max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.booleans(),
)
def test_stop_strings_cut_where_a_naive_search_does(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    sampling = SamplingParams(stop=stops, include_stop_str_in_output=include)
    pieces, final = stream(tokenizer, tokenizer.encode(text), sampling)
    assert "".join(pieces) == final == naive_cut(text, tuple(stops), include)


def test_what_may_begin_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=["<end>"])
    pieces, _ = stream(tokenizer, tokenizer.encode("a<en<enx"), sampling)
    assert pieces == ["a", "", "", "", "<en", "", "", "<enx", ""]


def test_half_a_character_waits(tokenizer: Tokenizer) -> None:
    pieces, _ = stream(tokenizer, tokenizer.encode("é☕"), SamplingParams())
    assert pieces == ["", "é", "", "", "☕", ""]
    pieces, _ = stream(tokenizer, tokenizer.encode("☕")[:2], SamplingParams())
    assert pieces[:2] == ["", ""] and set(pieces[2]) == {"\ufffd"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 5}', "null"])
def test_corrupt_tokenizers_are_refused(tmp_path: Path, content: str) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path, 260)


def test_tokenizers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path, 260)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"259.*logits for 200"):
        Tokenizer(tmp_path, 200)


@pytest.mark.parametrize(
    "content",
    ["[1]", "{", '{"temperature": NaN}', '{"top_p": 5}', '{"top_k": "x"}', "[" * 100_000],
)
def test_bad_generation_configs_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        default_sampling(read_generation_config(tmp_path), str(tmp_path))


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    assert default_sampling(read_generation_config(tmp_path), "") == SamplingParams()
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    got = default_sampling(read_generation_config(tmp_path), "")
    assert got == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    (tmp_path / "generation_config.json").write_text(json.dumps(config | {"do_sample": False}))
    assert default_sampling(read_generation_config(tmp_path), "").temperature == 0
