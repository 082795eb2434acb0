"""Models whose layers keep states: any schedule gives the tokens that one request alone gives.

The schedules share prefixes, and use snapshots of 0, 1, 3 and many states. The long form:

    python -m tests.equivalence --schedules 500 --case qwen3_5_moe_two_a_key
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.config.layers import FULL
from jaxserve.models.config.split import Split
from jaxserve.models.shards import check_split
from scripts.bench.prefix_states import chat_hits, report_chats
from scripts.lib.paths import ROOT
from tests.equivalence import fields_of_case
from tests.support.kept_programs import users_environment

CASES = "lfm2_bias_wide qwen3_5_moe_two_a_key nemotron_h_latent_biases"
# In a process of its own, as JAX's 64 bits are a setting of the whole process.
SCHEDULES = """
import sys
from tests.equivalence import main
for case in sys.argv[1].split():
    main(["--case", case, "--schedules", "12"])
"""


def test_any_schedule_gives_the_tokens_of_the_request_alone() -> None:
    command = [sys.executable, "-c", SCHEDULES, CASES]
    given: dict[str, Any] = {"cwd": ROOT, "env": users_environment(), "text": True, "timeout": 600}
    done = subprocess.run(command, capture_output=True, check=False, **given)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("12 schedules equal the oracle" in line for line in lines)
    assert all("'prefix_hits': 0" not in line and "preemptions" in line for line in lines), lines


def test_states_are_not_divided_by_position() -> None:
    config = parse_model_config(fields_of_case("lfm2_tied"))
    divided = replace(config, split=Split(4, context=2))
    with pytest.raises(UnsupportedModel, match="decode_context_parallel_size is 2; allowed: 1"):
        check_split(divided)


def test_a_case_has_states_of_its_shapes() -> None:
    config = parse_model_config(fields_of_case("qwen3_5_two_a_key"))
    shapes = [part.shape for part in config.states_of(0)]
    assert config.states_of(1) == () and config.num_page_layers == config.num_state_layers == 1
    assert config.state_bytes == 4 * sum(int(np.prod(shape)) for shape in shapes)


@pytest.mark.own_engine
def test_chats_find_the_tokens_that_a_model_without_states_finds() -> None:
    found = chat_hits(count=3, turns=3, scale=16)
    assert report_chats(found) and found["cached_tokens"] > 0.4 * found["prompt_tokens"]
    assert not report_chats(found | {"share": 0.89})
    assert not report_chats(found | {"differing_answers": 1})


def test_layers_that_all_attend_keep_no_states() -> None:
    config = parse_model_config(fields_of_case("lfm2_tied") | {"layer_types": [FULL] * 3})
    assert config.recurrent is None and config.state_bytes == 0
