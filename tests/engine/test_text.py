"""Incremental detokenization against decoding everything at once."""

from __future__ import annotations

import codecs
import json
import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxserve import CheckpointError, InvalidRequest, SamplingParams
from jaxserve.request import StopStrings
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.server.schema.logprobs import CompletionTokens, TokenTexts
from jaxserve.server.schema.openai import ChatMessage, ChatRequest, FunctionDefinition, Tool
from jaxserve.server.tool_calls.dialect import Dialect
from jaxserve.server.tool_calls.tools import tool_use
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.generation_config import (
    default_sampling,
    read_generation_config,
    recommends_sampling,
)
from jaxserve.text.tokenizer import Tokenizer
from tests.support.checkpoint import byte_tokenizer

pytestmark = pytest.mark.usefixtures("quick_code")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(directory)
    return Tokenizer(directory, 260)


def stream(tokenizer: Tokenizer, ids: list[int], sampling: SamplingParams) -> tuple[list[str], str]:
    """Return the emitted pieces, and the final text."""
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


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids, without an incomplete last character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    shown = (token for token in ids if token not in tokenizer.special_ids)
    decoder.decode(b"".join(map(tokenizer.token_bytes, shown)))
    text, rest = tokenizer.decode(ids), decoder.getstate()[0]
    # A surrogate's two bytes begin no character, although Python waits for a third one.
    begins = rest and not (rest[0] == 0xED and len(rest) == 2 and rest[1] >= 0xA0)
    return text[:-1] if begins else text


@settings(max_examples=100)
@given(st.text(max_size=30))
def test_text_comes_back_whole(tokenizer: Tokenizer, text: str) -> None:
    if text:
        pieces, final = stream(tokenizer, tokenizer.encode(text), SamplingParams())
        assert "".join(pieces) == final == text
        assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


@example(ids=[173, 258])
@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 259), min_size=1, max_size=40))
def test_any_ids_equal_decoding_at_once(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces, final = stream(tokenizer, ids, SamplingParams())
    context = tokenizer.decode([5, 6])
    assert "".join(pieces) == final == decoded(tokenizer, [5, 6, *ids])[len(context) :]


def naive_cut(text: str, stops: tuple[str, ...], include: bool) -> str:
    """Cut a text where it first completes a stop string, with tokens of one byte."""
    for end in range(1, len(text) + 1):
        found = [(text.find(s, 0, end), len(s)) for s in stops if text.find(s, 0, end) >= 0]
        if found:
            at, length = min(found)
            return text[: at + length * include]
    return text


@settings(max_examples=150)
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
    assert pieces == ["", "", ""]
    broken = [*tokenizer.encode("☕")[:2], *tokenizer.encode("a")]
    assert stream(tokenizer, broken, SamplingParams())[1] == "\ufffda"
    alone = tokenizer.encode("é")[1:]  # the last byte of a character that was not begun
    assert stream(tokenizer, alone, SamplingParams())[1] == "\ufffd"


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
    ["[1]", "{", "null", "", "[" * 100_000, " " * (1 << 20) + "{}"],
)
def test_bad_generation_configs_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_config(tmp_path)


BAD_NUMBERS = [-1e9, 1e9, float("nan"), float("inf"), 10**400, "0.7", "", True, False, [0.7], {}]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("temperature", [-1, 101, 1e-6, 5e-324]),
        ("top_p", [-0.1, 1.1, 0, 0.0]),
        ("top_k", [-2, 50.5, 50.0]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, 0.0, -1]),
    ],
)
def test_a_recommended_value_means_what_it_means_in_a_request_or_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, more: list[Any]
) -> None:
    for value in [*BAD_NUMBERS, *more, 1, 1.0, 0.5, None]:
        caplog.clear()
        others = {"do_sample": True, "top_k" if name != "top_k" else "top_p": 1}
        file = json.dumps(others | {name: value})
        (tmp_path / "generation_config.json").write_text(file)
        config = read_generation_config(tmp_path)
        given: dict[str, Any] = {"top_k" if name != "top_k" else "top_p": 1}
        want, warnings = SamplingParams(**given), 0
        try:
            if value is not None:
                want = SamplingParams(**given, **{name: value})
        except InvalidRequest:
            warnings = 1
        assert default_sampling(config) == want
        assert len(caplog.records) == warnings, value
        if warnings:
            message = caplog.records[0].getMessage()
            assert name in message and "generation_config.json" in message and len(message) < 600
            assert name not in config and recommends_sampling(config)


@pytest.mark.parametrize("value", [0, -1, 2**31, 10.0, "256", True, [256], float("nan")])
def test_a_wrong_length_is_left_out(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"max_new_tokens": value}))
    assert read_generation_config(tmp_path) == {}


@pytest.mark.parametrize("value", [0, 1, "false", "true", [], {}])
def test_a_switch_of_sampling_that_is_none_is_left_out(tmp_path: Path, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": value}))
    assert default_sampling(read_generation_config(tmp_path)) == SamplingParams()


def test_several_wrong_values_are_named_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {
        "temperature": "hot",
        "top_p": 5,
        "max_new_tokens": 0,
        "min_p": 0.25,
        "eta_cutoff": "x",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    assert default_sampling(read_generation_config(tmp_path)) == SamplingParams(min_p=0.25)
    (record,) = caplog.records
    message = record.getMessage()
    assert all(name in message for name in ("temperature", "top_p", "max_new_tokens"))


def test_generation_config_gives_the_defaults(tmp_path: Path) -> None:
    assert default_sampling(read_generation_config(tmp_path)) == SamplingParams()
    config = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    got = default_sampling(read_generation_config(tmp_path))
    assert got == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    (tmp_path / "generation_config.json").write_text(json.dumps(config | {"do_sample": False}))
    assert default_sampling(read_generation_config(tmp_path)).temperature == 0


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return a tokenizer with a mark that only tokenizer.json calls special, as in Mistral's."""
    directory = tmp_path_factory.mktemp("marked")
    byte_tokenizer().save_pretrained(directory)
    path = directory / "tokenizer.json"
    whole = json.loads(path.read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for at, (text, special) in enumerate({"[TOOL_CALLS]": True, "[plain]": False}.items()):
        whole["added_tokens"].append({"id": 260 + at, "content": text, "special": special} | flags)
    path.write_text(json.dumps(whole))
    return Tokenizer(directory, 262)


def test_what_decoding_leaves_out_is_what_counts_as_special(marked: Tokenizer) -> None:
    assert marked.special_ids == {token for token in range(262) if marked.decode([token]) == ""}
    assert marked.is_special("[TOOL_CALLS]") and marked.decode([260], False) == "[TOOL_CALLS]"
    assert not marked.is_special("[plain]") and not marked.is_special("a")


def test_calls_are_read_where_only_tokenizer_json_flags_their_mark(marked: Tokenizer) -> None:
    dialect = Dialect(marked, "mistral", None)
    chat = ChatRequest(
        messages=[ChatMessage(role="user", content="?")],
        tools=[Tool(function=FunctionDefinition(name="f"))],
    )
    use = tool_use(chat, dialect.parser, True, dialect.spell)
    assert dialect.shows_special(use) and dialect.spell("[TOOL_CALLS]") == "<[260]>"
    ids = [260, *marked.encode_word('[{"name": "f", "arguments": {"a": 1}}]')]
    sampling = SamplingParams(skip_special_tokens=not dialect.shows_special(use))
    pieces, _ = stream(marked, ids, sampling)
    reader = dialect.answer_format([5, 6], use, True).reader()
    assert reader is not None
    for piece in pieces:
        reader.feed(piece)
    reader.feed("", True)
    assert [(one.name, one.arguments) for one in reader.message.calls] == [("f", '{"a": 1}')]
    assert not reader.message.content


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_count_what_the_text_shows(marked: Tokenizer, skip: bool) -> None:
    ids = [5, 260, 6]
    zeros, none = np.zeros(3), np.zeros((3, 0))
    scores = TokenLogprobs(zeros, zeros, none, none)
    offsets = CompletionTokens(TokenTexts(marked, False), skip).drawn(ids, [scores], 0).text_offset
    assert offsets == [len(marked.decode(ids[:end], skip)) for end in range(3)]


def after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """Return the text of tokens behind a prompt, in pieces that never change."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(stop=["never"]))
    pieces = []
    for token in ids:
        detokenizer.add(token)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    assert "".join([*pieces, detokenizer.take()]) == detokenizer.text
    return detokenizer.text


@pytest.mark.parametrize(
    "prompt", ["costs 5 \ufffd", "\ufffd", "\ufffd\ufffd", "x" * 20 + "\ufffd"]
)
@pytest.mark.parametrize("text", ["fine", "☕", "\ufffd", "\ufffd!"])
def test_a_prompt_that_ends_in_a_replacement_character_is_not_repeated(
    tokenizer: Tokenizer, prompt: str, text: str
) -> None:
    assert after(tokenizer, tokenizer.encode(prompt), tokenizer.encode_word(text)) == text


def test_a_character_that_the_prompt_began_belongs_to_what_ends_it(tokenizer: Tokenizer) -> None:
    *begun, last = tokenizer.encode("costs 5 €")
    assert after(tokenizer, begun, [last]) == "€"
    assert after(tokenizer, begun, tokenizer.encode(" fine")) == " fine"
    assert after(tokenizer, begun, tokenizer.encode(" fine €")[:-1]) == " fine "
    assert after(tokenizer, begun, [last, *tokenizer.encode("€")[:1]]) == "€"
    assert after(tokenizer, begun[:-1], begun[-1:]) == ""
    assert after(tokenizer, begun[:-1], [begun[-1], last]) == "€"


def test_stop_strings_do_not_match_what_the_prompt_says(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(
        tokenizer, tokenizer.encode("price \ufffd"), SamplingParams(stop=["price"])
    )
    assert not any(detokenizer.add(token) for token in tokenizer.encode_word("fine"))
    assert detokenizer.stop is None


@pytest.mark.parametrize(("least", "text"), [(0, "a"), (1, "a"), (2, "aXb"), (4, "aXbXc")])
def test_a_stop_string_ends_no_text_within_min_tokens(
    tokenizer: Tokenizer, least: int, text: str
) -> None:
    sampling = SamplingParams(stop=["X"], min_tokens=least)
    assert stream(tokenizer, tokenizer.encode_word("aXbXc"), sampling)[1] == text


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 259), min_size=1, max_size=12),
    st.lists(st.integers(0, 259), min_size=1, max_size=20),
)
def test_any_prompt_is_left_out_and_nothing_else(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    context = prompt[-8:]
    before, whole = tokenizer.decode(context), decoded(tokenizer, context + ids)
    # No character of the context changes but the last, and only where that was not whole.
    ends = [end for end in range(len(before) + 1) if whole.startswith(before[:end])]
    assert after(tokenizer, prompt, ids) == whole[max(ends) :]


def test_stop_strings_are_indexed_once_for_all_completions() -> None:
    sampling = SamplingParams(stop=["ab", "abc", "x"])
    assert sampling.stop_strings is sampling.stop_strings is not None
    assert SamplingParams().stop_strings is None
    assert sampling == SamplingParams(stop=["ab", "abc", "x"])


def old_find(text: str, stops: list[str], start: int, settled: int) -> tuple[int, str] | None:
    """Search for each stop string separately in all of the text."""
    found = []
    for stop in stops:
        places = [at for at in range(start, len(text)) if text.startswith(stop, at)]
        found += [(at, len(stop), stop) for at in places if at + len(stop) > settled]
    return (min(found)[0], min(found)[2]) if found else None


@settings(max_examples=300)
@given(
    st.text(alphabet="abc", max_size=20),
    st.text(alphabet="abc", max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=6), min_size=1, max_size=20),
    st.integers(0, 24),
)
def test_a_piece_is_searched_as_the_whole_text_would_be(
    before: str, piece: str, stops: list[str], start: int
) -> None:
    """Whatever the piece: several matches in it, matches that begin before it, or before start."""
    start = min(start, len(before))
    index, text = StopStrings(stops), before + piece
    assert index.find(text, start, len(before)) == old_find(text, stops, start, len(before))
    ends = (at for at in range(start, len(text)) if begins_longer(text[at:], stops))
    assert index.first_beginning(text, start) == next(ends, len(text))


def begins_longer(end: str, stops: list[str]) -> bool:
    return any(stop.startswith(end) and stop != end for stop in stops)


# 128 strings of 256 characters: ones that share beginnings and ends, and ones that differ
# everywhere.
HOSTILE = {
    "one letter": ["a" * at + "b" + "a" * (255 - at) for at in range(1, 129)],
    "endings": [chr(1000 + at) + "a" * 255 for at in range(128)],
    "beginnings": ["a" * 255 + chr(1000 + at) for at in range(128)],
    "halves": [
        ("ab" * 128)[:240] + format(at, "016b").translate({48: "a", 49: "b"}) for at in range(128)
    ],
}


def cost(stops: list[str], text: str, size: int) -> float:
    """Return the CPU seconds for a text in pieces, the fastest of three runs."""
    best = math.inf
    for _ in range(3):
        index, so_far, held = StopStrings(stops), "", 0
        began = time.thread_time()
        for at in range(0, len(text), size):
            settled = len(so_far)
            so_far += text[at : at + size]
            assert index.find(so_far, 0, settled) is None
            held = index.first_beginning(so_far, held)
        best = min(best, time.thread_time() - began)
    return best


@pytest.mark.parametrize("stops", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("text", ["a" * 8000, "ab" * 4000, "aaab" * 2000, "the quick fox " * 570])
def test_many_long_stop_strings_cost_little_and_no_more_in_long_texts(
    stops: list[str], text: str
) -> None:
    few, many = cost(["never"], text, 4), cost(stops, text, 4)
    assert many < 100 * few  # 0.1 ms a token, where 128 searches of 256 characters took 4 ms
    assert cost(stops, 4 * text, 4) < 8 * max(many, 0.001)


def test_an_index_of_stop_strings_holds_no_parts_of_them() -> None:
    """All beginnings of 128 strings were 6 MB, of each request that waits."""
    for stops in HOSTILE.values():
        tracemalloc.start()
        index = StopStrings(stops)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert index.longest == 256 and held < 50_000


@settings(max_examples=100)
@given(
    st.text(alphabet="ab", min_size=1, max_size=30),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4),
)
def test_what_is_held_back_is_the_longest_beginning_of_a_stop_string(
    tokenizer: Tokenizer, text: str, stops: list[str]
) -> None:
    detokenizer, taken = Detokenizer(tokenizer, [5, 6], SamplingParams(stop=stops)), ""
    for token in tokenizer.encode(text):
        if detokenizer.add(token):
            return
        taken += detokenizer.take()
        held = detokenizer.text[len(taken) :]
        ends = (detokenizer.text[at:] for at in range(len(detokenizer.text)))
        longest = (end for end in ends if any(s.startswith(end) and s != end for s in stops))
        assert held == next(longest, "")
