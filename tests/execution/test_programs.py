"""Programs kept in files: found again, refused where they do not fit, never a crash."""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.start.programs import fingerprint
from jaxserve.start.programs.private_files import make_private
from jaxserve.start.programs.store import ProgramStore

pytestmark = pytest.mark.usefixtures("no_jax_cache")
WHAT = {"model": "one"}
WHERE = {"jaxlib": "1", "cpu": "a", "source": "x"}


def lower(factor: float = 3.0) -> Any:
    """Lower a program with a tree in and out and a donated argument, like the engine's programs."""

    def triple(state: dict[str, Any], y: Any) -> tuple[dict[str, Any], Any]:
        return {"x": state["x"] * factor + y}, jnp.argmax(y)

    return jax.jit(triple, donate_argnums=0).lower({"x": np.zeros(4, np.float32)}, np.arange(4.0))


def _same(lowered: Any) -> Any:
    return lowered


def never() -> Any:
    raise AssertionError("traced")


def run(program: Any) -> list[float]:
    state, best = program({"x": jnp.ones(4, jnp.float32)}, np.arange(4.0))
    assert int(best) == 3
    return np.asarray(state["x"]).tolist()


def store(folder: Path, what: Any = WHAT, where: Any = WHERE) -> ProgramStore:
    return ProgramStore(folder, what, where)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder that holds one program, "one"."""
    directory = tmp_path / "programs"
    first = store(directory)
    assert run(first.get("one", lower)) == [3, 4, 5, 6]
    assert (first.num_built, first.num_loaded) == (1, 0)
    return directory


@pytest.mark.parametrize(
    ("name", "is_traced"),
    [
        *((f"jaxserve/scheduling/{part}.py", True) for part in ("row_settings", "slot_table")),
        *((name, True) for name in ("jaxserve/request.py", "jaxserve/execution/step.py")),
        ("jaxserve/scheduling/scheduler.py", False),
        ("jaxserve/engine/engine.py", False),
    ],
)
def test_kept_programs_depend_on_the_source_that_they_are_traced_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, is_traced: bool
) -> None:
    for package in ("jaxserve", "pallas_kernels"):
        for path in (fingerprint._PACKAGES / package).rglob("*.py"):
            copied = tmp_path / path.relative_to(fingerprint._PACKAGES)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_bytes(path.read_bytes())
    monkeypatch.setattr(fingerprint, "_PACKAGES", tmp_path)
    before = fingerprint._source_digest()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + b"# more")
    assert (fingerprint._source_digest() != before) == is_traced


def files(folder: Path) -> dict[str, Path]:
    [entry] = (folder / "starts").glob("*/one-*")
    [program] = (folder / "objects").iterdir()
    return {"entry": entry, "object": program}


def test_a_later_start_neither_traces_nor_compiles(folder: Path) -> None:
    later = store(folder)
    assert run(later.get("one", never)) == [3, 4, 5, 6]
    assert (later.num_built, later.num_loaded) == (0, 1)


def test_files_and_folders_are_the_users_alone(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_changed_source_is_traced_and_finds_what_stayed_the_same(folder: Path) -> None:
    later = store(folder, where=WHERE | {"source": "y"})
    assert run(later.get("one", lower)) == [3, 4, 5, 6]
    assert (later.num_built, later.num_loaded) == (0, 1)
    assert run(later.get("two", lambda: lower(5.0))) == [5, 6, 7, 8]
    assert (later.num_built, later.num_loaded) == (1, 1)


def test_arguments_that_nothing_reads_count_too(tmp_path: Path) -> None:
    """As weights that only other parts of a model read, in a form that only the layers have."""

    for settings, unread in enumerate((np.zeros(3, np.float32), np.zeros((2, 5), np.uint8))):
        lowered = jax.jit(lambda x, unread: 2 * x).lower(np.arange(4.0), unread)
        kept = store(tmp_path / "kept", {"settings": settings})
        program = kept.get("one", functools.partial(_same, lowered))
        assert program(np.arange(4.0), unread).tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("name", ["jaxlib", "cpu"])
def test_another_machine_or_version_is_refused_by_name(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    later = store(folder, where=WHERE | {name: "other"})
    assert run(later.get("one", lower)) == [3, 4, 5, 6]
    assert (later.num_built, later.num_loaded) == (1, 0)
    assert f"compiled with another {name};" in caplog.text
    assert run(store(folder, where=WHERE | {name: "other"}).get("one", never)) == [3, 4, 5, 6]


def test_what_is_unknown_of_a_machine_differs_from_nothing(tmp_path: Path) -> None:
    """A process that compiles for a card of another machine does not know the card's driver."""
    folder = tmp_path / "programs"
    partly = store(folder, where=WHERE | {"cpu": None})
    partly.get("one", lower)
    partly.note({"pages": 7}, "cache")
    for cpu in ("a", "b", None):
        again = store(folder, where=WHERE | {"cpu": cpu})
        assert run(again.get("one", never)) == [3, 4, 5, 6]
        assert again.notes("cache") == {"pages": 7}
    other = store(folder, where=WHERE | {"cpu": "b", "jaxlib": "2"})
    assert other.find("one") is None and other.notes("cache") is None


def test_programs_for_a_device_that_is_not_there_are_kept_and_not_loaded(tmp_path: Path) -> None:
    away = ProgramStore(tmp_path / "programs", WHAT, WHERE, is_loadable=False)
    for _ in range(2):
        assert run(away.get("one", lower)) == [3, 4, 5, 6]
        assert away.has("one") and away.find("one") is None
    assert (away.num_built, away.num_loaded) == (2, 0)
    assert run(store(tmp_path / "programs").get("one", never)) == [3, 4, 5, 6]


def test_programs_for_another_device_are_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    what = {"model": "one", "device": "NVIDIA H100 PCIe", "threads": 0, "asked_sizes": [(1,), ()]}
    store(tmp_path / "programs", what).get("one", lower)
    assert not caplog.messages
    for _ in range(2):
        other = store(tmp_path / "programs", what | {"device": "NVIDIA H200"})
        assert not other.has("one")
        [refused] = caplog.messages  # once, when the folder is new
        assert "they are for NVIDIA H100 PCIe (another device)" in refused
    assert run(store(tmp_path / "programs", what).get("one", never)) == [3, 4, 5, 6]


def test_other_settings_have_a_folder_of_their_own(folder: Path) -> None:
    other = store(folder, what={"model": "two"})
    assert run(other.get("one", lambda: lower(7.0))) == [7, 8, 9, 10]
    assert run(store(folder).get("one", never)) == [3, 4, 5, 6]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def foreign(path: Path) -> None:
    path.write_bytes(b"\x80\x04N." * 9)


def deep(path: Path) -> None:
    path.write_bytes(b"jaxserve program 1\n" + b"[" * 60_000 + b"\n")


def opened(path: Path) -> None:
    path.chmod(0o666)


def link(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    target = path.parent.parent / "elsewhere"
    target.write_bytes(content)
    path.symlink_to(target)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("which", ["entry", "object"])
@pytest.mark.parametrize(
    "harm", [flip, cut, empty, foreign, deep, opened, link, directory], ids=lambda f: f.__name__
)
def test_harmed_files_are_a_warning_and_compiled_anew(
    folder: Path, harm: Callable[[Path], None], which: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = files(folder)[which]
    harm(path)
    later = store(folder)
    assert run(later.get("one", lower)) == [3, 4, 5, 6]
    assert later.num_built == (which == "object")
    assert "cannot be used and is made anew" in caplog.text and str(path) in caplog.text


def test_an_entry_with_a_good_digest_is_still_checked(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = files(folder)["entry"]
    later = store(folder)
    for content in (b"[]", b"{}", json.dumps({"where": WHERE, "object": "../../x"}).encode()):
        later._files.write(entry, {}, content)
        assert run(later.get("one", lower)) == [3, 4, 5, 6]
    assert caplog.text.count("made anew") == 3


def test_what_is_no_program_is_compiled_anew(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = store(folder)
    later._files.write(files(folder)["object"], {}, b"no pickle")
    assert run(later.get("one", lower)) == [3, 4, 5, 6]
    assert later.num_built == 1 and "cannot be loaded" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_open_folders_are_left_alone(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    one = store(shared)
    assert one.folder is None and one.notes() is None
    assert run(one.get("one", lower)) == [3, 4, 5, 6]
    assert list(shared.iterdir()) == [] and "is open to others" in caplog.text


def test_a_folder_that_everybody_can_replace_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder for all users, as for temporary files, but without the bit that protects entries."""
    around = tmp_path / "around"
    around.mkdir()
    around.chmod(0o777)
    assert store(around / "programs").folder is None
    assert f"{around} can be written by everybody" in caplog.text
    around.chmod(0o1777)
    assert store(around / "programs").folder is not None


def test_links_and_files_in_the_folders_place_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        assert store(tmp_path / name).folder is None
        with pytest.raises(OSError, match=name):
            make_private(tmp_path / name)


def test_no_folder_keeps_nothing() -> None:
    assert run(ProgramStore(None, WHAT, WHERE).get("one", lower)) == [3, 4, 5, 6]


def test_a_program_is_found_without_tracing_or_not_at_all(folder: Path) -> None:
    there = store(folder)
    found = there.find("one")
    assert there.has("one") and run(found) == [3, 4, 5, 6] and there.num_loaded == 1
    assert not there.has("two") and there.find("two") is None
    changed = store(folder, where=WHERE | {"source": "y"})
    assert not changed.has("one") and changed.find("one") is None
    next((folder / "objects").iterdir()).unlink()
    assert not there.has("one") and there.find("one") is None
    nowhere = ProgramStore(None, WHAT, WHERE)
    assert not nowhere.has("one") and nowhere.find("one") is None


def test_notes_hold_for_their_fingerprint(folder: Path) -> None:
    assert store(folder).notes() is None
    store(folder).note({"sizes": [1, 2]})
    assert store(folder).notes() == {"sizes": [1, 2]}
    assert store(folder, where=WHERE | {"source": "y"}).notes() is None
    assert store(folder, what={}).notes() is None


def test_what_was_used_longest_ago_goes_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store(folder)
    run(one.get("two", lambda: lower(5.0)))
    for age, path in enumerate(sorted((folder / "objects").iterdir())):
        os.utime(path, (age, age))
    run(store(folder).get("one", never))
    largest = max(path.stat().st_size for path in (folder / "objects").iterdir())
    monkeypatch.setattr("jaxserve.start.programs.store._MOST_BYTES", largest + 10)
    one.prune()
    kept = store(folder)
    run(kept.get("one", never))
    run(kept.get("two", lambda: lower(5.0)))
    assert (kept.num_loaded, kept.num_built) == (1, 1)


def test_what_a_killed_process_left_half_written_goes(folder: Path) -> None:
    old, new = folder / "objects" / ".a.1.2", folder / "objects" / ".b.3.4"
    entry = next((folder / "starts").iterdir()) / ".c.5.6"
    for path in (old, new, entry):
        path.write_text("half")
    for path in (old, entry):
        os.utime(path, (1, 1))
    store(folder).prune()
    assert new.exists() and not old.exists() and not entry.exists()
    run(store(folder).get("one", never))


# Modules that the sources import and no traced function reads: the host's half of slots, the forms
# of plans and errors, the machine's memory, and settings, which the name of a start's folder holds.
NOT_TRACED = {
    *(
        f"jaxserve/{name}.py"
        for name in """
        errors settings/checks settings/config settings/hosts settings/model_name settings/overrides
        start/plan/cache_kinds start/plan/start_plan start/programs/described_card structured
        """.split()
    ),
    *(
        f"jaxserve/scheduling/{name}.py"
        for name in ("logprobs", "page_keys", "page_pool", "plan", "sequence", "waiting")
    ),
}


def test_all_that_traced_code_imports_counts_as_source() -> None:
    """Kernels are imported by name, and lie in a package that counts as a whole."""
    packages = fingerprint._PACKAGES
    paths = [packages / source for source in fingerprint._SOURCES]
    sources = {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    imported = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            imported.update(packages / f"{name.replace('.', '/')}.py" for name in names)
    others = {path for path in imported - sources if path.is_file()}
    assert {str(path.relative_to(packages)) for path in others} == NOT_TRACED
