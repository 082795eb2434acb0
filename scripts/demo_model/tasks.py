"""Synthetic text tasks whose answers a program can check.

The demonstration checkpoint is trained on these tasks, and the live demo and the tests draw
their requests from here.  Every generator takes a ``random.Random`` and an approximate prompt
length in words. The tasks in ``STRETCHABLE`` grow to that length, the others ignore it.  A prompt
belongs to the training or to the held-out side by a hash of its text, so the two never overlap.
"""

from __future__ import annotations

import hashlib
import math
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

WORDS: tuple[str, ...] = tuple(
    "ant ape bag bat bee box bus cap car cat cow cup dog egg elk fan fig fox gem hat hen ice ink "
    "jam jar jug key kit lid log map mat mug net nut oak owl pan pen pie pig pot ram rug sun tea "
    "toy van".split()
)
NAMES: tuple[str, ...] = tuple(
    "Ann Bob Dan Eva Fay Gus Ida Jim Kim Leo Max Ned Pam Roy Sue Tom".split()
)
COLOURS: tuple[str, ...] = tuple("red blue pink gold tan".split())
ORDINALS: tuple[str, ...] = ("first", "second", "third", "last")

# One prompt in HELD_OUT_MODULUS is kept out of training.
HELD_OUT_MODULUS = 10
LONGEST_FILLER_WORDS = 560


@dataclass(frozen=True)
class Task:
    """Question of a task: ``prompt`` is the user message, ``answer`` the exact expected reply."""

    name: str
    prompt: str
    answer: str


Generator = Callable[[random.Random, int | None], Task]


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def _filler_sentence(rng: random.Random) -> str:
    kind = rng.randrange(3)
    first, second = rng.sample(WORDS, 2)
    colour, other = rng.choice(COLOURS), rng.choice(COLOURS)
    if kind == 0:
        return f"The {colour} {first} is in the {second}."
    if kind == 1:
        return f"The {first} and the {second} are {colour}."
    return f"The {first} saw the {colour} {second} in the {other} {rng.choice(WORDS)}."


def _filler(rng: random.Random, words: int) -> list[str]:
    sentences: list[str] = []
    count = 0
    while count + 4 <= words:
        sentences.append(_filler_sentence(rng))
        count += sentences[-1].count(" ") + 1
    return sentences


def _filler_budget(rng: random.Random, length: int | None, used: int) -> int:
    if length is None:
        length = _log_uniform(rng, used + 1, LONGEST_FILLER_WORDS)
    return max(0, length - used)


def _add(rng: random.Random, length: int | None) -> Task:
    a, b = rng.randrange(100), rng.randrange(10)
    return Task("add", f"What is {a} + {b}?", str(a + b))


def _reverse(rng: random.Random, length: int | None) -> Task:
    letters = rng.sample(string.ascii_lowercase, rng.randint(3, 5))
    return Task("reverse", f"Reverse: {'-'.join(letters)}", "-".join(reversed(letters)))


def _sort(rng: random.Random, length: int | None) -> Task:
    words = rng.sample(WORDS, rng.randint(2, 4))
    return Task("sort", f"Sort the words: {' '.join(words)}", " ".join(sorted(words)))


def _nth_word(rng: random.Random, length: int | None) -> Task:
    words = rng.sample(WORDS, rng.randint(4, 6))
    ordinal = rng.randrange(len(ORDINALS))
    answer = words[-1] if ORDINALS[ordinal] == "last" else words[ordinal]
    return Task("nth_word", f"What is the {ORDINALS[ordinal]} word: {' '.join(words)}?", answer)


def _largest(rng: random.Random, length: int | None) -> Task:
    numbers = rng.sample(range(10, 100), rng.randint(2, 4))
    side, answer = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
    listed = " ".join(map(str, numbers))
    return Task("largest", f"What is the {side} number: {listed}?", str(answer))


def _copy(rng: random.Random, length: int | None) -> Task:
    count = _log_uniform(rng, 2, 32) if length is None else min(max(length - 3, 3), len(WORDS))
    words = " ".join(rng.sample(WORDS, count))
    return Task("copy", f"Say the words: {words}", words)


def _count_up(rng: random.Random, length: int | None) -> Task:
    start = rng.randrange(100)
    stop = start + rng.randint(2, 12)
    return Task(
        "count_up", f"Count from {start} to {stop}.", " ".join(map(str, range(start, stop + 1)))
    )


def _facts(rng: random.Random, length: int | None) -> Task:
    wanted = rng.randint(2, 8) if length is None else (length - 3) // 3
    count = min(max(wanted, 2), len(NAMES))
    facts = list(zip(rng.sample(NAMES, count), rng.sample(WORDS, count), strict=True))
    stated = " ".join(f"{owner} has {thing}." for owner, thing in facts)
    owner, thing = rng.choice(facts)
    return Task("facts", f"{stated} What has {owner}?", thing)


def _key_value(rng: random.Random, length: int | None) -> Task:
    wanted = _log_uniform(rng, 2, 24) if length is None else (length - 6) // 2
    count = min(max(wanted, 2), len(WORDS) // 2)
    words = rng.sample(WORDS, 2 * count)
    listed = ", ".join(f"{words[index]} {words[index + 1]}" for index in range(0, 2 * count, 2))
    asked = 2 * rng.randrange(count)
    question = f"What is the word of {words[asked]}?"
    return Task("key_value", f"{listed}. {question}", words[asked + 1])


def _recall_code(rng: random.Random, length: int | None) -> Task:
    names = rng.sample(NAMES, rng.randint(1, 3))
    # No digit occurs twice in a prompt, so that each determines the next.
    digits = "".join(rng.sample(string.digits, 3 * len(names)))
    codes = [digits[start : start + 3] for start in range(0, len(digits), 3)]
    sentences = _filler(rng, _filler_budget(rng, length, 6 * len(names) + 6))
    for name, code in zip(names, codes, strict=True):
        sentences.insert(rng.randint(0, len(sentences)), f"The code of {name} is {code}.")
    asked = rng.randrange(len(names))
    prompt = f"{' '.join(sentences)} What is the code of {names[asked]}?"
    return Task("recall_code", prompt, codes[asked])


def _remember(rng: random.Random, length: int | None) -> Task:
    words = " ".join(rng.sample(WORDS, rng.randint(2, 4)))
    sentences = _filler(rng, _filler_budget(rng, length, words.count(" ") + 7))
    sentences.insert(rng.randint(0, len(sentences)), f"Remember the words: {words}.")
    return Task("remember", f"{' '.join(sentences)} What are the words?", words)


TASKS: MappingProxyType[str, Generator] = MappingProxyType(
    {
        "add": _add,
        "reverse": _reverse,
        "sort": _sort,
        "nth_word": _nth_word,
        "largest": _largest,
        "copy": _copy,
        "count_up": _count_up,
        "facts": _facts,
        "key_value": _key_value,
        "recall_code": _recall_code,
        "remember": _remember,
    }
)
# Tasks whose prompt follows the length argument, with the longest prompt in words.
STRETCHABLE: MappingProxyType[str, int] = MappingProxyType(
    {
        "copy": len(WORDS) + 3,
        "facts": 3 * len(NAMES) + 3,
        "key_value": len(WORDS) + 6,
        "recall_code": LONGEST_FILLER_WORDS,
        "remember": LONGEST_FILLER_WORDS,
    }
)


def make_task(name: str, rng: random.Random, length: int | None = None) -> Task:
    """Make an example of the task called ``name``, about ``length`` words long where it can be."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; the tasks are {', '.join(TASKS)}")
    if length is not None and length < 1:
        raise ValueError(f"length is {length} words; it must be at least 1, or None")
    return TASKS[name](rng, length)


def check(task: Task, text: str) -> bool:
    """Return whether ``text`` is the expected answer, blanks around it aside."""
    return text.strip() == task.answer


def split(task: Task) -> str:
    """Return ``"train"`` or ``"held_out"``, decided by the prompt's text alone."""
    digest = hashlib.sha256(task.prompt.encode()).digest()
    return "held_out" if int.from_bytes(digest[:8]) % HELD_OUT_MODULUS == 0 else "train"


def stream(
    name: str, rng: random.Random, side: str, lengths: tuple[int, int] | None = None
) -> Iterator[Task]:
    """Yield examples of one task on one side of the split, ``lengths`` in words if given."""
    if side not in ("train", "held_out"):
        raise ValueError(f"side is {side!r}; it must be 'train' or 'held_out'")
    while True:
        task = make_task(name, rng, rng.randint(*lengths) if lengths else None)
        if split(task) == side:
            yield task
