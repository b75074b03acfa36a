"""Records in files of JSON lines, and the folder of a sweep: records and schedules."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from poetmodel.files import read_bytes, write_text, writing
from poetmodel.sweeps.measurement import FAILED, Record

if sys.platform != "win32":
    import fcntl

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from pathlib import Path
    from typing import BinaryIO


RECORDS: Final = "cells.jsonl"
SCHEDULES: Final = "schedules"
"""Folder of the schedule files, each by the key of its run."""
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

    def records(self) -> list[Record]:
        """Return all records, the last one of each key, in the order of the file."""
        return list(self._by_key().values())

    def finished(self) -> dict[Hashable, Record]:
        """Return the records of the runs that need not be repeated, by key."""
        found = self._by_key().items()
        return {key: record for key, record in found if record["status"] != FAILED}

    def add(self, record: Record) -> None:
        """Write a record."""
        content = (json.dumps(record, allow_nan=False) + "\n").encode()
        with writing(self.path), self.path.open("a+b") as stream:
            _lock(stream.fileno())
            self._end_last_line(stream)
            size = stream.seek(0, os.SEEK_END)
            try:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            except OSError:
                os.ftruncate(stream.fileno(), size)
                raise

    def _by_key(self) -> dict[Hashable, Record]:
        content = read_bytes(self.path) if self.path.exists() else b""
        return dict(filter(None, map(self._parse, content.split(b"\n"))))

    def _parse(self, line: bytes) -> tuple[Hashable, Record] | None:
        """Return the record of a line with its key; None where it holds none."""
        try:
            record = json.loads(line)
            return self._key_of(record), record
        except (ValueError, RecursionError, LookupError, TypeError):
            return None

    def _end_last_line(self, stream: BinaryIO) -> None:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        if stream.read(1) in (b"", b"\n"):
            return
        stream.seek(0)
        content = stream.read()
        torn = content[content.rfind(b"\n") + 1 :]
        if self._parse(torn) is not None:
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


def _lock(descriptor: int) -> None:
    """Lock a file until it is closed; file systems without locks have none."""
    if sys.platform != "win32":
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
