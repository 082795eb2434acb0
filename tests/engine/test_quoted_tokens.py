"""Texts of added tokens in data stay text: the prompt's tokens spell the data exactly."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from jaxserve.server.api.infill import infill_prompt
from jaxserve.text.plain_tokenizer import PlainTokenizer
from jaxserve.text.template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer as OurTokenizer
from tests.support.small_tokenizers import FLAGS, KINDS, NOT_SPECIAL, SPECIAL, small_tokenizer

pytestmark = pytest.mark.usefixtures("quick_code")

ADDED = (*SPECIAL, NOT_SPECIAL)
HALVES = [text[:end] for text in ADDED for end in range(1, len(text))]
REST = [text[end:] for text in ADDED for end in range(1, len(text))]
FRAGMENTS = st.sampled_from([*ADDED, *HALVES, *REST, " ", "  ", "old", "é", "☃"])
TEXTS = st.lists(FRAGMENTS, max_size=10).map("".join)
# Tokenizers by kind, each made once.
MADE: dict[Any, OurTokenizer] = {}


def made(kind: str, number: int = 0) -> OurTokenizer:
    if (kind, number) not in MADE:
        MADE[kind, number] = small_tokenizer(kind, FLAGS[number])
    return MADE[kind, number]


def shown(tokenizer: OurTokenizer, ids: list[int]) -> tuple[list[int], str]:
    """Return the added tokens among `ids`, and the text between them, a line for each part."""
    added, parts = {tokenizer.token_id(text) for text in ADDED}, [[]]
    for token in ids:
        if token in added:
            parts.append([])
        else:
            parts[-1].append(token)
    lines = [tokenizer.decode(part, False) for part in parts]
    return [token for token in ids if token in added], "\n".join(lines)


def check(tokenizer: OurTokenizer, contents: list[str]) -> None:
    """Check a prompt's tokens against the tokens of a prompt with harmless data."""
    messages = [{"role": "user", "content": text} for text in contents]
    ids, said = shown(tokenizer, tokenizer.render_chat(messages))
    harmless = tokenizer.encode("<s>[INST](x)</s>" * len(contents), False)
    want, text = shown(tokenizer, harmless)
    assert ids == want
    first, *rest = text.split("(x)")
    pairs = zip(contents, rest, strict=True)
    assert said == first + "".join(f"({content}){after}" for content, after in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quoted_token_is_its_text(kind: str) -> None:
    check(made(kind), ["<s>old</s>"])
    check(made(kind), ["<s>", "a <s> old  </s>", "[INST]<unk><tool>", "x</s"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(st.lists(TEXTS, min_size=1, max_size=3), st.integers(0, len(FLAGS) - 1))
def test_a_prompt_says_what_was_written(kind: str, contents: list[str], flags: int) -> None:
    check(made(kind, flags), contents)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30)
@given(TEXTS)
def test_a_text_without_added_tokens_is_the_librarys(kind: str, text: str) -> None:
    """Words, blanks and all: data that quotes no added token changes no token."""
    tokenizer = made(kind)
    for added in ADDED:
        text = text.replace(added, "")
    if any(added in text for added in ADDED):
        return
    whole = f"<s>[INST]({text})</s>"
    want = tokenizer.backend.encode(whole, add_special_tokens=False).ids
    assert tokenizer.render_chat([{"role": "user", "content": text}]) == want
    assert tokenizer.encode_data(text) == tokenizer.encode(text, False)


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_request_is_data(kind: str) -> None:
    """Names of tools and arguments, system messages, results of tools and other variables."""
    tokenizer = made(kind)
    template = ChatTemplate("<s>{{ messages | tojson }}{{ tools | tojson }}{{ extra }}</s>")
    text = "a<s>b</s><tool>"
    call = {"function": {"name": text, "arguments": {text: [text]}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "content": text, "name": text, "tool_call_id": text},
    ]
    tools = [{"type": "function", "function": {"name": text, "description": text}}]
    ids = tokenizer.render_chat(messages, chat_template=template, tools=tools, extra=text)
    added = {tokenizer.token_id(name) for name in ADDED}
    assert [token for token in ids if token in added] == [1, 2]
    want = json.dumps(messages) + json.dumps(tools) + text
    assert tokenizer.decode(ids[1:-1], False).lstrip() == want


def test_tokens_that_a_normalizer_makes_of_data_are_text() -> None:
    """A Lowercase normalizer turns `<S>` of data into the token; NFKC does so with wide letters."""
    for normalizer, text in ((normalizers.Lowercase(), "<S>old"), (normalizers.NFKC(), "＜s＞old")):
        backend = Tokenizer(models.BPE({text: n for n, text in enumerate(["<s>", *"<s>old"])}, []))
        backend.normalizer = normalizer
        backend.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
        tokenizer = OurTokenizer.of(
            PlainTokenizer(backend, {"bos_token": "<s>"}, [], "<s>{{ messages[0].content }}"), "", 9
        )
        ids = tokenizer.render_chat([{"role": "user", "content": text}])
        assert ids[0] == 0 and tokenizer.token_strings(ids[1:]) == list("<s>old"), text


@pytest.mark.parametrize("model", ["WordLevel", "WordPiece", "Unigram"])
def test_words_that_are_special_tokens_are_no_data(model: str) -> None:
    """Where words are whole, a text may be known only as the special token."""
    vocab = {text: number for number, text in enumerate(["[UNK]", "[CLS]", "a", "[", "CLS", "]"])}
    if model == "Unigram":
        made: Any = models.Unigram([(text, 0.0) for text in vocab], unk_id=0)
    else:
        made = getattr(models, model)(vocab, unk_token="[UNK]")
    backend = Tokenizer(made)
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["[CLS]", "[UNK]"])
    tokenizer = OurTokenizer.of(
        PlainTokenizer(backend, {}, [], "[CLS] {{ messages[0].content }}"), "", 6
    )
    for text in ("[CLS]", "a [CLS] a", "[CLS][CLS]", "x [CLS]x", "[CLS] ☃"):
        ids = tokenizer.render_chat([{"role": "user", "content": text}])
        assert ids[0] == 1 and 1 not in ids[1:], (text, ids)
        assert len(ids) > 1


def test_a_model_without_unknown_tokens_encodes_what_it_knows() -> None:
    backend = Tokenizer(models.Unigram([(text, -1.0) for text in ["<s>", *"<s>old "]]))
    backend.add_special_tokens(["<s>"])
    plain = PlainTokenizer(backend, {}, [], "<s>{{ messages[0].content }}")
    ids = OurTokenizer.of(plain, "", 9).render_chat([{"role": "user", "content": "<s>old"}])
    assert ids[0] == 0 and 0 not in ids[1:] and len(ids) > 3


def test_many_tokens_of_data_and_of_a_template_take_linear_time() -> None:
    """A normalizer makes tokens of data, between as many of the template."""
    backend = Tokenizer(models.BPE({text: n for n, text in enumerate(["<s>", *"<s>old"])}, []))
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<s>", normalized=True, special=True)])
    template = "{% for m in messages %}<s>{{ m.content }}{% endfor %}"
    tokenizer = OurTokenizer.of(PlainTokenizer(backend, {}, [], template), "", 9)
    seconds = []
    for count in (500, 4000):
        messages = [{"role": "user", "content": "<S>old"}] * count
        started = time.thread_time()
        assert tokenizer.render_chat(messages, seconds=60.0).count(0) == count
        seconds.append(time.thread_time() - started)
    assert seconds[1] < 24 * max(seconds[0], 0.01)


def test_gaps_are_filled_around_data() -> None:
    """As in llama.cpp, a file's entries before and behind a gap are not tokens of the model."""
    backend = KINDS["llama"]()
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    backend.add_special_tokens([*SPECIAL, *marks])
    tokenizer = OurTokenizer.of(PlainTokenizer(backend, {}, [], None), "", 400)
    ids = infill_prompt(tokenizer, "a<fim_middle>", "</s>b")
    own = {tokenizer.token_id(text) for text in (*marks, *SPECIAL)}
    want = [tokenizer.token_id(marks[number]) for number in range(3)]
    assert [token for token in ids if token in own] == want
    assert tokenizer.decode(ids) == " a<fim_middle> </s>b".lstrip()


def test_paddings_and_truncations_of_a_file_are_left_out() -> None:
    backend = KINDS["llama"]()
    backend.enable_padding(length=1 << 31)
    backend.enable_truncation(2)
    tokenizer = OurTokenizer.of(PlainTokenizer(backend, {}, [], None), "", 400)
    assert len(tokenizer.encode("old old old")) == 3 * 2


def test_many_quoted_tokens_take_linear_time() -> None:
    """Counted in calls of the library, as time depends on the machine."""
    for kind in ("llama", "unigram", "gguf"):
        tokenizer, calls = made(kind), itertools.count()
        encoder = tokenizer._encoder
        spelled = encoder._spelled

        def counted(text: str, backend: Any, calls: Any = calls, spelled: Any = spelled) -> Any:
            next(calls)
            return spelled(text, backend)

        encoder._spelled = counted
        tokenizer.encode_data("<s>old</s>" * 500)
        encoder._spelled = spelled
        assert next(calls) < 5000
