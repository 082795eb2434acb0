"""WeightUpdate: the update of a model's weights over several requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from jaxserve.engine.async_llm import AsyncLLM
from jaxserve.errors import EngineAsleep
from jaxserve.server.schema.errors import ApiError

_START = "POST /start_weight_update"
_FINISH = "POST /finish_weight_update"


class WeightUpdate:
    """State of a model's weight update, which clients start, add tensors to, and finish.

    One update is in progress at a time, and one call of it. All methods must be called from the
    event loop.

    Args:
        llm: the model's engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._is_started = self._is_busy = False
        self._num_bytes = self._most_bytes = 0

    async def start(self, is_restart: bool) -> None:
        """Start an update.

        Args:
            is_restart: whether an update in progress is discarded.

        Raises:
            ApiError: 409, an update is in progress.
            EngineAsleep: the engine sleeps.
        """
        if self._llm.is_asleep:
            raise EngineAsleep("the engine sleeps; its weights can be updated after wake_up")
        with self._busy():
            if self._is_started and not is_restart:
                raise _conflict(
                    f"a weight update is in progress: {_FINISH}, or discard it with "
                    f"{_START}?restart=true"
                )
            await self._llm.discard_weights()
            self._most_bytes = await asyncio.to_thread(lambda: self._llm.most_weight_bytes)
            self._is_started, self._num_bytes = True, 0

    @asynccontextmanager
    async def adding(self) -> AsyncIterator[None]:
        """Context manager of a call that adds tensors. An exception in it ends the update.

        Raises:
            ApiError: 409, no update was started, or another call of it is in progress.
        """
        with self._busy():
            self._check_started()
            try:
                yield
            except BaseException:
                self._is_started = False
                await self._llm.discard_weights()
                raise

    def count(self, num_bytes: int) -> None:
        """Count bytes that the update receives.

        Raises:
            ApiError: 413, the update has more bytes than safetensors files of the model need.
        """
        self.check_room(num_bytes)
        self._num_bytes += num_bytes

    def check_room(self, num_bytes: int) -> None:
        """Check that the update may receive `num_bytes` more. Errors are as in `count`."""
        if self._num_bytes + num_bytes > self._most_bytes:
            raise ApiError(
                413,
                f"the tensors of this update take more than {self._most_bytes} bytes, twice the "
                "bytes of the model and headers",
                code="too_large",
            )

    async def add(self, params: Any) -> None:
        """Stage tensors (see `AsyncLLM.update_weights`). It must be called within `adding`.

        Raises:
            InvalidRequest: a tensor is invalid.
        """
        await self._llm.update_weights(params, finish=False)

    async def finish(
        self, version: str | None, running: Literal["recompute", "keep", "abort"]
    ) -> str:
        """Use the staged tensors, end the update, and return the version of the weights.

        Args:
            version, running: see `AsyncLLM.update_weights`.

        Raises:
            ApiError: 409, no update was started, or another call of it is in progress.
            InvalidRequest: the version is invalid. The update ends without effect.
        """
        with self._busy():
            self._check_started()
            try:
                return await self._llm.update_weights({}, version, running)
            finally:
                self._is_started = False

    async def sleep(self, level: int, mode: Literal["keep", "wait", "abort"]) -> None:
        """Let the engine sleep (see `AsyncLLM.sleep`). An update in progress is discarded.

        Raises:
            ApiError: 409, a call of the update is in progress.
        """
        with self._busy():
            await self._llm.sleep(level, mode)
            self._is_started = False

    def _check_started(self) -> None:
        if not self._is_started:
            raise _conflict(f"no weight update is in progress: {_START} first")

    @contextmanager
    def _busy(self) -> Iterator[None]:
        if self._is_busy:
            raise _conflict("another call changes the weights: wait for its answer")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")
