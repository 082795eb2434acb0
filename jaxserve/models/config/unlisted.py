"""Wrappers that `wrappers.py` does not list, and their parts beside the text.

An unlisted wrapper is read by the `model_type` in its `text_config`. Its other fields and tensors
must belong to an encoder of images or sound that has a configuration of its own in config.json
(`vision_config`, `audio_config`), to the connection of this encoder with the text, or else the
wrapper is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxserve.models.config.fields import Fields
from jaxserve.models.config.wrappers import OUTER

TEXT = "text_config"
# Words in the names of nested configurations, tensors and fields of one kind of encoder.
ENCODERS = (
    ("vision", "visual", "image", "img", "video", "vit", "vpm", "siglip", "patch", "pixel"),
    ("audio", "sound", "speech", "acoustic", "semantic", "whisper", "voice", "mel"),
    ("encoder",),
)
# Words in the names of modules between an encoder and the text.
CONNECTIONS = (
    "projector", "projection", "connector", "merger", "adapter", "adaptor", "aligner", "resampler",
    "qformer", "perceiver", "multimodal", "multi_modal", "mm", "mlp1",
)  # fmt: skip
# Fields of a wrapper that do not change the computation of its text.
_FREE = frozenset({
    TEXT, "_name_or_path", "architectures", "auto_map", "eos_token_id", "initializer_range",
    "is_encoder_decoder", "model_type", "pad_token_id", "transformers_version", "use_cache", *OUTER,
})  # fmt: skip


def part_words(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words in the names of a wrapper's parts beside the text, () without such parts.

    Args:
        raw: the fields of the wrapper. A nested configuration shows that it has an encoder.
    """
    nested = [key for key, value in raw.items() if _is_config(key, value)]
    words = [
        word for kind in ENCODERS if any(is_part(key, kind) for key in nested) for word in kind
    ]
    return (*words, *CONNECTIONS) if words else ()


def is_part(name: str, words: tuple[str, ...]) -> bool:
    """Return whether a name has one of the words between its ends and underscores."""
    return any(f"_{word}_" in f"_{name}_" for word in words)


def is_part_tensor(name: str, words: tuple[str, ...]) -> bool:
    """Return whether a tensor of a wrapper belongs to one of the parts beside the text.

    Args:
        name: the tensor's name in the checkpoint.
        words: the result of `part_words`.
    """
    return is_part(re.sub(r"^(thinker\.)?(model\.)?", "", name).partition(".")[0], words)


def outer_problems(raw: Mapping[str, Any]) -> list[str]:
    """Return an error text if an unlisted wrapper has fields that may concern its text.

    A field that repeats the value of the text's own field is accepted.
    """
    words, problems = part_words(raw), list[str]()
    text = raw[TEXT]
    known = {
        key
        for key, value in raw.items()
        if is_part(key, words)
        or re.search(r"_token(_id|_ids|_index)$", key)
        or (key in text and text[key] == value and not isinstance(value, Mapping))
    }
    Fields(raw, problems).finish(_FREE | known)
    return problems


def _is_config(key: str, value: Any) -> bool:
    return key.endswith("_config") and key != TEXT and isinstance(value, Mapping)
