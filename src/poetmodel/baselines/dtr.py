"""Dynamic tensor rematerialization (DTR): evict online by a score, recompute on demand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.engine import fit_budget
from poetmodel.baselines.homes import schedule_with_homes
from poetmodel.baselines.paging import StorageSpace, transfer_costs
from poetmodel.baselines.registry import METHODS
from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.heuristics.execution import Execution, StagedExecution, last_possible_reads
from poetmodel.problem import Problem, Quantity
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

MAX_PASSES: Final = 50
"""Maximum compute time of a `Runtime`, in single passes; a longer execution raises an error."""
LIVENESS: Final = "liveness"
"""Variant with liveness analysis of each stage and the score ``full``."""


def dtr(problem: Problem, heuristic: str = "full", *, liveness: bool = False) -> Schedule:
    """Evict the tensor with the lowest score whenever RAM is short; recompute it on its next use.

    The heuristic is the score of a tensor of `m` bytes that was last used `s` seconds ago and whose
    node takes `c` seconds:

    - ``full`` (h_DTR): ``(c + c of its evicted neighbourhood) / (m s)``. The neighbourhood consists
      of the evicted tensors that must be recomputed to recompute the tensor, and of those whose
      recomputation needs the tensor;
    - ``eq`` (h_DTR^eq): the neighbourhood is approximated by the adjacent connected sets of evicted
      tensors, maintained by union-find;
    - ``local`` (h_DTR^local): ``c / (m s)``;
    - ``msps``: ``(c + c of all tensors that must be recomputed for it) / m``, the reciprocal of
      Capuchin's memory saving per second;
    - ``lru``: ``1 / s``;
    - ``size``: ``1 / m``, the largest tensor first;
    - ``liveness``: ``full`` with `liveness`, a name for the command line.

    With `liveness`, which the paper lacks, the recomputations of a stage are known when it begins,
    and their tensors leave RAM after their last reader in the stage unless a later stage's node
    reads them. A stage recomputes in graph order, and never evicts a tensor that a later step of
    the stage reads. A neighbourhood counts each node once, and excludes tensors that no node reads.

    Without `liveness`, as in the authors' simulator (simrd, github.com/uwsampl/dtr-prototype), the
    clock is compute time, an input is used when its reader is requested, and an output when it is
    first computed. A tensor without a further user is evicted at once ("eager eviction") but may be
    recomputed for other tensors; then it stays until its score is the lowest; see `Runtime`.

    Interpretations. All state is in RAM. Tensors that cannot be recomputed are never evicted; they
    are freed when no node can need them any more ("banishing"; simrd pins constants forever). A
    node that the runtime computes twice within a stage is computed once by the schedule, and its
    outputs stay between the uses there. If the schedule then exceeds the budget, the step is
    executed again with less RAM. An execution above fifty single passes is abandoned. Tensors of 0
    bytes are not evicted; of equal scores, the lowest index is evicted. Without a schedule within
    the budget, and after an abandoned execution, `MethodNotApplicableError` has the reason.
    """
    if heuristic == LIVENESS:
        heuristic, liveness = HEURISTICS[0], True
    if heuristic not in HEURISTICS:
        raise InputError(
            f"heuristic {heuristic!r}: expected one of {', '.join((*HEURISTICS, LIVENESS))}"
        )
    schedule = _schedule_with_liveness if liveness else _schedule_by_runtime
    return schedule_with_homes(
        METHODS["dtr"].state_homes,
        problem,
        (partial(schedule, heuristic=heuristic),),
        may_overwrite=liveness,
    )


def _schedule_with_liveness(
    problem: Problem, *, heuristic: str, overwrites: bool = False
) -> Schedule:
    return _LivenessExecution(problem, heuristic, overwrites=overwrites).execute_stages()


def _schedule_by_runtime(problem: Problem, *, heuristic: str) -> Schedule:
    return fit_budget(problem, lambda ram_bytes: Runtime(problem, heuristic, ram_bytes).run())


def dtr_paging(problem: Problem) -> Schedule:
    """Evict as `dtr` with liveness does, to storage where this is cheaper than recomputation.

    The score is ``full`` or ``msps``. The cost of a tensor is the smaller of its recomputation
    (with its neighbourhood, for ``full``) and its transfers: page-in, and page-out unless it is on
    storage. Costs are energy, or times if time is minimized; staleness is always time. Tensors that
    cannot be recomputed are evicted to storage while it has space. Tensors evicted to storage
    belong to no neighbourhood.

    The best of several executions is returned: with each score, with paging alone, which may fit
    where recomputations do not, and, if time is minimized and transfers overlap computations, each
    also with transfers that cost 0. Homes of state are those of `StateHomes.EITHER`.
    """
    overlaps = problem.is_overlapping
    transfer_modes = (False, True) if overlaps and problem.minimize == Quantity.TIME else (False,)
    variants = [
        partial(
            _schedule_with_paging, score=score, free_transfers=free_transfers, recompute=recompute
        )
        for score, recompute in (("full", True), ("msps", True), ("full", False))
        for free_transfers in transfer_modes
    ]
    return schedule_with_homes(
        METHODS["dtr-paging"].state_homes, problem, variants, may_overwrite=True
    )


def _schedule_with_paging(
    problem: Problem,
    *,
    score: str,
    free_transfers: bool,
    recompute: bool,
    overwrites: bool = False,
) -> Schedule:
    """Execute a training step without state; without `recompute`, evict only to storage."""
    restricted_problem = problem if recompute else replace(problem, recompute=False)
    return _PagingExecution(
        restricted_problem, score, free_transfers=free_transfers, overwrites=overwrites
    ).execute_stages()


class Runtime(Execution):
    """Execution like the paper's simulator (simrd's ``RuntimeV2Eager``) within a RAM limit [B].

    Nodes are computed in graph order. Inputs in RAM are locked; missing ones are recomputed one by
    one, recursively. A tensor is freed after its last reader. One that is recomputed after that
    stays until its score is the lowest, because the runtime has no information about later readers.
    Tensors that cannot be recomputed are freed when no node can need them.
    """

    def __init__(self, problem: Problem, heuristic: str, ram_bytes: int) -> None:
        graph, self.compute_time_s = problem.graph, problem.table.compute_time_s
        super().__init__(graph, ram_bytes)
        self.scores = Scores(graph, self.compute_time_s, heuristic, counts_nodes_once=False)
        self.locks: Counter[int] = Counter()
        """Number of pending nodes that lock each tensor."""
        recomputable = {i for i, k in enumerate(graph.node_of) if problem.may_recompute(k)}
        self.pinned = set(range(len(graph.tensors))) - recomputable
        """Tensors that cannot be recomputed."""
        last_read_of = last_possible_reads(graph, recomputable)
        self.freed_after: list[list[int]] = [[] for _ in graph.nodes]
        """For each node the tensors that are freed after its first computation."""
        for i, users in enumerate(graph.users_of):
            last_use = users[-1] if users else graph.node_of[i]
            self.freed_after[last_read_of[i] if i in self.pinned else last_use].append(i)
        self.limit_s = MAX_PASSES * sum(self.compute_time_s)
        """Maximum compute time [s]."""
        self.program: list[Instruction] = []
        """Executed instructions in order; a schedule of stages does not preserve this order."""

    def run(self) -> Schedule:
        """Execute the training step and return its schedule."""
        for k in range(len(self.graph.nodes)):
            self._compute_with_inputs(k)
            for i in self.graph.outputs_of[k]:
                self.scores.record_use(i)
            for i in self.freed_after[k]:
                if i in self.ram:
                    self.evict(i)
        return self.schedule()

    def compute(self, k: int) -> None:
        """Evict tensors until node `k` fits in RAM, compute it, and unlock its inputs.

        All inputs must be in RAM and locked. Advances the clock, and frees no input. The method is
        not applicable if nothing may be evicted, or beyond `MAX_PASSES` single passes.
        """
        node = self.graph.nodes[k]
        self.evict_until_fits(node.output_bytes + node.workspace_bytes, k)
        self.scores.clock_s += self.compute_time_s[k]
        if self.scores.clock_s > self.limit_s:
            raise MethodNotApplicableError(
                f"it thrashes: the compute time of {MAX_PASSES} single passes does not finish the "
                f"training step within {format_bytes(int(self.limit_bytes))}"
            )
        super().compute(k)
        self.program.append(Instruction(Op.COMPUTE, k))
        for i in self.graph.outputs_of[k]:
            self.scores.record_recovery(i)
        for i in self.graph.inputs_of[k]:
            self.locks[i] -= 1

    def choose_victim(self, k: int) -> int | None:  # noqa: ARG002 - the inputs of node `k` are locked
        """Return the tensor with the lowest score, neither locked nor pinned; None without one."""
        evictable_tensors = (
            i for i in sorted(self.ram) if self.sizes[i] and not (self.locks[i] or i in self.pinned)
        )
        return min(evictable_tensors, key=self.scores.score, default=None)

    def evict(self, i: int) -> None:
        """Free tensor `i`, extend `program`, and mark the tensor as evicted unless it is pinned."""
        super().evict(i)
        self.program.append(Instruction(Op.FREE, i))
        if i not in self.pinned:
            self.scores.record_eviction(i)

    def _compute_with_inputs(self, k: int) -> None:
        """Compute node `k` after recomputing its missing inputs, recursively."""
        pending = [self._lock_inputs(k)]
        while pending:
            check_time_limit()
            node, missing = pending[-1]
            while missing and missing[0] in self.ram:
                self.locks[missing.pop(0)] += 1
            if missing:
                pending.append(self._lock_inputs(self.graph.node_of[missing[0]]))
            else:
                self.compute(node)
                pending.pop()

    def _lock_inputs(self, k: int) -> tuple[int, list[int]]:
        """Lock the inputs of node `k` that are in RAM; return the node and its missing inputs.

        Records a use of all inputs. The caller restores and locks the missing ones.
        """
        inputs = self.graph.inputs_of[k]
        for i in inputs:
            self.scores.record_use(i)
            self.locks[i] += i in self.ram
        return k, [i for i in inputs if i not in self.ram]


class _LivenessExecution(StagedExecution):
    """Execution of `dtr` with liveness; `node_costs` of scores are compute times by default."""

    def __init__(
        self,
        problem: Problem,
        heuristic: str,
        node_costs: Sequence[float] | None = None,
        *,
        overwrites: bool,
    ) -> None:
        super().__init__(problem.graph, problem.usable_ram_bytes, overwrites=overwrites)
        self.problem = problem
        score_costs = problem.table.compute_time_s if node_costs is None else node_costs
        self.scores = Scores(self.graph, score_costs, heuristic, counts_nodes_once=True)
        self.pinned: set[int] = set()
        """Tensors in RAM that no later stage's node reads and that cannot be recomputed, but that
        recomputations of evicted tensors need."""

    def choose_victim(self, k: int) -> int | None:
        is_recomputable = self._make_recomputability_test()
        recomputable_tensors = (i for i in self.evictable_candidates(k) if is_recomputable(i))
        return min(recomputable_tensors, key=self.scores.score, default=None)

    def retains(self, i: int) -> bool:
        """Return whether tensor `i` stays in RAM after its last reader in the stage; may pin it.

        It is pinned if it cannot be recomputed, and the recomputation of an evicted tensor with a
        further user needs it.
        """
        if self.is_awaited(i):
            return True
        if self._make_recomputability_test()(i):
            return False
        is_needed = self._is_needed(i)
        if is_needed:
            self.pinned.add(i)
        return is_needed

    def compute(self, k: int) -> None:
        """Compute node `k`, update scores and clock, and evict unneeded members of `pinned`."""
        super().compute(k)
        for i in self.graph.inputs_of[k]:
            self.scores.record_use(i)
        self.scores.clock_s += self.problem.table.compute_time_s[k]
        for i in self.graph.outputs_of[k]:
            self.scores.record_use(i)
            self._mark_in_ram(i)
        for i in sorted(self.pinned):  # pinned tensors whose evicted descendants are in RAM again
            if self._last_read.get(i, -1) < 0 and not self._is_needed(i):
                self.evict(i)

    def evict(self, i: int) -> None:
        super().evict(i)
        self.pinned.discard(i)
        if self.graph.users_of[i] and self._make_recomputability_test()(i):
            # Tensors without readers, and tensors that cannot be recomputed, are not needed again.
            self.scores.record_eviction(i)

    def _mark_in_ram(self, i: int) -> None:
        self.scores.record_recovery(i)

    def _make_recomputability_test(self) -> Callable[[int], bool]:
        """Return a cached predicate: whether a tensor can be recomputed from available tensors."""
        graph, known_recomputable = self.graph, set[int]()

        def is_recomputable(i: int) -> bool:
            """Return whether `i` can be recomputed, recursively, from available tensors."""
            check_time_limit()
            required_nodes, pending_nodes = set[int](), [graph.node_of[i]]
            while pending_nodes:
                k = pending_nodes.pop()
                if k in known_recomputable or k in required_nodes:
                    continue
                if not self.problem.may_recompute(k):
                    return False
                required_nodes.add(k)
                pending_nodes += [
                    graph.node_of[p] for p in graph.inputs_of[k] if not self._is_available(p)
                ]
            known_recomputable.update(required_nodes)
            return True

        return is_recomputable

    def _is_available(self, p: int) -> bool:
        """Return whether tensor `p` can be read without a recomputation."""
        return p in self.ram

    def _is_needed(self, i: int) -> bool:
        """Return whether recomputing an evicted tensor with a further user needs tensor `i`."""
        return any(self.is_awaited(output) for output in self.scores.evicted_descendants(i))


class _PagingExecution(_LivenessExecution):
    """Execution of `dtr_paging`: evicts to storage where this is cheaper."""

    def __init__(
        self, problem: Problem, heuristic: str, *, free_transfers: bool, overwrites: bool
    ) -> None:
        minimizes_time = problem.minimize == Quantity.TIME
        node_costs = None if minimizes_time else problem.energy.coefficients.compute
        super().__init__(problem, heuristic, node_costs, overwrites=overwrites)
        self.counts_neighbourhood = heuristic == "full"
        """Whether the cost of a recomputation includes evicted descendants, and the score divides
        by the time since the last use."""
        self.storage = StorageSpace(problem)
        self.page_in_cost, self.page_out_cost = transfer_costs(problem)
        if free_transfers:
            self.page_in_cost = self.page_out_cost = (0.0,) * len(self.sizes)
        self.paged_out: set[int] = set()
        """Tensors that are not in RAM and are paged in on use."""

    def choose_victim(self, k: int) -> int | None:
        """Return the tensor to evict for node `k`, by the lowest score; None without a candidate.

        If paging is cheaper than recomputation, adds the tensor to `paged_out`, so that its next
        use pages it in, and to the content of `storage`.
        """
        is_recomputable = self._make_recomputability_test()
        best: tuple[float, int, bool] | None = None
        for i in self.evictable_candidates(k):
            recomputation_cost = self._recomputation_cost(i) if is_recomputable(i) else math.inf
            transfer_cost = self._transfer_cost(i)
            cost = min(recomputation_cost, transfer_cost)
            if cost < math.inf:
                score = (
                    self.scores.cost_per_byte_second(i, cost)
                    if self.counts_neighbourhood
                    else cost / self.sizes[i]
                )
                candidate = (score, i, transfer_cost < recomputation_cost)
                best = candidate if best is None else min(best, candidate)
        if best is None:
            return None
        _, victim, is_paged = best
        if is_paged:
            self.paged_out.add(victim)
            self.storage.write(victim)
        return victim

    def pages_in(self, i: int) -> bool:
        return i in self.paged_out

    def page_in(self, i: int) -> None:
        super().page_in(i)
        self.scores.record_use(i)
        self._mark_in_ram(i)

    def evict(self, i: int) -> None:
        """Free tensor `i`, which is paged in or recomputed on its next use; write nothing."""
        if i in self.storage.stored_tensors and not self.is_awaited(i):
            self.paged_out.add(i)
        if i in self.paged_out:
            self.free(i)
            self.pinned.discard(i)
        else:
            super().evict(i)

    def _mark_in_ram(self, i: int) -> None:
        self.paged_out.discard(i)
        super()._mark_in_ram(i)

    def _is_available(self, p: int) -> bool:
        return p in self.ram or p in self.paged_out

    def _recomputation_cost(self, i: int) -> float:
        """Return the cost of recomputing tensor `i` and its evicted ancestors [s or J].

        It includes page-ins of their paged-out inputs and, with `counts_neighbourhood`, the
        recomputation of evicted descendants.
        """
        ancestors = self.scores.evicted_ancestors(i)
        paged_inputs = {
            p
            for ancestor in ancestors
            for p in self.graph.inputs_of[self.graph.node_of[ancestor]]
            if p in self.paged_out
        }
        recomputed_tensors = (
            {*ancestors, *self.scores.evicted_descendants(i)}
            if self.counts_neighbourhood
            else ancestors
        )
        return self.scores.total_cost(recomputed_tensors) + sum(
            self.page_in_cost[p] for p in paged_inputs
        )

    def _transfer_cost(self, i: int) -> float:
        """Return the cost of paging `i` in, and out unless it is on storage; inf if impossible."""
        if not self.storage.has_space_for(i):
            return math.inf
        page_out = 0.0 if i in self.storage.stored_tensors else self.page_out_cost[i]
        return self.page_in_cost[i] + page_out


# -- the scores ------------------------------------------------------------------------------------


HEURISTICS: Final = ("full", "eq", "local", "msps", "lru", "size")
"""Scores of `dtr`; the tensor with the lowest score is evicted."""


class Scores:
    """Scores of tensors by size, last use, evicted neighbourhood and cost.

    With `counts_nodes_once`, a node with several evicted outputs counts once in a neighbourhood,
    not once for each as in the authors' simulator. Callers advance the clock, which is compute
    time.
    """

    def __init__(
        self, graph: Graph, node_costs: Sequence[float], heuristic: str, *, counts_nodes_once: bool
    ) -> None:
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.node_costs = node_costs
        self.clock_s = 0.0
        self.last_use_s = [0.0] * len(self.sizes)
        self.evicted: set[int] = set()
        """Tensors that were computed, are not in RAM, and are recomputed on use."""
        self._counts_nodes_once = counts_nodes_once
        sets = CostSets()
        self._sets = sets if heuristic == "eq" else None
        score_functions: dict[str, Callable[[int], float]] = {
            "full": lambda i: self.cost_per_byte_second(
                i, self.total_cost({*self.evicted_ancestors(i), *self.evicted_descendants(i)})
            ),
            "eq": lambda i: self.cost_per_byte_second(
                i, self._node_cost(i) + sets.total_cost(self._evicted_neighbours(i))
            ),
            "local": lambda i: self.cost_per_byte_second(i, self._node_cost(i)),
            "msps": lambda i: self.total_cost(self.evicted_ancestors(i)) / self.sizes[i],
            "lru": lambda i: -self._staleness_s(i),
            "size": lambda i: 1 / self.sizes[i],
        }
        self.score = score_functions[heuristic]
        """Function from a tensor in RAM, of more than 0 bytes, to its score."""

    def record_use(self, i: int) -> None:
        """Record a use of tensor `i` at the current time."""
        self.last_use_s[i] = self.clock_s

    def record_eviction(self, i: int) -> None:
        """Record that tensor `i` left RAM and must be recomputed on use."""
        self.evicted.add(i)
        if self._sets is not None:
            self._sets.add(i, self._node_cost(i), self._evicted_neighbours(i))

    def record_recovery(self, i: int) -> None:
        """Record that tensor `i` is in RAM again, if it was evicted."""
        if i in self.evicted:
            self.evicted.remove(i)
            if self._sets is not None:
                self._sets.remove(i, self._node_cost(i))

    def cost_per_byte_second(self, i: int, cost: float) -> float:
        """Return a cost divided by size and staleness of tensor `i`; inf if either of them is 0."""
        weight = self.sizes[i] * self._staleness_s(i)
        return cost / weight if weight > 0 else math.inf

    def evicted_ancestors(self, i: int) -> set[int]:
        """Return tensor `i` and the evicted tensors that must be recomputed for it."""
        ancestors = {i}
        pending_tensors = [i]
        while pending_tensors:
            for p in self.graph.inputs_of[self.graph.node_of[pending_tensors.pop()]]:
                if p in self.evicted and p not in ancestors:
                    ancestors.add(p)
                    pending_tensors.append(p)
        return ancestors

    def evicted_descendants(self, i: int) -> set[int]:
        """Return the evicted tensors, without `i`, whose recomputation needs tensor `i`."""
        descendants: set[int] = set()
        pending_tensors = [i]
        while pending_tensors:
            for k in self.graph.users_of[pending_tensors.pop()]:
                for output in self.graph.outputs_of[k]:
                    if output in self.evicted and output not in descendants:
                        descendants.add(output)
                        pending_tensors.append(output)
        return descendants

    def _node_cost(self, i: int) -> float:
        return self.node_costs[self.graph.node_of[i]]

    def _staleness_s(self, i: int) -> float:
        return self.clock_s - self.last_use_s[i]

    def total_cost(self, tensors: Iterable[int]) -> float:
        """Return the cost of the nodes of `tensors`; see the class for nodes of several tensors."""
        nodes: Iterable[int] = (self.graph.node_of[i] for i in tensors)
        return math.fsum(
            self.node_costs[k] for k in (set(nodes) if self._counts_nodes_once else nodes)
        )

    def _evicted_neighbours(self, i: int) -> list[int]:
        """Return the evicted neighbours of `i`: inputs of its node, then outputs of its readers."""
        graph = self.graph
        input_tensors = graph.inputs_of[graph.node_of[i]]
        reader_outputs = (output for k in graph.users_of[i] for output in graph.outputs_of[k])
        return [
            neighbour
            for neighbour in (*input_tensors, *reader_outputs)
            if neighbour in self.evicted
        ]


class CostSets:
    """Costs of connected sets of evicted tensors.

    When a tensor is recomputed, its cost is subtracted from its set, but the set is not split. So
    sets may be larger than the connected sets: the paper's approximation.
    """

    def __init__(self) -> None:
        self._set_of: dict[int, int] = {}
        """Index of the set of each evicted tensor."""
        self._set_costs: list[float] = []
        """Cost of each set."""

    def add(self, i: int, cost: float, neighbours: Iterable[int]) -> None:
        """Add an evicted tensor with its node's cost, merged with the sets of its neighbours."""
        old_sets = self._find_sets(neighbours)
        self._set_of |= {
            member: len(self._set_costs)
            for member, old_set in self._set_of.items()
            if old_set in old_sets
        }
        self._set_of[i] = len(self._set_costs)
        self._set_costs.append(sum((self._set_costs[old_set] for old_set in old_sets), start=cost))

    def remove(self, i: int, cost: float) -> None:
        """Remove a tensor that is in RAM again from its set; subtract `cost`."""
        if i in self._set_of:
            self._set_costs[self._set_of.pop(i)] -= cost

    def total_cost(self, tensors: Iterable[int]) -> float:
        """Return the total cost of the sets that contain `tensors`; each set counts once."""
        return sum(self._set_costs[set_index] for set_index in self._find_sets(tensors))

    def _find_sets(self, tensors: Iterable[int]) -> list[int]:
        return sorted({self._set_of[i] for i in tensors if i in self._set_of})
