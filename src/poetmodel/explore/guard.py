"""Access to the explorer: its own page in a browser on this machine, and nothing else."""

from __future__ import annotations

import hmac
import json
from http.cookies import CookieError, SimpleCookie
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BODY_BYTES: Final = 64 * 1024
"""Largest body of a request."""
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
        headers = {
            key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]
        }
        refusal = self._refusal(headers)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if refusal is None and scope["path"] == "/" and self._is_token(given):
            kept = "Path=/; HttpOnly; SameSite=Strict; Max-Age=31536000"
            cookie = f"{self._cookie}={self._token}; {kept}"
            await _reply(send, 303, "", {"Location": "/", "Set-Cookie": cookie})
            return
        if refusal is None and not self._is_token(self._brought(headers)):
            refusal = 403, "open the address that 'poetmodel explore' printed, with its token"
        if refusal is None and _length(headers) > MOST_BODY_BYTES:
            refusal = 413, f"a request may have {MOST_BODY_BYTES:,} bytes"
        if refusal is not None:
            status, text = refusal
            await _reply(send, status, json.dumps({"detail": text}), {"Cache-Control": "no-store"})
            return
        await self._app(scope, _Limited(receive), _with_headers(send))

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

    def _brought(self, headers: Mapping[str, str]) -> str:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return "" if cookie is None else cookie.value

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _length(headers: Mapping[str, str]) -> int:
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else MOST_BODY_BYTES + 1


class _Limited:
    """Limit on a request's bytes; a body may be sent in pieces of no stated length."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = MOST_BODY_BYTES

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            return {"type": "http.disconnect"}
        return message


def _with_headers(send: Send) -> Send:
    """Return the application with the headers that every reply has."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            known = {key.lower() for key, _ in message["headers"]}
            added = dict(_HEADERS)
            if b"cache-control" not in known:
                added["Cache-Control"] = "no-store"
            pairs = [(key.lower().encode(), value.encode()) for key, value in added.items()]
            message = {**message, "headers": [*message["headers"], *pairs]}
        await send(message)

    return sending


async def _reply(send: Send, status: int, text: str, headers: Mapping[str, str]) -> None:
    body = text.encode()
    every = {**_HEADERS, "Content-Type": "application/json", "Content-Length": str(len(body))}
    pairs = [(key.lower().encode(), value.encode()) for key, value in {**every, **headers}.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
