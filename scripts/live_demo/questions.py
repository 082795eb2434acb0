"""The questions for a real model, short ones and others about a page of text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams
from scripts.lib.trace_rows import read_trace
from scripts.live_demo.scene import Ask

FILE = Path(__file__).with_name("questions.json")
# The settings that the makers of SmolLM2 advise, and a little against repetitions. Every request
# has a seed of its own, so that its answer does not depend on other requests.
SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05}
)


@dataclass(frozen=True)
class Question:
    """Question, and the text that it is about, if there is one.

    Attributes:
        title: of the text, or empty.
        passage: the text.
        question: about the text.
        max_tokens: of the answer.
    """

    title: str
    passage: str
    question: str
    max_tokens: int

    @property
    def prompt(self) -> str:
        """Prompt for the model. The text comes first, so that questions share its pages."""
        return f"{self.passage}\n\n{self.question}" if self.passage else self.question

    @property
    def heading(self) -> str:
        """Line that stands for the prompt on the screen."""
        return f"[{self.title}] {self.question}" if self.title else self.question


@dataclass(kw_only=True)
class QuestionAsk(Ask):
    """Request with a question."""

    question: Question


def read_questions(path: Path = FILE) -> list[Question]:
    """Read the questions in the order in which they are asked."""
    stored = json.loads(path.read_text())
    passages = {name: "\n\n".join(text["text"]) for name, text in stored["passages"].items()}
    questions = []
    for entry in stored["questions"]:
        title = entry.get("passage", "")
        passage = passages[title] if title else ""
        questions.append(Question(title, passage, entry["question"], entry["max_tokens"]))
    return questions


def make_question_asks(tokenizer: Any, max_model_len: int, count: int) -> list[QuestionAsk]:
    """Make the first `count` requests. They arrive as rows of the trace did.

    Raises:
        InvalidRequest: the model has no chat template, or too few positions.
    """
    if not tokenizer.has_template:
        raise InvalidRequest("this model has no chat template, so it cannot be asked", "model")
    requests: list[QuestionAsk] = []
    for number, (row, question) in enumerate(
        zip(read_trace(count), read_questions(), strict=False), 1
    ):
        token_ids = tokenizer.render_chat([{"role": "user", "content": question.prompt}])
        if len(token_ids) + question.max_tokens > max_model_len:
            raise InvalidRequest(
                f"question {number} has {len(token_ids)} tokens, too many for a model of "
                f"{max_model_len} positions",
                "model",
            )
        sampling = SamplingParams(**SAMPLING, seed=number, max_tokens=question.max_tokens)
        requests.append(
            QuestionAsk(
                number=number,
                arrival=row.arrival_s,
                token_ids=token_ids,
                sampling=sampling,
                timed=sampling,
                question=question,
            )
        )
    return requests
