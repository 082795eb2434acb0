"""Find the files of a checkpoint, and list the tensors in each."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import CheckpointError
from jaxserve.models.config.strict_json import read_object
from jaxserve.settings.model_name import INDEX, SINGLE
from jaxserve.weights.safetensors import (
    MAX_TENSORS,
    Shard,
    TensorEntry,
    read_header,
)

MAX_INDEX_BYTES = 64 << 20
MAX_LISTED = 20
# File name endings of configurations, tokenizers and chat templates, for all their readers.
TEXT_ENDINGS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, with checked headers. No values have been read.

    Attributes:
        directory: folder of the checkpoint, or a GGUF file.
        whole: the checkpoint holds one model only, as a GGUF file does. Every tensor must be used.
        ignored: tensors and files that the index does not list.
        is_part: tensors of the model may be missing.
    """

    directory: Path
    tensors: Mapping[str, TensorEntry]
    whole: bool = False
    ignored: tuple[str, ...] = ()
    is_part: bool = False

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file of the checkpoint changed after its header was read."""
        shards: set[Shard] = {entry.shard for entry in self.tensors.values()}
        for shard in shards:
            shard.check_unchanged()


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Return the tensors of a checkpoint's folder, as the headers of its files describe them.

    If there is an index, it determines the file of each tensor. Other tensors and files are
    ignored.

    Args:
        directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.

    Raises:
        CheckpointError: a file is missing, malformed or outside the folder, or the index disagrees
            with the files.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder")
    single, index = directory / SINGLE, directory / INDEX
    if index.exists() or index.is_symlink():
        weight_map = _weight_map(index)
        shards = sorted(set(weight_map.values()))
    elif single.exists() or single.is_symlink():
        weight_map, shards = None, [SINGLE]
    else:
        raise CheckpointError(f"{directory}: {_what_instead(directory)}")
    entries = [entry for path in _shard_files(directory, shards) for entry in read_header(path)]
    if weight_map is None:
        return Checkpoint(directory, {entry.name: entry for entry in entries})
    tensors, ignored = _by_index(index, weight_map, entries)
    if SINGLE not in shards and single.exists():
        ignored.append(SINGLE)
    return Checkpoint(directory, tensors, ignored=tuple(ignored))


def check_text_files(directory: Path) -> None:
    """Check that a checkpoint's configuration and tokenizer files are regular files in its folder.

    Raises:
        CheckpointError: a file with such a name is a link out of the folder, a broken link, a pipe,
            a socket, a device or a folder.
    """
    for name in sorted(os.listdir(directory)):
        path = directory / name
        if not name.endswith(TEXT_ENDINGS) or name == INDEX:
            continue
        _check_inside(directory, path)
        if not path.is_file():
            raise CheckpointError(f"{path}: not a regular file")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must map tensor names to files")
    if len(weight_map) > MAX_TENSORS:
        raise CheckpointError(f"{index}: lists {len(weight_map)} tensors; allowed: {MAX_TENSORS}")
    for name, file in weight_map.items():
        # Only a file name: no path, no parent, no NUL.
        plain = isinstance(file, str) and Path(file).name == file and file.isprintable()
        if not plain or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: tensor {name[:200]!r} is mapped to {str(file)[:200]!r}; "
                "allowed: the name of a .safetensors file in the same folder"
            )
    return weight_map


def _shard_files(directory: Path, names: Iterable[str]) -> list[Path]:
    names, present = list(names), set(os.listdir(directory))
    missing = [name for name in names if name not in present or not (directory / name).exists()]
    if missing:
        raise CheckpointError(f"{directory}: {listed(missing)} missing or a broken link")
    for name in names:
        _check_inside(directory, directory / name)
    return [directory / name for name in names]


def _check_inside(directory: Path, path: Path) -> None:
    # The Hugging Face cache links `<model>/snapshots/<revision>/<name>` to `<model>/blobs/<hash>`.
    home, target = directory.resolve(), path.resolve()
    inside = [home]
    if home.parent.name == "snapshots":
        inside.append(home.parent.parent / "blobs")
    if not any(target.is_relative_to(folder) for folder in inside):
        raise CheckpointError(f"{path}: links to {target}, outside the checkpoint's folder")


def _by_index(
    index: Path, weight_map: Mapping[str, str], entries: Iterable[TensorEntry]
) -> tuple[dict[str, TensorEntry], list[str]]:
    """Return the tensors that a checkpoint's index lists, by name, and names of all other tensors.

    Args:
        index: path of the index, for errors.
        weight_map: the file of each tensor, from the index.
        entries: all tensors of the files.

    Raises:
        CheckpointError: a file lacks a tensor that the index lists there.
    """
    tensors: dict[str, TensorEntry] = {}
    ignored: list[str] = []
    for entry in entries:
        file = entry.shard.path.name
        if weight_map.get(entry.name) == file:
            tensors[entry.name] = entry
        else:
            ignored.append(f"{entry.name} ({file})")
    missing = [
        f"{name!r} (not in {file})" for name, file in weight_map.items() if name not in tensors
    ]
    if missing:
        raise CheckpointError(f"{index}: disagrees with the files about {listed(missing)}")
    return tensors, ignored


def _what_instead(directory: Path) -> str:
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    pickles = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    others = [name for name in files if name.endswith((".safetensors", ".gguf"))]
    if pickles and not others:
        return (
            f"has only PyTorch pickles ({listed(pickles)}), which can run code when loaded; "
            "convert them to safetensors"
        )
    also = f"; found {listed(others)}" if others else ""
    return f"has neither {SINGLE} nor {INDEX}{also}"


def listed(items: Iterable[str]) -> str:
    """Join the first 20 items for an error message, and append the number of omitted items."""
    items = list(items)
    more = f" and {len(items) - MAX_LISTED} more" if len(items) > MAX_LISTED else ""
    return ", ".join(item[:200] for item in items[:MAX_LISTED]) + more
