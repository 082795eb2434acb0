"""A server of a model whose layers keep states: usage, metrics, settings, and the cache's reset."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.engine.test_state_serving import TINY
from tests.server.test_metrics import families
from tests.support.live_server import SMALL, Server

SNAPSHOT_BYTES = 2816
PROMPT = [*range(3, 58)]  # 55 tokens in pages of 16
NAMES = ("saved", "restored", "evicted", "lost_pages")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("states")
    (folder / "config.json").write_text(json.dumps(TINY))
    options = f"--state-cache-bytes {9 * SNAPSHOT_BYTES} --server-dev-mode --load-format dummy"
    with Server([*SMALL, *options.split(), "--skip-tokenizer-init", str(folder)]) as server:
        yield server


def counts(server: Server) -> dict[str, float]:
    found = families(server)
    values = {name: found[f"jaxserve:state_snapshots_{name}"].samples[0].value for name in NAMES}
    return values | {"held": found["jaxserve:state_snapshots"].samples[0].value}


def cached(server: Server, prompt: list[int]) -> int:
    answer = server.complete(prompt, 4, ignore_eos=True).json()
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_usage_and_metrics_tell_what_was_restored(server: Server) -> None:
    assert counts(server) == dict.fromkeys((*NAMES, "held"), 0)
    assert [cached(server, PROMPT) for _ in range(3)] == [0, 48, 48]
    assert counts(server) == {
        "saved": 1, "restored": 2, "evicted": 0, "lost_pages": 0, "held": 1
    }  # fmt: skip
    # No snapshot is at the border that both prompts share, until the second has passed it.
    other = [*PROMPT[:35], *range(7, 20)]
    assert [cached(server, other) for _ in range(2)] == [0, 32]
    assert counts(server)["lost_pages"] == 2
    for name in ("recurrent_state_usage_perc", "num_recurrent_state_slots_in_use"):
        assert families(server)[f"jaxserve:{name}"].samples[0].value == 0
    assert server.request("/reset_prefix_cache", "POST").json() == {"success": True}
    assert counts(server)["held"] == 0 and cached(server, PROMPT) == 0


def test_the_start_and_the_settings_tell_of_states(server: Server) -> None:
    [line] = [line for line in server.log if "states: " in line]
    assert "2,816 bytes a sequence, equal to 22 tokens of cache; 8 sequences and 9 prefixes" in line
    settings = server.request("/server_info?config_format=json").json()["vllm_config"]
    assert settings["cache_config"]["state_cache_bytes"] == 9 * SNAPSHOT_BYTES
