"""Models whose weights are arrays in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from flax import nnx

from jaxserve.errors import InvalidRequest
from jaxserve.models import config_fields, parse_model_config
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.overrides import overridden
from jaxserve.start.sources.find import divided, ties
from jaxserve.start.sources.source import CheckpointSource, Source
from jaxserve.text.generation_config import read_generation_config
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights.memory import NAME, checkpoint_of
from jaxserve.weights.tensors import StoredTensors, open_arrays


@dataclass(frozen=True)
class ParamsSource(CheckpointSource):
    """Source of arrays in memory.

    Attributes:
        params: the arrays (see `open_arrays`), or None after `released`.
        text: folder of the tokenizer, a tokenizer of Transformers, or None.
    """

    params: Any
    text: Any

    @cached_property
    def stored(self) -> StoredTensors | None:
        """The arrays as stored tensors, or None after `released`."""
        return None if self.params is None else open_arrays(self.params, self.model_config)

    @property
    def num_checkpoint_bytes(self) -> int:
        """0, because nothing is read from a file."""
        return 0

    def _own_tokenizer(self, size: int, form: str) -> Tokenizer:
        if isinstance(self.text, str | Path):
            return Tokenizer(self.text, size, form)
        return Tokenizer.of(self.text, "tokenizer", size, form)

    @property
    def can_load(self) -> bool:
        """Whether the arrays are still here."""
        return self.params is not None

    def released(self) -> Source:
        """Return the source without the arrays."""
        return replace(self, params=None)


def params_source(params: Any, config: Any, tokenizer: Any, settings: EngineConfig) -> ParamsSource:
    """Return the source of arrays in memory.

    Args:
        params: the arrays (see `open_arrays`).
        config: fields of config.json as a mapping, a folder with config.json, or a configuration of
            Transformers.
        tokenizer: folder of a tokenizer, a tokenizer of Transformers, or None.
        settings: settings of the engine.

    Raises:
        InvalidRequest: `config` or `tokenizer` is of another type.
        CheckpointError, UnsupportedModel: the configuration or an array cannot be used.
    """
    fields = config_fields(config)
    generation = read_generation_config(Path(config)) if isinstance(config, str | PathLike) else {}
    is_tokenizer = hasattr(tokenizer, "backend_tokenizer")
    if tokenizer is not None and not isinstance(tokenizer, str | Path) and not is_tokenizer:
        raise InvalidRequest(
            f"tokenizer is a {type(tokenizer).__name__}; allowed: a folder, a fast tokenizer of "
            "Transformers, or None",
            "tokenizer",
        )
    fields = overridden(fields, settings.hf_overrides)
    model = divided(parse_model_config(fields, "config"), settings)
    if isinstance(params, nnx.State):
        tied = "table" not in params.get("embedding", {})
    else:
        tied = ties(lambda: checkpoint_of(params), fields, model)
    if tied != model.tie_word_embeddings:
        fields["tie_word_embeddings"] = tied
        model = divided(parse_model_config(fields, "config"), settings)
    return ParamsSource(Path(NAME), fields, model, generation, params, tokenizer)
