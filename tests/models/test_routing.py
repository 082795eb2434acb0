"""Routers: a token's experts do not depend on its neighbours."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.models.config.experts import Experts
from jaxserve.models.routing import Router, route


def routers() -> list[Any]:
    """Return sizes with kinds. In the usual run each size has one kind, and two have all."""
    kinds: tuple[Router, ...] = ("softmax", "sigmoid", "chosen")
    sizes = [(6, 2, 1), (8, 2, 1), (60, 4, 1), (64, 6, 8), (128, 8, 1)]
    usual = {(8, 2, 1): "chosen", (60, 4, 1): "softmax", (128, 8, 1): "sigmoid"}
    return [
        pytest.param(*size, kind, marks=[] if usual.get(size, kind) == kind else pytest.mark.long)
        for size in sizes
        for kind in kinds
    ]


@pytest.mark.parametrize(("count", "chosen", "groups", "kind"), routers())
def test_a_token_is_routed_alike_to_the_bit_beside_any_others(
    count: int, chosen: int, groups: int, kind: Router
) -> None:
    experts = Experts(
        count=count,
        size=16,
        chosen=chosen,
        layers=(True,),
        groups=groups,
        kept_groups=max(1, groups // 2),
    )
    correction = np.linspace(-0.1, 0.1, count, dtype=np.float32) if kind == "sigmoid" else None
    routed = jax.jit(lambda scores: route(scores, experts, kind, correction))
    scores = np.float32(3 * np.random.default_rng(0).standard_normal((515, count)))
    weights, numbers = map(np.asarray, routed(scores))
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    for rows in (1, 2, 3, 4, 7, 8, 64):
        for at in range(0, 515 - rows, 37):
            some, their = routed(scores[at : at + rows])
            np.testing.assert_array_equal(some, weights[at : at + rows])
            np.testing.assert_array_equal(their, numbers[at : at + rows])
