"""Formats in which models write calls and mark their thoughts, under vLLM's parser names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls.

    Args:
        mark: the text before calls.
        is_optional_mark: the mark may be left out; calls are the whole text then.
        close: the text after each call.
        separators: characters, any of which separates two calls of a list.
        is_array: calls stand in brackets.
        arguments: the key of a call's arguments.
        is_python: calls are written as in Python instead of as JSON.
        id_length: length of a call's id of letters and digits, where templates require one.
    """

    mark: str
    is_optional_mark: bool = False
    close: str = ""
    separators: str = ""
    is_array: bool = False
    arguments: str = "arguments"
    is_python: bool = False
    id_length: int | None = None


_HERMES = CallFormat("<tool_call>", close="</tool_call>")
_LLAMA = CallFormat(
    "<|python_tag|>", is_optional_mark=True, separators=";,", arguments="parameters"
)
_MISTRAL = CallFormat("[TOOL_CALLS]", separators=",", is_array=True, id_length=9)
_PYTHON = CallFormat("<|python_start|>", True, "<|python_end|>", ",", True, is_python=True)
_GRANITE = CallFormat("<|tool_call|>", separators=",", is_array=True)

CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": _MISTRAL,
    "pythonic": _PYTHON,
    "llama4_pythonic": _PYTHON,
    "granite": _GRANITE,
}
# The format of forced calls where that of the model is unknown.
DEFAULT_FORMAT = "hermes"


@dataclass(frozen=True)
class ThinkingFormat:
    """A way to mark thoughts before an answer: the texts at their start and end."""

    start: str
    end: str


_THINK = ThinkingFormat("<think>", "</think>")
THINKING_FORMATS: dict[str, ThinkingFormat] = {
    "deepseek_r1": _THINK,
    "qwen3": _THINK,
    "glm45": _THINK,
    "olmo3": _THINK,
    "mistral": ThinkingFormat("[THINK]", "[/THINK]"),
    "granite": ThinkingFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ThinkingFormat("<seed:think>", "</seed:think>"),
}


def detect_calls(template: str) -> str | None:
    """Return the name of the format that a chat template teaches, if it is certain."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|tool_call|>" in template:
        return "granite"
    if "<tool_call>" in template:
        # Another format has the same mark around XML.
        return None if "<function=" in template else "hermes"
    if "<|python_start|>" in template or "[func_name1(" in template:
        return "pythonic"
    if "<|python_tag|>" in template or ('"parameters"' in template and "tools" in template):
        return "llama3_json"
    return None


def detect_thinking(template: str) -> str | None:
    """Return the name of the reasoning parser that fits a chat template, or None."""
    for name in ("qwen3", "mistral", "granite", "seed_oss"):
        if THINKING_FORMATS[name].end in template or (
            name == "granite" and "thought process" in template
        ):
            return name
    return None
