"""Kernels for LLM inference: functions over arrays, independent of requests and of the server.

Attention reads a paged KV cache. Its two arrays have the layout ``[P, K, S, H]`` (pages, kv heads,
tokens of a page, head dim), so each pair (page, kv head) is one contiguous run of ``S * H`` values.

* ``ragged_paged_attention``: rows with any number of queries (prompt chunks, decodes, drafts).
* ``paged_decode_attention``: one query per row. On a GPU the KV of a row is split over programs.
* ``kv_write``: store the keys and values of a step in their pages, in place.
* ``rope_kv_write``: normalize and rotate queries and keys, then store keys and values.
* ``quantized_kv_write``: store int8 keys and values, with one scale per token and kv head.
* ``latent_attention``, ``latent_write``, ``quantized_latent_write``: the same over one array
  ``[P, 1, S, C]`` of latents, which all heads read as keys and, in part, as values.
* ``attention_of_part`` and ``merge_parts``: attention over a cache that is sharded over devices by
  position. The first computes one shard, the second combines all shards.
* ``sum_over_devices`` and ``add_norm_over_devices``: sums over the devices of a mesh.

Products with weights:

* ``quantized_matmul``: dequantizes the weight piece by piece, never as a whole.
* ``grouped_matmul`` and ``quantized_grouped_matmul``: rows sorted by group times the matrix of
  their group (mixtures of experts).
* ``matmul_in_parts`` and ``gated_matmul``: products of few rows on a GPU.
* ``output_major_matmul``: transposed quantized weights, for a GPU without Triton.
* ``panel_product``, ``quantized_panel_product`` and ``block_product`` (GGUF blocks): products on
  CPU whose weights have a layout that is read at the speed of the memory. ``laid_out_product``
  makes that layout itself, and can be differentiated.

Operations over rows:

* ``add_norm``: add to the residual stream and normalize the sum.
* ``greatest``: argmax of logits.
* ``draw``: sample tokens on CPU.
* ``row_sums``, ``softmax``, ``sigmoid``, ``softplus`` and ``gated``. On CPU the result of a row
  does not depend on the number of rows.

Operations with a state per sequence:

* ``causal_conv``: a convolution of a few taps for each channel.
* ``gated_delta`` and ``mamba2``: linear recurrences over a matrix for each head.

Every operation has a specification in plain JAX (``reference``) and several implementations. The
tables in ``implementation`` decide which implementation runs.
"""

from pallas_kernels.arguments import AttentionOptions, check_page_table
from pallas_kernels.context_parts import PartPositions, attention_of_part, merge_parts
from pallas_kernels.device_sums import add_norm_over_devices, device_sum_limit, sum_over_devices
from pallas_kernels.implementation import IMPLEMENTATIONS
from pallas_kernels.latent import latent_attention, latent_write, quantized_latent_write
from pallas_kernels.latent_arguments import LatentOptions
from pallas_kernels.ops import (
    add_norm,
    add_norm_kernel,
    block_product,
    gated_matmul,
    greatest,
    grouped_matmul,
    has_few_row_product,
    has_greatest,
    inputs_in_panels,
    kernel_code,
    kernels_from,
    kv_write,
    laid_out_product,
    matmul_in_parts,
    paged_decode_attention,
    panel_product,
    quantized_kv_write,
    quantized_panel_product,
    ragged_paged_attention,
    restore_kernels,
    rope_kv_write,
    rope_kv_write_kernel,
    rows_in_panels,
)
from pallas_kernels.qkv_arguments import QkvOptions
from pallas_kernels.quantized_grouped_matmul import quantized_grouped_matmul
from pallas_kernels.quantized_matmul import dequantize, output_major_matmul, quantized_matmul
from pallas_kernels.row_arguments import Activation, NormOptions
from pallas_kernels.row_ops import (
    DrawSettings,
    draw,
    gated,
    has_draw,
    row_sums,
    sigmoid,
    softmax,
    softplus,
)
from pallas_kernels.state_arguments import (
    ChannelDeltaOptions,
    ChannelGates,
    ConvOptions,
    ConvWeights,
    DeltaOptions,
    Mamba2Options,
    StateRows,
)
from pallas_kernels.states import causal_conv, conv_recurrence, gated_delta, mamba2

__all__ = [
    "IMPLEMENTATIONS",
    "Activation",
    "AttentionOptions",
    "ChannelDeltaOptions",
    "ChannelGates",
    "ConvOptions",
    "ConvWeights",
    "DeltaOptions",
    "DrawSettings",
    "LatentOptions",
    "Mamba2Options",
    "NormOptions",
    "PartPositions",
    "QkvOptions",
    "StateRows",
    "add_norm",
    "add_norm_kernel",
    "add_norm_over_devices",
    "attention_of_part",
    "block_product",
    "causal_conv",
    "check_page_table",
    "conv_recurrence",
    "dequantize",
    "device_sum_limit",
    "draw",
    "gated",
    "gated_delta",
    "gated_matmul",
    "greatest",
    "grouped_matmul",
    "has_draw",
    "has_few_row_product",
    "has_greatest",
    "inputs_in_panels",
    "kernel_code",
    "kernels_from",
    "kv_write",
    "laid_out_product",
    "latent_attention",
    "latent_write",
    "mamba2",
    "matmul_in_parts",
    "merge_parts",
    "output_major_matmul",
    "paged_decode_attention",
    "panel_product",
    "quantized_grouped_matmul",
    "quantized_kv_write",
    "quantized_latent_write",
    "quantized_matmul",
    "quantized_panel_product",
    "ragged_paged_attention",
    "restore_kernels",
    "rope_kv_write",
    "rope_kv_write_kernel",
    "row_sums",
    "rows_in_panels",
    "sigmoid",
    "softmax",
    "softplus",
    "sum_over_devices",
]
