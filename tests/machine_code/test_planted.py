"""Faults planted in machine code are noticed: some of each kernel. `planted.py` plants all."""

from __future__ import annotations

import json

import pytest

from tests.machine_code.cases import FAMILIES, all_cases
from tests.machine_code.fault_kinds import KINDS
from tests.machine_code.planted import REASONS, Planted, Planting, Result, fault_in

CAPABILITY = (9, 0)
# Kinds of all sorts that nearly always change a result.
KIND_NAMES = (
    "barrier left out",
    "guard negated",
    "comparison reversed",
    "difference for a sum",
    "registers of mma's B swapped",
    "fence of registers left out",
    "wait for an mbarrier left out",
)
# A small case of each kernel.
CASES = (
    "decode-bf16-h96-g1",
    "ragged-bf16-h80",
    "mosaic-bf16-h64-p64",
    "kv_write-fp8-h64",
    "grouped-bf16",
    "quantized-int4-bf16",
    "quantized_grouped-int8-bf16",
    "add_norm-bf16-parts",
    "rope_kv_write-bf16-h64",
    "greatest-12x4097",
    "few_rows-bf16-silu",
    "causal_conv-f32-plain",
    "state_chunks-delta-bf16-uneven",
    "channel_chunks-bf16-bound-uneven",
    "state_steps-delta-bf16",
    "latent-bf16-32",
)


def test_each_kernel_has_faults() -> None:
    assert {case.family for case in all_cases() if case.name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("name", CASES)
def test_faults_are_noticed(name: str) -> None:
    """One of them may be in code on which no result depends."""
    cases = [case for case in all_cases() if case.name == name]
    kinds = [kind for kind in KINDS if kind.name in KIND_NAMES]
    planting = Planting(cases, CAPABILITY, seed=1)
    faults = list(planting.draw(3, kinds))
    survivors = [fault.key for subject, fault in faults if not subject.notice_at_once(fault)]
    assert len(survivors) <= 1, survivors


SAMPLES = {
    "barrier left out": ("bar.sync \t0;", ""),
    "wait for copies weakened": ("cp.async.wait_group 1;", "cp.async.wait_group 2;"),
    "wait for an mbarrier left out": (
        "mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], %r2;",
        "mov.pred %p1, 1;",
    ),
    "guard left out": ("@%p1 st.shared.b32 [%r1], %r2;", "st.shared.b32 [%r1], %r2;"),
    "guard negated": ("@%p1 ld.global.b32 %r1, [%rd1];", "@!%p1 ld.global.b32 %r1, [%rd1];"),
    "address 16 bytes on": ("ld.shared.b32 %r1, [%r2+-8];", "ld.shared.b32 %r1, [%r2+8];"),
    "source of a copy 64 bytes on": (
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;",
        "cp.async.cg.shared.global [ %r1 + 0 ], [%rd1+64], 0x10, %r2;",
    ),
    "size of a copy left out": (
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;",
        "cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;",
    ),
    "words of a store swapped": (
        "st.shared.v2.b32 [%r1], {%r2, %r3};",
        "st.shared.v2.b32 [%r1], {%r3, %r2};",
    ),
    "registers of mma's B swapped": (
        "mma.sync { %r1, %r2 }, { %r3, %r4, %r5, %r6 }, { %r7, %r8 }, { %r1, %r2 };",
        "mma.sync { %r1, %r2 }, { %r3, %r4, %r5, %r6 }, {%r8, %r7}, { %r1, %r2 };",
    ),
    "ldmatrix does not transpose": ("ldmatrix.x4.trans.shared.b16", "ldmatrix.x4.shared.b16"),
    "layout of wgmma's B": (
        "wgmma.mma_async %rd1, 1, 1, 1, 0, 1;",
        "wgmma.mma_async %rd1, 1, 1, 1, 0, 0;",
    ),
    "comparison one off": ("setp.lt.s32 \t%p1, %r1, %r2;", "setp.le.s32 \t%p1, %r1, %r2;"),
    "operands of a choice swapped": (
        "selp.b32 \t%r1, %r2, 7, %p1;",
        "selp.b32 \t%r1, 7, %r2, %p1;",
    ),
    "constant one more": ("shl.b32 \t%r1, %r2, 4;", "shl.b32 \t%r1, %r2, 5;"),
    "distance of a shuffle": (
        "shfl.sync.bfly.b32 \t%r1, %r2, 2, 31, -1;",
        "shfl.sync.bfly.b32 \t%r1, %r2, 4, 31, -1;",
    ),
    "factor left out": ("mul.rn.f32 \t%r1, %r2, %r3;", "mul.rn.f32 \t%r1, %r2, 0f3F800000;"),
    "float constant doubled": ("mov.b32 \t%r1, 0f3F800000;", "mov.b32 \t%r1, 0f40000000;"),
    "halves of a pair swapped": (
        "cvt.rn.bf16x2.f32 \t%r1, %r2, %r3;",
        "cvt.rn.bf16x2.f32 \t%r1, %r3, %r2;",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_kind_of_fault_changes_a_line(name: str) -> None:
    [kind] = [kind for kind in KINDS if kind.name == name]
    before, after = SAMPLES[name]
    assert fault_in(kind, before) == after
    assert fault_in(kind, "mov.u32 %r1, %tid.x;") is None


def test_faults_that_change_nothing_are_not_counted() -> None:
    faults = [Planted("case", "kernel", "kind", 0, n, "add", "sub") for n in range(3)]
    result = Result()
    for fault, noticed in zip(faults, ("a wrong result", "", ""), strict=True):
        result.add(fault, noticed)
    reasons = {faults[1].key: {"equivalent": True, "reason": "Zero is added."}}
    # A second judgement is the same.
    for _ in range(2):
        result.judge(reasons)
        assert (result.planted, result.caught, result.equivalent) == (2, 1, 1)
    assert result.kinds == {"kind": [3, 1]}
    assert [survivor["reason"] for survivor in result.survivors] == ["Zero is added.", ""]


def test_every_reason_is_a_sentence() -> None:
    for verdict in json.loads(REASONS.read_text()).values():
        assert set(verdict) == {"equivalent", "reason"}
        assert verdict["reason"].endswith(".")
