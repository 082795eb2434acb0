"""Worker of `scripts.bench.gradients`: value and gradient by one engine, printed as JSON.

The arguments are the engine ("jaxserve" or "transformers"), the checkpoint's folder, and the
numbers of rows, tokens of a row, and steps.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Step = Callable[[], tuple[float, float]]


def in_jax(folder: Path, tokens: np.ndarray) -> Step:
    """Return a function that computes the value, and the norm of its derivatives."""
    # Each engine is imported in a process of its own, whose peak memory is measured.
    from jaxserve.settings.environment import prepare_process

    prepare_process()
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    import jaxserve

    files = sorted(folder.glob("*.safetensors"))
    arrays = {name: array for file in files for name, array in load_file(file).items()}
    params = {name: jax.device_put(array) for name, array in arrays.items()}
    del arrays
    lengths = np.full(len(tokens), tokens.shape[1])

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jaxserve.logprobs(params, tokens, lengths, folder).mean()

    def step() -> tuple[float, float]:
        value, gradient = compiled(params)
        squares = sum(jnp.vdot(leaf, leaf) for leaf in gradient.values())
        return float(value), float(jnp.sqrt(squares))

    compiled = jax.jit(jax.value_and_grad(loss))
    return step


def in_torch(folder: Path, tokens: np.ndarray) -> Step:
    """Return a function that computes the value, and the norm of its derivatives."""
    # See `in_jax`.
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(tokens)

    def step() -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        scores = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        value = scores.gather(-1, ids[:, 1:, None]).mean()
        value.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        squares = sum(float(g.square().sum()) for g in gradients if g is not None)
        return float(value.detach()), squares**0.5

    return step


def main() -> None:
    engine, folder, *sizes = sys.argv[1:]
    rows, length, steps = map(int, sizes)
    tokens = np.random.default_rng(0).integers(16, 1000, (rows, length))
    step = {"jaxserve": in_jax, "transformers": in_torch}[engine](Path(folder), tokens)
    value, norm = step()
    seconds: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"engine": engine, "seconds": min(seconds), "bytes": peak, "value": value, "norm": norm}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
