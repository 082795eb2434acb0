"""OpenVINO GenAI's continuous batching, on an export of the checkpoint."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts.compare.engine import Engine, Setting, worker


@dataclass(frozen=True)
class OpenVino(Engine):
    name: str = "openvino"
    title: str = "OpenVINO GenAI"
    requirements: tuple[tuple[str, ...], ...] = (
        ("torch==2.13.0",),
        # They require torchvision, which is made for CUDA and breaks a torch that is not.
        ("--no-deps", "optimum-intel==2.2.0", "optimum==2.3.0"),
        (
            *("transformers>=4.51,<5.6", "nncf==3.4.0", "openvino-genai==2026.4.1.0"),
            *("huggingface-hub<1.22", "requests>=2.33"),
        ),
    )
    version_of: tuple[str, ...] = ("openvino-genai", "optimum-intel")
    settings: str = (
        "ContinuousBatchingPipeline, prompts in chunks, a request a row; KV cache and arithmetic "
        "in the weights' precision, in float32 where the CPU has no bfloat16"
    )

    def _folder(self, setting: Setting) -> Path:
        return setting.folder / "converted" / f"{setting.model.name}-openvino"

    def prepare(self, python: Path, setting: Setting) -> None:
        """Export once, in float32: OpenVINO rounds weights to the arithmetic it runs in."""
        folder = self._folder(setting)
        if (folder / "done").exists():
            return
        export = [str(python.parent / "optimum-cli"), "export", "openvino"]
        subprocess.run(
            [
                *(*export, "--model", str(setting.model), "--task", "text-generation-with-past"),
                *("--weight-format", "fp32", str(folder)),
            ],
            check=True,
            capture_output=True,
            env={"HF_HUB_OFFLINE": "1", "PATH": f"{python.parent}:/usr/bin:/bin"},
        )
        (folder / "done").touch()

    def command(self, python: Path, setting: Setting, port: int) -> list[str]:
        folder = str(self._folder(setting))
        return worker(python, "worker_openvino", setting, port, "--converted", folder)
