"""Load of the explorer: sessions that drag its slider, against a real server process.

``python bench/explore_load.py`` starts one with an empty store and lets 20 sessions drag for a
minute: each looks at a network, drags the slider over a few stops to one that it looks at, waits
for its picture, and looks at it for a while; some of these are known. It prints errors, how long
known points and first pictures took, and the memory of all processes after a warm-up and at the
end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

PROBLEMS: Final = (
    {"model": "resnet50", "device": "rpi4b"},
    {"model": "mobilenetv2", "device": "rpi4b"},
    {"model": "resnet18-cifar", "device": "rpi4b"},
    {"model": "mlp", "device": "mkr1000"},
)
"""What sessions look at, in turn; the first has 458 nodes."""
STOPS: Final = 40
"""Stops of a slider."""
KNOWN: Final = 0.3
"""Share of drags that end where the session was before."""
PASSED: Final = 2
"""Stops that a drag passes on its way, each of them wanted until the next one."""
LOOK_S: Final = 2.0
"""Longest time to look at a picture [s]."""
WARM_S: Final = 15.0
"""Time before memory is measured first [s]."""


@dataclass
class Figures:
    """What all sessions measured."""

    known_s: list[float] = field(default_factory=list)
    """From the wish to what is known of a point that has a schedule of its own."""
    pictures_s: dict[str, list[float]] = field(default_factory=dict)
    """From the wish to the first picture of a point that has none, by network."""
    errors: list[str] = field(default_factory=list)
    wishes: int = 0
    events: int = 0


@dataclass
class Session:
    """One page: it drags until the time is over."""

    name: str
    client: httpx.AsyncClient
    choice: dict[str, Any]
    figures: Figures
    rng: random.Random
    seen: list[int] = field(default_factory=list)

    async def run(self, end_s: float) -> None:
        """Drag, and listen meanwhile."""
        listening = asyncio.create_task(self.listen())
        try:
            problem = (await self.ask("POST", "/api/problems", json=self.choice)).json()
            while time.monotonic() < end_s:
                await self.drag(problem)
                await asyncio.sleep(self.rng.uniform(0.5, LOOK_S))
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def drag(self, problem: dict[str, Any]) -> None:
        """Drag the slider to another stop, known or not, and wait for its picture."""
        known = bool(self.seen) and self.rng.random() < KNOWN
        end = self.rng.choice(self.seen) if known else self.rng.randrange(STOPS + 1)
        begin = self.seen[-1] if self.seen else end
        for place in range(1, PASSED + 1):  # stops on the way, of which nobody wants a picture
            await self.want(problem, begin + (end - begin) * place // (PASSED + 1))
            await asyncio.sleep(self.rng.uniform(0.1, 0.3))
        await self.look(problem, end)
        self.seen.append(end)

    async def want(self, problem: dict[str, Any], stop: int) -> dict[str, Any]:
        """Want the point at a stop; return what is known of it at once."""
        floor, top = problem["floor_bytes"], problem["keep_all_bytes"]
        wish = {
            "problem": problem["problem"],
            "ram_bytes": floor + (top - floor) * stop // STOPS,
            "session": self.name,
        }
        begun_s = time.monotonic()
        point: dict[str, Any] = (await self.ask("POST", "/api/points", json=wish)).json()
        self.figures.wishes += 1
        if point["revision"] and not point["provisional"]:
            self.figures.known_s.append(time.monotonic() - begun_s)
        return point

    async def look(self, problem: dict[str, Any], stop: int) -> None:
        """Want a stop, and wait for its picture."""
        begun_s = time.monotonic()
        point = await self.want(problem, stop)
        unknown = not point["revision"] or point["provisional"]
        while point["revision"] == 0 and point["state"] in ("waiting", "solving"):
            await asyncio.sleep(0.02)
            point = (await self.ask("GET", f"/api/points/{point['id']}")).json()
        if point["value"] is None:
            return
        path = f"/api/points/{point['id']}/answer"
        await self.ask("GET", path, params={"revision": point["revision"]})
        if unknown:
            taken = self.figures.pictures_s.setdefault(self.choice["model"], [])
            taken.append(time.monotonic() - begun_s)

    async def listen(self) -> None:
        """Take events as a browser does."""
        path = f"/api/events?session={self.name}"
        async with self.client.stream("GET", path, timeout=None) as stream:
            async for line in stream.aiter_lines():
                self.figures.events += line.startswith("data:")

    async def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        """Return a reply, and take note of one that is an error."""
        reply = await self.client.request(method, path, **given)
        if reply.status_code != 200:
            self.figures.errors.append(f"{method} {path}: {reply.status_code} {reply.text[:200]}")
        return reply


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(word) for word in found.split()]


def memory_bytes(pid: int) -> int:
    """Return what a process holds in RAM, its share of what it shares with others [B]."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    (line,) = (line for line in text.splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def memory(pid: int) -> dict[str, float]:
    """Return the memory of the server and of its workers [MiB]."""
    workers = [memory_bytes(child) for child in children(pid)]
    return {
        "server_mib": round(memory_bytes(pid) / 2**20, 1),
        "workers_mib": round(sum(workers) / 2**20, 1),
        "workers": len(workers),
    }


async def drag(url: str, pid: int, *, sessions: int, seconds: float, seed: int) -> dict[str, Any]:
    """Let sessions drag; return what they measured."""
    base = url.partition("/?")[0]
    figures, begun_s = Figures(), time.monotonic()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=base, timeout=60, limits=limits, follow_redirects=True
    ) as client:
        await client.get(url)
        pages = [
            Session(
                f"session-{place}",
                client,
                PROBLEMS[place % len(PROBLEMS)],
                figures,
                random.Random(f"{seed}/{place}"),  # noqa: S311 - a load, no secret
            )
            for place in range(sessions)
        ]
        running = [asyncio.create_task(page.run(begun_s + seconds)) for page in pages]
        await asyncio.sleep(min(WARM_S, seconds / 2))
        before = memory(pid)
        await asyncio.gather(*running)
        await asyncio.sleep(12)  # wishes lapse, and workers that were interrupted are back
        after = memory(pid)
    return {
        "sessions": sessions,
        "seconds": seconds,
        "cores": len(os.sched_getaffinity(0)),
        "wishes": figures.wishes,
        "events": figures.events,
        "errors": figures.errors[:10],
        "error_count": len(figures.errors),
        "known": summary(figures.known_s),
        "first_picture": {name: summary(found) for name, found in figures.pictures_s.items()},
        "memory_warm": before,
        "memory_after": after,
    }


def summary(found: list[float]) -> dict[str, float]:
    """Return median, 95th percentile and maximum of times [s]."""
    if not found:
        return {"count": 0}
    ordered = sorted(found)
    return {
        "count": len(found),
        "median_s": round(median(found), 3),
        "p95_s": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "max_s": round(ordered[-1], 3),
    }


def main() -> None:
    """Start a server, drag, end it, and say what was left."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the record to this file, *.jsonl")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "poetmodel", "explore", "--no-browser"]
        server = subprocess.Popen(
            [*command, "--port", "8699", "--store", f"{folder}/load.sqlite"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url = (server.stdout.readline() if server.stdout else "").split()[-1]
            found = asyncio.run(
                drag(
                    url,
                    server.pid,
                    sessions=given.sessions,
                    seconds=given.seconds,
                    seed=given.seed,
                )
            )
            workers = children(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            status = server.wait(30)
        time.sleep(1)
        left = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
        found |= {"exit_status": status, "processes_left": len(left)}
    text = json.dumps({"date": time.strftime("%Y-%m-%d"), **found})
    sys.stdout.write(f"{json.dumps(found, indent=1)}\n")
    if given.out is not None:
        with given.out.open("a", encoding="utf-8") as stream:
            stream.write(f"{text}\n")


if __name__ == "__main__":
    main()
