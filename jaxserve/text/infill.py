"""Fill-in-the-middle: prompts made of the text before and after a gap.

Code models are trained to fill a gap between three markers. The markers are from the model cards.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest


class Marks(NamedTuple):
    """Marker tokens of a fill-in-the-middle prompt."""

    before: str  # marker before the text that precedes the gap
    behind: str  # marker before the text that follows the gap
    middle: str  # marker before the generated text, "" if there is none
    is_reversed: bool = False  # True if the text after the gap comes first


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, V3
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<PRE>", "<SUF>", "<MID>"),
    Marks("[PREFIX]", "[SUFFIX]", "", is_reversed=True),  # Codestral: [SUFFIX]...[PREFIX]...
)
ENDS = tuple(
    "<|endoftext|> <|fim_pad|> <|file_separator|> <fim_pad> <|end_of_text|> "
    "<｜end▁of▁sentence｜> ▁<EOT> <EOT> <|file_sep|> <file_sep> <|repo_name|>".split()
)


def infill_prompt(tokenizer: Any, before: str, behind: str) -> list[int]:
    """Return the token ids of a prompt whose continuation fills a gap.

    Raises:
        InvalidRequest: the model has no fill-in-the-middle markers; the error names `suffix`.
    """
    token = tokenizer.token_id
    for marks in MARKS:
        ids = [token(text) for text in marks[:3] if text]
        if None not in ids:
            break
    else:
        raise InvalidRequest(
            "suffix needs a model with tokens for filling gaps, like <|fim_prefix|>; this one has "
            "none, so send a prompt alone",
            "suffix",
        )
    head, tail = (tokenizer.encode_data(text) if text else [] for text in (before, behind))
    first = [ids[0], *head]
    second = [ids[1], *tail]
    parts = [*second, *first] if marks.is_reversed else [*first, *second, *ids[2:]]
    return [*_beginning(tokenizer), *parts]


def end_tokens(tokenizer: Any) -> list[int]:
    """Return ids of additional tokens with which code models end a filled gap."""
    ids = [tokenizer.token_id(text) for text in ENDS]
    return [number for number in ids if number is not None]


def _beginning(tokenizer: Any) -> list[int]:
    begin = tokenizer.special_names.get("bos_token")
    whole = tokenizer.encode("a", True)
    number = None if begin is None else tokenizer.token_id(begin)
    return [number] if number is not None and whole[:1] == [number] else []
