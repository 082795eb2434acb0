"""Predictions of what fits on which card: their pages are current, and their sums are right."""

from __future__ import annotations

import pytest

from pallas_kernels.devices import GIB
from scripts.gpu import fits
from scripts.gpu.fits import FORMS, MODELS
from scripts.lib.paths import RESULTS, ROOT


@pytest.fixture(scope="module")
def plans() -> dict:
    return fits.predictions()


def test_the_pages_hold_what_the_command_makes(plans: dict) -> None:
    assert (RESULTS / "fits.md").read_text() == fits.page(plans)
    text, table = (ROOT / "README.md").read_text(), fits.short_table(plans)
    assert fits.with_table(text, table) == text
    assert table.count("\n") < 14
    with pytest.raises(ValueError, match="no place"):
        fits.with_table("| cards |\n", table)


def test_weights_are_as_heavy_as_published() -> None:
    """Parameters by the models' pages, in billions."""
    for name, billions in zip(MODELS, (1.24, 3.21, 8.03, 14.8, 32.8, 70.6), strict=True):
        held, _ = fits.model_weights(name, "bfloat16").sizes(None)
        assert held / 2e9 == pytest.approx(billions, rel=0.005)


def test_a_prediction_adds_up_by_hand(plans: dict) -> None:
    """8B in 16 bits on an H100: 0.9 of 79.1 GiB, less 15.0 of weights and 1.9 of a step."""
    plan = plans["H100"]["Llama 3.1 8B"][0]
    used = plan.weights + plan.temporaries + plan.sampler + plan.cache_tokens * 131072
    assert used / GIB == pytest.approx(0.9 * 79.1 * (1 - 1 / 64), abs=0.1)
    assert plan.weights / GIB == pytest.approx(14.96, abs=0.01)
    assert plan.step_seconds == pytest.approx(15.0e9 / 3350e9, rel=0.01)


def test_fewer_bits_leave_more_cache_and_take_less_time(plans: dict) -> None:
    for models in plans.values():
        for forms in models.values():
            assert len(forms) == len(FORMS)
            first, second, third = forms
            assert first.step_seconds > second.step_seconds > third.step_seconds
            # Of two forms that fit, the smaller may get the smaller share.
            assert third.cache_tokens >= min(second.cache_tokens, 8192)
            assert second.cache_tokens >= min(first.cache_tokens, 8192)
