"""A model whose matrices lie as the CPU's own product reads them."""

from __future__ import annotations

import jax
import numpy as np
from flax import nnx

from jaxserve.models import Decoder
from jaxserve.models.panels import PanelWeight
from jaxserve.models.quantized import PROJECTIONS

# How many dimensions of a parameter are inputs, by its axes.
MATRICES = {**PROJECTIONS, ("embed", "vocab"): 1}


def use_panels(model: Decoder) -> Decoder:
    """Lay out a model's matrices in panels, in place, one after the other; the same model.

    Quantized ones stay, as do those of experts and routers.
    """
    for _, node in nnx.iter_graph(model):
        if not isinstance(node, nnx.Param):
            continue
        contract = MATRICES.get(node.get_metadata().get("axes"))
        value = node[...]
        if contract is not None and isinstance(value, jax.Array):
            weight = np.asarray(value)
            node.set_value(PanelWeight.of(weight, contract))
    return model
