"""A model's start, in lines that a person reads; and at length, for `--verbose`."""

from __future__ import annotations

from jaxserve.start.loaded import Loaded


def summary(loaded: Loaded) -> list[str]:
    """Return a line each for what a model takes, how much it serves at once, and its programs."""
    runner, config = loaded.runner, loaded.config
    tokens = (runner.num_pages - 1) * config.block_size
    device = "" if loaded.start is None else f" on {loaded.start.device}"
    lines = [
        f"model: {runner.model_config.architecture}{_quantization(loaded)}, "
        f"{readable(runner.weight_bytes)} of weights{device}",
        f"cache: {readable(runner.num_pages * runner.page_bytes)} for {tokens:,} tokens, "
        f"in {_cache_dtype(loaded)}",
        f"limits: {config.max_num_seqs} sequences together, each of "
        f"{loaded.limits.max_model_len:,} tokens at most; more requests wait",
    ]
    if loaded.start is not None:
        built, kept = loaded.start.store.num_built, loaded.start.store.num_loaded
        later = 0 if loaded.behind is None else loaded.behind.num_missing
        after = f"; {later} more, of less padding, are added while it serves" if later else ""
        lines.append(f"programs: {built} compiled, {kept} loaded from files{after}")
    return lines


def at_length(loaded: Loaded) -> list[str]:
    """Return lines with every figure of a start, to the byte."""
    runner, config = loaded.runner, loaded.config
    pages = runner.num_pages
    temporary = 0 if loaded.start is None else loaded.start.temporary_bytes
    lines = [
        f"memory: weights {runner.weight_bytes:,} bytes{_quantization(loaded)}; "
        f"KV cache in {_cache_dtype(loaded)}, {pages:,} pages x "
        f"{runner.page_bytes:,} = {pages * runner.page_bytes:,} bytes "
        f"({(pages - 1) * config.block_size:,} tokens); temporaries of a step at most "
        f"{temporary:,} bytes; at most {config.max_num_seqs} sequences "
        f"of {loaded.limits.max_model_len:,} tokens",
        f"{loaded.start}",
    ]
    if loaded.behind is not None and loaded.behind.num_missing:
        missing = loaded.behind.num_missing
        lines.append(f"{missing} more programs, of less padding, are added while it serves")
    return lines


def _cache_dtype(loaded: Loaded) -> str:
    if loaded.config.kv_cache_dtype == "fp8":
        return "float8_e4m3fn"
    if loaded.config.kv_cache_dtype == "int8_per_token_head":
        return "int8, with a scale for each token and kv head"
    return loaded.runner.kv_dtype.name


def _quantization(loaded: Loaded) -> str:
    """Name the format of the blocks' weights, where they are quantized."""
    stored = loaded.runner.model_config.quantization
    form = stored.method if stored is not None else loaded.config.quantization
    return "" if form is None else f" (blocks in {form})"


def readable(size: int) -> str:
    """Return a number of bytes in the unit that leaves few digits: 2.6 MB, 15 GB."""
    value, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 10 or unit == "bytes" else f"{value:.1f} {unit}"
