"""Execution of one training step by the decisions of a method, recorded as a schedule.

A method that decides on evictions during the execution has a subclass of `StagedExecution`. A
runtime that recomputes in another order has a subclass of `Execution`. A method with a fixed rule
for the tensors in RAM passes the rule to `retain_tensors`, or the saved tensors to
`recompute_once`.
"""

from __future__ import annotations

import math
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

FORWARD_PHASES: Final = frozenset({Phase.INPUT, Phase.FORWARD, Phase.LOSS})
"""Phases of the nodes of the forward pass."""


class Execution:
    """The execution of a training step; records computations, kept tensors and page-ins by stage.

    First computations are in graph order, each in its own stage. A node that a stage computes twice
    is computed once, and its outputs stay in RAM between their uses. A tensor that is paged in is
    paged out right after its first computation. `compute` and `page_in` do not check `limit_bytes`.
    """

    def __init__(self, graph: Graph, limit_bytes: float = math.inf) -> None:
        self.graph = graph
        self.limit_bytes = limit_bytes
        self.sizes = graph.tensor_bytes
        self.stage = -1
        self.ram: set[int] = set()
        self.ram_bytes = 0
        self._computed_nodes: list[set[int]] = []
        """For each stage so far, the computed nodes."""
        self._kept_tensors: list[set[int]] = []
        """For each stage so far, the tensors in RAM when it begins."""
        self._paged_tensors: list[set[int]] = []
        """For each stage so far, the paged-in tensors."""
        self._used_tensors: set[int] = set()
        """Tensors that the stage has read or computed."""

    def begin_stage(self) -> None:
        """Begin the next stage with the tensors that are in RAM."""
        self.stage += 1
        self._computed_nodes.append(set())
        self._kept_tensors.append(set(self.ram))
        self._paged_tensors.append(set())
        self._used_tensors = set()

    def compute(self, k: int) -> None:
        """Compute node `k`, and add its outputs to RAM; begin the next stage if necessary.

        An output that the stage has not used before is no longer kept into the stage.
        """
        if self._is_stage_over:
            self.begin_stage()
        outputs, used_tensors, kept_tensors = (
            self.graph.outputs_of[k],
            self._used_tensors,
            self._kept_tensors[-1],
        )
        self._computed_nodes[-1].add(k)
        used_tensors.update(self.graph.inputs_of[k])
        for i in outputs:
            if i in kept_tensors and i not in used_tensors:
                kept_tensors.remove(i)
        used_tensors.update(outputs)
        self._add_to_ram(outputs)

    def page_in(self, i: int) -> None:
        """Add tensor `i` to RAM; record a page-in unless the stage has it; begin a stage if due."""
        if self._is_stage_over:
            self.begin_stage()
        if (
            i not in self._kept_tensors[-1]
            and self.graph.node_of[i] not in self._computed_nodes[-1]
        ):
            self._paged_tensors[-1].add(i)
        self._add_to_ram((i,))

    def free(self, i: int) -> None:
        """Remove tensor `i` from RAM, where it must be; keep it no longer into an unused stage."""
        self.ram.remove(i)
        self.ram_bytes -= self.sizes[i]
        if i not in self._used_tensors:
            self._kept_tensors[-1].discard(i)

    def evict(self, i: int) -> None:
        """Evict tensor `i`. Subclasses may override this to record the eviction."""
        self.free(i)

    def choose_victim(self, k: int) -> int | None:  # noqa: ARG002 - subclasses use `k`
        """Return the tensor to evict so that node `k` fits; None, the default, if there is none."""
        return None

    def evict_until_fits(self, needed_bytes: int, k: int) -> None:
        """Evict victims until `needed_bytes` more fit; refuse the step if none is left."""
        while self.ram_bytes + needed_bytes > self.limit_bytes:
            check_time_limit()
            victim = self.choose_victim(k)
            if victim is None:
                raise MethodNotApplicableError(
                    f"the step {self._quoted_name(k)} takes {format_bytes(needed_bytes)} more, "
                    f"{format_bytes(self.ram_bytes)} of {format_bytes(int(self.limit_bytes))} are "
                    "in use, and no tensor may leave RAM"
                )
            self.evict(victim)

    def schedule(self) -> Schedule:
        """Return the recorded stages as a schedule, in which all state has its home on storage."""
        return with_immediate_page_outs(
            self.graph,
            R=pairs_of_rows(self._computed_nodes),
            kept=spans_of_rows(self._kept_tensors),
            M_in=pairs_of_rows(self._paged_tensors),
            identity=GraphIdentity.from_graph(self.graph),
        )

    @property
    def _is_stage_over(self) -> bool:
        return self.stage < 0 or self.stage in self._computed_nodes[-1]

    def _quoted_name(self, k: int) -> str:
        return repr(self.graph.nodes[k].name)

    def _add_to_ram(self, tensors: Iterable[int]) -> None:
        for i in tensors:
            if i not in self.ram:
                self.ram.add(i)
                self.ram_bytes += self.sizes[i]


class StagedExecution(Execution):
    """An execution that restores, stage by stage, the missing inputs of the stage.

    A stage computes in graph order, each node at most once, so a tensor that a later step of the
    stage reads must not be evicted: see `evictable_candidates`. With `overwrites`, an in-place
    operator may overwrite such an input if it does not fit otherwise.
    """

    def __init__(
        self, graph: Graph, limit_bytes: float = math.inf, *, overwrites: bool = False
    ) -> None:
        super().__init__(graph, limit_bytes)
        self.overwrites = overwrites
        self._last_read: dict[int, int] = {}
        """The last step of the stage that reads each tensor."""
        self._overwritten_inputs: set[int] = set()
        """Inputs that the current step overwrites, although `retains` would keep them."""
        self._replaceable_inputs: frozenset[int] = frozenset()
        """Inputs that the current step could overwrite, while a victim is chosen among them;
        otherwise empty."""

    # -- decisions of methods -------------------------------------------------------------------

    def pages_in(self, i: int) -> bool:  # noqa: ARG002 - subclasses use `i`
        """Return whether missing tensor `i` is paged in; by default it is recomputed."""
        return False

    def retains(self, i: int) -> bool:
        """Return whether tensor `i` stays in RAM after its last use in the stage."""
        return self.is_awaited(i)

    def demanded_tensors(self) -> Iterable[int]:
        """Return tensors that the stage restores if they are missing, like its node's inputs."""
        return ()

    # -- the stages -----------------------------------------------------------------------------

    def is_awaited(self, i: int) -> bool:
        """Return whether the node of a later stage reads tensor `i`."""
        users = self.graph.users_of[i]
        return bool(users) and users[-1] > self.stage

    def evictable_candidates(self, k: int) -> list[int]:
        """Return tensors in RAM, above 0 bytes, that no step of the stage from `k` on reads.

        Includes inputs of `k` while `_overwritten_victim` chooses one to overwrite.
        """
        return [
            i
            for i in sorted(self.ram)
            if self.sizes[i] and (self._last_read.get(i, -1) < k or i in self._replaceable_inputs)
        ]

    def execute_stages(self) -> Schedule:
        """Execute all stages and return the schedule."""
        for _ in self.graph.nodes:
            check_time_limit()
            self.begin_stage()
            self._execute_stage()
        return self.schedule()

    def _execute_stage(self) -> None:
        """Execute the page-ins, computations and evictions of the current stage, in graph order."""
        graph = self.graph
        computations, page_ins = self._find_missing()
        for k in computations:  # outputs of nodes that the stage computes need not be in RAM before
            for i in self.ram.intersection(graph.outputs_of[k]):
                self.free(i)
        self._last_read = {i: k for k in sorted(computations) for i in graph.inputs_of[k]}
        for k in sorted(computations.union(graph.node_of[i] for i in page_ins)):
            for i in graph.outputs_of[k]:
                if i in page_ins:
                    self.evict_until_fits(self.sizes[i], k)
                    self.page_in(i)
            if page_ins:  # A schedule keeps these outputs up to this step.
                self._used_tensors.update(graph.outputs_of[k])
            if k in computations:
                self._evict_for_step(k)
                self.compute(k)
            for i in (*graph.inputs_of[k], *graph.outputs_of[k]):
                if self._can_evict(i, k):
                    self.evict(i)
            self._overwritten_inputs.clear()

    def _evict_for_step(self, k: int) -> None:
        """Evict tensors until node `k` fits; without a victim, overwrite an input if permitted."""
        while self.ram_bytes + (needed_bytes := self._step_bytes(k)) > self.limit_bytes:
            victim = self.choose_victim(k)
            if victim is not None:
                check_time_limit()
                self.evict(victim)
            elif (overwritten_input := self._overwritten_victim(k)) is not None:
                self._overwritten_inputs.add(overwritten_input)
            else:
                self.evict_until_fits(needed_bytes, k)  # raises the error

    def _overwritten_victim(self, k: int) -> int | None:
        """Choose an input that node `k` evicts by overwriting it; None if not permitted."""
        if not self.overwrites:
            return None
        self._replaceable_inputs = frozenset(
            i
            for i in self.graph.shared_bytes_of[k]
            if self._last_read.get(i, -1) == k and not self._can_evict(i, k)
        )
        victim = self.choose_victim(k) if self._replaceable_inputs else None
        self._replaceable_inputs = frozenset()
        return victim

    def _step_bytes(self, k: int) -> int:
        """Return the size of outputs and workspace of node `k`, minus overwritten bytes [B]."""
        node, shared_bytes = self.graph.nodes[k], self.graph.shared_bytes_of[k]
        overwritten_bytes = sum(size for i, size in shared_bytes.items() if self._can_evict(i, k))
        return node.output_bytes + node.workspace_bytes - overwritten_bytes

    def _can_evict(self, i: int, k: int) -> bool:
        """Return whether tensor `i` is in RAM and may be evicted after step `k` of the stage."""
        last_read = self._last_read.get(i, -1)
        is_unneeded = i in self.ram and last_read <= k
        return is_unneeded and (i in self._overwritten_inputs or not self.retains(i))

    def _find_missing(self) -> tuple[set[int], set[int]]:
        """Return the nodes to compute in the stage (its own included), and tensors to page in."""
        graph = self.graph
        computations, page_ins = {self.stage}, set[int]()
        requested_tensors = [*graph.inputs_of[self.stage], *self.demanded_tensors()]
        while requested_tensors:
            i = requested_tensors.pop()
            k = graph.node_of[i]
            if i in self.ram or i in page_ins or k in computations:
                continue
            if self.pages_in(i):
                page_ins.add(i)
            else:
                computations.add(k)
                requested_tensors.extend(graph.inputs_of[k])
        return computations, {i for i in page_ins if graph.node_of[i] not in computations}

    def _quoted_name(self, k: int) -> str:
        return f"{super()._quoted_name(k)} on the way to {super()._quoted_name(self.stage)}"


def retain_tensors(
    graph: Graph,
    is_kept: Callable[[int, int], bool],
    list_demanded: Callable[[int], Iterable[int]],
    *,
    stored_tensors: Collection[int] = (),
) -> Schedule:
    """Return the schedule that keeps tensors by a rule, and restores missing tensors when read.

    `is_kept(stage, tensor)` is about RAM after the stage; `list_demanded(stage)` returns tensors
    needed beside its node's inputs. RAM is not limited. `stored_tensors` are paged, not recomputed.
    All state has its home on storage.
    """
    unreduced_schedule = _Retention(graph, is_kept, list_demanded, stored_tensors).execute_stages()
    return PartialSchedule.from_schedule(graph, unreduced_schedule).schedule()


class _Retention(StagedExecution):
    """The execution of `retain_tensors`, which keeps and demands tensors by given rules."""

    def __init__(
        self,
        graph: Graph,
        is_kept: Callable[[int, int], bool],
        list_demanded: Callable[[int], Iterable[int]],
        stored_tensors: Collection[int],
    ) -> None:
        super().__init__(graph)
        self.is_kept, self.list_demanded, self.stored_tensors = (
            is_kept,
            list_demanded,
            stored_tensors,
        )
        self.evictable_tensors = evictable_tensors(graph)
        self.last_reads = last_possible_reads(graph, self.evictable_tensors)

    def begin_stage(self) -> None:
        """Free evictable tensors not `is_kept`, and all of no later use; begin the next stage."""
        t = self.stage
        for i in list(self.ram):
            if self.last_reads[i] <= t or (i in self.evictable_tensors and not self.is_kept(t, i)):
                self.free(i)
        super().begin_stage()

    def pages_in(self, i: int) -> bool:
        return i in self.stored_tensors

    def demanded_tensors(self) -> Iterable[int]:
        return self.list_demanded(self.stage)

    def _execute_stage(self) -> None:
        """Page in the missing tensors, then compute; evictions are left to `begin_stage`."""
        computations, page_ins = self._find_missing()
        for i in page_ins:
            self.page_in(i)
        for k in sorted(computations):
            self.compute(k)


def recompute_once(
    graph: Graph, saved_tensors: Collection[int], groups: Collection[Collection[int]] = ()
) -> Schedule:
    """Return the schedule that keeps `saved_tensors` and recomputes the rest in the backward pass.

    Tensors that are not `evictable_tensors` are kept, too; all state has its home on storage. Other
    tensors stay until their last forward reader, see `last_forward_uses`. Every node is recomputed
    at most once, because saved and recomputed tensors stay while a later node may need them.
    `groups` are segments of nodes that are recomputed together: if a backward node reads an output
    of a segment that is not saved, all missing outputs of the segment that this backward node or a
    later one reads are recomputed.
    """
    first_backward, last_forward_use = first_backward_node(graph), last_forward_uses(graph)
    last_use = tuple(users[-1] if users else -1 for users in graph.users_of)
    segment_of = {k: segment for segment in groups for k in segment}
    kept_tensors = set(saved_tensors)

    def is_kept(t: int, i: int) -> bool:
        return i in kept_tensors or t < last_forward_use[i] or t >= first_backward

    def list_demanded(t: int) -> Iterable[int]:
        """Yield the outputs, not read for the last time yet, of segments that stage `t` reads."""
        read_segments = [
            segment_of.get(graph.node_of[i]) for i in graph.inputs_of[t] if i not in kept_tensors
        ]
        for segment in read_segments if t >= first_backward else ():
            for k in segment or ():
                yield from (i for i in graph.outputs_of[k] if last_use[i] >= t)

    return retain_tensors(graph, is_kept, list_demanded)


# -- properties of graphs for methods -------------------------------------------------------------


def evictable_tensors(graph: Graph) -> frozenset[int]:
    """Return the outputs of recomputable nodes of phase forward or loss without `Node.on_aux`."""
    return frozenset(
        i
        for i, k in enumerate(graph.node_of)
        if graph.nodes[k].recomputable
        and not graph.nodes[k].on_aux
        and graph.nodes[k].phase in FORWARD_PHASES - {Phase.INPUT}
    )


def last_forward_uses(graph: Graph) -> tuple[int, ...]:
    """Return each tensor's last reader in the forward pass, or its own node without one."""
    first_backward = first_backward_node(graph)
    return tuple(
        max(
            (k for k in users if k < first_backward or graph.nodes[k].phase in FORWARD_PHASES),
            default=graph.node_of[i],
        )
        for i, users in enumerate(graph.users_of)
    )


def first_backward_node(graph: Graph) -> int:
    """Return the first node of phase backward, else of phase update, else the node count."""
    phases = [None if node.is_state else node.phase for node in graph.nodes]
    for phase in (Phase.BACKWARD, Phase.UPDATE):
        if phase in phases:
            return phases.index(phase)
    return len(phases)


def last_possible_reads(graph: Graph, recomputable_tensors: Collection[int]) -> list[int]:
    """Return the last stage that may read each tensor if `recomputable_tensors` are recomputed."""
    recomputable_nodes = {graph.node_of[i] for i in recomputable_tensors}
    last_stages = list(graph.node_of)
    for i in range(len(last_stages) - 1, -1, -1):
        for k in graph.users_of[i]:
            outputs = graph.outputs_of[k] if k in recomputable_nodes else ()
            last_stages[i] = max(last_stages[i], k, *(last_stages[j] for j in outputs))
    return last_stages
