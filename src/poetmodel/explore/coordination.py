"""Shared state of all sessions: problems, points, requests, and running solves.

Each session requests one point at a time. Unfinished requested points are solved, the newest
request first; solves that no session requests any more are cancelled. All code here runs in the
event loop of the server, and must not block.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.explore.points import OpenProblem, Point, point_id
from poetmodel.explore.pool import RefusedError, WorkerPool
from poetmodel.explore.solving import Solves

if TYPE_CHECKING:
    from poetmodel.explore.choice import ExplorerChoice
    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame

MAX_KEPT_PROBLEMS: Final = 64
"""Maximum number of problems in memory, in addition to those of open sessions."""
MAX_KEPT_SESSIONS: Final = 500
REQUEST_LIFETIME_S: Final = 10.0
"""Time for which the request of a session without listeners stays valid, for a reload [s]."""


class Listener:
    """An event stream to a browser; for each point only the newest event is sent."""

    def __init__(self) -> None:
        self._pending_events: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._signal = asyncio.Event()
        self.is_closed = False

    def notify(self, kind: str, point: str) -> None:
        """Queue an event about a point."""
        self._pending_events[kind, point] = None
        self._signal.set()

    def close(self) -> None:
        """End the stream, because the server stops."""
        self.is_closed = True
        self._signal.set()

    async def next_events(self, max_s: float) -> list[tuple[str, str]]:
        """Wait for events and return them as (kind, point); empty after `max_s` without events."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signal.wait(), max_s)
        self._signal.clear()
        events, self._pending_events = list(self._pending_events), OrderedDict()
        return events


@dataclass(slots=True)
class PageSession:
    """A page in a browser, and the point that it requests."""

    name: str
    requested_point: str | None = None
    problem: str | None = None
    listeners: list[Listener] = field(default_factory=list)
    last_seen_s: float = field(default_factory=time.monotonic)
    """Time of the last contact, if there is no listener, on the monotonic clock [s]."""


class GoneError(Exception):
    """Error for a request about an unknown or discarded problem, point or revision."""


class Coordinator:
    """Opens problems, starts and cancels the solves of requested points, and notifies sessions."""

    def __init__(
        self,
        store: PointStore,
        *,
        solvers: WorkerPool,
        drawers: WorkerPool,
        search: dict[str, Any],
        drawn_by: str,
    ) -> None:
        """Create the coordinator without sessions; `start` starts its workers.

        `solvers` are the processes of solves, `drawers` those of short tasks. `drawn_by` is the
        version of the code that draws answers.
        """
        self.store = store
        self.solvers = solvers
        self.drawers = drawers
        self.drawn_by = drawn_by
        self.solves = Solves(
            store, solvers=solvers, drawers=drawers, search=search, notify=self._notify_listeners
        )
        self.opened: OrderedDict[str, OpenProblem] = OrderedDict()
        self.sessions: OrderedDict[str, PageSession] = OrderedDict()
        self._reads: dict[ExplorerChoice, asyncio.Task[OpenProblem]] = {}
        self._choices: OrderedDict[ExplorerChoice, str] = OrderedDict()
        self._drawings: dict[str, asyncio.Task[bytes | None]] = {}
        self._unrequested_drawings: set[str] = set()
        self._cleanup_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the workers and the periodic clean-up."""
        await asyncio.gather(self.solvers.start(), self.drawers.start())
        self._cleanup_task = asyncio.create_task(self._clean_up())

    async def stop(self) -> None:
        """Cancel all tasks and stop the workers; the store has all schedules and bounds."""
        tasks = [*self._drawings.values(), *filter(None, [self._cleanup_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self.solves.stop(), *tasks, return_exceptions=True)
        await asyncio.gather(self.solvers.stop(), self.drawers.stop())

    # -- problems --------------------------------------------------------------------------------

    async def open(self, choice: ExplorerChoice) -> OpenProblem:
        """Return the open problem of a choice with its points; the first call reads the graph."""
        name = self._choices.get(choice)
        opened = None if name is None else self.opened.get(name)
        if opened is None:
            task = self._reads.get(choice)
            if task is None:
                task = self._reads[choice] = asyncio.create_task(self._read_problem(choice))
                task.add_done_callback(lambda _: self._reads.pop(choice, None))
            opened = await asyncio.shield(task)
        self.opened.move_to_end(opened.name)
        return opened

    async def _read_problem(self, choice: ExplorerChoice) -> OpenProblem:
        """Prepare the problem of a choice in a worker, and load its stored points."""
        reply = await self.drawers.run_job({"task": "prepare", "choice": choice.model_dump()})
        name = reply.values["problem"]
        opened = self.opened.get(name)
        if opened is None:
            points = await self.store.call(self.store.points, name)
            opened = OpenProblem(name, reply.values, reply.body.decode().removesuffix("}"))
            opened.points = {point.id: _without_running_solve(point) for point in points}
            self.opened[name] = opened
        self._choices[choice] = name
        return opened

    def problem(self, name: str) -> OpenProblem:
        """Return an open problem; raise `GoneError` if it is not open."""
        opened = self.opened.get(name)
        if opened is None:
            msg = "this problem is not open here: choose model and device again"
            raise GoneError(msg)
        return opened

    def find(self, name: str) -> tuple[OpenProblem, Point]:
        """Return a point by its id, with its problem; raise `GoneError` for an unknown point."""
        for opened in reversed(self.opened.values()):
            if name in opened.points:
                return opened, opened.points[name]
        msg = "this point is not known here: choose model and device again"
        raise GoneError(msg)

    # -- requests --------------------------------------------------------------------------------

    def session(self, name: str) -> PageSession:
        """Return the session of a name; create it if it is unknown."""
        session = self.sessions.setdefault(name, PageSession(name))
        self.sessions.move_to_end(name)
        return session

    async def request_point(
        self,
        session: str,
        problem: str,
        ram_bytes: int,
        deadline_s: float | None,
        *,
        more: bool = False,
    ) -> dict[str, Any]:
        """Set the requested point of a session, start its solve if necessary, and return the point.

        The point replaces the session's previous one. With `more`, a point that ended with a gap is
        solved again.
        """
        opened, name = self.problem(problem), point_id(problem, ram_bytes, deadline_s)
        point = opened.points.get(name)
        if point is None or not point.is_over:
            stored = await self.store.call(self.store.point, name)
            point = opened.points.get(name)  # another request may have added the point
            if stored is not None and (point is None or _is_newer(stored, point)):
                point = opened.points[name] = _without_running_solve(stored)
            elif stored is not None and point is not None:
                max_bound = stored.bound if point.value is None else min(stored.bound, point.value)
                point.bound = max(point.bound, max_bound)
        if point is None:
            point = Point(id=name, problem=problem, ram_bytes=ram_bytes, deadline_s=deadline_s)
            opened.points[name] = point
        page_session = self.session(session)
        previous, page_session.requested_point, page_session.problem = (
            page_session.requested_point,
            name,
            problem,
        )
        page_session.last_seen_s = time.monotonic()
        if previous is not None and previous != name:
            self._cancel_unrequested(previous)
        solves_again = more and not point.is_proved
        if name not in self.solves.running and (solves_again or not point.is_over):
            if not point.is_over:
                await self.solves.use_neighbour(opened, point)
            is_still_requested = page_session.requested_point == name and (
                solves_again or not point.is_over
            )
            if (
                is_still_requested and name not in self.solves.running
            ):  # the state has not changed during the wait
                self.solves.start_solve(opened, point)
        return opened.describe(point)

    def _cancel_unrequested(self, name: str) -> None:
        """Cancel the solve and the drawing of a point unless another session requests it."""
        if any(session.requested_point == name for session in self.sessions.values()):
            return
        self.solves.cancel(name)
        for opened in self.opened.values():
            point = opened.points.get(name)
            if point is None:
                continue
            if not point.is_over:
                point.state = "cancelled"
            if point.digest in self._drawings:
                self._unrequested_drawings.add(point.digest)

    # -- drawings --------------------------------------------------------------------------------

    async def answer(self, name: str, revision: int | None) -> bytes | None:
        """Return the drawing of a point as gzipped JSON.

        Return None if the point has no schedule, or if no session requests the point any more when
        a worker is free. Raise `GoneError` for an old revision.
        """
        opened, point = self.find(name)
        if point.value is None:
            return None
        if revision is not None and revision != point.revision:
            msg = f"revision {revision} is over: the newest one is {point.revision}"
            raise GoneError(msg)
        digest = point.digest
        self._unrequested_drawings.discard(digest)
        task = self._drawings.get(digest)
        if task is None:
            task = self._drawings[digest] = asyncio.create_task(self._draw(opened, point))
            task.add_done_callback(lambda _: self._discard_drawing(digest))
        return await asyncio.shield(task)

    def _discard_drawing(self, digest: str) -> None:
        self._drawings.pop(digest, None)
        self._unrequested_drawings.discard(digest)

    async def _draw(self, opened: OpenProblem, point: Point) -> bytes | None:
        """Return the stored drawing of a point, or draw it in a worker and store it.

        Return None if no session requests the point any more when a worker is free.
        """
        digest = point.digest
        name, answer_digest = point.id, digest
        if point.provisional and point.lender is not None:
            name, answer_digest = point.lender
        stored = await self.store.call(self.store.answer, name, answer_digest, self.drawn_by)
        if stored is not None:
            return stored
        job, schedule = (
            self.solves.make_job_with_proof(opened, point),
            await self.solves.schedule(point),
        )
        worker = await self.drawers.acquire()
        if digest in self._unrequested_drawings:  # the slider has moved during the wait
            self.drawers.release(worker)
            return None
        reply = await self.drawers.run_job_on(worker, {**job, "task": "draw"}, schedule)
        await self.store.call(self.store.save_answer, point.id, digest, self.drawn_by, reply.body)
        return reply.body

    async def export(self, name: str, kind: str) -> Frame:
        """Return a file about a point; raise `RefusedError` if it has no schedule."""
        opened, point = self.find(name)
        if point.value is None:
            msg = "there is no schedule yet to export"
            raise RefusedError(msg)
        job = self.solves.make_job_with_proof(opened, point)
        job |= {"task": "export", "kind": kind}
        return await self.drawers.run_job(job, await self.solves.schedule(point))

    async def why(self, problem: str, ram_bytes: int, deadline_s: float | None) -> dict[str, Any]:
        """Return the reasons why a RAM and a deadline may be infeasible."""
        opened = self.problem(problem)
        point = Point(id="", problem=problem, ram_bytes=ram_bytes, deadline_s=deadline_s)
        reply = await self.drawers.run_job(self.solves.make_job("why", opened, point))
        return reply.values

    # -- events ----------------------------------------------------------------------------------

    def add_listener(self, name: str) -> Listener:
        """Add an event stream to a session; its first event is the requested point."""
        session, listener = self.session(name), Listener()
        session.listeners.append(listener)
        if session.requested_point is not None:
            listener.notify("point", session.requested_point)
        return listener

    def close_listeners(self) -> None:
        """End all event streams."""
        for session in self.sessions.values():
            for listener in session.listeners:
                listener.close()

    def remove_listener(self, name: str, listener: Listener) -> None:
        """Remove an event stream from a session."""
        session = self.sessions.get(name)
        if session is not None and listener in session.listeners:
            session.listeners.remove(listener)
            session.last_seen_s = time.monotonic()

    def _notify_listeners(self, opened: OpenProblem, point: Point, *, front: bool = False) -> None:
        for session in self.sessions.values():
            for listener in session.listeners:
                if session.requested_point == point.id:
                    listener.notify("point", point.id)
                if front and session.problem == opened.name:
                    listener.notify("front", point.id)

    async def _clean_up(self) -> None:
        """Periodically cancel requests of closed pages; discard unused problems and sessions."""
        while True:
            await asyncio.sleep(1)
            now_s = time.monotonic()
            sessions = list(self.sessions.values())
            for session in sessions:
                if session.listeners or now_s - session.last_seen_s < REQUEST_LIFETIME_S:
                    continue
                requested, session.requested_point = session.requested_point, None
                if requested is not None:
                    self._cancel_unrequested(requested)
                if len(self.sessions) > MAX_KEPT_SESSIONS:
                    del self.sessions[session.name]
            for opened in self.opened.values():
                opened.discard_idle(
                    self.solves.running.keys() | {session.requested_point for session in sessions}
                )
            used_problems = {session.problem for session in self.sessions.values()}
            for name in [name for name in self.opened if name not in used_problems]:
                is_solving = any(point in self.solves.running for point in self.opened[name].points)
                if len(self.opened) > MAX_KEPT_PROBLEMS and not is_solving:
                    del self.opened[name]


def _without_running_solve(point: Point) -> Point:
    """Mark the unfinished solve of a stored point, begun by another server, as cancelled."""
    if not point.is_over:
        point.state = "cancelled"
    return point


def _is_newer(stored: Point, point: Point) -> bool:
    """Return whether the stored point is finished or has a better schedule than `point`."""
    if stored.is_over:
        return True
    return stored.value is not None and (point.value is None or stored.value < point.value)
