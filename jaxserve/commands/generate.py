"""`jaxserve generate`: answer prompts of the command line."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape

import jaxserve
from jaxserve.commands import options
from jaxserve.errors import InvalidRequest
from jaxserve.outputs import RequestOutput
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import check_devices
from jaxserve.settings.model_name import check_model
from jaxserve.text import HOW_TO_GIVE
from jaxserve.text.generation_config import CHAT_SAMPLING, chat_sampling

TEMPLATES = "jaxserve.text.template"  # imports Jinja
# Options that vLLM's server has, too.
OWN = ("chat_template",)
# Fields of SamplingParams that are options of this command.
SAMPLING_FIELDS = (
    "n temperature top_p top_k min_p seed stop max_tokens min_tokens ignore_eos".split()
)


def add_generate(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve generate` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "generate",
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
    parser.add_argument("--model", metavar="MODEL", help=options.MODEL_HELP)
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="send prompts through the chat template (default: where the model has one)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    parser.add_argument(
        "--chat-template",
        metavar="TEXT",
        help=f"instead of the model's: a template itself, {HOW_TO_GIVE}",
    )
    sampling = parser.add_argument_group(
        "sampling",
        "Defaults are what the checkpoint recommends; where it recommends nothing, "
        f"{spell(CHAT_SAMPLING)}. {options.DEFAULT_MAX_TOKENS} tokens.",
    )
    options.add_fields(sampling, SamplingParams, SAMPLING_FIELDS, skip_default=True)
    options.add_engine(parser, excluded=OWN)
    options.add_sources(parser, ["model"])
    parser.set_defaults(run=generate)


def generate(arguments: argparse.Namespace) -> int:
    """Run `jaxserve generate`: answer the command line's prompts, and print answers in order.

    Returns:
        The exit status: 1 if an answer failed, else 0.

    Raises:
        CommandError: the model cannot be loaded, or a prompt is not a list of token ids.
        InvalidRequest: a setting is out of range.
    """
    prompts = [sys.stdin.read() if text == "-" else text for text in arguments.prompts]
    chosen: dict[str, Any] = {"max_tokens": options.DEFAULT_MAX_TOKENS} | options.given(
        arguments, SAMPLING_FIELDS
    )
    SamplingParams(**chosen)  # refuses a bad value before the model is loaded
    settings = options.engine_settings(arguments)
    check_model(arguments.model)
    check_devices(EngineConfig(**settings))
    template = arguments.chat_template
    if template is not None:
        importlib.import_module(TEMPLATES).find_template(template)  # likewise
    bodies = [_token_ids(text) for text in prompts] if settings.get("skip_tokenizer_init") else None
    with _open(arguments.model, settings) as llm:
        recommended = llm.get_default_sampling_params()
        usual = chat_sampling(llm.recommends_sampling, EngineConfig(**settings))
        _show_sampling({name: value for name, value in usual.items() if name not in chosen})
        sampling = dataclasses.replace(recommended, **{**usual, **chosen})
        if bodies is not None:
            outputs = llm.generate(bodies, sampling, use_tqdm=False)
        elif arguments.chat or (
            arguments.chat is None and (template is not None or _has_chat_template(llm))
        ):
            conversations = [[{"role": "user", "content": text}] for text in prompts]
            outputs = llm.chat(conversations, sampling, use_tqdm=False, chat_template=template)
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
    try:
        return jaxserve.LLM(model, **settings)
    except (ValueError, OSError) as error:  # wrong settings or files
        raise options.CommandError(str(error)) from error


def spell(sampling: Mapping[str, float]) -> str:
    """Return sampling settings as text, such as 'temperature 0.6, top_p 0.95'."""
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def _show_sampling(usual: Mapping[str, float]) -> None:
    console = Console(stderr=True, highlight=False)
    if usual and console.is_terminal:
        console.print(f"[dim]{spell(usual)}: the checkpoint recommends nothing[/]")


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
        raise options.CommandError(
            f"{text!r} is not token ids like 1,2,3, and --skip-tokenizer-init takes nothing else"
        ) from None


def _show(prompt: str, output: RequestOutput) -> None:
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
