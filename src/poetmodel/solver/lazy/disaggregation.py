"""From decisions per group to a schedule per stage, and the memory rows that it breaks."""

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
"""How far above a limit that a solver computed a row must be to count as broken, relatively."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecisions:
    """Decisions in a solution of a grouped relaxation."""

    kept: frozenset[tuple[int, int]]
    """(tensor, segment) that stays in RAM."""
    recomputed: frozenset[tuple[int, int]]
    """(group, node) that is recomputed."""
    paged_in: frozenset[tuple[int, int]]
    """(group, tensor) that is paged in."""
    resident: frozenset[int] = frozenset()
    """State that has its home in RAM."""


@dataclass(slots=True)
class Disaggregation:
    """A schedule as spans: each tensor in RAM at the beginning of a range of stages."""

    graph: Graph
    """The working graph of the problem."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """(tensor, first stage, last stage) at whose beginning it is in RAM."""
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    """(stage, node)."""
    paged_in: list[tuple[int, int]] = field(default_factory=list)
    """(stage, tensor)."""
    resident: frozenset[int] = frozenset()
    """State that has its home in RAM: it has no spans and is not paged in."""
    stated: Graph | None = None
    """The graph of the problem, where it has state."""

    def schedule(self) -> Schedule:
        """Return the schedule."""
        graph = self.stated or self.graph
        return with_immediate_page_outs(
            graph,
            R=(*self.recomputed, *((t, t) for t in range(len(graph.nodes)))),
            kept=self.spans,
            M_in=set(self.paged_in),
            resident=self.resident,
            identity=GraphIdentity.of(graph),
        )

    def stage_loads(self) -> list[int]:
        """Return the bytes of every stage row ``(t, t)``."""
        graph = self.graph
        sizes = graph.tensor_bytes
        change = [0] * (len(graph.nodes) + 1)
        for i, begin, end in self.spans:
            # A tensor at the beginning of stage t + 1 crosses the end of stage t.
            change[begin - 1] += sizes[i]
            change[end] -= sizes[i]
        everywhere = [(i, 1, len(graph.nodes)) for i in self.resident if sizes[i]]
        for i, begin, end in [*self.spans, *everywhere]:
            for q in (graph.node_of[i], *graph.users_of[i]):
                if begin - 1 <= q < end:
                    own = sizes[i] - graph.shared_bytes_of[q].get(i, 0)
                    change[q] -= own
                    change[q + 1] += own
        change[0] += self.resident_bytes
        return list(map(add, accumulate(change), graph.step_bytes))

    @property
    def resident_bytes(self) -> int:
        """RAM of resident state [B]."""
        sizes = (self.stated or self.graph).tensor_bytes
        return sum(sizes[i] for i in self.resident)

    def step_loads(self) -> Iterator[tuple[int, int, int]]:
        """Yield (stage, step, bytes) of every step before its stage's own that does something."""
        again: dict[int, list[int]] = {}
        arrive: dict[int, list[int]] = {}
        for t, k in self.recomputed:
            again.setdefault(t, []).append(k)
        for t, i in self.paged_in:
            arrive.setdefault(t, []).append(i)
        stages = sorted(again.keys() | arrive.keys())
        held = self._loads_at_begin(stages)
        for t in stages:
            check_time_limit()
            yield from self._stage_steps(t, again.get(t, []), arrive.get(t, []), held[t])

    def _loads_at_begin(self, stages: list[int]) -> dict[int, tuple[set[int], set[int]]]:
        """Return for each of some stages what is in RAM when it begins, and when the next does."""
        wanted = {*stages, *(t + 1 for t in stages)}
        begins: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for i, begin, end in self.spans:
            begins.setdefault(begin, []).append(i)
            ends.setdefault(end + 1, []).append(i)
        present_at: dict[int, set[int]] = {}
        present: set[int] = set()
        for t in range(len(self.graph.nodes) + 1):
            present.difference_update(ends.get(t, ()))
            present.update(begins.get(t, ()))
            if t in wanted:
                present_at[t] = set(present)
        return {t: (present_at[t], present_at[t + 1]) for t in stages}

    def _stage_steps(
        self, t: int, again: list[int], arrive: list[int], held: tuple[set[int], set[int]]
    ) -> Iterator[tuple[int, int, int]]:
        graph, sizes = self.graph, self.graph.tensor_bytes
        before, after = held
        computed = set(again)
        outputs = {i for k in again for i in graph.outputs_of[k]}
        last: dict[int, int] = {}
        for i in before | outputs | set(arrive):
            uses = [j for j in graph.users_of[i] if j == t or j in computed]
            last[i] = len(graph.nodes) if i in after else max([graph.node_of[i], *uses])
        for k in sorted({*again, *(graph.node_of[i] for i in arrive)}):
            total = self.resident_bytes
            for i, end in last.items():
                maker = graph.node_of[i]
                copies = (i in before) + (i in arrive and maker <= k)
                if maker < k:
                    total += sizes[i] if end >= k and (copies or maker in computed) else 0
                else:
                    total += sizes[i] * copies
            if k in computed:
                total += graph.output_bytes[k] + graph.nodes[k].workspace_bytes
                shared = graph.shared_bytes_of[k].items()
                total -= sum(size for i, size in shared if last.get(i) == k)
            yield t, k, total


def disaggregate(
    graph: Graph,
    grouping: Grouping,
    events: Events,
    decisions: GroupDecisions,
    *,
    stated: Graph | None = None,
) -> Disaggregation:
    """Put the decisions of groups on stages.

    A recomputation or page-in happens at its earliest need in the group: the first stage of the
    group that reads it, or the stage of the first recomputation that does, or the group's last
    stage if it is only kept on. What reads state that is replaced before is recomputed at the
    replacement. A tensor goes after its last need.
    """
    last_stages = (stated or graph).last_stages
    result = _Disaggregator(graph, grouping, events, decisions, last_stages).run()
    result.stated = stated
    return result


class _Disaggregator:
    def __init__(
        self,
        graph: Graph,
        grouping: Grouping,
        events: Events,
        decisions: GroupDecisions,
        last_stages: Sequence[int],
    ) -> None:
        self.graph = graph
        self.last_stages = last_stages
        self.grouping = grouping
        self.resident = resident = decisions.resident
        self.result = Disaggregation(graph, resident=resident)
        n_groups = grouping.n_groups
        self.again: list[list[int]] = [[] for _ in range(n_groups)]
        self.arrive: list[set[int]] = [set() for _ in range(n_groups)]
        self.enter: list[set[int]] = [set() for _ in range(n_groups + 1)]
        """For each group the tensors in RAM when it begins."""
        for group, k in decisions.recomputed:
            self.again[group].append(k)
        for group, i in decisions.paged_in:
            if i not in resident:
                self.arrive[group].add(i)
        for i, a in decisions.kept:
            if i in resident:
                continue
            stages = events.events[i]
            begin = grouping.group_of[graph.node_of[i]] if a == 0 else stages[a - 1]
            for group in range(begin + 1, stages[a] + 1):
                self.enter[group].add(i)

    def run(self) -> Disaggregation:
        for group in range(self.grouping.n_groups):
            check_time_limit()
            self._group(group)
        self._join()
        return self.result

    def _group(self, group: int) -> None:
        graph = self.graph
        stages = range(self.grouping.first_stage[group], self.grouping.last_stage[group] + 1)
        readers: dict[int, list[int]] = {}
        for t in stages:
            for i in graph.inputs_of[t]:
                readers.setdefault(i, []).append(t)
        stage_of = self._recompute(group, readers)
        for i in self.arrive[group] - self.enter[group]:
            stage = self._need(group, i, readers)
            if stage is not None:
                self.result.paged_in.append((stage, i))
                self._hold(group, i, stage, readers)
        for i, stage in stage_of.items():
            self._hold(group, i, stage, readers)
        for i in self.enter[group]:
            self._hold(group, i, stages[0] - 1, readers)
        for t in stages:
            for i in graph.outputs_of[t]:
                if i not in self.resident:
                    self._hold(group, i, t, readers)

    def _recompute(self, group: int, readers: dict[int, list[int]]) -> dict[int, int]:
        """Place the recomputations of a group, last node first; return the stage of what they make.

        Their stages join the readers of their inputs.
        """
        graph = self.graph
        stage_of: dict[int, int] = {}
        for k in sorted(self.again[group], reverse=True):
            missing = [
                i
                for i in graph.outputs_of[k]
                if i not in self.arrive[group] and i not in self.enter[group]
            ]
            needs = [self._need(group, i, readers) for i in missing]
            stage = min((need for need in needs if need is not None), default=None)
            if stage is None:
                continue  # nobody needs what it makes
            stage = min(stage, self.last_stages[k])
            self.result.recomputed.append((stage, k))
            stage_of.update((i, stage) for i in missing)
            for i in graph.inputs_of[k]:
                readers.setdefault(i, []).append(stage)
        return stage_of

    def _need(self, group: int, i: int, readers: dict[int, list[int]]) -> int | None:
        """Return the stage of the group that needs tensor `i` first, or None."""
        if readers.get(i):
            return min(readers[i])
        return self.grouping.last_stage[group] if i in self.enter[group + 1] else None

    def _hold(self, group: int, i: int, stage: int, readers: dict[int, list[int]]) -> None:
        """Keep tensor `i`, there in `stage`, to its last reader in the group, or across its end."""
        if i in self.enter[group + 1]:
            end = self.grouping.last_stage[group] + 1
        else:
            end = max([stage, *readers.get(i, ())])
        if end > stage:
            self.result.spans.append((i, stage + 1, end))

    def _join(self) -> None:
        """Join the spans of a tensor that touch."""
        spans: list[tuple[int, int, int]] = []
        for i, begin, end in sorted(self.result.spans):
            if spans and spans[-1][0] == i and spans[-1][2] + 1 >= begin:
                joined = spans.pop()
                spans.append((i, joined[1], max(end, joined[2])))
            else:
                spans.append((i, begin, end))
        self.result.spans = spans


def broken_stages(loads: Sequence[float], limit: float) -> list[int]:
    """Return the worst stage of each run of stages whose row ``(t, t)`` is broken, worst first."""
    worst: list[int] = []
    inside = False
    for t, load in enumerate(loads):
        broken = load > limit
        if broken and not inside:
            worst.append(t)
        elif broken and load > loads[worst[-1]]:
            worst[-1] = t
        inside = broken
    return sorted(worst, key=lambda t: -loads[t])


def broken_steps(result: Disaggregation, limit: float) -> list[tuple[int, int]]:
    """Return the worst step ``(t, k)``, ``k < t``, of each stage that breaks one."""
    worst: dict[int, tuple[int, int]] = {}
    for t, k, load in result.step_loads():
        if load > limit and (t not in worst or load > worst[t][0]):
            worst[t] = (load, k)
    return [(t, k) for t, (_, k) in sorted(worst.items())]
