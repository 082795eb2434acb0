"""Cost of structured outputs: a mask per token, and throughput beside free requests.

    python -m scripts.bench.structured

Masks: texts that satisfy JSON schemas, regexes and a grammar are read token by token through
`Constraint.advance` with a vocabulary of 128k, made of the source of Python's own library. The goal
is 50 us a token.

Throughput: an engine draws `--rows` sequences at temperature 1, free, constrained (a JSON schema
that never ends within the length), and half of each, first with a random Llama of 137M parameters
and a vocabulary of 48k, then with the bundled model. The goals: constrained draws at least 0.8 of
free's tokens per second, and free rows beside guided ones draw as fast as among free ones. Runs
take turns.
"""

from __future__ import annotations

import json
import re
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.commands.argument_types import positive_integer
from jaxserve.engine.delta import Delta
from jaxserve.engine.engine import Engine
from jaxserve.request import SamplingParams
from jaxserve.settings.config import EngineConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load
from jaxserve.structured import StructuredOutputsParams
from jaxserve.text.grammars import Grammars
from scripts.lib.argument_types import at_most, check_room, checkpoint, results_file, script_parser
from scripts.lib.model_shapes import COMMON, SHAPES
from scripts.lib.run_main import run_main
from scripts.lib.run_record import about_run, keep

Report = dict[str, Any]
VOCAB = 131_072
GOAL_US, GOAL_RATIO = 50.0, 0.8
MOST_ROWS, PROMPT, WIDE_LENGTH = 1024, 24, 512

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {"$ref": "#/$defs/address"},
        "kind": {"enum": ["person", "company", "unknown"]},
    },
    "required": ["name", "age", "email", "tags", "address", "kind"],
    "additionalProperties": False,
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "since": {"type": "string", "format": "date"},
            },
            "required": ["street", "zip", "since"],
            "additionalProperties": False,
        }
    },
}
EXAMPLE = {
    "name": "Margaret Hamilton",
    "age": 42,
    "email": "margaret@example.org",
    "tags": ["software", "engineering", "a much longer tag of several words"],
    "address": {"street": "12 Long Street, second floor", "zip": "12345", "since": "2024-02-29"},
    "kind": "person",
}
CALL = {
    "anyOf": [
        {
            "type": "object",
            "properties": {
                "tool": {"const": tool},
                "query": {"type": "string"},
                "limit": {"type": "integer"},
            },
            "required": ["tool", "query", "limit"],
            "additionalProperties": False,
        }
        for tool in ("search", "weather", "calendar")
    ]
}
CALLED = {"tool": "calendar", "query": "What is on my calendar for next Tuesday?", "limit": 10}
SUMS = 'start: sum\nsum: term (("+" | "-") term)*\nterm: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,9}/'

# By name: a form, and a text that satisfies it.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": ({"json": PERSON}, json.dumps(EXAMPLE)),
    "json_schema, anyOf": ({"json": CALL}, json.dumps(CALLED)),
    "json_object": ({"json_object": True}, json.dumps({"a": [EXAMPLE, CALLED, None, 1.5e3]})),
    "regex": (
        {"regex": r"(\w+ )+[0-9]{4}-[0-9]{2}-[0-9]{2}(, \w+)*"},
        "several words come before the date 2024-02-29, and, then, some, more, follow",
    ),
    # The remaining grammar changes with every word, and the library tries every token anew.
    "regex, words counted": (
        {"regex": r"(\w+ ){3,40}[0-9]{4}-[0-9]{2}-[0-9]{2}(, \w+)*"},
        "several words come before the date 2024-02-29, and, then, some, more, follow",
    ),
    "choice": (
        {"choice": [f"the option numbered {n}" for n in range(100)]},
        "the option numbered 77",
    ),
    "grammar": ({"grammar": SUMS}, "(12+345)-(6789+(1-2)-33)+444444-(5)"),
}


def vocabulary(size: int) -> tuple[str, Callable[[str], list[int]]]:
    """Make a tokenizer of `size` tokens, and the encoding of the tokenizers library.

    Bytes, the words of Python's own library as they stand in its source, and beginnings of them.
    A text is cut into the longest tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source = "\n".join(path.read_text(errors="replace") for path in sources)
    counts = Counter(re.findall(r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]{1,8}|\s+", source))
    words = [word for word, _ in counts.most_common() if word.isascii() and len(word) < 40]
    variants = (word[:length] for word in words for length in range(len(word), 1, -1))
    numbered = (f"{word}{number}" for number in range(100) for word in words)
    texts = dict.fromkeys(islice(dict.fromkeys(chain(variants, numbered)), size - 257))
    symbols = sorted(alphabet)
    spelled = [word.replace(" ", "\u0120").replace("\n", "\u010a") for word in texts]
    tokens = {token: number for number, token in enumerate(["<end>", *symbols, *spelled])}
    backend = Backend(models.BPE(vocab=tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])

    def encode(text: str) -> list[int]:
        left, ids = text.replace(" ", "\u0120"), []
        while left:
            size = next(size for size in range(40, 0, -1) if left[:size] in tokens)
            ids.append(tokens[left[:size]])
            left = left[size:]
        return ids

    return backend.to_str(), encode


def mask_cost(grammars: Grammars, encode: Callable[[str], list[int]], repeats: int) -> Report:
    """Measure us a token of advance and mask, by form: mean, median and 99th percentile."""
    result: Report = {"vocabulary": VOCAB}
    for name, (form, text) in CASES.items():
        ids = encode(text)
        started = time.perf_counter()
        start = grammars.compile(StructuredOutputsParams(**form))
        compiled = time.perf_counter() - started
        times = []
        for _ in range(repeats):
            constraint = start.copy()
            for token in ids:
                before = time.perf_counter()
                complete = constraint.advance(token)
                times.append((time.perf_counter() - before) * 1e6)
                if complete:
                    break
        result[name] = {
            "tokens": len(ids),
            "compile_ms": compiled * 1e3,
            "mean_us": statistics.fmean(times),
            "median_us": statistics.median(times),
            "p99_us": float(np.quantile(times, 0.99)),
        }
    result["mean_us"] = statistics.fmean(result[name]["mean_us"] for name in CASES)
    return result


def sampling(guided: bool, seed: int, tokens: int) -> SamplingParams:
    item = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "value": {"type": "integer"}},
        "required": ["name", "value"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": 1000}
    form = StructuredOutputsParams(json=schema) if guided else None
    return SamplingParams(
        seed=seed, max_tokens=tokens, ignore_eos=True, structured_outputs=form, detokenize=False
    )


def serve(loaded: Loaded, guided: list[bool], tokens: int) -> dict[str, float]:
    """Serve one batch of rows that begin together.

    Returns:
        Tokens per second of all and per second of CPU time, and the seconds in which free and
        guided rows ended.
    """
    engine = Engine(loaded)
    prompts = np.random.default_rng(0).integers(20, loaded.limits.vocab_size, (len(guided), PROMPT))
    ended: dict[bool, float] = {}
    drawn = 0

    def sink(delta: Delta) -> None:
        nonlocal drawn
        drawn += len(delta.token_ids)
        if delta.finish_reason is not None:
            assert str(delta.finish_reason) == "length", delta
            ended[guided[int(delta.request_id)]] = time.perf_counter() - started

    for number, is_guided in enumerate(guided):
        settings = sampling(is_guided, number, tokens)
        engine.add(
            engine.requests.make(prompts[number].tolist(), settings, request_id=str(number)), sink
        )
    started, cpu = time.perf_counter(), time.process_time()
    while engine.has_work:
        engine.step()
    assert drawn == len(guided) * tokens
    assert engine.stats().num_compiles == 0
    return {
        "tokens_per_s": drawn / (time.perf_counter() - started),
        "tokens_per_cpu_s": drawn / (time.process_time() - cpu),
        "free_s": ended.get(False, 0.0),
        "guided_s": ended.get(True, 0.0),
    }


def wide(rows: int) -> Loaded:
    """Make a random Llama of 137M parameters, with a tokenizer as large as its vocabulary."""
    config = COMMON | SHAPES["wide"] | {"eos_token_id": 0}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "config.json").write_text(json.dumps(config))
        (root / "tokenizer.json").write_text(vocabulary(config["vocab_size"])[0])
        (root / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
        settings = EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=rows,
            max_num_batched_tokens=max(256, rows),
            max_model_len=WIDE_LENGTH,
            enable_prefix_caching=False,
            decode_sizes=(max(1, rows // 2), rows),
            token_sizes=(64, max(256, rows)),
            wait_for_all_programs=True,
        )
        return load(settings)


def throughput(loaded: Loaded, rows: int, tokens: int, repeats: int) -> Report:
    """Measure tokens per second of free, constrained and mixed batches, and their ratios."""
    half = [number % 2 == 0 for number in range(rows)]
    scenes = {"free": [False] * rows, "constrained": [True] * rows, "mixed": half}
    for guided in scenes.values():
        serve(loaded, guided, min(8, tokens))
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in scenes}
    for number in range(repeats):
        for name in list(scenes) if number % 2 else reversed(scenes):
            runs[name].append(serve(loaded, scenes[name], tokens))
    loaded.runner.close()
    result: Report = {"tokens_a_row": tokens, "repeats": repeats}
    result |= {
        name: {key: statistics.median(run[key] for run in each) for key in each[0]}
        for name, each in runs.items()
    }
    pairs = list(zip(runs["constrained"], runs["free"], strict=True))
    for key in ("tokens_per_s", "tokens_per_cpu_s"):
        result[f"constrained_over_free_{key}"] = statistics.median(
            constrained[key] / free[key] for constrained, free in pairs
        )
    result["free_rows_beside_guided_over_among_free"] = statistics.median(
        free["free_s"] / mixed["free_s"]
        for mixed, free in zip(runs["mixed"], runs["free"], strict=True)
    )
    return result


def main() -> int:
    parser = script_parser("scripts.bench.structured", __doc__)
    parser.add_argument(
        "--model", type=checkpoint, help="checkpoint folder in place of the bundled model"
    )
    parser.add_argument("--rows", type=at_most(MOST_ROWS), default=32)
    parser.add_argument(
        "--tokens",
        type=at_most(5 * (WIDE_LENGTH - PROMPT)),
        default=160,
        help="of each row; a fifth with 137M",
    )
    parser.add_argument("--repeats", type=positive_integer, default=5)
    parser.add_argument(
        "--out", type=results_file, help="write the numbers here, beside those there"
    )
    options = parser.parse_args()
    check_room(parser, options.model, PROMPT, options.tokens)
    about = about_run() | {"setting": {"rows": options.rows}}

    def tell(name: str, found: Report) -> Report:
        print(json.dumps(found, indent=1), flush=True)
        if options.out:
            keep(options.out, {name: found}, about)
        return found

    source, encode = vocabulary(VOCAB)
    grammars = Grammars(lambda: source, VOCAB, (0,))
    grammars.tokenizer()
    masks = tell("masks", mask_cost(grammars, encode, 20))
    rows, tokens, repeats = options.rows, options.tokens, options.repeats
    large = tell("137M", throughput(wide(rows), rows, max(1, tokens // 5), repeats))
    config = EngineConfig(
        model=options.model,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        wait_for_all_programs=True,
    )
    name = f"model {Path(options.model).resolve().name}" if options.model else "bundled"
    small = tell(name, throughput(load(config), rows, tokens, repeats))
    met = {
        "mask_at_most_50_us": masks["mean_us"] <= GOAL_US,
        **{
            f"constrained_at_least_0.8_of_free, {kind}": report[
                "constrained_over_free_tokens_per_s"
            ]
            >= GOAL_RATIO
            for kind, report in (("137M", large), (name, small))
        },
    }
    tell("met", met)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    run_main(main)
