"""Checks of attention over latents in the report of a GPU, in small sizes, interpreted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from scripts.gpu.latent import SMALL, LatentSize, check
from scripts.gpu.setting import Setting


@pytest.mark.parametrize("size", SMALL, ids=lambda size: size.case.op)
def test_a_small_call_equals_the_specification(size: LatentSize) -> None:
    assert check(size, Setting(True, {"parts": {}}).kernel)["verdict"] == "ok"


def test_a_wrong_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(q: jax.Array, *rest: jax.Array, **options: object) -> jax.Array:
        return jnp.ones((*q.shape[:2], SMALL[0].case.sizes[0]), q.dtype)

    monkeypatch.setattr("scripts.gpu.latent.latent_attention", wrong)
    assert check(SMALL[0], "triton")["verdict"] == "WRONG"
