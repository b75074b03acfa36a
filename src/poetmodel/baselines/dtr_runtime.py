"""A training step as the runtime of dynamic tensor rematerialization carries it out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.assembly import Trace
from poetmodel.baselines.dtr_scores import Scores
from poetmodel.baselines.realization import last_needs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.time_limit import check_time_limit
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

THRASHING: Final = 50
"""A run that computes for as many passes is given up."""


@dataclass(slots=True)
class _Request:
    """A node that is to be computed once all its inputs are in RAM and locked."""

    node: int
    missing: list[int]
    """Inputs that were not in RAM, in order."""


class Runtime:
    """The runtime of the paper's simulator (simrd's ``RuntimeV2Eager``), within some RAM.

    Parameters
    ----------
    problem : Problem
        What is carried out.
    heuristic : str
        The score that names the tensor to evict.
    ram_bytes : int
        RAM that tensors and workspace may fill [B].

    Notes
    -----
    Nodes run in graph order. A node's inputs that are in RAM are locked, the others recomputed one
    after the other, each in the same way, and locked; then room is made for all its outputs. A
    tensor leaves when its last reader has run. One that is recomputed after that stays until its
    score is the least: the runtime does not know who will ask for it again. What may not be
    recomputed is never evicted, and leaves when nothing can need it any more.
    """

    def __init__(self, problem: Problem, heuristic: str, ram_bytes: int) -> None:
        self.problem = problem
        self.graph = graph = problem.graph
        self.trace = Trace(graph)
        self.scores = Scores(graph, problem.table.compute_time_s, heuristic, nodes_once=False)
        self.ram_bytes = ram_bytes
        self.used_bytes = 0
        self.locks: Counter[int] = Counter()
        again = {i for i, k in enumerate(graph.node_of) if problem.may_recompute(k)}
        self.pinned = set(range(len(graph.tensors))) - again
        needs = last_needs(graph, again)
        self.leaving: list[list[int]] = [[] for _ in graph.nodes]
        """The tensors that leave after each node's first computation."""
        for i, users in enumerate(graph.users_of):
            end = users[-1] if users else graph.node_of[i]
            self.leaving[needs[i] if i in self.pinned else end].append(i)
        self.limit_s = THRASHING * sum(problem.table.compute_time_s)

    def run(self) -> Schedule:
        """Carry out the step and return it as a schedule.

        Raises
        ------
        MethodNotApplicableError
            If a step does not fit and all tensors are locked, or the run thrashes.
        """
        for k in range(len(self.graph.nodes)):
            self._supply(k)
            for i in self.graph.outputs_of[k]:
                self.scores.use(i)
            for i in self.leaving[k]:
                if i in self.trace.ram:
                    self._evict(i)
        return self.trace.schedule()

    def _supply(self, k: int) -> None:
        """Compute node `k`, and before it whatever it needs."""
        pending = [self._request(k)]
        while pending:
            check_time_limit()
            request = pending[-1]
            while request.missing and request.missing[0] in self.trace.ram:
                self.locks[request.missing.pop(0)] += 1
            if request.missing:
                pending.append(self._request(self.graph.node_of[request.missing[0]]))
            else:
                self._compute(request.node)
                pending.pop()

    def _request(self, k: int) -> _Request:
        inputs = self.graph.inputs_of[k]
        for i in inputs:
            self.scores.use(i)
            self.locks[i] += i in self.trace.ram
        return _Request(k, [i for i in inputs if i not in self.trace.ram])

    def _compute(self, k: int) -> None:
        self._make_room(k)
        self.scores.clock_s += self.problem.table.compute_time_s[k]
        if self.scores.clock_s > self.limit_s:
            msg = (
                f"it thrashes: {THRASHING} passes of computing do not end the step within "
                f"{format_bytes(self.ram_bytes)}"
            )
            raise MethodNotApplicableError(msg)
        self.used_bytes += sum(
            self.graph.tensor_bytes[i] for i in self.graph.outputs_of[k] if i not in self.trace.ram
        )
        self.trace.compute(k)
        for i in self.graph.outputs_of[k]:
            self.scores.recover(i)
        for i in self.graph.inputs_of[k]:
            self.locks[i] -= 1

    def _make_room(self, k: int) -> None:
        node = self.graph.nodes[k]
        demand_bytes = node.output_bytes + node.workspace_bytes
        while self.used_bytes + demand_bytes > self.ram_bytes:
            check_time_limit()
            victim = min(
                (i for i in sorted(self.trace.ram) if self._may_leave(i)),
                key=self.scores.score,
                default=None,
            )
            if victim is None:
                msg = (
                    f"the step {node.name!r} takes {format_bytes(demand_bytes)} more, "
                    f"{format_bytes(self.used_bytes)} of {format_bytes(self.ram_bytes)} are in "
                    "use, and no tensor may leave RAM"
                )
                raise MethodNotApplicableError(msg)
            self._evict(victim)

    def _may_leave(self, i: int) -> bool:
        return not self.locks[i] and i not in self.pinned and self.graph.tensor_bytes[i] > 0

    def _evict(self, i: int) -> None:
        self.trace.free(i)
        self.used_bytes -= self.graph.tensor_bytes[i]
        if i not in self.pinned:
            self.scores.evict(i)
