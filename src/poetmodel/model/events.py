"""Events: the stages at which a tensor may be used, paged in or recomputed.

Stages may be merged into groups; with one stage per group, events are those of the whole problem.
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
    """Whether no memory row counts a tensor from one group to the beginning of another."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """The groups of stages at which each tensor and node has a decision.

    Indices are groups; with one stage per group, they are stages.
    """

    group_of: tuple[int, ...]
    """Group of each stage."""
    uses: tuple[tuple[int, ...], ...]
    """Groups after a tensor's first one in which a reader may run, ascending, by tensor."""
    events: tuple[tuple[int, ...], ...]
    """Groups at which keeping a tensor may begin or end, ascending, by tensor: ``T(i)``."""
    recompute: tuple[tuple[int, ...], ...]
    """Groups in which a node may be recomputed, ascending, by node: ``RS(k)``."""
    page_in: tuple[tuple[int, ...], ...]
    """Groups in which a tensor may be paged in, ascending, by tensor."""
    sure: tuple[frozenset[int], ...] = ()
    """Groups that a tensor surely enters in RAM at no cost, by tensor; empty if unknown."""
    dominated: frozenset[tuple[int, int]] = frozenset()
    """Segments ``(i, a)`` in which tensor `i` need not stay in RAM."""

    @cached_property
    def kept(self) -> frozenset[tuple[int, int]]:
        """Segments ``(i, a)`` in which tensor `i` stays in RAM at no cost."""
        return frozenset(
            (i, a)
            for i, sure_groups in enumerate(self.sure)
            for a, e in enumerate(self.events[i])
            if e in sure_groups
        )

    def segment(self, i: int, first: int, group: int) -> int | None:
        """Return the segment `a` in which keeping tensor `i` brings it into `group`.

        None if there is none.

        `first` is the group of its first computation.
        """
        events = self.events[i]
        if group <= first or not events or group > events[-1]:
            return None
        return bisect_left(events, group)


def storage_is_limiting(problem: Problem) -> bool:
    """Return whether the storage limit can forbid a choice of page-outs."""
    limit = problem.aux_limit_bytes
    graph = problem.graph
    if limit is None or not problem.can_page:
        return False
    return limit < graph.state_bytes + sum(
        size
        for size, users, page_in_reward, page_out_reward, is_stored in zip(
            graph.tensor_bytes,
            graph.users_of,
            problem.rewards.page_in,
            problem.rewards.page_out,
            graph.starts_on_storage,
            strict=True,
        )
        if (users or page_in_reward or page_out_reward) and not is_stored
    )


def paging_dominates(problem: Problem, k: int, *, limiting: bool | None = None) -> bool:
    """Return whether paging the outputs of node `k` is never worse than recomputing it.

    `limiting` is the result of `storage_is_limiting`, if known.

    Notes
    -----
    Replace the recomputations of `k` by one page-out of each read output and one page-in for each
    recomputation. This needs no inputs, and no more RAM at any step. Paging
    dominates if the replacement does not cost more in any quantity that is minimized or limited.
    Written bytes only grow, so paging never dominates if they are minimized or storage is limiting;
    if time is a makespan, paging would load the bus.

    Each row states ``sum <= limit``, lower limits with all signs reversed, so the sum must not
    grow. If `r >= 1` recomputations are removed, *at most* `r` page-ins and one page-out of each
    read output are added: an output that is in RAM or on storage already needs none. So a transfer
    with a negative coefficient may not be added at all, and its reward must not be counted:

        r * compute  >=  r * sum(max(0, page_in)) + sum(max(0, page_out))    for every r >= 1

    which ``r = 1`` implies. A row that rewards recomputing `k` (``compute < 0``) always forbids it.
    So does a row that limits transfers of its outputs in some stages.
    """
    graph = problem.graph
    if limiting is None:
        limiting = storage_is_limiting(problem)
    if not problem.can_page or problem.minimize == Quantity.WRITES or limiting:
        return False
    if _limits_makespan(problem):
        return False
    outputs = _read_outputs(graph, k)
    stored = graph.nodes[k].on_aux
    if not problem.counted_page_ins.isdisjoint(outputs):
        return False
    return all(
        quantity.compute[k]
        >= sum(
            max(0, quantity.page_in[i]) + (0 if stored else max(0, quantity.page_out[i]))
            for i in outputs
        )
        for quantity in _limited_quantities(problem)
    )


def _limits_makespan(problem: Problem) -> bool:
    """Return whether time is minimized or limited, and is a makespan with overlapping transfers."""
    is_time_counted = problem.minimize == Quantity.TIME or problem.deadline_s is not None
    return is_time_counted and problem.deadline_counts == DeadlineCounts.OVERLAP


def _read_outputs(graph: Graph, k: int) -> list[int]:
    """Return the outputs of node `k` that have readers."""
    return [i for i in graph.outputs_of[k] if graph.users_of[i]]


def _limited_quantities(problem: Problem) -> list[Coefficients]:
    """Return the coefficients of the objective and of each limit."""
    return [
        problem.objective.coefficients,
        *(limit.coefficients for limit in problem.linear_limits),
    ]


def recomputable_nodes(problem: Problem, *, dominance: bool = True) -> tuple[bool, ...]:
    """Return for each node whether the model must include its recomputation.

    Excludes useless recomputations and, with `dominance`, recomputations that paging dominates.
    """
    graph, rewards = problem.graph, problem.rewards.compute
    limiting = storage_is_limiting(problem)
    return tuple(
        problem.may_recompute(k)
        and (rewards[k] > 0 or any(graph.users_of[i] for i in graph.outputs_of[k]))
        and not (dominance and paging_dominates(problem, k, limiting=limiting))
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

    Groups of stages (`group_of`) are numbered from 0, in order. `recomputable` comes from
    `recomputable_nodes`: a recomputation is possible in every group between the first computation
    of a node and the last possible use of its outputs.

    Notes
    -----
    Keeping a tensor is decided from one event to the next. A keep that ends, or a page-in, between
    two uses can be moved to the earlier or the later use, with no more RAM at any step. A
    recomputation cannot be moved like that, since its inputs may be in RAM only then, and its
    workspace may fit only then.

    Recomputations and page-ins that a limit or the objective rewards (`Problem.rewards`) need not
    serve a use. They are possible in every group after that of the first computation, once in each;
    for longer groups, relaxations count further ones. A page-in is an event of its tensor up to the
    last use, since the tensor must be absent before it; after the last use, a copy is freed right
    after its step.

    Rows over stages (`counted`) distinguish groups: page-ins that they count are possible in every
    group of the rows, up to the last use, since none can be moved to another group.

    *Free keep*: a tensor that is surely in RAM in an event's group and free up to the next event is
    kept. Then it need not be paged in there, and its node need not be recomputed if that holds for
    all its outputs. Every recomputation that is removed also removes uses of its inputs.
    """
    counted_groups: dict[int, set[int]] = {}
    for family, index in {decision for row in counted for decision in row.space}:
        if family == "paged_in":
            counted_groups.setdefault(index[1], set()).add(group_of[index[0]])
    return _EventFinder(
        problem, group_of, recomputable, is_free=is_free, paged=counted_groups
    ).find()


def drop_dominated_keeps(
    problem: Problem, events: Events, *, may_move: Callable[[int], bool]
) -> Events:
    """Return events without keeps and page-ins that those of a reader's outputs dominate.

    `may_move` returns for a group whether no memory row depends on the stage of the group in which
    a node is recomputed.

    Notes
    -----
    Let node `u` be the only reader of tensor `i`, and let its outputs have no more bytes. After the
    first computation of `u`, `i` serves only the recomputation of `u`, and the outputs of `u` can
    be in RAM in place of `i`, with no more bytes:

    - kept from the first computation of `u` on. The recomputation is removed;
    - paged in where `i` is, if that costs no more in any limit and the objective, and if `i` needs
      no page-out for `u` itself;
    - kept from a recomputation of ``node(i)`` on: that of `u` moves there, if `u` reads no other
      tensor and the step fits in the group.
    """
    if _limits_makespan(problem):
        return events
    graph, group_of = problem.working_graph, events.group_of
    free_keeps, sure_groups, page_in = events.kept, events.sure, list(events.page_in)
    dominated: set[tuple[int, int]] = set()
    for i, u, outputs in _replaceable_tensors(problem):
        check_time_limit()
        k = graph.node_of[i]
        last = group_of[u]
        is_only_input = graph.inputs_of[u] == (i,)
        ends = (e for e in events.recompute[k] if e > last and not (is_only_input and may_move(e)))
        end = next(ends, len(group_of))
        begins = (group_of[k], *events.events[i])
        dominated.update(
            (i, a)
            for a, e in enumerate(begins[:-1])
            if last <= e < end and (i, a) not in free_keeps
        )
        is_sure_until_reader = all(e in sure_groups[i] for e in events.events[i] if e <= last)
        if is_sure_until_reader and _paging_costs_no_more(problem, i, outputs):
            page_in[i] = ()
    return replace(events, page_in=tuple(page_in), dominated=frozenset(dominated))


def _replaceable_tensors(problem: Problem) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (tensor, only reader, used outputs) if these outputs are no larger than the tensor."""
    graph, rewards = problem.working_graph, problem.rewards
    state = {*problem.graph.state_tensors, *problem.graph.state_of}
    for i, (size, readers) in enumerate(zip(graph.tensor_bytes, graph.users_of, strict=True)):
        if not size or len(readers) != 1 or i in state or rewards.page_in[i]:
            continue
        (u,) = readers
        outputs = _read_outputs(graph, u)
        output_bytes = sum(graph.tensor_bytes[j] for j in outputs)
        is_replaceable = output_bytes <= size and state.isdisjoint(outputs)
        if is_replaceable and not (rewards.compute[u] or any(rewards.page_in[j] for j in outputs)):
            yield i, u, outputs


def _paging_costs_no_more(problem: Problem, i: int, outputs: Sequence[int]) -> bool:
    """Return whether paging `outputs` costs no more than paging tensor `i`, in every quantity.

    If `outputs` have no more bytes than `i`, storage has space for them in place of `i`.
    """
    return i not in problem.working_graph.on_aux and all(
        sum(max(0, costs[j]) for j in outputs) <= costs[i]
        for quantity in _limited_quantities(problem)
        for costs in (quantity.page_in, quantity.page_out)
    )


class _EventFinder:
    """Finds events from the last node to the first.

    Recomputations of readers are uses of their inputs.
    """

    def __init__(
        self,
        problem: Problem,
        group_of: Sequence[int],
        recomputable: Sequence[bool],
        *,
        is_free: IsFree | None = None,
        paged: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        """Prepare the search, which `find` executes. Parameters are those of `find_events`."""
        self.problem = problem
        self.graph = problem.working_graph
        self.rewards = problem.rewards
        self.group_of = group_of
        self.recomputable = recomputable
        self.is_free = is_free
        self.paged = paged or {}
        """Groups with possible page-ins, for tensors whose page-ins rows over stages count."""
        n_tensors = len(self.graph.tensors)
        self.uses: list[tuple[int, ...]] = [()] * n_tensors
        self.events: list[tuple[int, ...]] = [()] * n_tensors
        self.page_in: list[tuple[int, ...]] = [()] * n_tensors
        self.sure: list[frozenset[int]] = [frozenset()] * n_tensors
        self.recompute: list[tuple[int, ...]] = [()] * len(self.graph.nodes)

    def find(self) -> Events:
        """Find the events of all nodes and tensors."""
        for k in range(len(self.graph.nodes) - 1, -1, -1):
            check_time_limit()
            self._find_node_events(k)
        return Events(
            group_of=tuple(self.group_of),
            uses=tuple(self.uses),
            events=tuple(self.events),
            recompute=tuple(self.recompute),
            page_in=tuple(self.page_in),
            sure=tuple(self.sure),
        )

    def _find_node_events(self, k: int) -> None:
        """Find the uses, recomputations, events and page-ins of a node and its outputs."""
        graph, group_of = self.graph, self.group_of
        first = group_of[k]
        use_groups: set[int] = set()
        for i in graph.outputs_of[k]:
            readers = graph.users_of[i]
            used_in = {group_of[j] for j in readers}.union(*(self.recompute[j] for j in readers))
            self.uses[i] = tuple(sorted(e for e in used_in if e > first))
            use_groups.update(self.uses[i])
        if self.recomputable[k]:
            self.recompute[k] = self._recompute_groups(k, use_groups)
        for i in graph.outputs_of[k]:
            self.events[i] = self._event_groups(i, self.recompute[k])
            self.sure[i] = self._sure_groups(i, self.events[i])
            if self.problem.can_page:
                groups: Sequence[int] = self.uses[i]
                if self._rewards_page_in(i):
                    groups = self._groups_after(k, self.problem.graph.last_page_in_stage(i))
                elif i in self.paged:
                    groups = [e for e in self.events[i] if e in self.paged[i]]
                self.page_in[i] = tuple(e for e in groups if e not in self.sure[i])

    def _rewards_page_in(self, i: int) -> bool:
        """Return whether a page-in of tensor `i` is possible and rewarded."""
        return self.problem.can_page and self.rewards.page_in[i] > 0

    def _groups_after(self, k: int, last: int) -> range:
        """Return the groups after that of node `k` up to that of stage `last`."""
        return range(self.group_of[k] + 1, self.group_of[last] + 1)

    def _recompute_groups(self, k: int, use_groups: set[int]) -> tuple[int, ...]:
        """Return the groups in which node `k` may be recomputed.

        `use_groups` are the groups with a use of its outputs.
        """
        first = self.group_of[k]
        if self.rewards.compute[k]:
            return tuple(self._groups_after(k, self.problem.graph.last_stages[k]))
        if not use_groups:
            return ()
        last = min(max(use_groups), self.group_of[self.problem.graph.last_stages[k]])
        return self._useful_groups(k, range(first + 1, last + 1))

    def _useful_groups(self, k: int, candidates: Sequence[int]) -> tuple[int, ...]:
        """Return the `candidates` in which an output with a later use is not surely in RAM."""
        if self.is_free is None:
            return tuple(candidates)
        useful_groups: set[int] = set()
        for i in self.graph.outputs_of[k]:
            if self.uses[i]:
                sure_groups = self._sure_groups(i, self._event_groups(i, candidates))
                useful_groups.update(
                    e for e in candidates if e <= self.uses[i][-1] and e not in sure_groups
                )
        return tuple(sorted(useful_groups))

    def _event_groups(self, i: int, recompute: Sequence[int]) -> tuple[int, ...]:
        """Return the groups in which tensor `i` may be read, recomputed or paged in.

        Page-ins are those for a reward, or for a row that counts them by stage. The groups end
        with the last use of the tensor.
        """
        last = self.uses[i][-1] if self.uses[i] else -1
        page_in_groups: Iterable[int] = self.paged.get(i, ())
        if self._rewards_page_in(i):
            page_in_groups = self._groups_after(
                self.graph.node_of[i], self.problem.graph.last_page_in_stage(i)
            )
        first = self.group_of[self.graph.node_of[i]]
        return tuple(
            sorted(
                {*self.uses[i], *(e for e in (*recompute, *page_in_groups) if first < e <= last)}
            )
        )

    def _sure_groups(self, i: int, events: tuple[int, ...]) -> frozenset[int]:
        """Return the events that tensor `i` may enter in RAM at no cost, in any solution.

        A free interval begins in a group whose last stage makes or reads `i`, which is then in RAM.
        A tensor with rewarded page-ins is not surely kept: it must be absent before one.
        """
        if self.is_free is None or self._rewards_page_in(i):
            return frozenset()
        intervals = pairwise((self.group_of[self.graph.node_of[i]], *events))
        return frozenset(end for begin, end in intervals if self.is_free(i, begin, end))
