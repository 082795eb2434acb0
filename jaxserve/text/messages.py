"""Messages for chat templates: their checks, their text, and the form of content of a template.

Templates of models that read images loop over parts, and ignore content that is a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest
from jaxserve.text.template_budget import TemplateTooLong

MAX_ROLE_CHARS = 64
# Names that callers cannot use for their own template inputs: arguments of the rendering call,
RENDERING_ARGUMENTS = frozenset(("messages", "chat_template", "tokenize", "seconds", "self"))
# inputs that every template receives,
COMMON_INPUTS = frozenset(("tools", "documents", "add_generation_prompt", "continue_final_message"))
# and, over HTTP, further arguments of Transformers' apply_chat_template.
RESERVED_INPUTS = (
    RENDERING_ARGUMENTS
    | COMMON_INPUTS
    | frozenset(
        "conversation add_special_tokens padding truncation max_length return_tensors return_dict "
        "tokenizer_kwargs return_assistant_tokens_mask".split()
    )
)
_TEXT = ("text", "input_text", "output_text")
# Names of kinds of content, by a word in the type.
_KINDS = {
    "image": "An image",
    "audio": "An audio recording",
    "video": "A video",
    "document": "A document",
    "file": "A file",
}


class RefusedMessages(InvalidRequest):
    """Error: a chat template refuses to render a conversation."""


class PartedText(str):
    """String made of several texts joined by line breaks. `parts` keeps the separate texts."""

    parts: tuple[str, ...]

    @classmethod
    def of(cls, parts: Iterable[str]) -> str:
        """Join the non-empty texts in `parts` with line breaks, and return a `PartedText`.

        The result is a plain str if there are fewer than two texts.
        """
        texts = tuple(filter(None, parts))
        if len(texts) < 2:
            return "".join(texts)
        text = cls("\n".join(texts))
        text.parts = texts
        return text


def plain_messages(messages: Any) -> Any:
    """Return a conversation in which the content of each message is one string.

    Content that is not text becomes a sentence in brackets. Only the newest user message is refused
    for such content, and only if no tool results follow it: clients send the whole conversation
    with each request, so an older message that is refused would block the conversation permanently.

    A value that is not a list is returned unchanged, and `Tokenizer.render_chat` refuses it.

    Raises:
        InvalidRequest: a message has no valid role, or its content is not valid; see
            `plain_message`.
    """
    if not isinstance(messages, list | tuple):
        return messages
    roles = [m.get("role") if isinstance(m, Mapping) else None for m in messages]
    newest = max((place for place, role in enumerate(roles) if role == "user"), default=-1)
    if "tool" in roles[newest + 1 :]:
        newest = -1
    return [plain_message(message, place == newest) for place, message in enumerate(messages)]


def plain_message(message: Any, is_newest: bool = True) -> dict[str, Any]:
    """Return a copy of a message whose content is one string. The role developer becomes system.

    Content is a string or a list of parts, {"type": "text", "text": ...}, joined by line breaks.

    Args:
        is_newest: True for the newest message. If its role is user, its content must be text only
            and not empty. In other messages, missing content is "" and a part of another type
            becomes a sentence in brackets.

    Raises:
        InvalidRequest: the role is missing or too long, or the content is not valid.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str):
        raise InvalidRequest("each message must be a dict with a role and content", "messages")
    if not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequest(f"a role must have 1 to {MAX_ROLE_CHARS} characters", "messages")
    is_strict = is_newest and role == "user"
    text = _text(message.get("content"), is_strict)
    if not text and is_strict:
        raise InvalidRequest("the content of a user's message is empty", "messages")
    # Templates know only the older name of the role.
    return {**message, "role": "system" if role == "developer" else role, "content": text}


def left_out(kind: Any) -> str:
    """Return the sentence that replaces content of a type, such as image_url, that the model cannot
    read.
    """
    name = str(kind)[:40]
    what = next((said for word, said in _KINDS.items() if word in name), f"Content of type {name}")
    return f"[{what} is left out here: this model reads only text.]"


def _text(content: Any, is_strict: bool) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        kind = type(content).__name__
        raise InvalidRequest(f"content must be text or a list of parts, got {kind}", "messages")
    return PartedText.of(_words(part, is_strict) for part in content)


def _words(part: Any, is_strict: bool) -> str:
    """Return the text of a content part, or the sentence that replaces a part of another type.

    Args:
        part: string, or dict with a type. The text of a refusal is in `refusal` or `text`.
        is_strict: True to refuse parts without text.

    Raises:
        InvalidRequest: the part is no dict, or has no text and `is_strict` is True.
    """
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequest("a part of a content must be a dict with a type", "messages")
    words, kind = None, part.get("type")
    is_text = kind in _TEXT or kind == "refusal"
    if is_text:
        words = part.get("text")
    if kind == "refusal" and part.get("refusal") is not None:
        words = part["refusal"]
    if not is_strict and not isinstance(words, str):
        return "" if is_text else left_out(kind)
    if not isinstance(words, str):
        raise InvalidRequest(
            f"content of type {str(kind)[:40]!r} is not supported: only text is", "messages"
        )
    return words


# Roles whose messages have strings as content, None for all roles.
TextRoles = frozenset[str] | None
_FORCED: dict[str, TextRoles] = {"string": None, "openai": frozenset()}
# Forms in the order in which they are tried. Some templates expect strings for the system message,
# or for all messages except the user's, and lists of parts otherwise.
_FORMS: tuple[TextRoles, ...] = (
    None,
    frozenset(),
    frozenset(("system",)),
    frozenset(("system", "assistant")),
)
_SYSTEM = {"role": "system", "content": "Vexkumsystem"}
_FIRST = {"role": "user", "content": "Vexkumfirst"}
_ANSWER = {"role": "assistant", "content": "Vexkumanswer"}
_SECOND = {"role": "user", "content": "Vexkumsecond"}
# Test conversations. A template may refuse some of them.
_TALKS = (
    (_FIRST,),
    (_SYSTEM, _FIRST),
    (_FIRST, _ANSWER, _SECOND),
    (_SYSTEM, _FIRST, _ANSWER, _SECOND),
)
_MAX_ROLES = 100
# Roles that never replace "user".
_OTHER_ROLES = frozenset(("assistant", "developer", "system", "tool"))


class _Score(NamedTuple):
    """Numbers of test contents that appear in the texts which a chat template renders."""

    plain: int  # contents without quotation marks, which Python and JSON add when they print a list
    shown: int  # contents in any form
    users: int  # user contents in any form
    rendered: int  # conversations that the template accepted


class WordsLost(ValueError):
    """Error: a chat template does not show the content of user messages in any form."""

    def __init__(self) -> None:
        super().__init__(
            "it shows nothing that a user says, be the content text or a list of parts; "
            "chat_template_content_format=string (or openai) takes it as it is"
        )


def find_form(
    render: Callable[[list[Any]], str], content_format: str, roles: Iterable[str]
) -> TextRoles:
    """Return the form of content with which a chat template shows most of the test messages.

    The form is the set of roles whose content is a string, while other roles have a list of parts.
    None stands for strings in all roles.

    Args:
        render: function that renders a list of messages to a text.
        content_format: "string" or "openai" for a fixed form, "auto" to detect the form.
        roles: other roles that the template may use in place of "user".

    Raises:
        WordsLost: the template accepts conversations but does not show user messages in any form.
        TemplateTooLong: the template exceeded its limits.
    """
    if content_format in _FORCED:
        _score(render, _FORCED[content_format], _TALKS[:1])
        return _FORCED[content_format]
    scores: list[_Score] = []
    for form in _FORMS:
        score = _score(render, form, _TALKS)
        if score.plain == sum(map(len, _TALKS)):
            return form
        scores.append(score)
    best = max(scores, key=lambda score: score[:2])
    if best.users or not any(score.rendered for score in scores):
        return _FORMS[scores.index(best)]
    for role in sorted({*roles} - _OTHER_ROLES)[:_MAX_ROLES]:
        if _score(render, None, [[{**_FIRST, "role": role}]]).shown:
            return None
    raise WordsLost


def _score(
    render: Callable[[list[Any]], str], form: TextRoles, talks: Iterable[Listing[Any]]
) -> _Score:
    plain = shown = users = rendered = 0
    for talk in talks:
        try:
            text = render(in_form(talk, form)).lower()
        except TemplateTooLong:
            raise
        except Exception:  # a template may refuse a role or a short conversation
            continue
        rendered += 1
        for message in talk:
            word = message["content"].lower()
            is_shown = word in text
            shown += is_shown
            users += is_shown and message["role"] == "user"
            plain += is_shown and f"'{word}'" not in text and f'"{word}"' not in text
    return _Score(plain, shown, users, rendered)


def in_form(messages: Listing[Mapping[str, Any]], form: TextRoles) -> list[Mapping[str, Any]]:
    """Return messages with their content in the form that a chat template expects.

    Args:
        form: roles whose content remains a string. For other roles, strings become lists of parts.
            None leaves all messages unchanged.
    """
    if form is None:
        return list(messages)
    return [
        message
        if message["role"] in form or not isinstance(message.get("content"), str)
        else {**message, "content": _parts(message["content"])}
        for message in messages
    ]


def _parts(content: str) -> list[dict[str, str]]:
    texts = content.parts if isinstance(content, PartedText) else (content,)
    return [{"type": "text", "text": text} for text in texts if text]


def with_ending(content: Any, ending: str) -> Any:
    """Return the content of a message, a string or a list of parts, with `ending` after its last
    text.
    """
    if isinstance(content, list):
        last = content[-1]["text"] if content else ""
        return [*content[:-1], {"type": "text", "text": f"{last}{ending}"}]
    return f"{content or ''}{ending}"
