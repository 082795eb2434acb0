"""Which tests a change selects, by the graph of imports, and which tests are weekly."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.models.cases import CASES
from tests.support import weekly
from tests.support.selection import (
    DAY,
    EVERYWHERE,
    READ_THE_TREE,
    ROOT,
    Graph,
    NoHistory,
    Selection,
    Subject,
    changed_files,
    day_old_commit,
    files_of,
    git,
)
from tests.test_floors import FLOORS, home_of, modules

SOURCES = {
    "jaxserve/__init__.py": "from jaxserve.engine.llm import LLM",
    "jaxserve/__main__.py": "from jaxserve.commands.cli import main",
    "jaxserve/errors.py": "",
    "jaxserve/engine/__init__.py": "",
    "jaxserve/engine/llm.py": "from jaxserve.errors import Fault",
    "jaxserve/commands/__init__.py": "",
    "jaxserve/commands/cli.py": "LATE = {'serve': 'jaxserve.server.serve'}",
    "jaxserve/server/__init__.py": "",
    "jaxserve/server/serve.py": "import jaxserve.engine.llm",
    "scripts/bench/__init__.py": "",
    "scripts/bench/load.py": "import jaxserve.errors",
    "scripts/bench/page.py": "from .load import run",
    "tests/conftest.py": "",
    "tests/clients/test_deploy.py": "DEPLOY = ROOT / 'scripts/deploy'",
    "tests/engine/conftest.py": "from jaxserve import LLM",
    "tests/engine/test_llm.py": "",
    "tests/server/test_serve.py": "command = [python, '-m', 'jaxserve', 'serve']",
    "tests/scripts/test_page.py": "from scripts.bench.page import run",
    "tests/test_bootstrap.py": "TEXT = (ROOT / 'scripts/bench/start').read_text()",
    "tests/support/exact.py": "EXACT = ('tests/engine/test_llm.py',)",
    "tests/test_exact.py": "from tests.support.exact import EXACT",
}
GRAPH = Graph(
    SOURCES,
    frozenset(
        {
            "README.md",
            "jaxserve/server/page/look.css",
            "scripts/bench/start",
            "scripts/deploy/pod.yaml",
        }
    ),
)


@pytest.mark.parametrize(
    ("changed", "concerned"),
    [
        # By a conftest.py, and a name that a package has from elsewhere.
        ("jaxserve/engine/llm.py", ["engine/test_llm.py", "server/test_serve.py"]),
        ("jaxserve/commands/cli.py", ["server/test_serve.py"]),  # by -m
        ("jaxserve/server/serve.py", ["server/test_serve.py"]),  # by a text with a module's name
        ("scripts/bench/load.py", ["scripts/test_page.py"]),  # by a relative import
        ("scripts/bench/start", ["scripts/test_page.py", "test_bootstrap.py"]),  # by its path
        ("jaxserve/server/page/look.css", ["server/test_serve.py"]),  # data of the modules above it
        ("scripts/deploy/pod.yaml", ["clients/test_deploy.py"]),  # by its folder
        ("tests/engine/test_llm.py", ["engine/test_llm.py"]),  # and not lists of tests
        ("jaxserve/server/gone.py", ["server/test_serve.py"]),
        ("README.md", []),
    ],
)
def test_a_change_concerns_the_tests_that_reach_it(changed: str, concerned: list[str]) -> None:
    assert GRAPH.concerned([changed]) == [f"tests/{name}" for name in concerned]


def test_what_all_tests_run_in_concerns_all() -> None:
    for path in EVERYWHERE:
        assert GRAPH.concerned([path]) == GRAPH.tests


# ------------------------------------------------------------------- the tree as it is


@pytest.fixture(scope="module")
def graph() -> Graph:
    return Graph.of_tree()


# A test that a change of the floor must select.
EXAMPLES = {
    "pallas_kernels": "tests/kernels/test_cpu_decode.py",
    "jaxserve.scheduling": "tests/scheduling/test_scheduler_machine.py",
    "jaxserve.models": "tests/models/test_parity.py",
    "jaxserve.weights": "tests/weights/test_loading.py",
    "jaxserve.text": "tests/engine/test_text.py",
    "jaxserve.execution": "tests/execution/test_step.py",
    "jaxserve.start": "tests/engine/test_start.py",
    "jaxserve.engine": "tests/engine/test_equivalence.py",
    "jaxserve.server": "tests/server/test_answers.py",
    "jaxserve.fleet": "tests/fleet/test_policy.py",
    "jaxserve.commands": "tests/test_cli.py",
}


def test_a_module_of_each_floor_concerns_tests_of_the_floor(graph: Graph) -> None:
    assert EXAMPLES.keys() <= FLOORS.keys()
    for floor, test in EXAMPLES.items():
        of_floor = [graph.modules[name] for name in modules() if home_of(name) == floor]
        reached = [path for path in of_floor if path in graph.reached(test)]
        assert reached, f"{test} reaches nothing of {floor}"
        assert test in graph.concerned(reached[-1:])


def test_every_module_concerns_a_test(graph: Graph) -> None:
    """Code that no test reaches would never be tested by its changes."""
    reached = frozenset().union(*map(graph.reached, graph.tests))
    silent = {
        path
        for path in graph.sources
        if path.startswith(("jaxserve/", "pallas_kernels/")) and not path.endswith("__init__.py")
    } - reached
    assert not silent


def test_the_host_half_is_not_concerned_by_kernels(graph: Graph) -> None:
    concerned = graph.concerned(["pallas_kernels/devices.py"])
    assert "tests/scheduling/test_scheduler_machine.py" not in concerned
    assert set(READ_THE_TREE) <= set(concerned) < set(graph.tests)


def test_only_tests_of_changes_are_selected(graph: Graph) -> None:
    chosen = Selection(graph, frozenset({"scripts/serving/bench.py"}), only_concerned=True)
    assert chosen.reason("tests/models/test_parity.py", None) is not None
    assert chosen.reason("tests/test_floors.py", None) is None


# ------------------------------------------------------------------- weekly tests


def test_a_weekly_test_runs_when_its_subject_changed() -> None:
    subject = Subject("tests of scripts", ("scripts/",))
    path = "tests/scripts/test_page.py"
    by = {name: Selection(GRAPH, frozenset([name])).reason(path, subject) for name in SOURCES}
    runs = {name for name, reason in by.items() if reason is None}
    # Also after a change of itself, but not of a module that its subject imports.
    assert runs == {"scripts/bench/load.py", "scripts/bench/page.py", path}
    assert by["jaxserve/errors.py"] == "tests of scripts: unchanged"
    assert Selection(GRAPH, frozenset()).reason("tests/engine/test_llm.py", None) is None
    assert Selection(GRAPH, None).reason(path, subject) is None
    assert Selection(GRAPH, frozenset(["pyproject.toml"])).reason(path, subject) is None


def test_the_subjects_of_weekly_tests_are_in_the_tree(graph: Graph) -> None:
    paths = [*graph.sources, *graph.others]
    subjects = [*weekly.BY_NAME.values(), *weekly.FURTHER.values(), weekly.RAY]
    for start in {start for subject in subjects for start in subject.of}:
        assert any(path.startswith(start) for path in paths), start
    files = [*weekly.BY_NAME, *weekly.FURTHER, *weekly.KEPT, *sum(weekly.NEEDS.values(), ())]
    for start in files:
        path, _, test = start.partition("::")
        found = [name for name in graph.tests if name.startswith(path)]
        assert found, start
        assert f"def {test.split('[')[0]}" in graph.sources[found[0]], start


def test_weekly_tests_depend_on_their_subjects(graph: Graph) -> None:
    """A test that reaches no code of its subject would run after no change of the subject."""
    for start, subject in (weekly.BY_NAME | weekly.FURTHER).items():
        code = tuple(path for path in subject.of if not path.startswith("tests/"))
        reached = [
            graph.reached(path) for path in graph.tests if path.startswith(start.partition("::")[0])
        ]
        assert any(path.startswith(code) for paths in reached for path in paths), start


class Item:
    """The parts of a test that decide whether it is weekly."""

    def __init__(self, nodeid: str) -> None:
        self.nodeid = nodeid

    def get_closest_marker(self, _: str) -> None:
        return None


def test_every_run_has_the_first_case_of_a_test_and_all_that_are_kept() -> None:
    is_weekly = {
        "tests/kernels/test_gated.py::test_a[1]": False,
        "tests/kernels/test_gated.py::test_a[2]": True,
        "tests/kernels/test_gated.py::test_b[2]": False,
        "tests/kernels/test_gated.py::test_misuse_is_refused[1]": False,
        "tests/kernels/test_gated.py::test_misuse_is_refused[2]": False,
        "tests/weights/test_bad_gguf.py::test_c[1]": False,
        "tests/weights/test_bad_gguf.py::test_c[2]": False,
        "tests/page/test_page.py::test_a_question_is_answered_with_its_figures": False,
        "tests/page/test_page.py::test_on_a_phone": True,
        "tests/engine/test_llm.py::test_d[1]": False,
        "tests/engine/test_llm.py::test_d[2]": False,
    }
    items: Any = [Item(nodeid) for nodeid in is_weekly]
    subjects = weekly.subjects(items)
    assert {item.nodeid: item in subjects for item in items} == is_weekly


def test_every_case_has_the_file_of_its_family() -> None:
    files = {case: weekly.family_file(case) for case in CASES}
    assert [case for case, file in files.items() if file is None] == []
    assert len(set(files.values())) == len(list((ROOT / weekly.FAMILIES).glob("[a-z]*.py")))


# ------------------------------------------------------------------- git


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for words in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        git(*words, root=tmp_path)
    return tmp_path


def commit(root: Path, when: str) -> str:
    git("add", "-A", root=root)
    environment = {"GIT_COMMITTER_DATE": when, "GIT_AUTHOR_DATE": when, "PATH": "/usr/bin:/bin"}
    words = ["git", "commit", "-qm", "one"]
    subprocess.run(words, cwd=root, env=environment, check=True, stdout=subprocess.DEVNULL)
    return git("rev-parse", "HEAD", root=root).strip()


def test_changes_are_those_of_code(repository: Path) -> None:
    for name in ("said", "changed", "deleted"):
        (repository / f"{name}.py").write_text(f"def {name}():\n    return 1\n")
    first = commit(repository, "2026-01-01T00:00:00Z")
    (repository / "said.py").write_text('def said():\n    """Say."""\n    return 1  # one\n')
    (repository / "changed.py").write_text("def changed():\n    return 2\n")
    (repository / "deleted.py").unlink()
    (repository / "new.py").write_text("")
    assert changed_files(first, repository) == {"changed.py", "deleted.py", "new.py"}


def test_the_day_old_commit_is_the_newest_of_them(repository: Path) -> None:
    (repository / "a").write_text("1")
    commit(repository, "2026-01-01T00:00:00Z")
    (repository / "a").write_text("2")
    old = commit(repository, "2026-01-02T00:00:00Z")
    (repository / "a").write_text("3")
    commit(repository, "2099-01-02T00:00:00Z")
    assert day_old_commit(repository) == old
    shallow = repository / "shallow"
    git("clone", "-q", "--depth", "1", f"file://{repository}", str(shallow), root=repository)
    with pytest.raises(NoHistory, match="no commit here is more than a day old"):
        day_old_commit(shallow)


def test_without_git_or_a_commit_all_tests_are_selected(tmp_path: Path) -> None:
    with pytest.raises(NoHistory, match=r"git failed|not a git repository"):
        changed_files("HEAD", tmp_path)
    with pytest.raises(NoHistory):
        files_of(None, "no-such-commit")
    assert DAY not in git("branch", "--list", DAY)


def test_all_processes_of_a_run_have_the_selection() -> None:
    """Processes of pytest-xdist read the command line alone, and get the rest from the first."""
    command = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider"]
    case = "tests/test_pages.py::test_a_true_tree_passes"
    environment = {name: text for name, text in os.environ.items() if "XDIST" not in name}
    result = subprocess.run(
        [*command, "--since", "HEAD", case],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert "1 passed" in result.stdout and "cases selected" in result.stdout, result.stdout
