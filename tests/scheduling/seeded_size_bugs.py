"""Bugs that pages of several sizes and the layers of Gemma 4 could have (see mutants).

The tests of a bug are a part of the usual run that notices it within a minute.
"""

from __future__ import annotations

from tests.scheduling.seeded_pool_bugs import Bug

PAGED = "jaxserve/models/paged.py"
LAYOUT = "jaxserve/models/config/page_kinds.py"
ATTENTION = "jaxserve/models/attention.py"
BESIDE = "jaxserve/models/experts_beside.py"
INPUTS = "jaxserve/models/layer_inputs.py"
GROUP_TESTS = ("tests/models/test_page_groups.py",)
PARITY_TESTS = ("tests/models/test_parity.py", "-k", "gemma4_experts or gemma4_shared_inputs")

SIZE_BUGS = (
    Bug(
        "sizes: a layer has the cells of the first kind",
        PAGED,
        "replace(step, **self._cells[place.group]._asdict())",
        "replace(step, **self._cells[0]._asdict())",
        tests=GROUP_TESTS,
    ),
    Bug(
        "sizes: a layer sees pages in the shape of the first kind",
        PAGED,
        "return self._as_kind(pages, place.kind), ",
        "return self._as_kind(pages, 0), ",
        tests=GROUP_TESTS,
    ),
    Bug(
        "sizes: a layer reads the array of another",
        PAGED,
        "        pages = self.pages[place.array]\n",
        "        pages = self.pages[place.array - 1]\n",
        tests=GROUP_TESTS,
    ),
    Bug(
        "sizes: a layer without pages reads those of the layer before its source",
        LAYOUT,
        "places = [places[source] for source in sources]",
        "places = [places[source - (source < at)] for at, source in enumerate(sources)]",
        tests=GROUP_TESTS,
    ),
    Bug(
        "sizes: keys are the values after their rotation",
        ATTENTION,
        "        kv = write_kv(",
        "        val = key if self.keys_as_values else val\n        kv = write_kv(",
        tests=PARITY_TESTS,
    ),
    Bug(
        "sizes: values are not normalized",
        ATTENTION,
        "val = val if self.value_norm is None else self.value_norm(val)",
        "val = val if self.value_norm is None else val",
        tests=PARITY_TESTS,
    ),
    Bug(
        "sizes: the router reads the input of the experts",
        BESIDE,
        "            weights, chosen = self._chosen(stream)\n",
        "            weights, chosen = self._chosen(x)\n",
        tests=PARITY_TESTS,
    ),
    Bug(
        "sizes: experts have no factors",
        BESIDE,
        "return weights * factors.astype(exact), chosen",
        "return weights, chosen",
        tests=PARITY_TESTS,
    ),
    Bug(
        "sizes: the input of a layer is not gated",
        INPUTS,
        "pair = jnp.stack([gate, step.layer_input], axis=1)",
        "pair = jnp.stack([gate, jnp.ones_like(gate)], axis=1)",
        tests=PARITY_TESTS,
    ),
)
