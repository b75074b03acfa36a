"""A schedule in the making: what is brought back when, and what that leaves in RAM.

A partial schedule is a set of *restorations*: recomputations and page-ins, each in a stage.
Everything else follows; only page-outs that serve no page-in, which own constraints may ask for,
are noted beside them. Whoever reads a tensor gets it from its latest restoration, its first
computation if there is no other, and it stays in RAM from a restoration to the last reader that the
restoration serves. So every partial schedule keeps the rules of execution; only limits can be
broken, and RAM is known for every step at any moment, because a change touches a few tensors only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from poetmodel.problem import Coefficients
from poetmodel.schedule import GraphIdentity, Schedule, paged_at_once, rows_of_spans
from poetmodel.time_limit import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from poetmodel.graph import Graph
    from poetmodel.heuristics.own_rows import OwnRows


class Restoration(NamedTuple):
    """One recomputation or page-in."""

    stage: int
    item: int
    """The node that is recomputed, or the tensor that is paged in."""
    recompute: bool

    @classmethod
    def page_out(cls, graph: Graph, i: int) -> Self:
        """Return what stands for a page-out of tensor `i` that serves no page-in.

        It is noted as a page-in in the stage of its first computation, where there can be none.
        """
        return cls(graph.node_of[i], i, recompute=False)

    def is_page_out(self, graph: Graph) -> bool:
        """Return whether it stands for a page-out alone."""
        return not self.recompute and self.stage == graph.node_of[self.item]


def restorations_of(graph: Graph, schedule: Schedule) -> list[Restoration]:
    """Return all recomputations, page-ins and page-outs without page-ins of a schedule."""
    out = {i for _, i in schedule.M_out} - {i for _, i in schedule.M_in}
    return [
        *(Restoration(t, k, recompute=True) for t, k in schedule.R if k < t),
        *(Restoration(t, i, recompute=False) for t, i in schedule.M_in),
        *(Restoration.page_out(graph, i) for i in sorted(out)),
    ]


class PartialSchedule:
    """A set of restorations with the RAM that it needs; without any it is keep-all."""

    def __init__(
        self,
        graph: Graph,
        restorations: Iterable[Restoration] = (),
        *,
        rows: OwnRows | None = None,
    ) -> None:
        self.graph = graph
        self.rows = rows
        self.used: list[float] = [] if rows is None else [0] * len(rows.limits)
        """What is used of each own row."""
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
        self.stored = [graph.nodes[k].on_aux for k in graph.node_of]
        """For each tensor whether it lies on storage from the start."""
        self.paged_out: set[int] = set()
        """Tensors that are paged out whether they are paged in or not."""
        self.written_bytes = 0
        """Bytes that page-outs take on storage [B]."""
        self.gaps: list[list[tuple[int, int]]] = [[] for _ in self.sizes]
        """For each tensor the stages ``first <= t < need`` whose rows count it though they neither
        read nor make it; `need` reads it next."""
        self._needs = [list(users) for users in graph.users_of]
        self._sources = [[k] for k in graph.node_of]
        self._own = [frozenset((k, *graph.users_of[i])) for i, k in enumerate(graph.node_of)]
        self.row_bytes: NDArray[np.int64] = np.array(graph.step_bytes, dtype=np.int64)
        """RAM at the last step of each stage, ``(t, t)`` [B]."""
        self.extra_bytes: NDArray[np.int64] = np.zeros(n, dtype=np.int64)
        """What the highest step of a stage needs beyond that, as `peaks` last found it [B]."""
        self._dirty: set[int] = set()
        self._log: list[tuple[Restoration, bool]] = []
        for restoration in restorations:
            check_time_limit()
            if restoration not in self:
                self._enter(restoration, adding=True)
        for i in range(len(self.sizes)):
            check_time_limit()
            self._count(i)

    @classmethod
    def of(cls, graph: Graph, schedule: Schedule, wanted: Coefficients | None = None) -> Self:
        """Return what a valid schedule brings back, less what serves nothing and is not wanted.

        The result is valid too, with no more energy, time, writes or RAM at any step. `wanted` is
        that of a problem with constraints or an objective of its own, where it has such.

        Goes backwards from the last stage, so that what serves only something useless is useless
        too. A recomputation also goes if all that it serves is in RAM as its stage begins.
        """
        partial = cls(graph, restorations_of(graph, schedule))
        wants = Coefficients((), (), ()) if wanted is None else wanted
        for i in sorted({i for _, i in schedule.M_out}):
            partial._settle_page_out(i, wanted=any(wants.page_out[i : i + 1]))
        kept = schedule.S_RAM

        def is_kept(i: int, t: int) -> bool:
            place = bisect_left(kept, (t, i))
            return kept[place : place + 1] == ((t, i),)

        for t in range(len(graph.nodes) - 1, -1, -1):
            for k in sorted(partial.recomputed[t], reverse=True):
                served = partial._served(k, t)
                if not any(wants.compute[k : k + 1]) and all(is_kept(i, t) for i in served):
                    partial.drop(Restoration(t, k, recompute=True))
            for i in sorted(partial.paged_in[t]):
                restoration = Restoration(t, i, recompute=False)
                if not any(wants.page_in[i : i + 1]) and partial.is_useless(restoration):
                    partial.drop(restoration)
        partial.commit()
        return partial

    def _settle_page_out(self, i: int, *, wanted: bool) -> None:
        """Let tensor `i` be paged out for its own sake exactly where that is wanted."""
        out = Restoration.page_out(self.graph, i)
        if out in self and not wanted:
            self.drop(out)
        elif out not in self and wanted:
            self.add(out)

    # -- what it is ----------------------------------------------------------------------------

    def __contains__(self, restoration: Restoration) -> bool:
        if restoration.is_page_out(self.graph):
            return restoration.item in self.paged_out
        chosen = self.recomputed if restoration.recompute else self.paged_in
        return restoration.item in chosen[restoration.stage]

    def restorations(self) -> list[Restoration]:
        """Return all restorations, by stage, then the page-outs that are noted beside them."""
        found = [
            Restoration(t, item, again)
            for t in range(len(self.recomputed))
            for chosen, again in ((self.recomputed[t], True), (self.paged_in[t], False))
            for item in sorted(chosen)
        ]
        return found + [Restoration.page_out(self.graph, i) for i in sorted(self.paged_out)]

    def schedule(self) -> Schedule:
        """Return the schedule."""
        graph, n = self.graph, len(self.recomputed)
        held = (span for i in range(len(self.sizes)) for span in self._spans(i))
        schedule = paged_at_once(
            graph,
            R=((*sorted(nodes), t) for t, nodes in enumerate(self.recomputed)),
            S_RAM=rows_of_spans(held, n),
            M_in=map(sorted, self.paged_in),
            identity=GraphIdentity.of(graph),
        )
        if not self.paged_out:
            return schedule
        out = {(graph.node_of[i], i) for i in self.paged_out}
        return replace(schedule, M_out=tuple(sorted(out.union(schedule.M_out))))

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
        """Return whether stage `t` begins with tensor `i` in RAM."""
        sources = self._sources[i]
        before = bisect_left(sources, t)
        return before > 0 and self._next_is_need(i, t, before)

    def serves(self, i: int, t: int) -> bool:
        """Return whether tensor `i`, made or brought back in stage `t`, is read from there."""
        return self._next_is_need(i, t, bisect_right(self._sources[i], t))

    def is_available(self, i: int, t: int) -> bool:
        """Return whether a step of stage `t` may read tensor `i` with nothing changed."""
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

    def source(self, i: int, t: int) -> Restoration | None:
        """Return what brought back tensor `i` of stage `t`; None for its first computation."""
        stage = self._sources[i][bisect_right(self._sources[i], t) - 1]
        k = self.graph.node_of[i]
        if i in self.paged_in[stage]:
            return Restoration(stage, i, recompute=False)
        return Restoration(stage, k, recompute=True) if k in self.recomputed[stage] else None

    # -- changes ---------------------------------------------------------------------------------

    def add(self, restoration: Restoration) -> None:
        """Add a restoration that is not there."""
        check_time_limit()
        self._change(restoration, adding=True)
        self._log.append((restoration, True))

    def drop(self, restoration: Restoration) -> None:
        """Take a restoration away; what served only it stays."""
        self._change(restoration, adding=False)
        self._log.append((restoration, False))

    def remove(self, restoration: Restoration) -> None:
        """Take a restoration away, and those that served only it."""
        self.drop(restoration)
        for i in self.graph.inputs_of[restoration.item] if restoration.recompute else ():
            source = self.source(i, restoration.stage)
            if source is not None and self.is_useless(source):
                self.remove(source)

    def is_useless(self, restoration: Restoration) -> bool:
        """Return whether a restoration serves no reader."""
        t, item, recompute = restoration
        if recompute:
            return not self._served(item, t)
        if restoration.is_page_out(self.graph):
            return True
        return self.graph.node_of[item] in self.recomputed[t] or not self.serves(item, t)

    def _served(self, k: int, t: int) -> list[int]:
        """Return the outputs of node `k` that are read from its recomputation in stage `t`."""
        outputs, paged_in = self.graph.outputs_of[k], self.paged_in[t]
        return [i for i in outputs if i not in paged_in and self.serves(i, t)]

    def mark(self) -> int:
        """Return where the partial schedule stands, for `undo`."""
        return len(self._log)

    def undo(self, mark: int) -> None:
        """Take back all changes since a mark."""
        while len(self._log) > mark:
            restoration, added = self._log.pop()
            self._change(restoration, adding=not added)

    def commit(self) -> None:
        """Forget how the partial schedule came about: marks before this one are void."""
        self._log.clear()

    def _change(self, restoration: Restoration, *, adding: bool) -> None:
        for i in self._enter(restoration, adding=adding):
            self._count(i)

    def _enter(self, restoration: Restoration, *, adding: bool) -> tuple[int, ...]:
        """Enter a restoration, or take it out; return the tensors whose `gaps` may change."""
        t, item, again = restoration
        graph = self.graph
        if not again and self._enter_transfer(restoration, adding=adding):
            return ()
        if again and self.rows is not None:
            self.rows.count(self, self.rows.compute[item], 1 if adding else -1)
        supplied = graph.outputs_of[item] if again else (item,)
        read = graph.inputs_of[item] if again else ()
        chosen = (self.recomputed if again else self.paged_in)[t]
        if adding:
            chosen.add(item)
            for i in supplied:
                insort(self._sources[i], t)
            for i in read:
                insort(self._needs[i], t)
        else:
            chosen.remove(item)
            for i in supplied:
                self._sources[i].remove(t)
            for i in read:
                self._needs[i].remove(t)
        self._dirty.update((t - 1, t))
        return (*supplied, *read)

    def _enter_transfer(self, restoration: Restoration, *, adding: bool) -> bool:
        """Count a page-in or page-out; return whether it is no more than a page-out."""
        i, rows, change = restoration.item, self.rows, 1 if adding else -1
        alone = restoration.is_page_out(self.graph)
        before = self.goes_out(i)
        if alone:
            (self.paged_out.add if adding else self.paged_out.remove)(i)
        else:
            self.page_ins[i] += change
            if rows is not None:
                rows.count(self, rows.page_in[i], change)
        moved = self.goes_out(i) - before
        self.written_bytes += 0 if self.stored[i] else moved * self.sizes[i]
        if moved and rows is not None:
            rows.count(self, rows.page_out[i], moved)
        return alone

    def goes_out(self, i: int) -> bool:
        """Return whether tensor `i` is paged out."""
        return i in self.paged_out or (self.page_ins[i] > 0 and not self.stored[i])

    def changes_page_out(self, restoration: Restoration, *, adding: bool) -> bool:
        """Return whether adding, or dropping, a page-in or page-out makes its tensor go out or not.

        Dropped is what is there, added what is not.
        """
        i, alone = restoration.item, restoration.is_page_out(self.graph)
        if adding:
            return (alone or not self.stored[i]) and not self.goes_out(i)
        if alone:
            return self.stored[i] or not self.page_ins[i]
        return self.page_ins[i] == 1 and not self.stored[i] and i not in self.paged_out

    def _gaps_now(self, i: int) -> list[tuple[int, int]]:
        """Return what `gaps` should hold for tensor `i`: needs and sources in one pass."""
        sources, own = self._sources[i], self._own[i]
        gaps = []
        previous = -1
        supplied = following = sources[0]
        place, count, never = 0, len(sources), len(self.recomputed)
        for need in self._needs[i]:
            if need == previous:
                continue
            while following <= need:
                supplied = following
                place += 1
                following = sources[place] if place < count else never
            if supplied != need:
                last = previous if previous > supplied else supplied
                first = last + 1 if last in own else last
                if first < need:
                    gaps.append((first, need))
            previous = need
        return gaps

    def _count(self, i: int) -> None:
        """Bring the rows that count tensor `i` up to date."""
        before, gaps = self.gaps[i], self._gaps_now(i)
        if gaps == before:
            return
        size, rows, dirty = self.sizes[i], self.row_bytes, self._dirty
        for gap in before:
            if gap not in gaps:
                first, need = gap
                rows[first:need] -= size
                dirty.update((first - 1, first, need))
        for gap in gaps:
            if gap not in before:
                first, need = gap
                rows[first:need] += size
                dirty.update((first - 1, first, need))
        self.gaps[i] = gaps

    # -- RAM -------------------------------------------------------------------------------------

    def peaks(self) -> NDArray[np.int64]:
        """Return the highest RAM use in each stage [B]."""
        for t in self._dirty - {-1}:
            check_time_limit()
            highest = self._highest_step(t) if self.recomputed[t] or self.paged_in[t] else 0
            self.extra_bytes[t] = max(0, highest - int(self.row_bytes[t]))
        self._dirty.clear()
        return self.row_bytes + self.extra_bytes

    def fits(self, limit_bytes: int) -> bool:
        """Return whether every step keeps within a limit."""
        if int(self.row_bytes.max()) > limit_bytes:
            return False
        return int(self.peaks().max()) <= limit_bytes

    def _highest_step(self, t: int) -> int:
        """Return the highest RAM use in stage `t`, simulated as the verifier does [B]."""
        graph, sizes = self.graph, self.sizes
        recomputed, paged_in = self.recomputed[t], self.paged_in[t]
        page: dict[int, list[int]] = {}
        for i in paged_in:
            page.setdefault(graph.node_of[i], []).append(i)
        steps = sorted({*recomputed, *page, t})
        freed = self._freed_bytes(t, steps, page)
        ram = highest = self._begin_bytes(t)
        for k in steps:
            if k in page:
                ram += sum(sizes[i] for i in page[k])
                highest = max(highest, ram)
            if k == t or k in recomputed:
                made = graph.output_bytes[k]
                highest = max(highest, ram + made + graph.nodes[k].workspace_bytes)
                ram += made - sum(sizes[i] for i in page.get(k, ()))
            ram -= freed.get(k, 0)
        return highest

    def _freed_bytes(self, t: int, steps: list[int], page: dict[int, list[int]]) -> dict[int, int]:
        """Return the bytes that are freed after each step of stage `t`."""
        graph, recomputed = self.graph, self.recomputed[t]
        last: dict[int, int] = {}
        for k in steps:
            if k == t or k in recomputed:
                last |= dict.fromkeys((*graph.inputs_of[k], *graph.outputs_of[k]), k)
            last |= dict.fromkeys(page.get(k, ()), k)
        freed: dict[int, int] = {}
        for i, k in last.items():
            if not self.enters(i, t + 1):
                freed[k] = freed.get(k, 0) + self.sizes[i]
        return freed

    def _begin_bytes(self, t: int) -> int:
        """Return the bytes in RAM when stage `t` begins."""
        if t == 0:
            return 0
        own = {*self.graph.inputs_of[t - 1], *self.graph.outputs_of[t - 1]}
        crossing = int(self.row_bytes[t - 1]) - self.graph.step_bytes[t - 1]
        return crossing + sum(self.sizes[i] for i in own if self.enters(i, t))
