"""Tokenizer: conversion between text and token ids, and rendering of chat templates."""

from __future__ import annotations

import copy
import itertools
import logging
import re
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from pathlib import Path
from typing import Any, Self

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text.added_texts import AddedTexts
from jaxserve.text.messages import RefusedMessages, find_form, in_form, with_ending
from jaxserve.text.plain_tokenizer import processor_template, read_tokenizer
from jaxserve.text.prompt_encoder import PromptEncoder
from jaxserve.text.template import ChatTemplate, read_templates
from jaxserve.text.tokenizer_calls import LibraryCalls, TokenizerFailure
from jaxserve.text.tokenizer_limits import MAX_TOKENS_BEYOND, check_tokenizer_files

NO_TEMPLATE = "this model has no chat template"
_log = logging.getLogger(__name__)
# Token of a single byte in SentencePiece vocabularies.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """Tokenizer of a checkpoint, with its chat templates.

    Args:
        directory: folder with tokenizer.json and related files.
        vocab_size: number of the model's logits.
        content_format: form of message content that chat templates expect: "string", "openai" (list
            of parts), or "auto" to detect it.

    Raises:
        CheckpointError: the tokenizer is missing, unreadable, or does not match the model.
    """

    def __init__(
        self, directory: str | Path, vocab_size: int, content_format: str = "auto"
    ) -> None:
        path = Path(directory) / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: there is no tokenizer.json; pass tokenizer=DIR, or "
                "skip_tokenizer_init=True to serve token ids only"
            )
        may_panic = check_tokenizer_files(path.parent, vocab_size)
        try:
            self.calls = LibraryCalls(may_panic)
            with self.calls:
                tokenizer = read_tokenizer(Path(directory))
                if tokenizer.chat_template is None:
                    tokenizer.chat_template = processor_template(Path(directory))
                self._take(tokenizer, str(path), vocab_size, content_format)
        except CheckpointError:
            raise
        except Exception as error:  # the library raises bare Exceptions for corrupt files
            raise CheckpointError(f"{path}: not a readable tokenizer ({error})") from error

    @classmethod
    def of(cls, tokenizer: Any, where: str, vocab_size: int, content_format: str = "auto") -> Self:
        """Return a `Tokenizer` that wraps a tokenizer of the Transformers library.

        Args:
            where: name of the source in error messages.
            vocab_size: number of the model's logits.
            content_format: form of message content that chat templates expect, as for `Tokenizer`.

        Raises:
            CheckpointError: the tokenizer does not match the model, or a chat template is not
                usable.
        """
        wrapped = cls.__new__(cls)
        wrapped.calls = LibraryCalls()
        wrapped._take(tokenizer, where, vocab_size, content_format)
        return wrapped

    def _take(self, tokenizer: Any, where: str, vocab_size: int, content_format: str) -> None:
        self._tokenizer = tokenizer
        self._content_format = content_format
        self.backend = tokenizer.backend_tokenizer
        self._vocab_size = vocab_size
        vocab: dict[str, int] = tokenizer.get_vocab()
        self._added_ids: dict[str, int] = tokenizer.get_added_vocab()
        self._beyond = self._tokens_beyond(vocab, where)
        self.eos_token_id: int | None = self._tokenizer.eos_token_id
        self.longest_token = max(map(len, vocab), default=1)
        self._is_byte_level = "ByteLevel" in str(self.backend.decoder)
        self._bytes = {letter: byte for byte, letter in enumerate(byte_letters())}
        # Decoding uses this flag. Lists of special tokens by name are rarely complete.
        flagged = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(number for number, token in flagged.items() if token.special)
        self._added_texts = {number: text for text, number in self._added_ids.items()}
        self._added = AddedTexts(self._added_ids)
        self._encoder = PromptEncoder(self.backend, self._added_ids, self.special_ids, self.calls)
        self._templates = read_templates(tokenizer, where, self.fit)

    def _tokens_beyond(self, vocab: Mapping[str, int], where: str) -> dict[int, str]:
        """Return the texts, by id, of the added tokens for which the model has no logits.

        Such tokens are, for example, image markers beside a text model. They are logged.

        Raises:
            CheckpointError: ordinary words or many added tokens have no logits either, so the
                tokenizer belongs to another model.
        """
        size, added = self._vocab_size, self._added_ids
        beyond = {token: text for text, token in vocab.items() if token >= size}
        if any(text not in added for text in beyond.values()) or len(beyond) > MAX_TOKENS_BEYOND:
            raise CheckpointError(
                f"{where}: holds token id {max(beyond)}, and the model has logits for {size}"
            )
        if beyond:
            listed = ", ".join(f"{text!r} ({token})" for token, text in sorted(beyond.items()))
            _log.warning(
                "%s: the model has logits for %d tokens, so these are never drawn, and refused in "
                "prompts: %s",
                where,
                size,
                listed,
            )
        return beyond

    def _within(self, ids: list[int], param: str) -> list[int]:
        # InvalidRequest: the model has no logits for one of the ids.
        if self._beyond:
            for token in ids:
                if token in self._beyond:
                    raise InvalidRequest(
                        f"{param} holds the token {self._beyond[token]!r}, whose id {token} this "
                        f"model does not know; its ids are 0 to {self._vocab_size - 1}",
                        param,
                    )
        return ids

    def fit(self, template: ChatTemplate, tools: Any = None, seconds: float = 1.0) -> ChatTemplate:
        """Detect the form of message content that a chat template expects, and set it in the
        template.

        Return the template, whose `text_roles` is the form.

        Args:
            tools: tools with which the test conversations are rendered, or None.
            seconds: limit on the CPU time of each rendering.

        Raises:
            WordsLost: the template does not show user messages in any form.
            TemplateTooLong: the template exceeded its limits.
        """
        inputs = {"tools": tools}
        template.text_roles = find_form(
            lambda talk: "".join(self._render(template, talk, inputs, seconds)),
            self._content_format,
            template.constants,
        )
        return template

    def with_template(self, template: ChatTemplate) -> Self:
        """Return a copy of the tokenizer that uses one chat template for all conversations."""
        other = copy.copy(self)
        other._templates = {False: template, True: template}
        return other

    def with_content_format(self, content_format: str) -> Self:
        """Return a copy of the tokenizer whose chat templates get message content in the given
        form.

        Args:
            content_format: "string", "openai" (list of parts), or "auto" to detect the form.
        """
        other = copy.copy(self)
        other._content_format = content_format
        templates = self._templates.items()
        other._templates = {tools: other.fit(copy.copy(template)) for tools, template in templates}
        return other

    def has_template(self, tools: bool) -> bool:
        """Return whether there is a chat template for conversations with tools (`tools` True) or
        without.
        """
        return self._template(tools) is not None

    def _template(self, tools: bool) -> ChatTemplate | None:
        return self._templates.get(tools) or self._templates.get(False)

    @property
    def template_source(self) -> str:
        """Jinja source of the chat template for conversations with tools, otherwise of the only
        one, or "".
        """
        template = self._templates.get(True) or self._templates.get(False)
        return template.source if template else ""

    @property
    def special_names(self) -> dict[str, str]:
        """Texts of the tokenizer's special tokens, by names such as "eos_token"."""
        return dict(self._tokenizer.special_tokens_map)

    def template_reads(self, name: str) -> bool:
        """Return whether any chat template of the tokenizer uses the variable `name`."""
        return any(template.reads(name) for template in self._templates.values())

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token whose text is `text`, or None if there is none."""
        return self._added_ids.get(text)

    def is_special(self, text: str) -> bool:
        """Return whether a text is that of a special token. Decoding omits special tokens by
        default.
        """
        return self.token_id(text) in self.special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a prompt, in which the texts of added tokens are recognized.

        Args:
            add_special_tokens: True to add the special tokens that the model expects around a text.

        Raises:
            InvalidRequest: the prompt is not valid text, contains a token without logits, or cannot
                be encoded.
        """
        return self._within(self._encode(text, add_special_tokens), "prompt")

    def encode_data(self, text: str) -> list[int]:
        """Return the token ids of untrusted text, in which the texts of added tokens are ordinary
        text.

        Raises:
            InvalidRequest: the text is not valid, or the tokenizer cannot encode it.
        """
        return self._encode(text, None)

    def encode_word(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens around it.

        Tokens without logits are allowed. Added tokens are recognized.

        Raises:
            InvalidRequest: the text is not valid, or the tokenizer cannot encode it.
        """
        return self._encode(text, False)

    def _encode(self, text: str, add_special_tokens: bool | None) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: whether special tokens are added around the text. With None, the
                texts of added tokens are ordinary text, too.

        Raises:
            InvalidRequest: the text is not valid, or the tokenizer cannot encode it.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"prompt must be text, got {type(text).__name__}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"prompt is not valid Unicode: {error}", "prompt") from None
        try:
            if add_special_tokens is None:
                return self._encoder.encode_data(text)
            return self._encoder.encode(text, add_special_tokens)
        except TokenizerFailure as error:
            raise _not_encoded("prompt", error) from None

    def decode(self, token_ids: Listing[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids.

        Args:
            skip_special_tokens: True to omit special tokens from the text.

        Raises:
            InvalidRequest: the tokenizer cannot decode the ids.
        """
        try:
            return self.calls.run(self.backend.decode, list(token_ids), skip_special_tokens)
        except TokenizerFailure as error:
            raise InvalidRequest(f"the tokenizer cannot decode the tokens: {error}") from None

    def token_strings(self, token_ids: Listing[int]) -> list[str]:
        """Return each token as the vocabulary spells it, for example "Ġword"."""
        return self._tokenizer.convert_ids_to_tokens(list(token_ids))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes that a token adds to a text. They may be a part of a character.

        The result is b"" for an id without a token.
        """
        text = self._added_texts.get(token_id)
        if text is not None:  # runs of spaces may be added tokens
            return (text if self._is_byte_level else text.replace("\u2581", " ")).encode()
        text = self.backend.id_to_token(token_id)
        if text is None:  # the model has more logits than tokens
            return b""
        if self._is_byte_level:
            return bytes(self._bytes[letter] for letter in text if letter in self._bytes)
        if match := _BYTE_TOKEN.fullmatch(text):
            return bytes((int(match[1], 16),))
        return text.replace("\u2581", " ").encode()  # how these vocabularies write a space

    def render_chat(
        self,
        messages: Listing[Mapping[str, Any]],
        seconds: float = 1.0,
        chat_template: ChatTemplate | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of the prompt that a chat template makes of a conversation.

        The texts of added tokens in messages and tools, which are untrusted, remain ordinary text.

        Args:
            messages: dicts with a role and content.
            seconds: limit on the CPU time of the template.
            chat_template: template to use in place of the tokenizer's own.
            options: further template variables, such as `tools`, `documents` or
                `add_generation_prompt`. With `continue_final_message`, the prompt ends after the
                content of the last message.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or the text cannot be
                encoded.
            TemplateTooLong: the template exceeded its limits.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise InvalidRequest("messages must be a non-empty list", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise InvalidRequest(
                    "each message must be a dict with a role and content", "messages"
                )
        template = chat_template or self._template(bool(options.get("tools")))
        if template is None:
            raise InvalidRequest(NO_TEMPLATE, "messages")
        try:
            pieces = self._render(template, messages, options, seconds)
        except InvalidRequest:
            raise
        except Exception as error:  # templates raise errors about their input
            raise RefusedMessages(
                f"the chat template refuses the messages: {error}", "messages"
            ) from error
        try:
            ids = self._encoder.encode_pieces(pieces)
        except TokenizerFailure as error:
            raise _not_encoded("messages", error) from None
        return self._within(ids, "messages")

    def _render(
        self,
        template: ChatTemplate,
        messages: Listing[Mapping[str, Any]],
        options: Mapping[str, Any],
        seconds: float,
    ) -> list[str]:
        """Return the text that a chat template makes of a conversation, in pieces.

        The text is cut within each text of an added token that comes from messages or options. So
        only tokens that the template itself writes are whole in one piece.

        Args:
            options: further template variables, and `continue_final_message`.
            seconds: limit on the CPU time of the template.

        Raises:
            InvalidRequest: the template leaves out the last message, which is to be continued.
        """
        # The mark is random, so input cannot contain it. The text is split at it for encoding.
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        end = f"\ue002{mark[1:-1]}"
        variables: dict[str, Any] = {"add_generation_prompt": True, "tools": None}
        variables |= {"documents": None, **self._added.cut(options, mark)}
        continued = variables.pop("continue_final_message", False)
        variables |= self._tokenizer.special_tokens_map
        messages = in_form(messages, template.text_roles)
        conversation = [self._added.cut(message, mark) for message in messages]
        if continued:
            conversation[-1]["content"] = with_ending(conversation[-1].get("content"), f"{end} ")
        text = template.render({**variables, "messages": conversation}, seconds)
        if continued:
            text, marker, after = text.rpartition(end)
            if not marker:
                raise InvalidRequest(
                    "the chat template leaves out the message to continue", "continue_final_message"
                )
            text = text if after.startswith(" ") else text.rstrip()
        return text.split(mark)


def _not_encoded(param: str, error: TokenizerFailure) -> InvalidRequest:
    # The checkpoint may be at fault, so the error is logged.
    message = f"this model's tokenizer cannot encode {param}: {error}"
    _log.warning("a request is refused: %s", message)
    return InvalidRequest(message, param)


def byte_letters() -> list[str]:
    """Return the 256 letters that a byte-level vocabulary (GPT-2) uses for the bytes 0 to 255.

    A letter is the byte's Latin-1 character if that is visible, otherwise the next character from
    U+0100 on.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = itertools.count(256)
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]
