"""An architecture that is not served is refused with one reason and the nearest that is served."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
from gguf.constants import MODEL_ARCH_NAMES
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from jaxserve.errors import UnsupportedModel
from jaxserve.models import parse_model_config
from jaxserve.models.config.unlisted import part_words
from jaxserve.models.config.wrappers import WRAPPERS
from jaxserve.models.refusals import REASONS, head_of, refusal_of, refusals, stem
from jaxserve.models.registry import GGUF_RULES, MODEL_TYPES, NAMES, gguf_refusal

SERVED = {*NAMES, *WRAPPERS}
# Wrappers of Transformers that are not listed, by `model_type`. Their `text_config` is read.
BY_TEXT = {
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "cosmos3_omni": "Cosmos3OmniForConditionalGeneration",
    "deepseek_vl_hybrid": "DeepseekVLHybridForConditionalGeneration",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration",
    "fast_vlm": "FastVlmForConditionalGeneration",
    "fun_asr_nano": "FunAsrNanoForConditionalGeneration",
    "glm46v": "Glm46VForConditionalGeneration",
    "glmga": "Glm46VForConditionalGeneration",
    "granite_speech_plus": "GraniteSpeechPlusForConditionalGeneration",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "lfm3_vl": "Lfm3VlForConditionalGeneration",
    "minicpm_ocr": "MiniCPMOcrForConditionalGeneration",
    "minicpmv4_6": "MiniCPMV4_6ForConditionalGeneration",
    "minicpmv4_7": "MiniCPMV4_7ForConditionalGeneration",
    "moss_transcribe_diarize": "MossTranscribeDiarizeForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
    "nemo_speechlm": "Nemotron3_5TranscribeForConditionalGeneration",
    "nemotron_h_omni": "NemotronH_Omni_Reasoning_V3",
    "omniasr": "OmniASRForConditionalGeneration",
    "perception_lm": "PerceptionLMForConditionalGeneration",
    "qianfan_ocr": "QianfanOCRForConditionalGeneration",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
    "vibevoice_asr": "VibeVoiceAsrForConditionalGeneration",
}
LANGUAGE = (
    "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ",
)  # fmt: skip
NEAREST = r"the nearest family that is served is (\w+)$"


def classes(*mappings: str) -> set[tuple[str, str]]:
    """Return `model_type` and class of the rows of Transformers' tables."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES") for name in mappings]
    return {
        (kind, name)
        for kind, names in chain.from_iterable(table.items() for table in tables)
        for name in ((names,) if isinstance(names, str) else names)
    }


def said(raw: dict[str, Any]) -> str:
    """Return the text of the refusal of a config.json."""
    with pytest.raises(UnsupportedModel) as caught:
        parse_model_config(raw)
    return str(caught.value)


def test_every_language_model_of_transformers_is_served_or_refused_with_a_reason():
    missing = [
        (kind, name)
        for kind, name in sorted(classes(*LANGUAGE))
        if name not in SERVED
        and BY_TEXT.get(kind) != name
        and not (re.search(NEAREST, said({"architectures": [name]})))
    ]
    assert missing == []


def test_a_model_type_alone_is_refused_as_its_class():
    for kind, name in classes("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT"):
        if name not in SERVED and kind not in {*BY_TEXT, *MODEL_TYPES}:
            refusal = refusal_of(kind)
            assert refusal == refusal_of(name) and refusal is not None, (kind, name)
    text = said({"model_type": "gpt2"})
    assert "architectures is missing, and model_type is 'gpt2': " in text
    assert re.search(NEAREST, text)


def test_every_other_class_of_transformers_gives_no_next_token():
    every = [
        name.removeprefix("MODEL_FOR_").removesuffix("_MAPPING_NAMES")
        for name in dir(modeling_auto)
        if re.fullmatch(r"MODEL_FOR_\w+_MAPPING_NAMES", name)
    ]
    table = refusals()
    names = {name for _, name in classes(*every)} - SERVED - {*BY_TEXT.values()}
    assert len(names) > 700
    assert [name for name in names if not (stem(name) in table or head_of(name))] == []


def test_the_table_names_nothing_that_is_served():
    served = {stem(name) for name in (*SERVED, *MODEL_TYPES, *GGUF_RULES)}
    served -= {"chatglm"}  # GGUF files of GLM-4 have this name, and its folders have code
    for name, refusal in refusals().items():
        assert refusal.reason in REASONS and refusal.nearest in SERVED, name
        assert name not in served, f"{name}: served; remove its row"


@pytest.mark.parametrize("kind", BY_TEXT)
def test_the_text_of_an_unlisted_wrapper_of_transformers_is_served(kind):
    config = CONFIG_MAPPING[kind]().to_dict()
    assert config["text_config"]["model_type"] in MODEL_TYPES
    assert part_words(config)
    problem = said({"architectures": [BY_TEXT[kind]], "text_config": {"model_type": "opt"}})
    assert "has text_config.model_type 'opt': its computation is not implemented yet" in problem


def test_every_architecture_of_gguf_files_is_read_or_refused_with_a_reason():
    for name in {*MODEL_ARCH_NAMES.values()} - {*GGUF_RULES, "clip"}:
        text = gguf_refusal(name)
        folder = re.search(r"a Hugging Face folder of (\w+) is served", text)
        nearest = folder or re.search(r"family that is served is (\w+)", text)
        assert nearest and nearest[1] in SERVED, (name, text)
        assert not folder or stem(name) not in GGUF_RULES
    assert gguf_refusal("lama").endswith("the most similar name that is served is llama")
    for name in ("", None, 3, ["llama"]):
        assert gguf_refusal(name) == "allowed: a name such as 'llama'"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["DeepseekV32ForCausalLM"]}, "sparse, .*nearest.*is DeepseekV3ForCausalLM$"),
    ({"architectures": ["GlmMoeDsaForCausalLM"]}, "sparse, .*DeepseekV3ForCausalLM$"),
    ({"architectures": ["BertForMaskedLM"]}, "it has an encoder"),
    ({"architectures": ["T5ForConditionalGeneration"]}, "it has an encoder"),
    ({"architectures": ["WhisperForConditionalGeneration"]}, "images or sound.*Qwen2Audio"),
    ({"architectures": ["ViTForImageClassification"]}, "images or sound"),
    ({"architectures": ["BaichuanForCausalLM"]}, "code in the checkpoint.*LlamaForCausalLM$"),
    ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "attend to later.*GemmaForC"),
    ({"architectures": ["FooForCausalLM", "GPT2LMHeadModel"]}, "not implemented yet"),
    ({"architectures": ["LlamaForMaskedLM"]}, r"encoder.*\"LlamaForCausalLM\"\]\}' serves them"),
    ({"architectures": ["Qwen3VLModel"]}, "base class.*Qwen3VLForConditionalGeneration"),
    ({"architectures": ["DeepseekV3ForCausalLm"]}, "no language model.*is DeepseekV3ForCausalLM$"),
    ({"architectures": ["LLamma3ForCausalLM"]}, "no language model of this name; the most sim"),
    ({"architectures": ["LlamaForCausalLm"]}, "that is served is LlamaForCausalLM$"),
    ({"architectures": ["QxzForCausalLM"]}, r"\['QxzForCausalLM'\]: .* no language model of this"),
    ({"architectures": ["QxzForCausalLM"], "auto_map": {}}, "code in the checkpoint"),
    ({"architectures": ["Qxz"], "model_type": "llama"}, "unknown, and .*'llama' .*--hf-overr"),
    ({"architectures": ["Qxz"], "model_type": "gpt2"}, "not implemented yet.*LlamaForCausalLM$"),
    ({"architectures": ["A" * 10240]}, r"is \['A{70,80}\.\.\.: .*no language model of this name$"),
    ({"architectures": ["ForA" * 2560 + "-"]}, "no language model of this name"),
    ({"model_type": "a" * 10240}, "no language model of this name"),
    ({"architectures": [""]}, "no family is named; allowed: a name such as"),
    ({}, "architectures is missing, and model_type is null: no family is named"),
    ({"model_type": ["llama"]}, "no family is named"),
    ({"architectures": "LlamaForCausalLM"}, "allowed: a list of names"),
    ({"architectures": ["Qxz"], "text_config": [1]}, r"text_config is \[1\]; allowed: an object"),
    ({"architectures": ["Qxz"], "text_config": "llama"}, "text_config is 'llama'; allowed: an obj"),
    ({"architectures": ["Qxz"], "text_config": {}}, "model_type '': allowed: .*'llama'"),
    ({"architectures": ["Qxz"], "text_config": {"model_type": [1]}}, r"type \[1\]: allowed"),
    ({"text_config": {"model_type": "llama"}}, "no family is named"),
    ({"model_type": "q", "text_config": {"model_type": "deepseek_v32"}}, "'q' has .*sparse"),
    ({"model_type": "q", "text_config": {"model_type": "qwen2_vl"}}, "the model_type of a text"),
    ({"model_type": "q", "text_config": {"model_type": "lama"}}, "no language .* is llama$"),
    ({"architectures": ["InternVLChatModel"], "llm_config": []}, r"llm_config is \[\]; allowed"),
    (
        {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": 3}},
        r"thinker_config\.text_config is 3; allowed: an object",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_a_refusal_says_one_reason_in_one_line(raw, named):
    text = said(raw)
    assert re.search(named, text), text
    assert "\n" not in text and len(text) < 500


def test_a_class_in_front_of_a_served_one_does_not_hide_it():
    """As in vLLM, the first class of a list that is served is."""
    with pytest.raises(UnsupportedModel, match="this LlamaForCausalLM cannot be served"):
        parse_model_config({"architectures": ["DeepseekV32ForCausalLM", "LlamaForCausalLM"]})
