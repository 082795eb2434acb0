"""One engine over several hosts: channel, group, two processes against the oracle, and deaths."""

import hmac
import os
import queue
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.commands.cli import make_parser
from jaxserve.commands.options import CommandError
from jaxserve.errors import DeviceError, InvalidRequest
from jaxserve.execution.hosts.channel import CLOSE, NONCE_BYTES, PROTOCOL, Channel, ChannelError
from jaxserve.execution.hosts.group import HELLO, Follower, Leader
from jaxserve.execution.hosts.relay import Relay
from jaxserve.execution.hosts.replay import _arrays
from jaxserve.settings.config import EngineConfig, bundled_model
from jaxserve.settings.hosts import HostsConfig
from jaxserve.start.sources.find import find_source
from jaxserve.start.start import load
from jaxserve.weights.converted import CARD
from tests.execution.over_hosts import free_ports
from tests.support.kept_programs import users_environment
from tests.support.last_line import found_by
from tests.support.live_server import Server

ROOT = Path(__file__).parents[2]
SECRET, OTHER = b"s" * 32, b"o" * 32


Connect = Callable[[], tuple[socket.socket, socket.socket]]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Yield a function that connects both ends, which the fixture closes at the end."""
    made: list[socket.socket] = []

    def connect() -> tuple[socket.socket, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            made.append(socket.create_connection(listener.getsockname()))
            made.append(listener.accept()[0])
        return made[-1], made[-2]

    yield connect
    for end in made:
        end.close()


def both(connect: Connect, secret: bytes = SECRET, other: bytes = SECRET) -> list[Channel]:
    """Return connected channels of a leader and a follower."""
    ends, made = connect(), []
    thread = threading.Thread(target=lambda: made.append(Channel(ends[0], secret, leads=True)))
    thread.start()
    follower = Channel(ends[1], other, leads=False)
    thread.join()
    return [*made, follower]


def greeted(connect: Connect) -> tuple[Channel, socket.socket, bytes]:
    """Return a leader's end, the raw other end, and the key of the follower's messages."""
    ends = connect()
    ends[1].sendall(PROTOCOL + b"n" * NONCE_BYTES)
    leader = Channel(ends[0], SECRET, leads=True)
    nonce = ends[1].recv(1 << 10)[len(PROTOCOL) :]
    nonces = nonce + b"n" * NONCE_BYTES
    return leader, ends[1], hmac.digest(SECRET, PROTOCOL + nonces + b"follower", "sha256")


def frame(key: bytes, counter: int, kind: int, number: int, payload: bytes) -> bytes:
    """Return a frame of the protocol."""
    body = struct.pack("<IHH", len(payload), kind, number) + payload
    return body + hmac.digest(key, struct.pack("<Q", counter) + body, "sha256")


def test_frames_arrive_whole_and_in_order(connect: Connect) -> None:
    leader, follower = both(connect)
    lost: list[str] = []
    leader.start(lost.append)
    follower.start(lost.append)
    for number in range(300):
        leader.send(20, number, b"a" * number, b"b")
    for number in range(300):
        got = follower.take()
        assert (got.kind, got.number, bytes(got.payload)) == (20, number, b"a" * number + b"b")
    follower.send(21, 7)
    assert leader.take()[:2] == (21, 7)
    leader.leave()
    assert follower.take().kind == CLOSE
    follower.close()
    leader.wait_closed(30)
    assert not lost


def test_the_protocol_is_what_its_description_says(connect: Connect) -> None:
    leader, raw, key = greeted(connect)
    raw.sendall(frame(key, 0, 5, 6, b"payload"))
    assert leader.receive_first() == (5, 6, b"payload")


@pytest.mark.parametrize("fault", ["replay", "change", "skip", "other key", "cut"])
def test_what_the_key_does_not_confirm_is_a_loss(connect: Connect, fault: str) -> None:
    leader, raw, key = greeted(connect)
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    leader.start(losses.put)
    first = frame(key, 0, 5, 0, b"first")
    raw.sendall(first)
    assert bytes(leader.take().payload) == b"first"
    second = bytearray(frame(key, 1, 5, 0, b"second"))
    if fault == "change":
        second[10] ^= 1
    bad = {
        "replay": first,
        "change": bytes(second),
        "skip": frame(key, 2, 5, 0, b"third"),
        "other key": frame(OTHER, 1, 5, 0, b"second"),
        "cut": bytes(second[:20]),
    }[fault]
    raw.sendall(bad)
    if fault == "cut":
        raw.close()
    said = losses.get(timeout=30)
    assert said == ("it closed the connection" if fault == "cut" else
                    "a frame that the secret does not confirm")  # fmt: skip
    with pytest.raises(ChannelError):
        leader.take()


def test_a_frame_too_large_to_be_one_is_refused_before_it_is_read(connect: Connect) -> None:
    leader, raw, _ = greeted(connect)
    raw.sendall(struct.pack("<IHH", 1 << 31, 5, 0))
    with pytest.raises(ChannelError, match="2147483648 bytes; allowed: at most 65536"):
        leader.receive_first()


def test_another_secret_another_protocol_and_a_mirror_are_refused(connect: Connect) -> None:
    leader, follower = both(connect, SECRET, OTHER)
    follower.send(HELLO, 1)
    with pytest.raises(ChannelError, match="does not confirm"):
        leader.receive_first()
    near, far = connect()
    far.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    with pytest.raises(ChannelError, match="another protocol"):
        Channel(near, SECRET, leads=True)
    near, far = connect()
    threading.Thread(target=lambda: far.sendall(far.recv(1 << 10))).start()
    with pytest.raises(ChannelError, match="repeats"):
        Channel(near, SECRET, leads=True)


def test_silence_is_a_loss(connect: Connect) -> None:
    leader, _, _ = greeted(connect)
    losses: queue.SimpleQueue[str] = queue.SimpleQueue()
    leader.seconds = 0.2
    leader.start(losses.put)
    assert re.fullmatch(r"it has been silent for \d+ s", losses.get(timeout=30))


def test_arrays_come_back_and_other_sizes_are_refused() -> None:
    like = [np.zeros((), np.int32), np.zeros((2, 3), np.uint32), np.zeros((), np.bool_)]
    given = [np.int32(-5), np.arange(6, dtype=np.uint32).reshape(2, 3), np.bool_(True)]
    data = memoryview(b"".join(array.tobytes() for array in given))
    for got, want in zip(_arrays(data, like), given, strict=True):
        assert np.array_equal(got, want) and got.dtype == want.dtype and got.shape == want.shape
    with pytest.raises(ChannelError, match="28 bytes; allowed: 29"):
        _arrays(data[:-1], like)


def hosts(rank: int, port: int, nnodes: int = 3) -> HostsConfig:
    return HostsConfig(nnodes=nnodes, node_rank=rank, master_port=port, nodes_secret="given")


def test_a_leader_refuses_all_but_its_followers(caplog: pytest.LogCaptureFixture) -> None:
    port, made, ends = free_ports(), {}, queue.SimpleQueue[int]()

    def lead() -> None:
        made[0] = Leader(hosts(0, port), SECRET, ends.put)

    refused: queue.SimpleQueue[int] = queue.SimpleQueue()

    def join(rank: int) -> None:
        try:
            made[rank] = Follower(hosts(rank, port), SECRET, ends.put)
        except DeviceError:
            refused.put(rank)

    threads = [threading.Thread(target=lead)]
    threads[0].start()
    with pytest.raises(DeviceError, match="nodes_secret and a node_rank of its own"):
        Follower(hosts(1, port), OTHER, ends.put)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, PROTOCOL + b"\0" * 2000):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(garbage)
            raw.settimeout(30)
            with suppress(ConnectionError):  # until the leader closes it
                while raw.recv(1 << 10):
                    pass
    ends.get(timeout=30)  # of the refused follower: it ends itself
    threads += [threading.Thread(target=join, args=(rank,)) for rank in (1, 1, 2)]
    threads[1].start()
    threads[2].start()
    assert refused.get(timeout=60) == 1  # the second one is refused
    assert "node_rank is 1; allowed: one from 1 to 2 that has not joined" in caplog.text
    threads[3].start()
    for thread in threads:
        thread.join(60)
    with pytest.raises(ConnectionRefusedError):  # the listener is closed
        socket.create_connection(("127.0.0.1", port), timeout=5)
    settle_and_close(made)


def settle_and_close(made: dict[int, Any]) -> None:
    """Let three hosts agree on the least sizes, refuse different settings, and end in order."""
    agreed: dict[int, Any] = {}

    def settle(rank: int, settings: dict[str, Any], sizes: dict[str, int | None]) -> None:
        try:
            agreed[rank] = made[rank].settle(settings, sizes)
        except InvalidRequest as error:
            agreed[rank] = str(error)

    def all_settle(settings: Any, sizes: Any) -> list[Any]:
        threads = [
            threading.Thread(target=settle, args=(rank, settings(rank), sizes(rank)))
            for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return [agreed[rank] for rank in range(3)]

    least = all_settle(lambda rank: {"a": 1}, lambda rank: {"x": 9 - rank, "y": None})
    assert least == [{"x": 7, "y": None}] * 3
    refused = all_settle(lambda rank: {"dtype": "xyz"[rank // 2]}, lambda rank: {})
    assert refused == ["settings of hosts differ: host 2 has dtype 'y', the leader 'x'"] * 3
    calls: list[int] = []
    follow = [
        threading.Thread(target=made[rank].follow, args=(lambda got: calls.append(got.number),))
        for rank in (1, 2)
    ]
    for thread in follow:
        thread.start()
    made[0].send(20, 4, b"")
    closing = threading.Thread(target=made[0].close)
    closing.start()
    for thread in follow:
        thread.join(30)
    for rank in (1, 2):
        made[rank].close()
    closing.join(30)
    assert calls == [4, 4]
    assert all(made[rank].loss is None for rank in range(3))


def test_a_host_ends_with_status_1_once_another_is_lost() -> None:
    port, made, ends = free_ports(), {}, queue.SimpleQueue[int]()
    first = threading.Thread(
        target=lambda: made.update({0: Leader(hosts(0, port, 2), SECRET, ends.put)})
    )
    first.start()
    follower = Follower(hosts(1, port, 2), SECRET, ends.put)
    first.join(30)
    follower._channel._connection.shutdown(socket.SHUT_RDWR)  # as if its process had died
    assert [ends.get(timeout=30), ends.get(timeout=30)] == [1, 1]
    assert made[0].loss == "host 1 is lost: it closed the connection"
    assert follower.loss is not None and follower.loss.startswith("the leader is lost")


# A host that joins the others, and does as a follower or as a leader that is killed does.
HOST = """
import os, signal, sys, time
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jaxserve.execution.hosts import join
from jaxserve.execution.hosts.group import Follower, Leader
from jaxserve.settings.hosts import HostsConfig

rank, port, moment = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = HostsConfig(nnodes=2, node_rank=rank, master_port=port, nodes_secret="given")
if rank == 0 and moment == "joining":
    Leader(config, b"s" * 32)
    os.kill(os.getpid(), signal.SIGKILL)
group = join.open_group(config, b"s" * 32)

def add(count):
    for _ in range(count):
        process_allgather(np.ones(4))

if rank == 0:
    if moment == "adding":
        group.send(20, 0)
        add(20)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
group.follow(lambda _: add(1000))
"""


@pytest.mark.parametrize("moment", ["joining", "waiting", "adding"])
def test_a_follower_says_in_one_sentence_that_its_leader_was_killed(moment: str) -> None:
    """JAX's coordination would abort it, with forty lines of stack frames."""
    port = free_ports()
    run = [sys.executable, "-c", HOST]
    given: Any = {"cwd": ROOT, "env": users_environment(), "text": True}
    given |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    follower = subprocess.Popen([*run, "1", str(port), moment], **given)
    try:
        leader = subprocess.run([*run, "0", str(port), moment], **given, timeout=120)
        assert leader.returncode == -signal.SIGKILL, leader.stderr
        _, said = follower.communicate(timeout=120)
    finally:
        follower.kill()
    assert follower.returncode == 1, said
    lines = said.splitlines()
    assert len(lines) == 1, said
    where = f"the leader is lost (127.0.0.1:{port}): "
    assert lines[0].startswith("the engine's hosts end: " + where)


def test_a_relay_outlasts_its_other_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname())
        near = socket.create_connection(relay.address)
        far, _ = listener.accept()
    for one, other in ((near, far), (far, near)):
        one.sendall(b"x" * 100_000)
        got = b""
        while len(got) < 100_000:
            got += other.recv(1 << 16)
    far.close()
    near.settimeout(0.2)
    with pytest.raises(TimeoutError):
        near.recv(1)
    # A connection that cannot be made ends at once: the follower tries again.
    with socket.create_connection(relay.address) as refused:
        assert refused.recv(1) == b""
    relay.close()
    near.settimeout(30)
    assert near.recv(1) == b""
    near.close()
    with pytest.raises(ConnectionError):
        socket.create_connection(relay.address)


# A program over two devices, of one process or of two, from a folder of programs.
KEEPER = """
import logging, sys
from pathlib import Path
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxserve.execution.hosts.join import join_jax
from jaxserve.execution.mesh import PARTS, make_mesh
from jaxserve.start.programs.store import ProgramStore
from jaxserve.settings.hosts import HostsConfig

logging.basicConfig(format="%(message)s")
hosts, rank, port, folder = *map(int, sys.argv[1:4]), Path(sys.argv[4])
jax.config.update("jax_num_cpu_devices", 2 // hosts)
if hosts == 2:
    join_jax(HostsConfig(nnodes=2, node_rank=rank, master_port=port, nodes_secret="given"))
kept = ProgramStore(folder, {"hosts": hosts}, {}, devices=2)
divided = NamedSharding(make_mesh(2), PARTS)
given = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=divided)
program = kept.get("sum", lambda: jax.jit(jnp.sum).lower(given))
ones = jax.make_array_from_callback((8,), divided, lambda index: jnp.ones(8)[index])
assert program(ones).addressable_data(0) == 8
print(kept.num_built, kept.num_loaded)
"""


def test_programs_of_one_process_and_of_two_lie_side_by_side(tmp_path: Path) -> None:
    def start(hosts: int) -> set[str]:
        port = str(free_ports())
        given: dict[str, Any] = {"cwd": ROOT, "env": users_environment(), "text": True}
        given |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        runs = [
            subprocess.Popen(
                [sys.executable, "-c", KEEPER, str(hosts), str(rank), port, str(tmp_path / "kept")],
                **given,
            )
            for rank in range(hosts)
        ]
        said = [run.communicate(timeout=120) for run in runs]
        assert all(run.returncode == 0 for run in runs), said
        assert not any("compiled anew" in log for _, log in said), said
        return {output.splitlines()[-1] for output, _ in said}

    assert start(1) == {"1 0"}
    # The later of two processes may find what the earlier has stored.
    assert "1 0" in start(2)
    assert start(1) == start(2) == {"0 1"}


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 3, over 2 hosts"),
        ({"node_rank": 2}, "node_rank must be less than nnodes, got 2 of 2"),
        ({"max_logprobs": -1}, "max_logprobs is -1"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode is raw_logits"),
        ({"memory_share": 0.5}, "one model"),
        ({"master_addr": "a b"}, "master_addr"),
        ({"master_port": 65535}, "master_port"),
    ],
)
def test_what_several_hosts_cannot_have_is_refused_by_name(
    fields: dict[str, Any], match: str
) -> None:
    good: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2, "nodes_secret": "file"}
    EngineConfig(**good)
    with pytest.raises(InvalidRequest, match=match):
        EngineConfig(**(good | fields))


def test_a_converted_folder_is_refused_before_it_is_read(tmp_path: Path) -> None:
    shutil.copy(bundled_model() / "config.json", tmp_path)
    (tmp_path / CARD).write_text("{}")
    config = EngineConfig(tmp_path, nnodes=2, tensor_parallel_size=2, nodes_secret="file")
    with pytest.raises(InvalidRequest, match=r"was converted.*allowed: what it was made of"):
        find_source(config)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("--headless", "node_rank is 0, and headless true"),
        ("--nnodes 2 -tp 2 --nodes-secret x --node-rank 1", "node_rank is 1, and headless false"),
        ("--nnodes 2 -tp 2", "nnodes needs nodes_secret"),
        ("a=. b=. --nnodes 2 -tp 2 --nodes-secret x", "several hosts serve one model"),
    ],
)
def test_a_command_line_of_hosts_that_contradicts_itself_is_refused(words: str, match: str) -> None:
    arguments = make_parser().parse_args(["serve", *words.split()])
    with pytest.raises(CommandError, match=match):
        arguments.run(arguments)


def test_a_follower_is_not_loaded_as_an_engine() -> None:
    config = EngineConfig(nnodes=2, node_rank=1, tensor_parallel_size=2, nodes_secret="file")
    with pytest.raises(InvalidRequest, match="jaxserve serve --headless"):
        load(config)


def test_two_hosts_of_two_devices_draw_what_the_oracle_does() -> None:
    found = found_by("tests.execution.over_hosts", "--devices", "2")
    assert found["requests"] > 20 and found["follower"] == 0


SIZES = (
    "--nnodes 2 --tensor-parallel-size 2 --max-num-seqs 4 --max-num-batched-tokens 32 "
    "--decode-sizes 4 --token-sizes 32 --num-gpu-blocks-override 80 --max-model-len 1024"
).split()


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Return each host's command line, as a supervisor repeats it: file and ports stay the same."""
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    port = free_ports()
    return [*SIZES, "--nodes-secret", str(secret), "--master-port", str(port)]


class Hosts:
    """A leader that serves, and its follower."""

    def __init__(self, arguments: list[str], port: int = 0) -> None:
        own = [sys.executable, "-m", "jaxserve", "serve", *arguments, "--headless"]
        self.follower = subprocess.Popen(
            [*own, "--node-rank", "1"], cwd=ROOT, env=users_environment(), stderr=subprocess.PIPE
        )
        self.server = Server([*arguments, "--port", str(port)])

    def __enter__(self) -> "Hosts":
        try:
            self.server.__enter__()
        except BaseException:
            self.follower.kill()
            self.follower.communicate()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.follower, self.server.process):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
        self.follower.communicate()
        self.server.__exit__()


def answer_of(server: Server) -> list[int]:
    answer = server.complete("Reverse: s-t-o-n-e", 12, return_token_ids=True)
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    "signals",
    # A connection that is closed ends the hosts of tests above, and of a gang that is killed.
    [[signal.SIGSTOP], pytest.param([signal.SIGKILL, signal.SIGSTOP], marks=pytest.mark.long)],
)
def test_a_follower_that_dies_or_stands_still_ends_the_group_and_a_restart_serves_again(
    arguments: list[str], signals: list[signal.Signals]
) -> None:
    port, answers = free_ports(), list[list[int]]()
    for number in signals:
        with Hosts(arguments, port) as hosts:
            answers.append(answer_of(hosts.server))
            end_by_its_follower(hosts, number)
    with Hosts(arguments, port) as hosts:
        answers.append(answer_of(hosts.server))
        hosts.server.process.send_signal(signal.SIGTERM)
        assert [hosts.server.process.wait(60), hosts.follower.wait(60)] == [0, 0]
    assert answers[0] and answers == [answers[0]] * (len(signals) + 1)


def end_by_its_follower(hosts: Hosts, number: signal.Signals) -> None:
    """Signal the follower under a stream, which ends the leader, and the stream with an error."""
    server = hosts.server
    long = {"prompt": "Count", "max_tokens": 900, "ignore_eos": True, "stream": True}
    stream = server.open_drawing(long)
    hosts.follower.send_signal(number)
    server.process.wait(60)  # it is ten seconds, but a busy machine needs more
    assert server.process.returncode == 1
    with stream:
        said = b""
        while piece := stream.recv(1 << 16):
            said += piece
    # A sum may fail before the silence, or the end of the connection, is noticed.
    assert b'"error"' in said and b"host" in said, said[-1000:]
    assert any("the engine's hosts end" in line for line in server.log)
