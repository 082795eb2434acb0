"""The benchmark of starts: its gates, its random models, and its reading of a server's answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxserve.models import read_model_config
from jaxserve.weights import load_weights
from scripts.bench import startup
from scripts.compare.engine_jaxserve import Jaxserve, JaxserveSchedules
from scripts.lib import server_process
from scripts.lib.random_checkpoint import tensor_shapes, write_checkpoint
from scripts.lib.server_process import read_metric, wait_for_programs

NONE: dict[str, float] = {
    "ready": 1.0,
    "compiles": 0,
    "compiles_after_ready": 0,
    "compiles_behind": 0,
}
COLD: dict[str, float] = NONE | {"compiles": 9, "programs_built": 9, "compiles_behind": 13}
SMALL = startup.LLAMAS["1b"] | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    ("model", "kind", "numbers", "expected"),
    [
        ("bundled", "cold", COLD, []),
        ("bundled", "cold", COLD | {"ready": 6.5}, ["ready after 6.50 s, most 6 s"]),
        ("135m", "cold", COLD | {"ready": 6.5}, []),
        ("1b", "cold", COLD | {"ready": 60.0}, []),
        ("135m", "warm", NONE | {"ready": 10.5}, ["ready after 10.50 s, most 10 s"]),
        ("bundled", "prebuilt", NONE | {"ready": 10.5}, []),
        ("1b", "cold", COLD | {"compiles_after_ready": 1}, ["compiles_after_ready is 1, not 0"]),
        ("1b", "warm", NONE | {"compiles_behind": 2}, ["compiles_behind is 2, not 0"]),
        ("1b", "prebuilt", NONE | {"programs_built": 1}, ["programs_built is 1, not 0"]),
        ("1b", "server", NONE | {"compiles": 1.0}, ["compiles is 1, not 0"]),
    ],
)
def test_gates_are_of_the_kind_of_start(
    model: str, kind: str, numbers: dict[str, float], expected: list[str]
) -> None:
    assert startup.faults(model, kind, numbers) == expected


def test_every_gate_that_is_missed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert startup.report({"1b": {"cold": COLD | {"all_programs": 57.8}}})
    assert "57.80  9 + 13 behind\nall gates hold" in capsys.readouterr().out
    assert not startup.report({"bundled": {"cold": COLD, "warm": COLD}})
    assert "MISSED: bundled, warm: compiles is 9, not 0" in capsys.readouterr().out


def engine(**behind: Any) -> Any:
    found = SimpleNamespace(wait=lambda _: True, num_missing=0, error=None) if behind else None
    if found is not None:
        vars(found).update(behind)
    return SimpleNamespace(loaded=SimpleNamespace(behind=found))


def test_the_last_program_is_in_its_place_when_the_engine_is_ready_or_later() -> None:
    assert startup.last_program(engine(), 5.0) == 5.0
    assert startup.last_program(engine(finished_at=9.0), 5.0) == 9.0
    assert startup.last_program(engine(finished_at=4.9), 5.0) == 5.0
    with pytest.raises(RuntimeError, match="3 programs are missing"):
        startup.last_program(engine(wait=lambda _: False, num_missing=3), 5.0)
    with pytest.raises(RuntimeError, match="no room"):
        startup.last_program(engine(error="no room", finished_at=None), 5.0)


def test_a_random_llama_is_written_once_and_reads_as_a_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(SMALL, tmp_path / "model", "bfloat16")
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 2 + 9 * SMALL["num_hidden_layers"]
    assert {tensor.dtype for tensor in tensors.values()} == {np.dtype(ml_dtypes.bfloat16)}
    assert (tensors["model.norm.weight"] == 1).all()
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (32, 32)
    up = tensors["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    down = tensors["model.layers.1.mlp.down_proj.weight"].astype(np.float32)
    assert up.shape == (48, 32) and np.std(up) == pytest.approx(32**-0.5, rel=0.1)
    assert down.shape == (32, 48) and np.std(down) == pytest.approx(192**-0.5, rel=0.1)
    assert len(np.unique(down[:, 0])) > 16
    written = (folder / "model.safetensors").stat()
    assert write_checkpoint(SMALL, folder, "bfloat16") == folder
    assert (folder / "model.safetensors").stat() == written


def test_a_checkpoint_in_shards_reads_as_one_model(tmp_path: Path) -> None:
    folder = write_checkpoint(SMALL, tmp_path / "model", "float32", shard_bytes=20_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == "model-00001.safetensors" and len(files) > 2
    config = read_model_config(folder)
    sizes = [leaf.size for leaf in jax.tree.leaves(nnx.state(load_weights(folder, config, "f4")))]
    assert sum(sizes) == sum(int(np.prod(shape)) for shape in tensor_shapes(SMALL).values())


@pytest.mark.parametrize(("model", "parameters"), [("135m", 134_515_008), ("1b", 1_235_814_400)])
def test_shapes_are_those_of_the_models_they_are_named_after(model: str, parameters: int) -> None:
    shapes = tensor_shapes(startup.LLAMAS[model])
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == parameters


@pytest.fixture
def server() -> Iterator[str]:
    """Yield the address of a server that counts down the missing programs of two models."""
    missing = [2.0, 1.0, 0.0]

    class Front(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            count = missing.pop(0) if len(missing) > 1 else missing[0]
            text = "# HELP jaxserve:engine_programs_missing Programs.\n"
            for name in "ab":
                text += f'jaxserve:engine_programs_missing{{model_name="{name}"}} {count}\n'
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Front) as front:
        threading.Thread(target=front.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{front.server_port}"
        front.shutdown()


def test_a_server_is_measured_once_it_has_all_its_programs(server: str) -> None:
    assert read_metric(server, "engine_programs_missing") == 4
    Jaxserve().settle(server)
    assert read_metric(server, "engine_programs_missing") == 0
    with pytest.raises(RuntimeError, match="has no engine_steps"):
        read_metric(server, "engine_steps")
    JaxserveSchedules().settle("http://nowhere")  # its worker has no counts


def test_programs_that_do_not_come_are_not_waited_for(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_process, "PROGRAMS_S", -1)
    with pytest.raises(RuntimeError, match="4 programs are still missing"):
        wait_for_programs(server)
