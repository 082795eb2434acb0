"""A real Chromium for the page's tests: found on this machine, or installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Playwright, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = """\
the page's tests drive a real Chromium; there is none here, and it could not be installed:
{faults}
Install one by hand: `apt-get install chromium`, or `.venv/bin/playwright install chromium`."""


def find(own: str) -> str | None:
    """Return the path of the system's Chromium, or `own`, where Playwright keeps its download."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or (own if Path(own).exists() else None)


def ways_to_install() -> list[list[Sequence[str]]]:
    """Return commands that install a Chromium, the most reliable first."""
    is_root = os.geteuid() == 0
    ours = [sys.executable, "-m", "playwright", "install", "chromium"]
    ways: list[list[Sequence[str]]] = []
    if is_root and shutil.which("apt-get"):
        install = ["apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium"]
        ways.append([["apt-get", "-qq", "update"], install])
    ways.append([[*ours, "--with-deps"] if is_root else ours])
    return ways


def install(own: str, ways: list[list[Sequence[str]]]) -> str:
    """Try the ways in turn, and fail the test, never skip it, if all of them fail."""
    faults = []
    for commands in ways:
        for command in commands:
            result = subprocess.run(
                command,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            if result.returncode:
                faults.append(f"  {' '.join(command)}: {result.stdout.strip()[-300:]}")
        path = find(own)
        if path is not None:
            return path
    pytest.fail(MISSING.format(faults="\n".join(faults)), pytrace=False)


def ensure(playwright: Playwright) -> str:
    """Return the path of a Chromium; install one if there is none."""
    own = playwright.chromium.executable_path
    return find(own) or install(own, ways_to_install())


def find_browser() -> str:
    """Return the path of a browser without opening it."""
    with sync_playwright() as playwright:
        return ensure(playwright)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Yield a headless Chromium."""
    # Its sandbox refuses to run as root, and a container's /dev/shm is too small for it.
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        path = ensure(playwright)
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()
