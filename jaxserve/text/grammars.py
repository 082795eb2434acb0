"""Grammars: structured output formats, compiled to masks over the vocabulary.

llguidance does the parsing: its lexer and Earley parser find the allowed next tokens in tens of
microseconds for a vocabulary of 128k (github.com/guidance-ai/llguidance). It is imported only when
a request has a format.
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
# Limit on the CPU time spent on cached formats. The memory of a format grows with the work on it,
# when it is compiled and whenever a text reaches a new state: usually by 50 to 150 MB per second,
# at most by 450 (measured by scripts/bench/structured.py), up to 24 MB for one format.
MAX_CACHED_SECONDS = 0.5
# White space between JSON tokens. Without a bound, small models generate it endlessly.
_SPACE = r"[ \n]{0,16}"

# Beginning of a rule in GBNF. Lark uses a colon instead.
_GBNF = re.compile(r"^[ \t]*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)
# Name of a token in Lark, outside strings, comments and regular expressions.
_LARK_NAMES = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<name><[^<>\s\[]+>)')
# Translating GBNF takes quadratic time: 0.4 s for this length.
_MAX_GBNF_CHARS = 8192

# Tokens matching this slice are allowed together where any such text is allowed. For words in a
# regex this saves two thirds of the mask time, in addition to the library's slices for JSON.
_WORDS = r"[a-zA-Z0-9]{1,30}"


# Limit on CPU time for the masks of a request, in the engine's thread. Ordinary schemas take 0.05
# ms per token, sometimes 2 ms. Very ambiguous formats take 20 to 140 ms.
_SECONDS = 0.25
_SECONDS_A_TOKEN = 0.005

Clock = Callable[[], float]


class GrammarError(RuntimeError):
    """Error: a sequence cannot continue in the structured output format of its request."""

    def as_refusal(self) -> InvalidRequest:
        """Return this error as an `InvalidRequest` that names the field of the output format."""
        return InvalidRequest(f"{NAME}: {self}", NAME)


@dataclass
class _Work:
    """CPU time in seconds that all requests with one structured output format have spent on it."""

    seconds: float = 0.0


class _Account:
    """CPU time spent on the token masks of one request, shared by its completions.

    Args:
        clock: function that returns the CPU time of the calling thread in seconds.
        work: CPU time of all requests with the same output format, which is increased, too.
    """

    def __init__(self, clock: Clock, work: _Work) -> None:
        self.clock = clock
        self.work = work
        self._seconds = 0.0
        self._num_tokens = 0

    def charge(self, seconds: float) -> None:
        """Add the CPU time, in seconds, spent on one more token of the request.

        Raises:
            GrammarError: the tokens of the request took too much time in total.
        """
        self._seconds += seconds
        self.work.seconds += seconds
        self._num_tokens += 1
        if self._seconds > _SECONDS + _SECONDS_A_TOKEN * self._num_tokens:
            raise GrammarError("it takes too long to follow; a less ambiguous form would not")


class Constraint:
    """Constraint of one sequence to a structured output format. Its state follows the sequence's
    tokens.

    Args:
        matcher: llguidance matcher in its initial state, used by this constraint only.
        vocab_size: number of the model's logits.
        clock: function that returns the CPU time of the calling thread in seconds.

    Attributes:
        is_guided: True: the tokens allowed after the next token depend on that token.
        words: u32[W]. Bit i % 32 of word i // 32 is set if token i is allowed next, including
            tokens that end the sequence once the text is complete. The array is never modified.

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
        """Update the constraint with the next token of the sequence.

        Returns:
            True if the text is complete, so that only a token that ends the sequence may follow.

        Raises:
            GrammarError: the output format does not allow the token, or is too complex to continue.
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
        """Return a constraint in the same state, for another completion of the same request.

        Both constraints share the account of the request's CPU time.
        """
        copied = Constraint.__new__(Constraint)
        copied._matcher, copied._size = self._matcher.deep_copy(), self._size
        copied._account = self._account
        copied.words = self.words
        return copied

    def begin(self) -> Constraint:
        """Return a constraint in the same state for a new request, with a new account of CPU
        time.
        """
        copied = self.copy()
        copied._account = _Account(self._account.clock, self.work)
        return copied

    @property
    def work(self) -> _Work:
        """CPU time spent on the structured output format by all of its requests together."""
        return self._account.work


class Grammars:
    """Compiler of structured output formats for one tokenizer, with a cache. It is thread-safe.

    Args:
        tokenizer: function that returns the text of a tokenizer.json, called when first needed.
        vocab_size: number of the model's logits.
        ends: ids of the tokens that end a sequence.
        clock: function that returns the CPU time of the calling thread in seconds.
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
        self._named: dict[str, int] = {}  # ids of added tokens, set together with `_made`
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], Constraint | str] = OrderedDict()
        self._bytes = 0

    def tokenizer(self) -> Any:
        """Return llguidance's tokenizer for the vocabulary, which the first call builds (up to a
        second).
        """
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
        """Return a new constraint to a structured output format, in its initial state.

        Compiling a new format takes milliseconds, so callers do it on their own thread. Results and
        errors are cached.

        Raises:
            InvalidRequest: the format is invalid, or no text in this vocabulary satisfies it.
        """
        closes = params.disable_additional_properties
        key = (params.form, params.text, closes, params.lenient, *_space(params).items())
        with self._lock:
            compiled = self._known.get(key)
            if compiled is not None:
                self._known.move_to_end(key)
        if compiled is None:
            compiled = self._compiled(params)
        self._remember(key, compiled)
        if isinstance(compiled, str):
            raise InvalidRequest(f"{NAME}.{params.form}: {compiled}", NAME)
        return compiled.begin()

    def _compiled(self, params: StructuredOutputsParams) -> Constraint | str:
        """Compile a structured output format. Return its initial constraint, or the error
        message.
        """
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

    def _remember(self, key: tuple[Any, ...], compiled: Constraint | str) -> None:
        with self._lock:
            if key not in self._known:
                self._known[key] = compiled
                self._bytes += len(key[1])
            while self._known and self._is_full():
                key, _ = self._known.popitem(last=False)
                self._bytes -= len(key[1])

    def _is_full(self) -> bool:
        # Even a single format may exceed the limits.
        constraints = (form for form in self._known.values() if isinstance(form, Constraint))
        return (
            len(self._known) > MAX_CACHED
            or self._bytes > MAX_CACHED_BYTES
            or sum(form.work.seconds for form in constraints) > MAX_CACHED_SECONDS
        )


def grammars_of(
    tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> Grammars | None:
    """Return the compiler of structured output formats for a model.

    The result is None without a tokenizer or without tokens that end a sequence.

    Args:
        vocab_size: number of the model's logits.
        eos_token_ids: ids of the tokens that end a sequence.
    """
    if tokenizer is None or not eos_token_ids:
        return None
    return Grammars(tokenizer.backend.to_str, vocab_size, eos_token_ids)


def schema_problem(schema: dict[str, Any], lenient: bool) -> str | None:
    """Return the error message of compiling a JSON schema with llguidance, or None if it compiles.

    Args:
        lenient: True to ignore keywords that llguidance does not support.
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
    """Return the error message of compiling a Lark grammar with llguidance, or None if it
    compiles.
    """
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(text))
    return first_line(error) if error else None


def _space(params: StructuredOutputsParams) -> JsonCompileOptions:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    pattern = params.whitespace_pattern
    return {"whitespace_pattern": _SPACE if pattern is None else pattern}


def _with_ids(grammar: str, named: Mapping[str, int]) -> str:

    def spell(match: re.Match[str]) -> str:
        number = named.get(match["name"] or "")
        return match[0] if number is None else f"<[{number}]>"

    return _LARK_NAMES.sub(spell, grammar)


def grammar_source(
    params: StructuredOutputsParams, named: Mapping[str, int], is_special: Callable[[int], bool]
) -> str:
    """Return a structured output format as the source of a grammar for llguidance.

    Args:
        named: ids of the tokenizer's added tokens by text.
        is_special: function that returns whether a token id is that of a special token.

    Raises:
        ValueError: the format is invalid.
    """
    from llguidance import LLMatcher, grammar_from

    if params.form in ("json", "json_object"):
        schema, options = {"type": "object"}, _space(params)
        if params.form == "json":
            is_strict = not params.lenient
            schema = enforceable(json.loads(params.text), is_strict, "an answer", schema_problem)
            options["lenient"] = not is_strict
        # As text, since the library does not accept objects with large integers.
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
    """Return the Lark grammar of a structured output format that is a structural tag.

    Args:
        special: ids of the tokenizer's special tokens by text.

    Raises:
        ValueError: the tag is invalid or not supported.
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
