"""The folder of a sweep: one JSON line per cell, and the schedules that were found."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

from poetmodel.bench.measurement import FAILED
from poetmodel.data import read_text, write_text
from poetmodel.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from poetmodel.bench.measurement import Record

RECORDS: Final = "cells.jsonl"
"""File of the records."""
SCHEDULES: Final = "schedules"
"""Folder of the schedule files, each by the key of its cell."""


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
    A record is on the disk before the next one is written. What a killed sweep left of a last line
    is taken away when the folder is opened; a whole line without its end of line gets one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / RECORDS
        try:
            (folder / SCHEDULES).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{folder}: the folder cannot be made ({error.strerror or error})"
            raise InputError(msg) from error
        if self.path.exists():
            self._repair()

    def records(self) -> list[Record]:
        """Return all records, the last one of each cell, in the order of the file."""
        if not self.path.exists():
            return []
        found: dict[str, Record] = {}
        for line in read_text(self.path).splitlines():
            record = _parsed(line)
            if record is not None:
                found[record["key"]] = record
        return list(found.values())

    def finished(self) -> dict[str, Record]:
        """Return the records of the cells that need not be run again, by key."""
        return {record["key"]: record for record in self.records() if record["status"] != FAILED}

    def add(self, record: Record) -> Record:
        """Write a record and its schedule; return the record as it is in the file."""
        line = {key: value for key, value in record.items() if key != "schedule"}
        if record.get("schedule") is not None:
            text = json.dumps(record["schedule"], allow_nan=False)
            write_text(self._schedule_path(record["key"]), text + "\n")
        try:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, allow_nan=False) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            msg = f"{self.path}: cannot be written ({error.strerror or error})"
            raise InputError(msg) from error
        return line

    def schedule(self, key: str) -> dict[str, Any] | None:
        """Return the content of the schedule file of a cell, None where there is none."""
        path = self._schedule_path(key)
        if not path.exists():
            return None
        document: dict[str, Any] = json.loads(read_text(path))
        return document

    def _schedule_path(self, key: str) -> Path:
        return self.folder / SCHEDULES / f"{key}.schedule.json"

    def _repair(self) -> None:
        content = self.path.read_bytes()
        if not content or content.endswith(b"\n"):
            return
        whole, _, torn = content.rpartition(b"\n")
        if _parsed(torn.decode("utf-8", errors="replace")) is not None:
            repaired = content + b"\n"
        else:
            repaired = whole + b"\n" if whole else b""
        write_text(self.path, repaired.decode("utf-8"))


def _parsed(line: str) -> Record | None:
    """Return the record of a line, None where it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or "key" not in record or "status" not in record:
        return None
    return record
