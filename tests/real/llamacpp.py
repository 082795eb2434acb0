"""Run llama.cpp on texts, chats and token ids, in a Python that has its packages.

    python -m venv /tmp/llamacpp
    /tmp/llamacpp/bin/pip install xllamacpp==2026.10.11549 llama-cpp-py-sync==0.11548 numpy
    /tmp/llamacpp/bin/python tests/real/llamacpp.py MODEL.gguf < question.json > answer.json

The first package holds llama.cpp built for AVX2 and its server, which renders chat templates; the
second says how its C functions are called (one build apart). A question may hold "texts",
"chats" and "sequences" of token ids; the answer holds the ids of each text and chat, and for each
sequence the log-probability of every token but the first, from the logits that llama_decode gives.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp  # type: ignore[import-not-found]
from llama_cpp_py_sync._cffi_bindings import ffi  # type: ignore[import-not-found]

CONTEXT = 2048
THREADS = 2


class LlamaCpp:
    """A model in llama.cpp's C interface.

    Args:
        path: of a GGUF file.
    """

    def __init__(self, path: str) -> None:
        self._lib: Any = ffi.dlopen(str(next(Path(xllamacpp.__file__).parent.glob("*.so"))))
        self._lib.llama_backend_init()
        parameters = self._lib.llama_model_default_params()
        self._model = self._lib.llama_model_load_from_file(path.encode(), parameters)
        self._vocab = self._lib.llama_model_get_vocab(self._model)
        self._size = self._lib.llama_vocab_n_tokens(self._vocab)
        context = self._lib.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = CONTEXT
        context.n_threads = context.n_threads_batch = THREADS
        self._context = self._lib.llama_init_from_model(self._model, context)

    def tokenize(self, text: str, add_special: bool = True) -> list[int]:
        """Return the ids of a text in which special tokens are special."""
        data = text.encode()
        room = len(data) + 16
        ids = ffi.new("llama_token[]", room)
        count = self._lib.llama_tokenize(self._vocab, data, len(data), ids, room, add_special, True)
        return list(ids[0:count])

    def logprobs(self, ids: list[int]) -> list[float]:
        """Return the log-probability of each token, given the tokens before it."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for place, token in enumerate(ids):
            batch.token[place], batch.pos[place] = token, place
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
            batch.logits[place] = 1
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        data = ffi.buffer(self._lib.llama_get_logits(self._context), 4 * len(ids) * self._size)
        logits = np.frombuffer(data, np.float32).reshape(len(ids), self._size)
        found = []
        for row, token in zip(logits, ids[1:], strict=False):
            wide = row.astype(np.float64)
            found.append(float(wide[token] - np.logaddexp.reduce(wide)))
        self._lib.llama_batch_free(batch)
        return found


def rendered(path: str, chats: list[Any]) -> list[str]:
    """Return the text that llama.cpp's server makes of each chat."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = path
    parameters.n_ctx = 256
    parameters.use_jinja = True
    server = xllamacpp.Server(parameters)
    texts = []
    for chat in chats:
        request = urllib.request.Request(
            f"{server.listening_address}/apply-template",
            json.dumps({"messages": chat}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            texts.append(json.load(answer)["prompt"])
    return texts


def main() -> None:
    path, question = sys.argv[1], json.load(sys.stdin)
    # llama.cpp's own words go to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer: dict[str, Any] = {"build": xllamacpp.__version__}
    llama = LlamaCpp(path)
    answer["texts"] = [llama.tokenize(text) for text in question.get("texts", ())]
    answer["sequences"] = [llama.logprobs(ids) for ids in question.get("sequences", ())]
    if question.get("chats"):
        texts = rendered(path, question["chats"])
        answer["chats"] = [llama.tokenize(text, add_special=False) for text in texts]
    json.dump(answer, out)
    out.flush()
    os._exit(0)  # the server has threads that would not end


if __name__ == "__main__":
    main()
