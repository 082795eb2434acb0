"""Times of others on the same GPU, for the report: torch and Transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scripts.gpu import models as gpu_models
from scripts.gpu.serving import mix
from scripts.gpu.setting import Item, Setting
from scripts.lib.transformers_batching import start_batching


def _torch_seconds(call: Callable[[], Any], cuda: bool, repeats: int) -> float:
    """Measure median seconds of a torch call over five rounds."""
    # Imported here: torch is not installed wherever this report runs.
    import torch

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    call()
    wait()
    rounds = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        rounds.append((time.perf_counter() - begin) / repeats)
    return float(np.median(rounds))


def _torch_attention(setting: Setting, kind: str, B: int, Q: int, context: int) -> dict[str, Any]:
    """Time torch's attention on dense (not paged) K and V of the 8B's heads."""
    # Imported here: torch is not installed wherever this report runs.
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = "cpu" if setting.dry_run else "cuda"
    dtype = torch.float32 if setting.dry_run else torch.bfloat16

    def draw(heads: int, length: int) -> torch.Tensor:
        return torch.randn(B, heads, length, 128, device=device, dtype=dtype)

    q, k, v = draw(32, Q), draw(8, context), draw(8, context)
    if kind == "sdpa":

        def call() -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=Q > 1, enable_gqa=True
            )
    else:
        mask = None
        if Q > 1:
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, Q, context, device=device
            )
        run = flex_attention if setting.dry_run else torch.compile(flex_attention)

        def call() -> torch.Tensor:
            return run(q, k, v, block_mask=mask, enable_gqa=True)

    seconds = _torch_seconds(call, device == "cuda", 1 if setting.dry_run else 20)
    seen = Q * context - Q * (Q - 1) // 2
    return {
        "value": round(seconds * 1e6, 1),
        "unit": "us",
        "tflops": round(4 * 32 * 128 * B * seen / seconds / 1e12, 1),
        "terabytes_per_s": round((k.nbytes + v.nbytes) / seconds / 1e12, 3),
    }


def _continuous_batching(setting: Setting, name: str) -> dict[str, Any]:
    """Measure output tokens per second of Transformers' continuous batching on the mix."""
    # Imported here: torch is not installed wherever this report runs.
    import torch
    import transformers

    model = gpu_models.MODELS[name]
    prompts, outputs = mix(model, setting.dry_run)
    fields = {k: v for k, v in model.config().items() if k not in ("architectures", "model_type")}
    kind = "LlamaConfig" if model.architecture == gpu_models.LLAMA else "Qwen3Config"
    config = getattr(transformers, kind)(**fields)
    config._attn_implementation = "sdpa"
    device = "cpu" if setting.dry_run else "cuda"
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # Its guesses from free memory are for a GPU.
    small = {"num_blocks": 16, "max_batch_tokens": 64} if setting.dry_run else {}
    batching = start_batching(network, max(outputs), **small)

    def serve(prompts: list[list[int]], outputs: list[int]) -> float:
        begin, tokens = time.perf_counter(), 0
        for prompt, count in zip(prompts, outputs, strict=True):
            batching.add_request(prompt, max_new_tokens=count)
        for _ in prompts:
            result = batching.get_result(timeout=120)
            if result is None or result.error:
                raise RuntimeError(f"Transformers gave no answer: {result and result.error}")
            tokens += len(result.generated_tokens)
        if tokens != sum(outputs):
            raise RuntimeError(f"Transformers gave {tokens} tokens, not {sum(outputs)}")
        return tokens / (time.perf_counter() - begin)

    try:
        serve(prompts[:2], outputs[:2])  # its own warm-up comes with the first requests
        rates = [serve(prompts, outputs)]
    finally:
        batching.stop(block=True)
    return {"value": round(float(np.median(rates))), "unit": "output tokens/s", "rates": rates}


def peers(setting: Setting) -> Iterator[Item]:
    """Time torch's attention at the kernels' shapes, then Transformers on the mix."""
    shapes = ((2, 1, 64), (1, 32, 32)) if setting.dry_run else ((64, 1, 4096), (1, 8192, 8192))
    models = ("tiny",) if setting.dry_run else ("0.6b", "8b")
    attention: dict[str, list[Item]] = {"sdpa": [], "flex": []}
    for kind, items in attention.items():
        for B, Q, context in shapes:
            label = f"torch {kind} dense B={B} queries {Q} context {context}"
            job = lambda k=kind, b=B, q=Q, c=context: _torch_attention(setting, k, b, q, c)  # noqa: E731
            items.append((label, job))
    batching = [
        (
            f"transformers continuous batching {name}",
            lambda n=name: _continuous_batching(setting, n),
        )
        for name in models
    ]
    yield from (*attention["sdpa"], *batching[:1], *attention["flex"], *batching[1:])
