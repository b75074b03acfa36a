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

from poetmodel.explore.points import OpenProblem, Point, make_point_id
from poetmodel.explore.pool import RefusedError, WorkerPool
from poetmodel.explore.solving import SolveManager

if TYPE_CHECKING:
    from poetmodel.explore.settings import ExplorerSettings
    from poetmodel.explore.store import PointStore
    from poetmodel.explore.tasks import Frame
    from poetmodel.solver.request import SearchOptions

MAX_CACHED_PROBLEMS: Final = 64
"""Number of problems in memory, those of sessions included, above which unused problems are
discarded."""
MAX_CACHED_SESSIONS: Final = 500
"""Number of sessions in memory, those of open pages included, above which sessions of closed
pages are discarded."""
REQUEST_LIFETIME_S: Final = 10.0
"""Time for which the request of a session without listeners stays valid, for a reload [s]."""


class Listener:
    """The unsent events of a stream to a browser: pairs (kind, id of a point), each queued once.

    The kinds are ``point``, a change of the requested point, and ``front``, a new schedule or the
    end of a solve of any point of the problem.
    """

    def __init__(self) -> None:
        self._pending_events: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._signal = asyncio.Event()
        self.is_closed = False

    def notify(self, kind: str, point_id: str) -> None:
        """Queue an event about a point, unless it is queued already."""
        self._pending_events[kind, point_id] = None
        self._signal.set()

    def close(self) -> None:
        """End the stream, because the server stops."""
        self.is_closed = True
        self._signal.set()

    async def wait_for_events(self, max_s: float) -> list[tuple[str, str]]:
        """Remove and return queued events; wait at most `max_s` [s] for one, or for the end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signal.wait(), max_s)
        self._signal.clear()
        events, self._pending_events = list(self._pending_events), OrderedDict()
        return events


@dataclass(slots=True)
class PageSession:
    """A page in a browser, and the point that it requests."""

    id: str
    """Id of the session."""
    requested_point: str | None = None
    """Id of the requested point; None before the first request, and after it has expired."""
    problem: str | None = None
    """Id of the problem of the last requested point."""
    listeners: list[Listener] = field(default_factory=list)
    last_seen_s: float = field(default_factory=time.monotonic)
    """Time of the last contact, if there is no listener, on the monotonic clock [s]."""


class GoneError(Exception):
    """Error for a request about an unknown or discarded problem or point, or an old revision."""


class Coordinator:
    """Opens problems, solves requested points, notifies sessions; quick workers read and draw."""

    def __init__(
        self,
        store: PointStore,
        *,
        solve_workers: WorkerPool,
        quick_workers: WorkerPool,
        search: SearchOptions,
    ) -> None:
        self.store = store
        self.solve_workers = solve_workers
        self.quick_workers = quick_workers
        self.solves = SolveManager(
            store,
            solve_workers=solve_workers,
            quick_workers=quick_workers,
            search=search,
            notify=self._notify_listeners,
        )
        self.open_problems: OrderedDict[str, OpenProblem] = OrderedDict()
        self.sessions: OrderedDict[str, PageSession] = OrderedDict()
        self._problem_tasks: dict[ExplorerSettings, asyncio.Task[OpenProblem]] = {}
        self._problem_ids: OrderedDict[ExplorerSettings, str] = OrderedDict()
        self._drawing_tasks: dict[str, asyncio.Task[bytes | None]] = {}
        self._unrequested_digests: set[str] = set()
        self._cleanup_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start workers and periodic clean-up; raise `WorkerError` if a worker does not start."""
        await asyncio.gather(self.solve_workers.start(), self.quick_workers.start())
        self._cleanup_task = asyncio.create_task(self._clean_up())

    async def stop(self) -> None:
        """Cancel solves, drawings and the clean-up, and stop the workers.

        The store then has each point that is finished or has a schedule of its own.
        """
        tasks = [*self._drawing_tasks.values(), *filter(None, [self._cleanup_task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(self.solves.stop(), *tasks, return_exceptions=True)
        await asyncio.gather(self.solve_workers.stop(), self.quick_workers.stop())

    # -- problems --------------------------------------------------------------------------------

    async def open(self, settings: ExplorerSettings) -> OpenProblem:
        """Return the open problem of some settings; if it is not open, read its graph and points.

        Concurrent calls share one read. The problem becomes the last to be discarded.
        """
        problem_id = self._problem_ids.get(settings)
        open_problem = None if problem_id is None else self.open_problems.get(problem_id)
        if open_problem is None:
            read_task = self._problem_tasks.get(settings)
            if read_task is None:
                read_task = self._problem_tasks[settings] = asyncio.create_task(
                    self._read_problem(settings)
                )
                read_task.add_done_callback(lambda _: self._problem_tasks.pop(settings, None))
            open_problem = await asyncio.shield(read_task)
        self.open_problems.move_to_end(open_problem.id)
        return open_problem

    async def _read_problem(self, settings: ExplorerSettings) -> OpenProblem:
        """Prepare the problem of some settings in a worker, and return it as an open problem.

        Registers a new problem with its stored points, of which unfinished ones become
        ``cancelled``, and its id in `_problem_ids`.
        """
        reply = await self.quick_workers.run_job({"task": "prepare_problem", "settings": settings})
        problem_id = reply.values["problem"]
        open_problem = self.open_problems.get(problem_id)
        if open_problem is None:
            points = await self.store.call(self.store.load_points, problem_id)
            open_problem = OpenProblem(problem_id, settings, reply.values)
            open_problem.points = {point.id: _mark_cancelled(point) for point in points}
            self.open_problems[problem_id] = open_problem
        self._problem_ids[settings] = problem_id
        return open_problem

    def find_problem(self, problem_id: str) -> OpenProblem:
        """Return an open problem by its id; raise `GoneError` if it is not open."""
        open_problem = self.open_problems.get(problem_id)
        if open_problem is None:
            msg = "this problem is not open here: choose model and device again"
            raise GoneError(msg)
        return open_problem

    def find_point(self, point_id: str) -> tuple[OpenProblem, Point]:
        """Return the problem of a point and the point, by its id; raise `GoneError` if unknown."""
        for open_problem in reversed(self.open_problems.values()):
            if point_id in open_problem.points:
                return open_problem, open_problem.points[point_id]
        msg = "this point is not known here: choose model and device again"
        raise GoneError(msg)

    # -- requests --------------------------------------------------------------------------------

    def find_or_add_session(self, session_id: str) -> PageSession:
        """Return the session of an id; create it if it is unknown."""
        session = self.sessions.setdefault(session_id, PageSession(session_id))
        self.sessions.move_to_end(session_id)
        return session

    async def request_point(
        self,
        session_id: str,
        problem_id: str,
        ram_bytes: int,
        deadline_s: float | None,
        *,
        solve_again: bool = False,
    ) -> dict[str, Any]:
        """Set the requested point of a session, start its solve if needed, and return its values.

        An unfinished point first takes better records of the store and of other points. The solve
        of the session's previous point is cancelled unless another session requests it. With
        `solve_again`, a point that ended without a proof is solved again.
        """
        open_problem, point_id = (
            self.find_problem(problem_id),
            make_point_id(problem_id, ram_bytes, deadline_s),
        )
        point = open_problem.points.get(point_id)
        if point is None or not point.is_finished:
            stored_point = await self.store.call(self.store.load_point, point_id)
            point = open_problem.points.get(point_id)  # another request may have added the point
            is_running = point_id in self.solves.running  # its solve updates the point
            if stored_point is not None and (
                point is None or (not is_running and _is_better(stored_point, point))
            ):
                point = open_problem.points[point_id] = _mark_cancelled(stored_point)
            elif stored_point is not None and point is not None:
                max_bound = (
                    stored_point.bound
                    if point.value is None
                    else min(stored_point.bound, point.value)
                )
                point.bound = max(point.bound, max_bound)
        if point is None:
            point = Point(
                id=point_id, problem=problem_id, ram_bytes=ram_bytes, deadline_s=deadline_s
            )
            open_problem.points[point_id] = point
        page_session = self.find_or_add_session(session_id)
        previous_id, page_session.requested_point, page_session.problem = (
            page_session.requested_point,
            point_id,
            problem_id,
        )
        page_session.last_seen_s = time.monotonic()
        if previous_id is not None and previous_id != point_id:
            self._cancel_unrequested(previous_id)
        must_solve_again = solve_again and not point.is_proved
        if point_id not in self.solves.running and (must_solve_again or not point.is_finished):
            if not point.is_finished:
                await self.solves.use_neighbour(open_problem, point)
            is_still_requested = page_session.requested_point == point_id and (
                must_solve_again or not point.is_finished
            )
            # No other call has started the solve during the wait.
            if is_still_requested and point_id not in self.solves.running:
                self.solves.start_solve(open_problem, point)
        return open_problem.describe(point)

    def _cancel_unrequested(self, point_id: str) -> None:
        """Cancel solve and queued drawing of a point unless a session requests the point."""
        if any(session.requested_point == point_id for session in self.sessions.values()):
            return
        self.solves.cancel(point_id)
        for open_problem in self.open_problems.values():
            point = open_problem.points.get(point_id)
            if point is None:
                continue
            if not point.is_finished:
                point.state = "cancelled"
            if point.digest in self._drawing_tasks:
                self._unrequested_digests.add(point.digest)

    # -- drawings --------------------------------------------------------------------------------

    async def load_drawing(self, point_id: str, revision: int | None) -> bytes | None:
        """Return the drawing of a point as gzipped JSON; `revision` None stands for the newest.

        None if the point has no schedule, or if no session requests the point any more when a
        worker is free. Calls for one revision share one drawing. Other revisions raise `GoneError`.
        """
        open_problem, point = self.find_point(point_id)
        if point.value is None:
            return None
        if revision is not None and revision != point.revision:
            msg = f"revision {revision} is over: the newest one is {point.revision}"
            raise GoneError(msg)
        digest = point.digest
        self._unrequested_digests.discard(digest)
        task = self._drawing_tasks.get(digest)
        if task is None:
            task = self._drawing_tasks[digest] = asyncio.create_task(
                self._draw(open_problem, point)
            )
            task.add_done_callback(lambda _: self._discard_drawing(digest))
        return await asyncio.shield(task)

    def _discard_drawing(self, digest: str) -> None:
        self._drawing_tasks.pop(digest, None)
        self._unrequested_digests.discard(digest)

    async def _draw(self, open_problem: OpenProblem, point: Point) -> bytes | None:
        """Draw a point in a worker; None if no session requests it when a worker is free."""
        digest, schedule = point.digest, await self.solves.load_schedule(point)
        job = self.solves.make_job_with_proof("draw_point", open_problem, point)
        worker = await self.quick_workers.acquire()
        if digest in self._unrequested_digests:  # the slider has moved during the wait
            self.quick_workers.release(worker)
            return None
        reply = await self.quick_workers.run_job_on(worker, job, schedule)
        return reply.body

    async def export(self, point_id: str, file_kind: str) -> Frame:
        """Return a file about a point: ``schedule``, ``plan``, ``report`` or ``command``.

        Raises `GoneError` for an unknown point, `RefusedError` for a point without a schedule.
        """
        open_problem, point = self.find_point(point_id)
        if point.value is None:
            msg = "there is no schedule yet to export"
            raise RefusedError(msg)
        job = self.solves.make_job_with_proof("export_point", open_problem, point)
        job["kind"] = file_kind
        return await self.quick_workers.run_job(job, await self.solves.load_schedule(point))

    async def explain_infeasibility(
        self, problem_id: str, ram_bytes: int, deadline_s: float | None
    ) -> dict[str, Any]:
        """Return the values of `answers.explain_infeasibility` for a RAM budget and a deadline."""
        open_problem = self.find_problem(problem_id)
        point = Point(id="", problem=problem_id, ram_bytes=ram_bytes, deadline_s=deadline_s)
        reply = await self.quick_workers.run_job(
            self.solves.make_job("explain_infeasibility", open_problem, point)
        )
        return reply.values

    # -- events ----------------------------------------------------------------------------------

    def add_listener(self, session_id: str) -> Listener:
        """Add an event stream to a session, which is created if unknown; return its listener."""
        session, listener = self.find_or_add_session(session_id), Listener()
        session.listeners.append(listener)
        if session.requested_point is not None:
            listener.notify("point", session.requested_point)
        return listener

    def close_listeners(self) -> None:
        """End all event streams."""
        for session in self.sessions.values():
            for listener in session.listeners:
                listener.close()

    def remove_listener(self, session_id: str, listener: Listener) -> None:
        """Remove an event stream from a session, and store the time as its last contact."""
        session = self.sessions.get(session_id)
        if session is not None and listener in session.listeners:
            session.listeners.remove(listener)
            session.last_seen_s = time.monotonic()

    def _notify_listeners(
        self, open_problem: OpenProblem, point: Point, *, has_new_schedule: bool = False
    ) -> None:
        """Queue ``point`` for sessions that request it, and a new schedule (``front``) for all."""
        for session in self.sessions.values():
            for listener in session.listeners:
                if session.requested_point == point.id:
                    listener.notify("point", point.id)
                if has_new_schedule and session.problem == open_problem.id:
                    listener.notify("front", point.id)

    async def _clean_up(self) -> None:
        """Each second, end expired requests of closed pages, and discard idle points.

        Cancels solves that no session requests any more. Above `MAX_CACHED_SESSIONS` and
        `MAX_CACHED_PROBLEMS`, discards sessions of expired requests, and problems without sessions
        and solves.
        """
        while True:
            await asyncio.sleep(1)
            now_s = time.monotonic()
            sessions = list(self.sessions.values())
            for session in sessions:
                if session.listeners or now_s - session.last_seen_s < REQUEST_LIFETIME_S:
                    continue
                requested_id, session.requested_point = session.requested_point, None
                if requested_id is not None:
                    self._cancel_unrequested(requested_id)
                if len(self.sessions) > MAX_CACHED_SESSIONS:
                    del self.sessions[session.id]
            for open_problem in self.open_problems.values():
                open_problem.discard_idle(
                    self.solves.running.keys() | {session.requested_point for session in sessions}
                )
            used_problems = {session.problem for session in self.sessions.values()}
            for problem_id in [
                problem_id for problem_id in self.open_problems if problem_id not in used_problems
            ]:
                is_solving = any(
                    point in self.solves.running for point in self.open_problems[problem_id].points
                )
                if len(self.open_problems) > MAX_CACHED_PROBLEMS and not is_solving:
                    del self.open_problems[problem_id]


def _mark_cancelled(point: Point) -> Point:
    """Mark a stored point as ``cancelled`` unless it is ``done``; return the point."""
    if not point.is_finished:
        point.state = "cancelled"
    return point


def _is_better(stored_point: Point, point: Point) -> bool:
    if stored_point.is_finished:
        return True
    return stored_point.value is not None and (
        point.value is None or stored_point.value < point.value
    )
