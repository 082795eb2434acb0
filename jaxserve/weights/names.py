"""Match a checkpoint's tensors with the tensors that the model's configuration implies."""

import logging
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from itertools import zip_longest

from jaxserve.errors import CheckpointError
from jaxserve.models import ModelConfig
from jaxserve.models.weight_table import WeightName
from jaxserve.weights.checkpoint import Checkpoint, listed
from jaxserve.weights.mxfp4 import unpacked
from jaxserve.weights.safetensors import FLOATS, TensorEntry

logger = logging.getLogger(__name__)

# Modules that predict further tokens (Qwen3.5, Nemotron 3, MiMo). They are not read.
FURTHER = ("mtp.", "model.mtp.")
# Rotary frequencies, which old versions of Transformers stored, and constants of an activation
# (Apertus). The config determines both.
COMPUTED = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
    r"|model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)"
)
# Projections of keys and values of layers that read the cache pages of others. They are not read.
UNUSED = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.[kv]_(proj|norm)\..*")
LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
OUTPUT = "lm_head.weight"


def renamed(checkpoint: Checkpoint, patterns: Iterable[tuple[str, str]]) -> Checkpoint:
    """Return the checkpoint with its tensors renamed to the names of the model family's table.

    Args:
        checkpoint: the checkpoint with the names of its files.
        patterns: regular expressions and replacements, applied to each name in order.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    patterns, tensors = tuple(patterns), dict[str, TensorEntry]()
    if not patterns:
        return checkpoint
    for name, entry in checkpoint.tensors.items():
        plain = name
        for pattern, replacement in patterns:
            plain = re.sub(pattern, replacement, plain)
        if plain in tensors:
            raise CheckpointError(f"{checkpoint.directory}: two tensors are {plain!r}")
        tensors[plain] = replace(entry, name=plain)
    return replace(checkpoint, tensors=tensors)


def as_stored(
    table: Iterable[WeightName], checkpoint: Checkpoint, dims: Mapping[str, int]
) -> list[WeightName]:
    """Return the model's table with each layout chosen by the shape of the checkpoint's tensor."""
    tensors = checkpoint.tensors
    shapes = {name: entry.shape for name, entry in tensors.items()}
    return [tensor.stored_as(shapes.get(tensor.name), dims) for tensor in table]


def has_own_output(checkpoint: Checkpoint, output: str, embedding: str) -> bool:
    """Return whether a checkpoint has an output projection that is not a copy of the embedding.

    The bytes of both tensors are compared if their dtypes and shapes are equal.

    Args:
        checkpoint: with the tensor names of its files.
        output: prefix of the names of the output projection's tensors.
        embedding: name of the embedding.
    """
    tensors = checkpoint.tensors
    outputs = [name for name in tensors if name.startswith(output)]
    if outputs != [f"{output}weight"] or embedding not in tensors:
        return bool(outputs)
    return not _same(tensors[outputs[0]], tensors[embedding])


def match_names(
    checkpoint: Checkpoint,
    config: ModelConfig,
    table: Iterable[WeightName],
    dims: Mapping[str, int],
) -> dict[str, TensorEntry]:
    """Return the checkpoint's entry for every tensor name of the model's table.

    An output projection is ignored if the model ties it to the embedding, because `has_own_output`
    has shown that the two are equal. Tensors outside the model are ignored with a warning that
    names them, for example another head, or layers after the last one. Unknown tensors of a layer
    or module of the model are an error, because without them the model would compute other results.

    Args:
        checkpoint: the checkpoint, with the names of the table.
        config: configuration of the model.
        table: the tensors of the model.
        dims: sizes of the dimensions that the table names.

    Raises:
        CheckpointError: one error that lists every missing, unexpected and misshapen tensor.
    """
    expected = {tensor.name: tensor.shape(dims) for tensor in table}
    packed = config.experts is not None and config.experts.packed
    tensors = unpacked(checkpoint.tensors) if packed else checkpoint.tensors
    layers = config.num_hidden_layers
    further = tuple(f"model.layers.{layers + index}." for index in range(config.extra_layers))
    present = {
        name: entry
        for name, entry in tensors.items()
        if not COMPUTED.fullmatch(name) and not name.startswith((*further, *FURTHER))
    }
    for name in list(present) if config.layers.sources else ():
        layer = UNUSED.fullmatch(name)
        if layer and int(layer[1]) < layers and config.layers.reads_other(int(layer[1])):
            del present[name]
    if config.tie_word_embeddings:
        present.pop(OUTPUT, None)
    extra = sorted(present.keys() - expected.keys())
    modules = {name.rpartition(".")[0] for name in (*expected, OUTPUT)}
    bad = [name for name in extra if checkpoint.whole or _changes(name, modules, layers)]
    _check(checkpoint, present, expected, bad)
    if extra:
        logger.warning(
            "%s: %d tensor(s) belong to nothing in config.json and are left out: %s",
            checkpoint.directory, len(extra), listed(extra),
        )  # fmt: skip
    return {name: present[name] for name in expected}


def _check(
    checkpoint: Checkpoint,
    present: Mapping[str, TensorEntry],
    expected: Mapping[str, tuple[int, ...]],
    unexpected: list[str],
) -> None:
    """Raise one CheckpointError that lists all tensors of a checkpoint that do not fit the model.

    These are missing and unexpected tensors, and those of another shape or of no float dtype.

    Args:
        checkpoint: the checkpoint, for its folder.
        present: its tensors by name.
        expected: shapes of the model's tensors by name.
        unexpected: names of tensors that the model lacks.
    """
    problems = {
        "missing": sorted(expected.keys() - present.keys()),
        "unexpected": unexpected,
        "of the wrong shape": [
            f"{name} {list(present[name].shape)} (config.json implies {list(shape)})"
            for name, shape in expected.items()
            if name in present and present[name].shape != shape
        ],
        f"of a dtype other than {', '.join(sorted(FLOATS))}": [
            f"{name} {present[name].dtype_name} (in {present[name].shard.path.name})"
            for name in expected
            if name in present and present[name].dtype_name not in FLOATS
        ],
    }
    if any(problems.values()):
        lines = [
            f"{len(names)} {what}: {listed(names)}" for what, names in problems.items() if names
        ]
        raise CheckpointError(
            f"{checkpoint.directory}: the tensors are not those of config.json:\n  "
            + "\n  ".join(lines)
        )


def _changes(name: str, modules: Set[str], layers: int) -> bool:
    # Whether an unread tensor belongs to a layer or module that the model computes.
    layer = LAYER.match(name)
    if layer is not None:
        return int(layer[1]) < layers
    return name.rpartition(".")[0] in modules


def _same(entry: TensorEntry, other: TensorEntry) -> bool:
    if (entry.dtype, entry.shape) != (other.dtype, other.shape):
        return False
    return all(a == b for a, b in zip_longest(entry.chunks(), other.chunks()))
