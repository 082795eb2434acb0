"""`jaxserve collect-env`: print facts about the machine for a bug report."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable

from jaxserve.settings.installation import collect_environment

_WIDTH, _INDENT = 100, 13


def add_collect_env(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare the command `jaxserve collect-env` and its options, with argparse's `add_parser`."""
    parser = add_parser(
        "collect-env",
        help="say what a report of a fault needs: versions, device, limits",
        description="Print versions, device, driver, cores, memory, limits of control groups, and "
        "where programs are kept. Opens no card, and prints no secret.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=collect_env)


def collect_env(arguments: argparse.Namespace) -> int:
    """Run `jaxserve collect-env`: print facts about the machine, and return the exit status 0.

    The facts are printed as lines of text, or with `--json` as one JSON object.
    """
    facts = collect_environment()
    if arguments.json:
        print(json.dumps(facts))
        return 0
    for name, text in facts.items():
        lines = textwrap.wrap(text, _WIDTH - _INDENT, break_on_hyphens=False)
        print(f"{name + ':':<{_INDENT}}" + f"\n{' ' * _INDENT}".join(lines))
    return 0
