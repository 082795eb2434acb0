"""Start of the models of a server, in the process that serves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.engine.sharing import check_sharing, salt_secret
from jaxserve.execution.runner import OnProgress
from jaxserve.server.served.chat_template import template_thread
from jaxserve.server.served.models import Models, ServedModel
from jaxserve.server.served.specs import ModelSpec
from jaxserve.server.settings import ServerConfig
from jaxserve.start.loaded import Loaded
from jaxserve.start.start import load

BUNDLED = (
    "no model is named, so this is the bundled toy; a real one: jaxserve serve Qwen/Qwen3-0.6B "
    "(from the Hugging Face hub), or the path of a GGUF file"
)


def start_models(
    specs: Iterable[ModelSpec],
    config: ServerConfig,
    say: Callable[[str], None] = lambda text: None,
    progress: OnProgress | None = None,
    describe: Callable[[Loaded], Iterable[str]] = lambda loaded: (),
) -> Models:
    """Load the models one after the other, start their engines, and return the served models.

    If a model fails, the models that were started before are closed.

    Args:
        specs: specifications of the models, at least one.
        config: the server's settings.
        say: receives a line for each model, and the lines of `describe`.
        progress: receives the progress of each start.
        describe: returns lines about a model that was loaded.

    Raises:
        CheckpointError, UnsupportedModel, ValueError: see `start.start.load`.
    """
    specs = list(specs)
    for spec in specs:
        check_sharing(spec.config)
    secret = salt_secret(specs[0].config)
    served: list[ServedModel] = []
    thread = template_thread()
    try:
        for spec in specs:
            name = spec.names[0]
            say(f"loading {name}" + ("" if spec.root == name else f" from {spec.root}"))
            if spec.config.model is None:
                say(BUNDLED)
            loaded = load(spec.config, progress)
            llm = AsyncLLM(loaded)
            served.append(ServedModel(spec.names, spec.root, llm, config, secret, thread))
            for line in describe(loaded):
                say(line)
    except BaseException:
        for model in served:
            model.llm.close()
        raise
    return Models(served)
