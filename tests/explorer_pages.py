"""The explorer in a process of its own, and its page in a browser."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
PATIENCE_MS = 120_000
"""How long anything may take on a busy machine; no promise of speed."""
WIDE: dict[str, Any] = {"viewport": {"width": 1440, "height": 900}}
PHONE: dict[str, Any] = {
    "viewport": {"width": 390, "height": 844},
    "has_touch": True,
    "is_mobile": True,
}


@dataclass(slots=True)
class Explorer:
    """A server that can be killed and started again, with the same port and store."""

    store: Path
    port: int
    process: subprocess.Popen[str] | None = None
    address: str = ""

    def start(self) -> None:
        """Start it and wait for its address."""
        command = [sys.executable, "-m", "poetmodel", "explore", "mlp", "--device", "mkr1000"]
        more = ["--port", f"{self.port}", "--store", f"{self.store}", "--no-browser"]
        self.process = subprocess.Popen(
            [*command, *more, "--time-limit", "60"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        said = []
        for line in self.process.stdout:
            said.append(line)
            found = re.search(r"http://\S+", line)
            if found:
                self.address = found[0]
                return
        raise AssertionError("".join(said))

    def kill(self) -> None:
        """End it and its workers at once, as a power cut would."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@dataclass(slots=True)
class Visit:
    """An open page, and all that it said and asked for."""

    page: Page
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @property
    def state(self) -> dict[str, str]:
        """What the page says of itself: the point, its state, and which answer is drawn."""
        found: dict[str, str] = self.page.evaluate("() => ({...document.documentElement.dataset})")
        return found

    def until(self, **wanted: str) -> dict[str, str]:
        """Wait until the page is in a state, and return it."""
        marks = "".join(f'[data-{key}="{value}"]' for key, value in wanted.items())
        self.page.wait_for_selector(f"html{marks}", state="attached", timeout=PATIENCE_MS)
        return self.state

    def settled(self) -> dict[str, str]:
        """Wait until the answer of what is wished is complete and drawn."""
        self.page.wait_for_function(
            """() => { const {state, point, answer} = document.documentElement.dataset;
            return state === 'done' && point && answer && answer.startsWith(point + ':'); }""",
            timeout=PATIENCE_MS,
        )
        return self.state

    def type(self, limit: str, text: str) -> None:
        """Type a limit into its field."""
        self.page.locator(f"#{limit}-text").fill(text)
        self.page.locator(f"#{limit}-text").press("Enter")

    def json(self, path: str) -> Any:
        """Ask the server for something as the page does."""
        return self.page.evaluate("(path) => fetch(path).then((reply) => reply.json())", path)

    def answer(self) -> Any:
        """Return the answer that is drawn, as the server has it."""
        point, _, revision = self.state["answer"].partition(":")
        return self.json(f"/api/points/{point}/answer?revision={revision}")

    def figure(self, name: str) -> float:
        """Return a figure of the page."""
        return float(self.page.locator(f"#{name}").get_attribute("data-value") or "nan")

    def close(self) -> None:
        """Close the page; nothing was loaded from elsewhere, and the console stayed silent."""
        hosts = {urlsplit(url).hostname for url in self.requests if not url.startswith("blob:")}
        self.page.context.close()
        assert hosts == {"127.0.0.1"}
        assert self.messages == []


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def visit(browser: Browser, explorer: Explorer, how: dict[str, Any] = WIDE, **view: str) -> Visit:
    """Open the explorer's page, perhaps at a certain view."""
    found = Visit(browser.new_context(accept_downloads=True, **how).new_page())
    page = found.page
    page.on("console", lambda message: found.messages.append(message.text))
    page.on("pageerror", lambda error: found.messages.append(str(error)))
    page.on("request", lambda request: found.requests.append(request.url))
    page.goto(explorer.address, timeout=PATIENCE_MS)
    if view:
        port = f"http://127.0.0.1:{explorer.port}/"
        page.goto(f"{port}?{urlencode(view)}", timeout=PATIENCE_MS)
    page.wait_for_selector("html[data-ready]", state="attached", timeout=PATIENCE_MS)
    return found


@contextmanager
def running(folder: Path) -> Iterator[Explorer]:
    """Run the explorer for a while."""
    explorer = Explorer(folder / "explore.sqlite", free_port())
    explorer.start()
    try:
        yield explorer
    finally:
        explorer.kill()
