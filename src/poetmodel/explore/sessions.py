"""The pages that look: what each one wants, and how it hears of news."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field


class Listener:
    """One stream of events to a browser: only the newest state of each point is sent."""

    def __init__(self) -> None:
        self._news: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._signal = asyncio.Event()
        self.over = False

    def hear(self, kind: str, point: str) -> None:
        """Take note that there is something new about a point."""
        self._news[kind, point] = None
        self._signal.set()

    def end(self) -> None:
        """End the stream: the server stops."""
        self.over = True
        self._signal.set()

    async def next(self, most_s: float) -> list[tuple[str, str]]:
        """Return what is new, kind and point; nothing after a while without news."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._signal.wait(), most_s)
        self._signal.clear()
        news, self._news = list(self._news), OrderedDict()
        return news


@dataclass(slots=True)
class PageSession:
    """A page in a browser, and the point that it wants."""

    name: str
    wants: str | None = None
    problem: str | None = None
    listeners: list[Listener] = field(default_factory=list)
    alone_s: float = field(default_factory=time.monotonic)
    """When it was last heard of, if nobody listens, on the monotonic clock [s]."""
