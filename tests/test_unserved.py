"""Names of vLLM's arguments that are not served: each says what to do instead."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest

from jaxserve import LLM, AsyncLLM, EngineConfig
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.options import engine_settings
from jaxserve.errors import InvalidRequest
from jaxserve.settings.unserved import UNSERVED, served
from jaxserve.start.start import load
from tests.support.checkpoint import save_checkpoint
from tests.support.quick_code import quick_programs


def test_none_of_them_is_a_setting() -> None:
    assert not UNSERVED.keys() & EngineConfig.__dataclass_fields__.keys()


@pytest.mark.parametrize("name", UNSERVED)
def test_values_that_ask_for_nothing_pass(name: str) -> None:
    for value in (None, *UNSERVED[name].neutral):
        assert served({name: value, "seed": 1}) == {"seed": 1}
    shown = name if name == "hf_token" else f"{name}='x'"  # a log may hold no token
    with pytest.raises(InvalidRequest, match=f"^{shown} is not supported: .+"):
        LLM("/no/such", **{name: "x"})


def test_a_flag_is_no_number() -> None:
    for name, value in (("data_parallel_size", True), ("enforce_eager", 0)):
        with pytest.raises(InvalidRequest, match=name):
            served({name: value})


def test_a_name_of_nobody_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="enforce_eagerly"):
        LLM("/no/such", enforce_eagerly=True)


@pytest.mark.parametrize("command", ["serve", "generate hi", "compile"])
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--enforce-eager", "enforce_eager=True"),
        ("--data-parallel-size 2", "--data-parallel-size=2"),
        ('--speculative-config {"a":1}', "speculative_config="),
        ("--tokenizer-mode slow", "tokenizer_mode='slow'"),
    ],
)
def test_an_option_is_refused_in_one_line(
    command: str, flag: str, name: str, capsys: pytest.CaptureFixture
) -> None:
    assert main([*command.split(), *flag.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jaxserve: error: {name}") and err.count("\n") == 1


def test_options_that_ask_for_nothing_pass() -> None:
    words = "serve --data-parallel-size 1 --no-enforce-eager --swap-space 0 --seed 3"
    assert engine_settings(make_parser().parse_args(words.split())) == {"seed": 3}


def test_an_engine_cannot_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of either kind, over the same loaded model."""
    with quick_programs():
        loaded = load(
            EngineConfig(
                model=save_checkpoint(tmp_path),
                max_num_seqs=2,
                max_num_batched_tokens=16,
                decode_sizes=(2,),
                token_sizes=(16,),
                max_model_len=32,
                num_scheduler_steps=1,
            )
        )
    with monkeypatch.context() as patch:
        patch.setattr(loaded.runner, "close", lambda: None)  # until the last of them has it
        refuse_copies(LLM(loaded))
    refuse_copies(AsyncLLM(loaded))


def refuse_copies(llm: LLM | AsyncLLM) -> None:
    try:
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="cannot be pickled or copied: it holds"):
                attempt(llm)
    finally:
        llm.close()
