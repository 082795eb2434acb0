"""ChatTemplate: a checkpoint's Jinja template, rendered in a sandbox with a work budget.

A template comes with a checkpoint, so its code is untrusted. Jinja has no endless loops, but nested
loops, macros and repeated doubling of strings can take nearly as long. A thread cannot be stopped
from outside, so every step that can repeat or grow is charged to one budget before it runs.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

from jaxserve.text.content_format import TextRoles
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
    """Compiled chat template. It is thread-safe.

    Args:
        source: Jinja source.
        max_nodes: maximum nodes in its syntax tree.

    Attributes:
        text_roles: roles whose messages have text as content; the other roles have lists of parts.
            None means text for all roles, as for most templates.
        constants: strings that the template compares with or prints.

    Raises:
        jinja2.TemplateError, ValueError: the source is invalid or too large.
    """

    def __init__(self, source: str, max_nodes: int = MAX_NODES) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise ValueError(f"the chat template has more than {MAX_SOURCE_CHARS} characters")
        self.source = source
        self.text_roles: TextRoles = None
        self._sandbox = Sandbox(max_nodes)
        try:
            parsed = self._sandbox.parse(source)
            self._names = {node.name for node in parsed.find_all(nodes.Name)}
            found = (node.value for node in parsed.find_all(nodes.Const))
            self.constants = {text for text in found if isinstance(text, str)}
            self._template = self._sandbox.from_string(parsed)
        except (RecursionError, MemoryError):
            raise ValueError("the chat template is nested too deep") from None

    def reads(self, name: str) -> bool:
        """Return whether the variable `name` occurs in the template."""
        return name in self._names

    def render(self, variables: dict[str, Any], seconds: float = 1.0) -> str:
        """Render and return the text.

        Args:
            variables: plain values. The template cannot change them.
            seconds: limit on CPU time.

        Raises:
            TemplateTooLong: the time or the output limit was exceeded.
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
