"""Requests made up from /openapi.json, right and wrong ones, against a server of its own.

    python -m tests.server.fuzz --max-examples 5000

All arguments go to `schemathesis run` (tests/clients/fuzz has its configuration). Needs
`scripts/clients`. The status is schemathesis's: 0 if no answer was a 5xx, of a wrong form
or of an undocumented status. It is also 1 if the server is not healthy afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from jaxserve.commands.argument_types import positive_integer
from scripts.lib.paths import ROOT
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.server_process import Server, ask

SCHEMATHESIS = ROOT / ".venv-clients" / "bin" / "st"
FOLDER = ROOT / "tests" / "clients"
ARGUMENTS = (
    "--max-num-seqs 8 --max-num-batched-tokens 128 --decode-sizes 8 --token-sizes 128 "
    "--check-invariants"
).split()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.server.fuzz",
        description="All other arguments go to `schemathesis run`; its own --help names them.",
    )
    parser.add_argument("-n", "--max-examples", type=positive_integer, help="of each endpoint")
    parser.parse_known_args()
    if not SCHEMATHESIS.exists():
        print("schemathesis is missing: run scripts/clients, once", file=sys.stderr)
        return 2
    end_at_sigterm()
    with tempfile.TemporaryDirectory() as files, Server(*ARGUMENTS, "--files-dir", files) as server:
        command = [SCHEMATHESIS, "--config-file", "fuzz/schemathesis.toml", "run"]
        where = server.url + "/openapi.json"
        status = subprocess.run([*command, where, *sys.argv[1:]], cwd=FOLDER, check=False)
        healthy = ask(server.url + "/health")["status"] == "ok"
        print(f"server healthy afterwards: {healthy}")
    return status.returncode or int(not healthy)


if __name__ == "__main__":
    run_main(main)
