"""FileStore: files of clients, on disk in one folder."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections import Counter
from pathlib import Path
from typing import BinaryIO, TypeVar
from uuid import uuid4

import msgspec

from jaxserve.errors import InvalidRequest
from jaxserve.server.schema.errors import ApiError
from jaxserve.server.schema.files import FileObject
from jaxserve.server.settings import ServerConfig

T = TypeVar("T")
MAX_UPLOADS = 4  # at the same time, divided equally between the keys
_ID = re.compile(r"(file|batch)[-_][0-9a-f]{32}", re.ASCII)


class FileRecord(msgspec.Struct):
    """Description of a stored file, and the digest of its owner's API key (None without keys)."""

    file: FileObject
    owner: str | None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Write a record to a JSON file. The file has the old or the new record, even after a crash."""
    fresh = path.with_suffix(".new")
    with fresh.open("wb") as file:
        file.write(msgspec.json.encode(record))
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def read_records(folder: Path, kind: type[T]) -> dict[str, T]:
    """Return the records of type `kind` in a folder by id. An unreadable record raises OSError."""
    records: dict[str, T] = {}
    for path in sorted(folder.glob("*.json")):
        if _ID.fullmatch(path.stem):
            try:
                records[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
            except msgspec.MsgspecError as error:
                raise OSError(f"{path} is no record: {error}") from error
    return records


def may_see(owner: str | None, client: str | None) -> bool:
    """Return whether a client may see an owner's object: they are equal, or one of them is None."""
    return owner is None or client is None or owner == client


class FileStore:
    """Uploaded files and outputs of batches, stored by id in the folder of the setting `files_dir`.

    Files on disk are named by their ids. Each API key has an equal share of every limit. Files of
    keys that no longer exist reduce the space of all.

    Raises:
        OSError, InvalidRequest: the folder cannot be used, or another server uses it.
    """

    def __init__(self, config: ServerConfig) -> None:
        assert config.files_dir is not None
        self.config = config
        self.folder = Path(config.files_dir).absolute()
        self._files, self._incoming = self.folder / "files", self.folder / "incoming"
        for folder in (self._files, self._incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(self.folder)
        for path in self._incoming.glob("*.upload"):  # left by a crash
            path.unlink()
        records = read_records(self._files, FileRecord)
        self._records = {name: r for name, r in records.items() if self.path(name).exists()}
        for path in self._files.iterdir():
            if _ID.fullmatch(path.stem) and path.stem not in self._records:
                path.unlink()
        self._bytes: Counter[str | None] = Counter()
        for record in self._records.values():
            self.count(record.owner, record.file.bytes)
        self.uploads: Counter[str | None] = Counter()

    def close(self) -> None:
        """Release the lock on the store's folder."""
        os.close(self._lock)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all stored files, of uploads in progress and of batch answers."""
        return self._bytes.total()

    def count(self, owner: str | None, num_bytes: int) -> None:
        """Add `num_bytes`, which may be negative, to the number of bytes that an owner holds."""
        self._bytes[owner] += num_bytes

    def path(self, name: str) -> Path:
        """Return the path at which the content of the file with the id `name` is stored."""
        assert _ID.fullmatch(name)
        return self._files / f"{name}.data"

    def has(self, name: str) -> bool:
        return name in self._records

    def get(self, name: str, client: str | None, parameter: str = "file_id") -> FileRecord:
        """Return the record of the file with the id `name`, if the client may see it.

        Raises:
            ApiError: 404, there is no such file. The error names `parameter`.
        """
        self.expire()
        record = self._records.get(name)
        if record is None or not may_see(record.owner, client):
            raise ApiError(404, f"No such File object: {name[:60]}", parameter, "not_found")
        return record

    def list(self, client: str | None, purpose: str | None) -> list[FileObject]:
        """Return the files of a purpose (None for any) that a client may see, the oldest first."""
        self.expire()
        files = [r.file for r in self._records.values() if may_see(r.owner, client)]
        files = [file for file in files if purpose in (None, file.purpose)]
        return sorted(files, key=lambda file: (file.created_at, file.id))

    def remove(self, name: str) -> None:
        """Delete the file with the id `name`. Processes that have it open can still read it."""
        record = self._records.pop(name)
        self.count(record.owner, -record.file.bytes)
        self.path(name).unlink(missing_ok=True)
        self.path(name).with_suffix(".json").unlink(missing_ok=True)

    def expire(self) -> None:
        """Delete the files whose time of expiry has passed."""
        now = time.time()
        for name, record in list(self._records.items()):
            if record.file.expires_at is not None and record.file.expires_at <= now:
                self.remove(name)

    def room(self, owner: str | None) -> int:
        """Return the number of bytes that an owner may still store, by its share and the total."""
        most = self.config.max_files_bytes
        return min(self.config.share(most) - self._bytes[owner], most - self.num_bytes)

    def check_bytes(self, owner: str | None, num_bytes: int) -> None:
        """Check that an owner may store `num_bytes` more.

        Raises:
            ApiError: 413, the owner's share or the limit on the bytes of all files would be
                exceeded.
        """
        if num_bytes <= self.room(owner):
            return
        most = self.config.max_files_bytes
        share = self.config.share(most)
        is_own = share < most and self._bytes[owner] + num_bytes > share
        whose, most = ("this key's files", share) if is_own else ("the files", most)
        raise ApiError(413, f"{whose} would take more than {most} bytes: delete some", "file")

    def check_number(self, owner: str | None) -> None:
        """Check that an owner may store one more file.

        Raises:
            ApiError: 413, the owner's share or the limit on the number of all files is reached.
        """
        self.expire()
        most = self.config.max_files
        share = self.config.share(most)
        num_files = Counter(record.owner for record in self._records.values()) + self.uploads
        is_own = share < most and num_files[owner] >= share
        if is_own or num_files.total() >= max(most, self.config.num_keys):
            whose, most = ("a key", share) if is_own else ("the server", most)
            raise ApiError(413, f"{whose} keeps at most {most} files: delete some", "file")

    def note(self, source: Path, file: FileObject, owner: str | None) -> FileRecord:
        """Write and return the record of `file`, whose content is at `source`. Thread-safe.

        Raises:
            OSError: the disk is full, for example.
        """
        file.bytes = source.stat().st_size
        record = FileRecord(file, owner)
        # The next start removes content without a record, and records without content.
        write_record(self.path(file.id).with_suffix(".json"), record)
        return record

    def adopt(self, source: Path, record: FileRecord) -> None:
        """Move a file at `source` into the store with its record from `note`, or raise OSError."""
        source.replace(self.path(record.file.id))
        self._records[record.file.id] = record
        self.count(record.owner, record.file.bytes)

    def receive(self, owner: str | None = None) -> Upload:
        """Return a new upload of an owner. Entering it as a context begins the upload.

        Raises:
            ApiError: 429, too many uploads are in progress. 413, the owner has no room for a file.
        """
        most = self.config.share(MAX_UPLOADS)
        if self.uploads[owner] >= most:
            raise ApiError(
                429,
                f"{most} files are being received",
                code="too_many_uploads",
                headers={"retry-after": "1"},
            )
        self.check_number(owner)
        self.check_bytes(owner, 1)
        return Upload(self, owner, self._incoming / f"{uuid4().hex}.upload")


class Upload:
    """File upload in progress: a context manager that deletes the file unless `keep` was called."""

    def __init__(self, store: FileStore, owner: str | None, path: Path) -> None:
        self._store = store
        self._owner = owner
        self._path = path
        self._file: BinaryIO | None = None
        self._record: FileRecord | None = None
        self.num_bytes = 0

    def __enter__(self) -> Upload:
        self._file = os.fdopen(
            os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb"
        )
        self._store.uploads[self._owner] += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._store.uploads[self._owner] -= 1
        self._store.count(self._owner, -self.num_bytes)
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)

    def write(self, data: bytes) -> None:
        """Append bytes to the uploaded file, and count them for its owner.

        Raises:
            ApiError: 413, the file would be too large, or the owner or the store has no room.
        """
        assert self._file is not None
        most = self._store.config.max_file_bytes
        if self.num_bytes + len(data) > most:
            raise ApiError(413, f"the file is larger than {most} bytes", "file", "too_large")
        self._store.check_bytes(self._owner, len(data))
        self.num_bytes += len(data)
        self._store.count(self._owner, len(data))
        self._file.write(data)

    def flush(self, file: FileObject) -> None:
        """Write the content, and a record with the description `file`, to the disk. Thread-safe.

        Raises:
            OSError: the disk is full, for example.
        """
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._record = self._store.note(self._path, file, self._owner)

    def keep(self) -> FileObject:
        """Move the file into the store after `flush` has written it, and return its description."""
        assert self._record is not None
        self._store.adopt(self._path, self._record)
        return self._record.file


def new_file(
    filename: str, purpose: str, seconds: int | None, name: str | None = None
) -> FileObject:
    """Return the description of an empty file, with a new id unless `name` is given.

    It expires after `seconds`, or never if they are None.
    """
    now = int(time.time())
    return FileObject(
        id=name or f"file-{uuid4().hex}",
        bytes=0,
        created_at=now,
        filename=filename,
        purpose=purpose,
        expires_at=None if seconds is None else now + seconds,
    )


def _locked(folder: Path) -> int:
    # InvalidRequest: another server holds the lock.
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise InvalidRequest(f"files_dir: another server uses {folder}", "files_dir") from None
    return lock
