"""The dtype of a model follows the card and the family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import LLM
from jaxserve.errors import UnsupportedModel
from jaxserve.models.registry import ARCHITECTURES
from jaxserve.start.plan import make_plan
from jaxserve.start.plan.forms import choose_dtype
from pallas_kernels.devices import DeviceLimits, find_card
from tests.support.checkpoint import save_checkpoint

pytestmark = pytest.mark.own_engine

T4, L4 = (find_card(name).limits for name in ("T4", "L4"))
CPU = DeviceLimits("cpu", "cpu")


@pytest.mark.parametrize(
    ("asked", "declared", "device", "overflows", "chosen"),
    [
        ("auto", "bfloat16", CPU, False, "float32"),
        ("auto", "bfloat16", L4, False, "bfloat16"),
        ("auto", "float32", L4, True, "bfloat16"),
        ("auto", "float16", L4, False, "float16"),
        ("auto", "float16", L4, True, "bfloat16"),
        ("auto", "bfloat16", T4, False, "float16"),
        ("auto", "float32", T4, False, "float16"),
        ("auto", "float16", T4, False, "float16"),
        ("auto", "bfloat16", T4, True, "float32"),
        ("auto", "float16", T4, True, "float32"),
        ("float16", "bfloat16", T4, False, "float16"),
        ("float32", "bfloat16", T4, True, "float32"),
        ("bfloat16", "float16", L4, True, "bfloat16"),
        ("bfloat16", "float16", CPU, True, "bfloat16"),
    ],
)
def test_the_dtype_that_a_card_computes(
    asked: str, declared: str, device: DeviceLimits, overflows: bool, chosen: str, caplog: Any
) -> None:
    assert choose_dtype(asked, declared, device, overflows) == chosen
    changed = asked == "auto" and device is T4 and (declared, chosen) != ("float16", "float16")
    assert (f"has no bfloat16: the model runs in {chosen}" in caplog.text) == changed


@pytest.mark.parametrize(
    ("asked", "device", "overflows", "message"),
    [
        (
            "bfloat16",
            T4,
            False,
            r"^dtype is bfloat16, which Tesla T4 \(compute capability 7\.5\) lacks; "
            r"use --dtype float16$",
        ),
        ("bfloat16", T4, True, "lacks; use --dtype float32$"),
        ("float16", T4, True, "^dtype is float16, which the model overflows; use --dtype float32$"),
        ("float16", L4, True, "use --dtype float32$"),
    ],
)
def test_a_dtype_that_fails_is_refused_with_the_remedy(
    asked: str, device: DeviceLimits, overflows: bool, message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        choose_dtype(asked, "bfloat16", device, overflows)


def test_gemma_overflows_float16() -> None:
    found = {name for name, rules in ARCHITECTURES.items() if rules.traits.overflows_float16}
    assert found == {f"Gemma{name}ForCausalLM" for name in ("", "2", "3", "4", "4Unified")}


@pytest.mark.filterwarnings("ignore:.*abstract device.*")
def test_a_start_asks_the_card(tmp_path: Path, monkeypatch: Any) -> None:
    assert jax.default_backend() == "cpu"
    save_checkpoint(tmp_path)
    monkeypatch.setattr(make_plan, "target_device", lambda: T4)
    with pytest.raises(UnsupportedModel, match="Tesla T4"):
        LLM(tmp_path, dtype="bfloat16", max_num_seqs=2, max_model_len=32)
