"""Implementation of `jaxserve bench serve`: send requests to a server, and report."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
from tqdm import tqdm

from jaxserve.commands.argument_types import writable_file
from jaxserve.commands.bench.client import arrivals, open_client, run_load, send
from jaxserve.commands.bench.command import SAMPLING
from jaxserve.commands.bench.datasets import make_works, spread_lengths
from jaxserve.commands.bench.outcome import ENDPOINTS, Outcome, Run, Target, Work
from jaxserve.commands.bench.report import details, failures, summarize, table
from jaxserve.commands.options import CommandError
from jaxserve.errors import CheckpointError
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.environment import openai_api_key
from jaxserve.settings.model_name import gguf_files, kind_of_model
from jaxserve.text.tokenizer import Tokenizer

MOST_IDS = 2**31 - 1  # for a tokenizer without a model


def run(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench serve`: send a load to a server, and print the table of the results.

    With --save-result, the results are also written to a JSON file.

    Returns:
        The exit status: 1 if no request was answered, else 0.

    Raises:
        CommandError: the server does not answer, or an option is invalid.
    """
    headers = dict(arguments.header)
    key = arguments.api_key or openai_api_key()
    if key:
        headers["authorization"] = f"Bearer {key}"
    base = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
    name, root = arguments.model, arguments.model
    if name is None:
        name, root = first_model(base, headers, not arguments.insecure)
        print(f"First model name: {name}, first model id: {root}")
    tokenizer_id, tokenizer = None, None
    if not arguments.skip_tokenizer_init:
        tokenizer_id, tokenizer = find_tokenizer(arguments.tokenizer, root)
    is_chat = arguments.backend == "openai-chat"
    if arguments.dataset_name == "random":
        arguments.ignore_eos = True  # as in vLLM, so that answers have the requested length
    spread_lengths(arguments)
    works = make_works(arguments, tokenizer, is_chat)
    endpoint = arguments.endpoint or ENDPOINTS[arguments.backend]
    sent = arguments.served_model_name or name
    target = Target(base + endpoint, sent, is_chat, _extra(arguments), headers)
    date = time.strftime("%Y%m%d-%H%M%S")
    path = _result_path(arguments, str(name), date)
    load = asyncio.run(_load(target, works, arguments))
    result = summarize(
        load,
        arguments.percentile_metrics,
        arguments.metric_percentiles,
        dict(arguments.goodput),
    )
    rate = arguments.request_rate
    print(table(result, arguments.percentile_metrics, arguments.max_concurrency, rate))
    for line in failures(load):
        print(line, file=sys.stderr)
    if path is not None:
        about = {
            "date": date,
            "endpoint_type": arguments.backend,
            "backend": arguments.backend,
            "label": arguments.label,
            "model_id": name,
            "tokenizer_id": tokenizer_id,
            "num_prompts": arguments.num_prompts,
            **dict(arguments.metadata),
            "request_rate": "inf" if math.isinf(rate) else rate,
            "burstiness": arguments.burstiness,
            "max_concurrency": arguments.max_concurrency,
        }
        _write(path, about | result | _kept_details(load, arguments), arguments.append_result)
    return 0 if result["completed"] else 1


def first_model(base: str, headers: dict[str, str], verify: bool) -> tuple[str, str]:
    """Return the name and the root (path or hub name) of the first model that a server lists.

    `base` is the URL of the server without a path, and `verify` whether TLS certificates are
    checked.

    Raises:
        CommandError: the server cannot be reached, or its list is empty.
    """
    url = base + "/v1/models"
    try:
        answer = httpx2.get(url, headers=headers, timeout=30, verify=verify)
        answer.raise_for_status()
        card = answer.json()["data"][0]
        return str(card["id"]), str(card.get("root") or card["id"])
    except httpx2.HTTPError as error:
        raise CommandError(f"{url} did not answer: {error or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CommandError(f"{url} lists no model; name one with --model") from None


def find_tokenizer(name: str | None, root: str) -> tuple[str | None, Any]:
    """Find the tokenizer of a model on this machine, and return its path and the tokenizer.

    Return (None, None) and print a line if `name` is None and this machine lacks the model.

    Args:
        name: the value of --tokenizer, or None.
        root: path or hub name of the model, used if `name` is None.

    Raises:
        CommandError: `name` is not a tokenizer, or the tokenizer cannot be read.
    """
    path = root if name is None else name
    kind = kind_of_model(path)
    try:
        if kind == "folder" and (Path(path) / "tokenizer.json").is_file():
            return path, Tokenizer(path, MOST_IDS)
        is_gguf = kind == "gguf" or (kind == "folder" and gguf_files(Path(path)))
        if is_gguf or (name is not None and kind is not None):
            config = EngineConfig(model=path)
            source = importlib.import_module("jaxserve.start.sources.find").find_source(config)
            return path, source.tokenizer(config)
    except (CheckpointError, ValueError, OSError) as error:
        raise CommandError(f"--tokenizer {path}: {error}") from error
    if name is not None:
        raise CommandError(f"--tokenizer {name}: is no folder, .gguf file or name on the hub")
    print(f"No tokenizer lies at {root}: prompts are token ids, or common words in a chat.")
    return None, None


def _extra(arguments: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(arguments, name) for name in (*SAMPLING, "logprobs")}
    extra = {name: value for name, value in fields.items() if value is not None}
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    return extra | arguments.extra_body


def _result_path(arguments: argparse.Namespace, model: str, date: str) -> Path | None:
    # Fail before the load if the results cannot be written.
    if not (arguments.save_result or arguments.append_result):
        return None
    limit = arguments.max_concurrency
    label = arguments.label or arguments.backend
    stem = f"{label}-{arguments.request_rate}qps{'' if limit is None else f'-concurrency{limit}'}"
    name = arguments.result_filename or f"{stem}-{model.split('/')[-1]}-{date}.json"
    try:
        return writable_file(str((arguments.result_dir or Path()) / name))
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"--result-filename: {error}") from None


async def _load(target: Target, works: list[Work], arguments: argparse.Namespace) -> Run:
    """Send a load to a server, and return its Run.

    If requested, wait first until the server answers, and send requests to warm it up.

    Raises:
        CommandError: the server has not answered in time.
    """
    limit, rate = arguments.max_concurrency, arguments.request_rate
    async with open_client(target, not arguments.insecure) as client:
        await _check_ready(client, target, works[0], arguments.ready_check_timeout_sec)
        if arguments.num_warmups:
            print(f"Warming up with {arguments.num_warmups} requests...")
            warm = [works[0]] * arguments.num_warmups
            await run_load(client, target, warm, [0.0] * len(warm), limit)
        kind = "Poisson process" if arguments.burstiness == 1 else "Gamma distribution"
        print("Starting main benchmark run...")
        print(f"Traffic request rate: {rate}")
        print(f"Burstiness factor: {arguments.burstiness} ({kind})")
        print(f"Maximum request concurrency: {limit}", flush=True)
        times = arrivals(len(works), rate, arguments.burstiness, arguments.seed)
        with tqdm(total=len(works), disable=arguments.disable_tqdm) as bar:
            return await run_load(client, target, works, times, limit, lambda _: _count(bar))


def _count(bar: Any) -> None:
    bar.update()


async def _check_ready(
    client: httpx2.AsyncClient, target: Target, work: Work, seconds: int
) -> None:
    if not seconds:
        return
    deadline, outcome = time.monotonic() + seconds, Outcome(0)
    while time.monotonic() < deadline:
        outcome = await send(client, target, work, time.perf_counter())
        if outcome.is_success:
            return
        await asyncio.sleep(min(1.0, seconds / 10))
    raise CommandError(f"{target.url} answered no request within {seconds} s: {outcome.error}")


def _kept_details(load: Run, arguments: argparse.Namespace) -> dict[str, Any]:
    lists = details(load)
    if not arguments.save_detailed:
        lists = {name: lists[name] for name in ("latencies", "queue_times")}  # as vLLM does
    return lists


def _write(path: Path, result: dict[str, Any], append: bool) -> None:
    with path.open("a" if append else "w", encoding="utf-8") as file:
        if append and file.tell():
            file.write("\n")
        json.dump(result, file)
    print(f"written: {path}", file=sys.stderr)
