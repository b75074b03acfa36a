"""The best schedule of a small problem by exhaustive search, from the rules of execution alone.

It shares no code with simulator, formulations and planner. Best-first search over the steps
``(t, k)`` of the stages: a state is the next step, the tensors in RAM and the tensors on storage;
at a step the search tries every combination of computing, paging in and out and letting go.

Why this covers every schedule. A tensor goes after its last use in a stage (or after its own step,
where nothing in the stage uses it) unless the next stage begins with it. So at step ``k`` only the
tensors of node ``k`` and, if ``k`` is computed, its inputs can go; letting one go or holding it, at
each such step, is a choice of ``S_RAM`` of the next stage together with the later uses. Held to no
use, it is in the next ``S_RAM``. Tensors whose step lies ahead stay.

What is left out, none of which can be better (only costs, times, bytes written and RAM in use of a
schedule shrink, and nothing else changes, when it is struck out):

1. paging out what is on storage already;
2. paging a tensor in at a step that computes it anew;
3. tensors that no step still ahead may read (``useful``): holding, paging or recomputing them;
4. dropping an entry of ``S_AUX``: storage keeps what it has, so all of it is always listed.

A label that is no better than an earlier one in any quantity that is minimized or limited, at the
same state, is dropped too: whatever follows the one may follow the other.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, NamedTuple

from poetmodel.schedule import Schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from poetmodel.problem import Problem

TOLERANCE = 1e-9


class Optimum(NamedTuple):
    """The least value of the minimized quantity, and a schedule that has it."""

    value: float
    """Energy [J], time [s], peak RAM or bytes written [B], with what every schedule pays."""
    schedule: Schedule
    """One of the best."""


class _Move(NamedTuple):
    """What one step does, and the state after it."""

    computes: bool
    paged_in: int
    paged_out: int
    ram: int
    aux: int
    peak_bytes: int


class _Quantity(NamedTuple):
    """One summed quantity: what every schedule pays, and what each choice adds."""

    base: float
    compute: list[float]
    page_in: list[float]
    page_out: list[float]


def optimum(problem: Problem, minimize: str | None = None) -> Optimum | None:
    """Find the best schedule of a problem, or show that there is none.

    Parameters
    ----------
    problem : Problem
        At most about six nodes; the number of states grows as ``4 ** tensors``.
    minimize : {'energy', 'time', 'ram', 'writes'}, optional
        What to minimize in place of the problem's own quantity; its limits stay.

    Returns
    -------
    Optimum or None
        None where no schedule keeps the limits.

    Raises
    ------
    ValueError
        For the meaning ``overlap`` with a deadline or idle power: that takes a plan of transfers.
    """
    name = str(minimize or problem.minimize)
    search = _Search(problem, name)
    return search.least_ram() if name == "ram" else search.run()


class _Search:
    """The tables of one search; tensors are bits."""

    def __init__(self, problem: Problem, minimize: str) -> None:
        graph, table = problem.graph, problem.table
        self.n = len(graph.nodes)
        self.budget = problem.usable_ram_bytes
        self.bytes = [tensor.bytes for node in graph.nodes for tensor in node.outputs]
        maker = {tensor.name: k for k, node in enumerate(graph.nodes) for tensor in node.outputs}
        number = {name: i for i, name in enumerate(maker)}
        self.inputs = [sum(1 << number[name] for name in set(v.inputs)) for v in graph.nodes]
        self.outputs = [sum(1 << number[made.name] for made in v.outputs) for v in graph.nodes]
        self.workspace = [node.workspace_bytes for node in graph.nodes]
        self.again = [problem.recompute and node.recomputable for node in graph.nodes]
        self.pages = problem.paging and table.has_storage
        self.from_start = sum(self.outputs[k] for k, node in enumerate(graph.nodes) if node.on_aux)
        self.room = problem.aux_limit_bytes
        self.steps = [(t, k) for t in range(self.n) for k in range(t + 1)]
        self.useful = self._useful()
        self.sums: dict[int, int] = {0: 0}
        self._quantities(problem, minimize)

    def _useful(self) -> list[int]:
        """Return for each step the tensors that a step after it may read to any avail."""
        after = 0
        masks = []
        for t, k in reversed(self.steps):
            masks.append(after)
            if k == t or (self.again[k] and self.outputs[k] & after):
                after |= self.inputs[k]
        return masks[::-1]

    def _quantities(self, problem: Problem, minimize: str) -> None:
        """Set what a label counts: the minimized quantity first, then the other limited ones."""
        table = problem.table
        device = problem.costs.device
        idle_w = device.idle_power_w if device is not None else 0.0
        counts = str(problem.deadline_counts)
        if counts == "overlap" and (idle_w or problem.deadline_s is not None):
            msg = "the search knows no overlap of transfers and computation"
            raise ValueError(msg)
        transfers = 0.0 if counts == "compute" else 1.0
        none = [0.0] * len(self.bytes)
        compute_s = list(table.compute_time_s)
        in_s = [transfers * value for value in table.page_in_time_s] or none
        out_s = [transfers * value for value in table.page_out_time_s] or none
        time = _Quantity(sum(compute_s), compute_s, in_s, out_s)
        energy = _Quantity(
            sum(table.compute_energy_j) + idle_w * sum(compute_s),
            [j + idle_w * s for j, s in zip(table.compute_energy_j, compute_s, strict=True)],
            [j + idle_w * s for j, s in zip(table.page_in_energy_j or none, in_s, strict=True)],
            [j + idle_w * s for j, s in zip(table.page_out_energy_j or none, out_s, strict=True)],
        )
        writes = _Quantity(0.0, [0.0] * self.n, none, [float(size) for size in self.bytes])
        none_at_all = _Quantity(0.0, [0.0] * self.n, none, none)
        by_name = {"energy": energy, "time": time, "writes": writes, "none": none_at_all}
        limits = {"time": problem.deadline_s, "energy": problem.energy_budget_j}
        limits = {name: limit for name, limit in limits.items() if limit is not None}
        first = next(iter(limits), "none") if minimize == "ram" else minimize
        names = [first, *(name for name in limits if name != first)]
        self.counted = [by_name[name] for name in names]
        self.limits = [limits.get(name) for name in names]

    def size(self, mask: int) -> int:
        """Return the bytes of a set of tensors."""
        total = self.sums.get(mask)
        if total is None:
            low = mask & -mask
            total = self.bytes[low.bit_length() - 1] + self.size(mask ^ low)
            self.sums[mask] = total
        return total

    def least_ram(self) -> Optimum | None:
        """Search for any schedule within ever less RAM, by halving what is left open."""
        low = max(
            self.size(self.inputs[k]) + self.size(self.outputs[k]) + self.workspace[k]
            for k in range(self.n)
        )
        high = self.budget
        best = None
        self.budget = high
        while low <= self.budget <= high:
            found = self.run()
            if found is None:
                if best is None:
                    return None
                low = self.budget + 1
            else:
                best = Optimum(self.peak_bytes, found.schedule)
                high = self.peak_bytes - 1
            self.budget = (low + high) // 2
        return best

    def run(self) -> Optimum | None:
        """Expand labels from the least value on; the first that is through is the best."""
        order = itertools.count()
        start = (0.0,) * len(self.counted)
        heap = [(start[0], 0, next(order), start, 0, self.from_start, -1)]
        trail: list[tuple[int, int, _Move]] = []
        seen: dict[tuple[int, int, int], list[tuple[float, ...]]] = {}
        while heap:
            _, minus_step, _, cost, ram, aux, parent = heapq.heappop(heap)
            step = -minus_step
            if step == len(self.steps):
                self.peak_bytes = max(move.peak_bytes for _, move in _path(trail, parent))
                return Optimum(self.counted[0].base + cost[0], self._schedule(trail, parent))
            if not _is_new(seen.setdefault((step, ram, aux), []), cost):
                continue
            for move in self.moves(step, ram, aux):
                total = self._pay(cost, step, move)
                if total is None:
                    continue
                trail.append((parent, step, move))
                entry = (total[0], -step - 1, next(order), total, move.ram, move.aux)
                heapq.heappush(heap, (*entry, len(trail) - 1))
        return None

    def moves(self, step: int, ram: int, aux: int) -> Iterator[_Move]:
        """Yield everything that a step may do within RAM and storage."""
        t, k = self.steps[step]
        out, useful = self.outputs[k], self.useful[step]
        wanted = k == t or (self.again[k] and bool(out & useful))
        if wanted and not self.inputs[k] & ~ram:
            peak = self.size(ram) + self.size(out) + self.workspace[k]
            if peak <= self.budget:
                touched = out | self.inputs[k]
                yield from self._leave(step, ram | out, aux, touched, (True, 0, peak))
        if k == t:
            return
        readable = out & aux & ~ram & useful if self.pages else 0
        for paged_in in _subsets(readable):
            held = ram | paged_in
            peak = self.size(held)
            if peak <= self.budget:
                yield from self._leave(step, held, aux, out, (False, paged_in, peak))

    def _leave(
        self, step: int, ram: int, aux: int, touched: int, done: tuple[bool, int, int]
    ) -> Iterator[_Move]:
        """Yield every choice of page-outs and of tensors let go at the end of a step."""
        computes, paged_in, peak = done
        useful = self.useful[step]
        idle = ram & ~useful
        if idle & ~touched:
            return  # held until now for nothing: the same without it is tried as well
        writable = self.outputs[self.steps[step][1]] & ram & ~aux & useful if self.pages else 0
        for paged_out in _subsets(writable):
            stored = aux | paged_out
            if self.room is not None and self.size(stored & ~self.from_start) > self.room:
                continue
            for gone in _subsets(ram & touched & useful):
                kept = ram & ~gone & ~idle
                yield _Move(computes, paged_in, paged_out, kept, stored, peak)

    def _pay(self, cost: tuple[float, ...], step: int, move: _Move) -> tuple[float, ...] | None:
        """Add what a move costs; None where a limit is passed."""
        t, k = self.steps[step]
        total = []
        for quantity, limit, paid in zip(self.counted, self.limits, cost, strict=True):
            more = paid
            if move.computes and k < t:
                more += quantity.compute[k]
            more += sum(quantity.page_in[i] for i in _bits(move.paged_in))
            more += sum(quantity.page_out[i] for i in _bits(move.paged_out))
            if limit is not None and quantity.base + more > limit + TOLERANCE * limit:
                return None
            total.append(more)
        return tuple(total)

    def _schedule(self, trail: list[tuple[int, int, _Move]], last: int) -> Schedule:
        """Write down the moves that lead to a label."""
        relations: dict[str, list[tuple[int, int]]] = {
            name: [] for name in ("R", "S_RAM", "S_AUX", "M_in", "M_out")
        }
        for step, move in _path(trail, last):
            t, k = self.steps[step]
            if move.computes:
                relations["R"].append((t, k))
            relations["M_in"].extend((t, i) for i in _bits(move.paged_in))
            relations["M_out"].extend((t, i) for i in _bits(move.paged_out))
            if k == t and t + 1 < self.n:
                made = sum(self.outputs[: t + 1])
                relations["S_RAM"].extend((t + 1, i) for i in _bits(move.ram))
                relations["S_AUX"].extend((t + 1, i) for i in _bits(move.aux & made))
        return Schedule(
            R=tuple(relations["R"]),
            S_RAM=tuple(relations["S_RAM"]),
            S_AUX=tuple(relations["S_AUX"]),
            M_in=tuple(relations["M_in"]),
            M_out=tuple(relations["M_out"]),
        )


def _path(trail: list[tuple[int, int, _Move]], last: int) -> Iterator[tuple[int, _Move]]:
    """Yield the steps and moves that lead to a label, the last first."""
    while last >= 0:
        last, step, move = trail[last]
        yield step, move


def _is_new(labels: list[tuple[float, ...]], cost: tuple[float, ...]) -> bool:
    """Note a label unless an earlier one is at least as good in everything."""
    for label in labels:
        if all(map(_at_most, label, cost)):
            return False
    labels.append(cost)
    return True


_at_most: Callable[[float, float], bool] = float.__le__


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _subsets(mask: int) -> Iterator[int]:
    subset = mask
    while True:
        yield subset
        if not subset:
            return
        subset = (subset - 1) & mask
