"""Dumps of a small program in XLA's form, shortened, for the reader's tests.

The program sorts an array while a number stays below five, or doubles it. It returns a part
of it, and looks a number up in a constant.
"""

HLO = """
HloModule jit_f, is_scheduled=true

%fused_sort (param_0: f32[64], param_1: s32[64]) -> (f32[64], s32[64]) {
  %param_0 = f32[64]{0} parameter(0)
  %param_1 = s32[64]{0} parameter(1)
  ROOT %sort.1 = (f32[64]{0}, s32[64]{0}) sort(%param_0, %param_1), dimensions={0}
}

%when_true (tuple.1: (f32[64], s32[64])) -> (f32[64]) {
  %tuple.1 = (f32[64]{0}, s32[64]{0}) parameter(0)
  %fusion.1 = (f32[64]{0}, s32[64]{0}) fusion(%tuple.1#0, %tuple.1#1), calls=%fused_sort
  %loop_add_fusion = f32[64]{0} fusion(%fusion.1#0), kind=kLoop, calls=%fused_add
  ROOT %tuple.2 = (f32[64]{0}) tuple(%loop_add_fusion)
}

%when_false (tuple.3: (f32[64])) -> (f32[64]) {
  %tuple.3 = (f32[64]{0}) parameter(0)
  %loop_multiply_fusion = f32[64]{0} fusion(%tuple.3#0), kind=kLoop, calls=%fused_multiply
  ROOT %tuple.4 = (f32[64]{0}) tuple(%loop_multiply_fusion)
}

%body (state.1: (s32[1], f32[64], s32[64])) -> (s32[1], f32[64], s32[64]) {
  %state.1 = (s32[1]{0}, f32[64]{0}, s32[64]{0}) parameter(0)
  %loop_compare_fusion = pred[1]{0} fusion(%state.1#0), kind=kLoop, calls=%fused_compare
  %bitcast.1 = pred[] bitcast(%loop_compare_fusion)
  %tuple.5 = (f32[64]{0}, s32[64]{0}) tuple(%state.1#1, %state.1#2)
  %tuple.6 = (f32[64]{0}) tuple(%state.1#1)
  %cond.1 = (f32[64]{0}) conditional(%bitcast.1, %tuple.5, %tuple.6), """ + (
    """true_computation=%when_true, false_computation=%when_false
  %loop_add_fusion.1 = s32[1]{0} fusion(%state.1#0), kind=kLoop, calls=%fused_add.1
  ROOT %tuple.7 = (s32[1]{0}, f32[64]{0}, s32[64]{0}) """
    """tuple(%loop_add_fusion.1, %cond.1#0, %state.1#2)
}

%condition (state.2: (s32[1], f32[64], s32[64])) -> pred[] {
  %state.2 = (s32[1]{0}, f32[64]{0}, s32[64]{0}) parameter(0)
  ROOT %loop_compare_fusion.1 = pred[] fusion(%state.2#0), kind=kLoop, calls=%fused_compare.1
}

%fused_slice (param_2: f32[64]) -> f32[16] {
  %param_2 = f32[64]{0} parameter(0)
  ROOT %slice.1 = f32[16]{0} slice(%param_2), slice={[8:24]}
}

ENTRY %main (x: f32[64], i: s32[64]) -> (f32[64], f32[16], /*index=2*/f32[1]) {
  %x = f32[64]{0} parameter(0), metadata={op_name="x"}
  %i = s32[64]{0} parameter(1)
  %copy.1 = f32[64]{0} copy(%x)
  %constant.1 = s32[1]{0} constant({0})
  %copy.2 = s32[1]{0} copy(%constant.1)
  %tuple.8 = (s32[1]{0}, f32[64]{0}, s32[64]{0}) tuple(%copy.2, %copy.1, %i)
  %while.1 = (s32[1]{0}, f32[64]{0}, s32[64]{0}) while(%tuple.8), condition=%condition, body=%body
  %wrapped_slice = f32[16]{0} fusion(%while.1#1), kind=kLoop, calls=%fused_slice
  %constant.2 = f32[4]{0} constant({1.5, -2.5e+3, inf, nan})
  %loop_dynamic_slice_fusion = f32[1]{0} fusion(%constant.2, %while.1#0), calls=%fused_lookup
  ROOT %tuple.9 = (f32[64]{0}, f32[16]{0}, /*index=2*/f32[1]{0}) """
    """tuple(%while.1#1, %wrapped_slice, /*index=2*/%loop_dynamic_slice_fusion)
}
"""
)

BUFFERS = """BufferAssignment:
allocation 0: size 256, page 0, maybe-live-out:
 value: <1 copy.1 @0> (size=256,offset=0): f32[64]{0}
 value: <2 loop_add_fusion @0> (size=256,offset=0): f32[64]{0}
 value: <3 loop_multiply_fusion @0> (size=256,offset=0): f32[64]{0}
 value: <4 cond.1{0} (phi) @0> (size=256,offset=0): f32[64]{0}
allocation 1: size 256, page 0, parameter 0, shape |f32[64]| at ShapeIndex {}:
 value: <5 x @0> (size=256,offset=0): f32[64]{0}
allocation 2: size 256, page 0, parameter 1, shape |s32[64]| at ShapeIndex {}:
 value: <6 i @0> (size=256,offset=0): s32[64]{0}
allocation 3: size 64, page 0, maybe-live-out:
 value: <7 wrapped_slice @0> (size=64,offset=0): f32[16]{0}
allocation 4: size 16, page 0, constant:
 value: <8 constant.2 @0> (size=16,offset=0): f32[4]{0}
allocation 5: size 4, page 0, constant:
 value: <9 constant.1 @0> (size=4,offset=0): s32[1]{0}
allocation 6: size 4, page 0, thread-local:
 value: <10 param_3 @0> (size=4,offset=0): s32[]
allocation 7: size 1024, page 0, preallocated-temp:
 value: <11 fusion.1{} @0> (size=16,offset=512): (f32[64]{0}, s32[64]{0})
 value: <12 fusion.1{0} @0> (size=256,offset=0): f32[64]{0}
 value: <13 fusion.1{1} @0> (size=256,offset=256): s32[64]{0}
 value: <14 copy.2 @0> (size=4,offset=640): s32[1]{0}
 value: <15 loop_add_fusion.1 @0> (size=4,offset=640): s32[1]{0}
 value: <16 loop_compare_fusion @0> (size=1,offset=644): pred[1]{0}
 value: <17 loop_compare_fusion.1 @0> (size=1,offset=644): pred[]
allocation 8: size 4, page 0, maybe-live-out:
 value: <18 loop_dynamic_slice_fusion @0> (size=4,offset=0): f32[1]{0}

Total bytes used: 1896
"""

THUNKS = """001: kCopy         [source       | next=003 (2)] kCopy
002: kCopy         [source       | next=003 (1)] kCopy
003: kWhile        [prev=002 (1) | next=012 (1)]
condition:
    004: kCustomKernel [source | sink] compare_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
  body:
    005: kCustomKernel [source       | next=010 (1)] compare grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
    010: kConditional  [prev=005 (1) | sink        ]
      false_branch:
        006: kCopy         [source       | next=008 (2)] kCopy
        007: kCopy         [source       | next=008 (1)] kCopy
        008: kCustomKernel [prev=007 (1) | next=009 (1)] sort_1 grid: [1, 1, 1] threads: [16, 1, 1]  shared_memory: 0 bytes
        009: kCustomKernel [prev=008 (1) | sink        ] add grid: [2, 1, 1] threads: [32, 1, 1]  shared_memory: 1536 bytes
      true_branch:
        013: kCustomKernel [source | sink] multiply grid: [1, 1, 1] threads: [64, 1, 1]  shared_memory: 0 bytes
    011: kCustomKernel [prev=005 (2) | sink        ] add_1 grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
012: kCopy         [prev=003 (1) | sink        ] kCopy
014: kCustomKernel [prev=003 (2) | sink        ] lookup grid: [1, 1, 1] threads: [1, 1, 1]  shared_memory: 0 bytes
"""  # noqa: E501 - as XLA writes them

INSTRUCTIONS = {
    1: "copy.1",
    2: "copy.2",
    3: "while.1",
    4: "loop_compare_fusion.1",
    5: "loop_compare_fusion",
    6: "fusion.1",
    7: "fusion.1",
    8: "fusion.1",
    9: "loop_add_fusion",
    10: "cond.1",
    11: "loop_add_fusion.1",
    12: "wrapped_slice",
    13: "loop_multiply_fusion",
    14: "loop_dynamic_slice_fusion",
}

METADATA = """thunk_metadata {
  thunk_info {
    profile_annotation: "command_buffer"
  }
  thunk_kind: "kCommandBuffer"
}
""" + "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n'
    f"    thunk_id: {number}\n  }}\n}}\n"
    for number, name in INSTRUCTIONS.items()
)

PARAMETERS = {
    "compare_1": 2,
    "compare": 2,
    "sort_1": 4,
    "add": 2,
    "multiply": 1,
    "add_1": 1,
    "lookup": 3,
}

PTX = """// Generated by LLVM NVPTX Back-End
.version 9.0
.target sm_90a
""" + "".join(
    f"\n.visible .entry {name}(\n"
    + ",\n".join(f"\t.param .u64 .ptr .align 16 {name}_param_{n}" for n in range(count))
    + "\n)\n{\n\tret; // nothing\n\n}\n"
    for name, count in PARAMETERS.items()
)
