"""Chat templates of checkpoints, settings and requests, rendered in a sandbox with a work budget.

A template comes with a checkpoint, so its code is untrusted. Jinja has no endless loops, but nested
loops, macros and repeated doubling of strings can take nearly as long. A thread cannot be stopped
from outside, so every step that can repeat or grow is charged to one budget before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jinja2 import nodes

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.text import HOW_TO_GIVE, NAMED_TEMPLATES, TEMPLATE_FOLDER
from jaxserve.text.messages import TextRoles
from jaxserve.text.template_budget import Budget, TemplateTooLong, weigh
from jaxserve.text.template_sandbox import Sandbox

MAX_SOURCE_CHARS = 1 << 20
# Maximum nodes in the syntax tree of a template. The largest published templates have a thousand.
MAX_NODES = 50_000
# The output of a template is limited to four times its input plus this many characters.
MORE_CHARS = 1 << 20
# Limit on all intermediate strings and lists, as a multiple of the output limit.
WORK_OF_OUTPUT = 16


class ChatTemplate:
    """Compiled chat template, which renders conversations to text. It is thread-safe.

    Args:
        source: Jinja source of the template.
        max_nodes: maximum nodes in the template's syntax tree.

    Raises:
        jinja2.TemplateError, ValueError: the source is invalid or too large.
    """

    def __init__(self, source: str, max_nodes: int = MAX_NODES) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the chat template has more than {MAX_SOURCE_CHARS} characters")
        self.source = source
        # Roles whose messages have text as content; the other roles have lists of parts. None means
        # text for all roles, as for most templates.
        self.text_roles: TextRoles = None
        self._sandbox = Sandbox(max_nodes)
        try:
            parsed = self._sandbox.parse(source)
            self._names = {node.name for node in parsed.find_all(nodes.Name)}
            constants = (node.value for node in parsed.find_all(nodes.Const))
            # Strings that the template compares with or prints.
            self.constants = {text for text in constants if isinstance(text, str)}
            self._template = self._sandbox.from_string(parsed)
        except (RecursionError, MemoryError):
            raise ValueError("the chat template is nested too deep") from None

    def reads(self, name: str) -> bool:
        """Return whether the variable `name` occurs in the chat template."""
        return name in self._names

    def render(self, variables: dict[str, Any], seconds: float = 1.0) -> str:
        """Render the chat template, and return the text.

        Args:
            variables: template variables such as `messages`, of plain types. The template cannot
                change them.
            seconds: limit on the CPU time.

        Raises:
            TemplateTooLong: the limit on time, work or output was exceeded.
            Exception: any error raised by the template.
        """
        most = 4 * weigh(variables, 1 << 30) + MORE_CHARS
        self._sandbox.budget = Budget(WORK_OF_OUTPUT * most, seconds)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                size += len(part)
                if size > most:
                    raise TemplateTooLong(f"it makes more than {most} characters")
                parts.append(part)
        except RecursionError:
            raise TemplateTooLong("it calls itself too often") from None
        finally:
            self._sandbox.budget = None
        return "".join(parts)


# Characters by which vLLM distinguishes a template from a path.
_JINJA = "{}\n"


def find_template(
    name: str | Path, may_read: bool = True, max_nodes: int = MAX_NODES
) -> ChatTemplate:
    """Return the compiled chat template that a setting or a request names.

    Args:
        name: path of a file, name of a shipped template, or Jinja source.
        may_read: True if files may be read. Requests never read files.
        max_nodes: maximum nodes in the syntax tree of Jinja source.

    Raises:
        InvalidRequest: the value is neither a known name nor Jinja source, or the template is
            invalid.
    """
    text = str(name)
    if may_read and not isinstance(name, Path) and any(sign in text for sign in _JINJA):
        may_read = False  # Jinja source, unless it was passed as a Path
    if may_read:
        is_file = False
        with suppress(OSError, ValueError):  # too long for a path, or contains a NUL
            is_file = Path(text).is_file()
        if is_file:
            return compile_template(_read(Path(text)), text)
    if text in NAMED_TEMPLATES:
        return compile_template((TEMPLATE_FOLDER / f"{text}.jinja").read_text(), text)
    if not any(sign in text for sign in _JINJA):
        raise InvalidRequest(
            f"chat_template: {text[:200]!r} is neither a template nor {HOW_TO_GIVE}",
            "chat_template",
        )
    return compile_template(text, max_nodes=max_nodes)


def _read(path: Path) -> str:
    # InvalidRequest: the file cannot be read, or is not UTF-8.
    try:
        with path.open("rb") as file:
            return file.read(4 * MAX_SOURCE_CHARS + 1).decode()
    except OSError as error:
        message = f"chat_template: cannot read {path}: {error.strerror}"
        raise InvalidRequest(message, "chat_template") from error
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"chat_template: {path} is no text in UTF-8", "chat_template"
        ) from None


def compile_template(source: str, where: str = "", max_nodes: int = MAX_NODES) -> ChatTemplate:
    """Compile the source of a chat template that does not come from a checkpoint, and return the
    template.

    Args:
        where: name of the source in error messages.
        max_nodes: maximum nodes in the template's syntax tree.

    Raises:
        InvalidRequest: the template is invalid or too large.
    """
    try:
        return ChatTemplate(source, max_nodes)
    except Exception as error:  # from Jinja, Python, or a size check
        at_file = f" {where}" if where else ""
        message = " ".join(str(error).split())[:300]
        raise InvalidRequest(f"chat_template{at_file}: {message}", "chat_template") from error


# Tools to test templates that render only conversations with tools.
_TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "f", "parameters": {"type": "object"}},
    }
]


def read_templates(
    tokenizer: Any, where: str, fit: Callable[[ChatTemplate, Any], ChatTemplate]
) -> dict[bool, ChatTemplate]:
    """Return the chat templates of a tokenizer as a dict: the template for conversations with tools
    under True, and the one for those without tools under False.

    The dict is empty without a chat template. It has one entry if a named template serves only one
    kind of conversation.

    Args:
        tokenizer: tokenizer of Transformers, or an object with the same methods.
        where: name of the tokenizer in error messages.
        fit: function that sets the form of message content that a template expects.

    Raises:
        CheckpointError: a template is invalid, exceeds its limits, or does not show user messages.
    """
    if tokenizer.chat_template is None:
        return {}
    sources: dict[bool, str] = {}
    for with_tools in (False, True):
        # Named templates without a default serve only one kind of conversation.
        with suppress(ValueError):
            sources[with_tools] = tokenizer.get_chat_template(tools=_TOOLS if with_tools else None)
    templates: dict[bool, ChatTemplate] = {}
    try:
        for with_tools, source in sources.items():
            same = [template for template in templates.values() if template.source == source]
            templates[with_tools] = same[0] if same else ChatTemplate(source)
            if not same:
                fit(templates[with_tools], _TOOLS if with_tools else None)
    except Exception as error:
        raise CheckpointError(f"{where}: the chat template is not usable: {error}") from error
    return templates
