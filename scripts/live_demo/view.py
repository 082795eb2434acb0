"""View of the bundled model at work: header, requests, slots, page map and the latest answers.

Every part is a list of lines cut to the terminal's width, so that the whole fits 80 x 24 and fills
larger terminals.
"""

from __future__ import annotations

import time

import numpy as np
from rich.text import Text

from jaxserve.engine.engine import Engine
from scripts.live_demo.requests import TaskAsk
from scripts.live_demo.scene import Scene

PALETTE = (
    "#4e9af1 #f28e2b #59c27a #e8605f #b48aff #edc948 "
    "#3fc1c9 #ff8fb8 #c49a6c #9bd66b #8f9dff #d8a0e0"
).split()
BAND = "bold white on #24476b"
SPARK = "#3fc1c9"
DIM, DARK, RULE = "#8a8a8a", "#444444", "#5f7f9f"
GOOD, BAD, SHARED = "bold #59c27a", "bold #ff5f5f", "bold #ffffff"


def question_of(prompt: str, width: int) -> str:
    """Cut out the end of a prompt, where its question stands, in at most `width` characters."""
    line = " ".join(prompt.split())
    return line if len(line) <= width else "…" + line[len(line) - width + 1 :]


def colour_of(slot: int) -> str:
    return PALETTE[slot % len(PALETTE)]


class Board:
    """Board that draws one engine and its scene as a Text of exactly the terminal's size."""

    def __init__(self, engine: Engine, scene: Scene[TaskAsk], note: str) -> None:
        self.engine = engine
        self.scene = scene
        self.note = note
        self._started = time.perf_counter()

    def render(self, width: int, height: int) -> Text:
        lines = [*self._header(width), self._requests(width), *self._slots(width)]
        lines += self._pages(width, max(4, (height - len(lines)) // 2))
        lines += self._answers(width, height - len(lines))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return Text("\n", no_wrap=True, end="").join(lines[:height])

    def _header(self, width: int) -> list[Text]:
        stats, now = self.engine.stats(), time.perf_counter()
        title = f" jaxserve · {self.engine.loaded.runner.weight_bytes / 1e6:.1f} MB model"
        right = f"{self.note} · {now - self._started:5.1f} s "
        band = Text(title.ljust(max(0, width - len(right))) + right, style=BAND)
        prompt, output = self.scene.rates.per_second(now)
        cached = sum(ask.num_cached for ask in self.scene.asks)
        figures = (
            [("tok/s in", f"{prompt:.0f}"), ("out", f"{output:.0f}")],
            [("running", f"{stats.num_running}/{stats.num_slots}")],
            [("waiting", str(stats.num_waiting))],
            [("cached tokens", f"{cached:,}")],
        )
        counts = (
            [("pages", f"{stats.pages_in_use}/{stats.num_pages}")],
            [("steps", str(stats.num_steps))],
            [("preemptions", str(stats.num_preemptions))],
            [("compiles since ready", str(stats.num_compiles))],
        )
        lines = [_figures(figures), _figures(counts)]
        room = width - max(line.cell_len for line in lines) - 12
        if room >= 20:
            lines[0].pad_right(width - min(room, 60) - 2 - lines[0].cell_len)
            lines[0].append(self.scene.rates.sparkline(now, min(room, 60)), SPARK)
            lines[1].pad_right(width - 2 - 14 - lines[1].cell_len)
            lines[1].append("tokens out / s", DIM)
        return [band, *lines]

    def _requests(self, width: int) -> Text:
        """Draw one mark a request: to come, waiting, running, right or wrong."""
        slot_of = {
            sequence.request.request_id: sequence.slot
            for sequence in self.engine.scheduler.running_sequences()
        }
        line = Text(" ")
        for ask in self.scene.asks:
            slot = slot_of.get(str(ask.number))
            if ask.ended:
                line.append(*(("✓", GOOD) if ask.right else ("✗", BAD)))
            elif slot is not None:
                line.append("■", colour_of(slot))
            else:
                line.append(*(("○", "white") if ask.added else ("·", DARK)))
        return line

    def _slots(self, width: int) -> list[Text]:
        lines = [_rule(" slots: request, task, prompt computed, tokens in and out ", width)]
        by_id = {str(ask.number): ask for ask in self.scene.asks}
        for slot in range(self.engine.slots.num_slots):
            sequence = self.engine.slots.sequences[slot]
            if sequence is None:
                lines.append(Text(" ·", DARK))
            else:
                lines.append(self._slot(slot, by_id[sequence.request.request_id], width))
        return lines

    def _slot(self, slot: int, ask: TaskAsk, width: int) -> Text:
        table, colour = self.engine.slots, colour_of(slot)
        sequence = table.sequences[slot]
        total, cells = len(ask.token_ids), min(24, width // 8)
        cached = max(sequence.num_cached, 0) * cells // total
        computed = min(int(table.num_computed[slot]), total) * cells // total
        line = Text(" ")
        line.append(f"▌#{ask.number:03d} {ask.task.name:<11} ", colour)
        line.append("━" * cached, SHARED)
        line.append("━" * (computed - cached), colour)
        line.append("─" * (cells - computed), DARK)
        line.append(f" {total:4d}", DIM)
        line.append(f" {ask.num_generated:3d}  " if ask.num_generated else "   ·  ", DIM)
        room = width - line.cell_len - 1
        answer = " ".join(ask.text.split())[-max(room - 12, 0) :]
        line.append(question_of(ask.task.prompt, max(room - len(answer) - 1, 8)), DIM)
        line.append(" " + answer, f"bold {colour}")
        return line

    def _pages(self, width: int, height: int) -> list[Text]:
        engine = self.engine
        owner = np.full(engine.pool.num_pages, -1)
        for slot in range(engine.slots.num_slots):
            if engine.slots.sequences[slot] is not None:
                owner[engine.slots.pages(slot)] = slot
        title = _rule(" pages of the KV cache: ■ held  ◆ shared  ▫ cached, free  · free ", width)
        per_row = width - 2
        wide = -(-engine.pool.num_usable // (per_row // 2)) < height
        per_row = per_row // 2 if wide else per_row
        rows = -(-engine.pool.num_usable // per_row)
        per_row = -(-engine.pool.num_usable // rows)
        lines = [title]
        for first in range(1, engine.pool.num_pages, per_row):
            line = Text(" ")
            for page in range(first, min(first + per_row, engine.pool.num_pages)):
                mark, style = self._page(page, int(owner[page]))
                line.append(mark + " " * wide, style)
            lines.append(line)
        return lines

    def _page(self, page: int, owner: int) -> tuple[str, str]:
        pool = self.engine.pool
        if pool.ref_count[page] > 1:
            return "◆", SHARED
        if owner >= 0:
            return "■", colour_of(owner)
        return ("▫", DIM) if pool.is_cached[page] else ("·", DARK)

    def _answers(self, width: int, height: int) -> list[Text]:
        ended = self.scene.ended
        right = sum(ask.right for ask in ended)
        lines = []
        if height > 3:
            lines.append(_rule(f" answers: {right} of {len(ended)} right ", width))
        for ask in reversed(ended[-max(height - len(lines), 0) :]):
            line = Text(" ")
            line.append(*(("✓ ", GOOD) if ask.right else ("✗ ", BAD)))
            line.append(f"#{ask.number:03d} {ask.task.name:<11} ", "white")
            line.append(f"{ask.ended - ask.added:5.1f} s  ", DIM)
            answer = " ".join(ask.text.split())
            room = width - line.cell_len - 1
            answer = answer if len(answer) < room * 2 // 3 else answer[: room * 2 // 3] + "…"
            line.append(question_of(ask.task.prompt, max(room - len(answer) - 1, 8)), DIM)
            line.append(" " + answer, "bold")
            if not ask.right and width > 100:
                line.append(f"  (expected {ask.task.answer})", BAD)
            lines.append(line)
        return lines


def _rule(title: str, width: int) -> Text:
    line = Text("─", RULE)
    line.append(title, RULE)
    line.append("─" * max(0, width - line.cell_len), RULE)
    return line


def _figures(groups: tuple[list[tuple[str, str]], ...]) -> Text:
    line = Text()
    for group in groups:
        line.append("  ")
        for name, value in group:
            line.append(f" {name} ", DIM)
            line.append(value, "bold white")
    return line
