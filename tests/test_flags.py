"""Every option of `vllm serve` and of llama.cpp's server is served or answered with advice.

`support/flags/vllm-0.33.0.txt` has the options that vLLM 0.33.0's `make_arg_parser` declares, and
the values of each; `llama-server-11434.txt` has the list of `llama-server --help`, build 11434.
"""

from __future__ import annotations

import argparse
import functools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from jaxserve import EngineConfig
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.options import RENAMED, declare_unserved, engine_settings, given
from jaxserve.commands.parser import CommandParser
from jaxserve.commands.serve import SERVER_FIELDS, llama_command, llama_options
from jaxserve.errors import InvalidRequest
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.compat import ENGINE, SERVER, served, table, unserved

FLAGS = Path(__file__).parent / "support/flags"
VLLM = [line.split() for line in (FLAGS / "vllm-0.33.0.txt").read_text().splitlines()]
LLAMA = (FLAGS / "llama-server-11434.txt").read_text().split()


@functools.cache
def serve_parser() -> CommandParser:
    [commands] = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    parser = commands.choices["serve"]
    declare_unserved(parser)
    return parser


def parse(words: str | list[str]) -> argparse.Namespace:
    words = words.split() if isinstance(words, str) else words
    return make_parser().parse_args(["serve", *words])


def test_the_lists_are_whole() -> None:
    assert len(VLLM) == 320 and len(LLAMA) == 413


@pytest.mark.parametrize("row", VLLM, ids=lambda row: row[1])
def test_every_option_of_vllm_has_a_word(row: list[str]) -> None:
    kind, *options = row
    ours = serve_parser()._option_string_actions
    for option in options:
        assert option in ours, f"{option} is unrecognized"
    action = ours[options[0]]
    assert all(ours[option].dest == action.dest for option in options)
    # It takes as many words as the original, so that the following options are read correctly.
    assert (action.nargs == 0) == (kind == "switch"), options
    if kind in ("words", "maybe"):
        assert action.nargs in ("+", "?") or action.dest in ("api_key", "allowed_media_domains")
    name = options[0][2:].replace("-", "_")
    name = RENAMED.get(name, name)
    settings = {*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__, "config"}
    row_here = unserved(ENGINE).get(name) or unserved(SERVER).get(name)
    assert name in settings or (row_here is not None and row_here.instead), name


@pytest.mark.parametrize("name", unserved(SERVER))
def test_an_option_of_the_server_is_refused_or_changes_nothing(
    name: str, capsys: pytest.CaptureFixture
) -> None:
    neutral = unserved(SERVER)[name].neutral
    for value in (None, *(neutral or ())):
        assert served({name: value}, (), SERVER) == {}
    flag = "--" + name.replace("_", "-")
    if neutral is None:
        arguments = parse([flag, "anything", "--strict"])
        assert served(given(arguments, unserved(SERVER)), (), SERVER) == {}
        return
    if any(isinstance(value, bool) for value in neutral):
        other = [value for value in (True, False) if value not in neutral]
        words = [[flag] if value else [flag.replace("--", "--no-", 1)] for value in other]
    else:
        words = [[flag, "x-y-z"]]
    for word in words:
        assert main(["serve", *word]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"jaxserve: error: {name}=") and err.count("\n") == 1


def test_no_name_is_both_served_and_not() -> None:
    ours = {field.name for cls in (EngineConfig, ServerConfig) for field in fields(cls)}
    assert not ours & unserved(SERVER).keys() and not ours & RENAMED.keys()
    assert not unserved(ENGINE).keys() & unserved(SERVER).keys()
    assert set(RENAMED.values()) <= ours


def test_spellings_of_vllm() -> None:
    words = (
        "-q int8 --max_model_len=77 --disable-prefix-caching --device-memory-utilization 0.5 "
        "--shutdown-timeout 4 --enable-async-scheduling --disable-auto-tool-choice -tp 1"
    )
    with pytest.raises(SystemExit):
        parse(words)  # --enable-async-scheduling is no option of vLLM's either
    arguments = parse(words.replace("--enable-async-scheduling ", "--dtype half "))
    settings = engine_settings(arguments)
    config = EngineConfig(**settings)
    assert (config.quantization, config.max_model_len, config.dtype) == ("int8", 77, "float16")
    assert config.gpu_memory_utilization == 0.5 and not config.enable_prefix_caching
    for name, method in (("awq_marlin", "awq"), ("int8_per_channel_weight_only", "int8")):
        settings = engine_settings(parse(f"--quantization {name}"))
        assert EngineConfig(**settings) == EngineConfig(quantization=method)
        assert EngineConfig(quantization=name).quantization == method
    server = ServerConfig(**given(arguments, SERVER_FIELDS))
    assert server.drain_timeout == 4 and not server.enable_auto_tool_choice


def test_a_cache_in_fp8_has_two_names() -> None:
    settings = engine_settings(parse("--kv-cache-dtype fp8_e4m3"))
    assert EngineConfig(**settings) == EngineConfig(kv_cache_dtype="fp8")
    older: Any = "fp8_e4m3"
    assert EngineConfig(kv_cache_dtype=older).kv_cache_dtype == "fp8"
    for name in ("auto", "fp8", "int8_per_token_head"):
        assert parse(f"--kv-cache-dtype {name}").kv_cache_dtype == name


OF_ACTIVATIONS, OF_8_BITS = "'auto' takes", "'fp8' \\(e4m3\\)"


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        *((value, OF_ACTIVATIONS) for value in ("bfloat16", "float16", "half", "float32")),
        *((value, OF_8_BITS) for value in ("fp8_e5m2", "fp8_inc", "fp8_per_token_head", "nvfp4")),
    ],
)
def test_another_form_of_the_cache_is_refused_with_a_word(
    value: Any, instead: str, capsys: pytest.CaptureFixture
) -> None:
    said = f"kv_cache_dtype={value!r} is not supported: .*{instead}"
    with pytest.raises(SystemExit, match="2"):
        parse(f"--kv-cache-dtype {value}")
    assert re.search(f"argument --kv-cache-dtype: {said}", capsys.readouterr().err)
    with pytest.raises(InvalidRequest, match=said):
        EngineConfig(kv_cache_dtype=value)


def test_an_option_newer_than_the_list_has_a_word() -> None:
    words = ["m.gguf", "--cpu-moe", "--moe-cache-mib", "4096", "-c", "8k"]
    said = llama_command(words, ())
    assert said is not None and "`jaxserve serve m.gguf --max-model-len 8k`" in said
    assert "--cpu-moe, --moe-cache-mib: the whole model is on the device" in said


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("77", 77),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2M", 2 << 20),
        ("1.5g", 15 * 10**8),
    ],
)
def test_numbers_may_be_written_short(text: str, number: int) -> None:
    assert parse(f"--max-model-len {text}").max_model_len == number


@pytest.mark.parametrize("text", ["k", "1.5K", "1kk", "-1k", "1 k", "many", "9" * 400 + "k"])
def test_numbers_that_are_none(text: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([f"--max-model-len={text}"])
    assert f"argument --max-model-len: invalid int value: {text!r}" in capsys.readouterr().err


def test_fields_of_json_options_are_options() -> None:
    words = [
        *("--hf-overrides.rope.factor", "2", "--hf_overrides.name=x", "--hf-overrides.l+", "a,b"),
        *("--", "--not_an_option"),
    ]
    arguments = parse(words)
    assert arguments.hf_overrides == {"rope": {"factor": 2}, "name": "x", "l": ["a", "b"]}
    assert arguments.models == ["--not_an_option"]


@pytest.mark.parametrize("flag", LLAMA)
def test_every_option_of_llama_cpp_has_a_word(flag: str) -> None:
    ours = serve_parser()._option_string_actions
    assert flag in ours or any(flag in options for options in llama_options())
    said = llama_command([flag, "41", "--strict"], ours)
    if flag in ours:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(f"{flag} is an option of llama.cpp's server: here it is `jaxserve")


def test_what_replaces_an_option_of_llama_cpp_is_an_option() -> None:
    ours = serve_parser()._option_string_actions
    equivalents, reasons = llama_options()
    for here in equivalents.values():
        flags = [word for word in here.split() if word.startswith("--")]
        assert all(flag in ours for flag in flags), here
    assert all(reasons.values())
    groups = [*table()["llama"]["equivalents"], *(r["flags"] for r in table()["llama"]["unserved"])]
    flags = " ".join(groups).split()
    assert len(flags) == len(set(flags)) == len(equivalents) + len(reasons)
    assert set(table()["llama"]["without_value"].split()) <= set(flags)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("-m x.gguf -c 4096 -np 4", "x.gguf --max-model-len 4096 --max-num-seqs 4"),
        ("-hf org/x:Q8_0 --port 1", "org/x:Q8_0 --port 1"),
        ("--port 1 -c 0 -m x.gguf", "x.gguf --port 1"),
        ("--strict -a b --hf-repo=org/x", "org/x --strict --served-model-name b"),
        ("-np -1 --no-cache-prompt m", "--no-enable-prefix-caching m"),
    ],
)
def test_a_command_of_llama_cpp_is_spelled_out(
    words: str, command: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["serve", *words.split()]) == 2
    assert f"here it is `jaxserve serve {command}`" in capsys.readouterr().err
    # The message names a command of ours.
    assert parse(command).run


def test_no_setting_is_automatic_by_a_value_of_its_own() -> None:
    assert set(table()["llama"]["automatic"]) == {"0", "-1", "auto"}


FILE = """
# A comment.
model: some/where
port: 8123
max_model_len: 64
strict: true
enable-prefix-caching: false
decode-sizes: [1, 2]
served-model-name: [a, b]
api-key: [k, l]
allowed-origins: ["*"]
default-chat-template-kwargs: {enable_thinking: false}
tensor-parallel-size: 1
seed:
"""


def test_a_file_gives_options(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    arguments = parse(["--config", str(path), "--port", "9", "--api-key", "own"])
    config = ServerConfig(**given(arguments, SERVER_FIELDS))
    assert (arguments.model, config.port, config.strict) == ("some/where", 9, True)
    assert (config.api_key, config.served_model_name) == (["own"], ["a", "b"])
    assert config.allowed_origins == ["*"]
    assert config.default_chat_template_kwargs == {"enable_thinking": False}
    assert engine_settings(arguments) == {
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "decode_sizes": (1, 2),
        "tensor_parallel_size": 1,
    }


def test_the_environment_comes_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FILE)
    for name, value in {
        "JAXSERVE_PORT": "8124",
        "JAXSERVE_MAX_MODEL_LEN": "65",
        "JAXSERVE_STRICT": "no",
        "JAXSERVE_API_KEY": "x,y",
        "JAXSERVE_ALLOWED_ORIGINS": '["http://a", "http://b"]',
        "JAXSERVE_DECODE_SIZES": "4,8",
        "JAXSERVE_MAX_NUM_SEQS": "",
    }.items():
        monkeypatch.setenv(name, value)
    arguments = parse(["--config", str(path), "--max-model-len", "66"])
    config = ServerConfig(**given(arguments, SERVER_FIELDS))
    assert (config.port, config.strict, config.api_key) == (8124, False, ["x", "y"])
    assert config.allowed_origins == ["http://a", "http://b"]
    settings = engine_settings(arguments)
    assert (settings["max_model_len"], settings["decode_sizes"]) == (66, (4, 8))
    assert "max_num_seqs" not in settings


@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_each_field_has_a_variable(cls: type, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = serve_parser()
    for field in fields(cls):
        action = ours._option_string_actions["--" + field.name.replace("_", "-")]
        text = "true" if action.nargs == 0 else str((action.choices or ["7"])[0])
        text = '{"a": 1}' if action.metavar == "JSON" else text
        monkeypatch.setenv(f"JAXSERVE_{field.name.upper()}", text)
    arguments = parse("")
    for field in fields(cls):
        assert hasattr(arguments, field.name), field.name


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "x", "JAXSERVE_PORT: argument --port: invalid int value: 'x'"),
        ("PORT", "65536", "JAXSERVE_PORT: --port must be from 0 to 65535"),
        ("STRICT", "maybe", "JAXSERVE_STRICT: strict must be true or false"),
        ("DTYPE", "int3", "JAXSERVE_DTYPE: --dtype must be one of"),
        ("KV_CACHE_DTYPE", "int3", "JAXSERVE_KV_CACHE_DTYPE: argument --kv-cache-dtype: invalid"),
        ("MODEL", "/no/such", "JAXSERVE_MODEL: model: '/no/such' is not a folder"),
    ],
)
def test_a_bad_variable_is_named(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setenv(f"JAXSERVE_{name}", value)
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith(f"jaxserve: error: {message}")


def test_a_variable_of_no_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("JAXSERVE_PROT", "1")
    monkeypatch.setenv("JAXSERVE_XYZ", "1")
    assert main(["serve", "/no/such"]) == 2
    first, second, error = capsys.readouterr().err.splitlines()
    assert first == (
        "jaxserve: warning: JAXSERVE_PROT is no setting, and changes nothing; did you mean "
        "JAXSERVE_PORT?"
    )
    assert second == "jaxserve: warning: JAXSERVE_XYZ is no setting, and changes nothing"
    assert error.startswith("jaxserve: error: model: '/no/such' is not")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: x", "FILE:1: argument --port: invalid int value: 'x'"),
        ("\nprot: 1", "FILE:2: there is no option 'prot'; did you mean port?"),
        ("port: 1\nport: 2", "FILE:2: port is given twice"),
        ("port: 70000", "FILE:1: --port must be from 0 to 65535"),
        ("port: [1", "--config FILE: not YAML: "),
        ("- port", "FILE:1: options are given like max-model-len: 4096"),
        ("strict: 3", "FILE:1: strict must be true or false"),
        ("config: other.yaml", "FILE:1: there is no option 'config'"),
        (
            "data-parallel-size: 2",
            "FILE:1: --data-parallel-size=2 needs --data-parallel-backend ray",
        ),
        ("a: !!python/object:os.system x", "--config FILE: not YAML: "),
        ("a: " + "[" * 3000, "--config FILE: not YAML: "),
        ("\x00", "--config FILE: not YAML: "),
        ("#" * ((1 << 20) + 1), "FILE: larger than 1048576 bytes"),
    ],
)
def test_a_bad_file_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    assert main(["serve", "--config", str(path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("jaxserve: error: " + message.replace("FILE", str(path)))
    assert err.count("\n") == 1


def test_other_commands_have_their_part_of_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("JAXSERVE_PORT", "no number")  # that of serve alone
    monkeypatch.setenv("JAXSERVE_MAX_MODEL_LEN", "1")
    batch = ["run-batch", "-i", str(FLAGS / "vllm-0.33.0.txt"), "-o", str(tmp_path / "out")]
    for words in (["generate", "hi"], ["compile"], batch):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert "JAXSERVE_MAX_MODEL_LEN: --max-model-len must be from 2 to" in err, err
    monkeypatch.delenv("JAXSERVE_MAX_MODEL_LEN")
    assert main([*batch, "--chat-template", "llama9"]) == 2
    assert "--chat-template: 'llama9' is neither" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture) -> None:
    assert main(["serve", "--config", "/no/such.yaml"]) == 2
    expected = "jaxserve: error: --config /no/such.yaml: No such file or directory\n"
    assert capsys.readouterr().err == expected
    assert main(["serve", "x", "--model", "y"]) == 2
    assert "models are x, and --model y besides" in capsys.readouterr().err
