"""The machine code of kernels for CPU can be kept, and is used as it is by a later process."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from llvmlite import ir

from jaxserve.start.programs.private_files import KernelFiles, PrivateFiles
from jaxserve.start.programs.store import ProgramStore
from pallas_kernels import kernel_code, panel_product, restore_kernels
from pallas_kernels.cpu import ffi
from pallas_kernels.cpu.add_norm import AddNorm
from pallas_kernels.cpu.decode import PagedDecode
from pallas_kernels.cpu.draw import Draw
from pallas_kernels.cpu.ffi import (
    NAMES,
    Kernel,
    code_of,
    host,
    kernels_from,
    machine_code,
    registered,
)
from pallas_kernels.cpu.gated import Gated
from pallas_kernels.cpu.panels import in_panels
from pallas_kernels.cpu.product import PanelProduct
from pallas_kernels.cpu.ragged import PagedTiles
from pallas_kernels.cpu.rope_kv_write import RopeKVWrite
from pallas_kernels.cpu.row_sums import RowSums
from pallas_kernels.row_arguments import ACTIVATIONS, NO_NORM

KERNELS: list[Kernel] = [
    PanelProduct("float32", "bfloat16"),
    PanelProduct("float64", "float64"),
    *([PanelProduct("bfloat16", "bfloat16")] if host().dots else []),
    PanelProduct("float32", "bfloat16", replace(host(), dots=not host().dots)),
    PagedDecode("float32", "float32", 16, 3, 64, capped=False, query_dtype="float32"),
    PagedDecode("float64", "float64", 8, 1, 32, capped=True, query_dtype="float64"),
    PagedTiles("float32", "float32", 16, 3, 64, capped=False, query_dtype="float32"),
    RowSums("float32", "squares"),
    RowSums("bfloat16", "exps"),
    Draw("float32"),
    *(Gated(dtype, act, "bfloat16") for dtype in ("float32", "bfloat16") for act in ACTIVATIONS),
    *(AddNorm("bfloat16", NO_NORM, True, False, True, delta) for delta in ("float32", "bfloat16")),
    *(
        RopeKVWrite(*("float32", NO_NORM, "float32", "float32"), *flags, False, False)
        for flags in itertools.product((False, True), repeat=4)
    ),
]
WHERE = {"cpu": "this one"}
LATER = """
import sys
from pathlib import Path
import numpy as np
from jaxserve.start.programs.store import ProgramStore
from pallas_kernels.cpu import ffi
from tests.kernels.test_cpu_kept import WHERE, lower

def never(*_):
    raise AssertionError("compiled or traced")

ffi.machine_code = never
folder, settings = Path(sys.argv[1]), sys.argv[2]
x, panels, expected = (np.load(folder / f"{name}.npy") for name in "xpy")
trace = never if settings == "the same" else lambda: lower(x, panels)
program = ProgramStore(folder, {"settings": settings}, WHERE).get("product", trace)
assert np.asarray(program(x, panels)).tobytes() == expected.tobytes()
print("ran")
"""


def test_names_tell_kernels_apart() -> None:
    names = {kernel.name for kernel in KERNELS}
    assert len(names) == len(KERNELS)
    assert all(name.startswith(NAMES) for name in names)


def lower(x: np.ndarray, panels: np.ndarray) -> jax.stages.Lowered:
    return jax.jit(lambda x, panels: panel_product(x, panels, "float32")).lower(x, panels)


@pytest.mark.usefixtures("no_jax_cache")
@pytest.mark.parametrize("settings", ["the same", "other"])
def test_a_later_process_compiles_no_kernel(tmp_path: Path, settings: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 70), np.float32)
    panels = in_panels(rng.standard_normal((70, 40), np.float32))
    folder = tmp_path / "programs"
    store = ProgramStore(folder, {"settings": "the same"}, WHERE)
    program = store.get("product", lambda: lower(x, panels))
    y = np.asarray(program(jnp.asarray(x), jnp.asarray(panels)))
    for name, array in zip("xpy", (x, panels, y), strict=True):
        np.save(folder / f"{name}.npy", array)
    for path in (folder / "objects").iterdir():
        if settings == "other":
            path.unlink()
    command = [sys.executable, "-c", LATER, str(folder), settings]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "ran\n", done.stderr


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Return a function that forgets registered kernels, and returns the names of compiled ones.

    XLA takes a name once in a process, so kernels that are registered again are never called.
    """
    compiled: list[str] = []

    def noted(module: ir.Module, *rest: Any) -> bytes:
        compiled.append(module.name)
        return machine_code(module, *rest)

    def forget() -> list[str]:
        codes.clear()
        compiled.clear()
        return compiled

    codes: dict[str, bytes] = {}
    monkeypatch.setattr(ffi, "machine_code", noted)
    monkeypatch.setattr(ffi, "_machine_codes", lambda: codes)
    monkeypatch.setattr(ffi, "_register", codes.__setitem__)
    return forget


def test_kernels_are_taken_from_files_that_are_good(
    fresh: Callable[[], list[str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, name = KERNELS[0], KERNELS[0].name
    files = PrivateFiles(logging.getLogger("jaxserve"))

    def compiled(where: str) -> list[str]:
        found = fresh()
        with kernels_from(KernelFiles(files, tmp_path, {"cpu": where})):
            assert registered(kernel) == name
        return found

    assert compiled("here") == [name]
    [file] = tmp_path.iterdir()
    good = file.read_bytes()
    assert compiled("here") == [] and compiled("elsewhere") == [name]
    assert len([*tmp_path.iterdir()]) == 2 and not caplog.text
    file.write_bytes(good[:-1] + b"?")
    assert compiled("here") == [name] and "is damaged or was changed" in caplog.text
    assert file.read_bytes() == good
    file.chmod(0o666)
    assert compiled("here") == [name] and "somebody else" in caplog.text
    assert compiled("here") == []
    file.unlink()
    with kernels_from(KernelFiles(files, tmp_path, {"cpu": "here"})):
        registered(kernel)  # an engine without files had it compiled
    assert file.read_bytes() == good
    fresh()
    registered(kernel)
    assert code_of(name) in good  # and no further look-up happens


@pytest.mark.usefixtures("no_jax_cache")
def test_a_program_of_another_kernel_by_that_name_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, panels = np.ones((2, 3), np.float32), in_panels(np.ones((3, 5), np.float32))
    ProgramStore(tmp_path / "kept", {}, {}).get("product", lambda: lower(x, panels))
    code = "jaxserve.start.programs.store.kernel_code"
    monkeypatch.setattr(code, lambda name: kernel_code(name) + b"changed")
    later = ProgramStore(tmp_path / "kept", {"its": "other settings"}, {})
    later.get("product", lambda: lower(x, panels))
    assert (later.num_loaded, later.num_built) == (0, 1)


def test_code_of_another_kernel_is_refused() -> None:
    code = kernel_code(registered(KERNELS[0]))
    for name in ("jaxserve_other", "printf", "take"):
        with pytest.raises(ValueError, match=name):
            restore_kernels({name: code})
    restore_kernels({KERNELS[0].name: b"known already, so not looked at"})
