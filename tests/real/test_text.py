"""Real tokenizers and chat templates give the ids of Transformers and of llama.cpp."""

from __future__ import annotations

from tests.real.conftest import Real
from tests.real.prompts import chats, texts


def test_prompts_are_read_as_the_references_read_them(real: Real) -> None:
    tokenizer = real.loaded.tokenizer
    assert tokenizer is not None
    wanted = real.reference["prompts"]
    differ = {
        text: (got, entry["ids"])
        for text, entry in zip(texts(), wanted, strict=False)
        if (got := tokenizer.encode(text)) != entry["ids"]
    }
    assert not differ


def test_chats_are_rendered_as_the_references_render_them(smollm2: Real) -> None:
    tokenizer = smollm2.loaded.tokenizer
    assert tokenizer is not None
    wanted = smollm2.reference["prompts"][len(texts()) :]
    assert len(wanted) == len(chats())
    for chat, entry in zip(chats(), wanted, strict=True):
        assert tokenizer.render_chat(chat) == entry["ids"], chat


def test_text_comes_back(real: Real) -> None:
    """A base model's prompt decodes to its text, apart from the text of special tokens."""
    tokenizer = real.loaded.tokenizer
    assert tokenizer is not None
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_prompts_are_of_every_kind() -> None:
    assert len(set(texts())) >= 100
    scripts = {
        "Latin": "é", "Cyrillic": "я", "Han": "的", "Kana": "の", "Hangul": "한", "Arabic": "ع",
        "Devanagari": "भ", "Greek": "λ", "Hebrew": "ב", "Thai": "ก", "Vietnamese": "ủ",
        "emoji": "🍕", "joined emoji": "\u200d👩", "blanks": " " * 100, "digits": "0987654321",
    }  # fmt: skip
    everything = "".join(texts())
    assert not [name for name, sign in scripts.items() if sign not in everything]
