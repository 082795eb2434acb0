"""Tiny random checkpoints written by Transformers, and a plain way to run ours over paged KV."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax.typing import DTypeLike
from safetensors.torch import load_file, save_file

from jaxserve.models import Decoder, read_model_config
from jaxserve.weights import load_weights
from tests.models.cases import family_of, transformers_model
from tests.models.packed import pack_experts, set_packed_experts


def hugging_face_model(case: str) -> Any:
    """Return a random model whose every parameter matters: biases and norms are random too."""
    torch.manual_seed(sum(case.encode()))
    model = transformers_model(case)
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(("bias", "alpha_p", "alpha_n", "_scale", ".scale")):
                parameter += 0.3 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer += 0.1 * torch.randn_like(buffer)
            elif name.endswith("layer_scalar"):
                buffer *= 0.7 + 0.3 * torch.rand_like(buffer)
    if "mxfp4" in case:
        set_packed_experts(model)
    return model


def save(case: str, model: Any, directory: Path) -> None:
    """Write the checkpoint of a case."""
    model.save_pretrained(directory)
    if family_of(case) == "olmo_hybrid":
        _divide_taps(model, directory)
    if "mxfp4" in case:
        pack_experts(directory)


def _divide_taps(model: Any, directory: Path) -> None:
    """Store each convolution of OLMo Hybrid as in published checkpoints.

    These have a tensor each for queries, keys and values. Transformers writes three equal parts.
    """
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, module in model.named_modules():
        if hasattr(module, "conv1d"):
            sizes = module.key_dim, module.key_dim, module.value_dim
            parts = module.conv1d.weight.detach().split(sizes)
            for letter, part in zip("qkv", parts, strict=True):
                tensors[f"{name}.{letter}_conv1d.weight"] = part.contiguous()
    save_file(tensors, path, {"format": "pt"})


def load(directory: Path, dtype: DTypeLike = jnp.float32) -> Decoder:
    """Load our model of a checkpoint in `directory`."""
    return load_weights(directory, read_model_config(directory), dtype)


def reference_logits(model: Any, tokens: Sequence[int], together: int = 0) -> np.ndarray:
    """Return Transformers' logits after each token, [T, V].

    Args:
        model: Transformers' model.
        tokens: a sequence.
        together: tokens read at once, the others one by one; all at once by default.
    """
    ids, cache, logits = torch.tensor([list(tokens)]), None, []
    with torch.no_grad():
        for chunk in ids.split(
            [together, *[1] * (len(tokens) - together)] if together else len(tokens), 1
        ):
            output = model(chunk, past_key_values=cache, use_cache=bool(together))
            cache = output.past_key_values
            logits.append(output.logits[0].float().numpy())
    return np.concatenate(logits)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    return float(np.abs(got - want).max() / np.abs(want).max())
