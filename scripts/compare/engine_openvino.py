"""OpenVINO GenAI's continuous batching, on an export of the checkpoint."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from compare.engine import Engine, Setting, worker


@dataclass(frozen=True)
class OpenVino(Engine):
    name: str = "openvino"
    title: str = "OpenVINO GenAI"
    requirements: tuple[tuple[str, ...], ...] = (
        ("torch==2.13.0",),
        # They ask for torchvision, which is made for CUDA and breaks a torch that is not.
        ("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0"),
        (
            *("transformers>=4.51,<5.6", "nncf==3.4.0", "openvino-genai==2026.4.1.0"),
            *("huggingface-hub<1.22", "requests>=2.33"),
        ),
    )
    version_of: tuple[str, ...] = ("openvino-genai", "optimum-intel")
    settings: str = "ContinuousBatchingPipeline; KV cache and arithmetic in the weights' precision"

    def prepare(self, python: Path, setting: Setting) -> None:
        """Written with optimum-intel; OpenVINO chooses its arithmetic when it runs."""
        if (setting.converted / "openvino" / "done").exists():
            return
        folder = setting.converted / "openvino"
        folder.parent.mkdir(parents=True, exist_ok=True)
        formats = {"float32": "fp32", "bfloat16": "bf16"}
        export = [str(python.parent / "optimum-cli"), "export", "openvino"]
        subprocess.run(
            [
                *(*export, "--model", str(setting.model), "--task", "text-generation-with-past"),
                *("--weight-format", formats[setting.dtype], str(folder)),
            ],
            check=True,
            capture_output=True,
            env={"HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}:/usr/bin:/bin"},
        )
        (folder / "done").touch()

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        folder = str(setting.converted / "openvino")
        return worker(python, "worker_openvino.py", setting, port, "--converted", folder)
