"""Result table of a solve, and its facts for other commands."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli.output import fact_table
from poetmodel.graph import Graph, checkpoint_all_peak_bytes
from poetmodel.problem import USER_OBJECTIVE, DeadlineCounts, Problem, Quantity
from poetmodel.problem.totals import format_terms
from poetmodel.report.presenter import (
    Fact,
    constraint_facts,
    device_ram_facts,
    format_items,
    format_percent,
    metric_facts,
    state_facts,
    text_fact,
    wear_facts,
)
from poetmodel.result import SolveResult, Status, Termination, relative_gap
from poetmodel.schedule import Schedule, Simulation, constraint_values
from poetmodel.schedule.metrics import Display, Group
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.table import Table

    from poetmodel.solver.tile_trials import TileTrial


MIN_SHOWN_S: Final = 1e-3
"""Minimum duration that is listed [s]."""

DEADLINE_TEXTS: Final = {
    DeadlineCounts.COMPUTE: "compute time alone",
    DeadlineCounts.SERIAL: "compute plus transfer time",
    DeadlineCounts.OVERLAP: "the makespan, where transfers overlap computation",
}
"""Descriptions of the times that a deadline can limit."""

TERMINATION_TEXTS: Final = {
    Termination.PROVED: "proven optimal within the gap tolerance",
    Termination.TIME_LIMIT: "stopped at the time limit, with a gap above the tolerance",
    Termination.INTERRUPTED: "interrupted; this is the best schedule so far",
    Termination.STALLED: "the solver stopped with a gap above the tolerance",
}
"""Descriptions of the reasons why a solve with a schedule stopped."""


def result_table(result: SolveResult, *, total_s: float, read_s: float) -> Table:
    """Return the table of a result; raise `NoScheduleError` if it has no schedule.

    `total_s` includes `read_s`, the time in which the program started and read its inputs [s].
    """
    schedule, simulation = result.require_schedule(), result.simulation
    problem = result.problem
    device = problem.costs.device
    device_name = device.short_name if device is not None else problem.costs.source
    facts = list(proof_facts(result))
    if simulation is not None:
        facts += _memory_facts(problem, simulation)
        facts += device_ram_facts(result.device_ram)
        facts += decision_facts(problem.graph, schedule, simulation)
        facts += metric_facts(Display.SOLVE, simulation, Group.STORAGE)
        facts += wear_facts(Display.SOLVE, simulation)
        facts += time_facts(problem, simulation)
        facts += constraint_facts(constraint_values(problem, simulation))
    facts += _effort_facts(result, total_s=total_s, read_s=read_s)
    return fact_table(
        f"{problem.graph.name} on {device_name}" if device_name else problem.graph.name, facts
    )


def proof_facts(result: SolveResult) -> Iterator[Fact]:
    """Yield the status, noting why the solve stopped, and the minimized value, bound and gap."""
    reason = TERMINATION_TEXTS[result.termination]
    if result.termination == Termination.STALLED and _is_solved_model_proved(result):
        reason = "proved for the model that was solved, which is not the stated problem"
    if result.violations:
        reason = "rejected by the verifier, see below"
    if not result.backend and result.termination == Termination.STALLED:
        reason = f"method {result.method!r} proves no bound"
    yield text_fact("status", str(result.status), reason)
    if result.problem.graph.exactness:
        yield text_fact("numbers", result.problem.graph.exactness)
    if result.problem.minimize == Quantity.ENERGY:
        yield from _energy_facts(result)
        yield text_fact("gap", _format_gap(result), f"of the overhead; {_tolerance_text(result)}")
        return
    yield from _objective_facts(result)
    if result.problem.uses_energy:
        yield from _energy_facts(result)


def tile_facts(
    tile_bytes: int | None, trials: Sequence[TileTrial], problem: Problem
) -> Iterator[Fact]:
    """Yield the tile size, unless None, and in one fact the sizes that were tried, if any."""
    if tile_bytes is not None:
        yield text_fact("tiles", format_bytes(tile_bytes), f"--tile {tile_bytes}B")
    if trials:
        format_value = problem.objective.format
        trial_texts = (
            f"{format_bytes(trial.tile_bytes)}: "
            + ("no schedule" if trial.value is None else format_value(trial.value))
            for trial in trials
        )
        yield text_fact(
            "tiles tried", "; ".join(trial_texts), "each for a fraction of the time limit"
        )


def _is_solved_model_proved(result: SolveResult) -> bool:
    """Return whether the solver's solution is proved optimal for its model, within the tolerance.

    The model may differ from the problem: it is that of ``paper``, or a restriction of the problem.
    """
    statistics = result.statistics
    value, bound = statistics.get("model_value"), statistics.get("model_bound")
    if statistics.get("restricted_status") is not None:
        return bool(statistics["restricted_status"] == Status.OPTIMAL)
    return (
        value is not None
        and bound is not None
        and relative_gap(value, bound) <= result.requested_gap
    )


def _energy_facts(result: SolveResult) -> Iterator[Fact]:
    """Yield energy, overhead and, if one is proven, the bound on the energy."""
    baseline_j, overhead_j = result.problem.baseline_energy_j, result.overhead_j or 0.0
    baseline_note = (
        f"baseline {format_joules(baseline_j)}: a single pass that computes every node once"
    )
    ratio_text = (
        f"{format_percent(overhead_j / baseline_j)} of the baseline" if baseline_j > 0 else ""
    )
    if result.simulation is not None:
        notes = {"energy_j": baseline_note, "overhead_j": ratio_text}
        yield from metric_facts(Display.SOLVE, result.simulation, Group.ENERGY, notes=notes)
    if result.bound_j is not None:
        bound_note = f"no schedule has an overhead below {format_joules(result.overhead_bound_j)}"
        yield text_fact("proven bound", format_joules(result.bound_j), bound_note)


def _objective_facts(result: SolveResult) -> Iterator[Fact]:
    """Yield the minimized value with its bound, and the gap; for other objectives than energy."""
    minimize, objective = result.problem.minimize, result.problem.objective
    value, bound = (objective.format(number or 0.0) for number in (result.value, result.bound))
    name, remark = f"minimized {minimize}", ""
    if minimize == USER_OBJECTIVE:
        name, remark = "user-defined objective", f"{format_terms(result.problem.user_objective)}; "
    elif minimize == Quantity.TIME and objective.baseline > 0:
        increase = format_percent((result.overhead or 0.0) / objective.baseline)
        remark = f"{increase} more than a single pass; "
    is_proved_minimum = (
        bool(result.problem.graph.replacement_of) and result.status == Status.OPTIMAL
    )
    if minimize == Quantity.RAM and is_proved_minimum:
        remark = f"the least RAM in which this network trains{_conditions_text(result.problem)}; "
    yield text_fact(name, value, f"{remark}bound {bound}")
    yield text_fact("gap", _format_gap(result), f"of the {name}; {_tolerance_text(result)}")


def _format_gap(result: SolveResult) -> str:
    return format_percent(result.gap or 0.0, digits=3)


def _tolerance_text(result: SolveResult) -> str:
    return f"tolerance {format_percent(result.requested_gap)}"


def _conditions_text(problem: Problem) -> str:
    """Return " within the other limits", or " at all" if there is no limit but RAM."""
    limits = (problem.deadline_s, problem.energy_budget_j, problem.constraints or None)
    storage_bytes, tensor_bytes = problem.aux_limit_bytes, sum(problem.graph.tensor_bytes)
    is_unlimited = (
        problem.recompute
        and problem.can_page
        and all(limit is None for limit in limits)
        and (storage_bytes is None or storage_bytes >= tensor_bytes)
    )
    return " at all" if is_unlimited else " within the other limits"


def _memory_facts(problem: Problem, simulation: Simulation) -> Iterator[Fact]:
    """Yield peak RAM, with budget and keep-all peak in a note, and resident bytes, if any."""
    graph, peak_bytes = problem.graph, simulation.peak_ram_bytes
    resident_bytes = graph.total_resident_bytes
    used_bytes = peak_bytes + (resident_bytes if problem.count_parameters else 0)
    budget = format_bytes(problem.ram_budget_bytes)
    fraction_text = format_percent(used_bytes / problem.ram_budget_bytes, digits=3)
    keep_all_text = format_bytes(checkpoint_all_peak_bytes(graph))
    resident_remark = (
        ", resident bytes included" if problem.count_parameters and resident_bytes else ""
    )
    peak_note = (
        f"{fraction_text} of the budget of {budget}{resident_remark}; keep-all: {keep_all_text}"
    )
    notes = {"peak_ram_bytes": peak_note}
    yield from metric_facts(Display.SOLVE, simulation, Group.MEMORY, notes=notes)
    if resident_bytes:
        kind_names = ", ".join(kind for kind, size in graph.resident_bytes.items() if size)
        counting_text = "counted in the budget"
        if not problem.count_parameters:
            counting_text = "needed in addition to the budget"
        yield text_fact(
            "resident RAM", format_bytes(resident_bytes), f"{kind_names}: {counting_text}"
        )


def decision_facts(graph: Graph, schedule: Schedule, simulation: Simulation) -> Iterator[Fact]:
    """Yield counts and bytes of homes of state, recomputations, transfers and kept tensors.

    Kept tensors are not state, have readers, and stay in RAM until their last use.
    """
    recomputations = [k for t, k in schedule.R if k < t]
    recomputed = set(recomputations)
    never_kept = {*simulation.page_ins, *simulation.page_outs, *graph.state_tensors}
    kept_tensors = [
        i
        for i, users in enumerate(graph.users_of)
        if users and i not in never_kept and graph.node_of[i] not in recomputed
    ]
    recomputed_bytes = sum(graph.nodes[k].output_bytes for k in recomputations)
    yield from state_facts(graph, simulation)
    yield text_fact(
        "recomputed",
        _times_text(len(recomputations)),
        f"{format_bytes(recomputed_bytes)} of outputs",
    )
    for name, counts, bytes_text in (
        ("paged out", simulation.page_outs, f"{format_bytes(simulation.paged_bytes)} written"),
        ("paged in", simulation.page_ins, f"{format_bytes(simulation.read_bytes)} read"),
    ):
        yield text_fact(name, _times_text(sum(counts.values())), bytes_text)
    kept_bytes_text = format_bytes(sum(graph.tensor_bytes[i] for i in kept_tensors))
    note = f"{kept_bytes_text} that stay in RAM from first computation to last use"
    yield text_fact("kept", format_items(len(kept_tensors), "tensor"), note)


def time_facts(problem: Problem, simulation: Simulation) -> Iterator[Fact]:
    """Yield core and bus times, cost of commits, times of the step, deadline and energy budget."""
    compute_note = f"a single pass takes {format_seconds(problem.pass_time_s)}"
    makespan_note = "of the plan, where transfers overlap computation"
    notes = {"compute_s": compute_note, "makespan_s": makespan_note}
    group_facts = partial(metric_facts, Display.SOLVE, simulation, notes=notes)
    model = problem.costs.cycles
    for fact in group_facts(Group.WORK):
        yield fact
        if fact.key == "compute_s" and model is not None:
            yield text_fact("  cycles", model.rate_text, f"{model.origin}; {model.label}")
    yield from commit_facts(problem)
    yield from group_facts(
        Group.STEP, unlisted_keys=() if simulation.planned_s is not None else ("makespan_s",)
    )
    if problem.deadline_s is not None:
        used_s = simulation.time_s or 0.0
        counts = DeadlineCounts(problem.deadline_counts or DeadlineCounts.SERIAL)
        fraction_text = (
            f", {format_percent(used_s / problem.deadline_s, digits=3)}"
            if problem.deadline_s
            else ""
        )
        yield text_fact(
            "deadline",
            format_seconds(problem.deadline_s),
            f"{counts}: {DEADLINE_TEXTS[counts]}; {format_seconds(used_s)} used{fraction_text}",
        )
    if problem.energy_budget_j is not None:
        yield text_fact("energy budget", format_joules(problem.energy_budget_j))


def commit_facts(problem: Problem) -> Iterator[Fact]:
    """Yield the time and energy of commits per step: 1/N of a commit every N steps."""
    commit, cost = problem.table.commit, problem.commit_cost
    if commit is not None:
        frequency_text = "every step" if problem.commit == 1 else f"1/{problem.commit} of a commit"
        writes_text = f"{format_bytes(commit.written_bytes)} and {commit.erased_blocks:.4g} erases"
        cost_text = f"{format_seconds(cost.time_s)}, {format_joules(cost.energy_j)}"
        yield text_fact(
            "commit", cost_text, f"{frequency_text}: {writes_text}, included in the single pass"
        )


def _effort_facts(result: SolveResult, *, total_s: float, read_s: float) -> Iterator[Fact]:
    """Yield time by activity, size of the model, and solver; `total_s` includes `read_s` [s]."""
    seconds_by_activity = {
        "reading": read_s,
        "building": result.build_s,
        "solving": result.solve_s - result.verify_s,
        "verifying": result.verify_s,
    }
    seconds_by_activity["other"] = total_s - sum(seconds_by_activity.values())
    activity_texts = [
        f"{name} {format_seconds(seconds)}"
        for name, seconds in seconds_by_activity.items()
        if seconds >= MIN_SHOWN_S
    ]
    limit_text = f"; limit {format_seconds(result.time_limit_s)}" if result.time_limit_s else ""
    yield text_fact("time taken", format_seconds(total_s), ", ".join(activity_texts) + limit_text)
    size_texts = list(_model_size_texts(result.statistics))
    if size_texts:
        yield text_fact("solver's model", size_texts[0], ", ".join(size_texts[1:]))
    if not result.backend:
        yield text_fact("made by", result.method, "without a solver")
        return
    method_text = "" if result.method == "optimal" else f"method {result.method}"
    versions_text = ", ".join(
        f"{name} {version}" for name, version in result.versions.items() if name != "poetmodel"
    )
    notes = (method_text, f"formulation {result.formulation}", versions_text)
    yield text_fact("solved by", result.backend, "; ".join(note for note in notes if note))


def _model_size_texts(statistics: Mapping[str, Any]) -> Iterator[str]:
    for key in ("columns", "rows", "nonzeros", "rounds", "enforced_rows"):
        value = statistics.get(key)
        if value is not None:
            name = key.replace("_", " ")
            yield f"{value:,} {name.removesuffix('s') if value == 1 else name}"


def _times_text(count: int) -> str:
    return "once" if count == 1 else f"{count} times" if count else "nothing"
