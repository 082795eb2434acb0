"""Train the demonstration checkpoint on the synthetic tasks of ``demo_tasks``.

    python scripts/train_demo_model.py [--out DIR] [--seed 0] [--steps N] [--minutes N]

Writes a Llama checkpoint in the plain Hugging Face layout (config, tokenizer with chat template,
safetensors weights) and a model card holding the accuracies measured on held-out examples.  The
run stops after ``--steps`` updates, so it is reproducible; ``--minutes`` is only a safety stop.

Shape names: B batch, T tokens, L layers, D hidden, N query heads, K kv heads, H head dim,
F mlp, V vocab.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import string
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

import demo_tasks
from demo_tasks import Task

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
PAD, BOS, _, EOS = range(4)
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What stands between the last word of a question and the answer.
PROMPT_END = "?<|im_end|>\n<|im_start|>assistant\n"
# Words of the prompts that become one token each, apart from the word lists of demo_tasks.
PROMPT_WORDS = (
    "user What is the words word has in of code Say saw are The and Count from to"
).split()
LETTER_RUNS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Sequence lengths of the training batches; every batch holds about the same number of tokens.
BUCKETS = (64, 128, 256, 512, 768)
TOKENS_PER_BATCH = 3072
QUERY_CHUNK = 128
EMBEDDING_SCALE = 0.5
PEAK_RATE = 2e-3
# Parts of the run: drills only, then short contexts, then contexts that grow to the longest.
DRILL_ONLY_SHARE, SHORT_SHARE, GROWN_SHARE = 0.01, 0.2, 0.5
CHAT_SHARE = 0.15
DEFAULT_STEPS = 2600
HELD_OUT_EXAMPLES = 300
# Words that prompts made to exceed a token limit are stretched to.
LONG_WORDS = (300, 560)
PARAMETER_NAMES = {
    "": ("input_layernorm", "post_attention_layernorm"),
    "self_attn.": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp.": ("gate_proj", "up_proj", "down_proj"),
}
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
class Config:
    """Sizes of the model, under the names of the Hugging Face configuration."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 1024


# ---------------------------------------------------------------------------------- tokenizer


def bytes_as_characters() -> dict[int, str]:
    """The printable character that byte-level BPE uses for each of the 256 byte values."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in set(kept)]
    table = {byte: chr(byte) for byte in kept}
    return table | {byte: chr(256 + rank) for rank, byte in enumerate(shifted)}


def build_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges after which each of ``words`` is one token.

    A later merge ranks below all earlier ones, so it cannot split a word that is already whole.
    """
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = list(word)
        for left, right in merges:
            at = 0
            while at < len(pieces) - 1:
                if (pieces[at], pieces[at + 1]) == (left, right):
                    pieces[at : at + 2] = [left + right]
                at += 1
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
    return merges


def build_tokenizer() -> Tokenizer:
    """A byte-level BPE over single digits, task words (with and without a blank) and bytes."""
    characters = bytes_as_characters()
    blank = characters[ord(" ")]
    bare = [*demo_tasks.WORDS, *demo_tasks.NAMES, *demo_tasks.COLOURS, *PROMPT_WORDS]
    after_blank = [blank + word for word in bare if word not in ("user", "Say")]
    after_blank += [blank + digit for digit in string.digits]
    merges = build_merges([*dict.fromkeys(bare), *dict.fromkeys(after_blank)])
    tokens = [*SPECIAL_TOKENS, *(characters[byte] for byte in range(256))]
    tokens += dict.fromkeys(left + right for left, right in merges)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LETTER_RUNS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def word_pairs(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Ids of every word that is one token both without and with a blank before it."""
    ids, blank = tokenizer.get_vocab(), bytes_as_characters()[ord(" ")]
    return [(ids[token], ids[blank + token]) for token in ids if blank + token in ids]


# -------------------------------------------------------------------------------------- model


def rope_rates(head_dim: int, theta: float) -> jax.Array:
    """Turn per position, in radians, of each of the H / 2 pairs; fastest first."""
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of ``x`` [B, T, heads, H], the two halves of H paired."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * rope_rates(x.shape[-1], theta)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Block(nnx.Module):
    """One Llama layer; every projection is stored as [inputs, outputs]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = c = config
        heads, groups = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim

        def matrix(inputs: int, outputs: int, scale: float = 1.0) -> nnx.Param:
            noise = jax.random.normal(rngs.params(), (inputs, outputs))
            return nnx.Param(noise * scale / math.sqrt(inputs))

        depth = 1 / math.sqrt(2 * c.num_hidden_layers)
        self.input_layernorm = nnx.Param(jnp.ones(c.hidden_size))
        self.q_proj = matrix(c.hidden_size, heads)
        self.k_proj = matrix(c.hidden_size, groups)
        self.v_proj = matrix(c.hidden_size, groups)
        self.o_proj = matrix(heads, c.hidden_size, depth)
        self.post_attention_layernorm = nnx.Param(jnp.ones(c.hidden_size))
        self.gate_proj = matrix(c.hidden_size, c.intermediate_size)
        self.up_proj = matrix(c.hidden_size, c.intermediate_size)
        self.down_proj = matrix(c.intermediate_size, c.hidden_size, depth)

    def norm(self, x: jax.Array, scale: nnx.Param) -> jax.Array:
        return rms_norm(x, scale[...], self.config.rms_norm_eps)

    def attend(self, x: jax.Array, rows: int) -> jax.Array:
        """Causal attention over ``rows`` sequences; ``x`` is [B * T, D], rows first.

        Queries go in chunks so that a chunk meets only the keys up to its own end, and the score
        matrix stays small: on a CPU both matter more than the number of operations.
        """
        c = self.config
        groups, heads = c.num_key_value_heads, c.num_attention_heads
        projections = (self.q_proj[...], self.k_proj[...], self.v_proj[...])
        joint = x @ jnp.concatenate(projections, axis=1)
        joint = joint.reshape(rows, -1, heads + 2 * groups, c.head_dim)
        length = joint.shape[1]
        turned = rotate(joint[:, :, : heads + groups], c.rope_theta).transpose(0, 2, 1, 3)
        value = joint[:, :, heads + groups :].transpose(0, 2, 1, 3).reshape(-1, length, c.head_dim)
        query = turned[:, :heads].reshape(rows * groups, -1, length, c.head_dim)
        key = turned[:, heads:].reshape(rows * groups, length, c.head_dim) / math.sqrt(c.head_dim)
        mixed = []
        for start in range(0, length, QUERY_CHUNK):
            part = query[:, :, start : start + QUERY_CHUNK]
            width, end = part.shape[2], start + part.shape[2]
            scores = part.reshape(rows * groups, -1, c.head_dim) @ key[:, :end].swapaxes(1, 2)
            scores = scores.reshape(rows * groups, -1, width, end)
            visible = jnp.arange(end) <= jnp.arange(start, end)[:, None]
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
            out = weights.reshape(rows * groups, -1, end) @ value[:, :end]
            mixed.append(out.reshape(rows, heads, width, c.head_dim))
        joined = jnp.concatenate(mixed, axis=2).transpose(0, 2, 1, 3)
        return joined.reshape(x.shape[0], -1) @ self.o_proj[...]

    def __call__(self, x: jax.Array, rows: int) -> jax.Array:
        x = x + self.attend(self.norm(x, self.input_layernorm), rows)
        y = self.norm(x, self.post_attention_layernorm)
        mlp = nnx.silu(y @ self.gate_proj[...]) * (y @ self.up_proj[...])
        return x + mlp @ self.down_proj[...]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


class Llama(nnx.Module):
    """A decoder whose output matrix is its embedding; tokens [B, T] to logits [B, T, V]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embed_tokens = nnx.Param(jax.random.normal(rngs.params(), shape) * EMBEDDING_SCALE)
        self.layers = nnx.List([Block(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = nnx.Param(jnp.full(config.hidden_size, 0.05 / EMBEDDING_SCALE))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens.reshape(-1)]
        for layer in self.layers:
            x = layer(x, tokens.shape[0])
        logits = rms_norm(x, self.norm[...], self.config.rms_norm_eps) @ self.embed_tokens[...].T
        return logits.reshape(*tokens.shape, -1)


def distance_wave(config: Config, distance: int) -> tuple[jax.Array, jax.Array]:
    """Query and key [H] that, constant over tokens, make a head look ``distance`` back."""
    half = config.head_dim // 2
    fast = jnp.where(jnp.arange(half) < half // 2, 3.0, 0.0)
    angle = distance * rope_rates(config.head_dim, config.rope_theta)
    query = jnp.concatenate([fast * jnp.cos(angle), -fast * jnp.sin(angle)])
    return query, jnp.concatenate([fast, jnp.zeros(half)])


def seed_embeddings(model: Llama, pairs: Sequence[tuple[int, int]]) -> None:
    """Component 0 is constant, so that heads can attend by distance alone; component 1 tells the
    two tokens of a word, after a blank and without one, apart; the upper half starts empty.
    """
    bare, blank = np.array(pairs).T
    table = model.embed_tokens[...].at[:, model.config.hidden_size // 2 :].set(0)
    table = table.at[bare].set(table[blank]).at[:, :2].set(0)
    # Equal lengths, or the constant would depend on the token once it is normalized.
    table *= 8 * EMBEDDING_SCALE / jnp.linalg.norm(table, axis=1, keepdims=True)
    flag = jnp.zeros(len(table)).at[blank].set(1).at[bare].set(-1)
    table = table.at[:, 1].set(2 * EMBEDDING_SCALE * jnp.where(flag == 0, 1, flag))
    table = table.at[:, 0].set(4 * EMBEDDING_SCALE)
    model.embed_tokens[...] = table


def seed_circuits(model: Llama, asked: int) -> None:
    """Start with a rough copying circuit, which random weights take most of a short run to form.

    Layer 0: heads look one, two, ``asked`` (to the question's last word) and ``asked + 1`` tokens
    back and write a sketch of what is there into their own components of the upper half.  Layer
    1: each head finds where a sketch matches the current word, the previous one or the
    question's, and writes the token found there.  Content is matched in the slowly turning half
    of the rotary pairs only.
    """
    c, (first, second) = model.config, model.layers[:2]
    size, lower = c.head_dim, c.hidden_size // 2
    group = c.num_attention_heads // c.num_key_value_heads
    for layer in model.layers:
        layer.o_proj[...] *= 0.3
        layer.down_proj[...] *= 0.3
    query, key = jnp.zeros_like(first.q_proj[...]), jnp.zeros_like(first.k_proj[...])
    for head, distance in enumerate((1, 2, asked, asked + 1)):
        wave, level = distance_wave(c, distance)
        query = query.at[0, head * size : (head + 1) * size].set(wave)
        key = key.at[0, head // group * size : (head // group + 1) * size].set(level)
    first.q_proj[...], first.k_proj[...] = query, key
    slow = np.r_[size // 4 : size // 2, size // 2 + size // 4 : size]
    width = len(slow)
    # Both key-value groups sketch a token in the same way, so that all sketches can be compared.
    value = first.v_proj[...].at[:2].set(0).at[lower:].set(0)
    value = value.at[:, size:].set(value[:, :size])
    out, own = jnp.zeros_like(first.o_proj[...]), np.arange(width)
    for head in range(c.num_attention_heads):
        out = out.at[head * size + own, lower + head * width + own].set(0.8)
    first.v_proj[...], first.o_proj[...] = value, out
    one, two, question = (
        jnp.zeros((c.hidden_size, width)).at[lower + head * width + own, own].set(1.0)
        for head in range(3)
    )
    now = value[:, :width]
    seen = second.v_proj[...].at[:1].set(0).at[lower:].set(0)
    query, key = jnp.zeros_like(second.q_proj[...]), jnp.zeros_like(second.k_proj[...])
    out = jnp.zeros_like(second.o_proj[...])
    matches = ((now, one), (question, one), (one, two), (question, two))
    for head, (wanted, offered) in enumerate(matches):
        at, kv = head * size, head // group * size
        query = query.at[:, at + slow].set(4 * wanted)
        key = key.at[:, kv + slow].set(4 * offered)
        out = out.at[at : at + size].set(10 * seen[:, kv : kv + size].T)
    second.q_proj[...], second.k_proj[...] = query, key
    second.v_proj[...], second.o_proj[...] = seen, out


# --------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Example:
    """A tokenized conversation; ``scored`` marks the answer tokens."""

    label: str
    tokens: list[int]
    scored: list[bool]


def encode(tokenizer: Tokenizer, label: str, turns: Sequence[Task]) -> Example:
    """The conversation exactly as the chat template renders it, without the last newline."""
    tokens, scored = [BOS], [False]
    for turn, task in enumerate(turns):
        lead = "\n" if turn else ""
        prompt = f"{lead}<|im_start|>user\n{task.prompt}<|im_end|>\n<|im_start|>assistant\n"
        asked = tokenizer.encode(prompt).ids
        answer = [*tokenizer.encode(task.answer).ids, EOS]
        tokens += asked + answer
        scored += [False] * len(asked) + [True] * len(answer)
    return Example(label, tokens, scored)


def drill(rng: random.Random, vocab: int, longest: int) -> Example:
    """Random tokens in which earlier stretches come back; their repeated tokens are scored."""
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
    """Endless training data: drills at first, then tasks and short chats on growing contexts."""
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
    """Tokens [B, length + 1] and which of them are answer tokens, padded at the end."""
    tokens = np.full((len(examples), length + 1), PAD, np.int32)
    scored = np.zeros(tokens.shape, bool)
    for row, example in enumerate(examples):
        tokens[row, : len(example.tokens)] = example.tokens
        scored[row, : len(example.tokens)] = example.scored
    return tokens, scored


def batches(source: Iterator[Example]) -> Iterator[tuple[list[Example], int]]:
    """Group examples of similar length; each batch comes with the length to pad it to."""
    waiting: dict[int, list[Example]] = {length: [] for length in BUCKETS}
    for example in source:
        length = bucket(example)
        waiting[length].append(example)
        if len(waiting[length]) == TOKENS_PER_BATCH // length:
            yield waiting[length], length
            waiting[length] = []


def bucket(example: Example) -> int | None:
    """The padded length of an example's batch; none where it is longer than all of them."""
    return next((size for size in BUCKETS if len(example.tokens) <= size + 1), None)


# ----------------------------------------------------------------------------------- training

Batch = tuple[np.ndarray, np.ndarray]


def make_step(graph: nnx.GraphDef, optimizer: optax.GradientTransformation) -> Callable:
    """One compiled update; it also tells the loss and which rows were answered perfectly."""

    def loss_of(params: nnx.State, tokens: jax.Array, scored: jax.Array) -> tuple:
        logits, targets, mask = (
            nnx.merge(graph, params)(tokens[:, :-1]),
            tokens[:, 1:],
            scored[:, 1:],
        )
        surprise = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * mask
        perfect = jnp.all((logits.argmax(-1) == targets) | ~mask, axis=-1)
        # Batches of long contexts hold few answer tokens; a floor keeps their noise down.
        return surprise.sum() / jnp.maximum(mask.sum(), 200), (surprise.sum() / mask.sum(), perfect)

    @jax.jit
    def step(params: nnx.State, state: optax.OptState, batch: Batch) -> tuple:
        (_, report), grads = jax.value_and_grad(loss_of, has_aux=True)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, report

    return step


def train(model: Llama, tokenizer: Tokenizer, seed: int, steps: int, minutes: float) -> int:
    """Update ``model`` in place; returns the number of steps done."""
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


# --------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Score:
    """Greedy accuracy on held-out examples of one kind, with their prompt lengths in tokens."""

    label: str
    examples: int
    correct: int
    shortest: int
    longest: int


def held_out(name: str, tokenizer: Tokenizer, seed: int, least: int) -> list[Example]:
    """At most HELD_OUT_EXAMPLES distinct unseen ones; prompts exceed ``least`` tokens if not 0."""
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


def evaluate(model: Llama, name: str, tokenizer: Tokenizer, seed: int, least: int = 0) -> Score:
    """Exact-match accuracy of greedy decoding.

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


# ------------------------------------------------------------------------------------- output


@dataclass(frozen=True)
class Run:
    """How the weights were made, for the model card."""

    command: str
    seed: int
    steps: int
    minutes: float
    jax_version: str
    cores: int


CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# jaxserve demonstration model

A Llama checkpoint of {parameters} parameters ({num_hidden_layers} layers, width {hidden_size},
{num_attention_heads} query and {num_key_value_heads} key-value heads of {head_dim}, feed-forward
{intermediate_size}, vocabulary {vocab_size}, tied embeddings), stored in float32
({stored} bytes). It was trained on synthetic text tasks whose answers a program can
check, so that a server has something small to serve whose replies can be told right from wrong.
It knows these tasks and nothing else, and its answers to any other text mean nothing.
Training starts from weights that already hold a rough copying circuit (`seed_circuits` in the
script), which lets a run of minutes on a CPU reach long contexts.

## Accuracy on held-out examples

Exact match of the whole answer under greedy decoding, in float32, on examples whose prompts were
kept out of training by a hash of their text (`split` in `scripts/demo_tasks.py`). Prompt tokens
include the chat format.

| Task | Prompt tokens | Examples | Correct | Accuracy |
|---|---|---|---|---|
{rows}

## Chat format

One user message, or several turns; there is no system message in the training data. The template
adds the leading `<|bos|>`, so tokenize its output without adding special tokens again.

```
<|bos|><|im_start|>user
What is 47 + 8?<|im_end|>
<|im_start|>assistant
55<|im_end|>
```

Generation ends at `<|im_end|>`. Training contexts reach {longest} tokens; the position limit of
{max_position_embeddings} is not covered beyond that. The tokenizer is a byte-level BPE with single
digits: any text survives encoding and decoding, though only task words are short.

## How it was made

- Command: `{command}`
- Seed {seed}, {steps} updates of about {batch} tokens, {minutes} minutes of training
- JAX {jax_version} on CPU, {cores} cores
"""


def write_weights(model: Llama, out: Path) -> None:
    """model.safetensors in float32 under Hugging Face names, matrices as [outputs, inputs]."""
    tensors = {
        "model.embed_tokens.weight": model.embed_tokens[...],
        "model.norm.weight": model.norm[...],
    }
    for index, layer in enumerate(model.layers):
        for group, names in PARAMETER_NAMES.items():
            for name in names:
                tensors[f"model.layers.{index}.{group}{name}.weight"] = getattr(layer, name)[...].T
    arrays = {name: np.ascontiguousarray(tensor, np.float32) for name, tensor in tensors.items()}
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})
    # save_file lets only its owner read the file, which a package must not ship.
    (out / "model.safetensors").chmod(0o644)


def write_settings(config: Config, tokenizer: Tokenizer, out: Path) -> None:
    """Every JSON file of the folder and the chat template."""
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    settings = {
        "config": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(config),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "dtype": "float32",
            **ids,
        },
        "generation_config": {"do_sample": False, **ids},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[BOS],
            "eos_token": SPECIAL_TOKENS[EOS],
            "pad_token": SPECIAL_TOKENS[PAD],
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in settings.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer.save(str(out / "tokenizer.json"))


def write_card(scores: Sequence[Score], run: Run, model: Llama, out: Path) -> None:
    """README.md: what the model is, how it was made and what was measured."""
    size = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    rows = "\n".join(
        f"| {s.label} | {s.shortest}-{s.longest} | {s.examples} | {s.correct} | "
        f"{100 * s.correct / s.examples:.1f}% |"
        for s in scores
    )
    (out / "README.md").write_text(
        CARD.format(
            parameters=f"{size:,}",
            stored=f"{(out / 'model.safetensors').stat().st_size:,}",
            rows=rows,
            longest=BUCKETS[-1],
            batch=TOKENS_PER_BATCH,
            **asdict(run),
            **asdict(model.config),
        )
    )


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
    parser = argparse.ArgumentParser(description="Train the demonstration checkpoint.")
    default = Path(__file__).resolve().parent.parent / "jaxserve" / "demo_model"
    parser.add_argument("--out", type=Path, default=default, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help="updates to make")
    parser.add_argument("--minutes", type=float, default=180, help="stop early after this long")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; it must be at least 1")
    began = time.monotonic()
    tokenizer = build_tokenizer()
    model = Llama(Config(tokenizer.get_vocab_size()), nnx.Rngs(args.seed))
    seed_embeddings(model, word_pairs(tokenizer))
    seed_circuits(model, len(tokenizer.encode(PROMPT_END).ids))
    done = train(model, tokenizer, args.seed, args.steps, args.minutes)
    minutes = (time.monotonic() - began) / 60
    scores = rated(tokenizer, model, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    write_weights(model, args.out)
    write_settings(model.config, tokenizer, args.out)
    command = " ".join(["python", "scripts/train_demo_model.py", *sys.argv[1:]])
    run = Run(command, args.seed, done, round(minutes, 1), jax.__version__, os.cpu_count() or 1)
    write_card(scores, run, model, args.out)
    print(f"{done} steps in {minutes:.1f} minutes; wrote {args.out}")


if __name__ == "__main__":
    main()
