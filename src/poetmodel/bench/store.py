"""The folder of a sweep: one JSON line per cell, and the schedules that were found."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench.locks import Lock
from poetmodel.bench.measurement import FAILED
from poetmodel.data import read_bytes, write_text
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poetmodel.bench.measurement import Record

RECORDS: Final = "cells.jsonl"
"""File of the records."""
SCHEDULES: Final = "schedules"
"""Folder of the schedule files, each by the key of its cell."""
CLAIMS: Final = "claims"
"""Folder with a locked file for each cell that some sweep is solving."""
_KEYS: Final = frozenset({"key", "status", "cell", "result"})
"""What every record has."""


class Store:
    """Records and schedules in a folder, which is made where it is missing.

    Parameters
    ----------
    folder : Path
        Where the sweep lives.

    Raises
    ------
    InputError
        If the folder cannot be made or read.

    Notes
    -----
    A record is on the disk before the next one is written; one that cannot be written whole leaves
    the file as it was. What a killed sweep left of a last line is taken away when the folder is
    opened; a whole line without its end of line gets one. Lines that hold no record are passed
    over. Several sweeps may write at the same time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RECORDS
        self._found: dict[str, Record] = {}
        self._read_bytes = 0
        try:
            (folder / SCHEDULES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{folder}: the folder cannot be made ({error.strerror or error})"
            raise InputError(msg) from error
        if self.path.exists() and _is_torn(read_bytes(self.path)):
            with self._alone():
                self._repair()

    def records(self) -> list[Record]:
        """Return all records, the last one of each cell, in the order of the file."""
        self._read_on()
        return list(self._found.values())

    def finished(self) -> dict[str, Record]:
        """Return the records of the cells that need not be run again, by key."""
        return {record["key"]: record for record in self.records() if record["status"] != FAILED}

    def record(self, key: str) -> Record | None:
        """Return the record of a cell as it is now, other sweeps' included; None without one."""
        self._read_on()
        return self._found.get(key)

    def add(self, record: Record) -> Record:
        """Write a record and its schedule; return the record as it is in the file."""
        line = {key: value for key, value in record.items() if key != "schedule"}
        if record.get("schedule") is not None:
            text = json.dumps(record["schedule"], allow_nan=False)
            write_text(self._schedule_path(record["key"]), text + "\n")
        content = (json.dumps(line, allow_nan=False) + "\n").encode()
        with self._alone():
            try:
                _append(self.path, content)
            except OSError as error:
                msg = f"{self.path}: cannot be written ({error.strerror or error})"
                raise InputError(msg) from error
        return line

    def claim(self, key: str) -> Lock | None:
        """Return the right to solve a cell, None while another sweep has it.

        It ends with `Lock.release`, or with this process however that ends.
        """
        return Lock.take(self.folder / CLAIMS / key)

    def schedule(self, key: str) -> dict[str, Any] | None:
        """Return the content of the schedule file of a cell, None where there is no whole one."""
        path = self._schedule_path(key)
        if not path.exists():
            return None
        try:
            document = json.loads(read_bytes(path))
        except ValueError:
            return None
        return document if isinstance(document, dict) else None

    def _schedule_path(self, key: str) -> Path:
        return self.folder / SCHEDULES / f"{key}.schedule.json"

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other sweeps from writing records meanwhile."""
        lock = Lock.take(self.folder / CLAIMS / RECORDS, wait=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.release()

    def _read_on(self) -> None:
        """Read the lines that have come since the last time."""
        if not self.path.exists():
            return
        if self.path.stat().st_size < self._read_bytes:  # somebody made the file shorter
            self._found.clear()
            self._read_bytes = 0
        content = read_bytes(self.path, begin=self._read_bytes)
        whole = content.rfind(b"\n") + 1
        for line in content[:whole].split(b"\n"):
            record = _parsed(line)
            if record is not None:
                self._found[record["key"]] = record
        self._read_bytes += whole

    def _repair(self) -> None:
        content = self.path.read_bytes()
        if not _is_torn(content):
            return
        whole, _, torn = content.rpartition(b"\n")
        with self.path.open("r+b") as stream:
            if _parsed(torn) is not None:
                stream.seek(0, os.SEEK_END)
                stream.write(b"\n")
            else:
                stream.truncate(len(whole) + 1 if whole else 0)


def _append(path: Path, content: bytes) -> None:
    """Append a line; where it cannot be written whole, leave the file as it was.

    What another sweep that was killed left of a line is ended first.
    """
    with path.open("a+b") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        torn = _is_torn(stream.read(1))
        try:
            stream.write(b"\n" * torn + content)
            stream.flush()
            os.fsync(stream.fileno())
        except OSError:
            os.ftruncate(stream.fileno(), size)
            raise


def _is_torn(content: bytes) -> bool:
    return bool(content) and not content.endswith(b"\n")


def _parsed(line: bytes) -> Record | None:
    """Return the record of a line, None where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and set(record) >= _KEYS else None
