"""Run several programs of this folder in one process, and print the output of each as JSON.

Imports take most of the time of these programs, and the programs import mostly the same modules.
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path

NAMES, *ARGUMENTS = sys.argv[1:]
printed: dict[str, str] = {}
for name in NAMES.split(","):
    path = Path(__file__).with_name(f"{name}_calls.py")
    sys.argv = [str(path), *ARGUMENTS]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except Exception:
            traceback.print_exc()
            traceback.print_exc(file=out)  # its own test says so, and the others go on
    printed[name] = out.getvalue()
print(json.dumps(printed))
