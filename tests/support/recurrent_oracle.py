"""The recurrent mixers in NumPy float64, over a whole sequence from its beginning."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.models import ModelConfig

Array = np.ndarray


def recurrent_mixer(kind: str, config: ModelConfig, layer: dict[str, Array], x: Array) -> Array:
    """Return the result of a layer's mixer, [T, D], for normalized tokens [T, D].

    Args:
        kind: "conv", "delta", "channel_delta" or "mamba2".
        layer: the layer's weights by name.
    """
    mixers = {"conv": _short_conv, "delta": _gated_delta, "mamba2": _mamba2}
    return (mixers | {"channel_delta": _channel_delta})[kind](config, layer, x)


def _short_conv(config: ModelConfig, layer: dict[str, Array], x: Array) -> Array:
    parts = np.tensordot(x, layer["conv.into"], 1) + layer.get("conv.into_bias", 0)
    before, after, inputs = parts[:, 0], parts[:, 1], parts[:, 2]
    bias = layer.get("conv.taps_bias", np.zeros(1))
    y = _convolved(before * inputs, layer["conv.taps"], bias)
    return (after * y) @ layer["conv.out"] + layer.get("conv.out_bias", 0)


def _gated_delta(config: ModelConfig, layer: dict[str, Array], x: Array) -> Array:
    sizes: Any = config.recurrent
    values = sizes.parts[2]
    if sizes.fused:
        per = sizes.heads // sizes.groups * sizes.outputs
        fused = (x @ layer["delta.fused"]).reshape(len(x), sizes.groups, -1)
        cut = np.cumsum([sizes.inputs, sizes.inputs, per])
        query, key, value, gate = (
            part.reshape(len(x), -1) for part in np.split(fused, cut, axis=-1)
        )
        mixed = np.concatenate([query, key, value], axis=-1)
    else:
        mixed, gate = x @ layer["delta.mixed"], x @ layer["delta.gate"]
    mixed = _silu(_convolved(mixed, layer["delta.taps"], np.zeros(1)))
    query, key, value = np.split(mixed, np.cumsum(sizes.parts[:2]), axis=-1)
    times = sizes.heads // sizes.groups
    query, key = (
        np.repeat(_unit(part.reshape(len(x), sizes.groups, -1)), times, axis=1)
        for part in (query, key)
    )
    value = value.reshape(len(x), sizes.heads, -1)
    gates = np.tensordot(x, layer["delta.gates"], 1).reshape(len(x), 2, sizes.heads)
    write = sizes.strength * _sigmoid(gates[:, 0])
    rate, bias = layer["delta.constants"]
    decay = np.exp(-np.exp(rate) * np.log1p(np.exp(gates[:, 1] + bias)))
    state = np.zeros((sizes.heads, sizes.inputs, sizes.outputs))
    y = np.zeros((len(x), sizes.heads, sizes.outputs))
    for token in range(len(x)):
        state = state * decay[token][:, None, None]
        known = np.einsum("hk,hkv->hv", key[token], state)
        change = write[token][:, None] * (value[token] - known)
        state = state + key[token][..., None] * change[:, None]
        y[token] = np.einsum("hk,hkv->hv", query[token] * sizes.inputs**-0.5, state)
    y = _normed(y, sizes.norm_eps or config.rms_norm_eps) * layer["delta.norm.scale"]
    return (y.reshape(len(x), values) * _silu(gate)) @ layer["delta.out"]


def _channel_delta(config: ModelConfig, layer: dict[str, Array], x: Array) -> Array:
    sizes: Any = config.recurrent
    mixed = _silu(_convolved(x @ layer["delta.mixed"], layer["delta.taps"], np.zeros(1)))
    query, key, value = (
        part.reshape(len(x), sizes.heads, -1)
        for part in np.split(mixed, np.cumsum(sizes.parts[:2]), axis=-1)
    )
    query, key = _unit(query) * sizes.inputs**-0.5, _unit(key)
    write = _sigmoid(x @ layer["delta.write"])
    narrow, gate = x, x
    if sizes.rank:
        narrow, gate = x @ layer["delta.decay_down"], x @ layer["delta.gate_down"]
    (constants,) = layer["delta.constants"]
    rate = np.exp(constants[:, :1])
    steps = (narrow @ layer["delta.decay"]).reshape(key.shape) + constants[:, 1:]
    if sizes.bound:
        decay = np.exp(-sizes.bound * _sigmoid(rate * steps))
    else:
        decay = np.exp(-rate * np.log1p(np.exp(steps)))
    state = np.zeros((sizes.heads, sizes.inputs, sizes.outputs))
    y = np.zeros((len(x), sizes.heads, sizes.outputs))
    for token in range(len(x)):
        state = state * decay[token][..., None]
        known = np.einsum("hk,hkv->hv", key[token], state)
        change = write[token][:, None] * (value[token] - known)
        state = state + key[token][..., None] * change[:, None]
        y[token] = np.einsum("hk,hkv->hv", query[token], state)
    y = _normed(y, config.rms_norm_eps) * layer["delta.norm.scale"]
    gate = _sigmoid(gate @ layer["delta.gate"])
    return (y.reshape(gate.shape) * gate) @ layer["delta.out"]


def _mamba2(config: ModelConfig, layer: dict[str, Array], x: Array) -> Array:
    sizes: Any = config.recurrent
    gate, mixed, steps = (
        x @ layer[f"mamba.{part}"] + layer.get(f"mamba.{part}_bias", np.zeros(1))
        for part in ("gate", "mixed", "steps")
    )
    if sizes.factors:
        first, *parts, last = sizes.factors
        gate, mixed, steps = first * gate, np.repeat(parts, sizes.parts) * mixed, last * steps
    mixed = _silu(_convolved(mixed, layer["mamba.taps"], layer.get("mamba.taps_bias", np.zeros(1))))
    inputs, b, c = np.split(mixed, np.cumsum(sizes.parts[:2]), axis=-1)
    inputs = inputs.reshape(len(x), sizes.heads, -1)
    times = sizes.heads // sizes.groups
    b, c = (np.repeat(part.reshape(len(x), sizes.groups, -1), times, axis=1) for part in (b, c))
    rate, bias, direct = layer["mamba.constants"]
    steps = np.clip(np.log1p(np.exp(steps + bias)), sizes.least, sizes.most)
    decay = np.exp(-np.exp(rate) * steps)
    state = np.zeros((sizes.heads, sizes.inputs, sizes.outputs))
    y = np.zeros((len(x), sizes.heads, sizes.outputs))
    for token in range(len(x)):
        change = steps[token][:, None] * inputs[token]
        state = state * decay[token][:, None, None] + b[token][..., None] * change[:, None]
        y[token] = np.einsum("hk,hkv->hv", c[token], state) + direct[:, None] * inputs[token]
    y, gate = (part.reshape(len(x), sizes.groups, -1) for part in (y, _silu(gate)))
    y = y if sizes.norm == "before" else y * gate
    if sizes.norm:
        y = _normed(y, config.rms_norm_eps) * layer["mamba.norm.scale"]
    y = (y * gate if sizes.norm == "before" else y).reshape(len(x), -1)
    return y @ layer["mamba.out"] + layer.get("mamba.out_bias", 0)


def _convolved(x: Array, taps: Array, bias: Array) -> Array:
    """Convolve each channel of x [T, C] with its taps [W, 1, C], the newest last."""
    width = len(taps)
    padded = np.concatenate([np.zeros((width - 1, x.shape[1])), x])
    parts = (taps[tap, 0] * padded[tap : tap + len(x)] for tap in range(width))
    return sum(parts) + bias.reshape(1, -1)


def _unit(x: Array) -> Array:
    return x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def _normed(x: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
