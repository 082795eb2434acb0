"""ChatTemplate: a checkpoint's Jinja template, rendered in a sandbox that counts its work.

A template comes with a checkpoint, so it is a foreign program. Jinja has no loop without an end,
but loops in loops, macros and doubled texts come close. No thread can be stopped from outside, so
every step that can repeat or enlarge anything pays from one budget, before it runs.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes

from jaxserve.text.content_format import TextRoles
from jaxserve.text.template_budget import Budget, TemplateTooLong, weigh
from jaxserve.text.template_sandbox import Sandbox

MAX_SOURCE_CHARS = 1 << 20
# Nodes of a template's syntax tree; the largest that models have hold a thousand.
MAX_NODES = 50_000
# The bound of a template's output is four times its input, and this much.
MORE_CHARS = 1 << 20
# The bound of all texts and lists made on the way, in multiples of the output's.
WORK_OF_OUTPUT = 16


class ChatTemplate:
    """A compiled template. It is safe from any thread.

    Args:
        source: in Jinja.
        max_nodes: of its syntax tree.

    Attributes:
        text_roles: roles whose messages it reads with content as text; None for all, as most do.
        constants: the texts that it compares with or prints.

    Raises:
        jinja2.TemplateError, ValueError: it has no meaning, or is too large.
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
        """Return whether the name of a variable occurs in it."""
        return name in self._names

    def render(self, variables: dict[str, Any], seconds: float = 1.0) -> str:
        """Return the text.

        Args:
            variables: plain values, which the template cannot change.
            seconds: of CPU time that it may take.

        Raises:
            TemplateTooLong: it takes longer, or makes more than four times its input and 1 MiB.
            Exception: whatever the template raises.
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
