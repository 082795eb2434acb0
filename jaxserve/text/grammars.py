"""Grammars: forms of answers, compiled to masks over the vocabulary.

The parsing is llguidance's, which finds the tokens that a lexer and an Earley parser allow next in
some tens of microseconds for a vocabulary of 128k (github.com/guidance-ai/llguidance). It is
imported only where a request has a form.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import InvalidRequest
from jaxserve.structured import NAME, StructuredOutputsParams, plain_schema
from jaxserve.text.grammar_vocabulary import vocabulary_for_grammars
from jaxserve.text.json_schemas import enforceable, first_line
from jaxserve.text.structural_tags import structural_tag_grammar
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.tokenizer_calls import LibraryCalls, TokenizerFailure

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 256
MAX_CACHED_BYTES = 4 << 20
# CPU time that was spent on the forms that are kept. The memory that a form takes grows with
# the work on it, while it is compiled and whenever a text comes to a new state: mostly by 50 to
# 150 MB a second, by 450 at most (those of scripts/bench/structured.py), up to 24 MB for one form.
MAX_CACHED_SECONDS = 0.5
# Between the parts of a JSON text; without a bound small models go on with spaces for ever.
_SPACE = r"[ \n]{0,16}"

# How a rule begins in GBNF, which Lark writes with a colon.
_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
# Where a token is named in Lark: outside of texts, comments and regular expressions.
_LARK_NAMES = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s\[]+>)')
# Translation of GBNF takes time by the square of its length: 0.4 s for this.
_MAX_GBNF_CHARS = 8192

# Tokens that are let through together where any such text may stand. For words in a regex that is
# two thirds of the time of a mask, beside the library's own groups for JSON.
_WORDS = r"[a-zA-Z0-9]{1,30}"


# CPU time of the engine's thread that a request's masks may take. Ordinary schemas take 0.05 ms a
# token, and 2 ms for one now and then; forms that can be read in very many ways take 20 to 140.
_SECONDS = 0.25
_SECONDS_A_TOKEN = 0.005

Clock = Callable[[], float]


class GrammarError(RuntimeError):
    """Failure of a sequence to go on in the form of its request."""

    def as_refusal(self) -> InvalidRequest:
        """Return the error as a refusal of the request."""
        return InvalidRequest(f"{NAME}: {self}", NAME)


@dataclass
class _Work:
    """The CPU time that was spent on a form, in all requests."""

    seconds: float = 0.0


class _Account:
    """CPU time that the masks of one request have cost, shared by its completions.

    Args:
        clock: seconds of CPU time.
        work: on the form, to which the cost is added.
    """

    def __init__(self, clock: Clock, work: _Work) -> None:
        self.clock = clock
        self.work = work
        self._seconds = 0.0
        self._num_tokens = 0

    def charge(self, seconds: float) -> None:
        """Charge one more token.

        Raises:
            GrammarError: the tokens have cost too much.
        """
        self._seconds += seconds
        self.work.seconds += seconds
        self._num_tokens += 1
        if self._seconds > _SECONDS + _SECONDS_A_TOKEN * self._num_tokens:
            raise GrammarError("it takes too long to follow; a less ambiguous form would not")


class Constraint:
    """Constraint of one sequence to its form. Its state follows the tokens that it was given.

    Args:
        matcher: of llguidance, at the start, and of no other constraint.
        vocab_size: width of the logits.
        clock: seconds of CPU time of the thread that calls.

    Attributes:
        is_guided: true: what may come after the next token depends on it.
        words: u32[W], bit i % 32 of word i // 32 is set where token i may come next; ends of the
            sequence are among them where the text is complete. Never written to again.

    Raises:
        GrammarError: the grammar is too complex to begin.
    """

    is_guided = True

    def __init__(self, matcher: Any, vocab_size: int, clock: Clock = time.thread_time) -> None:
        self._matcher = matcher
        self._account = _Account(clock, _Work())
        self._size = -(-vocab_size // 32)
        self.words = self._mask()

    def _mask(self) -> np.ndarray:
        import llguidance.numpy

        mask = np.zeros((1, self._size), np.int32)
        llguidance.numpy.fill_next_token_bitmask(self._matcher, mask, 0)
        if self._matcher.is_error():
            raise GrammarError(first_line(self._matcher.get_error()))
        return mask[0].view(np.uint32)

    def advance(self, token: int) -> bool:
        """Take a token that the sequence got.

        Returns:
            Whether the text is complete, and nothing can follow but the end.

        Raises:
            GrammarError: the form did not allow it, or is too complex to go on.
        """
        before = self._account.clock()
        is_complete = self._take(token)
        self._account.charge(self._account.clock() - before)
        return is_complete

    def _take(self, token: int) -> bool:
        if not self._matcher.consume_token(token):
            raise GrammarError(first_line(self._matcher.get_error()))
        if self._matcher.is_stopped():
            return True
        self.words = self._mask()
        return False

    def copy(self) -> Constraint:
        """Return a constraint in the same state, for another completion of the same request."""
        copied = Constraint.__new__(Constraint)
        copied._matcher, copied._size = self._matcher.deep_copy(), self._size
        copied._account = self._account
        copied.words = self.words
        return copied

    def begin(self) -> Constraint:
        """Return a constraint in the same state, for another request."""
        copied = self.copy()
        copied._account = _Account(self._account.clock, self.work)
        return copied

    @property
    def work(self) -> _Work:
        """CPU time that was spent on its form, shared with all constraints that began from it."""
        return self._account.work


class Grammars:
    """Compiler of forms for one tokenizer, which caches them. It is safe from any thread.

    Args:
        tokenizer: returns it in the JSON of the tokenizers library; called once it is needed.
        vocab_size: width of the logits.
        ends: token ids that end a sequence.
        clock: seconds of CPU time of the thread that calls.
    """

    def __init__(
        self,
        tokenizer: Callable[[], str],
        vocab_size: int,
        ends: Iterable[int],
        clock: Clock = time.thread_time,
    ) -> None:
        self._source = tokenizer
        self._clock = clock
        self._ends = list(ends)
        self._made: Any = None
        self._named: dict[str, int] = {}  # added tokens, once `_made` is there
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], Constraint | str] = OrderedDict()
        self._bytes = 0

    def tokenizer(self) -> Any:
        """Return the vocabulary as llguidance's trie; for a large one it takes a second to make."""
        import llguidance

        with self._lock:
            if self._made is None:
                kind = llguidance.LLTokenizer
                text, self._named = vocabulary_for_grammars(self._source(), self._vocab_size)
                self._made = kind(
                    text,
                    eos_token=self._ends,
                    slices=[*kind.general_slices(), _WORDS],
                )
            return self._made

    def compile(self, params: StructuredOutputsParams) -> Constraint:
        """Return a constraint of the caller's own, at its start.

        This takes milliseconds where the form is new, so it belongs on the caller's thread. Forms
        that do not compile are remembered too.

        Raises:
            InvalidRequest: the form has no meaning, or no text of this vocabulary satisfies it.
        """
        closes = params.disable_additional_properties
        key = (params.form, params.text, closes, params.lenient, *_space(params).items())
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            found = self._compiled(params)
        self._remember(key, found)
        if isinstance(found, str):
            raise InvalidRequest(f"{NAME}.{params.form}: {found}", NAME)
        return found.begin()

    def _compiled(self, params: StructuredOutputsParams) -> Constraint | str:
        """Return the compiled form, or a text of what is wrong with it."""
        import llguidance

        try:
            with LibraryCalls():
                tokenizer, started = self.tokenizer(), self._clock()
            source = grammar_source(params, self._named, tokenizer.is_special_token)
            matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
            if matcher.is_error():
                return first_line(matcher.get_error())
            constraint = Constraint(matcher, self._vocab_size, self._clock)
        except (ValueError, GrammarError, TokenizerFailure) as error:
            return first_line(str(error))
        constraint.work.seconds += self._clock() - started
        return constraint if constraint.words.any() else "no text satisfies it"

    def _remember(self, key: tuple[Any, ...], found: Constraint | str) -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = found
                self._bytes += len(key[1])
            while self._known and self._is_full():
                key, _ = self._known.popitem(last=False)
                self._bytes -= len(key[1])

    def _is_full(self) -> bool:
        """Return whether a form has to go; even a single one goes, and is compiled anew."""
        kept = (form for form in self._known.values() if isinstance(form, Constraint))
        return (
            len(self._known) > MAX_CACHED
            or self._bytes > MAX_CACHED_BYTES
            or sum(form.work.seconds for form in kept) > MAX_CACHED_SECONDS
        )


def grammars_of(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Grammars | None:
    """Return the compiler for a model; None without a tokenizer, or tokens that end a sequence."""
    if tokenizer is None or not eos_token_ids:
        return None
    return Grammars(tokenizer.backend.to_str, vocab_size, eos_token_ids)


def schema_problem(schema: dict[str, Any], lenient: bool) -> str | None:
    """Return the error of compiling a JSON schema, or None.

    Args:
        schema: JSON values only.
        lenient: whether keywords that are not supported are ignored.
    """
    from llguidance import LLMatcher

    options: Any = {"whitespace_flexible": False, "lenient": lenient}
    try:
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        error = LLMatcher.validate_grammar(source)
    except ValueError as problem:
        error = str(problem) or "it cannot be compiled"
    return first_line(error) if error else None


def lark_problem(text: str) -> str | None:
    """Return the error of a Lark grammar, or None."""
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text))
    return first_line(error) if error else None


def _space(params: StructuredOutputsParams) -> JsonCompileOptions:
    """Return the space allowed between the parts of a JSON text, as options of llguidance."""
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = params.whitespace_pattern
    return {"whitespace_pattern": _SPACE if pattern is None else pattern}


def _with_ids(grammar: str, named: Mapping[str, int]) -> str:
    """Replace names of added tokens, like `<think>`, in a Lark grammar by their ids."""

    def spell(found: re.Match[str]) -> str:
        number = named.get(found["name"] or "")
        return found[0] if number is None else f"<[{number}]>"

    return _LARK_NAMES.sub(spell, grammar)


def grammar_source(
    params: StructuredOutputsParams, named: Mapping[str, int], is_special: Callable[[int], bool]
) -> str:
    """Return the form in llguidance's language.

    Args:
        params: the form.
        named: ids of added tokens by their texts.
        is_special: whether no text spells a token.

    Raises:
        ValueError: the form is not one of that language.
    """
    from llguidance import LLMatcher, grammar_from

    if params.form in ("json", "json_object"):
        schema, options = {"type": "object"}, _space(params)
        if params.form == "json":
            is_strict = not params.lenient
            schema = enforceable(json.loads(params.text), is_strict, "an answer", schema_problem)
            options["lenient"] = not is_strict
        # As text, since the library takes no objects with large integers.
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if params.form == "regex":
        return LLMatcher.grammar_from_regex(params.text)
    if params.form == "choice":
        options = " | ".join(json.dumps(option) for option in json.loads(params.text))
        return LLMatcher.grammar_from_lark(f"start: {options}")
    if params.form == "structural_tag":
        special = {text: number for text, number in named.items() if is_special(number)}
        return LLMatcher.grammar_from_lark(_structural_tag(params, special))
    if _GBNF.search(params.text):
        return grammar_from("gbnf", _small_gbnf(params.text))
    return LLMatcher.grammar_from_lark(_with_ids(params.text, named))


def _small_gbnf(text: str) -> str:
    if len(text) > _MAX_GBNF_CHARS:
        raise ValueError(f"takes at most {_MAX_GBNF_CHARS} characters in GBNF")
    return text


def _structural_tag(params: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """Return a structural tag in Lark.

    Raises:
        ValueError: it has no meaning, or one that is not served.
    """
    from llguidance import grammar_from

    def schema_rule(schema: Any, spaces: int | None) -> str:
        options: Any = _space(params)
        if spaces is not None:
            options = {"whitespace_pattern": f"[ \\n]{{0,{spaces}}}"}
        schema = plain_schema(schema, params.disable_additional_properties)
        if isinstance(schema, dict):
            schema = {**schema, "x-guidance": options}
        return f"%json {json.dumps(schema)}"

    def grammar_rule(text: str) -> str:
        if _GBNF.search(text):
            text = grammar_from("gbnf", _small_gbnf(text))
        return f"%lark {{\n{text}\n}}"

    return structural_tag_grammar(json.loads(params.text), special, schema_rule, grammar_rule)
