"""Running the explorer: the store, the workers and the server, from start to Ctrl-C."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from poetmodel.explore.coordination import Coordinator
from poetmodel.explore.pool import WorkerPool
from poetmodel.explore.server import application
from poetmodel.explore.store import PointStore
from poetmodel.files import installed_version
from poetmodel.graph.zoo.state import STATES
from poetmodel.problem import Quantity
from poetmodel.report.facts import CHOICES
from poetmodel.report.folding import HEADS
from poetmodel.report.template import render
from poetmodel.units import ESTIMATES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from poetmodel.explore.choice import Catalogue
    from poetmodel.explore.guard import Guard

SOLVING: Final = 15
DRAWING: Final = 5
"""Niceness of the processes that solve and that draw: the server comes first, pictures second."""
CHARTS: Final = ("timeline", "gauge", "decisions", "map")
"""The types of the charts of an answer, in the order in which they are drawn."""
STOP_S: Final = 1
"""How long open streams may take to end [s]."""


def serve(
    listening: socket.socket,
    *,
    store: Path,
    catalogue: Catalogue,
    initial: Mapping[str, Any],
    search: dict[str, Any],
    workers: int | None = None,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; `ready` gets the address once it answers.

    In the main thread neither of them raises anything from here on, to the end of the process.
    """
    ending = _Ending()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, ending.request)
    port = listening.getsockname()[1]
    app = explorer(
        port=port,
        store=store,
        catalogue=catalogue,
        initial=initial,
        search=search,
        workers=workers,
    )
    config = uvicorn.Config(
        app.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        lifespan="on",
    )
    address = f"http://127.0.0.1:{port}/?token={app.token}"
    server = _Server(config, app.coordinator, lambda: ready(address))
    try:
        ending.of(server)
        server.run([listening])
    finally:
        app.store.close()


class _Ending:
    """Requests by signals: a server that runs ends, and one that starts ends at once."""

    def __init__(self) -> None:
        self._wanted = False
        self._server: uvicorn.Server | None = None

    def request(self, *_: object) -> None:
        """Handle a signal; while the server runs it has a handler of its own."""
        self._wanted = True
        if self._server is not None:
            self._server.should_exit = True

    def of(self, server: uvicorn.Server) -> None:
        """Let signals end a server, those that came before it too."""
        self._server = server
        if self._wanted:
            server.should_exit = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """An explorer that is ready to be served."""

    app: Guard
    coordinator: Coordinator
    store: PointStore
    token: str


def explorer(
    *,
    port: int,
    store: Path,
    catalogue: Catalogue,
    initial: Mapping[str, Any],
    search: dict[str, Any],
    workers: int | None = None,
) -> Explorer:
    """Open a store and return its explorer; the workers start with it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    kept, text = PointStore(store), catalogue.to_json()
    coordinator = Coordinator(
        kept,
        solvers=WorkerPool(workers or cores or 1, SOLVING, text, newest_first=True),
        drawers=WorkerPool(max(min(cores or 1, 2), (cores or 1) // 2), DRAWING, text),
        search=search,
        drawn_by=_drawing_version(),
    )
    token = kept.now(kept.secret)
    app = application(
        coordinator, catalogue, page=explorer_page, initial=initial, token=token, port=port
    )
    return Explorer(app=app, coordinator=coordinator, store=kept, token=token)


def explorer_page() -> str:
    """Return the explorer as the text of an HTML page; its data come over the API."""
    return render(
        "explore.html.jinja",
        package="poetmodel.explore",
        chart_scripts=CHARTS,
        charts={"graph": None, "charts": []},
        quantities=[str(quantity) for quantity in Quantity],
        states=STATES,
        decision_heads=HEADS,
        estimates=ESTIMATES,
        choices=list(CHOICES.values()),
        version=installed_version("poetmodel") or "",
    )


class _Server(uvicorn.Server):
    """A server that says when it has started, and ends its streams when it stops."""

    def __init__(
        self, config: uvicorn.Config, coordinator: Coordinator, started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._coordinator = coordinator
        self._tell = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        if self.should_exit:  # asked for before it had begun
            return
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._tell()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End all streams, then stop."""
        self._coordinator.silence()
        await super().shutdown(sockets)


def _drawing_version() -> str:
    """Return the digest of the code that draws answers, with which the store labels them."""
    digest = hashlib.sha256((installed_version("poetmodel") or "").encode())
    for package in ("poetmodel.explore", "poetmodel.plan", "poetmodel.report"):
        for path in sorted(files(package).iterdir(), key=lambda path: path.name):
            if path.name.endswith(".py"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
