"""Compiles Hopper's sums over devices for as many H200s, and keeps their machine code.

    python -m tests.machine_code.compile_device_sums

Takes a minute, in the environment of `scripts.gpu.compile_offline`, in which a second process of
this module runs with a folder for its dumps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.gpu.offline_environment import (
    NoEnvironment,
    compiler_variables,
    default_folder,
    make_environment,
)
from scripts.lib.run_main import run_main
from scripts.machine_code.mosaic_text import launch_arrays
from scripts.machine_code.xla_reader import without_comments
from tests.machine_code.device_sum_cases import CASES, COMMAND, DeviceSumCase, keep
from tests.machine_code.norm_cases import EPS


def compile_case(case: DeviceSumCase, dumps: Any) -> dict[str, Any]:
    """Compile the call of a case, inside the environment."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxserve.models.shards import AXIS
    from jaxserve.start.programs.described_card import DescribedCard
    from pallas_kernels.gpu.hopper_all_reduce import sum_over_devices
    from pallas_kernels.row_arguments import NormOptions

    norm, card = case.norm, DescribedCard.of("H200", case.devices)
    options = NormOptions(EPS, norm.offset, norm.rounds_last, norm.factor)
    operands = {name: a for name, a in case.operands().items() if a is not None}
    names, mesh = list(operands), card.cards
    assert mesh is not None
    whole, parts = PartitionSpec(), PartitionSpec(AXIS)
    specs = tuple(parts if name == "delta" else whole for name in names)

    def call(*arrays: jax.Array) -> Any:
        given = dict(zip(names, arrays, strict=True))
        return sum_over_devices(given.pop("delta")[0], AXIS, **given, options=options)

    shapes = [jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype) for name in names]
    placed = [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    mapped = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)
    dumps.clear()
    card.lower_placed(jax.jit(mapped), tuple(placed)).compile()
    [ptx] = dumps.mosaic.glob("*.ptx")
    return {
        "digest": case.digest(),
        "ptx": without_comments(ptx.read_text()),
        "arguments": launch_arrays(ptx.with_suffix(".mlir-passes.log").read_text()),
    }


def compile_inside(folder: Path) -> None:
    """Compile every case. Write all to a file of the folder."""
    from scripts.gpu.offline_compiler import Dumps

    dumps = Dumps(folder / "xla", folder / "mosaic")
    entries = {case.name: compile_case(case, dumps) for case in CASES}
    (folder / "entries.json").write_text(json.dumps(entries))


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    inside = parser.parse_args().inside
    if inside is not None:
        compile_inside(inside)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            interpreter = make_environment(default_folder())
            variables = compiler_variables(interpreter.parents[1], folder)
        except NoEnvironment as error:
            raise SystemExit(str(error)) from error
        command = [str(interpreter), "-m", "tests.machine_code.compile_device_sums"]
        run = subprocess.run([*command, "--inside", name], env=variables)
        if run.returncode:
            return run.returncode
        size = keep(json.loads((folder / "entries.json").read_text()))
    print(f"{size:,} bytes kept, of {len(CASES)} cases", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run_main(main)
