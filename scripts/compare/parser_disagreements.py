"""Kinds of disagreements between readers of outputs, each with our judgement."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Answer = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A way in which two answers to one output differ, and what we say to it.

    Attributes:
        title: of its paragraph.
        judgement: a sentence or two.
        fits: whether the answers differ so; given the output, the first answer and the second.
    """

    title: str
    judgement: str
    fits: Callable[[dict[str, Any], Answer, Answer], bool]


def bare(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def names(answer: Answer) -> list[str]:
    """Return the names of an answer's calls."""
    return [call["name"] for call in answer["calls"]]


def is_error(answer: Answer) -> bool:
    """Return whether there is an error in the answer's place."""
    return "error" in answer


def differ(key: str) -> Callable[[dict[str, Any], Answer, Answer], bool]:
    """Make the test whether two answers differ in a text by more than white space."""
    return lambda output, ours, theirs: bare(ours[key]) != bare(theirs[key])


def calls_more(output: dict[str, Any], first: Answer, second: Answer) -> bool:
    """Return whether the second answer has more calls."""
    return len(second["calls"]) > len(first["calls"])


def calls_fewer(output: dict[str, Any], first: Answer, second: Answer) -> bool:
    """Return whether the second answer has fewer calls."""
    return len(second["calls"]) < len(first["calls"])


def calls_otherwise(output: dict[str, Any], first: Answer, second: Answer) -> bool:
    """Return whether the answers have other calls."""
    return first["calls"] != second["calls"]


def has_broken_arguments(answer: Answer) -> bool:
    """Return whether a call's arguments are no object."""
    return any(not isinstance(call["arguments"], dict) for call in answer["calls"])


# The first that fits is the kind of a disagreement, so that each counts once.
WHOLE = (
    Kind(
        "vLLM raises an error",
        "Ours is right: a request must not fail because its answer is broken, or holds two calls.",
        lambda output, ours, theirs: is_error(theirs),
    ),
    Kind(
        "a call inside thoughts",
        "A matter of taste. vLLM ends thoughts at the first mark of a call, so that a model that "
        "forgets to end them still calls. So do we where vLLM does, if the model never ends "
        "them: a call that it only thinks about is not made.",
        lambda output, ours, theirs: (
            differ("reasoning")(output, ours, theirs)
            and len(bare(theirs["reasoning"])) < len(bare(ours["reasoning"]))
            and (calls_more(output, ours, theirs) or "inside" in output["about"])
        ),
    ),
    Kind(
        "an answer without marks of thoughts, taken for thoughts",
        "A matter of taste where the prompt has not begun thoughts. vLLM decides by the parser, we "
        "by the end of the prompt: a template that begins thoughts says so there.",
        lambda output, ours, theirs: (
            differ("reasoning")(output, ours, theirs)
            and not ours["reasoning"]
            and output["start"] != "open"
        ),
    ),
    Kind(
        "a mark left in the thoughts",
        "Ours is right: the first mark is markup whether the prompt or the model has written it.",
        lambda output, ours, theirs: (
            differ("reasoning")(output, ours, theirs)
            and bool(ours["reasoning"])
            and bare(ours["reasoning"]) in bare(theirs["reasoning"])
        ),
    ),
    Kind(
        "words before a mark inside thoughts lost",
        "Ours is right: thoughts that the prompt or the model has begun may name their mark.",
        lambda output, ours, theirs: (
            differ("reasoning")(output, ours, theirs)
            and bare(theirs["reasoning"]) in bare(ours["reasoning"])
            and not theirs["content"]
            and not theirs["calls"]
            and bool(theirs["reasoning"])
        ),
    ),
    Kind(
        "thoughts left in the answer",
        "Ours is right. vLLM's parser looks for both marks in the output, or switches thoughts off "
        "by a field of the request, where the prompt has begun them or a limit has cut them.",
        differ("reasoning"),
    ),
    Kind(
        "a call of a tool that is not there",
        "Ours is right: nothing can answer it. It stays content, so that nothing is lost.",
        lambda output, ours, theirs: bool(set(names(theirs)) - output["names"]),
    ),
    Kind(
        "an object in the middle of an answer",
        "A matter of taste. Where a dialect has no mark, vLLM takes any object with a name for a "
        "call; we take one that begins the answer or stands behind a mark.",
        lambda output, ours, theirs: (
            calls_more(output, ours, theirs) and "inside an answer" in output["about"]
        ),
    ),
    Kind(
        "a call made of a broken or cut text",
        "Ours is right. Arguments were never finished, or are none, or stand inside a string; vLLM "
        "sends what there is of them, or closes them itself, and a client runs a tool with half of "
        "its arguments.",
        calls_more,
    ),
    Kind(
        "a complete call not found",
        "Ours is right. One broken call, or a mark inside a string, makes vLLM give up all; or its "
        "pattern does not fit nested arguments, white space or words beside the call.",
        calls_fewer,
    ),
    Kind(
        "arguments that are no JSON object",
        "Ours is right: clients read arguments as JSON. vLLM sends an empty text where a tool has "
        "no arguments, a JSON text inside a text, or cuts a string at a mark inside it.",
        lambda output, ours, theirs: (
            calls_otherwise(output, ours, theirs) and has_broken_arguments(theirs)
        ),
    ),
    Kind(
        "other values of arguments",
        "Ours is right. The markup or the tool's schema says the type of each value; vLLM leaves "
        "out values that are not quoted, or leaves numbers, lists and objects as texts.",
        calls_otherwise,
    ),
    Kind(
        "words beside calls left out",
        "Ours is right: what the model said beside its calls is part of the answer. vLLM keeps "
        "words before calls at most.",
        lambda output, ours, theirs: (
            differ("content")(output, ours, theirs)
            and bool(ours["calls"])
            and len(theirs["content"]) < len(ours["content"])
        ),
    ),
    Kind(
        "marks and broken calls left out",
        "A matter of taste. Some of vLLM's parsers drop the text of what is no call; we show it, "
        "since a reader can see then why nothing was called.",
        lambda output, ours, theirs: (
            differ("content")(output, ours, theirs)
            and len(theirs["content"]) < len(ours["content"])
        ),
    ),
    Kind(
        "marks left in the answer",
        "Ours is right: marks are markup, also where the text ends before the second one, or "
        "within the header of a message.",
        differ("content"),
    ),
    Kind(
        "white space",
        "A matter of taste. vLLM's parsers keep or drop it, each in its own way; we leave it out "
        "around thoughts and beside calls, and change nothing else.",
        lambda output, ours, theirs: True,
    ),
)
STREAMED = (
    Kind(
        "an error in one way of reading alone",
        "A parser of thoughts that finds its marks by the numbers of one model's tokens fails on "
        "others; a parser that splits the whole text at its mark fails on two calls.",
        lambda output, whole, streamed: is_error(whole) or is_error(streamed),
    ),
    Kind(
        "other thoughts",
        "The stream decides before the end is there, and does not take it back.",
        differ("reasoning"),
    ),
    Kind(
        "calls only in the stream",
        "The stream sends a name before it is certain that a call follows.",
        calls_more,
    ),
    Kind(
        "calls only in the whole",
        "The stream sees a call only where it begins the text, or only with some sizes of its "
        "pieces.",
        calls_fewer,
    ),
    Kind(
        "other arguments",
        "What was sent cannot be taken back: parts come twice, are missing, or are no JSON.",
        calls_otherwise,
    ),
    Kind(
        "other content",
        "Words after calls, broken calls and marks reach only one of the two.",
        differ("content"),
    ),
    Kind("white space", "Harmless.", lambda output, whole, streamed: True),
)


def kind_of(kinds: Iterable[Kind], output: dict[str, Any], first: Answer, second: Answer) -> str:
    """Return the title of the first kind that fits two answers; empty where they are equal."""
    if first == second:
        return ""
    return next(kind.title for kind in kinds if kind.fits(output, first, second))
