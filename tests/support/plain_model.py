"""The oracle's forward pass in jax.numpy, which JAX differentiates by itself."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models import ModelConfig
from tests.support import oracle, recurrent_oracle


def _in_jax(function: Any, names: dict[str, Any]) -> Any:
    """Return a function of the oracle whose global names are `names`."""
    made = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _names(module: Any) -> dict[str, Any]:
    """Return the global names of a module, with jax.numpy for numpy in its functions."""
    names = dict(vars(module)) | {"np": jnp}
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            names[name] = _in_jax(value, names)
    return names


_RECURRENT = _names(recurrent_oracle)
_NAMES = _names(oracle) | {"recurrent_mixer": _RECURRENT["recurrent_mixer"]}


class PlainModel(oracle.Oracle):
    """A model whose weights JAX may trace. It has no cache and computes row by row."""

    def __init__(self, config: ModelConfig, weights: dict[str, Any]) -> None:
        self._through_cache = lambda x: x
        self.set_weights(config, weights)

    def logprobs(self, tokens: Any, lengths: Any) -> jax.Array:
        """Return what `jaxserve.logprobs` returns, [B, L - 1]."""
        rows: list[jax.Array] = []
        for row, length in zip(tokens, lengths, strict=True):
            logits = self.forward(row)[:-1]
            found = jnp.take_along_axis(jax.nn.log_softmax(logits), row[1:, None], axis=1)[:, 0]
            rows.append(jnp.where(jnp.arange(1, len(row)) < length, found, 0))
        return jnp.stack(rows)


for _name, _method in vars(oracle.Oracle).items():
    if isinstance(_method, FunctionType) and _name != "__init__":
        setattr(PlainModel, _name, _in_jax(_method, _NAMES))
