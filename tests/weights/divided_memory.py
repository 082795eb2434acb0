"""Peak of the host's memory while a checkpoint is read onto several devices.

    python -m tests.weights.divided_memory --devices 2 --form int8
    MALLOC_MMAP_THRESHOLD_=262144 python -m tests.weights.divided_memory --form int8

Beyond the pieces, which on CPU lie in the same memory, the host should hold about two parameters.
With the variable, glibc returns each freed buffer, so the rest is memory that is still in use.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxserve.execution.mesh import make_mesh
from jaxserve.models import ModelConfig, checkpoint_weights, parse_model_config
from jaxserve.models.shards import Split
from jaxserve.models.weight_table import dimensions
from jaxserve.weights import load_weights, parameter_values

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
LARGEST = 2048 * 2 * 8192 * 4  # bytes of gate_up
MEGABYTE = 1e6


def in_memory() -> np.ndarray:
    """Return the bytes of this process that are in memory: all, and without pages of files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return np.array([resident, resident - shared]) * os.sysconf("SC_PAGE_SIZE")


def write(folder: Path, config: ModelConfig) -> None:
    """Write a checkpoint of 1.5 GB, one file for each layer, so that little of it is held."""
    dims, block = dimensions(config), np.random.default_rng(0).normal(size=1 << 20)
    files: dict[str, dict[str, np.ndarray]] = {}
    names: dict[str, str] = {}
    table = sorted(checkpoint_weights(config), key=lambda weight: weight.path)
    for weight in table:
        words = weight.path.split(".")
        file = f"{words[words[0] == 'layers']}.safetensors"
        if file not in files:
            for other, tensors in files.items():
                save_file(tensors, folder / other)
            files = {file: {}}
        files[file][weight.name] = np.resize(block.astype(np.float32), weight.shape(dims))
        names[weight.name] = file
    for other, tensors in files.items():
        save_file(tensors, folder / other)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def start(count: int) -> Mesh | None:
    """Start JAX on so many devices, each with an operation behind it."""
    mesh = make_mesh(count)
    for device in jax.devices()[:count]:
        with jax.default_device(device):
            jax.block_until_ready(jax.jit(jnp.sum)(jnp.ones(4)))
    return mesh


class Watch(threading.Thread):
    """The most memory in use beyond JAX's arrays, looked at every few milliseconds.

    Attributes:
        most: bytes, as `in_memory` has them.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = np.zeros(2), threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            arrays = sum(array.nbytes for array in jax.live_arrays())
            self.most = np.maximum(self.most, in_memory() - arrays)

    def end(self) -> None:
        self._ended.set()
        self.join()


def main() -> None:
    """Write the checkpoint, read it, and print the peak memory of the read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--form", choices=("int8", "fp8", "int4"))
    arguments = parser.parse_args()
    count = arguments.devices
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    config = replace(parse_model_config(RAW), split=Split(count))
    imported = in_memory()
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), config)
        mesh = start(count)
        flags: Any = {"quantization": arguments.form, "panels": True, "mesh": mesh}
        started, watch = in_memory(), Watch()
        watch.start()
        model = load_weights(name, config, np.float32, **flags)
        watch.end()
    leaves = jax.tree.leaves(parameter_values(model))
    pieces = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    beyond, private = (watch.most - started) / MEGABYTE
    print(
        f"with imports {imported[0] / MEGABYTE:,.0f} MB, JAX on {count} devices "
        f"{started[0] / MEGABYTE:,.0f} MB; pieces {pieces / MEGABYTE:,.0f} MB; most beyond those "
        f"that there were {beyond:,.0f} MB, {private:,.0f} MB without pages of libraries; the "
        f"largest parameter {LARGEST / MEGABYTE:,.0f} MB in float32"
    )


if __name__ == "__main__":
    main()
