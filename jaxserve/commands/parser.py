"""CommandParser: a parser that also takes options from a file and from the environment.

The command line takes precedence over the environment, and the environment over the file. vLLM has
no such variables, and its command line takes precedence over the file, too.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jaxserve.commands.options import BAD_INPUT, CommandError, Entries, Switch, declare_unserved
from jaxserve.fleet.options import FleetConfig
from jaxserve.request import SamplingParams
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import VARIABLE_PREFIX, environment_settings


class OneLineParser(argparse.ArgumentParser):
    """An argparse parser without abbreviations, which reports an error in one line."""

    def __init__(self, *words: Any, allow_abbrev: bool = False, **named: Any) -> None:
        super().__init__(*words, allow_abbrev=allow_abbrev, **named)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


MAX_FILE_BYTES = 1 << 20
# Options that most users need. `--help` of a command with many options shows them first.
COMMON = frozenset(
    """
    host port api_key served_model_name model dtype quantization kv_cache_dtype max_model_len
    max_num_seqs gpu_memory_utilization tensor_parallel_size chat_template tool_call_parser
    reasoning_parser max_tokens temperature top_p top_k
    """.split()
)
_MOST_IN_USAGE = 20
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Setting(NamedTuple):
    """An option from an environment variable or from a file of options: origin, name and value."""

    origin: str  # name of the variable, or file and line
    name: str  # name of the option, with underscores
    value: Any  # text from the environment, or any value of YAML from a file

    @property
    def is_variable(self) -> bool:
        return self.origin.startswith(VARIABLE_PREFIX)


class CommandParser(OneLineParser):
    """The parser of a command, which also reads options from the environment and from a YAML file.

    It accepts vLLM's spellings. Two defaults (`set_defaults`) configure it: `settings` has the
    names that the environment can set, and `examine` is called with all words before they are
    parsed.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: list[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        if not self._knows(plain_words(words)):
            declare_unserved(self)
        examine = self.get_default("examine")
        if examine is not None:
            examine(words, self._option_string_actions)
        words = plain_words(words)
        parsed, rest = super().parse_known_args(words, namespace)
        for word in rest:
            if word.startswith("--") and word != "--":
                self.error(self._no_option(word.partition("=")[0]))
        settings = self.get_default("settings")
        if settings is not None and not rest:
            self._fill(parsed, settings, self._given(words))
        return parsed, rest

    def _knows(self, words: list[str]) -> bool:
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        # A file may contain any option.
        return "--config" not in flags and all(f in self._option_string_actions for f in flags)

    def _given(self, words: list[str]) -> set[str]:
        defaults = {action: action.default for action in self._actions}
        try:
            for action in defaults:
                action.default = argparse.SUPPRESS
            others, self._defaults = self._defaults, {}
            return set(vars(super().parse_known_args(words)[0]))
        finally:
            self._defaults = others
            for action, default in defaults.items():
                action.default = default

    def _fill(self, parsed: argparse.Namespace, names: Iterable[str], present: set[str]) -> None:
        """Set options that the command line lacks, from the environment, or else from the file.

        `present` has the options of the command line. `parsed.origins` gets the origins of others.
        """
        origins: dict[str, str] = {}
        path = getattr(parsed, "config", None)
        listed = [] if path is None else list(read_file(path))
        for setting in (*_variables(names), *listed):
            action = self._option_string_actions.get("--" + setting.name.replace("_", "-"))
            if action is None or action.dest in ("config", "help"):
                raise CommandError(f"{setting.origin}: {self._no_option(setting.name)}")
            if action.dest in present or action.dest in origins:
                continue
            value = _read(setting, action)
            if value is not None:
                setattr(parsed, action.dest, value)
                origins[action.dest] = setting.origin
        parsed.origins = origins

    def _no_option(self, name: str) -> str:
        dashes = "--" * name.startswith("--")
        names = [flag[2:] for flag in self._option_string_actions if flag.startswith("--")]
        close = difflib.get_close_matches(name[len(dashes) :].replace("_", "-"), names, 1)
        hint = f"; did you mean {dashes}{close[0]}?" if close else ""
        return f"there is no option {name!r}{hint}"

    def format_help(self) -> str:
        """Return the help text of the command. If it has many options, common ones come first."""
        shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
        words = [action for action in shown if not action.option_strings]
        common = [action for action in shown if action.dest in COMMON and action not in words]
        if len(shown) <= _MOST_IN_USAGE:
            return super().format_help()
        formatter = self.formatter_class(prog=f"{self.prog} [OPTION ...]")
        formatter.add_usage(self.usage, words, [])
        formatter.add_text(self.description)
        sections = [
            (group.title, group.description, group._group_actions) for group in self._action_groups
        ]
        sections.insert(1, ("common options", None, common))
        for title, description, actions in sections:
            formatter.start_section(title)
            formatter.add_text(description)
            others = [action for action in actions if action not in common]
            formatter.add_arguments(common if actions is common else others)
            formatter.end_section()
        return formatter.format_help()


class _SingleOption(OneLineParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{self.prog}: {message}")


def plain_words(words: list[str]) -> list[str]:
    """Return the words of a command line with vLLM's spellings replaced by argparse's.

    Underscores of options become dashes. `--x.a.b 1` becomes `--x '{"a": {"b": 1}}'`, and a `+`
    after the name makes the value a list.
    """
    end = words.index("--") if "--" in words else len(words)
    plain: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    pending = words[:end]
    while pending:
        word = pending.pop(0)
        flag, equals, value = word.partition("=")
        match = re.fullmatch(r"(--[A-Za-z][\w-]*)((?:\.\w+)*)(\+?)", flag)
        if match is None:
            plain.append(word)
            continue
        name = match[1].replace("_", "-")
        if not match[2]:
            plain.append(name + match[3] + equals + value)
            continue
        if not equals and pending:
            value = pending.pop(0)
        _put(nested.setdefault(name, {}), match[2][1:].split("."), value, bool(match[3]))
    for name, fields_of_it in nested.items():
        plain += [name, json.dumps(fields_of_it)]
    return plain + words[end:]


def _put(tree: dict[str, Any], path: list[str], text: str, is_list: bool) -> None:
    *outer, last = path
    for name in outer:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            inner = tree[name] = {}
        tree = inner
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    if is_list:
        value = [*(tree.get(last) or ()), *text.split(",")]
    tree[last] = value


def _variables(names: Iterable[str]) -> Iterator[Setting]:
    for name, value in environment_settings().items():
        if name in names and value:
            yield Setting(VARIABLE_PREFIX + name.upper(), name, value)


def unknown_variables() -> list[str]:
    """Return a warning for each environment variable JAXSERVE_<NAME> without a setting <name>."""
    names = {field.name for cls in (EngineConfig, ServerConfig) for field in fields(cls)}
    said = []
    for name in sorted(environment_settings().keys() - names):
        close = difflib.get_close_matches(name, names, 1)
        hint = f"; did you mean {VARIABLE_PREFIX}{close[0].upper()}?" if close else ""
        said.append(f"{VARIABLE_PREFIX}{name.upper()} is no setting, and changes nothing{hint}")
    return said


def with_options(message: str) -> str:
    """Return an error message in which options (`--max-model-len`) replace names of settings."""
    classes = (EngineConfig, ServerConfig, FleetConfig, SamplingParams)
    names = {field.name for cls in classes for field in fields(cls)}
    words = "|".join(name for name in names if "_" in name or name == "nnodes")
    # Fields of one word are also ordinary words, except at the beginning of "x must be".
    first = "|".join(name for name in names if "_" not in name)
    pattern = rf"(?<![\w.\-'\"])(?:{words})(?![\w'\"])|^(?:{first})(?= must )"
    return re.sub(pattern, lambda match: "--" + match[0].replace("_", "-"), message)


def read_file(path: str) -> Iterator[Setting]:
    """Yield the options of a YAML file in order, each as a Setting. Empty options are omitted.

    Raises:
        CommandError: the file is invalid. The message names the file, and the line if possible.
    """
    import yaml  # takes longer than the rest of the command line

    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise CommandError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return
        if not isinstance(node, yaml.MappingNode):
            raise CommandError(f"{path}:1: options are given like max-model-len: 4096")
        names: set[str] = set()
        for key, inner in node.value:
            origin = f"{path}:{key.start_mark.line + 1}"
            name = str(key.value).replace("-", "_")
            if name in names:
                raise CommandError(f"{origin}: {key.value} is given twice")
            names.add(name)
            value = loader.construct_object(inner, deep=True)
            if value is not None:
                yield Setting(origin, name, value)
    except OSError as error:
        raise CommandError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise CommandError(f"--config {path}: not YAML: {error}") from error


def _read(setting: Setting, action: argparse.Action) -> Any:
    single = _SingleOption(prog=setting.origin, add_help=False)
    single._add_action(action)
    words = _words(setting, action)
    return getattr(single.parse_args(words), action.dest, None)


def _words(setting: Setting, action: argparse.Action) -> list[str]:
    """Return the words of a command line that give an option (`action`) the value of a setting."""
    flag, value = "--" + setting.name.replace("_", "-"), setting.value
    if action.nargs == 0:
        if str(value).lower() not in _TRUE + _FALSE:
            raise CommandError(f"{setting.origin}: {setting.name} must be true or false")
        is_true = str(value).lower() in _TRUE
        if not isinstance(action, Switch):
            return [flag] if is_true else []
        opposite = action.option_strings[0] if flag in action.negative else action.negative[0]
        return [flag if is_true else opposite]
    is_list = action.nargs == "+" or isinstance(action, Entries | argparse._AppendAction)
    is_json = isinstance(action, Entries) and str(value).startswith("[")
    if is_list and setting.is_variable and not is_json:
        value = [part for part in value.split(",") if part]
    if isinstance(value, dict):
        return [flag, json.dumps(value)]
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    entries = [str(entry) for entry in value]
    if action.nargs == "+":
        return [flag, *entries]
    if isinstance(action, argparse._StoreAction):
        return [f"{flag}={','.join(entries)}"]
    return [f"{flag}={entry}" for entry in entries]
