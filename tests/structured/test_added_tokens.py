"""Forms with texts of added tokens: every text can be drawn, and is read back unchanged."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxserve.server.tool_calls.formats import CALL_FORMATS
from jaxserve.server.tool_calls.grammar import CallGrammar
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Constraint, Grammars
from tests.structured.test_call_grammars import FUNCTIONS, read
from tests.structured.test_grammars import TOKENIZER

FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
# Formats whose marks differ: around a call, before a list, before text, in sections, in messages.
FORMS = ["hermes", "llama3_json", "mistral", "granite", "pythonic", "kimi_k2", "openai"]
MARKS = sorted({mark for form in FORMS for mark in CALL_FORMATS[form].marks if mark.strip()})
# Texts that published vocabularies hold as added tokens, and some that are nasty.
ADDED = [
    *("<think>", "<|fim|>", "  ", "    ", "\n\n", "<b>", "</b>", "<0x0A>", "\u2581\u2581", "é"),
    *('{"', '"name"', "true", "\U0001f600", "<|im_end|> ", "[INST]", "a b"),
]
SPECIAL = ["<|eot|>", "</s>", "[/INST]"]


def _added(source: dict[str, Any], texts: Sequence[str], special: bool) -> None:
    """Add tokens, behind all others where the vocabulary does not hold them."""
    vocab = source["model"]["vocab"]
    taken = {token["content"] for token in source["added_tokens"]}
    free = 1 + max(*vocab.values(), *(token["id"] for token in source["added_tokens"]))
    for text in texts:
        if text in taken:
            continue
        number = vocab.get(text, free)
        free += number == free
        source["added_tokens"].append({"id": number, "content": text, "special": special, **FLAGS})
    source["added_tokens"].sort(key=lambda token: token["id"])


def byte_level() -> dict[str, Any]:
    """Return the bundled tokenizer with a normalizer like Qwen's."""
    return {**json.loads(TOKENIZER), "normalizer": {"type": "NFC"}}


def byte_fallback() -> dict[str, Any]:
    """Return a vocabulary of characters, with bytes for others, as in Llama 2 and Gemma."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(33, 127)] + ["\u2581", "\n", "\u2581\u2581", "th", "</"]
    vocab = {piece: number for number, piece in enumerate([*pieces, *letters])}
    blanks = {"pattern": {"String": " "}, "content": "\u2581", "type": "Replace"}
    back = {"pattern": {"String": "\u2581"}, "content": " ", "type": "Replace"}
    special = {"special": True, **FLAGS}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": pieces[number], **special} for number in range(3)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, blanks],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "vocab": vocab,
            "merges": ["\u2581 \u2581", "t h", "< /"],
        },
    }


class Vocabulary:
    """A tokenizer with its grammars, and texts drawn from them token by token.

    Args:
        source: of the tokenizer.
        end: the token that ends a text.
        size: width of the logits, by default three more than the number of tokens.
    """

    def __init__(self, source: dict[str, Any], end: str, size: int | None = None) -> None:
        self.backend = Tokenizer.from_str(json.dumps(source))
        self.size = self.backend.get_vocab_size() + 3 if size is None else size
        tokens = {token["content"]: token["id"] for token in source["added_tokens"]}
        self.named = {text: token for text, token in tokens.items() if token < self.size}
        self.added = np.array(sorted(self.named.values()))
        self.end = self.named[end]
        self.grammars = Grammars(lambda: json.dumps(source), self.size, [self.end])

    def compile(self, **form: Any) -> Constraint:
        return self.grammars.compile(StructuredOutputsParams(**form))

    def allowed(self, constraint: Constraint) -> np.ndarray:
        """Return int[n]: in their order, the tokens that may follow."""
        bits = np.unpackbits(constraint.words.view(np.uint8), bitorder="little")
        assert not bits[self.size :].any()
        return np.flatnonzero(bits)

    def draw(self, constraint: Constraint, seed: int, shows: bool = False) -> tuple[str, list[int]]:
        """Draw a text, in which a continuation is as likely in many tokens as in one.

        Args:
            constraint: at its start.
            seed: of the draws.
            shows: whether the text shows special tokens.
        """
        rng, constraint, tokens = random.Random(seed), constraint.copy(), []
        for number in range(600):
            choices = self.allowed(constraint)
            assert len(choices), f"nothing may follow {self.text(tokens)!r}"
            added = choices[np.isin(choices, self.added)]
            if self.end in choices and number > rng.randrange(60):
                break
            token = int(rng.choice(added if len(added) and rng.random() < 0.3 else choices))
            if token == self.end:
                break
            tokens.append(token)
            if constraint.advance(token):
                break
        else:
            return "", []
        return self.text(tokens, shows), tokens

    def text(self, tokens: list[int], shows: bool = False) -> str:
        return self.backend.decode(tokens, skip_special_tokens=not shows)


# By the name of a kind: a tokenizer, and the tokens that end a text.
KINDS = {"byte_level": (byte_level, "<|im_end|>"), "byte_fallback": (byte_fallback, "</s>")}


@pytest.fixture(scope="module", params=KINDS)
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    make, end = KINDS[request.param]
    source = make()
    _added(source, ADDED, False)
    _added(source, SPECIAL, True)
    return Vocabulary(source, end)


def texts(count: int, special: Sequence[str]) -> list[str]:
    """Return texts that hold the texts of added tokens, whole, in pieces and side by side."""
    rng = random.Random(5)
    parts = [*ADDED, *special, *MARKS, "x", " ", "<", ">", '"', "\\", "e\u0301", "日本", "\ue000"]
    made = [*ADDED, *special, *MARKS]
    while len(made) < count:
        drawn = rng.choices(parts, k=rng.randint(1, 5))
        made.append("".join(part[: rng.randint(1, len(part))] for part in drawn))
        made.append("".join(drawn))
    return list(dict.fromkeys(made))


def all_texts(vocabulary: Vocabulary) -> list[str]:
    return texts(160, [text for text in vocabulary.named if text.strip()])


def draws_only(vocabulary: Vocabulary, text: str, **form: Any) -> None:
    constraint = vocabulary.compile(**form)
    drawn = {vocabulary.draw(constraint, seed)[0] for seed in range(2)}
    assert drawn == {text}, (text, form)


def test_a_constant_is_drawn_whatever_it_holds(vocabulary: Vocabulary) -> None:
    for text in all_texts(vocabulary):
        constraint = vocabulary.compile(json={"const": {"a": text}})
        drawn, _ = vocabulary.draw(constraint, 1)
        assert json.loads(drawn) == {"a": text}, drawn


def test_a_choice_is_drawn_whatever_it_holds(vocabulary: Vocabulary) -> None:
    for text in all_texts(vocabulary):
        draws_only(vocabulary, text, choice=[text])
    both = vocabulary.compile(choice=["<|im_end|>", "<|im_start|>", "<think>"])
    drawn = {vocabulary.draw(both, seed)[0] for seed in range(40)}
    assert drawn == {"<|im_end|>", "<|im_start|>", "<think>"}


def test_a_regex_is_drawn_whatever_it_holds(vocabulary: Vocabulary) -> None:
    for text in all_texts(vocabulary):
        pattern = "".join(f"\\x{{{ord(letter):x}}}" for letter in text)
        draws_only(vocabulary, text, regex=pattern)


def test_a_grammar_is_drawn_whatever_it_holds(vocabulary: Vocabulary) -> None:
    for text in all_texts(vocabulary):
        lark = f"start: {json.dumps(text, ensure_ascii=False)} | TAIL\nTAIL: /q+/"
        drawn = {vocabulary.draw(vocabulary.compile(grammar=lark), seed)[0] for seed in range(12)}
        assert text in drawn and all(re.fullmatch("q+", one) for one in drawn - {text}), drawn


def test_free_strings_parse_whatever_is_drawn(vocabulary: Vocabulary) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "maxLength": 30}, "<b>": {"enum": [*ADDED[:6]]}},
        "required": ["a", "<b>"],
        "additionalProperties": False,
    }
    constraint, used = vocabulary.compile(json=schema), set()
    for seed in range(40):
        drawn, tokens = vocabulary.draw(constraint, seed)
        used.update(tokens)
        if drawn:
            jsonschema.validate(json.loads(drawn), schema)
    assert used & {vocabulary.named[text] for text in ("<think>", "  ", "</b>")}
    assert not used & {vocabulary.named[text] for text in SPECIAL}


def test_a_grammar_names_added_tokens(vocabulary: Vocabulary) -> None:
    lark = 'start: <think> "<think>" REST <|eot|>\nREST: /<think>/ // <think>'
    drawn, tokens = vocabulary.draw(vocabulary.compile(grammar=lark), 0, shows=True)
    assert drawn == "<think>" * 3 + "<|eot|>"
    think, end = (vocabulary.named[text] for text in ("<think>", "<|eot|>"))
    assert (tokens[0], tokens[-1], tokens.count(think) >= 1) == (think, end, True)


def test_ids_beyond_the_logits_are_never_drawn() -> None:
    source = byte_level()
    size = Tokenizer.from_str(json.dumps(source)).get_vocab_size()
    _added(source, ["<think>", "  "], False)
    grammars = Grammars(lambda: json.dumps(source), size, [3])
    start = grammars.compile(StructuredOutputsParams(regex="(<think>|  )x"))
    bits = np.unpackbits(start.words.view(np.uint8), bitorder="little")
    assert bits.sum() > 0 and not bits[size:].any()


# By vocabularies that have the marks of calls as added tokens, as special ones, or not at all: the
# calls that an answer may have. The usual run combines the second kind of vocabulary with calls
# that the first kind has not: a kind decides which texts its tokens have, and a form's grammar is
# independent of that.
HOW = ["added", "special", "text"]
LONG = pytest.mark.long
FORCED = [
    pytest.param((kind, how), most, marks=[] if usual == most else LONG, id=f"{kind}-{how}-{most}")
    for kind, usual in (("byte_level", 3), ("byte_fallback", 1))
    for how in HOW
    for most in (1, 3)
]
CHOSEN = [
    pytest.param((kind, how), marks=LONG if long else [], id=f"{kind}-{how}")
    for kind in KINDS
    for how in HOW
    for long in [kind == "byte_fallback" and how == "special"]
]


@pytest.fixture(scope="module")
def marked(request: pytest.FixtureRequest) -> Vocabulary:
    """Return a vocabulary of a kind that has the marks in one of these ways."""
    kind, how = request.param
    make, end = KINDS[kind]
    source = make()
    _added(source, ADDED, False)
    if how != "text":
        _added(source, MARKS, how == "special")
    return Vocabulary(source, end)


def spell(vocabulary: Vocabulary, mark: str) -> str:
    number = vocabulary.named.get(mark)
    return json.dumps(mark) if number is None else f"<[{number}]>"


@pytest.mark.parametrize(("marked", "most"), FORCED, indirect=["marked"], scope="module")
@pytest.mark.parametrize("form", FORMS)
def test_forced_calls_begin_with_the_mark_and_fit(marked: Vocabulary, form: str, most: int) -> None:
    grammar = CallGrammar(
        CALL_FORMATS[form], FUNCTIONS, lambda mark: spell(marked, mark), most=most
    ).text()
    constraint, called = marked.compile(grammar=grammar), set()
    for seed in range(15):
        text, tokens = marked.draw(constraint, seed, shows=True)
        if not text:
            continue
        message = read(form, text, True).message
        assert message.calls and len(message.calls) <= most and message.content == "", text
        for call in message.calls:
            schema = {function.name: function.schema for function in FUNCTIONS}[call.name]
            jsonschema.validate(json.loads(call.arguments), schema)
            called.add(call.name)
        described = CALL_FORMATS[form]
        mark = described.section[0] or described.mark
        if mark in marked.named and not described.is_optional_mark:
            assert tokens[0] == marked.named[mark]
            close = marked.named.get(described.section[1] or described.close)
            # The end of a message ends the answer: it is no part of the grammar.
            assert close is None or tokens[-1] == close or described.is_harmony
    assert called


def follows(vocabulary: Vocabulary, start: Constraint, tokens: Sequence[int]) -> int:
    """Return how many of `tokens` a constraint allows."""
    constraint = start.copy()
    for number, token in enumerate(tokens):
        if token not in vocabulary.allowed(constraint):
            return number
        constraint.advance(token)
    return len(tokens)


@pytest.mark.parametrize("marked", CHOSEN, indirect=True, scope="module")
@pytest.mark.parametrize("form", FORMS)
def test_a_chosen_call_begins_with_the_mark_and_fits(marked: Vocabulary, form: str) -> None:
    described = CALL_FORMATS[form]
    grammar = CallGrammar(
        described, FUNCTIONS, lambda mark: spell(marked, mark), may_answer=True
    ).text()
    start = marked.compile(grammar=grammar)
    mark = described.section[0] or described.mark
    number = marked.named.get(mark)
    schemas = {function.name: function.schema for function in FUNCTIONS}
    if number is not None and not described.is_optional_mark:
        assert number in marked.allowed(start)
        spelled = marked.grammars.tokenizer().tokenize_str(mark)
        assert len(spelled) > 1
        assert follows(marked, start, spelled) < len(spelled)
    for seed in range(15):
        constraint, before = start.copy(), []
        if number is not None and number in marked.allowed(constraint):
            constraint.advance(number)
            before = [number]
        text, tokens = marked.draw(constraint, seed, shows=True)
        if tokens:
            message = read(form, marked.text([*before, *tokens], shows=True), True).message
            assert message.calls or not before or described.is_harmony, text
            for call in message.calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
