"""GGUF files of models with states, as llama.cpp's converter writes them."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Generator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import ModelConfig, parse_model_config, read_model_config
from jaxserve.models.config.recurrent import Mamba2Sizes
from jaxserve.models.config.rules import Scales
from jaxserve.models.registry import GGUF_RULES
from jaxserve.models.shards import Part
from jaxserve.weights import GgufFile, gguf_config, gguf_fields, load_weights, read_gguf
from jaxserve.weights.cutting import cut
from jaxserve.weights.gguf.file import ENCODINGS, Encoding
from jaxserve.weights.gguf.names import named_tensors
from jaxserve.weights.model_weights import parameters_of
from tests.models.tiny_models import reference_logits, relative_error
from tests.support.gguf_files import Type
from tests.support.gguf_mamba import multiplied
from tests.support.gguf_recurrent import CONVERTERS, OLDER_NEXT, convert
from tests.support.paged_runner import PagedRunner
from tests.support.quick_operations import quick_operations
from tests.support.recurrent_checkpoints import CASES, DELTA, OTHERS, save_checkpoint
from tests.weights.test_gguf_blocks import CODES, in_full, is_in_blocks

NEXT, FALCON = "qwen3next", "falcon-h1"
PACKED = (Type.Q8_0, Type.Q4_K)
PROMPT, COUNT = [5, 17, 33, 8, 90, 41, 2, 64, 11], 8
Metadata = dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def operations_are_compiled_quickly() -> Generator[None]:
    with quick_operations():
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufFile]:
    """Return a file of each architecture in float32. Its checkpoint's folder is beside it."""
    root, found = tmp_path_factory.mktemp("states"), {}
    for name in CASES:
        save_checkpoint(name, root / name)
        found[name] = read_gguf(convert(root / name, root / f"{name}.gguf", name))
    return found


def folder_of(file: GgufFile) -> Path:
    return file.path.with_suffix("")


def in_the_file_s_numbers(folder: Path) -> Path:
    """Round a checkpoint's tensors as the file's do: 1 + w - 1 is not w, nor log(exp(w)).

    Those of Falcon-H1 are multiplied by the model's factors.
    """
    tensors = load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    is_qwen = "linear_num_key_heads" in raw
    for name, tensor in tensors.items():
        if "ssm_multipliers" in raw:
            tensors[name] = multiplied(name, tensor, raw)
        if name.endswith("A_log"):
            tensors[name] = np.log(np.exp(tensor))
        elif is_qwen and name.endswith("norm.weight") and "linear_attn" not in name:
            tensors[name] = tensor + np.float32(1) - np.float32(1)
    save_file(tensors, folder / "model.safetensors")
    return folder


def values_of(source: Path | GgufFile, config: ModelConfig, **options: Any) -> dict[str, Any]:
    model = load_weights(source, config, jnp.float32, **options)
    return {name: parameter[...] for name, parameter in parameters_of(model).items()}


def checkpoint_values(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's parameters. Of Qwen3-Next's, files have two projections of each key."""
    values = values_of(folder, read_model_config(folder))
    for name in [name for name in values if name.endswith(".delta.fused")]:
        size = DELTA["linear_key_head_dim"]
        heads = np.asarray(values.pop(name)).reshape(len(values["norm.scale"]), 2, -1)
        parts = np.split(heads, [size, 2 * size, 4 * size], axis=-1)
        flat = [part.reshape(len(heads), -1) for part in parts]
        base = name.removesuffix("fused")
        values[f"{base}mixed"], values[f"{base}gate"] = np.concatenate(flat[:3], -1), flat[3]
    return values


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_what_it_was_made_from(files, monkeypatch, name):
    """The configuration, and every value to the bit, also of tensors that are read in pieces."""
    file = files[name]
    want = read_model_config(folder_of(file))
    config = gguf_config(file)
    changes: dict[str, Any] = {"dtype": want.dtype, "recurrent": want.recurrent}
    if name.startswith("nemotron_h"):
        # The converter writes this context for all of them, and the experts' width as the MLP's.
        assert config.max_position_embeddings == 1 << 20
        changes["max_position_embeddings"] = want.max_position_embeddings
        changes["intermediate_size"] = want.intermediate_size
    if name in ("granitehybrid", "mamba2"):  # without positions the length is llama.cpp's
        assert config.max_position_embeddings == 1 << 20
        changes["max_position_embeddings"] = want.max_position_embeddings
    if name == FALCON:  # the matrices have been multiplied by the factors
        sizes = want.recurrent
        assert isinstance(sizes, Mamba2Sizes) and isinstance(config.recurrent, Mamba2Sizes)
        assert len(set(sizes.factors)) == 4 and config.recurrent.factors == ()
        assert config.scales == Scales(attention=64**-0.5, mixers=((1.0, 1.0),) * 2)
        want = replace(want, scales=config.scales, recurrent=replace(sizes, factors=()))
        changes["recurrent"] = want.recurrent
    assert replace(config, **changes) == want
    assert parse_model_config(json.loads(json.dumps(gguf_fields(file)))) == config
    assert name == NEXT or config.recurrent == want.recurrent
    monkeypatch.setattr("jaxserve.weights.block_reader.BLOCK_BYTES", 1 << 12)
    got = values_of(file, config)
    expected = checkpoint_values(in_the_file_s_numbers(folder_of(file)))
    assert got.keys() == expected.keys()
    for path, value in got.items():
        assert np.asarray(value).tobytes() == np.asarray(expected[path]).tobytes(), path


def packed_cases() -> list[Any]:
    """Return the architectures with a kind of blocks. The usual run takes the kinds in turn."""
    found = []
    for name, usual in zip(CASES, cycle(PACKED), strict=False):
        for kind in PACKED:
            is_usual = kind == usual or name == "qwen35"
            marks = [] if is_usual else [pytest.mark.long]
            found.append(pytest.param(name, kind, id=f"{name}-{kind.name}", marks=marks))
    return found


def assert_same_tokens(file: GgufFile, reference: Any, tolerance: float, **options: Any) -> None:
    """Compare with Transformers' model: the greedy tokens, and the logits after each token."""
    model = load_weights(file, gguf_config(file), jnp.float32, **options)
    runner = PagedRunner(model, page_size=8, max_tokens=32)
    [logits] = runner.greedy([PROMPT], COUNT, padded=True)
    want = reference_logits(reference, runner.tokens[0])
    choices = want[len(PROMPT) - 1 : -1].argmax(axis=-1)
    assert runner.tokens[0][len(PROMPT) :] == choices.tolist()
    assert relative_error(logits, want) < tolerance


@pytest.mark.parametrize(("name", "kind"), packed_cases())
def test_blocks_are_what_they_were_made_from(tmp_path, name, kind):
    """Values that blocks hold exactly: the same numbers in each form, and the same tokens."""
    reference = save_checkpoint(name, tmp_path / "hf", kind)
    file = read_gguf(convert(tmp_path / "hf", tmp_path / "model.gguf", name, kind))
    config = gguf_config(file)
    assert kind.name in {entry.encoding.name for entry in file.tensors.values()}
    wide = values_of(file, config)
    expected = checkpoint_values(in_the_file_s_numbers(tmp_path / "hf"))
    for path, value in wide.items():
        assert np.asarray(value).tobytes() == np.asarray(expected[path]).tobytes(), path
    floats = values_of(file, config, panels=True)
    blocks = values_of(file, config, panels=True, packed=True)
    codes = values_of(file, config, packed=True)
    for path, value in floats.items():
        whole = in_full(value)
        np.testing.assert_array_equal(in_full(blocks[path]), whole, path)
        mine = in_full(codes[path]) if isinstance(codes[path], CODES) else whole
        np.testing.assert_array_equal(mine.reshape(whole.shape), whole, path)
    in_floats = {path for path, value in blocks.items() if not is_in_blocks(value)}
    assert {path for path in in_floats if wide[path].ndim > 1} <= set(filter(is_small, wide))
    # Products of blocks round activations to 16 bits.
    assert_same_tokens(file, reference, 1e-3, panels=True, packed=True)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == NEXT else [pytest.mark.long]) for name in CASES]
)
def test_a_file_in_floats_gives_the_same_tokens(tmp_path, name):
    """Of Qwen3-Next, whose projections a file has in other parts; others have equal parameters."""
    reference = save_checkpoint(name, tmp_path / "hf")
    file = read_gguf(convert(tmp_path / "hf", tmp_path / "model.gguf", name))
    assert_same_tokens(file, reference, 1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_further_models_of_granite_s_name(tmp_path, name):
    """Granite without experts, whose projections the checkpoint fuses, and Bamba."""
    folder = tmp_path / "hf"
    reference = save_checkpoint(name, folder)
    file = read_gguf(convert(folder, tmp_path / "model.gguf", "granitehybrid"))
    want, config = read_model_config(folder), gguf_config(file)
    assert replace(config, max_position_embeddings=want.max_position_embeddings) == want
    values, expected = values_of(file, config), values_of(in_the_file_s_numbers(folder), want)
    assert values.keys() == expected.keys()
    for path, value in values.items():
        assert np.asarray(value).tobytes() == np.asarray(expected[path]).tobytes(), path
    assert_same_tokens(file, reference, 1e-4)
    if name == "bamba":
        quarter = gguf_config(with_metadata(file, {"rope.dimension_count": 16}))
        assert (config.rope.partial, quarter.rope.partial) == (0.5, 0.25)
        with pytest.raises(UnsupportedModel, match="are not rotated"):
            gguf_config(with_metadata(file, {"rope.scaling.finetuned": False}))


def is_small(path: str) -> bool:
    """Return whether a file has the parameter in floats, or as one of several small tensors."""
    parts = "gates taps taps_bias constants router shared_gate steps norm write correction"
    return path.removesuffix(".scale").endswith(tuple(parts.split()))


def test_value_heads_move_as_blocks_or_as_inputs(tmp_path):
    """A head holds whole blocks of Q8_0, so they are moved. One block of Q4_K holds four heads."""
    for kind, in_order in ((Type.Q8_0, True), (Type.Q4_K, False)):
        save_checkpoint("qwen35", tmp_path / kind.name, kind)
        file = convert(tmp_path / kind.name, tmp_path / f"{kind.name}.gguf", "qwen35", kind)
        config = gguf_config(read_gguf(file))
        out = values_of(read_gguf(file), config, panels=True, packed=True)["layers.0.delta.out"]
        assert out.layout == "block_panels" and (out.order is None) == in_order
        # Inputs in another order cannot be cut. Outputs can.
        if out.order is not None:
            upper = Part((256, 256), (((0, 128),), ((0, 256),)))
            with pytest.raises(UnsupportedModel, match=r"delta\.out: .*value head.*allowed: 1"):
                cut(out, ("mlp", "embed"), upper, "layers.0.delta.out")
            left = cut(out, ("mlp", "embed"), Part((256, 256), (((0, 256),), ((0, 128),))), "x")
            np.testing.assert_array_equal(in_full(left), in_full(out)[:128])


# Further layers, with the fields that the converter reads for them.
FURTHER: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen35": {
        "mtp.fc.weight": (256, 512),
        "mtp.norm.weight": (256,),
        "mtp.pre_fc_norm_embedding.weight": (256,),
        "mtp.pre_fc_norm_hidden.weight": (256,),
        "mtp.layers.0.input_layernorm.weight": (256,),
        "mtp.layers.0.self_attn.q_proj.weight": (512, 256),
        "mtp.layers.0.mlp.up_proj.weight": (256, 256),
    },
    "nemotron_h_moe": {
        "mtp.layers.0.eh_proj.weight": (256, 512),
        "mtp.layers.0.enorm.weight": (256,),
        "mtp.layers.0.mixer.q_proj.weight": (256, 256),
        "mtp.layers.1.mixer.gate.weight": (4, 256),
        "mtp.layers.1.final_layernorm.weight": (256,),
    },
}


@pytest.mark.parametrize("name", FURTHER)
def test_blocks_that_predict_further_tokens_are_not_read(files, tmp_path, name):
    folder = shutil.copytree(folder_of(files[name]), tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    ones = {other: np.ones(shape, np.float32) for other, shape in FURTHER[name].items()}
    save_file(tensors | ones, folder / "model.safetensors")
    if name == "nemotron_h_moe":
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"num_nextn_predict_layers": 1}))
    file = read_gguf(convert(folder, tmp_path / "model.gguf", name))
    layers = gguf_config(files[name]).num_hidden_layers
    assert f"blk.{layers}.nextn.eh_proj.weight" in file.tensors
    assert file.metadata[f"{name}.block_count"] == layers + 1
    assert gguf_config(file) == gguf_config(files[name])
    names = named_tensors(files[name], gguf_config(files[name])).tensors.keys()
    assert named_tensors(file, gguf_config(file)).tensors.keys() == names
    load_weights(file, gguf_config(file), jnp.float32)


def test_older_files_of_qwen3_next(files, tmp_path):
    """They have one tensor of all projections, as the checkpoint, and no list of layers."""
    older = convert(folder_of(files[NEXT]), tmp_path / "model.gguf", OLDER_NEXT)
    file = read_gguf(older)
    assert "blk.0.ssm_in.weight" in file.tensors
    config = gguf_config(with_metadata(file, {"full_attention_interval": 2}))
    assert config.recurrent == read_model_config(folder_of(files[NEXT])).recurrent
    got, want = values_of(file, config), values_of(folder_of(files[NEXT]), config)
    for path in ("layers.0.delta.fused", "layers.2.delta.fused", "layers.0.delta.out"):
        assert np.asarray(got[path]).tobytes() == np.asarray(want[path]).tobytes()


def with_metadata(file: GgufFile, changes: Metadata) -> GgufFile:
    """Return the file with other values of its architecture's keys, or without those of None."""
    prefix = f"{file.metadata['general.architecture']}."
    metadata = dict(file.metadata) | {f"{prefix}{key}": value for key, value in changes.items()}
    return replace(
        file, metadata={key: value for key, value in metadata.items() if value is not None}
    )


@pytest.mark.parametrize("name", CASES)
def test_a_missing_key_is_named(files, name):
    """Keys without a default, and keys of both ways to say which layers keep a state."""
    file, required = files[name], GGUF_RULES[name].required
    assert {"block_count", "embedding_length"} < required
    for key in sorted(required):
        with pytest.raises(CheckpointError, match=rf"{name}\.gguf: .*key {name}\.{key}, without"):
            gguf_config(with_metadata(file, {key: None}))


REFUSED: list[tuple[str, Metadata, str]] = [
    ("lfm2", {"attention.head_count_kv": np.array([2, 0, 3])}, "head_count_kv.*all equal"),
    ("lfm2", {"attention.head_count_kv": np.array([np.inf, 0, np.inf])}, "num_key_value_heads"),
    ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 2"),
    ("lfm2moe", {"expert_weights_scale": 2.0}, "expert_weights_scale is 2.0; allowed: 0.0 or 1.0"),
    ("lfm2", {"attention.causal": False}, "attention.causal is False"),
    ("lfm2", {"attention.sliding_window": 16}, "does not know lfm2.attention.sliding_window"),
    ("lfm2", {"shortconv.l_cache": 1}, "conv_L_cache is 1"),
    ("lfm2", {"rope.dimension_count": 32}, "only part of each head"),
    ("qwen35", {"ssm.inner_size": 250}, r"inner_size is 250; allowed: a multiple of .*\(4\)"),
    ("qwen35", {"ssm.time_step_rank": 3, "ssm.inner_size": 192}, "linear_num_value_heads is 3"),
    ("qwen35", {"ssm.group_count": 0}, "linear_num_key_heads is 0"),
    ("qwen35", {"rope.dimension_count": 96}, "partial_rotary_factor is 1.5"),
    ("qwen35", {"attention.recurrent_layers": np.array([True])}, "each of 3 blocks"),
    ("qwen35", {"attention.recurrent_layers": ["a", "b", "c"]}, "each of 3 blocks"),
    ("qwen35", {"attention.recurrent_layers": 1}, "each of 3 blocks"),
    ("qwen35", {"full_attention_interval": 0}, "full_attention_interval is 0"),
    ("qwen35", {"nextn_predict_layers": 3}, "num_hidden_layers is 0"),
    ("qwen35", {"nextn_predict_layers": np.array([1])}, "nextn_predict_layers is .*a number"),
    ("qwen35moe", {"expert_weights_norm": False}, "expert_weights_norm is False"),
    ("qwen35moe", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("qwen3next", {"expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
    ("nemotron_h", {"ssm.group_count": 3}, "n_groups is 3"),
    ("nemotron_h", {"ssm.dt_b_c_rms": True}, "does not know nemotron_h.ssm.dt_b_c_rms"),
    ("nemotron_h", {"feed_forward_length": np.array([0, 1, 0, 2])}, "feed_forward_length"),
    ("nemotron_h_moe", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 0 or 2"),
    ("nemotron_h_moe", {"expert_used_count": np.array([2] * 4)}, "expert_used_count is .*a number"),
    ("nemotron_h_moe", {"attention.value_length": 32}, "keys and values of different sizes"),
    ("granitehybrid", {"ssm.inner_size": 300}, r"inner_size is 300; allowed: a multiple of .*256"),
    ("granitehybrid", {"ssm.group_count": 3}, "mamba_n_groups is 3"),
    ("granitehybrid", {"attention.head_count_kv": np.array([0, 2, 3])}, "head_count_kv.*all equal"),
    ("granitehybrid", {"rope.dimension_count": 32}, "only part of each head"),
    ("granitehybrid", {"expert_shared_feed_forward_length": None}, "shared_intermediate_size is 0"),
    ("granitehybrid", {"expert_gating_func": 2}, "expert_gating_func is 2"),
    ("falcon-h1", {"ssm.inner_size": 500}, "mamba_n_heads is 8; allowed: a divisor .*500"),
    ("mamba2", {"ssm.inner_size": 300}, "inner_size is 300; allowed: a multiple of .*8"),
    ("mamba2", {"embedding_length": 300}, "inner_size is 512; allowed: a multiple of .*300"),
    ("mamba2", {"attention.head_count": 4}, "num_attention_heads is 4"),
    ("mamba2", {"ssm.dt_b_c_rms": True}, "does not know mamba2.ssm.dt_b_c_rms"),
    ("kimi-linear", {"kda.head_dim": 0}, "linear_head_dim is 0"),
    ("kimi-linear", {"attention.key_length_mla": 64}, "heads of 64, 64 of it rotated"),
    ("kimi-linear", {"expert_gating_func": 1}, "expert_gating_func is 1; allowed: 0 or 2"),
    ("kimi-linear", {"kda.gate_lower_bound": -5.0}, "does not know kimi-linear.kda.gate_lower"),
    ("falcon-h1", {"rope.dimension_count": 32}, "only part of each head"),
    ("falcon-h1", {"attention.scale": 0.1}, "does not know falcon-h1.attention.scale"),
]


@pytest.mark.parametrize(("name", "metadata", "named"), REFUSED)
def test_metadata_that_no_model_has_is_refused(files, name, metadata, named):
    file = with_metadata(files[name], metadata)
    with pytest.raises((CheckpointError, UnsupportedModel), match=rf"(?s){name}\.gguf.*{named}"):
        gguf_config(file)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba", r"not implemented.*nearest.*Mamba2ForCausalLM \(in GGUF files: mamba2"),
        ("jamba", r"not implemented.*nearest.*BambaForCausalLM"),
    ],
)
def test_other_architectures_with_states_are_refused_by_name(files, name, reason):
    file = files["nemotron_h"]
    file = replace(file, metadata={**file.metadata, "general.architecture": name})
    with pytest.raises(UnsupportedModel, match=rf"general\.architecture is '{name}': .*{reason}"):
        gguf_config(file)


@pytest.mark.parametrize("name", ["granitehybrid", "nemotron_h"])
def test_a_file_whose_layers_all_attend_lacks_tensors(files, name):
    none = {"feed_forward_length": 0} if name == "nemotron_h" else {}
    file = with_metadata(files[name], {"attention.head_count_kv": 2, **none})
    assert gguf_config(file).recurrent is None
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn"):
        load_weights(file, gguf_config(file), jnp.float32)


def test_neutral_values_change_nothing(files):
    for name, metadata in (
        ("nemotron_h_moe", {"expert_gating_func": 2}),
        ("qwen35moe", {"expert_weights_norm": True, "expert_gating_func": 1}),
        ("qwen35", {"attention.recurrent_layers": None, "full_attention_interval": 3}),
        ("qwen35", {"rope.scaling.type": "none"}),
    ):
        file = with_metadata(files[name], metadata)
        config = gguf_config(file)
        last = 2 if metadata.get("full_attention_interval") else None
        assert config.num_page_layers == 1
        assert last is None or config.has_pages(last)


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        ("lfm2", "blk.0.shortconv.conv.weight", r"layers\.0\.conv\.conv\.weight"),
        ("qwen35", "blk.0.ssm_out.weight", r"layers\.0\.linear_attn\.out_proj\.weight"),
        ("qwen35", "blk.2.ssm_a", r"layers\.2\.linear_attn\.A_log"),
        ("nemotron_h", "blk.3.ssm_norm.weight", r"layers\.3\.mixer\.norm\.weight"),
        ("granitehybrid", "blk.2.ssm_d", r"layers\.2\.mamba\.D"),
        ("granitehybrid", "blk.1.ffn_up_shexp.weight", r"layers\.1\.mlp\.shared_expert\.up_proj"),
        ("mamba2", "blk.1.ssm_norm.weight", r"layers\.1\.mixer\.norm\.weight"),
        ("kimi-linear", "blk.2.ssm_conv1d_k.weight", r"layers\.2\.self_attn\.k_conv1d\.weight"),
        ("falcon-h1", "blk.1.ffn_norm", r"layers\.1\.post_attention_layernorm\.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(files, name, tensor, named):
    file = files[name]
    entry = file.tensors[tensor]
    first, *others = entry.shape
    cut = replace(
        entry, shape=(first - 1, *others), num_bytes=entry.num_bytes // first * (first - 1)
    )
    file = replace(file, tensors={**file.tensors, tensor: cut})
    with pytest.raises(CheckpointError, match=named):
        load_weights(file, gguf_config(file), jnp.float32)


def test_taps_in_blocks_are_refused_by_name(files):
    """The converter leaves them in float32, since blocks of a tap have no meaning."""
    file = files["lfm2"]
    entry = file.tensors["blk.0.shortconv.conv.weight"]
    packed = replace(entry, encoding=file_encoding("Q8_0"))
    file = replace(file, tensors={**file.tensors, entry.name: packed})
    with pytest.raises(CheckpointError, match=r"shortconv.conv.weight' is in Q8_0; allowed"):
        named_tensors(file, gguf_config(file))


def file_encoding(name: str) -> Encoding:
    [found] = (encoding for encoding in ENCODINGS.values() if encoding.name == name)
    return found


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(list(CASES)),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4),
)
def test_nothing_else_is_raised(files, tmp_path, name, edits):
    """Whichever bytes of the metadata are damaged: refused, or a model of another configuration."""
    damaged = bytearray(files[name].path.read_bytes())
    for place, byte in edits:
        damaged[place] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = read_gguf(path)
        named_tensors(file, gguf_config(file))
    except (CheckpointError, UnsupportedModel):
        return


def test_keys_and_tensors_are_llama_cpp_s():
    """Each key that a rule names is one of llama.cpp's, and each of its tensors has a name."""
    known = {
        value.removeprefix("{arch}.")
        for group in vars(gguf.Keys).values()
        if inspect.isclass(group)
        for value in vars(group).values()
        if isinstance(value, str)
    }
    known.add("attention.recurrent_layers")  # newer than the package gguf 0.19
    for name, converter in CONVERTERS.items():
        rules = GGUF_RULES[name]
        named = rules.fields.keys() | rules.read | rules.required | rules.absent | rules.lists
        assert named | rules.computed.keys() <= known, name
        tensors = {
            gguf.TENSOR_NAMES[tensor].replace("{bid}", "{}")
            for tensor in gguf.MODEL_TENSORS[converter.arch]
        }
        stacked = {f"blk.{{}}.{expert}_exps" for expert in rules.experts}
        known_tensors = {key.removesuffix(".bias") for key in rules.tensors} | stacked
        # An embedding's projection, and gates and upward projections as one, are refused by name.
        assert tensors - known_tensors <= {"dense_2", "blk.{}.ffn_gate_up_exps"}, name
