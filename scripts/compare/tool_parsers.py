"""Comparison of vLLM's parsers of tool calls and thoughts with ours, over the corpus of outputs.

    python -m scripts.compare.tool_parsers                       installs vLLM's wheel, once
    python -m scripts.compare.tool_parsers --python PATH         an interpreter that has it

Every output of tests/structured/corpus is read by our reader, and by vLLM's parser of its dialect
as a whole and token by token (`worker_tool_parsers.py`, in vLLM's interpreter). Writes
scripts/results/tool_parsers.md: by dialect, how many answers differ, then each kind of
disagreement. The judgements of kinds are written by hand in that page, and each run keeps them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import Any

from jaxserve.commands.argument_types import writable_file
from jaxserve.server.tool_calls.thoughts import THINKING_FORMATS, ThoughtState
from scripts.compare.engine import Engine, module_command
from scripts.compare.engine_vllm import NEEDED
from scripts.compare.environments import NotInstalled, python_of
from scripts.lib.answer_reader import answer_reader
from scripts.lib.argument_types import script_parser
from scripts.lib.paths import IN_CHECKOUT, RESULTS, ROOT
from scripts.lib.run_main import run_main

Answer = dict[str, Any]
CORPUS = ROOT / "tests" / "structured" / "corpus"
TABLE = RESULTS / "tool_parsers.md"
# The wheel is compiled for CUDA, but its parsers need neither that nor a GPU.
PARSERS = Engine(
    name="vllm-parsers",
    title="vLLM's parsers",
    requirements=(
        ("torch==2.13.0",),
        ("--no-deps", "vllm==0.33.0", "xgrammar==0.2.8", "compressed-tensors==0.17.0"),
        (*NEEDED, "cohere-melody>=0.14", "orjson"),
    ),
)


# Kinds of disagreement, in the order of the page.
WHOLE = (
    "vLLM raises an error",
    "a call inside thoughts",
    "an answer without marks of thoughts, taken for thoughts",
    "a mark left in the thoughts",
    "words before a mark inside thoughts lost",
    "thoughts left in the answer",
    "a call of a tool that is not there",
    "an object in the middle of an answer",
    "a call made of a broken or cut text",
    "a complete call not found",
    "arguments that are no JSON object",
    "other values of arguments",
    "words beside calls left out",
    "marks and broken calls left out",
    "marks left in the answer",
    "white space",
)
STREAMED = (
    "an error in one way of reading alone",
    "other thoughts",
    "calls only in the stream",
    "calls only in the whole",
    "other arguments",
    "other content",
    "white space",
)
JUDGEMENT = re.compile(r'^- \*\*(.+?)\*\* \(\d+; [^)]+\)\. (.+?) For example "', re.MULTILINE)
HEADINGS = (
    "## vLLM's whole answers that are not ours",
    "## vLLM's streams that are not its whole answers",
)


def bare(text: str) -> str:
    return "".join(text.split())


def is_error(answer: Answer) -> bool:
    return "error" in answer


def whole_kind(output: dict[str, Any], ours: Answer, theirs: Answer) -> str:
    """Return the kind of the difference between our answer and vLLM's, or "" if they are equal."""
    if ours == theirs:
        return ""
    if is_error(theirs):
        return WHOLE[0]
    mine, other = bare(ours["reasoning"]), bare(theirs["reasoning"])
    more = len(theirs["calls"]) - len(ours["calls"])
    if mine != other:
        if len(other) < len(mine) and (more > 0 or "inside" in output["about"]):
            return WHOLE[1]
        if not mine and output["start"] != "open":
            return WHOLE[2]
        if mine and mine in other:
            return WHOLE[3]
        is_all = not theirs["content"] and not theirs["calls"]
        return WHOLE[4] if other and other in mine and is_all else WHOLE[5]
    if {call["name"] for call in theirs["calls"]} - output["names"]:
        return WHOLE[6]
    if more > 0:
        return WHOLE[7] if "inside an answer" in output["about"] else WHOLE[8]
    if more < 0:
        return WHOLE[9]
    if ours["calls"] != theirs["calls"]:
        objects = all(isinstance(call["arguments"], dict) for call in theirs["calls"])
        return WHOLE[11] if objects else WHOLE[10]
    if bare(ours["content"]) == bare(theirs["content"]):
        return WHOLE[15]
    if len(theirs["content"]) >= len(ours["content"]):
        return WHOLE[14]
    return WHOLE[12] if ours["calls"] else WHOLE[13]


def streamed_kind(output: dict[str, Any], whole: Answer, streamed: Answer) -> str:
    """Return the kind of the difference between vLLM's stream and its whole answer, or ""."""
    if whole == streamed:
        return ""
    if is_error(whole) or is_error(streamed):
        return STREAMED[0]
    if bare(whole["reasoning"]) != bare(streamed["reasoning"]):
        return STREAMED[1]
    more = len(streamed["calls"]) - len(whole["calls"])
    if more:
        return STREAMED[2] if more > 0 else STREAMED[3]
    if whole["calls"] != streamed["calls"]:
        return STREAMED[4]
    return STREAMED[5] if bare(whole["content"]) != bare(streamed["content"]) else STREAMED[6]


@dataclass
class Tally:
    """Disagreements of one dialect.

    Attributes:
        outputs: number of outputs.
        problem: why vLLM's parser could not be made, or empty.
        whole: kind and words of outputs whose whole vLLM reads differently from us.
        streamed: kind and words of outputs that vLLM streams differently from its whole answer.
        errors: number of outputs at which vLLM raises an error.
        unexpected: words of outputs that we ourselves read differently from the corpus.
    """

    outputs: int
    problem: str = ""
    whole: list[tuple[str, str]] = field(default_factory=list)
    streamed: list[tuple[str, str]] = field(default_factory=list)
    errors: int = 0
    unexpected: list[str] = field(default_factory=list)


def load(folder: Path) -> dict[str, Any]:
    """Return the corpus by dialect, with tools, and a prompt's end for each start of thoughts."""
    tools = json.loads((folder / "tools.json").read_text())
    dialects = {}
    for path in sorted(folder.glob("*.json")):
        if path.name == "tools.json":
            continue
        dialect = json.loads(path.read_text())
        thinking = THINKING_FORMATS.get(dialect["reasoning_parser"] or "")
        start = thinking.start if thinking is not None else ""
        end = thinking.end if thinking is not None else ""
        prompts = {"free": "x", "open": f"x{start}", "closed": f"x{start}{end}"}
        dialects[path.stem] = {**dialect, "tools": tools[dialect["tools"]], "prompts": prompts}
    return dialects


def read_ours(dialect: dict[str, Any], output: dict[str, Any]) -> Answer:
    reader = answer_reader(
        dialect["tool_call_parser"],
        dialect["reasoning_parser"],
        dialect["tools"],
        ThoughtState(output["start"]),
        parallel=True,
    )
    reader.feed(output["text"], True)
    message = reader.message
    calls = [{"name": c.name, "arguments": json.loads(c.arguments)} for c in message.calls]
    return {"reasoning": message.reasoning, "content": message.content, "calls": calls}


def tally_of(dialect: dict[str, Any], ours: list[Answer], theirs: list[Any] | str) -> Tally:
    """Return a dialect's disagreements.

    Args:
        ours: answer to each output.
        theirs: answers of vLLM to each, whole and streamed, or the reason why they are missing.
    """
    outputs = dialect["outputs"]
    if isinstance(theirs, str):
        is_missing = "has not been registered" in theirs
        return Tally(len(outputs), "vLLM has none" if is_missing else theirs)
    tally = Tally(len(outputs))
    tools = {tool["function"]["name"] for tool in dialect["tools"]}
    for output, mine, answers in zip(outputs, ours, theirs, strict=True):
        about, output = output["about"], {**output, "names": tools}
        whole, streamed = answers["whole"], answers["streamed"]
        if mine != {key: output[key] for key in mine}:
            tally.unexpected.append(about)
        tally.errors += is_error(whole) or is_error(streamed)
        if kind := whole_kind(output, mine, whole):
            tally.whole.append((kind, about))
        if kind := streamed_kind(output, whole, streamed):
            tally.streamed.append((kind, about))
    return tally


def rows(tallies: dict[str, Tally]) -> list[str]:
    lines = [
        "| dialect | outputs | vLLM whole, not as ours | vLLM streamed, not as whole | errors |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, tally in tallies.items():
        numbers = (tally.outputs, len(tally.whole), len(tally.streamed), tally.errors)
        cells = [str(number) for number in numbers]
        if tally.problem:
            cells[1:] = [tally.problem, "", ""]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    total = [
        sum(tally.outputs for tally in tallies.values()),
        sum(len(tally.whole) for tally in tallies.values()),
        sum(len(tally.streamed) for tally in tallies.values()),
        sum(tally.errors for tally in tallies.values()),
    ]
    return [*lines, f"| all | {' | '.join(f'{number:,}' for number in total)} |"]


def judgements(page_text: str) -> list[dict[str, str]]:
    """Read the judgements of an earlier page by kind: of whole answers, and of streams."""
    found = []
    for heading in HEADINGS:
        section = page_text.partition(heading)[2].partition("\n## ")[0]
        found.append(dict(JUDGEMENT.findall(section.replace("\n  ", " "))))
    return found


def paragraphs(
    kinds: Sequence[str], found: dict[str, list[tuple[str, str]]], judged: dict[str, str]
) -> list[str]:
    """Return a paragraph for each kind that was found.

    Args:
        kinds: in the order of the page.
        found: by dialect, kind and words of each disagreement.
        judged: the judgement of each kind.
    """
    lines = []
    for kind in kinds:
        cases = [(name, words) for name, all_ in found.items() for k, words in all_ if k == kind]
        if not cases:
            continue
        dialects = list(dict.fromkeys(name for name, _ in cases))
        shown = ", ".join(dialects[:6]) + (" and others" if len(dialects) > 6 else "")
        name, words = cases[0]
        text = (
            f"- **{kind}** ({len(cases)}; {shown}). {judged.get(kind, 'Not judged yet.')} "
            f'For example "{words}" in `{name}`.'
        )
        lines.append(fill(text, 118, subsequent_indent="  ", break_on_hyphens=False))
    return lines


def page(tallies: dict[str, Tally], version: str, earlier: str = "") -> str:
    whole, streamed = judgements(earlier)
    parts = [
        "# vLLM's parsers of calls and thoughts, beside ours",
        f"`python -m scripts.compare.tool_parsers`; vLLM {version}, its own parsers as its server "
        "calls them,\nover the outputs of `tests/structured/corpus`, which say what each format's "
        "documentation means. Streams come token\nby token, from a small tokenizer that has the "
        "dialect's marks as special tokens (gpt-oss: its own). Ours reads all\noutputs as the "
        "corpus says, and streams them as it reads them whole: tests compare that.",
        "\n".join(rows(tallies)),
        HEADINGS[0],
        "\n".join(paragraphs(WHOLE, {n: tally.whole for n, tally in tallies.items()}, whole)),
        HEADINGS[1],
        "\n".join(
            paragraphs(STREAMED, {n: tally.streamed for n, tally in tallies.items()}, streamed)
        ),
    ]
    return "\n\n".join(parts) + "\n"


def read_theirs(python: Path, dialects: dict[str, Any]) -> dict[str, Any]:
    """Return the worker's answers.

    Raises:
        CalledProcessError: with its standard error, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "outputs.json", Path(folder) / "answers.json"
        source.write_text(json.dumps(dialects))
        command = [*module_command(python, "worker_tool_parsers"), str(source), str(target)]
        subprocess.run(command, check=True, env={**os.environ, **IN_CHECKOUT}, cwd=folder)
        return json.loads(target.read_text())


def main() -> int:
    parser = script_parser("scripts.compare.tool_parsers", __doc__)
    parser.add_argument(
        "--python", type=Path, help="interpreter that has vLLM (default: one is installed, once)"
    )
    parser.add_argument("--table", type=writable_file, default=TABLE, help="page (%(default)s)")
    options = parser.parse_args()
    if options.python is not None and not options.python.is_file():
        parser.error(f"--python: {str(options.python)!r} must be a file that exists")
    given = {} if options.python is None else {PARSERS.name: options.python.absolute()}
    try:
        theirs = read_theirs(python_of(PARSERS, given), dialects := load(CORPUS))
    except (NotInstalled, subprocess.CalledProcessError) as error:
        print(f"vLLM's parsers cannot be had here: {error}", file=sys.stderr)
        return 1
    tallies = {}
    for name, dialect in dialects.items():
        ours = [read_ours(dialect, output) for output in dialect["outputs"]]
        tallies[name] = tally_of(dialect, ours, theirs["answers"][name])
        for about in tallies[name].unexpected:
            print(f"{name}: ours is not as the corpus says: {about}", file=sys.stderr)
    earlier = TABLE.read_text() if TABLE.is_file() else ""
    options.table.write_text(page(tallies, theirs["version"], earlier))
    print("\n".join(rows(tallies)))
    return 0


if __name__ == "__main__":
    run_main(main)
