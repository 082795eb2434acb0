"""An engine and models over several devices, in a process of its own with 8 of them on CPU.

    python -m tests.execution.over_devices                 the run of ./scripts/test
    python -m tests.execution.over_devices --every-case    models alone, every case of every family
    python -m tests.execution.over_devices --cases qwen3   only some cases

Prints its findings as a JSON object.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxserve.engine.engine import Engine
from jaxserve.execution.mesh import SECOND, make_mesh, mapped, placed_shapes, spec_of
from jaxserve.execution.runner import Runner
from jaxserve.models import Decoder, ModelConfig, PagedStep, abstract_model, parse_model_config
from jaxserve.models.linear import Constant
from jaxserve.models.mixers import Kept
from jaxserve.models.shards import AXIS, Split
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.eplb import EplbConfig
from jaxserve.start.plan.model_shapes import ModelShapes
from jaxserve.start.programs.compiler import Compiler
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.start.sources.expert_load import placement_of
from jaxserve.weights import random_weights
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.placement import Placement
from jaxserve.weights.shapes import PLAIN, RANDOM, shapes_of_model
from pallas_kernels import StateRows
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.equivalence import EXPERTS, LARGEST, TINY, Bench, fields_of_case, run_schedule
from tests.models.cases import CASES
from tests.support.fast_compile import FAST
from tests.support.own_programs import own_programs
from tests.support.quick_code import compile_quickly

DEVICES = 4
# One for each kind of parameter that is divided.
FEW = ("olmo2_gqa", "gpt_oss_alternate", "deepseek_v3_groups", "cohere_qk_norm_bias_head_dim")
NO_SIZES: Mapping[str, int] = MappingProxyType({})
TOKENS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], np.int32)


def two_steps(config: ModelConfig) -> Iterator[tuple[np.ndarray, PagedStep]]:
    """Yield two steps of two sequences: their prompts, then one more token of each and padding.

    The second sequence is continued from the state that its prompt saved after two tokens.
    """
    yield TOKENS, step_of(config, ((1, 3), (2, 0)), (0, 0), (7, 3), ((-1, -1), (1, 0), (0, 2)))
    yield TOKENS[::-1], step_of(config, ((1, 3), (2, 0)), (7, 2), (1, 1), ((1, 2), (1, 0), (0, 0)))


def step_of(
    config: ModelConfig,
    pages: tuple[tuple[int, int], ...],
    starts: tuple[int, ...],
    counts: tuple[int, ...],
    places: tuple[tuple[int, ...], ...],
) -> PagedStep:
    """Return a step of rows with pages of 4 tokens.

    Args:
        config: configuration of the model.
        pages: of each row.
        starts: position of the first token of each row.
        counts: number of tokens of each row.
        places: for each row the source of its states, their target, and the tokens before the
            border at which they are saved in place 2.
    """
    positions = np.zeros(len(TOKENS), np.int32)
    slots = np.full(len(TOKENS), -1, np.int32)
    ends = np.cumsum(counts)
    for own, first, count, end in zip(pages, starts, counts, ends, strict=True):
        tokens = np.arange(first, first + count)
        positions[end - count : end] = tokens
        slots[end - count : end] = np.array(own)[tokens // 4] * 4 + tokens % 4
    query_start = jnp.array([0, *ends], jnp.int32)
    source, target, border = (jnp.array(part, jnp.int32) for part in places)
    rows = StateRows(query_start, source, target, border, jnp.full(len(starts), 2, jnp.int32))
    return PagedStep(
        positions=jnp.array(positions),
        slot_mapping=jnp.array(slots),
        page_table=jnp.array(pages, jnp.int32),
        query_start=query_start,
        kv_len=jnp.array(starts, jnp.int32) + jnp.array(counts, jnp.int32),
        decode_only=False,
        implementation="xla",
        state_rows=None if config.recurrent is None else rows,
    )


def states_of(config: ModelConfig, layer: int, mesh: Any) -> tuple[Any, ...]:
    """Return the states of a layer for three places, divided over the devices of a mesh."""
    states: list[Any] = []
    for part in config.states_of(layer):
        array: Any = jax.ShapeDtypeStruct((3, *part.shape), jnp.float64)
        if mesh is not None:
            spec = PartitionSpec(*[None] * (1 + part.divided), AXIS)
            array = placed_shapes(mesh, array, spec)
        states.append(jnp.zeros(array.shape, array.dtype, device=array.sharding))
    return tuple(states)


def random_values(config: ModelConfig) -> dict[str, np.ndarray]:
    """Return random values of every parameter, including norms and biases."""
    rng = np.random.default_rng(5)
    values: dict[str, np.ndarray] = {}
    for path, parameter in parameters_of(abstract_model(config, jnp.float64)).items():
        initial = parameter.get_metadata()["initial"]
        base = initial.value if isinstance(initial, Constant) else 0.0
        values[path] = base + 0.3 * rng.standard_normal(parameter.shape)
    return values


# Several arrays at once are a tuple.
EXCHANGE = re.compile(
    r"= (\([^=]*?\)|\S+) (all-reduce|all-gather|all-to-all|collective-permute)(?:-start)?\("
)


def exchanges(text: str) -> Counter[str]:
    """Count the operations between devices in a compiled program, by kind."""
    return Counter(kind for _, kind in EXCHANGE.findall(text))


def places(state: Any) -> list[Any]:
    """Return the shape, dtype and division of each array of a model or of its description."""
    return [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in jax.tree.leaves(state)]


def logits_of(
    config: ModelConfig, values: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, Counter[str]]:
    """Return the logits after each token of two steps, and the operations that exchange data."""
    mesh, model = make_mesh(config.split.devices), abstract_model(config, jnp.float64)
    placement = Placement(config, parameters_of(model), None, panels=False, mesh=mesh)
    placed = {path: placement.placed(path, values[path]) for path in values}
    graphdef, state = nnx.split(filled(model, placed))
    if mesh is not None:
        described = shapes_of_model(config, jnp.float64, None, PLAIN, RANDOM)
        planned = ModelShapes.of(described).leaves_on(mesh)
        assert places(planned) == places(state), "compiled ahead for other parts"
    heads = max((kind.heads for kind in config.page_layout.kinds), default=config.split.devices)
    if config.latent is not None:  # each device keeps every latent
        heads *= config.split.devices
    pages: Any = jax.ShapeDtypeStruct((4, heads, 4, config.head_dim), jnp.float64)
    if mesh is not None:
        pages = placed_shapes(mesh, pages, SECOND)
    pages = jnp.zeros(pages.shape, pages.dtype, device=pages.sharding)
    arrays = (pages,) * (2 if config.latent is None else 1)
    kept = [
        Kept(arrays * config.has_pages(layer), states_of(config, layer, mesh))
        for layer in range(config.num_hidden_layers)
    ]
    steps = [*two_steps(config)]

    def forward(state: Any, tokens: Any, step: PagedStep, kept: Any) -> Any:
        model: Decoder = nnx.merge(graphdef, state)
        kept, _, hidden = model.advance(tokens, step, kept)
        return model.logits(hidden), kept

    arguments = state, *steps[0], kept
    specs = SECOND, jax.tree.map(spec_of, kept)
    run = forward if mesh is None else mapped(mesh, forward, arguments, specs)
    program = jax.jit(run, compiler_options=FAST).lower(*arguments).compile()
    found: list[np.ndarray] = []
    for tokens, step in steps:
        logits, kept = program(state, tokens, step, kept)
        found.append(np.asarray(logits)[: int(step.query_start[-1]), : config.vocab_size])
    return np.concatenate(found), exchanges(program.as_text() or "")


def differences(
    case: str, splits: Iterable[Split], sizes: Mapping[str, int] = NO_SIZES
) -> Iterator[tuple[float, dict[str, int]]]:
    """Yield the distance of logits over devices from logits on one, and the exchanges.

    The distance is the largest relative difference. Exchanges are counted by kind of operation,
    without two sums for each layer and one for the embedding. `sizes` replaces those of the case.
    """
    fields = fields_of_case(case) | {"vocab_size": 93, "eos_token_id": 2, **sizes}
    config = parse_model_config(fields)
    values = random_values(config)
    whole, _ = logits_of(config, values)
    for split in splits:
        parts, counts = logits_of(replace(config, split=split), values)
        counts["all-reduce"] -= 2 * config.num_hidden_layers + 1
        yield float(np.abs(parts - whole).max() / np.abs(whole).max()), dict(counts)


def counts_of(runner: Runner) -> dict[str, dict[str, int]]:
    """Return each launch program's exchanges between devices, and its donated arrays."""
    found: dict[str, dict[str, int]] = {}
    for bucket, program in runner._steps.items():
        text = program.as_text()
        gathered = " ".join(shape for shape, kind in EXCHANGE.findall(text) if kind == "all-gather")
        sizes = re.findall(r"\w\[([\d,]*)\]", gathered)
        products = [np.prod([int(n) for n in size.split(",") if n]) for size in sizes]
        header = text.split("\n", 1)[0]
        found[str(bucket)] = exchanges(text) | {
            "largest gather": int(max(products, default=0)),
            "taken over": header.count("may-alias") + header.count("must-alias"),
        }
    return found


def rows_of_experts(bench: Bench) -> list[list[int]]:
    """Return the rows of each device's experts for a request of 7 tokens that draws 5.

    With one step a launch, with several, and after a reset of the device.
    """
    loaded, found = bench.loaded[4], []
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for steps, resets in ((1, False), (3, False), (1, True)):
        if resets:
            loaded.runner.reset()
        before = loaded.runner.expert_rows.counts
        own = {"async_scheduling": False, "enable_prefix_caching": False}
        config = replace(loaded.config, num_scheduler_steps=steps, **own)
        engine = Engine(replace(loaded, config=config))
        prompt = [int(token) for token in TOKENS[:7]]
        engine.add(engine.requests.make(prompt, params, request_id="0"), lambda _: None)
        while engine.has_work:
            engine.step()
        counts = engine.stats().expert_rows
        found.append([int(n) for n in np.array(counts) - (before if len(before) else 0)])
    return found


def with_replicas(folder: Path) -> dict[str, Any]:
    """Run schedules over four devices whose busy experts are on two; return the engine's records.

    Six experts alone do not divide over four devices.
    """
    model_config = parse_model_config(EXPERTS | {"num_attention_heads": DEVICES})
    path, again = folder / "rows.json", folder / "again.json"
    path.write_text(json.dumps({"rows": [[], [9, 1, 8, 1, 1, 1]]}))
    settings = {"num_redundant_experts": 2, "load_path": path, "record_path": again}
    options: dict[str, Any] = {
        "tensor_parallel_size": DEVICES,
        "enable_expert_parallel": True,
        "enable_eplb": True,
        "eplb_config": EplbConfig(**settings),
    }
    placement = placement_of(EngineConfig(**options), model_config)
    split = Split(DEVICES, True, placement)
    bench = Bench(EXPERTS | {"num_attention_heads": DEVICES}, (4,), split=split, sizes=LARGEST)
    loaded = bench.loaded[4]
    rows = rows_of_experts(bench)
    schedules = run_schedule(bench, 8) + run_schedule(bench, 9)
    engine = Engine(replace(loaded, config=replace(loaded.config, **options)))
    devices = engine.stats().expert_rows
    engine.close()
    return {
        "placement": placement,
        "rows": rows,
        "schedules": dict(schedules),
        "by device": devices,
        "by expert": json.loads(again.read_text())["rows"],
    }


def warm_start(folder: Path) -> dict[str, int]:
    """Count programs compiled and read by two starts of an engine, and by a plan's copy."""
    split = Split(2)
    model_config = replace(parse_model_config(TINY), split=split)
    model = random_weights(model_config, jnp.float64, 3, panels=True, mesh=make_mesh(2))
    config = EngineConfig(
        dtype="float64",
        max_model_len=32,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        decode_sizes=(2,),
        token_sizes=(8,),
        num_gpu_blocks_override=20,
        num_scheduler_steps=2,
        tensor_parallel_size=2,
        wait_for_all_programs=True,
    ).resolve("cpu", 64)
    starts: list[WarmUp] = []
    for _ in range(2):
        starts.append(WarmUp(plan_of_model(config, model_config, model), folder))
        starts[-1].run(model_leaves(model)).close()
    first, second = (start.store for start in starts)
    plan = starts[0].plan
    copy = pickle.loads(pickle.dumps(plan))
    texts = [Compiler(one_plan).lower(plan.buckets.largest).as_text() for one_plan in (plan, copy)]
    return {
        "compiled first": first.num_built,
        "compiled second": second.num_built,
        "read second": second.num_loaded,
        "copies equal": int(texts[0] == texts[1]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--every-case", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], metavar="CASE", help="these alone")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_x64", True)
    compile_quickly()
    alone = arguments.cases or (arguments.every_case and [*CASES])
    found: dict[str, Any] = {"differences": {}, "exchanges": {}}
    for case in alone or FEW:
        counts = (2, DEVICES) if alone else (DEVICES,)
        for count, (value, own) in zip(counts, differences(case, map(Split, counts)), strict=True):
            found["differences"][f"{case}, {count}"] = value
            found["exchanges"][f"{case}, {count}"] = own
            print(f"{case}, {count}: {value:.1e}, {own}", file=sys.stderr, flush=True)
    if not alone:
        own = ((1, 3, 2, 3, 0, 2), (0, 1, 2, 0, 1, 3))  # places of its two layers
        splits = [Split(2, True), Split(2, True, own)]
        (found["expert parallel"], _), (found["replicas"], _) = differences(
            "gpt_oss_alternate", splits
        )
        bench = Bench(TINY, (4,), split=Split(DEVICES))
        found["schedules"] = dict(sum(map(partial(run_schedule, bench), range(6)), Counter()))
        runner = bench.loaded[4].runner
        runner.reset()
        found["after a reset"] = dict(run_schedule(bench, 7))
        found["programs"] = counts_of(runner)
        bench = Bench(EXPERTS, (4,), split=Split(2, True), sizes=LARGEST)
        found["rows of experts"] = rows_of_experts(bench)
        found["schedules of experts"] = dict(run_schedule(bench, 8))
        with own_programs(), tempfile.TemporaryDirectory() as folder:
            found["with replicas"] = with_replicas(Path(folder))
            found["starts"] = warm_start(Path(folder) / "programs")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
