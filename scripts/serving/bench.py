"""Load on an OpenAI-compatible server, and a report by the names of `vllm bench serve`.

    python -m scripts.serving.bench --base-url http://127.0.0.1:8000 --num-prompts 200 \\
        --random-input-len 128 --random-output-len 64 --request-rate 10 --save-result
    python -m scripts.serving.bench --dataset-name trace --trace-time-scale 0.2 ...
    python -m scripts.serving.bench --scene streams      512 concurrent streams, held to the end
    python -m scripts.serving.bench --scene overload     ten times capacity for a minute;
                                                         overload-kept: on 200 connections
    python -m scripts.serving.bench --scene client       what this client can follow

Arrivals are open-loop. Refused requests (429) are counted apart, with the time that their answer
took. The client is one process; the report has the share of a core that it took and how late it
sent. The scenes start a server themselves, with the bundled model, and write their results to
`scripts/results`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from http.client import HTTPException
from typing import Any

import numpy as np

from jaxserve.commands.argument_types import (
    existing_file,
    header,
    http_url,
    integer_from_0,
    json_object,
    name_value,
    number_in,
    objective,
    positive,
    positive_integer,
    positive_or_inf,
    some_of,
    writable_file,
    writable_folder,
)
from jaxserve.commands.bench.outcome import ENDPOINTS, Run, Target, Work
from jaxserve.commands.bench.report import METRICS
from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.lib.run_record import about_run
from scripts.lib.server_process import ask
from scripts.serving import scenes as serving_scenes
from scripts.serving.load import (
    Prompts,
    open_session,
    poisson_arrivals,
    random_works,
    run_load,
    send,
    trace_works,
)
from scripts.serving.report import details, plot, show, summarize


def _percentiles(text: str) -> list[float]:
    return [number_in(0, 100)(part) for part in text.split(",")]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.serving.bench",
        description=(__doc__ or "").splitlines()[0],
        epilog="Names and meanings follow `vllm bench serve`.",
        allow_abbrev=False,
    )
    parser.add_argument("--scene", choices=serving_scenes.SCENES, help="run this instead")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=ENDPOINTS, default="openai")
    server.add_argument("--base-url", type=http_url, default="http://127.0.0.1:8000")
    server.add_argument("--endpoint", help="default: the backend's own, /v1/completions or chat's")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--api-key", help="sent as a bearer token")
    server.add_argument("--header", action="append", type=header, default=[], metavar="NAME=VALUE")
    server.add_argument("--extra-body", type=json_object, default={}, metavar="JSON")
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument("--ignore-eos", action="store_true", help="generate the whole length")
    work = parser.add_argument_group("work")
    work.add_argument("--dataset-name", choices=("random", "trace"), default="random")
    work.add_argument("--num-prompts", type=positive_integer, default=1000)
    work.add_argument("--random-input-len", type=positive_integer, default=1024, metavar="TOKENS")
    work.add_argument("--random-output-len", type=positive_integer, default=128, metavar="TOKENS")
    ratio = number_in(0, 1, below=True)
    work.add_argument("--random-range-ratio", type=ratio, default=0.0, metavar="R")
    work.add_argument(
        "--trace-length-scale", type=positive, default=1.0, help="times the trace's lengths"
    )
    work.add_argument(
        "--trace-time-scale", type=positive, default=1.0, help="times the trace's gaps"
    )
    work.add_argument(
        "--tokenizer", type=existing_file, metavar="FILE", help="makes text prompts; tokenizer.json"
    )
    work.add_argument("--seed", type=integer_from_0, default=0)
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--request-rate",
        type=positive_or_inf,
        help="arrivals a second, inf allowed (default: the trace's own times; inf for random)",
    )
    pace.add_argument("--burstiness", type=positive, default=1.0, help="1 is a Poisson process")
    pace.add_argument("--max-concurrency", type=positive_integer)
    pace.add_argument("--num-warmups", type=integer_from_0, default=0, metavar="N")
    add_report(parser.add_argument_group("report"))
    return parser


def add_report(report: argparse._ArgumentGroup) -> None:
    report.add_argument("--percentile-metrics", type=some_of(METRICS), default=list(METRICS))
    report.add_argument("--metric-percentiles", type=_percentiles, default=[99.0])
    report.add_argument("--goodput", nargs="+", type=objective, default=[], metavar="NAME:MS")
    report.add_argument("--save-result", action="store_true", help="write JSON, and plots beside")
    report.add_argument("--save-detailed", action="store_true", help="with every request's times")
    report.add_argument("--result-dir", type=writable_folder, default=".")
    report.add_argument("--result-filename")
    report.add_argument("--metadata", nargs="*", type=name_value, default=[], metavar="NAME=VALUE")


def make_work(arguments: argparse.Namespace) -> tuple[list[Work], list[float]]:
    """Make the requests of a run, and the seconds at which they are to be sent."""
    rng = np.random.default_rng(arguments.seed)
    tokenizer = None
    if arguments.tokenizer:
        # Imported here: runs of random token ids do without it.
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        except Exception as error:  # the library's own class of error has no name
            raise ValueError(
                f"--tokenizer {arguments.tokenizer}: is no tokenizer: {error}"
            ) from None
    prompts = Prompts(arguments.backend == "openai-chat", tokenizer, rng)
    count, rate = arguments.num_prompts, arguments.request_rate
    if arguments.dataset_name == "trace":
        scales = arguments.trace_length_scale, arguments.trace_time_scale
        works, arrivals = trace_works(prompts, count, *scales)
        if rate is None:
            return works, arrivals
    else:
        lengths = arguments.random_input_len, arguments.random_output_len
        works = random_works(prompts, count, lengths, arguments.random_range_ratio, rng)
    pace = math.inf if rate is None else rate
    return works, poisson_arrivals(len(works), pace, arguments.burstiness, rng)


def first_model(base: str, headers: dict[str, str]) -> str:
    """Find the first model that the server lists.

    Raises:
        SystemExit: with a sentence; it cannot be reached, or lists none.
    """
    try:
        return ask(base + "/v1/models", headers=headers)["data"][0]["id"]
    except (OSError, HTTPException) as error:
        raise SystemExit(f"{base}/v1/models did not answer: {error}") from None
    except (ValueError, LookupError, TypeError):
        raise SystemExit(f"{base}/v1/models lists no model; name one with --model") from None


def make_target(arguments: argparse.Namespace) -> Target:
    headers = dict(arguments.header)
    if arguments.api_key:
        headers["authorization"] = f"Bearer {arguments.api_key}"
    base = arguments.base_url
    endpoint = arguments.endpoint or ENDPOINTS[arguments.backend]
    extra = {"temperature": arguments.temperature} | arguments.extra_body
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    model = arguments.model or first_model(base, headers)
    return Target(base + endpoint, model, arguments.backend == "openai-chat", extra, headers)


async def serve_load(
    target: Target, works: list[Work], arrivals: list[float], arguments: argparse.Namespace
) -> Run:
    """Send one request as a check, then the warm-up, then the run."""
    async with open_session() as session:
        first = await send(session, target, works[0], 0)
        if not first.is_success:
            raise SystemExit(f"the first request failed ({first.status}): {first.error}")
    warm = [works[0]] * arguments.num_warmups
    await run_load(target, warm, [0.0] * len(warm), arguments.max_concurrency)
    return await run_load(target, works, arrivals, arguments.max_concurrency)


def settings(
    arguments: argparse.Namespace, target: Target, about: dict[str, Any], num_sent: int
) -> dict[str, Any]:
    """Record what was run, by the report's names, beside the fields of `about_run`."""
    rate = arguments.request_rate
    if rate is None:
        rate = "trace" if arguments.dataset_name == "trace" else math.inf
    return {
        **about,
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "model_id": target.model,
        "num_prompts": num_sent,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **dict(arguments.metadata),
    }


def main() -> int:
    parser = make_parser()
    arguments = parser.parse_args()
    if arguments.scene:
        end_at_sigterm()
        return serving_scenes.SCENES[arguments.scene]()
    try:
        if arguments.result_filename:
            writable_file(str(arguments.result_dir / arguments.result_filename))
        works, arrivals = make_work(arguments)
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(str(error))
    target, about = make_target(arguments), about_run()
    run = asyncio.run(serve_load(target, works, arrivals, arguments))
    metrics = arguments.percentile_metrics
    result = settings(arguments, target, about, len(works))
    result |= summarize(run, metrics, arguments.metric_percentiles, dict(arguments.goodput))
    show(result, metrics)
    if arguments.save_detailed:
        result |= details(run)
    if arguments.save_result or arguments.save_detailed or arguments.result_filename:
        stem = f"{arguments.backend}-{result['request_rate']}qps-{result['date']}.json"
        path = arguments.result_dir / (arguments.result_filename or stem)
        path.write_text(json.dumps(result, indent=1) + "\n")
        plot({target.model: run}, path.with_suffix(".png"), f"{target.model}, {target.url}")
        print(f"written: {path}, {path.with_suffix('.png')}")
    return 0 if result["completed"] else 1


if __name__ == "__main__":
    run_main(main)
