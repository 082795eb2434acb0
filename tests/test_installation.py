"""Commands that install extras: from a checkout or a wheel, never from the package index."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jaxserve.settings.installation import install_command

ROOT = Path(__file__).parent.parent
# The project's name as a requirement of an installer, with or without extras.
BARE = re.compile(
    r"(?:pip3?|uv|pipx|poetry|conda)\s+(?:\w+\s+)*?(?:install|add|download)\b[^`\n]*?"
    r"[ '\"]jaxserve(?:\[[\w,{}]+\])?(?:[=<>~!][^\s]*)?(?=['\"`\s;,)]|$)"
)


def bare_names(text: str) -> list[str]:
    return [found for found in BARE.findall(text) if "checkout" not in found]


def test_a_checkout_installs_itself_and_a_wheel_its_file(tmp_path: Path) -> None:
    assert install_command() == "pip install -e ."
    assert install_command("cuda13") == "pip install -e '.[cuda13]'"
    assert install_command(checkout=tmp_path) == "pip install PATH_OF_WHEEL"
    assert install_command("ray", tmp_path) == "pip install 'PATH_OF_WHEEL[ray]'"


def test_no_file_installs_a_package_of_this_name_from_the_index() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [ROOT / name for name in listed.split("\0") if name]
    paths = [path for path in paths if path.is_file() and path != Path(__file__)]
    assert paths
    found = {
        str(path.relative_to(ROOT)): names
        for path in paths
        if (names := bare_names(path.read_bytes().decode(errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "pip install jaxserve",
        "run `pip install 'jaxserve[cuda13]'` and start again",
        "python -m pip install -U jaxserve[ray]",
        'uv pip install "jaxserve>=0.1"',
        "uv add jaxserve",
    ],
)
def test_a_bare_name_is_found(text: str) -> None:
    assert bare_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install -e . # in a checkout of the project",
        "pip install -e '.[events]'",
        "jaxserve convert SRC DST",
        "pip install openai\njaxserve serve",
    ],
)
def test_other_commands_pass(text: str) -> None:
    assert not bare_names(text)
