"""Worker that compiles cases for an absent card, inside the offline environment.

Reads descriptions of cases, a line each, from its input. Writes each program to a file, and then a
line to its output: "compiled", or the reason of a failure.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax

from scripts.gpu.offline_compiler import Compiler, Dumps
from scripts.gpu.targets import Target
from scripts.machine_code.compiled_program import Program, to_json
from scripts.machine_code.xla_reader import read_program
from tests.machine_code.attention_cases import AttentionCase, KvWriteCase
from tests.machine_code.big_cases import BigAttentionCase, BigGroupedCase, BigQuantizedCase
from tests.machine_code.case import Case
from tests.machine_code.few_row_cases import FewRowsCase
from tests.machine_code.greatest_cases import GreatestCase
from tests.machine_code.latent_cases import LatentAttentionCase
from tests.machine_code.norm_cases import AddNormCase
from tests.machine_code.product_cases import GroupedCase, QuantizedCase, QuantizedGroupedCase
from tests.machine_code.qkv_cases import RopeKvWriteCase
from tests.machine_code.state_cases import StateChunkCase
from tests.machine_code.state_step_cases import StateStepCase

CASE_TYPES: tuple[type[Case], ...] = (
    *(AttentionCase, KvWriteCase, GroupedCase, QuantizedCase, QuantizedGroupedCase),
    *(AddNormCase, FewRowsCase, GreatestCase, RopeKvWriteCase, StateChunkCase, StateStepCase),
    LatentAttentionCase,
    *(BigAttentionCase, BigGroupedCase, BigQuantizedCase),
)


def from_description(data: dict[str, Any]) -> Case:
    """Build a case from `Case.describe`, where tuples have become lists."""
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if name != "type"
    }
    kind = next(kind for kind in CASE_TYPES if kind.__name__ == data["type"])
    return kind(**fields)


def compile_case(case: Case, compiler: Compiler) -> Program:
    """Compile the call of a case."""
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in case.shapes())
    compiler.dumps.clear()
    compiler.compile(case.call, shapes, case.donated)
    program = read_program(compiler.dumps.xla, compiler.dumps.mosaic)
    if len(program.parameters) != len(shapes):
        raise ValueError(
            f"the program has {len(program.parameters)} parameters for {len(shapes)} arguments: "
            "the call does not use some of them"
        )
    return program


def main() -> int:
    card, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    compiler = Compiler(Target.of(card), Dumps(folder / "xla", folder / "mosaic"))
    for line in sys.stdin:
        try:
            program = compile_case(from_description(json.loads(line)), compiler)
            out.write_text(json.dumps({"modules": program.modules, **to_json(program)}))
            answer = "compiled"
        except Exception as error:  # a case that does not compile is a result, not the end
            answer = f"{type(error).__name__}: {error}".replace("\n", " ")
        print(answer, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
