"""Tables of the formats in which models write calls and thoughts, under vLLM's parser names."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.server.tool_calls.call_bodies import (
    Body,
    HeadedCall,
    JsonCall,
    KeyedCall,
    PythonCalls,
    XmlCall,
    all_marks,
)
from jaxserve.server.tool_calls.gemma import BracedCall


@dataclass(frozen=True)
class CallFormat:
    """Format in which a model writes tool calls: markers, separators, and the notation of a
    call.
    """

    mark: str  # marker before calls
    # True if the marker may be missing. The whole text is then calls.
    is_optional_mark: bool = False
    close: str = ""  # text after each call
    separators: str = ""  # characters, any of which may separate two calls of a list
    is_array: bool = False  # True if calls are in brackets
    body: Body = JsonCall()  # noqa: RUF009 - frozen
    # Length of call ids (letters and digits), if chat templates require one.
    id_length: int | None = None
    # Texts before and after all calls. Models sometimes omit them.
    section: tuple[str, str] = ("", "")
    # Alternative markers that models write, each with its closing text.
    others: tuple[tuple[str, str], ...] = ()
    has_own_section: bool = False  # True if each call has a section of its own
    is_harmony: bool = False  # True for gpt-oss's channels, read by `harmony.py`
    # Usual white space between two calls whose tags are on lines of their own.
    gaps: tuple[str, ...] = field(default=("\n",), compare=False)

    @property
    def is_python(self) -> bool:
        """Whether tool calls in this format have Python syntax."""
        return isinstance(self.body, PythonCalls)

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar can enforce calls in this format. If not, forced calls use
        DEFAULT_FORMAT.
        """
        return not isinstance(self.body, BracedCall)

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers with which tool calls may begin: of the section, of a call, and alternative
        ones.
        """
        return tuple(filter(None, (self.section[0], self.mark, *(mark for mark, _ in self.others))))

    @property
    def closes(self) -> tuple[str, ...]:
        """Texts that may close a tool call. Readers drop them."""
        return tuple(filter(None, (self.close, *(close for _, close in self.others))))

    @property
    def marks(self) -> set[str]:
        """All markers that readers of this call format look for, those of the notation included."""
        return {*self.starts, *self.closes, *filter(None, self.section), *all_marks([self.body])}


_HERMES = CallFormat("<tool_call>", close="</tool_call>")
_LLAMA = CallFormat(
    "<|python_tag|>", is_optional_mark=True, separators=";,", body=JsonCall("parameters")
)
_MISTRAL = CallFormat(
    "[TOOL_CALLS]", separators=",", is_array=True, body=JsonCall(may_be_bare=True), id_length=9
)
_PYTHON = CallFormat(
    "<|python_start|>", True, "<|python_end|>", ",", is_array=True, body=PythonCalls()
)
_GRANITE = CallFormat(
    "<|tool_call|>", separators=",", is_array=True, others=(("<tool_call>", "</tool_call>"),)
)
_ARRAY_IN_TAGS = CallFormat("<tool_calls>", close="</tool_calls>", separators=",", is_array=True)


def _xml(prefix: str = "", trims: bool = True, gaps: tuple[str, ...] = ("\n",)) -> CallFormat:
    end = f"</{prefix}tool_call>"
    body = XmlCall("<parameter=", "</parameter>", "</function>", end, trims=trims)
    section = (f"<{prefix}tool_call>", end)
    return CallFormat("<function=", body=body, section=section, has_own_section=True, gaps=gaps)


def _invoke(section: str, prefix: str, types: str = "", trims: bool = False) -> CallFormat:
    end = f"</{section}>"
    body = XmlCall(
        f"<{prefix}parameter name=",
        f"</{prefix}parameter>",
        f"</{prefix}invoke>",
        end,
        is_quoted=True,
        trims=trims,
        types=types,
    )
    return CallFormat(f"<{prefix}invoke name=", body=body, section=(f"<{section}>", end))


_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def _deepseek(body: HeadedCall) -> CallFormat:
    mark, close = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    return CallFormat(mark, close=close, body=body, section=_DEEPSEEK)


_QWEN_XML = _xml()
_STEP_XML = _xml(gaps=("", "\n"))
_GLM = CallFormat("<tool_call>", body=KeyedCall("</tool_call>"))


def _hunyuan(after: str = "", suffix: str = "") -> CallFormat:
    end, section = f"</tool_call{suffix}>", f"tool_calls{suffix}>"
    body = KeyedCall(end, after, suffix)
    return CallFormat(f"<tool_call{suffix}>", body=body, section=(f"<{section}", f"</{section}"))


HY_SUFFIX = ":opensource"
_COMMAND = CallFormat(
    "<|START_ACTION|>",
    close="<|END_ACTION|>",
    separators=",",
    is_array=True,
    body=JsonCall("parameters", "tool_name", number="tool_call_id"),
)
_COMMAND_R = CallFormat(
    "Action: ```json",
    close="```",
    separators=",",
    is_array=True,
    body=JsonCall("parameters", "tool_name", answers=("directly-answer", "directly_answer")),
    others=(("Action:\n```json", "```"), ("Action:```json", "```")),
)
_STEP3 = CallFormat(
    "<｜tool_call_begin｜>",
    close="<｜tool_call_end｜>",
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    body=XmlCall(
        "<steptml:parameter name=",
        "</steptml:parameter>",
        "</steptml:invoke>",
        "<｜tool_call_end｜>",
        is_quoted=True,
        before="function<｜tool_sep｜><steptml:invoke name=",
    ),
)
_KIMI = CallFormat(
    "<|tool_call_begin|>",
    close="<|tool_call_end|>",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    body=HeadedCall("<|tool_call_argument_begin|>", before="functions.", is_numbered=True),
)
_KIMI_3 = CallFormat(
    "<|open|>call tool=",
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    body=XmlCall(
        "<|open|>argument key=",
        "<|close|>argument<|sep|>",
        "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
        is_quoted=True,
        types="type",
        tag_end="<|sep|>",
        whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
        is_escaped=True,
    ),
)


def plamo_marks(name: str) -> tuple[str, str]:
    return f"<|plamo:begin_{name}:plamo|>", f"<|plamo:end_{name}:plamo|>"


_PLAMO = CallFormat(
    plamo_marks("tool_request")[0],
    close=plamo_marks("tool_request")[1],
    section=plamo_marks("tool_requests"),
    body=HeadedCall(
        f"{plamo_marks('tool_name')[1]}{plamo_marks('tool_arguments')[0]}"
        "<|plamo:constrain|>json<|plamo:msg|>",
        before=plamo_marks("tool_name")[0],
        tail=plamo_marks("tool_arguments")[1],
    ),
)
_XLAM = CallFormat(
    "[TOOL_CALLS]",
    True,
    separators=",",
    is_array=True,
    others=(("<tool_call>", "</tool_call>"), ("```json", "```")),
)
_HARMONY = CallFormat(
    "<|channel|>",
    close="<|call|>",
    body=HeadedCall("<|constrain|>json<|message|>", before="commentary to=functions."),
    is_harmony=True,
)

CALL_FORMATS: dict[str, CallFormat] = {
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": _MISTRAL,
    "pythonic": _PYTHON,
    "llama4_pythonic": _PYTHON,
    "openai": _HARMONY,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "step3p5": _STEP_XML,
    "step5": _STEP_XML,
    "mimo": _xml(trims=False),
    "seed_oss": _xml("seed:"),
    "deepseek_v3": _deepseek(
        HeadedCall("\n```json\n", before="function<｜tool▁sep｜>", tail="\n```")
    ),
    "deepseek_v31": _deepseek(HeadedCall("<｜tool▁sep｜>")),
    "deepseek_v32": _invoke("｜DSML｜function_calls", "｜DSML｜", "string"),
    "deepseek_v4": _invoke("｜DSML｜tool_calls", "｜DSML｜", "string"),
    "minimax_m2": _invoke("minimax:tool_call", ""),
    "cohere_command3": _COMMAND,
    "cohere_command4": _COMMAND,
    "command_r": _COMMAND_R,
    "granite": _GRANITE,
    "granite4": _HERMES,
    "granite-20b-fc": CallFormat("<function_call>"),
    "phi4_mini_json": CallFormat("functools", separators=",", is_array=True),
    "olmo3": CallFormat(
        "<function_calls>", close="</function_calls>", body=PythonCalls(is_list=False)
    ),
    "gemma4": CallFormat("<|tool_call>", close="<tool_call|>", body=BracedCall('<|"|>')),
    "functiongemma": CallFormat(
        "<start_function_call>", close="<end_function_call>", body=BracedCall("<escape>")
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "ling3": _GLM,
    "kimi_k2": _KIMI,
    "kimi_k3": _KIMI_3,
    "plamo3": _PLAMO,
    "dots": _invoke("dots_function_call", "", trims=True),
    "hy_v3": _hunyuan("<tool_sep>"),
    "hy_v4": _hunyuan(suffix=HY_SUFFIX),
    "hunyuan_a13b": _ARRAY_IN_TAGS,
    "jamba": _ARRAY_IN_TAGS,
    "internlm": CallFormat(
        "<|plugin|>",
        close="<|action_end|>",
        section=("<|action_start|>", ""),
        body=JsonCall("parameters"),
    ),
    "ernie45": _HERMES,
    "step3": _STEP3,
    "lfm2": CallFormat("<|tool_call_start|>", close="<|tool_call_end|>", body=PythonCalls()),
    "xlam": _XLAM,
    "apertus": CallFormat(
        "<|tools_prefix|>",
        close="<|tools_suffix|>",
        separators=",",
        is_array=True,
        body=JsonCall(is_keyed=True),
    ),
    "gigachat3": CallFormat(
        "function call<|role_sep|>",
        section=("<|message_sep|>", ""),
        others=(("<|function_call|>", ""),),
    ),
    "longcat": CallFormat("<longcat_tool_call>", close="</longcat_tool_call>"),
}
# Format of forced calls if the model's format is unknown, or no grammar can enforce it.
DEFAULT_FORMAT = "hermes"
