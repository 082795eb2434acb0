# pyright: reportUnknownMemberType=false
"""ProgramStore: compiled programs in files, so that a start need neither trace nor compile them."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from jaxserve.execution.mesh import mesh_devices
from jaxserve.start.programs.kept_files import KeptFiles, digest, file_name, make_private
from jaxserve.start.programs.kept_kernels import KeptKernels
from jaxserve.start.timeline import Timeline
from pallas_kernels import kernel_code, kernels_from, restore_kernels

_log = logging.getLogger(__name__)
# The form of an object's content; another one is another object.
_FORM = "3: payload, trees, machine code of kernels by name"
_KERNEL = re.compile(r'\b(?:custom_call_target="|stablehlo\.custom_call @)(jaxserve_\w+)')
_MOST_BYTES = 8 << 30
# Seconds after which a file that is being written is taken to be left by a killed process.
_ABANDONED = 3600


class ProgramStore:
    """Programs by name, read from files where an earlier start left them.

    Two levels. `starts/WHAT/NAME` says which object was compiled for a program of these settings,
    and on what: a start that finds its own fingerprint there loads the object and traces nothing.
    `objects/KEY` holds programs by what XLA was given, so that a start whose fingerprint differs
    (after a change of this package, say) traces its programs and compiles only what has changed.

    Objects are native code and are run as they are. So every folder must be the user's own and
    closed to others, files the user's own and no links; a file whose digest is not the one in its
    header is not loaded. What cannot be read is a warning and is compiled.

    An object has the machine code of the kernels of `pallas_kernels.cpu.ffi` that it calls.
    `kernels/NAME` has it too, for programs that must be traced: see `KeptKernels`.

    What is None in a fingerprint is unknown, and differs from nothing: what compiles for a card
    that is not there cannot say everything of its machine.

    JAX's own cache is not used for these programs: on CPU, what comes out of it cannot be
    serialized again (its functions are not found when it runs, jaxlib 0.10.2).

    Args:
        directory: None keeps nothing; made if missing.
        what: what the programs are for, as JSON values: it names their folder.
        where: what they were compiled on and from; programs with another are refused.
        is_loadable: whether what is compiled can be loaded here, and not only kept.
        devices: how many of JAX's, the first ones, a program runs on.
        options: of XLA's compiler, for every program.

    Attributes:
        directory, what, where: likewise.
        num_loaded, num_built: programs read from files, and compiled.
        folder: where this engine's programs are named; None if nothing is kept.
        timeline: receives a span for each of that; to be set before the first program.
        seconds: what loading, tracing and compiling took, added up over threads.
    """

    def __init__(
        self,
        directory: Path | None,
        what: Mapping[str, Any],
        where: Mapping[str, Any],
        is_loadable: bool = True,
        devices: int = 1,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.directory, self.what, self._options = directory, what, dict(options)
        self.is_loadable = is_loadable
        self._num_devices = devices
        self.num_loaded = self.num_built = 0
        self.timeline = Timeline()
        self.seconds = {"load": 0.0, "trace": 0.0, "compile": 0.0}
        self.folder: Path | None = None
        own = {"options": self._options} if self._options else {}
        self.where: dict[str, Any] = json.loads(json.dumps({**where, **own}))
        self._lock = threading.Lock()
        self._files = KeptFiles(_log)
        self._kept_kernels: KeptKernels | None = None
        if directory is None:
            return
        self._objects, self._codes = directory / "objects", directory / "kernels"
        folder = directory / "starts" / digest(json.dumps(what, sort_keys=True).encode())[:32]
        try:
            for path in (directory, self._objects, self._codes, folder.parent, folder):
                make_private(path)
        except OSError as error:
            self._files.warn("compiled programs are not kept: %s", error)
        else:
            self.folder = folder
            if self.where.get("cpu"):  # elsewhere programs have no such kernels
                self._kept_kernels = KeptKernels(self._files, self._codes, self.where)
            self._name_settings()

    def __str__(self) -> str:
        where = "nowhere: nothing is kept" if self.folder is None else self.folder
        return f"{self.num_built} programs compiled, {self.num_loaded} read; kept in {where}"

    def _name_settings(self) -> None:
        """Say in the folder what it is for; where it is new, name one for another device."""
        assert self.folder is not None
        if (self.folder / "what").exists():
            return
        content = json.dumps(self.what, sort_keys=True).encode()
        ours: dict[str, Any] = json.loads(content)  # a tuple is a list there
        for other in sorted(self.folder.parent.iterdir()):
            read = self._files.read(other / "what") if (other / "what").exists() else None
            what: dict[str, Any] = {} if read is None else json.loads(read)
            names = {name for name in {*what, *ours} if what.get(name) != ours.get(name)}
            if what and "device" in names and "model" not in names:
                self._files.warn(
                    "programs in %s are refused: they are for %s (another %s)",
                    *(other, what["device"], ", ".join(sorted(names))),
                )
        self._files.write(self.folder / "what", {"name": "what"}, content)

    def get(self, name: str, lower: Callable[[], Lowered]) -> Compiled:
        """Return the program of this name; `lower` traces it where no file has it. Thread-safe."""
        if self.folder is None:
            return self._compile(self._trace(lower, name), name)
        entry = self.folder / file_name(name)
        found = self._named_object(entry)
        program = None if found is None else self._load(self._objects / found, name)
        if program is not None:
            return program
        lowered = self._trace(lower, name)
        # What XLA made of it says no more, and is twenty times as long where a program is large.
        kernels = _kernels(lowered.as_text())
        key = _object_key(lowered, kernels, self.where)
        program = None if key == found else self._load(self._objects / key, name)
        if program is None:
            program = self._compile(lowered, name)
            self._keep(self._objects / key, program, kernels)
        content = json.dumps({"where": self.where, "object": key}).encode()
        self._files.write(entry, {"name": name}, content)
        return program

    def has(self, name: str) -> bool:
        """Return whether there is a file that `find` would load."""
        if self.folder is None:
            return False
        found = self._named_object(self.folder / file_name(name))
        return found is not None and (self._objects / found).exists()

    def find(self, name: str) -> Compiled | None:
        """Return the program of this name if a file has it, without tracing. Thread-safe."""
        if self.folder is None:
            return None
        found = self._named_object(self.folder / file_name(name))
        return None if found is None else self._load(self._objects / found, name)

    def notes(self, name: str = "notes") -> dict[str, Any] | None:
        """Return what `note` kept for this start; None where there is nothing that can be used."""
        if self.folder is None:
            return None
        read = self._files.read(self.folder / name)
        kept = None if read is None else json.loads(read)
        return None if kept is None or self._differs(kept["where"]) else kept["notes"]

    def note(self, notes: Mapping[str, Any], name: str = "notes") -> None:
        """Keep JSON values that later starts are to have, in a file of this name."""
        if self.folder is not None:
            content = json.dumps({"where": self.where, "notes": notes}).encode()
            self._files.write(self.folder / name, {"name": name}, content)

    def _trace(self, lower: Callable[[], Lowered], name: str) -> Lowered:
        kept = nullcontext() if self._kept_kernels is None else kernels_from(self._kept_kernels)
        with self._timed("trace", name), kept:
            return lower()

    def _compile(self, lowered: Lowered, name: str) -> Compiled:
        with self._timed("compile", name):
            options: Any = {"compiler_options": self._options} if self._options else {}
            program = lowered.compile(**options)
        with self._lock:
            self.num_built += 1
        return program

    @contextmanager
    def _timed(self, stage: str, name: str) -> Generator[None]:
        started = time.perf_counter()
        with self.timeline.span(f"{stage} {name}"):
            yield
        with self._lock:
            self.seconds[stage] += time.perf_counter() - started

    def _named_object(self, entry: Path) -> str | None:
        """Return the object that an entry names, if it was made under this fingerprint."""
        content = self._files.read(entry)
        if content is None:
            return None
        try:
            kept = json.loads(content)
            where, key = kept["where"], kept["object"]
            if not re.fullmatch(r"[0-9a-f]{64}", key):
                raise ValueError("it names no object")
        except (ValueError, KeyError, TypeError) as error:
            self._files.warn("%s cannot be used and is made anew: %s", entry, error)
            return None
        names = self._differs(where)
        if not names:
            return key
        self._files.warn(
            "programs in %s are refused: they were compiled with another %s; they are traced again",
            entry.parent,
            ", ".join(names),
        )
        return None

    def _differs(self, where: Mapping[str, Any]) -> list[str]:
        """Return the names by which a fingerprint is another than this start's."""
        pairs = {name: (where.get(name), self.where.get(name)) for name in {*where, *self.where}}
        return sorted(name for name, (a, b) in pairs.items() if a != b and None not in (a, b))

    def _load(self, path: Path, name: str) -> Compiled | None:
        if not self.is_loadable:
            return None
        with self._timed("load", name):
            content = self._files.read(path)
            if content is None:
                return None
            try:
                payload, in_tree, out_tree, kernels = pickle.loads(content)
                if kernels:
                    restore_kernels(kernels)
                # Without it, for as many devices as are visible; an engine has the first of them.
                program = serialize_executable.deserialize_and_load(
                    payload,
                    in_tree,
                    out_tree,
                    execution_devices=mesh_devices(self._num_devices),
                )
            except Exception as error:  # whatever a foreign or outdated file makes of it
                self._files.warn("%s cannot be loaded and is compiled anew: %s", path, error)
                return None
        with suppress(OSError):
            os.utime(path)  # for `prune`
        with self._lock:
            self.num_loaded += 1
        return program

    def _keep(self, path: Path, program: Compiled, kernels: dict[str, bytes]) -> None:
        try:
            content = pickle.dumps((*serialize_executable.serialize(program), kernels))
        except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
            self._files.warn("a program cannot be kept: %s", error)
            return
        self._files.write(path, {"object": path.name}, content)

    def prune(self) -> None:
        """Delete files of killed processes, and old ones where all take more than 8 GiB."""
        if self.folder is None:
            return
        large = [*_files_in(self._objects), *_files_in(self._codes)]
        for path in [*large, *_files_in(self.folder)]:
            with suppress(OSError):
                if path.name.startswith(".") and time.time() - path.stat().st_mtime > _ABANDONED:
                    path.unlink()
        files: list[tuple[float, int, Path]] = []
        for path in large:
            with suppress(OSError):  # another process prunes too
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= _MOST_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= size


def _files_in(directory: Path) -> list[Path]:
    with suppress(OSError):  # somebody removed the folder
        return [path for path in directory.iterdir() if path.is_file()]
    return []


def _kernels(program: str) -> dict[str, bytes]:
    """Return the machine code of each of this package's kernels that a program's text names."""
    return {name: kernel_code(name) for name in sorted(set(_KERNEL.findall(program)))}


def _object_key(lowered: Lowered, kernels: Mapping[str, bytes], where: Mapping[str, Any]) -> str:
    """Hash XLA's input, the machine and the versions, but not the source that was traced.

    The number of processes counts: XLA's input does not name them, and the executable of one
    process cannot be loaded by two.

    XLA's input lacks arguments that nothing reads. Their shapes count too: a loaded program takes
    them as it was given them.
    """
    given = {name: value for name, value in where.items() if name != "source"}
    if jax.process_count() > 1:  # with one process, keys equal the keys of earlier versions
        given["processes"] = jax.process_count()
    text, trees = lowered.as_text(), f"{lowered.in_tree}{lowered.out_tree}"
    trees += str([(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(lowered.args_info)])
    codes = {name: digest(code) for name, code in kernels.items()}
    return digest((_FORM + json.dumps([given, codes], sort_keys=True) + trees + text).encode())
