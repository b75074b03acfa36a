"""Parse and validate the limits and options of a problem, and report their errors together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from poetmodel.budgets import Budget
from poetmodel.device import Costs
from poetmodel.errors import BudgetError, InputError, quote
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.problem.quantities import USER_OBJECTIVE, DeadlineCounts, Quantity
from poetmodel.problem.single_pass import SinglePass
from poetmodel.problem.totals import Constraint, Count, Key, Terms, Total, term_faults
from poetmodel.units import parse_energy, parse_size, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.problem.limits import StatedProblem

_COMMIT_CONSTRAINT: Final = "replaced state stays in RAM between commits"
"""Name of the constraint that `_constraints_with_commits` adds."""
Limit = TypeVar("Limit")
"""Type of a parsed limit."""
MIN_POSITIVE_COST: Final = 1e-300
"""Minimum time or energy other than 0: a thousandth of it is still a normal float."""


class LimitNumbers(NamedTuple):
    """The limits of a problem as numbers; None for no limit."""

    ram_budget_bytes: int
    deadline_s: float | None
    aux_limit_bytes: int | None
    energy_budget_j: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedProblem:
    """The values of a problem, parsed and validated: options as enum members, limits as numbers."""

    costs: Costs
    """Costs, with the commits of the problem."""
    single_pass: SinglePass
    """Time and energy of computing every node once."""
    constraints: tuple[Constraint, ...]
    """Constraints, including `_COMMIT_CONSTRAINT` if commits need it."""
    minimize: str
    """A member of `Quantity`, or `USER_OBJECTIVE`."""
    deadline_counts: DeadlineCounts
    """The time that the deadline counts."""
    numbers: LimitNumbers


def resolve_problem(problem: StatedProblem) -> ResolvedProblem:
    """Parse and validate the fields of a problem.

    Raises `InputError`, `BudgetError` or `CostError`. Types are checked first, then options, costs
    and sums, then limits; only errors of one kind are raised together.
    """
    faults = list(_type_faults(problem))
    if faults:
        raise InputError(faults)
    costs, constraints = _costs_with_commits(problem), _constraints_with_commits(problem)
    minimize = _parse_objective(problem, faults)
    counts = _parse_deadline_counts(problem, faults)
    single_pass = SinglePass(problem.graph, costs, counts)
    faults += _switch_faults(problem)
    faults += _cost_range_faults(single_pass)
    faults += user_sum_faults(problem.graph, constraints, problem.user_objective)
    if counts == DeadlineCounts.OVERLAP and single_pass.idle_power_w > 0:
        faults += _energy_reward_faults(problem.user_objective, constraints)
    if faults:
        raise InputError(faults)
    numbers = LimitNumbers(
        ram_budget_bytes=_parse_or_default(partial(_parse_ram, problem), 0, faults),
        deadline_s=_parse_or_default(partial(_parse_deadline, problem, single_pass), None, faults),
        aux_limit_bytes=_parse_or_default(partial(_parse_storage, problem), None, faults),
        energy_budget_j=_parse_or_default(
            partial(_parse_energy_budget, problem, single_pass), None, faults
        ),
    )
    if faults:
        raise BudgetError(faults)
    return ResolvedProblem(
        costs=costs,
        single_pass=single_pass,
        constraints=constraints,
        minimize=minimize,
        deadline_counts=counts,
        numbers=numbers,
    )


def _parse_objective(problem: StatedProblem, faults: list[str]) -> str:
    """Return the objective; if it is invalid, add an error to `faults` and return the energy."""
    value = problem.minimize
    if value == USER_OBJECTIVE and problem.user_objective:
        return USER_OBJECTIVE
    if value in tuple(Quantity):
        return Quantity(value)
    hint = "; minimizing(...) sets it, with an objective" if value == USER_OBJECTIVE else ""
    faults.append(f"minimize: expected one of {', '.join(Quantity)}, got {quote(value)}{hint}")
    return Quantity.ENERGY


def _parse_deadline_counts(problem: StatedProblem, faults: list[str]) -> DeadlineCounts:
    """Return the time that the deadline counts: ``overlap`` by default if storage has DMA.

    An invalid value adds an error to `faults` and becomes ``serial``.
    """
    value, device = problem.deadline_counts, problem.costs.device
    if value is None:
        has_dma = device is not None and device.has_dma
        return DeadlineCounts.OVERLAP if has_dma else DeadlineCounts.SERIAL
    if value in tuple(DeadlineCounts):
        return DeadlineCounts(value)
    expected = ", ".join(DeadlineCounts)
    faults.append(f"deadline_counts: expected one of {expected}, got {quote(value)}")
    return DeadlineCounts.SERIAL


def _switch_faults(problem: StatedProblem) -> Iterator[str]:
    """Yield an error for each Boolean option that is no bool, and for parameters counted twice."""
    switches: dict[str, object] = {
        "recompute": problem.recompute,
        "paging": problem.paging,
        "count_parameters": problem.count_parameters,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            yield f"{name}: expected True or False, got {quote(value)}"
    if problem.count_parameters is True and problem.graph.state_tensors:
        yield (
            f"count_parameters: graph {quote(problem.graph.name)} has its state in the graph, "
            "where the RAM budget counts it; leave count_parameters out"
        )


def _costs_with_commits(problem: StatedProblem) -> Costs:
    if problem.costs.commit == problem.commit:
        return problem.costs
    return replace(problem.costs, commit=problem.commit)


def _constraints_with_commits(problem: StatedProblem) -> tuple[Constraint, ...]:
    """Return the constraints; rare commits add `_COMMIT_CONSTRAINT`: replaced state is resident."""
    graph, device = problem.graph, problem.costs.device
    rows = tuple(row for row in problem.constraints if row.name != _COMMIT_CONSTRAINT)
    # Between two commits, replaced state on storage would be in neither generation.
    replaced_state = [graph.tensors[i].name for i in graph.replacement_of]
    if (
        (problem.commit or 1) > 1
        and replaced_state
        and not (device is not None and device.is_volatile)
    ):
        terms: dict[str, float] = {f"{Count.RESIDENT}:{name}": 1 for name in replaced_state}
        return (*rows, Constraint(name=_COMMIT_CONSTRAINT, terms=terms, lower=len(replaced_state)))
    return rows


def _type_faults(problem: StatedProblem) -> Iterator[str]:
    """Yield an error for a graph, costs, commit interval or constraints of a wrong type."""
    graph: Any = problem.graph
    costs: Any = problem.costs
    if not isinstance(graph, Graph):
        yield f"graph: expected a Graph, got {quote(graph)}; Graph.load reads one"
    if not isinstance(costs, Costs):
        yield f"costs: expected Costs, got {quote(costs)}; Costs.estimate(graph, device) makes them"
    commit: Any = problem.commit
    if commit is not None and (
        not isinstance(commit, int) or isinstance(commit, bool) or commit < 1
    ):
        yield f"commit: expected a whole number of steps from 1 on, got {quote(commit)}"
    constraints: Any = problem.constraints
    if not isinstance(constraints, tuple | list):
        yield f"constraints: expected a tuple of Constraint, got {quote(constraints)}"
        return
    for index, row in enumerate(constraints):
        if not isinstance(row, Constraint):
            yield (
                f"constraints[{index}]: expected a Constraint, got {quote(row)}; functions are "
                "for subject_to"
            )


def _energy_reward_faults(objective: Terms, constraints: Iterable[Constraint]) -> Iterator[str]:
    """Yield an error for the objective, and for each bound of a constraint, that rewards energy.

    For problems whose idle power counts over a makespan: models contain only a lower bound on the
    makespan, so they would underestimate the rewards.
    """
    sums = [("objective", dict(objective), 1)]
    for row in constraints:
        label, terms = f"constraint {quote(row.name)}", row.terms
        sums += [(label, terms, 1)] * (row.upper is not None)
        sums += [(label, terms, -1)] * (row.lower is not None)
    for label, terms, sign in sums:
        if sign * terms.get(Total.ENERGY, 0) < 0:
            yield (
                f"{label}: energy_j: no sum may reward energy if the device draws idle power over "
                "a makespan; use compute_s and transfer_s, or deadline_counts='serial'"
            )


def _parse_or_default(parse: Callable[[], Limit], default: Limit, faults: list[str]) -> Limit:
    """Return the result of `parse`, or `default` on `BudgetError`; add its errors to `faults`."""
    try:
        return parse()
    except BudgetError as error:
        faults.extend(error.faults)
        return default


def user_sum_faults(
    graph: Graph, constraints: Iterable[Constraint], objective: Terms
) -> Iterator[str]:
    """Yield an error for each invalid term, repeated name, and count by stage in the objective."""
    names: set[str] = set()
    for row in constraints:
        label = f"constraint {quote(row.name)}"
        if row.name in names:
            yield f"{label}: another constraint has this name"
        names.add(row.name)
        yield from term_faults(graph, row.terms.items(), label)
    yield from term_faults(graph, objective, "objective")
    for key, _ in objective:
        if Key.parse(key).stage is not None:
            yield (
                f"objective: {quote(key)}: an objective cannot count by stage; a model of "
                "pm.build(problem) can"
            )


def _parse_ram(problem: StatedProblem) -> int:
    """Return the RAM budget [B], by default the device's; 100 % is keep-all plus resident bytes."""
    value, device = problem.ram, problem.costs.device
    if value is None:
        if device is None:
            raise BudgetError("ram: without a device, a budget is required, such as 256KiB or 50%")
        value = device.ram_bytes
    budget = Budget.parse(value)
    size = budget.resolve(checkpoint_all_peak_bytes(problem.graph) + problem.resident_bytes)
    if size == 0:
        raise BudgetError(f"ram: expected at least 1 byte, got {budget.stated_value!r}")
    return size


def _parse_deadline(problem: StatedProblem, single_pass: SinglePass) -> float | None:
    """Return the deadline [s] or None; a percentage is of the time of the single pass."""
    if problem.deadline is None:
        return None
    time_s = parse_time(problem.deadline, field="deadline", base_s=single_pass.time_s)
    if time_s == 0 and single_pass.time_s > 0:
        raise BudgetError(f"deadline: expected a time above 0, got {problem.deadline!r}")
    return time_s


def _parse_storage(problem: StatedProblem) -> int | None:
    """Return the storage limit [B] or None; a percentage is of the keep-all peak."""
    if problem.aux_bytes is None:
        return None if problem.costs.device is None else problem.costs.device.aux_bytes
    base_bytes = checkpoint_all_peak_bytes(problem.graph)
    return parse_size(problem.aux_bytes, field="aux", base_bytes=base_bytes)


def _parse_energy_budget(problem: StatedProblem, single_pass: SinglePass) -> float | None:
    """Return the energy budget [J] or None; a percentage is of the energy of the single pass."""
    if problem.energy_budget is None:
        return None
    base_j = single_pass.energy_j
    energy_j = parse_energy(problem.energy_budget, field="energy budget", base_j=base_j)
    if energy_j == 0 and base_j > 0:
        raise BudgetError(
            f"energy budget: expected an energy above 0, got {problem.energy_budget!r}"
        )
    return energy_j


def _cost_range_faults(single_pass: SinglePass) -> Iterator[str]:
    """Yield an error for the first cost too small to divide, and for sums that may overflow."""
    table, n_stages = single_pass.table, len(single_pass.graph.nodes)
    source = f"{single_pass.costs.source}: " * bool(single_pass.costs.source)
    nodes = [node.name for node in single_pass.graph.nodes]
    tensors = [tensor.name for tensor in single_pass.graph.tensors]
    for unit in ("time_s", "energy_j"):
        columns = [f"{action}_{unit}" for action in ("compute", "page_in", "page_out")]
        costs = [
            (cost, name, column)
            for column, names in zip(columns, (nodes, tensors, tensors), strict=True)
            for cost, name in zip(getattr(table, column), names, strict=False)
        ]
        small_costs = [entry for entry in costs if 0 < entry[0] < MIN_POSITIVE_COST]
        for cost, name, column in small_costs[:1]:
            yield f"{source}{name}: {column}: expected 0 or at least 1e-300, got {cost:g}"
        power_w = max(1.0, single_pass.idle_power_w) if unit == "time_s" else 1.0
        if sum(cost for cost, _, _ in costs) * n_stages * power_w == math.inf:
            cost, name, column = max(costs)
            yield (
                f"{source}{name}: {column}: {cost:g} is too large: with the other costs, over "
                f"{n_stages} stages, it exceeds the largest float; use smaller costs"
            )
