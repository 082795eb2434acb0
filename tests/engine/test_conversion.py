"""`jaxserve convert`, and engines that serve a converted folder."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import LLM, EngineConfig, UnsupportedModel
from jaxserve.commands.cli import main
from jaxserve.models.placed_weight import PlacedWeight
from jaxserve.models.token_rounding import TokenRounded
from jaxserve.start.sources.find import find_source
from jaxserve.start.start import load
from jaxserve.weights import parameter_values
from tests.engine.test_gguf_text import byte_level
from tests.engine.test_start import SMALL
from tests.support.gguf_files import Type, random_tensors, raw_config, write_gguf
from tests.support.shared_engine import GREEDY
from tests.weights.packing import save
from tests.weights.test_quantized import EXPERTS
from tests.weights.test_quantized import checkpoint as quantized_checkpoint

pytestmark = [pytest.mark.own_engine, pytest.mark.usefixtures("quick_code")]


def test_a_converted_folder_serves_the_same(llm, checkpoint: Path, tmp_path: Path, capsys) -> None:
    to = tmp_path / "to"
    assert main(["convert", str(checkpoint), str(to)]) == 0
    assert "whole and verified" in capsys.readouterr().err
    assert main(["convert", str(checkpoint), str(to)]) == 2
    assert "exists already" in capsys.readouterr().err
    want = llm.generate(["some text", "é"], GREEDY, use_tqdm=False)
    with LLM(to, **SMALL) as converted:
        got = converted.generate(["some text", "é"], GREEDY, use_tqdm=False)
        message = [{"role": "user", "content": "hi"}]
        rendered = converted.get_tokenizer().render_chat(message)
    assert [one.outputs[0].token_ids for one in got] == [one.outputs[0].token_ids for one in want]
    assert [one.outputs[0].text for one in got] == [one.outputs[0].text for one in want]
    assert rendered == llm.get_tokenizer().render_chat(message)
    with pytest.raises(UnsupportedModel, match="dtype float32, not bfloat16"):
        load(EngineConfig(model=to, dtype="bfloat16", **SMALL))


def test_a_gguf_file_is_converted(tmp_path: Path) -> None:
    """Unpacked once: configuration, tokenizer and ends become Transformers' files."""
    backend, metadata = byte_level()
    raw = raw_config("llama") | {"vocab_size": 310}
    kept = {key: value for key, value in metadata.items() if key.startswith("tokenizer")}
    kept["tokenizer.ggml.token_type"] = kept["tokenizer.ggml.token_type"].tolist()
    path = write_gguf(
        tmp_path / "m.gguf", "llama", random_tensors(raw), Type.Q8_0, metadata=kept, raw=raw
    )
    assert main(["convert", str(path), str(tmp_path / "to"), "--dtype", "bfloat16"]) == 0
    before, config = find_source(EngineConfig(model=path)), EngineConfig(model=tmp_path / "to")
    after = find_source(config)
    assert after.model_config == before.model_config
    assert json.loads((tmp_path / "to" / "generation_config.json").read_text()) == {
        "eos_token_id": [1]
    }
    bfloat16 = jax.numpy.dtype("bfloat16")
    want = parameter_values(before.load(before.model_config, bfloat16))
    got = parameter_values(after.load(after.model_config, bfloat16))
    assert all(np.asarray(got[p]).tobytes() == np.asarray(want[p]).tobytes() for p in want)
    text = "the cat<|user|> sat"
    assert after.tokenizer(config).encode(text) == [0, *backend.encode(text).ids]


@pytest.mark.parametrize("form", ["int4", "awq", "w8a8", "nf4"])
def test_quantized_weights_are_converted(form: str, tmp_path: Path, capsys) -> None:
    """A load of the converted folder gives the placed trees, and refuses another quantization."""
    stored = "awq" if form == "int4" else form
    folder, plain = quantized_checkpoint(tmp_path / "stored", stored, EXPERTS)
    asked = form if form == "int4" else None
    if asked is not None:
        folder = save(tmp_path / "plain", EXPERTS, plain)
    to = tmp_path / "to"
    options = ["--skip-tokenizer-init", *(["--quantization", asked] if asked else [])]
    assert main(["convert", str(folder), str(to), *options]) == 0
    sources = [find_source(EngineConfig(model=path)) for path in (folder, to)]
    float32 = np.dtype(np.float32)
    want, got = (
        parameter_values(source.load(source.model_config, float32, asked)) for source in sources
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    down = got["layers.0.mlp.down"]
    assert isinstance(down, TokenRounded) == (form == "w8a8")
    down = down.weight if isinstance(down, TokenRounded) else down
    assert isinstance(down, PlacedWeight) == (form != "nf4")
    again = EngineConfig(model=to, quantization="int8", skip_tokenizer_init=True, **SMALL)
    with pytest.raises(UnsupportedModel, match="int8"):
        load(again)
    capsys.readouterr()
    assert main(["convert", str(to), str(tmp_path / "b"), "--quantization", "int8", *options[:1]])
    assert "int8" in capsys.readouterr().err


def test_nothing_is_converted_into_nothing(tmp_path: Path, capsys) -> None:
    assert main(["convert", str(tmp_path / "absent"), str(tmp_path / "to")]) == 2
    assert "not a folder" in capsys.readouterr().err and not list(tmp_path.iterdir())
