"""Every LLVM kernel by the name of its operation, for programs that are read from files."""

from __future__ import annotations

from collections.abc import Iterable

from pallas_kernels.llvm_calls import NAMES, Kernel, registered
from pallas_kernels.llvm_decode import PagedDecode
from pallas_kernels.llvm_product import PanelProduct
from pallas_kernels.llvm_ragged import PagedTiles

_KINDS: tuple[type[PanelProduct | PagedDecode | PagedTiles], ...] = (
    *(PanelProduct, PagedDecode, PagedTiles),
)


def prepare(names: Iterable[str]) -> None:
    """Make the operations of these names, which a compiled program calls.

    Raises:
        ValueError: a name that no kernel has.
    """
    for name in names:
        registered(kernel_named(name))


def kernel_named(name: str) -> Kernel:
    """The kernel whose operation has this name.

    Raises:
        ValueError: there is none.
    """
    for kind in _KINDS:
        if name.startswith(kind.prefix):
            words = name.removeprefix(kind.prefix).split("_")
            try:
                kernel = kind.of_words(words)
            except (ValueError, TypeError, IndexError):
                break
            if kernel.name == name:
                return kernel
    raise ValueError(f"no kernel is called {name!r}; names begin with {NAMES!r}")
