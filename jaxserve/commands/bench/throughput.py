"""Implementation of `jaxserve bench throughput`: tokens per second for a set of prompts."""

from __future__ import annotations

import argparse
import copy
import time

from jaxserve.commands.bench.datasets import make_works, spread_lengths
from jaxserve.commands.bench.offline import check_lengths, open_engine, write_results
from jaxserve.commands.bench.outcome import Work
from jaxserve.commands.options import CommandError
from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams


def run(arguments: argparse.Namespace) -> int:
    """Run `jaxserve bench throughput`.

    Raises:
        CommandError: the model cannot be loaded, or a request does not fit it.
    """
    spread_lengths(arguments)
    with open_engine(arguments) as (llm, loaded):
        works = make_works(arguments, llm.get_tokenizer())
        longest = max(works, key=lambda work: work.input_tokens + work.output_tokens)
        lengths = "--input-len, --output-len"
        check_lengths(loaded, longest.input_tokens, longest.output_tokens, lengths)
        if arguments.num_warmups:
            others = copy.copy(arguments)
            others.num_prompts, others.seed = arguments.num_warmups, arguments.seed + 1
            _answer(llm, make_works(others, llm.get_tokenizer()), arguments)
        seconds, prompts, outputs = _answer(llm, works, arguments)
    total = prompts + outputs
    print(
        f"Throughput: {len(works) / seconds:.2f} requests/s, {total / seconds:.2f} total tokens/s, "
        f"{outputs / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompts}")
    print(f"Total num output tokens:  {outputs}")
    results = {
        "model_id": arguments.model,
        "elapsed_time": seconds,
        "num_requests": len(works),
        "total_num_tokens": total,
        "requests_per_second": len(works) / seconds,
        "tokens_per_second": total / seconds,
    }
    write_results(arguments.output_json, results)
    return 0


def _answer(llm: LLM, works: list[Work], arguments: argparse.Namespace) -> tuple[float, int, int]:
    """Answer all prompts, and return the seconds, the prompt tokens and the generated tokens.

    Raises:
        CommandError: a request failed.
    """
    sampling = [
        SamplingParams(
            n=arguments.n,
            temperature=1.0,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=work.output_tokens,
            detokenize=not arguments.disable_detokenize,
        )
        for work in works
    ]
    start = time.perf_counter()
    answers = llm.generate([work.prompt for work in works], sampling)
    seconds = time.perf_counter() - start
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise CommandError(f"{len(failed)} requests failed, the first of them: {failed[0]}")
    prompts = sum(len(answer.prompt_token_ids) for answer in answers)
    return seconds, prompts, sum(len(o.token_ids) for answer in answers for o in answer.outputs)
