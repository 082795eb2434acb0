"""Options of the command line, derived from the fields of dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Container, Iterable
from functools import partial
from typing import Any

from jaxserve.commands.argument_types import json_object
from jaxserve.errors import InvalidRequest
from jaxserve.settings.compat import BENCH, ENGINE, served, unserved
from jaxserve.settings.config import EngineConfig, usual_value

BAD_INPUT = 2
DEFAULT_MAX_TOKENS = 256
MODEL_HELP = "a checkpoint folder, a .gguf file or a name on the hub (default: the bundled model)"
# vLLM's names of settings that have another name here.
RENAMED = {
    "device_memory_utilization": "gpu_memory_utilization",
    "max_num_queued_tokens": "max_queued_prompt_tokens",
    "shutdown_timeout": "drain_timeout",
}
# vLLM's short forms of served options. `compat.toml` has the short forms of other options.
SHORT = {
    "quantization": "-q",
    "nnodes": "-n",
    "node_rank": "-r",
    "tensor_parallel_size": "-tp",
    "decode_context_parallel_size": "-dcp",
    "data_parallel_size": "-dp",
    "data_parallel_backend": "-dpb",
    "enable_expert_parallel": "-ep",
}
# `model` is declared by each command. `seed` is that of the sampling, which dummy weights follow.
ENGINE_FIELDS = [
    field.name for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "seed")
]


class CommandError(Exception):
    """An error in a command's input. The command prints only its message and ends with status 2."""


def field_help(cls: type) -> dict[str, str]:
    """Return the help text of each field by name, from the Args of a dataclass's docstring."""
    texts: dict[str, str] = {}
    for base in cls.__mro__:
        # From 3.13 on Python itself leaves out the indentation that all lines share.
        text = inspect.cleandoc(base.__doc__ or "")
        section = text.partition("Args:\n")[2].partition("\n\n")[0]
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _integer(text: str) -> int:
    # As in vLLM, 32k is 32,000 and 32K is 32,768.
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt])|(\d+)([KMGT])", text)
    try:
        if match is None:
            return int(text)
        if match[1]:
            return int(float(match[1]) * 1000 ** ("kmgt".index(match[2]) + 1))
        return int(match[3]) << 10 * ("KMGT".index(match[4]) + 1)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 1,2,4") from None


# argparse's arguments for an option with one or more words.
WORDS: dict[str, Any] = {"action": "extend", "nargs": "+", "metavar": "TEXT"}


class Switch(argparse.BooleanOptionalAction):
    """A boolean option `--x` with the form `--no-x`, and for `--enable-y` also `--disable-y`."""

    def __init__(self, option_strings: list[str], dest: str, **named: Any) -> None:
        super().__init__(option_strings, dest, **named)
        other = {"--enable-": "--disable-", "--disable-": "--enable-"}
        inverse = [
            opposite + option.removeprefix(prefix)
            for option in option_strings
            for prefix, opposite in other.items()
            if option.startswith(prefix)
        ]
        negative = [option for option in self.option_strings if option not in option_strings]
        self.negative = [*negative, *inverse]
        self.option_strings = [*self.option_strings, *inverse]

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, option_string not in self.negative)


class Refused(argparse.Action):
    """An unsupported option: it ends the command with an error and the suggestion in `const`."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        parser.error(f"{option_string} is not supported: {self.const}")


class Entries(argparse.Action):
    """An option for a list of strings, which is repeated for each string or has a JSON list."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        entries = _plain_value(values) if values.startswith("[") else [values]
        if not (isinstance(entries, list) and all(isinstance(entry, str) for entry in entries)):
            raise argparse.ArgumentError(self, f"{values!r} is not a list of texts")
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or ()), *entries])


def _usual(field: str, choices: Container[str], value: str) -> str:
    try:
        return value if value in choices else usual_value(value, field)
    except InvalidRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _option(hint: Any) -> dict[str, Any]:
    """Return the keyword arguments of `add_argument` for an option with the type of a field."""
    if typing.get_origin(hint) is dict:
        return {"type": json_object, "metavar": "JSON"}
    if typing.get_origin(hint) is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if hint is bool:
        return {"action": Switch}
    if hint in (int, float):
        return {"type": _integer if hint is int else float, "metavar": "NX"[hint is float]}
    if typing.get_origin(hint) is tuple:
        return {"type": _integers, "metavar": "N,N,..."}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        if any(typing.get_origin(kind) is not None for kind in kinds[1:]):
            return {"action": "append", "metavar": "TEXT"}
        return _option(kinds[0])
    return {"metavar": "TEXT"}


def add_fields(
    parser: argparse._ArgumentGroup, cls: type, names: Iterable[str], skip_default: bool = False
) -> None:
    """Add a command-line option for each named field of a dataclass, with help from its docstring.

    If the command line lacks an option, the parsed arguments lack its attribute. vLLM's other name
    of a field is a hidden option.
    """
    hints, helps = typing.get_type_hints(cls), field_help(cls)
    for field in dataclasses.fields(cls):
        if field.name not in names:
            continue
        text = helps[field.name]
        if field.default is not None and not skip_default:
            text += f" (default: {field.default})"
        kind = _option(hints[field.name])
        if field.metadata.get("words"):
            kind = WORDS
        elif field.metadata.get("entries"):
            kind = {"action": Entries, "metavar": "TEXT"}
        elif "choices" in kind:
            kind["type"] = partial(_usual, field.name, kind["choices"])
        parser.add_argument(
            *flags_of(field.name),
            dest=field.name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **kind,
        )
        for name in (name for name, ours in RENAMED.items() if ours == field.name):
            parser.add_argument(
                *flags_of(name),
                dest=field.name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **kind,
            )


def flags_of(name: str, short: str | None = None) -> list[str]:
    """Return the option strings for a field or vLLM's argument: `--long-name`, and a short form."""
    short = SHORT.get(name, short)
    return ["--" + name.replace("_", "-"), *([] if short is None else [short])]


def add_engine(
    parser: argparse.ArgumentParser,
    about: str | None = None,
    more: Iterable[str] = (),
    excluded: Container[str] = (),
) -> None:
    """Add the options of an engine's settings, and `--config`, to the parser of a command.

    `engine_settings` returns them. vLLM's other options are refused (see `declare_unserved`).

    Args:
        about: description of the group of options.
        more: further fields of EngineConfig, such as "seed".
        excluded: names of vLLM's options that the command declares itself.
    """
    group = parser.add_argument_group("engine", about)
    names = [*ENGINE_FIELDS, *more]
    add_fields(group, EngineConfig, names)
    group.add_argument(
        "--config",
        metavar="FILE",
        help="a YAML file of options, like max-model-len: 4096; those of the command line take "
        "precedence, and variables JAXSERVE_<OPTION> of the environment, like "
        "JAXSERVE_MAX_MODEL_LEN",
    )
    parser.set_defaults(unserved=(ENGINE,), own=excluded)
    add_sources(parser, names)


def add_sources(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Allow environment variables JAXSERVE_<NAME> to set the named options of a command.

    Names of earlier calls are kept. `CommandParser` reads the variables.
    """
    parser.set_defaults(settings={*(parser.get_default("settings") or ()), *names})


def declare_unserved(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's options that jaxserve does not support to a parser, hidden from its help.

    The parser's default `unserved` has the tables of these options, and `own` the names to leave
    out. The added names are stored in the default `refused`.
    """
    excluded, refused = parser.get_default("own") or (), []
    for kind in parser.get_default("unserved") or ():
        for name, row in unserved(kind).items():
            if name in excluded:
                continue
            refused.append(name)
            flags = flags_of(name, row.short)
            if flags[0] in parser._option_string_actions:
                continue  # the other form of a flag
            neutral = row.neutral or ()
            arguments: dict[str, Any] = {"type": _plain_value}
            if kind == BENCH:
                arguments = {"action": Refused, "nargs": "*", "const": row.instead}
            elif any(isinstance(value, bool) for value in neutral):
                arguments = {"action": Switch}
            elif [] in neutral:
                arguments["nargs"] = "+"
            elif name == "hf_token":
                arguments |= {"nargs": "?", "const": True}
            parser.add_argument(
                *flags,
                dest=name,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                **arguments,
            )
    parser.set_defaults(refused=refused)


def _plain_value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the engine settings that the command line contains, by name, the seed included.

    Raises:
        InvalidRequest: a setting of vLLM is not supported. The message has a suggestion.
    """
    names = [*ENGINE_FIELDS, "seed"]
    return served(given(arguments, [*names, *refused_names(arguments, ENGINE)]), names)


def refused_names(arguments: argparse.Namespace, kind: str) -> list[str]:
    """Return the unsupported options of a table (`kind`) that the command's parser has declared."""
    names = getattr(arguments, "refused", ())
    return [name for name in names if name in unserved(kind)]


def given(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return a dict of the options among `names` that the parsed arguments have."""
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
