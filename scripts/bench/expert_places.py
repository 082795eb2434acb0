"""Rows of the busiest device's experts over the mean, by places for experts that are used often.

    python -m scripts.bench.expert_places --json scripts/results/bench_expert_places.json

Engines of one random model, whose router prefers some experts, over devices of one processor. The
first counts rows by expert on some prompts. The others place experts by its file. Then all answer
other prompts, and the results are of these.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.commands.argument_types import positive_integer
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.execution.mesh import make_mesh
from jaxserve.models import Decoder, parse_model_config
from jaxserve.models.experts import SparseMLP
from jaxserve.models.shards import Split, check_split
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.eplb import EplbConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.sources.expert_load import placement_of
from scripts.bench.random_engine import load_random
from scripts.lib.argument_types import bench_parser
from scripts.lib.model_shapes import COMMON, sizes
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "moe_intermediate_size": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
MODEL = COMMON | sizes(2, 128, 8, 8, 256, vocab_size=4096, head_dim=16) | EXPERTS
ROWS, PROMPT, ANSWER = 16, 48, 32
SKEW = 0.5  # standard deviation of the logarithm of the factor of an expert's scores


def load(devices: int, eplb: EplbConfig) -> Loaded:
    """Make an engine of random weights, with one size of steps."""
    config = EngineConfig(
        max_num_seqs=ROWS,
        max_num_batched_tokens=256,
        max_model_len=PROMPT + ANSWER,
        enable_prefix_caching=False,
        decode_sizes=(ROWS,),
        token_sizes=(256,),
        tensor_parallel_size=devices,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=eplb,
    )
    model_config = parse_model_config(MODEL)
    split = Split(devices, True, placement_of(config, model_config))
    model_config = replace(model_config, split=split)
    check_split(model_config)
    return load_random(config, model_config, prefer_some, mesh=make_mesh(devices))


def prefer_some(model: Decoder) -> None:
    """Scale each expert's column of the routers, so that some are chosen more often."""
    rng = np.random.default_rng(0)
    for layer in model.layers:
        assert isinstance(layer.mlp, SparseMLP)
        router = layer.mlp.router[...]
        factors = np.exp(SKEW * rng.standard_normal(router.shape[1])).astype(np.float32)
        layer.mlp.router.set_value(jax.device_put(router * factors, router.sharding))


def answer(engine: Engine, seed: int) -> tuple[list[int], list[int]]:
    """Answer four prompts a slot. Return the rows by device that they took, and their tokens."""
    rng, drawn = np.random.default_rng(seed), list[int]()
    before = np.array(engine.stats().expert_rows or 0)
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False)

    def receive(delta: Delta) -> None:
        drawn.extend(delta.token_ids)

    for number in range(4 * ROWS):
        prompt = rng.integers(0, MODEL["vocab_size"], PROMPT)
        engine.add(engine.requests.make(prompt, params, request_id=str(number)), receive)
    while engine.has_work:
        engine.step()
    return (np.array(engine.stats().expert_rows) - before).tolist(), drawn


def measure(devices: int, redundant: list[int], folder: Path) -> dict[str, Any]:
    """Return rows by device, and the busiest over the mean, by places, and print them."""
    path, found = folder / "rows.json", dict[str, Any]()
    settings = {"in their own order": EplbConfig(record_path=path)}
    for count in redundant:
        eplb = EplbConfig(num_redundant_experts=count, load_path=path)
        settings[f"placed, with {count} replicas"] = eplb
    tokens: list[list[int]] = []
    for name, eplb in settings.items():
        engine = Engine(load(devices, eplb))
        if eplb.record_path is not None:
            answer(engine, seed=1)
        rows, drawn = answer(engine, seed=2)
        engine.close()
        tokens.append(drawn)
        busiest = max(rows) * devices / sum(rows)
        same = float(np.mean(np.array(drawn) == tokens[0]))
        found[name] = {"rows": rows, "busiest over mean": busiest, "same tokens": same}
        print(f"{name}: busiest device {busiest:.3f} of the mean; {same:.1%} of tokens the same")
    return found


def main() -> int:
    parser = bench_parser("scripts.bench.expert_places", __doc__)
    parser.add_argument("--devices", type=positive_integer, default=8)
    parser.add_argument("--redundant", type=int, nargs="+", default=[0, 8, 16])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    about = about_run()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.devices, arguments.redundant, Path(folder))
    if arguments.json is not None:
        keep(arguments.json, {f"{arguments.devices} devices": found}, about, {})
    return 0


if __name__ == "__main__":
    run_main(main)
