"""Reasons that rule a problem out before any solver is asked, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from poetmodel.errors import listed
from poetmodel.problem import (
    CONSTRAINTS,
    Coefficients,
    DeadlineCounts,
    LinearRow,
    Problem,
    largest_rewards,
    within,
)
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_WITHOUT_UNIT: Final = 10_000
"""Sizes below this may be meant in another unit than bytes."""
FAR_BELOW: Final = 20
"""A size is far below another one if it is this many times smaller."""


def obstacle(problem: Problem) -> str | None:
    """Return why no schedule can keep the limits, or None if that is not obvious.

    Looks at what every schedule pays: the minimum RAM, and the time and energy of a single pass;
    and at what an own constraint can come to at the very best.
    """
    return next(obstacles(problem), None)


def obstacles(problem: Problem) -> Iterator[str]:
    """Yield each limit that no schedule can keep whatever the other limits are, in words."""
    parts = (_ram(problem), no_generations(problem), _time(problem), _energy(problem))
    yield from filter(None, parts)
    yield from _constraints(problem)


def nothing_keeps(problem: Problem, further: str = "together", *, ram: bool = True) -> str:
    """Return a sentence: it is proved that no schedule keeps the limits of a problem, and more.

    Without `ram`, the RAM budget is left out.
    """
    return f"proved: no schedule keeps {limits_in_words(problem, ram=ram)} {further}"


def limits_in_words(problem: Problem, *, ram: bool = True) -> str:
    """Return the limits of a problem as a phrase; without `ram`, all but the RAM budget."""
    parts = [f"the RAM budget of {problem.ram_budget_bytes:,} B"] if ram else []
    if problem.deadline_s is not None:
        parts.append(f"the deadline of {problem.deadline_s:.6g} s ({problem.deadline_counts})")
    if problem.energy_budget_j is not None:
        parts.append(f"the energy budget of {problem.energy_budget_j:.6g} J")
    room = problem.aux_limit_bytes
    if room is not None and problem.can_page and room < sum(problem.graph.tensor_bytes):
        parts.append(f"the storage of {problem.aux_limit_bytes:,} B")
    rows = [f"{row.name!r} ({row.limits_in_words()})" for row in problem.constraints]
    if rows:
        parts.append(f"the constraint{'s' * (len(rows) > 1)} {listed(rows)}")
    if not problem.recompute:
        parts.append("no recomputation")
    if not problem.can_page:
        parts.append("no paging")
    return ", ".join(parts)


def _ram(problem: Problem) -> str | None:
    graph = problem.graph
    least = problem.floor
    if least.bytes <= problem.usable_ram_bytes:
        return None
    node = graph.nodes[least.node]
    tensors = list(_at_floor(problem))
    short = format_bytes(least.bytes)
    rounded = "" if short == f"{least.bytes:,} B" else f" ({short})"
    resident = whole = ""
    taken = problem.resident_bytes
    if taken:
        whole = f"; {least.bytes + taken:,} B with the parameters, gradients and optimizer"
        resident = f", of which parameters, gradients and optimizer take {taken:,} B"
    return (
        f"RAM budget {problem.ram_budget_bytes:,} B{resident}: the minimum RAM is "
        f"{least.bytes:,} B{rounded}, which step {node.name!r} needs for {listed(tensors)}{whole}"
        f"{unit_remark(problem.ram_budget_bytes, least.bytes)}"
    )


def refusal(
    what: str,
    budget_bytes: int,
    *,
    enough_bytes: int | None,
    needed_bytes: int = 0,
    whole_bytes: int | None = None,
    is_proved: bool = True,
) -> str:
    """Return why a RAM budget cannot be kept, and the least one that is known to do.

    Less than `needed_bytes` never is enough; what is enough is None where nothing was found. The
    budget was a share of `whole_bytes`, if given. Without a proof a longer search may find more.
    """
    text = f"ram: {format_bytes(budget_bytes)} is too little for {what}"
    remark = "" if whole_bytes else unit_remark(budget_bytes, needed_bytes)
    if not is_proved:
        text = f"ram: nothing was found in time for {what} within {format_bytes(budget_bytes)}"
        remark = "; a longer time_limit may find it"
    if enough_bytes is None:
        return text + remark
    enough = f"ram={enough_bytes}"
    if whole_bytes:
        enough += f" ({enough_bytes / whole_bytes:.1%})"
    if needed_bytes >= enough_bytes:
        return f"{text}: the least is {enough}{remark}"
    return f"{text}: {enough} is enough, and less than {needed_bytes:,} B never is{remark}"


def unit_remark(given_bytes: int, least_bytes: int) -> str:
    """Return the size probably meant if this one is far too small: its unit is missing."""
    if given_bytes >= MOST_WITHOUT_UNIT or least_bytes <= FAR_BELOW * given_bytes:
        return ""
    meant = f"{given_bytes}% or " if given_bytes <= 100 else ""  # noqa: PLR2004 - percent
    return f"; {given_bytes} is {given_bytes} bytes: did you mean {meant}{given_bytes}KiB?"


def _at_floor(problem: Problem) -> Iterator[str]:
    """Yield what takes RAM at the step of the largest working set, in words."""
    graph, k = problem.graph, problem.floor.node
    apart = set(graph.state_of)  # in the memory of what they replace
    resident = not problem.can_page and graph.state_bytes
    if resident or problem.reads_in_place:
        apart.update(graph.state_tensors)
    for i in (*graph.inputs_of[k], *graph.outputs_of[k]):
        if i not in apart:
            yield f"{graph.tensors[i].name} ({graph.tensor_bytes[i]:,} B)"
    if graph.nodes[k].workspace_bytes:
        yield f"workspace ({graph.nodes[k].workspace_bytes:,} B)"
    if resident:
        yield f"all state ({resident:,} B), which without paging stays in RAM"
    shared_bytes = graph.shared_bytes(k, graph.inputs_of[k])
    if shared_bytes:
        yield f"{shared_bytes:,} B less where it operates in place"


def no_generations(problem: Problem) -> str | None:
    """Return why storage has no room for what commits write; None where it has, or none is."""
    commit, device = problem.table.commit, problem.costs.device
    if commit is None:
        return None
    flash = None if device is None or not device.is_volatile else device.flash
    room = problem.aux_limit_bytes if flash is None else flash.storage_bytes
    if room is None or 2 * commit.generation_bytes <= room:
        return None
    return (
        f"commit: two generations of state take {2 * commit.generation_bytes:,} B in whole blocks, "
        f"and there are {room:,} B for them; train fewer parameters, or never commit"
    )


def _time(problem: Problem) -> str | None:
    if within(problem.pass_time_s, problem.deadline_s):
        return None
    extra = "" if problem.deadline_counts == DeadlineCounts.COMPUTE else ", without any transfer"
    return (
        f"deadline {format_seconds(problem.deadline_s or 0.0)}: a single pass over all nodes "
        f"already takes {problem.pass_time_s:.9g} s{extra}; no schedule is faster"
        f"{_committed(problem, format_seconds(problem.committing.time_s))}"
    )


def _committed(problem: Problem, amount: str) -> str:
    """Return the share of commits in a single pass, and a remedy; empty without them."""
    if problem.table.commit is None:
        return ""
    more = 2 * (problem.commit or 1)
    return f"; {amount} of it commit state: commit in every {more}-th step only, or more seldom"


def _energy(problem: Problem) -> str | None:
    if within(problem.baseline_energy_j, problem.energy_budget_j):
        return None
    return (
        f"energy budget {format_joules(problem.energy_budget_j or 0.0)}: a single pass over all "
        f"nodes already takes {problem.baseline_energy_j:.9g} J; no schedule needs less"
        f"{_committed(problem, format_joules(problem.committing.energy_j))}"
    )


def _constraints(problem: Problem) -> Iterator[str]:
    stated = {row.name: row for row in problem.constraints}
    for limit in problem.linear_limits:
        if limit.name != CONSTRAINTS or limit.upper >= 0:
            continue
        rewards = largest_rewards(problem.graph, _possible(problem, limit))
        if rewards <= limit.upper:
            continue
        name, side = limit.key
        best = limit.baseline + rewards
        best, more, most = (best, "less", "least") if side == "upper" else (-best, "more", "most")
        row, amount = stated[name], stated[name].amount(float(f"{best + 0.0:.9g}"))
        words = f"{amount} at {most}"
        if rewards == 0:
            words = f"{amount}, as a single pass does, and never to {more}"
        yield f"constraint {name!r}, {row.limits_in_words()}: schedules come to {words}"


def _possible(problem: Problem, limit: LinearRow) -> Coefficients:
    """Return the terms of a limited sum from the decisions that a problem allows."""
    of = limit.coefficients
    return Coefficients(
        compute=[value if problem.may_recompute(k) else 0 for k, value in enumerate(of.compute)],
        page_in=of.page_in if problem.can_page else [0] * len(of.page_in),
        page_out=of.page_out if problem.can_page else [0] * len(of.page_out),
        storage_home=of.storage_home if problem.can_page else [0] * len(of.storage_home),
    )
