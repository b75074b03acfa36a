"""Access control of the explorer: only requests of its own page, with the token, are served."""

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

MAX_BODY_BYTES: Final = 64 * 1024
"""Maximum size of the body of a request [B]."""
COOKIE_LIFETIME_S: Final = 31_536_000
"""Lifetime of the token's cookie in the browser [s]."""
LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Host names of this machine that are accepted."""
_DEFAULT_PORT: Final = "80"
"""Port that browsers leave out of the Host header."""
POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy: the page contains its scripts and styles, and connects only to its
server."""
_HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Guard:
    """ASGI middleware that rejects requests without the token, and those of other pages.

    A visit of the printed address, which contains the token, stores it in a cookie that scripts
    cannot read and other sites cannot send. The check of the Host header prevents DNS rebinding.
    Pages of other origins, including other ports of this machine, are rejected.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._port = port
        self._cookie = f"poetmodel-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an accepted request to the application; answer a rejected one with an error.

        A visit of ``/`` with the token in its query sets the cookie. WebSockets are ignored.
        """
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self._find_refusal(request.headers)
        query_token = request.query_params.get("token", "")
        if refusal is None and scope["path"] == "/" and self._is_token(query_token):
            redirect: Response = RedirectResponse("/", 303)
            redirect.set_cookie(
                self._cookie,
                self._token,
                max_age=COOKIE_LIFETIME_S,
                httponly=True,
                samesite="strict",
            )
            await redirect(scope, receive, _add_headers(send))
            return
        if refusal is None and not self._is_token(request.cookies.get(self._cookie, "")):
            refusal = 403, "open the address that 'poetmodel explore' printed, with its token"
        if refusal is None and _stated_body_bytes(request.headers) > MAX_BODY_BYTES:
            refusal = 413, f"a request may have at most {MAX_BODY_BYTES:,} bytes"
        if refusal is not None:
            status, reason = refusal
            await JSONResponse({"detail": reason}, status)(scope, receive, _add_headers(send))
            return
        await self._app(scope, _limit_body(receive), _add_headers(send))

    def _find_refusal(self, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return status and reason to reject a request by its host or origin; None to accept it."""
        host = headers.get("host", "")
        has_port = ":" in host.rpartition("]")[2]
        name, _, port = host.rpartition(":") if has_port else (host, "", _DEFAULT_PORT)
        if name not in LOOPBACK or port != str(self._port):
            return 403, "the explorer only answers to names of this machine"
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return 403, "the explorer only answers to its own page"
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "the explorer only answers to its own page"
        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())


def _stated_body_bytes(headers: Mapping[str, str]) -> int:
    """Return the stated size of a request body [B], or 0; an invalid size is above the maximum."""
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else MAX_BODY_BYTES + 1


def _limit_body(receive: Receive) -> Receive:
    """Wrap `receive`: a body above `MAX_BODY_BYTES`, even chunked, ends with a disconnect."""
    remaining_bytes = MAX_BODY_BYTES

    async def receive_limited() -> Message:
        nonlocal remaining_bytes
        message = await receive()
        remaining_bytes -= len(message.get("body", b""))
        return message if remaining_bytes >= 0 else {"type": "http.disconnect"}

    return receive_limited


def _add_headers(send: Send) -> Send:
    """Wrap `send` so that each response has the security headers, and by default is not cached."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_HEADERS)
            headers.setdefault("Cache-Control", "no-store")
        await send(message)

    return send_with_headers
