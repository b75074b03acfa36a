"""The RAM of a schedule: which stages compute, restore and read each tensor, and what that takes.

A step reads a tensor from its latest restoration, or from its first computation. The tensor stays
in RAM from a restoration to the last reader before the next one. RAM changes with the *links* of
tensors. A link starts at the last stage that has a tensor in RAM because the stage computes,
restores or reads it. It ends at the next stage that reads the tensor without a restoration. A
restoration changes at most three links of each tensor that it supplies or reads; a home changes all
links of the state. The RAM rows (last steps of stages) that count a link are updated with each
change. The other steps of a stage are evaluated when its peak is read, if its restorations or the
links that start there have changed since.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np

from poetmodel.clock import check_time_limit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from poetmodel.graph import Graph


class RamLedger:
    """The RAM of keep-all with recomputations, page-ins and homes of state.

    A resident state tensor is like one computed before the first stage and read after the last.
    Methods that compute peaks raise `TimeLimitError` after the calling context's time limit.
    """

    def __init__(self, graph: Graph, working_graph: Graph) -> None:
        self.graph, self.working_graph = graph, working_graph
        self.sizes = graph.tensor_bytes
        n_stages = len(graph.nodes)
        self.recomputed: list[set[int]] = [set() for _ in range(n_stages)]
        """For each stage, the recomputed nodes."""
        self.paged_in: list[set[int]] = [set() for _ in range(n_stages)]
        """For each stage, the paged-in tensors."""
        self.resident = set(graph.state_tensors)
        """State whose home is RAM."""
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
        self._touched_tensors: dict[int, dict[int, int]] = {}
        """Results of `_find_touched_tensors`, so far."""
        self._peak_changes: list[tuple[int, int]] = []
        """Stages with their previous `_extra_bytes`; -1 if the stage became stale."""
        self._counts_links = False
        """Whether changes update the links and rows; False until `count_links`."""

    def count_links(self) -> None:
        """Count the links (last use to next read) of all tensors once; changes then update them."""
        self._counts_links = True
        changes = [0] * (len(self.recomputed) + 1)
        """For each stage, the bytes of the links that begin there, less those that end."""
        for i, size in enumerate(self.sizes):
            check_time_limit()
            always_counting, intervals = self._always_counting[i], self.intervals[i]
            overwritable_bytes = self._overwritable_bytes.get(i, {})
            for last, need in self._links(i):
                first = last + 1 if last in always_counting else last
                if first < need:
                    changes[first] += size
                    changes[need] -= size
                    intervals.append((first, need))
                    if first in overwritable_bytes:
                        saved_bytes = overwritable_bytes[first] - size
                        changes[first] += saved_bytes
                        changes[first + 1] -= saved_bytes
                if last >= 0:
                    self._links_from[last].add(i)
        self.row_bytes += np.cumsum(changes[:-1], dtype=np.int64)
        for t, (nodes, tensors) in enumerate(zip(self.recomputed, self.paged_in, strict=True)):
            if nodes or tensors:
                self._mark_stale(t)

    # -- tensors in RAM --------------------------------------------------------------------------

    def _spans(self, i: int) -> Iterator[tuple[int, int, int]]:
        """Yield (i, first, last): tensor `i` is in RAM when stages first..last begin."""
        needs, sources = self._needs[i], self._sources[i]
        for a, source in enumerate(sources):
            end = sources[a + 1] if a + 1 < len(sources) else len(self.recomputed)
            n_served_needs = bisect_left(needs, end)
            if n_served_needs:
                yield i, source + 1, needs[n_served_needs - 1]

    def is_read_from(self, i: int, t: int) -> bool:
        """Return whether a step of stage `t` or later reads tensor `i` from its source in `t`."""
        return self._next_is_need(i, t, bisect_right(self._sources[i], t))

    def is_available(self, i: int, t: int) -> bool:
        """Return whether a step of stage `t` can read tensor `i` without any change."""
        sources = self._sources[i]
        n_sources_before = bisect_right(sources, t)
        return sources[n_sources_before - 1] == t or self._next_is_need(i, t, n_sources_before)

    def _next_is_need(self, i: int, t: int, next_source_index: int) -> bool:
        """Return whether stage `t` or a later one reads `i` before its next source's stage."""
        needs, sources = self._needs[i], self._sources[i]
        position = bisect_left(needs, t)
        if position == len(needs):
            return False
        return next_source_index == len(sources) or needs[position] < sources[next_source_index]

    def first_keeping_stage(self, i: int, t: int) -> int:
        """Return the first stage whose RAM row counts tensor `i` only if it is kept for stage `t`.

        That is the last earlier stage that computes, restores or reads it, or the next one if the
        row of that stage counts it anyway. A *row* is the RAM use at the last step of a stage.
        """
        sources, needs = self._sources[i], self._needs[i]
        last = sources[bisect_left(sources, t) - 1]
        need = bisect_left(needs, t)
        if need:
            last = max(last, needs[need - 1])
        return last + (last in self._always_counting[i])

    def sources_and_needs(self, i: int) -> tuple[Sequence[int], Sequence[int]]:
        """Return the stages that compute or restore tensor `i`, and those that read it, ascending.

        Not copies; stages may repeat. Resident state: source -1, last need the number of stages.
        """
        return self._sources[i], self._needs[i]

    def first_counting_stage(self, i: int, last: int) -> tuple[int, int | None]:
        """Return the first stage whose RAM row counts tensor `i` only if kept from stage `last`.

        The second value is None if this row (RAM at the last step) counts the whole tensor, else
        the bytes that the stage's node would save by overwriting the tensor, which the row counts
        [B].
        """
        first = last + (last in self._always_counting[i])
        saved_bytes_by_stage = self._overwritable_bytes.get(i)
        return first, None if saved_bytes_by_stage is None else saved_bytes_by_stage.get(first)

    def row_bytes_with(self, i: int, t: int) -> int:
        """Return the highest row before stage `t` if tensor `i` were also kept for `t` [B].

        The tensor must not be kept yet. Rows (RAM at the last step) from `first_keeping_stage` to
        ``t - 1`` count; 0 without one.
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

        The home of the state must be on storage. Stages between two readers are not checked. A
        *row* is the RAM use at the last step of a stage; 0 without one.
        """
        k, needs = self.graph.node_of[i], self._needs[i]
        last_need = needs[-1] if needs else k - (k not in self._always_counting[i])
        row_bytes = np.concatenate((self.row_bytes[:k], self.row_bytes[last_need + 1 :]))
        return int(row_bytes.max()) + self.sizes[i] if row_bytes.size else 0

    def tensors_kept_across(self, stage: int) -> list[tuple[int, int, int]]:
        """Return (tensor, first, need) for each of `intervals` with ``first <= stage < need``."""
        sizes = self.sizes
        return [
            (i, *interval)
            for i, intervals in enumerate(self.intervals)
            for interval in intervals
            if interval[0] <= stage < interval[1] and sizes[i]
        ]

    # -- changes ---------------------------------------------------------------------------------

    def change_step(self, t: int, item: int, *, is_recomputation: bool, is_added: bool) -> None:
        """Add or remove, in stage `t`, a recomputation of node or page-in of tensor `item`."""
        graph = self.working_graph
        items = (self.recomputed if is_recomputation else self.paged_in)[t]
        if is_added:
            items.add(item)
        else:
            items.remove(item)
        if self._counts_links:
            self._mark_stale(t)
        for i in graph.outputs_of[item] if is_recomputation else (item,):
            self._change_source(i, t, is_added=is_added)
        for i in graph.inputs_of[item] if is_recomputation else ():
            self._change_need(i, t, is_added=is_added)

    def change_home(self, i: int, *, to_storage: bool) -> None:
        """Move the home of state `i` to storage or to RAM."""
        k, n_stages = self.graph.node_of[i], len(self.recomputed)
        sources, needs = self._sources[i], self._needs[i]
        fixed_needs = (k, n_stages) if k in self._always_counting[i] else (n_stages,)
        if self._counts_links:
            self._count_all_links(i, -1)
        sources.remove(-1 if to_storage else k)
        insort(sources, k if to_storage else -1)
        for need in fixed_needs:
            if to_storage:
                needs.remove(need)
            else:
                insort(needs, need)
        (self.resident.remove if to_storage else self.resident.add)(i)
        if self._counts_links:
            self._count_all_links(i, 1)
            self._mark_stale(k)

    def _undo_peaks(self, n_changes: int) -> None:
        """Undo logged changes of `_extra_bytes` and stale stages until `n_changes` are left."""
        while len(self._peak_changes) > n_changes:
            t, previous_extra_bytes = self._peak_changes.pop()
            if previous_extra_bytes < 0:
                self._stale_stages.remove(t)
            else:
                self._stale_stages.add(t)
                self._extra_bytes[t] = previous_extra_bytes

    def _links(self, i: int) -> Iterator[tuple[int, int]]:
        """Yield the links of tensor `i` as (start, need), ascending.

        Stage `need` reads the tensor, but does not compute or restore it; `start` is the last
        earlier stage that uses it. Resident state begins at -1 and ends at the number of stages.
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
        """Add or remove stage `t` as a source (computation or restoration) of `i`; update links.

        A source replaces the link that ends at `t`; the next link then starts at `t`. No link
        changes if the stage has another source, or no step reads from this one.
        """
        sources, needs = self._sources[i], self._needs[i]
        position = bisect_left(sources, t)
        if is_added:
            sources.insert(position, t)
        else:
            del sources[position]
        next_position = position + is_added
        if not self._counts_links or (next_position < len(sources) and sources[next_position] == t):
            return  # the stage may have another source of the tensor
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
        """Add or remove a step of stage `t` that reads tensor `i`; update the tensor's links."""
        sources, needs = self._sources[i], self._needs[i]
        position = bisect_left(needs, t)
        if is_added:
            needs.insert(position, t)
        else:
            del needs[position]
        next_position = position + is_added
        if not self._counts_links or (next_position < len(needs) and needs[next_position] == t):
            return  # another step of the stage may read it
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

        Updates `row_bytes`, `intervals` and `_links_from`; the peak of `last` becomes stale. If
        node `last` could overwrite the tensor, its row counts only the bytes that overwriting
        saves.
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

        Updates `row_bytes`, `intervals` and `_links_from`; the peak of `t` becomes stale. Row `t`
        counts inputs of its node anyway, so it no longer counts the bytes of keeping the tensor.
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
        """Mark the peak of stage `t` as stale, and log this for `undo`.

        Without restorations a stage has no step above its last one.
        """
        has_steps = self.recomputed[t] or self.paged_in[t] or self._extra_bytes[t]
        if has_steps and t not in self._stale_stages:
            self._stale_stages.add(t)
            self._peak_changes.append((t, -1))

    # -- RAM -------------------------------------------------------------------------------------

    @property
    def extra_bytes(self) -> NDArray[np.int64]:
        """Excess of each stage's highest step over its last step [B]; not a copy."""
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
        """Compute `_extra_bytes` of stage `t`, logged for `undo`; leaves it in `_stale_stages`."""
        check_time_limit()
        self._peak_changes.append((t, int(self._extra_bytes[t])))
        bytes_at_steps, last_bytes = self._step_bytes(t)
        self._extra_bytes[t] = max(bytes_at_steps.values()) - last_bytes

    def highest_step(self, t: int) -> int:
        """Return the node of the first of the highest steps of stage `t`."""
        bytes_at_steps, _ = self._step_bytes(t)
        return max(bytes_at_steps, key=bytes_at_steps.__getitem__)

    def _step_bytes(self, t: int) -> tuple[dict[int, int], int]:
        """Return RAM above the stage's begin [B]: by step with an action, and that of step `t`."""
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
                last_reads.update(self._find_touched_tensors(k))
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

    def _find_touched_tensors(self, k: int) -> dict[int, int]:
        """Return a mapping from the tensors that node `k` reads and computes to `k`."""
        tensors = self._touched_tensors.get(k)
        if tensors is None:
            graph = self.working_graph
            tensors = dict.fromkeys((*graph.inputs_of[k], *graph.outputs_of[k]), k)
            self._touched_tensors[k] = tensors
        return tensors

    def fits(self, limit_bytes: int) -> bool:
        """Return whether the RAM use of every step is within a limit."""
        return self.find_excess(limit_bytes) is None

    def find_excess(self, limit_bytes: int) -> tuple[int, int] | None:
        """Return (stage, RAM use [B]) of any stage above a limit; None if no stage is above it."""
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
