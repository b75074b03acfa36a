"""How the server and its workers talk: frames of a JSON object and bytes, over pipes."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from poetmodel.schedule import Schedule

if TYPE_CHECKING:
    import asyncio
    from typing import BinaryIO

    from poetmodel.graph import Graph

HEAD: Final = struct.Struct(">II")
"""What a frame begins with: the lengths of its JSON and of its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A message: plain values, and bytes beside them."""

    values: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def encode(self) -> bytes:
        """Return it as bytes."""
        text = json.dumps(self.values, allow_nan=False).encode()
        return HEAD.pack(len(text), len(self.body)) + text + self.body


def read_frame(stream: BinaryIO) -> Frame | None:
    """Return the next frame of a stream; None at its end."""
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    length, more = HEAD.unpack(head)
    text, body = stream.read(length), stream.read(more)
    if len(text) < length or len(body) < more:
        return None
    return Frame(values=json.loads(text), body=body)


async def receive_frame(stream: asyncio.StreamReader) -> Frame:
    """Return the next frame of a stream; raise `asyncio.IncompleteReadError` at its end."""
    length, more = HEAD.unpack(await stream.readexactly(HEAD.size))
    text = await stream.readexactly(length)
    return Frame(values=json.loads(text), body=await stream.readexactly(more))


def pack_schedule(graph: Graph, schedule: Schedule) -> bytes:
    """Return a schedule as compressed JSON, without its graph."""
    entries = schedule.entries(has_state=bool(graph.state_tensors))
    return zlib.compress(json.dumps(entries, allow_nan=False).encode())


def unpack_schedule(body: bytes) -> Schedule:
    """Return a packed schedule."""
    return Schedule.of_entries(json.loads(zlib.decompress(body)), None)
