"""`jaxserve chat` and `jaxserve complete`: use a running server in a terminal."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable

from jaxserve.commands.options import DEFAULT_MAX_TOKENS
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.environment import environment_settings


def add_chat(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the commands `jaxserve chat` and `complete`, with argparse's `add_parser`."""
    about = {
        "chat": ("talk to a running server", "MESSAGE", "answer one message and end"),
        "complete": ("have a running server go on with texts", "PROMPT", "one prompt and end"),
    }
    for name, (text, metavar, quick) in about.items():
        parser = add_parser(
            name,
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
        usual = "the server's"
        if name == "chat":
            usual = "what the checkpoint recommends, or else 0.8, top_p 0.95 and min_p 0.05"
        parser.add_argument("--temperature", type=float, metavar="X", help=f"default: {usual}")
        parser.add_argument("--stats", action="store_true", help="tell tokens and speed")
        parser.set_defaults(run=chat, command=name)


def chat(arguments: argparse.Namespace) -> int:
    """Run `jaxserve chat` or `jaxserve complete`. Return 1 if the server did not answer, else 0."""
    module = importlib.import_module("jaxserve.commands.terminal")
    options = {name: getattr(arguments, name) for name in ("max_tokens", "temperature")}
    key = environment_settings().get("api_key", "").split(",")[0]
    remote = module.Remote(
        arguments.url,
        arguments.model_name,
        arguments.api_key or key or None,
        {name: value for name, value in options.items() if value is not None},
        draws_as_chat=arguments.command == "chat",
    )
    terminal = module.Terminal(arguments.stats)
    if arguments.command == "chat":
        return module.chat(remote, terminal, arguments.system_prompt, arguments.quick)
    return module.complete(remote, terminal, arguments.quick)
