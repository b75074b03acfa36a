"""The explorer's HTTP API.

A visit of the printed address, ``/?token=T``, sets a cookie; nothing else is answered without it
(see `poetmodel.explore.guard`). Errors are ``{"detail": "a sentence"}``. All values are plain JSON
in SI units; bodies of requests are JSON.

``GET /``
    The page.
``GET /api/choices``
    ``{models: [{name, group}], devices: [{name, ram_bytes}], initial, version}``: what may be
    chosen, and what the command line asked for: a CHOICE, perhaps with ``ram_bytes`` and
    ``deadline_s``.
``POST /api/problems`` CHOICE
    Opens a problem: ``{problem, title, choice, graph, floor_bytes, keep_all_bytes, resident_bytes,
    device_ram_bytes, baseline_energy_j, objective: {minimize, baseline}, deadline: {least_s,
    default, single_pass_s, most_s, counts}, points}``. ``graph`` is what charts know of
    the graph, ``points`` all points with a schedule of their own. CHOICE has
    the fields of `poetmodel.explore.choice.ExplorerChoice`.
``POST /api/points`` ``{problem, ram_bytes, deadline_s, session, more}``
    Lets a session want a point, in place of the one that it wanted before, and returns the POINT at
    once. What is not over is solved; with ``more`` also what ended with a gap.
``GET /api/points/ID``
    The POINT as it is now.
``GET /api/events?session=S``
    Server-sent events: ``point``, a POINT, whenever what the session wants has changed, and once
    at the beginning; ``front``, a POINT of the same problem with a new schedule. A
    page that comes back states its wish anew: a wish lapses ten seconds after its page has gone.
``GET /api/points/ID/answer?revision=N``
    What is drawn of a point: ``{charts: {TYPE: data}, answers: [{question, word, text, mood}],
    facts, command}``, with the charts of the report by their types and what it says of one
    schedule; of a provisional point that of the neighbour. It waits until it is drawn. It never
    changes for a revision (``ETag``); one that is over redirects to the newest one. 204 where
    there is nothing to draw, or nobody wanted it any more.
``GET /api/problems/ID/why?ram_bytes=N&deadline_s=S``
    Which limits no schedule can keep, and what the minimum RAM consists of: ``{text, reasons, node,
    phase, least_bytes, missing_bytes, held: [{tensor, index, bytes, role}], workspace_bytes,
    state_bytes, shared_bytes, resident_bytes, single_pass_s}``.
``GET /api/points/ID/export/KIND``
    A file: ``schedule``, ``plan``, ``report`` or ``command``.

A POINT has the fields of `poetmodel.explore.points.Point`, without ``digest`` and ``proof``, and
``gap`` and ``bound_j``, the bound on the energy of a step.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator  # noqa: TC003 - FastAPI reads it
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from poetmodel.errors import PoetModelError
from poetmodel.explore.choice import ExplorerChoice  # noqa: TC001 - FastAPI reads it
from poetmodel.explore.coordination import Coordinator, GoneError
from poetmodel.explore.guard import Guard
from poetmodel.explore.pool import WorkerError
from poetmodel.files import installed_version
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.explore.choice import Catalogue

KEEP_ALIVE_S: Final = 10.0
"""How often a silent stream of events says that it is alive [s]."""
LEAST_PAUSE_S: Final = 0.05
"""Least time between two batches of events of a session [s]."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Session = Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Ram = Annotated[int, Field(ge=1, le=MAX_BYTES, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
Kind = Literal["schedule", "plan", "report", "command"]


class Wish(BaseModel):
    """The point that a session wants."""

    model_config = ConfigDict(extra="forbid")

    problem: Name
    ram_bytes: Ram
    deadline_s: Seconds | None = None
    session: Name
    more: bool = False


def application(  # noqa: C901 - the routes, each a few lines
    coordinator: Coordinator,
    catalogue: Catalogue,
    *,
    page: Callable[[], str],
    initial: Mapping[str, Any],
    token: str,
    port: int,
) -> Guard:
    """Return the explorer as an ASGI application."""

    @asynccontextmanager
    async def living(_: FastAPI) -> AsyncIterator[None]:
        await coordinator.start()
        yield
        await coordinator.stop()

    app = FastAPI(lifespan=living, docs_url=None, redoc_url=None, openapi_url=None)
    _sentences(app)

    @app.get("/", response_class=HTMLResponse)
    def home() -> HTMLResponse:
        return HTMLResponse(page())

    @app.get("/api/choices")
    def choices() -> dict[str, Any]:
        return {
            "models": catalogue.models(),
            "devices": catalogue.device_list(),
            "initial": dict(initial),
            "version": installed_version("poetmodel") or "",
        }

    @app.post("/api/problems")
    async def open_problem(choice: ExplorerChoice) -> Response:
        opened = await coordinator.open(choice)
        points = [opened.describe(point) for point in opened.front()]
        added = json.dumps({"points": points}, allow_nan=False)
        # The graph is JSON already, an object without its last brace.
        return Response(f"{opened.drawn}, {added[1:]}", media_type="application/json")

    @app.post("/api/points")
    async def want(wish: Wish) -> dict[str, Any]:
        return await coordinator.want(
            wish.session, wish.problem, wish.ram_bytes, wish.deadline_s, more=wish.more
        )

    @app.get("/api/points/{point}")
    async def read_point(point: Name) -> dict[str, Any]:
        opened, known = coordinator.find(point)
        return opened.describe(known)

    @app.get("/api/points/{point}/answer")
    async def answer(request: Request, point: Name, revision: int | None = None) -> Response:
        _, known = coordinator.find(point)
        if revision is not None and known.value is not None and revision != known.revision:
            return RedirectResponse(f"/api/points/{point}/answer?revision={known.revision}")
        tag = f'"{known.digest}-{coordinator.drawn_by}"'
        headers = {"Cache-Control": "private, no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        body = await coordinator.answer(point, revision)
        if body is None:
            return Response(status_code=204)
        headers["Content-Encoding"] = "gzip"
        return Response(body, media_type="application/json", headers=headers)

    @app.get("/api/points/{point}/export/{kind}")
    async def export(point: Name, kind: Kind) -> Response:
        reply = await coordinator.export(point, kind)
        headers = {"Content-Disposition": f'attachment; filename="{reply.values["name"]}"'}
        return Response(reply.body, media_type=reply.values["media"], headers=headers)

    @app.get("/api/problems/{problem}/why")
    async def why(
        problem: Name,
        ram_bytes: Annotated[int, Query(ge=1, le=MAX_BYTES)],
        deadline_s: Annotated[float | None, Query(gt=0, le=1e12)] = None,
    ) -> dict[str, Any]:
        return await coordinator.why(problem, ram_bytes, deadline_s)

    @app.get("/api/events", response_class=EventSourceResponse)
    async def events(session: Session) -> AsyncIterator[ServerSentEvent]:
        async for event in _events(coordinator, session):
            yield event

    return Guard(app, token=token, port=port)


async def _events(coordinator: Coordinator, session: str) -> AsyncIterator[ServerSentEvent]:
    import asyncio

    listener = coordinator.listen(session)
    try:
        yield ServerSentEvent(comment="listening", retry=500)
        while True:
            news = await listener.next(KEEP_ALIVE_S)
            if listener.over:
                return
            if not news:
                yield ServerSentEvent(comment="alive")
            for kind, name in news:
                try:
                    opened, point = coordinator.find(name)
                except GoneError:
                    continue
                described = opened.describe(point)
                yield ServerSentEvent(event=kind, data=described)
            await asyncio.sleep(LEAST_PAUSE_S)
    finally:
        coordinator.leave(session, listener)


def _sentences(app: FastAPI) -> None:
    """Let every error be a sentence."""

    def say(status: int, text: str) -> JSONResponse:
        return JSONResponse({"detail": text}, status)

    @app.exception_handler(RequestValidationError)
    def _unusable(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = [
            f"{'.'.join(map(str, fault['loc'][1:])) or 'request'}: {fault['msg']}"
            for fault in error.errors()[:5]
        ]
        return say(422, "; ".join(faults))

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> JSONResponse:
        allowed = Headers(error.headers).get("allow")
        if allowed is None:
            return say(error.status_code, f"{error.detail}: there is nothing at this address")
        response = say(error.status_code, f"{request.method}: this address takes {allowed}")
        response.headers["allow"] = allowed
        return response

    @app.exception_handler(GoneError)
    def _gone(_: Request, error: GoneError) -> JSONResponse:
        return say(410, str(error))

    @app.exception_handler(PoetModelError)
    def _refused(_: Request, error: PoetModelError) -> JSONResponse:
        return say(409, str(error))

    @app.exception_handler(WorkerError)
    def _broken(_: Request, error: WorkerError) -> JSONResponse:
        return say(500, str(error))

    @app.exception_handler(Exception)
    def _failed(_: Request, error: Exception) -> JSONResponse:
        return say(500, f"the explorer failed ({type(error).__name__}); the terminal says more")
