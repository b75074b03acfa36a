"""Quantities as values: what a schedule pays of each, how it is counted and shown."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from operator import neg
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from poetmodel.device import Device, StorageMode
from poetmodel.problem.rows import (
    RELATIVE_TOLERANCE,
    ROUNDING,
    Coefficients,
    LinearRow,
    weighted,
)
from poetmodel.problem.totals import CONSTANT, Constraint, Count, Key, Terms, Total
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem.problem import Problem

OWN: Final = "own"
"""Name of an objective that is a user's own sum of totals."""
CONSTRAINTS: Final = "constraints"
"""Name of the rows of a user's own constraints in a model; their index is (name, side)."""
DEADLINE_ROWS: Final = ("deadline", "bus_deadline", "surrogate_deadline")
"""Names of the rows of a deadline: that of the core; where transfers run beside the computing that
of the bus; and that of a surrogate, while a model states one."""
LIMITED_SUMS: Final = frozenset({*DEADLINE_ROWS, "energy_budget", CONSTRAINTS})
"""Names of all rows of `linear_limits`."""


class Quantity(StrEnum):
    """Objective of a problem."""

    ENERGY = "energy"
    """Energy of one training step [J]."""
    TIME = "time"
    """Time of one training step, in the meaning of the deadline [s]."""
    RAM = "ram"
    """Peak RAM [B]."""
    WRITES = "writes"
    """Bytes paged out [B]."""


class DeadlineCounts(StrEnum):
    """Which time a deadline limits."""

    COMPUTE = "compute"
    """Compute time alone (POET, ICML 2022, equation 3)."""
    SERIAL = "serial"
    """Compute plus transfer time: storage that blocks the core."""
    OVERLAP = "overlap"
    """The makespan when one DMA channel moves tensors while the core computes."""


def transfer_mode(device: Device | None, deadline_counts: str | None) -> StorageMode:
    """Return the transfer mode of the device's storage, else the one that the deadline implies."""
    if device is not None and device.storage is not None:
        return device.storage.mode
    overlap = deadline_counts == DeadlineCounts.OVERLAP
    return StorageMode.DMA if overlap else StorageMode.BLOCKING


class TimeSum(NamedTuple):
    """A weighted sum of compute and transfer time."""

    compute: float
    """Weight of the time that the core computes."""
    transfer: float
    """Weight of the time that transfers take."""

    def of(self, compute_s: float, transfer_s: float) -> float:
        """Return the sum [s]."""
        return self.compute * compute_s + self.transfer * transfer_s


class Simulated(Protocol):
    """A simulated schedule, as far as objectives and limits look at it; figures by their names."""

    @property
    def compute_s(self) -> float | None:
        """Compute time [s]."""

    @property
    def transfer_s(self) -> float | None:
        """Transfer time [s]."""

    @property
    def time_s(self) -> float | None:
        """Time that the deadline counts [s]."""

    def total(self, graph: Graph, terms: Terms, *, extra: bool = False) -> float:
        """Return a sum of totals, or what it has beyond a single pass."""


@dataclass(frozen=True, slots=True)
class OwnSum:
    """A user's own sum of totals, as simulated."""

    graph: Graph = field(compare=False)
    terms: Terms
    rewards: float
    """Least possible sum of its negative terms, 0 or less."""

    def measured(self, simulation: Simulated) -> float:
        """Return the sum."""
        return simulation.total(self.graph, self.terms)

    def overhead(self, simulation: Simulated) -> float:
        """Return the excess of the sum over its baseline: a single pass less the rewards."""
        extra = simulation.total(self.graph, self.terms, extra=True)
        above = extra - self.rewards
        return above if above > ROUNDING * max(abs(extra), abs(self.rewards)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One quantity of a problem: what schedules pay of it, and how it is measured and shown."""

    quantity: str
    """Which `Quantity`, or `OWN`."""
    format: Callable[[float], str]
    """Shows an amount with its unit."""
    label: str
    """Name of the part above the baseline, in words."""
    figure: str
    """Name of the simulator's figure."""
    overhead_figure: str
    """Name of the figure that is the amount above the baseline, added up by itself."""
    coefficients: Coefficients
    """Contribution of each decision; none for peak RAM, which is no sum over decisions."""
    baseline: float = 0.0
    """Value of a single pass, which every schedule pays. A gap is a fraction of the excess."""
    least: float = 0.0
    """Lower bound above the baseline that needs no solver: the minimum RAM, else nothing."""
    whole: float = 0.0
    """Without a baseline, an amount to measure by: RAM that schedules can use, bytes of all
    tensors [B]."""
    reference: float | None = None
    """Value of a known schedule; only better ones matter."""
    counted: TimeSum | None = field(default=None, compare=False)
    """The sum of times that stands for a makespan, in a surrogate; `baseline` is that of a single
    pass then."""
    own: OwnSum | None = None
    """A user's own sum, where that is minimized."""

    @property
    def unit(self) -> float:
        """How much one unit of a model's objective is.

        A thousandth of the reference, the baseline, the RAM that schedules can use or a user's own
        coefficients together, so that gaps that matter are far above a solver's absolute
        tolerances; else the dearest transfer.
        """
        measured = self.whole if self.own is not None or not self.is_sum else self.baseline
        whole = (self.reference if self.is_sum else None) or measured
        transfers = (*self.coefficients.page_in, *self.coefficients.page_out)
        return whole / 1000 or float(max(transfers, default=0.0)) or 1.0

    @property
    def in_bytes(self) -> bool:
        """Whether it is whole bytes: a bound within less than one of a value reaches it."""
        return self.quantity in (Quantity.RAM, Quantity.WRITES)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over decisions: all are but the peak, a maximum over steps."""
        return self.quantity != Quantity.RAM

    def measured(self, simulation: Simulated) -> float:
        """Return the amount that a schedule takes, as simulated."""
        if self.own is not None:
            return self.own.measured(simulation)
        figure: float | None = getattr(simulation, self.figure)
        return 0.0 if figure is None else figure

    def overhead(self, simulation: Simulated) -> float:
        """Return the amount above the baseline, as simulated; the value that a search lowers."""
        if self.own is not None:
            return self.own.overhead(simulation)
        if self.counted is None:
            return max(0.0, getattr(simulation, self.overhead_figure) or 0.0)
        whole_s = self.counted.of(simulation.compute_s or 0.0, simulation.transfer_s or 0.0)
        overhead_s = whole_s - self.baseline
        return overhead_s if overhead_s > ROUNDING * whole_s else 0.0


def linear_limits(problem: Problem) -> Iterator[LinearRow]:
    """Yield the deadline, two of them where transfers run beside computing, and energy budget.

    Then the own constraints, a lower side with all signs turned: each row has an upper side alone.
    """
    if problem.deadline_s is not None:
        for name, counted in zip(DEADLINE_ROWS, problem.deadline_sums, strict=False):
            yield over_totals(
                problem,
                _times(problem, counted),
                name=name,
                # Rows count what comes beyond a single pass, so its time is taken off the limit.
                upper=problem.deadline_s * (1 + RELATIVE_TOLERANCE)
                - counted.of(problem.pass_compute_s, problem.committing.time_s),
                baseline=problem.pass_time_s,
            )
    if problem.energy_budget_j is not None:
        energy = problem.energy
        yield over_totals(
            problem,
            energy.coefficients,
            name="energy_budget",
            upper=problem.energy_budget_j * (1 + RELATIVE_TOLERANCE) - energy.baseline,
            baseline=energy.baseline,
        )
    for constraint in problem.constraints:
        if not constraint.by_stage:
            yield from _sides(problem, constraint)


def stage_limits(problem: Problem) -> Iterator[LinearRow]:
    """Yield the own constraints that count in stages, as rows over stages.

    Each has every stage in which what it counts may happen, if only with 0. What never may, such as
    a page-in of what is not computed yet, is left out.
    """
    graph = problem.graph
    unread = {*graph.state_of, *(graph.state_tensors if problem.reads_in_place else ())}
    for constraint in problem.constraints:
        if not constraint.by_stage:
            continue
        terms: dict[tuple[str, tuple[int, int]], float] = {}
        for key, value in constraint.terms.items():
            kind, stage, name = Key.parse(key)
            if kind == Count.RECOMPUTATIONS:
                family, item = "recomputed", graph.node_index[name]
                stages = range(item + 1, graph.last_stages[item] + 1)
            elif kind != Count.PAGE_INS:
                msg = f"{key}: no decision states the stage of {kind}"
                raise ValueError(msg)
            else:
                family, item = "paged_in", graph.tensor_index[name]
                last = -1 if item in unread else graph.last_page_in(item)
                stages = range(graph.node_of[item] + 1, last + 1)
            for t in stages:
                terms.setdefault((family, (t, item)), 0)
            if stage is not None and stage in stages:
                terms[family, (stage, item)] += value
        upper = constraint.upper or 0
        if all(isinstance(value, int) for value in terms.values()):
            upper = math.floor(upper)
        else:
            upper += RELATIVE_TOLERANCE * max(upper, *terms.values())
        pairs = ((value, decision) for decision, value in terms.items())
        yield LinearRow.of(pairs, name=constraint.name, upper=upper)


def over_totals(problem: Problem, coefficients: Coefficients, **stated: Any) -> LinearRow:
    """Return the row that has these coefficients for the decisions that totals count."""
    return LinearRow(space=problem.totals, values=tuple(chain(*coefficients)), **stated)


def _sides(problem: Problem, constraint: Constraint) -> Iterator[LinearRow]:
    """Yield the sides of a user's own constraint.

    What decisions may add has the tolerance in it; it is negative where that is too much.
    """
    coefficients, baseline = sum_of(problem, constraint.terms.items())
    # Parts of a single pass that cancel out are no more exact for that.
    passes: dict[str, float] = {
        Total.ENERGY: problem.energy.baseline,
        Total.COMPUTE: problem.pass_compute_s,
        Total.TRANSFER: problem.committing.time_s,
        Total.BYTES_WRITTEN: committed_bytes(problem),
    }
    parts = (abs(weight * passes.get(key, 0)) for key, weight in constraint.terms.items())
    largest = max(parts, default=0)
    for side, limit, sign in (("upper", constraint.upper, 1), ("lower", constraint.lower, -1)):
        if limit is None:
            continue
        signed = coefficients
        if sign < 0:
            signed = Coefficients(*(tuple(map(neg, column)) for column in coefficients))
        slack = sign * (limit - baseline)
        if all(isinstance(value, int) for column in signed for value in column):
            # A sum of integers exceeds the floor by 1 or not at all: no tolerance is needed.
            slack = math.floor(slack)
        else:
            slack += RELATIVE_TOLERANCE * max(abs(limit), largest)
        yield over_totals(
            problem,
            signed,
            name=CONSTRAINTS,
            key=(constraint.name, side),
            upper=slack,
            baseline=sign * baseline,
        )


def sum_of(problem: Problem, terms: Iterable[tuple[str, float]]) -> tuple[Coefficients, float]:
    """Return the term of each decision in a sum of totals, and the sum of a single pass."""
    graph, table = problem.graph, problem.table
    nothing = (0,) * len(graph.tensors)
    parts: list[tuple[Coefficients, float]] = []
    compute: list[float] = [0] * len(graph.nodes)
    page_in: list[float] = [0] * len(graph.tensors)
    page_out: list[float] = [0] * len(graph.tensors)
    home: list[float] = [0] * len(graph.tensors)
    baseline: float = 0
    for key, weight in terms:
        kind, _, name = key.partition(":")
        if kind == Count.RECOMPUTATIONS:
            compute[graph.node_index[name]] += weight
        elif kind in (Count.PAGE_INS, Count.PAGE_OUTS):
            counted = page_in if kind == Count.PAGE_INS else page_out
            counted[graph.tensor_index[name]] += weight
        elif kind == Count.RESIDENT:
            # In a single pass all state is resident; a home on storage takes the weight off again.
            baseline += weight
            home[graph.tensor_index[name]] -= weight
        elif key == CONSTANT:
            baseline += weight
        elif key in (Total.BYTES_WRITTEN, Total.BYTES_READ):
            sizes = graph.tensor_bytes
            moved = (nothing, sizes) if key == Total.BYTES_WRITTEN else (sizes, nothing)
            if key == Total.BYTES_WRITTEN:
                baseline += weight * committed_bytes(problem)
            parts.append((_moving(problem, (0,) * len(graph.nodes), *moved), weight))
        elif key == Total.ENERGY:
            parts += [(part, weight * power) for part, power in _energy_parts(problem)]
            baseline += weight * problem.energy.baseline
        elif key == Total.COMPUTE:
            parts.append((_coefficients(problem, table.compute_time_s), weight))
            baseline += weight * problem.pass_compute_s
        else:
            baseline += weight * problem.committing.time_s
            moved_s = (table.page_in_time_s, table.page_out_time_s)
            parts.append((_coefficients(problem, (), *moved_s), weight))
    named = _moving(problem, tuple(compute), tuple(page_in), tuple(page_out), home, counts=True)
    return weighted((named, 1), *parts) if parts else named, baseline


def _energy_parts(problem: Problem) -> Iterator[tuple[Coefficients, float]]:
    """Yield the energies of decisions, and their times with the idle power over these [W]."""
    table = problem.table
    computing_w = 0.0 if problem.deadline_counts == DeadlineCounts.OVERLAP else problem.idle_power_w
    paging_w = problem.idle_power_w if problem.counts_transfers else 0.0
    transfers_j = (table.page_in_energy_j, table.page_out_energy_j)
    yield _coefficients(problem, table.compute_energy_j, *transfers_j), 1.0
    if computing_w:
        yield _coefficients(problem, table.compute_time_s), computing_w
    if paging_w:
        transfers_s = (table.page_in_time_s, table.page_out_time_s)
        yield _coefficients(problem, (), *transfers_s), paging_w


def _energy(problem: Problem) -> Objective:
    """POET (ICML 2022), equation 2, and idle power over the time that counts."""
    return Objective(
        quantity=Quantity.ENERGY,
        format=format_joules,
        label="energy overhead",
        figure="energy_j",
        overhead_figure="overhead_j",
        coefficients=weighted(*_energy_parts(problem)),
        baseline=problem.baseline_energy_j,
    )


def _time(problem: Problem) -> Objective:
    return Objective(
        quantity=Quantity.TIME,
        format=format_seconds,
        label="time overhead",
        figure="time_s",
        overhead_figure="overtime_s",
        coefficients=_times(problem, problem.time_sum),
        baseline=problem.pass_time_s,
    )


def _peak_ram(problem: Problem) -> Objective:
    return Objective(
        quantity=Quantity.RAM,
        format=format_bytes,
        label="peak RAM",
        figure="needed_ram_bytes",
        overhead_figure="needed_ram_bytes",
        coefficients=_coefficients(problem),
        least=problem.floor.bytes,
        whole=problem.useful_ram_bytes,
    )


def _writes(problem: Problem) -> Objective:
    sizes = problem.graph.tensor_bytes
    return Objective(
        quantity=Quantity.WRITES,
        format=format_bytes,
        label="bytes paged out",
        figure="written_bytes",
        overhead_figure="paged_bytes",
        baseline=committed_bytes(problem),
        coefficients=_coefficients(problem, page_out=sizes),
        whole=sum(sizes),
    )


def _own(problem: Problem) -> Objective:
    coefficients, baseline = sum_of(problem, problem.own_objective)
    rewards = largest_rewards(problem.graph, coefficients)
    return Objective(
        quantity=OWN,
        format="{:.6g}".format,
        label="own objective above a single pass",
        figure="",
        overhead_figure="",
        coefficients=coefficients,
        baseline=baseline + rewards,
        whole=sum(map(abs, (value for column in coefficients for value in column))),
        own=OwnSum(problem.graph, problem.own_objective, rewards),
    )


def committed_bytes(problem: Problem) -> int:
    """Return the bytes that commits write in a step [B]."""
    commit = problem.table.commit
    return 0 if commit is None else commit.written_bytes


def rewards_page_outs(problem: Problem) -> bool:
    """Return whether an own constraint or objective may want a page-out that no page-in needs.

    Those of replaced state are decided by its home.
    """
    fixed = {*problem.graph.state_tensors, *problem.graph.state_of}
    sums = [sum_of(problem, problem.own_objective)[0]]
    for constraint in problem.constraints:
        if not constraint.by_stage:
            sums += [row.coefficients for row in _sides(problem, constraint)]
    return any(value < 0 for of in sums for i, value in enumerate(of.page_out) if i not in fixed)


def largest_rewards(graph: Graph, coefficients: Coefficients) -> float:
    """Return the least possible sum of the terms with negative coefficients, 0 or less.

    No count exceeds the stages after the first computation; a tensor goes out once.
    """
    n = len(graph.nodes)
    most = Coefficients(
        compute=range(n - 1, -1, -1),
        page_in=[n - 1 - k for k in graph.node_of],
        page_out=[1] * len(graph.tensors),
        storage_home=[1] * len(graph.tensors),
    )
    return sum(
        min(0.0, value) * times
        for column, counts in zip(coefficients, most, strict=True)
        for value, times in zip(column, counts, strict=True)
    )


OBJECTIVES: Final[Mapping[str, Callable[[Problem], Objective]]] = {
    Quantity.ENERGY: _energy,
    Quantity.TIME: _time,
    Quantity.RAM: _peak_ram,
    Quantity.WRITES: _writes,
    OWN: _own,
}
"""Makers of the objective of each quantity."""


def _times(problem: Problem, counted: TimeSum) -> Coefficients:
    """POET (ICML 2022), equation 3, and transfers."""
    table = problem.table
    return _coefficients(
        problem,
        [counted.compute * time_s for time_s in table.compute_time_s],
        [counted.transfer * time_s for time_s in table.page_in_time_s],
        [counted.transfer * time_s for time_s in table.page_out_time_s],
    )


def _coefficients(
    problem: Problem,
    compute: Sequence[float] = (),
    page_in: Sequence[float] = (),
    page_out: Sequence[float] = (),
) -> Coefficients:
    """Return coefficients for every node and tensor; a column that is not given is nothing."""
    nothing = (0.0,) * len(problem.graph.tensors)
    return _moving(
        problem,
        tuple(compute) or (0.0,) * len(problem.graph.nodes),
        tuple(page_in) or nothing,
        tuple(page_out) or nothing,
    )


def _moving(
    problem: Problem,
    compute: Sequence[float],
    page_in: Sequence[float],
    page_out: Sequence[float],
    home: Sequence[float] = (),
    *,
    counts: bool = False,
) -> Coefficients:
    """Return coefficients in which state on storage pays its first read and its write-back.

    `home` is what it pays beside these. Memory-mapped state is not read. A write-back that is a
    part of a commit is paid wherever the home is; `counts` of page-outs have it all the same.
    """
    graph, commit = problem.graph, problem.table.commit
    paid = () if commit is None or counts else commit.replacements
    at_home: list[float] = list(home) or [0] * len(graph.tensors)
    for i in graph.state_tensors:
        if not problem.reads_in_place:
            at_home[i] += page_in[i]
        if i in graph.replacement_of and graph.replacement_of[i] not in paid:
            at_home[i] += page_out[graph.replacement_of[i]]
    return Coefficients(compute, page_in, page_out, tuple(at_home))
