"""What all sessions share: problems, points, who wants which, and what the workers do about it.

A session wants one point at a time. A point that somebody wants and that is not over is solved, the
newest wish first; one that nobody wants any more is not. Everything here runs in the event loop of
the server, and nothing takes long.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.explore.crew import Crew, RefusedError, WorkerError
from poetmodel.explore.points import FIGURES, Point, known_bound, neighbour, point_id
from poetmodel.explore.sessions import Listener, Session
from poetmodel.result import relative_gap

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from collections.abc import Set as AbstractSet

    from poetmodel.explore.choice import Choice
    from poetmodel.explore.frames import Frame
    from poetmodel.explore.store import Store

KEPT_PROBLEMS: Final = 64
"""Problems that are kept beside those that somebody looks at."""
KEPT_STOPS: Final = 500
"""Points of a problem that are kept though nothing of their own is known."""
KEPT_SESSIONS: Final = 500
LINGER_S: Final = 10.0
"""How long a wish stays after nobody listens to its session any more, for a reload [s]."""
SAVE_EVERY_S: Final = 1.0
"""How often a bound alone is written to the store [s]."""
NO_PROOF: Final = {"termination": "interrupted", "build_s": 0.0, "solve_s": 0.0, "versions": {}}


class GoneError(Exception):
    """Something that was asked for by a name that is not known, or not any more."""


@dataclass(slots=True)
class Opened:
    """A problem that somebody looks at."""

    name: str
    facts: dict[str, Any]
    """What the worker said of it."""
    drawn: str
    """The same for the page with the graph, as JSON, but for the last brace."""
    points: dict[str, Point] = field(default_factory=dict)

    def told(self, point: Point, *, brief: bool = False) -> dict[str, Any]:
        """Return a point as the page gets it, a brief one without its history."""
        objective = self.facts["objective"]
        told = point.to_dict(objective["baseline"], minimize=objective["minimize"])
        if brief:
            del told["history"]
        return told

    def forget(self, used: AbstractSet[str | None]) -> None:
        """Forget the oldest stops of a slider that left nothing behind."""
        idle = [
            name
            for name, point in self.points.items()
            if not point.is_over and (point.value is None or point.provisional) and name not in used
        ]
        for name in idle[:-KEPT_STOPS]:
            del self.points[name]

    def front(self) -> list[Point]:
        """Return the points that have a schedule of their own."""
        points = self.points.values()
        return [point for point in points if point.value is not None and not point.provisional]


class Board:
    """Problems, points, sessions and workers of one server."""

    def __init__(
        self,
        store: Store,
        *,
        solvers: Crew,
        drawers: Crew,
        search: dict[str, Any],
        drawn_by: str,
    ) -> None:
        self.store = store
        self.solvers = solvers
        self.drawers = drawers
        self.search = search
        self.drawn_by = drawn_by
        self.opened: OrderedDict[str, Opened] = OrderedDict()
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        self._reading: dict[Choice, asyncio.Task[Opened]] = {}
        self._choices: OrderedDict[Choice, str] = OrderedDict()
        self._solves: dict[str, asyncio.Task[None]] = {}
        self._drawings: dict[str, asyncio.Task[bytes | None]] = {}
        self._schedules: dict[str, bytes] = {}
        self._unwanted: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Start the workers."""
        await asyncio.gather(self.solvers.start(), self.drawers.start())
        self._go(self._tidy())

    async def stop(self) -> None:
        """End everything; what was found is in the store."""
        tasks = [*self._drawings.values(), *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(self.solvers.stop(), self.drawers.stop())

    # -- problems --------------------------------------------------------------------------------

    async def open(self, choice: Choice) -> Opened:
        """Return the problem of a choice with all its points."""
        name = self._choices.get(choice)
        found = None if name is None else self.opened.get(name)
        if found is None:
            task = self._reading.get(choice)
            if task is None:
                task = self._reading[choice] = asyncio.create_task(self._read(choice))
                task.add_done_callback(lambda _: self._reading.pop(choice, None))
            found = await asyncio.shield(task)
        self.opened.move_to_end(found.name)
        return found

    async def _read(self, choice: Choice) -> Opened:
        reply = await self.drawers.do({"task": "prepare", "choice": choice.model_dump()})
        name = reply.values["problem"]
        found = self.opened.get(name)
        if found is None:
            points = await self.store.call(self.store.points, name)
            found = Opened(name, reply.values, reply.body.decode().removesuffix("}"))
            found.points = {point.id: _left(point) for point in points}
            self.opened[name] = found
        self._choices[choice] = name
        return found

    def problem(self, name: str) -> Opened:
        """Return an open problem."""
        found = self.opened.get(name)
        if found is None:
            msg = "this problem is not open here: choose model and device again"
            raise GoneError(msg)
        return found

    def find(self, name: str) -> tuple[Opened, Point]:
        """Return a point of an open problem."""
        for opened in reversed(self.opened.values()):
            if name in opened.points:
                return opened, opened.points[name]
        msg = "this point is not known here: choose model and device again"
        raise GoneError(msg)

    # -- wishes ----------------------------------------------------------------------------------

    def session(self, name: str) -> Session:
        """Return a session, a new one if it is not known."""
        found = self.sessions.setdefault(name, Session(name))
        self.sessions.move_to_end(name)
        return found

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
            point = opened.points.get(name)  # it may have come meanwhile
            if stored is not None and (point is None or _is_ahead(stored, point)):
                point = opened.points[name] = _left(stored)
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
        if name not in self._solves and (again or not point.is_over):
            if not point.is_over:
                await self._lend(opened, point)
            wanted = asking.wants == name and (again or not point.is_over)
            if wanted and name not in self._solves:  # nothing came meanwhile
                point.state = "waiting"
                self._solves[name] = self._go(self._solve(opened, point))
        return opened.told(point)

    def _drop(self, name: str) -> None:
        """Cancel the solve of a point that nobody wants."""
        if any(session.wants == name for session in self.sessions.values()):
            return
        task = self._solves.pop(name, None)
        if task is not None:
            task.cancel()
        for opened in self.opened.values():
            point = opened.points.get(name)
            if point is None:
                continue
            if not point.is_over:
                point.state = "cancelled"
            if point.digest in self._drawings:
                self._unwanted.add(point.digest)

    async def _lend(self, opened: Opened, point: Point) -> None:
        """Let a point begin with the best schedule and bound of its neighbours."""
        others = [other for other in opened.points.values() if other is not point]
        point.bound = max(point.bound, known_bound(point, others))
        near = neighbour(point, others)
        if near is None or (point.value is not None and point.value <= (near.value or 0.0)):
            return
        schedule = await self._schedule(near)
        if not schedule or near.value is None:
            return
        if point.value is not None and point.value <= near.value:
            return  # one of its own came meanwhile
        found = {name: getattr(near, name) for name in FIGURES}
        point.provisional, point.neighbour_bytes = True, near.ram_bytes
        point.lender = near.lender if near.provisional else (near.id, near.digest)
        point.bound = min(point.bound, near.value)
        point.proof = {**NO_PROOF, **near.proof, "termination": "interrupted"}
        if relative_gap(near.value, point.bound) <= self.search["gap"]:  # what is known proves it
            point.state, point.status, point.provisional = "done", "optimal", False
            point.proof["termination"] = "proved"
        point.take(found, schedule)
        point.note()
        if not point.provisional:
            await self._save(point, schedule)

    async def _schedule(self, point: Point) -> bytes:
        """Return the packed schedule of a point, which is another one's while it is provisional."""
        name = point.lender[0] if point.provisional and point.lender else point.id
        found = self._schedules.get(name)
        return await self.store.call(self.store.schedule, name) if found is None else found

    # -- solves ----------------------------------------------------------------------------------

    async def _solve(self, opened: Opened, point: Point) -> None:
        first: asyncio.Task[None] | None = None
        if point.value is None:
            first = asyncio.create_task(self._begin(opened, point))
        try:
            await self._run(opened, point)
        except RefusedError as error:
            self._fail(opened, point, str(error))
        except WorkerError as error:
            self._fail(opened, point, f"{error}; move the slider to try again")
        finally:
            if first is not None:
                first.cancel()
            if self._solves.get(point.id) is asyncio.current_task():
                del self._solves[point.id]
            await self._save(point, self._schedules.get(point.id))
            if point.id not in self._solves:
                self._schedules.pop(point.id, None)

    async def _begin(self, opened: Opened, point: Point) -> None:
        """Show something before the solve has anything."""
        with contextlib.suppress(WorkerError, RefusedError):  # the solve meets them, too
            reply = await self.drawers.do(self._job("begin", opened, point))
            if point.value is None and "found" in reply.values:
                self._take(opened, point, reply.values["found"], reply.body)

    async def _run(self, opened: Opened, point: Point) -> None:
        mine, before_s, saved_s = asyncio.current_task(), point.seconds, time.monotonic()
        start = await self._schedule(point)

        def told(frame: Frame) -> None:
            nonlocal saved_s
            if self._solves.get(point.id) is not mine:  # nobody wants it any more
                return
            values = frame.values
            point.state = "solving"
            point.seconds = before_s + values["seconds"]
            point.bound = max(point.bound, values["bound"])
            if "found" in values:
                self._take(opened, point, values["found"], frame.body)
            else:
                point.note()
                self._tell(opened, point)
                if time.monotonic() - saved_s > SAVE_EVERY_S:
                    saved_s = time.monotonic()
                    self._go(self._save(point, None))

        job = {**self._job("solve", opened, point), "search": self.search, "bound": point.bound}
        reply = await self.solvers.do(job, start, told)
        found, schedule = reply.values.get("found"), reply.body
        if found is None or (point.value is not None and point.value < found["value"]):
            schedule = await self._schedule(point)
        ended = replace(point, history=list(point.history))
        ended.end(reply.values, schedule, before_s=before_s)
        await self._save(ended, schedule or None)  # before anybody hears of it
        point.end(reply.values, schedule, before_s=before_s)
        if schedule:
            self._schedules[point.id] = schedule
        self._tell(opened, point, front=True)

    def _take(self, opened: Opened, point: Point, found: dict[str, Any], schedule: bytes) -> None:
        """Take over a schedule that a worker found, if it is better than what is known."""
        better = point.value is None or found["value"] < point.value
        if better:
            point.provisional = False
            point.take(found, schedule)
            point.proof = point.proof or dict(NO_PROOF)
            self._schedules[point.id] = schedule
            self._go(self._save(point, schedule))
        elif point.provisional and found["value"] == point.value:
            self._own(point, schedule)
        point.note()
        self._tell(opened, point, front=better)

    def _own(self, point: Point, schedule: bytes) -> None:
        """Let a point keep a schedule as its own that it had from a neighbour."""
        point.provisional = False
        point.revise(schedule)
        self._schedules[point.id] = schedule
        self._go(self._save(point, schedule))

    def _fail(self, opened: Opened, point: Point, reason: str) -> None:
        point.state, point.reason = "failed", reason
        self._tell(opened, point)

    def _job(self, task: str, opened: Opened, point: Point) -> dict[str, Any]:
        return {
            "task": task,
            "choice": opened.facts["choice"],
            "ram_bytes": point.ram_bytes,
            "deadline_s": point.deadline_s,
        }

    async def _save(self, point: Point, schedule: bytes | None) -> None:
        """Write a point, unless it has no schedule, or one of another point."""
        if point.is_over or (point.value is not None and not point.provisional):
            copy = replace(point, history=list(point.history))
            await self.store.call(self.store.save, copy, schedule)

    # -- answers ---------------------------------------------------------------------------------

    async def answer(self, name: str, revision: int | None) -> bytes | None:
        """Return what is drawn of a point, gzipped JSON.

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
        job, schedule = self._proved(opened, point), await self._schedule(point)
        worker = await self.drawers.take()
        if digest in self._unwanted:  # somebody dragged on while this one waited
            self.drawers.give_back(worker)
            return None
        reply = await self.drawers.let(worker, {**job, "task": "draw"}, schedule)
        await self.store.call(self.store.save_answer, point.id, digest, self.drawn_by, reply.body)
        return reply.body

    def _proved(self, opened: Opened, point: Point) -> dict[str, Any]:
        """Return a job about the schedule of a point with its certificate."""
        proof = {
            **NO_PROOF,
            **point.proof,
            "status": point.status or "feasible",
            "bound": point.bound,
            "final": point.is_over,
            "history": point.history,
        }
        return {**self._job("", opened, point), "proof": proof, "search": self.search}

    async def export(self, name: str, kind: str) -> Frame:
        """Return a file about a point."""
        opened, point = self.find(name)
        if point.value is None and kind != "c":
            msg = "there is no schedule yet to export"
            raise RefusedError(msg)
        job = {**self._proved(opened, point), "task": "export", "kind": kind}
        crew = self.solvers if kind == "c" else self.drawers
        return await crew.do(job, await self._schedule(point))

    async def why(self, problem: str, ram_bytes: int, deadline_s: float | None) -> dict[str, Any]:
        """Return what binds at a RAM and a deadline."""
        opened = self.problem(problem)
        point = Point(id="", problem=problem, ram_bytes=ram_bytes, deadline_s=deadline_s)
        reply = await self.drawers.do(self._job("why", opened, point))
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

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something beside everything else."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def _tidy(self) -> None:
        """Let wishes of closed pages lapse, and forget problems that nobody looks at."""
        while True:
            await asyncio.sleep(1)
            now_s = time.monotonic()
            for session in list(self.sessions.values()):
                if session.listeners or now_s - session.alone_s < LINGER_S:
                    continue
                wanted, session.wants = session.wants, None
                if wanted is not None:
                    self._drop(wanted)
                if len(self.sessions) > KEPT_SESSIONS:
                    del self.sessions[session.name]
            for opened in self.opened.values():
                opened.forget(self._solves.keys() | {one.wants for one in self.sessions.values()})
            used = {session.problem for session in self.sessions.values()}
            for name in [name for name in self.opened if name not in used]:
                busy = any(point in self._solves for point in self.opened[name].points)
                if len(self.opened) > KEPT_PROBLEMS and not busy:
                    del self.opened[name]


def _left(point: Point) -> Point:
    """Return a stored point: a solve that another server began, or left behind, is none here."""
    if not point.is_over:
        point.state = "cancelled"
    return point


def _is_ahead(stored: Point, point: Point) -> bool:
    """Return whether another server knows more of a point."""
    if stored.is_over:
        return True
    return stored.value is not None and (point.value is None or stored.value < point.value)
