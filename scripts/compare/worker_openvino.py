"""OpenVINO GenAI's ContinuousBatchingPipeline behind HTTP."""

from __future__ import annotations

from collections import deque

import numpy as np
import openvino
import openvino_genai

from scripts.compare.worker_http import Front, Job, arguments


def open_pipeline(
    folder: str, rows: int, max_len: int, threads: int, dtype: str
) -> openvino_genai.ContinuousBatchingPipeline:
    """Open the pipeline in float32 where that is set: the default is bf16, and an 8-bit cache."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = rows
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = True
    scheduler.num_kv_blocks = rows * -(-max_len // 32) + rows
    # A processor without bfloat16 refuses a cache in it.
    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if dtype == "bfloat16" and "BF16" in capabilities else "f32"
    properties = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)


def wanted(job: Job) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = job.max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def main() -> None:
    options = arguments(("--converted", ""))
    pipeline = open_pipeline(
        options.converted, options.rows, options.max_len, options.threads, options.dtype
    )
    front = Front(options.port)
    running: list[tuple[Job, openvino_genai.GenerationHandle]] = []
    waiting: deque[Job] = deque()
    number = 0
    while True:
        if not (running or waiting):
            waiting.append(front.jobs.get())
        waiting.extend(front.waiting())
        # With prompts in chunks the pipeline itself takes as many as its cache holds.
        while waiting and len(running) < options.rows:
            job = waiting.popleft()
            prompt = openvino.Tensor(np.array([job.prompt], np.int64))
            running.append((job, pipeline.add_request(number, prompt, wanted(job))))
            number += 1
        pipeline.step()
        for job, handle in running:
            while handle.can_read():
                for output in handle.read().values():
                    job.write(list(output.generated_ids))
        running = [pair for pair in running if not pair[0].done.is_set()]


if __name__ == "__main__":
    main()
