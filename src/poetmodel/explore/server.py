"""The explorer's HTTP API.

A visit of the printed address, ``/?token=T``, sets a cookie; other requests are rejected without it
(see `poetmodel.explore.guard`). Errors are ``{"detail": "a sentence"}``: 410 for an unknown problem
or point, 422 for invalid values, 409 for a refused request, 500 for a failure, 403 or 413 for a
request that the guard rejects, and the statuses of HTTP for an unknown address or method. Values
are plain JSON in SI units; bodies of requests are JSON.

``GET /``
    The page.
``GET /api/choices``
    ``{models: [{name, group}], devices: [{name, ram_bytes}], initial, version}``: the available
    choices, and the initial SETTINGS of the command line, with ``ram_bytes`` and ``deadline_s``,
    null if not given.
``POST /api/problems`` SETTINGS
    Opens a problem: ``{problem, title, settings, graph, floor_bytes, keep_all_bytes,
    resident_bytes, device_ram_bytes, whole_step, baseline_energy_j, objective: {minimize,
    baseline}, deadline: {min_s, default, single_pass_s, max_s, counts}, points}``. ``graph`` has
    the data of the graph for charts, ``points`` all points with a schedule of their own.
    ``whole_step`` has the fields of `poetmodel.device.ram.WholeStep`, or is null. SETTINGS has the
    fields of `poetmodel.explore.settings.ExplorerSettings.to_dict`.
``POST /api/points`` ``{problem, ram_bytes, deadline_s, session, more}``
    Sets the requested point of a session and returns the POINT before it is solved. An unfinished
    point is solved; with ``more`` also a point that ended without a proof.
``GET /api/points/ID``
    The current POINT.
``GET /api/events?session=S``
    Server-sent events: ``point``, the requested POINT, when it has changed, and once at the
    beginning; ``front``, a POINT of the same problem with a new schedule or a finished solve. A
    request expires ten seconds after its page was closed, so a page that reconnects repeats it.
``GET /api/points/ID/answer?revision=N``
    The drawing of a point: ``{charts: {TYPE: data}, answers: [{question, word, text, mood}],
    facts, command}``, with the charts of a report by type, and its texts about one schedule. The
    response waits until the point is drawn. The ``ETag`` identifies the revision: 304 for a page
    that has its drawing; another revision redirects to the newest one. 204 without a schedule, or
    if no session requests the point any more before it is drawn.
``GET /api/problems/ID/why?ram_bytes=N&deadline_s=S``
    Each limit that no schedule meets even alone, and the content of the minimum RAM: ``{text,
    reasons, node, phase, min_ram_bytes, missing_bytes, tensors_in_ram: [{tensor, index, bytes,
    role}], workspace_bytes, state_bytes, shared_bytes, resident_bytes, single_pass_s}``.
``GET /api/points/ID/export/KIND``
    A file: ``schedule``, ``plan``, ``report`` or ``command``.

A POINT has the keys of `poetmodel.explore.answer.Point.to_record` except ``digest``, ``lender`` and
``proof``, and also ``gap`` and ``bound_j``, the bound on the energy of a step, or null.
"""

from __future__ import annotations

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
from poetmodel.explore.guard import Guard
from poetmodel.explore.pool import WorkerError
from poetmodel.explore.session import ExplorerSession, GoneError
from poetmodel.explore.settings import ExplorerSettings  # noqa: TC001 - FastAPI reads it
from poetmodel.files import installed_version
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from poetmodel.explore.settings import Catalogue

KEEP_ALIVE_S: Final = 10.0
"""Interval of keep-alive comments in a silent event stream [s]."""
MIN_PAUSE_S: Final = 0.05
"""Minimum time between two batches of events of a stream [s]."""
Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
SessionId = Annotated[str, Query(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
RamBytes = Annotated[int, Field(ge=1, le=MAX_BYTES, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]
ExportKind = Literal["schedule", "plan", "report", "command"]


class PointRequest(BaseModel):
    """The point that a session requests."""

    model_config = ConfigDict(extra="forbid")

    problem: Identifier
    ram_bytes: RamBytes
    deadline_s: Seconds | None = None
    session: Identifier
    more: bool = False


def make_application(  # noqa: C901 - the routes, each a few lines
    explorer: ExplorerSession,
    catalogue: Catalogue,
    *,
    render_page: Callable[[], str],
    initial: Mapping[str, Any],
    token: str,
    port: int,
) -> Guard:
    """Return the explorer as an ASGI application, whose lifespan starts and stops the workers."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await explorer.start()
        yield
        await explorer.stop()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_error_handlers(app)

    @app.get("/", response_class=HTMLResponse)
    def show_page() -> HTMLResponse:
        return HTMLResponse(render_page())

    @app.get("/api/choices")
    def list_choices() -> dict[str, Any]:
        return {
            "models": catalogue.list_graphs(),
            "devices": catalogue.list_devices(),
            "initial": dict(initial),
            "version": installed_version("poetmodel") or "",
        }

    @app.post("/api/problems")
    async def open_problem(settings: ExplorerSettings) -> JSONResponse:
        """Open a problem; return its page data and the points with a schedule of their own."""
        loaded_problem = await explorer.open(settings)
        points = [loaded_problem.describe(point) for point in loaded_problem.points_with_schedule()]
        return JSONResponse({**loaded_problem.facts, "points": points})

    @app.post("/api/points")
    async def request_point(point_request: PointRequest) -> dict[str, Any]:
        """Call `ExplorerSession.request_point`; ``more`` of the request is `solve_again`."""
        return await explorer.request_point(
            point_request.session,
            point_request.problem,
            point_request.ram_bytes,
            point_request.deadline_s,
            solve_again=point_request.more,
        )

    @app.get("/api/points/{point}")
    async def read_point(point: Identifier) -> dict[str, Any]:
        loaded_problem, found_point = explorer.find_point(point)
        return loaded_problem.describe(found_point)

    @app.get("/api/points/{point}/answer")
    async def read_drawing(
        request: Request, point: Identifier, revision: int | None = None
    ) -> Response:
        """Return the drawing of a point, once it exists; redirect an old `revision` to the newest.

        Status 204 without schedule or requesting session, 304 if the page has it, 410 if unknown.
        """
        _, found_point = explorer.find_point(point)
        if (
            revision is not None
            and found_point.answer.found is not None
            and revision != found_point.revision
        ):
            return RedirectResponse(f"/api/points/{point}/answer?revision={found_point.revision}")
        tag = f'"{found_point.digest}-{installed_version("poetmodel")}"'
        headers = {"Cache-Control": "private, no-cache", "ETag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        body = await explorer.load_drawing(point, revision)
        if body is None:
            return Response(status_code=204)
        headers["Content-Encoding"] = "gzip"
        return Response(body, media_type="application/json", headers=headers)

    @app.get("/api/points/{point}/export/{kind}")
    async def export_point(point: Identifier, kind: ExportKind) -> Response:
        reply = await explorer.export(point, kind)
        headers = {"Content-Disposition": f'attachment; filename="{reply.values["name"]}"'}
        return Response(reply.body, media_type=reply.values["media"], headers=headers)

    @app.get("/api/problems/{problem}/why")
    async def explain_infeasibility(
        problem: Identifier,
        ram_bytes: Annotated[int, Query(ge=1, le=MAX_BYTES)],
        deadline_s: Annotated[float | None, Query(gt=0, le=1e12)] = None,
    ) -> dict[str, Any]:
        return await explorer.explain_infeasibility(problem, ram_bytes, deadline_s)

    @app.get("/api/events", response_class=EventSourceResponse)
    async def stream_events(session: SessionId) -> AsyncIterator[ServerSentEvent]:
        async for event in _stream_events(explorer, session):
            yield event

    return Guard(app, token=token, port=port)


async def _stream_events(explorer: ExplorerSession, session: str) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of a session, and keep-alive comments, until the stream is closed."""
    import asyncio

    listener = explorer.add_listener(session)
    try:
        yield ServerSentEvent(comment="listening", retry=500)
        while True:
            events = await listener.wait_for_events(KEEP_ALIVE_S)
            if listener.is_closed:
                return
            if not events:
                yield ServerSentEvent(comment="alive")
            for kind, point_id in events:
                try:
                    loaded_problem, point = explorer.find_point(point_id)
                except GoneError:
                    continue
                values = loaded_problem.describe(point)
                yield ServerSentEvent(event=kind, data=values)
            await asyncio.sleep(MIN_PAUSE_S)
    finally:
        explorer.remove_listener(session, listener)


def _add_error_handlers(app: FastAPI) -> None:
    """Register handlers that return every error as JSON, ``{"detail": text}``."""

    def error_response(status: int, text: str) -> JSONResponse:
        return JSONResponse({"detail": text}, status)

    @app.exception_handler(RequestValidationError)
    def _handle_invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
        faults = [
            f"{'.'.join(map(str, fault['loc'][1:])) or 'request'}: {fault['msg']}"
            for fault in error.errors()[:5]
        ]
        return error_response(422, "; ".join(faults))

    @app.exception_handler(HTTPException)
    def _handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        """Return the detail of an HTTP error; for a wrong method, the accepted methods."""
        allowed = Headers(error.headers).get("allow")
        if allowed is None:
            return error_response(
                error.status_code, f"{error.detail}: the explorer cannot answer this request"
            )
        response = error_response(
            error.status_code, f"{request.method}: this address accepts {allowed}"
        )
        response.headers["allow"] = allowed
        return response

    @app.exception_handler(GoneError)
    def _handle_gone(_: Request, error: GoneError) -> JSONResponse:
        return error_response(410, str(error))

    @app.exception_handler(PoetModelError)
    def _handle_poetmodel_error(_: Request, error: PoetModelError) -> JSONResponse:
        return error_response(409, str(error))

    @app.exception_handler(WorkerError)
    def _handle_worker_error(_: Request, error: WorkerError) -> JSONResponse:
        return error_response(500, str(error))

    @app.exception_handler(Exception)
    def _handle_exception(_: Request, error: Exception) -> JSONResponse:
        return error_response(
            500, f"the explorer failed ({type(error).__name__}); see the terminal for details"
        )
