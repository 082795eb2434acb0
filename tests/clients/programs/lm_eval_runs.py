"""Run lm_eval's command several times in one process; each argument has one run's options."""

from __future__ import annotations

import json
import sys
from typing import Any

from lm_eval import tasks
from lm_eval.__main__ import cli_evaluate


class OwnTasks(tasks.TaskManager):
    """Tasks of the folder that a run names; an index of lm_eval's 14,000 files takes seconds."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings | {"include_defaults": False})


tasks.TaskManager = OwnTasks
RUNS = sys.argv[1:]
for words in RUNS:
    sys.argv = ["lm_eval", *json.loads(words)]
    cli_evaluate()
