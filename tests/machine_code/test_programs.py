"""Programs as XLA compiles them: read from its dumps, kept, and run in every order allowed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from scripts.machine_code.compiled_program import (
    Array,
    Branch,
    Copy,
    Launch,
    Loop,
    Program,
    Slice,
    edges,
    from_json,
    launches,
    to_json,
    uses,
)
from scripts.machine_code.faults import Fault
from scripts.machine_code.xla_programs import Executable, Options, Run, any_order, run_program

# out[i] = in[i] + 1, and flag = in[0] < 5: of four i32.
PTX = """
.version 8.7
.target sm_80
.address_size 64

.visible .entry add_one(.param .u64 in, .param .u64 out)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [in];
    ld.param.u64 %rd2, [out];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd5, %r1, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd7, %rd4, %rd5;
    ld.global.u32 %r2, [%rd6];
    add.s32 %r3, %r2, 1;
    st.global.u32 [%rd7], %r3;
    ret;
}

.visible .entry below_five(.param .u64 in, .param .u64 out)
{
    .reg .pred %p<2>;
    .reg .b16 %rs<2>;
    .reg .b32 %r<2>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [in];
    ld.param.u64 %rd2, [out];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    ld.global.u32 %r1, [%rd3];
    setp.lt.s32 %p1, %r1, 5;
    selp.u16 %rs1, 1, 0, %p1;
    st.global.u8 [%rd4], %rs1;
    ret;
}
"""
INPUT, FLAG, OUTPUT, SPARE = Slice(0, 0, 16), Slice(1, 0, 1), Slice(2, 0, 16), Slice(2, 16, 16)
SIZES = {0: 16, 1: 1, 2: 32}


def add_one(source: Slice, target: Slice, name: str = "add") -> Launch:
    arguments = {"reads": (source,), "writes": (target,), "arguments": (source, target)}
    return Launch(name, "add_one", (1, 1, 1), (4, 1, 1), 0, **arguments)


def below_five(source: Slice) -> Launch:
    arguments = {"reads": (source,), "writes": (FLAG,), "arguments": (source, FLAG)}
    return Launch("compare", "below_five", (1, 1, 1), (1, 1, 1), 0, **arguments)


def program(*commands, result: Slice = OUTPUT, constants=()) -> Program:
    return Program(
        allocations=SIZES,
        parameters=(Array("s32", (4,), INPUT),),
        results=(Array("s32", (4,), result),),
        constants=tuple(constants),
        commands=commands,
        modules=(PTX,),
    )


def run(made: Program, *numbers: int, **options) -> list[int]:
    [result] = run_program(Executable.of(made), [np.array(numbers, np.int32)], Options(**options))
    return result.tolist()


def test_launches_and_copies_follow_each_other() -> None:
    made = program(add_one(INPUT, SPARE), Copy("copy", SPARE, OUTPUT))
    assert run(made, 1, 2, 3, 4) == [2, 3, 4, 5]


def test_a_branch_takes_the_list_of_its_truth_or_index() -> None:
    twice = (add_one(INPUT, SPARE), add_one(SPARE, OUTPUT))
    by_truth = Branch("if", FLAG, True, (twice, (Copy("copy", INPUT, OUTPUT),)))
    assert run(program(below_five(INPUT), by_truth), 4, 0, 0, 0) == [6, 2, 2, 2]
    assert run(program(below_five(INPUT), by_truth), 5, 0, 0, 0) == [5, 0, 0, 0]
    first = Slice(0, 0, 4)
    lists = ((Copy("copy", INPUT, OUTPUT),), (add_one(INPUT, OUTPUT),), twice)
    by_index = program(Branch("switch", first, False, lists))
    for index, wanted in ((0, 0), (1, 1), (2, 2), (3, 2), (-1, 2)):
        assert run(by_index, index, 0, 0, 0)[1] == wanted


def test_a_loop_runs_while_its_flag_is_true() -> None:
    body = (add_one(OUTPUT, SPARE), Copy("copy", SPARE, OUTPUT))
    loop = Loop("while", FLAG, (below_five(OUTPUT),), body)
    made = program(Copy("copy", INPUT, OUTPUT), loop)
    assert run(made, 0, 10, 0, 0) == [5, 15, 5, 5]
    assert run(made, 7, 0, 0, 0) == [7, 0, 0, 0]
    assert [launch.name for launch in launches(made.commands)] == ["compare", "add"]


def test_what_was_never_written_is_a_fault() -> None:
    for made in (program(), program(Copy("copy", SPARE, OUTPUT)), program(add_one(SPARE, OUTPUT))):
        with pytest.raises(Fault):
            run(made, 1, 2, 3, 4)
    executable = Executable.of(program(add_one(INPUT, OUTPUT)))
    with pytest.raises(Fault):  # the last number of the argument is not there
        run_program(executable, [[(0, np.zeros(3, np.int32))]])


def test_a_launch_reaches_only_its_own_slices() -> None:
    wrong = Launch("x", "add_one", (1, 1, 1), (4, 1, 1), 0, (SPARE,), (OUTPUT,), (INPUT, OUTPUT))
    with pytest.raises(Fault):
        run(program(wrong), 1, 2, 3, 4)


def test_constants_are_there() -> None:
    data = np.arange(4, dtype=np.int32).tobytes()
    assert run(program(add_one(SPARE, OUTPUT), constants=[(SPARE, data)]), 0, 0, 0, 0) == [
        *(1, 2, 3, 4)
    ]


def test_arguments_of_another_shape_are_refused() -> None:
    executable = Executable.of(program(add_one(INPUT, OUTPUT)))
    with pytest.raises(ValueError, match="shape"):
        Run(executable, [np.zeros(3, np.int32)])
    with pytest.raises(ValueError, match="is float32; expected int32"):
        Run(executable, [np.zeros(4, np.float32)])
    with pytest.raises(ValueError, match="1 parameters"):
        Run(executable, [])


# Two independent chains, then a command that needs both.
PARTS = [Slice(2, 4 * n, 4) for n in range(4)]
CHAINS = (
    Copy("a", Slice(0, 0, 4), PARTS[0]),
    Copy("b", Slice(0, 4, 4), PARTS[1]),
    Copy("a again", PARTS[0], PARTS[2]),
    Copy("b again", PARTS[1], PARTS[3]),
    Copy("over a", Slice(0, 8, 4), PARTS[0]),
    Copy("over all", INPUT, OUTPUT),
)


def test_edges_are_the_conflicts_of_slices() -> None:
    """Reads after writes, writes after reads, and writes after writes."""
    assert edges(CHAINS) == [set(), set(), {0}, {1}, {0, 2}, {0, 1, 2, 3, 4}]
    loop = Loop("while", FLAG, (below_five(PARTS[0]),), (Copy("x", PARTS[0], PARTS[1]),))
    assert uses(loop) == ([FLAG, PARTS[0], PARTS[0]], [FLAG, PARTS[1]])
    assert edges((*CHAINS[:2], loop))[2] == {0, 1}


def test_every_order_that_edges_allow_is_taken() -> None:
    rng, orders = np.random.default_rng(0), set()
    waits_for = edges(CHAINS)
    for _ in range(200):
        order = [CHAINS.index(command) for command in any_order(CHAINS, rng)]
        assert sorted(order) == list(range(len(CHAINS)))
        for place, number in enumerate(order):
            assert waits_for[number] <= set(order[:place])
        orders.add(tuple(order))
    # Interleavings of a, a again, over a with b, b again: 5! / (3! 2!).
    assert len(orders) == 10
    made = program(*CHAINS[:4])
    assert {tuple(run(made, 1, 2, 3, 4, order=rng)) for _ in range(20)} == {(1, 2, 1, 2)}


def test_a_program_is_the_same_after_it_was_kept() -> None:
    loop = Loop("while", FLAG, (below_five(OUTPUT),), (add_one(OUTPUT, OUTPUT),))
    branch = Branch("if", FLAG, True, ((add_one(INPUT, OUTPUT),), ()))
    made = program(branch, loop, Copy("copy", INPUT, SPARE), constants=[(SPARE, b"1234")])
    data = json.loads(json.dumps(to_json(made)))
    assert from_json(data, made.modules) == made
