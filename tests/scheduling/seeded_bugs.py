"""Bugs that a paged scheduler could have, as replacements in its source (see mutants)."""

from __future__ import annotations

from tests.scheduling.seeded_device_bugs import DEVICE_BUGS
from tests.scheduling.seeded_kind_bugs import KIND_BUGS
from tests.scheduling.seeded_latent_bugs import LATENT_BUGS
from tests.scheduling.seeded_pool_bugs import (
    BATCH,
    FITTING,
    POOL,
    POOL_BUGS,
    PUBLISHING,
    RAGGED,
    RESULTS,
    SCHEDULER,
    SIBLINGS,
    SLOTS,
    STATIC,
    WAITING,
    Bug,
)
from tests.scheduling.seeded_size_bugs import SIZE_BUGS
from tests.scheduling.seeded_state_bugs import STATE_BUGS

SCHEDULE_BUGS = (
    Bug(
        "pages are released twice",
        SCHEDULER,
        "self.pool.release(*self.slots.release(slots))",
        "held = self.slots.release(slots)\n"
        "        self.pool.release(*held), self.pool.release(*held)",
    ),
    Bug(
        "preemption leaks the pages",
        SCHEDULER,
        "        self._vacate([slot])\n        self.waiting.push(sequence)",
        "        self.slots.release([slot])\n"
        "        self._running = self._running[self._running != slot]\n"
        "        self.waiting.push(sequence)",
    ),
    Bug(
        "an abort in the middle of a prompt leaks the pages",
        SCHEDULER,
        "            self._vacate([sequence.slot])\n        return True",
        "            slot = sequence.slot\n"
        "            if self.slots.num_computed[slot] < sequence.num_prompt:\n"
        "                self.slots.release([slot])\n"
        "                self._running = self._running[self._running != slot]\n"
        "            else:\n"
        "                self._vacate([slot])\n"
        "        return True",
    ),
    Bug(
        "what was computed survives preemption",
        SCHEDULER,
        "            table.num_computed[slot] = cached\n",
        "            table.num_computed[slot] = cached if sequence.num_cached < 0 else end - 1\n",
    ),
    Bug(
        "a full hit leaves nothing to compute",
        SCHEDULER,
        "(len(sequence.token_ids) - 1) // self.pool.page_size",
        "len(sequence.token_ids) // self.pool.page_size",
    ),
    Bug(
        "a partial page is published",
        PUBLISHING,
        "full = table.num_committed[slots] // self.pool.page_size\n        first = table.num_p",
        "full = -(-table.num_committed[slots] // self.pool.page_size)\n        first = table.num_p",
    ),
    Bug(
        "pages of the step in flight are published",
        PUBLISHING,
        "full = table.num_committed[slots] // self.pool.page_size\n        first = table.num_p",
        "full = table.num_computed[slots] // self.pool.page_size\n        first = table.num_p",
    ),
    Bug(
        "pages are published before they are computed",
        SCHEDULER,
        "        table.num_computed[slots] = ends\n        generations",
        "        table.num_computed[slots] = ends\n"
        "        for slot in slots.tolist():\n"
        "            count = int(table.num_computed[slot]) // self.pool.page_size\n"
        "            count = min(count, int(table.num_keys[slot]))\n"
        "            pages = table.page_table[slot, :count]\n"
        "            self.pool.publish(pages, table.page_keys[slot, :count])\n"
        "        generations",
    ),
    Bug(
        "pages of a NaN row are published",
        SCHEDULER,
        "valid = current if draws.failed is None else current & ~draws.failed",
        "valid = current",
    ),
    Bug(
        "a sequence leaves before its last pages are offered",
        SCHEDULER,
        "self._running, slots[draws.is_last])",
        "self._running, slots[:0])",
        only_slow=True,
    ),
    Bug(
        "pages of prompts are offered late",
        PUBLISHING,
        "if plan.num_steps == 1 and plan.total_tokens > len(plan):",
        "if plan.num_steps < 1:",
        only_slow=True,
    ),
    Bug(
        "an oversize request is accepted",
        SCHEDULER,
        "needed > self.pool.num_usable",
        "needed > self.pool.num_usable + 1",
    ),
    Bug(
        "a request beyond max_model_len is accepted",
        SCHEDULER,
        " or length > self.slots.max_model_len",
        "",
    ),
    Bug(
        "the generation check is dropped",
        SCHEDULER,
        "current = table.generation[plan.slots] == plan.generations",
        "current = table.generation[plan.slots] > 0",
    ),
    Bug(
        "the head is preempted",
        SCHEDULER,
        "self._preempt(int(running[-1]))",
        "self._preempt(int(running[0]))",
    ),
    Bug(
        "a preempted sequence goes to the end of the queue",
        SCHEDULER,
        "self.waiting.push(sequence)\n        sequence.num_preemptions",
        "sequence.arrival += 1000\n"
        "        self.waiting.push(sequence)\n        sequence.num_preemptions",
    ),
    Bug(
        "admission ignores the budget",
        SCHEDULER,
        "count = min(num_known - cached, budget, self.max_row_tokens, room)",
        "count = min(num_known - cached, self.max_row_tokens, room)",
    ),
    Bug(
        "admission ignores the threshold",
        SCHEDULER,
        "count = min(num_known - cached, budget, self.max_row_tokens, room)",
        "count = min(num_known - cached, budget, room)",
    ),
    Bug(
        "a long prompt takes the whole budget",
        FITTING,
        "take = need - extra + np.minimum(np.maximum(spare - before, 0), extra)",
        "take = np.clip(budget - (np.cumsum(need) - need), 0, need)",
    ),
    Bug(
        "the budget is exceeded by one",
        FITTING,
        "spare = budget - int",
        "spare = budget + 1 - int",
    ),
    Bug(
        "a page is missing at a page's end",
        SCHEDULER,
        "growing = (ends > counts * size)",
        "growing = (ends > (counts + 1) * size)",
    ),
    Bug(
        "growing rows get each other's columns",
        RAGGED,
        "(last - counts.cumsum()).repeat(counts)",
        "(last - counts.cumsum()[0]).repeat(counts)",
    ),
    Bug(
        "admission counts hits as free pages",
        SCHEDULER,
        "                free -= self.pool.num_evictable(blocks)\n",
        "",
    ),
    Bug(
        "admission does not look at free pages",
        SCHEDULER,
        "free // table.num_parts * size if fits or num_running == 0 else 0",
        "free // table.num_parts * size",
        only_slow=True,
    ),
    Bug(
        "a blocked sequence waits until all have ended",
        SCHEDULER,
        "if sequence.blocked_at == self.pool.num_changes and num_running:",
        "if sequence.blocked_at >= 0 and num_running:",
    ),
    Bug(
        "a blocked sequence does not see pages being cached",
        POOL,
        "self.is_cached[added] = True\n        self.num_changes += 1\n",
        "self.is_cached[added] = True\n",
        only_slow=True,
    ),
    Bug(
        "a small request overtakes one that waits for pages",
        SCHEDULER,
        "                sequence.blocked_at = self.pool.num_changes\n                break\n",
        "                first = self.waiting.pop()\n"
        "                second = self.waiting.peek()\n"
        "                self.waiting.push(first)\n"
        "                if second is None or len(second.token_ids) > 1:\n"
        "                    break\n"
        "                second.arrival, first.arrival = first.arrival, second.arrival\n"
        "                break\n",
    ),
    Bug(
        "an admitted sequence is last whatever its priority",
        SCHEDULER,
        "if self.waiting.by_priority or prompts.were_considered:",
        "if prompts.were_considered:",
    ),
    Bug(
        "a later request that passed completions is last",
        SCHEDULER,
        "if self.waiting.by_priority or prompts.were_considered:",
        "if self.waiting.by_priority:",
    ),
    Bug(
        "completions that wait for their prompt are lost",
        SCHEDULER,
        "        self.waiting.restore()\n",
        "",
    ),
    Bug(
        "completions wait for the last page of a prompt, which they cannot share",
        SIBLINGS,
        "return (sequence.num_prompt - 1) // size * size",
        "return sequence.num_prompt // size * size",
    ),
    Bug(
        "completions wait though their prompt is in the cache",
        SIBLINGS,
        "is_short = cached < self._num_shared(sequence)",
        "is_short = True",
    ),
    Bug(
        "completions wait for each other's prompt though its pages are of no use",
        SIBLINGS,
        "return is_computing and not is_complete",
        "return is_computing",
    ),
    Bug(
        "all completions compute the prompt",
        SIBLINGS,
        "if sequence.index == 0 or not self._enabled:",
        "if sequence.index >= 0:",
        only_slow=True,
    ),
    Bug(
        "completions wait without a prefix cache",
        SIBLINGS,
        "if sequence.index == 0 or not self._enabled:",
        "if sequence.index == 0:",
        only_slow=True,
    ),
    Bug(
        "a token is drawn beyond the last",
        SCHEDULER,
        "        need[length >= table.stop_length[running]] = 0\n",
        "",
    ),
)

COMMIT_BUGS = (
    Bug(
        "a NaN row's token is kept",
        RESULTS,
        "        drawn &= ok\n",
        "        pass\n",
    ),
    Bug(
        "rows that draw nothing append a token",
        RESULTS,
        "drawn = current & plan.samples\n",
        "drawn = current.copy()\n",
    ),
    Bug(
        "a NaN row does not end its sequence",
        RESULTS,
        "for slot in () if draws.failed is None else plan.slots[draws.failed].tolist():",
        "for slot in []:",
    ),
    Bug(
        "a NaN in a prompt's chunk is overlooked",
        RESULTS,
        "None if all_ok else current & ~ok",
        "None if all_ok else current & ~ok & plan.samples",
    ),
    Bug(
        "min_tokens is ignored",
        RESULTS,
        "        is_stop &= length > table.min_length[slots]\n",
        "",
    ),
    Bug(
        "one token too many",
        RESULTS,
        "is_last = length >= table.stop_length[slots]",
        "is_last = length > table.stop_length[slots]",
    ),
    Bug(
        "a token in flight is not counted",
        SCHEDULER,
        "            table.length[slots] = length + samples\n",
        "",
    ),
    Bug(
        "a launch counts as one token in flight",
        SCHEDULER,
        "table.length[slots] += take",
        "table.length[slots] += 1",
    ),
    Bug(
        "a launch publishes the page of a token that was only drawn",
        PUBLISHING,
        "np.minimum(ends, table.num_known[plan.slots] - 1)",
        "np.minimum(ends, table.num_known[plan.slots])",
    ),
    Bug(
        "a launch goes on after a stop token",
        RESULTS,
        "over = lasts | ~ok",
        "over = ~ok",
    ),
    Bug(
        "a launch ignores min_tokens",
        RESULTS,
        " & (num_known >= table.min_length[slots])",
        "",
    ),
    Bug(
        "tokens of a launch are taken step by step",
        RESULTS,
        "token_ids.T[drawn][counts[drawn][:, None] > steps.T]",
        "token_ids[:, drawn][steps < counts[drawn]]",
    ),
    Bug(
        "a long launch is taken while others wait",
        SCHEDULER,
        "        if self.waiting:  # the launch ends",
        "        if False:  # for a slot",
    ),
    Bug(
        "a long launch is taken while somebody could come in",
        SCHEDULER,
        "max_steps = 1 if may_enter else min(max_steps, int(remaining.min()))",
        "max_steps = min(max_steps, int(remaining.min()))",
    ),
    Bug(
        "a long launch goes on when a slot is free for who waits",
        SCHEDULER,
        "max_steps = 1 if may_enter else min(max_steps, int(remaining.min()))",
        "max_steps = 1 if may_enter else max_steps",
    ),
    Bug(
        "a launch has pages for its first step only",
        SCHEDULER,
        "self._grow(slots, table.num_computed[slots] + draws)",
        "self._grow(slots, table.num_computed[slots] + 1)",
    ),
    Bug(
        "a launch goes beyond the last token",
        SCHEDULER,
        "np.minimum(remaining[remaining > 0], max_steps)",
        "np.full(len(slots), max_steps)",
    ),
    Bug(
        "a launch takes rows in the middle of their prompts",
        SCHEDULER,
        "        if (length[remaining > 0] - table.num_computed[slots] != 1).any():\n"
        "            return None\n",
        "",
    ),
    Bug(
        "an ended sequence can be ended again",
        SCHEDULER,
        "        if sequence.finish_reason is not None:\n            return False\n",
        "",
    ),
    Bug(
        "stop tokens end nothing",
        RESULTS,
        "        is_last |= is_stop\n",
        "",
    ),
)

TABLE_BUGS = (
    Bug(
        "generations repeat",
        SLOTS,
        "        self._generations += 1\n",
        "        self._generations = 1\n",
    ),
    Bug("a released slot keeps its generation", SLOTS, "self.generation[ending] = 0", "pass"),
    Bug(
        "a new sequence inherits a pending token",
        SLOTS,
        "self.length[slot] = num_known",
        "self.length[slot] = max(num_known, self.length[slot])",
    ),
    Bug("slots are lost", SLOTS, "self._free.extend(slots)", "self._free.append(slots[0])"),
    Bug(
        "tokens of a preempted sequence are a view",
        SLOTS,
        "self.tokens[slot, :num_known].copy()",
        "self.tokens[slot, :num_known]",
    ),
    Bug(
        "preemption loses the newest token",
        SLOTS,
        "self.tokens[slot, :num_known].copy()",
        "self.tokens[slot, : max(sequence.num_prompt, num_known - 1)].copy()",
    ),
    Bug(
        "stop tokens of the slot's last sequence stay",
        SLOTS,
        "*_NO_STOPS[len(stops) : used]",
        "*self.stop_token_ids[slot, len(stops) : used].tolist()",
    ),
    Bug(
        "a page of two that leave at once is let go of once",
        POOL,
        "            if len(pages_of) > 1:  # two sequences may share a page\n",
        "            if False:\n",
    ),
    Bug("an aborted sequence still counts as waiting", WAITING, "_num_dead += 1", "_num_dead += 0"),
    Bug(
        "an aborted sequence is admitted",
        WAITING,
        "if sequence.finish_reason is None:\n                return sequence",
        "if True:\n                return sequence",
    ),
    Bug(
        "a preempted sequence goes to the end of the line",
        WAITING,
        "if not self._line or entry > self._line[-1]:",
        "if True:",
    ),
    Bug(
        "who may jump the line waits for its end",
        WAITING,
        "self._heap[0] < self._line[0]",
        "False",
    ),
    Bug("priority is ignored", WAITING, "sequence.request.priority if self.by_priority", "0 if 0"),
)

OTHER_BUGS = (
    Bug(
        "a token in flight is read from the table",
        BATCH,
        "(plan.starts < slots.num_known[plan.slots])",
        "(plan.starts <= slots.num_known[plan.slots])",
    ),
    Bug(
        "a chunk of a prompt is laid out from its prompt's beginning",
        BATCH,
        "slots.tokens[plan.slots[row], start : start + count]",
        "slots.tokens[plan.slots[row], :count]",
    ),
    Bug(
        "a static batch is refilled",
        STATIC,
        "        if self.num_running:\n            return take, total\n",
        "        if self.num_running == self.batch_size:\n            return take, total\n",
    ),
    Bug(
        "a static batch holds pages for its prompts only",
        STATIC,
        "self._place(sequence, self._no_prefix.blocks, 0, length)",
        "self._place(sequence, self._no_prefix.blocks, 0, len(sequence.token_ids))",
    ),
    Bug(
        "padding rows are taken for a sequence's",
        STATIC,
        "_NO_GENERATION = -1",
        "_NO_GENERATION = 0",
    ),
    Bug(
        "a step of padding alone is lost",
        STATIC,
        "return padding if plan is None else _joined(plan, padding)",
        "return None if plan is None else _joined(plan, padding)",
        only_slow=True,
    ),
)

SCHEDULER_BUGS = (
    *POOL_BUGS,
    *STATE_BUGS,
    *KIND_BUGS,
    *SCHEDULE_BUGS,
    *COMMIT_BUGS,
    *TABLE_BUGS,
    *OTHER_BUGS,
)
BUGS = (*SCHEDULER_BUGS, *DEVICE_BUGS, *LATENT_BUGS, *SIZE_BUGS)
