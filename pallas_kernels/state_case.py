"""Sizes by which the implementation of an operation with states is chosen."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.devices import DeviceLimits


@dataclass(frozen=True)
class StateCase:
    """Sizes and dtype of an operation with a state per sequence, to choose its implementation.

    Attributes:
        op: "causal_conv", "gated_delta", "channel_delta" (with a decay for each number of a key) or
            "mamba2". For steps of one token per row "conv_step" or "conv_recurrence".
        device: the device that the code is compiled for.
        dtype: dtype of the tokens' numbers.
        tokens: number of tokens, padding included.
        size: taps of a convolution, or size of a query or key.
    """

    op: str
    device: DeviceLimits
    dtype: jnp.dtype
    tokens: int
    size: int

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def product_dtype(self) -> jnp.dtype:
        """Dtype of the operands of products: bfloat16 for bfloat16, otherwise float32.

        Keys are not normalized before the products, and states have no bounds, so float16 would
        overflow.
        """
        return jnp.dtype(jnp.bfloat16 if self.dtype == jnp.bfloat16 else jnp.float32)
