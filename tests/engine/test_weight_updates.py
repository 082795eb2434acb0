"""Weights in memory in a running engine: updates, versions, pause and sleep."""

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, AsyncLLM, CompletionOutput, SamplingParams
from jaxserve.errors import CheckpointError, EngineAsleep, InvalidRequest
from jaxserve.models import checkpoint_weights, parse_model_config
from jaxserve.models.weight_table import dimensions
from tests.equivalence import fields_of_case

pytestmark = [pytest.mark.own_engine, pytest.mark.usefixtures("quick_code")]

FIELDS = fields_of_case("llama_biases")
CONFIG = parse_model_config(FIELDS)
SETTINGS: Any = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 96,
    "block_size": 4,
    "decode_sizes": (4,),
    "token_sizes": (32,),
    "num_gpu_blocks_override": 90,
    "num_scheduler_steps": 1,
    "check_invariants": True,
}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], list(range(30, 60))]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


def arrays(seed: int) -> dict[str, Any]:
    generator, dims = np.random.default_rng(seed), dimensions(CONFIG)
    return {
        weight.name: generator.standard_normal(weight.shape(dims)).astype(np.float32)
        for weight in checkpoint_weights(CONFIG)
    }


FIRST, SECOND = arrays(0), arrays(1)


def engine(params: Any) -> LLM:
    return LLM.from_params(params, FIELDS, **SETTINGS)


def tokens(llm: LLM, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, sampling, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[int]]]:
    """Return the answers of engines that start with these weights."""
    mixed = FIRST | {name: SECOND[name] for name in SECOND if "q_proj" in name}
    found: dict[str, list[list[int]]] = {}
    for name, params in {"first": FIRST, "second": SECOND, "mixed": mixed}.items():
        with engine(params) as llm:
            found[name] = tokens(llm)
    return found


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    with engine(FIRST) as llm:
        yield llm
        assert llm.stats().num_compiles == 0


@pytest.fixture
def llm(shared: LLM) -> LLM:
    shared.update_weights(FIRST, version="0")
    return shared


def test_answers_are_those_of_an_engine_with_the_weights(
    llm: LLM, answers: dict[str, list[list[int]]]
) -> None:
    assert len({str(found) for found in answers.values()}) == 3
    assert tokens(llm) == answers["first"]
    updates = llm.stats().num_weight_updates
    assert llm.update_weights(SECOND) == llm.weights_version == str(updates + 1)
    assert tokens(llm) == answers["second"]
    on_device = {name: jnp.asarray(array) for name, array in FIRST.items()}
    assert llm.update_weights(on_device, "a") == "a"
    assert tokens(llm) == answers["first"]
    llm.update_weights({name: SECOND[name] for name in SECOND if "q_proj" in name})
    assert tokens(llm) == answers["mixed"]
    llm.check()


def test_staged_arrays_are_applied_together(llm: LLM, answers: dict[str, list[list[int]]]) -> None:
    for name, array in SECOND.items():
        llm.update_weights({name: array}, finish=False)
        assert llm.weights_version == "0"
    assert tokens(llm) == answers["first"]
    llm.update_weights({}, "all")
    assert tokens(llm) == answers["second"]


def test_a_refused_update_changes_nothing(llm: LLM, answers: dict[str, list[list[int]]]) -> None:
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.update_weights(SECOND, finish=False)
    bad = FIRST["model.norm.weight"].copy()
    bad[3] = np.inf
    with pytest.raises(InvalidRequest, match=r"'model.norm.weight'.*infinity") as raised:
        llm.update_weights({"model.norm.weight": bad}, "bad")
    assert raised.value.parameter == "params"
    assert llm.weights_version == "0"
    [output] = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 8 and output.outputs[0].token_ids == answers["first"][0]
    llm.update_weights({}, "nothing")  # the staged arrays were discarded
    assert tokens(llm) == answers["first"]
    for arguments, message in [
        ((FIRST, ""), "version is ''; allowed"),
        ((FIRST, "1", "later"), "running is 'later'; allowed: recompute, keep, abort"),
        (([1],), "params is a list; allowed"),
        ((None,), "params is a NoneType; allowed"),
        ((np.zeros(3),), "params is a ndarray; allowed"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            llm.update_weights(*arguments)
    assert llm.weights_version == "nothing"


@pytest.mark.parametrize("running", ["recompute", "keep", "abort"])
def test_running_requests(llm: LLM, running: Any) -> None:
    """Each token is the argmax of the version that the output names for it, unless kept."""
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    llm.enqueue(PROMPTS[:2], sampling)
    while llm.stats().generation_tokens < 20 + llm.stats().num_running:
        time.sleep(0.001)
        if llm.stats().num_running == 0:
            break
    llm.pause("keep")
    llm.update_weights(SECOND, "b", running)
    llm.resume()
    outputs = llm.wait_for_completion(use_tqdm=False)
    if running == "abort":
        assert {output.outputs[0].finish_reason for output in outputs} <= {"abort", "length"}
        return
    with engine(FIRST) as first, engine(SECOND) as second:
        for output in outputs:
            completion, prompt = output.outputs[0], output.prompt_token_ids
            assert len(completion.token_ids) == 60
            starts = [*completion.weight_versions, (60, "end")]
            for (start, version), (end, _) in pairwise(starts):
                known = [*prompt, *completion.token_ids[:start]]
                after = SamplingParams(max_tokens=end - start, temperature=0, ignore_eos=True)
                judge = first if version == "0" else second
                [want] = judge.generate([known], after, use_tqdm=False)
                if running == "recompute" or version == "0":
                    assert completion.token_ids[start:end] == want.outputs[0].token_ids
            assert [version for _, version in completion.weight_versions] in (["0", "b"], ["0"])


def test_prompt_logprobs_are_of_the_weights_of_the_answer(llm: LLM) -> None:
    """The first chunk of the prompt completes them, and the last one samples the first token."""
    prompt, engine = list(range(2, 35)), llm._thread.engine
    sampling = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=0, ignore_eos=True)

    def take_step() -> None:
        engine.resume_all()
        engine.step()
        engine.pause_all("keep")

    llm.pause()
    llm.enqueue([prompt], sampling)
    llm._thread.call(take_step)
    llm.update_weights(SECOND, "b")
    llm.resume()
    [output] = llm.wait_for_completion(use_tqdm=False)
    assert output.outputs[0].weight_versions == [(0, "b")]
    [again] = llm.generate([prompt], sampling, use_tqdm=False)
    assert output.prompt_logprobs == again.prompt_logprobs


def test_entries_of_older_weights_are_never_hit(
    llm: LLM, answers: dict[str, list[list[int]]]
) -> None:
    """Rows that keep their cache publish pages of both weights, which no later prompt shares."""
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm.pause()
    llm.enqueue(PROMPTS, sampling)
    llm.resume()
    while llm.stats().generation_tokens and llm.stats().num_running == 0:
        break
    llm.pause()
    llm.update_weights(SECOND, "0", "keep")
    llm.resume()
    kept = llm.wait_for_completion(use_tqdm=False)
    for output in kept:
        body = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        [again] = llm.generate([body], GREEDY, use_tqdm=False)
        assert again.num_cached_tokens == 0 or output.outputs[0].weight_versions == [(0, "0")]
    llm.reset_prefix_cache()
    assert tokens(llm) == answers["second"]


def test_updates_under_load(llm: LLM) -> None:
    """No request is lost, and each token is the argmax of the weights that it names."""
    stop, outputs = threading.Event(), list[Any]()

    def load(seed: int) -> None:
        generator = np.random.default_rng(seed)
        while not stop.is_set():
            prompt = generator.integers(2, 60, 12).tolist()
            sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            outputs.extend(llm.generate([prompt], sampling, use_tqdm=False))

    threads = [threading.Thread(target=load, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for number in range(12):
        llm.update_weights(SECOND if number % 2 == 0 else FIRST, "ab"[number % 2])
        time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert llm.stats().num_running == llm.stats().num_waiting == 0
    several = 0
    with engine(FIRST) as first, engine(SECOND) as second:
        for output in outputs[-40:]:
            completion = output.outputs[0]
            assert completion.finish_reason == "length", completion
            starts = [*completion.weight_versions, (20, "")]
            several += len(starts) > 2
            for (start, version), (end, _) in pairwise(starts):
                known = [*output.prompt_token_ids, *completion.token_ids[:start]]
                after = SamplingParams(max_tokens=end - start, temperature=0, ignore_eos=True)
                judge = second if version == "a" else first
                [want] = judge.generate([known], after, use_tqdm=False)
                assert completion.token_ids[start:end] == want.outputs[0].token_ids


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_pause(llm: LLM, mode: Any, answers: dict[str, list[list[int]]]) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    llm.enqueue(PROMPTS, sampling)
    llm.pause(mode)
    before = llm.stats()
    assert before.num_running == (3 if mode == "keep" and before.generation_tokens else 0) or (
        mode == "keep"
    )
    llm.enqueue(PROMPTS[:1], GREEDY)
    time.sleep(0.05)
    assert llm.stats().num_steps == before.num_steps
    assert llm.stats().num_waiting == before.num_waiting + 1
    llm.resume()
    *begun, last = llm.wait_for_completion(use_tqdm=False)
    assert last.outputs[0].token_ids == answers["first"][0]
    reasons = {output.outputs[0].finish_reason for output in begun}
    assert reasons <= {"length"} if mode != "abort" else reasons <= {"abort", "length"}
    if mode != "abort":
        assert [o.outputs[0].token_ids[:12] for o in begun] == answers["first"]
    llm.check()


@pytest.mark.parametrize("level", [1, 2])
def test_sleep(llm: LLM, level: int, answers: dict[str, list[list[int]]]) -> None:
    sampling = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm.enqueue(PROMPTS, sampling)
    llm.sleep(level, "keep")
    for call in (lambda: llm.generate(PROMPTS[:1]), lambda: llm.update_weights(FIRST), llm.resume):
        with pytest.raises(EngineAsleep, match="sleeps"):
            call()
    llm.sleep(level)
    llm.wake_up()
    llm.wake_up()
    if level == 2:
        with pytest.raises(InvalidRequest, match="dropped its weights, and tensors of"):
            llm.update_weights({"model.norm.weight": FIRST["model.norm.weight"]})
        llm.update_weights(FIRST)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids[:12] for output in outputs] == answers["first"]
    assert tokens(llm) == answers["first"]
    for arguments, message in [((3,), "level is 3; allowed: 1, 2"), ((1, "off"), "mode is 'off'")]:
        with pytest.raises(InvalidRequest, match=message):
            llm.sleep(*arguments)
    llm.check()


def test_calls_at_the_same_time(llm: LLM, answers: dict[str, list[list[int]]]) -> None:
    """Calls whose conditions another call has changed: each ends, and no request is lost."""
    thread, sampling = llm._thread, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    llm.enqueue(PROMPTS, sampling)
    while not llm.stats().generation_tokens:
        pass
    thread.call(thread.engine.wake_up)  # after the wake-up of another call
    thread.call(partial(thread.engine.sleep, 1))  # after a resume during its pause
    thread.call(partial(thread.engine.sleep, 2))  # after the sleep of another call
    with pytest.raises(EngineAsleep):  # after an update has read its arrays
        llm._updates.update(SECOND, "late")
    llm.wake_up()
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids[:12] for output in outputs] == answers["first"]
    assert llm.stats().num_failed_steps == 0 and llm.weights_version == "0"
    llm.check()


def test_an_engine_without_weights_computes_nothing(
    llm: LLM, answers: dict[str, list[list[int]]]
) -> None:
    llm.pause()
    llm.enqueue(PROMPTS, GREEDY)
    llm.sleep(2, "keep")
    llm.wake_up()
    with pytest.raises(EngineAsleep, match="dropped its weights"):
        llm.resume()
    llm.pause("wait")
    part = {name: FIRST[name] for name in FIRST if "q_proj.weight" in name}
    with pytest.raises(InvalidRequest, match=r"q_proj.weight' is a part of 'layers.0.*together"):
        llm.update_weights(part, finish=False)
    llm.update_weights(FIRST)
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == answers["first"]
    assert llm.stats().num_failed_steps == 0


def test_old_weights_are_freed(llm: LLM) -> None:
    old = [weakref.ref(leaf) for leaf in llm._thread.engine.runner.leaves]
    gc.disable()  # no reference cycle holds them
    try:
        llm.update_weights(SECOND)
        assert old and [leaf() for leaf in old] == [None] * len(old)
    finally:
        gc.enable()


def test_closed_engines_have_no_arrays() -> None:
    llm = engine(FIRST)
    llm.update_weights(SECOND, finish=False)
    staged = [weakref.ref(array) for array in llm._updates._staged.values()]
    llm.close()
    assert staged and [array() for array in staged] == [None] * len(staged)


def test_missing_arrays_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"1 missing: model.norm.weight"):
        engine({name: FIRST[name] for name in FIRST if name != "model.norm.weight"})


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [(3, None, "config is a int; allowed"), (FIELDS, 3, "tokenizer is a int; allowed")],
)
def test_arguments_of_other_types_are_refused(config: Any, tokenizer: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LLM.from_params(FIRST, config, tokenizer)


def test_async_engine(answers: dict[str, list[list[int]]]) -> None:
    async def run() -> None:
        async with AsyncLLM.from_params(FIRST, FIELDS, **SETTINGS) as llm:

            async def answer() -> CompletionOutput:
                whole = CompletionOutput(0, "", [])
                async for output in llm.generate({"prompt_token_ids": PROMPTS[0]}, GREEDY):
                    for part in output.outputs:
                        whole.token_ids += part.token_ids
                        whole.weight_versions += part.weight_versions
                return whole

            assert (await answer()).token_ids == answers["first"][0]
            assert await llm.update_weights(SECOND, "b") == llm.weights_version == "b"
            await llm.pause("wait")
            waiting = asyncio.create_task(answer())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await llm.resume()
            updated = await waiting
            assert updated.token_ids == answers["second"][0]
            assert set(updated.weight_versions) == {(n, "b") for n, _ in updated.weight_versions}
            await llm.sleep()
            with pytest.raises(EngineAsleep):
                await answer()
            await llm.wake_up()
            assert (await answer()).token_ids == answers["second"][0]
            names: Any = {metric.name: metric for metric in await llm.get_metrics()}
            assert names["jaxserve:weights_version_info"].labels["version"] == "b"
            assert names["jaxserve:weight_updates"].value == 1

    asyncio.run(run())


def test_a_pause_takes_no_thread() -> None:
    """Other work of the event loop's threads goes on while calls wait for requests to end."""
    settings = SETTINGS | {"max_model_len": 4000, "num_gpu_blocks_override": 1100}
    settings["allow_long_max_model_len"] = True

    async def run() -> None:
        async with AsyncLLM.from_params(FIRST, FIELDS, **settings) as llm:

            async def answer() -> None:
                long = SamplingParams(max_tokens=3000, ignore_eos=True)
                async for _ in llm.generate({"prompt_token_ids": PROMPTS[0]}, long):
                    started.set()

            started = asyncio.Event()
            answering = asyncio.create_task(answer())
            await started.wait()
            pauses = [asyncio.create_task(llm.pause("wait")) for _ in range(40)]
            await asyncio.sleep(0)
            await asyncio.to_thread(time.sleep, 0)
            assert not any(pause.done() for pause in pauses)
            await llm.resume()
            await asyncio.gather(*pauses)
            assert not answering.done()
            answering.cancel()

    asyncio.run(run())
