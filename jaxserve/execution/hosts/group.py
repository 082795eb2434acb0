"""Groups: the hosts of one engine, from joining to the end.

All hosts start together and end together. If a host is lost, the others end, because its shard of
the weights and of the cache is lost. A process supervisor starts them again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from jaxserve.errors import DeviceError, InvalidRequest
from jaxserve.execution.hosts.channel import CLOSE, Channel, ChannelError, Frame, connect, listen
from jaxserve.settings.hosts import HostsConfig

_log = logging.getLogger(__name__)
# Kinds of frames. `channel` and `replay` have others.
HELLO, SETTLE = 2, 3
# Silence after which a host is lost, during the start and while serving.
STARTING_SECONDS, SERVING_SECONDS = 60.0, 5.0
# Time for a server to answer its clients with an error.
FAREWELL_SECONDS = 2.5
# Time within which the end of a connection is detected.
NOTICE_SECONDS = 1.0
JOIN_SECONDS = 600.0
_MOST_GUESTS = 64


class Group(ABC):
    """Base class of Leader and Follower: connections of this host to the other hosts of the engine.

    Args:
        end: a function that ends this process with a status, without waiting for its threads.

    Attributes:
        loss: the reason if another host is lost, None before.
        leave_jax: closes JAX's connections between hosts, and waits until all hosts call it.
    """

    def __init__(self, end: Callable[[int], Any] = os._exit) -> None:
        self.loss: str | None = None
        self._end = end
        self.leave_jax: Callable[[], None] = lambda: None
        self._channels: dict[int, Channel] = {}
        self._lock = threading.Lock()
        self._is_lost, self._is_ended = threading.Event(), threading.Event()

    def serve(self) -> None:
        """Reduce the silence after which another host is lost from 60 s to 5 s.

        The engine calls this after the start, when no host compiles any more.
        """
        for channel in self._channels.values():
            channel.seconds = SERVING_SECONDS

    def fail(self, reason: str, seconds: float = FAREWELL_SECONDS) -> None:
        """End this process with status 1 after some seconds, which also ends all other hosts.

        The method returns at once, and a later call has no effect. The process ends without
        cleanup, because a thread or JAX may wait for the lost host inside a program.

        Args:
            reason: the reason, which is logged and stored in `loss`.
            seconds: the delay, in which a server can answer its clients.
        """
        with self._lock:
            if self.loss is not None:
                return
            self.loss = reason
        _log.critical("the engine's hosts end: %s", reason)

        def end() -> None:
            time.sleep(seconds)
            self._end(1)
            self._is_ended.set()

        threading.Thread(target=end, name="jaxserve-end", daemon=True).start()
        self._is_lost.set()

    @contextmanager
    def ending_with_the_others(self) -> Generator[None]:
        """Return a context that ends the process instead of raising an error if a host is lost.

        An error in the body, such as a failed sum over a closed connection, can precede the
        detection of the loss. The context waits up to one second for the detection, and otherwise
        raises the error.
        """
        try:
            yield
        except Exception:
            if self._is_lost.wait(NOTICE_SECONDS):
                self._is_ended.wait()
            raise

    @abstractmethod
    def settle(self, settings: Mapping[str, Any], sizes: Mapping[str, int | None]) -> Any:
        """Compare settings with all other hosts, and agree on the least of each size.

        All hosts call this method together.

        Args:
            settings: JSON values by name that must be equal on all hosts.
            sizes: sizes by name, of which the minimum over the hosts is taken. None is no limit.

        Returns:
            The agreed sizes, by name.

        Raises:
            InvalidRequest: settings differ. The message names them and the host.
            ChannelError: a host is lost.
        """

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Return the leader's JSON value on every host. All hosts call this method together.

        Args:
            value: the value to send on the leader, ignored on a follower.

        Raises:
            ChannelError: a host is lost.
        """

    def close(self) -> None:
        """End the connections between hosts, JAX's first, when all hosts call this. Idempotent."""
        channels, self._channels = self._channels, {}
        if not channels:
            return
        for channel in channels.values():
            channel.leave()
        self.leave_jax()
        for channel in channels.values():
            channel.wait_closed()


class Leader(Group):
    """The leader's connections to its followers. The constructor waits until all have joined.

    Args:
        config: address, port and number of the hosts.
        secret: the secret that all hosts share.
        end: see `Group`.

    Raises:
        InvalidRequest: the address cannot be bound.
        DeviceError: hosts are missing after ten minutes.
    """

    def __init__(
        self, config: HostsConfig, secret: bytes, end: Callable[[int], Any] = os._exit
    ) -> None:
        super().__init__(end)
        self._config, self._secret = config, secret
        self._joined = threading.Condition(self._lock)
        self._num_guests = 0
        with listen(config) as listener:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
            self._wait()
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        for channel in self._channels.values():
            channel.send(HELLO)

    def send(self, kind: int, number: int, *parts: bytes) -> None:
        """Send a frame to all followers: its kind, a number, and the parts of its payload.

        Raises:
            ChannelError: a follower is lost.
        """
        for channel in self._channels.values():
            channel.send(kind, number, *parts)

    @property
    def sent_bytes(self) -> int:
        """Total bytes that the leader has sent to its followers."""
        return sum(channel.sent_bytes for channel in self._channels.values())

    def settle(self, settings: Mapping[str, Any], sizes: Mapping[str, int | None]) -> Any:
        ours = json.loads(json.dumps(dict(settings)))
        least, faults = dict(sizes), list[str]()
        for rank, channel in sorted(self._channels.items()):
            theirs = json.loads(bytes(channel.take().payload))
            others = theirs["settings"]
            faults += [
                f"host {rank} has {name} {others.get(name)!r}, the leader {ours.get(name)!r}"
                for name in sorted({*ours, *others})
                if ours.get(name) != others.get(name)
            ]
            for name, size in theirs["sizes"].items():
                bounds = [bound for bound in (least.get(name), size) if bound is not None]
                least[name] = min(bounds, default=None)
        refused = "; ".join(faults)
        self.send(SETTLE, 0, json.dumps({"refused": refused, "sizes": least}).encode())
        if refused:
            raise InvalidRequest(f"settings of hosts differ: {refused}", "nnodes")
        return least

    def share(self, value: Any) -> Any:
        self.send(SETTLE, 0, json.dumps(value).encode())
        return value

    def _wait(self) -> None:
        count, until = self._config.nnodes - 1, time.monotonic() + JOIN_SECONDS
        with self._joined:
            while len(self._channels) < count:
                self._joined.wait(0.5)
                if time.monotonic() > until:
                    missing = sorted({*range(1, count + 1)} - set(self._channels))
                    raise DeviceError(
                        f"hosts {missing} of {count + 1} (node_rank) have not joined within "
                        f"{JOIN_SECONDS:.0f} s"
                    )

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, (host, *_) = listener.accept()
            except OSError:
                return
            with self._lock:
                is_crowded = self._num_guests >= _MOST_GUESTS
                self._num_guests += not is_crowded
            if is_crowded:
                connection.close()
                continue
            threading.Thread(target=self._greet, args=(connection, host), daemon=True).start()

    def _greet(self, connection: socket.socket, host: str) -> None:
        """Accept a follower's connection if it has the secret and a free rank, else close it.

        The follower's channel is stored and starts to send heartbeats. A refusal is logged.
        """
        try:
            channel = Channel(connection, self._secret, leads=True)
            frame = channel.receive_first()
            if frame.kind != HELLO:
                raise ChannelError(f"its first frame is of kind {frame.kind}; allowed: {HELLO}")
            rank = frame.number
            with self._joined:
                if not 0 < rank < self._config.nnodes or rank in self._channels:
                    raise ChannelError(
                        f"its node_rank is {rank}; allowed: one from 1 to "
                        f"{self._config.nnodes - 1} that has not joined"
                    )
                self._channels[rank] = channel
                channel.seconds = STARTING_SECONDS
                channel.start(lambda reason: self.fail(f"host {rank} is lost: {reason}"))
                self._joined.notify()
        except (OSError, ValueError) as error:
            _log.warning("a connection of %s to master_port is refused: %s", host, error)
            connection.close()
        finally:
            with self._lock:
                self._num_guests -= 1


class Follower(Group):
    """A follower's connection to its leader. The constructor waits until all hosts have joined.

    Args:
        config: address and port of the leader, and the rank of this host.
        secret: the secret that all hosts share.
        end: see `Group`.

    Raises:
        DeviceError: the leader cannot be reached for ten minutes, or refuses this host.
    """

    def __init__(
        self, config: HostsConfig, secret: bytes, end: Callable[[int], Any] = os._exit
    ) -> None:
        super().__init__(end)
        address = self._leader = config.master_addr, config.master_port
        try:
            self._channel = Channel(connect(address, JOIN_SECONDS), secret, leads=False)
            self._channel.seconds = STARTING_SECONDS
            self._channel.send(HELLO, config.node_rank)
            self._channel.start(self._lost)
            self._channels[0] = self._channel
            self._channel.take()
        except OSError as error:
            raise DeviceError(
                f"the leader at {address[0]}:{address[1]} does not take this host in: {error}; it "
                "needs the leader's nodes_secret and a node_rank of its own"
            ) from error

    def settle(self, settings: Mapping[str, Any], sizes: Mapping[str, int | None]) -> Any:
        content = {"settings": dict(settings), "sizes": dict(sizes)}
        with self.ending_with_the_others():
            self._channel.send(SETTLE, 0, json.dumps(content).encode())
            answer = json.loads(bytes(self._channel.take().payload))
        if answer["refused"]:
            raise InvalidRequest(f"settings of hosts differ: {answer['refused']}", "nnodes")
        return answer["sizes"]

    def share(self, value: Any) -> Any:
        with self.ending_with_the_others():
            return json.loads(bytes(self._channel.take().payload))

    def follow(self, run: Callable[[Frame], None]) -> None:
        """Call `run` with each frame from the leader, and return when the leader sends CLOSE.

        Raises:
            ChannelError: the leader is lost.
        """

        with self.ending_with_the_others():
            while (frame := self._channel.take()).kind != CLOSE:
                run(frame)

    def close(self) -> None:
        self.leave_jax()
        self._channel.close()

    def _lost(self, reason: str) -> None:
        host, port = self._leader
        self.fail(f"the leader is lost ({host}:{port}): {reason}", seconds=0.5)
