"""Predictions of the models that fit on each card: the page is current, and its sums are right."""

from __future__ import annotations

import pytest

from pallas_kernels.devices import GIB
from scripts.gpu import fits
from scripts.gpu.fits import FORMS, MODELS
from scripts.lib.paths import RESULTS

CARDS = ("H100",)


@pytest.fixture(scope="module")
def plans() -> fits.Plans:
    return fits.predictions(CARDS)


def test_the_page_has_the_plans_of_today(plans: fits.Plans) -> None:
    """Checks one card and models divided over several cards, since the other cards take minutes."""
    text = (RESULTS / "fits.md").read_text()
    for kind in ("tokens", "seconds"):
        assert all(line in text.splitlines() for line in fits.table(kind, plans).splitlines())
    assert fits.divided_table() in text
    assert text.count("\n| H100,") == 2


def test_weights_are_as_heavy_as_published(plans: fits.Plans) -> None:
    """Parameters by the models' pages, in billions."""
    for name, billions in zip(MODELS, (1.24, 3.21, 8.03, 14.8, 32.8, 70.6), strict=True):
        assert plans["H100"][name][0].weight_bytes / 2e9 == pytest.approx(billions, rel=0.005)


def test_a_prediction_adds_up_by_hand(plans: fits.Plans) -> None:
    """8B in 16 bits on an H100: 0.9 of 79.1 GiB, less 15.0 of weights and 1.9 of a step."""
    form = plans["H100"]["Llama 3.1 8B"][0]
    used = form.weight_bytes + form.step_bytes + form.cache_tokens * 131072
    assert used / GIB == pytest.approx(0.9 * 79.1 * (1 - 1 / 64), abs=0.1)
    assert form.weight_bytes / GIB == pytest.approx(14.96, abs=0.01)
    assert form.step_seconds == pytest.approx(15.0e9 / 3350e9, rel=0.01)


def test_fewer_bits_leave_more_cache_and_take_less_time(plans: fits.Plans) -> None:
    for models in plans.values():
        for forms in models.values():
            assert len(forms) == len(FORMS)
            first, second, third = forms
            assert first.step_seconds and second.step_seconds and third.step_seconds
            assert first.step_seconds > second.step_seconds > third.step_seconds
            # Of two forms that fit, the smaller may get the smaller share.
            assert third.cache_tokens >= min(second.cache_tokens, 8192)
            assert second.cache_tokens >= min(first.cache_tokens, 8192)
