"""Detection of a model's call and thinking formats by texts in its chat template."""

from __future__ import annotations

# Each row: texts, and the format of a template that contains all of them. The first match applies.
_CALLS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("<|channel|>", "functions."), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call>",), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("`directly-answer`", "Action:"), "command_r"),
    (("｜DSML｜tool_calls",), "deepseek_v4"),
    (("｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>",), "internlm"),
    (("<steptml:",), "step3"),
    (("functools[",), "phi4_mini_json"),
    (("<function_calls>",), "olmo3"),
    (("<|role_sep|>", "function call"), "gigachat3"),
    (("<|tool_call|>",), "granite"),
    (("<tool_sep>", "<tool_calls>"), "hy_v3"),
    (("<tool_sep>",), None),
    (("<arg_key:opensource>",), "hy_v4"),
    (("'<|open|>'", "('tool', fn.name)"), "kimi_k3"),
    (("plamo:begin_tool_request",), "plamo3"),
    (("<dots_function_call>",), "dots"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_calls>",), "jamba"),
    (("<function_call>",), "granite-20b-fc"),
    (("<tool_call>",), "hermes"),
    (("<|python_start|>",), "pythonic"),
    (("[func_name1(",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (('"parameters"', "tools"), "llama3_json"),
)
_THOUGHTS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "analysis"), "openai_gptoss"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|START_RESPONSE|>",), "cohere_command3"),
    (("<|channel>",), "gemma4"),
    (("</seed:think>",), "seed_oss"),
    (("</think:opensource>",), "hy_v4"),
    (("'<|close|>'", "'think'"), "kimi_k3"),
    (("plamo:end_think",), "plamo3"),
    (("[/THINK]",), "mistral"),
    (("</think>", "</answer>"), "hunyuan_a13b"),
    (("</think>", "<response>"), "ernie45"),
    (("</think>", "｜Assistant｜"), "deepseek_v3"),
    (("</think>", "<arg_key>"), "glm45"),
    (("</think>",), "qwen3"),
    (("Here is my response:",), "granite"),
    (("thought process",), "granite"),
)


def detect_calls(template: str) -> str | None:
    """Return the name of the call format of a chat template, or None if no known format matches.

    It is the first row of `_CALLS` whose texts are all in the template.
    """
    return _first(_CALLS, template)


def detect_thinking(template: str) -> str | None:
    """Return the name of the thinking format of a chat template, or None if no row matches."""
    return _first(_THOUGHTS, template)


def _first(rows: tuple[tuple[tuple[str, ...], str | None], ...], template: str) -> str | None:
    fits = (name for signs, name in rows if all(sign in template for sign in signs))
    return next(fits, None)
