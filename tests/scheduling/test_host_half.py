"""The host half runs where JAX does not."""

import subprocess
import sys
from pathlib import Path

import jaxserve

PROGRAM = """
import sys
for name in ("jax", "jaxlib", "flax"):
    sys.modules[name] = None
import importlib, pkgutil
import jaxserve.settings.config, jaxserve.errors, jaxserve.request
import jaxserve.scheduling as package
names = [module.name for module in pkgutil.iter_modules(package.__path__)]
assert {"scheduler", "page_pool", "slot_table"} <= set(names), names
for name in names:
    importlib.import_module(f"jaxserve.scheduling.{name}")
print("imported", len(names))
"""


def test_scheduling_imports_no_jax():
    root = Path(jaxserve.__file__).parents[1]
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("imported")
