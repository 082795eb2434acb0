"""Validation of a request's tools, and the call format, grammar and texts that follow from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.decode import is_within
from jaxserve.server.schema.openai import ChatRequest, NamedTool, ResponseFormat, Tool
from jaxserve.server.schema.sampling import answer_schema
from jaxserve.server.schema.tools import CUSTOM_PARAMETERS
from jaxserve.server.tool_calls.answer_parts import NAME, Beside, Tools
from jaxserve.server.tool_calls.call_rules import Unformable, arguments_schema
from jaxserve.server.tool_calls.formats import CALL_FORMATS, DEFAULT_FORMAT, CallFormat
from jaxserve.server.tool_calls.grammar import MAX_CALLS, CallGrammar, Function
from jaxserve.structured import MAX_SCHEMA_BYTES, plain_schema
from jaxserve.text.grammars import lark_problem, schema_problem
from jaxserve.text.json_schemas import EnforceableSchemas, UnenforceableSchema, well_formed

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 512 << 10
MAX_DEPTH = 32
_NAME = re.compile(NAME)
_ANY = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class CallUse:
    """Tool calls that an answer may contain, and the format in which the model writes them."""

    call_format: CallFormat
    tools: Tools
    is_certain: bool  # True if a grammar enforces every call
    parallel: bool
    beside: Beside = Beside.TEXT  # text that the grammar allows in addition to calls
    raw: frozenset[str] = frozenset()  # names of tools whose calls contain raw text


@dataclass(frozen=True)
class ToolUse:
    """Tools of one request: calls in the answer, descriptions in the prompt, and the answer's
    grammar.
    """

    calls: CallUse  # calls that the answer may contain
    described: list[dict[str, Any]]  # tools in the form of chat templates
    grammar: str | None  # grammar of the answer, None if the answer is unconstrained
    is_named: bool  # True if the request names the tool to call
    # True if the grammar may include the thoughts, where the format allows it.
    holds_thoughts: bool = True


def check_tools(tools: list[Tool]) -> None:
    """Check the number, total size, names and schema nesting of a request's tools.

    A later check of the schemas follows when a grammar is built from them.

    Raises:
        InvalidRequest: a limit is exceeded, or a name is invalid or repeated.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS} tools, got {len(tools)}", "tools")
    if len(msgspec.json.encode(tools)) > MAX_TOOLS_BYTES:
        raise InvalidRequest(f"tools takes at most {MAX_TOOLS_BYTES} bytes", "tools")
    seen = set()
    for tool in tools:
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"tools: a name must be 1 to 128 of a-z, A-Z, 0-9, _, . and -, got {name[:60]!r}",
                "tools",
            )
        if name in seen:
            raise InvalidRequest(f"tools: {name!r} is there twice", "tools")
        seen.add(name)
        if not is_within(tool.function.parameters, MAX_DEPTH):
            raise InvalidRequest(
                f"tools: parameters of {name!r} are nested deeper than {MAX_DEPTH}", "tools"
            )


def _check_well_formed(tools: list[Tool]) -> None:
    for function in (tool.function for tool in tools):
        if well_formed(function.parameters) is not function.parameters:
            raise InvalidRequest(
                f"tools: parameters of {function.name!r} are not a JSON schema", "tools"
            )


def allowed_tools(body: ChatRequest) -> tuple[list[Tool], NamedTool | str | None]:
    """Return the tools of a chat request that the model may see, and the choice of a tool.

    With `allowed_tools` in `tool_choice`, the tools are reduced to the allowed ones, and the choice
    is its mode ("auto" or "required"). Otherwise both fields are returned unchanged.

    Raises:
        InvalidRequest: `tool_choice` allows a tool that is not in `tools`.
    """
    tools, choice = body.tools or [], body.tool_choice
    allowed = choice.allowed_tools if isinstance(choice, NamedTool) else None
    if allowed is None:
        return tools, choice
    names = {tool.function.name for tool in allowed.tools if tool.allowed_tools is None}
    if missing := names - {tool.function.name for tool in tools}:
        raise InvalidRequest(f"tool_choice: {min(missing)[:60]!r} is not in tools", "tool_choice")
    return [tool for tool in tools if tool.function.name in names], allowed.mode


def tool_use(
    body: ChatRequest,
    parser: str | None,
    allows_auto: bool,
    spell: Callable[[str], str],
    schemas: EnforceableSchemas | None = None,
) -> ToolUse | None:
    """Return how the answer to a chat request may call tools, or None if it may not.

    A grammar enforces the calls if the request forces a call, has a strict tool, or has an output
    format beside tools. If the model's call format cannot express a schema, the default format is
    used.

    Args:
        parser: name of the model's call format, or None if it is unknown.
        allows_auto: True if the server lets the model choose whether to call a tool.
        spell: function that returns a marker as a term of a Lark grammar.
        schemas: cache of enforceable schemas, None for a new one.

    Raises:
        InvalidRequest: a tool, `tool_choice` or the output format is invalid, or not served.
    """
    schemas = EnforceableSchemas(schema_problem) if schemas is None else schemas
    check_tools(body.tools or [])
    tools, choice = allowed_tools(body)
    if not tools and choice not in (None, "none", "auto"):
        raise InvalidRequest("tool_choice needs tools", "tool_choice")
    if not tools or choice == "none":
        return None
    is_named = isinstance(choice, NamedTool)
    callable_tools = _named_tools(tools, choice) if isinstance(choice, NamedTool) else tools
    is_auto = choice in (None, "auto")
    if is_auto and (parser is None or not allows_auto):
        _check_well_formed(tools)
        raise InvalidRequest(
            'tool_choice "auto" needs a model whose calls are known (--tool-call-parser) and '
            "--enable-auto-tool-choice; here only required and a named function can be served",
            "tool_choice",
        )
    call_format = CALL_FORMATS[parser or DEFAULT_FORMAT]
    parallel = body.parallel_tool_calls is not False and not is_named
    answer = _answer_schema(body.response_format, schemas) if is_auto else None
    grammar, may_think = None, body.thinking_token_budget is None
    if not is_auto or answer is not None or any(tool.function.strict for tool in tools):
        form = partial(
            CallGrammar,
            functions=[_function(tool, schemas, not is_auto) for tool in callable_tools],
            spell=spell,
            most=MAX_CALLS if parallel else 1,
            may_answer=is_auto,
            answer_schema=answer,
            may_think=may_think,
        )
        call_format, grammar = _formed(call_format, form)
    called = {tool.function.name: tool.function.parameters or {} for tool in callable_tools}
    beside = Beside.FORM if answer is not None else Beside.TEXT if is_auto else Beside.NOTHING
    raw = frozenset(tool.function.name for tool in callable_tools if tool.lark is not None)
    calls = CallUse(call_format, called, grammar is not None, parallel, beside, raw)
    return ToolUse(calls, described(tools), grammar, is_named, may_think)


def _named_tools(tools: list[Tool], choice: NamedTool) -> list[Tool]:
    name = choice.function.name
    named = [tool for tool in tools if tool.function.name == name]
    if not named:
        raise InvalidRequest(f"tool_choice: {name[:60]!r} is not in tools", "tool_choice")
    return named


def _formed(
    call_format: CallFormat, form: Callable[[CallFormat], CallGrammar]
) -> tuple[CallFormat, str]:
    """Return the call format that a grammar enforces, and that grammar.

    It is the model's format, or the default format if the model's format cannot express a schema or
    its grammar is too large.

    Args:
        form: function from a call format to the grammar of answers in it.

    Raises:
        InvalidRequest: the grammar in the default format is too large, too.
    """
    try:
        grammar = form(call_format).text()
        if len(grammar) <= MAX_SCHEMA_BYTES:  # tagged calls have larger grammars than JSON
            return call_format, grammar
    except Unformable:
        pass
    if call_format.is_harmony:  # its reader does not find calls of other formats
        raise _too_large()
    call_format = CALL_FORMATS[DEFAULT_FORMAT]
    grammar = form(call_format).text()
    if len(grammar) > MAX_SCHEMA_BYTES:
        raise _too_large()
    return call_format, grammar


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        f"tools: the schemas of tools that must be well formed take at most {MAX_SCHEMA_BYTES} "
        "bytes together, without descriptions",
        "tools",
    )


def _function(tool: Tool, schemas: EnforceableSchemas, is_forced: bool) -> Function:
    """Return the name and the checked argument schema, or the Lark grammar, of a tool.

    Args:
        is_forced: True if the request forces the model to call a tool.

    Raises:
        InvalidRequest: the schema or grammar is too large or invalid, the tool is strict and its
            schema not enforceable, or a forced tool's schema does not describe an object.
    """
    name = tool.function.name
    if tool.lark is not None:
        if len(tool.lark) > MAX_SCHEMA_BYTES:
            raise _too_large()
        if problem := lark_problem(tool.lark):
            raise InvalidRequest(f"tools: the grammar of {name!r}: {problem}", "tools")
        return Function(name, CUSTOM_PARAMETERS, tool.lark)
    schema = arguments_schema(Function(name, tool.function.parameters or _ANY))
    if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
        raise _too_large()
    is_strict = bool(tool.function.strict)
    try:
        if tool.regex is not None:  # the schema has a group around it, so check the pattern alone
            schemas.get({"type": "string", "pattern": tool.regex}, True, "")
        schema = schemas.get(schema, is_strict, f"tool {name!r}")
        types = schema.get("type", "object")
        if is_forced and "object" not in (types if isinstance(types, list) else [types]):
            raise InvalidRequest(f"tools: parameters of {name!r} must be of type object", "tools")
        if schema.get("type") != "object":
            schema = schemas.get(schema | {"type": "object"}, is_strict, f"tool {name!r}")
    except UnenforceableSchema as error:
        if tool.type == "custom":
            reason = str(error).split("pattern: ", 1)[-1]
            raise InvalidRequest(f"tools: the grammar of {name!r}: {reason}", "tools") from None
        raise InvalidRequest(
            f"tools: parameters of {name!r} cannot be enforced, as strict requires: {error}",
            "tools",
        ) from None
    return Function(name, schema | {"type": "object"})


def described(tools: list[Tool]) -> list[dict[str, Any]]:
    """Return tools in the form of chat templates: dicts with the name, description and parameters
    of a function.
    """
    descriptions = []
    for function in (tool.function for tool in tools):
        fields: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            fields["description"] = function.description
        fields["parameters"] = well_formed(function.parameters or _ANY)
        descriptions.append({"type": "function", "function": fields})
    return descriptions


def _answer_schema(
    response_format: ResponseFormat | None, schemas: EnforceableSchemas
) -> dict[str, Any] | None:
    answer = answer_schema(response_format)
    if answer is None:
        is_object = response_format is not None and response_format.type == "json_object"
        return {"type": "object"} if is_object else None
    try:
        return schemas.get(plain_schema(answer[0]), answer[1], "an answer")
    except UnenforceableSchema as error:
        raise InvalidRequest(f"response_format: at {error}", "response_format") from None
