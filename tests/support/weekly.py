"""Which tests run only in the weekly job, or after a change of their subject.

    python -m tests.support.weekly --since REF | --changed REF | --long

prints the environments that a run's tests need besides `.venv`: "clients" and "compiler".
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import pytest

from tests.support.selection import ROOT, Graph, NoHistory, Selection, Subject, files_of

PAGE = Subject("the page in a browser", ("jaxserve/server/page/", "tests/page/"))
HOSTS = Subject(
    "several hosts",
    (
        "jaxserve/execution/hosts/",
        "jaxserve/execution/mesh.py",
        "jaxserve/execution/runner.py",
        "jaxserve/engine/following.py",
        "jaxserve/settings/hosts.py",
        "tests/execution/",
    ),
)
CUDA = Subject(
    "the start of CUDA",
    ("jaxserve/start/jax_start.py", "scripts/find_device.py", "tests/execution/test_jax_start.py"),
)
PROGRAMS = Subject(
    "processes that compile programs",
    ("jaxserve/start/", "jaxserve/execution/runner.py", "tests/engine/"),
)
PLANS = Subject(
    "further plans and forms of starts",
    (
        "jaxserve/models/",
        "jaxserve/settings/",
        "jaxserve/start/",
        "jaxserve/weights/",
        "pallas_kernels/devices.py",
        "tests/engine/",
    ),
)
TRACES = Subject(
    "traces of requests",
    (
        "jaxserve/server/served/tracing.py",
        "jaxserve/server/served/request_trace.py",
        "tests/server/test_traces.py",
    ),
)
SOURCES = Subject(
    "servers of other sources",
    (
        "jaxserve/server/served/",
        "jaxserve/settings/model_name.py",
        "jaxserve/start/sources/",
        "tests/server/test_sources.py",
    ),
)
RAY = Subject("Ray", ("jaxserve/fleet/", "jaxserve/ray_app.py", "tests/fleet/"))
REAL = Subject("more of real models", ("jaxserve/models/decoder.py", "tests/real/"))
# By the beginning of a test's node id.
BY_NAME = {
    "tests/scripts/": Subject("tests of scripts", ("scripts/", "tests/scripts/")),
    "tests/test_examples.py": Subject(
        "tests of scripts",
        ("scripts/examples/", "jaxserve/engine/llm.py", "tests/test_examples.py"),
    ),
    "tests/test_bootstrap.py": Subject(
        "tests of scripts",
        (
            "pyproject.toml",
            "scripts/bootstrap",
            "scripts/constraints.txt",
            "scripts/demo",
            "scripts/find_device.py",
            "scripts/test",
            "scripts/try_cuda.py",
        ),
    ),
    "tests/clients/test_bench.py": Subject(
        "tests of benchmarks", ("jaxserve/commands/bench/", "tests/clients/test_bench.py")
    ),
    "tests/clients/test_bench_serving.py": Subject("tests of scripts", ("scripts/serving/",)),
    "tests/clients/test_deploy.py": Subject("tests of scripts", ("scripts/deploy/",)),
    **dict.fromkeys(
        ("tests/clients/test_apart.py", "tests/clients/test_fronts.py"),
        Subject(
            "second clients of a protocol",
            ("jaxserve/server/api/", "jaxserve/server/schema/", "tests/clients/"),
        ),
    ),
    "tests/page/": PAGE,
    "tests/real/": REAL,
    "tests/server/test_sources.py": SOURCES,
    "tests/server/test_traces.py": TRACES,
    "tests/execution/test_jax_start.py": CUDA,
    "tests/execution/test_hosts.py::test_a_follower_says_in_one_sentence": HOSTS,
    "tests/execution/test_hosts.py::test_a_follower_that_dies": HOSTS,
    "tests/execution/test_hosts.py::test_programs_of_one_process": HOSTS,
    "tests/execution/test_hosts.py::test_two_hosts_of_two_devices": HOSTS,
    "tests/engine/test_host_plan.py::test_a_process_stays": PLANS,
    "tests/engine/test_memory_plan.py::test_a_start_is_refused_in_a_sentence": PLANS,
    "tests/engine/test_memory_plan.py::test_the_command_plans": PLANS,
    "tests/engine/test_programs_behind.py": PROGRAMS,
    "tests/engine/test_start.py::test_a_program_may_end": PROGRAMS,
    "tests/engine/test_start.py::test_kept_programs_are_one": PROGRAMS,
}
# Tests that every run has, whatever `BY_NAME` and `FURTHER` say, by the beginning of a node id.
KEPT = (
    "tests/engine/test_programs_behind.py::test_requests_are_served",
    "tests/machine_code/test_steps.py",
    "tests/page/test_dashboard.py::test_a_large_page_map",
    "tests/page/test_dashboard.py::test_page_map",
    "tests/page/test_markdown.py::test_hostile_markdown",
    "tests/page/test_page.py::test_a_question_is_answered",
    "tests/page/test_page.py::test_the_page_is_small",
    "tests/real/test_fetch.py",
    "tests/real/test_quality.py",
    "tests/real/test_text.py",
    "tests/real/test_tokens.py::test_greedy_answers[smollm2]",
    "tests/structured/test_schema_faults.py",
    "tests/test_examples.py::test_example_that_trains",
    "tests/weights/test_bad_checkpoints.py",
    "tests/weights/test_bad_gguf.py",
)
# Tests of which every run has one case of each function, by the beginning of a node id, except for
# functions that `HOSTILE` names. Those have all cases.
FURTHER = {
    **dict.fromkeys(
        [
            f"tests/engine/test_{name}.py"
            for name in ("calibration", "conversion", "divided_plan", "host_plan", "memory_plan")
        ],
        PLANS,
    ),
    **dict.fromkeys(
        [
            f"tests/engine/test_{name}.py"
            for name in ("added_texts", "gguf_text", "named_templates", "thinking")
        ],
        Subject(
            "further texts and templates",
            ("jaxserve/start/sources/", "jaxserve/text/", "tests/engine/", "tests/support/"),
        ),
    ),
    "tests/kernels/": Subject(
        "further cases of a kernel", ("pallas_kernels/", "tests/kernels/", "tests/support/")
    ),
    "tests/machine_code/": Subject(
        "further cases of machine code",
        ("pallas_kernels/", "scripts/machine_code/", "tests/machine_code/"),
    ),
    "tests/published/": Subject(
        "further published tokenizers", ("jaxserve/text/", "tests/published/", "tests/support/")
    ),
    "tests/structured/": Subject(
        "further grammars and schemas",
        ("jaxserve/structured.py", "jaxserve/text/", "tests/structured/"),
    ),
    "tests/weights/": Subject(
        "further forms of weights",
        (
            "jaxserve/models/",
            "jaxserve/start/sources/",
            "jaxserve/weights/",
            "pallas_kernels/",
            "tests/support/",
            "tests/weights/",
        ),
    ),
}
# Tests of hostile files and requests.
HOSTILE = re.compile(r"refus|damaged|hostile|malformed|_bad_|_bug_|blows_up|finite")
FAMILIES = "jaxserve/models/families/"
# Parameters of tests that name a case of a family.
CASES = ("case", "family")
FAMILY_TESTS = ("tests/models/", "tests/engine/test_families.py")
# Families in the file of another, by how the names of cases begin.
IN_FILES = {
    "ministral": "mistral",
    "glm4_moe_lite": "glm4_moe_lite",
    "glm4": "glm",
    "lfm3": "lfm2",
    "falcon_h1": "bamba",
    "arcee": "llama",
    "bailing_hybrid": "ling",
    "seed_oss": "llama",
    "hy_v3": "hunyuan",
    "mellum": "qwen",
    "sarvam_mla": "deepseek",
    "sarvam_moe": "glm",
    "solar_open": "glm",
}


def family_file(case: str) -> str | None:
    """Return the file of a case's family, or None if the case's name does not begin with one."""
    stems = sorted((path.stem for path in (ROOT / FAMILIES).glob("[a-z]*.py")), key=len)[::-1]
    name = case.lower()
    name = next((to for start, to in IN_FILES.items() if name.startswith(start)), name)
    return next((f"{FAMILIES}{stem}.py" for stem in stems if name.startswith(stem)), None)


def _family_of(item: pytest.Item) -> tuple[str, str] | None:
    # The case of the test, and the file of its family.
    if not item.nodeid.startswith(FAMILY_TESTS):
        return None
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    case = next((parameters[name] for name in CASES if name in parameters), None)
    file = family_file(case) if isinstance(case, str) else None
    return None if file is None else (str(case), file)


def _whole_name(item: pytest.Item) -> str:
    return item.nodeid.split("[", 1)[0]


def further_cases(items: Sequence[pytest.Item]) -> dict[pytest.Item, Subject]:
    """Return the tests of all cases of a family except one, for each test function.

    The case is the first one whose steps of one token are programs of their own, or else the first.
    """
    first: dict[tuple[str, str], str] = {}
    cases = [(item, *family) for item in items if (family := _family_of(item)) is not None]
    for item, case, file in sorted(cases, key=lambda one: "alone" not in one[0].name):
        first.setdefault((_whole_name(item), file), case)
    return {
        item: Subject("further cases of a family", (file, "tests/models/cases.py"))
        for item, case, file in cases
        if first[_whole_name(item), file] != case
    }


def _by_name(nodeid: str, subjects_of: Mapping[str, Subject]) -> Subject | None:
    return next(
        (subject for start, subject in subjects_of.items() if nodeid.startswith(start)), None
    )


def subject_of_file(path: str) -> Subject | None:
    """Return the subject of a file of tests, or None if one of its tests is not weekly."""
    return None if any(start.startswith(path) for start in KEPT) else _by_name(path, BY_NAME)


def subjects(items: Sequence[pytest.Item]) -> dict[pytest.Item, Subject]:
    """Return the subject of each test that is weekly."""
    subjects_of = further_cases(items)
    functions: set[str] = set()
    for item in items:
        subject = _by_name(item.nodeid, BY_NAME)
        function = _whole_name(item)
        if subject is None and function in functions and not HOSTILE.search(function):
            subject = _by_name(item.nodeid, FURTHER)
        functions.add(function)
        if item.get_closest_marker("ray"):
            subject = RAY
        if subject is not None and not item.nodeid.startswith(KEPT):
            subjects_of[item] = subject
    return subjects_of


def path_of(item: pytest.Item) -> str:
    """Return the path of a test's file from the root."""
    return str(PurePath(item.nodeid.split("::", 1)[0]))


# Files of tests that need another environment: see scripts/clients and tests/scripts/conftest.py.
NEEDS = {
    "clients": (
        "tests/clients/test_apart.py",
        "tests/clients/test_deploy.py",
        "tests/clients/test_fronts.py",
    ),
    "compiler": ("tests/scripts/test_compile_offline.py",),
}


def needs(chosen: Selection) -> list[str]:
    """Return the names in `NEEDS` of which a selection has at least one test."""

    def is_selected(file: str) -> bool:
        return chosen.reason(file, _by_name(file, BY_NAME)) is None

    return [name for name, files in NEEDS.items() if any(map(is_selected, files))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", metavar="REF")
    parser.add_argument("--changed", metavar="REF")
    parser.add_argument("--long", action="store_true", help="all tests")
    arguments = parser.parse_args()
    try:
        changed = None if arguments.long else files_of(arguments.since, arguments.changed)
    except NoHistory:
        changed = None
    print(*needs(Selection(Graph.of_tree(), changed, arguments.changed is not None)))


if __name__ == "__main__":
    main()
