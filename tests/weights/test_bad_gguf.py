"""Damaged, lying and hostile GGUF files end in one error that names the file, soon and in little
memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.weights import gguf_config, load_weights, read_gguf
from tests.support.gguf_files import random_tensors, raw_config, write_gguf

NAME = "m.gguf"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return content_of("llama", tmp_path_factory.mktemp("gguf"))


def content_of(case: str, folder: Path) -> bytes:
    return write_gguf(folder / NAME, case, random_tensors(raw_config(case))).read_bytes()


def refused(path: Path, named: str = "") -> None:
    """Check for an error with the file's name and `named`, within 5 CPU seconds and 64 MB."""
    tracemalloc.start()
    started = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    message = str(caught.value)
    assert time.process_time() - started < 5 and peak < 64 << 20
    assert NAME in message and named in message and len(message) < 2000, message


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def header(keys: bytes, num_keys: int, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + keys + tensors


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def one(*tensors: bytes, size: int = 256) -> bytes:
    head = header(b"", 0, b"".join(tensors), len(tensors))
    return head + b"\0" * (-len(head) % 32) + b"\0" * size


A = tensor("a", (8, 8), 0, 0)
CASES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "another_format": (b"PK\x03\x04" + b"\0" * 100, "not a GGUF"),
    "git_lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\n", "not a GGUF"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
    "old": (b"GGUF" + struct.pack("<III", 1, 0, 0) + b"\0" * 64, "version 1"),
    "cut_in_the_counts": (b"GGUF\x03\0\0\0\0", "beyond the end"),
    "many_tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "tensors"),
    "many_keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 64) - 1), "keys"),
    "keys_that_are_not_there": (header(b"", 1000), "key 0"),
    "giant_key": (header(struct.pack("<Q", 1 << 62), 1), "key 0"),
    "giant_text": (header(text("a") + struct.pack("<IQ", 8, (1 << 64) - 1), 1), "'a'"),
    "long_text": (header(text("a") + struct.pack("<IQ", 8, 100 << 20), 1), "'a'"),
    "giant_array": (header(text("a") + struct.pack("<IIQ", 9, 0, 1 << 60), 1), "'a'"),
    "overflowing_array": (header(text("a") + struct.pack("<IIQ", 9, 10, 1 << 61), 1), "'a'"),
    "array_of_texts": (header(text("a") + struct.pack("<IIQ", 9, 8, 1 << 60), 1), "texts"),
    "array_of_arrays": (header(text("a") + struct.pack("<IIQ", 9, 9, 1 << 60), 1), "type 9"),
    "unknown_type": (header(text("a") + struct.pack("<I", 77), 1), "type 77"),
    "not_utf8": (header(struct.pack("<Q", 2) + b"\xff\xfe", 1), "UTF-8"),
    "key_twice": (header((text("a") + struct.pack("<II", 4, 1)) * 2, 2), "twice"),
    "alignment_zero": (header(text("general.alignment") + struct.pack("<II", 4, 0), 1), "align"),
    "alignment_odd": (header(text("general.alignment") + struct.pack("<II", 4, 9), 1), "align"),
    "alignment_text": (header(text("general.alignment") + struct.pack("<I", 8) + text("x"), 1), ""),
    "no_dimensions": (one(tensor("a", (), 0, 0)), "dimensions"),
    "many_dimensions": (one(tensor("a", (1,) * 9, 0, 0)), "dimensions"),
    "dimensions_beyond_the_file": (one(text("a") + struct.pack("<I", 1 << 31)), "dimensions"),
    "size_zero": (one(tensor("a", (0, 8), 0, 0)), "'a'"),
    "overflowing_shape": (one(tensor("a", (1 << 40, 1 << 40), 0, 0)), "'a'"),
    "wrapping_shape": (one(tensor("a", (1 << 32, 1 << 32), 0, 0)), "'a'"),
    "unknown_encoding": (one(tensor("a", (8, 8), 99, 0)), "type 99"),
    "removed_encoding": (one(tensor("a", (8, 8), 4, 0)), "type 4"),
    "broken_blocks": (one(tensor("a", (40, 8), 2, 0)), "whole blocks"),
    "blocks_of_a_vector": (one(tensor("a", (32,), 2, 0)), "whole blocks"),
    "offset_past_the_end": (one(tensor("a", (8, 8), 0, 1 << 40)), "gap"),
    "giant_offset": (one(tensor("a", (8, 8), 0, (1 << 64) - 32)), "offset"),
    "overlap": (one(A, tensor("b", (8, 8), 0, 128), size=384), "overlaps"),
    "gap": (one(A, tensor("b", (8, 8), 0, 512), size=1024), "gap"),
    "tensor_twice": (one(A, tensor("a", (8, 8), 0, 256), size=512), "twice"),
    "truncated": (one(A, size=255), "truncated"),
    "trailing": (one(A, size=300), "after the last"),
}


@pytest.mark.parametrize("case", CASES)
def test_file_that_lies(tmp_path, case):
    (tmp_path / NAME).write_bytes(CASES[case][0])
    refused(tmp_path / NAME, CASES[case][1])


def test_a_sound_file_of_the_same_making(tmp_path):
    """The errors above come from their named defects, since the undamaged file is sound."""
    (tmp_path / NAME).write_bytes(one(A, tensor("b", (8, 8), 0, 256), size=512))
    assert set(read_gguf(tmp_path / NAME).tensors) == {"a", "b"}


@pytest.mark.parametrize("kind", ["absent", "folder", "link"])
def test_file_that_is_none(tmp_path, kind):
    if kind == "folder":
        (tmp_path / NAME).mkdir()
    elif kind == "link":
        (tmp_path / NAME).symlink_to("nowhere")
    refused(tmp_path / NAME)


def test_every_cut_is_refused(tmp_path, content):
    path = tmp_path / NAME
    for length in [*range(0, 200, 7), 1000, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_gguf(path)


@pytest.fixture(scope="module")
def contents(content, tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return the contents of files of several architectures."""
    folder = tmp_path_factory.mktemp("gguf")
    cases = "mixtral", "gptoss", "olmo2_windows", "granite", "mistral3", "deepseek2_lite"
    return [content, *(content_of(case, folder) for case in cases)]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_nothing_else_is_raised(tmp_path, contents, which, edits):
    """Whichever bytes of the header are damaged: refused, or a model of another configuration."""
    damaged = bytearray(contents[which])
    for place, byte in edits:
        damaged[place] = byte
    path = tmp_path / NAME
    path.write_bytes(damaged)
    try:
        gguf_config(read_gguf(path))
    except (CheckpointError, UnsupportedModel):
        return


CONFIGS: dict[str, tuple[str, dict[str, object]]] = {
    "hidden_size": ("llama", {"llama.embedding_length": 2**31}),
    "hidden_size_text": ("llama", {"llama.embedding_length": "64"}),
    "layers": ("llama", {"llama.block_count": 10**9}),
    "layers_listed": ("llama", {"llama.block_count": [2, 2]}),
    "heads_zero": ("gemma2", {"gemma2.attention.head_count": 0}),
    "heads_not_dividing": ("llama", {"llama.attention.head_count": 5}),
    "kv_heads_by_layer": ("llama", {"llama.attention.head_count_kv": [2, 1]}),
    "rotated_listed": ("llama", {"llama.rope.dimension_count": [16, 16]}),
    "rotated_zero": ("phi3", {"phi3.rope.dimension_count": 0}),
    "rotated_in_part": ("llama", {"llama.rope.dimension_count": 8}),
    "scaling_without_factor": ("llama", {"llama.rope.scaling.type": "linear"}),
    "epsilon": ("llama", {"llama.attention.layer_norm_rms_epsilon": float("nan")}),
    "end_beyond": ("llama", {"tokenizer.ggml.eos_token_id": 24}),
    "end_text": ("llama", {"tokenizer.ggml.eos_token_id": "</s>"}),
    "context": ("llama", {"llama.context_length": 0}),
    "architecture": ("llama", {"general.architecture": "mamba"}),
    "experts_listed": ("mixtral", {"llama.expert_count": [4, 4]}),
    "experts_many": ("qwen3moe", {"qwen3moe.expert_count": 1 << 31}),
    "windows_text": ("gptoss", {"gpt-oss.attention.sliding_window_pattern": ["a", "b"]}),
    "windows_named": ("olmo2_windows", {"olmo2.attention.sliding_window_pattern": "2"}),
    "rotated_more": ("deepseek2", {"deepseek2.rope.dimension_count": 1000}),
    "stretched_by_nan": ("deepseek2_lite", {"deepseek2.rope.scaling.factor": float("nan")}),
    "growth_nan": ("mistral3", {"mistral3.attention.temperature_scale": float("nan")}),
    "value_size": ("qwen3", {"qwen3.attention.value_length": 16}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_metadata_that_no_model_has(tmp_path, case):
    family, metadata = CONFIGS[case]
    tensors = random_tensors(raw_config(family))
    path = write_gguf(tmp_path / NAME, family, tensors, metadata=metadata)
    with pytest.raises((CheckpointError, UnsupportedModel), match=NAME):
        gguf_config(read_gguf(path))


CHANGES: dict[str, Callable[[Path, bytes], object]] = {
    "truncated": lambda path, content: path.write_bytes(content[:-64]),
    "replaced": lambda path, content: (path.unlink(), path.write_bytes(content)),
    "removed": lambda path, content: path.unlink(),
}


@pytest.mark.parametrize("case", CHANGES)
def test_file_that_changes_during_the_load(tmp_path, content, case):
    path = tmp_path / NAME
    path.write_bytes(content)
    file = read_gguf(path)
    config = gguf_config(file)
    CHANGES[case](path, content)
    with pytest.raises(CheckpointError, match=NAME):
        load_weights(file, config, jnp.float32)
