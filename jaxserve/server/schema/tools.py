"""Schemas of tools in chats: definitions, choices, and streamed calls."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Parameters of the function that represents a custom tool.
CUSTOM_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def require(value: Any, name: str) -> None:
    """Check that the value of a required field is not None.

    Raises:
        ValueError: the value is None. The message is msgspec's for a missing field `name`.
    """
    if value is None:
        raise ValueError(f"Object missing required field `{name}`")


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """Definition of a function that the model may call, with a JSON schema of its arguments in
    `parameters`.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarDefinition(msgspec.Struct, kw_only=True):
    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, kw_only=True):
    """Format of the input text of a custom tool: any text, or text that a grammar enforces.

    The chat API gives the grammar in `grammar`, and the responses API in `definition` and `syntax`.
    """

    type: Literal["text", "grammar"] = "text"
    grammar: GrammarDefinition | None = None
    definition: str | None = None
    syntax: Literal["lark", "regex"] | None = None

    def __post_init__(self) -> None:
        if self.definition is not None and self.syntax is not None:
            self.grammar = GrammarDefinition(definition=self.definition, syntax=self.syntax)
        if self.type == "grammar":
            require(self.grammar, "grammar")


class CustomDefinition(msgspec.Struct, kw_only=True):
    """Definition of a custom tool, whose input is a text instead of JSON arguments."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    """Tool that the model may call: a function, or a custom tool.

    A custom tool also has a `function` with its name and one argument, the text `input`.
    """

    type: Literal["function", "custom"] = "function"
    function: FunctionDefinition = None  # type: ignore[assignment]
    custom: CustomDefinition | None = None

    def __post_init__(self) -> None:
        if self.type == "custom" and self.custom is not None:
            custom, grammar = self.custom, self._grammar
            self.function = FunctionDefinition(
                name=custom.name, description=custom.description, parameters=CUSTOM_PARAMETERS
            )
            if grammar is not None:
                self.function.strict = True
                hint = f"The input matches this {grammar.syntax} grammar:\n{grammar.definition}"
                self.function.description = "\n".join(filter(None, (custom.description, hint)))
            if self.regex is not None:
                text = {"type": "string", "pattern": f"^(?:{self.regex})$"}
                self.function.parameters = CUSTOM_PARAMETERS | {"properties": {"input": text}}
        require(getattr(self, self.type), self.type)

    @property
    def _grammar(self) -> GrammarDefinition | None:
        form = self.custom.format if self.type == "custom" and self.custom else None
        return form.grammar if form is not None and form.type == "grammar" else None

    @property
    def lark(self) -> str | None:
        """Lark grammar that the input of a custom tool must match, None if the tool has no such
        grammar.
        """
        return self._definition("lark")

    @property
    def regex(self) -> str | None:
        """Regular expression that the input of a custom tool must match, None if the tool has
        none.
        """
        return self._definition("regex")

    def _definition(self, syntax: str) -> str | None:
        grammar = self._grammar
        return grammar.definition if grammar is not None and grammar.syntax == syntax else None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    """Tools among those of a request that the model may call (mode auto), or one of which it must
    call (mode required).
    """

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class NamedTool(msgspec.Struct, kw_only=True):
    """Object in `tool_choice`: a tool that the model must call, or a list of allowed tools."""

    type: Literal["function", "custom", "allowed_tools"] = "function"
    function: FunctionName = None  # type: ignore[assignment]
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None

    def __post_init__(self) -> None:
        if self.type == "custom" and self.custom is not None:
            self.function = self.custom
        require(getattr(self, self.type), self.type)


class CustomCall(msgspec.Struct, kw_only=True):
    """Call of a custom tool.

    `input` is text in answers. In conversations sent by clients it is any JSON value.
    """

    name: str
    input: Any = None


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class CustomDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    input: str | None = None


class CallDelta(msgspec.Struct):
    """Next part of a tool call in a streamed answer.

    The first part of each call has the call's id and the tool's name.
    """

    index: int
    function: FunctionDelta | msgspec.UnsetType = msgspec.UNSET
    custom: CustomDelta | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
