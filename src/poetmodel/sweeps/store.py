"""Records in files of JSON lines, and the folder of a sweep: records, schedules and claims."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import raise_write_errors, read_bytes, write_text
from poetmodel.sweeps.measurement import FAILED, Record

if sys.platform != "win32":  # without locks, concurrent sweeps in one folder repeat runs
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path
    from typing import BinaryIO


RECORDS: Final = "cells.jsonl"
"""File of the records of runs."""
SCHEDULES: Final = "schedules"
"""Folder of the schedule files, each by the key of its run."""
CLAIMS: Final = "claims"
"""Name of the folder with a locked file for each run in progress; for a `RecordFile` that is no
`Store`, the suffix after the name of its file."""
_FIELDS: Final = frozenset({"key", "status", "cell", "result"})
"""Fields of every record of a sweep."""


class RecordFile:
    """Records in a file, one JSON line each; the last record of each key counts.

    `key_of` returns the key of a record, and raises `KeyError` for a line that is no record. The
    first record creates the file.

    Notes
    -----
    Each record is flushed to disk before the next one is written; a failed write is undone. The
    next write removes a last line that a killed process left incomplete. Lines without a record are
    skipped. Several processes may write at the same time, each the records of the runs that it
    claims.
    """

    def __init__(self, path: Path, key_of: Callable[[Record], Hashable]) -> None:
        self.path = path
        self.claims_folder = path.with_name(f"{path.name}.{CLAIMS}")
        """Folder of the locked files; it exists while runs are claimed."""
        self._key_of = key_of
        self._records: dict[Hashable, Record] = {}
        self._parsed_bytes = 0

    def records(self) -> list[Record]:
        """Return the last record of each key, in the order of the first records of the keys."""
        self._parse_new_lines()
        return list(self._records.values())

    def finished_records(self) -> dict[Hashable, Record]:
        """Return, by key, the last record of each run; omit runs whose last record is a failure."""
        self._parse_new_lines()
        return {key: record for key, record in self._records.items() if record["status"] != FAILED}

    def find_record(self, key: Hashable) -> Record | None:
        """Return the last record of a run, whichever process wrote it; None without one."""
        self._parse_new_lines()
        return self._records.get(key)

    def add(self, record: Record) -> None:
        """Append a record to the file and flush it to disk; NaN and infinities are a ValueError."""
        content = (json.dumps(record, allow_nan=False) + "\n").encode()
        with raise_write_errors(self.path), self.path.open("a+b") as stream:
            _lock(stream.fileno(), wait=True)  # until the file is closed
            self._end_last_line(stream)
            size = stream.seek(0, os.SEEK_END)
            try:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                os.ftruncate(stream.fileno(), size)
                raise

    def claim(self, key: Hashable) -> Claim | None:
        """Claim a run for this process; return None if the run is claimed already.

        A claim ends with `Claim.release`, or with this process, even if it is killed. Where files
        cannot be locked, several processes can claim one run.
        """
        name = hashlib.sha256(str(key).encode()).hexdigest()[:20]
        return Claim.acquire(self.claims_folder / name)

    def _parse_new_lines(self) -> None:
        """Parse the lines written since the last call into `_records`."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self._parsed_bytes:  # the file was truncated
            self._records.clear()
            self._parsed_bytes = 0
        content = read_bytes(self.path, begin=self._parsed_bytes)
        for line in content.split(b"\n"):
            if (parsed := self._parse_line(line)) is not None:
                key, record = parsed
                self._records[key] = record
        self._parsed_bytes += content.rfind(b"\n") + 1

    def _parse_line(self, line: bytes) -> tuple[Hashable, Record] | None:
        try:
            record = json.loads(line)
            return self._key_of(record), record
        except (ValueError, RecursionError, LookupError, TypeError):
            return None

    def _end_last_line(self, stream: BinaryIO) -> None:
        """End a last line without line feed if it is a record, else remove it."""
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        if stream.read(1) in (b"", b"\n"):
            return
        stream.seek(0)
        content = stream.read()
        last_line = content[content.rfind(b"\n") + 1 :]
        if self._parse_line(last_line) is not None:
            stream.write(b"\n")
        else:
            stream.truncate(size - len(last_line))


class Store(RecordFile):
    """Records and schedules of a sweep in a folder, which is created if it does not exist.

    Parameters
    ----------
    folder : Path
        Folder of the sweep.

    Raises
    ------
    InputError
        If the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / RECORDS, _record_key)
        self.folder = folder
        self.claims_folder = folder / CLAIMS
        with raise_write_errors(folder, "the folder cannot be made"):
            (folder / SCHEDULES).mkdir(parents=True, exist_ok=True)

    def add(self, record: Record) -> None:
        """Write the schedule of a record, if any, to a file; append the record without it.

        An existing schedule file of the run stays if the record has no schedule.
        """
        if record.get("schedule") is not None:
            text = json.dumps(record["schedule"], allow_nan=False)
            write_text(self._schedule_path(record["key"]), text + "\n")
        super().add({key: value for key, value in record.items() if key != "schedule"})

    def load_schedule(self, key: str) -> dict[str, Any] | None:
        """Return the content of the schedule file of a run.

        Return None if there is no such file, or if it cannot be read or contains no JSON object.
        """
        path = self._schedule_path(key)
        document = None
        with suppress(ValueError):
            document = json.loads(read_bytes(path)) if path.exists() else None
        return document if isinstance(document, dict) else None

    def merge(self, other_store: Store) -> int:
        """Copy records and schedules from another folder for runs that have no record in this one.

        A record of a failed run is replaced if the run is finished in the other folder. Return the
        number of copied records.
        """
        finished_by_key = self.finished_records()
        n_copied = 0
        for record in other_store.records():
            key = record["key"]
            if key in finished_by_key or (
                record["status"] == FAILED and self.find_record(key) is not None
            ):
                continue
            self.add({**record, "schedule": other_store.load_schedule(key)})
            n_copied += 1
        return n_copied

    def _schedule_path(self, key: str) -> Path:
        return self.folder / SCHEDULES / f"{key}.schedule.json"


def _record_key(record: Record) -> str:
    if missing := _FIELDS - set(record):
        raise KeyError(*missing)
    return str(record["key"])


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to solve a run: a file that is locked until `release` or the end of the process."""

    path: Path
    """The locked file, which is empty."""
    descriptor: int
    """File descriptor of the open file."""

    @classmethod
    def acquire(cls, path: Path) -> Claim | None:
        """Create a file and its folder, and lock the file; return None if it is locked already."""
        while True:
            with raise_write_errors(path):
                path.parent.mkdir(exist_ok=True)
                try:
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                except FileNotFoundError:  # the folder was removed with the last claim
                    continue
            if not _lock(descriptor):
                os.close(descriptor)
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return cls(path, descriptor)
            os.close(descriptor)  # the file was removed between opening and locking

    def release(self) -> None:
        """Remove the file, release its lock, and remove its folder if that is empty."""
        with suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)
        with suppress(OSError):
            self.path.parent.rmdir()


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Lock a file; return False if it is locked already. With `wait`, wait for the lock instead.

    Return True without a lock if the system or the file system has no locks.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
