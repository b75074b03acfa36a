"""Shared state of all sessions: problems, points, demand, and the work on it.

A session wants one point at a time. A point that somebody wants and that is not over is solved, the
newest wish first; one that nobody wants any more is not. Everything here runs in the event loop of
the server, and nothing takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.explore.points import Opened, Point, point_id
from poetmodel.explore.pool import RefusedError, WorkerPool
from poetmodel.explore.solving import Solves

if TYPE_CHECKING:
    from poetmodel.explore.choice import ExplorerChoice
    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame

KEPT_PROBLEMS: Final = 64
"""Problems that are kept beside those that somebody looks at."""
KEPT_SESSIONS: Final = 500
LINGER_S: Final = 10.0
"""How long a wish stays after nobody listens to its session any more, for a reload [s]."""


class Listener:
    """One stream of events to a browser: only the newest state of each point is sent."""

    def __init__(self) -> None:
        self._news: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._signal = asyncio.Event()
        self.over = False

    def hear(self, kind: str, point: str) -> None:
        """Take note that there is something new about a point."""
        self._news[kind, point] = None
        self._signal.set()

    def end(self) -> None:
        """End the stream: the server stops."""
        self.over = True
        self._signal.set()

    async def next(self, most_s: float) -> list[tuple[str, str]]:
        """Return the next news, kind and point; nothing after a while without news."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signal.wait(), most_s)
        self._signal.clear()
        news, self._news = list(self._news), OrderedDict()
        return news


@dataclass(slots=True)
class PageSession:
    """A page in a browser, and the point that it wants."""

    name: str
    wants: str | None = None
    problem: str | None = None
    listeners: list[Listener] = field(default_factory=list)
    alone_s: float = field(default_factory=time.monotonic)
    """When it was last heard of, if nobody listens, on the monotonic clock [s]."""


class GoneError(Exception):
    """Something that was asked for by a name that is not known, or not any more."""


class Coordinator:
    """Problems, points, sessions and workers of one server."""

    def __init__(
        self,
        store: PointStore,
        *,
        solvers: WorkerPool,
        drawers: WorkerPool,
        search: dict[str, Any],
        drawn_by: str,
    ) -> None:
        self.store = store
        self.solvers = solvers
        self.drawers = drawers
        self.drawn_by = drawn_by
        self.solves = Solves(
            store, solvers=solvers, drawers=drawers, search=search, tell=self._tell
        )
        self.opened: OrderedDict[str, Opened] = OrderedDict()
        self.sessions: OrderedDict[str, PageSession] = OrderedDict()
        self._reading: dict[ExplorerChoice, asyncio.Task[Opened]] = {}
        self._choices: OrderedDict[ExplorerChoice, str] = OrderedDict()
        self._drawings: dict[str, asyncio.Task[bytes | None]] = {}
        self._unwanted: set[str] = set()
        self._tidying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers."""
        await asyncio.gather(self.solvers.start(), self.drawers.start())
        self._tidying = asyncio.create_task(self._tidy())

    async def stop(self) -> None:
        """End all tasks; the store keeps all schedules and bounds."""
        tasks = [*self._drawings.values(), *filter(None, [self._tidying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self.solves.stop(), *tasks, return_exceptions=True)
        await asyncio.gather(self.solvers.stop(), self.drawers.stop())

    # -- problems --------------------------------------------------------------------------------

    async def open(self, choice: ExplorerChoice) -> Opened:
        """Return the problem of a choice with all its points."""
        name = self._choices.get(choice)
        opened = None if name is None else self.opened.get(name)
        if opened is None:
            task = self._reading.get(choice)
            if task is None:
                task = self._reading[choice] = asyncio.create_task(self._read(choice))
                task.add_done_callback(lambda _: self._reading.pop(choice, None))
            opened = await asyncio.shield(task)
        self.opened.move_to_end(opened.name)
        return opened

    async def _read(self, choice: ExplorerChoice) -> Opened:
        reply = await self.drawers.do({"task": "prepare", "choice": choice.model_dump()})
        name = reply.values["problem"]
        opened = self.opened.get(name)
        if opened is None:
            points = await self.store.call(self.store.points, name)
            opened = Opened(name, reply.values, reply.body.decode().removesuffix("}"))
            opened.points = {point.id: _as_stopped(point) for point in points}
            self.opened[name] = opened
        self._choices[choice] = name
        return opened

    def problem(self, name: str) -> Opened:
        """Return an open problem."""
        opened = self.opened.get(name)
        if opened is None:
            msg = "this problem is not open here: choose model and device again"
            raise GoneError(msg)
        return opened

    def find(self, name: str) -> tuple[Opened, Point]:
        """Return a point of an open problem."""
        for opened in reversed(self.opened.values()):
            if name in opened.points:
                return opened, opened.points[name]
        msg = "this point is not known here: choose model and device again"
        raise GoneError(msg)

    # -- wishes ----------------------------------------------------------------------------------

    def session(self, name: str) -> PageSession:
        """Return a session, a new one if it is not known."""
        session = self.sessions.setdefault(name, PageSession(name))
        self.sessions.move_to_end(name)
        return session

    async def want(
        self,
        session: str,
        problem: str,
        ram_bytes: int,
        deadline_s: float | None,
        *,
        more: bool = False,
    ) -> dict[str, Any]:
        """Let a session want a point; return what is known of it, at once."""
        opened, name = self.problem(problem), point_id(problem, ram_bytes, deadline_s)
        point = opened.points.get(name)
        if point is None or not point.is_over:
            stored = await self.store.call(self.store.point, name)
            point = opened.points.get(name)  # another request may have added it
            if stored is not None and (point is None or _is_ahead(stored, point)):
                point = opened.points[name] = _as_stopped(stored)
            elif stored is not None and point is not None:
                most = stored.bound if point.value is None else min(stored.bound, point.value)
                point.bound = max(point.bound, most)
        if point is None:
            point = Point(id=name, problem=problem, ram_bytes=ram_bytes, deadline_s=deadline_s)
            opened.points[name] = point
        asking = self.session(session)
        before, asking.wants, asking.problem = asking.wants, name, problem
        asking.alone_s = time.monotonic()
        if before is not None and before != name:
            self._drop(before)
        again = more and not point.is_proved
        if name not in self.solves.running and (again or not point.is_over):
            if not point.is_over:
                await self.solves.lend(opened, point)
            wanted = asking.wants == name and (again or not point.is_over)
            if wanted and name not in self.solves.running:  # nothing came meanwhile
                self.solves.begin(opened, point)
        return opened.describe(point)

    def _drop(self, name: str) -> None:
        """Cancel the solve of a point that nobody wants."""
        if any(session.wants == name for session in self.sessions.values()):
            return
        self.solves.cancel(name)
        for opened in self.opened.values():
            point = opened.points.get(name)
            if point is None:
                continue
            if not point.is_over:
                point.state = "cancelled"
            if point.digest in self._drawings:
                self._unwanted.add(point.digest)

    # -- answers ---------------------------------------------------------------------------------

    async def answer(self, name: str, revision: int | None) -> bytes | None:
        """Return the drawing of a point, gzipped JSON.

        None where there is nothing to draw, or nobody wanted it any more when its turn came.
        """
        opened, point = self.find(name)
        if point.value is None:
            return None
        if revision is not None and revision != point.revision:
            msg = f"revision {revision} is over: the newest one is {point.revision}"
            raise GoneError(msg)
        digest = point.digest
        self._unwanted.discard(digest)
        task = self._drawings.get(digest)
        if task is None:
            task = self._drawings[digest] = asyncio.create_task(self._draw(opened, point))
            task.add_done_callback(lambda _: self._forget(digest))
        return await asyncio.shield(task)

    def _forget(self, digest: str) -> None:
        self._drawings.pop(digest, None)
        self._unwanted.discard(digest)

    async def _draw(self, opened: Opened, point: Point) -> bytes | None:
        digest = point.digest
        name, of = point.id, digest
        if point.provisional and point.lender is not None:
            name, of = point.lender
        known = await self.store.call(self.store.answer, name, of, self.drawn_by)
        if known is not None:
            return known
        job, schedule = self.solves.proved(opened, point), await self.solves.schedule(point)
        worker = await self.drawers.take()
        if digest in self._unwanted:  # somebody dragged on while this one waited
            self.drawers.give_back(worker)
            return None
        reply = await self.drawers.let(worker, {**job, "task": "draw"}, schedule)
        await self.store.call(self.store.save_answer, point.id, digest, self.drawn_by, reply.body)
        return reply.body

    async def export(self, name: str, kind: str) -> Frame:
        """Return a file about a point."""
        opened, point = self.find(name)
        if point.value is None:
            msg = "there is no schedule yet to export"
            raise RefusedError(msg)
        job = self.solves.proved(opened, point)
        job |= {"task": "export", "kind": kind}
        return await self.drawers.do(job, await self.solves.schedule(point))

    async def why(self, problem: str, ram_bytes: int, deadline_s: float | None) -> dict[str, Any]:
        """Return the binding limits at a RAM and a deadline."""
        opened = self.problem(problem)
        point = Point(id="", problem=problem, ram_bytes=ram_bytes, deadline_s=deadline_s)
        reply = await self.drawers.do(self.solves.job("why", opened, point))
        return reply.values

    # -- news ------------------------------------------------------------------------------------

    def listen(self, name: str) -> Listener:
        """Begin to listen for a session; what it wants is told first."""
        session, listener = self.session(name), Listener()
        session.listeners.append(listener)
        if session.wants is not None:
            listener.hear("point", session.wants)
        return listener

    def silence(self) -> None:
        """End all streams of events."""
        for session in self.sessions.values():
            for listener in session.listeners:
                listener.end()

    def leave(self, name: str, listener: Listener) -> None:
        """Stop listening."""
        session = self.sessions.get(name)
        if session is not None and listener in session.listeners:
            session.listeners.remove(listener)
            session.alone_s = time.monotonic()

    def _tell(self, opened: Opened, point: Point, *, front: bool = False) -> None:
        for session in self.sessions.values():
            for listener in session.listeners:
                if session.wants == point.id:
                    listener.hear("point", point.id)
                if front and session.problem == opened.name:
                    listener.hear("front", point.id)

    async def _tidy(self) -> None:
        """Let wishes of closed pages lapse, and forget problems that nobody looks at."""
        while True:
            await asyncio.sleep(1)
            now_s = time.monotonic()
            sessions = list(self.sessions.values())
            for session in sessions:
                if session.listeners or now_s - session.alone_s < LINGER_S:
                    continue
                wanted, session.wants = session.wants, None
                if wanted is not None:
                    self._drop(wanted)
                if len(self.sessions) > KEPT_SESSIONS:
                    del self.sessions[session.name]
            for opened in self.opened.values():
                opened.forget(self.solves.running.keys() | {session.wants for session in sessions})
            used = {session.problem for session in self.sessions.values()}
            for name in [name for name in self.opened if name not in used]:
                busy = any(point in self.solves.running for point in self.opened[name].points)
                if len(self.opened) > KEPT_PROBLEMS and not busy:
                    del self.opened[name]


def _as_stopped(point: Point) -> Point:
    """Return a stored point, with a solve that another server began marked as cancelled."""
    if not point.is_over:
        point.state = "cancelled"
    return point


def _is_ahead(stored: Point, point: Point) -> bool:
    """Return whether the store has a better schedule of a point, or the end of its solve."""
    if stored.is_over:
        return True
    return stored.value is not None and (point.value is None or stored.value < point.value)
