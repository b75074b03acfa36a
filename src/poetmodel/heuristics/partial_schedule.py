"""Partial schedules: sets of recomputations and page-ins, with the RAM that each step needs.

A partial schedule is a set of *restorations*: recomputations and page-ins, each in a stage. All
other decisions follow from them, except page-outs without page-ins, which user-defined constraints
may require, and homes of state. Both are restorations, too. A step reads a tensor from its latest
restoration, or from its first computation. The tensor stays in RAM from a restoration to the last
reader before the next one. So a partial schedule of permitted restorations obeys the rules of
execution and may only violate limits. Callers check whether a node may be recomputed, and the rules
for replaced state. The RAM is updated after each change, which affects few tensors.

A state tensor has its home in RAM unless a restoration assigns it a home on storage, from which the
step of its node reads it first. A resident state tensor is like a tensor that is computed before
the first stage and read after the last one: it is in RAM in every stage, and never restored.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import numpy as np

from poetmodel.clock import check_time_limit
from poetmodel.heuristics.restorations import (
    PAGE_IN,
    PAGE_OUT,
    RECOMPUTE,
    STORAGE_HOME,
    Restoration,
    list_restorations,
)
from poetmodel.problem import Coefficients
from poetmodel.problem.working_graph import make_working_graph
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.heuristics.user_rows import UserRows


class Mark(NamedTuple):
    """A position in the two change logs of a partial schedule."""

    changes: int
    """Number of logged changes of restorations."""
    peaks: int
    """Number of logged changes of peaks."""


START: Final = Mark(0, 0)
"""The position of a new or committed partial schedule."""


class PartialSchedule:
    """A set of restorations, and the RAM of the schedule with these. The empty set is keep-all.

    The constructor, `add`, and methods that compute peaks raise `TimeLimitError` if a time limit of
    the calling context has passed.

    Notes
    -----
    RAM changes with the *links* of tensors. A link starts at the last stage that has a tensor in
    RAM because the stage computes, restores or reads it. It ends at the next stage that reads the
    tensor without a restoration. A restoration changes at most three links of each tensor that it
    supplies or reads; a home changes all links of the state. The RAM rows (last steps of stages)
    that count a link are updated with each change. The other steps of a stage are evaluated when
    its peak is read, if its restorations or the links that start there have changed since.
    """

    def __init__(
        self,
        graph: Graph,
        restorations: Iterable[Restoration] = (),
        *,
        working_graph: Graph | None = None,
        rows: UserRows | None = None,
    ) -> None:
        """Begin with keep-all and add `restorations`; a repeated one is added once.

        `working_graph` defaults to the working graph of `graph` for a core that reads no state in
        place. `row_use` and `exceeded_rows` track `rows`, the rows of user-defined constraints.
        """
        self.graph = graph
        self.working_graph = (
            make_working_graph(graph, read_in_place=False)
            if working_graph is None
            else working_graph
        )
        """The working graph of the problem, in which state tensors are inputs on storage. By
        default, state is not read in place."""
        self.rows = rows
        self.row_use: list[float] = [] if rows is None else [0] * len(rows.limits)
        """For each row of user-defined constraints, the sum over the present decisions."""
        self.exceeded_rows: set[int] = set()
        """Rows of user-defined constraints that are exceeded."""
        if rows is not None:
            self.exceeded_rows.update(
                row for row, used in enumerate(self.row_use) if rows.is_exceeded(row, used)
            )
        self.sizes = graph.tensor_bytes
        n_stages = len(graph.nodes)
        self.recomputed: list[set[int]] = [set() for _ in range(n_stages)]
        """For each stage, the recomputed nodes."""
        self.paged_in: list[set[int]] = [set() for _ in range(n_stages)]
        """For each stage, the paged-in tensors."""
        self.page_ins = [0] * len(self.sizes)
        """Number of page-ins of each tensor."""
        self.starts_on_storage = graph.starts_on_storage
        """For each tensor, whether it starts on storage, or is state that may start there."""
        self.resident = set(graph.state_tensors)
        """State whose home is RAM."""
        self.paged_out: set[int] = set()
        """Tensors that are paged out even without page-ins."""
        self.aux_used_bytes = 0
        """Storage used by page-outs and by state with a home there [B]."""
        self.intervals: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        """For each tensor, (first, need) pairs: the rows of the stages ``first <= t < need`` count
        the tensor although their nodes, in the working graph, do not use it. Stage `need` reads it
        next; the last `need` of resident state is the number of stages. An exception is a first
        stage whose node reads the tensor and could overwrite it if `need` did not read it: the row
        of that stage counts the bytes that overwriting would save."""
        self._needs = [list(users) for users in self.working_graph.users_of]
        """For each tensor, the stages with steps that read it in the working graph, ascending; one
        entry for each such step. Further entries of resident state are the stage of its node,
        unless the core reads it in place, and finally the number of stages."""
        self._sources = [[k] for k in graph.node_of]
        """For each tensor, the stages that compute or restore it, ascending; twice if a stage
        recomputes it and pages it in; -1 for resident state."""
        self._always_counting = [
            frozenset((k, *users)) for k, users in zip(graph.node_of, self._needs, strict=True)
        ]
        """For each tensor, the stages whose rows always count it; for state also -1."""
        self._overwritable_bytes: dict[int, dict[int, int]] = {}
        """For tensors that nodes may overwrite, the bytes that this saves, by node [B]."""
        for k, shared_bytes in enumerate(self.working_graph.shared_bytes_of):
            for i, size in shared_bytes.items():  # tensors that the node reads and may overwrite
                self._overwritable_bytes.setdefault(i, {})[k] = size
                self._always_counting[i] -= {k}
        for i in graph.state_tensors:
            # If the core reads the state in place on storage, no step counts it in RAM.
            is_counted = self.working_graph.tensor_bytes[i] == self.sizes[i]
            counting_stages = self._always_counting[i] if is_counted else frozenset[int]()
            self._always_counting[i] = counting_stages | {-1}
            self._sources[i] = [-1]
            self._needs[i] = [*sorted(counting_stages), n_stages]
        self.row_bytes: NDArray[np.int64] = np.array(self.working_graph.step_bytes, dtype=np.int64)
        """RAM at the last step of each stage, ``(t, t)`` [B]."""
        self._extra_bytes: NDArray[np.int64] = np.zeros(n_stages, dtype=np.int64)
        """Excess of each stage's highest step over its last step, except for stale stages [B]."""
        self._stale_stages: set[int] = set()
        """Stages whose `_extra_bytes` must be computed again."""
        self._links_from: list[set[int]] = [set() for _ in range(n_stages)]
        """For each stage, the tensors with a link that starts there."""
        self._touched_tensors = [
            dict.fromkeys((*self.working_graph.inputs_of[k], *self.working_graph.outputs_of[k]), k)
            for k in range(n_stages)
        ]
        """For each node, a mapping from the tensors that it reads and computes to the node."""
        self._changes: list[tuple[Restoration, bool]] = []
        """Restorations changed since the last commit, and whether they were added."""
        self._peak_changes: list[tuple[int, int]] = []
        """Stages with their previous `_extra_bytes`; -1 if the stage became stale."""
        self._add_initial(restorations)

    def _add_initial(self, restorations: Iterable[Restoration]) -> None:
        """Count the links of keep-all, add the absent ones of `restorations`, and commit.

        Counting adds the links' bytes to `row_bytes`; see `_count_link`.
        """
        for i in range(len(self.sizes)):
            check_time_limit()
            self._count_all_links(i, 1)
        for restoration in restorations:
            check_time_limit()
            if restoration not in self:
                self._apply(restoration, is_added=True)
        self.commit()

    @classmethod
    def from_schedule(
        cls,
        graph: Graph,
        schedule: Schedule,
        rewards: Coefficients | None = None,
        *,
        working_graph: Graph | None = None,
    ) -> Self:
        """Return the partial schedule of a valid schedule, with only read or rewarded restorations.

        The result is valid, too, and needs no more energy, time, writes or RAM at any step; homes
        of state are unchanged. `rewards` are `Problem.rewards`, nonzero for rewarded decisions;
        None rewards none. `working_graph` is that of the problem.

        Stages are visited backwards, so that restorations are removed, too, if they serve only
        unneeded ones. An unrewarded recomputation is also removed if `schedule` has all outputs
        that are read from it in RAM when its stage begins.
        """
        partial = cls(graph, list_restorations(graph, schedule), working_graph=working_graph)
        coefficients = Coefficients((), (), (), ()) if rewards is None else rewards
        for i in sorted({i for _, i in schedule.M_out}.difference(graph.state_of)):
            partial._set_page_out(i, is_rewarded=any(coefficients.page_out[i : i + 1]))
        for t in range(len(graph.nodes) - 1, -1, -1):
            for k in sorted(partial.recomputed[t], reverse=True):
                is_free = not any(coefficients.compute[k : k + 1])
                if is_free and all(schedule.is_kept(t, i) for i in partial._read_outputs(k, t)):
                    partial.drop(Restoration(t, k, RECOMPUTE))
            for i in sorted(partial.paged_in[t]):
                restoration = Restoration(t, i, PAGE_IN)
                if not any(coefficients.page_in[i : i + 1]) and partial.is_useless(restoration):
                    partial.drop(restoration)
        partial.commit()
        return partial

    def _set_page_out(self, i: int, *, is_rewarded: bool) -> None:
        """Add the page-out without page-ins of tensor `i` if it is rewarded, otherwise drop it."""
        page_out = Restoration.at_its_node(self.graph, i, PAGE_OUT)
        if page_out in self and not is_rewarded:
            self.drop(page_out)
        elif page_out not in self and is_rewarded:
            self.add(page_out)

    # -- contents ------------------------------------------------------------------------------

    def __contains__(self, restoration: Restoration) -> bool:
        if restoration.kind == PAGE_OUT:
            return restoration.item in self.paged_out
        if restoration.kind == STORAGE_HOME:
            return restoration.item not in self.resident
        items = self.recomputed if restoration.kind == RECOMPUTE else self.paged_in
        return restoration.item in items[restoration.stage]

    def restorations(self) -> list[Restoration]:
        """Return recomputations and page-ins by stage, then homes on storage, then page-outs.

        The page-outs are those of the tensors in `paged_out`, not those that only page-ins need.
        """
        restorations = [
            Restoration(t, item, kind)
            for t in range(len(self.recomputed))
            for items, kind in ((self.recomputed[t], RECOMPUTE), (self.paged_in[t], PAGE_IN))
            for item in sorted(items)
        ]
        on_storage = (i for i in self.graph.state_tensors if i not in self.resident)
        for kind, tensors in ((STORAGE_HOME, on_storage), (PAGE_OUT, sorted(self.paged_out))):
            restorations += [Restoration.at_its_node(self.graph, i, kind) for i in tensors]
        return restorations

    def schedule(self) -> Schedule:
        """Return all decisions as a schedule."""
        graph = self.graph
        nonresident_tensors = (i for i in range(len(self.sizes)) if i not in self.resident)
        ram_spans = (span for i in nonresident_tensors for span in self._spans(i))
        return with_immediate_page_outs(
            graph,
            R=((t, k) for t, nodes in enumerate(self.recomputed) for k in (*sorted(nodes), t)),
            kept=ram_spans,
            M_in=((t, i) for t, tensors in enumerate(self.paged_in) for i in sorted(tensors)),
            M_out=((graph.node_of[i], i) for i in self.paged_out),
            resident=self.resident,
            identity=GraphIdentity.from_graph(graph),
        )

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Yield (i, first, last) ranges: tensor `i` is in RAM when stages first..last begin.

        There is one for each first computation or restoration, up to the last reader before the
        next one. It is empty (``last < first``) or omitted if no later stage reads the tensor.
        """
        needs, sources = self._needs[i], self._sources[i]
        for a, source in enumerate(sources):
            end = sources[a + 1] if a + 1 < len(sources) else len(self.recomputed)
            n_served_needs = bisect_left(needs, end)
            if n_served_needs:
                yield i, source + 1, needs[n_served_needs - 1]

    # -- tensors in RAM --------------------------------------------------------------------------

    def is_kept_into(self, i: int, t: int) -> bool:
        """Return whether tensor `i` is in RAM when stage `t` begins."""
        sources = self._sources[i]
        n_sources_before = bisect_left(sources, t)
        return n_sources_before > 0 and self._next_is_need(i, t, n_sources_before)

    def is_read_from(self, i: int, t: int) -> bool:
        """Return whether a step of stage `t` or later reads tensor `i` from its source in `t`.

        A source is the first computation or a restoration.
        """
        return self._next_is_need(i, t, bisect_right(self._sources[i], t))

    def is_available(self, i: int, t: int) -> bool:
        """Return whether a step of stage `t` can read tensor `i` without any change."""
        sources = self._sources[i]
        n_sources_before = bisect_right(sources, t)
        return sources[n_sources_before - 1] == t or self._next_is_need(i, t, n_sources_before)

    def _next_is_need(self, i: int, t: int, next_source_index: int) -> bool:
        """Return whether a step from stage `t` on reads tensor `i` before its next source.

        `next_source_index` is the position of that source among the tensor's sources; the number of
        sources if there is none. A step in the stage of that source does not count.
        """
        needs, sources = self._needs[i], self._sources[i]
        position = bisect_left(needs, t)
        if position == len(needs):
            return False
        return next_source_index == len(sources) or needs[position] < sources[next_source_index]

    def first_keeping_stage(self, i: int, t: int) -> int:
        """Return the first stage whose RAM row counts tensor `i` only if it is kept for stage `t`.

        The tensor is then kept from the last stage before `t` that computes, restores or reads it.
        That stage is returned, or the next one if the row of that stage counts the tensor in any
        case. A *row* is the RAM use at the last step of a stage.
        """
        sources, needs = self._sources[i], self._needs[i]
        last = sources[bisect_left(sources, t) - 1]
        need = bisect_left(needs, t)
        if need:
            last = max(last, needs[need - 1])
        return last + (last in self._always_counting[i])

    def sources_and_needs(self, i: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the stages that compute or restore tensor `i`, and those that read it, ascending.

        For resident state, the source is -1 and the last need is the number of stages. The two
        sequences are not copies; a stage may occur repeatedly.
        """
        return self._sources[i], self._needs[i]

    def first_counting_stage(self, i: int, last: int) -> tuple[int, int | None]:
        """Return the first stage whose RAM row counts tensor `i` only if kept from stage `last`.

        That is `last`, or the next stage if the row of `last` counts the tensor in any case. A
        *row* is the RAM use at the last step of a stage. The second value is None if this row
        counts the whole tensor; if the node of the stage could overwrite the tensor, it is the
        number of bytes that the row counts instead: those that overwriting would save [B].
        """
        first = last + (last in self._always_counting[i])
        saved_bytes_by_stage = self._overwritable_bytes.get(i)
        return first, None if saved_bytes_by_stage is None else saved_bytes_by_stage.get(first)

    def row_bytes_with(self, i: int, t: int) -> int:
        """Return the highest row before stage `t` if tensor `i` were also kept for `t` [B].

        A *row* is the RAM use at the last step of a stage. Rows from `first_keeping_stage` to
        ``t - 1`` count. The bytes of the tensor are added to them, so it must not be kept yet. If
        the node of the first stage could overwrite the tensor, only the bytes that overwriting
        would save are added to that row. Return 0 if there is no such row.
        """
        first, size = self.first_keeping_stage(i, t), self.sizes[i]
        row_bytes = self.row_bytes[first:t]
        if first < t and first in self._overwritable_bytes.get(i, ()):
            first_row_bytes = int(row_bytes[0]) + self._overwritable_bytes[i][first]
            return (
                max(first_row_bytes, int(row_bytes[1:].max()) + size)
                if row_bytes.size > 1
                else first_row_bytes
            )
        return int(row_bytes.max()) + size if row_bytes.size else 0

    def row_bytes_if_resident(self, i: int) -> int:
        """Return the highest row in stages that count state `i` only if the state is resident [B].

        The home of the state must be on storage. The stages are those before the node of the state
        and after the last reader, or all stages if the core reads the state in place. Stages
        between two readers are not checked. The size of the state is added to the *row*, the RAM
        use at the last step of a stage. Return 0 if there is no such stage.
        """
        k, needs = self.graph.node_of[i], self._needs[i]
        last_need = needs[-1] if needs else k - (k not in self._always_counting[i])
        row_bytes = np.concatenate((self.row_bytes[:k], self.row_bytes[last_need + 1 :]))
        return int(row_bytes.max()) + self.sizes[i] if row_bytes.size else 0

    def tensors_kept_across(self, stage: int) -> list[tuple[int, int, int]]:
        """Return (tensor, first, need) for each of `intervals` with ``first <= stage < need``.

        These are the tensors that the stage keeps in RAM although its node does not use them, or
        could overwrite them. Tensors of 0 bytes are omitted.
        """
        sizes = self.sizes
        return [
            (i, *interval)
            for i, intervals in enumerate(self.intervals)
            for interval in intervals
            if interval[0] <= stage < interval[1] and sizes[i]
        ]

    def source(self, i: int, t: int) -> Restoration | None:
        """Return the recomputation or page-in from which stage `t` reads tensor `i`.

        If one stage has both, return the page-in. Return None for a first computation, for resident
        state, and for state that is still in RAM from the first read at its node.
        """
        stage = self._sources[i][bisect_right(self._sources[i], t) - 1]
        if stage < 0:
            return None
        k = self.graph.node_of[i]
        if i in self.paged_in[stage]:
            return Restoration(stage, i, PAGE_IN)
        return Restoration(stage, k, RECOMPUTE) if k in self.recomputed[stage] else None

    # -- changes ---------------------------------------------------------------------------------

    def add(self, restoration: Restoration) -> None:
        """Add a restoration that is not present, and log the change. Limits are not checked."""
        check_time_limit()
        self._apply(restoration, is_added=True)
        self._changes.append((restoration, True))

    def drop(self, restoration: Restoration) -> None:
        """Remove a restoration, but not the restorations that serve only it; log the change."""
        self._apply(restoration, is_added=False)
        self._changes.append((restoration, False))

    def remove(self, restoration: Restoration) -> list[Restoration]:
        """Remove a restoration and those that serve only it; return all in the order of removal.

        All page-ins of a state tensor are removed before its home on storage. Restorations from
        which only a removed recomputation reads are removed after it. All removals are logged.
        """
        n_changes_before = len(self._changes)
        if restoration.kind == STORAGE_HOME and self.page_ins[restoration.item]:
            for t, paged_in_tensors in enumerate(self.paged_in):
                if restoration.item in paged_in_tensors:
                    self.drop(Restoration(t, restoration.item, PAGE_IN))
        self.drop(restoration)
        for i in (
            self.working_graph.inputs_of[restoration.item] if restoration.kind == RECOMPUTE else ()
        ):
            source = self.source(i, restoration.stage)
            if source is not None and self.is_useless(source):
                self.remove(source)
        return [change for change, _ in self._changes[n_changes_before:]]

    def is_useless(self, restoration: Restoration) -> bool:
        """Return whether no step reads a tensor from a restoration; True for a page-out.

        If one stage both recomputes a tensor and pages it in, reads of the tensor count for
        neither.
        """
        t, item, kind = restoration
        if kind == RECOMPUTE:
            return not self._read_outputs(item, t)
        if kind == PAGE_OUT:
            return True
        return self.graph.node_of[item] in self.recomputed[t] or not self.is_read_from(item, t)

    def _read_outputs(self, k: int, t: int) -> list[int]:
        """Return the outputs of node `k` that are read from its recomputation in stage `t`."""
        outputs, paged_in = self.graph.outputs_of[k], self.paged_in[t]
        return [i for i in outputs if i not in paged_in and self.is_read_from(i, t)]

    def mark(self) -> Mark:
        """Return the current position in the change logs, for `undo`."""
        return Mark(len(self._changes), len(self._peak_changes))

    def undo(self, mark: Mark) -> None:
        """Undo all changes after a mark, newest first, and restore the peaks known at the mark."""
        while len(self._changes) > mark.changes:
            restoration, was_added = self._changes.pop()
            self._apply(restoration, is_added=not was_added)
        while len(self._peak_changes) > mark.peaks:
            t, previous_extra_bytes = self._peak_changes.pop()
            if previous_extra_bytes < 0:
                self._stale_stages.remove(t)
            else:
                self._stale_stages.add(t)
                self._extra_bytes[t] = previous_extra_bytes

    def commit(self) -> None:
        """Clear the change logs. Earlier marks become invalid."""
        self._changes.clear()
        self._peak_changes.clear()

    def _apply(self, restoration: Restoration, *, is_added: bool) -> None:
        """Add or remove a restoration; update its tensors' links, `row_use` and `aux_used_bytes`.

        Logs each peak that becomes stale, for `undo`. `add` and `drop` log the restoration.
        """
        t, item, kind = restoration
        graph, is_recomputation = self.working_graph, kind == RECOMPUTE
        if kind == STORAGE_HOME:
            self._apply_home(item, is_added=is_added)
            return
        if not is_recomputation and self._apply_transfer(restoration, is_added=is_added):
            return
        if is_recomputation and self.rows is not None:
            self.rows.count_decision(
                self.row_use, self.exceeded_rows, self.rows.compute[item], 1 if is_added else -1
            )
        items = (self.recomputed if is_recomputation else self.paged_in)[t]
        if is_added:
            items.add(item)
        else:
            items.remove(item)
        self._mark_stale(t)
        for i in graph.outputs_of[item] if is_recomputation else (item,):
            self._change_source(i, t, is_added=is_added)
        for i in graph.inputs_of[item] if is_recomputation else ():
            self._change_need(i, t, is_added=is_added)

    def _apply_transfer(self, restoration: Restoration, *, is_added: bool) -> bool:
        """Count an added or removed page-in or page-out; return whether it is a page-out.

        Updates `paged_out` or `page_ins`, then `aux_used_bytes`, `row_use` and `exceeded_rows`. The
        caller updates `paged_in` and links for page-ins.
        """
        i, rows, change = restoration.item, self.rows, 1 if is_added else -1
        is_page_out = restoration.kind == PAGE_OUT
        was_paged_out = self.is_paged_out(i)
        if is_page_out:
            (self.paged_out.add if is_added else self.paged_out.remove)(i)
        else:
            self.page_ins[i] += change
            if rows is not None:
                rows.count_decision(self.row_use, self.exceeded_rows, rows.page_in[i], change)
        page_out_change = self.is_paged_out(i) - was_paged_out
        self.aux_used_bytes += 0 if self.starts_on_storage[i] else page_out_change * self.sizes[i]
        if page_out_change and rows is not None:
            rows.count_decision(self.row_use, self.exceeded_rows, rows.page_out[i], page_out_change)
        return is_page_out

    def _apply_home(self, i: int, *, is_added: bool) -> None:
        """Move the home of state `i` to storage if `is_added`, otherwise to RAM.

        Updates the state's links (with `row_bytes`), `resident`, `aux_used_bytes` and the use of
        user-defined rows. Peaks of the node's stage and of stages where these links start become
        stale.
        """
        k, n_stages = self.graph.node_of[i], len(self.recomputed)
        sources, needs = self._sources[i], self._needs[i]
        fixed_needs = (k, n_stages) if k in self._always_counting[i] else (n_stages,)
        self._count_all_links(i, -1)
        sources.remove(-1 if is_added else k)
        insort(sources, k if is_added else -1)
        for need in fixed_needs:
            if is_added:
                needs.remove(need)
            else:
                insort(needs, need)
        (self.resident.remove if is_added else self.resident.add)(i)
        self._count_all_links(i, 1)
        change = 1 if is_added else -1
        self.aux_used_bytes += change * self.sizes[i]
        if self.rows is not None:
            self.rows.count_decision(
                self.row_use, self.exceeded_rows, self.rows.storage_home[i], change
            )
        self._mark_stale(k)

    def is_paged_out(self, i: int) -> bool:
        """Return whether tensor `i` is paged out, by a page-out of its own or for a page-in.

        The write-back of a replacement does not count: it belongs to the home of the state.
        """
        return i in self.paged_out or (self.page_ins[i] > 0 and not self.starts_on_storage[i])

    def changes_page_out(self, restoration: Restoration, *, is_added: bool) -> bool:
        """Return whether adding (`is_added`) or dropping a transfer changes `is_paged_out`.

        The transfer is a page-in or page-out. A dropped transfer is present, an added one is not.
        Page-ins of a tensor that starts on storage never change `is_paged_out`.
        """
        i, is_page_out = restoration.item, restoration.kind == PAGE_OUT
        if is_added:
            return (is_page_out or not self.starts_on_storage[i]) and not self.is_paged_out(i)
        if is_page_out:
            return self.starts_on_storage[i] or not self.page_ins[i]
        return self.page_ins[i] == 1 and not self.starts_on_storage[i] and i not in self.paged_out

    # -- links -----------------------------------------------------------------------------------

    def _links(self, i: int) -> Iterator[tuple[int, int]]:
        """Yield the links of tensor `i` as (start, need), ascending.

        Stage `need` reads the tensor, but does not compute or restore it; `start` is the last
        earlier stage that computes, restores or reads it. For resident state, the first start is -1
        and the last need is the number of stages.
        """
        sources = self._sources[i]
        previous_need = -1
        source = next_source = sources[0]
        source_index, n_sources, no_source = 0, len(sources), len(self.recomputed) + 1
        for need in self._needs[i]:
            if need == previous_need:
                continue
            while next_source <= need:
                source = next_source
                source_index += 1
                next_source = sources[source_index] if source_index < n_sources else no_source
            if source != need:
                yield max(previous_need, source), need
            previous_need = need

    def _count_all_links(self, i: int, sign: int) -> None:
        """Count all links of tensor `i` (sign 1), or remove all of them (-1)."""
        for last, need in self._links(i):
            self._count_link(i, last, need, sign)

    def _change_source(self, i: int, t: int, *, is_added: bool) -> None:
        """Add or remove stage `t` as a source of tensor `i`; update the tensor's links (`_links`).

        A source computes or restores the tensor. A new one removes the link that ends at `t`, if
        stage `t` reads the tensor; otherwise the next link starts at `t` instead of at an earlier
        stage. A removal reverses this. No link changes if the stage has another source of the
        tensor, or no step reads the tensor from this one.
        """
        sources, needs = self._sources[i], self._needs[i]
        position = bisect_left(sources, t)
        if is_added:
            sources.insert(position, t)
        else:
            del sources[position]
        next_position = position + is_added
        if next_position < len(sources) and sources[next_position] == t:
            return  # the stage has another source of the tensor
        need_position = bisect_left(needs, t)
        last = sources[position - 1]
        if need_position and needs[need_position - 1] > last:
            last = needs[need_position - 1]
        if need_position == len(needs):
            return
        next_need = needs[need_position]
        if next_need == t:
            self._count_link(i, last, t, -1 if is_added else 1)
        elif next_position == len(sources) or next_need < sources[next_position]:
            self._count_link(i, last if is_added else t, next_need, -1)
            self._count_link(i, t if is_added else last, next_need, 1)

    def _change_need(self, i: int, t: int, *, is_added: bool) -> None:
        """Add or remove a step of stage `t` that reads tensor `i`; update the tensor's links.

        A new reader splits the link (`_links`) across `t` in two, or else adds a link that ends at
        `t`. A removal reverses this. No link changes if another step of the stage reads the tensor,
        or if the stage computes or restores it.
        """
        sources, needs = self._sources[i], self._needs[i]
        position = bisect_left(needs, t)
        if is_added:
            needs.insert(position, t)
        else:
            del needs[position]
        next_position = position + is_added
        if next_position < len(needs) and needs[next_position] == t:
            return  # another step of the stage reads it
        source_position = bisect_right(sources, t)
        last = sources[source_position - 1]
        if last == t:
            return
        if position and needs[position - 1] > last:
            last = needs[position - 1]
        if next_position < len(needs) and (
            source_position == len(sources) or needs[next_position] < sources[source_position]
        ):
            self._split_link(i, (last, needs[next_position]), t, 1 if is_added else -1)
        else:
            self._count_link(i, last, t, 1 if is_added else -1)

    def _count_link(self, i: int, last: int, need: int, sign: int) -> None:
        """Add a link of tensor `i` from stage `last` to reader `need` (sign 1), or remove it (-1).

        Updates the `row_bytes` of stages from `last` to ``need - 1`` (without `last` if its row
        counts the tensor in any case), the tensor's `intervals` and, unless `last` is -1,
        `_links_from` stage `last`, whose peak becomes stale. If node `last` could overwrite the
        tensor, row `last` changes only by the bytes that overwriting would save.
        """
        first = last + 1 if last in self._always_counting[i] else last
        if first < need:
            size, rows = sign * self.sizes[i], self.row_bytes
            rows[first:need] += size
            if i in self._overwritable_bytes and first in self._overwritable_bytes[i]:
                rows[first] += sign * self._overwritable_bytes[i][first] - size
            if sign > 0:
                insort(self.intervals[i], (first, need))
            else:
                self.intervals[i].remove((first, need))
        if last >= 0:
            (self._links_from[last].add if sign > 0 else self._links_from[last].remove)(i)
            self._mark_stale(last)

    def _split_link(self, i: int, whole_link: tuple[int, int], t: int, sign: int) -> None:
        """Split `whole_link` of tensor `i` at reader `t` (sign 1), or merge its two halves (-1).

        Updates the tensor's `intervals` and `_links_from` stage `t`, whose peak becomes stale. A
        split reduces row `t` of `row_bytes` by the tensor's size if the row always counts the
        tensor (`_always_counting`); otherwise, if node `t` could overwrite the tensor, by this size
        minus the bytes that overwriting saves; otherwise not. A merge adds the same number.
        """
        always_counting, intervals, (last, need) = (
            self._always_counting[i],
            self.intervals[i],
            whole_link,
        )
        first = last + 1 if last in always_counting else last
        second_first = t + 1 if t in always_counting else t
        whole_interval = (first, need)
        halves = [
            interval for interval in ((first, t), (second_first, need)) if interval[0] < interval[1]
        ]
        position = bisect_left(
            intervals, whole_interval if sign > 0 else halves[0] if halves else whole_interval
        )
        if sign > 0:
            intervals[position : position + 1] = halves
        else:
            intervals[position : position + len(halves)] = [whole_interval]
        if second_first > t:
            self.row_bytes[t] -= sign * self.sizes[i]
        elif i in self._overwritable_bytes and t in self._overwritable_bytes[i]:
            self.row_bytes[t] += sign * (self._overwritable_bytes[i][t] - self.sizes[i])
        (self._links_from[t].add if sign > 0 else self._links_from[t].remove)(i)
        self._mark_stale(t)

    def _mark_stale(self, t: int) -> None:
        """Mark the peak of stage `t` as stale, and log this for `undo`."""
        if t not in self._stale_stages:
            self._stale_stages.add(t)
            self._peak_changes.append((t, -1))

    # -- RAM -------------------------------------------------------------------------------------

    @property
    def extra_bytes(self) -> NDArray[np.int64]:
        """Excess of the highest step of each stage over its last step, in `row_bytes` [B].

        Evaluates stale stages first. The array is not a copy.
        """
        for t in self._stale_stages:
            self._update_extra_bytes(t)
        self._stale_stages.clear()
        return self._extra_bytes

    def peaks(self) -> NDArray[np.int64]:
        """Return the highest RAM use in each stage [B]."""
        return self.row_bytes + self.extra_bytes

    def peak(self, t: int) -> int:
        """Return the highest RAM use in stage `t` [B]."""
        if t in self._stale_stages:
            self._update_extra_bytes(t)
            self._stale_stages.remove(t)
        return int(self.row_bytes[t] + self._extra_bytes[t])

    def _update_extra_bytes(self, t: int) -> None:
        """Compute `_extra_bytes` of stage `t`, and log the previous value for `undo`.

        The caller removes the stage from `_stale_stages`.
        """
        check_time_limit()
        self._peak_changes.append((t, int(self._extra_bytes[t])))
        bytes_at_steps, last_bytes = self._step_bytes(t)
        self._extra_bytes[t] = max(bytes_at_steps.values()) - last_bytes

    def highest_step(self, t: int) -> int:
        """Return the node of the first of the highest steps of stage `t`."""
        bytes_at_steps, _ = self._step_bytes(t)
        return max(bytes_at_steps, key=bytes_at_steps.__getitem__)

    def _step_bytes(self, t: int) -> tuple[dict[int, int], int]:
        """Return the RAM of the active steps of stage `t`, by node, and of its last step [B].

        Counted relative to the RAM when the stage begins.
        """
        recomputed, paged_in = self.recomputed[t], self.paged_in[t]
        if not recomputed and not paged_in:
            return {t: 0}, 0
        graph, node_of = self.working_graph, self.graph.node_of
        sizes, shared_bytes = graph.tensor_bytes, graph.shared_bytes_of
        page_bytes: dict[int, int] = {}
        for i in paged_in:
            k = node_of[i]
            page_bytes[k] = page_bytes.get(k, 0) + sizes[i]
        steps = sorted({*recomputed, *page_bytes, t})
        last_reads: dict[int, int] = {}
        for k in steps:
            if k in recomputed or k == t:
                last_reads.update(self._touched_tensors[k])
        for i in paged_in:
            last_reads[i] = max(node_of[i], last_reads.get(i, -1))
        freed_bytes = dict.fromkeys(steps, 0)
        saved_bytes: dict[int, int] = {}
        for i in last_reads.keys() - self._links_from[t]:
            k = last_reads[i]
            freed_bytes[k] += sizes[i]
            if i in shared_bytes[k]:
                saved_bytes[k] = saved_bytes.get(k, 0) + shared_bytes[k][i]
        bytes_at_steps: dict[int, int] = {}
        ram_bytes = step_bytes = 0
        for k in steps:
            page_in_bytes = page_bytes.get(k, 0)
            ram_bytes += page_in_bytes
            bytes_at_steps[k] = ram_bytes
            if k in recomputed or k == t:
                is_resident = not self.resident.isdisjoint(graph.outputs_of[k])
                output_bytes = 0 if is_resident else graph.output_bytes[k]
                step_bytes = (
                    ram_bytes
                    + output_bytes
                    + graph.nodes[k].workspace_bytes
                    - saved_bytes.get(k, 0)
                )
                bytes_at_steps[k] = max(ram_bytes, step_bytes)
                ram_bytes += output_bytes - page_in_bytes
            ram_bytes -= freed_bytes[k]
        return bytes_at_steps, step_bytes

    def fits(self, limit_bytes: int) -> bool:
        """Return whether the RAM use of every step is within a limit."""
        return self.find_excess(limit_bytes) is None

    def find_excess(self, limit_bytes: int) -> tuple[int, int] | None:
        """Return (stage, RAM use [B]) of one stage above a limit; None if no stage is above it.

        If last steps of stages exceed the limit, return the highest of these; other steps may use
        more. Otherwise return the peak of some stage above the limit.
        """
        row_bytes = self.row_bytes
        fullest_stage = int(row_bytes.argmax())
        if row_bytes[fullest_stage] > limit_bytes:
            return fullest_stage, int(row_bytes[fullest_stage])
        for t in list(self._stale_stages):
            ram_bytes = self.peak(t)
            if ram_bytes > limit_bytes:
                return t, ram_bytes
        peaks = self.peaks()
        fullest_stage = int(peaks.argmax())
        ram_bytes = int(peaks[fullest_stage])
        return (fullest_stage, ram_bytes) if ram_bytes > limit_bytes else None
