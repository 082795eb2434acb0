"""BatchService: answers lines of batches with what other clients leave of the engines."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from jaxserve.server.api.inner import InnerClient
from jaxserve.server.kept.batch_lines import BatchResponse, Line
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.served.models import Models, ServedModel

# One slot of this many is left for clients that come while a batch runs.
SLOTS_FOR_ONE_FREE = 8
# Seconds between looks at the slots, besides those when a line has ended.
POLL_SECONDS = 0.02


class BatchService:
    """Service of batches: a line starts where a slot is free, and none where others wait.

    Args:
        models: of the server.
        client: of its endpoints.
    """

    def __init__(self, models: Models, client: InnerClient) -> None:
        self._models = models
        self._client = client
        self._taken = dict.fromkeys((model.name for model in models.all), 0)
        self._freed = asyncio.Event()

    async def answer(self, line: Line, owner: str | None = None) -> BatchResponse:
        """Answer a line, whatever the status of the answer."""
        return await self._client.answer(line, owner)

    def is_alive(self, model: str | None) -> bool:
        """Return whether the engine of a model still answers."""
        return self._find(model).llm.is_alive()

    async def enter(self, model: str | None) -> None:
        """Wait for a slot that no other client needs, and take it."""
        served = self._find(model)
        while not self._has_room(served):
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._freed.wait()
        self._taken[served.name] += 1

    def leave(self, model: str | None) -> None:
        """Give a slot back."""
        self._taken[self._find(model).name] -= 1
        self._freed.set()
        self._freed = asyncio.Event()

    def _has_room(self, served: ServedModel) -> bool:
        slots = served.admission.num_slots
        taken = max(self._taken[served.name], served.behind().admission.num_live)
        most = max(1, slots - max(1, slots // SLOTS_FOR_ONE_FREE))
        return taken < most and taken + served.admission.num_live < slots

    def _find(self, model: str | None) -> ServedModel:
        try:
            return self._models.find(model)
        except ApiError:  # the endpoint refuses the line
            return self._models.all[0]
