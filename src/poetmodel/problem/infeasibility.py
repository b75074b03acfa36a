"""Messages on the reasons of infeasibility that are found without a solver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.errors import join_names
from poetmodel.problem import (
    USER_CONSTRAINTS,
    Coefficients,
    LinearRow,
    Problem,
    is_within,
    min_negative_sum,
)
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_BYTES_WITHOUT_UNIT: Final = 10_000
"""Largest budget that is suspected to lack its unit [B]."""
MISSING_UNIT_RATIO: Final = 20
"""Ratio of the minimum to a budget above which the budget is suspected to lack its unit. The hint
requires this ratio and a budget of at most `MAX_BYTES_WITHOUT_UNIT`."""


def infeasibility_reason(problem: Problem) -> str | None:
    """Return the first of `infeasibility_reasons`; None if no reason is evident."""
    return next(infeasibility_reasons(problem), None)


def infeasibility_reasons(problem: Problem) -> Iterator[str]:
    """Yield a message for each limit that no schedule meets, even without the other limits."""
    faults = (
        _ram_fault(problem),
        commit_space_fault(problem),
        _deadline_fault(problem),
        _energy_fault(problem),
    )
    yield from filter(None, faults)
    yield from _constraint_faults(problem)


def infeasibility_proof(problem: Problem, ending: str = "together", *, ram: bool = True) -> str:
    """Return the sentence that no schedule meets the limits; the caller has proved this.

    `ending` follows the list of limits, which omits the RAM budget unless `ram`.
    """
    limits_text = ", ".join(_limit_phrases(problem, ram=ram))
    return f"proved: no schedule meets {limits_text} {ending}{_forbidden_text(problem)}"


def describe_limits(problem: Problem, *, ram: bool = True) -> str:
    """Return limits (without the budget unless `ram`), constraints and forbidden decisions."""
    return ", ".join(_limit_phrases(problem, ram=ram)) + _forbidden_text(problem)


def _forbidden_text(problem: Problem) -> str:
    """Return a phrase that recomputation or paging is impossible; "" if both are possible."""
    names = ["recomputation"] * (not problem.recompute) + ["paging"] * (not problem.can_page)
    return f", without {' or '.join(names)}" if names else ""


def _limit_phrases(problem: Problem, *, ram: bool) -> list[str]:
    """Return a phrase for each limit, such as ``the storage of 8 B``; `ram` adds the RAM budget."""
    phrases = [f"the RAM budget of {problem.ram_budget_bytes:,} B"] if ram else []
    if problem.deadline_s is not None:
        phrases.append(f"the deadline of {problem.deadline_s:.6g} s ({problem.deadline_counts})")
    if problem.energy_budget_j is not None:
        phrases.append(f"the energy budget of {problem.energy_budget_j:.6g} J")
    limit_bytes = problem.aux_limit_bytes
    if (
        limit_bytes is not None
        and problem.can_page
        and limit_bytes < sum(problem.graph.tensor_bytes)
    ):
        phrases.append(f"the storage of {problem.aux_limit_bytes:,} B")
    rows = [f"{row.name!r} ({row.describe_limits()})" for row in problem.constraints]
    if rows:
        phrases.append(f"the constraint{'s' * (len(rows) > 1)} {join_names(rows)}")
    return phrases


def _ram_fault(problem: Problem) -> str | None:
    """Return a message if the minimum RAM exceeds the budget minus resident bytes, else None."""
    graph = problem.graph
    floor = problem.floor
    if floor.bytes <= problem.usable_ram_bytes:
        return None
    node = graph.nodes[floor.node]
    contents = list(_floor_contents(problem))
    minimum_text = format_bytes(floor.bytes)
    rounded_text = "" if minimum_text == f"{floor.bytes:,} B" else f" ({minimum_text})"
    resident_text = total_text = ""
    resident_bytes = problem.resident_bytes
    if resident_bytes:
        total_text = (
            f"; {floor.bytes + resident_bytes:,} B with the parameters, gradients and optimizer"
        )
        resident_text = f", of which parameters, gradients and optimizer take {resident_bytes:,} B"
    return (
        f"RAM budget {problem.ram_budget_bytes:,} B{resident_text}: the minimum RAM is "
        f"{floor.bytes:,} B{rounded_text}, which node {node.name!r} needs for "
        f"{join_names(contents)}{total_text}"
        f"{missing_unit_hint(problem.ram_budget_bytes, floor.bytes)}"
    )


def missing_unit_hint(budget_bytes: int, min_bytes: int) -> str:
    """Return a hint that a small budget lacks its unit if it is far below the minimum, else ""."""
    if budget_bytes > MAX_BYTES_WITHOUT_UNIT or min_bytes <= MISSING_UNIT_RATIO * budget_bytes:
        return ""
    percentage = f"{budget_bytes}% or " if budget_bytes <= 100 else ""  # noqa: PLR2004 - percent
    return f"; {budget_bytes} is {budget_bytes} bytes: did you mean {percentage}{budget_bytes}KiB?"


def _floor_contents(problem: Problem) -> Iterator[str]:
    """Yield the contents of the minimum RAM with their sizes, such as ``conv1 (64 B)``."""
    graph, k = problem.graph, problem.floor.node
    omitted_tensors = set(graph.state_of)  # Replacements use the memory of their state tensors.
    resident_state_bytes = not problem.can_page and graph.state_bytes
    if resident_state_bytes or problem.reads_in_place:
        omitted_tensors.update(graph.state_tensors)
    for i in (*graph.inputs_of[k], *graph.outputs_of[k]):
        if i not in omitted_tensors:
            yield f"{graph.tensors[i].name} ({graph.tensor_bytes[i]:,} B)"
    if graph.nodes[k].workspace_bytes:
        yield f"workspace ({graph.nodes[k].workspace_bytes:,} B)"
    if resident_state_bytes:
        yield f"all state ({resident_state_bytes:,} B), which without paging stays in RAM"
    shared_bytes = graph.shared_bytes(k, graph.inputs_of[k])
    if shared_bytes:
        yield f"{shared_bytes:,} B less where it operates in place"


def commit_space_fault(problem: Problem) -> str | None:
    """Return a message if storage cannot hold the two generations of commits, else None.

    Commits go to the device's flash if it has flash and its storage is volatile.
    """
    commit, device = problem.table.commit, problem.costs.device
    if commit is None:
        return None
    flash = None if device is None or not device.is_volatile else device.flash
    available_bytes = problem.aux_limit_bytes if flash is None else flash.storage_bytes
    if available_bytes is None or 2 * commit.generation_bytes <= available_bytes:
        return None
    return (
        f"commit: two generations of state take {2 * commit.generation_bytes:,} B in whole blocks, "
        f"and {available_bytes:,} B are available; train fewer parameters, or never commit"
    )


def _deadline_fault(problem: Problem) -> str | None:
    """Return a message if a single pass exceeds the deadline, else None."""
    if is_within(problem.pass_time_s, problem.deadline_s):
        return None
    commit_s = problem.pass_time_s - problem.pass_compute_s
    transfer_note = hint = ""
    if not problem.counts_compute_alone:
        transfer_note = f", without any transfer{' but commits' if commit_s > 0 else ''}"
    if commit_s > 0:
        hint = _commit_hint(problem, format_seconds(commit_s))
    return (
        f"deadline {format_seconds(problem.deadline_s or 0.0)}: a single pass over all nodes "
        f"already takes {problem.pass_time_s:.9g} s{transfer_note}; no schedule is faster{hint}"
    )


def _commit_hint(problem: Problem, amount_text: str) -> str:
    """Return a hint that commits take `amount_text` and can be rarer; "" if there are none."""
    if problem.table.commit is None:
        return ""
    interval = 2 * (problem.commit or 1)
    return (
        f"; commits of state take {amount_text} of it: commit only once in {interval} steps, or "
        "less often"
    )


def _energy_fault(problem: Problem) -> str | None:
    """Return a message if a single pass exceeds the energy budget, else None."""
    if is_within(problem.baseline_energy_j, problem.energy_budget_j):
        return None
    commit_j = problem.commit_cost.energy_j
    hint = _commit_hint(problem, format_joules(commit_j)) if commit_j > 0 else ""
    return (
        f"energy budget {format_joules(problem.energy_budget_j or 0.0)}: a single pass over all "
        f"nodes already takes {problem.baseline_energy_j:.9g} J; no schedule needs less{hint}"
    )


def _constraint_faults(problem: Problem) -> Iterator[str]:
    """Yield a message for each user constraint that no schedule meets.

    The best value is that of a single pass in which every rewarded decision is made as often as
    possible. Per-stage constraints are not compared.
    """
    constraints = {row.name: row for row in problem.constraints}
    for limit in problem.linear_limits:
        if limit.name != USER_CONSTRAINTS or limit.upper >= 0:
            continue
        rewards = min_negative_sum(problem.graph, _allowed_coefficients(problem, limit))
        if rewards <= limit.upper:
            continue
        name, side = limit.key
        best_value = limit.baseline + rewards
        best_value, direction, extreme = (
            (best_value, "less", "least") if side == "upper" else (-best_value, "more", "most")
        )
        row = constraints[name]
        formatted_value = row.format_value(float(f"{best_value + 0.0:.9g}"))
        value_text = f"{formatted_value} at {extreme}"
        if rewards == 0:
            value_text = f"{formatted_value}, as a single pass does, and never to {direction}"
        yield f"constraint {name!r}, {row.describe_limits()}: schedules come to {value_text}"


def _allowed_coefficients(problem: Problem, limit: LinearRow) -> Coefficients:
    """Return the coefficients of a row, with 0 for decisions that the problem forbids."""
    coefficients = limit.coefficients
    return Coefficients(
        compute=[
            value if problem.may_recompute(k) else 0 for k, value in enumerate(coefficients.compute)
        ],
        page_in=coefficients.page_in if problem.can_page else [0] * len(coefficients.page_in),
        page_out=coefficients.page_out if problem.can_page else [0] * len(coefficients.page_out),
        storage_home=coefficients.storage_home
        if problem.can_page
        else [0] * len(coefficients.storage_home),
    )
