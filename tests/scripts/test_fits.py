"""Predictions of what fits on which card: their pages are current, and their sums are right."""

from __future__ import annotations

import pytest

from pallas_kernels.devices import CARDS, GIB, find_card
from scripts.gpu import fits
from scripts.gpu.fits import FORMS, MODELS, predict
from scripts.lib.paths import RESULTS, ROOT


def test_the_pages_hold_what_the_command_makes() -> None:
    assert (RESULTS / "fits.md").read_text() == fits.page()
    text = (ROOT / "README.md").read_text()
    assert fits.with_table(text) == text
    assert fits.short_table().count("\n") < 14
    with pytest.raises(ValueError, match="no place"):
        fits.with_table("| cards |\n")


def test_weights_are_as_heavy_as_published() -> None:
    """Parameters by the models' pages, in billions."""
    published = dict(zip(MODELS, (1.24, 3.21, 8.03, 14.8, 32.8, 70.6), strict=True))
    for name, shape in MODELS.items():
        held, read = fits.weight_bytes(shape, 16)
        assert held / 2e9 == pytest.approx(published[name], rel=0.005)
        tied = held if shape.is_tied else held - 2 * shape.vocab * shape.hidden
        assert read == pytest.approx(tied)


def test_a_prediction_adds_up_by_hand() -> None:
    """8B in 16 bits on an H100: 0.9 of 79.1 GiB, less 15.0 of weights and 0.4 of a step."""
    fit = predict(find_card("H100"), MODELS["Llama 3.1 8B"], 16)
    assert fit.tokens * 131072 / GIB == pytest.approx(0.9 * 79.1 - 14.96 - 0.35, abs=0.1)
    assert fit.seconds == pytest.approx(15.0e9 / 3350e9, rel=0.01)


def test_fewer_bits_leave_more_cache_and_take_less_time() -> None:
    for card in CARDS:
        for shape in MODELS.values():
            fit = [predict(card, shape, bits) for bits in FORMS.values()]
            assert fit[0].seconds > fit[1].seconds > fit[2].seconds
            # Of two forms that fit, the smaller may get the smaller share.
            assert fit[2].tokens >= min(fit[1].tokens, fits.ENOUGH)
            assert fit[1].tokens >= min(fit[0].tokens, fits.ENOUGH)
