# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""JAX functions with the types that JAX does not annotate, and a counter of compilations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable

import jax
from jax import lax

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Cond(Protocol):
    """Call signature of `lax.cond`, for type checkers."""

    def __call__(
        self,
        pred: Bool[Array, ""],
        true_fun: Callable[[*Ts], T],
        false_fun: Callable[[*Ts], T],
        /,
        *operands: *Ts,
    ) -> T: ...


class ForiLoop(Protocol):
    """Call signature of `lax.fori_loop`, for type checkers."""

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
    """Type of a JAX device: the attributes that jaxserve reads."""

    platform: str
    device_kind: str
    client: Any

    def memory_stats(self) -> dict[str, int] | None: ...


cond: Cond = lax.cond
fori_loop: ForiLoop = lax.fori_loop


class HostDevice(Device, Protocol):
    """Type of a JAX device with the index of its host's process."""

    process_index: int


def all_devices() -> list[HostDevice]:
    """Return the devices of JAX's default backend on all hosts."""
    return jax.devices()


def devices() -> list[Device]:
    """Return the devices of JAX's default backend that belong to this process."""

    return jax.local_devices()


class CompileCounter:
    """Counts the programs that JAX compiles in this process, or on one of its threads.

    Attributes:
        num_compiles: the number of compilations since the counter was created.
        thread: identifier of the only thread whose compilations are counted, or None for all.
    """

    def __init__(self) -> None:
        self.num_compiles = 0
        self.thread: int | None = None
        self._listener: Any = self._on_event
        jax.monitoring.register_event_duration_secs_listener(self._listener)

    def _on_event(self, event: str, duration: float, /, **_: Any) -> None:
        if event == _COMPILE_EVENT and self.thread in (None, threading.get_ident()):
            self.num_compiles += 1

    def close(self) -> None:
        """Stop counting compilations, and unregister the listener from JAX. Idempotent.

        Another library may have removed all listeners with `jax.monitoring.clear_event_listeners`.
        """
        listener, self._listener = self._listener, None
        if listener is not None:
            with suppress(AssertionError):
                jax.monitoring.unregister_event_duration_listener(listener)
