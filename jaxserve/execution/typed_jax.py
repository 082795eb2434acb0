# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""JAX functions with the types that are missing in JAX's annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import jax
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Cond(Protocol):
    """`lax.cond`."""

    def __call__(
        self,
        pred: Bool[Array, ""],
        true_fun: Callable[[*Ts], T],
        false_fun: Callable[[*Ts], T],
        /,
        *operands: *Ts,
    ) -> T: ...


class ForiLoop(Protocol):
    """`lax.fori_loop`."""

    def __call__(
        self,
        lower: int,
        upper: int,
        body_fun: Callable[[Int[Array, ""], T], T],
        init_val: T,
        *,
        unroll: bool = False,
    ) -> T: ...


@runtime_checkable
class Device(Protocol):
    """A device of jaxlib, which has no annotations."""

    platform: str
    device_kind: str
    client: Any

    def memory_stats(self) -> dict[str, int] | None: ...


cond: Cond = lax.cond
fori_loop: ForiLoop = lax.fori_loop


class HostDevice(Device, Protocol):
    """A device of any host of the engine."""

    process_index: int


def all_devices() -> list[HostDevice]:
    """Return the devices of JAX's default backend on all hosts."""
    return jax.devices()


def devices() -> list[Device]:
    """Return the devices of JAX's default backend in this process."""

    return jax.local_devices()
