"""PlainTokenizer: the common case of Transformers' tokenizers without importing Transformers.

That import takes longer than starting the engine. If tokenizer.json completely defines a tokenizer,
the tokenizers library alone reads it. Otherwise Transformers reads the folder. Tests compare both.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError

_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_NAMED = tuple("bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split())
_KNOWN = tuple(
    "tokenizer_class backend model_max_length chat_template is_local added_tokens_decoder "
    "model_input_names name_or_path local_files_only clean_up_tokenization_spaces "
    "extra_special_tokens".split()
)
_ADDED_FLAGS = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
# Other files that Transformers reads.
_OTHER_FILES = tuple(
    "special_tokens_map.json added_tokens.json additional_chat_templates tokenizer.model "
    "tekken.json".split()
)
# With more entries, Transformers also considers the model family.
_MOST_ENTRIES = 100_000
_MOST_JSON_BYTES = 16 << 20


class PlainTokenizer:
    """Tokenizer read without Transformers, with the part of Transformers' interface that
    `Tokenizer` uses.

    Args:
        backend: tokenizer of the tokenizers library.
        named: texts of special tokens by names such as "eos_token".
        extra: texts of further special tokens.
        chat_template: Jinja source of the chat template, or None.
    """

    def __init__(
        self,
        backend: Backend,
        named: Mapping[str, str],
        extra: list[str],
        chat_template: str | None,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.special_tokens_map = dict(named)
        self.all_special_tokens = list(dict.fromkeys([*named.values(), *extra]))
        end = named.get("eos_token")
        self.eos_token_id = None if end is None else backend.token_to_id(end)
        self.all_special_ids = [backend.token_to_id(text) for text in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        added = self.backend_tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str | None]:
        return [self.backend_tokenizer.id_to_token(token) for token in token_ids]

    def get_chat_template(self, tools: Any = None) -> str | None:
        """Return the source of the chat template, or None. It does not depend on `tools`."""
        return self.chat_template


def read_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a folder: a `PlainTokenizer`, or one of Transformers if necessary.

    Transformers is imported only if `read_plain` returns None: few tokenizers need it, and the
    import takes longer than the rest of a start.

    Raises:
        Exception: either library failed to read corrupt files.
    """
    plain = read_plain(directory)
    if plain is not None:
        return plain
    transformers = importlib.import_module("transformers")
    return transformers.AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def read_plain(directory: Path) -> PlainTokenizer | None:
    """Return the tokenizer in a folder, or None if Transformers must read it.

    Transformers is necessary if tokenizer.json and tokenizer_config.json do not completely define
    the tokenizer.

    Raises:
        Exception: the tokenizers library failed to read a corrupt tokenizer.json.
    """
    if any((directory / name).exists() for name in _OTHER_FILES):
        return None
    config = _json(directory / "tokenizer_config.json")
    if config is None:
        return None
    named = {name: config[name] for name in _NAMED if config.get(name) is not None}
    extra = config.get("extra_special_tokens", [])
    template = _chat_template(directory, config)
    plain = (
        config.get("tokenizer_class") in _CLASSES
        and config.get("clean_up_tokenization_spaces", False) is False
        and set(config) <= {*_NAMED, *_KNOWN}
        and isinstance(extra, list)
        and all(type(text) is str for text in (*named.values(), *extra))
        and (template is None or type(template) is str)
    )
    if not plain:
        return None
    backend = Backend.from_file(str(directory / "tokenizer.json"))
    added = backend.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    if (
        backend.padding is not None
        or backend.truncation is not None
        or backend.get_vocab_size() > _MOST_ENTRIES
        or not {*named.values(), *extra} <= special
        or not _agrees(config.get("added_tokens_decoder", {}), added)
    ):
        return None
    return PlainTokenizer(backend, named, extra, template)


def _chat_template(directory: Path, config: Mapping[str, Any]) -> Any:
    path = directory / "chat_template.jinja"
    return path.read_text() if path.is_file() else config.get("chat_template")


def processor_template(directory: Path) -> str | None:
    """Return the source of the chat template in a folder's chat_template.json, which image
    processors have, or None without the file.

    Raises:
        CheckpointError: the file contains no template.
    """
    path = directory / "chat_template.json"
    if not path.exists():
        return None
    template = (_json(path) or {}).get("chat_template")
    if isinstance(template, list):  # list of named templates
        template = {
            each.get("name"): each.get("template") for each in template if type(each) is dict
        }
    if isinstance(template, dict):
        template = template.get("default")
    if not isinstance(template, str):
        raise CheckpointError(f"{path}: there is no chat_template, which must be text")
    return template


def _agrees(listed: Any, added: Mapping[int, Any]) -> bool:
    if not isinstance(listed, Mapping):
        return False
    added_tokens = {
        str(n): {flag: getattr(t, flag) for flag in _ADDED_FLAGS} for n, t in added.items()
    }
    return _items(listed) <= _items(added_tokens)


def _items(tokens: Mapping[str, Any]) -> set[str]:
    pairs: Iterable[tuple[str, Any]] = tokens.items()
    return {json.dumps([number, token], sort_keys=True) for number, token in pairs}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            return None
        loaded = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None  # Transformers reports the error
    return loaded if isinstance(loaded, dict) else None
