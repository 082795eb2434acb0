"""Find the tensors of the text model in the checkpoint of a multimodal model."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models.config.unlisted import is_part_tensor
from jaxserve.weights.checkpoint import Checkpoint, listed
from jaxserve.weights.names import FURTHER
from jaxserve.weights.safetensors import TensorEntry

logger = logging.getLogger(__name__)

OUTPUT = "lm_head."
# Prefixes of the text model's tensors and of its output projection, in place of "model." and
# "lm_head.". Some were used by Transformers before version 4.52, some since, and some by the code
# of a checkpoint.
NAMINGS = (
    ("language_model.model.", "language_model.lm_head."),
    ("model.language_model.", OUTPUT),
    ("model.text_model.", OUTPUT),
    ("thinker.model.", "thinker.lm_head."),
    ("thinker.model.language_model.", "thinker.lm_head."),
    ("model.", OUTPUT),
)


def text_tensors(checkpoint: Checkpoint, parts: tuple[str, ...] | None) -> Checkpoint:
    """Return a multimodal checkpoint with only its text model's tensors, under text-only names.

    One log message counts the omitted tensors of the other parts.

    Args:
        checkpoint: the checkpoint with the names of its files.
        parts: words in the names of the other parts of a wrapper that is not listed. All its other
            tensors must be used. None for a listed wrapper, whose other tensors are omitted.

    Raises:
        CheckpointError: the checkpoint has no text embedding under a known name.
        UnsupportedModel: tensors belong neither to the text nor to `parts`.
    """
    prefix, head = naming(checkpoint)
    unknown: list[str] = []
    tensors: dict[str, TensorEntry] = {}
    others: Counter[str] = Counter()
    for name, entry in checkpoint.tensors.items():
        for start, plain in ((head, OUTPUT), (prefix, "model.")):
            if name.startswith(start) and not _is_tower(name, start, prefix):
                plain = plain + name.removeprefix(start)
                tensors[plain] = replace(entry, name=plain)
                break
        else:
            if (
                parts is not None
                and not is_part_tensor(name, parts)
                and not name.startswith(FURTHER)
            ):
                unknown.append(name)
            others[".".join(name.split(".")[: 2 if name.startswith("model.") else 1])] += 1
    if unknown:
        words = f"the names of other parts have one of {', '.join(parts or ())}"
        allowed = words if parts else "config.json has no configuration of another part"
        raise UnsupportedModel(
            f"{checkpoint.directory}: this wrapper is unknown to jaxserve, and {len(unknown)} "
            f"tensor(s) belong neither to its text nor to another part: {listed(sorted(unknown))}; "
            f"{allowed}"
        )
    if others:
        counts = [f"{count} of {part}" for part, count in sorted(others.items())]
        logger.warning(
            "%s: its text alone is served; left out are tensors of its other parts: %s",
            checkpoint.directory, listed(counts),
        )  # fmt: skip
    return replace(checkpoint, tensors=tensors, whole=parts is not None)


def naming(checkpoint: Checkpoint) -> tuple[str, str]:
    """Return the name prefixes of a multimodal checkpoint's text model and its output projection.

    Raises:
        CheckpointError: the checkpoint has no text embedding under a known name.
    """
    for prefix, head in NAMINGS:
        if f"{prefix}embed_tokens.weight" in checkpoint.tensors:
            return prefix, head
    if checkpoint.is_part:
        for prefix, head in NAMINGS:
            starts = f"{prefix}layers.", f"{prefix}norm.", head
            if any(name.startswith(starts) for name in checkpoint.tensors):
                return prefix, head
    names = [f"{prefix}embed_tokens.weight" for prefix, _ in NAMINGS]
    raise CheckpointError(
        f"{checkpoint.directory}: has no embedding of text; looked for {listed(names)}"
    )


def _is_tower(name: str, start: str, prefix: str) -> bool:
    # Without a prefix of its own, the text model shares "model." with the other parts.
    if start != prefix or prefix != "model.":
        return False
    return not name.startswith(("model.layers.", "model.embed_tokens.", "model.norm."))
