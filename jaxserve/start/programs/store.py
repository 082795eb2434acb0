# pyright: reportUnknownMemberType=false
"""ProgramStore: compiled programs in files, so that a later start neither traces nor compiles."""

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
from jaxserve.start.programs.private_files import (
    KernelFiles,
    PrivateFiles,
    digest,
    file_name,
    make_private,
    prune,
)
from jaxserve.start.report import Timeline
from pallas_kernels import kernel_code, kernels_from, restore_kernels

_log = logging.getLogger(__name__)
# Version of an object's content, and a part of the object's key.
_FORM = "3: payload, trees, machine code of kernels by name"
_KERNEL = re.compile(r'\b(?:custom_call_target="|stablehlo\.custom_call @)(jaxserve_\w+)')
_MOST_BYTES = 8 << 30


class ProgramStore:
    """Compiled programs by name, loaded from files where an earlier start wrote them.

    There are two levels. `starts/SUBJECT/NAME` names the object that was compiled for a program of
    one configuration, together with a fingerprint. A start with the same fingerprint loads the
    object without tracing. `objects/KEY` contains programs by XLA's input. A start with another
    fingerprint, for example after a change of this package, traces its programs and compiles a
    program only if its XLA input changed.

    Objects are native code and are executed. Therefore all folders are private and all files are
    checked as `PrivateFiles` describes. The program of a file that fails is compiled again.

    An object contains the machine code of the kernels of `pallas_kernels.cpu.ffi` that it calls.
    `kernels/NAME` contains the same code for programs that must be traced (see `KernelFiles`).

    A fingerprint value of None is unknown and matches every value: a compiler for an absent card
    cannot know everything about the card's machine. JAX's own cache is not used for these programs.
    On CPU, a program that it returns cannot be serialized again (jaxlib 0.10.2).

    Args:
        directory: folder of all files, created if missing, or None to keep no programs.
        subject: JSON values that say which programs these are. Their digest names the folder.
        fingerprint: facts about compiler, machine and source. Files with other facts are refused.
        is_loadable: whether compiled programs can be loaded by this process.
        devices: number of JAX's devices that a program runs on, counted from the first.
        options: options of XLA's compiler, for every program.

    Attributes:
        directory, subject, fingerprint, is_loadable: as above.
        num_loaded, num_built: programs loaded from files, and programs compiled.
        folder: folder of this configuration's programs, or None if no programs are kept.
        timeline: receives a span for each load, trace and compilation. Set it before the first one.
        seconds: seconds of loading, tracing and compiling, summed over threads.
    """

    def __init__(
        self,
        directory: Path | None,
        subject: Mapping[str, Any],
        fingerprint: Mapping[str, Any],
        is_loadable: bool = True,
        devices: int = 1,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.directory, self.subject, self._options = directory, subject, dict(options)
        self.is_loadable = is_loadable
        self._num_devices = devices
        self.num_loaded = self.num_built = 0
        self.timeline = Timeline()
        self.seconds = {"load": 0.0, "trace": 0.0, "compile": 0.0}
        self.folder: Path | None = None
        compiler = {"options": self._options} if self._options else {}
        # Through JSON, because it is compared with values that were read from files.
        self.fingerprint: dict[str, Any] = json.loads(json.dumps({**fingerprint, **compiler}))
        self._lock = threading.Lock()
        self._files = PrivateFiles(_log)
        self._kernels: KernelFiles | None = None
        if directory is None:
            return
        self._objects, self._codes = directory / "objects", directory / "kernels"
        folder = directory / "starts" / digest(json.dumps(subject, sort_keys=True).encode())[:32]
        try:
            for path in (directory, self._objects, self._codes, folder.parent, folder):
                make_private(path)
        except OSError as error:
            self._files.warn("compiled programs are not kept: %s", error)
            return
        self.folder = folder
        if self.fingerprint.get("cpu"):  # only CPU programs call these kernels
            self._kernels = KernelFiles(self._files, self._codes, self.fingerprint)
        self._name_subject()

    def __str__(self) -> str:
        folder = "nowhere: nothing is kept" if self.folder is None else self.folder
        return f"{self.num_built} programs compiled, {self.num_loaded} read; kept in {folder}"

    def _name_subject(self) -> None:
        """Write the subject into a new folder. Warn if another folder is of another device."""
        assert self.folder is not None
        if (self.folder / "what").exists():
            return
        content = json.dumps(self.subject, sort_keys=True).encode()
        subject: dict[str, Any] = json.loads(content)  # a tuple is a list there
        for folder in sorted(self.folder.parent.iterdir()):
            text = self._files.read(folder / "what") if (folder / "what").exists() else None
            other: dict[str, Any] = {} if text is None else json.loads(text)
            names = {name for name in other | subject if other.get(name) != subject.get(name)}
            if other and "device" in names and "model" not in names:
                self._files.warn(
                    "programs in %s are refused: they are for %s (another %s)",
                    folder,
                    other["device"],
                    ", ".join(sorted(names)),
                )
        self._files.write(self.folder / "what", {"name": "what"}, content)

    def get(self, name: str, lower: Callable[[], Lowered]) -> Compiled:
        """Return the compiled program of a name, from its file or compiled now. Thread-safe.

        Args:
            name: name of the program in this configuration.
            lower: traces the program. It is called if no usable file names an object.
        """
        if self.folder is None:
            return self._compile(self._trace(lower, name), name)
        entry = self.folder / file_name(name)
        named = self._named_object(entry)
        program = None if named is None else self._load(self._objects / named, name)
        if program is not None:
            return program
        lowered = self._trace(lower, name)
        # XLA's compiled text has no more kernels and is twenty times as long for a large program.
        names = sorted(set(_KERNEL.findall(lowered.as_text())))
        kernels = {kernel: kernel_code(kernel) for kernel in names}
        key = _object_key(lowered, kernels, self.fingerprint)
        program = None if key == named else self._load(self._objects / key, name)
        if program is None:
            program = self._compile(lowered, name)
            self._keep(self._objects / key, program, kernels)
        content = json.dumps({"where": self.fingerprint, "object": key}).encode()
        self._files.write(entry, {"name": name}, content)
        return program

    def has(self, name: str) -> bool:
        """Return whether a file exists from which `find` would load the program of a name."""
        if self.folder is None:
            return False
        named = self._named_object(self.folder / file_name(name))
        return named is not None and (self._objects / named).exists()

    def find(self, name: str) -> Compiled | None:
        """Load the program of a name from its file, or return None without one. Thread-safe."""
        if self.folder is None:
            return None
        named = self._named_object(self.folder / file_name(name))
        return None if named is None else self._load(self._objects / named, name)

    def notes(self, name: str = "notes") -> dict[str, Any] | None:
        """Return the JSON values that `note` wrote under a name, or None if there are none.

        Values that were written with another fingerprint count as none.
        """
        if self.folder is None:
            return None
        text = self._files.read(self.folder / name)
        values = None if text is None else json.loads(text)
        return None if values is None or self._differs(values["where"]) else values["notes"]

    def note(self, notes: Mapping[str, Any], name: str = "notes") -> None:
        """Write JSON values into a file of this name, which later starts read with `notes`."""
        if self.folder is not None:
            content = json.dumps({"where": self.fingerprint, "notes": notes}).encode()
            self._files.write(self.folder / name, {"name": name}, content)

    def prune(self) -> None:
        """Delete partial files of killed processes, and the oldest files while all exceed 8 GiB."""
        if self.folder is not None:
            prune([self._objects, self._codes], _MOST_BYTES, self.folder)

    def _trace(self, lower: Callable[[], Lowered], name: str) -> Lowered:
        kernels = nullcontext() if self._kernels is None else kernels_from(self._kernels)
        with self._timed("trace", name), kernels:
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
        """Return the key of the object that a file in `starts` names, None if it is unusable."""
        content = self._files.read(entry)
        if content is None:
            return None
        try:
            values = json.loads(content)
            fingerprint, key = values["where"], values["object"]
            if not re.fullmatch(r"[0-9a-f]{64}", key):
                raise ValueError("it names no object")
        except (ValueError, KeyError, TypeError) as error:
            self._files.warn("%s cannot be used and is made anew: %s", entry, error)
            return None
        names = self._differs(fingerprint)
        if not names:
            return key
        self._files.warn(
            "programs in %s are refused: they were compiled with another %s; they are traced again",
            entry.parent,
            ", ".join(names),
        )
        return None

    def _differs(self, other: Mapping[str, Any]) -> list[str]:
        ours = self.fingerprint
        pairs = {name: (other.get(name), ours.get(name)) for name in {*other, *ours}}
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
                # By default JAX loads a program for all visible devices. An engine uses the first.
                program = serialize_executable.deserialize_and_load(
                    payload,
                    in_tree,
                    out_tree,
                    execution_devices=mesh_devices(self._num_devices),
                )
            except Exception as error:  # unpickling an outdated file may raise anything
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


def _object_key(
    lowered: Lowered, kernels: Mapping[str, bytes], fingerprint: Mapping[str, Any]
) -> str:
    # The source that was traced does not count, because XLA's input shows its changes. The number
    # of processes counts, because XLA's input does not contain it and a program compiled for one
    # process cannot be loaded by two. The shapes of all arguments count, because XLA's input
    # lacks unused arguments and a loaded program still takes them.
    machine = {name: value for name, value in fingerprint.items() if name != "source"}
    if jax.process_count() > 1:  # with one process, keys equal the keys of earlier versions
        machine["processes"] = jax.process_count()
    text, trees = lowered.as_text(), f"{lowered.in_tree}{lowered.out_tree}"
    trees += str([(str(leaf.dtype), leaf.shape) for leaf in jax.tree.leaves(lowered.args_info)])
    codes = {name: digest(code) for name, code in kernels.items()}
    return digest((_FORM + json.dumps([machine, codes], sort_keys=True) + trees + text).encode())
