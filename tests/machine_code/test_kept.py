"""Stored programs of compiled cases, and when they are stale."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from pathlib import Path

import pytest

from scripts.lib.paths import ROOT
from scripts.machine_code.compiled_program import Copy, Program, Slice
from tests.machine_code import freshness
from tests.machine_code.cases import all_cases
from tests.machine_code.freshness import case_digest, kernel_digest, modules_of, plain_tree
from tests.machine_code.kept import Execution, KeptFile, StaleProgram

CASE = next(case for case in all_cases() if case.name == "kv_write-bf16-h64")
CAPABILITY = (9, 0)
EXECUTION = Execution(5, ["add"], ["sub"])
COPY = Copy("copy", Slice(0, 0, 4), Slice(1, 0, 4))


def program(text: str = "PTX") -> Program:
    return Program({0: 4, 1: 4}, (), (), (), (COPY,), (text, "common"))


def test_what_was_put_is_got_again(tmp_path: Path) -> None:
    file = KeptFile.read("kv_write", tmp_path)
    other = dataclasses.replace(CASE, name="other")
    file.put(CASE, CAPABILITY, program(), EXECUTION)
    file.put(other, CAPABILITY, program("more"), EXECUTION)
    file.put(CASE, (8, 0), program(), EXECUTION)
    file.save()
    again = KeptFile.read("kv_write", tmp_path)
    assert again.get(CASE, CAPABILITY) == again.get(CASE, (8, 0)) == program()
    assert again.executions(CAPABILITY) == {CASE.name: EXECUTION, "other": EXECUTION}
    assert len(again.modules) == 3  # shared modules are stored once
    again.drop_others(CAPABILITY, {CASE.name})
    again.save()
    left = KeptFile.read("kv_write", tmp_path)
    assert len(left.modules) == 2
    with pytest.raises(StaleProgram, match=r"other for 9\.0 is not kept"):
        left.get(other, CAPABILITY)


def test_a_stale_program_is_refused_with_the_command(tmp_path: Path) -> None:
    file = KeptFile.read("kv_write", tmp_path)
    file.put(CASE, CAPABILITY, program(), EXECUTION)
    changed = dataclasses.replace(CASE, kv_heads=3)
    command = r"tests\.machine_code\.compile --capability 9\.0 --only '\^kv_write-bf16-h64\$'"
    with pytest.raises(StaleProgram, match=f"other source; make it with .*{command}"):
        file.get(changed, CAPABILITY)


def copy_kernels(folder: Path) -> Path:
    shutil.copytree(ROOT / "pallas_kernels", folder / "pallas_kernels")
    return folder


def edit(folder: Path, file: str, old: str, new: str) -> None:
    path = folder / "pallas_kernels" / file
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "is_stale"),
    [
        ("gpu/triton_kv_write.py", "slot >= 0", "slot > 0", True),
        ("gpu/triton_tile.py", "1 << (n - 1)", "1 << n", True),  # which it imports
        ("fp8_bits.py", "= 0x80, 0x7F", "= 0x80, 0x3F", True),  # as a name of the package
        ("gpu/triton_kv_write.py", "    # A NaN stays NaN, and", "    # It stays, and", False),
        ("gpu/triton_kv_write.py", "Body of the kernel: store", "Body of the kernel: write", False),
        ("gpu/triton_ragged.py", "tokens // tile", "tokens // 2", False),
        ("ops.py", "k: [T,K,H] keys.", "k: [T, K, H] keys.", False),
    ],
)
def test_a_kernel_is_the_modules_that_it_imports(tmp_path, file, old, new, is_stale) -> None:
    folder = copy_kernels(tmp_path)
    before = kernel_digest.__wrapped__(CASE.kernel_module, folder)
    assert before == kernel_digest(CASE.kernel_module)
    edit(folder, file, old, new)
    assert (kernel_digest.__wrapped__(CASE.kernel_module, folder) != before) == is_stale


def test_the_digest_of_a_case_is_that_of_everything_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [case_digest(CASE, CAPABILITY)]
    assert digests == [case_digest(CASE, CAPABILITY)]
    digests.append(case_digest(CASE, (8, 0)))
    digests.append(case_digest(dataclasses.replace(CASE, seed=1), CAPABILITY))
    monkeypatch.setattr(freshness, "TABLES", tmp_path)
    (tmp_path / "9.0").mkdir()
    (tmp_path / "9.0/h200.json").write_text("{}")
    digests.append(case_digest(CASE, CAPABILITY))
    monkeypatch.setattr(freshness, "JAX", "1.0")
    digests.append(case_digest(CASE, CAPABILITY))
    assert len(set(digests)) == len(digests)


def test_modules_are_found_through_imports_of_every_form() -> None:
    names = {path.stem for path in modules_of("pallas_kernels.gpu.triton_quantized_matmul")}
    assert {"triton_grouped_matmul", "triton_quantized_matmul", "fp8_bits", "tuning"} <= names
    assert "ops" not in names and "__init__" not in names


def test_a_tree_says_what_a_source_means() -> None:
    first = 'def f(a):\n    "Say."\n    return f"{a}!" + "b"  # c'
    second = "def f(a):\n\n    return (f'{a}!' + 'b')"
    assert plain_tree(ast.parse(first)) == plain_tree(ast.parse(second))
    assert plain_tree(ast.parse(first)) != plain_tree(ast.parse(first.replace("!", "?")))
