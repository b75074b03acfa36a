"""A training graph as a chain of steps that the backward pass reverses.

Methods for chains (revolve, rotor, POFO) treat the forward pass as consecutive steps ``0..L-1``,
each of which passes a *state* to the next. The forward pass is divided after articulation points
whose outputs can be recomputed; on a plain chain a step is one node. The backward pass is divided
accordingly: part ``s`` reads the *tape* of step `s` (tensors of the step) and the state before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase, articulation_points
from poetmodel.heuristics.execution import (
    FORWARD_PHASES,
    evictable_tensors,
    first_backward_node,
    last_forward_uses,
    retain_tensors,
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
    """Recomputable outputs of the step's last node that are read later."""
    state: frozenset[int]
    """Members of `outputs` that the next step reads; empty for the last step."""
    tape: frozenset[int]
    """Recomputable tensors of the step that the step's part of the backward pass reads."""
    backward: tuple[int, ...]
    """Nodes of the step's part of the backward pass, in ascending order; may be empty."""


class Chain:
    """A graph divided into at least two steps that its backward pass reverses.

    Each recomputable articulation point but the last one ends a step; the last step ends with the
    forward pass. The constructor raises `MethodNotApplicableError` if the graph is not a chain.
    """

    def __init__(self, graph: Graph) -> None:
        first_backward = first_backward_node(graph)
        self.graph = graph
        self.recomputable = evictable_tensors(graph)
        """Recomputable tensors of the forward pass."""
        recomputable_nodes = {graph.node_of[i] for i in self.recomputable}
        late_forward_node = next(
            (node for node in graph.nodes[first_backward:] if node.phase in FORWARD_PHASES), None
        )
        if late_forward_node is not None:
            raise MethodNotApplicableError(
                f"graph {graph.name!r} is no chain: its forward node {late_forward_node.name!r} "
                "follows a backward one"
            )
        cut_nodes = articulation_points(graph, phases={Phase.FORWARD, Phase.LOSS})
        ends = [k for k in cut_nodes if k in recomputable_nodes and k < first_backward]
        if len(ends) < 2 or first_backward == len(graph.nodes):  # noqa: PLR2004 - a chain has two steps or more
            reason = "no backward pass" if first_backward == len(graph.nodes) else "a single step"
            raise MethodNotApplicableError(f"graph {graph.name!r} is no chain: it has {reason}")
        ends[-1] = first_backward - 1
        ranges = [range(previous_end + 1, end + 1) for previous_end, end in pairwise([-1, *ends])]
        used_outputs = [
            frozenset(
                i for i in graph.outputs_of[k] if i in self.recomputable and graph.users_of[i]
            )
            for k in ends
        ]
        states = [
            frozenset(i for i in outputs if graph.users_of[i][0] < first_backward)
            for outputs in used_outputs
        ]
        backward_parts = _split_backward(graph, ranges, states, self.recomputable)
        self.steps: list[ChainStep] = []
        """Steps in forward order."""
        for nodes, outputs, state, backward_nodes in zip(
            ranges, used_outputs, states, backward_parts, strict=True
        ):
            step_tensors = self.recomputable.intersection(
                i for k in nodes for i in graph.outputs_of[k]
            )
            tape = step_tensors.intersection(i for t in backward_nodes for i in graph.inputs_of[t])
            self.steps.append(ChainStep(nodes, outputs, state, tape, tuple(backward_nodes)))

    def to_schedule(
        self,
        tensors_of_part: Mapping[int, Collection[int]],
        *,
        freed_steps: Collection[int] = (),
        stored_tensors: Collection[int] = (),
    ) -> Schedule:
        """Return the schedule that has `tensors_of_part[s]` in RAM when part `s` begins.

        `tensors_of_part` needs an entry for the last part, and for each part with nodes. Missing
        tensors are recomputed, except `stored_tensors`, which are paged. A recomputable tensor
        stays in the forward pass until its last use there, and longer if the last part begins with
        it; within a part if the part has it or a later node reads it; between parts if
        `tensors_of_part` has it for both. Tensors of `freed_steps` are freed before the part of
        their step, and recomputed for it. Other tensors stay until the last stage that may read
        them.
        """
        graph, steps, last_forward_use = self.graph, self.steps, last_forward_uses(self.graph)
        first_backward = first_backward_node(graph)
        part_of = [len(steps) - 1] * len(graph.nodes)
        for s, step in enumerate(steps):
            for t in step.backward:
                part_of[t] = s
        part_starts = {step.backward[0] for step in steps if step.backward}
        last_use = tuple(users[-1] if users else -1 for users in graph.users_of)

        def stays_after(t: int, i: int) -> bool:
            """Return whether recomputable tensor `i` stays in RAM after stage `t`."""
            part_after = part_of[min(t + 1, len(part_of) - 1)]
            if (
                part_after in freed_steps
                and part_after != part_of[t]
                and graph.node_of[i] in steps[part_after].nodes
            ):
                return False
            if i in tensors_of_part[part_after] and (
                t < first_backward or i in tensors_of_part[part_of[t]]
            ):
                return True
            if t + 1 < first_backward:
                return t < last_forward_use[i]
            return part_after == part_of[t] and last_use[i] > t

        def required_tensors(t: int) -> Collection[int]:
            return tensors_of_part[part_of[t]] if t in part_starts else ()

        return retain_tensors(graph, stays_after, required_tensors, stored_tensors=stored_tensors)

    def total_bytes(self, tensors: Collection[int]) -> int:
        """Return the sum of the bytes of `tensors` [B]."""
        return sum(self.graph.tensor_bytes[i] for i in tensors)


def _split_backward(
    graph: Graph,
    step_ranges: Sequence[range],
    states: Sequence[frozenset[int]],
    recomputable: frozenset[int],
) -> list[list[int]]:
    """Return each step's backward nodes, each in the latest possible step; refuse a non-chain.

    A node may read recomputable tensors of its own step, and the state before the step.
    """
    step_of = {k: s for s, nodes in enumerate(step_ranges) for k in nodes}
    parts: list[list[int]] = [[] for _ in step_ranges]
    current_step = len(step_ranges) - 1
    for t in range(first_backward_node(graph), len(graph.nodes)):
        possible_steps = set(range(current_step + 1))
        for i in graph.inputs_of[t]:
            if i in recomputable:
                s = step_of[graph.node_of[i]]
                possible_steps &= {s, s + 1} if i in states[s] else {s}
        if not possible_steps:
            raise MethodNotApplicableError(
                f"graph {graph.name!r} is no chain: its backward pass does not go through the "
                f"{len(step_ranges)} steps of the forward pass in reverse (node "
                f"{graph.nodes[t].name!r})"
            )
        current_step = max(possible_steps)
        parts[current_step].append(t)
    return parts


class StepPeaks(NamedTuple):
    """Peaks of executing a step, with and without its tape [B]."""

    taped_bytes: int
    """Peak if the step's tape is kept; the state before the step is not counted."""
    untaped_bytes: int
    """Peak without a tape; the state before the step is not counted."""
    untaped_with_input_bytes: int
    """Peak without a tape; the state before the step counts until its last use."""


class ChainMemory(Chain):
    """A chain with the peaks of its steps and of the parts of its backward pass [B].

    *Other tensors* are all except the recomputable ones of the forward pass, such as samples,
    labels and gradients. All methods keep them from their computation to their last use.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        states = [frozenset[int](), *(step.state for step in self.steps)]
        steps = range(len(self.steps))
        self.other_tensor_bytes = self._count_other_tensor_bytes()
        """Other tensors in RAM when each stage begins [B]."""
        self.backward_bytes = [self._backward_bytes(s, ()) for s in steps]
        """Peak of each part of the backward pass: other tensors, the tape until its last readers in
        the part, outputs and workspaces. The state before the step, which stays until the end of
        the part, is not counted [B]. 0 for an empty part."""
        self.freeing_bytes = [self._backward_bytes(s, states[s]) for s in steps]
        """Peak of each part as in `backward_bytes`, except that the state before the step is freed
        after its last reader in the part: from then on its bytes are subtracted [B]."""
        self.forward_peaks = [self._step_peaks(s, states[s], is_recomputed=False) for s in steps]
        """Peaks of computing each step in the forward pass, with other tensors."""
        self.recomputed_peaks = [self._step_peaks(s, states[s], is_recomputed=True) for s in steps]
        """Peaks of recomputing each step, without other tensors."""

    def recomputed_nodes(self, s: int) -> list[int]:
        """Return the nodes of step `s` that are computed again if the step is recomputed."""
        outputs_of = self.graph.outputs_of
        return [k for k in self.steps[s].nodes if self.recomputable.intersection(outputs_of[k])]

    def tape_completion_nodes(self, s: int) -> list[int]:
        """Return the nodes that complete the tape of step `s` from its own state, ascending."""
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

    def tape_completion_bytes(self, s: int) -> int:
        """Return the peak of computing the tape of step `s` from its `ChainStep.state` [B].

        Of this state, only tensors in the tape count; the state before the step does not count.
        """
        step, nodes = self.steps[s], self.tape_completion_nodes(s)
        return self._peak(
            nodes, nodes, step.tape, step.tape & step.state
        ) + self.other_bytes_before(s)

    def peaks(self, s: int, t: int) -> StepPeaks:
        """Return the peaks of step `s` if it is executed before part `t` of the backward pass.

        Before the last part, that is the forward pass; before any other part, the step is
        recomputed beside the other tensors in RAM.
        """
        if t == len(self.steps) - 1:
            return self.forward_peaks[s]
        other_bytes = self.other_bytes_before(t)
        return StepPeaks(*(peak + other_bytes for peak in self.recomputed_peaks[s]))

    def other_bytes_before(self, t: int) -> int:
        """Return the bytes of other tensors in RAM when part `t` begins, or 0 if empty [B]."""
        part = self.steps[t].backward
        return self.other_tensor_bytes[part[0]] if part else 0

    def _output_and_workspace_bytes(self, k: int) -> int:
        return self.graph.nodes[k].output_bytes + self.graph.nodes[k].workspace_bytes

    def _count_other_tensor_bytes(self) -> list[int]:
        """Return the bytes of tensors that are not `recomputable` at each stage's begin [B]."""
        graph, steps = self.graph, self.steps
        byte_changes = [0] * (len(graph.nodes) + 2)
        first_stage = {k: step.backward[0] for step in steps if step.backward for k in step.nodes}
        for i, size in enumerate(graph.tensor_bytes):
            if i in self.recomputable or not graph.users_of[i]:
                continue
            # A step may be recomputed until its part of the backward pass begins, and then reads
            # its samples and labels again.
            last_stage = max(max(k, first_stage.get(k, k)) for k in graph.users_of[i])
            byte_changes[graph.node_of[i] + 1] += size
            byte_changes[last_stage + 1] -= size
        return list(accumulate(byte_changes[: len(graph.nodes)]))

    def _backward_bytes(self, s: int, freed_tensors: Collection[int]) -> int:
        """Return the peak of backward part `s`, 0 for an empty part [B].

        The state before the step does not count, nor do `freed_tensors` after their last reader.
        """
        backward_nodes, sizes = self.steps[s].backward, self.graph.tensor_bytes
        last_reader = {i: t for t in backward_nodes for i in self.graph.inputs_of[t]}
        peak = 0
        for t in backward_nodes:
            tape_bytes = sum(sizes[i] for i in self.steps[s].tape if last_reader[i] >= t)
            freed_bytes = sum(sizes[i] for i in freed_tensors if last_reader.get(i, -1) < t)
            peak = max(
                peak,
                self.other_tensor_bytes[t]
                + tape_bytes
                + self._output_and_workspace_bytes(t)
                - freed_bytes,
            )
        return peak

    def _step_peaks(self, s: int, input_state: frozenset[int], *, is_recomputed: bool) -> StepPeaks:
        """Return peaks of step `s` from `input_state`; without other tensors if `is_recomputed`."""
        step = self.steps[s]
        nodes = self.recomputed_nodes(s) if is_recomputed else step.nodes
        other_bytes = None if is_recomputed else self.other_tensor_bytes
        return StepPeaks(
            taped_bytes=self._peak(
                nodes, step.nodes, step.tape | step.state, other_bytes_by_stage=other_bytes
            ),
            untaped_bytes=self._peak(
                nodes, step.nodes, step.state, other_bytes_by_stage=other_bytes
            ),
            untaped_with_input_bytes=self._peak(
                nodes, step.nodes, step.state, input_state, other_bytes_by_stage=other_bytes
            ),
        )

    def _peak(
        self,
        nodes: Iterable[int],
        readers: Iterable[int],
        kept_tensors: frozenset[int],
        live_tensors: frozenset[int] = frozenset(),
        *,
        other_bytes_by_stage: Sequence[int] | None = None,
    ) -> int:
        """Return the peak of executing `nodes` in order, with `live_tensors` in RAM first [B].

        Except `kept_tensors`, tensors are freed after the last of `readers`.
        """
        last_reader = {i: k for k in readers for i in self.graph.inputs_of[k]}
        peak = 0
        for k in nodes:
            ram_bytes = self.total_bytes(live_tensors) + (
                0 if other_bytes_by_stage is None else other_bytes_by_stage[k]
            )
            peak = max(peak, ram_bytes + self._output_and_workspace_bytes(k))
            live_tensors |= self.recomputable.intersection(self.graph.outputs_of[k])
            live_tensors = frozenset(
                i for i in live_tensors if i in kept_tensors or last_reader.get(i, k) > k
            )
        return peak
