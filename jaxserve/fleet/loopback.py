"""The port of Serve's replicas for each other, on the loopback address where the node has that."""

# Ray has no wheels for every Python.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica

LOOPBACK = "127.0.0.1"
_replica: Any = replica


def keep_to_loopback() -> None:
    """Let Serve bind the port of this process's replica to the loopback address.

    Serve opens it on all interfaces and without Ray's token, once the replica has been made. A node
    of a cluster of several machines keeps that: its replicas are called from others. Idempotent.
    """
    add = _replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() != LOOPBACK or add.__name__ == "add_local_port":
        return

    def add_local_port(server: Any, address: str) -> int:
        return add(server, address.replace("[::]", LOOPBACK))

    _replica.add_port_to_grpc_server = add_local_port
