"""What the steps of a chain take at their peaks, counted node by node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from poetmodel.baselines.realization import begin_of_backward, droppable

if TYPE_CHECKING:
    from collections.abc import Collection

    from poetmodel.baselines.chain import Chain
    from poetmodel.graph import Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainMemory:
    """Peaks of steps and of parts of the backward pass [B].

    *Others* are all tensors but those of the forward pass that can be made again: samples, labels,
    gradients. They live from their computation to their last use whatever a method decides.
    """

    chain: Chain
    """The steps."""
    free: frozenset[int]
    """Tensors that can be made again."""
    others_bytes: tuple[int, ...]
    """Others in RAM as each stage begins."""
    backward_bytes: tuple[int, ...]
    """Peak of each part of the backward pass: others, what is left of the tape, working sets.

    The state before the step aside, which stays to the end of the part."""
    freeing_bytes: tuple[int, ...]
    """The same where that state is freed after its last reader: from there on its bytes are off."""
    first: tuple[tuple[int, int, int], ...]
    """Peaks of each step in the forward pass, others included; see `_peaks`."""
    again: tuple[tuple[int, int, int], ...]
    """Peaks of each step when it is computed again, others aside."""

    @classmethod
    def of(cls, chain: Chain) -> ChainMemory:
        """Count the peaks of a chain."""
        free = droppable(chain.graph)
        others = _others_bytes(chain, free)
        count = len(chain.steps)
        return cls(
            chain=chain,
            free=free,
            others_bytes=others,
            backward_bytes=tuple(_backward_bytes(chain, s, others, ()) for s in range(count)),
            freeing_bytes=tuple(
                _backward_bytes(chain, s, others, chain.steps[s - 1].state if s else ())
                for s in range(count)
            ),
            first=tuple(_peaks(chain, s, free, others) for s in range(count)),
            again=tuple(_peaks(chain, s, free, None) for s in range(count)),
        )

    def made_again(self, s: int) -> list[int]:
        """Return the nodes of step `s` that run when it is computed again."""
        return [k for k in self.chain.steps[s].nodes if self.free.intersection(self._outputs(k))]

    def made_beside_state(self, s: int) -> list[int]:
        """Return the nodes that make what is missing of the tape of step `s` beside its state."""
        step, graph = self.chain.steps[s], self.chain.graph
        nodes: set[int] = set()
        wanted = list(step.tape - step.state)
        while wanted:
            k = graph.node_of[wanted.pop()]
            if k in step.nodes and k not in nodes:
                nodes.add(k)
                wanted += [i for i in graph.inputs_of[k] if i in self.free - step.state]
        return sorted(nodes)

    def taped_bytes(self, s: int, t: int) -> int:
        """Return the peak of step `s` with its tape kept, before part `t`; its input aside."""
        return self._peak(s, t, 0)

    def run_bytes(self, s: int, t: int, *, from_outside: bool) -> int:
        """Return the peak of step `s` without a tape, before part `t`.

        Its input counts up to its last use, unless it is held outside anyway.
        """
        return self._peak(s, t, 1 if from_outside else 2)

    def beside_state_bytes(self, s: int) -> int:
        """Return the peak of making the rest of the tape of step `s` while its state stays."""
        graph, step = self.chain.graph, self.chain.steps[s]
        nodes = self.made_beside_state(s)
        last = {i: k for k in nodes for i in graph.inputs_of[k]}
        live, peak = set(step.tape & step.state), 0
        for k in nodes:
            node = graph.nodes[k]
            peak = max(peak, self.chain.bytes_of(live) + node.output_bytes + node.workspace_bytes)
            live.update(graph.outputs_of[k])
            live = {i for i in live if i in step.tape or last.get(i, k) > k}
        return peak + (self.others_bytes[step.backward[0]] if step.backward else 0)

    def _peak(self, s: int, t: int, kind: int) -> int:
        if t == len(self.chain.steps) - 1:
            return self.first[s][kind]
        part = self.chain.steps[t].backward
        return self.again[s][kind] + (self.others_bytes[part[0]] if part else 0)

    def _outputs(self, k: int) -> tuple[int, ...]:
        return self.chain.graph.outputs_of[k]


def _others_bytes(chain: Chain, free: Collection[int]) -> tuple[int, ...]:
    graph = chain.graph
    changes = [0] * (len(graph.nodes) + 2)
    first_stage = {k: step.backward[0] for step in chain.steps if step.backward for k in step.nodes}
    for i, size in enumerate(graph.tensor_bytes):
        if i in free or not graph.users_of[i]:
            continue
        # What a step reads beside its state is needed until that step can run for the last time.
        end = max(max(k, first_stage.get(k, k)) for k in graph.users_of[i])
        changes[graph.node_of[i] + 1] += size
        changes[end + 1] -= size
    live, total = [], 0
    for change in changes[: len(graph.nodes)]:
        total += change
        live.append(total)
    return tuple(live)


def _backward_bytes(chain: Chain, s: int, others: tuple[int, ...], freed: Collection[int]) -> int:
    graph, step = chain.graph, chain.steps[s]
    left = _last_readers(graph, step.backward, step.tape)
    state = _last_readers(graph, step.backward, freed)
    peak = 0
    for t in step.backward:
        taped = sum(graph.tensor_bytes[i] for i, end in left.items() if end >= t)
        off = sum(graph.tensor_bytes[i] for i, end in state.items() if end < t)
        node = graph.nodes[t]
        peak = max(peak, others[t] + taped + node.output_bytes + node.workspace_bytes - off)
    return peak


def _last_readers(graph: Graph, nodes: Collection[int], tensors: Collection[int]) -> dict[int, int]:
    """Return the last of some nodes that reads each tensor, -1 where none does."""
    return {i: max((t for t in nodes if i in graph.inputs_of[t]), default=-1) for i in tensors}


def _peaks(
    chain: Chain, s: int, free: Collection[int], others: tuple[int, ...] | None
) -> tuple[int, int, int]:
    """Return the peaks of a step: with its tape kept; without a tape; so, and its input counted.

    With `others` as in the forward pass, where they count; without, as when the step is computed
    again and nothing but what can be made again is made.
    """
    graph, step = chain.graph, chain.steps[s]
    before = chain.steps[s - 1].state if s else frozenset[int]()
    last: dict[int, int] = {}
    for k in step.nodes:
        last.update((i, k) for i in (*graph.outputs_of[k], *graph.inputs_of[k]) if i in free)
    begin = begin_of_backward(graph)
    peaks = []
    for kept, counted in (
        (step.tape | step.state, frozenset[int]()),
        (step.state, frozenset[int]()),
        (step.state, before),
    ):
        live, peak = set(counted), 0
        for k in step.nodes:
            made = [i for i in graph.outputs_of[k] if i in free]
            if k >= begin or (others is None and not made):
                continue
            node = graph.nodes[k]
            use = chain.bytes_of(live) + node.output_bytes + node.workspace_bytes
            peak = max(peak, use + (others[k] if others is not None else 0))
            live.update(made)
            live = {i for i in live if i in kept or last.get(i, k) > k}
        peaks.append(peak)
    return peaks[0], peaks[1], peaks[2]
