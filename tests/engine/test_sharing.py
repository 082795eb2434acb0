"""Engines of a fleet share a secret from a file, and their settings of events."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve import EngineConfig
from jaxserve.commands.cli import main
from jaxserve.engine.engine import Engine
from jaxserve.engine.sharing import check_sharing, salt_secret
from jaxserve.errors import InvalidRequest
from jaxserve.server.served.specs import plan_models
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.kv_events import KVEventsConfig
from jaxserve.settings.secret_files import read_secret
from jaxserve.start.loaded import Loaded

SECRET = b"0123456789abcdef" * 2
EVENTS: dict[str, Any] = {"enable_kv_cache_events": True}


def secret_file(folder: Path, content: bytes = SECRET, mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    assert read_secret(None) is None
    assert read_secret(secret_file(tmp_path, SECRET + b"\n")) == SECRET + b"\n"
    assert read_secret(secret_file(tmp_path, mode=0o440)) == SECRET, "a group's secret of a pod"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secret")
    assert read_secret(link) == SECRET
    assert len(read_secret(secret_file(tmp_path, bytes(1 << 16))) or b"") == 1 << 16


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (b"", 0o600, "must hold from 32 to 65536 random bytes, and holds 0 bytes"),
        (SECRET[1:], 0o600, "holds 31 bytes"),
        (bytes((1 << 16) + 1), 0o600, "holds more"),
        (SECRET, 0o644, r"is open to others \(mode 0644\)"),
        (SECRET, 0o602, r"is open to others \(mode 0602\)"),
        (SECRET, 0o660, r"is open to others \(mode 0660\)"),
    ],
)
def test_a_bad_secret_is_a_sentence(tmp_path: Path, content: bytes, mode: int, said: str) -> None:
    path = secret_file(tmp_path, content, mode)
    with pytest.raises(InvalidRequest, match=f"prefix_caching_secret: {path} .*{said}"):
        read_secret(path)


def test_what_is_no_file_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (
        ("none", "cannot be read (No such file or directory)"),
        ("", "is not a file"),
        ("pipe", "is not a file"),
        ("a\0b", "cannot be read (embedded null byte)"),
    ):
        with pytest.raises(InvalidRequest) as found:
            check_sharing(EngineConfig(prefix_caching_secret=f"{tmp_path}/{name}"))
        assert said in str(found.value)
    assert main(["serve", "--port", "0", "--prefix-caching-secret", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is not a file" in error


def test_engines_of_a_secret_make_equal_keys_and_salts(tmp_path: Path, loaded: Loaded) -> None:
    def keys(**settings: Any) -> bytes:
        engine = Engine(replace(loaded, config=replace(loaded.config, **settings)))
        made = engine.scheduler.publisher.page_keys
        return made.prefix("salt", np.arange(40, dtype=np.int32)).keys.tobytes()

    path = secret_file(tmp_path)
    assert keys(prefix_caching_secret=path) == keys(prefix_caching_secret=str(path))
    assert keys() != keys()
    config = EngineConfig(prefix_caching_secret=path)
    assert salt_secret(config) == salt_secret(config) != SECRET
    assert salt_secret(EngineConfig()) != salt_secret(EngineConfig())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"enable": True}, "has no field 'enable'; its fields are enable_kv_cache_events, pub"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events must be true or false; got '1'"),
        ({"publisher": "kafka"}, "publisher must be null or zmq; got 'kafka'"),
        ({"endpoint": None}, "endpoint must be like tcp://.*; got 'None'"),
        ({"endpoint": "5557"}, "endpoint must be like"),
        ({"endpoint": "tcp://*:65536"}, "endpoint must be like"),
        ({"endpoint": "inproc://here"}, "endpoint must be like"),
        ({"replay_endpoint": 5558}, "replay_endpoint must be like"),
        ({"replay_endpoint": "tcp://*:5557"}, "replay_endpoint must be another one than endpoint"),
        ({"buffer_steps": -1}, "buffer_steps"),
        ({"buffer_steps": "many"}, "buffer_steps"),
        ({"hwm": 0}, "hwm"),
        ({"max_queue_size": 1.5}, "max_queue_size"),
        ({"topic": 7}, "topic must be a printable text"),
        ({"topic": "t" * 256}, "topic must be a printable text of at most 255 bytes"),
        ({"topic": "\ud800"}, "topic must be a printable text of at most 255 bytes"),
    ],
)
def test_bad_settings_of_events_are_a_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"kv_events_config.{said}"):
        EngineConfig(kv_events_config=fields)


def test_settings_of_events_are_those_of_vllm() -> None:
    assert EngineConfig().kv_events_config is None
    for given in ("{}", {}, {"publisher": "zmq"}, EVENTS | {"publisher": "null"}):
        config = EngineConfig(kv_events_config=given).kv_events_config
        assert isinstance(config, KVEventsConfig) and not config.publishes
    config = EngineConfig(kv_events_config='{"enable_kv_cache_events": true}').kv_events_config
    assert config == KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint="tcp://*:5557",
        replay_endpoint=None,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
        topic="",
    )
    assert replace(EngineConfig(kv_events_config=config), seed=1).kv_events_config is config


def test_each_model_of_a_server_has_its_own_ports() -> None:
    fields = EVENTS | {"replay_endpoint": "tcp://*:5658"}
    specs = plan_models(
        ["a=x", "b=y", "c=z"], {"kv_events_config": fields}, ServerConfig(port=8000)
    )
    found = [spec.config.kv_events_config for spec in specs]
    assert [config.endpoint for config in found] == [
        f"tcp://*:{port}" for port in (5557, 5558, 5559)
    ]
    assert [config.replay_endpoint for config in found] == [
        f"tcp://*:{port}" for port in (5658, 5659, 5660)
    ]
    assert KVEventsConfig(**EVENTS, endpoint="ipc:///x").for_rank(2).endpoint == "ipc:///x_dp2"
    assert KVEventsConfig(**EVENTS, endpoint="tcp://*:0").for_rank(2).endpoint == "tcp://*:0"
    with pytest.raises(InvalidRequest, match=r"endpoint must be like .*65536"):
        KVEventsConfig(**EVENTS, endpoint="tcp://*:65535").for_rank(1)


def test_a_port_in_use_is_a_sentence_before_anything_is_loaded(
    capsys: pytest.CaptureFixture,
) -> None:
    with socket.create_server(("", 0)) as taken:
        endpoint = f"tcp://*:{taken.getsockname()[1]}"
        free = {"endpoint": "tcp://*:0"}
        for fields in ({"endpoint": endpoint}, free | {"replay_endpoint": endpoint}):
            with pytest.raises(InvalidRequest, match=r"cannot be opened .Address already in use;"):
                Engine(EngineConfig(model="/no/such", kv_events_config=EVENTS | fields))
        text = f'{{"enable_kv_cache_events": true, "endpoint": "{endpoint}"}}'
        assert main(["serve", "--port", "0", "--kv-events-config", text]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--kv-events-config.endpoint" in error


def test_events_without_a_prefix_cache_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fields = EVENTS | {"endpoint": "tcp://*:0"}
    check_sharing(EngineConfig(kv_events_config=fields, enable_prefix_caching=False))
    assert "nothing is published without enable_prefix_caching" in caplog.text
