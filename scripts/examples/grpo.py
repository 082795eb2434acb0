"""GRPO in one process: an engine samples, its model is differentiated, the engine gets the weights.

    python -m scripts.examples.grpo --minutes 10 --out DIR --seed 0

Trains the bundled model on one of its tasks. Two fifths of the prompts belong to other tasks, so
that the model keeps them. Tasks with more errors have more prompts. The completions of a prompt are
a group. A completion has the reward 1 if it is the expected answer, else 0. Its advantage is the
reward less the mean of the group, over the standard deviation. Groups of equal rewards are dropped.

Correct completions of a prompt are equal, so a gradient has one row for each group, with the sum of
their advantages. Wrong completions are left out. The gradients of the log-probabilities of all
completions, weighted by probability, sum to zero. The wrong ones would therefore add noise, and on
average the direction of the correct ones.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import load_file, save_file

import jaxserve
from jaxserve import LLM, Rollout, SamplingParams
from jaxserve.commands.argument_types import positive, positive_integer
from jaxserve.settings.config import bundled_model
from scripts.demo_model.tasks import STRETCHABLE, TASKS, Task, check, stream
from scripts.lib.argument_types import at_least, new_folder, script_parser
from scripts.lib.run_main import run_main

PROMPTS, OTHERS, GROUP = 96, 64, 8  # of the task, of all others, and completions of a prompt
ROWS, LENGTH = 64, 64  # of every gradient, which is thus compiled once
WORDS = (4, 28)  # of a prompt whose length can be chosen
RATE, WARM_UP = 8e-4, 0.05
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))
REPORTED = 20  # updates between two lines of output
WEIGHTS = "model.safetensors"


@contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Add the time of a block to the seconds of a part."""
    began = time.monotonic()
    yield
    seconds[part] += time.monotonic() - began


def sample(llm: LLM, questions: list[Task], sampling: SamplingParams) -> tuple[Rollout, np.ndarray]:
    """Return completions of questions, and their rewards [questions, completions of each]."""
    render = llm.get_tokenizer().render_chat
    chats = [[{"role": "user", "content": question.prompt}] for question in questions]
    rollout = llm.rollout([render(chat, add_generation_prompt=True) for chat in chats], sampling)
    texts = iter(rollout.texts())
    rewards = [[check(question, next(texts)) for _ in range(sampling.n)] for question in questions]
    return rollout, np.array(rewards, np.float32)


def accuracies(llm: LLM, count: int) -> dict[str, tuple[float, int]]:
    """Return the share of correct greedy answers by task, and the number of questions.

    There are `count` questions of each task, or fewer if its held-out side is smaller. None of them
    occurs in the training.
    """
    shares = {}
    for name in TASKS:
        draws = stream(name, random.Random(f"held out {name}"), "held_out")
        questions = list(dict.fromkeys(islice(draws, 2 * count)))[:count]
        rewards = sample(llm, questions, SamplingParams(temperature=0, max_tokens=64))[1]
        shares[name] = float(rewards.mean()), len(questions)
    return shares


def batch_of(rollout: Rollout, rewards: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return tokens, lengths, weights and sampled log-probabilities of ROWS completions.

    The last two are [ROWS, LENGTH - 1], in the order of `jaxserve.logprobs`. The tokens of prompts
    have the weight 0, as do all tokens of completions that are too long or of a dropped group.
    """
    spread = np.maximum(rewards.std(axis=1, keepdims=True), 1e-6)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
    rows = advantages.argmax(axis=1) + GROUP * np.arange(len(rewards))
    weights = np.maximum(advantages, 0).sum(axis=1) * (rollout.lengths[rows] <= LENGTH)
    best = np.argsort(-weights)[:ROWS]
    rows, weights = rows[best], weights[best] / max(weights[best].sum(), 1e-6)
    tokens, mask, sampled = (
        np.pad(array[rows], ((0, 0), (0, LENGTH)))[:, :LENGTH]
        for array in (rollout.tokens, rollout.mask, rollout.logprobs)
    )
    lengths = np.minimum(rollout.lengths[rows], LENGTH)
    weights = (mask[:, 1:] * weights[:, None]).astype(np.float32)
    return tokens, lengths, weights, sampled[:, 1:]


@jax.jit
def update(
    params: Any, state: Any, rate: float, tokens: Any, lengths: Any, weights: Any
) -> tuple[Any, Any, jax.Array]:
    """Return the weights and the optimizer's state after an update, and log-probabilities."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        scores = jaxserve.logprobs(params, tokens, lengths, bundled_model())
        return -(weights * scores).sum(), scores

    (_, scores), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    steps, state = OPTIMIZER.update(gradient, state)
    return optax.apply_updates(params, jax.tree.map(lambda s: -rate * s, steps)), state, scores


def train(llm: LLM, params: Any, task: str, seed: int, minutes: float, updates: int | None) -> Any:
    """Return the weights after `minutes`, or after `updates`. The engine has the same."""
    seconds: dict[str, float] = defaultdict(float)
    rng, state = random.Random(seed), OPTIMIZER.init(params)
    draws = {
        name: stream(name, rng, "train", WORDS if name in STRETCHABLE else None) for name in TASKS
    }
    # The recent share of wrong completions, by which the prompts of other tasks are drawn.
    wrong = {name: 0.2 for name in TASKS if name != task}
    sampling = SamplingParams(n=GROUP, temperature=1, max_tokens=32)
    began, difference, means = time.monotonic(), 0.0, list[float]()
    while len(means) != updates:
        part = (time.monotonic() - began) / (60 * minutes)
        if part >= 1:
            break
        with timed(seconds, "rollouts"):
            pairs = [(next(draws[task]), next(draws[task])) for _ in range(PROMPTS)]
            questions = [max(pair, key=lambda one: len(one.prompt)) for pair in pairs]  # harder
            others = rng.choices([*wrong], [share + 0.05 for share in wrong.values()], k=OTHERS)
            questions += [next(draws[name]) for name in others]
            rollout, rewards = sample(llm, questions, sampling)
            for name, reward in zip(others, rewards[PROMPTS:].mean(axis=1), strict=True):
                wrong[name] += 0.05 * (1 - reward - wrong[name])
            tokens, lengths, weights, sampled = batch_of(rollout, rewards)
        rate = RATE * min(part / WARM_UP, 1) * (1 + math.cos(math.pi * part)) / 2
        with timed(seconds, "gradients"):
            params, state, scores = update(params, state, rate, tokens, lengths, weights)
            scores = np.where(weights > 0, scores, sampled)
            difference = max(difference, float(np.abs(scores - sampled).max()))
        with timed(seconds, "weight updates"):
            llm.update_weights(params)
        means.append(float(rewards[:PROMPTS].mean()))
        if len(means) % REPORTED == 0 or len(means) == updates:
            print(f"{len(means)} updates: reward {np.mean(means[-REPORTED:]):.3f}", flush=True)
    print(f"largest difference of log-probabilities between trainer and rollout: {difference}")
    parts = ", ".join(f"{part} {spent:.1f}" for part, spent in seconds.items())
    print(f"seconds: {parts}; processor time of the process {time.process_time():.1f}")
    return params


def main() -> None:
    parser = script_parser("scripts.examples.grpo", __doc__)
    parser.add_argument("--minutes", type=positive, default=10, help="time of the training")
    parser.add_argument("--updates", type=positive_integer, help="most updates, in place of all")
    parser.add_argument("--out", type=new_folder, required=True, help="folder to write")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--task", choices=[*TASKS], default="sort", help="the task to train")
    parser.add_argument("--questions", type=positive_integer, default=200, help="held out, by task")
    args = parser.parse_args()
    files = load_file(bundled_model() / WEIGHTS)
    with LLM(max_num_seqs=256, seed=args.seed) as llm:
        before = accuracies(llm, args.questions)
        params = {name: jnp.asarray(tensor) for name, tensor in files.items()}
        params = train(llm, params, args.task, args.seed, args.minutes, args.updates)
    shutil.copytree(bundled_model(), args.out, ignore=lambda *_: ["README.md"], dirs_exist_ok=True)
    save_file({name: np.asarray(params[name]) for name in params}, args.out / WEIGHTS)
    with LLM(args.out) as llm:
        after = accuracies(llm, args.questions)
    for name, (share, count) in after.items():
        print(f"{name}: {before[name][0]:.3f} -> {share:.3f} of {count} questions")


if __name__ == "__main__":
    run_main(main)
