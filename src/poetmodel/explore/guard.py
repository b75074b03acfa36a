"""Access to the explorer: its own page in a browser on this machine, and nothing else."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY_BYTES: Final = 64 * 1024
"""Largest body of a request."""
YEAR_S: Final = 31_536_000
"""How long a browser keeps the token [s]."""
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Names of this machine that a browser may have in its address bar."""
POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""The page holds its scripts and styles, and talks to its server alone."""
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """Lets requests through that come from the page of this server; others get a sentence.

    The printed address carries the token; the first visit puts it into a cookie that scripts cannot
    read and other sites cannot send. The Host header must name this machine, so that no other name
    that resolves to it (DNS rebinding) will do; and no other page's request passes, even one of
    another port of this machine.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._port = port
        self._cookie = f"poetmodel-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._refusal(request.headers)
        given = request.query_params.get("token", "")
        if refusal is None and scope["path"] == "/" and self._is_token(given):
            admitted: Response = RedirectResponse("/", 303)
            admitted.set_cookie(
                self._cookie, self._token, max_age=YEAR_S, httponly=True, samesite="strict"
            )
            await admitted(scope, receive, _with_headers(send))
            return
        if refusal is None and not self._is_token(request.cookies.get(self._cookie, "")):
            refusal = 403, "open the address that 'poetmodel explore' printed, with its token"
        if refusal is None and _length(request.headers) > MOST_BODY_BYTES:
            refusal = 413, f"a request may have {MOST_BODY_BYTES:,} bytes"
        if refusal is not None:
            status, text = refusal
            await JSONResponse({"detail": text}, status)(scope, receive, _with_headers(send))
            return
        await self._app(scope, _limited(receive), _with_headers(send))

    def _refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        host = headers.get("host", "")
        name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if name not in LOOPBACK or port != str(self._port):
            return 403, "the explorer answers to this machine's own names alone"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "the explorer answers to its own page alone"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "the explorer answers to its own page alone"
        return None

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else MOST_BODY_BYTES + 1


def _limited(receive: Receive) -> Receive:
    """Limit a request's bytes; a body may be sent in pieces of no stated length."""
    left = MOST_BODY_BYTES

    async def receiving() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        return message if left >= 0 else {"type": "http.disconnect"}

    return receiving


def _with_headers(send: Send) -> Send:
    """Return the application with the headers that every reply has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_HEADERS)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return sending
