"""Dialect: how one model writes tool calls and thoughts, and how its answers are read.

A chat template shows the formats by texts that it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.scheduling.slot_table import NO_TOKEN
from jaxserve.server.tool_calls import harmony, thoughts
from jaxserve.server.tool_calls.answer import AnswerFormat
from jaxserve.server.tool_calls.formats import CALL_FORMATS, DEFAULT_FORMAT, CallFormat
from jaxserve.server.tool_calls.histories import harmony_messages
from jaxserve.server.tool_calls.tools import ToolUse
from jaxserve.text.thinking import ThinkingMarks

# Number of tokens at the end of a prompt in which templates open or close thoughts.
_TAIL_TOKENS = 24
_WITH_THOUGHTS = {
    "openai": "openai_gptoss",
    "cohere_command3": "cohere_command3",
    "cohere_command4": "cohere_command4",
    "kimi_k3": "kimi_k3",
}
_TEXT_ARGUMENTS = re.compile(r"\+\s*\w+\['function'\]\['arguments'\]\s*\+")


def _with_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = json.dumps(arguments, ensure_ascii=False)
    return function if isinstance(arguments, str) else {**function, "arguments": text}


class Dialect:
    """Formats in which one model writes tool calls and thoughts, found in its chat template.

    Args:
        tokenizer: `Tokenizer` of the model, None without a tokenizer.
        tool_call_parser: name of the format of tool calls, "none" if the model makes no calls, None
            to detect the format in the chat template.
        reasoning_parser: name of the thinking format, None to detect it in the chat template.
    """

    def __init__(
        self, tokenizer: Any, tool_call_parser: str | None, reasoning_parser: str | None
    ) -> None:
        self._tokenizer = tokenizer
        template = "" if tokenizer is None else tokenizer.template_source
        # True if the chat template renders the tools of a request.
        self.reads_tools = tokenizer is not None and tokenizer.template_reads("tools")
        self.parser = detect_calls(template) if tool_call_parser is None else tool_call_parser
        if self.parser == "none":
            self.parser = None
        # These formats put markers around answers too, so they need a thinking format.
        detected = thoughts.detect_thinking(template) or _WITH_THOUGHTS.get(self.parser or "")
        self.thinking = thoughts.THINKING_FORMATS.get(reasoning_parser or detected or "")
        if tokenizer is None:
            self.thinking = None
        # DeepSeek's templates concatenate arguments with strings, and render the calls of a message
        # only if its content is None.
        self._has_text_arguments = _TEXT_ARGUMENTS.search(template) is not None
        self._needs_no_content = "['content'] is none" in template

    @property
    def call_format(self) -> CallFormat:
        """Format of the model's tool calls, or the default format (for forced calls) if it is
        unknown.
        """
        return CALL_FORMATS[self.parser or DEFAULT_FORMAT]

    def spell(self, mark: str) -> str:
        """Return the marker `mark` as a term of a Lark grammar: the token `<[id]>` if it is an
        added token, otherwise a quoted string.
        """
        token = self._tokenizer.token_id(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    @property
    def stop_token_ids(self) -> list[int]:
        """Ids of tokens that end an answer beside the checkpoint's own, in gpt-oss only,
        else [].
        """
        if self.thinking is None or not self.thinking.is_harmony:
            return []
        ids = (self._tokenizer.token_id(mark) for mark in harmony.HARMONY_STOPS)
        return [token for token in ids if token is not None]

    def marks(
        self, prompt: list[int], use: ToolUse | None = None, is_formed: bool = False
    ) -> ThinkingMarks | None:
        """Return the markers and token ids by which the engine finds the thoughts in an answer.

        The result is None if the model has no thinking format.

        Args:
            prompt: token ids of the prompt, whose end may have opened or closed the thoughts.
            is_formed: True if a structured output format constrains the answer after the thoughts.
        """
        if self.thinking is None:
            return None
        forms_calls = use is not None and use.grammar is not None
        if self.thinking.is_harmony:
            is_held = use is not None and forms_calls and use.holds_thoughts
            return self._harmony_marks(forms_calls, is_formed, is_held)
        start, token = self.start(prompt), self._tokenizer.token_id(self.thinking.start)
        end, ids = self.thinking.end, self._end_ids()
        answers = [mark for mark, _ in self.thinking.answer_marks]
        single_tokens = [mark for mark in answers if self._tokenizer.token_id(mark) is not None]
        if single_tokens and is_formed and not forms_calls:
            end, ids = single_tokens[0], [*ids, self._tokenizer.token_id(single_tokens[0])]
        return ThinkingMarks(
            start=self.thinking.start,
            end=end,
            end_token_ids=tuple(ids),
            decode=self._decode,
            start_token_id=NO_TOKEN if token is None else token,
            is_open=start is thoughts.ThoughtState.OPEN,
            is_closed=start is thoughts.ThoughtState.CLOSED,
        )

    def _harmony_marks(self, forms_calls: bool, is_formed: bool, is_held: bool) -> ThinkingMarks:
        """Return the markers of the thoughts in gpt-oss's channels.

        A grammar of tool calls applies from the first message on, since it includes the thoughts,
        unless they have a token budget. Any other output format applies from the final channel on.
        """
        assert self.thinking is not None
        turn = f"{harmony.END}{harmony.START}assistant"
        answer = f"{turn}{harmony.CHANNEL}final{harmony.MESSAGE}"
        pattern, forced = (
            harmony.HARMONY_ANSWER if is_formed else harmony.HARMONY_ANSWER_OR_CALL,
            answer,
        )
        if forms_calls:
            pattern, forced = harmony.HARMONY_TURN, turn
        return ThinkingMarks(
            start=self.thinking.start,
            end=self.thinking.end,
            end_token_ids=tuple(self._ids(forced)),
            decode=self._decode,
            is_open=forms_calls or is_formed,
            is_closed=is_held,
            end_pattern=pattern,
        )

    def adapted(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """Return copies of the messages and tools of a conversation in the form that the model's
        chat template can render, with arguments of tool calls as text if the template needs text.
        """
        if self._has_text_arguments or self._needs_no_content:
            messages = [self._as_text(message) for message in messages]
        if self.thinking is None or not self.thinking.is_harmony:
            return messages, tools
        described = [
            {**tool, "function": {"description": "", **tool["function"]}} for tool in tools or ()
        ]
        return harmony_messages(messages), described or tools

    def _as_text(self, message: dict[str, Any]) -> dict[str, Any]:
        # DeepSeek's templates need arguments as text, and None or "" instead of empty content.
        if not message.get("tool_calls"):
            return message
        calls = message["tool_calls"]
        if self._has_text_arguments:
            calls = [{**call, "function": _with_text(call["function"])} for call in calls]
        content = None if self._needs_no_content else ""
        return {**message, "content": message["content"] or content, "tool_calls": calls}

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, False)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in harmony.HARMONY_PARTS.split(text):
            token = self._tokenizer.token_id(part) if part else None
            ids += [token] if token is not None else self._tokenizer.encode_word(part)
        return ids

    def _end_ids(self) -> list[int]:
        assert self.thinking is not None
        token = self._tokenizer.token_id(self.thinking.end)
        return self._tokenizer.encode_word(self.thinking.end) if token is None else [token]

    def start(self, prompt: list[int]) -> thoughts.ThoughtState:
        """Return the state of the thoughts (open, closed or free) after the token ids of a
        prompt.
        """
        assert self.thinking is not None
        start = thoughts.start_of(
            self._tokenizer.decode(prompt[-_TAIL_TOKENS:], False), self.thinking
        )
        return (
            thoughts.ThoughtState.OPEN
            if start is thoughts.ThoughtState.FREE and self.thinking.is_always
            else start
        )

    def shows_special(self, use: ToolUse | None) -> bool:
        """Return whether answers must be decoded with special tokens, because a marker of tool
        calls or thoughts is a special token.
        """
        marks = set() if use is None else use.calls.call_format.marks
        if self.thinking is not None:
            marks |= self.thinking.marks
        return any(mark and self._tokenizer.is_special(mark) for mark in marks)

    def answer_format(
        self, prompt: list[int], use: ToolUse | None, with_thoughts: bool
    ) -> AnswerFormat:
        """Return the format by which the answers to a request are split into content, thoughts and
        calls.

        Args:
            prompt: token ids of the prompt.
            use: tools of the request, None without tools.
        """
        if self.thinking is None:
            return AnswerFormat(use)
        if self.thinking.is_harmony:
            return AnswerFormat(
                use, self.thinking, harmony=self._harmony_ids(), with_thoughts=with_thoughts
            )
        ids = self._end_ids()
        end = ids[0] if len(ids) == 1 else None
        call = None
        if use is not None and self.thinking.ends_at_calls:
            call = self._tokenizer.token_id(use.calls.call_format.starts[0])
        start = self.start(prompt)
        return AnswerFormat(use, self.thinking, start, end, call, with_thoughts=with_thoughts)

    def _harmony_ids(self) -> harmony.HarmonyIds | None:
        channel, end = (
            self._tokenizer.token_id(harmony.CHANNEL),
            self._tokenizer.token_id(harmony.END),
        )
        if channel is None or end is None:
            return None
        return harmony.HarmonyIds(channel, end, tuple(self._tokenizer.encode_word("analysis")))


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


def detect_calls(template: str) -> str | None:
    """Return the name of the tool call format that fits the source of a chat template.

    It is the format of the first row of `_CALLS` whose texts are all in the template, or None.
    """
    return thoughts.first_match(_CALLS, template)
