"""Binding of the internal port of Serve's replicas to the loopback address."""

# Ray has no wheels for some versions of Python.
# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import ray
from ray.serve._private import replica

LOOPBACK = "127.0.0.1"
_replica: Any = replica


def keep_to_loopback() -> None:
    """Make Serve bind the port of this process's replica to the loopback address.

    Without this, Serve opens the port on all interfaces, without a check of Ray's token. In a
    cluster of several machines it does so anyway, because other machines call the replica. Call
    this before Serve opens the port. Idempotent.
    """
    add = _replica.add_port_to_grpc_server
    if ray.util.get_node_ip_address() != LOOPBACK or add.__name__ == "add_local_port":
        return

    def add_local_port(server: Any, address: str) -> int:
        return add(server, address.replace("[::]", LOOPBACK))

    _replica.add_port_to_grpc_server = add_local_port
