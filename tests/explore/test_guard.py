"""Who the explorer talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

if TYPE_CHECKING:
    from kit.explorers import Visitor


def stranger(visitor: Visitor, **headers: str) -> httpx.Client:
    """Return a client of the same server without a cookie."""
    return httpx.Client(base_url=visitor.client.base_url, headers=headers)


@pytest.mark.parametrize("path", ["/", "/api/choices", "/api/events?session=s", "/?token=wrong"])
def test_nothing_is_told_without_the_token(visitor: Visitor, path: str) -> None:
    """A sentence says which address to open."""
    with stranger(visitor) as client:
        reply = client.get(path)
    assert reply.status_code == 403
    assert "open the address" in reply.json()["detail"]


def test_token_goes_into_a_cookie_and_out_of_the_address(visitor: Visitor) -> None:
    """Scripts cannot read it, and other sites cannot send it."""
    token = next(iter(visitor.client.cookies.values()))
    with stranger(visitor) as client:
        reply = client.get("/", params={"token": token})
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert client.get("/").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=lambda headers: " ".join(map(str, *headers.items())),
)
def test_other_names_and_other_pages_are_refused(visitor: Visitor, headers: dict[str, str]) -> None:
    """Neither a name that resolves to this machine nor a page of another port will do."""
    reply = visitor.client.get("/api/choices", headers=headers)
    assert reply.status_code == 403
    assert "access-control-allow-origin" not in reply.headers


def test_own_page_is_answered(visitor: Visitor) -> None:
    """By each name that this machine has in an address bar."""
    port = visitor.client.base_url.port
    for name in ("127.0.0.1", "localhost", "[::1]"):
        host = f"{name}:{port}"
        given = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert visitor.client.get("/api/choices", headers=given).status_code == 200


def test_large_bodies_are_refused(visitor: Visitor) -> None:
    """With a length that is stated, and in pieces without one."""
    reply = visitor.client.post("/api/problems", content=b"x" * 100_000)
    assert reply.status_code == 413
    pieces = (b"x" * 1000 for _ in range(100))
    with pytest.raises(httpx.HTTPError):  # the server hangs up, or answers with an error
        visitor.client.post("/api/problems", content=pieces).raise_for_status()
    assert visitor.client.get("/api/choices").status_code == 200


def test_replies_may_not_be_framed_sniffed_or_stored(visitor: Visitor) -> None:
    """Each one carries the headers that say so."""
    for path in ("/", "/api/choices", "/nowhere"):
        headers = visitor.client.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
