"""A training graph as a chain of steps that the backward pass reverses.

Methods for chains (revolve, rotor, POFO) treat the forward pass as consecutive steps ``1..L``, each
of which passes a *state* to the next. A step consists of the nodes between two articulation points
of the forward pass; on a plain chain it is one node. The backward pass is divided accordingly: part
``s`` reads the *tape* of step `s` (outputs of the step) and the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase, articulation_points
from poetmodel.heuristics.execution import (
    FORWARD,
    evictable_tensors,
    first_backward_node,
    last_forward_uses,
    retain,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from poetmodel.schedule import Schedule


@dataclass(frozen=True, slots=True)
class ChainStep:
    """One step of a chain, and its part of the backward pass."""

    nodes: range
    """Nodes of the forward pass; may include samples and labels."""
    outputs: frozenset[int]
    """Outputs of the step's last node that are read later."""
    state: frozenset[int]
    """Outputs of the step's last node that the next step reads."""
    tape: frozenset[int]
    """Tensors of the step that the step's part of the backward pass reads."""
    backward: tuple[int, ...]
    """Nodes of the step's part of the backward pass, in ascending order; may be empty."""


class Chain:
    """A graph divided into at least two steps that its backward pass reverses.

    The constructor raises `MethodNotApplicableError` if the graph is not a chain.
    """

    def __init__(self, graph: Graph) -> None:
        """Divide the forward pass at its articulation points, and the backward pass into parts."""
        begin = first_backward_node(graph)
        self.graph = graph
        self.recomputable = evictable_tensors(graph)
        """Recomputable tensors of the forward pass."""
        recomputable_nodes = {graph.node_of[i] for i in self.recomputable}
        late_forward = next((node for node in graph.nodes[begin:] if node.phase in FORWARD), None)
        if late_forward is not None:
            raise MethodNotApplicableError(
                f"graph {graph.name!r} is no chain: its forward node {late_forward.name!r} "
                "follows a backward one"
            )
        points = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
        ends = [k for k in points if k in recomputable_nodes and k < begin]
        if len(ends) < 2 or begin == len(graph.nodes):  # noqa: PLR2004 - a chain has two steps or more
            reason = "no backward pass" if begin == len(graph.nodes) else "a single step"
            raise MethodNotApplicableError(f"graph {graph.name!r} is no chain: it has {reason}")
        ends[-1] = begin - 1
        ranges = [range(a + 1, b + 1) for a, b in pairwise([-1, *ends])]
        outputs_read = [
            frozenset(
                i for i in graph.outputs_of[k] if i in self.recomputable and graph.users_of[i]
            )
            for k in ends
        ]
        states = [
            frozenset(i for i in outputs if graph.users_of[i][0] < begin)
            for outputs in outputs_read
        ]
        parts = _split_backward(graph, ranges, states, self.recomputable)
        self.steps: list[ChainStep] = []
        """Steps in forward order."""
        for nodes, outputs, state, part in zip(ranges, outputs_read, states, parts, strict=True):
            produced = self.recomputable.intersection(i for k in nodes for i in graph.outputs_of[k])
            tape = produced.intersection(i for t in part for i in graph.inputs_of[t])
            self.steps.append(ChainStep(nodes, outputs, state, tape, tuple(part)))

    def realize(
        self,
        held: Mapping[int, Collection[int]],
        *,
        freed: Collection[int] = (),
        stored: Collection[int] = (),
    ) -> Schedule:
        """Return the schedule that has the tensors `held[s]` in RAM when part `s` begins.

        Steps count from 0. The forward pass keeps the tensors that the last part begins with.
        Tensors of the `freed` steps are freed before their part begins, and recomputed for it;
        those of other steps stay if a later part held them. Tensors of `stored` are paged out, and
        paged in where they are missing.
        """
        graph, steps, last = self.graph, self.steps, last_forward_uses(self.graph)
        begin = first_backward_node(graph)
        part_of = [len(steps) - 1] * len(graph.nodes)
        for s, step in enumerate(steps):
            for t in step.backward:
                part_of[t] = s
        forward_peaks = {step.backward[0] for step in steps if step.backward}
        last_use = tuple(users[-1] if users else -1 for users in graph.users_of)

        def stays_after(t: int, i: int) -> bool:
            """Return whether tensor `i` stays in RAM after stage `t`."""
            part_after = part_of[min(t + 1, len(part_of) - 1)]
            if (
                part_after in freed
                and part_after != part_of[t]
                and graph.node_of[i] in steps[part_after].nodes
            ):
                return False
            if i in held[part_after] and (t < begin or i in held[part_of[t]]):
                return True
            if t + 1 < begin:
                return t < last[i]
            return part_after == part_of[t] and last_use[i] > t

        def required_tensors(t: int) -> Collection[int]:
            return held[part_of[t]] if t in forward_peaks else ()

        return retain(graph, stays_after, required_tensors, stored=stored)

    def bytes_of(self, tensors: Collection[int]) -> int:
        """Return the bytes of some tensors together [B]."""
        return sum(self.graph.tensor_bytes[i] for i in tensors)


def _split_backward(
    graph: Graph,
    ranges: Sequence[range],
    states: Sequence[frozenset[int]],
    recomputable: frozenset[int],
) -> list[list[int]]:
    """Split the backward pass: each node belongs to the latest step whose part may read its inputs.

    Raises `MethodNotApplicableError` if a node has no such step.
    """
    step_of = {k: s for s, nodes in enumerate(ranges) for k in nodes}
    parts: list[list[int]] = [[] for _ in ranges]
    current = len(ranges) - 1
    for t in range(first_backward_node(graph), len(graph.nodes)):
        choices = set(range(current + 1))
        for i in graph.inputs_of[t]:
            if i in recomputable:
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
    """Peaks of a step in different modes [B]."""

    taped: int
    """Peak with the step's tape kept, without the step's input."""
    run: int
    """Peak without a tape, without the step's input."""
    run_with_input: int
    """Peak without a tape, with the step's input until the input's last use."""


class ChainMemory(Chain):
    """A chain with the peaks of its steps and of the parts of its backward pass [B].

    *Other tensors* are all except the recomputable ones of the forward pass: samples, labels and
    gradients. All methods keep them from their computation to their last use.
    """

    def __init__(self, graph: Graph) -> None:
        """Compute the peaks of all steps and of all parts of the backward pass."""
        super().__init__(graph)
        states = [frozenset[int](), *(step.state for step in self.steps)]
        steps = range(len(self.steps))
        self.others_bytes = self._others_bytes()
        """Other tensors in RAM when each stage begins [B]."""
        self.backward_bytes = [self._backward_bytes(s, ()) for s in steps]
        """Peak of each part of the backward pass: other tensors, the rest of the tape, working
        sets. The state before the step, which stays until the end of the part, is not counted
        [B]."""
        self.freeing_bytes = [self._backward_bytes(s, states[s]) for s in steps]
        """Peak of each part if the state before the step is freed after its last reader; its bytes
        are subtracted from there on [B]."""
        self.forward_peaks = [self._step_peaks(s, states[s], is_recomputed=False) for s in steps]
        """Peaks of each step in the forward pass, with other tensors."""
        self.recomputed_peaks = [self._step_peaks(s, states[s], is_recomputed=True) for s in steps]
        """Peaks of each step when recomputed, without other tensors."""

    def recomputed_nodes(self, s: int) -> list[int]:
        """Return the nodes of step `s` that run when it is recomputed."""
        outputs_of = self.graph.outputs_of
        return [k for k in self.steps[s].nodes if self.recomputable.intersection(outputs_of[k])]

    def nodes_beside_state(self, s: int) -> list[int]:
        """Return the nodes of step `s` that compute the rest of its tape from its state.

        Nodes that only compute the state are excluded.
        """
        step, graph = self.steps[s], self.graph
        nodes: set[int] = set()
        required_tensors = list(step.tape - step.state)
        while required_tensors:
            k = graph.node_of[required_tensors.pop()]
            if k in step.nodes and k not in nodes:
                nodes.add(k)
                required_tensors += [
                    i for i in graph.inputs_of[k] if i in self.recomputable - step.state
                ]
        return sorted(nodes)

    def beside_state_bytes(self, s: int) -> int:
        """Return the peak of computing the rest of step `s`'s tape, with its state in RAM [B]."""
        step, nodes = self.steps[s], self.nodes_beside_state(s)
        return self._peak(nodes, nodes, step.tape, step.tape & step.state) + self.others_before(s)

    def peaks(self, s: int, t: int) -> StepPeaks:
        """Return the peaks of step `s` when it runs before part `t` of the backward pass."""
        if t == len(self.steps) - 1:
            return self.forward_peaks[s]
        other_bytes = self.others_before(t)
        return StepPeaks(*(peak + other_bytes for peak in self.recomputed_peaks[s]))

    def others_before(self, t: int) -> int:
        """Return the bytes of other tensors in RAM when backward part `t` begins [B]."""
        part = self.steps[t].backward
        return self.others_bytes[part[0]] if part else 0

    def _output_and_workspace_bytes(self, k: int) -> int:
        return self.graph.nodes[k].output_bytes + self.graph.nodes[k].workspace_bytes

    def _others_bytes(self) -> list[int]:
        """Return the bytes of other tensors in RAM when each stage begins [B]."""
        graph, steps = self.graph, self.steps
        changes = [0] * (len(graph.nodes) + 2)
        first_stage = {k: step.backward[0] for step in steps if step.backward for k in step.nodes}
        for i, size in enumerate(graph.tensor_bytes):
            if i in self.recomputable or not graph.users_of[i]:
                continue
            # Inputs of a step other than its state are needed until the step can last run.
            end = max(max(k, first_stage.get(k, k)) for k in graph.users_of[i])
            changes[graph.node_of[i] + 1] += size
            changes[end + 1] -= size
        return list(accumulate(changes[: len(graph.nodes)]))

    def _backward_bytes(self, s: int, freed: Collection[int]) -> int:
        """Return the peak of backward part `s`; `freed` tensors end at their last reader [B]."""
        part, sizes = self.steps[s].backward, self.graph.tensor_bytes
        last = {i: t for t in part for i in self.graph.inputs_of[t]}
        peak = 0
        for t in part:
            taped = sum(sizes[i] for i in self.steps[s].tape if last[i] >= t)
            off = sum(sizes[i] for i in freed if last.get(i, -1) < t)
            peak = max(
                peak, self.others_bytes[t] + taped + self._output_and_workspace_bytes(t) - off
            )
        return peak

    def _step_peaks(self, s: int, before: frozenset[int], *, is_recomputed: bool) -> StepPeaks:
        """Return the peaks of step `s`; `before` is the state that it reads."""
        step = self.steps[s]
        nodes = self.recomputed_nodes(s) if is_recomputed else step.nodes
        others_bytes = None if is_recomputed else self.others_bytes
        return StepPeaks(
            taped=self._peak(nodes, step.nodes, step.tape | step.state, others=others_bytes),
            run=self._peak(nodes, step.nodes, step.state, others=others_bytes),
            run_with_input=self._peak(nodes, step.nodes, step.state, before, others=others_bytes),
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
        """Return the peak of running `nodes` while the tensors `live` are in RAM [B].

        Tensors outside `kept` are freed after the last of `readers`. `others` has the bytes of
        other tensors per stage.
        """
        last = {i: k for k in readers for i in self.graph.inputs_of[k]}
        peak = 0
        for k in nodes:
            in_ram = self.bytes_of(live) + (0 if others is None else others[k])
            peak = max(peak, in_ram + self._output_and_workspace_bytes(k))
            live |= self.recomputable.intersection(self.graph.outputs_of[k])
            live = frozenset(i for i in live if i in kept or last.get(i, k) > k)
        return peak
