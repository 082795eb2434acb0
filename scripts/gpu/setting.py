"""Setting of a report's items: the size of the run, its variant, and measured ceilings."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.settings.machine import gpu_flags

ITEM_SECONDS = 20.0
"""Seconds for a bucket of tuning: the 51 of a sweep are to fit in twenty minutes."""
Item = tuple[str, Callable[[], dict[str, Any]]]
NO_SHARE = MappingProxyType({"note": "no share: the ceilings were not measured"})
PLAIN_JAX = "plain JAX"
APART = "launches apart"
VARIANTS: Mapping[str, str] = MappingProxyType(
    {
        "as served": "",
        APART: "--xla_gpu_enable_pdl=false",
        # XLA's default, which a start on a GPU sets otherwise. Some versions lack it.
        "launched early": " ".join(
            flag.replace("=false", "=true") for flag in gpu_flags() if flag.endswith("=false")
        ),
        "no graphs": "--xla_gpu_enable_command_buffer=",
        # Without +WHILE. Fusions are in graphs anyway.
        "loops by the host": "--xla_gpu_enable_command_buffer=+FUSION",
        "tiles by cost model": (
            "--xla_gpu_autotune_level=0 --xla_gpu_experimental_cost_model_gemm_tiling_default=true"
        ),
        "cuBLAS alone": "--xla_gpu_enable_triton_gemm=false",
        PLAIN_JAX: "",
    }
)
"""XLA's flags of a process in which steps are timed once more, by name."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Size of a run: on the GPU at full size, or tiny and interpreted.

    Attributes:
        variant: of `VARIANTS`, or "".
        folder: for traces. None keeps no traces.
    """

    dry_run: bool
    report: dict[str, Any]
    item_seconds: float = ITEM_SECONDS
    variant: str = ""
    folder: pathlib.Path | None = None

    @property
    def kernel(self) -> str:
        """Implementation to check and to time."""
        return "triton_interpret" if self.dry_run else "triton"

    @property
    def auto(self) -> str:
        """Implementation of whole steps."""
        return "xla" if self.dry_run or self.variant == PLAIN_JAX else "auto"

    def ceiling(self, name: str) -> float | None:
        """Return a ceiling that this report measured: the report is of one device."""
        return self.report["parts"].get("bandwidth", {}).get(name, {}).get("per_second")

    @property
    def ceilings(self) -> tuple[float, float] | None:
        """Bytes and operations a second, where this report measured both."""
        read, matmul = self.ceiling("read"), self.ceiling("matmul bfloat16")
        return None if read is None or matmul is None else (read, matmul)

    def share(self, seconds: float, bytes_moved: float, flops: float) -> dict[str, Any]:
        """Return the share of a ceiling that a call reaches, where both were measured."""
        if self.ceilings is None:
            return dict(NO_SHARE)
        read, matmul = self.ceilings
        floors = {"of read bandwidth": bytes_moved / read, "of matmul rate": flops / matmul}
        bound = max(floors, key=floors.__getitem__)
        return {"share": f"{100 * floors[bound] / seconds:.1f}%", "of": bound}
