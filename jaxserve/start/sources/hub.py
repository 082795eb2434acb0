"""Download of checkpoints from the Hugging Face hub.

Only files that an engine reads are downloaded: configuration, tokenizer, and either safetensors or
one GGUF model. Pickles and code are never downloaded. The files are in the cache of the library
`huggingface_hub`, from which they are read without a network.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxserve.errors import CheckpointError
from jaxserve.execution.runner import OnProgress
from jaxserve.settings.environment import HubAccess, hub_access
from jaxserve.settings.model_name import HUB_NAME, INDEX
from jaxserve.start.device import this_device
from jaxserve.start.sources.hub_gguf import GgufModel, gguf_models, of_form, preferred
from jaxserve.weights.checkpoint import listed
from jaxserve.weights.gguf.parts import part_names

_log = logging.getLogger(__name__)

CONFIG = frozenset({"config.json", "generation_config.json", "hf_quant_config.json"})
TEXT = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
})  # fmt: skip
# A plain name: no folder, no leading dot, and no character with a meaning in glob patterns.
WEIGHTS = re.compile(r"(?!consolidated|adapter)\w[\w.-]*\.safetensors")
MAX_LISTED_FILES = 100_000
TIMEOUT = 20.0  # seconds for an answer about a model


@dataclass(frozen=True)
class _HubName:
    """The parsed name of a model on the Hugging Face hub.

    Attributes:
        repo: name of the repository, org/name.
        file: path of the named GGUF file in the repository, or None.
        form: named form of a GGUF file, such as Q4_K_M, or None.
        where: name of the repository in error texts.
    """

    repo: str
    file: str | None
    form: str | None
    where: str

    def gguf(self, sizes: Mapping[str, int]) -> GgufModel | None:
        """Return the GGUF model to load, or None if the safetensors are to be loaded.

        Without a named file or form, safetensors take precedence over GGUF files.

        Args:
            sizes: bytes of each file of the repository, by its path.

        Raises:
            CheckpointError: the repository lacks the named file or form, or a part of it.
        """
        if self.file is None and self.form is None:
            weights = any(WEIGHTS.fullmatch(name) for name in sizes)
            models = [] if weights else gguf_models(sizes)
            if not models:
                return None
            model, why = preferred(models, this_device().free)
            _log.warning("%s: takes %s, %s", self.where, model.files[0], why)
            return model
        if self.file is not None:
            files = part_names(self.file) or [self.file]
            if self.file != files[0]:
                raise CheckpointError(f"{self.where}: name the first part, {files[0]}")
            missing = [name for name in files if name not in sizes]
            if missing:
                there = [name for name in sizes if name.endswith(".gguf")]
                raise CheckpointError(
                    f"{self.where}: has no {listed(missing)}; there are {listed(there) or 'none'}"
                )
            return GgufModel(tuple(files), sum(sizes[name] for name in files))
        models = gguf_models(sizes)
        assert self.form is not None
        if (model := of_form(models, self.form)) is not None:
            return model
        forms = sorted({model.form or model.stem for model in models})
        raise CheckpointError(
            f"{self.where}: has no GGUF file of the form {self.form}; there are "
            f"{listed(forms) or 'none'}"
        )


def fetch(
    name: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    text_only: bool = False,
    config_only: bool = False,
) -> Path:
    """Download a checkpoint from the hub into the cache, or find it there without a network.

    If the repository has only GGUF files and the name selects none, `preferred` chooses one.

    Args:
        name: org/name, org/name:FORM or org/name/FILE.gguf.
        revision: branch, tag or commit, by default "main".
        download_dir: folder of the cache.
        on_progress: called before and after the download with "download", the bytes done, and all
            bytes.
        text_only: whether to fetch only the tokenizer.
        config_only: whether to fetch only the configuration.

    Returns:
        The folder of the checkpoint, or the path of the GGUF file or of its first part.

    Raises:
        CheckpointError: the model, revision or file does not exist, access is denied, or there is
            neither a network nor a cached copy.
    """
    parsed = HUB_NAME.fullmatch(name)
    assert parsed is not None, name
    repo, access = parsed["repo"], hub_access()
    where = f"model {repo!r}" + (f" at revision {revision!r}" if revision else "")
    target = _HubName(repo, file=parsed["file"], form=parsed["form"], where=where)
    if access.is_offline:
        return _cached(target, revision, download_dir, text_only, "HF_HUB_OFFLINE is set")
    try:
        sizes = _listing(repo, revision, access)
        gguf = None if text_only else target.gguf(sizes)
        if gguf is not None and config_only:
            raise CheckpointError(f"{where}: a GGUF file on the hub has to be fetched first")
        names = list(gguf.files) if gguf else _chosen(sizes, where, text_only, config_only)
        total = sum(sizes[path] for path in names)
        if on_progress is not None:
            on_progress("download", 0, max(total, 1))
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            endpoint=access.endpoint,
            allow_patterns=names,
        )
    except (httpx2.TransportError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = f"the hub cannot be reached ({_line(error)})"
        return _cached(target, revision, download_dir, text_only, reason)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{where}: {_refusal(error)}") from error
    if on_progress is not None:
        on_progress("download", max(total, 1), max(total, 1))
    return Path(folder) / gguf.files[0] if gguf else Path(folder)


def _listing(repo: str, revision: str | None, access: HubAccess) -> dict[str, int]:
    # One request: other calls of the library retry for half a minute without a network.
    api = HfApi(endpoint=access.endpoint)
    info = api.model_info(repo, revision=revision, timeout=TIMEOUT, files_metadata=True)
    files = info.siblings or []
    if len(files) > MAX_LISTED_FILES:
        raise CheckpointError(f"model {repo!r}: more than {MAX_LISTED_FILES} files")
    return {file.rfilename: file.size or 0 for file in files}


def _chosen(sizes: Iterable[str], where: str, text_only: bool, config_only: bool) -> list[str]:
    """Return the names of the files to download from a repository with safetensors.

    Args:
        sizes: all files of the repository.
        where: name of the repository in error texts.
        text_only: whether only the tokenizer is needed.
        config_only: whether only the configuration is needed.

    Raises:
        CheckpointError: weights are needed and the repository has no safetensors.
    """
    names = TEXT if text_only else TEXT | CONFIG | {INDEX}
    weights = [name for name in sizes if WEIGHTS.fullmatch(name)]
    if not weights and not text_only:
        raise CheckpointError(
            f"{where}: there are no safetensors or GGUF files; PyTorch pickles can run code and "
            "are not read"
        )
    chosen = [name for name in sizes if name in (CONFIG if config_only else names)]
    if config_only:
        return chosen
    return chosen if text_only else chosen + weights


def _cached(
    target: _HubName,
    revision: str | None,
    download_dir: str | Path | None,
    text_only: bool,
    reason: str,
) -> Path:
    """Return the path of a model in the cache of the hub library, as `fetch` does.

    Args:
        target: the parsed name of the model.
        revision: branch, tag or commit.
        download_dir: folder of the cache.
        text_only: whether only the tokenizer is needed.
        reason: why the hub is not asked, for the log and the error.

    Raises:
        CheckpointError: the cache has no copy.
    """
    absent = CheckpointError(f"{target.where}: is not in the cache, and {reason}")
    try:
        # Without patterns the library returns the folder even if its files are incomplete.
        options: Any = {"cache_dir": download_dir, "local_files_only": True, "allow_patterns": []}
        folder = Path(snapshot_download(target.repo, revision=revision, **options))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise absent from None
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file()
    }
    gguf = None if text_only or (target.file and target.file not in sizes) else target.gguf(sizes)
    if gguf is None and (target.file or not sizes.keys() & {"config.json", "tokenizer.json"}):
        raise absent
    _log.info("%s: %s; read from the cache", target.where, reason)
    return folder if gguf is None else folder / gguf.files[0]


def _refusal(error: Exception) -> str:
    match error:
        case GatedRepoError():
            return "its owner must grant access: ask for it on the hub, then set HF_TOKEN"
        case RevisionNotFoundError():
            return "there is no such revision"
        case RepositoryNotFoundError():
            return "there is no such model on the hub, or it is private (set HF_TOKEN)"
        case _:
            return _line(error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
