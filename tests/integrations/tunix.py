"""Tests of JaxserveRollout with the real google-tunix, in an environment of their own.

    python -m tests.integrations.tunix

makes `.venv-tunix` by the commands that jaxserve/integrations/README.md gives to users, and runs in
it the tests of `with_tunix/`, one of which is the example of that page. Other arguments go to
pytest. These tests are not part of scripts/test, because the environment takes minutes and 2 GB.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "jaxserve/integrations/README.md"
TESTS = tuple(f"tests/integrations/with_tunix/{name}.py" for name in ("rollout", "learner"))


def commands() -> list[str]:
    """Return the commands of the page that install Tunix and jaxserve."""
    return [line for line in PAGE.read_text().splitlines() if line.startswith("pip install ")]


def example() -> str:
    """Return the program on the page."""
    return PAGE.read_text().split("```python\n")[1].split("```")[0]


def environment(folder: Path) -> Path:
    """Make a virtual environment, unless the same was made before, and return its interpreter."""
    steps, python = [*commands(), "pip install pytest"], folder / "bin/python"
    parts = [sys.version, *steps, (ROOT / "pyproject.toml").read_text()]
    digest, stamp = hashlib.sha256("\0".join(parts).encode()).hexdigest(), folder / ".installed"
    if stamp.is_file() and stamp.read_text() == digest:
        return python
    print(f"installing Tunix beside jaxserve into {folder} (once; a few minutes)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    for step in steps:
        # Isolated, so that no other environment is on the path.
        arguments = [python, "-I", "-m", *shlex.split(step), "-qq", "--no-compile"]
        subprocess.run(arguments, cwd=ROOT, check=True)
    stamp.write_text(digest)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integrations.tunix", description=__doc__)
    parser.add_argument(
        "--environment", type=Path, default=ROOT / ".venv-tunix", help="folder of the environment"
    )
    options, others = parser.parse_known_args()
    python = environment(options.environment.absolute())
    # Neither the plugins nor the settings of the other tests.
    pytest = ["-m", "pytest", "-q", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}"]
    settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [python, *pytest, "-p", "no:cacheprovider", *TESTS, *others],
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
