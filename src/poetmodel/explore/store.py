"""Store of the explorer: points with results or schedules, in an SQLite file.

Several servers may share a file. A server makes all calls in one thread, in order. Committed points
survive a crash of the server, because SQLite uses a write-ahead log.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from poetmodel.errors import InputError
from poetmodel.explore.answer import Point

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


_Result = TypeVar("_Result")

FORMAT: Final = 1
"""Version of the tables."""
BUSY_S: Final = 10.0
"""Maximum wait for another server's write [s]."""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS points (
    id TEXT PRIMARY KEY, problem TEXT NOT NULL, ram_bytes INTEGER NOT NULL, deadline_s REAL,
    state TEXT NOT NULL, rank INTEGER NOT NULL, value REAL, bound REAL NOT NULL,
    digest TEXT NOT NULL, facts TEXT NOT NULL, schedule BLOB, changed_s REAL NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS points_of_problem ON points (problem);
"""


class PointStore:
    """Points in one file, and the token of its servers.

    Raises `InputError` if the file cannot be written, or is of another program or version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._connection = self._thread.submit(self._open).result()

    def _open(self) -> sqlite3.Connection:
        """Open or create the file, folder and tables; return the connection in autocommit mode."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))  # it contains the token
            with ExitStack() as exit_stack:
                connection = exit_stack.enter_context(
                    closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None))
                )
                self._check_format(connection)
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.executescript(_TABLES)
                exit_stack.pop_all()
        except (OSError, sqlite3.Error) as error:
            raise InputError(
                f"--store {self.path}: expected a store of the explorer, to be written ({error})"
            ) from error
        return connection

    def _check_format(self, connection: sqlite3.Connection) -> None:
        """Raise `InputError` if the file lacks a table of a store, or has another `FORMAT`."""
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
        if not tables:
            return
        if not {"meta", "points"} <= tables:
            raise InputError(
                f"--store {self.path}: this database is no store of the explorer; give another file"
            )
        stored_format = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
        if stored_format is not None and stored_format[0] != str(FORMAT):
            raise InputError(
                f"--store {self.path}: was written by another version of poetmodel (format "
                f"{stored_format[0]}, expected {FORMAT}); give another file"
            )

    async def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method below in the thread of the store, without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def call_and_wait(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Call a method below in the thread of the store; wait for its result and return it."""
        return self._thread.submit(function, *arguments).result()

    def close(self) -> None:
        """Complete all writes and close the file."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    # -- methods in the store's thread -----------------------------------------------------------

    def load_token(self) -> str:
        """Return the access token of this file; the first call writes it, and the format."""
        with self._connection as connection:
            connection.execute(
                "INSERT OR IGNORE INTO meta VALUES ('token', ?), ('format', ?)",
                (secrets.token_urlsafe(24), str(FORMAT)),
            )
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        return str(meta["token"])

    def load_points(self, problem: str) -> list[Point]:
        """Return all stored points of a problem."""
        query = "SELECT facts FROM points WHERE problem = ?"
        return [_parse_point(row) for row in self._connection.execute(query, (problem,))]

    def load_point(self, point_id: str) -> Point | None:
        """Return a stored point by its id; None if there is none."""
        query = "SELECT facts FROM points WHERE id = ?"
        row = self._connection.execute(query, (point_id,)).fetchone()
        return None if row is None else _parse_point(row)

    def load_schedule(self, point_id: str) -> bytes:
        """Return the stored packed schedule of a point; empty without one."""
        query = "SELECT schedule FROM points WHERE id = ?"
        row = self._connection.execute(query, (point_id,)).fetchone()
        return b"" if row is None or row[0] is None else row[0]

    def save(self, point: Point) -> None:
        """Merge a point with the stored one, and store the result; `point` is unchanged.

        A schedule that is not at hand is ignored: the store has one that is as good.
        """
        answer = point.answer
        if answer.found is not None and not answer.found.packed:
            answer = replace(answer, found=None)
        with self._transaction() as connection:
            stored = self.load_point(point.id)
            merged = replace(stored or point)
            merged.take(answer)
            if stored is not None and merged.answer == stored.answer:
                return
            if merged.answer == point.answer:
                merged = replace(point, answer=merged.answer)  # with the revision that pages know
            else:
                merged.revision = max(merged.revision, point.revision + 1)
            found = merged.answer.found
            packed = b"" if found is None else found.packed or self.load_schedule(point.id)
            merged.state = point.state if merged.answer.proof is None else "done"
            connection.execute(
                "INSERT OR REPLACE INTO points VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    merged.id,
                    merged.problem,
                    merged.ram_bytes,
                    merged.deadline_s,
                    merged.state,
                    merged.is_finished + merged.answer.is_proved,
                    None if found is None else found.value,
                    merged.answer.bound,
                    merged.digest,
                    json.dumps(merged.to_record(), allow_nan=False),
                    packed or None,
                    time.time(),
                ),
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Context manager: a transaction that excludes other writers from its first read on."""
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection as connection:
            yield connection


def _parse_point(row: tuple[str]) -> Point:
    return Point.from_record(json.loads(row[0]))
