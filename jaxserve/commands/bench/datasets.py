"""Requests of a benchmark: random, from ShareGPT's file, or from lines of JSON, as in vLLM.

Lengths, order, repetitions and random generators follow vLLM's `benchmarks/datasets`, so that the
same seed gives the same lengths.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.commands.bench.outcome import Work
from jaxserve.commands.options import CommandError

# Token ids that are bytes in nearly every vocabulary, above the usual special tokens.
TOKEN_IDS = (16, 256)
WORDS = "the of and to in is it for on as with at by from or an be this that are was not".split()
_TRIES = 10  # to find a text with the requested number of tokens
# Limits of lengths in tokens for ShareGPT's conversations: vLLM's `is_valid_sequence`.
_LEAST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


class RandomPrompts:
    """A source of random prompts of a requested length: text, token ids, or words.

    Args:
        tokenizer: makes prompts of text with random tokens. None for prompts of token ids.
        is_chat: without a tokenizer, make prompts of common words instead of token ids.
    """

    def __init__(self, tokenizer: Any, is_chat: bool, generator: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._generator = generator
        self._ids = np.arange(*TOKEN_IDS)
        self.num_special = 0
        if tokenizer is not None:
            size = tokenizer.backend.get_vocab_size(with_added_tokens=False)
            special = np.fromiter(tokenizer.special_ids, np.int64)
            self._ids = np.setdiff1d(np.arange(size), special)
            self.num_special = len(tokenizer.encode("a")) - len(tokenizer.encode("a", False))
        self.vocab_size = len(self._ids) if tokenizer is None else size

    def draw(self, count: int) -> list[int]:
        """Return a list of `count` random token ids, none of which is a special token."""
        return self._ids[self._generator.integers(0, len(self._ids), count)].tolist()

    def make(self, first: Sequence[int], offset: int, length: int) -> tuple[list[int] | str, int]:
        """Return a prompt (text or token ids) and its number of tokens.

        Its tokens are those in `first`, then `length` consecutive ids of the vocabulary from
        `offset`. The number can differ from the requested one with a tokenizer, since not every
        list of ids encodes a text.
        """
        following = self._ids[(offset + np.arange(length)) % len(self._ids)].tolist()
        ids = [*first, *following]
        if self._tokenizer is None:
            if self._is_chat:
                return " ".join(WORDS[number % len(WORDS)] for number in ids), len(ids)
            return ids, len(ids)
        count = len(ids)
        for tries_left in range(_TRIES, -1, -1):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            ids = self._tokenizer.encode(text, False) if text else []
            if len(ids) == count or not tries_left:
                break
            ids = [*ids[:count], *self.draw(max(0, count - len(ids)))]
        return text, len(ids)


def random_works(arguments: argparse.Namespace, tokenizer: Any, is_chat: bool) -> list[Work]:
    """Return requests with random prompts, and random lengths of prompts and answers.

    Lengths are from [length * (1 - r), length * (1 + r)], with `length` and `r` from the options of
    the command line.

    Args:
        tokenizer: tokenizer for prompts of text, or None for token ids.
        is_chat: without a tokenizer, make prompts of common words.

    Raises:
        CommandError: a prompt could have 0 tokens.
    """
    generator = np.random.default_rng(arguments.seed)
    prompts = RandomPrompts(tokenizer, is_chat, generator)
    ratios = arguments.random_range_ratio
    inputs = max(0, arguments.random_input_len - prompts.num_special)
    if arguments.random_prefix_len + math.floor(inputs * (1 - ratios["input"])) < 1:
        raise CommandError(
            f"--random-input-len {arguments.random_input_len}: leaves prompts without a token; the "
            f"tokenizer adds {prompts.num_special}"
        )

    def draw(mean: int, ratio: float, least: int) -> np.ndarray:
        low, high = math.floor(mean * (1 - ratio)), math.ceil(mean * (1 + ratio))
        return generator.integers(max(low, least), max(high, least) + 1, arguments.num_prompts)

    lengths = draw(inputs, ratios["input"], 0).tolist()
    outputs = draw(arguments.random_output_len, ratios["output"], 1).tolist()
    offsets = generator.integers(0, prompts.vocab_size, arguments.num_prompts).tolist()
    first = prompts.draw(arguments.random_prefix_len)
    works = []
    for number, (length, output, offset) in enumerate(zip(lengths, outputs, offsets, strict=True)):
        prompt, count = prompts.make(first, offset + number, length)
        works.append(Work(prompt, count, output))
    return works


def spread_lengths(arguments: argparse.Namespace) -> None:
    """Copy the values of --input-len and --output-len to the length options of all data sets.

    The attributes of `arguments` are set, as in vLLM. Absent options have no effect.
    """
    if arguments.input_len is not None:
        arguments.random_input_len = arguments.input_len
    if arguments.output_len is not None:
        for name in ("random_output_len", "sharegpt_output_len", "custom_output_len"):
            setattr(arguments, name, arguments.output_len)


def sharegpt_works(arguments: argparse.Namespace, tokenizer: Any) -> list[Work]:
    """Return requests from a ShareGPT file: the first question of each conversation, as in vLLM.

    The length of an answer is that of the conversation's answer, or --sharegpt-output-len. Too
    short and too long conversations are skipped.

    Raises:
        CommandError: the file has another format, or no conversation of a suitable length.
    """
    path: Path = arguments.dataset_path
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--dataset-path {path}: is no JSON: {error}") from None
    if not isinstance(entries, list):
        raise CommandError(f"--dataset-path {path}: must be a list of conversations")
    talks = [entry.get("conversations") for entry in entries if isinstance(entry, dict)]
    talks = [talk for talk in talks if isinstance(talk, list) and len(talk) >= 2]
    _shuffle(talks, arguments)
    works: list[Work] = []
    fixed = arguments.sharegpt_output_len
    for talk in talks:
        if len(works) == arguments.num_prompts:
            break
        texts = [turn.get("value") if isinstance(turn, dict) else None for turn in talk[:2]]
        if not all(isinstance(text, str) for text in texts):
            raise CommandError(f"--dataset-path {path}: a turn has no text under 'value'")
        prompt, answer = (tokenizer.encode(text) if text else [] for text in texts)
        output = len(answer) if fixed is None else fixed
        is_short = len(prompt) < _LEAST or (fixed is None and output < _LEAST)
        if is_short or len(prompt) > _LONGEST_PROMPT or len(prompt) + output > _LONGEST:
            continue
        works.append(Work(str(texts[0]), len(prompt), output))
    return _filled(works, arguments)


def custom_works(arguments: argparse.Namespace, tokenizer: Any, is_chat: bool) -> list[Work]:
    """Return requests from a .jsonl file, whose lines are JSON objects with a prompt.

    The chat template is applied to a prompt unless the server applies it (`is_chat`) or
    --skip-chat-template is set.

    Raises:
        CommandError: a line has no prompt or no length of an answer. The message has its number.
    """
    path: Path = arguments.dataset_path
    if path.suffix != ".jsonl":
        raise CommandError(f"--dataset-path {path}: must be a .jsonl file, one object a line")
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CommandError(f"--dataset-path {path}, line {number}: no JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
            raise CommandError(f"--dataset-path {path}, line {number}: has no text under 'prompt'")
        rows.append((number, row))
    _shuffle(rows, arguments)
    works = []
    for number, row in rows[: arguments.num_prompts]:
        output = arguments.custom_output_len
        if output == -1:
            output = row.get("output_tokens")
            if type(output) is not int or output < 1:
                raise CommandError(
                    f"--dataset-path {path}, line {number}: 'output_tokens' must be an integer of "
                    "at least 1 where --custom-output-len is -1"
                )
        prompt: list[int] | str = row["prompt"]
        count = 1 if tokenizer is None else len(tokenizer.encode(prompt))
        is_plain = is_chat or arguments.skip_chat_template
        if tokenizer is not None and not is_plain and tokenizer.has_template(False):
            prompt = tokenizer.render_chat([{"role": "user", "content": prompt}])
            count = len(prompt)
        works.append(Work(prompt, count, output))
    return _filled(works, arguments)


def _shuffle(rows: list[Any], arguments: argparse.Namespace) -> None:
    if not arguments.disable_shuffle:
        random.Random(arguments.seed).shuffle(rows)


def _filled(works: list[Work], arguments: argparse.Namespace) -> list[Work]:
    # Repeats random requests up to the requested number.
    if not works:
        raise CommandError(f"--dataset-path {arguments.dataset_path}: holds no request that fits")
    if arguments.no_oversample:
        return works
    generator = random.Random(arguments.seed)
    missing = arguments.num_prompts - len(works)
    return works + [generator.choice(works) for _ in range(missing)]


def make_works(arguments: argparse.Namespace, tokenizer: Any, is_chat: bool = False) -> list[Work]:
    """Return the requests of a benchmark from the data set that --dataset-name selects.

    Args:
        tokenizer: makes and counts text, or None for prompts of token ids.
        is_chat: whether requests are sent to the chat endpoint.

    Raises:
        CommandError: the data set needs a file or a tokenizer, or does not take a file.
    """
    name, path = arguments.dataset_name, arguments.dataset_path
    if name == "random":
        if path is not None:
            raise CommandError("--dataset-path is for --dataset-name sharegpt and custom")
        return random_works(arguments, tokenizer, is_chat)
    if path is None:
        raise CommandError(f"--dataset-name {name} needs --dataset-path, a file")
    if name == "custom":
        return custom_works(arguments, tokenizer, is_chat)
    if tokenizer is None:
        raise CommandError("--dataset-name sharegpt counts tokens: name a --tokenizer")
    return sharegpt_works(arguments, tokenizer)
