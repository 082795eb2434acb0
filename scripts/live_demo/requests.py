"""The requests for the bundled model: lengths and arrivals of a real trace, and tasks."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Any

from jaxserve.request import SamplingParams
from scripts.demo_model import tasks as demo_tasks
from scripts.demo_model.tasks import Task
from scripts.lib.trace_rows import read_trace
from scripts.live_demo.scene import Ask

# Prompts of at least so many tokens are documents, each with several questions.
DOCUMENT_TOKENS = 100
WORDS_PER_TOKEN = 0.8
TEMPLATE_TOKENS = 12
LONGEST_ANSWER = 112


@dataclass(kw_only=True)
class TaskAsk(Ask):
    """Request with a task, whose answer is either right or wrong."""

    task: Task

    @property
    def right(self) -> bool:
        return self.ended > 0 and demo_tasks.check(self.task, self.text)


def follow_ups(task: Task) -> list[Task]:
    """List the other questions that a document of codes answers, except training questions."""
    codes = dict(re.findall(r"The code of (\w+) is (\d+)\.", task.prompt))
    document, question, asked = task.prompt.rpartition("What is the code of ")
    others = (name for name in codes if name != asked.rstrip("?"))
    tasks = (Task(task.name, f"{document}{question}{name}?", codes[name]) for name in others)
    return [other for other in tasks if demo_tasks.split(other) == "held_out"]


def choose_task(rng: random.Random, prompt: int, output: int, questions: list[Task]) -> Task:
    """Choose a task of about these token counts. `questions` are open ones of earlier documents."""
    words = max(1, round((prompt - TEMPLATE_TOKENS) * WORDS_PER_TOKEN))
    if prompt >= DOCUMENT_TOKENS:
        if questions and rng.random() < 0.5:
            return questions.pop(0)
        name = rng.choice(("recall_code", "recall_code", "remember"))
        tasks = demo_tasks.stream(name, rng, "held_out", (words, words))
        if name == "remember":
            return next(tasks)
        task = next(task for task in tasks if follow_ups(task))
        questions += follow_ups(task)
        return task
    fitting = [name for name in demo_tasks.TASKS if name not in demo_tasks.STRETCHABLE]
    fitting += 2 * ["facts", "key_value"] if words > 20 else []
    fitting += 3 * ["copy"] if output >= 8 else []
    name = rng.choice(fitting)
    # The answer is the copied text, so its length can be chosen.
    length = min(output, words) + 3 if name == "copy" else words
    return next(demo_tasks.stream(name, rng, "held_out", (length, length)))


def make_asks(
    tokenizer: Any, max_model_len: int, count: int, seed: int = 0
) -> tuple[list[TaskAsk], float]:
    """Make the requests. Return also the factor that fits the trace's lengths to the model."""
    trace, rng = read_trace(count), random.Random(seed)
    longest = max_model_len - LONGEST_ANSWER
    scale = min(1.0, longest / max(row.input_tokens + row.output_tokens for row in trace))
    requests: list[TaskAsk] = []
    questions: list[Task] = []
    for number, row in enumerate(trace, 1):
        wanted, output = round(row.input_tokens * scale), round(row.output_tokens * scale)
        while True:
            task = choose_task(rng, wanted, output, questions)
            messages = [{"role": "user", "content": task.prompt}]
            token_ids = tokenizer.render_chat(messages)
            if len(token_ids) <= longest:
                break
            wanted = wanted * 9 // 10
        # Timed requests have the trace's output lengths, whatever the model would say.
        timed = SamplingParams(temperature=0.0, max_tokens=max(2, output), ignore_eos=True)
        requests.append(
            TaskAsk(
                number=number,
                arrival=row.arrival_s,
                token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=LONGEST_ANSWER),
                timed=timed,
                task=task,
            )
        )
    return requests, scale
