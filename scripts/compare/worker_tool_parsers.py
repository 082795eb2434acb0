"""vLLM's parsers of calls and thoughts, run over outputs: whole, and token by token.

    python -m scripts.compare.worker_tool_parsers OUTPUTS.json ANSWERS.json

The interpreter is one that has vLLM. A GPU is not needed. Every dialect gets a tokenizer
trained on its own outputs, with its marks as special tokens, because parsers find them by token.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from pathlib import Path
from typing import Any

import vllm
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
from vllm.parser import ParserManager

Answer = dict[str, Any]


class HarmonyTokenizer:
    """The vocabulary of gpt-oss, as OpenAI's package has it."""

    def __init__(self) -> None:
        self._encoding = get_encoding()

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._encoding.encode(text, allowed_special="all")

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self._encoding.decode(list(ids))

    def get_vocab(self) -> dict[str, int]:
        return {}


def tokenizer_of(texts: list[str], marks: list[str]) -> Any:
    """Return a byte-level tokenizer of a few hundred words of these texts, and of the marks."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
    )
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)


def steps_of(tokenizer: Any, text: str) -> list[tuple[str, list[int]]]:
    """Return the text's tokens, each with the text it adds. Parts of a character go together."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps: list[tuple[str, list[int]]] = []
    done, waiting = "", []
    for end, token in enumerate(ids, 1):
        waiting.append(token)
        decoded = tokenizer.decode(ids[:end], skip_special_tokens=False)
        if not decoded.endswith("\ufffd"):
            steps.append((decoded[len(done) :], waiting))
            done, waiting = decoded, []
    return steps


class Dialect:
    """vLLM's parser of one dialect, made anew for every output, as its server does."""

    def __init__(self, dialect: dict[str, Any]) -> None:
        texts = [output["text"] for output in dialect["outputs"]]
        is_harmony = dialect["tool_call_parser"] == "openai"
        self._tokenizer = (
            HarmonyTokenizer() if is_harmony else tokenizer_of(texts, dialect["marks"])
        )
        self._tools = dialect["tools"]
        self._prompts = dialect["prompts"]
        calls, thoughts = dialect["tool_call_parser"], dialect["reasoning_parser"]
        can_leave = calls is not None and not is_harmony
        # Some parsers of thoughts take every text for thoughts, even after a prompt that has
        # closed them. Such a model is served without one.
        self._classes = {
            start: ParserManager.get_parser(
                tool_parser_name=calls,
                reasoning_parser_name=None if start == "closed" and can_leave else thoughts,
                enable_auto_tools=True,
                is_harmony=is_harmony,
            )
            for start in self._prompts
        }

    def _open(self, start: str) -> tuple[Any, Any, list[int]]:
        """Return a parser, its request and its prompt, with thoughts switched as it starts."""
        switch = {} if start == "free" else {"enable_thinking": start == "open"}
        if switch:
            switch["thinking"] = switch["enable_thinking"]
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            tools=self._tools,
            chat_template_kwargs=switch,
        )
        parser = self._classes[start](self._tokenizer, request.tools, chat_template_kwargs=switch)
        prompt = self._tokenizer.encode(self._prompts[start], add_special_tokens=False)
        return parser, request, prompt

    def whole(self, start: str, text: str) -> Answer:
        parser, request, prompt = self._open(start)
        parser.set_prompt_token_ids(prompt)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        return answer(reasoning, content, [(call.name, call.arguments) for call in calls or []])

    def streamed(self, start: str, text: str) -> Answer:
        """Return the sum of the parts that vLLM streams for a text."""
        parser, request, prompt = self._open(start)
        reasoning = content = ""
        calls: dict[int, tuple[str, str]] = {}
        steps = [*steps_of(self._tokenizer, text), ("", [])]
        for place, (part, ids) in enumerate(steps):
            is_last = place == len(steps) - 1
            delta = parser.parse_delta(part, ids, request, prompt, finished=is_last)
            if delta is None:
                continue
            reasoning += delta.reasoning or ""
            content += delta.content or ""
            for call in delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                function = call.function
                if function is not None:
                    name += function.name or ""
                    arguments += function.arguments or ""
                calls[call.index] = (name, arguments)
        return answer(reasoning, content, [calls[index] for index in sorted(calls)])


def answer(reasoning: str | None, content: str | None, calls: list[tuple[str, str]]) -> Answer:
    """Return an answer to compare: None as an empty text, arguments as their values."""
    read = []
    for name, arguments in calls:
        try:
            value = json.loads(arguments)
        except (TypeError, ValueError):
            value = arguments
        read.append({"name": name, "arguments": value})
    return {"reasoning": reasoning or "", "content": content or "", "calls": read}


def attempt(read: Any, start: str, text: str) -> Answer:
    """Return an answer, or the error in its place."""
    try:
        return read(start, text)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def read_all(dialects: dict[str, Any]) -> dict[str, Any]:
    """Return, by dialect, the answers for each output, or the reason why they are missing."""
    answers: dict[str, Any] = {}
    for name, dialect in dialects.items():
        try:
            parser = Dialect(dialect)
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        answers[name] = [
            {
                "whole": attempt(parser.whole, output["start"], output["text"]),
                "streamed": attempt(parser.streamed, output["start"], output["text"]),
            }
            for output in dialect["outputs"]
        ]
    return answers


def main() -> None:
    source, target = (Path(argument) for argument in sys.argv[1:3])
    # Parsers log a traceback for every output that they cannot read.
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()):
        answers = read_all(json.loads(source.read_text()))
    target.write_text(json.dumps({"version": vllm.__version__, "answers": answers}))


if __name__ == "__main__":
    main()
