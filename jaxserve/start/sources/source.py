"""Sources of models that the setting `model` names: folders, GGUF files and the hub."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError, InvalidRequest, UnsupportedModel
from jaxserve.execution.mesh import Mesh
from jaxserve.execution.runner import OnProgress
from jaxserve.models import Decoder, ModelConfig, parse_model_config, read_config_fields
from jaxserve.models.shards import Split, check_split
from jaxserve.settings.config import EngineConfig, bundled_model
from jaxserve.settings.model_name import NO_MODEL, kind_of_model
from jaxserve.settings.overrides import overridden
from jaxserve.start.garbage import collection_paused
from jaxserve.start.sources.expert_load import placement_of
from jaxserve.start.sources.hub_gguf import gguf_of_folder
from jaxserve.text.generation_config import read_generation_config
from jaxserve.text.gguf_vocabulary import gguf_ends
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import (
    ConvertedModel,
    GgufFile,
    gguf_fields,
    is_converted,
    load_converted,
    load_weights,
    open_checkpoint,
    open_converted,
    open_gguf,
)
from jaxserve.weights.checkpoint import check_text_files
from jaxserve.weights.converted_parts import load_converted_parts
from jaxserve.weights.names import has_own_output
from jaxserve.weights.placement import use_panels
from jaxserve.weights.wrapped import NAMINGS, naming

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """A model's files, found and checked; no weight has been read.

    Attributes:
        path: of the folder or the GGUF file.
        fields: fields of its config.json, or those that a GGUF file's metadata amounts to, with the
            setting `hf_overrides` in their place.
        model_config: the model's configuration.
        generation_config: the recommended settings of generation.
        weights: where they are read from: the folder, an opened file, or a converted folder.
    """

    path: Path
    fields: dict[str, Any]
    model_config: ModelConfig
    generation_config: dict[str, Any]
    weights: Path | GgufFile | ConvertedModel

    @property
    def fixed_dtype(self) -> str | None:
        """The dtype of parameters that were placed before; None where they are cast on load."""
        return self.weights.dtype if isinstance(self.weights, ConvertedModel) else None

    @property
    def fixed_quantization(self) -> str | None:
        """The quantization of parameters that were placed before; None where there is none."""
        return self.weights.quantization if isinstance(self.weights, ConvertedModel) else None

    @collection_paused()
    def tokenizer(self, config: EngineConfig, on_progress: OnProgress | None = None) -> Tokenizer:
        """Return the tokenizer that the settings name, or the model's own.

        Raises:
            CheckpointError: none there, or one that does not fit the model.
        """
        size, form = self.model_config.vocab_size, config.chat_template_content_format
        if config.tokenizer is not None:
            folder = local_path(str(config.tokenizer), config, on_progress, text_only=True)
            return Tokenizer(folder, size, form)
        if isinstance(self.weights, GgufFile):
            made = _late("jaxserve.text.gguf_tokenizer").gguf_tokenizer(
                self.weights.metadata, str(self.path), size
            )
            return Tokenizer.of(made, str(self.path), size, form)
        return Tokenizer(self.path, size, form)

    def without_vocabulary(self) -> Source:
        """Return the source without a GGUF file's vocabulary, which takes 25 MB for Gemma 3."""
        if not isinstance(self.weights, GgufFile):
            return self
        metadata = self.weights.metadata
        kept = {key: metadata[key] for key in metadata if not key.startswith("tokenizer.")}
        return replace(self, weights=replace(self.weights, metadata=kept))

    def load(
        self,
        model_config: ModelConfig,
        dtype: Any,
        on_progress: OnProgress | None = None,
        quantization: str | None = None,
        kv_scales: bool = False,
        panels: bool = False,
        packed: bool = False,
        mesh: Mesh | None = None,
    ) -> Decoder:
        """Return the model with its weights; see `load_weights` and `load_converted`.

        Raises:
            CheckpointError: the files are not right.
            UnsupportedModel: a converted folder is to be quantized, or otherwise than it is.
        """
        if isinstance(self.weights, ConvertedModel):
            made = self.fixed_quantization
            if quantization not in (None, made):
                raise UnsupportedModel(
                    f"{self.path}: was converted {f'to {made}' if made else 'in full'} and cannot "
                    f"be quantized to {quantization}; convert the checkpoint that it was made of"
                )
            if mesh is not None:
                flags = {"panels": panels, "kv_scales": kv_scales}
                return load_converted_parts(self.weights, model_config, mesh, **flags)
            model = load_converted(self.weights, model_config, kv_scales=kv_scales)
            if panels:
                use_panels(model)
            return model
        return load_weights(
            self.weights,
            model_config,
            dtype,
            quantization=quantization,
            kv_scales=kv_scales,
            panels=panels,
            packed=packed,
            mesh=mesh,
            on_progress=None if on_progress is None else _stage("weights", on_progress),
        )


def _stage(name: str, on_progress: OnProgress):
    return lambda done, total: on_progress(name, done, total)


def find_source(
    config: EngineConfig, on_progress: OnProgress | None = None, *, config_only: bool = False
) -> Source:
    """Find a model's files, fetch them if they are on the hub, and read its configuration.

    Args:
        config: names the model.
        on_progress: called with the bytes of a download.
        config_only: whether to fetch the configuration alone.

    Raises:
        CheckpointError, UnsupportedModel: nothing there, or nothing that can be served.
    """
    path = bundled_model()
    if config.model is not None:
        path = local_path(str(config.model), config, on_progress, config_only=config_only)
    if path.is_file():
        file = open_gguf(path)
        fields = overridden(gguf_fields(file), config.hf_overrides)
        generation = _generation_config(
            config, path.parent, {"eos_token_id": gguf_ends(file.metadata)}
        )
        made = _divided(parse_model_config(fields, str(path)), config)
        return Source(path, fields, made, generation, file)
    where = str(path / "config.json")
    fields = overridden(read_config_fields(path), config.hf_overrides)
    model_config = _divided(parse_model_config(fields, where), config)
    generation = _generation_config(config, path, None)
    if is_converted(path):
        if config.has_followers:
            raise InvalidRequest(
                f"model: {path} was converted, and such a folder is not read by several hosts "
                "(nnodes); allowed: what it was made of",
                "model",
            )
        return Source(path, fields, model_config, generation, open_converted(path))
    if not config_only and config.load_format != "dummy":
        tied = _ties(path, fields, model_config)
        if tied != model_config.tie_word_embeddings:
            fields["tie_word_embeddings"] = tied
            model_config = _divided(parse_model_config(fields, where), config)
    return Source(path, fields, model_config, generation, path)


def _divided(model_config: ModelConfig, config: EngineConfig) -> ModelConfig:
    """Return the configuration of a model over as many devices as the settings name.

    Raises:
        UnsupportedModel: its sizes do not divide.
        CheckpointError: see `placement_of`.
    """
    split = Split(
        config.tensor_parallel_size,
        config.enable_expert_parallel,
        placement_of(config, model_config),
        config.decode_context_parallel_size,
        config.all_reduce == "pallas",
    )
    made = replace(model_config, split=split)
    check_split(made)
    return made


def _ties(path: Path, fields: dict[str, Any], config: ModelConfig) -> bool:
    """Return whether the model projects by its embedding.

    As in Transformers, an output projection among the tensors that differs from the embedding is
    used whatever config.json says. A wrapper and its text model often disagree, or leave it to
    defaults of their classes.
    """
    unsaid = config.wrapper and fields.get("tie_word_embeddings") is None
    if not (config.tie_word_embeddings or unsaid):
        return False
    checkpoint = open_checkpoint(path)
    prefix, output = naming(checkpoint) if config.wrapper else NAMINGS[-1]
    own = has_own_output(checkpoint, output, f"{prefix}embed_tokens.weight")
    if own and config.tie_word_embeddings:
        logger.warning(
            "%s: has an output projection that differs from the embedding, though config.json "
            "ties them; it is used",
            path,
        )
    return not own


def local_path(
    name: str,
    config: EngineConfig,
    on_progress: OnProgress | None,
    *,
    text_only: bool = False,
    config_only: bool = False,
) -> Path:
    """Return the folder, or the GGUF file, that a name stands for.

    A folder without safetensors and with the files of one GGUF model stands for that model.

    Raises:
        CheckpointError: there is none, it holds text files that lie elsewhere, or several GGUF
            models.
    """
    kind = kind_of_model(name)
    if kind == "folder":
        folder = Path(name)
        check_text_files(folder)
        needs_weights = config.load_format != "dummy" or not (folder / "config.json").exists()
        found = gguf_of_folder(folder) if needs_weights and not text_only else None
        return found or folder
    if kind == "gguf" and not text_only:
        return Path(name)
    if kind == "hub":
        fetch = _late("jaxserve.start.sources.hub").fetch
        only = {"text_only": text_only, "config_only": config_only}
        return fetch(name, config.revision, config.download_dir, on_progress, **only)
    raise CheckpointError(f"{'tokenizer' if text_only else 'model'}: {name!r} {NO_MODEL}")


def _late(name: str) -> Any:
    """Import a module that brings large libraries, only once it is needed."""
    return importlib.import_module(name)


def _generation_config(
    config: EngineConfig, folder: Path, own: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the settings of generation; the ends among the model's own count in any case."""
    found = read_generation_config(folder) if own is None else own
    if config.generation_config == "auto":
        return found
    ends = {"eos_token_id": found["eos_token_id"]} if "eos_token_id" in found else {}
    if config.generation_config == "vllm":
        return ends
    other = Path(config.generation_config)
    if not (other / "generation_config.json").is_file():
        raise CheckpointError(
            f"generation_config: {str(other)!r} is not 'auto', 'vllm' or a folder with a "
            "generation_config.json"
        )
    return ends | read_generation_config(other)
