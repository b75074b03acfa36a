"""Partial schedules: sets of recomputations and page-ins, with the RAM that each step needs.

A partial schedule is a set of *restorations*: recomputations and page-ins, each in a stage. All
other decisions follow from them, except page-outs without page-ins, which user-defined constraints
may require, and homes of state. Both are restorations, too. So a partial schedule of permitted
restorations obeys the rules of execution and may only violate limits. Callers check whether a node
may be recomputed, and the rules for replaced state. `heuristics.ledger` counts the RAM.

A state tensor has its home in RAM unless a restoration assigns it a home on storage, from which the
step of its node reads it first.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from poetmodel.clock import check_time_limit
from poetmodel.heuristics.ledger import RamLedger
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
    from collections.abc import Iterable

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


class PartialSchedule(RamLedger):
    """A set of restorations that can be changed and undone. The empty set is keep-all.

    `working_graph` defaults to that of `graph` for a core that reads no state in place. `row_use`
    and `exceeded_rows` track `rows`, those of user-defined constraints. The constructor, `add`, and
    methods that compute peaks raise `TimeLimitError` after the context's time limit.
    """

    def __init__(
        self,
        graph: Graph,
        restorations: Iterable[Restoration] = (),
        *,
        working_graph: Graph | None = None,
        rows: UserRows | None = None,
    ) -> None:
        if working_graph is None:
            working_graph = make_working_graph(graph, read_in_place=False)
        super().__init__(graph, working_graph)
        self.rows = rows
        self.row_use: list[float] = [] if rows is None else [0] * len(rows.limits)
        """For each row of user-defined constraints, the sum over the present decisions."""
        self.exceeded_rows: set[int] = set()
        """Rows of user-defined constraints that are exceeded."""
        if rows is not None:
            self.exceeded_rows.update(
                row for row, used in enumerate(self.row_use) if rows.is_exceeded(row, used)
            )
        self.page_ins = [0] * len(self.sizes)
        """Number of page-ins of each tensor."""
        self.starts_on_storage = graph.starts_on_storage
        """For each tensor, whether it starts on storage, or is state that may start there."""
        self.paged_out: set[int] = set()
        """Tensors that are paged out even without page-ins."""
        self.aux_used_bytes = 0
        """Storage used by page-outs and by state with a home there [B]."""
        self._changes: list[tuple[Restoration, bool]] = []
        """Restorations changed since the last commit, and whether they were added."""
        self._add_initial(restorations)

    def _add_initial(self, restorations: Iterable[Restoration]) -> None:
        """Add the absent ones of `restorations`, and commit."""
        for restoration in restorations:
            check_time_limit()
            if restoration not in self:
                self._apply(restoration, is_added=True)
        self.count_links()
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
        of state are unchanged. Stages are visited backwards, so that restorations that serve only
        unneeded ones go, too. `rewards` are `Problem.rewards`; None rewards none.
        """
        partial = cls(graph, list_restorations(graph, schedule), working_graph=working_graph)
        if rewards is None:
            no_rewards = (0.0,) * len(graph.tensors)
            rewards = Coefficients((0.0,) * len(graph.nodes), no_rewards, no_rewards, no_rewards)
        for i in sorted({i for _, i in schedule.M_out}.difference(graph.state_of)):
            partial._set_page_out(i, is_rewarded=rewards.page_out[i] > 0)
        for t in range(len(graph.nodes) - 1, -1, -1):
            for k in sorted(partial.recomputed[t], reverse=True):
                if not rewards.compute[k] and all(
                    schedule.is_kept(t, i) for i in partial._read_outputs(k, t)
                ):
                    partial.drop(Restoration(t, k, RECOMPUTE))
            for i in sorted(partial.paged_in[t]):
                restoration = Restoration(t, i, PAGE_IN)
                if not rewards.page_in[i] and partial.is_useless(restoration):
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
        """Return recomputations and page-ins by stage, then homes on storage, then `paged_out`."""
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

    def source(self, i: int, t: int) -> Restoration | None:
        """Return the restoration from which stage `t` reads tensor `i`, a page-in first, if any."""
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
        """Remove a restoration and those that serve only it; return all in the order of removal."""
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

        If a stage both recomputes and pages in a tensor, its reads count for neither.
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
        self._undo_peaks(mark.peaks)

    def commit(self) -> None:
        """Clear the change logs. Earlier marks become invalid."""
        self._changes.clear()
        self._peak_changes.clear()

    def _apply(self, restoration: Restoration, *, is_added: bool) -> None:
        """Add or remove a restoration; update links, `row_use` and `aux_used_bytes`.

        Logs stale peaks for `undo`; `add` and `drop` log the restoration.
        """
        t, item, kind = restoration
        is_recomputation = kind == RECOMPUTE
        if kind == STORAGE_HOME:
            self._apply_home(item, is_added=is_added)
            return
        if not is_recomputation and self._apply_transfer(restoration, is_added=is_added):
            return
        if is_recomputation and self.rows is not None:
            self.rows.count_decision(
                self.row_use, self.exceeded_rows, self.rows.compute[item], 1 if is_added else -1
            )
        self.change_step(t, item, is_recomputation=is_recomputation, is_added=is_added)

    def _apply_transfer(self, restoration: Restoration, *, is_added: bool) -> bool:
        """Count an added or removed page-in or page-out; return whether it is a page-out.

        The caller updates `paged_in` and links for page-ins.
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
        """Move the home of state `i` to storage if `is_added`, otherwise to RAM."""
        self.change_home(i, to_storage=is_added)
        change = 1 if is_added else -1
        self.aux_used_bytes += change * self.sizes[i]
        if self.rows is not None:
            self.rows.count_decision(
                self.row_use, self.exceeded_rows, self.rows.storage_home[i], change
            )

    def is_paged_out(self, i: int) -> bool:
        """Return whether tensor `i` is paged out, by itself or for a page-in.

        The write-back of a replacement does not count: it belongs to the home of the state.
        """
        return i in self.paged_out or (self.page_ins[i] > 0 and not self.starts_on_storage[i])

    def changes_page_out(self, restoration: Restoration, *, is_added: bool) -> bool:
        """Return whether adding (`is_added`) or dropping a transfer changes `is_paged_out`."""
        i, is_page_out = restoration.item, restoration.kind == PAGE_OUT
        if is_added:
            return (is_page_out or not self.starts_on_storage[i]) and not self.is_paged_out(i)
        if is_page_out:
            return self.starts_on_storage[i] or not self.page_ins[i]
        return self.page_ins[i] == 1 and not self.starts_on_storage[i] and i not in self.paged_out
