"""The model as pure functions of its weights, with the kernels and bits of an engine."""

from jaxserve.pure.functions import hidden_states, logits, logprobs

__all__ = ["hidden_states", "logits", "logprobs"]
