"""Dynamic tensor rematerialization: evict online by a score, recompute on demand."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.engine import fitted
from poetmodel.baselines.homes import all_in_ram, best_homes
from poetmodel.baselines.paging import StorageSpace, transfer_costs
from poetmodel.clock import check_time_limit
from poetmodel.errors import InputError, MethodNotApplicableError
from poetmodel.heuristics.execution import Execution, StagedExecution, last_needs
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule

THRASHING: Final = 50
"""A run that takes as many times the compute time of a single pass is given up."""
LIVENESS: Final = "liveness"
"""The variant that knows what each stage needs. Its score is ``full``."""


@all_in_ram
def dtr(problem: Problem, heuristic: str = "full", *, liveness: bool = False) -> Schedule:
    """Evict the tensor of the least score whenever RAM is short, recompute what is missing.

    The heuristic is the score of a tensor of `m` bytes that was last used `s` seconds ago and whose
    node takes `c` seconds:

    - ``full`` (h_DTR): ``(c + c of its evicted neighbourhood) / (m s)``. The neighbourhood are the
      evicted tensors that must be recomputed to recompute this one, and those that need this one to
      be recomputed;
    - ``eq`` (h_DTR^eq): the neighbourhood is approximated by the connected sets of evicted tensors
      next to it, kept by union-find;
    - ``local`` (h_DTR^local): ``c / (m s)``;
    - ``msps``: ``(c + c of what must be recomputed for it) / m``, the reciprocal of Capuchin's
      memory saving per second;
    - ``lru``: ``1 / s``;
    - ``size``: ``1 / m``, the largest tensor first;
    - ``liveness``: ``full`` with `liveness`, a name for the command line.

    `liveness` says that what a stage recomputes is known when the stage begins, and leaves RAM
    after its last reader there; the paper's runtime does neither.

    As in the authors' simulator (simrd, github.com/uwsampl/dtr-prototype), the clock is compute
    time, an input is used when its reader is requested and an output when it is computed first, and
    a tensor without a further user leaves at once ("eager eviction") but counts as evicted, since
    others may need it again. When it is recomputed after that, it stays until its score is the
    least: the runtime does not know that no node reads it any more. This matters where a
    recomputation has further outputs, and where it needs long chains of others; see `Runtime`.

    Interpretations. What may not be recomputed is never evicted; it leaves when no node can need it
    any more ("banishing"; simrd pins constants for good). A node that the runtime computes twice
    within a stage is computed once by the schedule and stays between its uses there; where that
    takes more RAM than the budget, the runtime is run again with less. A run whose compute time
    exceeds fifty single passes is given up. Tensors of 0 bytes are not evicted; ties go to the
    lowest number.

    With `liveness` a stage recomputes in graph order, keeps what a later step of it reads, and
    frees the rest; see `StagedExecution`. A neighbourhood counts each node once, however many of
    its outputs are evicted, and what no node reads is no part of it. This is a stronger method than
    the published one.

    Each eviction looks at the neighbourhood of every candidate: O(n) evictions of O(n) candidates
    with up to O(edges) each; neighbourhoods are small in practice.
    """
    if heuristic == LIVENESS:
        heuristic, liveness = HEURISTICS[0], True
    if heuristic not in HEURISTICS:
        raise InputError(
            f"heuristic {heuristic!r}: expected one of {', '.join((*HEURISTICS, LIVENESS))}"
        )
    if liveness:
        return _Liveness(problem, heuristic).run()
    return fitted(problem, lambda ram_bytes: Runtime(problem, heuristic, ram_bytes).run())


def dtr_paging(problem: Problem) -> Schedule:
    """Run `dtr` with liveness, and with eviction to storage wherever that is cheaper.

    The score is ``full`` or ``msps``, where the cost of a tensor is the lesser of recomputing it
    (with what the score counts besides) and of its transfers: page-in, and page-out unless it lies
    on storage already. The lesser one also decides how it leaves. Costs are energy, or time in the
    deadline's meaning where the problem minimizes time; staleness stays time. What cannot be
    recomputed goes to storage, as long as that has space. What is on storage is paged in when it
    is needed, and is no part of any neighbourhood.

    Each score has a run of its own, and one more run only pages: it fits where recomputing within a
    stage does not. Where the time is minimized and transfers overlap with computing, further runs
    charge nothing for transfers, as if all were hidden. The best schedule is taken.
    """
    overlaps = problem.deadline_counts == DeadlineCounts.OVERLAP
    charges = (False, True) if overlaps and problem.minimize == Quantity.TIME else (False,)
    rules = [
        partial(_paged, score=score, free=free, recompute=recompute)
        for score, recompute in (("full", True), ("msps", True), ("full", False))
        for free in charges
    ]
    return best_homes(problem, rules)


def _paged(problem: Problem, *, score: str, free: bool, recompute: bool) -> Schedule:
    allowed = problem if recompute else replace(problem, recompute=False)
    return _Paging(allowed, score, free=free).run()


class Runtime(Execution):
    """The runtime of the paper's simulator (simrd's ``RuntimeV2Eager``), within some RAM [B].

    Nodes run in graph order. A node's inputs that are in RAM are locked, the others recomputed one
    after the other, each in the same way, and locked; then room is made for all its outputs. A
    tensor leaves when its last reader has run. One that is recomputed after that stays until its
    score is the least: the runtime does not know which node will read it again. What may not be
    recomputed is never evicted, and leaves when nothing can need it any more.
    """

    def __init__(self, problem: Problem, heuristic: str, ram_bytes: int) -> None:
        graph, self.compute_time_s = problem.graph, problem.table.compute_time_s
        super().__init__(graph, ram_bytes)
        self.scores = Scores(graph, self.compute_time_s, heuristic, nodes_once=False)
        self.locks: Counter[int] = Counter()
        again = {i for i, k in enumerate(graph.node_of) if problem.may_recompute(k)}
        self.pinned = set(range(len(graph.tensors))) - again
        needs = last_needs(graph, again)
        self.leaving: list[list[int]] = [[] for _ in graph.nodes]
        """The tensors that leave after each node's first computation."""
        for i, users in enumerate(graph.users_of):
            end = users[-1] if users else graph.node_of[i]
            self.leaving[needs[i] if i in self.pinned else end].append(i)
        self.limit_s = THRASHING * sum(self.compute_time_s)
        self.program: list[Instruction] = []
        """What it did, in its own order, which a schedule of stages does not keep."""

    def run(self) -> Schedule:
        """Execute the training step and return it as a schedule."""
        for k in range(len(self.graph.nodes)):
            self._compute_with_inputs(k)
            for i in self.graph.outputs_of[k]:
                self.scores.use(i)
            for i in self.leaving[k]:
                if i in self.ram:
                    self.evict(i)
        return self.schedule()

    def compute(self, k: int) -> None:
        """Compute node `k`, whose inputs are locked, and unlock them."""
        node = self.graph.nodes[k]
        self.make_room(node.output_bytes + node.workspace_bytes, k)
        self.scores.clock_s += self.compute_time_s[k]
        if self.scores.clock_s > self.limit_s:
            raise MethodNotApplicableError(
                f"it thrashes: the compute time of {THRASHING} single passes does not finish the "
                f"training step within {format_bytes(int(self.limit_bytes))}"
            )
        super().compute(k)
        self.program.append(Instruction(Op.COMPUTE, k))
        for i in self.graph.outputs_of[k]:
            self.scores.recover(i)
        for i in self.graph.inputs_of[k]:
            self.locks[i] -= 1

    def victim(self, k: int) -> int | None:  # noqa: ARG002 - what node `k` reads is locked
        """Return the tensor of the least score that is neither locked nor pinned."""
        may_leave = (
            i for i in sorted(self.ram) if self.sizes[i] and not (self.locks[i] or i in self.pinned)
        )
        return min(may_leave, key=self.scores.score, default=None)

    def evict(self, i: int) -> None:
        """Free tensor `i` and count it as evicted, unless nothing can need it any more."""
        super().evict(i)
        self.program.append(Instruction(Op.FREE, i))
        if i not in self.pinned:
            self.scores.evict(i)

    def _compute_with_inputs(self, k: int) -> None:
        pending = [self._request(k)]
        while pending:
            check_time_limit()
            node, missing = pending[-1]
            while missing and missing[0] in self.ram:
                self.locks[missing.pop(0)] += 1
            if missing:
                pending.append(self._request(self.graph.node_of[missing[0]]))
            else:
                self.compute(node)
                pending.pop()

    def _request(self, k: int) -> tuple[int, list[int]]:
        """Lock the inputs of node `k` that are in RAM; return the node and the other inputs."""
        inputs = self.graph.inputs_of[k]
        for i in inputs:
            self.scores.use(i)
            self.locks[i] += i in self.ram
        return k, [i for i in inputs if i not in self.ram]


class _Liveness(StagedExecution):
    def __init__(
        self, problem: Problem, heuristic: str, node_costs: Sequence[float] | None = None
    ) -> None:
        super().__init__(problem.graph, problem.usable_ram_bytes)
        self.problem = problem
        costs = problem.table.compute_time_s if node_costs is None else node_costs
        self.scores = Scores(self.graph, costs, heuristic, nodes_once=True)
        self.pinned: set[int] = set()
        """In RAM without a further user, because it cannot be recomputed."""

    def victim(self, k: int) -> int | None:
        again = self._recomputability()
        recomputable = (i for i in self.candidates(k) if again(i))
        return min(recomputable, key=self.scores.score, default=None)

    def retains(self, i: int) -> bool:
        if self.is_awaited(i):
            return True
        if self._recomputability()(i):
            return False
        needed = self._is_needed(i)
        if needed:
            self.pinned.add(i)
        return needed

    def compute(self, k: int) -> None:
        super().compute(k)
        for i in self.graph.inputs_of[k]:
            self.scores.use(i)
        self.scores.clock_s += self.problem.table.compute_time_s[k]
        for i in self.graph.outputs_of[k]:
            self.scores.use(i)
            self._is_back(i)
        for i in sorted(self.pinned):  # for evicted tensors that are back
            if self._last_read.get(i, -1) < 0 and not self._is_needed(i):
                self.evict(i)

    def evict(self, i: int) -> None:
        super().evict(i)
        self.pinned.discard(i)
        if self.graph.users_of[i] and self._recomputability()(i):
            self.scores.evict(i)  # no node needs any other tensor again

    def _is_back(self, i: int) -> None:
        self.scores.recover(i)

    def _recomputability(self) -> Callable[[int], bool]:
        """Return a test whether a tensor can be recomputed from what is in RAM now."""
        graph, repeatable = self.graph, set[int]()

        def test(i: int) -> bool:
            check_time_limit()
            needed, todo = set[int](), [graph.node_of[i]]
            while todo:
                k = todo.pop()
                if k in repeatable or k in needed:
                    continue
                if not self.problem.may_recompute(k):
                    return False
                needed.add(k)
                todo += [graph.node_of[p] for p in graph.inputs_of[k] if not self._is_available(p)]
            repeatable.update(needed)
            return True

        return test

    def _is_available(self, p: int) -> bool:
        """Whether tensor `p` need not be recomputed when it is read."""
        return p in self.ram

    def _is_needed(self, i: int) -> bool:
        """Whether an evicted tensor with a further user is computed from tensor `i`."""
        return any(self.is_awaited(u) for u in self.scores.evicted_after(i))


class _Paging(_Liveness):
    def __init__(self, problem: Problem, heuristic: str, *, free: bool = False) -> None:
        by_time = problem.minimize == Quantity.TIME
        costs = None if by_time else problem.energy.coefficients.compute
        super().__init__(problem, heuristic, costs)
        self.full = heuristic == "full"
        self.storage = StorageSpace(problem)
        self.page_in_cost, self.page_out_cost = transfer_costs(problem)
        if free:
            self.page_in_cost = self.page_out_cost = (0.0,) * len(self.sizes)
        self.away: set[int] = set()
        """Not in RAM, and paged in if needed."""

    def victim(self, k: int) -> int | None:
        again = self._recomputability()
        best: tuple[float, int, bool] | None = None
        for i in self.candidates(k):
            recompute = self._recomputation_cost(i) if again(i) else math.inf
            transfer = self._transfer_cost(i)
            cost = min(recompute, transfer)
            if cost < math.inf:
                score = self.scores.per_byte_second(i, cost) if self.full else cost / self.sizes[i]
                ranked = (score, i, transfer < recompute)
                best = ranked if best is None else min(best, ranked)
        if best is None:
            return None
        _, victim, pages = best
        if pages:
            self.away.add(victim)
            self.storage.write(victim)
        return victim

    def pages_in(self, i: int) -> bool:
        return i in self.away

    def page_in(self, i: int) -> None:
        super().page_in(i)
        self.scores.use(i)
        self._is_back(i)

    def evict(self, i: int) -> None:
        if i in self.storage.stored and not self.is_awaited(i):
            self.away.add(i)
        if i in self.away:
            self.free(i)
            self.pinned.discard(i)
        else:
            super().evict(i)

    def _is_back(self, i: int) -> None:
        self.away.discard(i)
        super()._is_back(i)

    def _is_available(self, p: int) -> bool:
        return p in self.ram or p in self.away

    def _recomputation_cost(self, i: int) -> float:
        before = self.scores.evicted_before(i)
        read = {
            p for u in before for p in self.graph.inputs_of[self.graph.node_of[u]] if p in self.away
        }
        counted = {*before, *self.scores.evicted_after(i)} if self.full else before
        return self.scores.total(counted) + sum(self.page_in_cost[p] for p in read)

    def _transfer_cost(self, i: int) -> float:
        """Return the cost of paging tensor `i` out and in, infinite without space for it."""
        if not self.storage.takes(i):
            return math.inf
        page_out = 0.0 if i in self.storage.stored else self.page_out_cost[i]
        return self.page_in_cost[i] + page_out


# -- the scores ------------------------------------------------------------------------------------


HEURISTICS: Final = ("full", "eq", "local", "msps", "lru", "size")
"""Scores of `dtr`. The tensor of the least score is evicted."""


class Scores:
    """Knows when tensors were used and which are evicted; the clock is compute time.

    With `nodes_once` a node counts once in a neighbourhood however many of its outputs are evicted;
    the authors' simulator counts every tensor.
    """

    def __init__(
        self, graph: Graph, cost: Sequence[float], heuristic: str, *, nodes_once: bool
    ) -> None:
        self.graph = graph
        self.sizes = graph.tensor_bytes
        self.cost = cost
        self.clock_s = 0.0
        self.last_use_s = [0.0] * len(self.sizes)
        self.evicted: set[int] = set()
        """Computed before, not in RAM, and recomputed if needed."""
        self._nodes_once = nodes_once
        sets = CostSets()
        self._sets = sets if heuristic == "eq" else None
        scores: dict[str, Callable[[int], float]] = {
            "full": lambda i: self.per_byte_second(
                i, self.total({*self.evicted_before(i), *self.evicted_after(i)})
            ),
            "eq": lambda i: self.per_byte_second(
                i, self._own_cost(i) + sets.total(self._evicted_beside(i))
            ),
            "local": lambda i: self.per_byte_second(i, self._own_cost(i)),
            "msps": lambda i: self.total(self.evicted_before(i)) / self.sizes[i],
            "lru": lambda i: -self._staleness_s(i),
            "size": lambda i: 1 / self.sizes[i],
        }
        self.score = scores[heuristic]
        """From a tensor in RAM to its score."""

    def use(self, i: int) -> None:
        """Record that tensor `i` is used now."""
        self.last_use_s[i] = self.clock_s

    def evict(self, i: int) -> None:
        """Record that tensor `i` left RAM and must be recomputed if needed."""
        self.evicted.add(i)
        if self._sets is not None:
            self._sets.add(i, self._own_cost(i), self._evicted_beside(i))

    def recover(self, i: int) -> None:
        """Record that tensor `i` is in RAM."""
        if i in self.evicted:
            self.evicted.remove(i)
            if self._sets is not None:
                self._sets.remove(i, self._own_cost(i))

    def per_byte_second(self, i: int, cost: float) -> float:
        """Return a cost over the size and the staleness of tensor `i`."""
        weight = self.sizes[i] * self._staleness_s(i)
        return cost / weight if weight > 0 else math.inf

    def evicted_before(self, i: int) -> set[int]:
        """Return tensor `i` and the evicted ones that must be recomputed for it."""
        ancestors = {i}
        todo = [i]
        while todo:
            for p in self.graph.inputs_of[self.graph.node_of[todo.pop()]]:
                if p in self.evicted and p not in ancestors:
                    ancestors.add(p)
                    todo.append(p)
        return ancestors

    def evicted_after(self, i: int) -> set[int]:
        """Return the evicted tensors for which tensor `i` must be recomputed."""
        descendants: set[int] = set()
        todo = [i]
        while todo:
            for k in self.graph.users_of[todo.pop()]:
                for o in self.graph.outputs_of[k]:
                    if o in self.evicted and o not in descendants:
                        descendants.add(o)
                        todo.append(o)
        return descendants

    def _own_cost(self, i: int) -> float:
        return self.cost[self.graph.node_of[i]]

    def _staleness_s(self, i: int) -> float:
        return self.clock_s - self.last_use_s[i]

    def total(self, tensors: Iterable[int]) -> float:
        """Return the cost of the nodes of some tensors."""
        nodes: Iterable[int] = (self.graph.node_of[u] for u in tensors)
        return math.fsum(self.cost[k] for k in (set(nodes) if self._nodes_once else nodes))

    def _evicted_beside(self, i: int) -> list[int]:
        """Return the evicted inputs of the node of tensor `i`, and outputs of its readers."""
        graph = self.graph
        before = graph.inputs_of[graph.node_of[i]]
        after = (o for k in graph.users_of[i] for o in graph.outputs_of[k])
        return [u for u in (*before, *after) if u in self.evicted]


class CostSets:
    """Costs of connected sets of evicted tensors.

    A tensor that comes back takes its own cost out of its set, which stays whole. So sets become
    larger than the true ones: the paper's approximation.
    """

    def __init__(self) -> None:
        self._set_of: dict[int, int] = {}
        """The set of each evicted tensor."""
        self._cost: list[float] = []

    def add(self, i: int, cost: float, beside: Iterable[int]) -> None:
        """Add an evicted tensor, joined with the sets of those beside it."""
        joined = self._sets(beside)
        self._set_of |= {u: len(self._cost) for u, old in self._set_of.items() if old in joined}
        self._set_of[i] = len(self._cost)
        self._cost.append(sum((self._cost[old] for old in joined), start=cost))

    def remove(self, i: int, cost: float) -> None:
        """Take a tensor that is back out of its set."""
        if i in self._set_of:
            self._cost[self._set_of.pop(i)] -= cost

    def total(self, tensors: Iterable[int]) -> float:
        """Return the cost of the sets that the tensors are in, each set once."""
        return sum(self._cost[root] for root in self._sets(tensors))

    def _sets(self, tensors: Iterable[int]) -> list[int]:
        return sorted({self._set_of[u] for u in tensors if u in self._set_of})
