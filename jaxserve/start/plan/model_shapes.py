# pyright: reportUnknownMemberType=false
"""ModelShapes: the structure of a placed model, with the shape of each array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_leaves_with_path

from jaxserve.execution.mesh import local_bytes, placed_arguments, spec_of
from jaxserve.models import Decoder, ModelConfig
from jaxserve.models.placed_weight import FULL, PlacedWeight
from jaxserve.weights.memory import parameters_of_state


@dataclass(frozen=True)
class ModelShapes:
    """The structure of a model whose weights are placed, with shapes in place of its arrays.

    The structure can be pickled. Shapes of a model that is divided over devices have a sharding
    over an abstract mesh, which names no device.

    Attributes:
        graphdef: Flax's description of the module.
        state: Flax's state of the module, a tree of `jax.ShapeDtypeStruct`.
    """

    graphdef: Any
    state: Any

    @classmethod
    def of(cls, model: Decoder) -> ModelShapes:
        """Return the ModelShapes of a model, which may have shapes in place of arrays itself."""
        graphdef, state = nnx.split(model)  # pyright: ignore[reportUnknownVariableType]
        return cls(graphdef, jax.tree.map(_shape, state))

    @property
    def treedef(self) -> Any:
        """Tree structure of the model's arrays, as `jax.tree.flatten` returns it."""
        return jax.tree.structure(self.state)

    @property
    def leaves(self) -> list[Any]:
        """Shapes of the model's arrays, in the order in which programs take the arrays."""
        return jax.tree.leaves(self.state)

    def leaves_on(self, mesh: Mesh | None) -> list[Any]:
        """Return the shapes of the model's arrays, with shardings over `mesh` unless it is None."""
        return self.leaves if mesh is None else placed_arguments(mesh, self.leaves)

    def state_of(self, leaves: list[jax.Array]) -> Any:
        """Return Flax's state of a model with these shapes.

        Args:
            leaves: the model's arrays, in the order in which programs take them.
        """
        return jax.tree.unflatten(self.treedef, leaves)

    def values(self, leaves: list[jax.Array]) -> dict[str, Any]:
        """Return the values of the parameters of a model with these shapes, by path.

        Args:
            leaves: the model's arrays, in the order in which programs take them.
        """
        return parameters_of_state(self.state_of(leaves))

    def with_values(
        self, leaves: list[jax.Array] | None, values: Mapping[str, Any]
    ) -> tuple[ModelShapes, list[jax.Array]]:
        """Return the shapes and the arrays of a model after some parameters were replaced.

        No module is made, because reference cycles of Flax would keep the old arrays in memory.

        Args:
            leaves: the model's arrays, or None if all parameters are replaced.
            values: new values of parameters, by path.
        """
        state = self.state if leaves is None else jax.tree.unflatten(self.treedef, leaves)

        def replaced(path: Any, leaf: Any) -> Any:
            name = keystr(path, simple=True, separator=".")
            return leaf.replace(values[name]) if name in values else leaf

        state = jax.tree_util.tree_map_with_path(replaced, state, is_leaf=_is_variable)
        return ModelShapes(self.graphdef, jax.tree.map(_shape, state)), jax.tree.leaves(state)

    @property
    def parameters(self) -> dict[str, Any]:
        """The model's parameters by path, with shapes instead of arrays.

        A quantized parameter consists of several arrays.
        """
        leaves = tree_leaves_with_path(self.state, is_leaf=_is_variable)
        return {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}

    @property
    def num_bytes(self) -> int:
        """Bytes of the model's arrays on each device."""
        return sum(map(local_bytes, self.leaves))

    @property
    def is_quantized(self) -> bool:
        """Whether at least one parameter is quantized."""
        values = (parameter.get_value() for parameter in self.parameters.values())
        return any(
            value.form != FULL
            if isinstance(value, PlacedWeight)
            else not isinstance(value, jax.ShapeDtypeStruct)
            for value in values
        )

    def for_config(self, config: ModelConfig) -> ModelShapes:
        """Return the same shapes with another model configuration of the same weights."""
        model: Decoder = nnx.merge(self.graphdef, self.state)
        model.config = config
        return ModelShapes.of(model)

    def difference(self, placed: ModelShapes) -> str | None:
        """Return a text that says how the shapes of a placed model differ from these, or None.

        The text names the first parameter that differs or is missing, with both shapes. If all
        parameters are equal but the module structure differs, the text says only that.
        """
        planned, actual = dict(self._parameters()), dict(placed._parameters())
        for path in {**planned, **actual}:
            if planned.get(path) != actual.get(path):
                return f"{path} is {actual.get(path, 'missing')}; planned: {planned.get(path)}"
        if self.graphdef != placed.graphdef or self.treedef != placed.treedef:
            return "its modules differ"
        return None

    def _parameters(self) -> Iterator[tuple[str, str]]:
        for path, leaf in tree_leaves_with_path(self.state):
            spec = spec_of(leaf)
            divided = f" over {spec}" if any(spec) else ""
            yield (
                keystr(path, simple=True, separator="."),
                f"{leaf.dtype}{list(leaf.shape)}{divided}",
            )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    # The sharding of a divided array is over an abstract mesh, which needs no devices.
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    mesh = sharding.mesh.abstract_mesh if isinstance(sharding.mesh, Mesh) else sharding.mesh
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, sharding.spec)
    )


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
