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
import random
import re
import string
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
# Words of the prompts that become one token each, apart from the word lists of demo_tasks.
PROMPT_WORDS = (
    "user What is the words word Who has does have in of code Say saw are The and"
).split()
LETTER_RUNS = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Sequence lengths of the training batches; every batch holds about the same number of tokens.
QUERY_CHUNK = 128
EMBEDDING_SCALE = 0.05
BUCKETS = (64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Config:
    """Sizes of the model, under the names of the Hugging Face configuration."""

    vocab_size: int
    hidden_size: int = 128
    intermediate_size: int = 384
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
    after_blank = [blank + word for word in bare if word not in ("user", "What", "Who", "Say")]
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
        self.norm = nnx.Param(jnp.ones(config.hidden_size))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens[...][tokens.reshape(-1)]
        for layer in self.layers:
            x = layer(x, tokens.shape[0])
        logits = rms_norm(x, self.norm[...], self.config.rms_norm_eps) @ self.embed_tokens[...].T
        return logits.reshape(*tokens.shape, -1)


def seed_circuits(model: Llama) -> None:
    """Start with a rough copying circuit, which random weights take most of a short run to form.

    Layer 0: two heads look one and two tokens back and write a sketch of that token.  Layer 1: two
    heads look for places whose preceding token resembles the current one and write the token found
    there.  Content is matched in the slowly turning half of the rotary pairs only.
    """
    c, (first, second) = model.config, model.layers[:2]
    size, half = c.head_dim, c.head_dim // 2
    group = c.num_attention_heads // c.num_key_value_heads
    # A constant component of every embedding lets a head attend by distance alone.
    model.embed_tokens[...] = model.embed_tokens[...].at[:, 0].set(4 * EMBEDDING_SCALE)
    for layer in model.layers:
        layer.o_proj[...] *= 0.1
        layer.down_proj[...] *= 0.1
    fast = jnp.where(jnp.arange(half) < half // 2, 3.0, 0.0)
    turn = rope_rates(size, c.rope_theta)
    query = first.q_proj[...].at[:, : group * size].set(0)
    for head, distance in ((0, 1.0), (1, 2.0)):
        wave = jnp.concatenate([fast * jnp.cos(distance * turn), -fast * jnp.sin(distance * turn)])
        query = query.at[0, head * size : (head + 1) * size].set(wave)
    first.q_proj[...] = query
    key = first.k_proj[...].at[:, :size].set(0)
    first.k_proj[...] = key.at[0, :half].set(fast)
    value = first.v_proj[...].at[0].set(0)
    first.v_proj[...] = value
    sketch = first.o_proj[...][:size]
    sketch /= jnp.linalg.norm(sketch, axis=1, keepdims=True)
    first.o_proj[...] = first.o_proj[...].at[:size].set(0.08 * sketch)
    slow = np.r_[half // 2 : half, half + half // 2 : size]
    seen = second.v_proj[...].at[0].set(0)
    query, key, out = second.q_proj[...], second.k_proj[...], second.o_proj[...]
    for kv in range(c.num_key_value_heads):
        rows = slice(kv * len(slow), (kv + 1) * len(slow))
        at, head = kv * size, kv * group * size
        query = query.at[:, head : head + size].set(0).at[:, head + slow].set(12 * value[:, rows])
        key = key.at[:, at : at + size].set(0).at[:, at + slow].set(4 * sketch[rows].T)
        out = out.at[head : head + size].set(seen[:, at : at + size].T)
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


def drill(rng: random.Random, vocab: int) -> Example:
    """Random tokens in which earlier stretches come back; their repeated tokens are scored."""
    length = round(math.exp(rng.uniform(math.log(40), math.log(1000))) )
    if rng.random() < 0.7:
        length = min(length, 64)
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
    return Example("drill", tokens[: length], scored[: length])


def examples(tokenizer: Tokenizer, rng: random.Random, progress: Callable[[], float]) -> Iterator[Example]:
    names = tuple(demo_tasks.TASKS)
    vocab = tokenizer.get_vocab_size()
    while True:
        if progress() < 0.06 or rng.random() < 0.08:
            yield drill(rng, vocab)
            continue
        grown = min(1.0, 0.05 + progress() / 0.4)
        longest = round(32 * (demo_tasks.LONGEST_FILLER_WORDS / 32) ** grown)
        turns = rng.choice((2, 3, 4)) if rng.random() < 0.15 else 1
        chosen = []
        for _ in range(turns):
            name = rng.choice(names)
            length = None
            if name in ("recall_code", "remember"):
                length = rng.randint(16, max(17, longest // turns))
            chosen.append(next(demo_tasks.stream(name, rng, "train", length and (length, length))))
        yield encode(tokenizer, chosen[0].name if turns == 1 else "chat", chosen)


def batches(source: Iterator[Example], tokens_per_batch: int) -> Iterator[tuple]:
    waiting: dict[int, list[Example]] = {length: [] for length in BUCKETS}
    for example in source:
        length = next((b for b in BUCKETS if len(example.tokens) <= b + 1), None)
        if length is None:
            continue
        waiting[length].append(example)
        if len(waiting[length]) == tokens_per_batch // length:
            rows = waiting[length]
            waiting[length] = []
            tokens = np.zeros((len(rows), length + 1), np.int32)
            scored = np.zeros((len(rows), length + 1), bool)
            for row, item in enumerate(rows):
                tokens[row, : len(item.tokens)] = item.tokens
                scored[row, : len(item.tokens)] = item.scored
            yield tokens, scored, [item.label for item in rows]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=3000)
    p.add_argument("--minutes", type=float, default=3)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--opt", default="adamw")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--btok", type=int, default=6144)
    a = p.parse_args()
    tok = build_tokenizer()
    V = tok.get_vocab_size()
    c = Config(vocab_size=V)
    model = Llama(c, nnx.Rngs(a.seed))
    seed_circuits(model)
    graph, params = nnx.split(model)
    n = sum(x.size for x in jax.tree.leaves(params))
    print("vocab", V, "params", n, "bytes", 4 * n)
    sched = optax.warmup_constant_schedule(0, a.lr, 100)
    if a.opt == "adamw":
        core = optax.adamw(sched, b1=0.9, b2=0.98, weight_decay=0.01)
    else:
        core = optax.contrib.muon(sched, adam_learning_rate=sched, weight_decay=0.01, adam_weight_decay=0.0, consistent_rms=0.2)
    opt = optax.chain(optax.clip_by_global_norm(1.0), core)
    state = opt.init(params)

    @jax.jit
    def step(params, state, tokens, scored):
        def loss_fn(params):
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            targets, mask = tokens[:, 1:], scored[:, 1:]
            ce = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
            total = mask.sum()
            right = ((logits.argmax(-1) == targets) | ~mask).all(-1)
            return (ce * mask).sum() / jnp.maximum(total, 200), (right, (ce * mask).sum() / total, (ce*mask).sum(1)/mask.sum(1))
        (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state, aux

    done = 0
    t0 = time.time()
    acc = defaultdict(list)
    losses = []
    stream = batches(examples(tok, random.Random(a.seed), lambda: done / a.steps), a.btok)
    tdata = 0
    ntok = 0
    while done < a.steps and time.time() - t0 < a.minutes * 60:
        t1 = time.time()
        tokens, scored, labels = next(stream)
        tdata += time.time() - t1
        params, state, (right, loss, rl) = step(params, state, tokens, scored)
        ntok += tokens.size
        losses.append(float(loss))
        for l, r, q in zip(labels, np.asarray(right), np.asarray(rl)):
            acc[l].append((r, q))
        done += 1
        if done % 100 == 0:
            print(done, f"{time.time()-t0:.0f}s data {tdata:.0f}s {ntok/(time.time()-t0):.0f}tok/s loss {np.mean(losses[-100:]):.3f}",
                  " ".join(f"{k}:{np.mean([x[0] for x in v]):.2f}/{np.mean([x[1] for x in v]):.2f}" for k, v in sorted(acc.items())), flush=True)
            acc.clear()


if __name__ == "__main__":
    main()
