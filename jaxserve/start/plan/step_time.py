"""Predictions of a step's time on each of several devices, from data sheets and stated latencies.

The time of a step is the longer of its memory traffic at the full bandwidth and its products at
the peak rate, plus the sums over devices, which do not overlap with either. All figures are from
publications, not measured: limits from data sheets, which no step reaches, and times of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import mul
from types import MappingProxyType

from jaxserve.models import ModelConfig
from jaxserve.models.shards import group_of, local_kv_heads
from jaxserve.start.plan.weights import Weights

TERA, GIGA = 1e12, 1e9
# Dense products of 16 bits with sums in float32, a second, by the data sheets.
_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": 125 * TERA,
        "Tesla V100-SXM2-32GB": 125 * TERA,
        "Tesla T4": 65 * TERA,
        "NVIDIA A100-SXM4-80GB": 312 * TERA,
        "NVIDIA A100-SXM4-40GB": 312 * TERA,
        "NVIDIA A100 80GB PCIe": 312 * TERA,
        "NVIDIA A100-PCIE-40GB": 312 * TERA,
        "NVIDIA A30": 165 * TERA,
        "NVIDIA A10": 125 * TERA,
        "NVIDIA GeForce RTX 3090": 71 * TERA,
        "NVIDIA GeForce RTX 4090": 165 * TERA,
        "NVIDIA GeForce RTX 5090": 209 * TERA,
        "NVIDIA L4": 121 * TERA,
        "NVIDIA L40S": 362 * TERA,
        "NVIDIA H100 80GB HBM3": 989 * TERA,
        "NVIDIA H100 PCIe": 756 * TERA,
        "NVIDIA H200": 989 * TERA,
        "NVIDIA B200": 2250 * TERA,
    }
)
# Bytes per second between cards, one way, by the data sheets of NVLink. Other cards have PCIe 4.
_LINKS: Mapping[str, float] = MappingProxyType(
    {
        "Tesla V100-SXM2-16GB": 150 * GIGA,
        "Tesla V100-SXM2-32GB": 150 * GIGA,
        "NVIDIA A100-SXM4-80GB": 300 * GIGA,
        "NVIDIA A100-SXM4-40GB": 300 * GIGA,
        "NVIDIA H100 80GB HBM3": 450 * GIGA,
        "NVIDIA H200": 450 * GIGA,
        "NVIDIA B200": 900 * GIGA,
    }
)
_PCIE = 32 * GIGA
# Seconds of a small sum. Of two cards: NCCL within a CUDA graph (NVIDIA/nccl, issue 1259). Of
# eight: NCCL on H100s, 19 to 25 us from 128 B to 512 KB (ByteDance-Seed/Triton-distributed, issue
# 57). Of more, on several hosts: assumed, no figure was found.
_SUM_OF_TWO, _SUM_OF_EIGHT, _SUM_OF_HOSTS = 6e-6, 20e-6, 40e-6
_A_HOST = 8  # cards
_SUMMED = 4  # bytes of a number that is summed, which is float32


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of one step on each device, and the parts of that time.

    Attributes:
        tokens: number of tokens of the step.
        memory: seconds to read weights and cache once at the full bandwidth.
        compute: seconds of the products at the peak rate.
        sums: seconds of the sums over devices, and of the exchange of attention's parts.
    """

    tokens: int
    memory: float
    compute: float
    sums: float

    @property
    def seconds(self) -> float:
        """Seconds of the step: the longer of `memory` and `compute`, plus `sums`."""
        return max(self.memory, self.compute) + self.sums


def sum_seconds(devices: int, num_bytes: float, card: str) -> float:
    """Return the predicted seconds of one sum over devices (all-reduce), 0 for one device.

    Args:
        devices: number of devices.
        num_bytes: bytes of one device's addend, of which a ring moves 2 (n - 1) / n over a link.
        card: name of the card that each device is.
    """
    if devices == 1:
        return 0.0
    least = _SUM_OF_TWO if devices == 2 else _SUM_OF_EIGHT
    least = _SUM_OF_HOSTS if devices > _A_HOST else least
    return least + 2 * (devices - 1) / devices * num_bytes / _LINKS.get(card, _PCIE)


@dataclass(frozen=True)
class StepTimes:
    """Predicts the duration of steps of a model on a card, for one form of the weights.

    Attributes:
        weights: weights of the model, with its split over devices.
        form: quantized form of the weights, or None.
        token_bytes: bytes of a token's KV cache in all layers, on each device.
        card: name of the card that each device is.
        bandwidth: bytes per second of a device's memory.
        state_bytes: bytes of a sequence's states in all layers, on each device.
    """

    weights: Weights = field(compare=False)  # the plan beside it identifies the model
    form: str | None
    token_bytes: float
    card: str
    bandwidth: float
    state_bytes: int = 0

    @property
    def is_known(self) -> bool:
        """Whether the card's peak rate is in the table, and its bandwidth is known."""
        return self.card in _FLOPS and self.bandwidth > 0

    def decode(self, rows: int, context: int) -> StepTime:
        """Predict the time of a decode step of `rows` sequences that have `context` tokens each.

        A layer with a window reads at most its window. States are read and written.
        """
        each, drawn = self.weights.multiplied
        seen = self._seen(context)
        work = rows * (2 * (each + drawn) + self._attention * seen)
        moved = rows * (seen * self.token_bytes + 2 * self.state_bytes)
        return self._time(rows, self.weights.read(self.form, rows) + moved, work)

    def prefill(self, tokens: int) -> StepTime:
        """Predict the time of one step over a whole prompt of `tokens` tokens."""
        each, drawn = self.weights.multiplied
        work = 2 * (tokens * each + drawn) + self._attention * tokens * tokens / 2
        return self._time(tokens, self.weights.read(self.form, tokens), work)

    def _time(self, tokens: int, read: float, work: float) -> StepTime:
        config = self.weights.config
        size = tokens * config.hidden_size * _SUMMED
        each = sum_seconds(config.split.devices, size, self.card)
        layers = range(config.num_hidden_layers)
        parts = sum(len(config.mixers_of(layer)) + config.has_mlp(layer) for layer in layers)
        sums = (parts + 1) * each  # the embedding's too
        if (context := config.split.context) > 1:
            # In each layer with attention, queries go to other devices of the kv head, and results
            # back. Each of both moves half of the bytes of a sum over equally large arrays.
            for sized in self._attentions:
                heads = group_of(sized) * (1 if config.latent is None else local_kv_heads(sized))
                size = tokens * context * heads * (_value_size(sized) + 2) * _SUMMED
                sums += 2 * sum_seconds(context, size / 2, self.card)
        return StepTime(tokens, read / self.bandwidth, work / _FLOPS[self.card], sums)

    def _seen(self, context: int) -> float:
        """Return the positions that a token attends to, on average over numbers in the cache."""
        kinds = self.weights.config.page_layout.kinds
        sizes = [
            len(kind.layers) * kind.heads * (kind.key_size + kind.value_size) for kind in kinds
        ]
        seen = [context if kind.window is None else min(context, kind.window) for kind in kinds]
        return sum(map(mul, sizes, seen)) / max(1, sum(sizes))

    @property
    def _attention(self) -> float:
        # Operations per token and attended position, in all layers with attention of a device.
        return 2.0 * sum(
            local_kv_heads(one) * group_of(one) * (one.head_dim + _value_size(one))
            for one in self._attentions
        )

    @property
    def _attentions(self) -> list[ModelConfig]:
        """The configuration of each layer with attention."""
        config = self.weights.config
        layers = filter(config.has_pages, range(config.num_hidden_layers))
        return list(map(config.for_layer, layers))


def _value_size(config: ModelConfig) -> int:
    # A value is as long as a key, except with latents.
    return config.head_dim if config.latent is None else config.latent.rank
