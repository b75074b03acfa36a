"""What a schedule decides on each tensor: where it lives, what is done to it, what that costs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from poetmodel.graph import Graph
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule, Simulation
    from poetmodel.schedule.simulation import MemoryPoint

Span = tuple[int, int]


class Fate(StrEnum):
    """What a schedule does to a tensor after its first computation."""

    KEPT = "kept"
    """It stays in RAM to its last use."""
    RECOMPUTED = "recomputed"
    """Its node is computed again."""
    PAGED = "paged"
    """It goes to storage and comes back, or comes from there."""
    BOTH = "paged and recomputed"
    """Both."""
    UNUSED = "unused"
    """Nothing reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What becomes of one tensor."""

    tensor: int
    """Its number."""
    fate: Fate
    """What is done to it."""
    in_ram: tuple[Span, ...]
    """First and last of each run of stages in which it is in RAM at some step."""
    on_storage: tuple[Span, ...]
    """The same for stages at whose begin it is on storage."""
    recomputed: tuple[int, ...]
    """Stages in which its node is computed again."""
    paged_in: tuple[int, ...]
    """Stages in which it is paged in."""
    paged_out: tuple[int, ...]
    """Stages in which it is paged out."""
    energy_j: float
    """Energy of these recomputations and transfers [J]; a node's outputs share recomputations."""
    time_s: float
    """Their time [s]."""
    binding_bytes: int
    """Its bytes times the steps at which memory binds and it is in RAM [B]."""

    def to_dict(self, graph: Graph) -> dict[str, Any]:
        """Return it as plain values, SI."""
        return {
            "tensor": graph.tensors[self.tensor].name,
            "node": graph.nodes[graph.node_of[self.tensor]].name,
            "bytes": graph.tensor_bytes[self.tensor],
            "fate": str(self.fate),
            "in_ram": [list(span) for span in self.in_ram],
            "on_storage": [list(span) for span in self.on_storage],
            "recomputed": list(self.recomputed),
            "paged_in": list(self.paged_in),
            "paged_out": list(self.paged_out),
            "energy_j": self.energy_j,
            "time_s": self.time_s,
            "binding_bytes": self.binding_bytes,
        }


def find_lives(
    problem: Problem, schedule: Schedule, points: Iterable[MemoryPoint] = ()
) -> tuple[Life, ...]:
    """Return the life of each tensor of a valid schedule.

    Parameters
    ----------
    problem : Problem
        Gives graph and costs.
    schedule : Schedule
        The relations.
    points : iterable of MemoryPoint
        The steps at which memory binds; see `binding_points`.

    Returns
    -------
    tuple of Life, one per tensor
    """
    relations = _ByIndex(problem.graph, schedule)
    places = [(point.stage, point.node) for point in points]
    return tuple(_life(problem, relations, i, places) for i in range(len(problem.graph.tensors)))


def binding_points(
    problem: Problem, schedule: Schedule, simulation: Simulation
) -> tuple[MemoryPoint, ...]:
    """Return the steps at which memory binds.

    Those in stages that a tensor spends out of RAM, to be recomputed or paged in later, with less
    room left than it takes: it could not have been kept over them. Where nothing is recomputed or
    paged, the steps at the peak.
    """
    graph = problem.graph
    found = _ByIndex(graph, schedule)
    absent = [0] * len(graph.nodes)
    moved = {i for _, i in schedule.M_in}
    moved.update(i for t, k in schedule.R if k < t for i in graph.outputs_of[k])
    for i in moved:
        k = graph.node_of[i]
        for t in range(k + 1, max((*found.paged_in[i], *found.computed[k]))):
            if not found.appears(t, i):
                absent[t] = max(absent[t], graph.tensor_bytes[i])
    usable = problem.usable_ram_bytes
    if not moved:
        return tuple(p for p in simulation.curve if p.ram_bytes == simulation.peak_ram_bytes)
    return tuple(p for p in simulation.curve if usable - p.ram_bytes < absent[p.stage])


class _ByIndex:
    """A schedule by node and tensor, and whether a tensor is in RAM at a step."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.computed = _stages(schedule.R)
        self.kept = _stages(schedule.S_RAM)
        self.stored = _stages(schedule.S_AUX)
        self.paged_in = _stages(schedule.M_in)
        self.paged_out = _stages(schedule.M_out)

    def appears(self, t: int, i: int) -> bool:
        """Return whether tensor `i` is in RAM at some step of stage `t`."""
        k = self.graph.node_of[i]
        return any(t in stages for stages in (self.kept[i], self.computed[k], self.paged_in[i]))

    def is_held(self, t: int, k: int, i: int) -> bool:
        """Return whether tensor `i` is in RAM at step `k` of stage `t`, outputs of `k` included."""
        made = self.graph.node_of[i]
        if not self.appears(t, i) or (k < made and t not in self.kept[i]):
            return False
        if t + 1 in self.kept[i]:
            return True
        uses = [j for j in self.graph.users_of[i] if j >= made and t in self.computed[j]]
        return k <= max(uses, default=made)


def _life(problem: Problem, found: _ByIndex, i: int, places: list[tuple[int, int]]) -> Life:
    graph, table = problem.graph, problem.table
    k = graph.node_of[i]
    again = tuple(sorted(t for t in found.computed[k] if t > k))
    came, went = sorted(found.paged_in[i]), sorted(found.paged_out[i])
    energy_j, time_s = (
        problem.compute_charge_j(k) * len(again),
        table.compute_time_s[k] * len(again),
    )
    if came or went:
        energy_j += problem.page_in_charge_j(i) * len(came)
        energy_j += problem.page_out_charge_j(i) * len(went)
        time_s += table.page_in_time_s[i] * len(came) + table.page_out_time_s[i] * len(went)
    in_ram = {*found.kept[i], *found.computed[k], *came}
    held = sum(found.is_held(t, step, i) for t, step in places)
    return Life(
        tensor=i,
        fate=_fate(bool(came), bool(again) and bool(graph.users_of[i]), bool(graph.users_of[i])),
        in_ram=tuple(_spans(in_ram)),
        on_storage=tuple(_spans(found.stored[i])),
        recomputed=again,
        paged_in=tuple(came),
        paged_out=tuple(went),
        energy_j=energy_j,
        time_s=time_s,
        binding_bytes=graph.tensor_bytes[i] * held,
    )


def _fate(paged: bool, recomputed: bool, used: bool) -> Fate:  # noqa: FBT001 - read as one line
    if paged:
        return Fate.BOTH if recomputed else Fate.PAGED
    if recomputed:
        return Fate.RECOMPUTED
    return Fate.KEPT if used else Fate.UNUSED


def _stages(pairs: Iterable[tuple[int, int]]) -> Mapping[int, set[int]]:
    stages: defaultdict[int, set[int]] = defaultdict(set)
    for t, k in pairs:
        stages[k].add(t)
    return stages


def _spans(stages: Iterable[int]) -> Iterator[Span]:
    """Yield first and last of each run of consecutive stages."""
    first = last = None
    for t in sorted(stages):
        if last is None or first is None:
            first = t
        elif t != last + 1:
            yield first, last
            first = t
        last = t
    if first is not None and last is not None:
        yield first, last


MOVED: Final = frozenset({Fate.RECOMPUTED, Fate.PAGED, Fate.BOTH})
"""Fates that cost something."""
