"""Names of kernels for CPU say all that their code depends on, so programs can ask for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pallas_kernels.llvm_calls import NAMES, Kernel, registered
from pallas_kernels.llvm_code import host
from pallas_kernels.llvm_decode import PagedDecode
from pallas_kernels.llvm_kernels import kernel_named, prepare
from pallas_kernels.llvm_product import PanelProduct
from pallas_kernels.llvm_ragged import PagedTiles

KERNELS: list[Kernel] = [
    PanelProduct("float32", "bfloat16"),
    PanelProduct("float64", "float64"),
    *([PanelProduct("bfloat16", "bfloat16")] if host().dots else []),
    PagedDecode("float32", "float32", 16, 3, 64, capped=False),
    PagedDecode("float64", "float64", 8, 1, 32, capped=True),
    PagedTiles("float32", "float32", 16, 3, 64, capped=False),
]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_is_found_by_its_name(kernel: Kernel) -> None:
    assert kernel.name.startswith(NAMES)
    assert kernel_named(kernel.name) == kernel
    prepare([kernel.name])
    assert registered(kernel) == kernel.name


@pytest.mark.parametrize(
    "name",
    [
        "jaxserve_product_float32",
        "jaxserve_product_float32_float32_7x1",  # of another CPU
        "jaxserve_product_bfloat16_float32_32x64_dots",  # which no host multiplies
        PanelProduct("float32", "float32", replace(host(), dots=not host().dots)).name,
        "jaxserve_decode_float32_float32_16_3_x",
        "jaxserve_decode_float32_float32_16_3_64_capped_twice",
        "jaxserve_nothing",
        "",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="no kernel is called"):
        kernel_named(name)
