"""Order of loads in machine code: the loads that are counted, and the faults."""

from __future__ import annotations

from scripts.gpu.launch_order import memory_micros, neighbours, order_faults, read_order

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.CONSTANT R2, desc[UR4][R2.64] ;
        /*0020*/                   ACQBULK ;
        /*0030*/              @!P0 LDG.E R3, desc[UR4][R2.64] ;
        /*0040*/                   LDS R4, [R5] ;
        /*0050*/                   PREEXIT ;
        /*0060*/                   STG.E desc[UR4][R2.64], R3 ;
        /*0070*/                   EXIT ;
"""
THUNKS = """
 000: kKernel [next=001] product grid: [1, 1, 1] threads: [32, 1, 1]
 001: kKernel [prev=000] reader grid: [1, 1, 1] threads: [32, 1, 1]
 002: kCopy [prev=001] copy
 003: kKernel [prev=002] last grid: [1, 1, 1] threads: [32, 1, 1]
"""


def test_accesses_are_counted_before_the_wait_and_after() -> None:
    order = {"waits": 1, "before_wait": 1, "read_only": 1, "launches_early": 1}
    assert read_order(SASS) == order
    assert read_order(SASS.replace("ACQBULK", "NOP"))["before_wait"] == 0


def test_only_what_follows_an_early_launch_is_a_fault() -> None:
    pairs = neighbours(THUNKS)
    assert pairs == {("product", "reader")}
    good = {"waits": 1, "before_wait": 0, "read_only": 0, "launches_early": 0}
    early, bad = {**good, "launches_early": 1}, {**good, "before_wait": 2, "read_only": 2}
    kernels = {"product": early, "reader": good, "last": bad}
    assert order_faults(kernels, pairs) == []
    assert order_faults({**kernels, "product": good, "reader": bad}, pairs) == []
    assert order_faults({**kernels, "reader": bad}, pairs) == [
        "reader, after product: 2 accesses before it waits",
        "reader, after product: 2 read-only loads",
    ]
    waiting = {**kernels, "reader": {**good, "waits": 0}}
    assert order_faults(waiting, pairs) == ["reader, after product: does not wait"]


def test_the_best_of_the_estimates_counts() -> None:
    entry = '{"exec_time_us":9,"memory_access_time_us":%s,"name":"%s"}'
    estimates = [entry % pair for pair in ((550.0, ""), (0.19, "indexing-cost-model"), (0, "sol"))]
    hlo = f'x "reification_cost":[{",".join(estimates)}] y "reification_cost":[{estimates[0]}]'
    assert memory_micros(hlo) == 550.2
