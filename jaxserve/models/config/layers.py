"""Attention windows and rotation of each layer, as given in config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxserve.models.config.fields import MAX_POSITIONS, Fields

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ATTENTION, LATENT = "attention", "latent"
PAGED = frozenset({ATTENTION, LATENT})  # mixers with cache pages
MAX_LAYERS = 1 << 10


@dataclass(frozen=True)
class LayerTable:
    """The parts of each layer, and the window and rotation of its attention.

    Attributes:
        windows: number of positions that a query sees, including its own, or None for all.
        rotary: whether queries and keys are rotated.
        mixers: names of each layer's mixers (see `models.mixers`), which read the same input and
            whose results are added. Empty: every layer has attention alone.
        mlps: whether each layer has an MLP or experts. Empty: every layer has.
        heads: number of query heads of each layer. Empty: all layers have as many.
        kv_heads, head_dims: the same for heads of keys and values, and for the size of a head.
        keys_as_values: whether attention takes the projected keys as values too. Empty: in no
            layer.
        sources: number of the layer whose cache pages each layer reads. Layers with another number
            than their own have no pages. Empty: each layer has its own.
        mlp_sizes: width of the MLP of each layer. Empty: all layers have the same.
    """

    windows: tuple[int | None, ...]
    rotary: tuple[bool, ...]
    mixers: tuple[tuple[str, ...], ...] = ()
    mlps: tuple[bool, ...] = ()
    heads: tuple[int, ...] = ()
    kv_heads: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()
    keys_as_values: tuple[bool, ...] = ()
    sources: tuple[int, ...] = ()
    mlp_sizes: tuple[int, ...] = ()

    def reads_other(self, layer: int) -> bool:
        """Return whether a layer reads the cache pages of another, and has none of its own."""
        return bool(self.sources) and self.sources[layer] != layer


# Reads a LayerTable, given the fields and the number of layers.
ReadLayers = Callable[[Fields, int], LayerTable]


def full_attention(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable without windows. A `layer_types` with windows is refused."""
    return _table(fields, None, [False] * layers)


def one_window(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable whose layers all have the window `sliding_window`, or none if it is null.

    A `layer_types` that differs from this is refused.
    """
    window = _window(fields)
    sliding = [window is not None] * layers
    kinds = _kinds(fields, sliding)
    if kinds != sliding:
        fields.refuse("layer_types", f"{_named(sliding[0])!r} for every layer")
    return _table(fields, window, sliding)


def by_type(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable with the window `sliding_window` in the layers that `layer_types` names.

    Without `layer_types` every layer has the window. A null `sliding_window` means no windows.
    """
    window = _window(fields)
    return _table(fields, window, [window is not None] * layers)


def every(period: int, *, field: str | None = None) -> ReadLayers:
    """Return a function that reads a LayerTable whose windows `layer_types` or else a period gives.

    By default every layer has the window `sliding_window`, except for each `period`-th layer.

    Args:
        period: distance between layers without a window.
        field: the field of config.json that overrides `period`.
    """

    def read(fields: Fields, layers: int) -> LayerTable:
        length = period
        if field is not None:
            length = fields.integer(field, 1, MAX_LAYERS, default=period)
        sliding = [(index + 1) % length != 0 for index in range(layers)]
        return _table(fields, _window(fields), sliding)

    return read


def rotated_windows(fields: Fields, layers: int) -> LayerTable:
    """Return the LayerTable of Cohere 2, which rotates only in layers with a window.

    Without `layer_types`, every n-th layer has no window. n is `sliding_window_pattern`, by default
    4.
    """
    table = every(4, field="sliding_window_pattern")(fields, layers)
    return LayerTable(table.windows, tuple(window is not None for window in table.windows))


def by_switch(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable with the window `sliding_window` in the layers that `layer_types` names.

    Without `layer_types`, the layers from index `max_window_layers` on have the window. No layer
    has a window unless `use_sliding_window` is true.
    """
    if not fields.flag("use_sliding_window", default=False):
        # Both fields describe a window that is switched off.
        fields.take("sliding_window")
        fields.take("max_window_layers")
        return _table(fields, None, [False] * layers)
    window = fields.integer("sliding_window", 1, MAX_POSITIONS)
    first = fields.integer(
        "max_window_layers", 0, MAX_LAYERS, default=0 if fields.has("layer_types") else None
    )
    return _table(fields, window, [index >= first for index in range(layers)])


def from_one_layer(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable with the window `sliding_window` in the layers that `layer_types` names.

    Without `layer_types`, the layers from index `max_window_layers` on have the window, by default
    none.
    """
    first = fields.integer("max_window_layers", 0, MAX_LAYERS, default=layers)
    window = _window(fields)
    return _table(fields, window, [window is not None and i >= first for i in range(layers)])


def one_switched_window(fields: Fields, layers: int) -> LayerTable:
    """Return a LayerTable whose layers have the window `sliding_window` if it is switched on.

    The switch is `use_sliding_window`, by default false. Without it no layer has a window.
    """
    if fields.flag("use_sliding_window", default=False):
        return one_window(fields, layers)
    fields.take("sliding_window")  # the size of a window that is switched off
    return _table(fields, None, [False] * layers)


def no_rope(fields: Fields, layers: int) -> LayerTable:
    """Return the LayerTable of a model some of whose layers do not rotate (SmolLM3).

    Layers with a zero in `no_rope_layers` do not rotate. Without that field, every n-th layer does
    not, where n is `no_rope_layer_interval`, by default 4. With `use_sliding_window`, the layers
    without rotation, or the layers that `layer_types` lists, have the window `sliding_window`.
    """
    interval = fields.integer("no_rope_layer_interval", 1, MAX_LAYERS, default=4)
    rotary = [(index + 1) % interval != 0 for index in range(layers)]
    listed = fields.take("no_rope_layers")
    if listed is not None:
        flags = listed if isinstance(listed, list) else []
        if len(flags) < layers or any(
            type(flag) is not int or flag not in (0, 1) for flag in flags
        ):
            fields.refuse("no_rope_layers", f"0 or 1 for each of the {layers} layers")
        else:
            rotary = [flag == 1 for flag in flags[:layers]]
    on = fields.flag("use_sliding_window", default=False)
    window = _window(fields) if on else None
    if not on:
        fields.take("sliding_window")
    sliding = [window is not None and not rotates for rotates in rotary]
    table = _table(fields, window, sliding)
    return LayerTable(table.windows, tuple(rotary))


def layer_kinds(
    fields: Fields,
    layers: int,
    allowed: Sequence[str],
    default: Sequence[str],
    names: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Return the kind of each layer from `layer_types`, or `default` if the field is absent.

    A malformed `layer_types` is refused and gives layers of the first kind in `allowed`.

    Args:
        layers: number of layers.
        allowed: kinds of layers.
        names: kinds by their other names in the field.
    """
    listed = fields.take("layer_types")
    if listed is None:
        return list(default)
    kinds = listed if isinstance(listed, list) else []
    kinds = [names.get(kind, kind) if isinstance(kind, str) else None for kind in kinds]
    if len(kinds) == layers and all(kind in allowed for kind in kinds):
        return [kind for kind in kinds if kind is not None]
    kinds = " or ".join((", ".join(map(repr, allowed[:-1])), repr(allowed[-1])))
    fields.refuse("layer_types", f"{kinds} for each of {layers} layers")
    return [allowed[0]] * layers


def _window(fields: Fields) -> int | None:
    if fields.take("sliding_window") is None:
        if not fields.mentions("sliding_window"):
            fields.refuse("sliding_window", "a number of positions, or null for no window")
        return None
    return fields.integer("sliding_window", 1, MAX_POSITIONS)


def _kinds(fields: Fields, default: Sequence[bool]) -> list[bool]:
    """Return whether each layer has a window, from `layer_types`, or `default` if that is absent.

    A malformed `layer_types` is added to `fields.problems` and gives `default`.
    """
    kinds = fields.take("layer_types")
    if kinds is None:
        return list(default)
    if (
        not isinstance(kinds, list)
        or len(kinds) != len(default)
        or any(kind not in (FULL, SLIDING) for kind in kinds)
    ):
        fields.refuse("layer_types", f"{FULL!r} or {SLIDING!r} for each of {len(default)} layers")
        return list(default)
    return [kind == SLIDING for kind in kinds]


def _table(fields: Fields, window: int | None, default: Sequence[bool]) -> LayerTable:
    sliding = _kinds(fields, default)
    if window is None and any(sliding):
        if fields.has("layer_types"):
            fields.refuse("layer_types", f"{FULL!r} for every layer where no window is in use")
        else:
            fields.refuse("sliding_window", "a number of positions")
    windows = tuple(window if slides else None for slides in sliding)
    return LayerTable(windows, (True,) * len(sliding))


def _named(slides: bool) -> str:
    return SLIDING if slides else FULL
