"""Tools of the responses endpoint in the form of chat: namespaces, custom and hosted tools."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.response_items import Choice, ResponseTool, ToolChoice, ToolReference
from jaxserve.server.schema.tools import (
    AllowedTools,
    CustomDefinition,
    CustomFormat,
    FunctionDefinition,
    FunctionName,
    NamedTool,
    Tool,
)

# Tools that OpenAI's servers run, or that their models know without a description, and the items
# that record their calls. They are not shown to the model.
HOSTED_TOOLS = frozenset(
    "apply_patch code_interpreter computer computer_use computer_use_preview file_search "
    "image_generation local_shell mcp programmatic_tool_calling shell tool_search web_search "
    "web_search_2025_08_26 web_search_preview web_search_preview_2025_03_11".split()
)
HOSTED_ITEMS = frozenset(
    "apply_patch_call apply_patch_call_output code_interpreter_call computer_call "
    "computer_call_output file_search_call image_generation_call local_shell_call "
    "local_shell_call_output mcp_approval_request mcp_approval_response mcp_call mcp_list_tools "
    "program program_output shell_call shell_call_output tool_search_call tool_search_output "
    "web_search_call".split()
)


def strip_hosted(body: dict[str, Any]) -> None:
    """Reduce the hosted tools and items in the body of a responses request to type, id and status.

    Their other fields, which are removed from `body` in place, do not fit the schemas.
    """
    for name, types in (("tools", HOSTED_TOOLS), ("input", HOSTED_ITEMS), ("items", HOSTED_ITEMS)):
        if isinstance(body.get(name), list):
            body[name] = [_stripped(entry, types) for entry in body[name]]


def _stripped(value: Any, types: frozenset[str]) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        return value
    if value["type"] not in types:
        return value
    names = ("type", "id", "status")
    return {name: value[name] for name in names if isinstance(value.get(name), str)}


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which the model calls a tool: `namespace__name`, or `name` without a
    namespace.
    """
    return f"{namespace}__{name}" if namespace else name


def seen_tools(tools: list[ResponseTool] | None) -> list[tuple[str | None, ResponseTool]]:
    """Return the tools of a responses request that the model sees, each after the name of its
    namespace.

    Namespaces are replaced by their members. Hosted tools are left out. The namespace is None for a
    tool outside namespaces.

    Raises:
        InvalidRequest: a tool has an unsupported type, or has no name.
    """
    seen: list[tuple[str | None, ResponseTool]] = []
    for tool in tools or ():
        if tool.type == "namespace":
            members = tool.tools or []
            if any(member.type not in ("function", "custom") for member in members):
                raise InvalidRequest(
                    "tools: a namespace can only hold tools of types function and custom", "tools"
                )
            seen += [(tool.name, member) for member in members]
        elif tool.type not in HOSTED_TOOLS:
            seen.append((None, tool))
    for _, tool in seen:
        if tool.type not in ("function", "custom"):
            raise InvalidRequest(
                f"tools of type {tool.type[:40]!r} are unknown: function, custom and namespace are "
                "served, and hosted tools of OpenAI's are left out",
                "tools",
            )
    if any(tool.name is None for tool in tools or () if tool.type not in HOSTED_TOOLS) or any(
        tool.name is None for _, tool in seen
    ):
        raise InvalidRequest("tools: a tool needs a name", "tools")
    return seen


def _chosen_name(name: str, tools: list[ResponseTool] | None) -> str:
    # Otherwise the flat name of the only namespace with such a tool, or the name itself.
    # InvalidRequest: several namespaces have one.
    seen = [(flat_name(group, tool.name or ""), tool.name) for group, tool in seen_tools(tools)]
    if any(flat == name for flat, _ in seen):
        return name
    names = [flat for flat, tool_name in seen if tool_name == name]
    if len(names) > 1:
        raise InvalidRequest(
            f"tool_choice: {name[:60]!r} is in several groups; name one of {', '.join(names)}",
            "tool_choice",
        )
    return names[0] if names else name


def tool_choice(
    choice: Choice | None, tools: list[ResponseTool] | None
) -> NamedTool | Literal["none", "auto", "required"] | None:
    """Convert the `tool_choice` of a responses request to the form of a chat request.

    Args:
        choice: "none", "auto", "required", None (unset), a tool, or a list of allowed tools.
        tools: tools of the request, from which a name's namespace is found.

    Raises:
        InvalidRequest: the chosen tool is of an unsupported type, has no name, or is ambiguous.
    """
    if not isinstance(choice, ToolChoice):
        return choice
    if choice.type != "allowed_tools":
        return _named(choice.type, choice.name or None, tools)
    listed = choice.tools or []
    served = [named for tool in listed for named in _allowed(tool, tools)]
    if listed and not served and choice.mode == "required":
        raise _not_served(listed[0].type)
    allowed = AllowedTools(mode=choice.mode or "auto", tools=served)
    return NamedTool(type="allowed_tools", allowed_tools=allowed)


def _allowed(tool: ToolReference, tools: list[ResponseTool] | None) -> list[NamedTool]:
    """Return the tools that one entry of the allowed tools stands for, in the form of a chat
    request.

    A hosted tool stands for none, and a namespace for all of its members.

    Raises:
        InvalidRequest: the namespace is not in `tools`, or the entry has no supported type.
    """
    if tool.type in HOSTED_TOOLS:
        return []
    if tool.type != "namespace":
        return [_named(tool.type, tool.name, tools)]
    members = [(group, member.name or "") for group, member in seen_tools(tools)]
    names = [flat_name(group, name) for group, name in members if group and group == tool.name]
    if not names:
        raise InvalidRequest(
            f"tool_choice: namespace {(tool.name or '')[:60]!r} is not in tools", "tool_choice"
        )
    return [NamedTool(function=FunctionName(name=name)) for name in names]


def _not_served(kind: str) -> InvalidRequest:
    return InvalidRequest(
        f"tool_choice: tools of type {kind[:40]!r} are not served; choose one of type function or "
        "custom",
        "tool_choice",
    )


def _named(kind: str, name: str | None, tools: list[ResponseTool] | None) -> NamedTool:
    if kind not in ("function", "custom"):
        raise _not_served(kind)
    if name is None:
        raise InvalidRequest(f"tool_choice of type {kind} needs a name", "tool_choice")
    return NamedTool(function=FunctionName(name=_chosen_name(name, tools)))


def chat_tool(namespace: str | None, tool: ResponseTool) -> Tool:
    """Convert a tool of a responses request to a tool of a chat request.

    Args:
        namespace: name of the tool's namespace, which becomes part of the tool's name, or None.

    Raises:
        InvalidRequest: the format of a custom tool is invalid.
    """
    name = flat_name(namespace, tool.name or "")
    if tool.type != "custom":
        return Tool(
            function=FunctionDefinition(
                name=name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
    try:
        form = msgspec.convert(tool.format or {}, CustomFormat)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tools: format of {name[:60]!r}: {error}", "tools") from None
    definition = CustomDefinition(name=name, description=tool.description, format=form)
    return Tool(type="custom", custom=definition)
