"""Every kernel's machine code for 8.9, 10.0 and 12.0, as in `test_kernels.py`."""

from __future__ import annotations

from tests.machine_code.case import Capability
from tests.machine_code.kernel_checks import OTHER_CAPABILITIES, USUAL, check_kernel, each_kernel


@each_kernel(OTHER_CAPABILITIES, USUAL)
def test_machine_code_does_what_the_specification_says(capability: Capability, family: str) -> None:
    check_kernel(capability, family)
