"""The division of parameters over several devices: index arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.errors import UnsupportedModel
from jaxserve.models import ModelConfig, abstract_model, parse_model_config
from jaxserve.models.shards import (
    Split,
    check_split,
    group_of,
    padded_vocab,
    part_of,
    parts_of,
)
from jaxserve.weights.model_weights import parameters_of
from tests.models.test_published_traits import LAGUNA, MIMO
from tests.support.tiny_config import TINY


def over(config: ModelConfig, devices: int, **options: bool) -> ModelConfig:
    return replace(config, split=Split(devices, **options))


def tiny_config(**sizes: int) -> ModelConfig:
    fields = {**TINY, "architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes}
    return parse_model_config({"head_dim": 16, **fields})


def test_parts_of_heads_side_by_side_are_the_whole():
    config = over(tiny_config(num_attention_heads=8, num_key_value_heads=4), 4)
    whole = np.arange(3 * 4 * 4 * 2).reshape(3, 4, 4, 2)
    axes = ("embed", "kv_heads", "group", "head_dim")
    cut = [part.cut(whole) for part in parts_of(config, axes, whole.shape)]
    assert [piece.shape for piece in cut] == [(3, 1, 4, 2)] * 4
    np.testing.assert_array_equal(np.concatenate(cut, axis=1), whole)


def test_devices_beyond_the_kv_heads_share_one_and_divide_its_queries():
    config = over(tiny_config(num_attention_heads=8, num_key_value_heads=2), 4)
    # Of two kv heads: queries 0 to 3, the key 4, the value 5.
    whole = np.arange(12).reshape(1, 2, 6, 1)
    axes = ("embed", "kv_heads", "group", "head_dim")
    cut = [part.cut(whole).ravel().tolist() for part in parts_of(config, axes, whole.shape)]
    assert cut == [[0, 1, 4, 5], [2, 3, 4, 5], [6, 7, 10, 11], [8, 9, 10, 11]]
    assert group_of(config) == 2
    scale = part_of(config, ("kv_heads", "group"), (2, 4), 3).cut(np.arange(8).reshape(2, 4))
    assert scale.tolist() == [[6, 7]]


def test_a_vocabulary_that_does_not_divide_is_padded_with_zeros():
    config = over(tiny_config(vocab_size=5), 2)
    part = part_of(config, ("vocab", "embed"), (5, 2), 1)
    assert part.own_shape == (3, 2) and padded_vocab(config) == 6
    assert part.cut(np.ones((5, 2))).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert part.outputs(2).tolist() == [0] and part.inputs(1).tolist() == [3, 4, 5]


def test_experts_are_divided_whole_or_by_their_width():
    config = tiny_config()
    axes, shape = ("experts", "embed", "gate_up", "mlp"), (4, 3, 2, 8)
    assert part_of(over(config, 2), axes, shape, 1).own_shape == (4, 3, 2, 4)
    assert part_of(over(config, 2, expert_parallel=True), axes, shape, 1).own_shape == (2, 3, 2, 8)
    router = part_of(over(config, 2, expert_parallel=True), ("embed", "experts"), (3, 4), 1)
    assert router.is_whole


def test_flat_indices_are_those_of_the_cut():
    config = over(tiny_config(num_attention_heads=8, num_key_value_heads=2), 4)
    whole = np.arange(3 * 2 * 6 * 2).reshape(3, 2, 6, 2)
    axes = ("embed", "kv_heads", "group", "head_dim")
    for part in parts_of(config, axes, whole.shape):
        expected = whole.reshape(3, -1)[:, part.outputs(1)]
        np.testing.assert_array_equal(expected, part.cut(whole).reshape(3, -1))


def test_each_parameter_is_on_some_device():
    config = over(tiny_config(num_attention_heads=8, num_key_value_heads=2), 4)
    for path, parameter in parameters_of(abstract_model(config)).items():
        axes, shape = parameter.get_metadata()["axes"], tuple(parameter.shape)
        held = np.zeros(shape, bool)
        indices = np.arange(held.size).reshape(shape)
        for part in parts_of(config, axes, shape):
            held.reshape(-1)[part.cut(indices)] = True
        assert held.all(), path


@pytest.mark.parametrize(
    ("sizes", "devices", "expected"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 4, "num_attention_heads is 6"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "num_key_value_heads is 6"),
        ({"intermediate_size": 30}, 4, "intermediate_size is 30; allowed: a multiple of 4"),
    ],
)
def test_sizes_that_do_not_divide_are_named(sizes: dict[str, int], devices: int, expected: str):
    with pytest.raises(UnsupportedModel, match=expected):
        check_split(over(tiny_config(**{"num_attention_heads": 8, **sizes}), devices))
    check_split(over(tiny_config(), 1))


def test_layers_with_different_numbers_of_query_heads_are_divided_each_by_its_own():
    config = over(parse_model_config(LAGUNA), 16)  # two devices for each kv head
    axes = ("embed", "kv_heads", "group", "head_dim")
    shapes = {"layers.0": (3, 8, 48 // 8 + 2, 2), "layers.1": (3, 8, 64 // 8 + 2, 2)}
    for path, shape in shapes.items():
        part = part_of(config, axes, shape, 1, f"{path}.attention.qkv")
        half = (shape[2] - 2) // 2
        assert part.spans[2] == ((half, 2 * half), (2 * half, shape[2]))
    check_split(config)
    with pytest.raises(UnsupportedModel, match="num_attention_heads is 48"):
        check_split(over(config, 32))


def test_pages_of_layers_with_different_kv_heads_are_divided_each_by_its_own():
    config = parse_model_config(MIMO)
    for devices, heads, splits in ((1, [4, 8], 2), (4, [4, 8], 2), (8, [8, 8], 1)):
        layout = over(config, devices).page_layout
        assert [kind.heads for kind in layout.kinds] == heads  # copies of a head included
        assert [layout.splits(0), layout.splits(1)] == [1, splits]
        check_split(over(config, devices))
    axes = ("embed", "kv_heads", "group", "head_dim")
    for path, heads in (("layers.0", 4), ("layers.1", 8)):
        part = part_of(over(config, 8), axes, (3, heads, 64 // heads + 1, 2), 1, path)
        assert part.spans[1] == ((0, 1) if heads == 4 else (1, 2),)
    with pytest.raises(UnsupportedModel, match="8 kv heads of this MiMo"):
        check_split(replace(config, split=replace(config.split, devices=8, context=2)))
