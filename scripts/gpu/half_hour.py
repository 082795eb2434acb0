"""First half hour on a GPU: three commands of eight minutes, in order of worth.

    python -m scripts.gpu.half_hour 1 --folder DIR
    python -m scripts.gpu.half_hour 2 --folder DIR --from DIR_OF_1
    python -m scripts.gpu.half_hour 3 --folder DIR --from DIR_OF_2
    python -m scripts.gpu.half_hour 3 --folder DIR --dry-run        tiny, on a CPU

    1   ceilings, each kernel against the reference, with launches that overlap and apart, tokens of
        64 requests against the CPU's, steps of 8B and 0.6B at 1, 32 and 256 rows, with the time of
        each kind of kernel and the host's time of a dispatch
    2   attention at the shapes of the goals, launches of 8 steps, 8B's steps with XLA's flags
        varied, products of few rows, ten items of tuning
    3   an engine of 0.6B: a cold start, 256 requests, a start from files, one from files that were
        compiled as without the card, torch's attention and Transformers' continuous batching on
        the same card, then an engine of 8B

Each command may be on another machine of the same kind: it copies the folder of an earlier
command (its own, if it was killed), does the missing items of its number and of earlier numbers,
and leaves report.json, page.html, log.txt, a trace, the CPU's tokens and XLA's autotuning results.
No item is begun after eight minutes, and an item that runs a minute and a half later is ended.
Each line of the list runs ``scripts.gpu.report`` in a process of its own, so a kernel that hangs or
that takes the device with it ends that process alone. The page is written anew after every item.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from jaxserve.commands.argument_types import positive
from scripts.gpu.page import write_page
from scripts.gpu.progress import TRIES, ReportError, read_report, save
from scripts.gpu.setting import APART, VARIANTS
from scripts.lib.argument_types import new_folder, pattern, script_parser
from scripts.lib.paths import IN_CHECKOUT
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.unpack import unpack

MINUTES = 8.0
GRACE = 90.0
"""Seconds after the last item may begin, at whose end it is ended."""
LAST_WORD = 8.0
"""Seconds that it then has to write what it was at."""
FILES = (
    *("report.json", "earlier_report.json", "log.txt", "autotuned.tar.gz", "trace.json.gz"),
    "cpu_tokens.json",
)
TUNED = "xla_gpu_per_fusion_autotune_cache_dir"
"""Folder within JAX's cache in which XLA keeps what it found while it tuned products."""
ENDED = (0, 4)
"""Statuses of a stage of which no item is left; 4 if one failed."""
GIVEN_UP = 8
"""Processes of a stage in one command, after which it is left: each ended before its items did."""
FREE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
SIZES = "(8b|0.6b|tiny) decode B=(1|2|32|256)$"
GOALS = "^(?!.*(32768|B=8 ))"


@dataclasses.dataclass(frozen=True)
class Stage:
    """Items that one process does.

    Attributes:
        command: number of the command that begins it.
        parts: of ``scripts.gpu.report``.
        only: regular expression of the items.
        variables: of the environment.
    """

    command: int
    parts: str
    only: str = ""
    variant: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    seconds_per_item: float = 10.0

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.parts, self.variant, self.only)))


STAGES = (
    Stage(1, "bandwidth,essentials"),
    Stage(1, "served", "bundled", variables=FREE),
    Stage(1, "essentials", variant=APART),
    Stage(1, "steps", SIZES),
    Stage(1, "profiles", SIZES),
    Stage(1, "served", "bundled", APART, FREE),
    Stage(2, "decode,prefill", GOALS),
    Stage(2, "steps", "launches"),
    *(Stage(2, "variants", variant=name) for name in VARIANTS),
    Stage(2, "products"),
    Stage(2, "tuning", "bfloat16 h128"),
    Stage(3, "served", "(0.6b|tiny) (started|step)", variables=FREE),
    Stage(3, "served", "(0.6b|tiny) from", variables=FREE),
    Stage(3, "peers", "sdpa|batching (0.6b|tiny)", variables=FREE),
    Stage(3, "served", "8b (started|step)", variables=FREE),
    Stage(3, "steps"),
    Stage(3, "profiles"),
    Stage(3, "peers", variables=FREE),
)


def take_over(earlier: pathlib.Path, folder: pathlib.Path) -> None:
    for name in FILES:
        if (earlier / name).is_file():
            shutil.copyfile(earlier / name, folder / name)


class OtherCard(Exception):
    """Error of a report that is of another card, and is kept as it is."""


class Run:
    """Course of one command: its processes, one after the other, and the page.

    Args:
        until: of the monotonic clock. No item begins later.
        cache: JAX's folder of programs, on this machine alone.
    """

    def __init__(
        self, folder: pathlib.Path, dry_run: bool, until: float, cache: pathlib.Path
    ) -> None:
        self.folder, self.dry_run, self.until, self.cache = folder, dry_run, until, cache
        self._written: float | None = None
        kept = folder / "autotuned.tar.gz"
        if kept.is_file():
            with tarfile.open(kept) as archive:
                unpack(archive, cache)

    @property
    def path(self) -> pathlib.Path:
        return self.folder / "report.json"

    def state(self, stage: Stage) -> dict[str, Any]:
        """Return how a stage ended last, or an empty record if it never began."""
        try:
            return read_report(self.path).get("stages", {}).get(stage.name, {})
        except ReportError:
            return {}

    def _note(self, stage: Stage, state: dict[str, Any]) -> None:
        report = read_report(self.path)
        report.setdefault("stages", {})[stage.name] = state
        save(self.path, report)

    def write_page(self) -> None:
        """Write the page, where the report has changed."""
        try:
            changed = self.path.stat().st_mtime
            if changed != self._written:
                write_page(read_report(self.path), self.folder / "page.html")
                self._written = changed
        except (OSError, ReportError):
            return

    def do(self, stage: Stage, tries: int) -> bool:
        """Do the missing items of a stage. Return whether there is time for another stage.

        Args:
            tries: after which an item that does not end is left.

        Raises:
            OtherCard: the report is of another card. It was put aside.
        """
        state = self.state(stage)
        for _ in range(GIVEN_UP):
            if time.monotonic() > self.until:
                return False
            begin = time.monotonic()
            status = self._process(stage, tries)
            if status == 2 and self.path.is_file():
                os.replace(self.path, self.folder / "earlier_report.json")
                raise OtherCard
            state = {
                "status": status,
                "ended": state.get("ended", 0) + (status in ENDED),
                "seconds": state.get("seconds", 0) + round(time.monotonic() - begin),
            }
            if self.path.is_file():
                self._note(stage, state)
            self._keep_tuned()
            self.write_page()
            if status in ENDED:
                break
        return time.monotonic() <= self.until

    def _process(self, stage: Stage, tries: int) -> int:
        """Run a stage's process to its end, or end it. Return its status."""
        minutes = max((self.until - time.monotonic()) / 60, 1e-3)
        command = [sys.executable, "-u", "-m", "scripts.gpu.report", "--resume"]
        command += ["--out", str(self.path), "--parts", stage.parts, "--minutes", f"{minutes:.3f}"]
        command += ["--seconds-per-item", str(stage.seconds_per_item), "--tries", str(tries)]
        command += ["--only", stage.only] if stage.only else []
        command += ["--variant", stage.variant] if stage.variant else []
        command += ["--dry-run"] if self.dry_run else []
        path = self.folder / "log.txt"
        with path.open("ab") as log, path.open("rb") as said:
            said.seek(0, os.SEEK_END)
            log.write(f"== {stage.name}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command,
                env={**os.environ, **IN_CHECKOUT, **self._variables(stage)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # with the processes that it starts, it is a group to end
            )
            try:
                while process.poll() is None and time.monotonic() < self.until + GRACE:
                    self.write_page()
                    _pass_on(said)
                    time.sleep(0.2)
            finally:
                process.terminate()  # then it notes that its item was interrupted, unless it hangs
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LAST_WORD)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                _pass_on(said)
        return process.returncode

    def _variables(self, stage: Stage) -> dict[str, str]:
        found = {"JAX_COMPILATION_CACHE_DIR": str(self.cache), **stage.variables}
        if self.dry_run:
            found |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        elif "XLA_PYTHON_CLIENT_PREALLOCATE" not in found:
            found["XLA_CLIENT_MEM_FRACTION"] = "0.92"
        flags = VARIANTS.get(stage.variant, "")
        if self.dry_run:  # most of a dry run is the compiler's work
            flags = f"{flags} --xla_backend_optimization_level=0".strip()
        return found | ({"XLA_FLAGS": flags} if flags else {})

    def _keep_tuned(self) -> None:
        if not (self.cache / TUNED).is_dir():
            return
        part = self.folder / "autotuned.tar.gz.part"
        with tarfile.open(part, "w:gz") as archive:
            archive.add(self.cache / TUNED, TUNED)
        os.replace(part, self.folder / "autotuned.tar.gz")


def _pass_on(said: BinaryIO) -> None:
    for line in said.read().decode(errors="replace").splitlines():
        print(line[:300], flush=True)


def to_do(run: Run, number: int, stages: str) -> Iterator[tuple[Stage, int]]:
    """Yield unfinished stages in order of worth, then, once, stages with failures.

    With each, how often an item is tried that does not end: a second time at the end only.
    """
    chosen = [s for s in STAGES if s.command <= number and re.search(stages, s.name)]
    failed = []
    for stage in chosen:
        state = run.state(stage)
        if state.get("status") == 4:
            failed.append(stage)
        elif state.get("status") != 0:
            yield stage, 1
            failed += [stage] if run.state(stage).get("status") == 4 else []
    yield from ((s, TRIES) for s in failed if run.state(s)["ended"] < TRIES)


def go_on(run: Run, number: int, stages: str) -> bool:
    """Do stages until time is over. Return whether any are left."""
    while True:
        try:
            return not all(run.do(*given) for given in to_do(run, number, stages))
        except OtherCard:
            print("the report was of another card: it is kept, and a new one begun", flush=True)


def main() -> int:
    began = time.monotonic()
    parser = script_parser("scripts.gpu.half_hour", __doc__)
    parser.add_argument("number", type=int, choices=(1, 2, 3), help="which of the three commands")
    parser.add_argument("--folder", type=new_folder, required=True, help="where results go")
    parser.add_argument(
        "--from", dest="earlier", type=pathlib.Path, help="folder of an earlier command"
    )
    parser.add_argument("--minutes", type=positive, default=MINUTES, help="default %(default)g")
    parser.add_argument("--stages", type=pattern, default="", help="regular expression")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    arguments = parser.parse_args()
    if arguments.earlier and not arguments.earlier.is_dir():
        parser.error(f"--from: {str(arguments.earlier)!r} must be a folder that exists")
    end_at_sigterm()
    folder = arguments.folder.absolute()
    folder.mkdir(exist_ok=True)
    if arguments.earlier:
        take_over(arguments.earlier, folder)
    with tempfile.TemporaryDirectory() as cache:
        until = began + 60 * arguments.minutes
        run = Run(folder, arguments.dry_run, until, pathlib.Path(cache))
        try:
            left = go_on(run, arguments.number, arguments.stages)
        finally:
            run.write_page()
            for part in folder.glob("*.part"):  # of a file that was being written
                part.unlink()
    ended = json.dumps({"left": left, "seconds": round(time.monotonic() - began)})
    print(f"command {arguments.number}: {ended}", flush=True)
    return 3 if left else 0


if __name__ == "__main__":
    run_main(main)
