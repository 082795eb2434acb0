"""Detection of the form in which a chat template expects content: a string or a list of parts.

Templates of models that read images loop over parts, and ignore content that is a string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

from jaxserve.text.messages import PartedText
from jaxserve.text.template_budget import TemplateTooLong

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
    """Number of marked contents that appear in the rendered texts."""

    plain: int  # contents without quotation marks, which Python and JSON add when they print a list
    shown: int  # contents in any form
    users: int  # user contents in any form
    rendered: int  # conversations that the template accepted


class WordsLost(ValueError):
    """Refusal of a template that does not show user messages in any form."""

    def __init__(self) -> None:
        super().__init__(
            "it shows nothing that a user says, be the content text or a list of parts; "
            "chat_template_content_format=string (or openai) takes it as it is"
        )


def find_form(
    render: Callable[[list[Any]], str], content_format: str, roles: Iterable[str]
) -> TextRoles:
    """Return the form of content with which a template shows most of the test messages.

    Args:
        render: function that renders a conversation or raises.
        content_format: "string" or "openai" for a fixed form, "auto" to detect it.
        roles: other roles that the template may use in place of "user".

    Raises:
        WordsLost: the template accepts conversations but does not show user messages in any form.
        TemplateTooLong: the template does not end.
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
    """Return messages with their content in the form `form`."""
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
    """Return content with `ending` appended to its last text."""
    if isinstance(content, list):
        last = content[-1]["text"] if content else ""
        return [*content[:-1], {"type": "text", "text": f"{last}{ending}"}]
    return f"{content or ''}{ending}"
