# pyright: reportUnknownMemberType=false
"""Placed: a model with its arrays, read from a source as a plan says."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import jax
from flax import nnx

from jaxserve.execution.mesh import make_mesh
from jaxserve.execution.runner import OnProgress
from jaxserve.start.plan.forms import layout_on
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.start.sources.source import Source
from jaxserve.weights.placement import use_output_rows

_log = logging.getLogger(__name__)
# Bytes from which on a checkpoint is read while programs are compiled.
_LONG_READ = 1 << 28


@dataclass(frozen=True)
class Placed:
    """A model whose weights are on the device or devices.

    Attributes:
        shapes: the model's structure, with the shapes of the arrays.
        leaves: the arrays, in the order in which programs take them.
    """

    shapes: ModelShapes
    leaves: list[jax.Array]


def place(source: Source, plan: StartPlan, on_progress: OnProgress | None = None) -> Placed:
    """Read the weights of a source, and place them on the devices in the dtype and form of a plan.

    Raises:
        CheckpointError, UnsupportedModel: see `Source.load`.
    """
    mesh = make_mesh(plan.model_config.split.devices)
    layout = layout_on(plan.config, plan.device.limits)
    model = source.load(plan.model_config, plan.dtype, plan.form, layout, mesh, on_progress)
    if mesh is None and layout.output_rows:  # otherwise each device's part is transposed
        use_output_rows(model)
    return Placed(ModelShapes.of(model), jax.tree.leaves(nnx.state(model)))


def checked(plan: StartPlan, placed: Placed) -> StartPlan:
    """Return the plan, with the shapes of the placed model if they differ from the planned shapes.

    A difference is logged with the name of the parameter. One cause is expected: "int4" on a CPU
    takes for each matrix the block format with the least error, which depends on the values.
    """
    difference = plan.model.difference(placed.shapes)
    if difference is None:
        return plan
    _log.warning(
        "another model than was planned has been read: %s; its programs are compiled for what was "
        "read",
        difference,
    )
    return replace(plan, model=placed.shapes)


def overlaps_compiling(source: Source, plan: StartPlan) -> bool:
    """Return whether programs are compiled while the weights of a model are read.

    This is the case for a large Hugging Face checkpoint in full precision on one CPU device. On a
    GPU XLA measures kernels while it compiles, and needs the device for itself. Small models are
    read first, because tracing holds Python's lock and would delay the reading by more than it
    gains.
    """
    model = plan.model_config
    is_plain = (plan.form, model.quantization) == (None, None) and model.split.devices == 1
    is_plain = is_plain and plan.config.kv_cache_dtype != "fp8" and plan.platform == "cpu"
    return is_plain and source.num_checkpoint_bytes >= _LONG_READ
