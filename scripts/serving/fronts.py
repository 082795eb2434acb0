"""Routers of other projects in front of two replicas, and a table of the checks that pass.

    python -m scripts.serving.fronts                     every check through every router
    python -m scripts.serving.fronts --kills 20          and replicas ended by SIGKILL under load
    python -m scripts.serving.fronts --fronts smg --programs FOLDER

The routers come from the package index, and `./scripts/clients` installs them into `.venv-clients`.
The replicas serve the bundled model with an API key and prefix caching, the routers route by
prefix. A check is one of `front_checks.py`. A router that answers it otherwise than a replica has
the reason in its cell. Results go to `scripts/results/fronts.json` and, as a table, to `fronts.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from jaxserve.commands.argument_types import integer_from_0
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import RESULTS
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run, plain
from scripts.lib.server_process import Server
from scripts.serving.front_checks import CHECKS, check_drain
from scripts.serving.front_kills import kill_often, replace
from scripts.serving.front_process import KINDS, PROGRAMS, REPLICA, Front

_MOST_CHARACTERS = 160


def make_parser() -> argparse.ArgumentParser:
    parser = script_parser("scripts.serving.fronts", __doc__, allow_abbrev=False)
    parser.add_argument("--fronts", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="folder of their programs")
    parser.add_argument("--kills", type=integer_from_0, default=0, help="of replicas, under load")
    parser.add_argument("--no-save", action="store_true", help="print the table alone")
    return parser


def version(kind: str, programs: Path) -> str:
    code = f"from importlib.metadata import version; print(version({KINDS[kind].package!r}))"
    command = [str(programs / "python"), "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def outcome(check: str, front: Front) -> str:
    """Return "yes", or why a check failed."""
    try:
        CHECKS[check](front)
    except Exception as error:  # whatever a client raises is the finding
        text = " ".join(str(error).split()) or "not so"
        return plain(f"{type(error).__name__}: {text}"[:_MOST_CHARACTERS]).replace("|", "/")
    return "yes"


def run_front(kind: str, replicas: list[Server], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every check through a router, and the kills. Replicas that ended are replaced."""
    result: dict[str, Any] = {"version": version(kind, arguments.programs), "checks": {}}
    with Front(kind, replicas, arguments.programs) as front:
        for check in CHECKS:
            result["checks"][check] = outcome(check, front)
            print(f"{kind}: {check}: {result['checks'][check]}", flush=True)
            if CHECKS[check] is check_drain:
                for replica in replicas:
                    if replica.process.poll() is not None:
                        replace(front, replica)
        if arguments.kills:
            result["kills"] = [kill_often(front, arguments.kills, retries) for retries in (0, 2)]
    return result


def table(fronts: dict[str, Any]) -> str:
    """Return the checks as Markdown, a column for each router."""
    names = " | ".join(f"{kind} {result['version']}" for kind, result in fronts.items())
    lines = [f"| through the router | {names} |", "|---" * (len(fronts) + 1) + "|"]
    for check in CHECKS:
        cells = " | ".join(result["checks"][check] for result in fronts.values())
        lines.append(f"| {check} | {cells} |")
    return "\n".join(lines) + "\n"


def kills_table(fronts: dict[str, Any]) -> str:
    """Return the ends of requests as Markdown, or "" without kills."""
    rows = []
    for kind, result in fronts.items():
        for run in result.get("kills", ()):
            ends = ", ".join(f"{count:,} {name}" for name, count in run["ends"].items())
            slowest = max(run["first_request_s"])
            rows.append(
                f"| {kind} | {run['client_retries']} | {run['kills']} | {ends} | {slowest} |"
            )
    if not rows:
        return ""
    head = "| router | client's retries | kills | ends of requests | idle once ready, at most, s |"
    return "\n" + "\n".join([head, "|---|---|---|---|---|", *rows]) + "\n"


def save(about: dict[str, Any], fronts: dict[str, Any]) -> None:
    path = RESULTS / "fronts.json"
    path.write_text(json.dumps(about | {"fronts": fronts}, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(fronts) + kills_table(fronts))


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    for kind in arguments.fronts:
        program = arguments.programs / KINDS[kind].command[0]
        if not program.exists():
            parser.error(f"--programs: there is no {program}; ./scripts/clients installs it")
    end_at_sigterm()
    about = about_run()
    replicas: list[Server] = []
    fronts: dict[str, Any] = {}
    try:
        for _ in range(2):
            replicas.append(Server(*REPLICA).__enter__())
        for kind in arguments.fronts:
            fronts[kind] = run_front(kind, replicas, arguments)
            if not arguments.no_save:
                save(about, fronts)
    finally:
        for replica in replicas:
            replica.__exit__(None, None, None)
    print(table(fronts) + kills_table(fronts))
    return 0


if __name__ == "__main__":
    run_main(main)
