"""Running the explorer: the store, the workers and the server, from start to Ctrl-C."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from poetmodel.data import installed
from poetmodel.explore.board import Board
from poetmodel.explore.crew import Crew
from poetmodel.explore.server import application
from poetmodel.explore.store import Store

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from poetmodel.explore.choice import Catalogue

SOLVING: Final = 15
DRAWING: Final = 5
"""Niceness of the processes that solve and that draw: the server comes first, pictures second."""
STOP_S: Final = 1
"""How long open streams may take to end [s]."""


def serve(
    listening: socket.socket,
    *,
    port: int,
    store: Path,
    catalogue: Catalogue,
    initial: Mapping[str, Any],
    search: dict[str, Any],
    workers: int | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C; `ready` gets the address once it answers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kept = Store(store)
    try:
        token, text = kept.now(kept.secret), catalogue.to_json()
        board = Board(
            kept,
            solvers=Crew(workers or cores or 1, SOLVING, text),
            drawers=Crew(max(1, (cores or 1) // 2), DRAWING, text),
            search=search,
        )
        board.drawn_by = _version()
        app = application(board, catalogue, page=_page, initial=initial, token=token, port=port)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=STOP_S,
            lifespan="on",
        )
        with suppress(KeyboardInterrupt):  # which is how the server ends
            _Server(config, board, lambda: ready(f"http://127.0.0.1:{port}/?token={token}")).run(
                [listening]
            )
    finally:
        kept.close()


class _Server(uvicorn.Server):
    """A server that says when it has started, and ends its streams when it stops."""

    def __init__(self, config: uvicorn.Config, board: Board, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._board = board
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        if self.started:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, then stop."""
        self._board.silence()
        await super().shutdown(sockets)


def _version() -> str:
    """Return what tells this version's pictures from those of others: what makes them."""
    found = hashlib.sha256((installed("poetmodel") or "").encode())
    for package in ("poetmodel.explore", "poetmodel.plan", "poetmodel.report"):
        for path in sorted(files(package).iterdir(), key=lambda path: path.name):
            if path.name.endswith(".py"):
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _page() -> str:
    from importlib import import_module

    text: str = import_module("poetmodel.explore.page").explorer_page()
    return text
