"""The parts of ``gpu_report.py`` that run whole engines: jaxserve's, and others on the same GPU."""

from __future__ import annotations

import gc
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from scripts.gpu import models as gpu_models
from scripts.gpu.parts import Item, Setting
from scripts.lib.transformers_batching import start_batching


def mix(model: gpu_models.ModelShape, dry_run: bool) -> tuple[list[list[int]], list[int]]:
    """Draw (prompts, numbers of tokens to draw): 256 requests of 100-1024 in and out, seed 0."""
    count, low, high = (4, 3, 9) if dry_run else (256, 100, 1025)
    rng = np.random.default_rng(0)
    lengths = rng.integers(low, high, (count, 2))
    vocabulary = min(model.V, 10000)
    prompts = [rng.integers(0, vocabulary, int(n)).tolist() for n in lengths[:, 0]]
    return prompts, lengths[:, 1].tolist()


def _throughput(setting: Setting, name: str) -> dict[str, Any]:
    """Measure output tokens per second of jaxserve on the mix: random weights, greedy."""
    model = gpu_models.MODELS[name]
    prompts, outputs = mix(model, setting.dry_run)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in outputs]
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(model.config()))
        begin = time.perf_counter()
        settings = {"max_model_len": 64, "max_num_seqs": 2} if setting.dry_run else {}
        settings = {"max_model_len": 2048, **settings}
        with LLM(
            folder,
            load_format="dummy",
            dtype="float32" if setting.dry_run else "bfloat16",
            skip_tokenizer_init=True,
            **settings,
        ) as llm:
            start_up = time.perf_counter() - begin
            rates = []
            for _ in range(1 if setting.dry_run else 3):
                begin = time.perf_counter()
                done = llm.generate(prompts, params, use_tqdm=False)
                seconds = time.perf_counter() - begin
                rates.append(sum(len(d.outputs[0].token_ids) for d in done) / seconds)
    gc.collect()
    return {
        "value": round(float(np.median(rates))),
        "unit": "output tokens/s",
        "rates": rates,
        "start_up_s": round(start_up, 1),
    }


def engine(setting: Setting) -> Iterator[Item]:
    """Time the 256-request mix on the 0.6B- and the 8B-shaped model."""
    for name in ("tiny",) if setting.dry_run else ("0.6b", "8b"):
        yield f"{name} 256 requests", lambda n=name: _throughput(setting, n)


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
    batching = start_batching(network, max(outputs))

    def serve(prompts: list[list[int]], outputs: list[int]) -> float:
        begin, tokens = time.perf_counter(), 0
        for prompt, count in zip(prompts, outputs, strict=True):
            batching.add_request(prompt, max_new_tokens=count)
        for _ in prompts:
            result = batching.get_result(timeout=300)
            if result is None or result.error:
                raise RuntimeError(f"Transformers gave no answer: {result and result.error}")
            tokens += len(result.generated_tokens)
        if tokens != sum(outputs):
            raise RuntimeError(f"Transformers gave {tokens} tokens, not {sum(outputs)}")
        return tokens / (time.perf_counter() - begin)

    try:
        serve(prompts[:2], outputs[:2])  # its own warm-up comes with the first requests
        rates = [serve(prompts, outputs) for _ in range(1 if setting.dry_run else 3)]
    finally:
        batching.stop(block=True)
    return {"value": round(float(np.median(rates))), "unit": "output tokens/s", "rates": rates}


def peers(setting: Setting) -> Iterator[Item]:
    """Time torch SDPA and flex attention at the kernels' shapes; Transformers on the mix."""
    shapes = ((2, 1, 64), (1, 32, 32)) if setting.dry_run else ((64, 1, 4096), (1, 8192, 8192))
    for kind in ("sdpa", "flex"):
        for B, Q, context in shapes:
            label = f"torch {kind} dense B={B} queries {Q} context {context}"
            yield (
                label,
                lambda k=kind, b=B, q=Q, c=context: _torch_attention(setting, k, b, q, c),
            )
    for name in ("tiny",) if setting.dry_run else ("0.6b", "8b"):
        yield (
            f"transformers continuous batching {name}",
            lambda n=name: _continuous_batching(setting, n),
        )
