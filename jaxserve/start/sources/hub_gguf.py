"""GGUF models among the files of a folder or of a repository on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jaxserve.errors import CheckpointError
from jaxserve.settings.model_name import gguf_files
from jaxserve.weights.checkpoint import listed
from jaxserve.weights.gguf.parts import PART_NAME, part_names

# The form that llama.cpp loads by default.
PREFERRED = "Q4_K_M"
# Largest share of the free memory for a file. The rest is for the cache and temporaries.
SHARE = 0.8
# A plain path: no leading dots, and no character with a meaning in glob patterns.
PATH = re.compile(r"(?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf")
# Files that are no complete models: image projectors, quantization statistics, drafts.
_OTHERS = re.compile(r"(^|[-._])(mmproj|imatrix|mtp|draft)([-._]|$)", re.IGNORECASE)
# The form in a file's name: Q4_K_M, IQ3_XXS, UD-Q2_K_XL, BF16, MXFP4_MOE.
_FORM = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)


@dataclass(frozen=True)
class GgufModel:
    """A GGUF model of a repository or folder, stored as one or several files.

    Attributes:
        files: paths of its parts in order. Most models have one.
        num_bytes: bytes of all parts.
    """

    files: tuple[str, ...]
    num_bytes: int

    @property
    def stem(self) -> str:
        """Name of the model's file without folders, part number and ending."""
        name = PurePosixPath(self.files[0]).name
        parsed = PART_NAME.fullmatch(name)
        return parsed["stem"] if parsed else name.removesuffix(".gguf")

    @property
    def form(self) -> str | None:
        """Form of the weights, such as Q4_K_M, from the end of the file name, or None."""
        match = _FORM.search(self.stem)
        return None if match is None else match[1]


def gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """Return the complete GGUF models of a repository, the shortest names first.

    Image projectors, quantization statistics and draft models are left out.

    Args:
        sizes: bytes of each file, by its path.

    Raises:
        CheckpointError: the repository has GGUF models, and each lacks a part.
    """
    bytes_of: dict[tuple[str, ...], int] = {}
    missing: dict[str, list[str]] = {}
    for name in sizes:
        if PATH.fullmatch(name) is None or _OTHERS.search(PurePosixPath(name).stem):
            continue
        files = tuple(part_names(name) or [name])
        if lacking := [part for part in files if part not in sizes]:
            missing[name] = lacking
        else:
            bytes_of[files] = sum(sizes[part] for part in files)
    if missing and not bytes_of:
        name, lacking = next(iter(missing.items()))
        raise CheckpointError(f"{name}: the other parts are missing: {listed(lacking)}")
    models = [GgufModel(files, size) for files, size in bytes_of.items()]
    return sorted(models, key=lambda model: (len(model.stem), model.files))


def gguf_of_folder(folder: Path) -> Path | None:
    """Return the path of a folder's only GGUF model, or None if the folder has no GGUF file.

    The path is that of the first part of a divided model. A folder with safetensors counts as a
    folder without GGUF files.

    Raises:
        CheckpointError: there are several models, or the first part of one is missing.
    """
    names = gguf_files(folder)
    # An image projector without a model is returned, because its header names its kind.
    main_files = [name for name in names if not _OTHERS.search(Path(name).stem)] or names
    models = {tuple(part_names(name) or [name]) for name in main_files}
    if len(models) > 1:
        first_files = listed(sorted(files[0] for files in models))
        raise CheckpointError(f"{folder}: holds {len(models)} GGUF models, name one: {first_files}")
    for files in models:
        if files[0] not in names:
            raise CheckpointError(f"{folder}: the first part is missing: {files[0]}")
        return folder / files[0]
    return None


def of_form(models: Iterable[GgufModel], form: str) -> GgufModel | None:
    """Return the first model whose file name contains `form` as a word in any case, or None."""
    word = re.compile(rf"(?:^|[-._]){re.escape(form)}(?:[-.]|$)", re.IGNORECASE)
    return next((model for model in models if word.search(model.stem)), None)


def preferred(models: Iterable[GgufModel], free: int) -> tuple[GgufModel, str]:
    """Return the GGUF model that is loaded by default, and the reason as text for the log.

    The model in the form `PREFERRED` is taken, as in llama.cpp. Without that form it is the largest
    that fits into the free memory, or else the smallest.

    Args:
        models: models of the repository, at least one.
        free: bytes of free memory.
    """
    models = list(models)
    if (usual := of_form(models, PREFERRED)) is not None:
        return usual, f"which is taken where no form is named (REPO:{PREFERRED})"
    by_size = sorted(models, key=lambda model: model.num_bytes)
    fitting = [model for model in by_size if model.num_bytes <= SHARE * free]
    gib = f"{free / (1 << 30):.1f} GiB"
    if fitting:
        return fitting[-1], f"the largest that fits into the {gib} of memory that are free"
    return by_size[0], f"the smallest, though none fits into the {gib} of memory that are free"
