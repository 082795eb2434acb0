"""XLA's dumps of a program are read, and dumps of another form are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from scripts.machine_code.compiled_program import Array, Branch, Copy, Launch, Loop, Slice
from scripts.machine_code.hlo_text import UnreadableHlo
from scripts.machine_code.xla_reader import read_program, without_comments
from tests.machine_code import sample_dumps

NUMBERS, INDICES, RESULT = Slice(1, 0, 256), Slice(2, 0, 256), Slice(0, 0, 256)
PART, CONSTANT = Slice(3, 0, 64), Slice(4, 0, 16)
SORTED, ORDER = Slice(7, 0, 256), Slice(7, 256, 256)
NUMBER, FLAG, LOOKED_UP = Slice(7, 640, 4), Slice(7, 644, 1), Slice(8, 0, 4)


def write_dumps(folder: Path, **changes: tuple[str, str]) -> Path:
    """Write the sample's dumps, with one text replaced in the named ones."""
    texts = {
        "hlo": ("sm_9.0a_gpu_after_optimizations.txt", sample_dumps.HLO),
        "buffers": ("sm_9.0a_gpu_after_optimizations-buffer-assignment.txt", sample_dumps.BUFFERS),
        "thunks": ("thunk_sequence.txt", sample_dumps.THUNKS),
        "metadata": ("thunk_metadata.txt", sample_dumps.METADATA),
        "ptx": ("1.ptx", sample_dumps.PTX),
    }
    for key, (name, text) in texts.items():
        old, new = changes.get(key, ("", ""))
        assert not old or old in text, old
        (folder / f"module_0001.jit_f.{name}").write_text(text.replace(old, new) if old else text)
    return folder


def test_parameters_results_and_constants(tmp_path: Path) -> None:
    program = read_program(write_dumps(tmp_path))
    assert program.parameters == (Array("f32", (64,), NUMBERS), Array("s32", (64,), INDICES))
    assert program.results == (
        Array("f32", (64,), RESULT),
        Array("f32", (16,), PART),
        Array("f32", (1,), LOOKED_UP),
    )
    assert 6 not in program.allocations and program.allocations[7] == 1024
    constants = dict(program.constants)
    assert constants[Slice(5, 0, 4)] == bytes(4)
    numbers = struct.unpack("4f", constants[CONSTANT])
    np.testing.assert_array_equal(numbers, [1.5, -2500, np.inf, np.nan])
    [module] = program.modules
    assert "Generated" not in module and "nothing" not in module and "\n\n" not in module


def launch(name: str, kernel: str, threads: int, reads: tuple, writes: tuple, **more) -> Launch:
    fields = {"arguments": (*reads, *writes)} | more
    return Launch(name, kernel, (1, 1, 1), (threads, 1, 1), 0, reads, writes, **fields)


def test_commands(tmp_path: Path) -> None:
    first, second, loop, part, lookup = read_program(write_dumps(tmp_path)).commands
    assert first == Copy("copy.1", NUMBERS, RESULT)
    assert second == Copy("copy.2", Slice(5, 0, 4), NUMBER)
    assert part == Copy("wrapped_slice", Slice(0, 32, 64), PART)
    assert lookup == launch(
        *("loop_dynamic_slice_fusion", "lookup", 1, (CONSTANT, NUMBER), (LOOKED_UP,))
    )
    assert isinstance(loop, Loop) and loop.flag == FLAG
    assert loop.condition == (launch("loop_compare_fusion.1", "compare_1", 1, (NUMBER,), (FLAG,)),)
    compare, branch, add = loop.body
    assert compare == launch("loop_compare_fusion", "compare", 1, (NUMBER,), (FLAG,))
    # It writes where it reads, and gets the slice once.
    assert add == launch(
        *("loop_add_fusion.1", "add_1", 1, (NUMBER,), (NUMBER,)), arguments=(NUMBER,)
    )
    assert isinstance(branch, Branch) and branch.index == FLAG and branch.is_truth


def test_a_truth_takes_the_list_that_stands_in_the_computation_for_true(tmp_path: Path) -> None:
    """XLA calls that list "false_branch"."""
    loop = read_program(write_dumps(tmp_path)).commands[2]
    when_true, when_false = loop.body[1].branches
    multiply = launch("loop_multiply_fusion", "multiply", 64, (RESULT,), (RESULT,))
    assert when_false == (Launch(**{**vars(multiply), "arguments": (RESULT,)}),)
    *copies, sort, add = when_true
    # A sort works in place, on copies of its operands.
    assert copies == [Copy("fusion.1", RESULT, SORTED), Copy("fusion.1", INDICES, ORDER)]
    assert sort.reads == (RESULT, INDICES, SORTED, ORDER) and sort.writes == (SORTED, ORDER)
    assert sort.arguments == (RESULT, INDICES, SORTED, ORDER) and not sort.starts_early
    assert (add.kernel, add.grid, add.threads, add.shared_memory) == (
        *("add", (2, 1, 1), (32, 1, 1), 1536),
    )
    assert add.starts_early


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thunks": ("kCopy         [source       | next=003 (2)]", "kFft [source]")}, "kind"),
        ({"thunks": ("[prev=008 (1) | sink        ] add", "[source] add")}, "waits for the one 1"),
        ({"thunks": ("[source       | next=003 (1)]", "[prev=001 (1) | sink]")}, "0 before it"),
        ({"thunks": ("threads: [16, 1, 1]", "threads: [16, 1]")}, "kind"),
        ({"thunks": ("condition:", "condition")}, "another form"),
        ({"metadata": ('"wrapped_slice"', '"nonesuch"')}, "names no instruction"),
        ({"hlo": ("{1.5, -2.5e+3, inf, nan}", "{...}")}, "not printed whole"),
        ({"hlo": ("ENTRY %main", "%main")}, "no ENTRY"),
        ({"hlo": ("kind=kLoop, calls=%fused_slice", "kind=kLoop")}, "no attribute calls"),
        (
            {"hlo": ("true_computation=%when_true, false_", "false_computation=%when_true, true_")},
            "mixed up",
        ),
        (
            {"buffers": ("loop_add_fusion.1 @0> (size=4,offset=640)", "y @0> (size=4,offset=0)")},
            "no buffer",
        ),
        (
            {"buffers": ("loop_add_fusion.1 @0> (size=4,offset=640)",) * 2}
            | {"hlo": ("tuple(%loop_add_fusion.1, %cond", "tuple(%constant.1, %cond")},
            "its body moves",
        ),
        ({"ptx": ("lookup_param_2", "lookup_param_2, .param .u64 more")}, "4 parameters for 3"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(UnreadableHlo, match=message):
        read_program(write_dumps(tmp_path, **changes))


def test_dumps_of_two_programs_are_refused(tmp_path: Path) -> None:
    write_dumps(tmp_path)
    (tmp_path / "module_0002.jit_g.thunk_sequence.txt").write_text("")
    with pytest.raises(UnreadableHlo, match="2 files"):
        read_program(tmp_path)


def test_comments_are_left_out() -> None:
    assert without_comments("a; // b\n\n  // c\n{\n\n}\n") == "a;\n{\n}\n"
