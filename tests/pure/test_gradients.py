"""Gradients of pure functions equal those of a plain model, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig, read_model_config
from jaxserve.pure import functions as pure
from jaxserve.weights import load_weights
from tests.models.cases import CASES, family_of
from tests.models.tiny_models import hugging_face_model, save
from tests.support.fast_compile import FAST
from tests.support.plain_model import PlainModel

TOLERANCE = 1e-9
ROWS, LENGTH = 2, 21
# Each kind of part once: norms of heads, caps and norms after parts, experts. `long` has the rest.
USUAL = ("qwen3", "gemma2_caps", "mixtral_top2")


def families() -> list[Any]:
    """Return a case of each family."""
    cases = {family_of(case): case for case in reversed(CASES) if "mxfp4" not in case}
    found = dict.fromkeys((*USUAL, *cases.values()))
    return [pytest.param(case, marks=[] if case in USUAL else [pytest.mark.long]) for case in found]


class Batch:
    """Tokens, lengths, and weights of the sum of log-probabilities that is differentiated."""

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        self.tokens = jnp.asarray(generator.integers(0, 96, (ROWS, LENGTH)))
        self.lengths = jnp.asarray([LENGTH, 13])
        self.weights = jnp.asarray(generator.normal(size=(ROWS, LENGTH - 1)))

    def loss(self, config: ModelConfig) -> Callable[[Any], jax.Array]:
        def loss(params: Any) -> jax.Array:
            found = pure.logprobs(params, self.tokens, self.lengths, config)
            return (self.weights * found).sum()

        return loss

    def plain_loss(self, config: ModelConfig) -> Callable[[Any], jax.Array]:
        def loss(state: Any) -> jax.Array:
            flat = {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(state)}
            model = PlainModel(config.for_length(config.context_length), flat)
            return (self.weights * model.logprobs(self.tokens, self.lengths)).sum()

        return loss


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Write a checkpoint. Return its folder, and its tensors in float64."""
    from safetensors.numpy import load_file

    folder = tmp_path_factory.mktemp("qwen3")
    save("qwen3", hugging_face_model("qwen3"), folder)
    tensors = load_file(folder / "model.safetensors")
    return folder, {name: array.astype(np.float64) for name, array in tensors.items()}


def compiled(function: Any) -> Any:
    return jax.jit(function, compiler_options=FAST)


def difference(found: Any, wanted: Any) -> float:
    """Return the norm of the difference of two trees over the norm of the second."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    squares = [
        (np.square(np.asarray(a) - np.asarray(b)).sum(), np.square(np.asarray(b)).sum())
        for a, b in pairs
    ]
    distance, size = np.sum(squares, axis=0)
    return float(np.sqrt(distance / size))


@pytest.mark.parametrize("case", families())
def test_gradients_of_a_family(tmp_path: Path, case: str) -> None:
    """By all parameters. Values are compared too. Families of other layers are refused."""
    save(case, hugging_face_model(case), tmp_path)
    config, batch = read_model_config(tmp_path), Batch()
    layers = range(config.num_hidden_layers)
    state = nnx.state(load_weights(tmp_path, config, np.float64))
    if any(set(config.mixers_of(layer)) - {"attention"} for layer in layers):
        with pytest.raises(UnsupportedModel, match="has no derivatives"):
            jax.grad(batch.loss(config))(state)
        return
    value, gradient = compiled(jax.value_and_grad(batch.loss(config)))(state)
    expected, wanted = compiled(jax.value_and_grad(batch.plain_loss(config)))(state)
    assert abs(value - expected) < TOLERANCE * abs(expected)
    assert difference(gradient, wanted) < TOLERANCE


def test_transformations(qwen: tuple[Path, dict[str, Any]]) -> None:
    """By arrays of a file: `checkpoint`, `vmap` over rows, and `vmap` of `grad`."""
    folder, params = qwen
    config, batch = read_model_config(folder), Batch()
    loss = batch.loss(config)
    wanted = compiled(jax.grad(loss))(params)

    def by_rows(params: Any) -> jax.Array:
        def row(tokens: jax.Array, length: jax.Array) -> jax.Array:
            return pure.logprobs(params, tokens[None], length[None], config)[0]

        return (batch.weights * jax.vmap(row)(batch.tokens, batch.lengths)).sum()

    def of_rows(params: Any) -> Any:
        def row(tokens: jax.Array, length: jax.Array, weights: jax.Array) -> Any:
            def loss(params: Any) -> jax.Array:
                found = pure.logprobs(params, tokens[None], length[None], config)[0]
                return (weights * found).sum()

            return jax.grad(loss)(params)

        each = jax.vmap(row)(batch.tokens, batch.lengths, batch.weights)
        return jax.tree.map(lambda array: array.sum(axis=0), each)

    for function in (jax.grad(jax.checkpoint(loss)), jax.grad(by_rows), of_rows):
        assert difference(compiled(function)(params), wanted) < 1e-13


def test_layers_without_derivatives_are_refused_by_name(tmp_path: Path) -> None:
    save("lfm2_tied", hugging_face_model("lfm2_tied"), tmp_path)
    config = read_model_config(tmp_path)
    state = nnx.state(load_weights(tmp_path, config, np.float64))
    with pytest.raises(UnsupportedModel, match=r"layer \d+ \(conv\) has no derivatives"):
        jax.grad(Batch().loss(config))(state)
