"""A schedule in the making: what is brought back when, and what that leaves in RAM.

A partial schedule is a set of *restorations*: recomputations and page-ins, each in a stage.
Everything else follows; only page-outs that serve no page-in, which own constraints may ask for,
are noted beside them. Whoever reads a tensor gets it from its latest restoration, its first
computation if there is no other, and it stays in RAM from a restoration to the last reader that the
restoration serves. So every partial schedule keeps the rules of execution; only limits can be
broken, and RAM is known for every step at any moment, because a change touches a few tensors only.

A state tensor has its home in RAM until a restoration gives it one on storage, where the step of
its node reads it first. Resident, it is like a tensor from before the first stage that something
needs after the last one. It is in RAM in every stage then, and nothing brings it back.
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
    restorations_of,
)
from poetmodel.problem import Coefficients
from poetmodel.problem.working_graph import working_graph
from poetmodel.schedule import GraphIdentity, Schedule, with_immediate_page_outs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.heuristics.own_rows import OwnRows


class Mark(NamedTuple):
    """A position in the changes of a partial schedule."""

    changes: int
    peaks: int


START: Final = Mark(0, 0)
"""The position when a partial schedule was made, or committed."""


class PartialSchedule:
    """A set of restorations with the RAM that it needs; without any it is keep-all.

    Notes
    -----
    RAM changes with the *links* of tensors: a link goes from the last stage that has a tensor at
    hand, where it is made, brought back or read, to the next one that reads it with nothing brought
    back. A restoration changes a link or two of each tensor that it supplies or reads. The rows
    that count a link follow at once. The steps of a stage are gone through again when its peak is
    read, where its restorations, or the links that begin there, have changed since.
    """

    def __init__(
        self,
        graph: Graph,
        restorations: Iterable[Restoration] = (),
        *,
        working: Graph | None = None,
        rows: OwnRows | None = None,
    ) -> None:
        self.graph = graph
        self.working = working_graph(graph, read_in_place=False) if working is None else working
        """The working graph of the problem, without state."""
        self.rows = rows
        self.used: list[float] = [] if rows is None else [0] * len(rows.limits)
        """Use of each own row."""
        self.exceeded: set[int] = set()
        """Own rows of which too much is used."""
        if rows is not None:
            self.exceeded.update(
                row for row, used in enumerate(self.used) if rows.exceeded(row, used)
            )
        self.sizes = graph.tensor_bytes
        n = len(graph.nodes)
        self.recomputed: list[set[int]] = [set() for _ in range(n)]
        """For each stage the nodes recomputed."""
        self.paged_in: list[set[int]] = [set() for _ in range(n)]
        """For each stage the tensors paged in."""
        self.page_ins = [0] * len(self.sizes)
        """How often each tensor is paged in."""
        self.stored = graph.starts_on_storage
        """For each tensor whether it lies on storage from the start, or may as state."""
        self.resident = set(graph.state_tensors)
        """State that has its home in RAM."""
        self.paged_out: set[int] = set()
        """Tensors that are paged out whether they are paged in or not."""
        self.aux_used_bytes = 0
        """Bytes that page-outs, and state that is not resident, take on storage [B]."""
        self.gaps: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        """For each tensor the stages ``first <= t < need`` whose rows count it though they neither
        read nor make it; `need` reads it next. The first one may read it where its node could write
        over it, which it cannot then; its row counts what that would save."""
        self._needs = [list(users) for users in self.working.users_of]
        """For each tensor the stages that read it, ascending; one for each node that reads it."""
        self._sources = [[k] for k in graph.node_of]
        """For each tensor the stages that make it or bring it back, ascending."""
        self._own = [
            frozenset((k, *users)) for k, users in zip(graph.node_of, self._needs, strict=True)
        ]
        """For each tensor the stages whose rows count it in any case."""
        self._saved: dict[int, dict[int, int]] = {}
        """For tensors that nodes may write over, what that saves in the stage of each [B]."""
        for q, shared in enumerate(self.working.shared_bytes_of):
            for i, size in shared.items():  # lives on, though its node reads it
                self._saved.setdefault(i, {})[q] = size
                self._own[i] -= {q}
        for i in graph.state_tensors:
            # Where the core reads it on storage, nothing else counts it.
            is_counted = self.working.tensor_bytes[i] == self.sizes[i]
            own = self._own[i] if is_counted else frozenset[int]()
            self._own[i] = own | {-1}
            self._sources[i] = [-1]
            self._needs[i] = [*sorted(own), n]
        self.row_bytes: NDArray[np.int64] = np.array(self.working.step_bytes, dtype=np.int64)
        """RAM at the last step of each stage, ``(t, t)`` [B]."""
        self._extra_bytes: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        """Excess of a stage's highest step beyond that, of all stages but those of `_dirty` [B]."""
        self._dirty: set[int] = set()
        self._stays: list[set[int]] = [set() for _ in range(n)]
        """For each stage the tensors with a link that begins there."""
        self._touched = [
            dict.fromkeys((*self.working.inputs_of[k], *self.working.outputs_of[k]), k)
            for k in range(n)
        ]
        """For each node the tensors that it reads and makes, each with the node."""
        self._log: list[tuple[Restoration, bool]] = []
        self._peak_log: list[tuple[int, int]] = []
        """Stages with what `_extra_bytes` had of them, when that was found; -1 when they became
        dirty."""
        self._begin(restorations)

    def _begin(self, restorations: Iterable[Restoration]) -> None:
        """Count all links, and enter the restorations to begin with."""
        for i in range(len(self.sizes)):
            check_time_limit()
            self._link_all(i, 1)
        for restoration in restorations:
            check_time_limit()
            if restoration not in self:
                self._enter(restoration, adding=True)
        self.commit()

    @classmethod
    def of(
        cls,
        graph: Graph,
        schedule: Schedule,
        wanted: Coefficients | None = None,
        *,
        working: Graph | None = None,
    ) -> Self:
        """Return the restorations of a valid schedule that serve something or are wanted.

        The result is valid too, with no more energy, time, writes or RAM at any step; state keeps
        its homes. `wanted` is that of a problem with constraints or an objective of its own, where
        it has such, `working` its working graph.

        Goes backwards from the last stage, so that what serves only something useless is useless
        too. A recomputation also goes if all that it serves is in RAM as its stage begins.
        """
        partial = cls(graph, restorations_of(graph, schedule), working=working)
        wants = Coefficients((), (), (), ()) if wanted is None else wanted
        for i in sorted({i for _, i in schedule.M_out}.difference(graph.state_of)):
            partial._settle_page_out(i, wanted=any(wants.page_out[i : i + 1]))
        for t in range(len(graph.nodes) - 1, -1, -1):
            for k in sorted(partial.recomputed[t], reverse=True):
                is_free = not any(wants.compute[k : k + 1])
                if is_free and all(schedule.is_kept(t, i) for i in partial._served(k, t)):
                    partial.drop(Restoration(t, k, RECOMPUTE))
            for i in sorted(partial.paged_in[t]):
                restoration = Restoration(t, i, PAGE_IN)
                if not any(wants.page_in[i : i + 1]) and partial.is_useless(restoration):
                    partial.drop(restoration)
        partial.commit()
        return partial

    def _settle_page_out(self, i: int, *, wanted: bool) -> None:
        """Let tensor `i` be paged out for its own sake exactly where that is wanted."""
        out = Restoration.at_its_node(self.graph, i, PAGE_OUT)
        if out in self and not wanted:
            self.drop(out)
        elif out not in self and wanted:
            self.add(out)

    # -- what it is ----------------------------------------------------------------------------

    def __contains__(self, restoration: Restoration) -> bool:
        if restoration.kind == PAGE_OUT:
            return restoration.item in self.paged_out
        if restoration.kind == STORAGE_HOME:
            return restoration.item not in self.resident
        chosen = self.recomputed if restoration.kind == RECOMPUTE else self.paged_in
        return restoration.item in chosen[restoration.stage]

    def restorations(self) -> list[Restoration]:
        """Return all restorations, by stage, then homes on storage, and page-outs noted beside."""
        restorations = [
            Restoration(t, item, kind)
            for t in range(len(self.recomputed))
            for chosen, kind in ((self.recomputed[t], RECOMPUTE), (self.paged_in[t], PAGE_IN))
            for item in sorted(chosen)
        ]
        on_storage = (i for i in self.graph.state_tensors if i not in self.resident)
        for kind, tensors in ((STORAGE_HOME, on_storage), (PAGE_OUT, sorted(self.paged_out))):
            restorations += [Restoration.at_its_node(self.graph, i, kind) for i in tensors]
        return restorations

    def schedule(self) -> Schedule:
        """Return the schedule."""
        graph = self.graph
        moving = (i for i in range(len(self.sizes)) if i not in self.resident)
        held = (span for i in moving for span in self._spans(i))
        return with_immediate_page_outs(
            graph,
            R=((t, k) for t, nodes in enumerate(self.recomputed) for k in (*sorted(nodes), t)),
            kept=held,
            M_in=((t, i) for t, tensors in enumerate(self.paged_in) for i in sorted(tensors)),
            M_out=((graph.node_of[i], i) for i in self.paged_out),
            resident=self.resident,
            identity=GraphIdentity.of(graph),
        )

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Yield the stages, first to last, that begin with tensor `i` in RAM."""
        needs, sources = self._needs[i], self._sources[i]
        for a, supplied in enumerate(sources):
            end = sources[a + 1] if a + 1 < len(sources) else len(self.recomputed)
            served = bisect_left(needs, end)
            if served:
                yield i, supplied + 1, needs[served - 1]

    # -- where tensors are -----------------------------------------------------------------------

    def enters(self, i: int, t: int) -> bool:
        """Whether stage `t` begins with tensor `i` in RAM."""
        sources = self._sources[i]
        before = bisect_left(sources, t)
        return before > 0 and self._next_is_need(i, t, before)

    def serves(self, i: int, t: int) -> bool:
        """Whether tensor `i`, made or brought back in stage `t`, is read from there."""
        return self._next_is_need(i, t, bisect_right(self._sources[i], t))

    def is_available(self, i: int, t: int) -> bool:
        """Whether a step of stage `t` may read tensor `i` with nothing changed."""
        sources = self._sources[i]
        before = bisect_right(sources, t)
        return sources[before - 1] == t or self._next_is_need(i, t, before)

    def _next_is_need(self, i: int, t: int, following: int) -> bool:
        needs, sources = self._needs[i], self._sources[i]
        need = bisect_left(needs, t)
        if need == len(needs):
            return False
        return following == len(sources) or needs[need] < sources[following]

    def kept_from(self, i: int, t: int) -> int:
        """Return the first stage whose row counts tensor `i` if it is kept for a step of `t`."""
        sources, needs = self._sources[i], self._needs[i]
        last = sources[bisect_left(sources, t) - 1]
        need = bisect_left(needs, t)
        if need:
            last = max(last, needs[need - 1])
        return last + (last in self._own[i])

    def links_of(self, i: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the stages that supply tensor `i`, and those that read it, both ascending."""
        return self._sources[i], self._needs[i]

    def first_counted(self, i: int, last: int) -> tuple[int, int | None]:
        """Return the first stage whose row counts tensor `i` if it is kept on from stage `last`.

        With what that row counts of it if that is not the whole, as the tensor could be overwritten
        there [B]; else None.
        """
        first = last + (last in self._own[i])
        saved = self._saved.get(i)
        return first, None if saved is None else saved.get(first)

    def row_bytes_with(self, i: int, t: int) -> int:
        """Return the highest of the rows that count tensor `i` if it is kept for a step of `t` [B].

        With it; 0 where no row counts it.
        """
        first, size = self.kept_from(i, t), self.sizes[i]
        rows = self.row_bytes[first:t]
        if first < t and first in self._saved.get(i, ()):
            began = int(rows[0]) + self._saved[i][first]
            return max(began, int(rows[1:].max()) + size) if rows.size > 1 else began
        return int(rows.max()) + size if rows.size else 0

    def row_bytes_if_resident(self, i: int) -> int:
        """Return the highest row before and after state `i` on storage is there, with it [B]."""
        k, needs = self.graph.node_of[i], self._needs[i]
        last = needs[-1] if needs else k - (k not in self._own[i])
        rows = np.concatenate((self.row_bytes[:k], self.row_bytes[last + 1 :]))
        return int(rows.max()) + self.sizes[i] if rows.size else 0

    def across(self, stage: int) -> list[tuple[int, int, int]]:
        """Return each tensor with bytes that the row of a stage counts though it could be out.

        With the first stage that counts it so, and the stage that reads it next.
        """
        sizes = self.sizes
        return [
            (i, *gap)
            for i, gaps in enumerate(self.gaps)
            for gap in gaps
            if gap[0] <= stage < gap[1] and sizes[i]
        ]

    def source(self, i: int, t: int) -> Restoration | None:
        """Return the restoration of tensor `i` in stage `t`; None if it needs none."""
        stage = self._sources[i][bisect_right(self._sources[i], t) - 1]
        if stage < 0:
            return None
        k = self.graph.node_of[i]
        if i in self.paged_in[stage]:
            return Restoration(stage, i, PAGE_IN)
        return Restoration(stage, k, RECOMPUTE) if k in self.recomputed[stage] else None

    # -- changes ---------------------------------------------------------------------------------

    def add(self, restoration: Restoration) -> None:
        """Add a restoration that is not there."""
        check_time_limit()
        self._enter(restoration, adding=True)
        self._log.append((restoration, True))

    def drop(self, restoration: Restoration) -> None:
        """Take a restoration away; what served only it stays."""
        self._enter(restoration, adding=False)
        self._log.append((restoration, False))

    def remove(self, restoration: Restoration) -> list[Restoration]:
        """Take a restoration away, and those that served only it; return all of them.

        State that has its home in RAM again is no longer paged in.
        """
        mark = len(self._log)
        if restoration.kind == STORAGE_HOME and self.page_ins[restoration.item]:
            for t, arriving in enumerate(self.paged_in):
                if restoration.item in arriving:
                    self.drop(Restoration(t, restoration.item, PAGE_IN))
        self.drop(restoration)
        for i in self.working.inputs_of[restoration.item] if restoration.kind == RECOMPUTE else ():
            source = self.source(i, restoration.stage)
            if source is not None and self.is_useless(source):
                self.remove(source)
        return [change for change, _ in self._log[mark:]]

    def is_useless(self, restoration: Restoration) -> bool:
        """Whether a restoration serves no reader."""
        t, item, kind = restoration
        if kind == RECOMPUTE:
            return not self._served(item, t)
        if kind == PAGE_OUT:
            return True
        return self.graph.node_of[item] in self.recomputed[t] or not self.serves(item, t)

    def _served(self, k: int, t: int) -> list[int]:
        """Return the outputs of node `k` that are read from its recomputation in stage `t`."""
        outputs, paged_in = self.graph.outputs_of[k], self.paged_in[t]
        return [i for i in outputs if i not in paged_in and self.serves(i, t)]

    def mark(self) -> Mark:
        """Return the current position of the partial schedule, for `undo`."""
        return Mark(len(self._log), len(self._peak_log))

    def undo(self, mark: Mark) -> None:
        """Take back all changes since a mark, with what is known of peaks."""
        while len(self._log) > mark.changes:
            restoration, added = self._log.pop()
            self._enter(restoration, adding=not added)
        while len(self._peak_log) > mark.peaks:
            t, extra = self._peak_log.pop()
            if extra < 0:
                self._dirty.remove(t)
            else:
                self._dirty.add(t)
                self._extra_bytes[t] = extra

    def commit(self) -> None:
        """Forget how the partial schedule came about: marks before this one are void."""
        self._log.clear()
        self._peak_log.clear()

    def _enter(self, restoration: Restoration, *, adding: bool) -> None:
        """Enter a restoration, or take it out, with the links of the tensors it concerns."""
        t, item, kind = restoration
        graph, again = self.working, kind == RECOMPUTE
        if kind == STORAGE_HOME:
            self._enter_home(item, adding=adding)
            return
        if not again and self._enter_transfer(restoration, adding=adding):
            return
        if again and self.rows is not None:
            self.rows.count(self.used, self.exceeded, self.rows.compute[item], 1 if adding else -1)
        chosen = (self.recomputed if again else self.paged_in)[t]
        if adding:
            chosen.add(item)
        else:
            chosen.remove(item)
        self._note_change(t)
        for i in graph.outputs_of[item] if again else (item,):
            self._change_source(i, t, adding=adding)
        for i in graph.inputs_of[item] if again else ():
            self._change_need(i, t, adding=adding)

    def _enter_transfer(self, restoration: Restoration, *, adding: bool) -> bool:
        """Count a page-in or page-out; return whether it is no more than a page-out."""
        i, rows, change = restoration.item, self.rows, 1 if adding else -1
        alone = restoration.kind == PAGE_OUT
        before = self.goes_out(i)
        if alone:
            (self.paged_out.add if adding else self.paged_out.remove)(i)
        else:
            self.page_ins[i] += change
            if rows is not None:
                rows.count(self.used, self.exceeded, rows.page_in[i], change)
        moved = self.goes_out(i) - before
        self.aux_used_bytes += 0 if self.stored[i] else moved * self.sizes[i]
        if moved and rows is not None:
            rows.count(self.used, self.exceeded, rows.page_out[i], moved)
        return alone

    def _enter_home(self, i: int, *, adding: bool) -> None:
        """Let state `i` have its home on storage, or in RAM again."""
        k, n = self.graph.node_of[i], len(self.recomputed)
        sources, needs = self._sources[i], self._needs[i]
        always = (k, n) if k in self._own[i] else (n,)
        self._link_all(i, -1)
        sources.remove(-1 if adding else k)
        insort(sources, k if adding else -1)
        for need in always:
            if adding:
                needs.remove(need)
            else:
                insort(needs, need)
        (self.resident.remove if adding else self.resident.add)(i)
        self._link_all(i, 1)
        change = 1 if adding else -1
        self.aux_used_bytes += change * self.sizes[i]
        if self.rows is not None:
            self.rows.count(self.used, self.exceeded, self.rows.storage_home[i], change)
        self._note_change(k)

    def goes_out(self, i: int) -> bool:
        """Whether tensor `i` is paged out."""
        return i in self.paged_out or (self.page_ins[i] > 0 and not self.stored[i])

    def changes_page_out(self, restoration: Restoration, *, adding: bool) -> bool:
        """Whether adding, or dropping, a page-in or page-out makes its tensor go out or not.

        Dropped is what is there, added what is not.
        """
        i, alone = restoration.item, restoration.kind == PAGE_OUT
        if adding:
            return (alone or not self.stored[i]) and not self.goes_out(i)
        if alone:
            return self.stored[i] or not self.page_ins[i]
        return self.page_ins[i] == 1 and not self.stored[i] and i not in self.paged_out

    # -- links -----------------------------------------------------------------------------------

    def _links(self, i: int) -> Iterator[tuple[int, int]]:
        """Yield the links of tensor `i`, each with the stages of its beginning and end."""
        sources = self._sources[i]
        previous = -1
        supplied = following = sources[0]
        index, count, never = 0, len(sources), len(self.recomputed) + 1
        for need in self._needs[i]:
            if need == previous:
                continue
            while following <= need:
                supplied = following
                index += 1
                following = sources[index] if index < count else never
            if supplied != need:
                yield max(previous, supplied), need
            previous = need

    def _link_all(self, i: int, sign: int) -> None:
        """Count all links of tensor `i` (1) or none any more (-1)."""
        for last, need in self._links(i):
            self._count_link(i, last, need, sign)

    def _change_source(self, i: int, t: int, *, adding: bool) -> None:
        """Let stage `t` bring tensor `i` back once more, or once less."""
        sources, needs = self._sources[i], self._needs[i]
        at = bisect_left(sources, t)
        if adding:
            sources.insert(at, t)
        else:
            del sources[at]
        after = at + adding
        if after < len(sources) and sources[after] == t:
            return  # it does so beside this
        need = bisect_left(needs, t)
        last = sources[at - 1]
        if need and needs[need - 1] > last:
            last = needs[need - 1]
        if need == len(needs):
            return
        end = needs[need]
        if end == t:
            self._count_link(i, last, t, -1 if adding else 1)
        elif after == len(sources) or end < sources[after]:
            self._count_link(i, last if adding else t, end, -1)
            self._count_link(i, t if adding else last, end, 1)

    def _change_need(self, i: int, t: int, *, adding: bool) -> None:
        """Let one step more of stage `t` read tensor `i`, or one step less."""
        sources, needs = self._sources[i], self._needs[i]
        at = bisect_left(needs, t)
        if adding:
            needs.insert(at, t)
        else:
            del needs[at]
        after = at + adding
        if after < len(needs) and needs[after] == t:
            return  # another step of the stage reads it
        source = bisect_right(sources, t)
        last = sources[source - 1]
        if last == t:
            return
        if at and needs[at - 1] > last:
            last = needs[at - 1]
        if after < len(needs) and (source == len(sources) or needs[after] < sources[source]):
            self._split_link(i, (last, needs[after]), t, 1 if adding else -1)
        else:
            self._count_link(i, last, t, 1 if adding else -1)

    def _count_link(self, i: int, last: int, need: int, sign: int) -> None:
        """Count a link of tensor `i` (1), or count it no longer (-1)."""
        first = last + 1 if last in self._own[i] else last
        if first < need:
            size, rows = sign * self.sizes[i], self.row_bytes
            rows[first:need] += size
            if i in self._saved and first in self._saved[i]:
                rows[first] += sign * self._saved[i][first] - size
            if sign > 0:
                insort(self.gaps[i], (first, need))
            else:
                self.gaps[i].remove((first, need))
        if last >= 0:
            (self._stays[last].add if sign > 0 else self._stays[last].remove)(i)
            self._note_change(last)

    def _split_link(self, i: int, link: tuple[int, int], t: int, sign: int) -> None:
        """Let a link of tensor `i` be two, which meet in stage `t` (1), or be one again (-1)."""
        own, gaps, (last, need) = self._own[i], self.gaps[i], link
        first = last + 1 if last in own else last
        second = t + 1 if t in own else t
        whole = (first, need)
        parts = [gap for gap in ((first, t), (second, need)) if gap[0] < gap[1]]
        at = bisect_left(gaps, whole if sign > 0 else parts[0] if parts else whole)
        if sign > 0:
            gaps[at : at + 1] = parts
        else:
            gaps[at : at + len(parts)] = [whole]
        if second > t:
            self.row_bytes[t] -= sign * self.sizes[i]
        elif i in self._saved and t in self._saved[i]:
            self.row_bytes[t] += sign * (self._saved[i][t] - self.sizes[i])
        (self._stays[t].add if sign > 0 else self._stays[t].remove)(i)
        self._note_change(t)

    def _note_change(self, t: int) -> None:
        """Note that the steps of stage `t` must be gone through for its peak."""
        if t not in self._dirty:
            self._dirty.add(t)
            self._peak_log.append((t, -1))

    # -- RAM -------------------------------------------------------------------------------------

    @property
    def extra_bytes(self) -> NDArray[np.int64]:
        """Excess of the highest step of each stage beyond `row_bytes` [B]."""
        for t in self._dirty:
            self._find_extra(t)
        self._dirty.clear()
        return self._extra_bytes

    def peaks(self) -> NDArray[np.int64]:
        """Return the highest RAM use in each stage [B]."""
        return self.row_bytes + self.extra_bytes

    def peak(self, t: int) -> int:
        """Return the highest RAM use in stage `t` [B]."""
        if t in self._dirty:
            self._find_extra(t)
            self._dirty.remove(t)
        return int(self.row_bytes[t] + self._extra_bytes[t])

    def _find_extra(self, t: int) -> None:
        """Go through the steps of stage `t` for its entry in `extra_bytes`."""
        check_time_limit()
        self._peak_log.append((t, int(self._extra_bytes[t])))
        self._extra_bytes[t] = self._step_excess(t)

    def _step_excess(self, t: int) -> int:
        """Return by how much the highest step of stage `t` is above its last one [B].

        Both are counted from what is in RAM as the stage begins.
        """
        again, pages = self.recomputed[t], self.paged_in[t]
        if not again and not pages:
            return 0
        graph, node_of = self.working, self.graph.node_of
        sizes, shared = graph.tensor_bytes, graph.shared_bytes_of
        page_bytes: dict[int, int] = {}
        for i in pages:
            k = node_of[i]
            page_bytes[k] = page_bytes.get(k, 0) + sizes[i]
        steps = sorted({*again, *page_bytes, t})
        last: dict[int, int] = {}
        for k in steps:
            if k in again or k == t:
                last.update(self._touched[k])
        for i in pages:
            last[i] = max(node_of[i], last.get(i, -1))
        freed = dict.fromkeys(steps, 0)
        saved: dict[int, int] = {}
        for i in last.keys() - self._stays[t]:
            k = last[i]
            freed[k] += sizes[i]
            if i in shared[k]:
                saved[k] = saved.get(k, 0) + shared[k][i]
        ram = highest = step = 0
        for k in steps:
            arriving = page_bytes.get(k, 0)
            ram += arriving
            highest = max(highest, ram)
            if k in again or k == t:
                is_there = not self.resident.isdisjoint(graph.outputs_of[k])
                output_bytes = 0 if is_there else graph.output_bytes[k]
                step = ram + output_bytes + graph.nodes[k].workspace_bytes - saved.get(k, 0)
                highest = max(highest, step)
                ram += output_bytes - arriving
            ram -= freed[k]
        return highest - step

    def fits(self, limit_bytes: int) -> bool:
        """Whether every step keeps within a limit."""
        return self.excess(limit_bytes) is None

    def excess(self, limit_bytes: int) -> tuple[int, int] | None:
        """Return a stage that is above a limit, with what it uses at least [B]; None without."""
        rows = self.row_bytes
        fullest = int(rows.argmax())
        if rows[fullest] > limit_bytes:
            return fullest, int(rows[fullest])
        for t in list(self._dirty):
            load = self.peak(t)
            if load > limit_bytes:
                return t, load
        peaks = self.peaks()
        fullest = int(peaks.argmax())
        load = int(peaks[fullest])
        return (fullest, load) if load > limit_bytes else None
