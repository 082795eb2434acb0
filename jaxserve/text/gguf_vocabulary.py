"""Facts of llama.cpp about GGUF vocabularies: splits of text by pre-tokenizers, and end tokens.

Splits apply before the merges of byte-level vocabularies. Names, flags, most patterns and the texts
of end tokens are from llama.cpp's src/llama-vocab.cpp (MIT licence, ggml authors). Where it only
approximates a pattern of the model's tokenizer.json, and quotes it, the pattern here is the
model's.

Many files name only the end-of-text token. A model that ends its turns with another token would
then continue with both sides of the conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TextSplit:
    """Rules by which a byte-level vocabulary splits text into words before merging tokens."""

    # Patterns, applied in order, each to the words of the previous one. Text that a pattern does
    # not match becomes a word of its own.
    patterns: tuple[str, ...]
    # True if a word that is a token is encoded as that token regardless of merges.
    ignore_merges: bool = False
    begins: bool = False  # True if a text begins with the BOS token, unless the file says otherwise


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _BLANKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_ANY_NUMBER = rf"{_ENDINGS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"


def _cased(ending: str, numbers: str) -> str:
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{ending}|{_BEFORE}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{numbers}|{_SLASHES}|{_BLANKS}"


_TEKKEN, _GPT4O = _cased("", r"\p{N}"), _cased(f"{_ENDINGS}?", r"\p{N}{1,3}")
_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_CODE = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_CODE}|{_MARKED}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
# Cased letters, as listed in DeepSeek-V2's tokenizer.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫ"
    "ᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭ"
    "ℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟"
    "𞤀-𞥃"
)
_ASIAN = (  # AFMoE: Chinese, Japanese, Thai, Lao, Khmer, Burmese, Korean
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
    "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f"
    "\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_NOT_HAN_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_NOT_HAN_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"

_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"
_EACH_LINE = r"[^\n]+|[\n]+"
_POETRY = r" ?[^(\s|.,!?…。，、।۔،)]+"
# Names that share patterns, with both flags False.
_PLAIN: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        (_GPT2,),
    ),
    (  # single digits
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
        (r"\p{N}", _GPT2),
    ),
    ("dbrx smaug-bpe glm4 chatglm-bpe", (_LLAMA3,)),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        (_QWEN2,),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT4O,)),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", (r"\p{N}{1,3}", _KANA, _DEEPSEEK3)),
    ("poro-chat bloom gpt3-finnish", (_POETRY,)),
    ("viking", (_POETRY, r"\p{N}")),
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("falcon", (_PUNCTUATION, _GPT2, r"[0-9][0-9][0-9]")),
    (
        "deepseek-llm",
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        ),
    ),
    (
        "deepseek-coder",
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    (
        "jais-2",
        (
            rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|\s{{512}}(?!\S)|\s{{256}}(?!\S)"
            r"|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
            r"|\s{1,2}(?!\S)|\s{1}",
        ),
    ),
    (
        "spark2_5",
        (
            r"\p{N}{1,3}",
            _KANA,
            rf"{_CODE}|{_MARKED}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        ),
    ),
    (
        "qwen35",
        (
            rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        ),
    ),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    (
        "kimi-k2",
        (
            rf"[\p{{Han}}]+|{_BEFORE}{_NOT_HAN_UPPER}*{_NOT_HAN_LOWER}+{_ENDINGS}?"
            rf"|{_BEFORE}{_NOT_HAN_UPPER}+{_NOT_HAN_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
            rf"|{_SIGNS}|{_BLANKS}",
        ),
    ),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    (
        "bailingmoe bailingmoe2 llada-moe",
        (rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",),
    ),
    (
        "seed-coder",
        (rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
    ),
    ("ufakzeka", (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",)),
    (  # groups of three digits from the right
        "afmoe",
        (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _ASIAN, _DEEPSEEK3),
    ),
    ("laguna", (_EACH_LINE, _QWEN2)),
    (
        "exaone-moe",
        (
            rf"{_ENDINGS}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    ),
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _cased(f"{_ENDINGS}?", r"\p{N}"),
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_LLAMA3_NAMES = (
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split()
)
SPLITS: Mapping[str, TextSplit] = MappingProxyType(
    {name: TextSplit(patterns) for names, patterns in _PLAIN for name in names.split()}
    | {name: TextSplit((_LLAMA3,), ignore_merges=True, begins=True) for name in _LLAMA3_NAMES}
    | {
        "tekken": TextSplit((_TEKKEN,), ignore_merges=True, begins=True),
        "chameleon": TextSplit(_CHAMELEON, begins=True),
        "youtu": TextSplit(_YOUTU, ignore_merges=True),
        "minicpm5": TextSplit((r"\p{N}{1,3}", _ANY_NUMBER), ignore_merges=True),
        "granite-embed-multi-97m": TextSplit((_GPT4O,), ignore_merges=True),
    }
)
# BPE vocabularies spelled in characters instead of bytes.
IN_CHARACTERS = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")


TEXTS: frozenset[str] = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> "
    "<|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> "
    "<eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[".split()
)
# If a file does not name the token, the first of these texts in its vocabulary applies.
_CODE_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_USER_DEFINED = 4  # type of a token
_NAMED = ("eos", "eot", "eom", *_CODE_ENDS)


def end_texts(types: Mapping[str, int]) -> set[str]:
    """Return the tokens of a vocabulary that end an answer according to their text alone.

    Args:
        types: GGUF token type of each token, by the text of the token.
    """
    ends = set(TEXTS.intersection(types))
    if ends & {"<|call|>", "<|calls|>"} and ends & {"<|return|>", "<|flush|>"}:
        ends.discard("<|end|>")  # ends only a part of an answer
    if types.get("</s>") == _USER_DEFINED:
        ends.discard("</s>")  # an HTML tag, for which Gemma has a token
    return ends


def gguf_ends(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the ids of the tokens that end an answer, from the metadata of a GGUF file.

    The ids that the metadata names come first, unchecked. The ids of tokens with known texts follow
    in ascending order.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    tokens = tokens if isinstance(tokens, list) else []
    types = metadata.get("tokenizer.ggml.token_type")
    types = types if isinstance(types, np.ndarray | list) else [1] * len(tokens)
    named = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _NAMED}
    places = {token: index for index, token in enumerate(tokens)}
    texts = end_texts(dict(zip(tokens, types, strict=False)))
    for name, spellings in _CODE_ENDS.items():
        if named[name] is None:
            texts.update([text for text in spellings if text in places][:1])
    by_text = sorted(places[text] for text in texts)
    return list(dict.fromkeys([*(end for end in named.values() if end is not None), *by_text]))
