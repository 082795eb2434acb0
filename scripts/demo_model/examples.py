"""The demonstration model's examples as tokens: endless for training, held out for scores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from scripts.demo_model import tasks as demo_tasks
from scripts.demo_model.tasks import Task
from scripts.demo_model.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS

# Sequence lengths of the training batches. Every batch holds about the same number of tokens.
BUCKETS = (64, 128, 256, 512, 768)
TOKENS_PER_BATCH = 3072
# Parts of the run: drills only, then short contexts, then contexts that grow to the longest.
DRILL_ONLY_SHARE, SHORT_SHARE, GROWN_SHARE = 0.01, 0.2, 0.5
CHAT_SHARE = 0.15
HELD_OUT_EXAMPLES = 300
# Words that prompts made to exceed a token limit are stretched to.
LONG_WORDS = (300, 560)
FILLER_TASKS = ("recall_code", "remember")
# How often each task is drawn: the ones learned by copying alone need less practice.
TASK_WEIGHTS = {
    "add": 1.5,
    "reverse": 2.0,
    "sort": 2.0,
    "nth_word": 2.0,
    "largest": 1.5,
    "copy": 0.7,
    "count_up": 1.0,
    "facts": 0.5,
    "key_value": 0.7,
    "recall_code": 1.0,
    "remember": 1.0,
}


@dataclass(frozen=True)
class Example:
    """A tokenized conversation. ``scored`` marks the answer tokens."""

    label: str
    tokens: list[int]
    scored: list[bool]


def encode(tokenizer: Tokenizer, label: str, turns: Sequence[Task]) -> Example:
    """Encode the conversation exactly as the chat template renders it, less the last newline."""
    tokens, scored = [BOS], [False]
    for turn, task in enumerate(turns):
        separator = "\n" if turn else ""
        prompt = f"{separator}<|im_start|>user\n{task.prompt}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer.encode(prompt).ids
        answer = [*tokenizer.encode(task.answer).ids, EOS]
        tokens += asked + answer
        scored += [False] * len(asked) + [True] * len(answer)
    return Example(label, tokens, scored)


def drill(rng: random.Random, vocab: int, longest: int) -> Example:
    """Draw random tokens in which earlier stretches come back. Repeated tokens are scored."""
    length = round(math.exp(rng.uniform(math.log(64), math.log(longest))))
    tokens, scored = [BOS], [False]
    while len(tokens) < length:
        span = rng.randint(4, 12)
        if len(tokens) < 2 * span or rng.random() < 0.35:
            tokens += [rng.randrange(len(SPECIAL_TOKENS), vocab) for _ in range(span)]
            scored += [False] * span
        else:
            start = rng.randint(1, len(tokens) - span)
            tokens += tokens[start : start + span]
            scored += [False] + [True] * (span - 1)
    return Example("drill", tokens[:length], scored[:length])


def training_examples(
    tokenizer: Tokenizer, rng: random.Random, progress: Callable[[], float]
) -> Iterator[Example]:
    """Yield training data without end: drills at first, then tasks and short chats."""
    names, weights, vocab = [*TASK_WEIGHTS], [*TASK_WEIGHTS.values()], tokenizer.get_vocab_size()
    while True:
        now = progress()
        grown = min(1.0, max(0.0, now - SHORT_SHARE) / (GROWN_SHARE - SHORT_SHARE))
        longest = round(BUCKETS[0] * (BUCKETS[-1] / BUCKETS[0]) ** grown)
        if now < DRILL_ONLY_SHARE or rng.random() < 0.1 * (1 - grown):
            yield drill(rng, vocab, min(longest, 128))
            continue
        turns = rng.choice((2, 3, 4)) if rng.random() < CHAT_SHARE else 1
        tasks = []
        for name in rng.choices(names, weights, k=turns):
            words = round(math.exp(rng.uniform(math.log(16), math.log(max(17, longest // turns)))))
            span = (words, words) if name in FILLER_TASKS else None
            tasks.append(next(demo_tasks.stream(name, rng, "train", span)))
        example = encode(tokenizer, tasks[0].name if turns == 1 else "chat", tasks)
        if len(example.tokens) <= longest + 1:
            yield example


def pad(examples: Sequence[Example], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad to tokens [B, length + 1]. Return also which of them are answer tokens."""
    tokens = np.full((len(examples), length + 1), PAD, np.int32)
    scored = np.zeros(tokens.shape, bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        scored[row, : len(example.tokens)] = example.scored
    return tokens, scored


def batches(source: Iterator[Example]) -> Iterator[tuple[list[Example], int]]:
    """Group examples of similar length. Each batch comes with the length to pad it to."""
    waiting: dict[int, list[Example]] = {length: [] for length in BUCKETS}
    for example in source:
        length = bucket(example)
        waiting[length].append(example)
        if len(waiting[length]) == TOKENS_PER_BATCH // length:
            yield waiting[length], length
            waiting[length] = []


def bucket(example: Example) -> int | None:
    """Choose the padded length of an example's batch, or None if it is longer than all of them."""
    return next((size for size in BUCKETS if len(example.tokens) <= size + 1), None)


def held_out(name: str, tokenizer: Tokenizer, seed: int, least: int) -> list[Example]:
    """Draw at most HELD_OUT_EXAMPLES unseen ones, of prompts above ``least`` tokens if not 0."""
    rng = random.Random(f"held out {name} {seed}")
    lengths = LONG_WORDS if least and name in FILLER_TASKS else None
    found: dict[str, Example] = {}
    # Some tasks have few prompts in all: then every held-out one is found, and that is enough.
    draws = islice(demo_tasks.stream(name, rng, "held_out", lengths), 40 * HELD_OUT_EXAMPLES)
    for task in draws:
        assert demo_tasks.split(task) == "held_out"
        example = encode(tokenizer, name, [task])
        if bucket(example) and example.scored.index(True) > least:
            found[task.prompt] = example
        if len(found) == HELD_OUT_EXAMPLES:
            break
    return list(found.values())
