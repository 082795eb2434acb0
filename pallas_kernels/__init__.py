"""Paged attention kernels: arrays in, arrays out, without a notion of requests or serving.

Three operations over a paged KV cache whose arrays are laid out ``[P, K, S, H]`` (pages, kv heads,
tokens of a page, head dim), so that one (page, kv head) block is ``S * H`` contiguous values:

* ``ragged_paged_attention``: rows of any number of queries (prompt chunks, decodes, drafts);
* ``paged_decode_attention``: one query per row, the KV of a row split over programs and merged;
* ``kv_write``: store a step's keys and values in their pages, in place; ``rope_kv_write`` norms
  and rotates queries and keys before; ``quantized_kv_write`` stores int8 with a scale a token and
  kv head.

``sum_over_devices`` and ``add_norm_over_devices`` sum over the devices of a mesh.

``attention_of_part`` is the first over some positions of every row, and ``merge_parts`` joins what
all parts gave, for caches over several devices.

Operations over weights: ``quantized_matmul``, which never makes a quantized weight whole;
``grouped_matmul`` and ``quantized_grouped_matmul``, rows sorted by group times each group's matrix,
for mixtures of experts; ``matmul_in_parts`` and ``gated_matmul``, for few rows on a GPU; on one
without Triton ``output_major_matmul``, whose quantized weight is transposed; and on CPU
``panel_product``, ``quantized_panel_product`` and ``block_product``, for the blocks of GGUF files,
which read weights in an order of their own at the memory's speed. Operations over rows:
``add_norm``, which adds to the residual stream and norms the sum; ``greatest``, for tokens;
``row_sums``, for norms, ``softmax`` and ``sigmoid``, for routers; on CPU a row's result does not
depend on how many others there are.

Every operation has a plain specification in ``reference`` and several implementations; which one
runs, the tables in ``implementation`` decide.
"""

from pallas_kernels.arguments import check_page_table
from pallas_kernels.context_parts import attention_of_part, merge_parts
from pallas_kernels.device_sums import (
    add_norm_over_devices,
    device_sum_limit,
    sum_over_devices,
)
from pallas_kernels.implementation import IMPLEMENTATIONS
from pallas_kernels.norm_arguments import NormOptions
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
from pallas_kernels.product_arguments import Activation
from pallas_kernels.qkv_arguments import QkvOptions
from pallas_kernels.quantized_grouped_matmul import quantized_grouped_matmul
from pallas_kernels.quantized_matmul import (
    dequantize,
    output_major_matmul,
    quantized_matmul,
)
from pallas_kernels.row_ops import draw, gated, has_draw, row_sums, sigmoid, softmax

__all__ = [
    "IMPLEMENTATIONS",
    "Activation",
    "NormOptions",
    "QkvOptions",
    "add_norm",
    "add_norm_kernel",
    "add_norm_over_devices",
    "attention_of_part",
    "block_product",
    "check_page_table",
    "dequantize",
    "device_sum_limit",
    "draw",
    "gated",
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
    "matmul_in_parts",
    "merge_parts",
    "output_major_matmul",
    "paged_decode_attention",
    "panel_product",
    "quantized_grouped_matmul",
    "quantized_kv_write",
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
    "sum_over_devices",
]
