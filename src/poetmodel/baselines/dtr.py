"""Dynamic tensor rematerialization: evict online by a score, recompute on demand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from poetmodel.baselines.assembly import fitted
from poetmodel.baselines.dtr_runtime import Runtime
from poetmodel.baselines.dtr_scores import HEURISTICS, Scores
from poetmodel.baselines.execution import Execution
from poetmodel.errors import InputError
from poetmodel.problem import DeadlineCounts, Quantity
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from poetmodel.problem import Problem
    from poetmodel.schedule import Schedule

LIVENESS: Final = "liveness"
"""The variant that knows what each stage needs; by the score ``full``."""


def dtr(problem: Problem, heuristic: str = "full", *, liveness: bool = False) -> Schedule:
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

        ``liveness`` is ``full`` with `liveness`: a name for the command line.
    liveness : bool
        Whether what a stage recomputes is known when the stage begins, and leaves RAM after its
        last reader there; the paper's runtime does neither.

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
    As in the authors' simulator (simrd), the clock is compute time, an input is used when its
    reader is requested and an output when it is made first, and a tensor without a further user
    leaves at once ("eager eviction") but counts as evicted, since others may need it again. When it
    is recomputed after that, it stays until its score is the least: nothing says that nobody reads
    it any more. This matters where recomputing makes more than it was asked for, and where one
    recomputation needs long chains of others; see `Runtime`.

    Interpretations. What may not be recomputed is never evicted; it leaves when nothing can need it
    any more ("banishing"; simrd pins constants for good). A node that the runtime computes twice
    within a stage is computed once by the schedule and stays between its uses there; where that
    takes more RAM than the budget, the runtime is run again with less. A run of more than fifty
    passes of computing is given up. Tensors of 0 bytes are not evicted; ties go to the lowest
    number.

    With `liveness` a stage recomputes in graph order, keeps what a later step of it reads, and
    frees the rest; see `Execution`. A neighbourhood counts each node once, however many of its
    outputs are evicted, and what nobody reads is no part of it. This is a stronger method than the
    published one.

    Each eviction looks at the neighbourhood of every candidate: O(n) evictions of O(n) candidates
    with up to O(edges) each; neighbourhoods are small in practice.

    References
    ----------
    Kirisame, Lyubomirsky, Haan, Brennan, He, Roesch, Chen, Tatlock: Dynamic Tensor
    Rematerialization. ICLR 2021, section 4; simulator at github.com/uwsampl/dtr-prototype.
    """
    if heuristic == LIVENESS:
        heuristic, liveness = HEURISTICS[0], True
    if heuristic not in HEURISTICS:
        msg = f"heuristic {heuristic!r}: expected one of {', '.join((*HEURISTICS, LIVENESS))}"
        raise InputError(msg)
    if liveness:
        return _Dtr(problem, heuristic).run()
    return fitted(problem, lambda ram_bytes: Runtime(problem, heuristic, ram_bytes).run())


def dtr_paging(problem: Problem) -> Schedule:
    """Run `dtr` with liveness, and with eviction to storage wherever that is cheaper.

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
        self.scores = Scores(self.graph, self._node_costs(), heuristic, nodes_once=True)
        self.pinned: set[int] = set()
        """In RAM without a further user, because it cannot be made again."""

    def _node_costs(self) -> Sequence[float]:
        return self.problem.table.compute_time_s

    # -- what leaves RAM --------------------------------------------------------------------------

    def choose(self, candidates: Sequence[int]) -> int | None:
        again = self._can_be_made()
        return min((i for i in candidates if again(i)), key=self.scores.score, default=None)

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
            self.scores.use(i)
        self.scores.clock_s += self.problem.table.compute_time_s[k]
        for i in self.graph.outputs_of[k]:
            self.scores.use(i)
            self._is_back(i)
        self._unpin()

    def on_leave(self, i: int) -> None:
        self.pinned.discard(i)
        if self.graph.users_of[i] and self._can_be_made()(i):
            self.scores.evict(i)  # anything else is gone: nobody needs it again

    def _is_back(self, i: int) -> None:
        self.scores.recover(i)

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
        return any(self.is_awaited(u) for u in self.scores.evicted_after(i))


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
                score = (self.scores.per_byte_second(i, cost), i, transfer < recompute)
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
        self.scores.use(i)
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
            for u in self.scores.evicted_before(i)
            for p in self.graph.inputs_of[self.graph.node_of[u]]
            if p in self.away
        }
        return self.scores.neighbourhood_cost(i) + sum(self._page_in_cost(p) for p in read)

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
