"""The search for the model that the setting `model` names."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.execution.mesh import Mesh
from jaxserve.execution.runner import OnProgress
from jaxserve.models import Decoder, ModelConfig, parse_model_config, read_config_fields
from jaxserve.models.shards import Split, check_split
from jaxserve.settings.config import EngineConfig, bundled_model
from jaxserve.settings.overrides import overridden
from jaxserve.start.sources.expert_load import placement_of
from jaxserve.start.sources.paths import local_path
from jaxserve.start.sources.source import (
    CheckpointSource,
    ConvertedSource,
    GgufSource,
    Source,
)
from jaxserve.text.generation_config import read_generation_config
from jaxserve.text.gguf_vocabulary import gguf_ends
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import (
    Checkpoint,
    gguf_fields,
    is_converted,
    open_checkpoint,
    open_converted,
    open_gguf,
    random_weights,
)
from jaxserve.weights.names import has_own_output
from jaxserve.weights.shapes import PLAIN, RANDOM, DeviceLayout, Stored
from jaxserve.weights.wrapped import NAMINGS, naming

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RandomSource(Source):
    """A model with random weights, and the configuration and tokenizer of another source.

    Attributes:
        text: the other source.
        seed: seed of the weights.
    """

    text: Source
    seed: int

    @property
    def stored(self) -> Stored:
        """The constant `RANDOM`, because random weights have no stored tensors."""
        return RANDOM

    def _own_tokenizer(self, size: int, form: str) -> Tokenizer:
        return self.text._own_tokenizer(size, form)

    def without_vocabulary(self) -> Source:
        """Return a copy of this source without the vocabulary of the source of its tokenizer."""
        return replace(self, text=self.text.without_vocabulary())

    def load(
        self,
        model_config: ModelConfig,
        dtype: Any,
        form: str | None = None,
        layout: DeviceLayout = PLAIN,
        mesh: Mesh | None = None,
        on_progress: OnProgress | None = None,
    ) -> Decoder:
        """Create the model with random weights on the devices (arguments of `Source.load`)."""
        return random_weights(model_config, dtype, self.seed, form, layout.panels, mesh)


def find_source(
    config: EngineConfig, on_progress: OnProgress | None = None, *, config_only: bool = False
) -> Source:
    """Find a model's files, fetch them if they are on the hub, and read its configuration.

    Args:
        config: names the model.
        on_progress: called with the bytes of a download.
        config_only: whether to fetch the configuration alone.

    Returns:
        The source of the model, whose weights have not been read.

    Raises:
        CheckpointError: the model does not exist or cannot be read.
        UnsupportedModel: the model cannot be served.
    """
    source = _find(config, on_progress, config_only)
    if config.load_format != "dummy":
        return source
    of_text = (source.path, source.fields, source.model_config, source.generation_config)
    return RandomSource(*of_text, source, config.seed)


def _find(config: EngineConfig, on_progress: OnProgress | None, config_only: bool) -> Source:
    path = bundled_model()
    if config.model is not None:
        path = local_path(str(config.model), config, on_progress, config_only=config_only)
    if path.is_file():
        file = open_gguf(path)
        fields = overridden(gguf_fields(file), config.hf_overrides)
        generation = _generation_config(
            config, path.parent, {"eos_token_id": gguf_ends(file.metadata)}
        )
        model_config = divided(parse_model_config(fields, str(path)), config)
        return GgufSource(path, fields, model_config, generation, file)
    where = str(path / "config.json")
    fields = overridden(read_config_fields(path), config.hf_overrides)
    model_config = divided(parse_model_config(fields, where), config)
    generation = _generation_config(config, path, None)
    if is_converted(path):
        if config.has_followers:
            raise InvalidRequest(
                f"model: {path} was converted, and such a folder is not read by several hosts "
                "(nnodes); allowed: what it was made of",
                "model",
            )
        return ConvertedSource(path, fields, model_config, generation, open_converted(path))
    if not config_only and config.load_format != "dummy":
        tied = ties(open_checkpoint(path), fields, model_config)
        if tied != model_config.tie_word_embeddings:
            fields["tie_word_embeddings"] = tied
            model_config = divided(parse_model_config(fields, where), config)
    return CheckpointSource(path, fields, model_config, generation)


def divided(model_config: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Return the configuration of a model with its division over devices, by the settings.

    Raises:
        UnsupportedModel: the model cannot be divided so.
    """
    split = Split(
        config.tensor_parallel_size,
        config.enable_expert_parallel,
        placement_of(config, model_config),
        config.decode_context_parallel_size,
        config.all_reduce == "pallas",
    )
    divided = replace(model_config, split=split)
    check_split(divided)
    return divided


def ties(checkpoint: Checkpoint, fields: dict[str, Any], config: ModelConfig) -> bool:
    """Return whether a model's output projection is its embedding (tied weights).

    As in Transformers, a stored output projection that differs from the embedding is used, whatever
    config.json says. A wrapper's config.json and its text model's often disagree, or rely on the
    defaults of their classes.
    """
    unsaid = config.wrapper and fields.get("tie_word_embeddings") is None
    if not (config.tie_word_embeddings or unsaid):
        return False
    prefix, output = naming(checkpoint) if config.wrapper else NAMINGS[-1]
    has_projection = has_own_output(checkpoint, output, f"{prefix}embed_tokens.weight")
    if has_projection and config.tie_word_embeddings:
        _log.warning(
            "%s: has an output projection that differs from the embedding, though config.json "
            "ties them; it is used",
            checkpoint.directory,
        )
    return not has_projection


def _generation_config(
    config: EngineConfig, folder: Path, of_file: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of generation_config.json that the setting generation_config selects.

    The model's end-of-sequence ids are always included.

    Args:
        config: the settings.
        folder: folder of the model.
        of_file: fields of a GGUF file, or None to read them from `folder`.

    Raises:
        CheckpointError: the setting names a folder without the file.
    """
    fields = read_generation_config(folder) if of_file is None else of_file
    if config.generation_config == "auto":
        return fields
    ends = {"eos_token_id": fields["eos_token_id"]} if "eos_token_id" in fields else {}
    if config.generation_config == "vllm":
        return ends
    other = Path(config.generation_config)
    if not (other / "generation_config.json").is_file():
        raise CheckpointError(
            f"generation_config: {str(other)!r} is not 'auto', 'vllm' or a folder with a "
            "generation_config.json"
        )
    return ends | read_generation_config(other)
