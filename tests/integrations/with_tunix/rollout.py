# pyright: reportMissingImports=false
"""JaxserveRollout with the real Tunix: texts, padding, scores, and new weights of its modules."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from jaxserve import LLM, SamplingParams
from jaxserve.errors import InvalidRequest
from jaxserve.integrations import trees
from jaxserve.integrations.tunix import JaxserveRollout
from jaxserve.models import read_model_config
from tests.integrations.families import FAMILIES, arrays_of
from tests.integrations.with_tunix.models import DEMO, module_of, scores_of, tokenizer, write

PROMPTS = ["sort 3 1 2", "sort 3 1 2", "add 12 7", "hello there"]
SMALL: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64}
CONFIG = partial(RolloutConfig, max_tokens_to_generate=12, max_prompt_length=32)
SAMPLED = CONFIG(temperature=1.0, return_logprobs=True, seed=jax.random.PRNGKey(1))
GREEDY = CONFIG(temperature=0.0, return_logprobs=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, **SMALL) as engine:
        yield engine


def padded(rows: list[np.ndarray], pad_id: int) -> np.ndarray:
    return np.array([np.pad(row, (0, 12 - len(row)), constant_values=pad_id) for row in rows])


def check_scores(rollout: JaxserveRollout, output: Any) -> np.ndarray:
    """Check that scores of completions have the bits of the rollout, and return them."""
    completions = jnp.asarray(padded(output.tokens, rollout.pad_id()))
    prompts = jnp.asarray(output.left_padded_prompt_tokens)
    mask = np.arange(12) < np.array([len(row) for row in output.tokens])[:, None]
    expected = padded(output.logprobs, 0)
    for arguments in ((prompts, completions), (prompts, completions, jnp.asarray(mask))):
        scores = rollout.get_per_token_logps(*arguments)
        assert isinstance(scores, jax.Array) and scores.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(scores), expected)
    return expected


def test_completions_are_those_of_the_engine(llm: LLM) -> None:
    """Tunix starts each prompt with BOS, the engine's own tokenizer does as its files say."""
    encoder, sampling = TokenizerAdapter(tokenizer()), SamplingParams(temperature=0, max_tokens=12)
    with_bos: Any = [{"prompt_token_ids": [1, *encoder.encode(text)]} for text in PROMPTS]
    for rollout, prompts in (
        (JaxserveRollout(tokenizer=encoder, llm=llm), with_bos),
        (JaxserveRollout(tokenizer=tokenizer(), llm=llm), with_bos),
        (JaxserveRollout(llm=llm), PROMPTS),
    ):
        assert isinstance(rollout, BaseRollout) and rollout.model() is None
        assert (rollout.pad_id(), rollout.eos_id()) == (0, 3)
        output = rollout.generate(PROMPTS, GREEDY)
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        assert output.text == [answer.outputs[0].text for answer in answers]
        assert [row.tolist() for row in output.tokens] == [a.outputs[0].token_ids for a in answers]
        for row, answer in zip(output.left_padded_prompt_tokens, answers, strict=True):
            ids = answer.prompt_token_ids
            assert row.tolist() == [0] * (32 - len(ids)) + ids
        check_scores(rollout, output)


def test_sampled_completions(llm: LLM) -> None:
    rollout = JaxserveRollout(tokenizer=tokenizer(), llm=llm)
    first, second = (rollout.generate(PROMPTS, SAMPLED) for _ in range(2))
    assert first.text == second.text and first.text[0] != first.text[1]
    check_scores(rollout, first)
    assert rollout.generate(PROMPTS, CONFIG(temperature=1.0)).logprobs is None
    stop = int(first.tokens[2][3])
    config = CONFIG(
        temperature=1.0, seed=jax.random.PRNGKey(1), eos_tokens=[stop], return_logprobs=True
    )
    ended = rollout.generate(PROMPTS, config)
    assert (
        ended.tokens[2].tolist()
        == first.tokens[2][: first.tokens[2].tolist().index(stop) + 1].tolist()
    )
    check_scores(rollout, ended)
    narrow = CONFIG(temperature=1.0, top_k=1, top_p=0.9)
    assert rollout.generate(PROMPTS, narrow).text == rollout.generate(PROMPTS, GREEDY).text
    banned = rollout.generate(PROMPTS, GREEDY, bad_words=["1"])
    assert not any("1" in text for text in banned.text)


def test_scores_at_a_temperature(tmp_path: Path) -> None:
    """Tunix's loss divides logits by the temperature: "processed_logprobs" does the same."""
    folder = write("qwen3", tmp_path)
    module, config = module_of(folder), CONFIG(temperature=0.7, return_logprobs=True)
    with LLM(folder, logprobs_mode="processed_logprobs", **SMALL) as engine:
        rollout = JaxserveRollout(module, tokenizer(), llm=engine)
        output = rollout.generate(PROMPTS, config)
        completions = padded(output.tokens, 0)
        scores = rollout.get_per_token_logps(output.left_padded_prompt_tokens, completions)
    np.testing.assert_allclose(scores, padded(output.logprobs, 0), atol=1e-5)
    graph, state = nnx.split(module)
    from tunix.rl.common import compute_per_token_logps

    theirs = compute_per_token_logps(
        graph, state, jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions), 0, 3,
        temperature=0.7,
    )  # fmt: skip
    np.testing.assert_allclose(np.where(completions != 0, theirs, 0), scores, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_agree_with_tunix_loaders(tmp_path: Path, family: str) -> None:
    """The state that Tunix loads is ours, and ours is the one that Tunix loads."""
    folder = write(family, tmp_path)
    config, arrays = read_model_config(folder), arrays_of(family)
    state = nnx.state(module_of(folder))
    names = jax.jit(lambda state: trees.names_from_tunix(state, config))(state)
    assert names.keys() == arrays.keys()
    assert all(np.array_equal(names[name], arrays[name]) for name in arrays)
    loaded, converted = trees.flat(state), trees.tunix_from_names(arrays, config)
    assert loaded.keys() == converted.keys()
    assert all(np.array_equal(loaded[path], converted[path]) for path in loaded)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_modules_of_tunix_as_new_weights(tmp_path: Path, family: str) -> None:
    """The answers become those of a fresh engine, and the scores those of Tunix's module."""
    first, second = write(family, tmp_path / "first"), write(family, tmp_path / "second", 1)
    module = module_of(second)
    with LLM(second, **SMALL) as engine:
        expected = JaxserveRollout(tokenizer=tokenizer(), llm=engine).generate(PROMPTS, GREEDY)
    with LLM(first, **SMALL) as engine:
        rollout = JaxserveRollout(tokenizer=tokenizer(), llm=engine)
        before = rollout.generate(PROMPTS, GREEDY)
        rollout.update_params(nnx.state(module, nnx.Param), (nnx.Param,))
        compiled = engine.stats().num_compiles
        output = rollout.generate(PROMPTS, GREEDY)
        assert engine.stats().num_compiles == compiled
        ours = check_scores(rollout, output)
        theirs = scores_of(
            module, output.left_padded_prompt_tokens, padded(output.tokens, 0), rollout.pad_id()
        )
        rollout.update_params(arrays_of(family))  # by the names of Hugging Face
        assert rollout.generate(PROMPTS, GREEDY).text == before.text
        assert (
            JaxserveRollout(module, tokenizer(), llm=engine).generate(PROMPTS, GREEDY).text
            == expected.text
        )
    assert output.text == expected.text != before.text
    assert all(map(np.array_equal, output.tokens, expected.tokens))
    assert all(map(np.array_equal, output.logprobs, expected.logprobs))
    real = padded(output.tokens, 0) != 0
    np.testing.assert_allclose(np.where(real, theirs, 0), np.where(real, ours, 0), atol=2e-4)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_module_on_a_mesh(tmp_path: Path, kind: str) -> None:
    folder = write("llama3", tmp_path / "first")
    other = write("llama3", tmp_path / "second", 1)
    axes = (getattr(jax.sharding.AxisType, kind),) * 2
    mesh = jax.make_mesh((2, 1), ("fsdp", "tp"), axis_types=axes)
    state = nnx.state(module_of(other, mesh))
    assert len(jax.tree.leaves(state)[0].sharding.device_set) == 2
    with LLM(other, **SMALL) as engine:
        expected = JaxserveRollout(tokenizer=tokenizer(), llm=engine).generate(PROMPTS, GREEDY)
    with LLM(folder, **SMALL) as engine:
        rollout = JaxserveRollout(tokenizer=tokenizer(), mesh=mesh, llm=engine)
        rollout.update_params(state)
        assert rollout.generate(PROMPTS, GREEDY).text == expected.text


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_lora_of_qwix_is_merged(tmp_path: Path, family: str) -> None:
    """Tunix's module with LoRA, whose own scores judge the merged weights."""
    folder = write(family, tmp_path)
    module = module_of(folder)
    provider = qwix.LoraProvider(module_path=".*attn.*|.*mlp.*", rank=4, alpha=8.0)
    adapted: Any = qwix.apply_lora_to_model(
        module, provider, rngs=nnx.Rngs(0), **module.get_model_input()
    )
    lora = nnx.state(adapted, nnx.LoRAParam)
    generator = np.random.default_rng(0)
    changed = jax.tree.map(
        lambda leaf: jnp.asarray(0.1 * generator.standard_normal(leaf.shape), leaf.dtype), lora
    )
    nnx.update(adapted, changed)
    assert any(
        path.endswith("o_proj.w_lora_a") or "vec_einsum" in path for path in trees.flat(lora)
    )
    with LLM(folder, **SMALL) as engine:
        rollout = JaxserveRollout(adapted, tokenizer(), llm=engine, lora_alpha=8.0)
        at_once = rollout.generate(PROMPTS, GREEDY)
        plain = JaxserveRollout(tokenizer=tokenizer(), llm=engine)
        plain.update_params(arrays_of(family))
        before = plain.generate(PROMPTS, GREEDY)
        rollout.update_params(nnx.state(adapted, (nnx.LoRAParam,)), (nnx.LoRAParam,))
        output = rollout.generate(PROMPTS, GREEDY)
        ours = check_scores(rollout, output)
        with pytest.raises(InvalidRequest, match="lora_alpha"):
            plain.update_params(nnx.state(adapted, nnx.LoRAParam), (nnx.LoRAParam,))
    assert output.text == at_once.text != before.text
    completions = padded(output.tokens, 0)
    theirs = scores_of(adapted, output.left_padded_prompt_tokens, completions, 0)
    np.testing.assert_allclose(np.where(completions != 0, theirs, 0), ours, atol=2e-4)


def test_an_engine_is_required() -> None:
    with pytest.raises(InvalidRequest, match="llm is NoneType; allowed: an LLM"):
        JaxserveRollout()
