"""Any schedule gives the tokens that one request alone would get: checked token for token.

    python -m tests.equivalence --schedules 2000 --seed 1
    python -m tests.equivalence --schedules 200 --experts     a mixture of experts
    python -m tests.equivalence --case qwen3_5_two_a_key       layers that keep a state
    python -m tests.equivalence --dtype bfloat16              to the bit, on CPU
    python -m tests.equivalence --dtype float32 --case gemma2_caps      of another family
    python -m tests.equivalence --tensor-parallel-size 4                over devices of one process

The oracle's products are small: with OPENBLAS_NUM_THREADS=1 they are up to 12 times as fast.

Random schedules of an adversarial workload run through the whole engine in float64 and are compared
with the oracle: all fields of a request in any mix, structured outputs of every form among them,
chunks of 1 to 64 tokens, pages of 1, 4 and 16, so few pages that sequences are preempted, prefix
caching on and off, both policies, aborts at any step, with and without a step in flight. Compiled
programs and the cache's contents carry over from schedule to schedule, so that every page is dirty.
Log-probabilities are of any mode, of any number of tokens or of some by name. A twentieth as many
beam searches, beside workloads and with the prefix cache reset at any step, equal their definition.

In other types the answers are compared with the same engine's answers to each request alone, with
one page size, one step a launch, an empty cache and whole prompts: tokens and log-probabilities are
equal to the bit. This covers every family, whose cases `tests.models.cases` lists.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args
from unittest.mock import patch

import jax
import jax.numpy as jnp
import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.engine.delta import Delta, Sink
from jaxserve.engine.engine import Engine, make_scheduler
from jaxserve.engine.llm import LLM
from jaxserve.engine.request_factory import bad_words_token_ids
from jaxserve.errors import InvalidRequest
from jaxserve.execution.hosts.group import Group
from jaxserve.execution.mesh import make_mesh
from jaxserve.models import ModelConfig, parse_model_config
from jaxserve.models.shards import ONE_DEVICE, Split
from jaxserve.outputs import RequestOutput
from jaxserve.request import MAX_LOGPROBS, BeamSearchParams, SamplingParams
from jaxserve.scheduling.logprobs import TokenLogprobs
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import KV_CACHE_DTYPES, EngineConfig, LogprobsMode
from jaxserve.start.loaded import Loaded
from jaxserve.start.plan.limits import Limits
from jaxserve.start.programs.warm_up import WarmUp
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import grammar_source
from jaxserve.weights import random_weights
from jaxserve.weights.placement import use_panels
from scripts.lib.placed_model import model_leaves, plan_of_model
from tests.models.cases import CASES, transformers_model
from tests.models.trait_cases import TRAIT_FAMILIES
from tests.support.letters import END, TEXTS, VOCAB, letter_tokenizer
from tests.support.oracle import Answer, Form, Oracle, Score
from tests.support.quick_code import compile_quickly
from tests.support.workloads import Ask, adversarial_workload

LONGEST_PROMPT, LONGEST_OUTPUT = 40, 14
MAX_LEN = LONGEST_PROMPT + LONGEST_OUTPUT + 2
SLOTS = 5
DEVICE_PAGES = 400
DEVICE_SNAPSHOTS = 40
# Cases that the oracle computes beside plain Qwen3: layers with windows, latents or states.
ORACLES = (
    *("qwen3_window", "deepseek_v3", "lfm2", "lfm3", "qwen3_5", "qwen3_next", "nemotron_h"),
    *("granitemoehybrid", "falcon_h1", "bamba", "olmo_hybrid", "mamba2"),
    *("gemma4", *TRAIT_FAMILIES),
)
MOST_STEPS = 6
MAX_STEPS = 4000
# Sizes of programs: two of each kind, or the largest alone in a test of something else.
FULL: dict[str, Any] = {"decode_sizes": (2, SLOTS), "token_sizes": (8, 64)}
LARGEST: dict[str, Any] = {"decode_sizes": (SLOTS,), "token_sizes": (64,)}

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}

# XLA's exponentials differ in the last bit where a row is no whole number of vectors, and some of
# its sums only where rows are long.
WHOLE_VECTORS = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "moe_intermediate_size": 96,
    "head_dim": 32,
}
# For latent attention, where a head's size is the size of its rotated part.
LATENT = {
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 16,
    "linear_head_dim": 32,
}

# One dense layer and one of experts, of which a third is chosen.
EXPERTS = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
}


@dataclass
class Got:
    """The tokens, text and scores that one completion of a request received."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Score] = field(default_factory=list)
    prompt_logprobs: list[Score] = field(default_factory=list)
    times_prompt: int = 0


def fields_of_case(case: str) -> dict[str, Any]:
    """Return the configuration of one of `tests.models.cases`, with sizes of whole vectors."""
    model = transformers_model(case)
    fields = model.config.to_dict()
    own = {"architectures": [type(model).__name__], "vocab_size": VOCAB, "eos_token_id": END}
    if "mamba_d_head" in fields:  # follows from the other sizes
        own["mamba_d_head"] = "auto"
    sizes = WHOLE_VECTORS | (LATENT if "kv_lora_rank" in fields else {})
    if "num_heads" in fields:  # Mamba 2
        own["num_heads"] = fields["expand"] * sizes["hidden_size"] // sizes["head_dim"]
    if fields.get("hidden_size_per_layer_input"):
        own["vocab_size_per_layer_input"] = VOCAB
    if sizes_of_layers := fields.pop("per_layer_config", None):  # Gemma 4
        heads = next(iter(sizes_of_layers.values())).get("num_key_value_heads")
        own |= {"global_head_dim": 2 * sizes["head_dim"], "num_global_key_value_heads": heads}
    fields = with_sizes(fields | own, sizes)
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    return with_factors(fields, head_dim // 2)


def with_sizes(fields: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return a configuration with the sizes of `sizes` for the fields that it has."""
    return {name: sizes.get(name, value) for name, value in fields.items()}


def with_factors(fields: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """Return a configuration whose lists of factors have one factor for each rotated pair."""
    found: dict[str, Any] = {}
    share = fields.get("partial_rotary_factor") or 1.0
    for name, value in fields.items():
        if isinstance(value, Mapping):
            value = with_factors(value, pairs)
        elif name in ("short_factor", "long_factor"):
            value = np.resize(value, int(pairs * share)).tolist()
        found[name] = value
    return found


class Bench:
    """Compiled engines, one a page size, and the oracle of their model.

    Args:
        fields: the model's configuration.
        page_sizes: of the engines. Fewer sizes compile less.
        kv_cache_dtype: of the caches.
        dtype: of the engines. Only float64 has an oracle.
        split: devices that the engines are divided over.
        group: of hosts that they lie on. No host has all logits, so prompts are not scored.
        sizes: settings of the engines that differ from those of `small_config`.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        page_sizes: tuple[int, ...] = (1, 4, 16),
        kv_cache_dtype: Literal["auto", "fp8", "int8_per_token_head"] = "auto",
        dtype: Literal["float64", "float32", "bfloat16"] = "float64",
        split: Split = ONE_DEVICE,
        group: Group | None = None,
        sizes: Mapping[str, Any] = FULL,
    ) -> None:
        self.scores_on_host = group is None
        model_config = parse_model_config(dict(fields))
        if model_config.state_bytes:
            item = 2 if dtype == "float64" else 1
            sizes = {
                **sizes,
                "state_cache_bytes": DEVICE_SNAPSHOTS * item * model_config.state_bytes,
            }
        model = random_weights(model_config, jnp.dtype(dtype), seed=3)
        self.oracle = Oracle(model_config, model, kv_cache_dtype) if dtype == "float64" else None
        use_panels(model)
        if split.devices > 1:
            model_config, model = divided_model(fields, split, dtype)
        self._answers: dict[object, Answer] = {}
        self._alone: dict[object, list[Got]] = {}
        self.loaded: dict[int, Loaded] = {}
        self.tokenizer = letter_tokenizer()
        self._vocabulary = llguidance.LLTokenizer(
            self.tokenizer.backend.to_str(), n_vocab=VOCAB, eos_token=[END]
        )
        for page in page_sizes:
            most = -1 if group is None else MAX_LOGPROBS
            config = small_config(
                model_config,
                dtype=dtype,
                kv_cache_dtype=kv_cache_dtype,
                block_size=page,
                max_logprobs=most,
                **sizes,
            )
            warm_up = WarmUp(plan_of_model(config, model_config, model), group=group)
            runner = warm_up.run(model_leaves(model))
            limits = Limits(VOCAB, MAX_LEN, (END,), seed=0, max_logprobs=most)
            made = (config, runner, self.tokenizer, limits, SamplingParams())
            self.loaded[page] = Loaded(*made, group=group)

    def answer(self, ask: Ask, index: int, mode: LogprobsMode) -> Answer | Got:
        """Return the answer to one completion of a request that runs alone."""
        if self.oracle is None:
            return self._answers_alone(ask, mode)[index]
        return self._oracle_answer(self.oracle, ask, index, mode)

    def _answers_alone(self, ask: Ask, mode: LogprobsMode) -> list[Got]:
        key = (tuple(ask.prompt), ask.sampling, mode)
        if key not in self._alone:
            loaded = self.loaded[min(self.loaded)]
            config = replace(
                loaded.config,
                enable_prefix_caching=False,
                async_scheduling=False,
                num_scheduler_steps=1,
                logprobs_mode=mode,
            )
            engine = Engine(replace(loaded, config=config))
            (self._alone[key],) = drive(engine, [replace(ask, at_step=0, abort_at=None)])
        return self._alone[key]

    def _oracle_answer(self, oracle: Oracle, ask: Ask, index: int, mode: LogprobsMode) -> Answer:
        sampling = ask.sampling
        own = () if sampling.ignore_eos else (END,)
        stops = tuple(dict.fromkeys((*own, *(sampling.stop_token_ids or ()))))
        seed = ((sampling.seed or 0) + index) % 2**64
        key = (tuple(ask.prompt), sampling, index, mode)
        if key not in self._answers:
            words = sampling.bad_words or ()
            self._answers[key] = oracle.answer(
                ask.prompt,
                sampling,
                seed,
                stops,
                bad_words_token_ids(words, self.tokenizer.encode_word, VOCAB),
                TEXTS if sampling.detokenize else (),
                self._form(sampling.structured_outputs),
                mode,
            )
        return self._answers[key]

    def _form(self, asked: StructuredOutputsParams | None) -> Form | None:
        """Reads all that was generated again for every token."""
        if asked is None:
            return None
        source = grammar_source(asked, {}, lambda token: False)
        start = llguidance.LLMatcher(self._vocabulary, source, log_level=0)

        def form(output: tuple[int, ...]) -> tuple[np.ndarray, bool]:
            matcher = start.deep_copy()
            assert matcher.consume_tokens(list(output)), matcher.get_error()
            if matcher.is_stopped():
                return np.zeros(VOCAB, bool), True
            mask = llguidance.numpy.allocate_token_bitmask(1, VOCAB)
            llguidance.numpy.fill_next_token_bitmask(matcher, mask, 0)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
            return bits.astype(bool), False

        return form


def divided_model(fields: Mapping[str, Any], split: Split, dtype: str) -> tuple[ModelConfig, Any]:
    """Return the model of a bench over several devices."""
    model_config = replace(parse_model_config(dict(fields)), split=split)
    placed: Any = {"panels": True, "mesh": make_mesh(split.devices)}
    return model_config, random_weights(model_config, jnp.dtype(dtype), 3, **placed)


def small_config(model_config: ModelConfig, **fields: Any) -> EngineConfig:
    """Return the settings of a bench's engine."""
    return EngineConfig(
        max_model_len=MAX_LEN,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=DEVICE_PAGES,
        check_invariants=True,
        num_scheduler_steps=MOST_STEPS,
        tensor_parallel_size=model_config.split.devices,
        enable_expert_parallel=model_config.split.expert_parallel,
        decode_context_parallel_size=model_config.split.context,
        **(FULL | fields),
    ).resolve("cpu", model_config.max_position_embeddings)


def scored_on_device(ask: Ask) -> Ask:
    """Return a request whose log-probabilities a compiled program computes."""
    most = {
        name: min(MAX_LOGPROBS, VOCAB) if getattr(ask.sampling, name) == -1 else value
        for name in ("logprobs", "prompt_logprobs")
        if (value := getattr(ask.sampling, name)) is not None
    }
    return replace(ask, sampling=replace(ask.sampling, logprob_token_ids=None, **most))


def run_schedule(bench: Bench, seed: int) -> Counter[str]:
    """Run one random schedule, compare it with the oracle, and return counts of its events.

    Raises:
        AssertionError: a request got other tokens than alone, or the engine lost something.
    """
    rng = random.Random(seed)
    page = rng.choice(list(bench.loaded))
    loaded = bench.loaded[page]
    one_sequence = -(-MAX_LEN // page)
    budget = rng.choice([SLOTS, 8, 17, 64])
    config = replace(
        loaded.config,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=rng.choice([0, 1, 3, 16]),
        enable_prefix_caching=rng.random() < 0.7,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.random() < 0.8,
        num_scheduler_steps=rng.choice([1, 1, 2, 3, MOST_STEPS]),
        logprobs_mode=rng.choice(["raw_logprobs", *get_args(LogprobsMode)]),
    )
    if not bench.scores_on_host:
        config = replace(config, logprobs_mode="raw_logprobs")
    snapshots = random.Random(seed).choice([0, 1, 3, DEVICE_SNAPSHOTS])

    def scheduler(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
        slots.num_snapshots = min(slots.num_snapshots, snapshots)
        return make_scheduler(config, pool, slots)

    engine = Engine(replace(loaded, config=config), scheduler=scheduler)
    # Fewer pages than the device has, so that the host's pool runs out first.
    blocks = one_sequence + rng.choice([0, one_sequence // 4, 2 * one_sequence, 200])
    pages = 1 + engine.slots.num_parts * min(blocks, DEVICE_PAGES - 1)
    engine.pool.__init__(pages, page, engine.slots.kinds)
    engine.slots.block_pages = engine.pool.block_pages
    if engine.scheduler.states is not None:
        engine.pool.snapshots = engine.scheduler.states.snapshots
        engine.scheduler.states.interval, engine.scheduler.states.least = 8, 1
    asks = adversarial_workload(
        rng,
        count=rng.randrange(4, 11),
        vocab=VOCAB,
        page=page,
        longest_prompt=LONGEST_PROMPT,
        longest_output=LONGEST_OUTPUT,
    )
    if not bench.scores_on_host:
        asks = list(map(scored_on_device, asks))
    got = drive(engine, asks)
    stats = engine.stats()
    assert stats.pages_in_use == 0 and stats.num_compiles == 0, stats
    engine.scheduler.check()
    compare(bench, asks, got, seed, config.logprobs_mode)
    return snapshot_counts(engine, snapshots) + Counter(
        requests=len(asks),
        tokens=stats.generation_tokens,
        preemptions=stats.num_preemptions,
        prefix_hits=stats.prefix_hits,
        aborted=sum(ask.abort_at is not None for ask in asks),
        guided=sum(ask.sampling.structured_outputs is not None for ask in asks),
        complete=sum(
            one.finish_reason == "stop"
            for ask, completions in zip(asks, got, strict=True)
            for one in completions
            if ask.sampling.structured_outputs is not None
        ),
        stopped_by_text=sum(isinstance(one.stop_reason, str) for each in got for one in each),
        steps=stats.num_steps,
    )


def snapshot_counts(engine: Engine, budget: int) -> Counter[str]:
    """Count a schedule's use of snapshots. The result is empty for a model without states."""
    if not engine.slots.keeps_states:
        return Counter()
    counts = Counter({f"with {budget} snapshots": 1})
    if engine.scheduler.states is not None:
        pool = engine.scheduler.states.snapshots
        counts.update(saved=pool.num_saved, restored=pool.num_restored, evicted=pool.num_evicted)
    return counts


def run_search(bench: Bench, seed: int) -> int:
    """Run a random beam search beside a workload, check it by definition, and return its beams.

    Raises:
        AssertionError: it found other sequences, or the engine lost something.
    """
    assert bench.oracle is not None
    rng = random.Random(seed)
    page = rng.choice(list(bench.loaded))
    loaded = bench.loaded[page]
    config = replace(loaded.config, enable_prefix_caching=rng.random() < 0.8)
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, LONGEST_PROMPT))]
    params = BeamSearchParams(
        beam_width=rng.choice([1, 2, 3, 7]),
        max_tokens=rng.randrange(1, 7),
        ignore_eos=rng.random() < 0.3,
        length_penalty=rng.choice([1.0, 1.0, 0.0, -1.5, 3.0]),
        allowed_token_ids=rng.choice([None, None, rng.sample(range(VOCAB), 5)]),
    )
    asks = adversarial_workload(
        rng, count=3, vocab=VOCAB, page=page, longest_prompt=20, longest_output=9
    )
    # The runner serves later schedules too.
    with (
        patch.object(loaded.runner, "close"),
        _ResettingLLM(replace(loaded, config=config), rng) as llm,
    ):
        pages = min(2 + 2 * -(-MAX_LEN // page), DEVICE_PAGES)
        llm._thread.engine.pool.__init__(pages, page)
        for ask in asks:
            beside = {"prompt_token_ids": ask.prompt, "cache_salt": ask.salt}
            with suppress(InvalidRequest):
                llm.enqueue(beside, ask.sampling, priority=ask.priority)
        [found] = llm.beam_search({"prompt_token_ids": prompt}, params)
        llm.wait_for_completion(use_tqdm=False)
        llm.check()
        assert llm.stats().pages_in_use == 0 and llm.stats().num_compiles == 0
    got = found.sequences
    want = found_beams(bench.oracle, prompt, params, () if params.ignore_eos else (END,))
    where = f"search {seed}: {params}\n got {got}\nwant {want}"
    assert [beam.tokens for beam in got] == [prompt + tokens for tokens, _ in want], where
    sums = [total for _, total in want]
    assert np.allclose([beam.cum_logprob for beam in got], sums, rtol=0, atol=1e-9), where
    return len(got)


class _ResettingLLM(LLM):
    """An LLM that forgets cached prefixes before some of its calls."""

    def __init__(self, loaded: Loaded, rng: random.Random) -> None:
        super().__init__(loaded)
        self._rng = rng

    def generate(self, *arguments: Any, **named: Any) -> list[RequestOutput]:
        if self._rng.random() < 0.3:
            self.reset_prefix_cache(self._rng.random() < 0.5)
        return super().generate(*arguments, **named)


def found_beams(
    oracle: Oracle, prompt: list[int], params: BeamSearchParams, ends: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """Return the tokens and summed log-probabilities of a beam search, by its definition."""
    going: list[tuple[list[int], float]] = [([], 0.0)]
    complete: list[tuple[list[int], float]] = []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in going:
            row = oracle.logits(tuple(prompt + tokens))
            row = row - row.max() - np.log(np.exp(row - row.max()).sum())
            allowed = params.allowed_token_ids
            for token in np.argsort(-row, kind="stable").tolist()[
                : None if allowed is not None else 2 * params.beam_width
            ]:
                if allowed is None or token in allowed:
                    beam = ([*tokens, token], total + row[token])
                    (complete if token in ends else longer).append(beam)
        going = sorted(longer, key=lambda beam: -beam[1])[: params.beam_width]
    ranked = sorted(
        [*complete, *going], key=lambda beam: -(beam[1] / len(beam[0]) ** params.length_penalty)
    )
    return ranked[: params.beam_width]


def drive(engine: Engine, asks: list[Ask]) -> list[list[Got]]:
    """Serve the workload to its end, and return the outputs for each request and completion."""
    got = [[Got() for _ in range(ask.sampling.n)] for ask in asks]

    def sink(delta: Delta) -> None:
        one = got[int(delta.request_id)][delta.index]
        assert one.finish_reason is None, "a completion ended twice"
        one.token_ids += delta.token_ids
        one.text += delta.text
        one.finish_reason, one.stop_reason = delta.finish_reason, delta.stop_reason
        one.logprobs += scores_of(delta.logprobs)
        one.prompt_logprobs += scores_of(delta.prompt_logprobs)
        one.times_prompt += delta.prompt_logprobs is not None

    # After the last request has come or is aborted, an engine without work stays idle.
    last = max((step for ask in asks for step in (ask.at_step, ask.abort_at or 0)), default=0)
    for step in range(MAX_STEPS):
        for number, ask in enumerate(asks):
            if ask.at_step == step:
                _start(engine, number, ask, sink, got[number])
            if ask.abort_at == step:
                engine.abort(str(number))
        if step > last and not engine.has_work:
            assert engine.stats().num_failed_steps == 0
            return got
        engine.step()
    raise AssertionError(f"not done after {MAX_STEPS} steps")


def _start(engine: Engine, number: int, ask: Ask, sink: Sink, got: list[Got]) -> None:
    try:
        request = engine.requests.make(
            ask.prompt,
            ask.sampling,
            request_id=str(number),
            number=number,
            priority=ask.priority,
            cache_salt=ask.salt,
        )
    except InvalidRequest as error:
        if "leave no token to draw" not in str(error):
            raise
        for one in got:
            one.finish_reason = "error"
        return
    engine.add(request, sink)


def scores_of(scores: TokenLogprobs | None) -> list[Score]:
    """Return one entry for each token."""
    columns = () if scores is None else (*scores[:4], scores.ranks())
    return [Score(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def same_scores(got: list[Score], want: list[Score], to_the_bit: bool = False) -> bool:
    """Return whether scores are equal, to the bit or up to the rounding of float64."""
    if to_the_bit:
        return got == want
    return len(got) == len(want) and all(
        (one.rank, one.top_ids, one.top_ranks) == (other.rank, other.top_ids, other.top_ranks)
        and np.allclose(one.logprob, other.logprob, rtol=0, atol=1e-9)
        and np.allclose(one.top_logprobs, other.top_logprobs, rtol=0, atol=1e-9)
        for one, other in zip(got, want, strict=True)
    )


def compare(
    bench: Bench, asks: list[Ask], got: list[list[Got]], seed: int, mode: LogprobsMode
) -> None:
    """Check that completions equal the oracle's, and that an aborted one is a beginning of it."""
    same = partial(same_scores, to_the_bit=bench.oracle is None)
    for number, (ask, completions) in enumerate(zip(asks, got, strict=True)):
        for index, one in enumerate(completions):
            want = bench.answer(ask, index, mode)
            where = f"schedule {seed}, request {number}, completion {index}: {ask}"
            if one.finish_reason == "abort":
                assert one.token_ids == want.token_ids[: len(one.token_ids)], where
                assert same(one.logprobs, want.logprobs[: len(one.logprobs)]), where
                assert want.text.startswith(one.text), where
            else:
                assert one.token_ids == want.token_ids, f"{where}\n got {one}\nwant {want}"
                assert (one.finish_reason, one.stop_reason) == (
                    want.finish_reason,
                    want.stop_reason,
                ), f"{where}\n got {one}\nwant {want}"
                # A possible beginning of a stop string is withheld when an error ends the text.
                is_error = one.finish_reason == "error"
                shown = want.text[: len(one.text)] if is_error else want.text
                assert one.text == shown, f"{where}\n got {one}\nwant {want}"
                assert same(one.logprobs, want.logprobs), f"{where}\n got {one}\nwant {want}"
            # The prompt's come once, with the first token of the first completion.
            asked = index == 0 and ask.sampling.prompt_logprobs is not None
            assert one.times_prompt == (asked and bool(one.token_ids)), where
            if one.times_prompt:
                assert same(one.prompt_logprobs, want.prompt_logprobs), where
            if ask.sampling.logprobs is not None or ask.sampling.logprob_token_ids:
                assert len(one.logprobs) == len(one.token_ids), where


def main(words: Sequence[str] | None = None) -> int:
    """Run schedules with the options `words`, or with the process's own for None."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--experts", action="store_true", help="of a mixture of experts")
    model.add_argument("--case", choices=(*CASES,), metavar="CASE", help="of tests.models.cases")
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default="auto")
    types = ("float64", "float32", "bfloat16")
    parser.add_argument("--dtype", choices=types, default="float64")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-expert-parallel", action="store_true")
    parser.add_argument("--decode-context-parallel-size", type=int, default=1)
    parser.add_argument("--page-sizes", type=int, nargs="+", help="one engine for each")
    arguments = parser.parse_args(words)
    if arguments.dtype == "float64" and arguments.case and not arguments.case.startswith(ORACLES):
        parser.error(
            f"in float64 a --case begins with {', '.join(ORACLES)}, which the oracle computes; "
            "others: --dtype float32 or bfloat16"
        )
    is_exact = arguments.dtype == "float64"
    split = Split(
        arguments.tensor_parallel_size,
        arguments.enable_expert_parallel,
        context=arguments.decode_context_parallel_size,
    )
    if split.devices > 1:
        jax.config.update("jax_num_cpu_devices", split.devices)
    jax.config.update("jax_enable_x64", is_exact)
    if is_exact:  # users have no float64: the engine's logic is compared, not XLA's code
        compile_quickly()
    fields = EXPERTS if arguments.experts else TINY
    if arguments.case:
        fields = fields_of_case(arguments.case)
    elif arguments.dtype != "float64":
        fields = with_sizes(fields, WHOLE_VECTORS)
    if split.devices > fields.get("num_attention_heads", split.devices):
        fields = with_sizes(fields, {"num_attention_heads": split.devices})
    if split.context > 1:
        fields = with_sizes(fields, {"num_key_value_heads": split.devices // split.context})
    is_special = arguments.experts or arguments.case or arguments.kv_cache_dtype != "auto"
    is_special = is_special or split.devices > 1
    page_sizes = tuple(arguments.page_sizes or ((4,) if is_special else (1, 4, 16)))
    bench = Bench(fields, page_sizes, arguments.kv_cache_dtype, arguments.dtype, split)
    totals: Counter[str] = Counter()
    for seed in range(arguments.seed, arguments.seed + arguments.schedules):
        totals += run_schedule(bench, seed)
    searches = arguments.schedules // 20 if bench.oracle and not is_special else 0
    for seed in range(arguments.seed, arguments.seed + searches):
        totals["beams"] += run_search(bench, seed)
    other = "the oracle" if bench.oracle else "each request alone"
    print(f"{arguments.schedules} schedules equal {other}: {dict(totals)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
