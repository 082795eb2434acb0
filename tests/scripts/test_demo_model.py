"""The checkpoint shipped in jaxserve/demo_model: it loads, it fits and it answers its tasks."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from scripts.demo_model import tasks as demo_tasks

FOLDER = Path(__file__).resolve().parents[2] / "jaxserve" / "demo_model"
EXAMPLES = 24
CARD_ROW = re.compile(
    r"^\| (?P<task>\w+)(?:, more than (?P<least>\d+) tokens)? "
    r"\| (?P<shortest>\d+)-(?P<longest>\d+) "
    r"\| (?P<examples>\d+) \| (?P<correct>\d+) \| (?P<percent>[\d.]+)% \|$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Row:
    """One line of the model card's table, with a `least` of 0 if prompts have any length."""

    task: str
    least: int
    longest: int
    examples: int
    correct: int
    percent: float


def card_rows() -> list[Row]:
    matches = CARD_ROW.finditer((FOLDER / "README.md").read_text())
    return [
        Row(
            match["task"],
            int(match["least"] or 0),
            int(match["longest"]),
            int(match["examples"]),
            int(match["correct"]),
            float(match["percent"]),
        )
        for match in matches
    ]


def reliable_rows() -> list[Row]:
    return [row for row in card_rows() if row.correct >= 0.95 * row.examples]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def test_weights_are_at_most_four_megabytes():
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000


def test_card_numbers_agree_and_reach_the_goal():
    rows = card_rows()
    assert {row.task for row in rows} == set(demo_tasks.TASKS)
    for row in rows:
        assert row.percent == pytest.approx(100 * row.correct / row.examples, abs=0.051)
    reliable = reliable_rows()
    assert len({row.task for row in reliable}) >= 4
    assert any(row.least >= 300 for row in reliable)


def test_card_tells_how_to_make_the_weights_again():
    card = (FOLDER / "README.md").read_text()
    assert re.search(r"^- Command: `python -m scripts\.demo_model\.train", card, re.MULTILINE)
    assert re.search(r"^- Seed \d+, \d+ updates .* [\d.]+ minutes", card, re.MULTILINE)


@pytest.mark.parametrize("row", reliable_rows(), ids=lambda row: f"{row.task}-{row.least}")
def test_greedy_answers_are_right(row: Row, model, tokenizer):
    lengths = (300, 400) if row.least else None
    stream = demo_tasks.stream(row.task, random.Random(f"test {row.task}"), "held_out", lengths)
    asked = [(task, prompt_ids(tokenizer, task.prompt)) for task in islice(stream, 4 * EXAMPLES)]
    asked = [(task, ids) for task, ids in asked if row.least < len(ids) <= row.longest][:EXAMPLES]
    assert len(asked) == EXAMPLES
    width = max(len(ids) for _, ids in asked)
    pad = tokenizer.pad_token_id
    tokens = torch.tensor([[pad] * (width - len(ids)) + ids for _, ids in asked])
    longest = max(len(tokenizer.encode(task.answer)) for task, _ in asked) + 1
    with torch.inference_mode():
        made = model.generate(tokens, attention_mask=tokens != pad, max_new_tokens=longest)
    texts = tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
    right = [demo_tasks.check(task, text) for (task, _), text in zip(asked, texts, strict=True)]
    # The card promises 95% and more: three misses among 24 are no surprise, four would be.
    assert sum(right) >= 0.87 * EXAMPLES


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "two  blanks, a\ttab\r\nand a line\n\n",
        "What is 12 + 345?",
        "naïve café — “quotes” … ½",
        "日本語と中文、한국어",
        "👩‍👩‍👧 🏳️‍🌈 👍🏽",
        "مرحبا שלום",
        "e\u0301 \u00a0\u2003\u200b\ufeff",
        "".join(map(chr, range(33))) + "\x7f\x80\x9f",
        "\U0010ffff\ue000",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_random_text_survives_the_tokenizer(tokenizer):
    rng = random.Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(50):
        text = "".join(map(chr, rng.choices(points, k=40)))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_chat_template_renders_the_training_format(tokenizer):
    turns = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "What is 2 + 2?"},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text == (
        "<|bos|><|im_start|>user\nWhat is 1 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n3<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.encode(text, add_special_tokens=False).count(tokenizer.bos_token_id) == 1


def test_digits_are_single_tokens_and_task_words_whole(tokenizer):
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4
    for word in (*demo_tasks.WORDS, *demo_tasks.NAMES, *demo_tasks.COLOURS):
        assert len(tokenizer.encode(word, add_special_tokens=False)) == 1
        assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1


@pytest.mark.parametrize("name", demo_tasks.TASKS)
def test_tasks_are_reproducible_and_check_their_answers(name: str):
    task = demo_tasks.make_task(name, random.Random(5))
    assert task == demo_tasks.make_task(name, random.Random(5))
    assert demo_tasks.check(task, f" {task.answer}\n")
    assert not demo_tasks.check(task, task.answer + "x")
    assert demo_tasks.split(task) in ("train", "held_out")


@pytest.mark.parametrize("name", demo_tasks.STRETCHABLE)
def test_stretchable_tasks_follow_the_length(name: str):
    longest = demo_tasks.STRETCHABLE[name]
    words = [
        len(demo_tasks.make_task(name, random.Random(5), length).prompt.split())
        for length in (longest // 2, longest)
    ]
    assert abs(words[0] - longest // 2) <= 10
    assert abs(words[1] - longest) <= 10


def test_unknown_tasks_and_sides_are_refused():
    with pytest.raises(ValueError, match="unknown task 'poem'; the tasks are add"):
        demo_tasks.make_task("poem", random.Random(0))
    with pytest.raises(ValueError, match="at least 1"):
        demo_tasks.make_task("copy", random.Random(0), 0)
    with pytest.raises(ValueError, match="'train' or 'held_out'"):
        next(demo_tasks.stream("copy", random.Random(0), "test"))
