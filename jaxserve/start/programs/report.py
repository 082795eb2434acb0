"""StartReport: facts about a start."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.start.plan.bucket_plan import BucketPlan
from jaxserve.start.programs.store import ProgramStore


@dataclass
class StartReport:
    """Facts about a start, for log lines and benchmarks.

    Attributes:
        store: where the programs come from.
        bucket_plan: the padded sizes, and what they were chosen by where the configuration names
            none.
        stages: seconds that each stage took.
        temporary_bytes: most memory that a launch takes beside weights and cache.
        device: that it was on.
    """

    store: ProgramStore
    bucket_plan: BucketPlan
    stages: dict[str, float]
    temporary_bytes: int = 0
    device: str = ""

    def __str__(self) -> str:
        return f"{self.store}; {self.bucket_plan}; on {self.device}"
