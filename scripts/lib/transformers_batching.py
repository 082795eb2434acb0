"""Transformers' continuous batching as both comparisons start it. It needs torch."""

from __future__ import annotations

from typing import Any


def start_batching(network: Any, longest: int, **settings: Any) -> Any:
    """Start the manager of `generate_batch`, which itself takes one length for all requests.

    Args:
        longest: most tokens that a request generates.
        settings: of `ContinuousBatchingConfig`, where its guesses from GPU memory do not fit.
    """
    # Imported here: it is not installed wherever this module is.
    import transformers

    generation = transformers.GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    config = transformers.ContinuousBatchingConfig(**settings)
    batching = network.init_continuous_batching(
        generation_config=generation, continuous_batching_config=config
    )
    batching.start()
    return batching
