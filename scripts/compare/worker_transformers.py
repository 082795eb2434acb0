"""Transformers behind HTTP: padded static batches of `generate`, or its continuous batching."""

from __future__ import annotations

import threading
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from scripts.compare.worker_http import Front, Job, arguments
from scripts.lib.transformers_batching import start_batching


class Columns(BaseStreamer):
    """Columns of a batch: a token for every row and step. The first call has the prompts."""

    def __init__(self, jobs: list[Job]) -> None:
        self._jobs = jobs
        self._is_started = False

    def put(self, value: torch.Tensor) -> None:
        if self._is_started:
            for job, token in zip(self._jobs, value.tolist(), strict=True):
                job.write([token])
        self._is_started = True

    def end(self) -> None:
        pass


def serve_static(network: Any, front: Front, rows: int) -> None:
    """Serve first-come batches, left-padded, each run until its longest answer ends."""
    while True:
        jobs = front.batch(rows)
        width = max(len(job.prompt) for job in jobs)
        ids = torch.zeros((len(jobs), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, width - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        longest = max(job.max_tokens for job in jobs)
        try:
            with torch.inference_mode():
                network.generate(
                    ids, attention_mask=mask, max_new_tokens=longest, streamer=Columns(jobs)
                )
        except Exception as error:
            for job in jobs:
                job.fail(f"{type(error).__name__}: {error}")


def serve_continuous(network: Any, front: Front, rows: int, max_len: int) -> None:
    """Add requests as they come. A thread reads the answers."""
    page = 64
    batching = start_batching(
        network,
        max_len,
        page_size=page,
        num_blocks=rows * -(-max_len // page),
        max_batch_tokens=512,
        max_requests_per_batch=rows,
        allow_block_sharing=False,
    )
    jobs: dict[str, Job] = {}

    def read() -> None:
        while True:
            result = batching.get_result(timeout=1)
            if result is None:
                if not batching.is_running():
                    for job in jobs.values():
                        job.fail("Transformers' batching thread has ended")
                    return
                continue
            job = jobs[result.request_id]
            if result.error:
                job.fail(str(result.error))
            job.write(result.generated_tokens[job.written :])

    threading.Thread(target=read, daemon=True).start()
    number = 0
    while True:
        job = front.jobs.get()
        name, number = str(number), number + 1
        jobs[name] = job
        batching.add_request(
            job.prompt, request_id=name, max_new_tokens=job.max_tokens, streaming=True
        )


def main() -> None:
    options = arguments(("--mode", "static"))
    torch.set_num_threads(options.threads)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).eval()
    network.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)
    network.config.eos_token_id = None
    front = Front(options.port)
    if options.mode == "static":
        serve_static(network, front, options.rows)
    else:
        serve_continuous(network, front, options.rows, options.max_len)


if __name__ == "__main__":
    main()
