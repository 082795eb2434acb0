"""Settings of a fleet: their meaning, and refusals before a process is started."""

from __future__ import annotations

import socket
import sys
from typing import Any

import pytest

from jaxserve.commands.cli import main
from jaxserve.errors import InvalidRequest
from jaxserve.fleet.options import FleetConfig, resources_of


def refusal(capsys: pytest.CaptureFixture, *words: str) -> str:
    assert main(["serve", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err.removeprefix("jaxserve: error: ")


RAY = ("--data-parallel-backend", "ray")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--data-parallel-size 2", "--data-parallel-size=2 needs --data-parallel-backend ray"),
        ("--ray-address auto", "--ray-address needs --data-parallel-backend ray"),
        ("--request-routing prefix", "--request-routing needs --data-parallel-backend ray"),
        ("-dpb ray --ray-address ray://x:1", "--ray-address must be HOST:PORT or auto"),
        ("-dpb ray --ray-address 127.0.0.1:1", "--ray-address: no cluster answers at 127.0.0.1:1"),
        ("-dpb ray -dp 0", "--data-parallel-size must be"),
        ("-dpb ray -dp 2 --files-dir x", "--files-dir is not supported with replicas"),
        ("-dpb ray -dp 2 --uds x", "uds is not supported with replicas"),
        (
            "-dpb ray -tp 2 --nnodes 2 --master-port 9",
            "--master-port is not supported with",
        ),
        (
            "-dpb ray -tp 2 --nnodes 2 --nodes-secret x",
            "--nodes-secret is not supported with",
        ),
        ("-dpb ray -dp 2 -tp 3 --nnodes 2", "--tensor-parallel-size is 3, over 2 hosts"),
        ("--nnodes 2 -tp 2", "--nnodes needs --nodes-secret"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    words: str, error: str, capsys: pytest.CaptureFixture
) -> None:
    assert refusal(capsys, *words.split()).startswith(error)


def test_a_replica_has_a_gpu_for_each_of_its_devices() -> None:
    cluster = {"CPU": 8.0, "GPU": 4.0}
    assert resources_of(FleetConfig(2, "ray"), cluster, 2) == {"num_cpus": 1, "num_gpus": 2}
    assert resources_of(FleetConfig(2, "ray"), {"CPU": 8.0}, 2)["num_gpus"] == 0
    shared = FleetConfig(2, "ray", ray_actor_options={"num_gpus": 0.5})
    assert resources_of(shared, cluster, 1) == {"num_gpus": 0.5}
    with pytest.raises(InvalidRequest, match=r"num_gpus is 0.5, and tensor_parallel_size 2"):
        resources_of(shared, cluster, 2)
    with pytest.raises(InvalidRequest, match="2 replicas need 8 GPUs, and there are 4"):
        resources_of(FleetConfig(2, "ray"), cluster, 4)


def test_each_of_a_replicas_hosts_has_the_gpus_of_its_devices() -> None:
    cluster = {"CPU": 8.0, "GPU": 8.0}
    assert resources_of(FleetConfig(2, "ray"), cluster, 4, 2) == {"num_cpus": 1, "num_gpus": 2}
    fewer = FleetConfig(1, "ray", ray_actor_options={"num_gpus": 1})
    with pytest.raises(InvalidRequest, match=r"num_gpus is 1, and tensor_parallel_size 2 on each"):
        resources_of(fewer, cluster, 4, 2)
    with pytest.raises(InvalidRequest, match="2 replicas of 4 hosts need 16 GPUs, and there are 8"):
        resources_of(FleetConfig(2, "ray"), cluster, 8, 4)


def test_without_ray_it_is_said_how_to_install_it(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "jaxserve.fleet.cluster", raising=False)
    error = refusal(capsys, *RAY, "--data-parallel-size", "2", "--port", "0")
    assert "needs Ray Serve" in error and "pip install -e '.[ray]'" in error


def test_a_port_in_use_is_found_before_ray_is_started(capsys: pytest.CaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        error = refusal(capsys, *RAY, "--data-parallel-size", "2", "--port", port)
    assert port in error


def test_numbers_are_checked_and_one_replica_is_the_plain_server() -> None:
    for resources in ({"num_cpus": "x"}, {"num_gpus": -1}):
        with pytest.raises(InvalidRequest, match=r"ray_actor_options\.num_"):
            FleetConfig(2, "ray", ray_actor_options=resources)
    with pytest.raises(InvalidRequest, match=r"autoscaling_config\.max_replicas"):
        FleetConfig(2, "ray", autoscaling_config={"max_replicas": "x"})
    fleets: list[dict[str, Any]] = [
        {"data_parallel_size": 2},
        {"ray_address": "auto"},
        {"autoscaling_config": {"max_replicas": 4}},
    ]
    for backend in ("mp", "ray"):
        assert not FleetConfig(1, backend).is_fleet()
        assert FleetConfig(1, backend).is_fleet(nnodes=2) == (backend == "ray")
    for fields in fleets:
        assert FleetConfig(data_parallel_backend="ray", **fields).is_fleet()
    assert FleetConfig(2, "ray", autoscaling_config='{"max_replicas": 4}').most_replicas() == 4
    with pytest.raises(InvalidRequest, match="data_parallel_backend must be mp or ray"):
        FleetConfig(1, "mpi")  # type: ignore[arg-type]
