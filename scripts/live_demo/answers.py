"""View of a real model's answers: each is printed as it ends, above the answers in progress."""

from __future__ import annotations

import time

from rich.console import Console
from rich.live import Live
from rich.text import Text

from jaxserve.engine.engine import Engine
from jaxserve.request import FinishReason
from scripts.live_demo.questions import QuestionAsk
from scripts.live_demo.scene import Scene
from scripts.live_demo.view import DIM, RULE, colour_of

MOST_LINES = 3
INDENT = 5
FRAMES_PER_SECOND = 10


def plain(text: str) -> str:
    """Return a text in one line, without control sequences."""
    return "".join(sign for sign in " ".join(text.split()) if sign.isprintable())


def abridge(console: Console, text: str, lines: int, style: str = "") -> list[Text]:
    """Wrap a text to the console's width, and cut it after so many lines."""
    cut = " …"
    wrapped = list(Text(plain(text), style=style).wrap(console, console.width - INDENT - len(cut)))
    for line in wrapped:
        line.rstrip()
    if len(wrapped) > lines:
        wrapped[lines - 1].append(cut)
    return wrapped[:lines]


class AnswerFeed:
    """Running list of answers on a console.

    Args:
        live: region below the answers for answers in progress, or None.
        started: when the program did, on the clock of `time.perf_counter`.
    """

    def __init__(
        self,
        console: Console,
        engine: Engine,
        scene: Scene[QuestionAsk],
        live: Live | None,
        started: float,
    ) -> None:
        self._console = console
        self._engine = engine
        self._scene = scene
        self._live = live
        self._started = started
        self._begun = time.perf_counter()
        self._num_printed = 0
        self._drawn = 0.0

    def draw(self) -> None:
        """Print the answers that have ended since, and draw the others."""
        for ask in self._scene.ended[self._num_printed :]:
            self._print(ask)
        self._num_printed = len(self._scene.ended)
        now = time.perf_counter()
        if self._live is not None and now - self._drawn >= 1 / FRAMES_PER_SECOND:
            self._live.update(self._region(now), refresh=True)
            self._drawn = now

    def _print(self, ask: QuestionAsk) -> None:
        heading = abridge(self._console, ask.question.heading, 2, "bold")
        is_cut = ask.finish_reason is FinishReason.LENGTH
        answer = abridge(self._console, ask.error or ask.text + " …" * is_cut, MOST_LINES)
        block = Text(f"#{ask.number:02d}  ", style=RULE)
        block.append_text(Text(f"\n{' ' * INDENT}").join(heading))
        for line in answer:
            block.append(f"\n{' ' * INDENT}")
            block.append_text(line)
        cached = f" ({ask.num_cached} cached)" if ask.num_cached else ""
        block.append(
            f"\n{' ' * INDENT}{len(ask.token_ids)} tokens in{cached}, {ask.num_generated} out; "
            f"the first after {ask.first - ask.added:.2f} s, all after "
            f"{ask.ended - ask.added:.2f} s",
            DIM,
        )
        self._console.print(block, no_wrap=True, overflow="ignore", crop=False)
        if not self._num_printed and ask is self._scene.ended[0]:
            seconds = ask.ended - self._started
            self._console.print(f"[dim]{' ' * INDENT}First answer {seconds:.1f} s after the start.")

    def _region(self, now: float) -> Text:
        """Draw a line of counts, and a line for each answer that is being written."""
        width, height = self._console.size
        stats, scene = self._engine.stats(), self._scene
        _, output = scene.rates.per_second(now)
        title = (
            f"── {len(scene.ended)} of {len(scene.asks)} answered · {stats.num_running} running · "
            f"{stats.num_waiting} waiting · {output:.0f} tokens/s · {now - self._begun:.0f} s "
        )
        lines = [Text(title.ljust(width, "─"), RULE)]
        slots = self._engine.slots
        running = [
            (slot, scene.running[sequence.request.request_id])
            for slot, sequence in enumerate(slots.sequences)
            if sequence is not None and sequence.request.request_id in scene.running
        ]
        for slot, ask in running[: max(1, height // 2 - 2)]:
            lines.append(self._row(slot, ask, width))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True).join(lines)

    def _row(self, slot: int, ask: QuestionAsk, width: int) -> Text:
        """Draw the question, and the newest words of its answer."""
        line = Text(f"▌#{ask.number:02d} ", colour_of(slot))
        question = Text(plain(ask.question.heading), DIM)
        question.truncate(width * 2 // 5, overflow="ellipsis", pad=True)
        line.append_text(question)
        room = width - line.cell_len - 2
        if ask.drawn:
            words = plain(ask.text)
            line.append(" " + (words if len(words) <= room else "…" + words[1 - room :]))
        else:
            computed = int(self._engine.slots.num_computed[slot])
            line.append(f" reads: {computed} of {len(ask.token_ids)} tokens", DIM)
        return line
