"""Checkpoint files into placed arrays."""

from jaxserve.weights.checkpoint import Checkpoint, open_checkpoint
from jaxserve.weights.loading import load_weights, random_weights

__all__ = ["Checkpoint", "load_weights", "open_checkpoint", "random_weights"]
