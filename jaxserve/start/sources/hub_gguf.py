"""GGUF files of a folder or of a repository on the hub, and the one to take of several."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from jaxserve.errors import CheckpointError
from jaxserve.settings.model_name import gguf_files
from jaxserve.weights.checkpoint import listed
from jaxserve.weights.gguf.parts import PART_NAME, part_names

# What llama.cpp takes where no form is named.
PREFERRED = "Q4_K_M"
# The share of the free memory that a file may have; the rest is for the cache and temporaries.
SHARE = 0.8
# A plain path: nothing hidden, no character that a pattern gives a meaning.
PATH = re.compile(r"(?:\w[\w.+-]*/)*\w[\w.+-]*\.gguf")
# Files that hold no model of their own: projectors of images, statistics of a quantization, drafts.
_OTHERS = re.compile(r"(^|[-._])(mmproj|imatrix|mtp|draft)([-._]|$)", re.IGNORECASE)
# The form in a file's name: Q4_K_M, IQ3_XXS, UD-Q2_K_XL, BF16, MXFP4_MOE.
_FORM = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE
)


@dataclass(frozen=True)
class GgufModel:
    """A model of a repository.

    Attributes:
        files: its parts, the first one's first; mostly one.
        num_bytes: of all of them.
    """

    files: tuple[str, ...]
    num_bytes: int

    @property
    def stem(self) -> str:
        """The name without folders, number of a part and ending."""
        name = PurePosixPath(self.files[0]).name
        parsed = PART_NAME.fullmatch(name)
        return parsed["stem"] if parsed else name.removesuffix(".gguf")

    @property
    def form(self) -> str | None:
        """The form that the name ends in, if it does."""
        found = _FORM.search(self.stem)
        return None if found is None else found[1]


def gguf_models(sizes: Mapping[str, int]) -> list[GgufModel]:
    """List the models among a repository's files.

    Args:
        sizes: bytes of each file, by its path.

    Raises:
        CheckpointError: of every model a part is missing.
    """
    found: dict[tuple[str, ...], int] = {}
    missing: dict[str, list[str]] = {}
    for name in sizes:
        if PATH.fullmatch(name) is None or _OTHERS.search(PurePosixPath(name).stem):
            continue
        files = tuple(part_names(name) or [name])
        if lacking := [part for part in files if part not in sizes]:
            missing[name] = lacking
        else:
            found[files] = sum(sizes[part] for part in files)
    if missing and not found:
        name, lacking = next(iter(missing.items()))
        raise CheckpointError(f"{name}: the other parts are missing: {listed(lacking)}")
    models = [GgufModel(files, size) for files, size in found.items()]
    return sorted(models, key=lambda model: (len(model.stem), model.files))


def gguf_of_folder(folder: Path) -> Path | None:
    """Return the GGUF file of a folder's only model, or its first part; None without any.

    Raises:
        CheckpointError: there are several models, or the first part of one is missing.
    """
    names = gguf_files(folder)
    # Beside no model, a projector of images is returned, whose header names its kind.
    own = [name for name in names if not _OTHERS.search(Path(name).stem)] or names
    models = {tuple(part_names(name) or [name]) for name in own}
    if len(models) > 1:
        found = listed(sorted(files[0] for files in models))
        raise CheckpointError(f"{folder}: holds {len(models)} GGUF models, name one: {found}")
    for files in models:
        if files[0] not in names:
            raise CheckpointError(f"{folder}: the first part is missing: {files[0]}")
        return folder / files[0]
    return None


def of_form(models: Iterable[GgufModel], form: str) -> GgufModel | None:
    """Return the model whose name holds a form as a word, in any case; the shortest name's."""
    word = re.compile(rf"(?:^|[-._]){re.escape(form)}(?:[-.]|$)", re.IGNORECASE)
    return next((model for model in models if word.search(model.stem)), None)


def preferred(models: Iterable[GgufModel], free: int) -> tuple[GgufModel, str]:
    """Return the model to take where no form is named, and why.

    Args:
        models: of the repository; at least one.
        free: bytes of memory that are free.
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
