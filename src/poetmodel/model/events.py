"""Where decisions can matter: the stages at which a tensor may be used, paged in or recomputed.

Stages may be merged into groups; a group of one stage each is the whole problem.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.clock import check_time_limit
from poetmodel.problem import Coefficients, DeadlineCounts, LinearRow, Problem, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph

    IsFree = Callable[[int, int, int], bool]
    """Whether no memory row counts a tensor from one group up to the begin of another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """The groups of stages at which each tensor and node has a decision.

    Indices are groups; with one stage a group they are stages.
    """

    group_of: tuple[int, ...]
    """For each stage its group."""
    uses: tuple[tuple[int, ...], ...]
    """For each tensor the groups after its first in which a reader of it may run, ascending."""
    events: tuple[tuple[int, ...], ...]
    """For each tensor the groups at which keeping it may begin or end: ``T(i)``, ascending."""
    recompute: tuple[tuple[int, ...], ...]
    """For each node the groups in which it may be recomputed: ``RS(k)``, ascending."""
    page_in: tuple[tuple[int, ...], ...]
    """For each tensor the groups in which it may be paged in, ascending."""
    sure: tuple[frozenset[int], ...] = ()
    """For each tensor the groups that it surely enters in RAM, at no cost; empty if unknown."""
    dominated: frozenset[tuple[int, int]] = frozenset()
    """Segments ``(i, a)`` in which tensor `i` need not stay in RAM."""

    @cached_property
    def kept(self) -> frozenset[tuple[int, int]]:
        """Segments ``(i, a)`` in which tensor `i` stays in RAM at no cost."""
        return frozenset(
            (i, a)
            for i, sure in enumerate(self.sure)
            for a, e in enumerate(self.events[i])
            if e in sure
        )

    def segment(self, i: int, first: int, group: int) -> int | None:
        """Return `a` such that keeping tensor `i` into `group` is segment `a`, or None.

        `first` is the group of its first computation.
        """
        events = self.events[i]
        if group <= first or not events or group > events[-1]:
            return None
        return bisect_left(events, group)


def storage_is_limiting(problem: Problem) -> bool:
    """Return whether the storage limit can rule a choice of page-outs out."""
    limit = problem.aux_limit_bytes
    graph = problem.graph
    if limit is None or not problem.can_page:
        return False
    return limit < graph.state_bytes + sum(
        size
        for size, users, into, out, stored in zip(
            graph.tensor_bytes,
            graph.users_of,
            problem.rewards.page_in,
            problem.rewards.page_out,
            graph.starts_on_storage,
            strict=True,
        )
        if (users or into or out) and not stored
    )


def dominated(problem: Problem, k: int, *, limiting: bool | None = None) -> bool:
    """Return whether paging the outputs of node `k` is never worse than recomputing it.

    `limiting` is what `storage_is_limiting` says, where it is known already.

    Notes
    -----
    Replace the recomputations of `k` by one page-out of each read output and one page-in for each
    recomputation: needs no input, and no more RAM at any step. It must be no dearer in every
    quantity that is minimized or limited. Written bytes only grow, so it never holds where they are
    minimized or storage is limiting; where time is a makespan it would load the bus.

    Each row counts ``sum <= limit``, a lower limit with all signs turned, so it must be no larger
    in any such sum. There `r >= 1` recomputations go, and what comes is *at most* `r` page-ins and
    one page-out of each read output: an output that is in RAM, or on storage, already needs none.
    So what has a negative coefficient may not come at all, and takes nothing off for sure:

        r * compute  >=  r * sum(max(0, page_in)) + sum(max(0, page_out))    for every r >= 1

    which ``r = 1`` implies. A row that wants `k` recomputed (``compute < 0``) always forbids it. So
    does one that limits transfers of its outputs in some stages.
    """
    graph = problem.graph
    if limiting is None:
        limiting = storage_is_limiting(problem)
    if not problem.can_page or problem.minimize == Quantity.WRITES or limiting:
        return False
    if _has_makespan(problem):
        return False
    outputs = _read_outputs(graph, k)
    stored = graph.nodes[k].on_aux
    if not problem.counted_page_ins.isdisjoint(outputs):
        return False
    return all(
        of.compute[k]
        >= sum(max(0, of.page_in[i]) + (0 if stored else max(0, of.page_out[i])) for i in outputs)
        for of in _counted(problem)
    )


def _has_makespan(problem: Problem) -> bool:
    """Return whether time counts, and is that of transfers beside the computing."""
    timed = problem.minimize == Quantity.TIME or problem.deadline_s is not None
    return timed and problem.deadline_counts == DeadlineCounts.OVERLAP


def _read_outputs(graph: Graph, k: int) -> list[int]:
    """Return the outputs of node `k` that anybody reads."""
    return [i for i in graph.outputs_of[k] if graph.users_of[i]]


def _counted(problem: Problem) -> list[Coefficients]:
    """Return the quantities of the objective and of each limit."""
    return [
        problem.objective.coefficients,
        *(limit.coefficients for limit in problem.linear_limits),
    ]


def recomputable_nodes(problem: Problem, *, dominance: bool = True) -> tuple[bool, ...]:
    """Return for each node whether the model must offer its recomputation."""
    graph, wanted = problem.graph, problem.rewards.compute
    limiting = storage_is_limiting(problem)
    return tuple(
        problem.may_recompute(k)
        and (wanted[k] > 0 or any(graph.users_of[i] for i in graph.outputs_of[k]))
        and not (dominance and dominated(problem, k, limiting=limiting))
        for k in range(len(graph.nodes))
    )


def find_events(
    problem: Problem,
    group_of: Sequence[int],
    *,
    recomputable: Sequence[bool],
    is_free: IsFree | None = None,
    counted: Iterable[LinearRow] = (),
) -> Events:
    """Return the groups at which decisions can matter.

    The groups of stages (`group_of`) are numbered from 0, in order. `recomputable` is from
    `recomputable_nodes`: a recomputation is offered in every group between the first computation of
    a node and the last possible use of what it makes.

    Notes
    -----
    Keeping a tensor is decided from one event to the next. A keep that ends, or a page-in that
    happens, between two uses can as well end at the earlier or happen at the later one, with no
    more RAM at any step; a recomputation cannot be moved like that, for its inputs may be in RAM
    only then, and its transients may only fit then.

    What a limit or the objective wants (`Problem.wanted`) may serve nothing else. Such
    recomputations and page-ins are offered in every group after that of the first computation, once
    in each; of longer groups the relaxations count the others. A page-in is an event of its tensor
    up to the last use, since the tensor must be gone before it; beyond that a copy goes right after
    its step.

    Rows over stages that are `counted` tell groups apart: page-ins that these count are offered in
    every group in which the rows have them, up to the last use, as none can wait for another group.

    *Free keep*: a tensor that is surely in RAM in an event's group and free up to the next event is
    kept. Then it need not be paged in there, and its node not be recomputed if that holds for all
    its outputs. Every recomputation that goes away takes its inputs' uses with it.
    """
    paged: dict[int, set[int]] = {}
    for family, index in {decision for row in counted for decision in row.space}:
        if family == "paged_in":
            paged.setdefault(index[1], set()).add(group_of[index[0]])
    return _Sweep(problem, group_of, recomputable, is_free=is_free, paged=paged).run()


def without_dominated_keeps(
    problem: Problem, events: Events, *, moves: Callable[[int], bool]
) -> Events:
    """Return the events without keeps and page-ins that those of what a reader makes dominate.

    `moves` says of a group whether no memory row tells when in it a node is recomputed.

    Notes
    -----
    Let node `u` alone read tensor `i`, and make no more bytes. Once `u` was computed, `i` serves
    its recomputation only, and what `u` makes can be in RAM in place of `i`, with no more bytes:

    - kept from the first computation of `u` on. The recomputation goes;
    - paged in where `i` is, if that costs no more in any limit and the objective, and if `i` needs
      no page-out for `u` itself;
    - kept from a recomputation of ``node(i)`` on: that of `u` moves there, if `u` reads nothing
      else and the step has room in the group.
    """
    if _has_makespan(problem):
        return events
    graph, group_of = problem.working_graph, events.group_of
    kept, sure, page_in = events.kept, events.sure, list(events.page_in)
    dominated: set[tuple[int, int]] = set()
    for i, u, outputs in _handed_on(problem):
        check_time_limit()
        k = graph.node_of[i]
        last = group_of[u]
        moved = graph.inputs_of[u] == (i,)
        stays = (e for e in events.recompute[k] if e > last and not (moved and moves(e)))
        end = next(stays, len(group_of))
        begins = (group_of[k], *events.events[i])
        dominated.update(
            (i, a) for a, e in enumerate(begins[:-1]) if last <= e < end and (i, a) not in kept
        )
        stayed = all(e in sure[i] for e in events.events[i] if e <= last)
        if stayed and _pages_no_dearer(problem, i, outputs):
            page_in[i] = ()
    return replace(events, page_in=tuple(page_in), dominated=frozenset(dominated))


def _handed_on(problem: Problem) -> Iterator[tuple[int, int, list[int]]]:
    """Yield each tensor that one node alone reads, to make no more bytes of it.

    With that node, and those of its outputs that anybody reads.
    """
    graph, wanted = problem.working_graph, problem.rewards
    state = {*problem.graph.state_tensors, *problem.graph.state_of}
    for i, (size, readers) in enumerate(zip(graph.tensor_bytes, graph.users_of, strict=True)):
        if not size or len(readers) != 1 or i in state or wanted.page_in[i]:
            continue
        (u,) = readers
        outputs = _read_outputs(graph, u)
        taken = sum(graph.tensor_bytes[j] for j in outputs)
        alike = taken <= size and state.isdisjoint(outputs)
        if alike and not (wanted.compute[u] or any(wanted.page_in[j] for j in outputs)):
            yield i, u, outputs


def _pages_no_dearer(problem: Problem, i: int, outputs: Sequence[int]) -> bool:
    """Return whether to page other tensors costs no more than tensor `i`, in all that counts.

    Storage has room for them if they take no more bytes, as `i` goes from there.
    """
    return i not in problem.working_graph.on_aux and all(
        sum(max(0, paged[j]) for j in outputs) <= paged[i]
        for of in _counted(problem)
        for paged in (of.page_in, of.page_out)
    )


class _Sweep:
    """Walks from the last node to the first: recomputations of a reader are uses of its inputs."""

    def __init__(
        self,
        problem: Problem,
        group_of: Sequence[int],
        recomputable: Sequence[bool],
        *,
        is_free: IsFree | None = None,
        paged: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        self.problem = problem
        self.graph = problem.working_graph
        self.wanted = problem.rewards
        self.group_of = group_of
        self.recomputable = recomputable
        self.is_free = is_free
        self.paged = paged or {}
        """For tensors whose page-ins rows count in stages the groups in which they are offered."""
        n_tensors = len(self.graph.tensors)
        self.uses: list[tuple[int, ...]] = [()] * n_tensors
        self.events: list[tuple[int, ...]] = [()] * n_tensors
        self.page_in: list[tuple[int, ...]] = [()] * n_tensors
        self.sure: list[frozenset[int]] = [frozenset()] * n_tensors
        self.recompute: list[tuple[int, ...]] = [()] * len(self.graph.nodes)

    def run(self) -> Events:
        for k in range(len(self.graph.nodes) - 1, -1, -1):
            check_time_limit()
            self._visit(k)
        return Events(
            group_of=tuple(self.group_of),
            uses=tuple(self.uses),
            events=tuple(self.events),
            recompute=tuple(self.recompute),
            page_in=tuple(self.page_in),
            sure=tuple(self.sure),
        )

    def _visit(self, k: int) -> None:
        graph, group_of = self.graph, self.group_of
        first = group_of[k]
        used: set[int] = set()
        for i in graph.outputs_of[k]:
            readers = graph.users_of[i]
            used_in = {group_of[j] for j in readers}.union(*(self.recompute[j] for j in readers))
            self.uses[i] = tuple(sorted(e for e in used_in if e > first))
            used.update(self.uses[i])
        if self.recomputable[k]:
            self.recompute[k] = self._recompute(k, used)
        for i in graph.outputs_of[k]:
            self.events[i] = self._events(i, self.recompute[k])
            self.sure[i] = self._sure(i, self.events[i])
            if self.problem.can_page:
                offered: Sequence[int] = self.uses[i]
                if self._is_wanted_in(i):
                    offered = self._after(k, self.problem.graph.last_page_in(i))
                elif i in self.paged:
                    offered = [e for e in self.events[i] if e in self.paged[i]]
                self.page_in[i] = tuple(e for e in offered if e not in self.sure[i])

    def _is_wanted_in(self, i: int) -> bool:
        """Return whether a page-in of tensor `i` may be wanted for its own sake."""
        return self.problem.can_page and self.wanted.page_in[i] > 0

    def _after(self, k: int, last: int) -> range:
        """Return the groups after that of node `k` up to that of stage `last`."""
        return range(self.group_of[k] + 1, self.group_of[last] + 1)

    def _recompute(self, k: int, used: set[int]) -> tuple[int, ...]:
        """Return the groups in which node `k` may be recomputed, given the uses of its outputs."""
        first = self.group_of[k]
        if self.wanted.compute[k]:
            return tuple(self._after(k, self.problem.graph.last_stages[k]))
        if not used:
            return ()
        last = min(max(used), self.group_of[self.problem.graph.last_stages[k]])
        return self._useful(k, range(first + 1, last + 1))

    def _useful(self, k: int, offered: Sequence[int]) -> tuple[int, ...]:
        """Return the groups in which some output that is still used is not surely in RAM."""
        if self.is_free is None:
            return tuple(offered)
        useful: set[int] = set()
        for i in self.graph.outputs_of[k]:
            if self.uses[i]:
                sure = self._sure(i, self._events(i, offered))
                useful.update(e for e in offered if e <= self.uses[i][-1] and e not in sure)
        return tuple(sorted(useful))

    def _events(self, i: int, recompute: Sequence[int]) -> tuple[int, ...]:
        """Return the stages in which tensor `i` may be read, made or wanted, up to the last use.

        Beyond that nothing is kept for nobody.
        """
        last = self.uses[i][-1] if self.uses[i] else -1
        paged: Iterable[int] = self.paged.get(i, ())
        if self._is_wanted_in(i):
            paged = self._after(self.graph.node_of[i], self.problem.graph.last_page_in(i))
        first = self.group_of[self.graph.node_of[i]]
        return tuple(
            sorted({*self.uses[i], *(e for e in (*recompute, *paged) if first < e <= last)})
        )

    def _sure(self, i: int, events: tuple[int, ...]) -> frozenset[int]:
        """Return the events that tensor `i` may enter in RAM at no cost, in any solution.

        A free stretch begins in a group whose last stage makes or reads `i`, which is there then.
        A tensor whose page-ins are wanted is not kept for sure: it must be gone before one.
        """
        if self.is_free is None or self._is_wanted_in(i):
            return frozenset()
        stretches = pairwise((self.group_of[self.graph.node_of[i]], *events))
        return frozenset(end for begin, end in stretches if self.is_free(i, begin, end))
