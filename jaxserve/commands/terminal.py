"""Implementation of `jaxserve chat` and `jaxserve complete`: requests from a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx2
import msgspec

from jaxserve.errors import JaxserveError

CONNECT_SECONDS = 10
# Control characters except tab and line feed. They are replaced, so that no model can control the
# terminal.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


class NoAnswer(JaxserveError):
    """Error of `jaxserve chat` and `complete`: the server is out of reach or a request failed."""


@dataclass
class Answer:
    """A model's answer as far as it has arrived: its text, number of tokens and times.

    `first` and `last` are the seconds from the request to the first and the last part of the text.
    `str()` returns a line with tokens and speed.
    """

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0

    def __str__(self) -> str:
        rate = (self.tokens - 1) / max(1e-9, self.last - self.first)
        speed = f", {rate:.0f} tokens/s after it" if self.tokens > 1 else ""
        return f"[{self.tokens} tokens; the first after {self.first:.2f} s{speed}]"


@dataclass
class Remote:
    """A client of a server with OpenAI's API, which opens its connection as a context manager.

    On entering the context, the client selects the first model of the server if none is named.

    Raises:
        NoAnswer: on entering the context, if the URL is invalid or the server does not list its
            models.
    """

    url: str  # address of the server, with or without `/v1`
    # Name of the model. The default is the first one that the server lists.
    model: str | None = None
    api_key: str | None = None  # key for the server, sent as a bearer token
    options: dict[str, Any] = field(default_factory=dict)
    # Use the sampling settings for chats in the model's card, which servers of jaxserve have.
    draws_as_chat: bool = False

    def __enter__(self) -> Remote:
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        base = self.url.rstrip("/").removesuffix("/v1") + "/v1/"
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        try:
            self._client = httpx2.Client(base_url=base, headers=headers, timeout=timeout)
        except httpx2.InvalidURL as error:
            raise NoAnswer(f"{self.url!r} is no URL: {error}") from error
        if self.model is None:
            try:
                listed = self._get("models", CONNECT_SECONDS)["data"]
                self.model = str(listed[0]["id"])
            except (LookupError, TypeError) as error:
                raise NoAnswer(f"{self.url} does not list its models: give --model-name") from error
        if self.draws_as_chat:
            self.options = self._chat_sampling() | self.options
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def _chat_sampling(self) -> dict[str, Any]:
        try:
            listed = self._get("models", CONNECT_SECONDS)["data"]
            cards = [card for card in listed if card["id"] == self.model]
            return dict(cards[0]["chat_sampling"]) if cards else {}
        except (NoAnswer, LookupError, TypeError, ValueError):
            return {}

    def _get(self, path: str, timeout: float) -> Any:
        try:
            response = self._client.get(path, timeout=timeout)
            if response.status_code != 200:
                raise NoAnswer(_reason(response))
            return msgspec.json.decode(response.content)
        except (httpx2.HTTPError, httpx2.UnsupportedProtocol) as error:
            raise NoAnswer(self._unreachable(error)) from error
        except msgspec.DecodeError as error:
            raise NoAnswer(f"{self.url} does not speak OpenAI's API") from error

    def _unreachable(self, error: Exception) -> str:
        return f"cannot reach {self.url}: {str(error) or type(error).__name__}"

    def stream(self, path: str, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        """Send a request, and yield the parts of the answer's text as they arrive.

        Args:
            path: path of the endpoint below `/v1/`.
            body: fields of the request besides model, options and streaming.
            answer: receives the text, the times and the number of tokens.

        Raises:
            NoAnswer: the request was refused or failed, or its answer ended early.
        """
        fields = self.options | body | {"model": self.model, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        started = time.monotonic()
        try:
            with self._client.stream("POST", path, json=fields) as response:
                if response.status_code != 200:
                    response.read()
                    raise NoAnswer(_reason(response))
                for event in httpx2.EventSource(response):
                    if event.data == "[DONE]":
                        return
                    text = _take(event.data, answer)
                    if text:
                        answer.last = time.monotonic() - started
                        answer.first = answer.first or answer.last
                        answer.text += text
                        yield text
        except (httpx2.HTTPError, httpx2.SSEError) as error:
            raise NoAnswer(self._unreachable(error)) from error
        raise NoAnswer("the answer broke off")


def _take(data: str, answer: Answer) -> str:
    """Return the text in a streamed event of OpenAI's API, or an empty string.

    Args:
        data: JSON of the event.
        answer: receives the number of tokens if the event has a usage.

    Raises:
        NoAnswer: the event is an error, or has another format.
    """
    try:
        event = msgspec.json.decode(data)
        if event.get("error"):
            raise NoAnswer(str(event["error"]["message"]))
        if event.get("usage"):
            answer.tokens = int(event["usage"]["completion_tokens"])
        choices = event.get("choices") or [{}]
        delta = choices[0].get("delta", choices[0])
        return delta.get("content") or delta.get("text") or ""
    except (msgspec.DecodeError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise NoAnswer(f"not an event of OpenAI's API: {data[:80]!r}") from error


def _reason(response: httpx2.Response) -> str:
    try:
        return (
            f"{response.status_code}: {msgspec.json.decode(response.content)['error']['message']}"
        )
    except (msgspec.DecodeError, LookupError, TypeError):
        return f"{response.status_code} {response.reason_phrase} from {response.url}"


class Terminal:
    """The terminal of `jaxserve chat` and `complete`: reads typed lines and prints answers.

    Args:
        show_stats: print tokens and speed after each answer, on standard error.
    """

    def __init__(self, show_stats: bool = False) -> None:
        self._show_stats = show_stats
        self._prompt = ""
        if sys.stdin.isatty():
            self._prompt = "> "
            with suppress(ImportError):  # line editing and history, if Python has them
                __import__("readline")

    def lines(self) -> Iterator[str]:
        """Yield the lines of standard input until its end (Ctrl-D), except empty ones.

        Ctrl-C discards the current line.
        """
        while True:
            try:
                line = input(self._prompt)
            except EOFError:
                if self._prompt:
                    print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D ends)", file=sys.stderr)
                continue
            if line.strip():
                yield line

    def show(self, remote: Remote, path: str, body: dict[str, Any]) -> Answer:
        """Send a request, print the answer's text as it arrives, and return the Answer.

        Ctrl-C cancels the answer, also at the server. On a terminal, control characters are
        replaced.

        Args:
            path, body: see `Remote.stream`.

        Raises:
            NoAnswer: the request was refused or failed.
        """
        answer = Answer()
        parts = remote.stream(path, body, answer)
        is_tty = sys.stdout.isatty()
        try:
            for text in parts:
                sys.stdout.write(text.translate(_CONTROLS) if is_tty else text)
                sys.stdout.flush()
        except KeyboardInterrupt:
            if not self._prompt:
                raise
        finally:
            parts.close()  # type: ignore[attr-defined]
            if answer.text:
                print(flush=True)
        if self._show_stats:
            print(answer, file=sys.stderr)
        return answer


def _say(error: NoAnswer) -> None:
    print(f"jaxserve: error: {error}", file=sys.stderr)


def chat(remote: Remote, terminal: Terminal, system: str | None, quick: str | None) -> int:
    """Run `jaxserve chat`: hold a conversation with a model, or send one message.

    Args:
        system: first message of the conversation, with role system, or None.
        quick: the only message. None reads messages from the terminal.

    Returns:
        The exit status: 1 if the server did not answer and there is no terminal to try again.
    """
    messages = [{"role": "system", "content": system}] if system else []
    try:
        with remote:
            for line in terminal.lines() if quick is None else [quick]:
                conversation = [*messages, {"role": "user", "content": line}]
                try:
                    answer = terminal.show(remote, "chat/completions", {"messages": conversation})
                except NoAnswer as error:
                    if not sys.stdin.isatty() or quick is not None:
                        raise
                    _say(error)
                    continue
                messages = [*conversation, {"role": "assistant", "content": answer.text}]
    except NoAnswer as error:
        _say(error)
        return 1
    return 0


def complete(remote: Remote, terminal: Terminal, quick: str | None) -> int:
    """Run `jaxserve complete`: send each line as a separate prompt, and print its completion.

    `quick` is the only prompt. None reads prompts from the terminal. The exit status is that of
    `chat`.
    """
    try:
        with remote:
            for line in terminal.lines() if quick is None else [quick]:
                try:
                    terminal.show(remote, "completions", {"prompt": line})
                except NoAnswer as error:
                    if not sys.stdin.isatty() or quick is not None:
                        raise
                    _say(error)
    except NoAnswer as error:
        _say(error)
        return 1
    return 0
