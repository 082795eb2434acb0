"""Engines of the two models that are small to compile and keep their programs from run to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve import EngineConfig, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from tests.equivalence import Got, drive
from tests.support.own_programs import own_programs
from tests.support.quick_code import quick_programs
from tests.support.workloads import Ask

# One program for prompts and mixed steps, one for decodes of one row, and one for more.
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "token_sizes": (256,),
    "decode_sizes": (1, 8),
    "wait_for_all_programs": True,
    "max_model_len": 2560,
    "num_gpu_blocks_override": 601,
    "check_invariants": True,
}


def load_real(path: Path, **settings: Any) -> Loaded:
    """Return the compiled model of a folder of `tests.real.fetch`; its programs lie beside it."""
    kept = {"compilation_cache_dir": path.parent / "compiled"}
    with own_programs():
        return load(EngineConfig(model=path, **{**SETTINGS, **kept, **settings}))


def load_quickly(path: Path, **settings: Any) -> Loaded:
    """Load as `load_real` does, but with one size of decodes, which compiles in less time.

    For answers that are compared with a reference, within a tolerance.
    """
    kept = {"compilation_cache_dir": path.parent / "compiled quickly", "decode_sizes": (8,)}
    with quick_programs():
        return load_real(path, **{**kept, **settings})


def make_engine(loaded: Loaded, pages: int | None = None, **config: Any) -> Engine:
    """Return an engine over compiled programs, of which only one may be in use at a time.

    Args:
        pages: how many blocks of all kinds of pages it may use, if not all.
        **config: fields of EngineConfig that no program depends on.
    """
    engine = Engine(replace(loaded, config=replace(loaded.config, **config)))
    if pages is not None:
        pool, kinds = engine.pool, engine.slots.kinds
        pages *= sum(kind.num_pages for kind in kinds)
        pool.__init__(min(pages, pool.num_pages), pool.page_size, kinds)
        engine.slots.block_pages = pool.block_pages  # which the scheduler has passed on
    return engine


def serve(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams | Sequence[SamplingParams],
    apart: int = 0,
) -> list[Got]:
    """Return the answers to prompts that are served together.

    Args:
        params: of all prompts, or of each.
        apart: steps between one request and the next.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    asks = [
        Ask(prompt, sampling, at_step=apart * index, salt="", priority=0, abort_at=None)
        for index, (prompt, sampling) in enumerate(zip(prompts, each, strict=True))
    ]
    got = [completions[0] for completions in drive(engine, asks)]
    stats = engine.stats()
    assert stats.pages_in_use == 0 and stats.num_compiles == 0, stats
    engine.scheduler.check()
    return got


def serve_alone(loaded: Loaded, prompt: list[int], params: SamplingParams) -> Got:
    """Return the answer to a prompt that runs alone, with an empty cache and one step at a time."""
    plain: dict[str, Any] = {"enable_prefix_caching": False, "async_scheduling": False}
    return serve(make_engine(loaded, num_scheduler_steps=1, **plain), [prompt], params)[0]
