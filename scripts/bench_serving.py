"""Load on an OpenAI-compatible server, and a report by the names of `vllm bench serve`.

    python scripts/bench_serving.py --base-url http://127.0.0.1:8000 --num-prompts 200 \\
        --random-input-len 128 --random-output-len 64 --request-rate 10 --save-result
    python scripts/bench_serving.py --dataset-name trace --trace-time-scale 0.2 ...
    python scripts/bench_serving.py --scene streams      512 concurrent streams, held to the end
    python scripts/bench_serving.py --scene overload     ten times capacity for a minute
    python scripts/bench_serving.py --scene client       what this client can follow

Arrivals are open-loop. Refused requests (429) are counted apart, with the time that their answer
took. The client is one process; the report says what share of a core it took and how late it
sent. The scenes start a server themselves, with the bundled model, and write their results to
`scripts/results`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

import serving_scenes
from argument_types import positive, positive_integer, positive_or_inf
from serving_load import (
    ENDPOINTS,
    Prompts,
    Run,
    Target,
    Work,
    open_session,
    poisson_arrivals,
    random_works,
    run_load,
    send,
    trace_works,
)
from serving_process import ask
from serving_report import METRICS, details, machine, plot, show, summarize


def _objectives(pairs: list[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` as milliseconds by name."""
    objectives = {}
    for pair in pairs:
        name, _, limit = pair.partition(":")
        if name not in ("ttft", "tpot", "e2el") or not limit.replace(".", "", 1).isdigit():
            raise SystemExit(f"--goodput {pair!r}: write ttft:MS, tpot:MS or e2el:MS")
        objectives[name] = float(limit)
    return objectives


def _names(text: str) -> list[str]:
    names = text.split(",")
    if set(names) - METRICS.keys():
        raise argparse.ArgumentTypeError(f"{text!r}: choose from {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    percentiles = [float(part) for part in text.split(",")]
    if not all(0 <= one <= 100 for one in percentiles):
        raise argparse.ArgumentTypeError(f"{text!r}: percentiles are from 0 to 100")
    return percentiles


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="Names and meanings follow `vllm bench serve`.",
    )
    parser.add_argument("--scene", choices=serving_scenes.SCENES, help="run this instead")
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=ENDPOINTS, default="openai")
    server.add_argument("--base-url", default="http://127.0.0.1:8000")
    server.add_argument("--endpoint", help="default: the backend's own, /v1/completions or chat's")
    server.add_argument("--model", help="default: the first that the server lists")
    server.add_argument("--api-key", help="sent as a bearer token")
    server.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    server.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON")
    server.add_argument("--temperature", type=float, default=0.0)
    server.add_argument("--ignore-eos", action="store_true", help="generate the whole length")
    work = parser.add_argument_group("work")
    work.add_argument("--dataset-name", choices=("random", "trace"), default="random")
    work.add_argument("--num-prompts", type=positive_integer, default=1000)
    work.add_argument("--random-input-len", type=positive_integer, default=1024, metavar="TOKENS")
    work.add_argument("--random-output-len", type=positive_integer, default=128, metavar="TOKENS")
    work.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R")
    work.add_argument(
        "--trace-length-scale", type=positive, default=1.0, help="times the trace's lengths"
    )
    work.add_argument(
        "--trace-time-scale", type=positive, default=1.0, help="times the trace's gaps"
    )
    work.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json, to make text prompts")
    work.add_argument("--seed", type=int, default=0)
    pace = parser.add_argument_group("pace")
    pace.add_argument(
        "--request-rate",
        type=positive_or_inf,
        help="arrivals a second, inf allowed (default: the trace's own times; inf for random)",
    )
    pace.add_argument("--burstiness", type=positive, default=1.0, help="1 is a Poisson process")
    pace.add_argument("--max-concurrency", type=positive_integer)
    pace.add_argument("--num-warmups", type=int, default=0, metavar="N")
    add_report(parser.add_argument_group("report"))
    return parser


def add_report(report: argparse._ArgumentGroup) -> None:
    report.add_argument("--percentile-metrics", type=_names, default=list(METRICS))
    report.add_argument("--metric-percentiles", type=_percentiles, default=[99.0])
    report.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS")
    report.add_argument("--save-result", action="store_true", help="write JSON, and plots beside")
    report.add_argument("--save-detailed", action="store_true", help="with every request's times")
    report.add_argument("--result-dir", type=Path, default=Path())
    report.add_argument("--result-filename")
    report.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE")


def make_work(arguments: argparse.Namespace) -> tuple[list[Work], list[float]]:
    """The requests of a run, and the seconds at which they are to be sent."""
    rng = np.random.default_rng(arguments.seed)
    tokenizer = None
    if arguments.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(arguments.tokenizer)
    prompts = Prompts(arguments.backend == "openai-chat", tokenizer, rng)
    count, rate = arguments.num_prompts, arguments.request_rate
    if arguments.dataset_name == "trace":
        scales = arguments.trace_length_scale, arguments.trace_time_scale
        works, arrivals = trace_works(prompts, count, *scales)
        if rate is None:
            return works, arrivals
    else:
        if not 0 <= arguments.random_range_ratio < 1:
            raise SystemExit("--random-range-ratio must be in [0, 1)")
        lengths = arguments.random_input_len, arguments.random_output_len
        works = random_works(prompts, count, lengths, arguments.random_range_ratio, rng)
    pace = math.inf if rate is None else rate
    return works, poisson_arrivals(len(works), pace, arguments.burstiness, rng)


def make_target(arguments: argparse.Namespace) -> Target:
    headers = dict(pair.split("=", 1) for pair in arguments.header)
    if arguments.api_key:
        headers["authorization"] = f"Bearer {arguments.api_key}"
    base = arguments.base_url.rstrip("/")
    endpoint = arguments.endpoint or ENDPOINTS[arguments.backend]
    extra = {"temperature": arguments.temperature} | arguments.extra_body
    if arguments.ignore_eos:
        extra["ignore_eos"] = True
    model = arguments.model or ask(base + "/v1/models", headers=headers)["data"][0]["id"]
    return Target(base + endpoint, model, arguments.backend == "openai-chat", extra, headers)


async def serve_load(
    target: Target, works: list[Work], arrivals: list[float], arguments: argparse.Namespace
) -> Run:
    """One request to see that all is well, the warm-up, then the run."""
    async with open_session() as session:
        first = await send(session, target, works[0], 0)
        if not first.is_success:
            raise SystemExit(f"the first request failed ({first.status}): {first.error}")
    warm = [works[0]] * arguments.num_warmups
    await run_load(target, warm, [0.0] * len(warm), arguments.max_concurrency)
    return await run_load(target, works, arrivals, arguments.max_concurrency)


def settings(arguments: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What was run, as the report says it."""
    rate = arguments.request_rate
    if rate is None:
        rate = "trace" if arguments.dataset_name == "trace" else math.inf
    return {
        **machine(),
        "endpoint_type": arguments.backend,
        "backend": arguments.backend,
        "model_id": target.model,
        "num_prompts": arguments.num_prompts,
        "request_rate": "inf" if rate == math.inf else rate,
        "burstiness": arguments.burstiness,
        "max_concurrency": arguments.max_concurrency,
        **dict(pair.split("=", 1) for pair in arguments.metadata),
    }


def main() -> int:
    arguments = make_parser().parse_args()
    if arguments.scene:
        return serving_scenes.SCENES[arguments.scene]()
    objectives = _objectives(arguments.goodput)
    works, arrivals = make_work(arguments)
    target = make_target(arguments)
    run = asyncio.run(serve_load(target, works, arrivals, arguments))
    metrics = arguments.percentile_metrics
    result = settings(arguments, target)
    result |= summarize(run, metrics, arguments.metric_percentiles, objectives)
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
    sys.exit(main())
