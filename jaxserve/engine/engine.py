"""Engine: the body of the serving loop. One thread owns it, and it never waits for a caller."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from jaxserve.engine.delivery import Delivery, LiveSequence
from jaxserve.engine.delta import Sink
from jaxserve.engine.draw_scores import DrawScores
from jaxserve.engine.metrics import STEP_TOKENS, EngineStats, MemoryUse, SnapshotStats, ValueCounts
from jaxserve.engine.recovery import Recovery
from jaxserve.engine.request_factory import RequestFactory
from jaxserve.engine.sharing import check_sharing, open_events
from jaxserve.errors import EngineAsleep, EngineDead, InvalidRequest
from jaxserve.execution.runner import InFlight, OnProgress
from jaxserve.request import MAX_LOGPROBS, FinishReason, Request
from jaxserve.scheduling.budget import LaunchLength
from jaxserve.scheduling.logprobs import PromptLogprobs
from jaxserve.scheduling.page_pool import PagePool
from jaxserve.scheduling.plan import LaunchPlan
from jaxserve.scheduling.scheduler import Scheduler
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slot_table import SlotTable
from jaxserve.settings.config import EngineConfig
from jaxserve.settings.secret_files import read_secret
from jaxserve.start.loaded import Loaded
from jaxserve.start.sources.expert_load import record
from jaxserve.start.start import load
from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.grammars import grammars_of

_log = logging.getLogger(__name__)


PauseMode = Literal["keep", "wait", "abort"]
UpdateMode = Literal["recompute", "keep", "abort"]
MakeScheduler = Callable[[EngineConfig, PagePool, SlotTable], Scheduler]


def make_scheduler(config: EngineConfig, pool: PagePool, slots: SlotTable) -> Scheduler:
    """Create the default scheduler of an engine with the settings of its resolved configuration."""
    assert config.max_num_batched_tokens is not None
    return Scheduler(
        pool,
        slots,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        policy=config.scheduling_policy,
        prefix_secret=read_secret(config.prefix_caching_secret),
        num_snapshots=slots.num_snapshots if slots.keeps_states else None,
    )


class Engine:
    """The body of the serving loop: schedules a step, submits it, and commits the previous step.

    An Engine is not thread-safe. `EngineThread` runs it on its own thread.

    Args:
        config: the settings, from which the model is loaded, or a loaded model.
        on_progress: called with (stage, done, total) while the model is loaded.
        scheduler: creates the scheduler. Baselines pass another one with the same interface.
    """

    def __init__(
        self,
        config: EngineConfig | Loaded,
        on_progress: OnProgress | None = None,
        scheduler: MakeScheduler = make_scheduler,
    ) -> None:
        if not isinstance(config, Loaded):
            check_sharing(config)
        loaded = config if isinstance(config, Loaded) else load(config, on_progress)
        self.loaded = loaded
        self.config = loaded.config
        self.limits = loaded.limits
        self.tokenizer = loaded.tokenizer
        self.runner = loaded.runner
        grammars = grammars_of(
            loaded.tokenizer, loaded.limits.vocab_size, loaded.limits.eos_token_ids
        )
        self.requests = RequestFactory(
            loaded.tokenizer, loaded.limits, grammars, loaded.default_sampling
        )
        self.slots = loaded.slot_table()
        kinds = self.slots.kinds
        self.pool = PagePool(self.runner.num_pages, self.slots.page_size, kinds)
        self.scheduler = scheduler(self.config, self.pool, self.slots)
        self._in_flight: InFlight | None = None
        self._pace = LaunchLength(self.runner.most_steps, self.config.num_scheduler_steps)
        self._recovery = Recovery(self.scheduler, self.slots)
        scores = DrawScores(self.slots, self.config.logprobs_mode, self.limits.vocab_size)
        self._delivery = Delivery(self.scheduler, self.slots, self._recovery, scores)
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_failed_steps = 0
        self._prompt_tokens = 0
        # A histogram of prompt and answer tokens per step.
        self.step_tokens = ValueCounts(STEP_TOKENS)
        self._compiles_at_start = self.runner.num_compiles
        self.num_weight_updates = 0
        # "keep" computes nothing. "wait" computes the requests that have begun.
        self.paused: PauseMode | None = None
        self.is_asleep = False
        self._events = open_events(self.config, kinds[0].window)
        if self._events is not None:
            self.pool.on_change = self._events.add

    def add(self, request: Request, sink: Sink, takes_arrays: bool = False) -> None:
        """Queue a request at the scheduler: one sequence for each of its `n` completions.

        Args:
            sink: called with every Delta of the request's completions.
            takes_arrays: whether the deltas have the tokens of a launch as arrays, without text.

        Raises:
            InvalidRequest: the request id is in use, or the request does not fit into the KV cache.
            EngineAsleep: the engine sleeps.
        """
        if self.is_asleep:
            raise EngineAsleep("the engine sleeps; it serves again after wake_up")
        if self._delivery.of_request(request.request_id):
            raise InvalidRequest(f"request_id {request.request_id!r} is being served", "request_id")
        lives, now = [], time.monotonic()
        for index in range(request.sampling.n):
            sequence = Sequence(
                request=request,
                arrival=self._num_arrivals + index,
                token_ids=request.prompt_token_ids,
                index=index,
                seed=(request.seed + index) % 2**64,
                constraint=None if request.constraint is None else request.constraint.copy(),
            )
            if request.sampling.prompt_logprobs is not None and index == 0:
                sequence.prompt_logprobs = self._prompt_logprobs(request)
            has_text = request.sampling.stop if takes_arrays else request.sampling.detokenize
            text = self._detokenizer(request) if has_text else None
            lives.append(LiveSequence(sequence, sink, text, takes_arrays, now))
        for live in lives:
            self._queue(live.sequence)
        self._delivery.add(request.request_id, lives)
        self._num_arrivals += len(lives)
        self._prompt_tokens += len(request.prompt_token_ids)

    def _prompt_logprobs(self, request: Request) -> PromptLogprobs:
        width, count = request.sampling.prompt_logprobs or 0, len(request.prompt_token_ids)
        width = self.limits.vocab_size if width == -1 else width
        # As in vLLM, sampling parameters do not change the log-probabilities of prompt tokens.
        as_logits = self.config.logprobs_mode.endswith("_logits")
        return PromptLogprobs(count, width, as_logits or width > MAX_LOGPROBS, as_logits)

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        tail = request.prompt_token_ids[-16:].tolist()
        return Detokenizer(self.tokenizer, tail, request.sampling)

    def abort(self, request_id: str, error: str | None = None, waiting_only: bool = False) -> bool:
        """Abort a request, and send the last deltas of its completions with reason "abort".

        Args:
            error: message for the deltas, or None.
            waiting_only: abort the request only if no sequence of it has ever had a slot.

        Returns:
            Whether the request was aborted. It is False for an unknown or ended request.
        """
        lives = self._delivery.of_request(request_id)
        if not lives or (waiting_only and any(live.sequence.num_cached >= 0 for live in lives)):
            return False
        for live in lives:
            self._delivery.end(live, FinishReason.ABORT, error)
        return True

    def pause(self, request_id: str) -> None:
        """Free the slots and pages of a request until `resume` queues it again.

        Its tokens are kept. A token that is being computed is dropped and sampled again later.
        """
        for live in self._delivery.of_request(request_id):
            self.scheduler.finish(live.sequence, FinishReason.ABORT)
            self._recovery.forget(live.sequence)

    def resume(self, request_id: str) -> None:
        """Queue a paused request's sequences again, as the newest arrivals with their tokens.

        A request that is not paused is not changed.
        """
        for live in self._delivery.of_request(request_id):
            if live.sequence.finish_reason is None:
                continue
            again = replace(
                live.sequence,
                arrival=self._num_arrivals,
                finish_reason=None,
                blocked_at=-1,
                precedence=0,
            )
            self._num_arrivals += 1
            self._delivery.replace(live, again)
            self._queue(live.sequence)

    def _queue(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)
        if self.paused == "wait":
            self.scheduler.waiting.hold(lambda waiting: waiting is sequence)

    @property
    def weights_version(self) -> str:
        """The version of the weights, "0" until an update."""
        return self._delivery.weights_version

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        has_rows = self.scheduler.has_work and self.paused != "keep"
        return has_rows or self._in_flight is not None

    def pause_all(self, mode: PauseMode) -> None:
        """Start no further request until `resume_all`. New requests wait.

        Args:
            mode: "keep" stops all requests where they are. "wait" computes the requests that have
                begun to their end, after which `has_work` is False. "abort" aborts all requests.
        """
        if mode == "abort":
            for live in self._delivery.all():
                self._delivery.end(live, FinishReason.ABORT)
        self._drain()
        can_compute = not self.is_asleep and self.runner.leaves
        self.paused = "wait" if mode == "wait" and can_compute else "keep"
        if self.paused == "wait":
            self.scheduler.waiting.hold(lambda waiting: waiting.num_cached < 0)

    def resume_all(self) -> None:
        """Continue after `pause_all`.

        Raises:
            EngineAsleep: the engine sleeps, or has had no weights since it slept.
        """
        if self.is_asleep:
            raise EngineAsleep("the engine sleeps; it serves again after wake_up")
        if not self.runner.leaves:
            raise EngineAsleep("the engine dropped its weights; it serves after update_weights")
        self.paused = None
        self.scheduler.waiting.release()

    def replace_weights(
        self, leaves: list[Any], version: str, running: UpdateMode = "recompute"
    ) -> None:
        """Use other weights from the next step on.

        Args:
            leaves: the model's arrays (see `Runner.replace_leaves`).
            version: name of the weights.
            running: "recompute" computes the cache of running requests again, and keeps their
                tokens. "keep" continues them on their cache. "abort" aborts all requests.
        """
        if self.is_asleep:
            raise EngineAsleep("the engine sleeps; its weights can be updated after wake_up")
        self._drain()
        if running == "abort":
            for live in self._delivery.all():
                self._delivery.end(live, FinishReason.ABORT)
        elif running == "recompute":
            self._compute_anew()
        lacked = not self.runner.leaves
        self.runner.replace_leaves(leaves)
        waiting = self.scheduler.waiting
        self.scheduler.publisher.begin_weights([*waiting, *waiting.held])
        self._delivery.weights_version = version
        self.num_weight_updates += 1
        if lacked:
            self.resume_all()

    def _compute_anew(self) -> None:
        """Preempt all sequences. Their cache and pending prompt logprobs are computed again."""
        self.scheduler.preempt_all(lambda sequence: sequence.precedence)
        for prompt in (live.sequence.prompt_logprobs for live in self._delivery.all()):
            if prompt is not None:
                prompt.start_anew()

    def sleep(self, level: int) -> None:
        """Free the KV cache, and the weights as `Runner.sleep` does, until `wake_up`.

        The engine is paused. Tokens of unfinished requests are kept, and their cache is computed
        again. A sleeping engine is not changed.
        """
        if self.is_asleep:
            return
        self._drain()
        self.paused, self.is_asleep = "keep", True
        self._compute_anew()
        self.pool.clear_cache()
        self.runner.sleep(level)

    def wake_up(self, leaves: list[Any] | None = None) -> None:
        """Allocate the KV cache again, and continue. `leaves` are of files, with version "0"."""
        if not self.is_asleep:
            return
        self.runner.wake_up(leaves)
        self.is_asleep = False
        if leaves is not None:
            self._delivery.weights_version = "0"
        if self.runner.leaves:  # otherwise `replace_weights` continues
            self.resume_all()

    @property
    def loss(self) -> str | None:
        """The reason why the engine ends if another of its hosts is lost, otherwise None.

        After a loss, the engine's thread may wait forever within a step.
        """
        return None if self.loaded.group is None else self.loaded.group.loss

    @property
    def progress(self) -> tuple[int, int]:
        """The pair (committed steps, failed steps) since the start, which every step changes."""
        return self._num_steps, self._num_failed_steps

    def step(self) -> None:
        """Run one iteration of the loop: schedule and submit a step, commit the previous one.

        The tokens of the committed step are sent to the receivers of the requests. After an error
        of the device, the failed step is computed again, and a sequence that keeps failing ends
        with finish_reason "error". Any other exception is a bug of the engine.

        Raises:
            EngineDead: a step failed on an engine with several hosts.
        """
        self._recovery.limit_running()
        # Programs are added while the engine serves.
        self.scheduler.token_sizes = self.runner.buckets.token_sizes
        self.scheduler.now = time.monotonic()
        plan = None
        if self.paused != "keep":
            plan = self.scheduler.schedule(min(self._pace.steps(), self.runner.max_steps))
        try:
            submitted = None if plan is None else self.runner.submit(plan, self.slots)
        except Exception as error:
            before = [] if self._in_flight is None else [self._in_flight.plan]
            self._recover(error, [*before, *([] if plan is None else [plan])])
            return
        before, self._in_flight = self._in_flight, submitted
        if before is not None:
            self._commit(before)
        if not self.config.async_scheduling or self._recovery.is_testing:
            self._drain()
        if self.config.check_invariants:
            self.scheduler.check()

    def _drain(self) -> None:
        step, self._in_flight = self._in_flight, None
        if step is not None:
            self._commit(step)

    def _commit(self, step: InFlight) -> None:
        try:
            token_ids, ok, logprobs = self.runner.read(step)
        except Exception as error:
            self._recover(error, [step.plan])
            return
        outside = (token_ids < 0) | (token_ids >= self.limits.vocab_size)
        if outside.any():  # these rows fail, as rows with logits that are not finite
            ok, token_ids = ok & ~(outside & step.plan.samples), np.where(outside, 0, token_ids)
        self._pace.has_read(step.submitted, step.plan.num_steps)
        self._recovery.has_read(step.plan)
        if logprobs is not None:
            self._delivery.keep_prompt_logprobs(step.plan, logprobs)
        result = self.scheduler.commit(step.plan, token_ids, ok)
        self._num_steps += 1
        # As in vLLM, a row that has computed its whole prompt also counts its sampled token.
        steps, before = step.plan.num_steps, self._delivery.num_first_tokens
        self._delivery.deliver(result, logprobs)
        count = step.plan.total_tokens if steps == 1 else len(result.tokens)
        first = self._delivery.num_first_tokens - before
        self.step_tokens.add((count + first) / steps, steps)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear the prefix cache, so that later requests reuse no earlier page, and return True.

        Args:
            reset_running_requests: whether to preempt running sequences first, so that their pages
                are computed again. Their tokens are kept.
        """
        if reset_running_requests:
            self.scheduler.preempt_all(lambda sequence: sequence.precedence)
        self.pool.clear_cache()
        return True

    def _recover(self, error: Exception, plans: list[LaunchPlan]) -> None:
        """Recover from a failed step, which loses the contents of the KV cache.

        All sequences are preempted, so that their pages are computed again. Sequences that have
        failed too often end with finish_reason "error".

        Args:
            plans: plans of the failed step, and of a step in flight with it.

        Raises:
            EngineDead: the engine has several hosts, whose states may differ now.
        """
        if self.loaded.group is not None:
            raise EngineDead(f"a step failed, on one of several hosts: {error}") from error
        _log.error("a step failed and is computed again: %s", error, exc_info=error)
        self._num_failed_steps += 1
        self._in_flight = None
        self.runner.reset(error)
        guilty = self._recovery.has_failed(plans)
        self.pool.clear_cache()
        for sequence in guilty:
            # Its other completions have the same prompt and settings.
            for live in self._delivery.of_request(sequence.request.request_id):
                if live.sequence is sequence or len(live.sequence.token_ids) == sequence.num_prompt:
                    self._delivery.end(live, FinishReason.ERROR, f"the step failed: {error}")

    def stats(self) -> EngineStats:
        """Return a snapshot of the engine's counters, and of its use of slots and pages."""
        scheduler, pool, behind = self.scheduler, self.pool, self.loaded.behind
        in_use = {"page": pool.num_usable - pool.num_free, "slot": scheduler.num_running}
        units = {"page": pool.num_usable, "slot": self.slots.num_slots}
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting + len(scheduler.waiting.held),
            num_slots=self.slots.num_slots,
            num_pages=pool.num_usable,
            pages_in_use=in_use["page"],
            num_steps=self._num_steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._delivery.num_tokens,
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            num_compiles=self.runner.num_compiles - self._compiles_at_start,
            num_compiles_behind=0 if behind is None else behind.num_compiled,
            num_programs_missing=0 if behind is None else behind.num_missing,
            num_failed_steps=self._num_failed_steps,
            expert_rows=tuple(self.runner.expert_rows.counts.tolist()),
            memory=tuple(
                MemoryUse(kind.name, kind.unit, units[kind.unit], in_use[kind.unit])
                for kind in self.runner.memory
                if kind.layers
            ),
            snapshots=self._snapshot_stats(),
            pages_by_kind=self._pages_by_kind(),
            weights_version=self.weights_version,
            num_weight_updates=self.num_weight_updates,
        )

    def _pages_by_kind(self) -> dict[str, int]:
        kinds = self.runner.model_config.page_layout.kinds
        if len(kinds) < 2:
            return {}
        return {
            kind.name: count for kind, count in zip(kinds, self.pool.used_by_kind(), strict=True)
        }

    def _snapshot_stats(self) -> SnapshotStats | None:
        if not self.slots.keeps_states:
            return None
        if self.scheduler.states is None:  # without a prefix cache
            return SnapshotStats()
        pool = self.scheduler.states.snapshots
        return SnapshotStats(
            held=pool.num_held,
            saved=pool.num_saved,
            restored=pool.num_restored,
            evicted=pool.num_evicted,
            lost_pages=pool.num_lost_pages,
        )

    def close(self, error: str | None = None) -> None:
        """End all requests, and release the device, connections and publisher. Idempotent.

        Args:
            error: message for the last deltas of the requests, which then have finish_reason
                "error". None for finish_reason "abort".
        """
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        for live in self._delivery.all():
            self._delivery.end(live, reason, error)
        self._in_flight = None
        if self._events is not None:
            self._events.close()
        if self.loaded.behind is not None:
            self.loaded.behind.close()
        if self.loaded.group is not None and error is not None:
            self.loaded.group.fail(error)
        elif self.loaded.group is not None:
            self.loaded.group.close()
        record(self.config, self.runner)
        self.runner.close()
