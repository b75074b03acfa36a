"""Dynamic tensor rematerialization: evict online by a score, recompute on demand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.cost_sets import CostSets
from poetmodel.baselines.execution import Execution
from poetmodel.errors import InputError
from poetmodel.problem import DeadlineCounts, Quantity
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

HEURISTICS: Final = ("full", "eq", "local", "msps", "lru", "size")
"""What `dtr` can score tensors by; the tensor of the least score goes."""


def dtr(problem: Problem, heuristic: str = "full") -> Schedule:
    """Evict the tensor of the least score whenever RAM is short, recompute what is missing.

    Parameters
    ----------
    problem : Problem
        What to schedule.
    heuristic : {'full', 'eq', 'local', 'msps', 'lru', 'size'}
        The score of a tensor of `m` bytes that was last used `s` seconds ago and whose node takes
        `c` seconds:

        - ``full`` (h_DTR): ``(c + c of its evicted neighbourhood) / (m s)``. The neighbourhood are
          the evicted tensors that must be recomputed to recompute this one, and those that need
          this one to be recomputed;
        - ``eq`` (h_DTR^eq): the neighbourhood is approximated by the connected sets of evicted
          tensors next to it, kept by union-find;
        - ``local`` (h_DTR^local): ``c / (m s)``;
        - ``msps``: ``(c + c of what must be recomputed for it) / m``, the reciprocal of Capuchin's
          memory saving per second;
        - ``lru``: ``1 / s``;
        - ``size``: ``1 / m``, the largest tensor first.

    Returns
    -------
    Schedule
        Within the RAM budget.

    Raises
    ------
    MethodNotApplicableError
        If a step does not fit and no tensor may be evicted.
    InputError
        For an unknown heuristic.

    Notes
    -----
    As in the paper's simulator (simrd), the clock is compute time, an input is used when its
    reader starts and an output when its maker ends, and a tensor without a further user leaves at
    once but counts as evicted, since others may need it again ("eager eviction"). What cannot be
    made again, because a node on the way is not recomputable, is never evicted; without a further
    user it stays until no evicted tensor needs it ("banishing").

    Interpretations. The neighbourhood counts each node once, however many of its outputs are
    evicted (``eq`` counts every tensor, as simrd does); what nobody reads is no part of it. A stage
    recomputes in graph order and keeps what a later step of it reads, where the paper's recursion
    could evict that and make it twice; see `Execution`. Tensors of 0 bytes are never evicted. Ties
    go to the lowest number.

    Each eviction looks at the neighbourhood of every candidate: O(n) evictions of O(n) candidates
    with up to O(edges) each; neighbourhoods are small in practice.

    References
    ----------
    Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock: Dynamic Tensor
    Rematerialization. ICLR 2021, section 4; simulator at github.com/uwsampl/dtr-prototype.
    """
    if heuristic not in HEURISTICS:
        msg = f"heuristic {heuristic!r}: expected one of {', '.join(HEURISTICS)}"
        raise InputError(msg)
    return _Dtr(problem, heuristic).run()


def dtr_paging(problem: Problem) -> Schedule:
    """Run `dtr` with eviction to storage wherever that is cheaper.

    Parameters
    ----------
    problem : Problem
        What to schedule.

    Returns
    -------
    Schedule
        Within the RAM budget and the storage limit.

    Raises
    ------
    MethodNotApplicableError
        If a step does not fit and no tensor may be evicted in either way.

    Notes
    -----
    The score is that of h_DTR, where the cost of a tensor is the lesser of recomputing it (its
    evicted neighbourhood included) and of its transfers: page-in, and page-out unless it lies on
    storage already. The lesser one also decides how it leaves. Costs are energy, or time in the
    deadline's meaning where the problem minimizes time; staleness stays time. What cannot be made
    again goes to storage, as long as that has room; what is on storage is paged in when it is
    needed, and is no part of any neighbourhood.
    """
    return _DtrPaging(problem).run()


class _Dtr(Execution):
    def __init__(self, problem: Problem, heuristic: str) -> None:
        super().__init__(problem)
        self.cost = self._node_costs()
        self.clock_s = 0.0
        self.last_use_s = [0.0] * len(self.sizes)
        self.evicted: set[int] = set()
        """Made before, not in RAM, and to be recomputed if needed."""
        self.pinned: set[int] = set()
        """In RAM without a further user, because it cannot be made again."""
        self.sets = CostSets(len(self.sizes)) if heuristic == "eq" else None
        scores: dict[str, Callable[[int], float]] = {
            "full": lambda i: self._per_byte_second(i, self._neighbourhood_cost(i)),
            "eq": lambda i: self._per_byte_second(i, self._cost_of_sets(i)),
            "local": lambda i: self._per_byte_second(i, self.cost[self.graph.node_of[i]]),
            "msps": lambda i: self._total(self._evicted_before([i])) / self.sizes[i],
            "lru": lambda i: -self._staleness_s(i),
            "size": lambda i: 1 / self.sizes[i],
        }
        self.score = scores[heuristic]

    def _node_costs(self) -> Sequence[float]:
        return self.problem.table.compute_time_s

    # -- what leaves RAM --------------------------------------------------------------------------

    def choose(self, candidates: Sequence[int]) -> int | None:
        again = self._can_be_made()
        return min((i for i in candidates if again(i)), key=self.score, default=None)

    def keeps(self, i: int) -> bool:
        if self.is_awaited(i):
            return True
        if self._can_be_made()(i):
            return False
        if self._is_needed(i):
            self.pinned.add(i)
            return True
        return False

    def on_compute(self, k: int) -> None:
        for i in self.graph.inputs_of[k]:
            self.last_use_s[i] = self.clock_s
        self.clock_s += self.problem.table.compute_time_s[k]
        for i in self.graph.outputs_of[k]:
            self.last_use_s[i] = self.clock_s
            self._is_back(i)
        self._unpin()

    def on_leave(self, i: int) -> None:
        self.pinned.discard(i)
        if not self.graph.users_of[i] or not self._can_be_made()(i):
            return  # it is gone: nobody needs it again
        self.evicted.add(i)
        if self.sets is not None:
            self.sets.add(i, self.cost[self.graph.node_of[i]], self._evicted_beside(i))

    def _is_back(self, i: int) -> None:
        if i in self.evicted:
            self.evicted.remove(i)
            if self.sets is not None:
                self.sets.remove(i, self.cost[self.graph.node_of[i]])

    def _unpin(self) -> None:
        """Let go what was pinned for evicted tensors that are back."""
        for i in sorted(self.pinned):
            if self._last_read.get(i, -1) < 0 and not self._is_needed(i):
                self.let_go(i)

    # -- what can be had again --------------------------------------------------------------------

    def _can_be_made(self) -> Callable[[int], bool]:
        """Return a test whether a tensor can be recomputed from what is in RAM now."""
        known: dict[int, bool] = {}
        graph, problem = self.graph, self.problem

        def test(i: int) -> bool:
            check_time_limit()
            todo = [i]
            while todo:
                u = todo[-1]
                if u in known:
                    todo.pop()
                    continue
                k = graph.node_of[u]
                missing = [p for p in graph.inputs_of[k] if not self._is_at_hand(p)]
                if not problem.may_recompute(k):
                    known[u] = False
                elif unknown := [p for p in missing if p not in known]:
                    todo.extend(unknown)
                    continue
                else:
                    known[u] = all(known[p] for p in missing)
                todo.pop()
            return known[i]

        return test

    def _is_at_hand(self, p: int) -> bool:
        """Return whether tensor `p` need not be recomputed when it is read."""
        return p in self.ram

    def _is_needed(self, i: int) -> bool:
        """Return whether an evicted tensor with a further user is made from tensor `i`."""
        return any(self.is_awaited(u) for u in self._evicted_after(i))

    # -- costs ------------------------------------------------------------------------------------

    def _staleness_s(self, i: int) -> float:
        return self.clock_s - self.last_use_s[i]

    def _per_byte_second(self, i: int, cost: float) -> float:
        weight = self.sizes[i] * self._staleness_s(i)
        return cost / weight if weight > 0 else math.inf

    def _neighbourhood_cost(self, i: int) -> float:
        return self._total({*self._evicted_before([i]), *self._evicted_after(i)})

    def _total(self, tensors: Iterable[int]) -> float:
        nodes = {self.graph.node_of[u] for u in tensors}
        return math.fsum(self.cost[k] for k in nodes)

    def _evicted_before(self, tensors: Iterable[int]) -> set[int]:
        """Return the given tensors and the evicted ones that must be recomputed for them."""
        found = set(tensors)
        todo = list(found)
        while todo:
            for p in self.graph.inputs_of[self.graph.node_of[todo.pop()]]:
                if p in self.evicted and p not in found:
                    found.add(p)
                    todo.append(p)
        return found

    def _evicted_after(self, i: int) -> set[int]:
        """Return the evicted tensors for which tensor `i` must be recomputed."""
        found: set[int] = set()
        todo = [i]
        while todo:
            for k in self.graph.users_of[todo.pop()]:
                for o in self.graph.outputs_of[k]:
                    if o in self.evicted and o not in found:
                        found.add(o)
                        todo.append(o)
        return found

    def _evicted_beside(self, i: int) -> list[int]:
        """Return the evicted tensors that tensor `i` is made from or that are made from it."""
        graph = self.graph
        before = graph.inputs_of[graph.node_of[i]]
        after = (o for k in graph.users_of[i] for o in graph.outputs_of[k])
        return [u for u in (*before, *after) if u in self.evicted]

    def _cost_of_sets(self, i: int) -> float:
        own = self.cost[self.graph.node_of[i]]
        return own if self.sets is None else own + self.sets.total(self._evicted_beside(i))


class _DtrPaging(_Dtr):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, "full")
        graph = problem.graph
        self.stored: set[int] = set()
        """With a copy on storage."""
        if problem.can_page:
            self.stored = {i for i, k in enumerate(graph.node_of) if graph.nodes[k].on_aux}
        self.away: set[int] = set()
        """Not in RAM, and to be paged in if needed."""
        self.room_bytes = math.inf if problem.aux_limit_bytes is None else problem.aux_limit_bytes
        """Storage that is left [B]."""

    def _node_costs(self) -> Sequence[float]:
        problem = self.problem
        if problem.minimize == Quantity.TIME:
            return problem.table.compute_time_s
        return [problem.compute_charge_j(k) for k in range(len(problem.graph.nodes))]

    def choose(self, candidates: Sequence[int]) -> int | None:
        again = self._can_be_made()
        best: tuple[float, int, bool] | None = None
        for i in candidates:
            recompute = self._neighbourhood_cost(i) if again(i) else math.inf
            transfer = self._transfer_cost(i)
            cost = min(recompute, transfer)
            if cost < math.inf:
                score = (self._per_byte_second(i, cost), i, transfer < recompute)
                best = score if best is None else min(best, score)
        if best is None:
            return None
        _, victim, pages = best
        if pages:
            self.away.add(victim)
            if victim not in self.stored:
                self.stored.add(victim)
                self.room_bytes -= self.sizes[victim]
        return victim

    def fetches(self, i: int) -> bool:
        return i in self.away

    def on_page_in(self, i: int) -> None:
        self.last_use_s[i] = self.clock_s
        self._is_back(i)

    def on_leave(self, i: int) -> None:
        if i in self.stored and not self.is_awaited(i):
            self.away.add(i)
        if i in self.away:
            self.pinned.discard(i)
        else:
            super().on_leave(i)

    def _is_back(self, i: int) -> None:
        self.away.discard(i)
        super()._is_back(i)

    def _is_at_hand(self, p: int) -> bool:
        return p in self.ram or p in self.away

    def _neighbourhood_cost(self, i: int) -> float:
        read = {
            p
            for u in self._evicted_before([i])
            for p in self.graph.inputs_of[self.graph.node_of[u]]
            if p in self.away
        }
        return super()._neighbourhood_cost(i) + sum(self._page_in_cost(p) for p in read)

    def _transfer_cost(self, i: int) -> float:
        """Return what it costs to have tensor `i` out and in again, infinite where it can't be."""
        if i in self.stored:
            return self._page_in_cost(i)
        if not self.problem.can_page or self.sizes[i] > self.room_bytes:
            return math.inf
        return self._page_in_cost(i) + self._page_out_cost(i)

    def _page_in_cost(self, i: int) -> float:
        problem = self.problem
        if problem.minimize != Quantity.TIME:
            return problem.page_in_charge_j(i)
        return problem.table.page_in_time_s[i] if self._transfers_count else 0.0

    def _page_out_cost(self, i: int) -> float:
        problem = self.problem
        if problem.minimize != Quantity.TIME:
            return problem.page_out_charge_j(i)
        return problem.table.page_out_time_s[i] if self._transfers_count else 0.0

    @property
    def _transfers_count(self) -> bool:
        return self.problem.deadline_counts != DeadlineCounts.COMPUTE
