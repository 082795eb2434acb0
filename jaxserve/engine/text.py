"""Text to token ids and back: tokenizer, chat template, incremental detokenization."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any, Self

from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxserve.engine.gguf_text import gguf_tokenizer
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.request import SamplingParams

MAX_TOKENIZER_BYTES = 64 << 20
MAX_JSON_BYTES = 1 << 20
_CONTEXT_TOKENS = 8
# A byte of no known character, in vocabularies that are made of characters.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
        directory: holds tokenizer.json and what belongs to it.
        vocab_size: width of the model's logits; every token id must be below it.

    Raises:
        CheckpointError: no tokenizer there, or one that does not fit the model.
    """

    def __init__(self, directory: str | Path, vocab_size: int) -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: there is no tokenizer.json; pass tokenizer=DIR, or "
                "skip_tokenizer_init=True to serve token ids only"
            )
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_TOKENIZER_BYTES} bytes")
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=False
            )
            self._take(tokenizer, str(path), vocab_size)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exceptions for a corrupt file
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str, vocab_size: int) -> Self:
        """The tokenizer that a GGUF file's metadata describes.

        Raises:
            CheckpointError: there is none, one of an unknown kind, or one that does not fit.
        """
        made = cls.__new__(cls)
        try:
            made._take(gguf_tokenizer(metadata), where, vocab_size)
        except CheckpointError:
            raise
        except Exception as error:  # whatever a vocabulary that contradicts itself leads to
            raise CheckpointError(
                f"{where}: its tokenizer cannot be built ({str(error)[:200]}); pass tokenizer=DIR"
            ) from error
        return made

    def _take(self, tokenizer: Any, where: str, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        largest = max(self._tokenizer.get_vocab().values(), default=0)
        if largest >= vocab_size:
            raise CheckpointError(
                f"{where}: holds token id {largest}, and the model has logits for {vocab_size}"
            )
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        self._is_byte_level = "ByteLevel" in str(self.backend.decoder)
        self._bytes = {letter: byte for byte, letter in bytes_to_unicode().items()}
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        self._added_texts = {at: text for text, at in self._tokenizer.get_added_vocab().items()}
        added = [text for text in self._tokenizer.get_added_vocab() if len(text) > 1]
        added.sort(key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, added)) or r"(?!)")

    def save(self, directory: Path) -> None:
        """Write the tokenizer and its chat template, as `Tokenizer` reads them."""
        self._tokenizer.save_pretrained(directory)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model expects."""
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt must be text, got {type(text).__name__}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"prompt is not valid Unicode: {error}", "prompt") from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_word(self, text: str) -> list[int]:
        """Token ids of a piece of text, with nothing before or after it."""
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Listing[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_strings(self, token_ids: Listing[int]) -> list[str]:
        """Each token as the vocabulary spells it."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text, in UTF-8; possibly a part of a character."""
        text = self._added_texts.get(token_id)
        if text is not None:
            return text.encode()
        text = self.backend.id_to_token(token_id)
        if text is None:  # the model has more logits than there are tokens
            return b""
        if self._is_byte_level:
            return bytes(self._bytes[letter] for letter in text if letter in self._bytes)
        if found := _BYTE_TOKEN.fullmatch(text):
            return bytes((int(found[1], 16),))
        return text.replace("\u2581", " ").encode()  # how such vocabularies write a blank

    def render_chat(self, messages: Listing[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation through the model's chat template.

        Messages are data: where one holds the text of a special token, that is encoded as text.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidRequest("messages must be a non-empty list", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(
                    "each message must be a dict with a role and content", "messages"
                )
        if self._tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template; use generate", "messages")
        # No text can hold the mark by design or by chance; it is where text is cut for encoding.
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        try:
            text = self._tokenizer.apply_chat_template(
                [self._cut(message, mark) for message in messages],
                tokenize=False,
                **{"add_generation_prompt": True, **options},
            )
        except Exception as error:  # whatever a template raises is about its input
            raise InvalidRequest(
                f"the chat template refuses the messages: {error}", "messages"
            ) from error
        pieces = text.split(mark)
        return [
            token
            for piece in pieces
            for token in self._tokenizer.encode(piece, add_special_tokens=False)
        ]

    def _cut(self, value: Any, mark: str) -> Any:
        """A message with a mark in every special token's text, so that none is left whole."""
        if isinstance(value, Mapping):
            return {name: self._cut(inner, mark) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._cut(inner, mark) for inner in value]
        while isinstance(value, str) and self._added.search(value):
            value = self._added.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        return value


class Detokenizer:
    """One sequence's text, token by token.

    Never emits half a character: bytes that do not make one yet wait for the next token. Never
    emits what may turn out to be the beginning of a stop string.

    Attributes:
        text: everything decoded, cut at the stop string once one was found.
        stop: the stop string that was found, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Listing[int], sampling: SamplingParams
    ) -> None:
        self._backend = tokenizer.backend
        self._context = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._skip_special = sampling.skip_special_tokens
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip_special)
        self._stops = sampling.stop or ()
        self._longest_stop = max(map(len, self._stops), default=0)
        self._include_stop = sampling.include_stop_str_in_output
        self._min_tokens = sampling.min_tokens
        self._token_ids: list[int] = []
        self._search_from = 0
        self._num_emitted = 0
        self._incomplete = False
        self.text = ""
        self.stop: str | None = None

    def add(self, token_id: int) -> bool:
        """Take one more token; True if its text completes a stop string."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._backend, token_id)
        self._incomplete = piece is None
        if piece is None:
            return False
        return self._extend(piece)

    def finish(self) -> None:
        """No more tokens will come: characters left incomplete become U+FFFD."""
        if self._incomplete and self.stop is None:
            whole = self._backend.decode(
                self._context + self._token_ids, skip_special_tokens=self._skip_special
            )
            before = self._backend.decode(self._context, skip_special_tokens=self._skip_special)
            self._extend(whole[len(before) + len(self.text) :])
        self._longest_stop = 0

    def _extend(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if not self._stops:
            return False
        if len(self._token_ids) <= self._min_tokens:
            self._search_from = len(self.text)
            return False
        start = max(self._search_from, before - self._longest_stop + 1)
        found = [(self.text.find(stop, start), stop) for stop in self._stops]
        found = [(at, len(stop), stop) for at, stop in found if at >= 0]
        if not found:
            return False
        at, length, self.stop = min(found)
        self.text = self.text[: at + length if self._include_stop else at]
        return True

    def take(self) -> str:
        """The text that is certain by now and was not taken before."""
        end = len(self.text)
        if self.stop is None and self._longest_stop:
            end -= self._held_back()
        piece = self.text[self._num_emitted : end]
        self._num_emitted = max(self._num_emitted, end)
        return piece

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        limit = min(self._longest_stop - 1, len(self.text) - self._search_from)
        for length in range(limit, 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


def read_generation_config(directory: str | Path) -> dict[str, Any]:
    """generation_config.json of a checkpoint, or an empty dict where there is none.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    path = Path(directory) / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError(f"larger than {MAX_JSON_BYTES} bytes")
        loaded = json.loads(path.read_text())
        if not isinstance(loaded, dict):
            raise ValueError("not an object")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return loaded


def default_sampling(generation_config: Mapping[str, Any], where: str) -> SamplingParams:
    """The sampling settings that a checkpoint recommends.

    Raises:
        CheckpointError: a recommended value is out of range.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    chosen = {n: generation_config[n] for n in names if generation_config.get(n) is not None}
    if generation_config.get("max_new_tokens") is not None:
        chosen["max_tokens"] = generation_config["max_new_tokens"]
    if generation_config.get("do_sample") is False:
        chosen["temperature"] = 0.0
    try:
        return SamplingParams(**chosen)
    except InvalidRequest as error:
        raise CheckpointError(f"{where}: generation_config.json: {error}") from error
