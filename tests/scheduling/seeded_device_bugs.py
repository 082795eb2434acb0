"""Bugs that the states of sequences could have on the device (see mutants).

Each is in the places of a step, the loop of several decode steps, a layer, or a kernel. The tests
of a bug are a part of the usual run that notices it within seconds.
"""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import BATCH, Bug

STEP = "jaxserve/execution/step.py"
LAYERS = "jaxserve/models/recurrent.py"
ROWS = "pallas_kernels/cpu/state_rows.py"
CONVOLUTION = "pallas_kernels/cpu/causal_conv.py"
RECURRENCE = "pallas_kernels/cpu/recurrence.py"
SPECIFICATION = "pallas_kernels/reference.py"
PLACES_TESTS = ("tests/execution/test_state_rows.py",)
KERNEL_TESTS = ("tests/kernels/test_states.py",)
STATE_TESTS = ("tests/engine/test_snapshots.py",)
FAMILY_TESTS = ("tests/engine/test_states.py",)


def _places(letter: str, name: str, old: str, new: str) -> Bug:
    return Bug(name, BATCH, old, new, letter=letter, tests=PLACES_TESTS)


def _steps(letter: str, name: str, old: str, new: str) -> Bug:
    return Bug(name, STEP, old, new, letter=letter, tests=STATE_TESTS)


def _kernel(letter: str, name: str, file: str, old: str, new: str) -> Bug:
    return Bug(name, file, old, new, letter=letter, tests=KERNEL_TESTS)


PLACE_BUGS = (
    _places(
        "a",
        "places: a row at position 0 starts from its slot",
        "source=jnp.where(first == 0, -1, source)",
        "source=source",
    ),
    _places(
        "b",
        "places: a restored row starts from zeros",
        "source = jnp.where(restored >= 0, restored, batch.slots)",
        "source = jnp.where(restored >= 0, -1, batch.slots)",
    ),
    _places(
        "c",
        "places: in a full bucket padding belongs to the last row",
        "        query_start=batch.query_start,\n        source",
        "        query_start=batch.query_start.at[-1].set(len(batch.tokens)),\n        source",
    ),
    _places(
        "f",
        "places: a snapshot is saved one token late",
        "tokens = border - first",
        "tokens = border - first + 1",
    ),
    _places(
        "g",
        "places: a snapshot is saved one token early",
        "tokens = border - first",
        "tokens = border - first - 1",
    ),
    _places(
        "g",
        "places: the first step of a launch saves the border of a later one",
        "is_here = (tokens > 0) & (tokens <= jnp.diff(batch.query_start))",
        "is_here = tokens > 0\n    tokens = jnp.minimum(tokens, jnp.diff(batch.query_start))",
    ),
    _places(
        "h",
        "places: a snapshot is taken from the neighbouring row",
        "        saved=saved,",
        "        saved=jnp.roll(saved, 1),",
    ),
    _places(
        "m",
        "places: a row that has ended keeps the place of a state",
        "target=jnp.where(batch.slots == null_slot, -1, batch.slots)",
        "target=batch.slots",
    ),
    _places(
        "n",
        "places: rows read the places of the batch's chunks",
        "    restored, border, saved = batch.states\n",
        "    chunk = jnp.cumsum(jnp.diff(batch.query_start) > 1) - 1\n"
        "    restored, border, saved = batch.states[:, chunk]\n",
    ),
    _places(
        "n",
        "places: the first position of a row is read at the row's number",
        "batch.positions.at[batch.query_start[:-1]].get",
        "batch.positions.at[jnp.arange(len(batch.slots))].get",
    ),
)

STEP_BUGS = (
    _steps(
        "f",
        "steps: a launch of decodes saves a snapshot one token late",
        "states.at[0].set(jnp.where(done == 0, states[0], -1))",
        "states.at[1].add(done > 0)",
    ),
    _steps(
        "g",
        "steps: a launch of decodes saves a snapshot one token early",
        "states.at[0].set(jnp.where(done == 0, states[0], -1))",
        "states.at[1].add(-(done > 0).astype(jnp.int32))",
    ),
    _steps(
        "m",
        "steps: an ended row advances the state of its slot",
        "slots=jnp.where(active, batch.slots, null_slot),\n            states",
        "slots=batch.slots,\n            states",
    ),
    _steps(
        "m",
        "steps: an ended row goes on as if it had not",
        "            positions=jnp.where(active, batch.positions + done, 0),\n"
        "            kv_len=jnp.where(active, length, 0),\n"
        "            slots=jnp.where(active, batch.slots, null_slot),\n",
        "            positions=batch.positions + done,\n"
        "            kv_len=jnp.where(active, length, 0),\n"
        "            slots=batch.slots,\n",
    ),
)

LAYER_BUGS = (
    Bug(
        "layers: a step of single tokens drops the past of a short convolution",
        LAYERS,
        "before * inputs, states[0], self.taps",
        "before * inputs, states[0] * (not step.decode_only), self.taps",
        letter="d",
        tests=STATE_TESTS,
    ),
    Bug(
        "layers: a step of single tokens drops the past of the delta rule's convolution",
        LAYERS,
        "mixed, gates, states, weights",
        "mixed, gates, (states[0] * (not step.decode_only), states[1]), weights",
        letter="d",
        tests=FAMILY_TESTS,
    ),
    Bug(
        "layers: a step of single tokens drops the past of Mamba-2's convolution",
        LAYERS,
        "mixed, steps, states, weights",
        "mixed, steps, (states[0] * (not step.decode_only), states[1]), weights",
        letter="d",
        tests=FAMILY_TESTS,
    ),
)

KERNEL_BUGS = (
    _kernel(
        "a",
        "convolution: a row without a source starts from another state",
        ROWS,
        "return self.code.select(is_fresh, filled(vector.type, 0.0), vector)",
        "return vector",
    ),
    _kernel(
        "b",
        "kernels: a row that starts from another place starts from zeros",
        ROWS,
        'is_fresh = self.code.icmp_signed("<", self.source, const(0))',
        'is_fresh = self.code.icmp_signed("!=", self.source, self.target)',
    ),
    _kernel(
        "c",
        "recurrence: padding belongs to the last row",
        RECURRENCE,
        "            row = self.row_of(code, tables, code.srem(unit, num_rows))\n",
        "            nth = code.srem(unit, num_rows)\n"
        "            row = self.row_of(code, tables, nth)\n"
        '            is_last = code.icmp_signed("==", nth, code.sub(num_rows, const(1)))\n'
        '            vars(row)["end"] = code.select(is_last, tokens, row.end)\n',
    ),
    _kernel(
        "d",
        "convolution: a chunk of one token drops the past",
        CONVOLUTION,
        "                    past.append(places.or_zero(read))\n",
        "                    count = code.sub(places.end, places.begin)\n"
        '                    is_one = code.icmp_signed("==", count, const(1))\n'
        "                    zeros = filled(read.type, 0.0)\n"
        "                    past.append(code.select(is_one, zeros, places.or_zero(read)))\n",
    ),
    _kernel(
        "e",
        "convolution: a chunk of three tokens keeps one column too few",
        CONVOLUTION,
        "                save(places.target, places.advanced(past, advance, save))\n",
        "                past = places.advanced(past, advance, save)\n"
        "                count = code.sub(places.end, places.begin)\n"
        '                is_three = code.icmp_signed("==", count, const(3))\n'
        "                zeros = filled(past[0].type, 0.0)\n"
        "                past[0] = code.select(is_three, zeros, past[0])\n"
        "                save(places.target, past)\n",
    ),
    _kernel(
        "f",
        "kernels: a snapshot is saved one token late",
        ROWS,
        "middle = code.add(self.begin, self.border)",
        "middle = code.add(code.add(self.begin, self.border), const(1))\n"
        "        middle = code.smaller_int(middle, self.end)",
    ),
    _kernel(
        "g",
        "kernels: a snapshot is saved one token early",
        ROWS,
        "middle = code.add(self.begin, self.border)",
        "middle = code.sub(code.add(self.begin, self.border), const(1))\n"
        "        middle = code.larger_int(middle, self.begin)",
    ),
    _kernel(
        "h",
        "kernels: a state is saved at the neighbouring place",
        ROWS,
        "save(self.saved, carry)",
        "save(code.add(self.saved, const(1)), carry)",
    ),
    _kernel(
        "h",
        "recurrence: a snapshot is taken from the neighbouring slot",
        RECURRENCE,
        "read = self.read(code, state, self.sums.name)\n                    self._write",
        "other = code.larger_int(code.sub(row.target, const(1)), const(0))\n"
        "                    read = self.read(code, matrix(other), self.sums.name)\n"
        "                    self._write",
    ),
    _kernel(
        "m",
        "kernels: a row that has ended changes a state",
        ROWS,
        "return StateRow(code, begin, end, *(read(table, number) for table in places))",
        "source, target, *saved = [read(table, number) for table in places]\n"
        "        target = code.larger_int(target, const(0))\n"
        "        return StateRow(code, begin, end, source, target, *saved)",
    ),
)

SPECIFICATION_BUGS = (
    _kernel(
        "a",
        "specification: a row without a source starts from another state",
        SPECIFICATION,
        "first = jnp.where(source < 0, 0, states[jnp.maximum(source, 0)])",
        "first = states[jnp.maximum(source, 0)]",
    ),
    _kernel(
        "b",
        "specification: a row that starts from another place starts from zeros",
        SPECIFICATION,
        "first = jnp.where(source < 0, 0,",
        "first = jnp.where(source != rows.target[row], 0,",
    ),
    _kernel(
        "c",
        "specification: padding advances the last row",
        SPECIFICATION,
        "    start, count = rows.query_start, len(states)\n",
        "    start, count = rows.query_start, len(states)\n"
        "    start = jnp.where(start == start[-1], len(inputs[0]), start)\n",
    ),
    _kernel(
        "d",
        "specification: a chunk of one token drops the past",
        SPECIFICATION,
        "first = jnp.where(source < 0, 0,",
        "first = jnp.where(start[row + 1] - start[row] == 1, 0,",
    ),
    _kernel(
        "f",
        "specification: a snapshot is saved one token late",
        SPECIFICATION,
        "(done == rows.border[row])",
        "(done == rows.border[row] + 1) & (rows.border[row] > 0)",
    ),
    _kernel(
        "g",
        "specification: a snapshot is saved one token early",
        SPECIFICATION,
        "(done == rows.border[row])",
        "(done + 1 == rows.border[row])",
    ),
    _kernel(
        "h",
        "specification: a snapshot is taken from the neighbouring row",
        SPECIFICATION,
        "jnp.where(at_border, rows.saved[row], count)",
        "jnp.where(at_border, jnp.roll(rows.saved, 1)[row], count)",
    ),
    _kernel(
        "n",
        "specification: the border is that of the batch's chunk",
        SPECIFICATION,
        "(done == rows.border[row])",
        "(done == rows.border[jnp.cumsum(jnp.diff(start) > 1)[row] - 1])",
    ),
)

DEVICE_BUGS = (*PLACE_BUGS, *STEP_BUGS, *LAYER_BUGS, *KERNEL_BUGS, *SPECIFICATION_BUGS)
