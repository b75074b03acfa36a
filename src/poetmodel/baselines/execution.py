"""A training step carried out stage by stage, by a method that decides as it goes.

The walk knows what is in RAM and on storage, supplies the inputs of every stage, and asks a method
what leaves RAM. What it did is a schedule, whose memory the judge finds to be what the walk saw.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from poetmodel.errors import MethodNotApplicableError
from poetmodel.schedule import GraphIdentity, Schedule, storage_entries
from poetmodel.time_limit import check_time_limit
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from poetmodel.problem import Problem


class Execution:
    """One training step within the RAM budget; methods say what is fetched, kept and evicted.

    Parameters
    ----------
    problem : Problem
        What is carried out. Its RAM budget is kept; other limits are for the judge.

    Notes
    -----
    A stage computes in graph order whatever its node needs and RAM does not hold, each node once,
    as a schedule does. Hence what a later step of the same stage reads is never evicted before it,
    and a tensor that is evicted before any step of the stage has touched it leaves RAM when the
    stage begins.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.sizes = problem.graph.tensor_bytes
        self.stage = 0
        """The stage that is carried out."""
        self.ram: set[int] = set()
        """Tensors in RAM."""
        self.ram_bytes = 0
        """Their size [B]."""
        self._computed: list[tuple[int, int]] = []
        self._kept: list[tuple[int, int]] = []
        self._paged: list[tuple[int, int]] = []
        self._begun_with: set[int] = set()
        self._touched: set[int] = set()
        self._last_read: dict[int, int] = {}

    # -- what a method decides ------------------------------------------------------------------

    def fetches(self, i: int) -> bool:  # noqa: ARG002 - the answer of a method without storage
        """Return whether tensor `i`, which is not in RAM, is paged in; else it is recomputed."""
        return False

    def choose(self, candidates: Sequence[int]) -> int | None:  # noqa: ARG002 - likewise
        """Return which of the tensors leaves RAM, None if none of them can."""
        return None

    def keeps(self, i: int) -> bool:
        """Return whether tensor `i` stays in RAM now that no step of the stage reads it any more.

        By default as long as a later stage computes one of its users for the first time.
        """
        return self.is_awaited(i)

    def on_compute(self, k: int) -> None:
        """Take note that node `k` was computed."""

    def on_page_in(self, i: int) -> None:
        """Take note that tensor `i` was paged in."""

    def on_leave(self, i: int) -> None:
        """Take note that tensor `i` left RAM."""

    # -- the walk -------------------------------------------------------------------------------

    def is_awaited(self, i: int) -> bool:
        """Return whether a first computation after this stage reads tensor `i`."""
        users = self.graph.users_of[i]
        return bool(users) and users[-1] > self.stage

    def run(self) -> Schedule:
        """Carry out the step and return it as a schedule.

        Raises
        ------
        MethodNotApplicableError
            If a step does not fit in RAM and nothing may leave.
        """
        for t in range(len(self.graph.nodes)):
            check_time_limit()
            self.stage = t
            self._carry_out(t)
        graph = self.graph
        out = {i for _, i in self._paged if not graph.nodes[graph.node_of[i]].on_aux}
        return Schedule(
            R=tuple(self._computed),
            S_RAM=tuple(self._kept),
            S_AUX=storage_entries(graph, self._paged),
            M_in=tuple(self._paged),
            M_out=tuple((graph.node_of[i], i) for i in out),
            identity=GraphIdentity.of(graph),
        )

    def _carry_out(self, t: int) -> None:
        graph = self.graph
        computed, paged = self._supply(t)
        for k in computed:  # the copies that are made anew are not waited for
            self._remove(self.ram.intersection(graph.outputs_of[k]))
        self._begun_with = set(self.ram)
        self._touched = set()
        self._last_read = {i: k for k in sorted(computed) for i in graph.inputs_of[k]}
        for k in sorted(computed.union(graph.node_of[i] for i in paged)):
            for i in graph.outputs_of[k]:
                if i in paged:
                    self._make_room(self.sizes[i], k)
                    self._add((i,))
                    self._paged.append((t, i))
                    self.on_page_in(i)
            if k in computed:
                node = graph.nodes[k]
                self._make_room(node.output_bytes + node.workspace_bytes, k)
                self._add(graph.outputs_of[k])
                self._computed.append((t, k))
                self._touched.update(graph.inputs_of[k])
                self.on_compute(k)
            self._touched.update(graph.outputs_of[k])
            self._release(k)
        self._kept.extend((t, i) for i in self._begun_with)

    def _supply(self, t: int) -> tuple[set[int], set[int]]:
        """Return the nodes that stage `t` computes and the tensors that it pages in."""
        graph = self.graph
        computed, paged = {t}, set[int]()
        wanted = list(graph.inputs_of[t])
        while wanted:
            i = wanted.pop()
            k = graph.node_of[i]
            if i in self.ram or i in paged or k in computed:
                continue
            if self.fetches(i):
                paged.add(i)
            else:
                computed.add(k)
                wanted.extend(graph.inputs_of[k])
        return computed, {i for i in paged if graph.node_of[i] not in computed}

    def _make_room(self, demand_bytes: int, k: int) -> None:
        usable = self.problem.usable_ram_bytes
        while self.ram_bytes + demand_bytes > usable:
            check_time_limit()
            candidates = [
                i for i in sorted(self.ram) if self.sizes[i] and self._last_read.get(i, -1) < k
            ]
            victim = self.choose(candidates)
            if victim is None:
                name, stage = self.graph.nodes[k].name, self.graph.nodes[self.stage].name
                msg = (
                    f"the step {name!r} on the way to {stage!r} takes {format_bytes(demand_bytes)} "
                    f"more, {format_bytes(self.ram_bytes)} of {format_bytes(usable)} are in use, "
                    "and no tensor may leave RAM"
                )
                raise MethodNotApplicableError(msg)
            self.let_go(victim)

    def let_go(self, i: int) -> None:
        """Take tensor `i`, which no later step of the stage reads, out of RAM."""
        self._remove((i,))
        if i not in self._touched:
            self._begun_with.discard(i)
        self.on_leave(i)

    def _release(self, k: int) -> None:
        """Let go what no step of the stage reads after `k` and the method does not keep."""
        for i in (*self.graph.inputs_of[k], *self.graph.outputs_of[k]):
            if i in self.ram and self._last_read.get(i, -1) <= k and not self.keeps(i):
                self.let_go(i)

    def _add(self, tensors: Sequence[int]) -> None:
        for i in tensors:
            if i not in self.ram:
                self.ram.add(i)
                self.ram_bytes += self.sizes[i]

    def _remove(self, tensors: set[int] | tuple[int, ...]) -> None:
        self.ram.difference_update(tensors)
        self.ram_bytes -= sum(self.sizes[i] for i in tensors)
