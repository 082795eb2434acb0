"""The demonstration model's tokenizer: a byte-level BPE over the words of its tasks."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from scripts.demo_model import tasks as demo_tasks

SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
PAD, BOS, _, EOS = range(4)
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Words of the prompts that become one token each, apart from the word lists of demo_tasks.
PROMPT_WORDS = (
    "user What is the words word has in of code Say saw are The and Count from to"
).split()
LETTER_RUNS = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def bytes_as_characters() -> dict[int, str]:
    """Return the printable character that byte-level BPE uses for each of the 256 byte values."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    shifted = [byte for byte in range(256) if byte not in set(kept)]
    table = {byte: chr(byte) for byte in kept}
    return table | {byte: chr(256 + rank) for rank, byte in enumerate(shifted)}


def build_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Build merges after which each of ``words`` is one token.

    A later merge ranks below all earlier ones, so it cannot split a word that is already whole.
    """
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = list(word)
        for left, right in merges:
            index = 0
            while index < len(pieces) - 1:
                if (pieces[index], pieces[index + 1]) == (left, right):
                    pieces[index : index + 2] = [left + right]
                index += 1
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces[:2] = [pieces[0] + pieces[1]]
    return merges


def build_tokenizer() -> Tokenizer:
    """Build a byte-level BPE over single digits, task words (with or without a blank) and bytes."""
    characters = bytes_as_characters()
    blank = characters[ord(" ")]
    bare = [*demo_tasks.WORDS, *demo_tasks.NAMES, *demo_tasks.COLOURS, *PROMPT_WORDS]
    after_blank = [blank + word for word in bare if word not in ("user", "Say")]
    after_blank += [blank + digit for digit in string.digits]
    merges = build_merges([*dict.fromkeys(bare), *dict.fromkeys(after_blank)])
    tokens = [*SPECIAL_TOKENS, *(characters[byte] for byte in range(256))]
    tokens += dict.fromkeys(left + right for left, right in merges)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LETTER_RUNS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    return tokenizer


def word_pairs(tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Find the ids of every word that is one token both without and with a blank before it."""
    ids, blank = tokenizer.get_vocab(), bytes_as_characters()[ord(" ")]
    return [(ids[token], ids[blank + token]) for token in ids if blank + token in ids]
