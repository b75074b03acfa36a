"""From what people write to numbers: the limits and choices of a problem, all faults at once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device import Costs
from poetmodel.errors import BudgetError, InputError, shown
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.problem.objective import OWN, DeadlineCounts, Quantity
from poetmodel.problem.totals import Constraint, Count, Key, Terms, Total, check_terms
from poetmodel.units import parse_energy, parse_size, parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from poetmodel.problem.problem import Problem

COMMIT: Final = "replaced state stays in RAM between commits"
"""Name of the constraint of problems in which not every step commits."""
SMALLEST_COST: Final = 1e-300
"""Least time or energy other than nothing: a thousandth of it is still a full number."""


def resolve_choices(problem: Problem) -> dict[str, Any]:
    """Return the choices of a problem as members; refuse unknown ones, and costs beyond numbers."""
    chosen: dict[str, Any] = {}
    faults: list[str] = []
    counts = problem.deadline_counts
    for name, choices, value in (
        ("minimize", Quantity, problem.minimize),
        ("deadline_counts", DeadlineCounts, _default_counts(problem) if counts is None else counts),
    ):
        if name == "minimize" and value == OWN and problem.own_objective:
            chosen[name] = OWN
        elif value in tuple(choices):
            chosen[name] = choices(value)
        else:
            hint = "; minimizing(...) sets it, with an objective" if value == OWN else ""
            faults.append(f"{name}: expected one of {', '.join(choices)}, got {shown(value)}{hint}")
    for name in ("recompute", "paging", "count_parameters"):
        if not isinstance(getattr(problem, name), bool):
            faults.append(f"{name}: expected True or False, got {shown(getattr(problem, name))}")
    if problem.count_parameters is True and problem.graph.state_tensors:
        faults.append(
            f"count_parameters: graph {shown(problem.graph.name)} has its state in the graph, "
            "where the RAM budget counts it; leave --count-parameters out"
        )
    faults += _costs_beyond_numbers(problem)
    faults += own_sum_faults(problem.graph, problem.constraints, problem.own_objective)
    if chosen.get("deadline_counts") == DeadlineCounts.OVERLAP and problem.idle_power_w > 0:
        faults += _rewarded_idling(problem)
    if faults:
        raise InputError(faults)
    return chosen


def committed(problem: Problem) -> dict[str, Any]:
    """Return the costs of a problem with its commits, and its constraints with theirs.

    Refuse what is of another kind than all that follows takes for granted.
    """
    faults = list(_wrong_kinds(problem))
    if faults:
        raise InputError(faults)
    graph, every, device = problem.graph, problem.commit, problem.costs.device
    rows = tuple(row for row in problem.constraints if row.name != COMMIT)
    # Between two commits such state would be in neither generation.
    kept = [graph.tensors[i].name for i in graph.replacement_of]
    if (every or 1) > 1 and kept and not (device is not None and device.is_volatile):
        terms: dict[str, float] = {f"{Count.RESIDENT}:{name}": 1 for name in kept}
        rows = (*rows, Constraint(name=COMMIT, terms=terms, lower=len(kept)))
    changed: dict[str, Any] = {} if rows == problem.constraints else {"constraints": rows}
    if problem.costs.commit != every:  # the same costs stay the same object
        changed["costs"] = replace(problem.costs, commit=every)
    return changed


def _wrong_kinds(problem: Problem) -> Iterator[str]:
    """Name what is of another kind than all that follows takes for granted."""
    graph: Any = problem.graph
    costs: Any = problem.costs
    if not isinstance(graph, Graph):
        yield f"graph: expected a Graph, got {shown(graph)}; Graph.load reads one"
    if not isinstance(costs, Costs):
        yield f"costs: expected Costs, got {shown(costs)}; Costs.estimate(graph, device) makes them"
    every: Any = problem.commit
    if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
        yield f"commit: expected a whole number of steps from 1 on, got {shown(every)}"
    constraints: Any = problem.constraints
    if not isinstance(constraints, tuple | list):
        yield f"constraints: expected a tuple of Constraint, got {shown(constraints)}"
        return
    for number, row in enumerate(constraints):
        if not isinstance(row, Constraint):
            yield (
                f"constraints[{number}]: expected a Constraint, got {shown(row)}; subject_to takes "
                "functions"
            )


def _rewarded_idling(problem: Problem) -> Iterator[str]:
    """Name sums that more energy is good for: of a makespan models know a lower bound only."""
    sums = [("objective", dict(problem.own_objective), 1)]
    for row in problem.constraints:
        where, terms = f"constraint {shown(row.name)}", row.terms
        sums += [(where, terms, 1)] * (row.upper is not None)
        sums += [(where, terms, -1)] * (row.lower is not None)
    for where, terms, sign in sums:
        if sign * terms.get(Total.ENERGY, 0) < 0:
            yield (
                f"{where}: energy_j from below is not decided where the device draws idle power "
                "over a makespan; use compute_s and transfer_s, or deadline_counts='serial'"
            )


def resolve_limits(problem: Problem) -> dict[str, Any]:
    """Return the limits of a problem as numbers, percentages of what the problem says included."""
    limits: dict[str, Any] = {}
    faults: list[str] = []
    for name, resolve in (
        ("ram_budget_bytes", _ram_bytes),
        ("deadline_s", _deadline_s),
        ("aux_limit_bytes", _aux_bytes),
        ("energy_budget_j", _energy_j),
    ):
        try:
            limits[name] = resolve(problem)
        except BudgetError as error:
            faults.extend(error.faults)
    if faults:
        raise BudgetError(faults)
    return limits


def check_limits(
    *,
    ram: str | int | None = None,
    deadline: str | float | None = None,
    aux_bytes: str | int | None = None,
    energy_budget: str | float | None = None,
) -> None:
    """Raise `BudgetError` for limits that no graph makes right, such as an unknown unit."""
    whole = 1.0
    parsed: tuple[tuple[Any, Callable[[Any], float]], ...] = (
        (ram, lambda value: parse_size(value, field="ram", whole_bytes=1)),
        (deadline, lambda value: parse_time(value, field="deadline", whole_s=whole)),
        (aux_bytes, lambda value: parse_size(value, field="aux", whole_bytes=1)),
        (energy_budget, lambda value: parse_energy(value, field="energy budget", whole_j=whole)),
    )
    faults: list[str] = []
    for value, parse in parsed:
        try:
            if value is not None:
                parse(value)
        except BudgetError as error:
            faults.extend(error.faults)
    if faults:
        raise BudgetError(faults)


def own_sum_faults(
    graph: Graph, constraints: Iterable[Constraint], objective: Terms
) -> Iterator[str]:
    """Yield what is wrong with own constraints and an own objective."""
    names: set[str] = set()
    for row in constraints:
        where = f"constraint {shown(row.name)}"
        if row.name in names:
            yield f"{where}: another constraint has this name"
        names.add(row.name)
        yield from check_terms(graph, row.terms.items(), where)
    yield from check_terms(graph, objective, "objective")
    for key, _ in objective:
        if Key.parse(key).stage is not None:
            yield (
                f"objective: {shown(key)}: an objective counts in all stages; in a model of "
                "pm.build(problem) it can be stated"
            )


def _default_counts(problem: Problem) -> DeadlineCounts:
    device = problem.costs.device
    overlaps = device is not None and device.has_dma
    return DeadlineCounts.OVERLAP if overlaps else DeadlineCounts.SERIAL


def _ram_bytes(problem: Problem) -> int:
    value, device = problem.ram, problem.costs.device
    if value is None:
        if device is None:
            raise BudgetError(
                "ram: a budget is needed where no device gives one, such as 256KiB or 50%"
            )
        value = device.ram_bytes
    whole = checkpoint_all_peak_bytes(problem.graph) + problem.resident_bytes
    size = parse_size(value, field="ram", whole_bytes=whole)
    if size == 0:
        raise BudgetError(f"ram: expected at least 1 byte, got {value!r}")
    return size


def _deadline_s(problem: Problem) -> float | None:
    if problem.deadline is None:
        return None
    time_s = parse_time(problem.deadline, field="deadline", whole_s=problem.pass_time_s)
    if time_s == 0 and problem.pass_time_s > 0:
        raise BudgetError(f"deadline: expected a time above 0, got {problem.deadline!r}")
    return time_s


def _aux_bytes(problem: Problem) -> int | None:
    if problem.aux_bytes is None:
        return None if problem.costs.device is None else problem.costs.device.aux_bytes
    whole = checkpoint_all_peak_bytes(problem.graph)
    return parse_size(problem.aux_bytes, field="aux", whole_bytes=whole)


def _energy_j(problem: Problem) -> float | None:
    if problem.energy_budget is None:
        return None
    whole_j = problem.baseline_energy_j
    energy_j = parse_energy(problem.energy_budget, field="energy budget", whole_j=whole_j)
    if energy_j == 0 and whole_j > 0:
        raise BudgetError(
            f"energy budget: expected an energy above 0, got {problem.energy_budget!r}"
        )
    return energy_j


def _costs_beyond_numbers(problem: Problem) -> Iterator[str]:
    """Name costs too small to be divided, and those that add up to more than a number holds."""
    table, times = problem.table, len(problem.graph.nodes)
    source = f"{problem.costs.source}: " * bool(problem.costs.source)
    nodes = [node.name for node in problem.graph.nodes]
    tensors = [tensor.name for tensor in problem.graph.tensors]
    for unit in ("time_s", "energy_j"):
        columns = [f"{what}_{unit}" for what in ("compute", "page_in", "page_out")]
        costs = [
            (cost, name, column)
            for column, names in zip(columns, (nodes, tensors, tensors), strict=True)
            for cost, name in zip(getattr(table, column), names, strict=False)
        ]
        tiny = [entry for entry in costs if 0 < entry[0] < SMALLEST_COST]
        for cost, name, column in tiny[:1]:
            yield f"{source}{name}: {column}: expected 0 or at least 1e-300, got {cost:g}"
        power_w = max(1.0, problem.idle_power_w) if unit == "time_s" else 1.0
        if sum(cost for cost, _, _ in costs) * times * power_w == math.inf:
            cost, name, column = max(costs)
            yield (
                f"{source}{name}: {column}: {cost:g} is too large: with the other costs, over "
                f"{times} stages, it exceeds the largest number; give smaller figures"
            )
