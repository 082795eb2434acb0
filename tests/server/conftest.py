"""Servers that the tests share. Of package scope: other folders of the process come after them."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxserve import AsyncLLM, EngineConfig
from jaxserve.server.http.app import App
from jaxserve.server.kept.files import FileStore
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.settings import ServerConfig
from jaxserve.settings.config import bundled_model
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from tests.server import models
from tests.support.live_server import SMALL, Canary, Server
from tests.support.quick_code import quick_programs

KEYS = ("first-key", "second-key")


# A server that reads its own template of a file: the prompt shows the template's input.
SHOWING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "thinking={{ enable_thinking }} effort={{ reasoning_effort }} "
    "docs={{ documents | length if documents else 0 }}"
)


class Many(NamedTuple):
    """A server of several models, the first with marks for gaps, and the ids of these."""

    server: Server
    marks: list[int]


class Certificates(NamedTuple):
    """Files in PEM: an authority's, and a server's and a client's that it signed."""

    authority: Path
    server: Path
    key: Path
    client: Path
    client_key: Path
    locked_key: Path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Return the bundled model's tokenizer, as Transformers reads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_model())


@pytest.fixture(scope="session")
def oracle() -> Callable[[list[int]], np.ndarray]:
    """Return Transformers' next-token distribution as a function of token ids, [T, V]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float64)

    def logprobs(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].log_softmax(-1).numpy()

    return logprobs


@pytest.fixture(scope="package")
def main_server() -> Iterator[Server]:
    """Start a server of the bundled model, with short times for slow clients."""
    times = "--header-timeout 3 --body-timeout 3 --write-timeout 4"
    buffers = "--max-unread-tokens 64 --send-buffer-bytes 4096"
    slow = [*times.split(), *buffers.split(), "--enable-tokenizer-info-endpoint"]
    with Server([*SMALL, *slow]) as server:
        yield server


@pytest.fixture(scope="package")
def main_canary(main_server: Server) -> Canary:
    return Canary(main_server)


@pytest.fixture
def server(main_server: Server, main_canary: Canary) -> Iterator[Server]:
    """Return the main server, and check after each test that it is unchanged."""
    yield main_server
    main_canary.check()


@pytest.fixture(scope="package")
def slow_server() -> Iterator[Server]:
    """Start a server like the main one, but so slow that a test can observe running requests."""
    with Server(SMALL, module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="package")
def slow_canary(slow_server: Server) -> Canary:
    return Canary(slow_server)


@pytest.fixture
def slow(slow_server: Server, slow_canary: Canary) -> Iterator[Server]:
    """Return the slow server, and check after each test that it is unchanged."""
    yield slow_server
    slow_canary.check()


@pytest.fixture(scope="package")
def narrow_server() -> Iterator[Server]:
    """Start a server with one slot, slow steps, a short queue, keys, and no unknown fields."""
    narrow = (
        "--max-num-queued-reqs 2 --max-queued-prompt-tokens 64 "
        "--max-connections 24 --strict --max-num-seqs 1 --decode-sizes 1 "
        "--allowed-origins http://app.example --reasoning-parser qwen3 --tool-call-parser hermes"
    )
    keys = [part for key in KEYS for part in ("--api-key", key)]
    arguments = [*SMALL, *narrow.split(), *keys]
    with Server(arguments, key=KEYS[0], module="tests.support.slow_server") as server:
        yield server


@pytest.fixture(scope="package")
def narrow_canary(narrow_server: Server) -> Canary:
    return Canary(narrow_server)


@pytest.fixture
def narrow(narrow_server: Server, narrow_canary: Canary) -> Iterator[Server]:
    """Return the narrow server, and check after each test that it is unchanged."""
    yield narrow_server
    narrow_canary.check()


@pytest.fixture(scope="package")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    folder = tmp_path_factory.mktemp("many")
    marks = models.write_coder(folder / "coder")
    models.write_marked(folder / "marked")
    models.write_channels(folder / "channels")
    models.write_strange(folder / "strange")
    models.write_short(folder / "short")
    names = ("coder", "marked", "channels", "strange", "short")
    more = "--max-logprobs -1 --response-role critic".split()
    with Server([*(f"{name}={folder / name}" for name in names), *SMALL, *more]) as server:
        yield Many(server, marks)


@pytest.fixture(scope="package")
def trusting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("template") / "showing.jinja"
    path.write_text(SHOWING)
    (path.parent / "generation_config.json").write_text('{"eos_token_id": 3, "max_new_tokens": 2}')
    arguments = [
        *(*SMALL, "--chat-template", str(path), "--trust-request-chat-template"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
        *("--reasoning-effort-map", '{"medium": "low"}', "--root-path", "/llm"),
        *("--generation-config", str(path.parent)),
        *("--allowed-origins", '["http://a.example", "http://b.example"]', "--allow-credentials"),
        *("--allowed-methods", "GET", "--allowed-headers", '["x-one"]'),
        *("--enable-force-include-usage", "--return-tokens-as-token-ids"),
    ]
    with Server(arguments) as server:
        yield server


@pytest.fixture(scope="package")
def trusting_canary(trusting_server: Server) -> Canary:
    return Canary(trusting_server)


@pytest.fixture
def trusting(trusting_server: Server, trusting_canary: Canary) -> Iterator[Server]:
    """Return a server with its own template, and check after each test that it is unchanged."""
    yield trusting_server
    trusting_canary.check()


@pytest.fixture(scope="session")
def loaded() -> Loaded:
    with quick_programs():
        return load(
            EngineConfig(
                max_num_seqs=2,
                max_num_batched_tokens=32,
                decode_sizes=(2,),
                token_sizes=(32,),
                num_gpu_blocks_override=30,
                num_scheduler_steps=1,
            )
        )


@pytest.fixture
def make_app(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., App]]:
    """Yield a function from fields of settings to an application in this process."""
    monkeypatch.setattr(loaded.runner, "close", lambda: None)
    llm = AsyncLLM(loaded)

    def make(**fields: Any) -> App:
        config = ServerConfig(**{"health_timeout": 0.2, "drain_timeout": 0.2, **fields})
        files = None if config.files_dir is None else FileStore(config)
        models = Models([ServedModel(["demo"], "demo", llm, config, b"secret")])
        return App(models, config, files=files)

    yield make
    llm.close()


@pytest.fixture
def app(make_app: Callable[..., App]) -> App:
    return make_app()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2".split()
    leaf = ["-addext", "basicConstraints=critical,CA:FALSE", "-CA", "authority.pem"]
    for name, more in {  # as strictly as Python 3.13 reads them
        "authority": [
            *("-addext", "basicConstraints=critical,CA:TRUE"),
            *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        ],
        "server": ["-addext", "subjectAltName=DNS:localhost", *leaf],
        "client": leaf,
    }.items():
        signed = ["-CAkey", "authority.key"] if "-CA" in more else []
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"]
        openssl(*new, *files, *more, *signed)
    openssl(*"ec -in server.key -aes256 -passout pass:secret -out locked.key".split())
    names = ("authority.pem", "server.pem", "server.key", "client.pem", "client.key", "locked.key")
    return Certificates(*(folder / name for name in names))
