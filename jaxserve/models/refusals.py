"""Reasons for refusing architectures that are not served, with the nearest family that is served.

`refusals.toml` lists architectures of Transformers, of GGUF files and of checkpoints with code of
their own. Classes without a next token are recognised by the endings of their names.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

TABLE = Path(__file__).with_name("refusals.toml")
MAX_NAME = 200
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "sparse": "its attention is sparse, over an index of tokens, which is not implemented",
        "encoder": "it has an encoder, and models of a decoder alone are served",
        "media": "its input or output is images or sound, and models of text are served",
        "bidirectional": "its tokens attend to later tokens too, which is not implemented",
        "own": "its computation is code in the checkpoint, which jaxserve does not execute",
        "unwritten": "its computation is not implemented yet",
        "gguf": "its tensors in GGUF files are not read yet",
        "classifier": "it classifies, and gives no next token",
        "reward": "it gives rewards, and no next token",
        "base": "it is a base class, which gives embeddings and no next token",
    }
)
# Endings of names of Transformers' classes, with the key of the reason and the nearest family.
HEADS = (
    (r"RewardModel", "reward", "LlamaForCausalLM"),
    (
        r"(For(MaskedLM|PreTraining|NextSentencePrediction|TextEncoding)|Encoder)",
        "encoder",
        "LlamaForCausalLM",
    ),
    (
        r"(For\w*(Image|Video|Visual|Depth|Detection|Segmentation|Pose|Normal|Keypoint|Pointmap"
        r"|Recognition|Retrieval|Document)\w*|\w*Backbone|VQVAE|VisionTransformer)",
        "media",
        "LlavaForConditionalGeneration",
    ),
    (
        r"(For(CTC|RNNT|TDT|XVector|Audio\w*|Speech\w*|TextToSpe\w*|TextToWave\w*)|HifiGan)",
        "media",
        "Qwen2AudioForConditionalGeneration",
    ),
    (
        r"For\w*(Classification|QuestionAnswering\w*|MultipleChoice|Regression|Prediction|Decision)",
        "classifier",
        "LlamaForCausalLM",
    ),
    (r"(?<!LMHead)Model", "base", "LlamaForCausalLM"),
)


@dataclass(frozen=True)
class Refusal:
    """The reason for refusing an architecture.

    Attributes:
        reason: a key of `REASONS`.
        nearest: name of the nearest architecture that is served.
    """

    reason: str
    nearest: str


def stem(name: str) -> str:
    """Return the name of an architecture without case, punctuation and the ending of its class.

    A class, its `model_type` and the `model_type` of its text have the same stem in most families.
    """
    ending = r"(For[A-Z]\w*|(LMHead|WithLMHead|MT|Reward)?Model(WithLMHead)?)$"
    plain = re.sub(r"[^a-z0-9]", "", re.sub(ending, "", name[:MAX_NAME]).lower())
    return re.sub(r"(?<=.)text(model)?$", "", plain)


def refusals() -> dict[str, Refusal]:
    """Return the contents of `refusals.toml` by stem."""
    import tomllib  # takes milliseconds, and most processes do not need it

    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {
        stem(name): Refusal(reason, nearest)
        for reason, rows in table.items()
        for nearest, names in rows.items()
        for name in names.split()
    }


def refusal_of(name: str) -> Refusal | None:
    """Return the `Refusal` of an architecture, a `model_type` or a class, or None if unknown."""
    return refusals().get(stem(name)) or head_of(name)


def head_of(name: str) -> Refusal | None:
    """Return the `Refusal` of a class that gives no next token, or None for other names."""
    for ending, reason, nearest in HEADS:
        if re.search(f"{ending}$", name[-MAX_NAME:]):
            return Refusal(reason, nearest)
    return None


def described(refusal: Refusal) -> str:
    """Return the text of an error: the reason, and the nearest family that is served."""
    return f"{REASONS[refusal.reason]}; the nearest family that is served is {refusal.nearest}"


def override(architecture: str) -> str:
    """Return the advice to read a checkpoint as the given architecture, with its option."""
    option = json.dumps({"architectures": [architecture]})
    return f"where its weights are those of {architecture}, --hf-overrides '{option}' serves them"


def unknown(name: str, served: Iterable[str], has_code: bool = False) -> str:
    """Return the text of an error for a name that is neither served nor in `refusals.toml`.

    Args:
        name: the architecture or `model_type`.
        served: names that are served.
        has_code: whether the checkpoint has code of its own.
    """
    import difflib  # takes milliseconds, and most processes do not need it

    text = "jaxserve and Transformers have no language model of this name"
    text = REASONS["own"] if has_code else text
    stems = {stem(other): other for other in reversed(tuple(served))}
    near = difflib.get_close_matches(stem(name), stems, 1, 0.75)
    return f"{text}; the most similar name that is served is {stems[near[0]]}" if near else text
