"""The `jaxserve` command, as a user runs it."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import jaxserve
from jaxserve import EngineConfig, SamplingParams
from jaxserve.commands.argument_types import integer_from_0, number_in, positive_integer
from jaxserve.commands.cli import main, make_parser
from jaxserve.commands.generate import SAMPLING_FIELDS
from jaxserve.commands.options import ENGINE_FIELDS, field_help
from jaxserve.commands.parser import with_options
from jaxserve.errors import InvalidRequest
from jaxserve.settings.environment import check_devices
from jaxserve.text.generation_config import CHAT_SAMPLING, chat_sampling, recommends_sampling
from tests.support.checkpoint import save_checkpoint
from tests.support.kept_programs import users_environment
from tests.support.quick_code import quick_programs

ROOT = Path(__file__).parent.parent
# Few and small programs, so that they compile quickly.
SMALL = (
    "--max-num-seqs 4 --max-num-batched-tokens 32 --decode-sizes 4 --token-sizes 32 "
    "--max-model-len 64"
).split()


def start(*arguments: str, **options) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    usual = {"cwd": ROOT, "stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "jaxserve", *arguments],
        **{**usual, "env": users_environment(), **options},
    )


def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
    process = start(*arguments)
    out, err = process.communicate(stdin, timeout=300)
    return process.returncode, out, err


@pytest.fixture(autouse=True, scope="module")
def quick_code() -> Iterator[None]:
    """Make engines of this process compile as quickly as in other tests."""
    with quick_programs():
        yield


def loading(model: str) -> str:
    return f"jaxserve: loading {model} and compiling its programs\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("checkpoint")))


@pytest.fixture(scope="module")
def only_config(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder that holds only a config.json."""
    folder = tmp_path_factory.mktemp("config")
    (folder / "config.json").write_bytes((Path(checkpoint) / "config.json").read_bytes())
    return str(folder)


def test_prompts_go_through_the_chat_template(checkpoint: str) -> None:
    asked = "--temperature 0 --max-tokens 4 --ignore-eos --json --model".split()
    code, out, err = run("generate", *asked, checkpoint, *SMALL, "hi", "-", stdin="[red]hé\n")
    assert (code, err) == (0, loading(checkpoint))
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], second["prompt"]) == ("hi", "[red]hé\n")
    bos, end, user, bot = range(4)
    middle = first["prompt_token_ids"][2:-2]
    assert first["prompt_token_ids"] == [bos, user, *middle, end, bot]
    assert len(middle) == 2 and len(second["prompt_token_ids"]) == 4 + len("[red]hé\n".encode())
    [choice] = first["outputs"]
    assert len(choice["token_ids"]) == 4 and choice["finish_reason"] == "length"
    assert first["finished"] and first["error"] is None


def test_raw_text_several_choices_and_plain_output(
    checkpoint: str, capsys: pytest.CaptureFixture
) -> None:
    asked = "--no-chat --n 2 --seed 5 --max-tokens 6 --ignore-eos --model".split()
    assert main(["generate", *asked, checkpoint, *SMALL, "[bold]say[/bold]"]) == 0
    out, err = capsys.readouterr()
    assert err == loading(checkpoint)
    assert out.startswith("> [bold]say[/bold]\n1: ")
    assert "\n2: " in out and "\x1b" not in out


def test_token_ids_without_a_tokenizer(only_config: str, capsys: pytest.CaptureFixture) -> None:
    asked = "--skip-tokenizer-init --load-format dummy --json --max-tokens 3 --ignore-eos".split()
    argv = ["generate", *asked, "--model", only_config, *SMALL, "1,2 3", "4"]
    assert main(argv) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt_token_ids"] for record in records] == [[1, 2, 3], [4]]
    assert [len(record["outputs"][0]["token_ids"]) for record in records] == [3, 3]


def test_where_nothing_is_recommended_a_chat_is_drawn_as_people_expect(
    checkpoint: str, capsys: pytest.CaptureFixture
) -> None:
    words = "generate --json --seed 5 --max-tokens 40 --ignore-eos --model".split()
    drawn = []
    for more in ([], "--temperature 0.8 --top-p 0.95 --min-p 0.05".split(), ["--min-p", "0"]):
        assert main([*words, checkpoint, *SMALL, *more, "hi"]) == 0
        drawn.append(json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"])
    assert drawn[0] == drawn[1] != drawn[2]
    config = EngineConfig()
    is_silent = recommends_sampling({"max_new_tokens": 9, "do_sample": True})
    assert chat_sampling(is_silent, config) == CHAT_SAMPLING
    assert chat_sampling(False, EngineConfig(generation_config="vllm")) == {}
    for name, value in (("temperature", 1.0), ("top_k", 64), ("top_p", 0.9), ("min_p", 0.1)):
        assert chat_sampling(recommends_sampling({name: value}), config) == {}


BAD_INPUT = {
    "no prompt": ([], "the following arguments are required: PROMPT"),
    "unknown flag": (["--modle", "x", "hi"], "there is no option '--modle'; did you mean --model?"),
    "abbreviated flag": (
        ["--max-tok", "3", "hi"],
        "there is no option '--max-tok'; did you mean --max-tokens?",
    ),
    "not a number": (["--top-k", "many", "hi"], "invalid int value: 'many'"),
    "not a list": (["--decode-sizes", "1;2", "hi"], "'1;2' is not a list like 1,2,4"),
    "not a choice": (["--load-format", "zip", "hi"], "choose from"),
    "out of range": (["--top-p", "1.5", "hi"], "--top-p must be from 0 to 1, got 1.5"),
    "bad engine setting": (["--block-size", "0", "hi"], "--block-size must be from 1 to 1024"),
    "no folder": (["--model", "/no/such", "hi"], "'/no/such' is not a folder"),
    "no checkpoint": (["--model", "CONFIG", "hi"], "there is no tokenizer.json"),
    "not token ids": (["--skip-tokenizer-init", "hi"], "'hi' is not token ids like 1,2,3"),
    "too long a context": (
        ["--model", "CONFIG", "--max-model-len", "4096", "hi"],
        "--max-model-len (4096) is beyond the 256 positions",
    ),
    "no template": (
        ["--model", "RAW", "--chat", *SMALL, "hi"],
        "this model has no chat template: pass prompts to LLM.generate",
    ),
    "too long a prompt": (
        ["--model", "RAW", *SMALL, "x" * 64],
        "prompt has 64 tokens; at most 63 leave room for an answer",
    ),
}


@pytest.fixture(scope="module")
def folders(checkpoint: str, only_config: str, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Map placeholders to a folder without tokenizer and weights, and one without chat template."""
    raw = tmp_path_factory.mktemp("raw")
    for path in Path(checkpoint).iterdir():
        if path.name != "chat_template.jinja":
            (raw / path.name).write_bytes(path.read_bytes())
    return {"CONFIG": only_config, "RAW": str(raw)}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_exit_2(
    case: str, folders: dict[str, str], capsys: pytest.CaptureFixture
) -> None:
    arguments, message = BAD_INPUT[case]
    try:
        code = main(["generate", *(folders.get(word, word) for word in arguments)])
    except SystemExit as ended:
        code = ended.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    # A prompt is checked once the model is loaded.
    *before, line = err.splitlines()
    assert all(said.startswith("jaxserve: loading ") for said in before) and message in line, err


def test_errors_of_a_real_process_are_no_tracebacks() -> None:
    code, out, err = run("generate", "--model", "/no/such", "hi")
    assert (code, out) == (2, "")
    assert err == (
        "jaxserve: error: model: '/no/such' is not a folder with a checkpoint, nor a .gguf file, "
        "nor a name on the Hugging Face hub (org/name)\n"
    )


def test_control_c_ends_it_quietly() -> None:
    # A shell's background job ignores Ctrl-C, and so would its children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start("generate", "-")
    signal.signal(signal.SIGINT, before)
    assert process.stdin is not None
    # More than a pipe holds: once it is written, the command has begun to read its prompt.
    process.stdin.write("x" * (1 << 20))
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")


def test_a_reader_that_has_seen_enough_ends_it_quietly(only_config: str) -> None:
    asked = "--skip-tokenizer-init --load-format dummy --max-tokens 2 --model".split()
    words = ["generate", "--json", *asked, only_config, *SMALL, "1"]
    reader, writer = os.pipe()
    os.close(reader)
    # As in a shell: output stays in a buffer, and is written at the end.
    environment = {n: v for n, v in users_environment().items() if n != "PYTHONUNBUFFERED"}
    with start(*words, stdout=writer, env=environment) as process:
        os.close(writer)
        _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (1, loading(only_config))


def test_output_that_cannot_be_written_is_said_in_one_line(only_config: str) -> None:
    asked = "--skip-tokenizer-init --load-format dummy --max-tokens 2 --model".split()
    for form in ([], ["--json"]):
        words = ["generate", *form, *asked, only_config, *SMALL, "1"]
        with open("/dev/full", "w") as full, start(*words, stdout=full) as process:
            _, err = process.communicate(timeout=300)
        said = "jaxserve: error: cannot write the output: No space left on device\n"
        assert (process.returncode, err) == (1, loading(only_config) + said)


def test_standard_error_that_is_full_changes_no_status() -> None:
    with (
        open("/dev/full", "w") as full,
        start("generate", "--top-p", "7", "hi", stderr=full) as one,
    ):
        out, _ = one.communicate(timeout=300)
    assert (one.returncode, out) == (2, "")


def test_help_and_version(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    assert "generate" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        main(["generate", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in (*ENGINE_FIELDS, *SAMPLING_FIELDS):
        assert f" --{name.replace('_', '-')}" in shown
    assert "tokens in a block of KV cache, by default 16" in shown
    assert "(default: " in shown
    assert "--no-chat sends the text as it is" in shown
    assert "recommends nothing, temperature 0.8, top_p 0.95, min_p 0.05." in shown


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_field_is_documented(cls: type) -> None:
    assert set(field_help(cls)) == {field.name for field in dataclasses.fields(cls) if field.init}
    # Python 3.13 compiles docstrings without the indentation that their lines share.
    stripped = type(cls.__name__, cls.__bases__, {"__doc__": inspect.cleandoc(cls.__doc__ or "")})
    assert field_help(stripped) == field_help(cls)


def test_options_become_values_of_the_fields_types() -> None:
    words = (
        "--no-enable-prefix-caching --check-invariants --decode-sizes 1,2,8 --max-model-len 64 "
        "--gpu-memory-utilization 0.5 --tokenizer some/where --dtype bfloat16 "
        "--scheduling-policy priority --stop a --stop b --top-p 0.5 --max-tokens 7 --no-chat x"
    )
    arguments = vars(make_parser().parse_args(["generate", *words.split()]))
    given = {name: arguments[name] for name in ENGINE_FIELDS if name in arguments}
    assert EngineConfig(**given) == EngineConfig(
        enable_prefix_caching=False,
        check_invariants=True,
        decode_sizes=(1, 2, 8),
        max_model_len=64,
        gpu_memory_utilization=0.5,
        tokenizer="some/where",
        dtype="bfloat16",
        scheduling_policy="priority",
    )
    given = {name: arguments[name] for name in SAMPLING_FIELDS if name in arguments}
    assert SamplingParams(**given) == SamplingParams(stop=["a", "b"], top_p=0.5, max_tokens=7)
    assert arguments["chat"] is False and arguments["prompts"] == ["x"]


@pytest.mark.parametrize(
    ("parse", "least"),
    [(positive_integer, 1), (integer_from_0, 0), (partial(positive_integer, least=7), 7)],
    ids=["from 1", "from 0", "from 7"],
)
def test_integers_have_a_least_value(parse: Callable[[str], int], least: int) -> None:
    assert [parse(str(least)), parse(f"{least + 1}")] == [least, least + 1]
    for text in (str(least - 1), "-3", "1.5", ""):
        message = f"^{text!r} must be an integer of at least {least}$"
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse(text)
    assert positive_integer("9", most=9) == 9
    with pytest.raises(argparse.ArgumentTypeError, match=r"at most 9$"):
        positive_integer("10", most=9)


@pytest.mark.parametrize(
    ("below", "outside"), [(False, ["-0.1", "2.1", "nan", "x"]), (True, ["-0.1", "2", "nan"])]
)
def test_numbers_have_a_least_and_a_largest_value(below: bool, outside: list[str]) -> None:
    parse = number_in(0, 2, below)
    assert (parse("0"), parse("1.5")) == (0, 1.5)
    for text in outside:
        with pytest.raises(argparse.ArgumentTypeError, match="must be a number from 0 "):
            parse(text)
    assert below or parse("2") == 2


@pytest.mark.parametrize(
    "command", [["serve"], ["run-batch", "-i", "README.md", "-o", "/dev/null"]]
)
def test_a_library_that_is_missing_is_named_with_what_installs_it(command: list[str]) -> None:
    """A machine may have only the packages that `LLM` needs."""
    code = (
        "import sys; sys.modules['starlette'] = None; import jaxserve.commands.cli\n"
        f"sys.exit(jaxserve.commands.cli.main({command}))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert re.match(
        r"jaxserve: error: starlette[.\w]* is not installed; pip install -e \. installs ", line
    )


# Settings that are checked before JAX is imported: the words, and the message.
EARLY = {
    "a folder for files": (
        ["serve", "--files-dir", "/proc/x"],
        "--files-dir: files cannot be written to /proc/x (No such file or directory)",
    ),
    "devices": (
        ["serve", "-tp", "2"],
        "--tensor-parallel-size is 2, and JAX sees 1 device (cpu); "
        "XLA_FLAGS=--xla_force_host_platform_device_count=2 divides the processor",
    ),
    "devices of generate": (["generate", "-tp", "2", "hi"], "--tensor-parallel-size is 2, and JAX"),
    "devices of compile": (["compile", "-tp", "2"], "--tensor-parallel-size is 2, and JAX"),
    "a secret": (
        ["serve", "--prefix-caching-secret", "/no/such"],
        "--prefix-caching-secret: /no/such cannot be read (No such file or directory)",
    ),
    "a target": (["convert", ".", "README.md"], "DST: README.md exists already"),
    "a folder": (
        ["serve", "tests"],
        "model: the folder 'tests' has no config.json and no GGUF file",
    ),
    "a folder of generate": (["generate", "--model", "tests", "hi"], "the folder 'tests' has no"),
    "a rank": (["serve", "--node-rank", "1"], "--node-rank must be less than --nnodes, got 1 of 1"),
    "no such option": (
        ["serve", "--prot", "1"],
        "there is no option '--prot'; did you mean --port?",
    ),
}


def test_settings_are_checked_before_jax_is_imported() -> None:
    code = (
        "import contextlib, json, os, sys\n"
        "sys.modules['jax'] = None\n"
        "from jaxserve.commands.cli import main\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try: status = main(words)\n"
        "    except SystemExit as error: status = error.code\n"
        "    print(status, flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, json.dumps([words for words, _ in EARLY.values()])],
        cwd=ROOT,
        env=users_environment() | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["2"] * len(EARLY), result.stderr
    said = result.stderr.splitlines()
    for line, (_, message) in zip(said, EARLY.values(), strict=True):
        assert message in line, line


@pytest.mark.parametrize(
    ("flags", "variable", "is_enough"),
    [
        ("--xla_force_host_platform_device_count=4", "", True),
        ("--xla_force_host_platform_device_count=3", "", False),
        ("", "4", True),
        ("", "1", False),
    ],
)
def test_devices_of_the_environment_are_counted(
    flags: str, variable: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", variable)
    config = EngineConfig(tensor_parallel_size=4)
    with nullcontext() if is_enough else pytest.raises(InvalidRequest, match="JAX sees"):
        check_devices(config)


def test_options_take_the_place_of_fields_in_messages() -> None:
    message = "max_num_seqs must be at least 1; node_rank or 'max_num_seqs' in x.max_num_seqs"
    expected = "--max-num-seqs must be at least 1; --node-rank or 'max_num_seqs' in x.max_num_seqs"
    assert with_options(message) == expected
    assert with_options("seed must be a number") == "--seed must be a number"
    assert with_options("the model must stop") == "the model must stop"


def test_help_begins_with_common_options(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: jaxserve serve [OPTION ...] [[NAME=]MODEL ...]\n")
    sections = re.findall(r"^(\w[\w ]*):$", shown, re.MULTILINE)
    assert sections[:2] == ["positional arguments", "common options"]
    assert shown.index("  --port N") < shown.index("\noptions:") < shown.index("  --uds TEXT")
    assert shown.count("  --port N") == 1
