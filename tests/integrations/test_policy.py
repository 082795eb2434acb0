"""An engine as the policy of a trainer: rollouts, their log-probabilities, new weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM, SamplingParams
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.execution.typed_jax import CompileCounter
from jaxserve.integrations import trees
from jaxserve.integrations.policy import ServedPolicy
from jaxserve.models import parse_model_config
from tests.integrations.families import arrays_of, fields_of

FAMILY = "qwen3"
FIELDS, CONFIG = fields_of(FAMILY), parse_model_config(fields_of(FAMILY))
FIRST, SECOND = arrays_of(FAMILY), arrays_of(FAMILY, 1)
SETTINGS: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7]]
PAD = 0


def engine(params: Any) -> LLM:
    return LLM.from_params(
        params,
        FIELDS,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        decode_sizes=(4,),
        token_sizes=(32,),
    )


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with engine(FIRST) as opened:
        yield opened


@pytest.fixture
def policy(llm: LLM) -> ServedPolicy:
    llm.update_weights(FIRST)
    return ServedPolicy(llm)


def greedy(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    bodies: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [
        output.outputs[0].token_ids for output in llm.generate(bodies, sampling, use_tqdm=False)
    ]


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """Return the answers of a fresh engine with the second weights."""
    with engine(SECOND) as fresh:
        return greedy(fresh)


def padded(rows: list[np.ndarray], width: int) -> np.ndarray:
    return np.array([np.pad(row, (0, width - len(row)), constant_values=PAD) for row in rows])


def test_samples_are_padded_at_the_left(policy: ServedPolicy) -> None:
    samples = policy.sample(PROMPTS, SETTINGS, 3, 8, PAD)
    assert samples.prompts.tolist() == [[PAD] * (8 - len(row)) + row for row in PROMPTS]
    assert [len(tokens) for tokens in samples.tokens] == [9] * 4
    assert samples.texts is None
    wide = policy.sample(PROMPTS, SETTINGS, None, 4, PAD)  # the longest prompt has 5 tokens
    assert wide.prompts.shape == (4, 8)


def test_a_seed_gives_the_same_samples_and_equal_prompts_differ(policy: ServedPolicy) -> None:
    for seed in (3, jax.random.PRNGKey(3), jax.random.key(3)):
        first, second = (policy.sample(PROMPTS, SETTINGS, seed, 8, PAD) for _ in range(2))
        rows = [tokens.tolist() for tokens in first.tokens]
        assert rows == [tokens.tolist() for tokens in second.tokens]
        assert len({tuple(rows[row]) for row in (0, 1, 3)}) == 3


def test_scores_have_the_bits_of_the_rollout(policy: ServedPolicy) -> None:
    samples = policy.sample(PROMPTS * 5, {**SETTINGS, "stop_token_ids": [3, 17, 40]}, 1, 8, PAD)
    completions = padded(samples.tokens, 9)
    mask = np.arange(9) < np.array([len(tokens) for tokens in samples.tokens])[:, None]
    for marked in (None, mask):
        found = np.asarray(
            policy.completion_logprobs(samples.prompts, completions, marked, PAD, False, None)
        )
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, padded(samples.logprobs, 9))
    # A stop token that is the padding has a value, if the mask or the argument says so.
    shorter = np.where(np.arange(9) < 4, completions, PAD)
    counts = [
        np.count_nonzero(
            policy.completion_logprobs(samples.prompts, shorter, marked, PAD, ends, None), axis=1
        ).max()
        for marked, ends in ((None, False), (None, True), (np.arange(9) < [[6]] * 20, False))
    ]
    assert counts == [4, 5, 6]
    scaled = policy.completion_logprobs(
        samples.prompts, completions, mask, PAD, False, SamplingParams(temperature=2.0)
    )
    assert not np.array_equal(scaled, padded(samples.logprobs, 9))


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[Any, Any] = {}
    for path, array in values.items():
        *places, last = path.split(".")
        node = tree
        for place in places:
            node = node.setdefault(int(place) if place.isdecimal() else place, {})
        node[last] = array if isinstance(array, nnx.Variable) else nnx.Param(jnp.asarray(array))
    return tree


@pytest.mark.parametrize("form", ["names", "decoder", "tunix", "nested", "state", "parts"])
def test_new_weights_give_the_answers_of_a_fresh_engine(
    policy: ServedPolicy, answers: list[list[int]], form: str
) -> None:
    assert greedy(policy.llm) != answers
    tunix = trees.tunix_from_names(SECOND, CONFIG)
    halves = [{p: a for p, a in tunix.items() if ("attn" in p) == half} for half in (True, False)]
    updates: dict[str, list[Any]] = {
        "names": [SECOND],
        "decoder": [trees.decoder_from_names(SECOND, CONFIG, jnp.float32)],
        "tunix": [tunix],
        "nested": [nested(tunix)],
        "state": [nnx.State(nested(tunix))],
        "parts": halves,
    }
    # As Tunix calls it on a CPU.
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        for params in updates[form]:
            policy.update(params, (nnx.Param,))
    assert greedy(policy.llm) == answers


def test_lora_parameters_are_merged_into_the_first_weights(llm: LLM) -> None:
    """The base is that of the first update, in the actor or in the engine."""
    llm.update_weights(FIRST)
    tunix = trees.tunix_from_names(FIRST, CONFIG)
    others = trees.tunix_from_names(SECOND, CONFIG)
    tree, generator = trees.tunix_tree(CONFIG), np.random.default_rng(5)
    path = "layers.1.attn.q_proj.w"

    def lora() -> dict[str, Any]:
        a, b = generator.standard_normal((32, 2)), generator.standard_normal((2, 4, 16))
        return {
            path + trees.LORA_A: nnx.LoRAParam(jnp.asarray(a, jnp.float32)),
            path + trees.LORA_B: nnx.LoRAParam(jnp.asarray(b, jnp.float32)),
        }

    policy, updates = ServedPolicy(llm, lora_alpha=4.0), [lora(), lora()]
    for update in updates:
        # The types leave out the other parameters, which have other values here.
        policy.update(nnx.State(nested({**others, **update})), (nnx.LoRAParam,))
    merged = trees.with_lora(trees.flat(nested(updates[1])), tunix, tree, 4.0)
    found = llm.params
    with engine({**FIRST, **tree.to_names(merged, is_part=True)}) as fresh:
        assert greedy(fresh) == greedy(llm)
        assert all(map(np.array_equal, jax.tree.leaves(fresh.params), jax.tree.leaves(found)))
    with pytest.raises(InvalidRequest, match="lora_alpha"):
        ServedPolicy(llm).update(nested(updates[0]))


def test_a_refused_update_changes_nothing(policy: ServedPolicy) -> None:
    before, version = greedy(policy.llm), policy.llm.weights_version
    tunix = trees.tunix_from_names(SECOND, CONFIG)
    name = "layers.1.mlp.up_proj.kernel"
    infinite = {**tunix, name: jnp.full_like(tunix[name], jnp.inf)}
    for params, error in (
        (infinite, InvalidRequest),
        ({**tunix, name: tunix[name].T}, CheckpointError),
        ({**tunix, "layers.1.x": tunix[name]}, CheckpointError),
        ({"layers.0.x_lora_a": tunix[name]}, InvalidRequest),
    ):
        with pytest.raises(error):
            policy.update(params)
    policy.update({"final_norm.w": FIRST["model.norm.weight"]})  # no staged tensor is applied
    assert greedy(policy.llm) == before
    assert policy.update({}) == policy.llm.weights_version == str(int(version) + 1)


def test_tunix_is_required_by_its_module_alone() -> None:
    code = (
        "import sys; sys.modules['tunix'] = None\n"
        "import jaxserve.integrations.policy, jaxserve.integrations.trees\n"
        "import jaxserve.integrations.tunix"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jaxserve.integrations.tunix needs Google's Tunix; install")
    assert "pip install google-tunix==0.1.7" in last


def test_an_engine_closes_after_another_library_removed_its_listener() -> None:
    """Tunix removes all listeners of JAX at the end of a training."""
    counter = CompileCounter()
    jax.monitoring.unregister_event_duration_listener(counter._listener)
    counter.close()
    counter.close()
