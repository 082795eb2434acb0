"""GGUF files by their first bytes: under any name, and as the only model of a folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxserve import CheckpointError, EngineConfig
from jaxserve.errors import UnsupportedModel
from jaxserve.settings.model_name import kind_of_model
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.hub_gguf import gguf_of_folder
from jaxserve.start.sources.source import GgufSource
from jaxserve.weights import open_gguf
from tests.engine.test_gguf_text import whole_model
from tests.support.checkpoint import save_checkpoint
from tests.support.gguf_files import random_tensors, raw_config, write_gguf
from tests.support.gguf_parts import split_gguf


@pytest.mark.parametrize("name", ["m.GGUF", "m", "sha256-0a1b", "model.bin", "with a space"])
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, name: str) -> None:
    """The model is named by its file and by its folder."""
    path, _ = whole_model(tmp_path)
    want = find_source(EngineConfig(model=path))
    path = path.rename(tmp_path / name)
    (tmp_path / "README.md").write_text("of the model")
    (tmp_path / "empty").touch()
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("nowhere")
    assert kind_of_model(str(path)) == "gguf"
    for model in (path, tmp_path):
        config = EngineConfig(model=model)
        source = find_source(config)
        assert source.path == path and source.fields == want.fields
        assert source.generation_config == {"eos_token_id": [1, 3]}
        assert source.tokenizer(config).encode("the cat")


def test_a_folder_of_one_gguf_model_may_hold_more(tmp_path: Path) -> None:
    """A configuration, as quantized copies on the hub have it, and files of no text model."""
    path, _ = whole_model(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["OfTheOriginal"]}')
    for name in ("mmproj-F16.gguf", "model-mmproj.gguf", "imatrix.gguf", "m-draft.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert find_source(EngineConfig(model=tmp_path)).path == path
    assert find_source(EngineConfig(model=tmp_path), config_only=True).path == path


def test_parts_in_a_folder_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    path, _ = whole_model(tmp_path)
    parts = split_gguf(path, tmp_path / "parts", 8)
    assert len(parts) > 2
    source = find_source(EngineConfig(model=tmp_path / "parts"))
    assert isinstance(source, GgufSource) and source.path == parts[0]
    assert source.file.tensors.keys() == open_gguf(path).tensors.keys()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"missing beside it: {parts[1].name}"):
        find_source(EngineConfig(model=tmp_path / "parts"))
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=rf"first part is missing: {parts[0].name}"):
        find_source(EngineConfig(model=tmp_path / "parts"))


@pytest.mark.parametrize(
    "others", [["b.gguf"], ["b"], ["b-00001-of-00002.gguf"], ["b", "a b", "c"]]
)
def test_several_gguf_models_in_a_folder_are_named(tmp_path: Path, others: list[str]) -> None:
    path, _ = whole_model(tmp_path)
    for name in others:
        (tmp_path / name).write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError) as caught:
        find_source(EngineConfig(model=tmp_path))
    message = str(caught.value)
    assert f"{len(others) + 1} GGUF models" in message
    assert all(name in message for name in [path.name, *others])


def test_a_folder_of_safetensors_is_served_by_them(tmp_path: Path) -> None:
    path, _ = whole_model(tmp_path)
    save_checkpoint(tmp_path)
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    assert find_source(EngineConfig(model=tmp_path)).path == tmp_path
    (tmp_path / "model.safetensors").unlink()
    dummy = EngineConfig(model=tmp_path, load_format="dummy")
    assert find_source(dummy).path == tmp_path


def test_a_folder_with_a_projector_alone_is_refused_by_its_kind(tmp_path: Path) -> None:
    path, _ = whole_model(tmp_path)
    tensors = random_tensors(raw_config("llama"))
    metadata = {"general.architecture": "clip"}
    write_gguf(tmp_path / "mmproj-F16.gguf", "llama", tensors, metadata=metadata)
    path.unlink()
    with pytest.raises(UnsupportedModel, match=r"mmproj-F16\.gguf: is a projector of images"):
        find_source(EngineConfig(model=tmp_path))


def test_a_file_that_is_no_model_is_none(tmp_path: Path) -> None:
    for name, content in (("a", b""), ("b", b"GGU"), ("c", b"gguf"), ("d", b"{}")):
        (tmp_path / name).write_bytes(content)
        assert kind_of_model(str(tmp_path / name)) is None
    assert gguf_of_folder(tmp_path) is None
    with pytest.raises(CheckpointError, match=r"config\.json"):
        find_source(EngineConfig(model=tmp_path))
