"""Run the explorer: store, workers and server, from start to Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import uvicorn

from poetmodel.errors import WorkersLostError
from poetmodel.explore.pool import WorkerPool
from poetmodel.explore.server import make_application
from poetmodel.explore.session import ExplorerSession
from poetmodel.explore.settings import ExplorerSettings
from poetmodel.explore.store import PointStore
from poetmodel.files import installed_version
from poetmodel.graph.zoo.state import STATES
from poetmodel.problem import Quantity
from poetmodel.report.facts import TREATMENT_NAMES
from poetmodel.report.folding import HEADS
from poetmodel.report.template import render
from poetmodel.schedule.metrics import Display, metrics_at
from poetmodel.units import ESTIMATES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from poetmodel.explore.guard import Guard
    from poetmodel.explore.settings import Catalogue
    from poetmodel.solver.request import SearchOptions

SOLVING_NICENESS: Final = 15
DRAWING_NICENESS: Final = 5
"""Niceness of the processes that solve, and of those that draw. The server has the highest
priority, then drawing."""
CHARTS: Final = ("timeline", "gauge", "decisions", "map")
"""Types of charts, in the order in which the page draws them."""
STOP_S: Final = 1
"""Maximum time for open streams to end [s]."""


def serve(
    listener: socket.socket,
    *,
    store: Path,
    catalogue: Catalogue,
    initial: Mapping[str, Any],
    search: SearchOptions,
    workers: int | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; call `on_ready` with the address after the server has started.

    In the main thread, the handlers of both signals are replaced and not restored. `listener` is a
    bound socket, `initial` has the page's first settings. `workers` processes solve, None for one
    per core. Raises `InputError` if the store cannot be used, and `WorkersLostError` if a worker
    does not start.
    """
    stop_signals = _StopSignals()
    if threading.current_thread() is threading.main_thread():
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signal_number, stop_signals.request_stop)
    port = listener.getsockname()[1]
    explorer = open_explorer(
        port=port,
        store=store,
        catalogue=catalogue,
        initial=initial,
        search=search,
        workers=workers,
    )
    config = uvicorn.Config(
        explorer.app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_S,
        lifespan="on",
    )
    address = f"http://127.0.0.1:{port}/?token={explorer.token}"
    server = _Server(config, explorer.session, lambda: on_ready(address))
    try:
        stop_signals.stop_on_request(server)
        with suppress(SystemExit):  # of newer versions of uvicorn, if the start fails
            server.run([listener])
    finally:
        explorer.store.close()
    if not (server.started or stop_signals.is_requested):
        raise WorkersLostError("a worker did not start: the error above has the reason")


class _StopSignals:
    """Signal handler that stops the server, or prevents its start."""

    def __init__(self) -> None:
        self.is_requested = False
        """Whether a signal has requested the stop."""
        self._server: uvicorn.Server | None = None

    def request_stop(self, *_: object) -> None:
        """Stop the server, also one that is set later; a running server handles signals itself."""
        self.is_requested = True
        if self._server is not None:
            self._server.should_exit = True

    def stop_on_request(self, server: uvicorn.Server) -> None:
        """Set the server that signals stop; stop it if a signal has arrived before."""
        self._server = server
        if self.is_requested:
            server.should_exit = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """An explorer that is ready to be served."""

    app: Guard
    session: ExplorerSession
    store: PointStore
    token: str


def open_explorer(
    *,
    port: int,
    store: Path,
    catalogue: Catalogue,
    initial: Mapping[str, Any],
    search: SearchOptions,
    workers: int | None = None,
) -> Explorer:
    """Open a store and return an explorer; workers (None: one per core) start with the server."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    point_store, catalogue_text = PointStore(store), catalogue.to_json()
    session = ExplorerSession(
        point_store,
        solve_workers=WorkerPool(
            workers or n_cores or 1, SOLVING_NICENESS, catalogue_text, newest_first=True
        ),
        quick_workers=WorkerPool(
            max(min(n_cores or 1, 2), (n_cores or 1) // 2), DRAWING_NICENESS, catalogue_text
        ),
        search=search,
    )
    token = point_store.call_and_wait(point_store.load_token)
    app = make_application(
        session, catalogue, render_page=render_page, initial=initial, token=token, port=port
    )
    return Explorer(app=app, session=session, store=point_store, token=token)


def render_page() -> str:
    """Return the HTML page of the explorer with its scripts; it loads its data from the API."""
    return render(
        "explore.html.jinja",
        package="poetmodel.explore",
        chart_scripts=CHARTS,
        charts={"graph": None, "charts": []},
        quantities=[str(quantity) for quantity in Quantity],
        states=STATES,
        decision_heads=HEADS,
        estimates=ESTIMATES,
        metrics=[
            metric for metric in metrics_at(Display.EXPLORER) if Display.EXPLORER in metric.tables
        ],
        choices=list(TREATMENT_NAMES.values()),
        defaults=ExplorerSettings.defaults(),
        version=installed_version("poetmodel") or "",
    )


class _Server(uvicorn.Server):
    """A server that reports its start, and ends its streams when it stops."""

    def __init__(
        self, config: uvicorn.Config, session: ExplorerSession, on_start: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._session = session
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start and call `on_start`, unless a stop was requested or the start fails."""
        if self.should_exit:  # requested before the start
            return
        await super().startup(sockets)
        if self.started and not self.should_exit:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._session.close_listeners()
        await super().shutdown(sockets)
