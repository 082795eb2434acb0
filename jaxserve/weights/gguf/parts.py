"""Open models that llama.cpp's `llama-gguf-split` has divided into several GGUF files.

The files are called `NAME-00001-of-00003.gguf`. The first one holds all metadata. Each file has its
own number, the number of files and the number of tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.weights.checkpoint import listed
from jaxserve.weights.gguf.file import GgufFile, GgufTensor, read_gguf

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_PARTS = 4096


def part_names(name: str) -> list[str] | None:
    """Return the file names of all parts of a GGUF model, in order, or None for a single file.

    Args:
        name: file name of one of the parts, with or without folders.
    """
    parsed = PART_NAME.fullmatch(name)
    if parsed is None or not 0 < int(parsed["count"]) <= MAX_PARTS:
        return None
    stem, count = parsed["stem"], int(parsed["count"])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def open_gguf(path: str | Path) -> GgufFile:
    """Read the header of a GGUF file, and of the other parts in its folder if the model is split.

    Args:
        path: path of the file, or of the first part.

    Returns:
        The file, with the metadata of the first part and the tensors of all parts.

    Raises:
        CheckpointError: a part is missing, belongs to another model, or has the wrong number; see
            also `read_gguf`.
    """
    path = Path(path)
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int:
        raise CheckpointError(f"{path}: split.count is {str(count)[:20]}; allowed: an integer")
    if count in (0, 1):
        return first
    names = part_names(path.name)
    if names is None or len(names) != count:
        raise CheckpointError(
            f"{path}: is one of {str(count)[:20]} parts, whose names must end in "
            "-00001-of-00002.gguf and so on"
        )
    if path.name != names[0]:
        raise CheckpointError(f"{path}: is a part of a model; name the first, {names[0]}")
    missing = [name for name in names if not path.with_name(name).exists()]
    if missing:
        raise CheckpointError(f"{path}: parts are missing beside it: {listed(missing)}")
    tensors: dict[str, GgufTensor] = {}
    for number, name in enumerate(names):
        part = first if number == 0 else read_gguf(path.with_name(name))
        _check(part, number, first)
        for tensor in part.tensors.values():
            other = tensors.setdefault(tensor.name, tensor)
            if other is not tensor:
                raise CheckpointError(
                    f"{part.path}: tensor {tensor.name!r} is also in {other.shard.path.name}"
                )
    total = first.metadata.get("split.tensors.count")
    if type(total) is not int or total != len(tensors):
        raise CheckpointError(
            f"{path}: its parts hold {len(tensors)} tensors; split.tensors.count says "
            f"{str(total)[:20]}"
        )
    return replace(first, tensors=tensors)


def _check(part: GgufFile, number: int, first: GgufFile) -> None:
    """Check that a part of a GGUF model has the given number, and agrees with the first part.

    Raises:
        CheckpointError: a metadata value differs. The error names the part and the key.
    """
    expected: dict[str, Any] = {"split.no": number}
    for key in ("split.count", "split.tensors.count"):
        expected[key] = first.metadata.get(key)
    if "general.architecture" in part.metadata:
        expected["general.architecture"] = first.metadata.get("general.architecture")
    for key, value in expected.items():
        actual = part.metadata.get(key)
        if type(actual) is not type(value) or not isinstance(actual, int | str) or actual != value:
            shown = str(part.metadata.get(key))[:80]
            raise CheckpointError(
                f"{part.path}: is no part of this model: {key} is {shown}, not {str(value)[:80]}"
            )
