"""The allowed loss of each number form: perplexity of prose over the perplexity in float32."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.real.conftest import Real
from tests.real.engines import load_real
from tests.real.quality import CHUNK, FORMS, chunks, logprobs, perplexity, prose_chunks
from tests.real.quality_table import CONVERTED, FIRST

STORED = Path(__file__).parent.parent.parent / "scripts" / "results" / "quality.json"
# A little above the measured value.
MOST_DRIFT = {
    "smollm2": {
        "packed": 0.0005,
        "bfloat16": 0.002,
        "int8": 0.005,
        "fp8": 0.02,
        "int4": 0.005,
        "KV in fp8": 0.02,
        "KV in int8": 0.003,
    },
    "gemma3": {
        "packed": 0.0005,
        "bfloat16": 0.002,
        "int8": 0.005,
        "fp8": 0.025,
        "int4": 0.04,
        "KV in fp8": 0.015,
        "KV in int8": 0.003,
    },
}


def check_drift(real: Real, form: str, sequences: list[list[int]], base: float) -> None:
    """Compare a form's perplexity with that in float32."""
    loaded = load_real(real.path, **FORMS[form])
    drift = perplexity(logprobs(loaded, sequences)) / base - 1
    loaded.runner.close()
    assert abs(drift) < MOST_DRIFT[real.name][form], (form, drift)


@pytest.mark.long
def test_int4_drifts_on_the_first_chunk(smollm2: Real) -> None:
    """The drift is counted from Transformers' float32, which other tests find equal to ours."""
    want = smollm2.reference["long"]
    base = perplexity(np.array(want["prompt_logprobs"][: CHUNK - 1]))
    check_drift(smollm2, "int4", [want["ids"][:CHUNK]], base)


@pytest.mark.long
def test_drifts_on_all_text(real: Real) -> None:
    sequences = prose_chunks(real.loaded)
    base = perplexity(logprobs(real.loaded, sequences))
    for form in MOST_DRIFT[real.name]:
        check_drift(real, form, sequences, base)


@pytest.mark.parametrize("name", MOST_DRIFT)
def test_the_stored_table_is_within_the_bounds(name: str) -> None:
    rows = {row["form"]: row for row in json.loads(STORED.read_text()) if row["model"] == name}
    assert set(rows) == {FIRST, *MOST_DRIFT[name], CONVERTED, "llama.cpp"}
    assert len({row["tokens"] for row in rows.values()}) == 1
    for form, bound in MOST_DRIFT[name].items():
        assert abs(rows[form]["drift"]) < bound, form


def test_chunks_hold_every_token_once() -> None:
    made = chunks(range(10, 20), [1], 4)
    assert made == [[1, 10, 11, 12], [1, 13, 14, 15], [1, 16, 17, 18], [1, 19]]
    assert chunks(range(10, 15), [], 4) == [[10, 11, 12, 13], [14]]
