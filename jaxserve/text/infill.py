"""Fill-in-the-middle: prompts of what stands before and behind a gap.

Models of code are trained to fill a gap between three marks. Here they are as the cards of the
models name them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest


class Marks(NamedTuple):
    """Tokens around what stands before and behind a gap.

    Attributes:
        before, behind: begin these parts.
        middle: begins what the model writes; empty where nothing does.
        is_reversed: whether what stands behind the gap comes first.
    """

    before: str
    behind: str
    middle: str
    is_reversed: bool = False


MARKS = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    Marks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder, V3
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    Marks("<PRE>", "<SUF>", "<MID>"),
    Marks("[PREFIX]", "[SUFFIX]", "", is_reversed=True),  # Codestral: [SUFFIX]...[PREFIX]...
)
ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|file_separator|>", "<fim_pad>", "<|end_of_text|>"),
    *("<｜end▁of▁sentence｜>", "▁<EOT>", "<EOT>", "<|file_sep|>", "<file_sep>", "<|repo_name|>"),
)


def infill_prompt(tokenizer: Any, before: str, behind: str) -> list[int]:
    """Return the token ids of a prompt whose continuation fills a gap.

    Args:
        tokenizer: of the model.
        before: text that stands before the gap.
        behind: text that stands behind it.

    Raises:
        InvalidRequest: naming `suffix`, where the model has no marks for gaps.
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
    """Return the tokens by which a model of code ends what fills a gap, besides its own end."""
    found = [tokenizer.token_id(text) for text in ENDS]
    return [number for number in found if number is not None]


def _beginning(tokenizer: Any) -> list[int]:
    """Return the token that begins every prompt of the model, where there is one."""
    begin = tokenizer.special_names.get("bos_token")
    whole = tokenizer.encode("a", True)
    number = None if begin is None else tokenizer.token_id(begin)
    return [number] if number is not None and whole[:1] == [number] else []
