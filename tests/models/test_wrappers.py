"""Of a model of images or sound the text is served, as its family computes it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxserve import LLM, SamplingParams
from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Decoder, parse_model_config
from jaxserve.models.config.model_config import ModelConfig
from jaxserve.models.config.wrappers import DEFAULTS
from jaxserve.settings.config import EngineConfig
from jaxserve.start.conversion import convert
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.source import Source
from tests.models.tiny_models import reference_logits, relative_error
from tests.models.tiny_wrappers import CASES, LEFT_OUT, text_alone, tiny_wrapper
from tests.support.paged_runner import PagedRunner

TOKENS = np.random.default_rng(3).integers(3, 96, 40).tolist()
MAIN = [
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
]
QWEN = "Qwen3VLForConditionalGeneration"


def found(folder: Path, **settings: Any) -> Source:
    return find_source(EngineConfig(model=folder, **settings))


def read(source: Source) -> Decoder:
    return source.load(source.model_config, np.dtype(np.float32))


def leaves(model: Decoder) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(nnx.state(model))]


def rewrite(
    folder: Path, change: Any = lambda raw: raw, rename: Any = lambda name: name
) -> dict[str, np.ndarray]:
    """Change a checkpoint's config.json and its tensors' names; an empty name drops a tensor."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    tensors = load_file(folder / "model.safetensors")
    tensors = {rename(name): tensor for name, tensor in tensors.items() if rename(name)}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "") for name in CASES), ("Mistral3ForConditionalGeneration", "mistral4")],
)
def test_the_text_of_a_wrapper_is_that_of_its_family(name, kind, tmp_path):
    """Transformers' own logits agree for a text, and the weights read here are equal."""
    wrapper = tiny_wrapper(name, kind=kind)
    plain = text_alone(name, wrapper, kind)
    want = reference_logits(plain, TOKENS)
    got = reference_logits(wrapper, TOKENS) * LEFT_OUT.get(name, 1.0)
    assert relative_error(got, want) < 1e-6
    wrapper.save_pretrained(tmp_path / "wrapper")
    plain.save_pretrained(tmp_path / "plain")
    if "Kimi" in name:  # Transformers' renaming of the tower on saving also renames the text
        layers = ("language_model.model.blocks", "language_model.model.layers")
        rewrite(tmp_path / "wrapper", rename=lambda tensor: tensor.replace(*layers))
    ours, alone = found(tmp_path / "wrapper"), found(tmp_path / "plain")
    config = ours.model_config
    assert config.wrapper == name and alone.model_config.wrapper is None
    plain_config = replace(alone.model_config, dtype=config.dtype)
    assert _unstacked(replace(config, wrapper=None)) == _unstacked(plain_config)
    assert leaves(read(ours)) == leaves(read(alone))


def _unstacked(config: ModelConfig) -> ModelConfig:
    experts = config.experts and replace(config.experts, stacked=False)
    return replace(config, experts=experts)


@pytest.fixture(scope="module", params=MAIN)
def main(request, tmp_path_factory) -> tuple[Path, Any]:
    wrapper = tiny_wrapper(request.param, tie_word_embeddings="Gemma" in request.param)
    folder = tmp_path_factory.mktemp("wrapper") / "model"
    wrapper.save_pretrained(folder)
    return folder, wrapper


def test_tokens_are_those_of_the_wrapper_in_transformers(main):
    """Through chunks and pages."""
    folder, wrapper = main
    runner = PagedRunner(read(found(folder)), 1, 4)
    logits = runner.greedy([TOKENS[:23]], 24, chunks=2)
    want = reference_logits(wrapper, runner.tokens[0])
    assert runner.tokens[0][23:] == want[22:-1].argmax(axis=-1).tolist()
    assert relative_error(logits[0], want) < 1e-4


def test_any_schedule_gives_the_tokens_of_the_wrapper(tmp_path):
    """Checks the wrapper whose weights have a storage form of their own."""
    wrapper, folder = tiny_wrapper("Qwen3VLMoeForConditionalGeneration"), tmp_path
    wrapper.save_pretrained(folder)
    prompts = [TOKENS[:30], TOKENS[:21], [*TOKENS[:30], *TOKENS[35:]], TOKENS[31:]]
    greedy = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    settings: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 4}
    sizes: dict[str, Any] = {"decode_sizes": (3,), "token_sizes": (16,)}
    with LLM(
        folder,
        skip_tokenizer_init=True,
        num_gpu_blocks_override=120,
        compilation_cache_dir=None,
        check_invariants=True,
        **settings,
        **sizes,
    ) as llm:
        first = llm.generate(prompts[:1], greedy, use_tqdm=False)
        outputs = first + llm.generate(prompts[1:], greedy, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0].token_ids
        want = reference_logits(wrapper, [*prompt, *answer])[len(prompt) - 1 : -1]
        assert answer == want.argmax(axis=-1).tolist()


OLDER = [
    ("model.language_model.", "language_model.model.", "language_model.lm_head."),
    ("model.language_model.", "model.", "lm_head."),
    ("model.language_model.", "thinker.model.language_model.", "thinker.lm_head."),
    ("model.language_model.", "model.text_model.", "lm_head."),
]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> tuple[Path, list[bytes]]:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    tiny_wrapper(QWEN).save_pretrained(folder)
    return folder, leaves(read(found(folder)))


def copied(qwen: tuple[Path, list[bytes]], to: Path) -> Path:
    for path in qwen[0].iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize(("newer", "older", "head"), OLDER)
def test_tensors_have_the_names_of_several_versions(qwen, tmp_path, caplog, newer, older, head):
    folder = copied(qwen, tmp_path)
    rewrite(folder, rename=lambda name: name.replace(newer, older).replace("lm_head.", head))
    assert leaves(read(found(folder))) == qwen[1]
    [line] = [record.getMessage() for record in caplog.records]
    assert "text alone" in line and "27 of model.visual" in line


def test_a_text_models_tensors_are_checked_as_ever(qwen, tmp_path):
    folder = copied(qwen, tmp_path)
    for rename, named in (
        (lambda name: "" if "layers.1.mlp.up" in name else name, "1 missing: model.layers.1.mlp"),
        (lambda name: name.replace("layers.0.mlp.up", "layers.0.mlp.u"), "1 unexpected"),
        (lambda name: name.replace("embed_tokens", "embed"), "no embedding of text"),
    ):
        rewrite(folder, rename=rename)
        with pytest.raises(CheckpointError, match=named):
            read(found(folder))


def test_configurations_that_nest_more_deeply(qwen, tmp_path):
    """Omni models have a thinker, and OpenGVLab's InternVL calls the text `llm_config`."""
    folder = copied(qwen, tmp_path)

    def nest(raw: dict[str, Any]) -> dict[str, Any]:
        thinker = {"text_config": raw["text_config"], "model_type": "qwen2_5_omni_thinker"}
        return {
            "architectures": ["Qwen2_5OmniForConditionalGeneration"],
            "thinker_config": thinker,
            "talker_config": {"hidden_size": 8},
            "dtype": "float32",
        }

    rewrite(folder, nest, lambda name: f"thinker.{name}")
    assert leaves(read(found(folder))) == qwen[1]
    chat = {"architectures": ["InternVLChatModel"], "vision_config": {}}
    rewrite(
        folder,
        lambda raw: chat | {"llm_config": raw["thinker_config"]["text_config"]},
        lambda name: name.replace("thinker.model.language_model", "language_model.model").replace(
            "thinker.lm_head", "language_model.lm_head"
        ),
    )
    assert leaves(read(found(folder))) == qwen[1]


@pytest.mark.parametrize("said", [True, None])
def test_an_output_projection_is_used_whatever_the_wrapper_says(qwen, tmp_path, said):
    """As in Transformers, whose class ties by default; `jaxserve convert` keeps the result."""
    folder = copied(qwen, tmp_path)
    rewrite(folder, lambda raw: raw | {"tie_word_embeddings": said})
    assert leaves(read(found(folder))) == qwen[1]
    rewrite(folder, rename=lambda name: "" if "lm_head" in name else name)
    assert found(folder).model_config.tie_word_embeddings
    assert len(leaves(read(found(folder)))) == len(qwen[1]) - 1
    to = tmp_path / "converted"
    convert(EngineConfig(model=folder, skip_tokenizer_init=True), to)
    assert leaves(read(found(to))) == leaves(read(found(folder)))


def test_flat_configurations_are_read_as_nested_ones(tmp_path):
    """The published files of Qwen2.5-VL have the text's fields beside the tower's."""
    tiny_wrapper("Qwen2_5_VLForConditionalGeneration").save_pretrained(tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= nested["text_config"] | {"model_type": "qwen2_5_vl"}
    rope = flat.pop("rope_parameters")
    flat |= {"rope_theta": rope["rope_theta"]}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 1, 1]}
    assert parse_model_config(flat) == parse_model_config(nested)
    with pytest.raises(UnsupportedModel, match="unheard_of is 1"):
        parse_model_config(flat | {"unheard_of": 1})


@pytest.mark.parametrize("kind", DEFAULTS)
def test_absent_fields_are_those_of_transformers(kind):
    """A nested configuration was written as its deviations from its class."""
    config = CONFIG_MAPPING[kind]()
    object.__setattr__(config, "allow_global_per_layer_attribute_access", True)  # of Gemma 4
    for name, value in DEFAULTS[kind].items():
        want = getattr(config, name, None)
        if name == "rope_theta":
            want = config.rope_parameters["rope_theta"]
        assert want == value, name


WRAPPED: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama"},
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"text_config": {"model_type": "opt"}},
            r"text_config\.model_type 'opt': .*nearest.*LlamaFor",
        ),
        ({"text_config": {"model_type": 3}}, r"text_config\.model_type 3: allowed.*'llama'"),
        ({"text_config": {"hidden_size": -1}}, r"text_config\.hidden_size is -1"),
        ({"text_config": {"unheard_of": 1}}, r"text_config\.unheard_of is 1"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "architectures is .*PaliGemma"),
        ({"eos_token_id": "x"}, "eos_token_id is"),
        ({"text_config": [1]}, r"text_config is \[1\]; allowed: an object"),
    ],
)
def test_a_bad_wrapper_is_refused(change, named):
    with pytest.raises(UnsupportedModel, match=named):
        parse_model_config(WRAPPED | change)


def test_fields_outside_concern_the_text_where_they_say_so():
    config = parse_model_config(
        WRAPPED
        | {"model_type": "llava", "tie_word_embeddings": True, "torch_dtype": "float16"}
        | {"eos_token_id": [7, 2], "text_config": {"model_type": "llama", "dtype": "bfloat16"}}
    )
    assert config.tie_word_embeddings and config.dtype == "float16"
    assert config.eos_token_ids == (7, 2)
    without = {key: value for key, value in WRAPPED.items() if key != "architectures"}
    assert parse_model_config(without | {"model_type": "llava"}).wrapper
