"""Disaggregation: convert group decisions to a schedule over stages, and find violated rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import TYPE_CHECKING, Final

from poetmodel.clock import check_time_limit
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.model.events import Events
    from poetmodel.model.grouping import Grouping

ROUNDING: Final = 1e-7
"""Maximum excess over a limit, relative to the limit, that counts as a solver's rounding error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecisions:
    """Decisions of a solution of a grouped relaxation."""

    kept: frozenset[tuple[int, int]]
    """Segments ``(i, a)`` of `Events` in which tensor `i` stays in RAM."""
    recomputed: frozenset[tuple[int, int]]
    """(group, node) pairs: the group recomputes the node."""
    paged_in: frozenset[tuple[int, int]]
    """(group, tensor) pairs: the group pages in the tensor."""
    resident: frozenset[int] = frozenset()
    """State tensors whose home is RAM."""


@dataclass(slots=True)
class Disaggregation:
    """A schedule as spans of stages in which tensors are in RAM."""

    graph: Graph
    """The working graph of the problem."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(tensor, first, last): the tensor is in RAM when stages first..last begin."""
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    """(stage, node) pairs."""
    paged_in: list[tuple[int, int]] = field(default_factory=list)
    """(stage, tensor) pairs."""
    resident: frozenset[int] = frozenset()
    """State tensors whose home is RAM. They have no spans and are not paged in."""
    stated_graph: Graph | None = None
    """The graph of the problem with its state; None means `graph`."""

    def schedule(self) -> Schedule:
        """Return the schedule, with page-outs right after first computations.

        Pages out the tensors that are paged in and do not start on storage, and the replacements of
        state on storage.
        """
        graph = self.stated_graph or self.graph
        return with_immediate_page_outs(
            graph,
            R=(*self.recomputed, *((t, t) for t in range(len(graph.nodes)))),
            kept=self.spans,
            M_in=set(self.paged_in),
            resident=self.resident,
            identity=GraphIdentity.from_graph(graph),
        )

    def stage_loads(self) -> list[int]:
        """Return the bytes in RAM at the last step ``(t, t)`` of every stage [B], by stage.

        Includes resident state and the node's workspace.
        """
        graph = self.graph
        sizes = graph.tensor_bytes
        differences = [0] * (len(graph.nodes) + 1)
        for i, begin, end in self.spans:
            # A tensor at the beginning of stage t + 1 crosses the end of stage t.
            differences[begin - 1] += sizes[i]
            differences[end] -= sizes[i]
        resident_spans = [(i, 1, len(graph.nodes)) for i in self.resident if sizes[i]]
        for i, begin, end in [*self.spans, *resident_spans]:
            for k in (graph.node_of[i], *graph.users_of[i]):
                if begin - 1 <= k < end:
                    unshared_bytes = sizes[i] - graph.shared_bytes_of[k].get(i, 0)
                    differences[k] -= unshared_bytes
                    differences[k + 1] += unshared_bytes
        differences[0] += self.resident_state_bytes
        return list(map(add, accumulate(differences), graph.step_bytes))

    @property
    def resident_state_bytes(self) -> int:
        """Size of the state whose home is RAM [B]."""
        sizes = (self.stated_graph or self.graph).tensor_bytes
        return sum(sizes[i] for i in self.resident)

    def step_loads(self) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, step, bytes in RAM) of every active step before the last of its stage.

        A step is active if its node is recomputed or an output of the node is paged in. The bytes
        include resident state and, in a recomputation, the workspace. Stages and their steps are
        ascending. Raises `TimeLimitError` if the time limit passes.
        """
        recomputed_nodes: dict[int, list[int]] = {}
        paged_tensors: dict[int, list[int]] = {}
        for t, k in self.recomputed:
            recomputed_nodes.setdefault(t, []).append(k)
        for t, i in self.paged_in:
            paged_tensors.setdefault(t, []).append(i)
        stages = sorted(recomputed_nodes.keys() | paged_tensors.keys())
        tensors_in_ram = self._tensors_in_ram(stages)
        for t in stages:
            check_time_limit()
            yield from self._step_loads_in_stage(
                t, recomputed_nodes.get(t, []), paged_tensors.get(t, []), tensors_in_ram[t]
            )

    def _tensors_in_ram(self, stages: list[int]) -> dict[int, tuple[set[int], set[int]]]:
        """Return the tensors in RAM when each of `stages` begins and when the next stage begins.

        The result is by stage. Tensors of resident state are not included.
        """
        needed_stages = {*stages, *(t + 1 for t in stages)}
        beginning_spans: dict[int, list[int]] = {}
        ended_spans: dict[int, list[int]] = {}
        for i, begin, end in self.spans:
            beginning_spans.setdefault(begin, []).append(i)
            ended_spans.setdefault(end + 1, []).append(i)
        tensors_at: dict[int, set[int]] = {}
        present_tensors: set[int] = set()
        for t in range(len(self.graph.nodes) + 1):
            present_tensors.difference_update(ended_spans.get(t, ()))
            present_tensors.update(beginning_spans.get(t, ()))
            if t in needed_stages:
                tensors_at[t] = set(present_tensors)
        return {t: (tensors_at[t], tensors_at[t + 1]) for t in stages}

    def _step_loads_in_stage(
        self,
        t: int,
        recomputed_nodes: list[int],
        paged_tensors: list[int],
        tensors_in_ram: tuple[set[int], set[int]],
    ) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, step, bytes in RAM) of each active step before the last of stage `t`.

        A step is active if its node is recomputed or an output of the node is paged in. Steps are
        ascending. `tensors_in_ram` are the tensors when the stage begins and when the next one
        begins. A tensor counts until its last use in the stage, or until the end of the stage if it
        is in RAM when the next stage begins. Resident state counts in every step, a workspace only
        in the recomputation of its node.
        """
        graph, sizes = self.graph, self.graph.tensor_bytes
        tensors_at_begin, tensors_at_next_begin = tensors_in_ram
        computed_nodes = set(recomputed_nodes)
        outputs = {i for k in recomputed_nodes for i in graph.outputs_of[k]}
        last_use: dict[int, int] = {}
        for i in tensors_at_begin | outputs | set(paged_tensors):
            uses = [j for j in graph.users_of[i] if j == t or j in computed_nodes]
            last_use[i] = (
                len(graph.nodes) if i in tensors_at_next_begin else max([graph.node_of[i], *uses])
            )
        for k in sorted({*recomputed_nodes, *(graph.node_of[i] for i in paged_tensors)}):
            ram_bytes = self.resident_state_bytes
            for i, end in last_use.items():
                producer = graph.node_of[i]
                copies = (i in tensors_at_begin) + (i in paged_tensors and producer <= k)
                if producer < k:
                    ram_bytes += (
                        sizes[i] if end >= k and (copies or producer in computed_nodes) else 0
                    )
                else:
                    ram_bytes += sizes[i] * copies
            if k in computed_nodes:
                ram_bytes += graph.output_bytes[k] + graph.nodes[k].workspace_bytes
                shared_bytes = graph.shared_bytes_of[k].items()
                ram_bytes -= sum(size for i, size in shared_bytes if last_use.get(i) == k)
            yield t, k, ram_bytes


def disaggregate(
    graph: Graph,
    grouping: Grouping,
    events: Events,
    decisions: GroupDecisions,
    *,
    stated_graph: Graph | None = None,
) -> Disaggregation:
    """Assign the decisions of groups to stages of the working graph `graph`.

    A recomputation or page-in happens at the earliest need in the group: the first stage that reads
    the tensor, or the stage of the first recomputation that reads the tensor. If the tensor is only
    kept for the next group, the recomputation or page-in happens in the last stage of the group. A
    node that reads state is recomputed no later than the replacement of that state. A tensor is
    evicted after its last need. Decisions without a need are dropped, as are keeps and page-ins of
    resident state, page-ins of tensors that are kept into the group, and recomputations whose
    needed outputs are all paged in or kept into the group. `stated_graph` is the graph of the
    problem with its state; None means `graph`. Raises `TimeLimitError` if the time limit passes.
    """
    last_stages = (stated_graph or graph).last_stages
    result = _Disaggregator(graph, grouping, events, decisions, last_stages).disaggregate()
    result.stated_graph = stated_graph
    return result


class _Disaggregator:
    """Assigns the decisions of one solution to stages, group by group."""

    def __init__(
        self,
        graph: Graph,
        grouping: Grouping,
        events: Events,
        decisions: GroupDecisions,
        last_stages: Sequence[int],
    ) -> None:
        """Index recomputations, page-ins and keeps by group, without those of resident state.

        No stage has a decision yet. `last_stages` is `Graph.last_stages` of the graph with its
        state: the last stage in which each node may be computed.
        """
        self.graph = graph
        self.last_stages = last_stages
        self.grouping = grouping
        self.resident = resident = decisions.resident
        self.result = Disaggregation(graph, resident=resident)
        n_groups = grouping.n_groups
        self.recomputed_nodes: list[list[int]] = [[] for _ in range(n_groups)]
        self.paged_tensors: list[set[int]] = [set() for _ in range(n_groups)]
        self.kept_tensors: list[set[int]] = [set() for _ in range(n_groups + 1)]
        """For each group, the tensors in RAM when it begins."""
        for group, k in decisions.recomputed:
            self.recomputed_nodes[group].append(k)
        for group, i in decisions.paged_in:
            if i not in resident:
                self.paged_tensors[group].add(i)
        for i, a in decisions.kept:
            if i in resident:
                continue
            event_groups = events.event_groups[i]
            first_group = grouping.group_of[graph.node_of[i]] if a == 0 else event_groups[a - 1]
            for group in range(first_group + 1, event_groups[a] + 1):
                self.kept_tensors[group].add(i)

    def disaggregate(self) -> Disaggregation:
        """Assign the decisions of all groups, merge the spans, and return the result.

        Raises `TimeLimitError` if the time limit passes.
        """
        for group in range(self.grouping.n_groups):
            check_time_limit()
            self._add_group(group)
        self._merge_spans()
        return self.result

    def _add_group(self, group: int) -> None:
        """Assign the recomputations, then the page-ins of one group to its stages.

        Drops page-ins of tensors without a need or kept into the group. Adds spans for recomputed
        outputs, paged-in tensors, tensors kept into the group and outputs of first computations.
        """
        graph = self.graph
        stages = range(self.grouping.first_stage[group], self.grouping.last_stage[group] + 1)
        readers: dict[int, list[int]] = {}
        for t in stages:
            for i in graph.inputs_of[t]:
                readers.setdefault(i, []).append(t)
        stage_of = self._assign_recomputations(group, readers)
        for i in self.paged_tensors[group] - self.kept_tensors[group]:
            stage = self._first_need(group, i, readers)
            if stage is not None:
                self.result.paged_in.append((stage, i))
                self._add_span(group, i, stage, readers)
        for i, stage in stage_of.items():
            self._add_span(group, i, stage, readers)
        for i in self.kept_tensors[group]:
            self._add_span(group, i, stages[0] - 1, readers)
        for t in stages:
            for i in graph.outputs_of[t]:
                if i not in self.resident:
                    self._add_span(group, i, t, readers)

    def _assign_recomputations(self, group: int, readers: dict[int, list[int]]) -> dict[int, int]:
        """Assign stages to the recomputations of a group, the last node first.

        The stage is the earliest `_first_need` of an output that is neither paged in nor kept into
        the group, or the node's entry in `last_stages` if that is earlier. If `_first_need` is None
        for each such output, the recomputation is dropped. `readers` has the stages of the group
        that read each tensor; the stages of the recomputations are added for their inputs. Adds the
        recomputations to the result. Return the stage of each output that is recomputed and neither
        paged in nor kept into the group.
        """
        graph = self.graph
        stage_of: dict[int, int] = {}
        for k in sorted(self.recomputed_nodes[group], reverse=True):
            missing_tensors = [
                i
                for i in graph.outputs_of[k]
                if i not in self.paged_tensors[group] and i not in self.kept_tensors[group]
            ]
            need_stages = [self._first_need(group, i, readers) for i in missing_tensors]
            stage = min(
                (need_stage for need_stage in need_stages if need_stage is not None), default=None
            )
            if stage is None:
                continue  # no missing output is needed
            stage = min(stage, self.last_stages[k])
            self.result.recomputed.append((stage, k))
            stage_of.update((i, stage) for i in missing_tensors)
            for i in graph.inputs_of[k]:
                readers.setdefault(i, []).append(stage)
        return stage_of

    def _first_need(self, group: int, i: int, readers: dict[int, list[int]]) -> int | None:
        """Return the first stage of the group that reads tensor `i`, also for a recomputation.

        `readers` has the reading stages by tensor. If there is none, return the last stage of the
        group if the tensor is kept into the next group, else None.
        """
        if readers.get(i):
            return min(readers[i])
        return self.grouping.last_stage[group] if i in self.kept_tensors[group + 1] else None

    def _add_span(self, group: int, i: int, stage: int, readers: dict[int, list[int]]) -> None:
        """Add the span that keeps tensor `i` from stage ``stage + 1`` on, if it is needed there.

        The span ends at the first stage of the next group if the tensor is kept into that group,
        otherwise at the last stage of the group that reads the tensor (`readers`, by tensor).
        """
        if i in self.kept_tensors[group + 1]:
            end = self.grouping.last_stage[group] + 1
        else:
            end = max([stage, *readers.get(i, ())])
        if end > stage:
            self.result.spans.append((i, stage + 1, end))

    def _merge_spans(self) -> None:
        """Sort the spans of tensors in RAM; merge adjacent or overlapping ones of one tensor."""
        spans: list[tuple[int, int, int]] = []
        for i, begin, end in sorted(self.result.spans):
            if spans and spans[-1][0] == i and spans[-1][2] + 1 >= begin:
                merged = spans.pop()
                spans.append((i, merged[1], max(end, merged[2])))
            else:
                spans.append((i, begin, end))
        self.result.spans = spans


def violated_stages(loads: Sequence[float], limit_bytes: float) -> list[int]:
    """Return the worst stage of each sequence of stages with violated rows, the worst first.

    `loads` are the bytes in RAM at the last step of each stage. A row is violated above
    `limit_bytes`. Of stages with equal bytes, the earliest counts as the worst.
    """
    worst_stages: list[int] = []
    was_violated = False
    for t, load in enumerate(loads):
        is_violated = load > limit_bytes
        if is_violated and not was_violated:
            worst_stages.append(t)
        elif is_violated and load > loads[worst_stages[-1]]:
            worst_stages[-1] = t
        was_violated = is_violated
    return sorted(worst_stages, key=lambda t: -loads[t])


def violated_steps(disaggregation: Disaggregation, limit_bytes: float) -> list[tuple[int, int]]:
    """Return the worst violated step ``(t, k)`` of each stage that has one before its last step.

    A step of `Disaggregation.step_loads` is violated if its bytes in RAM exceed `limit_bytes`; of
    equal ones, the first step is the worst. The last step of a stage is never returned. Stages are
    ascending. Raises `TimeLimitError` if the time limit passes.
    """
    worst_steps: dict[int, tuple[int, int]] = {}
    for t, k, load in disaggregation.step_loads():
        if load > limit_bytes and (t not in worst_steps or load > worst_steps[t][0]):
            worst_steps[t] = (load, k)
    return [(t, k) for t, (_, k) in sorted(worst_steps.items())]
