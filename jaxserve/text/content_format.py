"""The form in which a chat template reads content: as text, or as a list of parts.

Templates of models that read images loop over parts, and leave out content that is one text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listing
from typing import Any, NamedTuple

from jaxserve.text.messages import PartedText
from jaxserve.text.template_budget import TemplateTooLong

# Roles whose messages have content as text; None for all.
TextRoles = frozenset[str] | None
_FORCED: dict[str, TextRoles] = {"string": None, "openai": frozenset()}
# The forms that are tried, in the order of preference. Some templates read the system message, or
# all messages but the user's, as text beside parts.
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
# Conversations of which a template may refuse some.
_TALKS = (
    (_FIRST,),
    (_SYSTEM, _FIRST),
    (_FIRST, _ANSWER, _SECOND),
    (_SYSTEM, _FIRST, _ANSWER, _SECOND),
)
_MAX_ROLES = 100
# Roles that no template has in place of the user's.
_OTHER_ROLES = frozenset(("assistant", "developer", "system", "tool"))


class _Score(NamedTuple):
    """Contents that a template shows.

    Attributes:
        plain: without quotation marks, which Python and JSON put around texts in parts.
        shown: in any way.
        users: of users, in any way.
        rendered: conversations that the template took.
    """

    plain: int
    shown: int
    users: int
    rendered: int


class WordsLost(ValueError):
    """Refusal of a template that shows the user's words in no form."""

    def __init__(self) -> None:
        super().__init__(
            "it shows nothing that a user says, be the content text or a list of parts; "
            "chat_template_content_format=string (or openai) takes it as it is"
        )


def find_form(
    render: Callable[[list[Any]], str], content_format: str, roles: Iterable[str]
) -> TextRoles:
    """Return the form in which a template shows the most of marked messages.

    Args:
        render: returns the text of a conversation, or raises.
        content_format: "string" and "openai" are taken, "auto" renders.
        roles: further roles that the template may have in place of the user's.

    Raises:
        WordsLost: the template takes a conversation, and shows no user's message in any form.
        TemplateTooLong: it does not end.
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
        except Exception:  # a template may refuse a role, or so short a conversation
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
    """Return messages with their content in a template's form."""
    if form is None:
        return list(messages)
    return [
        message
        if message["role"] in form or not isinstance(message.get("content"), str)
        else {**message, "content": _parts(message["content"])}
        for message in messages
    ]


def _parts(content: str) -> list[dict[str, str]]:
    """Return content as parts: none for an empty text, which templates take for no content."""
    texts = content.parts if isinstance(content, PartedText) else (content,)
    return [{"type": "text", "text": text} for text in texts if text]


def with_ending(content: Any, ending: str) -> Any:
    """Return content with an ending behind its last text."""
    if isinstance(content, list):
        last = content[-1]["text"] if content else ""
        return [*content[:-1], {"type": "text", "text": f"{last}{ending}"}]
    return f"{content or ''}{ending}"
