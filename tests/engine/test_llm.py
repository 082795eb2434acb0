"""LLM: outputs, and everything a caller may get wrong."""

from __future__ import annotations

import gc
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxserve import LLM, EngineClosed, InvalidRequest, SamplingParams
from jaxserve.engine.batch import RequestBatch
from jaxserve.start.loaded import Loaded
from tests.support.shared_engine import GREEDY, Canary

pytestmark = pytest.mark.usefixtures("quick_code")

PROMPTS = ["hello", "a much longer prompt than the others, in two pages", "x", "naïve café ☕"]


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def test_greedy_equals_transformers(llm: LLM, checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        want = model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=None)
        assert output.outputs[0].token_ids == want[0, ids.shape[1] :].tolist()


def test_together_equals_alone(llm: LLM) -> None:
    settings = [
        SamplingParams(temperature=t, top_p=0.9, seed=i, max_tokens=5 + 3 * i)
        for i, t in enumerate((0.0, 1.0, 1.0, 2.0))
    ]
    together = llm.generate(PROMPTS, settings, use_tqdm=False)
    alone = [
        llm.generate(prompt, params, use_tqdm=False)[0]
        for prompt, params in zip(PROMPTS, settings, strict=True)
    ]
    assert tokens(together) == tokens(alone)
    assert [output.prompt for output in together] == PROMPTS


def test_output_fields(llm: LLM) -> None:
    [output] = llm.generate(
        "abc", SamplingParams(n=3, seed=1, max_tokens=4, ignore_eos=True), use_tqdm=False
    )
    assert output.finished and len(output.outputs) == 3
    assert [one.index for one in output.outputs] == [0, 1, 2]
    assert all(one.finish_reason == "length" and len(one.token_ids) == 4 for one in output.outputs)
    assert len({tuple(one.token_ids) for one in output.outputs}) > 1
    for index, one in enumerate(output.outputs):
        params = SamplingParams(seed=1 + index, max_tokens=4, ignore_eos=True)
        assert tokens(llm.generate("abc", params, use_tqdm=False)) == [one.token_ids]


def test_token_prompts_equal_text(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("the same prompt")
    forms: list[Any] = ["the same prompt", {"prompt": "the same prompt"}, ids, tuple(ids)]
    forms += [
        np.array(ids),
        np.array(ids, np.uint8),
        {"prompt_token_ids": ids},
        list(np.array(ids)),
    ]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(ids) for ids in tokens(outputs)}) == 1
    assert tokens(llm.generate(ids, GREEDY, use_tqdm=False)) == tokens(outputs[:1])


def test_prefix_cache_is_reported(llm: LLM) -> None:
    prompt = "p" * 40
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    [salted] = llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt="mine")
    assert salted.num_cached_tokens == 0
    assert tokens([first]) == tokens([second]) == tokens([salted])


def test_stop_strings_and_tokens(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
    [free] = llm.generate("stop here", SamplingParams(**params), use_tqdm=False)
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    cut = next(i for i in range(3, 25) if text[i : i + 2] not in text[: i + 1])
    stop = text[cut : cut + 2]
    for include in (False, True):
        stopping = SamplingParams(
            **params, stop=[stop, stop + "never"], include_stop_str_in_output=include
        )
        [one] = llm.generate("stop here", stopping, use_tqdm=False)
        assert one.outputs[0].text == text[: cut + 2 * include]
        assert (one.outputs[0].finish_reason, one.outputs[0].stop_reason) == ("stop", stop)
    last = next(i for i in range(2, 30) if ids[i] not in ids[:i])
    stopping = SamplingParams(**params, stop_token_ids=[ids[last]])
    [one] = llm.generate("stop here", stopping, use_tqdm=False)
    assert one.outputs[0].token_ids == ids[: last + 1]
    assert (one.outputs[0].finish_reason, one.outputs[0].stop_reason) == ("stop", ids[last])


@pytest.mark.parametrize(("include", "text"), [(False, ""), (True, "X")])
def test_a_stop_token_is_in_the_text_only_if_it_is_included(
    llm: LLM, include: bool, text: str
) -> None:
    token = llm.get_tokenizer().encode("X")[-1]
    params = SamplingParams(
        allowed_token_ids=[token], stop_token_ids=[token], include_stop_str_in_output=include
    )
    [one] = llm.generate("x", params, use_tqdm=False)
    assert (one.outputs[0].token_ids, one.outputs[0].text) == ([token], text)


def test_min_tokens_holds_off_the_end(llm: LLM) -> None:
    everything = list(range(2, 33))
    params = SamplingParams(max_tokens=9, min_tokens=6, stop_token_ids=everything, seed=0)
    [one] = llm.generate("x", params, use_tqdm=False)
    ids = one.outputs[0].token_ids
    assert len(ids) >= 6 and not set(ids[:6]) & {1, *everything}


def test_chat_goes_through_the_template(llm: LLM) -> None:
    message = [{"role": "user", "content": "hi"}]
    [one] = llm.chat(message, GREEDY, use_tqdm=False)
    ids = llm.get_tokenizer().encode("<|bos|><|user|>hi<|end|><|bot|>")
    assert one.prompt_token_ids == ids
    assert len(llm.chat([message, message], GREEDY, use_tqdm=False)) == 2


def test_a_chat_takes_what_the_server_takes(llm: LLM) -> None:
    def ids(*messages: dict[str, Any]) -> list[int]:
        return llm.chat(list(messages), GREEDY, use_tqdm=False)[0].prompt_token_ids

    user = {"role": "user", "content": "hi"}
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert ids({"role": "user", "content": parts}) == ids(user | {"content": "h\ni"})
    assert ids({"role": "critic", "content": "a"}, user) != ids(user)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "tool_calls": [call]}
    assert ids(user, said, user) == ids(user, said | {"content": ""}, user)
    for content in (None, [], "", [{"type": "text", "text": ""}], [{"type": "image_url"}], 5):
        with pytest.raises(InvalidRequest, match="content"):
            ids({"role": "user", "content": content})


def test_a_prompt_dict_may_say_its_salt(llm: LLM) -> None:
    ids = [7] * 40

    def cached(**fields: Any) -> int:
        prompt = {"prompt_token_ids": ids, "multi_modal_data": None, **fields}
        [one] = llm.generate(prompt, GREEDY, use_tqdm=False, cache_salt="all")
        return one.num_cached_tokens

    assert [cached(cache_salt=name) for name in ("alice", "bob", "alice")] == [0, 0, 32]
    assert [cached(), cached(), cached(cache_salt="all")] == [0, 32, 32]


MESSAGES = [{"role": "user", "content": "hi"}]


def test_a_chat_has_a_salt_and_a_priority(llm: LLM) -> None:
    long = [{"role": "user", "content": "hi" * 30}]
    asked: dict[str, Any] = {"use_tqdm": False, "cache_salt": "mine"}
    assert [llm.chat(long, GREEDY, **asked)[0].num_cached_tokens > 0 for _ in range(2)] == [0, 1]
    with pytest.raises(InvalidRequest, match="priority"):
        llm.chat(long, GREEDY, use_tqdm=False, priority=[2**40])


def test_a_chat_tells_the_template_what_it_was_told(llm: LLM) -> None:
    plain = llm.chat(MESSAGES, GREEDY, use_tqdm=False)[0].prompt_token_ids
    open_ended = llm.chat(MESSAGES, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert open_ended[0].prompt_token_ids == plain[:-1]
    free: dict[str, Any] = {"add_generation_prompt": False, "enable_thinking": False}
    told = llm.chat(MESSAGES, GREEDY, use_tqdm=False, chat_template_kwargs=free)
    assert told[0].prompt_token_ids == plain[:-1]
    neutral: dict[str, Any] = {"chat_template": None, "tools": None, "mm_processor_kwargs": None}
    assert llm.chat(MESSAGES, GREEDY, use_tqdm=False, **neutral)[0].prompt_token_ids == plain


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"chat_template": "mine"}, "chat_template"),
        ({"add_generation_promt": False}, "add_generation_promt"),
        ({"tool": 1}, "tool"),
        ({"enable_thinking": False}, "enable_thinking"),  # which this template does not read
        ({"lora_request": "a"}, "lora_request"),
        ({"tokenize": True}, "tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {5: 5}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_a_chat_refuses_what_it_would_not_heed(
    canary: Canary, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        canary.llm.chat(MESSAGES, GREEDY, use_tqdm=False, **options)
    assert caught.value.parameter == name
    canary.check()


LONG = "y" * 256
BAD_PROMPTS: dict[str, Any] = {
    "empty text": "",
    "no ids": [],
    "no prompts": [[]],
    "null": None,
    "null among prompts": ["ok", None],
    "negative id": [[5, -1]],
    "numpy negative id": np.array([5, -1]),
    "id beyond the logits": [[5, 260]],
    "id of 2**31": [[2**31]],
    "id of 2**80": [[2**80]],
    "fraction": [[1.5]],
    "bool": [[True, 4]],
    "mixed": [[1, "a"]],
    "nested": [[[1], [2]]],
    "too long": LONG,
    "exactly the context": [[5] * 256],
    "generator": (i for i in range(3)),
    "bytes": b"abc",
    "number": 7,
    "dict without prompt": {"prompt_token_ids": None},
    "dict with an unknown key": {"prompt": "a", "text": "b"},
    "dict with an image": {"prompt": "a", "multi_modal_data": {"image": object()}},
    "dict with a bad salt": {"prompt": "a", "cache_salt": 5},
    "array of no dimension": np.array(5),
    "arrays of no dimension": [np.array(5)],
    "lone surrogate": "\ud800",
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_refused(canary: Canary, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        canary.llm.generate(BAD_PROMPTS[name], GREEDY, use_tqdm=False)
    assert len(str(caught.value)) < 300
    canary.check()


def test_prompt_of_all_but_one_token_is_served(canary: Canary) -> None:
    [one] = canary.llm.generate([[5] * 255], GREEDY, use_tqdm=False)
    assert len(one.outputs[0].token_ids) == 1 and one.outputs[0].finish_reason == "length"
    canary.check()


BAD_PARAMS: list[dict[str, Any]] = [
    {"max_tokens": 0}, {"max_tokens": -1}, {"max_tokens": 10**12}, {"max_tokens": 1.5},
    {"max_tokens": True}, {"max_tokens": "5"}, {"min_tokens": -1},
    {"min_tokens": 20, "max_tokens": 10}, {"n": 0}, {"n": -1}, {"n": 129}, {"n": 10**9},
    {"temperature": -1}, {"temperature": -1e-9}, {"temperature": 1e300},
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": "1"},
    {"temperature": None}, {"top_p": -1}, {"top_p": -1e-9}, {"top_p": 2}, {"top_p": True},
    {"top_p": float("nan")}, {"top_p": float("inf")}, {"top_p": 1.001}, {"temperature": False},
    {"top_k": -2}, {"top_k": 2**63}, {"top_k": 1.5}, {"min_p": -0.1}, {"min_p": 1.1},
    {"seed": 2**64}, {"seed": -(2**63) - 1}, {"seed": 0.5}, {"stop": ""}, {"stop": ["a", ""]},
    {"stop": ["s"] * 129}, {"stop": "x" * 2**20}, {"stop": [1]}, {"stop": 5},
    {"stop_token_ids": [-1]}, {"stop_token_ids": [1.0]}, {"stop_token_ids": "ab"},
    {"stop_token_ids": np.array(5)}, {"allowed_token_ids": np.array(5)},
    {"stop_token_ids": list(range(33))}, {"ignore_eos": 1}, {"detokenize": "no"},
    {"stop": "a", "detokenize": False},
    {"presence_penalty": 2.1}, {"frequency_penalty": -1e9}, {"presence_penalty": math.nan},
    {"repetition_penalty": 0}, {"repetition_penalty": -1}, {"repetition_penalty": 1e9},
    {"logit_bias": {"-1": 1}}, {"logit_bias": {"1e3": 1}}, {"logit_bias": {"x": 1}},
    {"logit_bias": {5: 1e9}}, {"logit_bias": {5: math.nan}}, {"logit_bias": {5: "1"}},
    {"logit_bias": [1]}, {"logit_bias": dict.fromkeys(range(301), 1)}, {"logit_bias": {True: 1}},
    {"logit_bias": {"5": 1, 5: 2}}, {"logit_bias": {2**31: 1}},
    {"allowed_token_ids": []}, {"allowed_token_ids": [-1]}, {"allowed_token_ids": 5},
    {"allowed_token_ids": "5"}, {"allowed_token_ids": [1.0]},
    {"bad_words": [""]}, {"bad_words": ["  "]}, {"bad_words": "word"}, {"bad_words": [5]},
    {"logprobs": -2}, {"logprobs": 2**31}, {"logprobs": True},
    {"prompt_logprobs": -2}, {"prompt_logprobs": 1.0},
    {"bad_words": ["w"] * 10_000}, {"bad_words": ["w" * 300]},
]  # fmt: skip


@pytest.mark.parametrize("fields", BAD_PARAMS, ids=lambda fields: str(fields)[:40])
def test_bad_sampling_params_name_their_field(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    assert caught.value.parameter in fields
    assert len(str(caught.value)) < 300


SMALL = [0, -0.0, 1e-320, 1e-40, 1e-8, 1e-5, 9.999e-5, np.float32(1e-6)]


@pytest.mark.parametrize("value", SMALL, ids=str)
def test_a_temperature_too_small_to_draw_with_is_greedy(value: float) -> None:
    """Clients send them to ask for the most likely token (ragas#939)."""
    assert SamplingParams(temperature=value).temperature == 0.0
    assert SamplingParams(temperature=1e-4).temperature == 1e-4


def test_a_share_of_nothing_is_the_most_likely_token(llm: LLM) -> None:
    greedy = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    for top_p in (0, -0.0, 1e-320, 1e-39):
        params = replace(GREEDY, temperature=50.0, top_p=top_p, seed=5)
        assert params.temperature == 0.0  # so that one of several equals is chosen as by greedy
        assert tokens(llm.generate(PROMPTS, params, use_tqdm=False)) == greedy
        assert replace(params, min_tokens=0) == params
    assert SamplingParams(temperature=2.0, top_p=1.2e-38).temperature == 2.0


def test_a_seed_may_be_negative_as_vllms() -> None:
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-7).seed == 2**64 - 7
    assert SamplingParams(seed=-(2**63)).seed == 2**63
    assert replace(SamplingParams(seed=5), seed=-1).seed is None


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [260]},
        {"stop_token_ids": [2**31 - 1]},
    ],
)
def test_settings_beyond_the_model_are_refused(canary: Canary, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        canary.llm.generate("x", SamplingParams(**fields), use_tqdm=False)
    canary.check()


@pytest.mark.parametrize("max_tokens", [None, 10**6])
def test_min_tokens_end_with_the_context(canary: Canary, max_tokens: int | None) -> None:
    asked = SamplingParams(max_tokens=max_tokens, min_tokens=10**6, temperature=0)
    [one] = canary.llm.generate("x", asked, use_tqdm=False)
    room = canary.llm._thread.engine.limits.max_model_len - len(one.prompt_token_ids)
    assert len(one.outputs[0].token_ids) == room
    assert one.outputs[0].finish_reason == "length"
    canary.check()


def test_one_bad_prompt_starts_none(canary: Canary) -> None:
    before = canary.llm.stats().prompt_tokens
    with pytest.raises(InvalidRequest):
        canary.llm.generate(["fine"] * 20 + [""], GREEDY, use_tqdm=False)
    assert canary.llm.stats().prompt_tokens == before
    with pytest.raises(InvalidRequest, match="2 entries for 3 prompts"):
        canary.llm.generate(["a"] * 3, [GREEDY] * 2, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        canary.llm.generate("a", {"max_tokens": 3}, use_tqdm=False)  # type: ignore[arg-type]
    canary.check()


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{}], ["hi"], [{"role": 1, "content": "a"}], [[]], 5]
)
def test_bad_messages_are_refused(canary: Canary, messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        canary.llm.chat(messages, GREEDY, use_tqdm=False)
    canary.check()


@pytest.mark.parametrize("salt", ["s" * 129, "a\nb", "\x00", 5])
def test_bad_salts_and_priorities_are_refused(canary: Canary, salt: Any) -> None:
    with pytest.raises(InvalidRequest, match="cache_salt"):
        canary.llm.generate("a", GREEDY, use_tqdm=False, cache_salt=salt)
    with pytest.raises(InvalidRequest, match="priority"):
        canary.llm.generate("a", GREEDY, use_tqdm=False, priority=[2**40])
    canary.check()


def test_generate_from_two_threads(canary: Canary) -> None:
    want = tokens(canary.llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    got: dict[int, Any] = {}

    def work(number: int) -> None:
        got[number] = tokens(canary.llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(4)] == [want] * 4
    canary.check()


def test_interrupt_gives_everything_back(canary: Canary, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = RequestBatch._next, iter([None, None, KeyboardInterrupt()])

    def interrupted(batch: RequestBatch) -> Any:
        if (error := next(calls)) is not None:
            raise error
        return original(batch)

    with monkeypatch.context() as patch:
        patch.setattr(RequestBatch, "_next", interrupted)
        with pytest.raises(KeyboardInterrupt):
            canary.llm.generate(["long"] * 9, SamplingParams(max_tokens=200), use_tqdm=False)
    canary.check()


def test_use_after_close_and_after_fork(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    llm = LLM(loaded)
    with monkeypatch.context() as patch:
        here = os.getpid()
        patch.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(EngineClosed, match="process"):
            llm.generate("x", GREEDY, use_tqdm=False)
    llm.close()
    llm.close()
    with pytest.raises(EngineClosed, match="closed"):
        llm.generate("x", GREEDY, use_tqdm=False)
    with pytest.raises(EngineClosed, match="closed"):
        llm.stats()


def test_an_engine_that_nothing_refers_to_closes(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    llm = LLM(loaded)
    thread = llm._thread
    assert llm.generate("x", GREEDY, use_tqdm=False) and thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()


def test_requests_open_at_close_are_ended(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    llm = LLM(loaded)
    done: list[Any] = []
    params = SamplingParams(max_tokens=None, ignore_eos=True)

    def work() -> None:
        done.extend(llm.generate(["endless"] * 6, params, use_tqdm=False))

    thread = threading.Thread(target=work)
    thread.start()
    while llm.stats().num_running == 0:
        pass
    llm.close()
    thread.join(30)
    reasons = {one.finish_reason for output in done for one in output.outputs}
    assert len(done) == 6 and reasons <= {"abort", "length"} and "abort" in reasons


def test_requests_beside_a_long_step_are_ended_too(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    read, begun, goes_on = loaded.runner.read, threading.Event(), threading.Event()

    def long(step: Any) -> Any:
        begun.set()
        goes_on.wait(30)
        return read(step)

    monkeypatch.setattr(loaded.runner, "read", long)
    llm, done = LLM(loaded), []
    params = SamplingParams(max_tokens=None, ignore_eos=True)

    def work() -> None:
        try:
            done.extend(llm.generate("endless", params, use_tqdm=False))
        except Exception as error:
            done.append(error)

    working, closing = threading.Thread(target=work), threading.Thread(target=llm.close)
    working.start()
    assert begun.wait(30)
    closing.start()
    working.join(2.5)  # who waits looks at the engine every second
    goes_on.set()
    working.join(30)
    closing.join(30)
    [output] = done
    assert output.outputs[0].finish_reason == "abort"


def test_ending_what_has_ended_raises_nothing(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    llm = LLM(loaded)
    thread = llm._thread
    llm.close()
    # It closes between the look and the message.
    monkeypatch.setattr(thread, "is_alive", lambda: True)
    thread.abort("one")
    thread.abort_waiting("one", "too late")
    thread.pause(["one"])
    thread.resume(["one"])
