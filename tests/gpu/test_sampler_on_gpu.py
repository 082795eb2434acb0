"""The sampler, whose GPU form takes other steps than a CPU's."""

import jax
import numpy as np

from jaxserve.execution import sampling
from tests.execution.test_sampling import check_thresholds


def test_thresholds_are_exact_on_a_gpu() -> None:
    check_thresholds(jax.jit(sampling._threshold), np.uint32)
