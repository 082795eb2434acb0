"""Sources of models: a checkpoint folder, a GGUF file, a converted folder, random weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.execution.mesh import Mesh
from jaxserve.execution.runner import OnProgress
from jaxserve.models import Decoder, ModelConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.model_name import INDEX, SINGLE
from jaxserve.start.garbage import collection_paused
from jaxserve.start.sources.paths import copy_text, imported, local_path
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.weights import (
    ConvertedModel,
    GgufFile,
    load_converted,
    load_weights,
)
from jaxserve.weights.converted import restored
from jaxserve.weights.converted_parts import load_converted_parts, whole
from jaxserve.weights.placement import use_panels
from jaxserve.weights.safetensors import read_tensor
from jaxserve.weights.shapes import PLAIN, DeviceLayout, Stored
from jaxserve.weights.tensors import StoredTensors, open_tensors


@dataclass(frozen=True)
class Source(ABC):
    """A model: configuration, tokenizer files, and tensors that can be listed and read.

    A source is found and checked before any weight is read, and outlives the start.

    Attributes:
        path: folder or GGUF file.
        fields: fields of config.json, or equal fields derived from a GGUF file's metadata, after
            the setting `hf_overrides`.
        model_config: the model's configuration.
        generation_config: fields of generation_config.json, the recommended settings of generation.
    """

    path: Path
    fields: dict[str, Any]
    model_config: ModelConfig
    generation_config: dict[str, Any]

    @property
    def fixed_dtype(self) -> str | None:
        """Dtype of weights that `jaxserve convert` has stored, or None if reading casts weights."""
        return None

    @property
    def fixed_quantization(self) -> str | None:
        """Form that `jaxserve convert` has quantized the weights to, or None."""
        return None

    @property
    def stored(self) -> Stored | None:
        """Description of the stored tensors, which gives the shapes of weights, or None."""
        return None

    @property
    def num_checkpoint_bytes(self) -> int:
        """Bytes of the weight files of a Hugging Face checkpoint, 0 for another source."""
        return 0

    def tensors(self) -> Mapping[str, Any]:
        """Return by name descriptions of the tensors, with attributes `shape` and `dtype`."""
        return {}

    def read(self, name: str) -> np.ndarray:
        """Return the values of a tensor in `tensors`.

        Raises:
            CheckpointError: the tensor cannot be read.
        """
        raise KeyError(name)

    def tokenizer(self, config: EngineConfig, on_progress: OnProgress | None = None) -> Tokenizer:
        """Return the tokenizer that the settings name, or else the model's own.

        Args:
            config: the settings, with tokenizer and chat_template_content_format.
            on_progress: called with the bytes of a download.

        Raises:
            CheckpointError: the tokenizer is missing, or does not fit the model.
        """
        with collection_paused():
            size, form = self.model_config.vocab_size, config.chat_template_content_format
            if config.tokenizer is not None:
                folder = local_path(str(config.tokenizer), config, on_progress, text_only=True)
                return Tokenizer(folder, size, form)
            return self._own_tokenizer(size, form)

    def _own_tokenizer(self, size: int, form: str) -> Tokenizer:
        return Tokenizer(self.path, size, form)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the model's own tokenizer into a folder, as tokenizer files of Transformers."""
        copy_text(self.path, folder)

    def without_vocabulary(self) -> Source:
        """Return the source without the vocabulary, which is not needed after `tokenizer`."""
        return self

    @property
    def can_load(self) -> bool:
        """Whether `load` works, also after `released`."""
        return True

    def released(self) -> Source:
        """Return the source without arrays that are not needed after `load`."""
        return self

    @abstractmethod
    def load(
        self,
        model_config: ModelConfig,
        dtype: Any,
        form: str | None = None,
        layout: DeviceLayout = PLAIN,
        mesh: Mesh | None = None,
        on_progress: OnProgress | None = None,
    ) -> Decoder:
        """Read the weights, place them in the layout of the device, and return the model.

        Args:
            model_config: the configuration of the model.
            dtype: dtype of the parameters that are not quantized.
            form: form to quantize to, or None to keep the stored form.
            layout: layout of matrices on the device.
            mesh: devices over which the model is divided, or None for one device.
            on_progress: called with the stage, the bytes read so far, and the total bytes.

        Raises:
            CheckpointError: a file is missing, malformed, or contradicts the configuration.
            UnsupportedModel: `form` differs from the form of a converted folder.
        """


@dataclass(frozen=True)
class CheckpointSource(Source):
    """Source of a folder with a Hugging Face checkpoint."""

    @property
    def _files(self) -> Path | GgufFile:
        return self.path

    @cached_property
    def stored(self) -> StoredTensors | None:
        """The stored tensors, or None if the folder has only a configuration."""
        if not any((self.path / name).exists() for name in (INDEX, SINGLE)):
            return None
        return open_tensors(self._files, self.model_config)

    @property
    def num_checkpoint_bytes(self) -> int:
        """Bytes of the checkpoint's safetensors files."""
        with suppress(OSError):
            return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
        return 0

    def tensors(self) -> Mapping[str, Any]:
        """Return by name the entries of the tensors in the checkpoint's files."""
        return {} if self.stored is None else self.stored.opened.tensors

    def read(self, name: str) -> np.ndarray:
        """Return the values of the tensor of a name from the checkpoint's files."""
        return read_tensor(self.tensors()[name])

    def load(
        self,
        model_config: ModelConfig,
        dtype: Any,
        form: str | None = None,
        layout: DeviceLayout = PLAIN,
        mesh: Mesh | None = None,
        on_progress: OnProgress | None = None,
    ) -> Decoder:
        """Read the checkpoint's weights and place them on devices (arguments of `Source.load`)."""
        return load_weights(
            self.stored or self._files,
            model_config,
            dtype,
            quantization=form,
            kv_scales=layout.kv_scales,
            panels=layout.panels,
            packed=layout.keeps_blocks,
            mesh=mesh,
            on_progress=None if on_progress is None else partial(on_progress, "weights"),
        )


@dataclass(frozen=True)
class GgufSource(CheckpointSource):
    """Source of an opened GGUF file."""

    file: GgufFile

    @property
    def _files(self) -> Path | GgufFile:
        return self.file

    @cached_property
    def stored(self) -> StoredTensors | None:
        """The stored tensors of the GGUF file."""
        return open_tensors(self.file, self.model_config)

    @property
    def num_checkpoint_bytes(self) -> int:
        """0, because a GGUF file is no Hugging Face checkpoint."""
        return 0

    def _own_tokenizer(self, size: int, form: str) -> Tokenizer:
        tokenizer = imported("jaxserve.text.gguf_tokenizer").gguf_tokenizer(
            self.file.metadata, str(self.path), size
        )
        return Tokenizer.of(tokenizer, str(self.path), size, form)

    def save_tokenizer(self, folder: Path) -> None:
        """Write the GGUF file's tokenizer into a folder, as files of Transformers."""
        imported("jaxserve.text.gguf_tokenizer").save_tokenizer(
            self.file.metadata, str(self.path), folder
        )

    def without_vocabulary(self) -> Source:
        """Return the source without the GGUF file's vocabulary, which takes 25 MB for Gemma 3."""
        metadata = self.file.metadata
        rest = {key: metadata[key] for key in metadata if not key.startswith("tokenizer.")}
        return replace(self, file=replace(self.file, metadata=rest))


@dataclass(frozen=True)
class ConvertedSource(Source):
    """Source of a folder that `jaxserve convert` wrote."""

    converted: ConvertedModel

    @property
    def fixed_dtype(self) -> str | None:
        """Dtype of the converted parameters that are not quantized."""
        return self.converted.dtype

    @property
    def fixed_quantization(self) -> str | None:
        """Form that the conversion quantized the weights to, or None."""
        return self.converted.quantization

    @property
    def stored(self) -> ConvertedModel:
        """Description of the arrays in the converted folder."""
        return self.converted

    def tensors(self) -> Mapping[str, Any]:
        """Return the description of each parameter of the converted checkpoint, by name."""
        return self.converted.parameters

    def read(self, name: str) -> np.ndarray:
        """Return the values of the converted parameter of a name, after a check of their digest."""
        entry = self.converted.parameters[name]
        shape = jax.ShapeDtypeStruct(entry.shape, entry.dtype)
        return restored(self.converted, lambda _: whole(self.converted, name, shape))

    def load(
        self,
        model_config: ModelConfig,
        dtype: Any,
        form: str | None = None,
        layout: DeviceLayout = PLAIN,
        mesh: Mesh | None = None,
        on_progress: OnProgress | None = None,
    ) -> Decoder:
        """Read the converted weights, check them, and place them (arguments of `Source.load`)."""
        stored_form = self.fixed_quantization
        if form not in (None, stored_form):
            how = f"to {stored_form}" if stored_form else "in full"
            raise UnsupportedModel(
                f"{self.path}: was converted {how} and cannot be quantized to {form}; convert the "
                "checkpoint that it was made of"
            )
        flags: Any = {"kv_scales": layout.kv_scales}
        if mesh is not None:
            flags["panels"] = layout.panels
            return load_converted_parts(self.converted, model_config, mesh, **flags)
        model = load_converted(self.converted, model_config, **flags)
        if layout.panels:
            use_panels(model)
        return model
