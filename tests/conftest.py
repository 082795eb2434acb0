"""Fixtures and options for all tests: a Hypothesis profile, and a cache of compiled programs."""

from __future__ import annotations

import gc
import os
import secrets
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import run_costs, selection, weekly
from tests.support.kept_programs import (
    FOLDER,
    borrow_programs,
    keep_objects,
    keep_programs,
    kept_folder,
    kernels_kept_folder,
    users_kept_folder,
    users_kept_kernels,
    users_kernels,
    users_objects,
)

# The same examples in every run, and no clocks.
settings.register_profile(
    "jaxserve",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("jaxserve")

NEED_GPU = Path(__file__).parent / "gpu"
SELECTED = "selected"  # in a run's folder: how many tests were selected, and why others were not
KERNELS = "kernels"  # in that folder: the machine code of CPU kernels
LEFT_OUT = "left-out-"  # in that folder, by a path of tests: why some of them were left out
# Their tests share servers, a browser or checkpoints, which are costly to make. The longest first:
# a process goes through such a folder alone, and at the end no other shall wait for it.
TOGETHER = tuple(
    f"tests/{name}/" for name in ("server", "models", "clients", "real", "published", "page")
)


def make_folder() -> None:
    """Make one folder with compiled programs for all processes of a run.

    Tests, servers and scripts share many programs. `Runner.num_compiles` also counts programs that
    are read from this folder, so a test still sees an unexpected compilation.
    """
    folder = tempfile.mkdtemp(prefix="jaxserve-tests-")
    os.environ[FOLDER] = folder
    borrow_programs(Path(folder, "compiled"), kept_folder())
    objects = users_objects(Path(folder))
    objects.parent.mkdir(mode=0o700, parents=True)  # code is read from no folder open to others
    borrow_programs(objects, users_kept_folder())
    borrow_programs(users_kernels(Path(folder)), users_kept_kernels())
    borrow_programs(Path(folder, KERNELS), kernels_kept_folder())
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/compiled")
    # Otherwise the folder's name is in every key.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")
    # Small ones too: thousands are single operations, of which each takes 20 ms to compile.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    # PyTorch's threads wait for each other by spinning: among tiny matrices that is most of a test.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def remove_folder() -> None:
    """Remove it at the end of a run, and keep its programs for the next."""
    folder = Path(os.environ[FOLDER])
    keep_programs(folder / "compiled", kept_folder())
    keep_objects(users_objects(folder), users_kept_folder())
    keep_objects(users_kernels(folder), users_kept_kernels())
    keep_objects(folder / KERNELS, kernels_kept_folder())
    shutil.rmtree(folder, ignore_errors=True)


# Here, because conftest files of the folders below import JAX, which reads the environment then.
# The main module of a process that xdist made has no file; a test's own run of pytest is another.
if "PYTEST_XDIST_WORKER" not in os.environ or hasattr(sys.modules["__main__"], "__file__"):
    make_folder()


class ByFixtures(LoadScopeScheduling):
    """Gives whole files to processes, and whole folders where their tests share fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def deselect(config: pytest.Config, items: list[pytest.Item], those: list[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=those)
    left_out = set(those)
    items[:] = [item for item in items if item not in left_out]


CHOSEN = pytest.StashKey[selection.Selection]()
FILES = pytest.StashKey[Counter[str]]()  # numbers of files that are not collected, by reason


def selection_of(config: pytest.Config) -> selection.Selection | None:
    """Return the selection of `--since` or `--changed`, or None without these options."""
    if config.option.changed is None and config.option.since is None:
        return None
    if CHOSEN not in config.stash:
        config.stash[CHOSEN] = selection.Selection(
            selection.Graph.of_tree(),
            config.option.changed_files,
            only_concerned=config.option.changed is not None,
        )
        config.stash[FILES] = Counter()
    return config.stash[CHOSEN]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file of which no test is selected: to collect all takes 20 s."""
    if not collection_path.name.startswith("test_") or collection_path.suffix != ".py":
        return None
    chosen = selection_of(config)
    if chosen is None:
        return None
    path = os.path.relpath(collection_path, selection.ROOT)
    subject = None if config.getoption("long") else weekly.subject_of_file(path)
    reason = chosen.reason(path, subject)
    if reason is None:
        return None
    config.stash[FILES][reason] += 1
    return True


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that `--since` or `--changed` does not select, and say how many of which."""
    chosen = selection_of(config)
    if chosen is None:
        return
    subjects = {} if config.getoption("long") else weekly.subjects(items)
    reasons: dict[str, list[pytest.Item]] = {}
    for item in items:
        reason = chosen.reason(weekly.path_of(item), subjects.get(item))
        if reason is not None:
            reasons.setdefault(reason, []).append(item)
    for those in reasons.values():
        deselect(config, items, those)
    files = config.stash[FILES].items()
    lines = [f"{count:>6} files left out: {reason}" for reason, count in files]
    lines += [f"{len(those):>6} cases left out: {reason}" for reason, those in reasons.items()]
    chosen_file = Path(os.environ[FOLDER], SELECTED)  # the same from every process
    chosen_file.write_text("\n".join([*lines, f"{len(items):>6} cases selected"]))


def find_changes(config: pytest.Config) -> None:
    """Find the changed files once, for all processes. Without a history select all tests."""
    option = config.option
    if option.since is None and option.changed is None:
        option.changed_files, option.selected_by = None, ""
        return
    try:
        option.changed_files = selection.files_of(option.since, option.changed)
        option.selected_by = f"{len(option.changed_files)} files changed"
    except selection.NoHistory as error:
        option.changed_files = None
        option.selected_by = f"all tests, because changes are not known: {error}"


# Options that the first process of a run sets for all of them.
SHARED_OPTIONS = ("changed_files", "selected_by", "schedule_seed")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Send the shared options to a process of xdist, which reads only the command line."""
    option = node.config.option
    node.workerinput["options"] = {name: getattr(option, name) for name in SHARED_OPTIONS}


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = f"seed of fresh schedules: --schedule-seed {config.option.schedule_seed}"
    return [seed, *filter(None, [config.option.selected_by])]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put folders that stay in one process before all files, and leave out long forms."""
    if not config.getoption("long"):
        deselect(config, items, [item for item in items if item.get_closest_marker("long")])
    select(config, items)

    def rank(item: pytest.Item) -> int:
        starts = enumerate(map(item.nodeid.startswith, TOGETHER))
        return next((index for index, is_in in starts if is_in), len(TOGETHER))

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFixtures:
    # As `pytest_collection_modifyitems` has put them: the longest files hold the fewest tests.
    config.option.loadscopereorder = False
    return ByFixtures(config, log)


def choose_platform(config: pytest.Config) -> None:
    """Select the CPU for all runs, except runs in which every test needs a GPU.

    Servers, scripts and processes of tests use it too, since each would take 3/4 of a GPU.
    """
    root = config.invocation_params.dir
    named = [(root / text.split("::")[0]).resolve() for text in config.args]
    if config.option.markexpr != "gpu" and not all(path.is_relative_to(NEED_GPU) for path in named):
        os.environ["JAX_PLATFORMS"] = "cpu"
        if "jax" in sys.modules:  # a folder's conftest has imported it
            sys.modules["jax"].config.update("jax_platforms", "cpu")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption(
        "--published", metavar="DIR", help="where packages with published tokenizers are kept"
    )
    parser.addoption(
        "--check-shapes",
        action="store_true",
        help="check arrays against the shapes in the signatures of models and execution",
    )
    parser.addoption(
        "--changed",
        metavar="REF",
        help="only tests of files that changed since a commit, and of what imports them",
    )
    parser.addoption(
        "--since",
        metavar="REF",
        help="leave out weekly tests whose subject has not changed since a commit; "
        f"{selection.DAY}: the newest that is more than a day old",
    )
    run_costs.pytest_addoption(parser)
    parser.addoption(
        "--schedule-seed",
        type=int,
        default=None,
        help="of fresh random schedules; the header names that of a run",
    )
    parser.addoption("--long", action="store_true", help="long forms too: of tests/real 40 minutes")
    parser.addoption(
        "--real-folder", type=Path, metavar="DIR", help="where files of real models are kept"
    )
    config: Any = pluginmanager.get_plugin("pytestconfig")
    given = "--check-shapes" in config.invocation_params.args
    # Set here, because conftest files of the folders below import the checked modules. A worker of
    # xdist has the options of its master before it reads its own.
    if given or getattr(config.option, "check_shapes", False):
        from tests.support.shape_checks import check_shapes

        check_shapes()


def leave_out(what: str, why: str) -> None:
    """Have the end of the run say in one line why tests were deselected, whichever process did."""
    (Path(os.environ[FOLDER]) / f"{LEFT_OUT}{what.replace('/', '::')}").write_text(why)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for file in sorted(Path(os.environ[FOLDER]).glob(f"{LEFT_OUT}*")):
        what = file.name.removeprefix(LEFT_OUT).replace("::", "/")
        terminalreporter.write_line(f"tests/{what} left out: {file.read_text()}")
    if (file := Path(os.environ[FOLDER], SELECTED)).is_file():
        selected_by = terminalreporter.config.option.selected_by
        terminalreporter.section(f"selection: {selected_by}")
        terminalreporter.write_line(file.read_text())


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        vars(config.option).update(config.workerinput["options"])
    else:
        choose_platform(config)
        find_changes(config)
        if config.option.schedule_seed is None:
            config.option.schedule_seed = secrets.randbits(32)
        config.add_cleanup(remove_folder)
    runs_tests = hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)
    if runs_tests and Path("jaxserve").is_dir():  # tests/test_bootstrap.py runs this file alone
        # Imported here: JAX reads the variables above when it is imported.
        from tests.support import shared_engine
        from tests.support.kept_kernels import keep_machine_code
        from tests.support.quick_code import QuickCode

        keep_machine_code(Path(os.environ[FOLDER], KERNELS))
        config.pluginmanager.register(shared_engine, "jaxserve-shared-engine")
        config.pluginmanager.register(QuickCode(), "jaxserve-quick-code")
    run_costs.pytest_configure(config)
    # A process of tests holds millions of objects, which Python would look through at every turn.
    gc.set_threshold(10_000, 20, 20)
    if config.getoption("--check-shapes") and "tests.support.shape_checks" not in sys.modules:
        raise pytest.UsageError("--check-shapes must be an argument of the command")


def pytest_collection_finish() -> None:
    """Freeze the objects of imported modules: `gc.collect` in a test would otherwise visit them."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_jax_cache() -> Generator[None]:
    """Turn JAX's cache off. See `tests.support.own_programs`."""
    # Imported here: JAX reads the variables above when it is imported.
    from tests.support.own_programs import own_programs

    with own_programs():
        yield
