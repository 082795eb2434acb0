"""The shard of every parameter on each of several devices, by index arithmetic alone.

Tensor parallelism (Shoeybi et al. 2019, "Megatron-LM"): each device has some of the heads, of the
MLP's width and of the vocabulary. Results that sum over these dimensions are added over devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.errors import UnsupportedModel
from jaxserve.models.config.recurrent import GatedDeltaSizes, Mamba2Sizes
from jaxserve.models.config.split import AXIS, ONE_DEVICE, Split

if TYPE_CHECKING:
    from jaxserve.models.config.model_config import ModelConfig

__all__ = ["AXIS", "ONE_DEVICE", "Part", "Split"]

# Logical axes that are divided evenly.
DIVIDED = ("mlp", "vocab", "state_heads")
# Consecutive indices, as (first, end).
Span = tuple[int, int]


@dataclass(frozen=True)
class Part:
    """The shard of a parameter on one device, as index ranges of the whole array.

    Attributes:
        shape: shape of the whole array.
        spans: for each dimension, the index ranges (first, end) of the shard, in their order.
            Indices past the end are padding with zeros.
    """

    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def is_whole(self) -> bool:
        """Whether the shard is the whole array, which every device then has."""
        return all(
            spans == ((0, size),) for size, spans in zip(self.shape, self.spans, strict=True)
        )

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of the shard, with its padding."""
        return tuple(sum(end - start for start, end in spans) for spans in self.spans)

    def cut(self, values: np.ndarray) -> np.ndarray:
        """Return this shard of the whole array `values`: a view if possible, else a copy.

        Raises:
            ValueError: `values` does not have the shape of the whole array.
        """
        if values.shape != self.shape:
            raise ValueError(f"an array is {list(values.shape)}; allowed: {list(self.shape)}")
        for dimension, spans in enumerate(self.spans):
            values = _cut(values, dimension, spans)
        return values

    def outputs(self, contract: int) -> np.ndarray:
        """Return the flat indices, int64[O], of the shard's outputs among the weight's outputs.

        `contract` is the number of leading dimensions that are inputs. Padding has the number of
        all outputs as its index.
        """
        return self._indices(slice(contract, None))

    def inputs(self, contract: int) -> np.ndarray:
        """Return the flat indices, int64[I], of the shard's inputs among the weight's inputs.

        `contract` is the number of leading dimensions that are inputs.
        """
        return self._indices(slice(contract))

    def _indices(self, dimensions: slice) -> np.ndarray:
        # Flat indices into `dimensions`. Padding gets the number of all indices.
        shape, flat = self.shape[dimensions], np.zeros((), np.int64)
        is_real = np.ones((), np.bool_)
        for size, spans in zip(shape, self.spans[dimensions], strict=True):
            indices = np.concatenate([np.arange(*span) for span in spans])
            flat = flat[..., None] * size + indices
            is_real = is_real[..., None] & (indices < size)
        return np.where(is_real, flat, prod(shape)).reshape(-1)


def _cut(values: np.ndarray, dimension: int, spans: tuple[Span, ...]) -> np.ndarray:
    """Return `values` with only the index ranges `spans` of one dimension, concatenated.

    Indices past the end of the dimension give zeros, at the end of the result.
    """
    size, before = values.shape[dimension], (slice(None),) * dimension
    if spans == ((0, size),):
        return values
    taken = [values[(*before, slice(*span))] for span in spans]
    missing = sum(end - start for start, end in spans) - sum(t.shape[dimension] for t in taken)
    if missing:
        shape = list(values.shape)
        shape[dimension] = missing
        taken.append(np.zeros(shape, values.dtype))
    return taken[0] if len(taken) == 1 else np.concatenate(taken, axis=dimension)


def part_of(
    config: ModelConfig, axes: Any, shape: tuple[int, ...], device: int, path: str = ""
) -> Part:
    """Return the shard of a parameter on one device.

    kv heads, the MLP's width and the vocabulary are divided. With `expert_parallel` experts are
    divided instead of their width. If there are fewer kv heads than devices, several devices have
    the same kv head, and its query heads are divided among them. The vocabulary is padded to a
    multiple of the devices. If experts have places, a device has the experts of its places, in
    order.

    Args:
        config: configuration of the model, including its `split` (see `check_split`).
        axes: logical axes of the parameter.
        shape: shape of the whole parameter.
        device: number of the device.
        path: path of the parameter, which gives the layer of expert places. Without it the experts
            of the shard are arbitrary, in the right number.
    """
    split = config.split
    if split.devices == 1:
        return Part(shape, tuple(((0, size),) for size in shape))
    has_experts = len(axes) > 1 and axes[0] == "experts" and split.expert_parallel
    if path.startswith("layers."):
        config = config.for_layer(int(path.split(".")[1]))
    spans: list[tuple[Span, ...]] = []
    for dimension, (name, size) in enumerate(zip(axes, shape, strict=True)):
        divided = name == "experts" and dimension == 0 if has_experts else name in DIVIDED
        if name == "kv_heads":
            spans.append((_kv_heads(config, device),))
        elif name == "state_parts":
            spans.append(tuple(_equal_parts(config, device)))
        elif name == "group":
            spans.append(tuple(_group(config, size, device)))
        elif has_experts and divided and split.places:
            spans.append(tuple(_experts(split, device, path)))
        elif divided and len(axes) > 1:
            each = -(-size // split.devices)
            spans.append(((device * each, (device + 1) * each),))
        else:
            spans.append(((0, size),))
    return Part(shape, tuple(spans))


def parts_of(config: ModelConfig, axes: Any, shape: tuple[int, ...], path: str = "") -> list[Part]:
    """Return the shard of a parameter on every device, in the order of devices (see `part_of`)."""
    return [part_of(config, axes, shape, device, path) for device in range(config.split.devices)]


def _equal_parts(config: ModelConfig, device: int) -> Iterator[Span]:
    # Queries, keys and values of all heads, one after the other: a device's share of each.
    assert isinstance(config.recurrent, GatedDeltaSizes | Mamba2Sizes)
    first = 0
    for size in config.recurrent.parts:
        each = size // config.split.devices
        yield first + device * each, first + (device + 1) * each
        first += size


def _experts(split: Split, device: int, path: str) -> Iterator[Span]:
    each = split.places // split.devices
    experts = range(each)
    if path:
        layer = int(path.split(".")[1])  # path is layers.N.mlp.x
        experts = split.placement[layer][device * each : (device + 1) * each]
    for expert in experts:
        yield expert, expert + 1


def kv_copies(config: ModelConfig) -> int:
    """Return the number of devices that have the same kv head, 1 if kv heads are enough for all."""
    return max(1, config.split.devices // config.num_key_value_heads)


def _kv_heads(config: ModelConfig, device: int) -> Span:
    heads, devices = config.num_key_value_heads, config.split.devices
    first = device * heads // devices
    return first, first + max(1, heads // devices)


def _group(config: ModelConfig, size: int, device: int) -> Iterator[Span]:
    # The ranges of the query heads of this device, and of the key and value, if any.
    group, copies = config.num_attention_heads // config.num_key_value_heads, kv_copies(config)
    share = group // copies
    first = device % copies * share
    if copies == 1:
        yield 0, size
        return
    yield first, first + share
    if size > group:
        yield group, size


def group_of(config: ModelConfig) -> int:
    """Return the number of query heads on one device for each of its kv heads."""
    return config.num_attention_heads // config.num_key_value_heads // kv_copies(config)


def local_kv_heads(config: ModelConfig) -> int:
    """Return the number of kv heads on each device, at least 1."""
    return max(1, config.num_key_value_heads // config.split.devices)


def padded_vocab(config: ModelConfig) -> int:
    """Return the size of the vocabulary, rounded up to a multiple of the number of devices."""
    devices = config.split.devices
    return -(-config.vocab_size // devices) * devices


def check_split(config: ModelConfig) -> None:
    """Check that the sizes of the model allow the division over devices in `config.split`.

    Raises:
        UnsupportedModel: names every size that is not divisible, with allowed values; or else an
            unsupported `decode_context_parallel_size`.
    """
    devices, problems = config.split.devices, list(_problems(config))
    if problems:
        raise UnsupportedModel(
            f"tensor_parallel_size is {devices}, over which this {config.architecture} cannot be "
            f"divided: {'; '.join(dict.fromkeys(problems))}"
        )
    _check_context(config)


def _problems(config: ModelConfig) -> Iterator[str]:
    devices, experts = config.split.devices, config.experts
    for sized in config.sized if config.num_page_layers else ():
        heads, kv_heads = sized.num_attention_heads, sized.num_key_value_heads
        if heads % devices:
            yield _multiple("num_attention_heads", heads, devices)
        elif kv_heads % devices and devices % kv_heads:
            allowed = f"a multiple or a divisor of {devices}"
            yield f"num_key_value_heads is {kv_heads}; allowed: {allowed}"
    has_mlp = any(map(config.has_mlp, range(config.num_hidden_layers)))
    is_dense = has_mlp and (experts is None or not all(experts.layers))
    if is_dense and config.intermediate_size % devices:
        yield _multiple("intermediate_size", config.intermediate_size, devices)
    sizes = {} if config.recurrent is None else config.recurrent.divided
    for name, size in sizes.items():
        if size % devices:
            yield _multiple(name, size, devices)
    if experts is None:
        return
    if config.split.expert_parallel and not config.split.places and experts.count % devices:
        yield _multiple("the number of experts", experts.count, devices)
    if not config.split.expert_parallel and experts.size % devices:
        yield _multiple("the width of an expert", experts.size, devices)
    if experts.shared % devices:
        yield _multiple("the width of shared experts", experts.shared, devices)


def _check_context(config: ModelConfig) -> None:
    """Check that devices that divide the positions of the cache between them share a kv head.

    Any other division of positions would save no memory.

    Raises:
        UnsupportedModel: `config.split.context` does not divide the number of copies of a kv head.
    """
    context = config.split.context
    copies, heads = min((kv_copies(one), one.num_key_value_heads) for one in config.sized)
    if config.latent is not None:  # every device has the only head
        heads, copies = 1, config.split.devices
    if context > 1 and config.recurrent is not None:
        raise UnsupportedModel(
            f"decode_context_parallel_size is {context}; allowed: 1, since layers of this "
            f"{config.architecture} keep a state in place of positions"
        )
    if copies % context == 0:
        return
    allowed = [n for n in range(1, copies + 1) if copies % n == 0]
    raise UnsupportedModel(
        f"decode_context_parallel_size is {context}, and positions are divided among devices that "
        f"have the same kv head: over {config.split.devices} devices (tensor_parallel_size) each "
        f"of the {heads} kv heads of this {config.architecture} lies on {copies}; allowed: "
        f"{', '.join(map(str, allowed))}, or a tensor_parallel_size that is a multiple of "
        f"{heads * context}"
    )


def _multiple(name: str, size: int, devices: int) -> str:
    return f"{name} is {size}; allowed: a multiple of {devices}"
