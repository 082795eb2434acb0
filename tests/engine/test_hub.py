"""Models by their names on the hub, fetched from a server on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxserve import CheckpointError, EngineConfig
from jaxserve.settings.model_name import is_hub_name
from jaxserve.start.device import DeviceMemory
from jaxserve.start.sources.find import find_source
from jaxserve.start.sources.hub import fetch
from jaxserve.weights import parameter_values
from pallas_kernels.devices import DeviceLimits
from tests.support.gguf_files import random_tensors, raw_config, write_gguf
from tests.support.gguf_parts import split_gguf
from tests.support.hub_server import Hub, commit_of, serve_hub

NEVER = {
    "pytorch_model.bin": b"\x80\x02",
    "modeling_tiny.py": b"raise SystemExit",
    "consolidated.safetensors": b"x",
    "adapter_model.safetensors": b"x",
    "onnx/model.safetensors": b"x",
    "../escape.safetensors": b"x",
    "..\\escape.safetensors": b"x",
    "/etc/escape.safetensors": b"x",
    "..": b"x",
    "README.md": b"# tiny",
}


@pytest.fixture(scope="module")
def files(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    held = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    folder = tmp_path_factory.mktemp("gguf")
    gguf = write_gguf(folder / "m.gguf", "llama", random_tensors(raw_config("llama")))
    bare = write_gguf(folder / "tiny-BF16.gguf", "llama", random_tensors(raw_config("llama")))
    parts = split_gguf(bare, folder, 12)
    assert len(parts) == 2
    other = held | {"generation_config.json": b'{"temperature": 0.25}'}
    return {
        "org/tiny": {"main": {**held, **NEVER}, "v2": other},
        "org/pickle": {"main": {"config.json": b"{}", "pytorch_model.bin": b"x"}},
        "org/tiny-GGUF": {"main": {"tiny.F32.gguf": gguf.read_bytes(), "README.md": b""}},
        "org/many-GGUF": {
            "main": {
                "tiny-UD-Q4_K_M.gguf": b"x" * 30,
                "tiny-Q4_K_M.gguf": gguf.read_bytes(),
                "tiny-Q8_0.gguf": b"x" * 80,
                "mmproj-tiny-Q4_K_M.gguf": b"x" * 9,
                "tiny-imatrix.gguf": b"x" * 9,
                "../escape-Q4_K_M.gguf": b"x",
                "BF16/" + parts[0].name: parts[0].read_bytes(),
                "BF16/" + parts[1].name: parts[1].read_bytes(),
                "config.json": b"{}",
            }
        },
        "org/large-GGUF": {
            "main": {
                "big-00001-of-00002-Q8_0.gguf": b"x" * 900,
                "big-Q2_K.gguf": b"x" * 200,
                "big-Q3_K_S.gguf": b"x" * 300,
                "big-Q5_0.gguf": b"x" * 500,
            }
        },
        "org/torn-GGUF": {"main": {"torn-Q4_0-00002-of-00003.gguf": b"x"}},
    }


@pytest.fixture
def hub(files: dict, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serve_hub(files) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield served


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_name_is_as_good_as_a_folder(hub, checkpoint, tmp_path):
    told: list[tuple[str, int, int]] = []
    config = EngineConfig(model="org/tiny", download_dir=tmp_path)
    source = find_source(config, lambda *progress: told.append(progress))
    local = find_source(EngineConfig(model=checkpoint))
    assert source.model_config == local.model_config
    assert source.generation_config == local.generation_config
    text = "some <|user|> text é"
    assert source.tokenizer(config).encode(text) == local.tokenizer(config).encode(text)
    want = parameter_values(local.load(local.model_config, np.float32))
    got = parameter_values(source.load(source.model_config, np.float32))
    assert all(np.array_equal(got[path], want[path]) for path in want)
    sizes = sum((checkpoint / name).stat().st_size for name in names(source.path))
    assert told == [("download", 0, sizes), ("download", sizes, sizes)]


def test_only_what_is_read_is_fetched(hub, checkpoint, tmp_path):
    folder = fetch("org/tiny", download_dir=tmp_path)
    assert folder == tmp_path / "models--org--tiny" / "snapshots" / commit_of("org/tiny", "main")
    assert names(folder) == names(checkpoint)
    fetched = [path.split("/", 5)[-1] for path in hub.asked if "/resolve/" in path]
    assert fetched and not set(fetched) & NEVER.keys()
    assert not list(tmp_path.parent.rglob("*escape*"))


def test_revisions_differ(hub, tmp_path):
    config = EngineConfig(model="org/tiny", revision="v2", download_dir=tmp_path)
    assert find_source(config).generation_config == {"temperature": 0.25}
    commit = commit_of("org/tiny", "v2")
    assert fetch("org/tiny", commit, tmp_path).name == commit
    with pytest.raises(CheckpointError, match=r"'org/tiny' at revision 'v3': .*no such revision"):
        fetch("org/tiny", "v3", tmp_path)


def test_offline_reads_the_cache_and_asks_nobody(hub, tmp_path, monkeypatch):
    first = fetch("org/tiny", download_dir=tmp_path)
    gguf = fetch("org/tiny-GGUF/tiny.F32.gguf", download_dir=tmp_path)
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("org/tiny", download_dir=tmp_path) == first
    assert fetch("org/tiny-GGUF/tiny.F32.gguf", download_dir=tmp_path) == gguf
    with pytest.raises(CheckpointError, match="not in the cache, and HF_HUB_OFFLINE is set"):
        fetch("org/other", download_dir=tmp_path)
    with pytest.raises(CheckpointError, match="not in the cache"):
        fetch("org/tiny", "v2", tmp_path)
    assert hub.asked == []


def test_without_a_network_the_cache_is_read(hub, tmp_path, monkeypatch):
    first = fetch("org/tiny", download_dir=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert fetch("org/tiny", download_dir=tmp_path) == first
    with pytest.raises(CheckpointError, match=r"'org/other': .*hub cannot be reached"):
        fetch("org/other", download_dir=tmp_path)


def test_an_interrupted_download_is_noticed(hub, tmp_path, monkeypatch):
    folder = fetch("org/tiny", download_dir=tmp_path)
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = find_source(EngineConfig(model="org/tiny", download_dir=tmp_path))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        source.load(source.model_config, np.float32)


REFUSED = [
    ("org/absent", "no such model"),
    ("org/gated", "grant access"),
    ("org/pickle", "no safetensors or GGUF files; PyTorch pickles"),
    ("org/pickle:Q4_0", "no GGUF file of the form Q4_0; there are none"),
    ("org/many-GGUF:Q4_K", "of the form Q4_K; there are BF16, Q4_K_M, Q8_0, UD-Q4_K_M"),
    ("org/many-GGUF:mmproj", "no GGUF file of the form mmproj"),
    ("org/many-GGUF/BF16/tiny-BF16-00002-of-00002.gguf", "first part, BF16/tiny-BF16-00001"),
    ("org/torn-GGUF", r"00002-of-00003\.gguf: the other parts are missing: torn-Q4_0-00001-of"),
    ("org/torn-GGUF/torn-Q4_0-00001-of-00003.gguf", r"has no torn-Q4_0-00001.*, torn-Q4_0-00003"),
    ("org/tiny-GGUF/absent.gguf", r"has no absent\.gguf; there are tiny\.F32\.gguf"),
]


@pytest.mark.parametrize(("name", "named"), REFUSED)
def test_names_that_lead_nowhere(hub, tmp_path, name, named):
    with pytest.raises(CheckpointError, match=named):
        fetch(name, download_dir=tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("", "a", "/a/b", "../b", "a/..", "a/b/c", "a/b/../c.gguf", "a//b", "a/b\0", "a/b*"),
        *("a/b:", "a/b:c/d", "a/b:*", "a/b:c:d", "a/b/c:Q4_0", "a/b/c.gguf:Q4_0"),
    ],
)
def test_what_is_no_name_asks_nobody(hub, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert not is_hub_name(name)
    with pytest.raises(CheckpointError, match="not a folder"):
        find_source(EngineConfig(model=name or "nowhere", download_dir=tmp_path))
    assert hub.asked == []


def test_a_gguf_file_by_name(hub, tmp_path):
    config = EngineConfig(model="org/tiny-GGUF/tiny.F32.gguf", download_dir=tmp_path)
    source = find_source(config)
    assert source.path.name == "tiny.F32.gguf" and source.model_config.hidden_size == 64
    source.load(source.model_config, np.float32)


def fetched(hub: Hub) -> set[str]:
    return {path.split("/", 5)[-1] for path in hub.asked if "/resolve/" in path}


@pytest.mark.parametrize(
    ("form", "file"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q4_k_m", "tiny-Q4_K_M.gguf"),
        ("UD-Q4_K_M", "tiny-UD-Q4_K_M.gguf"),
        ("Q8_0", "tiny-Q8_0.gguf"),
    ],
)
def test_a_form_names_a_file(hub, tmp_path, form, file):
    """As for llama.cpp and vLLM: `org/repo:Q4_K_M`."""
    assert fetch(f"org/many-GGUF:{form}", download_dir=tmp_path).name == file
    assert fetched(hub) == {file}


def test_a_form_in_several_parts(hub, tmp_path, monkeypatch):
    config = EngineConfig(model="org/many-GGUF:BF16", download_dir=tmp_path)
    source = find_source(config)
    assert source.path.name == "tiny-BF16-00001-of-00002.gguf"
    assert fetched(hub) == {f"BF16/tiny-BF16-0000{number}-of-00002.gguf" for number in (1, 2)}
    alone = find_source(EngineConfig(model="org/tiny-GGUF", download_dir=tmp_path))
    whole = parameter_values(alone.load(alone.model_config, np.float32))
    found = parameter_values(source.load(source.model_config, np.float32))
    assert all(np.array_equal(found[path], whole[path]) for path in whole)
    named = "org/many-GGUF/BF16/tiny-BF16-00001-of-00002.gguf"
    assert fetch(named, download_dir=tmp_path) == source.path
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch("org/many-GGUF:bf16", download_dir=tmp_path) == source.path
    assert fetch(named, download_dir=tmp_path) == source.path
    source.path.with_name("tiny-BF16-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"parts are missing: .*00002-of-00002"):
        fetch("org/many-GGUF:BF16", download_dir=tmp_path)


def test_without_a_form_q4_k_m_is_taken_and_said(hub, tmp_path, caplog):
    assert fetch("org/many-GGUF", download_dir=tmp_path).name == "tiny-Q4_K_M.gguf"
    assert "'org/many-GGUF': takes tiny-Q4_K_M.gguf, which is taken where no" in caplog.text
    with pytest.raises(CheckpointError, match="has to be fetched first"):
        fetch("org/many-GGUF", download_dir=tmp_path, config_only=True)


@pytest.mark.parametrize(
    ("free", "file", "why"),
    [
        (10_000, "big-00001-of-00002-Q8_0.gguf", "the largest that fits"),
        (700, "big-Q5_0.gguf", "the largest that fits"),
        (400, "big-Q3_K_S.gguf", "the largest that fits"),
        (100, "big-Q2_K.gguf", "the smallest, though none fits"),
    ],
)
def test_else_the_largest_that_fits_is_taken_and_said(
    hub, tmp_path, caplog, monkeypatch, free, file, why
):
    host = DeviceMemory(DeviceLimits("cpu", "CPU"), 1 << 30, free)
    monkeypatch.setattr("jaxserve.start.sources.hub.this_device", lambda: host)
    assert fetch("org/large-GGUF", download_dir=tmp_path).name == file
    assert fetched(hub) == {file}
    assert f"takes {file}, {why}" in caplog.text


def test_a_form_is_no_tokenizers(hub, tmp_path, checkpoint):
    config = EngineConfig(model=checkpoint, tokenizer="org/tiny:Q4_K_M", download_dir=tmp_path)
    find_source(config).tokenizer(config)
    assert "tokenizer.json" in fetched(hub)


def test_the_tokenizer_alone(hub, tmp_path, checkpoint):
    config = EngineConfig(model=checkpoint, tokenizer="org/tiny", download_dir=tmp_path)
    find_source(config).tokenizer(config)
    [folder] = tmp_path.glob("models--org--tiny/snapshots/*")
    assert "tokenizer.json" in names(folder) and "model.safetensors" not in names(folder)


def test_a_folder_wins_over_a_name(hub, tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(checkpoint, tmp_path / "org" / "tiny")
    assert find_source(EngineConfig(model="org/tiny")).path == Path("org/tiny")
    assert hub.asked == []


def test_sampling_defaults_are_chosen(checkpoint, tmp_path):
    """`generation_config` names the checkpoint's, vLLM's defaults, or a folder's; ends stay."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    own = {"temperature": 0.3, "eos_token_id": [1, 5]}
    (folder / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5}')

    def found(setting: str) -> dict:
        config = EngineConfig(model=folder, generation_config=setting)
        return find_source(config).generation_config

    assert found("auto") == own
    assert found("vllm") == {"eos_token_id": [1, 5]}
    assert found(str(tmp_path)) == {"eos_token_id": [1, 5], "top_p": 0.5}
    with pytest.raises(CheckpointError, match=r"generation_config.*nowhere"):
        found("nowhere")
