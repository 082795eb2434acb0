"""Training of the demonstration checkpoint on the synthetic tasks of ``demo_tasks``.

    python -m scripts.demo_model.train [--out DIR] [--seed 0] [--steps N] [--minutes N]

Writes a Llama checkpoint in the plain Hugging Face layout (config, tokenizer with chat template,
safetensors weights) and a model card holding the accuracies measured on held-out examples.  The
run stops after ``--steps`` updates, so it is reproducible. ``--minutes`` is only a safety stop.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tokenizers import Tokenizer

from jaxserve.commands.argument_types import positive, positive_integer
from scripts.demo_model import tasks as demo_tasks
from scripts.demo_model.checkpoint import Run, Score, write_card, write_settings, write_weights
from scripts.demo_model.examples import (
    FILLER_TASKS,
    TOKENS_PER_BATCH,
    Example,
    batches,
    bucket,
    held_out,
    pad,
    training_examples,
)
from scripts.demo_model.network import Config, Llama, seed_circuits, seed_embeddings
from scripts.demo_model.tokenizer import build_tokenizer, word_pairs
from scripts.lib.argument_types import new_folder, script_parser
from scripts.lib.paths import ROOT
from scripts.lib.run_main import run_main

# Text between the last word of a question and the answer.
PROMPT_END = "?<|im_end|>\n<|im_start|>assistant\n"
PEAK_RATE = 2e-3
DEFAULT_STEPS = 2600


Batch = tuple[np.ndarray, np.ndarray]


def make_step(graph: nnx.GraphDef, optimizer: optax.GradientTransformation) -> Callable:
    """Compile one update, which also returns the loss and which rows were answered perfectly."""

    def loss_of(params: nnx.State, tokens: jax.Array, scored: jax.Array) -> tuple:
        logits, targets, mask = (
            nnx.merge(graph, params)(tokens[:, :-1]),
            tokens[:, 1:],
            scored[:, 1:],
        )
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * mask
        perfect = jnp.all((logits.argmax(-1) == targets) | ~mask, axis=-1)
        # Batches of long contexts hold few answer tokens. A floor keeps their noise down.
        return surprise.sum() / jnp.maximum(mask.sum(), 200), (surprise.sum() / mask.sum(), perfect)

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, batch: Batch) -> tuple:
        (_, report), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, report

    return step


def train(model: Llama, tokenizer: Tokenizer, seed: int, steps: int, minutes: float) -> int:
    """Update ``model`` in place. Return the number of steps done."""
    graph, params = nnx.split(model)
    rate = optax.warmup_cosine_decay_schedule(
        0.0, PEAK_RATE, min(100, steps // 2), steps, PEAK_RATE / 50
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.98, weight_decay=0.01)
    )
    state, step, done = optimizer.init(params), make_step(graph, optimizer), 0
    source = batches(training_examples(tokenizer, random.Random(seed), lambda: done / steps))
    perfect: dict[str, list[bool]] = defaultdict(list)
    losses: list[float] = []
    began = time.monotonic()
    while done < steps and time.monotonic() - began < 60 * minutes:
        examples, length = next(source)
        params, state, (loss, rows) = step(params, state, pad(examples, length))
        losses.append(float(loss))
        for example, good in zip(examples, np.asarray(rows), strict=True):
            perfect[example.label].append(bool(good))
        done += 1
        if done % 250 == 0:
            shares = " ".join(f"{k} {np.mean(v):.2f}" for k, v in sorted(perfect.items()))
            spent = time.monotonic() - began
            print(f"step {done} {spent:.0f} s loss {np.mean(losses):.3f} | {shares}", flush=True)
            perfect.clear()
            losses.clear()
    nnx.update(model, params)
    return done


def evaluate(model: Llama, name: str, tokenizer: Tokenizer, seed: int, least: int = 0) -> Score:
    """Compute exact-match accuracy of greedy decoding.

    One pass over prompt and expected answer decides it: greedy decoding gives that answer and
    stops exactly when the best token at every answer position is the expected one.
    """
    graph, params = nnx.split(model)
    best = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens).argmax(-1))
    examples = held_out(name, tokenizer, seed, least)
    groups: dict[int, list[Example]] = defaultdict(list)
    for example in examples:
        groups[bucket(example)].append(example)
    correct = 0
    for length, members in groups.items():
        rows = TOKENS_PER_BATCH // length
        for start in range(0, len(members), rows):
            part = members[start : start + rows]
            tokens, scored = pad(part + [part[0]] * (rows - len(part)), length)
            hits = (np.asarray(best(params, tokens[:, :-1])) == tokens[:, 1:]) | ~scored[:, 1:]
            correct += int(hits.all(axis=1)[: len(part)].sum())
    sizes = [example.scored.index(True) for example in examples]
    label = f"{name}, more than {least} tokens" if least else name
    return Score(label, len(examples), correct, min(sizes), max(sizes))


def rated(tokenizer: Tokenizer, model: Llama, seed: int) -> list[Score]:
    """Score every task as it comes, and the filler tasks again on long prompts only."""
    wanted = [(name, 0) for name in demo_tasks.TASKS] + [(name, 300) for name in FILLER_TASKS]
    scores = []
    for name, least in wanted:
        scores.append(evaluate(model, name, tokenizer, seed, least))
        s = scores[-1]
        print(f"{s.label}: {s.correct} of {s.examples} held-out examples", flush=True)
    return scores


def main() -> None:
    parser = script_parser("scripts.demo_model.train", __doc__)
    default = ROOT / "jaxserve" / "demo_model"
    parser.add_argument("--out", type=new_folder, default=str(default), help="folder to write")
    parser.add_argument(
        "--seed", type=lambda text: positive_integer(text, 0, (1 << 32) - 1), default=0
    )
    parser.add_argument(
        "--steps", type=positive_integer, default=DEFAULT_STEPS, help="updates to make"
    )
    parser.add_argument("--minutes", type=positive, default=180, help="stop early after this long")
    args = parser.parse_args()
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = Llama(Config(tokenizer.get_vocab_size()), nnx.Rngs(args.seed))
    seed_embeddings(model, word_pairs(tokenizer))
    seed_circuits(model, len(tokenizer.encode(PROMPT_END).ids))
    done = train(model, tokenizer, args.seed, args.steps, args.minutes)
    if not done:
        raise SystemExit(f"no update was made in --minutes {args.minutes:g}; nothing is written")
    minutes = (time.monotonic() - began) / 60
    scores = rated(tokenizer, model, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_weights(model, args.out)
    write_settings(model.config, tokenizer, args.out)
    command = " ".join(["python", "-m", "scripts.demo_model.train", *sys.argv[1:]])
    run = Run(command, args.seed, done, round(minutes, 1), jax.__version__, os.cpu_count() or 1)
    write_card(scores, run, model, args.out)
    print(f"{done} steps in {minutes:.1f} minutes; wrote {args.out}")


if __name__ == "__main__":
    run_main(main)
