"""Recompute-memory cuts: a recomputation must fit beside what stays in RAM meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import eq
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from poetmodel.clock import check_time_limit
from poetmodel.solver.lazy.cuts import PRESENT, Cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from poetmodel.solver.lazy.params import LazyParams
    from poetmodel.solver.lazy.relaxation import Relaxation


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeMemoryOrigin:
    """A recompute-memory cut in terms of the graph: the stages of a group, and its `node`."""

    first_stage: int
    last_stage: int
    node: int
    output: int | None
    """An output of it that bounds when that happens, by its first direct reader."""
    tensors: tuple[int, ...]
    """The tensors that stay meanwhile."""


class _Stay(NamedTuple):
    """Columns for a group's first tensors that stay in RAM."""

    leaves: int | None
    """Column of keeping it beyond the group; None where a stage of the group reads it."""
    returns: tuple[int, ...]
    """Columns of bringing it back in the group: if none does, it has been there all the time."""


def separator(
    relaxation: Relaxation, params: LazyParams, _: Callable[[], bool]
) -> RecomputeMemorySeparator | None:
    """Return the separator of this family for a relaxation, if that is restoring."""
    restoring = relaxation.model.restoring
    return RecomputeMemorySeparator(relaxation, params.cuts_per_round) if restoring else None


class RecomputeMemorySeparator:
    """At most `most` recompute-memory cuts for a point of a relaxation with ``restoring=True``.

    Notes
    -----
    Let node `k` be recomputed in group `l`, at a stage that nobody knows. Inputs, outputs and
    workspace of `k` are in RAM then, and so is every other tensor from before `l` that leaves the
    group and does not come back in it::

        sum(bytes[i] * (kept[i beyond l] - recomputed[l,node(i)] - paged_in[l,i]))
        + need(k) * recomputed[l,k]  <=  budget

    Tensors that the last stage of the group reads stay as well, with 1 for ``kept``. If an output
    of `k` neither enters the group nor is paged in, it is recomputed at its first direct reader `u`
    or before; then all count that `u` or a later stage of the group reads::

        ... + need(k) * (recomputed[l,k] - kept[v into l] - paged_in[l,v])  <=  budget

    The sum may be over any of these tensors. Without the recomputation they fit beside what the
    stage rows at the ends of the groups count besides, so the row is stated with that as its right
    side and a coefficient of `recomputed` that makes up for it.
    """

    family: ClassVar[str] = "recompute_memory"
    lasting: ClassVar[bool] = True

    def __init__(self, relaxation: Relaxation, most: int) -> None:
        self.relaxation = relaxation
        self.most = most
        self.graph = relaxation.problem.working_graph
        self.budget = int(relaxation.problem.usable_ram_bytes)
        self.sizes = self.graph.tensor_bytes
        grouping = relaxation.grouping
        n_groups = grouping.n_groups
        self.entering: list[dict[int, int]] = [{} for _ in range(n_groups)]
        """For each group the columns of tensors that may enter it and may as well not."""
        self.leaving: list[dict[int, _Stay]] = [{} for _ in range(n_groups)]
        self.read: list[dict[int, tuple[int, _Stay]]] = [{} for _ in range(n_groups)]
        """For each group the tensors that its stages read, with the last that does."""
        self.first_reader: dict[tuple[int, int], int] = {}
        """First stage of a group that reads a tensor, by (group, tensor)."""
        self.ends = [self._end(group) for group in range(n_groups)]
        for i in range(len(self.graph.tensors)):
            check_time_limit()
            if self.sizes[i] and relaxation.events.events[i]:
                self._add_tensor(i)

    def _end(self, group: int) -> tuple[int, frozenset[int]] | None:
        """Return the rest of the stage row at a group's end, and the group's own tensors."""
        q = self.relaxation.grouping.last_stage[group]
        if q not in self.relaxation.grouping.stage_rows:
            return None
        return self.budget - self.graph.step_bytes[q], self._own(q)

    def _own(self, k: int) -> frozenset[int]:
        """Return the tensors that the step of a node needs."""
        return frozenset((*self.graph.inputs_of[k], *self.graph.outputs_of[k]))

    def _add_tensor(self, i: int) -> None:
        relaxation, events = self.relaxation, self.relaxation.events
        sure = relaxation.events.kept
        k = self.graph.node_of[i]
        first = events.group_of[k]
        last: dict[int, int] = {}
        for j in self.graph.users_of[i]:
            group = events.group_of[j]
            self.first_reader.setdefault((group, i), j)
            last[group] = j
        again = frozenset(events.recompute[k])
        for group in range(first + 1, events.events[i][-1] + 1):
            if relaxation.model.recomputable[k] and group not in again:
                continue  # its recomputation is left out, for it may enter at no cost: likewise
            enters = events.segment(i, first, group)
            if enters is None or (i, enters) in sure:
                continue  # a free keep: whether it is in RAM is left open
            column = relaxation.kept.get((i, enters))
            if column is not None:
                self.entering[group][i] = column
            ways = (relaxation.recomputed.get((group, k)), relaxation.paged_in.get((group, i)))
            returns = tuple(way for way in ways if way is not None)
            if group in last:
                self.read[group][i] = (last[group], _Stay(None, returns))
            leaves = events.segment(i, first, group + 1)
            if leaves is None or (i, leaves) in sure:
                continue
            column = relaxation.kept.get((i, leaves))
            if column is not None:
                self.leaving[group][i] = _Stay(column, returns)

    # -- separation ----------------------------------------------------------------------------

    def separate(self, x: NDArray[Any], least: float) -> list[Cut]:
        """Return the cuts that a point violates by more than `least`, the most violated first.

        With each come those that the point would violate if it recomputed the node elsewhere.
        """
        point = _StayPoint(self, x)
        entries: list[tuple[float, Cut]] = []
        columns = self.relaxation.recomputed
        wanted = {}
        for (group, k), column in columns.items():
            if x[column] <= PRESENT:
                continue
            entry = self._worst(point, group, k, 0.0, least)
            if entry is not None:
                entries.append(entry)
                wanted[k] = float(x[column])
        for (group, k), column in columns.items():
            if k in wanted and x[column] <= PRESENT:
                entry = self._worst(point, group, k, wanted[k], least)
                if entry is not None:
                    entries.append(entry)
        entries.sort(key=lambda entry: -entry[0])
        return [cut for _, cut in entries[: self.most]]

    def _worst(
        self, point: _StayPoint, group: int, k: int, more: float, least: float
    ) -> tuple[float, Cut] | None:
        """Return the most violated cut of a recomputation, with `more` of it than at the point."""
        check_time_limit()
        best = None
        column = self.relaxation.recomputed[group, k]
        for output in (None, *self.graph.outputs_of[k]):
            stays = point.stays(group, self._until(group, output))
            if stays is None:
                continue
            cut = self._cut(group, k, output, stays)
            if cut is None:
                continue
            violation = cut.violation(point.x) - more * cut.value(partial(eq, column))
            if violation > least and (best is None or violation > best[0]):
                best = (violation, cut)
        return best

    def _until(self, group: int, output: int | None) -> int | None:
        """Return the stage up to which the recomputation happens; None where nobody knows."""
        if output is None:
            return self.relaxation.grouping.last_stage[group]
        if output not in self.entering[group]:
            return None
        return self.first_reader.get((group, output))

    def stays(self, group: int, until: int) -> dict[int, _Stay]:
        """Return the bytes that stay in RAM from the beginning of a group up to a stage of it."""
        stays = dict(self.leaving[group])
        for i, (stage, stay) in self.read[group].items():
            if stage >= until:
                stays[i] = stay
        return stays

    # -- rows ----------------------------------------------------------------------------------

    def restate(self, cut: Cut) -> Iterator[Cut]:
        """Yield a cut of a coarser relaxation for each group that its group has become."""
        origin: RecomputeMemoryOrigin = cut.origin
        group_of = self.relaxation.grouping.group_of
        for group in range(group_of[origin.first_stage], group_of[origin.last_stage] + 1):
            until = self._until(group, origin.output)
            if until is None or (group, origin.node) not in self.relaxation.recomputed:
                continue
            stays = self.stays(group, until)
            chosen = {i: stays[i] for i in origin.tensors if i in stays}
            stated = self._cut(group, origin.node, origin.output, chosen)
            if stated is not None:
                yield stated

    def _cut(
        self, group: int, k: int, output: int | None, stays: Mapping[int, _Stay]
    ) -> Cut | None:
        relaxation = self.relaxation
        own = self._own(k)
        chosen = {i: stay for i, stay in stays.items() if i not in own}
        available = self._available(group, chosen, at_end=output is None)
        excess = available - (self.budget - self.graph.step_bytes[k])
        if excess <= 0:
            return None  # whatever fits without the recomputation fits beside it
        scale = self.budget
        terms = {relaxation.recomputed[group, k]: -excess / scale}
        if output is not None:
            for column in (
                self.entering[group].get(output),
                relaxation.paged_in.get((group, output)),
            ):
                if column is not None:
                    terms[column] = terms.get(column, 0.0) + excess / scale
        limit = available
        for i, stay in chosen.items():
            size = self.sizes[i]
            if stay.leaves is None:
                limit -= size
            else:
                terms[stay.leaves] = terms.get(stay.leaves, 0.0) - size / scale
            for column in stay.returns:
                terms[column] = terms.get(column, 0.0) + size / scale
        grouping = relaxation.grouping
        origin = RecomputeMemoryOrigin(
            first_stage=grouping.first_stage[group],
            last_stage=grouping.last_stage[group],
            node=k,
            output=output,
            tensors=tuple(sorted(chosen)),
        )
        pairs = ((value, column) for column, value in sorted(terms.items()))
        return Cut.of(pairs, lower=-limit / scale, name=self.family, origin=origin)

    def _available(self, group: int, chosen: Mapping[int, _Stay], *, at_end: bool) -> int:
        """Return the bytes of these tensors that fit if nothing is recomputed.

        All of them cross the end of the group before; at this group's end are those that leave it,
        and what its last stage reads.
        """
        available = self.budget
        before = self.ends[group - 1]
        if before is not None:
            available = min(available, before[0] + self._bytes(i for i in chosen if i in before[1]))
        here = self.ends[group]
        if at_end and here is not None:
            counted = (i for i, stay in chosen.items() if i in here[1] or stay.leaves is None)
            available = min(available, here[0] + self._bytes(counted))
        return available

    def _bytes(self, tensors: Iterable[int]) -> int:
        return sum(self.sizes[i] for i in tensors)


class _StayPoint:
    """Tensors that stay in RAM at a point."""

    def __init__(self, separator: RecomputeMemorySeparator, x: NDArray[Any]) -> None:
        self.separator = separator
        self.x = x
        self._known: dict[tuple[int, int], dict[int, _Stay]] = {}

    def stays(self, group: int, until: int | None) -> dict[int, _Stay] | None:
        """Return the tensors that stay up to a stage of a group; None where the stage is."""
        if until is None:
            return None
        if (group, until) not in self._known:
            self._known[group, until] = {
                i: stay
                for i, stay in self.separator.stays(group, until).items()
                if self._share(stay) > PRESENT
            }
        return self._known[group, until]

    def _share(self, stay: _Stay) -> float:
        share = 1.0 if stay.leaves is None else float(self.x[stay.leaves])
        return share - sum(float(self.x[column]) for column in stay.returns)
