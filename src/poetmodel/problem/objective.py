"""Objectives and limits as linear expressions over decisions, with their units and metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import chain
from operator import neg
from typing import TYPE_CHECKING, Any, Final, Protocol

from poetmodel.problem.quantities import (
    USER_OBJECTIVE,
    DeadlineCounts,
    Quantity,
    TimeSum,
)
from poetmodel.problem.rows import (
    RELATIVE_TOLERANCE,
    ROUNDING_ERROR,
    Coefficients,
    LinearRow,
    weighted_sum,
)
from poetmodel.problem.totals import CONSTANT, Constraint, Count, Key, Terms, Total
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from poetmodel.graph import Graph
    from poetmodel.problem.parse import LimitNumbers
    from poetmodel.problem.single_pass import SinglePass

USER_CONSTRAINTS: Final = "constraints"
"""Name of the rows of user-defined constraints in a model, except per-stage ones; their key is
(name, ``upper`` or ``lower``)."""
DEADLINE_ROWS: Final = ("deadline", "bus_deadline", "stated_deadline")
"""Names of the rows of a deadline: of the counted time (for a makespan, the time of the core); of
the bus, if `Problem.deadline_sums` includes it; of a `Statement` that is solved with the model."""
LIMITED_SUMS: Final = frozenset({*DEADLINE_ROWS, "energy_budget", USER_CONSTRAINTS})
"""Names of the rows that models make of `linear_limits`."""


class SimulatedMetrics(Protocol):
    """Metrics of a simulated schedule for objectives and limits; times are None without costs."""

    @property
    def compute_s(self) -> float | None:
        """Compute time [s]."""

    @property
    def transfer_s(self) -> float | None:
        """Transfer time [s]."""

    @property
    def time_s(self) -> float | None:
        """Time that the deadline counts [s]."""

    def total(self, graph: Graph, terms: Terms, *, only_excess: bool = False) -> float:
        """Return a sum of totals; with `only_excess`, its excess over a single pass."""


@dataclass(frozen=True, slots=True)
class UserSum:
    """A user-defined objective, evaluated on simulated schedules."""

    graph: Graph = field(compare=False)
    """Graph of the schedules."""
    terms: Terms
    """The weighted sum of totals."""
    rewards: float
    """Lower bound on the sum of the negative terms, 0 or less."""

    def value_of(self, simulation: SimulatedMetrics) -> float:
        """Return the value of the sum."""
        return simulation.total(self.graph, self.terms)

    def overhead_of(self, simulation: SimulatedMetrics) -> float:
        """Return the excess of the sum over its baseline; 0 within the rounding error."""
        excess = simulation.total(self.graph, self.terms, only_excess=True)
        overhead = excess - self.rewards
        scale = max(abs(excess), abs(self.rewards))
        return overhead if overhead > ROUNDING_ERROR * scale else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A quantity of a problem as a linear expression over decisions, with metric and format."""

    quantity: str
    """A member of `Quantity`, or `USER_OBJECTIVE`."""
    format: Callable[[float], str]
    """Formats a value with its unit."""
    label: str
    """Display name of the excess over the baseline."""
    metric: str
    """Name of the attribute of `Simulation` that is the value; empty for a user-defined sum."""
    overhead_metric: str
    """Name of the attribute of `Simulation` that is the excess over the baseline; empty for a
    user-defined sum."""
    coefficients: Coefficients
    """Contribution of each decision; all 0 for peak RAM, which is no sum over decisions.

    For a makespan, transfer times and idle power are omitted, so that sums are lower bounds."""
    baseline: float = 0.0
    """Lower bound on every schedule: the value of a single pass, for a user-defined sum plus its
    `UserSum.rewards`; 0 for peak RAM. A gap is relative to the excess over the baseline."""
    known_bound: float = 0.0
    """Lower bound on the excess that needs no solver: the minimum RAM, else 0."""
    scale: float = 0.0
    """Scale of objectives whose baseline may be 0: useful RAM, bytes of all tensors [B], or the sum
    of the absolute coefficients of a user-defined sum; 0 for energy and time."""
    reference: float | None = None
    """Excess of a known schedule over the baseline, above 0; only better schedules matter. None if
    no schedule is known."""
    user_sum: UserSum | None = None
    """The user-defined sum; None for other objectives."""

    @property
    def unit(self) -> float:
        """Divisor of the objective in models: one thousandth of a typical value.

        Relevant gaps are then far above a solver's absolute tolerances.
        """
        typical_value = (
            self.scale if self.user_sum is not None or not self.is_sum else self.baseline
        )
        value = (self.reference if self.is_sum else None) or typical_value
        transfers = (*self.coefficients.page_in, *self.coefficients.page_out)
        return value / 1000 or float(max(transfers, default=0.0)) or 1.0

    @property
    def is_in_bytes(self) -> bool:
        """Whether values are whole bytes: a bound less than 1 B below a value proves it optimal."""
        return self.quantity in (Quantity.RAM, Quantity.WRITES)

    @property
    def is_sum(self) -> bool:
        """Whether the objective is a sum over decisions; peak RAM, a maximum over steps, is not."""
        return self.quantity != Quantity.RAM

    def value_of(self, simulation: SimulatedMetrics) -> float:
        """Return the value of a simulated schedule; 0 for an energy or time without costs."""
        if self.user_sum is not None:
            return self.user_sum.value_of(simulation)
        value: float | None = getattr(simulation, self.metric)
        return 0.0 if value is None else value

    def overhead_of(self, simulation: SimulatedMetrics) -> float:
        """Return the excess over the baseline; 0 for an energy or time that is None."""
        if self.user_sum is not None:
            return self.user_sum.overhead_of(simulation)
        return max(0.0, getattr(simulation, self.overhead_metric) or 0.0)


def linear_limits(
    single_pass: SinglePass,
    numbers: LimitNumbers,
    time_sums: Sequence[TimeSum],
    constraints: Iterable[Constraint],
) -> Iterator[LinearRow]:
    """Yield a row for each limit on a sum: deadline, energy budget, user constraints.

    The `upper` of a row is the limit minus the sum of a single pass, with a tolerance unless all
    coefficients of a user constraint are ints. Per-stage constraints have rows of `stage_limits`.
    """
    if numbers.deadline_s is not None:
        for name, time_sum in zip(DEADLINE_ROWS, time_sums, strict=False):
            yield row_over_totals(
                single_pass.totals,
                _time_coefficients(single_pass, time_sum),
                name=name,
                # Rows sum the excess over a single pass, whose time is subtracted from the limit.
                upper=numbers.deadline_s * (1 + RELATIVE_TOLERANCE)
                - time_sum.weigh(single_pass.compute_s, single_pass.commit_cost.time_s),
                baseline=single_pass.time_s,
            )
    if numbers.energy_budget_j is not None:
        energy = energy_objective(single_pass)
        yield row_over_totals(
            single_pass.totals,
            energy.coefficients,
            name="energy_budget",
            upper=numbers.energy_budget_j * (1 + RELATIVE_TOLERANCE) - energy.baseline,
            baseline=energy.baseline,
        )
    for constraint in constraints:
        if not constraint.is_per_stage:
            yield from _bound_rows(single_pass, constraint)


def stage_limits(single_pass: SinglePass, constraints: Iterable[Constraint]) -> Iterator[LinearRow]:
    """Yield one row over (stage, item) decisions for each per-stage user constraint.

    Rows have only upper bounds: a lower bound is at most 0 and always met. They list, with
    coefficient 0, all possible stages of their nodes and tensors. Terms of impossible stages are
    omitted.
    """
    graph = single_pass.graph
    unread_tensors = {*graph.state_of, *(graph.state_tensors if single_pass.reads_in_place else ())}
    for constraint in constraints:
        if not constraint.is_per_stage:
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
                last_stage = -1 if item in unread_tensors else graph.last_page_in_stage(item)
                stages = range(graph.node_of[item] + 1, last_stage + 1)
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
        yield LinearRow.from_terms(pairs, name=constraint.name, upper=upper)


def row_over_totals(
    totals: tuple[tuple[str, int], ...], coefficients: Coefficients, **fields: Any
) -> LinearRow:
    """Return the row with these coefficients of the decisions that `totals` lists."""
    return LinearRow(space=totals, values=tuple(chain(*coefficients)), **fields)


def _bound_rows(single_pass: SinglePass, constraint: Constraint) -> Iterator[LinearRow]:
    """Yield one row per bound of a user constraint, that of the upper bound first.

    The `upper` of a row is the bound minus the value of a single pass, with a tolerance unless all
    coefficients are ints. It is negative if a single pass violates the bound.
    """
    coefficients, baseline = expand_totals(single_pass, constraint.terms.items())
    # Terms of a single pass that cancel out leave their rounding errors.
    pass_totals: dict[str, float] = {
        Total.ENERGY: single_pass.energy_j,
        Total.COMPUTE: single_pass.compute_s,
        Total.TRANSFER: single_pass.commit_cost.time_s,
        Total.BYTES_WRITTEN: committed_bytes(single_pass),
    }
    pass_terms = (abs(weight * pass_totals.get(key, 0)) for key, weight in constraint.terms.items())
    max_term = max(pass_terms, default=0)
    for bound_name, limit, sign in (
        ("upper", constraint.upper, 1),
        ("lower", constraint.lower, -1),
    ):
        if limit is None:
            continue
        signed_coefficients = coefficients
        if sign < 0:
            signed_coefficients = Coefficients(
                *(tuple(map(neg, column)) for column in coefficients)
            )
        upper = sign * (limit - baseline)
        if all(isinstance(value, int) for column in signed_coefficients for value in column):
            # A sum of integers exceeds the floor by 1 or more, or not at all: without tolerance.
            upper = math.floor(upper)
        else:
            upper += RELATIVE_TOLERANCE * max(abs(limit), max_term)
        yield row_over_totals(
            single_pass.totals,
            signed_coefficients,
            name=USER_CONSTRAINTS,
            key=(constraint.name, bound_name),
            upper=upper,
            baseline=sign * baseline,
        )


def expand_totals(
    single_pass: SinglePass, terms: Iterable[tuple[str, float]]
) -> tuple[Coefficients, float]:
    """Return the coefficients of decisions in a weighted sum of totals, and a constant.

    The constant is the value for a single pass with all state resident, commits included. Terms
    must be valid and not count by stage. Energies omit idle power over a makespan.
    """
    graph, table = single_pass.graph, single_pass.table
    zeros = (0,) * len(graph.tensors)
    weighted_coefficients: list[tuple[Coefficients, float]] = []
    compute_weights: list[float] = [0] * len(graph.nodes)
    page_in_weights: list[float] = [0] * len(graph.tensors)
    page_out_weights: list[float] = [0] * len(graph.tensors)
    home_weights: list[float] = [0] * len(graph.tensors)
    baseline: float = 0
    for key, weight in terms:
        kind, _, name = key.partition(":")
        if kind == Count.RECOMPUTATIONS:
            compute_weights[graph.node_index[name]] += weight
        elif kind in (Count.PAGE_INS, Count.PAGE_OUTS):
            transfer_weights = page_in_weights if kind == Count.PAGE_INS else page_out_weights
            transfer_weights[graph.tensor_index[name]] += weight
        elif kind == Count.RESIDENT:
            # In a single pass all state is resident; a home on storage subtracts the weight.
            baseline += weight
            home_weights[graph.tensor_index[name]] -= weight
        elif key == CONSTANT:
            baseline += weight
        elif key in (Total.BYTES_WRITTEN, Total.BYTES_READ):
            sizes = graph.tensor_bytes
            transfer_bytes = (zeros, sizes) if key == Total.BYTES_WRITTEN else (sizes, zeros)
            if key == Total.BYTES_WRITTEN:
                baseline += weight * committed_bytes(single_pass)
            weighted_coefficients.append(
                (
                    _add_state_transfers(single_pass, (0,) * len(graph.nodes), *transfer_bytes),
                    weight,
                )
            )
        elif key == Total.ENERGY:
            weighted_coefficients += [
                (coefficients, weight * factor)
                for coefficients, factor in _energy_terms(single_pass)
            ]
            baseline += weight * single_pass.energy_j
        elif key == Total.COMPUTE:
            weighted_coefficients.append(
                (_make_coefficients(single_pass, table.compute_time_s), weight)
            )
            baseline += weight * single_pass.compute_s
        else:
            baseline += weight * single_pass.commit_cost.time_s
            transfer_times_s = (table.page_in_time_s, table.page_out_time_s)
            weighted_coefficients.append(
                (_make_coefficients(single_pass, (), *transfer_times_s), weight)
            )
    count_coefficients = _add_state_transfers(
        single_pass,
        tuple(compute_weights),
        tuple(page_in_weights),
        tuple(page_out_weights),
        home_weights,
        are_counts=True,
    )
    return weighted_sum((count_coefficients, 1), *weighted_coefficients), baseline


def _energy_terms(single_pass: SinglePass) -> Iterator[tuple[Coefficients, float]]:
    """Yield (coefficients, weight) pairs whose weighted sum is the energy of decisions [J].

    Energies have weight 1, counted times [s] the idle power [W]; idle power over a makespan is
    omitted.
    """
    table = single_pass.table
    counts, idle_power_w = single_pass.deadline_counts, single_pass.idle_power_w
    compute_idle_w = 0.0 if counts == DeadlineCounts.OVERLAP else idle_power_w
    transfer_idle_w = idle_power_w if counts == DeadlineCounts.SERIAL else 0.0
    transfers_j = (table.page_in_energy_j, table.page_out_energy_j)
    yield _make_coefficients(single_pass, table.compute_energy_j, *transfers_j), 1.0
    if compute_idle_w:
        yield _make_coefficients(single_pass, table.compute_time_s), compute_idle_w
    if transfer_idle_w:
        transfers_s = (table.page_in_time_s, table.page_out_time_s)
        yield _make_coefficients(single_pass, (), *transfers_s), transfer_idle_w


def energy_objective(single_pass: SinglePass) -> Objective:
    """Return the energy as an objective [J]: POET (ICML 2022), equation 2, plus idle energy."""
    return Objective(
        quantity=Quantity.ENERGY,
        format=format_joules,
        label="energy overhead",
        metric="energy_j",
        overhead_metric="overhead_j",
        coefficients=weighted_sum(*_energy_terms(single_pass)),
        baseline=single_pass.energy_j,
    )


def time_objective(single_pass: SinglePass, time_sum: TimeSum) -> Objective:
    """Return the time that the deadline counts as an objective [s]."""
    return Objective(
        quantity=Quantity.TIME,
        format=format_seconds,
        label="time overhead",
        metric="time_s",
        overhead_metric="overtime_s",
        coefficients=_time_coefficients(single_pass, time_sum),
        baseline=single_pass.time_s,
    )


def ram_objective(single_pass: SinglePass, min_bytes: int, useful_bytes: int) -> Objective:
    """Return the peak RAM as an objective [B], without coefficients of decisions."""
    return Objective(
        quantity=Quantity.RAM,
        format=format_bytes,
        label="peak RAM",
        metric="needed_ram_bytes",
        overhead_metric="needed_ram_bytes",
        coefficients=_make_coefficients(single_pass),
        known_bound=min_bytes,
        scale=useful_bytes,
    )


def writes_objective(single_pass: SinglePass) -> Objective:
    """Return the bytes paged out as an objective [B]; its baseline is the committed bytes."""
    sizes = single_pass.graph.tensor_bytes
    return Objective(
        quantity=Quantity.WRITES,
        format=format_bytes,
        label="bytes paged out",
        metric="written_bytes",
        overhead_metric="paged_bytes",
        baseline=committed_bytes(single_pass),
        coefficients=_make_coefficients(single_pass, page_out=sizes),
        scale=sum(sizes),
    )


def user_objective(single_pass: SinglePass, terms: Terms) -> Objective:
    """Return the user-defined objective; its baseline includes `UserSum.rewards`, 0 or less."""
    coefficients, baseline = expand_totals(single_pass, terms)
    rewards = min_negative_sum(single_pass.graph, coefficients)
    return Objective(
        quantity=USER_OBJECTIVE,
        format="{:.6g}".format,
        label="objective above a single pass",
        metric="",
        overhead_metric="",
        coefficients=coefficients,
        baseline=baseline + rewards,
        scale=sum(map(abs, (value for column in coefficients for value in column))),
        user_sum=UserSum(single_pass.graph, terms, rewards),
    )


def committed_bytes(single_pass: SinglePass) -> int:
    """Return the bytes that commits write per step [B]; 0 without commits."""
    commit = single_pass.table.commit
    return 0 if commit is None else commit.written_bytes


def may_reward_page_outs(
    single_pass: SinglePass, constraints: Iterable[Constraint], user_objective: Terms
) -> bool:
    """Return whether a user constraint or objective may reward page-outs that no page-in needs."""
    state_and_replacements = {*single_pass.graph.state_tensors, *single_pass.graph.state_of}
    sums = [expand_totals(single_pass, user_objective)[0]]
    for constraint in constraints:
        if not constraint.is_per_stage:
            sums += [row.coefficients for row in _bound_rows(single_pass, constraint)]
    return any(
        value < 0
        for coefficients in sums
        for i, value in enumerate(coefficients.page_out)
        if i not in state_and_replacements
    )


def min_negative_sum(graph: Graph, coefficients: Coefficients) -> float:
    """Return a lower bound on the sum of the terms with negative coefficients, 0 or less.

    Recomputations and page-ins count at most once in each stage after the first computation.
    """
    n = len(graph.nodes)
    max_counts = Coefficients(
        compute=range(n - 1, -1, -1),
        page_in=[n - 1 - k for k in graph.node_of],
        page_out=[1] * len(graph.tensors),
        storage_home=[1] * len(graph.tensors),
    )
    return sum(
        min(0.0, value) * max_count
        for column, counts in zip(coefficients, max_counts, strict=True)
        for value, max_count in zip(column, counts, strict=True)
    )


def _time_coefficients(single_pass: SinglePass, time_sum: TimeSum) -> Coefficients:
    """Return the weighted times of decisions: POET (ICML 2022), equation 3, plus transfers [s]."""
    table = single_pass.table
    return _make_coefficients(
        single_pass,
        [time_sum.compute * time_s for time_s in table.compute_time_s],
        [time_sum.transfer * time_s for time_s in table.page_in_time_s],
        [time_sum.transfer * time_s for time_s in table.page_out_time_s],
    )


def _make_coefficients(
    single_pass: SinglePass,
    compute: Sequence[float] = (),
    page_in: Sequence[float] = (),
    page_out: Sequence[float] = (),
) -> Coefficients:
    """Return the coefficients of all decisions, homes included; an omitted column is 0."""
    zeros = (0.0,) * len(single_pass.graph.tensors)
    return _add_state_transfers(
        single_pass,
        tuple(compute) or (0.0,) * len(single_pass.graph.nodes),
        tuple(page_in) or zeros,
        tuple(page_out) or zeros,
    )


def _add_state_transfers(
    single_pass: SinglePass,
    compute: Sequence[float],
    page_in: Sequence[float],
    page_out: Sequence[float],
    home: Sequence[float] = (),
    *,
    are_counts: bool = False,
) -> Coefficients:
    """Return the columns with a ``storage_home`` that includes the transfers of state on storage.

    These are the first read of the state and the page-out of its replacement. Unless the
    coefficients are counts, page-outs of committed state are excluded: the baseline has their cost.
    """
    graph, commit = single_pass.graph, single_pass.table.commit
    excluded_replacements = () if commit is None or are_counts else commit.replacements
    storage_home: list[float] = list(home) or [0] * len(graph.tensors)
    for i in graph.state_tensors:
        if not single_pass.reads_in_place:
            storage_home[i] += page_in[i]
        if i in graph.replacement_of and graph.replacement_of[i] not in excluded_replacements:
            storage_home[i] += page_out[graph.replacement_of[i]]
    return Coefficients(compute, page_in, page_out, tuple(storage_home))
