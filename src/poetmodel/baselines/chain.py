"""A training graph as a chain of steps that its backward pass goes through in reverse.

Methods for chains (revolve, rotor, POFO) see the forward pass as steps ``1..L``, one after the
other, each of which hands a *state* to the next. A step is what lies between two articulation
points of the forward pass; on a plain chain it is one node. The backward pass is split likewise:
part ``s`` reads the *tape* of step `s` (tensors that the step made) and the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.baselines.realization import (
    begin_of_backward,
    droppable,
    last_forward_uses,
    realize,
)
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase, articulation_points

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from poetmodel.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a chain, and the part of the backward pass that belongs to it."""

    nodes: range
    """Nodes of the forward pass, samples and labels among them aside."""
    outputs: frozenset[int]
    """All outputs of its last node that are still read."""
    state: frozenset[int]
    """Those of them that the next step reads."""
    tape: frozenset[int]
    """Its tensors that its part of the backward pass reads."""
    backward: tuple[int, ...]
    """Nodes of its part of the backward pass, ascending; may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A graph cut into steps."""

    graph: Graph
    """The training graph."""
    steps: tuple[Step, ...]
    """The steps, first to last."""

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Cut a graph into steps.

        Raises
        ------
        MethodNotApplicableError
            If its forward pass has no two steps, or its backward pass does not go through them in
            reverse.
        """
        begin, free = begin_of_backward(graph), droppable(graph)
        own = {graph.node_of[i] for i in free}
        points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
        ends = [k for k in points if k in own and k < begin]
        if len(ends) < 2 or begin == len(graph.nodes):  # noqa: PLR2004 - two steps make a chain
            what = "no backward pass" if begin == len(graph.nodes) else "a single step"
            msg = f"graph {graph.name!r} is no chain: it has {what}"
            raise MethodNotApplicableError(msg)
        ends[-1] = begin - 1
        bounds = [-1, *ends]
        ranges = [range(a + 1, b + 1) for a, b in pairwise(bounds)]
        read = [
            frozenset(i for i in graph.outputs_of[k] if i in free and graph.users_of[i])
            for k in ends
        ]
        states = [frozenset(i for i in made if graph.users_of[i][0] < begin) for made in read]
        parts = _parts(graph, ranges, states, free)
        return cls(
            graph=graph,
            steps=tuple(
                Step(
                    nodes=nodes,
                    outputs=made,
                    state=state,
                    tape=frozenset(
                        i
                        for t in part
                        for i in graph.inputs_of[t]
                        if i in free and graph.node_of[i] in nodes
                    ),
                    backward=tuple(part),
                )
                for nodes, made, state, part in zip(ranges, read, states, parts, strict=True)
            ),
        )

    def realize(
        self, held: Mapping[int, Collection[int]], *, freed: Collection[int] = ()
    ) -> Schedule:
        """Return the schedule that has the tensors of `held` in RAM as each part begins.

        Parameters
        ----------
        held : mapping of int to collection of int
            For each step, counted from 0, the tensors of the forward pass that are in RAM when its
            part of the backward pass begins. What the forward pass itself keeps is what the last
            step's part begins with.
        freed : collection of int, optional
            Steps whose own tensors are freed before their part begins, and computed again for it;
            those of other steps stay where parts behind them held them.
        """
        graph, steps, last = self.graph, self.steps, last_forward_uses(self.graph)
        begin = begin_of_backward(graph)
        part_of, first = self._parts_by_stage()
        final = tuple(users[-1] if users else -1 for users in graph.users_of)

        def keep(t: int, i: int) -> bool:
            after = part_of[min(t + 1, len(part_of) - 1)]
            if after in freed and after != part_of[t] and graph.node_of[i] in steps[after].nodes:
                return False
            if i in held[after] and (t < begin or i in held[part_of[t]]):
                return True
            if t + 1 < begin:
                return t < last[i]
            return after == part_of[t] and final[i] > t

        def demand(t: int) -> Collection[int]:
            return held[part_of[t]] if t in first else ()

        return realize(graph, keep, demand)

    def _parts_by_stage(self) -> tuple[list[int], frozenset[int]]:
        """Return the part of each stage, and the stages with which a part begins."""
        graph = self.graph
        part_of = [len(self.steps) - 1] * len(graph.nodes)
        for s, step in enumerate(self.steps):
            for t in step.backward:
                part_of[t] = s
        return part_of, frozenset(step.backward[0] for step in self.steps if step.backward)

    def bytes_of(self, tensors: Collection[int]) -> int:
        """Return the bytes of some tensors together [B]."""
        return sum(self.graph.tensor_bytes[i] for i in tensors)


def _parts(
    graph: Graph,
    ranges: Sequence[range],
    states: Sequence[frozenset[int]],
    free: frozenset[int],
) -> list[list[int]]:
    """Split the backward pass: each node goes to the latest step whose part may read its inputs."""
    step_of = {k: s for s, nodes in enumerate(ranges) for k in nodes}
    parts: list[list[int]] = [[] for _ in ranges]
    current = len(ranges) - 1
    for t in range(begin_of_backward(graph), len(graph.nodes)):
        choices = set(range(current + 1))
        for i in graph.inputs_of[t]:
            if i in free:
                s = step_of[graph.node_of[i]]
                choices &= {s, s + 1} if i in states[s] else {s}
        if not choices:
            msg = (
                f"graph {graph.name!r} is no chain: its backward pass does not go through the "
                f"{len(ranges)} steps of the forward pass in reverse (node "
                f"{graph.nodes[t].name!r})"
            )
            raise MethodNotApplicableError(msg)
        current = max(choices)
        parts[current].append(t)
    return parts
