"""Checkpoints on the Hugging Face hub, by name.

Only the files that are read are fetched: configuration, tokenizer, safetensors. Pickles and code
never are. Files lie in the cache of the hub's own library, and are found there without a network.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxserve.config import HubAccess, hub_access
from jaxserve.errors import CheckpointError
from jaxserve.execution.runner import OnProgress
from jaxserve.model_name import HUB_NAME
from jaxserve.weights.checkpoint import listed

_log = logging.getLogger(__name__)

CONFIG = frozenset({"config.json", "generation_config.json"})
TEXT = frozenset({
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
})  # fmt: skip
# A plain name: no folder, nothing hidden, no character that a pattern gives a meaning.
WEIGHTS = re.compile(r"(?!consolidated|adapter)\w[\w.-]*\.safetensors")
INDEX = "model.safetensors.index.json"
MAX_LISTED_FILES = 100_000
TIMEOUT = 20.0  # seconds for an answer about a model


def fetch(
    name: str,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    on_progress: OnProgress | None = None,
    *,
    text_only: bool = False,
    config_only: bool = False,
) -> Path:
    """Bring a checkpoint here, or find it in the cache.

    Args:
        name: org/name, or org/name/FILE.gguf.
        revision: branch, tag or commit; "main" by default.
        download_dir: the cache's folder.
        on_progress: called with the bytes of the files as "download", before and after.
        text_only: whether to fetch the tokenizer alone.
        config_only: whether to fetch the configuration alone.

    Returns:
        The checkpoint's folder, or the GGUF file.

    Raises:
        CheckpointError: no such model, revision or file, no access, or no network and no copy.
    """
    parsed = HUB_NAME.fullmatch(name)
    assert parsed is not None, name
    repo, file, access = parsed["repo"], parsed["file"], hub_access()
    where = f"model {repo!r}" + (f" at revision {revision!r}" if revision else "")
    if access.is_offline:
        return _cached(repo, file, revision, download_dir, where, "HF_HUB_OFFLINE is set")
    try:
        sizes = _listing(repo, revision, access)
        names = [file] if file else _chosen(sizes, where, text_only)
        if config_only:
            names = [name for name in names if name in CONFIG or name == file]
        if file and file not in sizes:
            gguf = [path for path in sizes if path.endswith(".gguf")]
            raise CheckpointError(f"{where}: has no {file}; there are {listed(gguf) or 'none'}")
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
        return _cached(repo, file, revision, download_dir, where, reason)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(f"{where}: {_refusal(error)}") from error
    if on_progress is not None:
        on_progress("download", max(total, 1), max(total, 1))
    return Path(folder) / file if file else Path(folder)


def _listing(repo: str, revision: str | None, access: HubAccess) -> dict[str, int]:
    """List the files of a model with their sizes.

    The request is made once; other calls of the library retry for half a minute without a network.
    """
    api = HfApi(endpoint=access.endpoint)
    info = api.model_info(repo, revision=revision, timeout=TIMEOUT, files_metadata=True)
    files = info.siblings or []
    if len(files) > MAX_LISTED_FILES:
        raise CheckpointError(f"model {repo!r}: more than {MAX_LISTED_FILES} files")
    return {file.rfilename: file.size or 0 for file in files}


def _chosen(sizes: Iterable[str], where: str, text_only: bool) -> list[str]:
    """Choose the files that are read; where there are none, the error names what is there."""
    wanted = TEXT if text_only else TEXT | CONFIG | {INDEX}
    weights = [name for name in sizes if WEIGHTS.fullmatch(name)]
    if not weights and not text_only:
        gguf = [name for name in sizes if name.endswith(".gguf")]
        hint = "there are no safetensors; PyTorch pickles can run code and are not read"
        if gguf:
            hint = f"there are only GGUF files; add one to the name: {listed(sorted(gguf))}"
        raise CheckpointError(f"{where}: {hint}")
    chosen = [name for name in sizes if name in wanted]
    return chosen if text_only else chosen + weights


def _cached(
    repo: str,
    file: str | None,
    revision: str | None,
    download_dir: str | Path | None,
    where: str,
    reason: str,
) -> Path:
    """Return the copy in the cache."""
    for name in [file] if file else ["config.json", "tokenizer.json"]:
        found = try_to_load_from_cache(repo, name, cache_dir=download_dir, revision=revision)
        if isinstance(found, str):
            _log.info("%s: %s; read from the cache", where, reason)
            return Path(found) if file else Path(found).parent
    raise CheckpointError(f"{where}: is not in the cache, and {reason}")


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
