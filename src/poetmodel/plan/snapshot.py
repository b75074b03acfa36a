"""A plan as a snapshot of an allocator, for PyTorch's memory_viz page."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import kind_of
from poetmodel.errors import PlanError
from poetmodel.plan.arena import Arena, aligned
from poetmodel.plan.listing import Words
from poetmodel.plan.stays import stays
from poetmodel.schedule.machine import Content, Origin, Stay

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.plan.program import Plan
    from poetmodel.plan.simulation import PlanCheck

Entry = dict[str, Any]

PROTOCOL: Final = 4
"""The latest version of pickles that the page reads."""
UNKNOWN: Final = "unknown"
"""The category without which the page shows no others."""
_POOL: Final = (0, 0)


def memory_snapshot(graph: Graph, plan: Plan, check: PlanCheck, arena: Arena) -> dict[str, Any]:
    """Return a plan as a snapshot with the history of an allocator, as PyTorch records them.

    Parameters
    ----------
    graph : Graph
        The training graph.
    plan : Plan
        A valid plan.
    check : PlanCheck
        What `check_plan` found, for the times of the events.
    arena : Arena
        Its addresses.

    Returns
    -------
    dict
        The keys of ``torch.cuda.memory._snapshot()``. The one segment is the arena; its blocks are
        what is in RAM at the end; the trace has each copy of a tensor and each workspace.

    Raises
    ------
    PlanError
        If something that the plan makes has no address.

    Notes
    -----
    What is allocated when the last entry of an instruction's allocations is reached is its
    `Moment.high_bytes`, and after its last entry `Moment.ram_bytes`; so the peak is the plan's. An
    output in place of an input is a free and an allocation at one address; what the output leaves
    of the input is allocated again until the input is freed.
    """
    history = _History(graph, plan, check, arena)
    trace = history.entries()
    return {"segments": history.segments(), "device_traces": [trace]}


def encode_snapshot(snapshot: dict[str, Any]) -> bytes:
    """Return the bytes of a file that the page opens."""
    return pickle.dumps(snapshot, protocol=PROTOCOL)


class _History:
    """The allocations and frees of a plan."""

    def __init__(self, graph: Graph, plan: Plan, check: PlanCheck, arena: Arena) -> None:
        self.graph, self.plan, self.arena = graph, plan, arena
        self.words = Words(graph, plan)
        self.stays = [stay for stay in stays(graph, plan) if stay.bytes]
        self.offsets = {
            (stay.position, stay.content, stay.index): stay.offset for stay in arena.offsets
        }
        self.issued_us = [round(moment.issued_s * 1e6) for moment in check.moments]
        self.done_us = [*self.issued_us[1:], *(round(m.end_s * 1e6) for m in check.moments[-1:])]

    def entries(self) -> list[Entry]:
        """Return the entries of the trace, in order."""
        begins: dict[int, list[Stay]] = {}
        gives: dict[int, list[Stay]] = {}
        ends: dict[int, list[Stay]] = {}
        for stay in self.stays:
            begins.setdefault(stay.begin, []).append(stay)
            ends.setdefault(stay.end, []).append(stay)
            if stay.given_at is not None:
                gives.setdefault(stay.given_at, []).append(stay)
        entries = [self._entry("segment_alloc", 0, self.arena.bytes, [], 0)]
        for position in range(-1, len(self.plan.program)):
            begun_us = self.issued_us[position] if position >= 0 else 0
            done_us = self.done_us[position] if position >= 0 else 0
            for stay in gives.get(position, ()):
                entries += self._free(stay, position, begun_us)
                if stay.bytes > stay.given_bytes:
                    entries.append(self._rest(stay, position, begun_us))
            entries += [self._alloc(stay, begun_us) for stay in begins.get(position, ())]
            for stay in ends.get(position, ()):
                if stay.given_at is None:
                    entries += self._free(stay, position, done_us)
                elif stay.bytes > stay.given_bytes:
                    entries += self._free_rest(stay, position, done_us)
        last_us = self.done_us[-1] if self.done_us else 0
        return [*entries, self._entry("snapshot", 0, 0, [], last_us, category=UNKNOWN)]

    def segments(self) -> list[dict[str, Any]]:
        """Return the arena as it is at the end, as the one segment."""
        kept = [stay for stay in self.stays if stay.end >= len(self.plan.program)]
        blocks: list[dict[str, Any]] = []
        end = 0
        for stay in sorted(kept, key=self._offset):
            offset = self._offset(stay)
            size = min(aligned(stay.bytes, self.arena.alignment), self.arena.bytes - offset)
            blocks += _gap(end, offset)
            blocks.append(_block(offset, size, stay.bytes, "active_allocated", self._frames(stay)))
            end = offset + size
        blocks += _gap(end, self.arena.bytes)
        used = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
        segment = {
            "device": 0,
            "address": 0,
            "total_size": self.arena.bytes,
            "allocated_size": used,
            "active_size": used,
            "requested_size": sum(stay.bytes for stay in kept),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }
        return [segment] if self.arena.bytes else []

    def _alloc(self, stay: Stay, time_us: int) -> Entry:
        kind = "workspace" if stay.content == Content.WORKSPACE else kind_of(self.graph, stay.index)
        where = self._offset(stay)
        return self._entry("alloc", where, stay.bytes, self._frames(stay), time_us, category=kind)

    def _rest(self, stay: Stay, position: int, time_us: int) -> Entry:
        where, size = self._of_rest(stay)
        kind = kind_of(self.graph, stay.index)
        frames = [self._thing(stay, ", the rest"), self._instruction(position, again=False)]
        return self._entry("alloc", where, size, frames, time_us, category=kind)

    def _free(self, stay: Stay, position: int, time_us: int) -> list[Entry]:
        return self._freed(self._offset(stay), stay.bytes, stay, position, time_us)

    def _free_rest(self, stay: Stay, position: int, time_us: int) -> list[Entry]:
        return self._freed(*self._of_rest(stay), stay, position, time_us)

    def _freed(self, where: int, size: int, stay: Stay, position: int, time_us: int) -> list[Entry]:
        frames = [self._thing(stay), self._instruction(position, again=False)]
        return [
            self._entry(action, where, size, frames, time_us)
            for action in ("free_requested", "free_completed")
        ]

    def _of_rest(self, stay: Stay) -> tuple[int, int]:
        return self._offset(stay) + stay.given_bytes, stay.bytes - stay.given_bytes

    def _offset(self, stay: Stay) -> int:
        offset = self.offsets.get((stay.begin, stay.content, stay.index))
        if offset is None:
            known = self.graph.nodes if stay.content == Content.WORKSPACE else self.graph.tensors
            raise PlanError(
                f"arena: {stay.content} {known[stay.index].name!r} of instruction {stay.begin} has "
                "no offset; poetmodel.place gives every one"
            )
        return offset

    def _frames(self, stay: Stay) -> list[dict[str, Any]]:
        """Return content and instruction of an allocation, as frames of a stack."""
        if stay.begin < 0:
            return [self._thing(stay), _frame("program", stay.begin, "resident state")]
        again = stay.origin == Origin.RECOMPUTED
        return [self._thing(stay), self._instruction(stay.begin, again=again)]

    def _thing(self, stay: Stay, remark: str = "") -> dict[str, Any]:
        if stay.content == Content.WORKSPACE:
            return _frame("workspace", stay.index, self.graph.nodes[stay.index].name)
        return _frame("tensor", stay.index, self.graph.tensors[stay.index].name + remark)

    def _instruction(self, position: int, *, again: bool) -> dict[str, Any]:
        step = self.plan.program[position]
        words = f"{self.words.verb(step, again=again)} {self.words.name(step)}"
        return _frame("program", position, words)

    @staticmethod
    def _entry(
        action: str,
        where: int,
        size: int,
        frames: list[dict[str, Any]],
        time_us: int,
        **more: str,
    ) -> Entry:
        return {
            "action": action,
            "addr": where,
            "size": size,
            "stream": 0,
            "time_us": time_us,
            "pool_id": _POOL,
            "frames": frames,
            **more,
        }


def _frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def _block(
    where: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "address": where,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }


def _gap(begin: int, end: int) -> list[dict[str, Any]]:
    return [_block(begin, end - begin, 0, "inactive", [])] if end > begin else []
