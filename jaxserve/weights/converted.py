"""Write and load the folders of `jaxserve convert`: placed parameters, stored with Orbax.

The card, `jaxserve.json`, lists every file with its size, every array with its shape, dtype and
digest, and the form of each quantized parameter (`parameter_arrays.py`). It is the last file
written, and the folder is renamed to its final name afterwards. A folder with a card is therefore
complete, and the digests reveal later damage.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import CheckpointError, UnsupportedModel
from jaxserve.models import Decoder, ModelConfig, abstract_model
from jaxserve.models.config.fields import Fields
from jaxserve.models.config.strict_json import read_object
from jaxserve.weights.checkpoint import listed
from jaxserve.weights.model_weights import filled, parameters_of
from jaxserve.weights.parameter_arrays import abstract_parameter, forms, named_arrays
from jaxserve.weights.placement import scales_of, scales_parameter
from jaxserve.weights.quantize import FORMS

if TYPE_CHECKING:
    from jaxtyping import Array

CARD, WEIGHTS = "jaxserve.json", "weights"
FORMAT = 1
MAX_CARD_BYTES = 64 << 20
MAX_FILES = 1 << 17
DTYPES = ("float32", "bfloat16", "float16", "float64")
CODES = ("int8", "uint8", "int32")  # dtypes of quantized parameters

# Returns the sharding of a parameter, given its path and shape.
ShardingOf = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]


@dataclass(frozen=True)
class _Parameter:
    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True)
class ConvertedModel:
    """Contents of a folder that `jaxserve convert` wrote: the fields of its card, and its files.

    Attributes:
        dtype: dtype of the unquantized parameters.
        parameters: shape, dtype and digest of each array, by name.
        forms: forms of the quantized parameters, by path.
        quantization: form to which the conversion quantized the model. None without quantization,
            and for checkpoints that were already quantized.
        files: sizes in bytes of the files below the folder, by relative path.
    """

    directory: Path
    dtype: str
    parameters: Mapping[str, _Parameter]
    forms: Mapping[str, Any]
    quantization: str | None
    files: Mapping[str, int]


def is_converted(directory: Path) -> bool:
    """Return whether a folder was written by `write_converted`, even if it is incomplete.

    `open_converted` refuses incomplete folders.
    """
    return (directory / CARD).exists() or (directory / WEIGHTS).is_dir()


def write_converted(
    values: dict[str, Any],
    config: ModelConfig,
    directory: Path,
    extra: Callable[[Path], None],
    dtype: str,
    quantization: str | None = None,
) -> None:
    """Write a folder with a model's parameters and the files that `extra` adds.

    The folder is written under a temporary name, read back, compared bit for bit, and then renamed.
    After an error, the temporary folder is removed.

    Args:
        values: arrays by path, on any devices. The dict is emptied, so that memory never holds them
            twice.
        config: configuration of the model.
        directory: folder to create; it must not exist.
        extra: function that writes configuration and tokenizer into a folder.
        dtype: dtype of the parameters that are not quantized.
        quantization: form to which the model was quantized while it was read, or None.

    Raises:
        CheckpointError: the folder exists or cannot be written, or the arrays that were read back
            differ.
    """
    directory = directory.absolute()
    if directory.exists() or directory.is_symlink():
        raise CheckpointError(f"{directory}: exists already")
    partial = directory.with_name(f".{directory.name}.partial-{os.getpid()}")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
        try:
            extra(partial)
            arrays = named_arrays(values)
            _with_orbax(lambda orbax: orbax.save(partial / WEIGHTS, arrays))
            card = {
                "format": FORMAT,
                "dtype": dtype,
                "parameters": {
                    name: asdict(parameter) for name, parameter in _describe(arrays).items()
                },
                "forms": forms(values),
                "quantization": quantization,
                "files": _files(partial),
            }
            _sync_all(partial)
            _write_synced(partial / CARD, json.dumps(card, indent=1))
            values.clear()
            arrays.clear()
            load_converted(open_converted(partial), config)
            os.rename(partial, directory)
            _sync(directory.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written ({error})") from error


def open_converted(directory: Path) -> ConvertedModel:
    """Return the contents of a converted folder's card, which must list exactly its files.

    Raises:
        CheckpointError: the folder is incomplete or has other files, or the card is malformed.
    """
    card = directory / CARD
    if not card.exists():
        raise CheckpointError(
            f"{directory}: has {WEIGHTS} but no {CARD}: its conversion did not end; convert again"
        )
    fields = Fields(read_object(card, MAX_CARD_BYTES), problems=[])
    if fields.take("format") != FORMAT:
        fields.refuse("format", f"{FORMAT}; convert the model again")
    dtype = fields.choice("dtype", DTYPES)
    described, files = fields.take("parameters"), fields.take("files")
    # Cards of versions without quantized parameters lack both fields.
    quantized = fields.take("forms") if fields.mentions("forms") else {}
    quantization = fields.take("quantization")
    if quantization not in (None, *FORMS):
        fields.refuse("quantization", f"null or one of {', '.join(FORMS)}")
    if not isinstance(quantized, dict):
        fields.refuse("forms", "an object")
    fields.finish()
    if fields.problems:
        raise CheckpointError(f"{card}: " + "; ".join(fields.problems))
    sizes = _files(directory)
    if not isinstance(files, dict) or files != sizes:
        names = set(files) if isinstance(files, dict) else set()
        wrong = [f"{name[:100]!r} missing" for name in sorted(names - sizes.keys(), key=str)]
        wrong += [f"{name!r} not listed" for name in sorted(sizes.keys() - names)]
        wrong += [
            f"{name!r} of another size"
            for name in sorted(names & sizes.keys())
            if files[name] != sizes[name]
        ]
        raise CheckpointError(f"{card}: its list is not what the folder holds: {listed(wrong)}")
    parameters = _parameters(card, described)
    return ConvertedModel(directory, dtype, parameters, quantized, quantization, sizes)


def load_converted(
    converted: ConvertedModel,
    config: ModelConfig,
    sharding_of: ShardingOf | None = None,
    *,
    kv_scales: bool = False,
) -> Decoder:
    """Load the model of a converted folder, with every parameter placed and verified.

    Args:
        converted: the folder, from `open_converted`.
        config: configuration that the parameters must match.
        sharding_of: returns the sharding of an array, given its path and shape. By default, all
            arrays are placed on JAX's default device.
        kv_scales: use the folder's scales for an fp8 cache, if it has them.

    Raises:
        CheckpointError: the parameters do not match `config`, or an array differs from its digest.
    """
    model = abstract_model(config, jnp.dtype(converted.dtype))
    tree = expected_tree(converted, model)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        path: jax.ShapeDtypeStruct(
            tuple(leaf.shape),
            leaf.dtype,
            sharding=default if sharding_of is None else sharding_of(path, tuple(leaf.shape)),
        )
        for path, leaf in named_arrays(tree).items()
    }
    values = restored(
        converted,
        lambda orbax: orbax.restore(converted.directory.absolute() / WEIGHTS, abstract),
    )
    verify(converted.directory, values, converted.parameters)
    # The leaves must be in the order of the tree, which differs from the order of `values`.
    values = jax.tree.structure(tree).unflatten([values[name] for name in abstract])
    return with_scales(model, values, kv_scales)


def restored(converted: ConvertedModel, use: Callable[[Any], Any]) -> Any:
    """Call `use` with an Orbax checkpointer, on a new thread, and return its result.

    Raises:
        CheckpointError: the folder cannot be restored. Errors of Orbax are converted to this one.
    """
    try:
        return _with_orbax(use)
    except (CheckpointError, UnsupportedModel):
        raise
    except Exception as error:  # Orbax and TensorStore raise exceptions of many types
        text = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{converted.directory / WEIGHTS}: cannot be restored ({text})"
        ) from error


def with_scales(model: Decoder, values: dict[str, Any], kv_scales: bool) -> Decoder:
    """Return the abstract model filled with the arrays of `values`, by path.

    Cache scales are removed from `values`, and set in the model only if `kv_scales`.
    """
    scales = {path: values.pop(path) for path in list(values) if path in scales_of(model)}
    model = filled(model, values)
    if kv_scales:
        for path, value in scales.items():
            scales_of(model)[path].kv_scales = scales_parameter(value)
    return model


def expected_tree(converted: ConvertedModel, model: Decoder) -> dict[str, Any]:
    """Return the parameters that a converted folder must hold, by path, with shapes for arrays.

    Raises:
        CheckpointError: the card lists other arrays, shapes or dtypes.
    """
    tree = _abstract_tree(converted, model)
    expected = {
        name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in named_arrays(tree).items()
    }
    stored = {path: (entry.shape, entry.dtype) for path, entry in converted.parameters.items()}
    if stored != expected:
        wrong = [path for path in {**expected, **stored} if expected.get(path) != stored.get(path)]
        raise CheckpointError(
            f"{converted.directory}: the parameters are not those of config.json: "
            f"{listed(sorted(wrong))}"
        )
    return tree


def _abstract_tree(converted: ConvertedModel, model: Decoder) -> dict[str, Any]:
    """Return the parameters of `model`, by path, as shapes and in the forms of the folder's card.

    Scales of the cache are included if the card lists them.

    Raises:
        CheckpointError: a form of the card does not fit the model.
    """
    parameters = parameters_of(model)
    tree: dict[str, Any] = {
        path: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
        for path, leaf in parameters.items()
    }
    shapes = {path: (entry.shape, entry.dtype) for path, entry in converted.parameters.items()}
    for path, form in converted.forms.items():
        try:
            if path not in parameters:
                raise ValueError(f"{path[:200]} is no parameter of config.json's model")
            tree[path] = abstract_parameter(path, form, parameters[path], shapes)
        except ValueError as error:
            raise CheckpointError(f"{converted.directory / CARD}: forms: {error}") from error
    for path, module in scales_of(model).items():
        if path in shapes:
            tree[path] = jax.ShapeDtypeStruct((2, module.kv_heads), jnp.float32)
    return tree


def _with_orbax(use: Callable[[Any], Any]) -> Any:
    """Call `use` with an Orbax checkpointer, on a new thread, and return its result.

    Orbax runs event loops. On a thread that already runs one, such as a notebook's, it fails. If
    the thread has an event loop that is not running, Orbax replaces it, and that loop is never
    closed. Orbax is imported here because the import takes seconds.
    """
    config: Any = jax.config  # its type stubs lack the settings
    wide = config.jax_enable_x64  # the setting may apply to this thread only

    def call() -> Any:
        orbax = importlib.import_module("orbax.checkpoint")
        with jax.enable_x64(wide), orbax.StandardCheckpointer() as checkpointer:
            return use(checkpointer)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def verify(where: Path, values: Mapping[str, Any], written: Mapping[str, _Parameter]) -> None:
    """Compare the shapes, dtypes and digests of arrays with their descriptions in a folder's card.

    Args:
        where: the folder, for the error.
        values: the arrays that were read, by name.
        written: the descriptions by name.

    Raises:
        CheckpointError: arrays differ. The error names them.
    """
    got = _describe(values)
    wrong = sorted(path for path in written if got[path] != written[path])
    if wrong:
        raise CheckpointError(f"{where}: not what was written, bit for bit: {listed(wrong)}")


def _describe(values: Mapping[str, Array]) -> dict[str, _Parameter]:
    # Two threads: the host holds copies of only a few arrays at a time.
    def describe(value: Array) -> _Parameter:
        host = np.ascontiguousarray(np.asarray(value))
        digest = hashlib.sha256(host.reshape(-1).view(np.uint8).data).hexdigest()
        return _Parameter(tuple(value.shape), str(value.dtype), digest)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(values, pool.map(describe, values.values()), strict=True))


def _files(directory: Path) -> dict[str, int]:
    """Return the sizes of all files below a converted folder except its card, by relative path.

    Raises:
        CheckpointError: there are links, devices or other special files, or too many files.
    """
    sizes: dict[str, int] = {}
    waiting = [directory]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            listing = list(entries)
        for entry in listing:
            name = Path(entry.path).relative_to(directory).as_posix()
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif not entry.is_file(follow_symlinks=False):
                raise CheckpointError(f"{directory / name}: not a regular file of this folder")
            elif name != CARD:
                sizes[name] = entry.stat(follow_symlinks=False).st_size
            if len(sizes) + len(waiting) > MAX_FILES:
                raise CheckpointError(f"{directory}: holds more than {MAX_FILES} files")
    return sizes


def _parameters(card: Path, described: Any) -> dict[str, _Parameter]:
    if not isinstance(described, dict):
        raise CheckpointError(f"{card}: parameters must map paths to their descriptions")
    parameters = {}
    for path, entry in described.items():
        try:
            shape, dtype, sha256 = entry["shape"], entry["dtype"], entry["sha256"]
            sound = all(type(size) is int for size in shape) and isinstance(sha256, str)
        except (TypeError, KeyError):
            sound = False
        if not sound or dtype not in (*DTYPES, *CODES):
            raise CheckpointError(f"{card}: {path[:200]!r} needs a shape, a dtype and a sha256")
        parameters[path] = _Parameter(tuple(shape), dtype, sha256)
    return parameters


def _write_synced(path: Path, text: str) -> None:
    with open(path, "x") as file:
        file.write(text)
    _sync(path)


def _sync_all(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder) / name)
        _sync(Path(folder))


def _sync(path: Path) -> None:
    # For a folder, this flushes the names of its files.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
