"""The execution of one training step as a method decides; the result is a schedule.

A method that evicts as it goes derives from `StagedExecution`. A runtime that recomputes in its own
order derives from `Execution`. A method that knows beforehand what stays in RAM gives its rule to
`retain`, or the saved tensors to `recompute_once`.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, Phase
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.schedule import (
    GraphIdentity,
    Schedule,
    pairs_of_rows,
    spans_of_rows,
    with_immediate_page_outs,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

FORWARD: Final = frozenset({Phase.INPUT, Phase.FORWARD, Phase.LOSS})
"""Phases of the forward pass; later nodes read what it saved."""


@dataclass(slots=True)
class _LastResort:
    """Whether nodes may write over inputs that are read later."""

    allowed: bool = False
    wanted: bool = False
    """Whether a method has asked for it."""


_LAST_RESORT: Final[ContextVar[_LastResort | None]] = ContextVar("last_resort", default=None)


def overwrites() -> bool:
    """Return whether a method may evict an input by writing over it; see `last_resort`."""
    resort = _LAST_RESORT.get()
    if resort is None:
        return False
    resort.wanted = True
    return resort.allowed


def last_resort(graph: Graph, attempt: Callable[[], Schedule]) -> Schedule:
    """Run a method, and again with overwritten inputs if it has no schedule.

    A node that works in place may then write over an input that is read later: the input is evicted
    after its step. A method that could do so from the start would keep more state in RAM, and pay
    for it.
    """
    resort = _LAST_RESORT.get()
    if resort is not None or not any(graph.shared_bytes_of):
        return attempt()
    resort = _LastResort()
    before = _LAST_RESORT.set(resort)
    try:
        return attempt()
    except MethodNotApplicableError as refusal:
        if not resort.wanted:
            raise
        resort.allowed = True
        try:
            return attempt()
        except MethodNotApplicableError:
            raise refusal from None
    finally:
        _LAST_RESORT.reset(before)


class Execution:
    """What is in RAM, and what every stage has computed, kept and paged in.

    Tensors and workspaces may fill `limit_bytes` [B].

    The first computations come in graph order, each in its own stage. Within a stage a schedule
    knows no order but that of the nodes. A node that a stage computes twice is computed once by the
    schedule, and its outputs stay in RAM between their uses there. A tensor that a stage frees
    before any use is not in RAM when the stage begins. A tensor that is paged in is paged out right
    after its first computation.
    """

    def __init__(self, graph: Graph, limit_bytes: float = math.inf) -> None:
        self.graph = graph
        self.limit_bytes = limit_bytes
        self.sizes = graph.tensor_bytes
        self.stage = -1
        self.ram: set[int] = set()
        self.ram_bytes = 0
        self._computed: list[set[int]] = []
        self._kept: list[set[int]] = []
        self._paged: list[set[int]] = []
        self._used: set[int] = set()
        """Tensors that the stage has read or computed."""

    def begin_stage(self) -> None:
        """Begin the next stage with the tensors that are in RAM."""
        self.stage += 1
        self._computed.append(set())
        self._kept.append(set(self.ram))
        self._paged.append(set())
        self._used = set()

    def compute(self, k: int) -> None:
        """Compute node `k`, in the next stage if the node of the current one is computed."""
        if self._stage_is_over:
            self.begin_stage()
        outputs, used, kept = self.graph.outputs_of[k], self._used, self._kept[-1]
        self._computed[-1].add(k)
        used.update(self.graph.inputs_of[k])
        for i in outputs:
            if i in kept and i not in used:
                kept.remove(i)
        used.update(outputs)
        self._add(outputs)

    def page_in(self, i: int) -> None:
        """Page tensor `i` in, in the next stage if the node of the current one is computed."""
        if self._stage_is_over:
            self.begin_stage()
        if i not in self._kept[-1] and self.graph.node_of[i] not in self._computed[-1]:
            self._paged[-1].add(i)
        self._add((i,))

    def free(self, i: int) -> None:
        """Free tensor `i`, which is in RAM."""
        self.ram.remove(i)
        self.ram_bytes -= self.sizes[i]
        if i not in self._used:
            self._kept[-1].discard(i)

    def evict(self, i: int) -> None:
        """Free tensor `i` by decision of the method, which may extend this."""
        self.free(i)

    def victim(self, k: int) -> int | None:  # noqa: ARG002 - the answer of a method without any
        """Return the tensor to evict so that node `k` fits, None if no tensor may leave RAM."""
        return None

    def make_room(self, demand_bytes: int, k: int) -> None:
        """Evict tensors until so many bytes more fit at node `k`."""
        while self.ram_bytes + demand_bytes > self.limit_bytes:
            check_time_limit()
            victim = self.victim(k)
            if victim is None:
                raise MethodNotApplicableError(
                    f"the step {self._name(k)} takes {format_bytes(demand_bytes)} more, "
                    f"{format_bytes(self.ram_bytes)} of {format_bytes(int(self.limit_bytes))} are "
                    "in use, and no tensor may leave RAM"
                )
            self.evict(victim)

    def schedule(self) -> Schedule:
        """Return the stages so far as a schedule."""
        return with_immediate_page_outs(
            self.graph,
            R=pairs_of_rows(self._computed),
            kept=spans_of_rows(self._kept),
            M_in=pairs_of_rows(self._paged),
            identity=GraphIdentity.of(self.graph),
        )

    @property
    def _stage_is_over(self) -> bool:
        return self.stage < 0 or self.stage in self._computed[-1]

    def _name(self, k: int) -> str:
        return repr(self.graph.nodes[k].name)

    def _add(self, tensors: Iterable[int]) -> None:
        for i in tensors:
            if i not in self.ram:
                self.ram.add(i)
                self.ram_bytes += self.sizes[i]


class StagedExecution(Execution):
    """An execution that computes or pages in, stage by stage, what is missing in RAM.

    A stage computes in graph order, each node once, as a schedule does. So a tensor that a later
    step of the stage reads is never evicted before that step.
    """

    def __init__(self, graph: Graph, limit_bytes: float = math.inf) -> None:
        super().__init__(graph, limit_bytes)
        self._last_read: dict[int, int] = {}
        """The last step of the stage that reads each tensor."""
        self._overwritten: set[int] = set()
        """Inputs that the current step writes over, although a later stage reads them."""
        self._replaceable: frozenset[int] = frozenset()
        """Inputs of the current step that it could write over, while a victim is chosen."""

    # -- what a method decides ------------------------------------------------------------------

    def pages_in(self, i: int) -> bool:  # noqa: ARG002 - the answer of a method without storage
        """Whether tensor `i`, which is not in RAM, is paged in; else it is recomputed."""
        return False

    def retains(self, i: int) -> bool:
        """Whether tensor `i` stays in RAM after its last reader in the stage.

        By default it stays as long as a later stage reads it for its own node.
        """
        return self.is_awaited(i)

    def demanded(self) -> Iterable[int]:
        """Return the tensors that the stage needs in RAM besides the inputs of its node."""
        return ()

    # -- the stages -----------------------------------------------------------------------------

    def is_awaited(self, i: int) -> bool:
        """Whether the node of a later stage reads tensor `i`."""
        users = self.graph.users_of[i]
        return bool(users) and users[-1] > self.stage

    def candidates(self, k: int) -> list[int]:
        """Return the tensors of more than 0 bytes that no step of the stage from `k` on reads.

        Inputs that step `k` may write over are among them while one of these is looked for.
        """
        return [
            i
            for i in sorted(self.ram)
            if self.sizes[i] and (self._last_read.get(i, -1) < k or i in self._replaceable)
        ]

    def run(self) -> Schedule:
        """Execute all stages and return the schedule."""
        for _ in self.graph.nodes:
            check_time_limit()
            self.begin_stage()
            self._execute()
        return self.schedule()

    def _execute(self) -> None:
        graph = self.graph
        computed, paged = self._missing()
        for k in computed:  # what is recomputed anyway need not be in RAM before
            for i in self.ram.intersection(graph.outputs_of[k]):
                self.free(i)
        self._last_read = {i: k for k in sorted(computed) for i in graph.inputs_of[k]}
        for k in sorted(computed.union(graph.node_of[i] for i in paged)):
            for i in graph.outputs_of[k]:
                if i in paged:
                    self.make_room(self.sizes[i], k)
                    self.page_in(i)
            if paged:
                self._used.update(graph.outputs_of[k])  # a stage keeps them up to this step
            if k in computed:
                self._make_room_for(k)
                self.compute(k)
            for i in (*graph.inputs_of[k], *graph.outputs_of[k]):
                if self._leaves(i, k):
                    self.evict(i)
            self._overwritten.clear()

    def _make_room_for(self, k: int) -> None:
        """Evict until node `k` fits, again if it may then write over fewer inputs.

        Without another victim, the node writes over an input that a later stage reads, if that is
        allowed: the input is evicted after the step.
        """
        while self.ram_bytes + (demand_bytes := self._step_bytes(k)) > self.limit_bytes:
            victim = self.victim(k)
            if victim is not None:
                check_time_limit()
                self.evict(victim)
            elif (overwritten := self._overwritten_victim(k)) is not None:
                self._overwritten.add(overwritten)
            else:
                self.make_room(demand_bytes, k)  # says that no tensor may leave

    def _overwritten_victim(self, k: int) -> int | None:
        """Return the input to evict by writing over it, None if there is none."""
        if not overwrites():
            return None
        self._replaceable = frozenset(
            i
            for i in self.graph.shared_bytes_of[k]
            if self._last_read.get(i, -1) == k and not self._leaves(i, k)
        )
        victim = self.victim(k) if self._replaceable else None
        self._replaceable = frozenset()
        return victim

    def _step_bytes(self, k: int) -> int:
        """Return the bytes of node `k` beside its inputs, less those that it writes over [B]."""
        node, shared = self.graph.nodes[k], self.graph.shared_bytes_of[k]
        over = sum(size for i, size in shared.items() if self._leaves(i, k))
        return node.output_bytes + node.workspace_bytes - over

    def _leaves(self, i: int, k: int) -> bool:
        """Whether tensor `i` is in RAM and no longer needed once node `k` is computed."""
        last_read = self._last_read.get(i, -1)
        may_leave = i in self.ram and last_read <= k
        return may_leave and (i in self._overwritten or not self.retains(i))

    def _missing(self) -> tuple[set[int], set[int]]:
        """Return the nodes to compute in the stage, and the tensors to page in."""
        graph = self.graph
        computed, paged = {self.stage}, set[int]()
        wanted = [*graph.inputs_of[self.stage], *self.demanded()]
        while wanted:
            i = wanted.pop()
            k = graph.node_of[i]
            if i in self.ram or i in paged or k in computed:
                continue
            if self.pages_in(i):
                paged.add(i)
            else:
                computed.add(k)
                wanted.extend(graph.inputs_of[k])
        return computed, {i for i in paged if graph.node_of[i] not in computed}

    def _name(self, k: int) -> str:
        return f"{super()._name(k)} on the way to {super()._name(self.stage)}"


def retain(
    graph: Graph,
    keep: Callable[[int, int], bool],
    demand: Callable[[int], Iterable[int]] = lambda _: (),
    *,
    stored: Collection[int] = (),
) -> Schedule:
    """Return the schedule that retains what a rule says and recomputes what is missing, once.

    `keep` says whether a tensor of a recomputable forward node stays in RAM after a stage; tensors
    of other nodes stay while they may be needed. `demand` says which tensors a stage needs besides
    what its node reads. `stored` tensors are paged out at their first computation, and paged in
    where they are missing. Keeps and transfers that serve nothing are removed.
    """
    retained = _Retention(graph, keep, demand, stored).run()
    return PartialSchedule.of(graph, retained).schedule()


class _Retention(StagedExecution):
    def __init__(
        self,
        graph: Graph,
        keep: Callable[[int, int], bool],
        demand: Callable[[int], Iterable[int]],
        stored: Collection[int],
    ) -> None:
        super().__init__(graph)
        self.keep, self.demand, self.stored = keep, demand, stored
        self.droppable = droppable(graph)
        self.until = last_needs(graph, self.droppable)

    def begin_stage(self) -> None:
        t = self.stage
        for i in list(self.ram):
            if self.until[i] <= t or (i in self.droppable and not self.keep(t, i)):
                self.free(i)
        super().begin_stage()

    def pages_in(self, i: int) -> bool:
        return i in self.stored

    def demanded(self) -> Iterable[int]:
        return self.demand(self.stage)

    def _execute(self) -> None:
        computed, paged = self._missing()
        for i in paged:
            self.page_in(i)
        for k in sorted(computed):
            self.compute(k)


def recompute_once(
    graph: Graph, saved: Collection[int], groups: Collection[Collection[int]] = ()
) -> Schedule:
    """Return the schedule that saves some tensors and recomputes the others when they are read.

    Every node is recomputed at most once: what is recomputed, and what is saved, stays until
    nothing more is computed from it. Groups are sets of nodes that are recomputed together: when
    one of their tensors is missing, all that will still be read are recomputed.
    """
    begin, last = begin_of_backward(graph), last_forward_uses(graph)
    final = tuple(users[-1] if users else -1 for users in graph.users_of)
    group_of = {k: group for group in groups for k in group}
    stays = set(saved)

    def keep(t: int, i: int) -> bool:
        return i in stays or t < last[i] or t >= begin

    def demand(t: int) -> Iterable[int]:
        read = [group_of.get(graph.node_of[i]) for i in graph.inputs_of[t] if i not in stays]
        for group in read if t >= begin else ():
            for k in group or ():
                yield from (i for i in graph.outputs_of[k] if final[i] >= t)

    return retain(graph, keep, demand)


# -- what methods ask of a graph ------------------------------------------------------------------


def droppable(graph: Graph) -> frozenset[int]:
    """Return the outputs of recomputable forward nodes, samples aside."""
    return frozenset(
        i
        for i, k in enumerate(graph.node_of)
        if graph.nodes[k].recomputable
        and not graph.nodes[k].on_aux
        and graph.nodes[k].phase in FORWARD - {Phase.INPUT}
    )


def last_forward_uses(graph: Graph) -> tuple[int, ...]:
    """Return the last node of the forward pass that reads each tensor, or its own node."""
    return tuple(
        max((k for k in users if graph.nodes[k].phase in FORWARD), default=graph.node_of[i])
        for i, users in enumerate(graph.users_of)
    )


def begin_of_backward(graph: Graph) -> int:
    """Return the first node after the forward pass; the number of nodes where there is none."""
    phases = (k for k, node in enumerate(graph.nodes) if node.phase not in FORWARD)
    return next(phases, len(graph.nodes))


def last_needs(graph: Graph, recomputable: Collection[int]) -> list[int]:
    """Return the last stage that may read each tensor, if these may be recomputed."""
    again = {graph.node_of[i] for i in recomputable}
    until = list(graph.node_of)
    for i in range(len(until) - 1, -1, -1):
        for k in graph.users_of[i]:
            outputs = graph.outputs_of[k] if k in again else ()
            until[i] = max(until[i], k, *(until[j] for j in outputs))
    return until
