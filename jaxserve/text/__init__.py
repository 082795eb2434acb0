"""Tokenizers, chat templates and grammars.

The names of the shipped chat templates are here, since the command line lists them without
importing Jinja.
"""

from __future__ import annotations

from pathlib import Path

TEMPLATE_FOLDER = Path(__file__).parent / "templates"
NAMED_TEMPLATES = tuple(sorted(path.stem for path in TEMPLATE_FOLDER.glob("*.jinja")))
HOW_TO_GIVE = f"a file, or a name of {', '.join(NAMED_TEMPLATES)}"
