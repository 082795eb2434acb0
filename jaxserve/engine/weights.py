"""WeightUpdates: new weights for a running engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, get_args

from jaxserve.engine.engine import UpdateMode
from jaxserve.engine.thread import EngineThread
from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.execution.mesh import make_mesh
from jaxserve.start.plan.forms import layout_on
from jaxserve.start.plan.start_plan import StartPlan
from jaxserve.weights.updates import ParameterReader

MAX_VERSION = 256


class WeightUpdates:
    """Reads new weights beside a running engine, and lets it use them between two steps.

    Thread-safe. Updates run one after the other.

    Args:
        thread: the engine's thread.
    """

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._lock = threading.Lock()
        self._staged: dict[str, Any] = {}
        self._reader: ParameterReader | None = None

    def update(
        self,
        params: Any,
        version: str | None = None,
        running: UpdateMode = "recompute",
        finish: bool = True,
    ) -> str:
        """Update weights (see `LLM.update_weights`), and return the version that the engine uses.

        Raises:
            InvalidRequest: an argument is invalid. Staged tensors are discarded.
            EngineClosed, EngineDead: the engine has ended.
        """
        with self._lock:
            try:
                return self._update(params, version, running, finish)
            except BaseException:
                self._staged = {}
                raise

    def discard(self) -> None:
        """Discard the staged tensors."""
        with self._lock:
            self._staged = {}

    @property
    def most_file_bytes(self) -> int:
        """See `ParameterReader.most_file_bytes`."""
        return self._opened_reader().most_file_bytes

    def _update(self, params: Any, version: str | None, running: UpdateMode, finish: bool) -> str:
        self._thread.check_open()
        self._check(version, running)
        engine = self._thread.engine
        plan, runner = engine.loaded.plan, engine.runner
        assert plan is not None
        current = plan.model.values(runner.leaves) if runner.leaves else {}
        if not isinstance(params, Mapping) or params:
            try:
                self._staged |= self._opened_reader().read(params, {**current, **self._staged})
            except CheckpointError as error:
                raise InvalidRequest(str(error), "params") from error
        if not finish:
            return engine.weights_version
        if not runner.leaves:
            self._check_whole(plan)
        shapes, leaves = plan.model.with_values(runner.leaves or None, self._staged)
        if (difference := plan.model.difference(shapes)) is not None:
            raise InvalidRequest(
                f"params: another form than the engine's weights have: {difference}; allowed: "
                "values that are stored in the same form",
                "params",
            )
        self._staged = {}
        return self._thread.call(partial(_replace, engine, leaves, version, running))

    def _check(self, version: str | None, running: str) -> None:
        if self._thread.engine.loaded.group is not None:
            raise InvalidRequest(
                "update_weights: this engine has several hosts (nnodes); allowed: one host"
            )
        is_text = isinstance(version, str) and 0 < len(version) <= MAX_VERSION
        if version is not None and not (is_text and version.isprintable()):
            raise InvalidRequest(
                f"version is {str(version)[:80]!r}; allowed: 1 to {MAX_VERSION} printable "
                "characters, or None",
                "version",
            )
        check_mode(running, "running", UpdateMode)

    def _opened_reader(self) -> ParameterReader:
        if self._reader is None:
            loaded = self._thread.engine.loaded
            plan, source = loaded.plan, loaded.source
            assert plan is not None and source is not None
            self._reader = ParameterReader(
                plan.model_config,
                plan.dtype,
                plan.form or source.fixed_quantization,
                layout_on(plan.config, plan.device.limits),
                make_mesh(plan.model_config.split.devices),
            )
        return self._reader

    def _check_whole(self, plan: StartPlan) -> None:
        # After sleep at level 2, the engine has no weights to keep.
        missing = sorted(plan.model.parameters.keys() - self._staged.keys())
        if missing:
            raise InvalidRequest(
                f"params: the engine dropped its weights, and tensors of {len(missing)} parameters "
                f"are missing: {', '.join(missing[:8])}; allowed: all tensors of the model",
                "params",
            )


def _replace(engine: Any, leaves: Any, version: str | None, running: UpdateMode) -> str:
    if version is None:
        version = str(engine.num_weight_updates + 1)
    engine.replace_weights(leaves, version, running)
    return version


def check_mode(mode: str, name: str, allowed: Any = Literal["keep", "wait", "abort"]) -> None:
    """Check that an argument is one of the texts of a Literal type.

    Args:
        mode: the argument.
        name: its name.
        allowed: the type.

    Raises:
        InvalidRequest: it is not.
    """
    texts = get_args(allowed)
    if mode not in texts:
        raise InvalidRequest(f"{name} is {mode!r}; allowed: {', '.join(texts)}", name)
