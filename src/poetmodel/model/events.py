"""Events: the stages at which a tensor may be used, paged in or recomputed.

A relaxation merges stages into groups; the exact model has one stage per group.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from poetmodel.clock import check_time_limit
from poetmodel.problem import Coefficients, LinearRow, Problem, Quantity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph

    IsFree = Callable[[int, int, int], bool]
    """(tensor, first group, last group) -> whether keeping the tensor from the first group to the
    beginning of the last adds to no enforced memory row."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Events:
    """The groups of stages at which each tensor and node has a decision.

    Indices are groups; with one stage per group, they are stages. Keep ``(i, a)`` of tensor `i`
    ends at ``event_groups[i][a]``, and begins at the event before it or, for ``a = 0``, in the
    group of the first computation.
    """

    group_of: tuple[int, ...]
    """Group of each stage."""
    use_groups: tuple[tuple[int, ...], ...]
    """Groups in which a reader of a tensor may be computed, after the group of the tensor's first
    computation; ascending, by tensor."""
    event_groups: tuple[tuple[int, ...], ...]
    """Groups at which keeping a tensor may end or, besides the group of its first computation,
    begin; ascending, by tensor: ``T(i)``."""
    recompute_groups: tuple[tuple[int, ...], ...]
    """Groups in which a node may be recomputed, ascending, by node: ``RS(k)``."""
    page_in_groups: tuple[tuple[int, ...], ...]
    """Groups in which a tensor may be paged in, ascending, by tensor."""
    present_groups: tuple[frozenset[int], ...] = ()
    """Events at whose beginning a tensor can be in RAM in every solution at no cost, by tensor; an
    empty tuple if unknown."""
    dominated_keeps: frozenset[tuple[int, int]] = frozenset()
    """Keeps ``(i, a)`` that at least one best schedule lacks: see `mark_dominated_keeps`."""

    @cached_property
    def free_keeps(self) -> frozenset[tuple[int, int]]:
        """Free keeps ``(i, a)`` with ``event_groups[i][a]`` in ``present_groups[i]``."""
        return frozenset(
            (i, a)
            for i, groups in enumerate(self.present_groups)
            for a, e in enumerate(self.event_groups[i])
            if e in groups
        )

    def keep_index(self, i: int, first_group: int, group: int) -> int | None:
        """Return the index `a` of the keep of tensor `i` in which `group` begins.

        None up to `first_group`, that of the tensor's first computation, and after its last event.
        """
        events = self.event_groups[i]
        if group <= first_group or not events or group > events[-1]:
            return None
        return bisect_left(events, group)


def is_storage_limiting(problem: Problem) -> bool:
    """Return whether state and all useful page-outs together exceed the storage limit."""
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


def paging_dominates(problem: Problem, k: int, *, is_limiting: bool | None = None) -> bool:
    """Return whether paging the outputs of node `k` is provably never worse than recomputing it.

    `is_limiting` is the result of `is_storage_limiting`, computed if None. False without paging.

    Notes
    -----
    Replace the recomputations of `k` by one page-out of each read output and one page-in for each
    recomputation. This needs no inputs, and no more RAM at any step. Paging dominates if the
    replacement does not cost more in any quantity that is minimized or limited. The replacement
    adds written bytes, so paging never dominates if these are minimized or storage is limiting.
    Paging does not dominate either if a makespan is minimized or limited, because page-ins delay
    other transfers.

    Each row states ``sum <= limit``, lower limits with all signs reversed, so the sum must not
    grow. If `r >= 1` recomputations are removed, *at most* `r` page-ins and one page-out of each
    read output are added: an output in RAM needs no page-in, and an output on storage needs no
    page-out. So a transfer with a negative coefficient is perhaps not added, and must count 0:

        r * compute  >=  r * sum(max(0, page_in)) + sum(max(0, page_out))    for every r >= 1

    which ``r = 1`` implies. Paging does not dominate if a row rewards recomputing `k` (``compute <
    0``), or if a per-stage row limits page-ins of outputs of `k`.
    """
    graph = problem.graph
    if is_limiting is None:
        is_limiting = is_storage_limiting(problem)
    if not problem.can_page or problem.minimize == Quantity.WRITES or is_limiting:
        return False
    if _limits_makespan(problem):
        return False
    outputs = _used_outputs(graph, k)
    is_stored = graph.nodes[k].on_aux
    if not problem.counted_page_ins.isdisjoint(outputs):
        return False
    return all(
        coefficients.compute[k]
        >= sum(
            max(0, coefficients.page_in[i]) + (0 if is_stored else max(0, coefficients.page_out[i]))
            for i in outputs
        )
        for coefficients in _limited_coefficients(problem)
    )


def _limits_makespan(problem: Problem) -> bool:
    """Return whether time is minimized or limited, and is a makespan with overlapping transfers."""
    is_time_counted = problem.minimize == Quantity.TIME or problem.deadline_s is not None
    return is_time_counted and problem.counts_makespan


def _used_outputs(graph: Graph, k: int) -> list[int]:
    """Return the outputs of node `k` that have readers."""
    return [i for i in graph.outputs_of[k] if graph.users_of[i]]


def _limited_coefficients(problem: Problem) -> list[Coefficients]:
    """Return the coefficients of the objective and of each limit on totals."""
    return [
        problem.objective.coefficients,
        *(limit.coefficients for limit in problem.linear_limits),
    ]


def recomputable_nodes(problem: Problem, *, dominance: bool = True) -> tuple[bool, ...]:
    """Return for each node whether the model has decisions to recompute it.

    Excludes forbidden and useless recomputations and, with `dominance`, those that paging
    dominates.
    """
    graph, rewards = problem.graph, problem.rewards.compute
    is_limiting = is_storage_limiting(problem)
    return tuple(
        problem.may_recompute(k)
        and (rewards[k] > 0 or any(graph.users_of[i] for i in graph.outputs_of[k]))
        and not (dominance and paging_dominates(problem, k, is_limiting=is_limiting))
        for k in range(len(graph.nodes))
    )


def find_events(
    problem: Problem,
    group_of: Sequence[int],
    *,
    recomputable: Sequence[bool],
    is_free: IsFree | None = None,
    counted_rows: Iterable[LinearRow] = (),
) -> Events:
    """Return the groups at which each tensor and node needs a decision.

    `group_of` has the group of each stage; groups are numbered from 0, in order. `recomputable` is
    the result of `recomputable_nodes`: such a node may be recomputed in every group after that of
    its first computation, up to the last possible use of its outputs, unless free keeps make that
    useless. `is_free` identifies free keeps; by default, there are none. `counted_rows` are the
    enforced per-stage rows. Raises `TimeLimitError`.

    Notes
    -----
    Keeping a tensor is decided from one event to the next. The end of a keep between two uses can
    move to the earlier use, and a page-in to the later one, with no more RAM at any step. A
    recomputation cannot move, because its inputs and its workspace may fit in RAM only in its
    group.

    Recomputations and page-ins that a limit or the objective rewards (`Problem.rewards`) need not
    serve a use. They are possible once in every group after that of the first computation, up to
    `Graph.last_stages` or `Graph.last_page_in_stage`. In groups of several stages, relaxations
    count further ones. Up to the last use, such a page-in is an event of its tensor, because the
    tensor must be absent before the page-in. A copy made after the last use is freed right after
    its step.

    Page-ins that `counted_rows` count are possible in every group that the rows name, up to the
    last use, because they cannot move to another group.

    *Free keep*: if a tensor is in RAM in every solution at one event, and keeping it up to the next
    event adds to no enforced memory row, the tensor is kept. Then the next event needs no page-in
    of the tensor, and no recomputation of its node if all outputs that are used from then on are
    kept. Each omitted recomputation also removes uses of its inputs.
    """
    counted_groups: dict[int, set[int]] = {}
    for family, index in {decision for row in counted_rows for decision in row.space}:
        if family == "paged_in":
            counted_groups.setdefault(index[1], set()).add(group_of[index[0]])
    return _EventFinder(
        problem, group_of, recomputable, is_free=is_free, counted_page_in_groups=counted_groups
    ).find()


def mark_dominated_keeps(
    problem: Problem, events: Events, *, allows_moves: Callable[[int], bool]
) -> Events:
    """Find the keeps and page-ins of tensors that the outputs of their only reader can replace.

    Return the events without these page-ins, and with these keeps, except `Events.free_keeps`, in
    `Events.dominated_keeps`. If a makespan is limited or minimized, return `events` itself.
    `allows_moves` returns for a group whether no memory row depends on the stage of the group in
    which a node is recomputed. Raises `TimeLimitError`.

    Notes
    -----
    Let node `u` be the only reader of tensor `i`, and let the outputs of `u` have no more bytes
    than `i`. After the first computation of `u`, `i` is needed only to recompute `u`, and the
    outputs of `u` can be in RAM in place of `i`:

    - Instead of keeping `i` from the first computation of `u` on, keep the outputs. They need no
      recomputation of `u`.
    - Instead of paging in `i`, page in the outputs, if that costs no more in any limit and the
      objective, and if the first computation of `u` needs no page-in of `i`.
    - Instead of keeping `i` from a recomputation of ``node(i)`` on, recompute `u` in the same group
      and keep the outputs, if `u` reads no other tensor and `allows_moves` of that group is True.
    """
    if _limits_makespan(problem):
        return events
    graph, group_of = problem.working_graph, events.group_of
    free_keeps, present_groups, page_in_groups = (
        events.free_keeps,
        events.present_groups,
        list(events.page_in_groups),
    )
    dominated_keeps: set[tuple[int, int]] = set()
    for i, u, outputs in _replaceable_tensors(problem):
        check_time_limit()
        k = graph.node_of[i]
        reader_group = group_of[u]
        is_only_input = graph.inputs_of[u] == (i,)
        end_candidates = (
            e
            for e in events.recompute_groups[k]
            if e > reader_group and not (is_only_input and allows_moves(e))
        )
        end_group = next(end_candidates, len(group_of))
        begin_groups = (group_of[k], *events.event_groups[i])
        dominated_keeps.update(
            (i, a)
            for a, e in enumerate(begin_groups[:-1])
            if reader_group <= e < end_group and (i, a) not in free_keeps
        )
        is_present_until_reader = all(
            e in present_groups[i] for e in events.event_groups[i] if e <= reader_group
        )
        if is_present_until_reader and _paging_costs_no_more(problem, i, outputs):
            page_in_groups[i] = ()
    return replace(
        events, page_in_groups=tuple(page_in_groups), dominated_keeps=frozenset(dominated_keeps)
    )


def _replaceable_tensors(problem: Problem) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (tensor, only reader, its read outputs) if these are no larger than the tensor."""
    graph, rewards = problem.working_graph, problem.rewards
    state = {*problem.graph.state_tensors, *problem.graph.state_of}
    for i, (size, readers) in enumerate(zip(graph.tensor_bytes, graph.users_of, strict=True)):
        if not size or len(readers) != 1 or i in state or rewards.page_in[i]:
            continue
        (u,) = readers
        outputs = _used_outputs(graph, u)
        output_bytes = sum(graph.tensor_bytes[j] for j in outputs)
        is_replaceable = output_bytes <= size and state.isdisjoint(outputs)
        if is_replaceable and not (rewards.compute[u] or any(rewards.page_in[j] for j in outputs)):
            yield i, u, outputs


def _paging_costs_no_more(problem: Problem, i: int, outputs: Sequence[int]) -> bool:
    """Return whether paging `outputs` costs no more than paging tensor `i`, in any sum."""
    return i not in problem.working_graph.on_aux and all(
        sum(max(0, costs[j]) for j in outputs) <= costs[i]
        for coefficients in _limited_coefficients(problem)
        for costs in (coefficients.page_in, coefficients.page_out)
    )


class _EventFinder:
    """Finds events from the last node to the first: readers' recomputations are uses of outputs.

    If `is_free` is None, no free keep is found.
    """

    def __init__(
        self,
        problem: Problem,
        group_of: Sequence[int],
        recomputable: Sequence[bool],
        *,
        is_free: IsFree | None,
        counted_page_in_groups: Mapping[int, Collection[int]],
    ) -> None:
        self.problem = problem
        self.graph = problem.working_graph
        self.rewards = problem.rewards
        self.group_of = group_of
        self.recomputable = recomputable
        self.is_free = is_free
        self.counted_page_in_groups = counted_page_in_groups
        """Groups of the page-ins that per-stage rows count, by tensor."""
        n_tensors = len(self.graph.tensors)
        self.use_groups: list[tuple[int, ...]] = [()] * n_tensors
        self.event_groups: list[tuple[int, ...]] = [()] * n_tensors
        self.page_in_groups: list[tuple[int, ...]] = [()] * n_tensors
        self.present_groups: list[frozenset[int]] = [frozenset()] * n_tensors
        self.recompute_groups: list[tuple[int, ...]] = [()] * len(self.graph.nodes)

    def find(self) -> Events:
        """Return the events of all nodes and tensors, as groups of `group_of`."""
        for k in range(len(self.graph.nodes) - 1, -1, -1):
            check_time_limit()
            self._find_node_events(k)
        return Events(
            group_of=tuple(self.group_of),
            use_groups=tuple(self.use_groups),
            event_groups=tuple(self.event_groups),
            recompute_groups=tuple(self.recompute_groups),
            page_in_groups=tuple(self.page_in_groups),
            present_groups=tuple(self.present_groups),
        )

    def _find_node_events(self, k: int) -> None:
        """Set the groups of node `k` and of its outputs; those of all readers must be set."""
        graph, group_of = self.graph, self.group_of
        first_group = group_of[k]
        use_groups: set[int] = set()
        for i in graph.outputs_of[k]:
            readers = graph.users_of[i]
            groups_of_uses = {group_of[j] for j in readers}.union(
                *(self.recompute_groups[j] for j in readers)
            )
            self.use_groups[i] = tuple(sorted(e for e in groups_of_uses if e > first_group))
            use_groups.update(self.use_groups[i])
        if self.recomputable[k]:
            self.recompute_groups[k] = self._find_recompute_groups(k, use_groups)
        for i in graph.outputs_of[k]:
            self.event_groups[i] = self._find_event_groups(i, self.recompute_groups[k])
            self.present_groups[i] = self._find_present_groups(i, self.event_groups[i])
            if self.problem.can_page:
                page_in_groups: Sequence[int] = self.use_groups[i]
                if self._rewards_page_in(i):
                    page_in_groups = self._groups_after(k, self.problem.graph.last_page_in_stage(i))
                elif i in self.counted_page_in_groups:
                    page_in_groups = [
                        e for e in self.event_groups[i] if e in self.counted_page_in_groups[i]
                    ]
                self.page_in_groups[i] = tuple(
                    e for e in page_in_groups if e not in self.present_groups[i]
                )

    def _rewards_page_in(self, i: int) -> bool:
        """Return whether a page-in of tensor `i` is possible and rewarded."""
        return self.problem.can_page and self.rewards.page_in[i] > 0

    def _groups_after(self, k: int, last_stage: int) -> range:
        """Return the groups after that of node `k`, up to and including that of `last_stage`."""
        return range(self.group_of[k] + 1, self.group_of[last_stage] + 1)

    def _find_recompute_groups(self, k: int, use_groups: set[int]) -> tuple[int, ...]:
        """Return the groups in which the recomputable node `k` may be recomputed, ascending."""
        first_group = self.group_of[k]
        if self.rewards.compute[k]:
            return tuple(self._groups_after(k, self.problem.graph.last_stages[k]))
        if not use_groups:
            return ()
        last_group = min(max(use_groups), self.group_of[self.problem.graph.last_stages[k]])
        return self._select_useful_groups(k, range(first_group + 1, last_group + 1))

    def _select_useful_groups(self, k: int, candidates: Sequence[int]) -> tuple[int, ...]:
        """Return the `candidates` in which recomputing `k` can be useful.

        An output is used (there or later), and no free keep has it in RAM at the beginning. All
        `candidates` without `is_free`.
        """
        if self.is_free is None:
            return tuple(candidates)
        useful_groups: set[int] = set()
        for i in self.graph.outputs_of[k]:
            if self.use_groups[i]:
                present_groups = self._find_present_groups(
                    i, self._find_event_groups(i, candidates)
                )
                useful_groups.update(
                    e for e in candidates if e <= self.use_groups[i][-1] and e not in present_groups
                )
        return tuple(sorted(useful_groups))

    def _find_event_groups(self, i: int, recompute_groups: Sequence[int]) -> tuple[int, ...]:
        """Return the groups in which tensor `i` may be read, recomputed or paged in, ascending."""
        last_group = self.use_groups[i][-1] if self.use_groups[i] else -1
        page_in_groups: Iterable[int] = self.counted_page_in_groups.get(i, ())
        if self._rewards_page_in(i):
            page_in_groups = self._groups_after(
                self.graph.node_of[i], self.problem.graph.last_page_in_stage(i)
            )
        first_group = self.group_of[self.graph.node_of[i]]
        return tuple(
            sorted(
                {
                    *self.use_groups[i],
                    *(
                        e
                        for e in (*recompute_groups, *page_in_groups)
                        if first_group < e <= last_group
                    ),
                }
            )
        )

    def _find_present_groups(self, i: int, event_groups: tuple[int, ...]) -> frozenset[int]:
        """Return the `event_groups` at whose beginning `i` can be in RAM for free."""
        if self.is_free is None or self._rewards_page_in(i):
            return frozenset()
        intervals = pairwise((self.group_of[self.graph.node_of[i]], *event_groups))
        return frozenset(last for first, last in intervals if self.is_free(i, first, last))
