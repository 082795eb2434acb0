# pyright: reportMissingImports=false
"""JaxserveRollout in Tunix's cluster and learner: GRPO steps, LoRA, and the example of the page."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from tunix.rl import rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from jaxserve import LLM
from jaxserve.integrations import trees
from jaxserve.integrations.tunix import JaxserveRollout
from tests.integrations.families import fields_of
from tests.integrations.tunix import example
from tests.integrations.with_tunix.models import module_of, tokenizer, write

DATA = [
    {"prompts": np.array(["sort 3 1 2", "add 12 7"])},
    {"prompts": np.array(["hello", "sort 9 8"])},
]
ROLES = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT)


def cluster_of(
    actor: Any, reference: Any, llm: LLM, meshes: list[Any], offload: bool = False, **options: Any
) -> Any:
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3),
        eval_every_n_steps=100,
        max_steps=4,
        mini_batch_size=2,
        train_micro_batch_size=2,
    )
    return rl_cluster.RLCluster(
        actor=actor,
        reference=reference,
        tokenizer=tokenizer(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict(zip(ROLES, meshes, strict=True)),
            rollout_engine=functools.partial(JaxserveRollout, llm=llm, **options),
            training_config=training,
            offload_to_cpu=offload,
            rollout_config=RolloutConfig(
                max_tokens_to_generate=12,
                max_prompt_length=32,
                temperature=1.0,
                kv_cache_size=64,
                return_logprobs=True,
            ),
        ),
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(character.isdigit() for character in text)) for text in completions]


def mesh_of(devices: list[Any]) -> Any:
    return jax.sharding.Mesh(np.array(devices).reshape(-1, 1), ("fsdp", "tp"))


@pytest.mark.parametrize("meshes", ["together", "apart", "offloaded"])
def test_steps_of_grpo(tmp_path: Path, meshes: str) -> None:
    """Two iterations a batch, so that Tunix also asks the worker for scores. After the steps, the
    engine has the actor's weights to the bit."""
    folder = write("qwen3", tmp_path)
    first, second = mesh_of(jax.devices()[:1]), mesh_of(jax.devices()[1:2])
    places = [first, first, second if meshes == "apart" else first]
    actor, reference = module_of(folder, first), module_of(folder, first)
    start = jax.tree.leaves(jax.tree.map(np.array, nnx.state(actor)))
    with LLM(folder, max_num_seqs=8, max_model_len=128) as llm:
        cluster = cluster_of(actor, reference, llm, places, meshes == "offloaded")
        at_start = int(llm.weights_version)
        assert at_start >= 1
        config = GRPOConfig(num_generations=4, num_iterations=2, beta=0.04)
        GRPOLearner(cluster, config, reward).train(DATA)
        # Tunix also hands over weights whenever it offloads the actor.
        updates = int(llm.weights_version) - at_start
        assert updates > 2 if meshes == "offloaded" else updates == 2
        trained = cluster.actor_trainer.model
        assert not all(map(np.array_equal, start, jax.tree.leaves(nnx.state(trained))))
        names = trees.names_from_tunix(nnx.state(trained), llm.model_config)
        served = trees.names_from_decoder(llm.params, llm.model_config, jnp.float32)
        assert all(np.array_equal(names[name], served[name]) for name in served)
        output = cluster.generate(["sort 3 1 2"] * 2)
        prompts, tokens = output.left_padded_prompt_tokens, np.zeros((2, 12), np.int32)
        for row, completion in enumerate(output.tokens):
            tokens[row, : len(completion)] = completion
        scores = cluster.get_old_per_token_logps(jnp.asarray(prompts), jnp.asarray(tokens))
        for row, values in enumerate(output.logprobs):
            np.testing.assert_array_equal(scores[row, : len(values)], values)
        theirs = cluster.get_actor_per_token_logps(jnp.asarray(prompts), jnp.asarray(tokens), 0, 3)
        real = tokens != 0
        np.testing.assert_allclose(np.where(real, theirs, 0), np.where(real, scores, 0), atol=2e-4)
        arrays = {name: np.asarray(array) for name, array in names.items()}
    fields = fields_of("qwen3")
    with LLM.from_params(arrays, fields, folder, max_num_seqs=8, max_model_len=128) as fresh:
        rollout = JaxserveRollout(tokenizer=tokenizer(), llm=fresh)
        bodies = output.left_padded_prompt_tokens, tokens
        again = rollout.get_per_token_logps(*bodies)
        np.testing.assert_array_equal(np.asarray(again), np.asarray(scores))


def test_a_step_of_grpo_with_lora(tmp_path: Path) -> None:
    """Only LoRA parameters are trained and handed over."""
    folder = write("qwen3", tmp_path)
    mesh = mesh_of(jax.devices()[:1])
    module = module_of(folder, mesh)
    provider = qwix.LoraProvider(module_path=".*attn.*|.*mlp.*", rank=4, alpha=8.0)
    with mesh:
        actor: Any = qwix.apply_lora_to_model(
            module, provider, rngs=nnx.Rngs(0), **module.get_model_input()
        )
    with LLM(folder, max_num_seqs=8, max_model_len=128) as llm:
        cluster = cluster_of(actor, module_of(folder, mesh), llm, [mesh] * 3, lora_alpha=8.0)
        GRPOLearner(cluster, GRPOConfig(num_generations=4, beta=0.0), reward).train(DATA[:1])
        assert llm.weights_version == "2"
        output = cluster.generate(["sort 3 1 2"])
        tokens = np.zeros((1, 12), np.int32)
        tokens[0, : len(output.tokens[0])] = output.tokens[0]
        prompts = jnp.asarray(output.left_padded_prompt_tokens)
        theirs = cluster.get_actor_per_token_logps(prompts, jnp.asarray(tokens), 0, 3)
    lora = trees.flat(nnx.state(cluster.actor_trainer.model, nnx.LoRAParam))
    assert any(np.any(array) for path, array in lora.items() if path.endswith("_lora_b"))
    count = len(output.tokens[0])
    np.testing.assert_allclose(theirs[0, :count], output.logprobs[0], atol=2e-4)


def test_the_example_of_the_page_runs() -> None:
    names: dict[str, Any] = {}
    exec(compile(example(), "README.md", "exec"), names)
    llm = names["worker"].keywords["llm"]
    assert llm.weights_version == "3"  # the actor's, then one for each step
    llm.close()
