"""Records in files of JSON lines, and the folder of a sweep: records, schedules and claims."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench.measurement import FAILED, Record
from poetmodel.files import read_bytes, write_text, writing

if sys.platform != "win32":  # there, sweeps of one folder do not know of each other
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path
    from typing import BinaryIO


RECORDS: Final = "cells.jsonl"
SCHEDULES: Final = "schedules"
"""Folder of the schedule files, each by the key of its run."""
CLAIMS: Final = "claims"
"""Folder with a locked file for each run that some sweep is solving."""
_FIELDS: Final = frozenset({"key", "status", "cell", "result"})
"""Fields of every record of a sweep."""


class RecordFile:
    """Records in a file, one JSON line each; the last record of each key counts.

    A `KeyError` of `key_of` means that a line is no record. The file is made with the first one.

    Notes
    -----
    A record is on the disk before the next one is written; one that cannot be written whole leaves
    the file as it was. What a killed process left of a last line is taken away before the next
    record; a whole line without its end of line gets one. Lines that hold no record are passed
    over. Several processes may write at the same time.
    """

    def __init__(self, path: Path, key_of: Callable[[Record], Hashable]) -> None:
        self.path = path
        self._key_of = key_of
        self._found: dict[Hashable, Record] = {}
        self._read_bytes = 0

    def records(self) -> list[Record]:
        """Return all records, the last one of each key, in the order of the file."""
        self._read_on()
        return list(self._found.values())

    def finished(self) -> dict[Hashable, Record]:
        """Return the records of the runs that need not be repeated, by key."""
        self._read_on()
        return {key: record for key, record in self._found.items() if record["status"] != FAILED}

    def record(self, key: Hashable) -> Record | None:
        """Return the record of a run as it is now, other processes' included; None without one."""
        self._read_on()
        return self._found.get(key)

    def add(self, record: Record) -> None:
        """Write a record."""
        content = (json.dumps(record, allow_nan=False) + "\n").encode()
        with writing(self.path), self.path.open("a+b") as stream:
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

    def claim(self, key: Hashable) -> Claim | None:  # noqa: ARG002 - of those that are shared
        """Return the right to solve a run, None while another process has it."""
        return Claim()

    def _read_on(self) -> None:
        """Read the lines that have come since the last time."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self._read_bytes:  # somebody made the file shorter
            self._found.clear()
            self._read_bytes = 0
        content = read_bytes(self.path, begin=self._read_bytes)
        for line in content.split(b"\n"):
            self._parse(line)
        self._read_bytes += content.rfind(b"\n") + 1

    def _parse(self, line: bytes) -> bool:
        """Keep the record of a line; return whether it holds one."""
        try:
            record = json.loads(line)
            self._found[self._key_of(record)] = record
        except (ValueError, RecursionError, LookupError, TypeError):
            return False
        return True

    def _end_last_line(self, stream: BinaryIO) -> None:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        if stream.read(1) in (b"", b"\n"):
            return
        stream.seek(0)
        content = stream.read()
        torn = content[content.rfind(b"\n") + 1 :]
        if self._parse(torn):
            stream.write(b"\n")
        else:
            stream.truncate(size - len(torn))


class Store(RecordFile):
    """Records and schedules of a sweep in a folder, which is made where it is missing.

    Parameters
    ----------
    folder : Path
        Where the sweep lives.

    Raises
    ------
    InputError
        If the folder cannot be made.

    Notes
    -----
    Several sweeps may write at the same time, each run by the one that claims it.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / RECORDS, _key)
        self.folder = folder
        with writing(folder, "the folder cannot be made"):
            (folder / SCHEDULES).mkdir(parents=True, exist_ok=True)

    def add(self, record: Record) -> None:
        """Write a record, and its schedule to a file of its own."""
        if record.get("schedule") is not None:
            text = json.dumps(record["schedule"], allow_nan=False)
            write_text(self._schedule_path(record["key"]), text + "\n")
        super().add({key: value for key, value in record.items() if key != "schedule"})

    def claim(self, key: Hashable) -> Claim | None:
        """Return the right to solve a run, None while another sweep has it.

        It ends with `Claim.release`, or with this process however that ends.
        """
        return Claim.take(self.folder / CLAIMS / str(key))

    def schedule(self, key: str) -> dict[str, Any] | None:
        """Return the content of the schedule file of a run, None where there is no whole one."""
        path = self._schedule_path(key)
        document = None
        with suppress(ValueError):
            document = json.loads(read_bytes(path)) if path.exists() else None
        return document if isinstance(document, dict) else None

    def _schedule_path(self, key: str) -> Path:
        return self.folder / SCHEDULES / f"{key}.schedule.json"


def _key(record: Record) -> str:
    if missing := _FIELDS - set(record):
        raise KeyError(*missing)
    return str(record["key"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The right to solve a run: a file that is locked while this process lives, or `release`."""

    path: Path | None = None
    """The file, which is there for the lock alone; None where nobody else solves anything."""
    descriptor: int = -1

    @classmethod
    def take(cls, path: Path) -> Claim | None:
        """Lock a file, which is made where it is missing; None where another process has it."""
        while True:
            with writing(path):
                path.parent.mkdir(exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            if not _lock(descriptor):
                os.close(descriptor)
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(path.stat(), os.fstat(descriptor)):
                    return cls(path=path, descriptor=descriptor)
            os.close(descriptor)  # it was released, and taken away, between opening and locking

    def release(self) -> None:
        """Take the file away and let others have the lock."""
        if self.path is None:
            return
        with suppress(OSError):
            self.path.unlink()
        os.close(self.descriptor)


def _lock(descriptor: int, *, wait: bool = False) -> bool:
    """Whether a file could be locked; file systems without locks always let it."""
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
