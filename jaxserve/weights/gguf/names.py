"""Convert the metadata and tensor names of GGUF files to Hugging Face configs and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import ModelConfig, parse_model_config
from jaxserve.models.config.fields import shown
from jaxserve.models.gguf.metadata import FURTHER, PATTERN, VISION_KEYS, GgufMetadata, Raw
from jaxserve.models.gguf.rules import (
    COMPUTED,
    COMPUTED_BY_EXPERTS,
    FIELDS,
    PER_LAYER,
    READ,
    TEXTS,
    Change,
    GgufRules,
    Names,
)
from jaxserve.models.registry import GGUF_RULES, gguf_refusal
from jaxserve.settings.checks import is_neutral
from jaxserve.weights.checkpoint import Checkpoint, listed
from jaxserve.weights.gguf.file import GgufFile, GgufTensor
from jaxserve.weights.gguf.joined import ValueTensor, joined
from jaxserve.weights.safetensors import TensorEntry, read_tensor

WINDOW_SIZE = "attention.sliding_window"
MAX_FURTHER = 16
FUSED = r"blk\.(\d{1,5})\.attn_qkv\.(weight|bias)"
FUSED_EXPERTS = r"blk\.(\d{1,5})\.ffn_gate_up_exps\.weight"


def gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration of the model in a GGUF file. Errors are as in `gguf_fields`."""
    return parse_model_config(gguf_fields(file), str(file.path))


def gguf_fields(file: GgufFile) -> Raw:
    """Convert the metadata of a GGUF file to the fields of a config.json.

    Raises:
        UnsupportedModel: jaxserve does not support the architecture or a field.
        CheckpointError: the metadata is inconsistent.
    """
    rules = rules_of(file)
    metadata = _own(file, rules)
    fields = {**FIELDS, **rules.fields}
    raw: Raw = {fields[key]: value for key, value in metadata.items() if key in fields}
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{file.path}: has no tensor token_embd.weight")
    raw |= {
        "architectures": [rules.name],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
    }
    size = metadata.get("attention.key_length")
    value_size = metadata.get("attention.value_length", size)
    if value_size != size and "attention.value_length" not in rules.fields:
        raise UnsupportedModel(f"{file.path}: keys and values of different sizes")
    rules.finish(_metadata(file), raw)
    return raw


def rules_of(file: GgufFile) -> GgufRules:
    """Return the conversion rules for a GGUF file's architecture.

    Raises:
        UnsupportedModel: the architecture is not supported.
    """
    name = file.metadata.get("general.architecture")
    if name == "clip":
        raise UnsupportedModel(
            f"{file.path}: is a projector of images (mmproj), not a model; name the GGUF file of "
            "the model itself, whose text is served"
        )
    if not isinstance(name, str) or name not in GGUF_RULES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture is {shown(name)}: {gguf_refusal(name)}"
        )
    return GGUF_RULES[name]


def _metadata(file: GgufFile) -> GgufMetadata:
    def read_factors(name: str) -> list[float]:
        entry = file.tensors[name]
        if len(entry.shape) != 1 or entry.shape[0] > 1 << 12:
            shape = list(entry.shape)
            raise CheckpointError(f"{file.path}: tensor {name!r} has the shape {shape}")
        return [float(value) for value in read_tensor(entry)]

    architecture = file.metadata["general.architecture"]
    tensors = file.tensors.keys()
    return GgufMetadata(file.path, architecture, file.metadata, tensors, read_factors)


def _own(file: GgufFile, rules: GgufRules) -> dict[str, Any]:
    """Return the metadata of the file's architecture, by key without the architecture's prefix.

    Raises:
        UnsupportedModel: a key or value is not supported, or a value has the wrong type.
        CheckpointError: a key without a default is missing.
    """
    prefix = f"{file.metadata['general.architecture']}."
    metadata = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    supported = FIELDS.keys() | rules.fields.keys() | READ | rules.read | rules.lists
    computed = _computed(metadata, rules)
    for key in sorted(metadata.keys() & computed.keys() - supported):
        if not is_neutral(metadata[key], computed[key]):
            allowed = " or ".join(map(shown, computed[key]))
            raise UnsupportedModel(
                f"{file.path}: {prefix + key} is {shown(metadata[key])}; allowed: {allowed}"
            )
    # Zero means that the model has no experts or no window.
    unknown = [
        key
        for key, value in metadata.items()
        if key not in supported | computed.keys()
        and (_says(value) or (key == PATTERN and _says(metadata.get(WINDOW_SIZE, 0))))
    ]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: jaxserve does not know {listed(prefix + key for key in unknown)}"
        )
    missing = sorted(rules.required - metadata.keys())
    if missing:
        keys = listed(prefix + key for key in missing)
        raise CheckpointError(f"{file.path}: has no metadata key {keys}, without a default")
    for key in metadata.keys() & PER_LAYER:
        layers = metadata.get("block_count")
        metadata[key] = _of_all_layers(metadata[key], layers, key in rules.absent)
    for key in metadata.keys() & supported - {PATTERN, *VISION_KEYS, *rules.lists}:
        if np.ndim(metadata[key]) or isinstance(metadata[key], str) != (key in TEXTS):
            kind = "text" if key in TEXTS else "a number"
            if key in PER_LAYER:
                kind += ", or one number for each layer, all equal"
            raise UnsupportedModel(
                f"{file.path}: {prefix + key} is {shown(metadata[key])}; allowed: {kind}"
            )
    return metadata


def _computed(metadata: Raw, rules: GgufRules) -> dict[str, tuple[Any, ...]]:
    # Allowed values, by key, of metadata that is not a config field.
    computed = {**COMPUTED, "use_parallel_residual": (rules.parallel,)}
    has_experts = "expert_count" in rules.fields and _says(metadata.get("expert_count", 0))
    return {**computed, **(COMPUTED_BY_EXPERTS if has_experts else {}), **rules.computed}


def _of_all_layers(value: Any, layers: Any, zeros: bool) -> Any:
    # One size if all layers have the same, or with `zeros` the same or 0. Others stay a list.
    if not isinstance(value, np.ndarray) or len(value) != layers:
        return value
    sizes = value[value != 0] if zeros and value.any() else value
    return sizes[0].item() if (sizes == sizes[0]).all() else value


def named_tensors(file: GgufFile, config: ModelConfig) -> Checkpoint:
    """Return the tensors of a GGUF file as a Checkpoint, under their Hugging Face names.

    Args:
        config: configuration of the model, which may differ from `gguf_config(file)`.

    Raises:
        CheckpointError: a tensor does not fit the model, or a name occurs twice.
        UnsupportedModel: the architecture is not supported.
    """
    rules = rules_of(file)
    remaining = dict(file.tensors)
    if remaining.keys() >= rules.factors:
        remaining = {name: entry for name, entry in remaining.items() if name not in rules.factors}
    further = _further_blocks(file, rules)
    remaining = {name: e for name, e in remaining.items() if not name.startswith(further)}
    tensors: dict[str, TensorEntry] = {}
    for entry in _joined(file, rules, config, remaining):
        tensors[entry.name] = entry
    for name, values in rules.values(_metadata(file), config.num_hidden_layers).items():
        tensors[name] = ValueTensor.of(name, values, next(iter(file.tensors.values())).shard)
    for entry in remaining.values():
        for tensor in _renamed(entry, file, rules, config):
            if tensors.setdefault(tensor.name, tensor).offset != tensor.offset:
                raise CheckpointError(f"{file.path}: two tensors are {tensor.name!r}")
    return Checkpoint(file.path, tensors, whole=True)


def _further_blocks(file: GgufFile, rules: GgufRules) -> tuple[str, ...]:
    # Prefixes of the last blocks, which predict further tokens and are not read.
    metadata = _metadata(file)
    layers, count = metadata.get("block_count"), metadata.get(FURTHER, 0)
    if FURTHER not in rules.read or type(layers) is not int or type(count) is not int:
        return ()
    count = min(count, MAX_FURTHER)
    return tuple(f"blk.{index}." for index in range(layers - count, layers))


def _joined(
    file: GgufFile, rules: GgufRules, config: ModelConfig, remaining: dict[str, GgufTensor]
) -> Iterator[TensorEntry]:
    # The parts are removed from `remaining`.
    for join in rules.joins:
        for layer in range(config.num_hidden_layers):
            names = [f"blk.{layer}.{part}" for part in join.parts]
            if remaining.keys() >= set(names):
                parts = [remaining.pop(name) for name in names]
                yield joined(f"model.layers.{layer}.{join.name}", join, parts)


def _renamed(
    entry: GgufTensor, file: GgufFile, rules: GgufRules, config: ModelConfig
) -> Iterator[GgufTensor]:
    """Yield a GGUF tensor's entry under its Hugging Face name.

    A tensor of all experts or heads yields one matrix for each, and fused queries, keys and values
    yield three tensors. Fused gates and upward projections of experts yield two matrices for each.
    """
    fused = re.fullmatch(FUSED_EXPERTS, entry.name)
    if fused is not None and "ffn_gate" in rules.experts:
        count = config.experts.count if config.experts is not None else 0
        for index, matrix in enumerate(_matrices(entry, file, count, "experts")):
            for half, name in zip(_halves(matrix), ("ffn_gate", "ffn_up"), strict=True):
                yield replace(half, name=rules.experts[name].format(int(fused[1]), index))
        return
    expert = re.fullmatch(r"blk\.(\d{1,5})\.(\w+?)(?:_exps|\.(\d{1,5}))\.weight", entry.name)
    if expert is not None and expert[2] in rules.experts:
        name, layer, number = rules.experts[expert[2]], int(expert[1]), expert[3]
        if number is not None:
            yield replace(entry, name=name.format(layer, int(number)))
        else:
            count = config.experts.count if config.experts is not None else 0
            for index, matrix in enumerate(_matrices(entry, file, count, "experts")):
                yield replace(matrix, name=name.format(layer, index))
        return
    head = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)\.weight", entry.name)
    if head is not None and head[2] in rules.heads:
        matrices = _matrices(entry, file, config.num_attention_heads, "heads")
        for index, matrix in enumerate(matrices):
            yield replace(matrix, name=rules.heads[head[2]].format(head[1], index))
        return
    if rules.fused and (fused := re.fullmatch(FUSED, entry.name)) is not None:
        yield from _query_key_value(entry, fused, file, config)
        return
    name = hugging_face_name(entry.name, rules.tensors)
    if rules.paired and re.search(r"\.(q|k)_proj\.", name):
        heads = config.num_attention_heads
        heads = heads if ".q_proj." in name else config.num_key_value_heads
        if entry.shape[0] % (2 * heads):
            raise CheckpointError(f"{file.path}: tensor {entry.name!r} does not hold whole heads")
        entry = replace(entry, heads=heads)
    change = rules.change(config, name)
    yield replace(entry if change is None else _changed(entry, change), name=name)


def _changed(entry: GgufTensor, change: Change) -> GgufTensor:
    """Return the entry of a GGUF tensor as the checkpoint's tensor, by the rule `change`.

    The shape stays as it is in the file if the rule does not fit it. The later comparison with the
    model's shapes then reports the tensor.

    Raises:
        CheckpointError: the tensor is stored in blocks, and has another shape in the checkpoint.
    """
    shape = entry.shape
    if change.shape is not None and change.shape != shape and prod(change.shape) == prod(shape):
        if entry.encoding.is_packed:
            raise CheckpointError(
                f"{entry.shard.path}: tensor {entry.name!r} is in {entry.encoding.name}; allowed: "
                "formats without blocks"
            )
        shape = change.shape
    rows, columns = change.rows, change.columns
    return replace(
        entry,
        shape=shape,
        restore=change.restore,
        rows=rows if rows is not None and len(rows) == shape[0] else None,
        columns=columns if columns is not None and len(columns) == shape[-1] else None,
    )


def _query_key_value(
    entry: GgufTensor, fused: re.Match[str], file: GgufFile, config: ModelConfig
) -> Iterator[GgufTensor]:
    """Split the entry of a GGUF tensor that has the rows of queries, then keys, then values.

    Args:
        entry: the tensor's place in the file.
        fused: match whose groups are the layer's number and the end of the tensor's name.
        file: the file, for the message of an error.
        config: has the numbers of heads.

    Yields:
        The entries of queries, keys and values, under their Hugging Face names.

    Raises:
        CheckpointError: the number of rows is not that of the config.
    """
    keys = config.num_key_value_heads * config.head_dim
    rows = {"q": config.num_attention_heads * config.head_dim, "k": keys, "v": keys}
    if entry.shape[0] != sum(rows.values()):
        raise CheckpointError(
            f"{file.path}: tensor {entry.name!r} has {entry.shape[0]} rows; expected "
            f"{sum(rows.values())}, of queries, keys and values"
        )
    size, offset = entry.num_bytes // entry.shape[0], entry.offset
    for part, count in rows.items():
        yield replace(
            entry,
            name=f"model.layers.{fused[1]}.self_attn.{part}_proj.{fused[2]}",
            shape=(count, *entry.shape[1:]),
            offset=offset,
            num_bytes=count * size,
        )
        offset += count * size


def _matrices(entry: GgufTensor, file: GgufFile, count: int, kind: str) -> Iterator[GgufTensor]:
    """Yield the entry of each matrix of a GGUF tensor [count, outputs, inputs].

    `kind` names the matrices in errors, such as "experts".
    """
    if len(entry.shape) != 3 or entry.shape[0] != count:
        raise CheckpointError(
            f"{file.path}: tensor {entry.name!r} has the shape {list(entry.shape)}; expected a "
            f"matrix for each of {count} {kind}"
        )
    size = entry.num_bytes // count
    for index in range(count):
        offset = entry.offset + index * size
        yield replace(entry, shape=entry.shape[1:], offset=offset, num_bytes=size)


def _halves(matrix: GgufTensor) -> tuple[GgufTensor, GgufTensor]:
    # The upper and the lower rows. Of an odd number, the later comparison of shapes reports one.
    rows, size = matrix.shape[0] // 2, matrix.num_bytes // matrix.shape[0]
    first, second = (rows, matrix.shape[1]), (matrix.shape[0] - rows, matrix.shape[1])
    return (
        replace(matrix, shape=first, num_bytes=rows * size),
        replace(
            matrix,
            shape=second,
            offset=matrix.offset + rows * size,
            num_bytes=second[0] * size,
        ),
    )


def hugging_face_name(name: str, names: Names) -> str:
    """Return the Hugging Face name of a GGUF tensor, or `name` unchanged if `names` lacks it.

    `names` maps llama.cpp's names to Hugging Face's, with {} for the number of the layer.
    """
    layer = re.fullmatch(r"blk\.(\d{1,5})\.(.+)", name)
    number = layer[1] if layer else ""
    key = name if layer is None else f"blk.{{}}.{layer[2]}"
    if key in names:
        return names[key].replace("{}", number)
    stem, _, kind = key.rpartition(".")
    if stem not in names or kind not in ("weight", "bias"):
        return name
    return f"{names[stem].replace('{}', number)}.{kind}"


def _says(value: Any) -> bool:
    return bool(np.any(value)) if not isinstance(value, str) else value not in ("", "none")


def _dtype(file: GgufFile) -> str:
    # The dtype of the matrices outside blocks. Without such matrices: float16, as block scales.
    names = {entry.encoding.name for entry in file.tensors.values() if len(entry.shape) > 1}
    if names & {"BF16", "MXFP4"}:  # the scales of MXFP4 exceed the range of float16
        return "bfloat16"
    return "float32" if names == {"F32"} else "float16"
