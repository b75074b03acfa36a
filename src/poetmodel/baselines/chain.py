"""A training graph as a chain of steps that its backward pass goes through in reverse.

Methods for chains (revolve, rotor, POFO) see the forward pass as steps ``1..L``, one after the
other, each of which passes a *state* to the next. A step is what lies between two articulation
points of the forward pass; on a plain chain it is one node. The backward pass is split likewise:
part ``s`` reads the *tape* of step `s` (outputs of the step) and the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase, articulation_points
from poetmodel.heuristics.execution import (
    FORWARD,
    begin_of_backward,
    droppable,
    last_forward_uses,
    retain,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from poetmodel.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One step of a chain, and the part of the backward pass that belongs to it."""

    nodes: range
    """Nodes of the forward pass, samples and labels among them aside."""
    outputs: frozenset[int]
    """Outputs of its last node that are read later."""
    state: frozenset[int]
    """Those of them that the next step reads."""
    tape: frozenset[int]
    """Its tensors that its part of the backward pass reads."""
    backward: tuple[int, ...]
    """Nodes of its part of the backward pass, ascending; may be empty."""


class Chain:
    """A graph cut into steps, at least two, which its backward pass goes through in reverse."""

    def __init__(self, graph: Graph) -> None:
        begin = begin_of_backward(graph)
        self.graph = graph
        self.free = droppable(graph)
        """Recomputable tensors of the forward pass."""
        own = {graph.node_of[i] for i in self.free}
        late = next((node for node in graph.nodes[begin:] if node.phase in FORWARD), None)
        if late is not None:
            raise MethodNotApplicableError(
                f"graph {graph.name!r} is no chain: its forward node {late.name!r} follows a "
                "backward one"
            )
        points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
        ends = [k for k in points if k in own and k < begin]
        if len(ends) < 2 or begin == len(graph.nodes):  # noqa: PLR2004 - a chain has two steps or more
            what = "no backward pass" if begin == len(graph.nodes) else "a single step"
            raise MethodNotApplicableError(f"graph {graph.name!r} is no chain: it has {what}")
        ends[-1] = begin - 1
        ranges = [range(a + 1, b + 1) for a, b in pairwise([-1, *ends])]
        read = [
            frozenset(i for i in graph.outputs_of[k] if i in self.free and graph.users_of[i])
            for k in ends
        ]
        states = [frozenset(i for i in outputs if graph.users_of[i][0] < begin) for outputs in read]
        parts = _parts(graph, ranges, states, self.free)
        self.steps: list[ChainStep] = []
        """First to last."""
        for nodes, outputs, state, part in zip(ranges, read, states, parts, strict=True):
            produced = self.free.intersection(i for k in nodes for i in graph.outputs_of[k])
            tape = produced.intersection(i for t in part for i in graph.inputs_of[t])
            self.steps.append(ChainStep(nodes, outputs, state, tape, tuple(part)))

    def realize(
        self,
        held: Mapping[int, Collection[int]],
        *,
        freed: Collection[int] = (),
        stored: Collection[int] = (),
    ) -> Schedule:
        """Return the schedule that has the tensors of `held` in RAM as each part begins.

        Steps count from 0. What the forward pass itself keeps is what the last step's part begins
        with. Own tensors of `freed` steps are freed before their part begins, and recomputed for
        it; those of other steps stay where parts behind them held them. What is `stored` is paged
        out, and in where it is missing.
        """
        graph, steps, last = self.graph, self.steps, last_forward_uses(self.graph)
        begin = begin_of_backward(graph)
        part_of = [len(steps) - 1] * len(graph.nodes)
        for s, step in enumerate(steps):
            for t in step.backward:
                part_of[t] = s
        first = {step.backward[0] for step in steps if step.backward}
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

        return retain(graph, keep, demand, stored=stored)

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
            raise MethodNotApplicableError(
                f"graph {graph.name!r} is no chain: its backward pass does not go through the "
                f"{len(ranges)} steps of the forward pass in reverse (node "
                f"{graph.nodes[t].name!r})"
            )
        current = max(choices)
        parts[current].append(t)
    return parts


class StepPeaks(NamedTuple):
    """Peaks of a step [B]."""

    taped: int
    """With its tape kept, its input aside."""
    run: int
    """Without a tape, its input aside."""
    run_with_input: int
    """Without a tape, its input counted up to its last use."""


class ChainMemory(Chain):
    """A chain with the peaks of its steps and of the parts of its backward pass [B].

    *Others* are all tensors but the recomputable ones of the forward pass: samples, labels,
    gradients. Every method keeps them from their computation to their last use.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        states = [frozenset[int](), *(step.state for step in self.steps)]
        steps = range(len(self.steps))
        self.others_bytes = self._others_bytes()
        """Others in RAM as each stage begins."""
        self.backward_bytes = [self._backward_bytes(s, ()) for s in steps]
        """Peak of each part of the backward pass: others, what is left of the tape, working sets.
        The state before the step aside, which stays to the end of the part."""
        self.freeing_bytes = [self._backward_bytes(s, states[s]) for s in steps]
        """The same where that state is freed after its last reader: from there on its bytes are
        off."""
        self.first = [self._step_peaks(s, states[s], again=False) for s in steps]
        """Of each step in the forward pass, others included."""
        self.recomputed = [self._step_peaks(s, states[s], again=True) for s in steps]
        """Of each step when recomputed, others aside."""

    def recomputed_nodes(self, s: int) -> list[int]:
        """Return the nodes of step `s` that run when it is recomputed."""
        outputs_of = self.graph.outputs_of
        return [k for k in self.steps[s].nodes if self.free.intersection(outputs_of[k])]

    def nodes_beside_state(self, s: int) -> list[int]:
        """Return the nodes that compute the rest of the tape of step `s` beside its state."""
        step, graph = self.steps[s], self.graph
        nodes: set[int] = set()
        wanted = list(step.tape - step.state)
        while wanted:
            k = graph.node_of[wanted.pop()]
            if k in step.nodes and k not in nodes:
                nodes.add(k)
                wanted += [i for i in graph.inputs_of[k] if i in self.free - step.state]
        return sorted(nodes)

    def beside_state_bytes(self, s: int) -> int:
        """Return the peak of computing the rest of the tape of step `s` while its state stays."""
        step, nodes = self.steps[s], self.nodes_beside_state(s)
        return self._peak(nodes, nodes, step.tape, step.tape & step.state) + self.others_before(s)

    def peaks(self, s: int, t: int) -> StepPeaks:
        """Return the peaks of step `s` before part `t` of the backward pass."""
        if t == len(self.steps) - 1:
            return self.first[s]
        others = self.others_before(t)
        return StepPeaks(*(peak + others for peak in self.recomputed[s]))

    def others_before(self, t: int) -> int:
        """Return the bytes of others as part `t` of the backward pass begins."""
        part = self.steps[t].backward
        return self.others_bytes[part[0]] if part else 0

    def _made_bytes(self, k: int) -> int:
        """Return the bytes of outputs and workspace of a node."""
        return self.graph.nodes[k].output_bytes + self.graph.nodes[k].workspace_bytes

    def _others_bytes(self) -> list[int]:
        graph, steps = self.graph, self.steps
        changes = [0] * (len(graph.nodes) + 2)
        first_stage = {k: step.backward[0] for step in steps if step.backward for k in step.nodes}
        for i, size in enumerate(graph.tensor_bytes):
            if i in self.free or not graph.users_of[i]:
                continue
            # What a step reads beside its state is needed until that step can run for the last
            # time.
            end = max(max(k, first_stage.get(k, k)) for k in graph.users_of[i])
            changes[graph.node_of[i] + 1] += size
            changes[end + 1] -= size
        return list(accumulate(changes[: len(graph.nodes)]))

    def _backward_bytes(self, s: int, freed: Collection[int]) -> int:
        part, sizes = self.steps[s].backward, self.graph.tensor_bytes
        last = {i: t for t in part for i in self.graph.inputs_of[t]}
        peak = 0
        for t in part:
            taped = sum(sizes[i] for i in self.steps[s].tape if last[i] >= t)
            off = sum(sizes[i] for i in freed if last.get(i, -1) < t)
            peak = max(peak, self.others_bytes[t] + taped + self._made_bytes(t) - off)
        return peak

    def _step_peaks(self, s: int, before: frozenset[int], *, again: bool) -> StepPeaks:
        step = self.steps[s]
        nodes = self.recomputed_nodes(s) if again else step.nodes
        others = None if again else self.others_bytes
        return StepPeaks(
            taped=self._peak(nodes, step.nodes, step.tape | step.state, others=others),
            run=self._peak(nodes, step.nodes, step.state, others=others),
            run_with_input=self._peak(nodes, step.nodes, step.state, before, others=others),
        )

    def _peak(
        self,
        nodes: Iterable[int],
        readers: Iterable[int],
        kept: frozenset[int],
        live: frozenset[int] = frozenset(),
        *,
        others: Sequence[int] | None = None,
    ) -> int:
        """Return the peak of running some nodes beside what is live [B].

        What is not kept is freed after the last reader; `others` are counted by stage.
        """
        last = {i: k for k in readers for i in self.graph.inputs_of[k]}
        most = 0
        for k in nodes:
            there = self.bytes_of(live) + (0 if others is None else others[k])
            most = max(most, there + self._made_bytes(k))
            live |= self.free.intersection(self.graph.outputs_of[k])
            live = frozenset(i for i in live if i in kept or last.get(i, k) > k)
        return most
