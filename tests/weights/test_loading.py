"""Checkpoints of every dtype and layout arrive in the model value for value."""

import json
import shutil
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError
from jaxserve.models import Decoder, checkpoint_weights, read_model_config
from jaxserve.models.weight_table import dimensions
from jaxserve.weights import block_reader as reading
from jaxserve.weights import load_weights
from jaxserve.weights.block_reader import reading_ahead
from jaxserve.weights.safetensors import Shard, SharedFile, read_header


def load(directory, dtype=jnp.float32, **options) -> Decoder:
    return load_weights(directory, read_model_config(directory), dtype, **options)


def leaves(model: Decoder) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(model)[1])]


def assert_equal(one: Decoder, other: Decoder) -> None:
    for left, right in zip(leaves(one), leaves(other), strict=True):
        assert left.dtype == right.dtype
        assert left.tobytes() == right.tobytes()


def test_every_value_has_its_place(single, tensors):
    """Spelled out by hand, head by head, for the fused and transposed parameters."""
    model = load(single)
    attention, mlp = model.layers[1].attention, model.layers[1].mlp
    prefix = "model.layers.1."
    query = tensors[prefix + "self_attn.q_proj.weight"]
    key = tensors[prefix + "self_attn.k_proj.weight"]
    value = tensors[prefix + "self_attn.v_proj.weight"]
    out = tensors[prefix + "self_attn.o_proj.weight"]
    for head in range(4):
        rows = slice(4 * head, 4 * head + 4)
        kv_head, member = divmod(head, 2)
        np.testing.assert_array_equal(attention.qkv[:, kv_head, member], query[rows].T)
        np.testing.assert_array_equal(attention.out[kv_head, member], out[:, rows].T)
    for head in range(2):
        rows = slice(4 * head, 4 * head + 4)
        np.testing.assert_array_equal(attention.qkv[:, head, 2], key[rows].T)
        np.testing.assert_array_equal(attention.qkv[:, head, 3], value[rows].T)
    np.testing.assert_array_equal(mlp.gate_up[:, 0], tensors[prefix + "mlp.gate_proj.weight"].T)
    np.testing.assert_array_equal(mlp.gate_up[:, 1], tensors[prefix + "mlp.up_proj.weight"].T)
    np.testing.assert_array_equal(mlp.down[...], tensors[prefix + "mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(model.embedding.table[...], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(model.embedding.project[...], tensors["lm_head.weight"].T)
    np.testing.assert_array_equal(model.norm.scale[...], tensors["model.norm.weight"])


def test_shards_equal_one_file_bit_for_bit(single, sharded):
    assert_equal(load(single), load(sharded))


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_dtype_is_cast_by_value(single, tensors, stored, wanted):
    held = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    save_file(held, single / "model.safetensors")
    model = load(single, wanted)
    want = held["model.layers.0.mlp.down_proj.weight"].astype(wanted).T
    got = np.asarray(model.layers[0].mlp.down[...])
    assert got.dtype == wanted
    assert got.tobytes() == want.tobytes()
    assert all(leaf.dtype == wanted for leaf in leaves(model))


def test_float64_stays_float64(single, tensors):
    held = {name: tensor.astype(np.float64) / 3 for name, tensor in tensors.items()}
    save_file(held, single / "model.safetensors")
    with jax.enable_x64(True):
        model = load(single, jnp.float64)
    np.testing.assert_array_equal(model.norm.scale[...], held["model.norm.weight"])
    assert all(leaf.dtype == np.float64 for leaf in leaves(model))


def test_few_parameters_are_held_at_once_where_they_leave_the_host(single, tensors, monkeypatch):
    """Where no shard is larger than two parameters and their copies, one stream fills them."""
    filled: set[SharedFile] = set()

    class Counted(SharedFile):
        def read(self, shard: Shard, offset: int, values: np.ndarray) -> bool:
            filled.add(self)
            return super().read(shard, offset, values)

    def streams(folder: Path, **options: Any) -> int:
        filled.clear()
        load(folder, **options)
        return len(filled)

    monkeypatch.setattr(reading, "SharedFile", Counted)
    apart = single.parent / "apart"
    shutil.copytree(single, apart)
    (apart / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, apart / f"{number}.safetensors")
    shards = {name: f"{number}.safetensors" for number, name in enumerate(tensors)}
    index = {"metadata": {}, "weight_map": shards}
    (apart / "model.safetensors.index.json").write_text(json.dumps(index))
    assert streams(single) == streams(apart) == reading.STREAMS
    assert 1 < streams(single, quantization="int8") <= reading.STREAMS
    assert streams(apart, quantization="int8") == 1


def test_what_is_read_ahead_is_the_beginning_of_each_stream(single, tensors, monkeypatch):
    """A broken file changes no result: the read itself reports the error."""
    skimmed: list[tuple[int, int]] = []
    seen = Semaphore(0)

    class Seen(SharedFile):
        def skim(self, shard: Shard, offset: int, size: int, memory: np.ndarray) -> None:
            skimmed.append((offset, offset + size))
            seen.release()
            super().skim(shard, offset, size, memory)
            raise CheckpointError("no more of it")

    path = single / "model.safetensors"
    found = {entry.name: entry for entry in read_header(path)}
    table = checkpoint_weights(read_model_config(single))
    monkeypatch.setattr(reading, "SharedFile", Seen)
    monkeypatch.setattr(reading, "SKIM_BYTES", 64)
    with reading_ahead(table, found, path.stat):
        for _ in range(reading.STREAMS):
            assert seen.acquire(timeout=60)
        assert len(set(skimmed)) == len(skimmed) == reading.STREAMS
        model = load(single)  # reads ahead too, as far as it gets
    assert len(set(skimmed)) == reading.STREAMS
    starts = {entry.offset for entry in found.values()}
    assert all(start in starts and end - start == 64 for start, end in skimmed)
    assert min(skimmed)[0] == min(starts)
    np.testing.assert_array_equal(model.embedding.table[...], tensors["model.embed_tokens.weight"])


def test_reading_ahead_stops_in_time(single, monkeypatch):
    """After a number of bytes, and when the bridged work has ended, also by an error."""
    table = checkpoint_weights(read_model_config(single))
    found = {entry.name: entry for entry in read_header(single / "model.safetensors")}
    sizes: list[int] = []
    stop, started, called = Event(), Event(), Event()
    waits = False

    class Seen(SharedFile):
        def skim(self, shard: Shard, offset: int, size: int, memory: np.ndarray) -> None:
            sizes.append(size)
            if waits or sum(sizes) == 5000:
                started.set()
            assert not waits or stop.wait(60)
            super().skim(shard, offset, size, memory)

    monkeypatch.setattr(reading, "SharedFile", Seen)
    monkeypatch.setattr(reading, "STREAMS", 1)
    monkeypatch.setattr(reading, "AHEAD_BYTES", 5000)
    monkeypatch.setattr(reading, "Event", lambda: stop)
    with reading_ahead(table, found, called.set):
        assert started.wait(60)
    assert sum(sizes) == 5000 and called.is_set()

    def fail() -> None:
        with reading_ahead(table, found, called.set):
            assert started.wait(60)
            print(1 / 0)

    waits = True
    for event in (stop, started):
        event.clear()
    sizes.clear()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert len(sizes) == 1
    with pytest.raises(ZeroDivisionError), reading_ahead(table, found, lambda: 1 / 0):
        pass


def test_progress_counts_bytes(sharded, tensors):
    seen: list[tuple[int, int]] = []
    load(sharded, on_progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert [t for _, t in seen] == [total] * len(tensors)
    assert seen[-1] == (total, total) and seen == sorted(seen)


def test_parameters_are_placed_by_path(single):
    placed: dict[str, tuple[int, ...]] = {}

    def place(path: str, values: np.ndarray) -> jax.Array:
        placed[path] = values.shape
        return jnp.asarray(values)

    model = load(single, place=place)
    assert placed["layers.1.attention.qkv"] == (16, 2, 4, 4)
    assert len(placed) == len(leaves(model))


def test_the_cache_of_the_hub_is_followed(tmp_path, sharded):
    """There, the files of a snapshot are links into the model's folder of blobs."""
    home = tmp_path / "models--some--model"
    snapshot, blobs = home / "snapshots" / "abc", home / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sharded.iterdir()):
        shutil.copy(file, blobs / f"{number:064}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
    assert_equal(load(snapshot), load(sharded))


def test_stored_rotary_frequencies_are_left_out(single, tensors):
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    want = load(single)
    save_file(tensors | old, single / "model.safetensors")
    assert_equal(load(single), want)


def test_a_tied_output_projection_is_left_out(single, tensors):
    raw = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, single / "model.safetensors")
    model = load(single)
    np.testing.assert_array_equal(
        model.embedding.project[...], tensors["model.embed_tokens.weight"].T
    )
    assert "lm_head.weight" in load_file(single / "model.safetensors")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_name(single, tensors, dtype, value):
    held = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    held["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    save_file(held, single / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(single, jnp.float32)
    assert "layers.1.self_attn.k_proj" in str(caught.value) and "NaN" in str(caught.value)
    assert "model.safetensors" in str(caught.value)
    loaded = load(single, jnp.float32, check_finite=False)
    assert not np.isfinite(loaded.layers[1].attention.qkv[...]).all()


def test_values_beyond_the_range_of_the_dtype_are_refused_by_name(single, tensors):
    tensors["model.norm.weight"][3] = 1e6
    save_file(tensors, single / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*1000000.*float16"):
        load(single, jnp.float16)
    load(single, jnp.bfloat16)


def test_blocks_are_the_whole_in_pieces(single, tensors):
    """A tensor's blocks together fill the same cells as the whole tensor."""
    config = read_model_config(single)
    for weight in checkpoint_weights(config):
        tensor, dims = tensors[weight.name], dimensions(config)
        whole = weight.arrange(tensor, dims)
        pieces = np.full(whole.shape, np.nan, np.float32)
        for block in weight.blocks(dims, 40):
            pieces[block.index] = block.arrange(tensor[slice(*block.rows)])
        np.testing.assert_array_equal(pieces, whole)
