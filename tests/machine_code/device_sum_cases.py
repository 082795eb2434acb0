"""Calls of Hopper's sum over devices, and the file of their machine code."""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Sequence
from typing import Any

import numpy as np

from scripts.gpu.offline_environment import JAX
from scripts.machine_code.over_devices import DeviceLaunch
from scripts.machine_code.ptx import read_module
from tests.machine_code.comparison import Tolerance
from tests.machine_code.freshness import kernel_digest
from tests.machine_code.kept import FOLDER, StaleProgram
from tests.machine_code.norm_cases import AddNormCase

MODULE = "pallas_kernels.gpu.hopper_all_reduce"
FILE = FOLDER / "device_sums.json.xz"
COMMAND = "python -m tests.machine_code.compile_device_sums"


@dataclasses.dataclass(frozen=True)
class DeviceSumCase:
    """Call on every device of a mesh.

    Attributes:
        norm: the addition and norm. Every device has a part of the addend.
        has_residual: whether that is computed, or the sum of the parts alone.
    """

    norm: AddNormCase
    has_residual: bool = True

    @property
    def name(self) -> str:
        return self.norm.name

    @property
    def devices(self) -> int:
        assert self.norm.parts is not None
        return self.norm.parts

    def operands(self) -> dict[str, Any]:
        """Make the arrays by name. "delta" has the parts of all devices."""
        operands = self.norm.operands(self.norm.arguments())
        operands["delta"] = operands["delta"][:, : self.norm.rows]
        return operands if self.has_residual else {"delta": operands["delta"]}

    def given(self, device: int) -> list[np.ndarray]:
        """Return the arrays of a device, in the order in which the kernel takes them."""
        found = {name: array for name, array in self.operands().items() if array is not None}
        return list((found | {"delta": found["delta"][device]}).values())

    def expected(self) -> list[np.ndarray]:
        """Compute the sum in the order of the devices in float32, and its norm in float64."""
        if self.has_residual:
            return self.norm.expected()[: 1 + self.norm.has_norm]
        first, *others = self.operands()["delta"]
        for part in others:
            first = first + part
        return [first]

    @property
    def tolerances(self) -> Sequence[Tolerance]:
        return self.norm.tolerances

    def describe(self) -> dict[str, Any]:
        """Describe the case as JSON holds it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_description(cls, data: dict[str, Any]) -> DeviceSumCase:
        """Build a case from `describe`."""
        return cls(AddNormCase(**data["norm"]), data["has_residual"])

    def digest(self) -> str:
        """Return the digest of everything that the machine code depends on."""
        return f"{kernel_digest(MODULE)} {JAX} {json.dumps(self.describe(), sort_keys=True)}"


def _case(name: str, rows: int, width: int, devices: int, **options: Any) -> DeviceSumCase:
    has_residual = options.pop("has_residual", True)
    norm = AddNormCase(f"sum-over-{devices}-{name}", rows, width, devices, **options)
    return DeviceSumCase(norm, has_residual)


CASES = (
    _case("alone", 2, 256, 2, has_residual=False, has_norm=False, dtype="f32"),
    _case("alone", 2, 128, 8, has_residual=False, has_norm=False, dtype="f32"),
    _case("bf16", 3, 128, 2),
    _case("bf16-offset", 2, 384, 4, offset=1.0, rounds_last=True),
    _case("bf16-rounds", 1, 2304, 8),
    _case("f16-around-factor", 1, 2304, 8, dtype="f16", factor=0.22, has_delta_norm=True),
    _case("f32-after", 2, 256, 4, dtype="f32", has_norm=False, has_delta_norm=True),
    _case("bf16-no-norm", 1, 128, 8, has_norm=False),
)


def kept_launch(case: DeviceSumCase) -> DeviceLaunch:
    """Return the launch that a case compiled to.

    Raises:
        StaleProgram: it is not kept, or the source has changed since.
    """
    entry = _entry(case)
    [kernel] = read_module(entry["ptx"]).values()
    return DeviceLaunch(kernel, case.norm.rows, tuple(entry["arguments"]))


def kept_text(case: DeviceSumCase) -> str:
    """Return the stored PTX of a case, as `kept_launch` does."""
    return _entry(case)["ptx"]


def _entry(case: DeviceSumCase) -> dict[str, Any]:
    kept = json.loads(lzma.decompress(FILE.read_bytes())) if FILE.is_file() else {}
    entry = kept.get(case.name)
    if entry is None or entry["digest"] != case.digest():
        raise StaleProgram(f"{case.name} is not that of the source; make it with {COMMAND}")
    return entry


def keep(entries: dict[str, dict[str, Any]]) -> int:
    """Write the machine code of all cases. Return the size of the file in bytes."""
    text = json.dumps(entries, separators=(",", ":"), sort_keys=True).encode()
    FILE.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    return FILE.stat().st_size
