"""Clients of the explorer's server, servers in other processes, and their page in a browser."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import httpx

from kit.browser_pages import PATIENCE_MS, OpenPage
from kit.patience import PATIENCE_S, wait_until

MLP = {"model": "mlp", "device": "mkr1000"}
STEP = Path(__file__).resolve().parents[2] / "docs" / "digits.step.json"
"""A captured step that can be exported."""
LONG = {"model": "resnet50", "device": "rpi4b"}
"""A problem whose solve always ends at its time limit."""


class Visitor:
    """A client with the requests of a page: opens problems, requests points, receives events.

    `events` are (kind, data) pairs in the order of their arrival.
    """

    def __init__(self, client, session="one"):
        self.client = client
        self.session = session
        self.events = []
        self.thread = None
        self.closed = threading.Event()

    def close(self):
        """Stop listening, and close the client."""
        self.closed.set()
        if self.thread is not None:
            self.thread.join()
        self.client.close()

    def listen(self):
        """Append the session's events to `events` in a thread, until `close` or the server ends."""
        self.thread = threading.Thread(target=self._listen)
        self.thread.start()

    def _listen(self):
        """Receive events by HTTP 1.0, whose stream has no chunks."""
        url = self.client.base_url
        cookies = "; ".join(f"{name}={value}" for name, value in self.client.cookies.items())
        request = (
            f"GET /api/events?session={self.session} HTTP/1.0\r\nHost: {url.host}:{url.port}\r\n"
            f"Cookie: {cookies}\r\n\r\n"
        )
        kind, text = "", b""
        with socket.create_connection((url.host, url.port), PATIENCE_S) as stream:
            stream.sendall(request.encode())
            stream.settimeout(0.1)
            while not self.closed.is_set():
                try:
                    received = stream.recv(65536)
                except TimeoutError:
                    continue
                except OSError:  # the server was killed
                    return
                if not received:
                    return
                *lines, text = (text + received).split(b"\n")
                for line in lines:
                    key, _, value = line.decode().strip().partition(": ")
                    if key == "event":
                        kind = value
                    elif key == "data":
                        self.events.append((kind, json.loads(value)))

    def open(self, choice):
        """Request a problem; return the reply. `choice` has its fields, such as the model."""
        reply = self.client.post("/api/problems", json=choice)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def request_point(self, problem, share, **more):
        """Request a point; return the reply.

        Its RAM is the minimum RAM plus `share` times the difference to the keep-all peak. `more`
        are further fields of the request.
        """
        floor, top = problem["floor_bytes"], problem["keep_all_bytes"]
        ram_bytes = round(floor + share * (top - floor))
        given = {"problem": problem["problem"], "ram_bytes": ram_bytes, "session": self.session}
        reply = self.client.post("/api/points", json=given | more)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def point(self, name):
        """Return the current state of a point."""
        reply = self.client.get(f"/api/points/{name}")
        assert reply.status_code == 200, reply.text
        return reply.json()

    def wait_for_end(self, name):
        """Wait until a point has ended; return it."""
        return wait_until(lambda: self._final_point(name))

    def _final_point(self, name):
        point = self.point(name)
        return None if point["state"] in ("waiting", "solving") else point

    def wait_for_schedule(self, name):
        """Wait until a point has a schedule; return it."""
        return wait_until(lambda: found if (found := self.point(name))["revision"] else None)

    def answer(self, name):
        """Return the newest answer to a point; repeat the request after status 410, outdated."""
        while True:
            reply = self.client.get(f"/api/points/{name}/answer")
            if reply.status_code == 200:
                return reply.json()
            assert reply.status_code == 410, reply.text


class Explorer:
    """A server in a separate process, with its answers in `folder`."""

    def __init__(self, folder, *options, errors=None):
        self.errors = errors  # where stderr goes, as for `subprocess.Popen`
        self.port = 0  # any free port; a restart uses the same one
        self.folder = folder
        self.options = options
        self.process = None
        self.url = ""
        self.visitors = []

    def start(self):
        """Start the server, and wait for its address; a restarted server has the same port."""
        given = ("--no-browser", "--port", str(self.port), "--store", str(self.store))
        # Stdout to a pipe is buffered, Python's default.
        buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "poetmodel", "explore", *given, *self.options],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=self.folder,
            env=buffered,
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]
        self.port = httpx.URL(self.url).port or 0

    @property
    def store(self):
        """File of the server's answers."""
        return self.folder / "store.sqlite"

    def end(self, signal_number=signal.SIGINT):
        """Send a signal to the server, and wait for its end; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal_number)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.wait(PATIENCE_S)

    def visitor(self, session="one"):
        """Return a new visitor that has opened the printed address; `run_explorer` closes it."""
        client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)
        assert client.get(self.url).status_code == 303
        self.visitors.append(Visitor(client, session))
        return self.visitors[-1]


@contextmanager
def run_explorer(folder, *options, errors=None):
    """Context manager of a running server; at its end, kills the server and closes visitors."""
    explorer = Explorer(folder, *options, errors=errors)
    explorer.start()
    try:
        yield explorer
    finally:
        if explorer.process is not None and explorer.process.poll() is None:
            explorer.end(signal.SIGKILL)
        for visitor in explorer.visitors:
            visitor.close()


WIDE = {"viewport": {"width": 1440, "height": 900}}


@dataclass(slots=True)
class Visit(OpenPage):
    """The page of an explorer."""

    @property
    def state(self):
        """Data attributes of the page: the point, its state, and the drawn answer."""
        return self.page.evaluate("() => ({...document.documentElement.dataset})")

    def until(self, **wanted):
        """Wait until data attributes of the page have the values `wanted`; return all of them."""
        marks = "".join(f'[data-{key}="{value}"]' for key, value in wanted.items())
        self.page.wait_for_selector(f"html{marks}", state="attached", timeout=PATIENCE_MS)
        return self.state

    def wait_until_settled(self):
        """Wait until the answer to the requested point is complete and drawn; return the state."""
        self.page.wait_for_function(
            """() => { const {state, point, answer} = document.documentElement.dataset;
            return state === 'done' && point && answer && answer.startsWith(point + ':'); }""",
            timeout=PATIENCE_MS,
        )
        return self.state

    def type(self, limit, text):
        """Type a text into the field of a limit, and press Enter."""
        self.page.locator(f"#{limit}-text").fill(text)
        self.page.locator(f"#{limit}-text").press("Enter")

    def json(self, path):
        """Request a path from the server in the page, with its session; return the JSON."""
        return self.page.evaluate("(path) => fetch(path).then((reply) => reply.json())", path)

    def answer(self):
        """Return the drawn answer from the server."""
        point, _, revision = self.state["answer"].partition(":")
        return self.json(f"/api/points/{point}/answer?revision={revision}")

    def read_number(self, name):
        """Return the number in ``data-value`` of an element; NaN without that attribute."""
        return float(self.page.locator(f"#{name}").get_attribute("data-value") or "nan")

    def close(self):
        """Close the page; assert that it requested only the server, and logged no message."""
        hosts = {urlsplit(url).hostname for url in self.requests if not url.startswith("blob:")}
        self.page.context.close()
        assert hosts == {"127.0.0.1"}
        assert self.messages == []


def open_visit(browser, explorer, how=WIDE, **view):
    """Open the explorer's page in a browser; with `view`, then the address with these fields."""
    addresses = [f"http://127.0.0.1:{explorer.port}/?{urlencode(view)}"] if view else []
    return Visit.open(browser, how, explorer.url, *addresses)
