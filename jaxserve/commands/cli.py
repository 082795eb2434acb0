"""The `jaxserve` command.

Options are made from the fields of `EngineConfig` and `SamplingParams`, so there is one list of
each: `max_num_seqs` is `--max-num-seqs`, a boolean has a `--no-` form, and the help text is the
field's line in the class's docstring. JAX is imported once the arguments have been read.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

import jaxserve
from jaxserve.commands.convert import add_convert
from jaxserve.commands.options import (
    BAD_INPUT,
    CommandError,
    Parser,
    add_engine,
    add_fields,
    engine_settings,
    given,
)
from jaxserve.commands.standard_streams import drop_output, settle_streams
from jaxserve.config import api_keys_from_environment, prepare_process
from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.outputs import RequestOutput
from jaxserve.request import SamplingParams
from jaxserve.server.http.listener import bind
from jaxserve.server.http.start_report import StartReport
from jaxserve.server.served.specs import check_models, plan_models
from jaxserve.server.settings import ServerConfig

INTERRUPTED = 130
DEFAULT_MAX_TOKENS = 256
MODEL_HELP = "a checkpoint folder, a .gguf file or a name on the hub (default: the bundled model)"

# Of SamplingParams, what has a meaning for prompts given on a command line.
SAMPLING_FIELDS = (
    "n temperature top_p top_k min_p seed stop max_tokens min_tokens ignore_eos".split()
)


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxserve", description="An LLM inference engine in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_generate(commands.add_parser)
    add_serve(commands.add_parser)
    add_convert(commands.add_parser)
    add_compile(commands.add_parser)
    add_talk(commands.add_parser)
    add_run_batch(commands.add_parser)
    return parser


def add_generate(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve generate`."""
    parser = add_parser(
        "generate",
        allow_abbrev=False,
        help="answer prompts and print the answers",
        description="Answer prompts, all of them in one batch, and print the answers in order. "
        "Where the model has a chat template, each prompt is sent as one user message; "
        "--no-chat sends the text as it is.",
    )
    parser.add_argument(
        "prompts",
        nargs="+",
        metavar="PROMPT",
        help="a prompt; - reads one from standard input. With --skip-tokenizer-init, token ids "
        "like 1,2,3",
    )
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send prompts through the chat template (default: where the model has one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    sampling = parser.add_argument_group(
        "sampling", f"Defaults are what the checkpoint recommends, and {DEFAULT_MAX_TOKENS} tokens."
    )
    add_fields(sampling, SamplingParams, SAMPLING_FIELDS, skip_default=True)
    add_engine(parser)
    parser.set_defaults(run=generate)


def add_serve(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve serve`."""
    parser = add_parser(
        "serve",
        allow_abbrev=False,
        help="answer OpenAI's HTTP API",
        description="Serve models over HTTP, as the OpenAI client and others like it expect.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="checkpoint folders, .gguf files or names on the hub, each with the name to serve it "
        "by (default: the bundled model)",
    )
    server = parser.add_argument_group("server")
    add_fields(server, ServerConfig, [field.name for field in dataclasses.fields(ServerConfig)])
    add_engine(parser, "For each model.", ["seed"])
    parser.set_defaults(run=serve)


def serve(arguments: argparse.Namespace) -> int:
    """Run `jaxserve serve`."""
    fields = [field.name for field in dataclasses.fields(ServerConfig)]
    asked: dict[str, Any] = {"api_key": api_keys_from_environment() or None}
    try:
        config = ServerConfig(**asked | given(arguments, fields))
        plans = plan_models(arguments.models, engine_settings(arguments), config)
        check_models(plans)
        with bind(config.host, config.port) as listener:
            # Imported late: it brings JAX with it.
            module = importlib.import_module("jaxserve.commands.serve")
            return module.serve(plans, config, listener)
    except (ValueError, OSError) as error:  # settings, files or a port that are not right
        raise CommandError(str(error)) from error


def add_compile(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve compile`."""
    parser = add_parser(
        "compile",
        allow_abbrev=False,
        help="build what a start needs ahead of time",
        description="Compile every program that `jaxserve serve` with the same models and engine "
        "options runs, and keep them in the compilation cache. They hold for this machine's kind "
        "of device and these versions; a start with others says so and compiles anew.",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="[NAME=]MODEL",
        help="as for serve (default: the bundled model)",
    )
    add_fields(parser.add_argument_group("server"), ServerConfig, ["model_weights"])
    add_engine(parser, "For each model.", ["seed"])
    parser.set_defaults(run=compile_programs)


def compile_programs(arguments: argparse.Namespace) -> int:
    """Run `jaxserve compile`; 1 where programs could not be kept."""
    loaded, report = [], StartReport(sys.stderr)
    try:
        config = ServerConfig(**given(arguments, ["model_weights"]))
        plans = plan_models(arguments.models, engine_settings(arguments), config)
        check_models(plans)
        load = importlib.import_module("jaxserve.engine.loading").load  # brings JAX with it
        for plan in plans:
            # All stay loaded: on a GPU the next one's cache has what this one leaves.
            loaded.append(load(plan.config, report.progress))
            print(f"{plan.names[0]}: {loaded[-1].start}")
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error
    finally:
        for one in loaded:
            one.runner.close()
    starts = [one.start for one in loaded]
    return 0 if all(start and start.store.folder is not None for start in starts) else 1


def add_talk(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve chat` and `jaxserve complete`."""
    about = {
        "chat": ("talk to a running server", "MESSAGE", "answer one message and end"),
        "complete": ("have a running server go on with texts", "PROMPT", "one prompt and end"),
    }
    for name, (text, metavar, quick) in about.items():
        parser = add_parser(
            name,
            allow_abbrev=False,
            help=text,
            description=f"{text.capitalize()}, a line at a time. Ctrl-C stops an answer, Ctrl-D "
            "ends. Any server with OpenAI's API will do.",
        )
        parser.add_argument(
            "--url",
            default=f"http://127.0.0.1:{ServerConfig.port}/v1",
            help="of the server (default: %(default)s)",
        )
        parser.add_argument("--model-name", metavar="NAME", help="default: the first one listed")
        parser.add_argument("--api-key", metavar="KEY", help="default: JAXSERVE_API_KEY")
        parser.add_argument("-q", "--quick", metavar=metavar, help=quick)
        if name == "chat":
            parser.add_argument("--system-prompt", metavar="TEXT", help="what the talk begins with")
        tokens = None if name == "chat" else DEFAULT_MAX_TOKENS
        parser.add_argument(
            "--max-tokens",
            type=int,
            default=tokens,
            metavar="N",
            help=f"of an answer (default: {tokens or 'what the context leaves'})",
        )
        parser.add_argument("--temperature", type=float, metavar="X", help="default: the server's")
        parser.add_argument("--stats", action="store_true", help="tell tokens and speed")
        parser.set_defaults(run=talk, talk=name)


def talk(arguments: argparse.Namespace) -> int:
    """Run `jaxserve chat` or `jaxserve complete`."""
    module = importlib.import_module("jaxserve.commands.chat")
    options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature")}
    keys = api_keys_from_environment()
    remote = module.Remote(
        arguments.url,
        arguments.model_name,
        arguments.api_key or (keys[0] if keys else None),
        {name: value for name, value in options.items() if value is not None},
    )
    terminal = module.Terminal(arguments.stats)
    if arguments.talk == "chat":
        return module.chat(remote, terminal, arguments.system_prompt, arguments.quick)
    return module.complete(remote, terminal, arguments.quick)


def add_run_batch(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare `jaxserve run-batch`."""
    parser = add_parser(
        "run-batch",
        allow_abbrev=False,
        help="answer a batch file of OpenAI's form",
        description="Answer a JSONL file of OpenAI's batch form with a model in this process. "
        "Answers are written as they come; custom_id says which is which. A bad line gets an "
        "error of its own. The status is 1 where a line has no good answer.",
    )
    parser.add_argument("-i", "--input-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("-o", "--output-file", required=True, type=Path, metavar="FILE")
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP)
    server = parser.add_argument_group("server")
    add_fields(server, ServerConfig, ["served_model_name"])
    add_engine(parser, None, ["seed"])
    parser.set_defaults(run=run_batch)


def run_batch(arguments: argparse.Namespace) -> int:
    """Run `jaxserve run-batch`."""
    source, sink = arguments.input_file, arguments.output_file
    if not source.is_file():
        raise CommandError(f"there is no file {str(source)!r}")
    if sink.exists() and sink.samefile(source):
        raise CommandError("the output would overwrite the input")
    module = importlib.import_module("jaxserve.commands.run_batch")  # brings JAX with it
    try:
        config = module.batch_config(getattr(arguments, "served_model_name", None))
        models = [arguments.model] if arguments.model else []
        plans = plan_models(models, engine_settings(arguments), config)
        return module.run_batch(plans, config, source, sink)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


def generate(arguments: argparse.Namespace) -> int:
    """Run `jaxserve generate`."""
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments.prompts]
    asked: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS} | given(arguments, SAMPLING_FIELDS)
    SamplingParams(**asked)  # refuse a bad value before the model is loaded
    settings = engine_settings(arguments)
    bodies = [_token_ids(text) for text in prompts] if settings.get("skip_tokenizer_init") else None
    with _open(arguments.model, settings) as llm:
        sampling = dataclasses.replace(llm.get_default_sampling_params(), **asked)
        if bodies is not None:
            outputs = llm.generate(bodies, sampling, use_tqdm=False)
        elif arguments.chat or (arguments.chat is None and _has_chat_template(llm)):
            conversations = [[{"role": "user", "content": text}] for text in prompts]
            outputs = llm.chat(conversations, sampling, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, sampling, use_tqdm=False)
    show = _show_json if arguments.json else _show
    for prompt, output in zip(prompts, outputs, strict=True):
        show(prompt, output)
    errors = [output.error for output in outputs if output.error]
    for error in errors:
        print(f"jaxserve: error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _open(model: str | None, settings: dict[str, Any]) -> jaxserve.LLM:
    console = Console(stderr=True)
    try:
        if not console.is_terminal:
            return jaxserve.LLM(model, **settings)
        with console.status("loading the model and compiling"):
            return jaxserve.LLM(model, **settings)
    except (ValueError, OSError) as error:  # settings, or files that are not what they should be
        raise CommandError(str(error)) from error


def _has_chat_template(llm: jaxserve.LLM) -> bool:
    try:
        llm.get_tokenizer().render_chat([{"role": "user", "content": "?"}])
    except InvalidRequest:
        return False
    return True


def _token_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in re.split(r"[,\s]+", text.strip())]
    except ValueError:
        raise CommandError(
            f"{text!r} is not token ids like 1,2,3, and --skip-tokenizer-init takes nothing else"
        ) from None


def _show(prompt: str, output: RequestOutput) -> None:
    """A prompt and its answers, in colour on a terminal."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[bold cyan]> {escape(prompt)}[/]")
    for choice in output.outputs:
        label = f"[dim]{choice.index + 1}:[/] " if len(output.outputs) > 1 else ""
        answer = choice.text or " ".join(map(str, choice.token_ids))
        cut = " [dim]...[/]" if choice.finish_reason == "length" else ""
        console.print(f"{label}{escape(answer)}{cut}")
    console.print()


def _show_json(prompt: str, output: RequestOutput) -> None:
    record = dataclasses.asdict(output)
    record["prompt"] = prompt
    print(json.dumps(record))


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for bad input, 130 when interrupted, 1 where its
    output cannot be written."""
    settle_streams()
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read our output has seen enough
        drop_output()
    except OSError as error:
        drop_output()
        print(f"jaxserve: error: cannot write the output: {error.strerror}", file=sys.stderr)
    return 1


def _run(argv: list[str] | None) -> int:
    prepare_process()
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except (JaxserveError, CommandError) as error:
        print(f"jaxserve: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        print(
            f"jaxserve: error: {error.name} is not installed; `pip install -e .` in a checkout of "
            "jaxserve installs all that its commands need",
            file=sys.stderr,
        )
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
