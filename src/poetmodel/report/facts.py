"""Facts of a report as JSON values, for ``--json`` and for the page."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.device.ram import device_ram_metrics
from poetmodel.files import installed_version
from poetmodel.problem import USER_OBJECTIVE, Problem
from poetmodel.report.presenter import metric_facts, state_metrics, to_json_object
from poetmodel.result import gap_over_time, relative_gap
from poetmodel.schedule.decisions import (
    Treatment,
    find_decisions,
    in_place_uses,
    saved_in_place_bytes,
)
from poetmodel.schedule.metrics import Display, Group, metrics_at
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.case.case import Case
    from poetmodel.case.opening import Checked
    from poetmodel.graph import Graph
    from poetmodel.schedule import Schedule
    from poetmodel.schedule.io import ConstraintEntry, ProblemEntry

TREATMENT_NAMES: Final = {
    **{treatment: str(treatment) for treatment in Treatment},
    Treatment.BOTH: "recomputed and paged",
    Treatment.UNUSED: "never read",
}
"""Names of the treatments of tensors in a report."""


def schedule_facts(subject: Checked) -> dict[str, Any]:
    """Return all facts of a report about one schedule as JSON values in SI units.

    Metrics are those of the simulator; bounds and times of the solve are those stated in the file.
    For a compiled step, peak and budget include reserved bytes, and the peak is that of its plan.
    """
    simulation, has_costs = subject.simulation, subject.costs is not None
    stated_problem = subject.document.problem

    def metrics(*groups: Group) -> dict[str, Any]:
        return to_json_object(
            metric_facts(Display.REPORT, simulation, *groups, has_costs=has_costs)
        )

    return {
        "label": subject.label,
        "file": subject.file,
        "status": subject.document.status,
        "valid": subject.verdict.valid,
        "violations": list(subject.verdict.violations),
        "notes": [*filter(None, (subject.graph.exactness,)), *subject.notes],
        **metrics(Group.ENERGY),
        **_bound_facts(subject),
        "asks_energy": subject.problem.uses_energy,
        **metrics(Group.MEMORY),
        "peak_ram_bytes": subject.peak_ram_bytes,
        "budget_bytes": subject.budget_bytes,
        **device_ram_metrics(subject.device_ram),
        **metrics(Group.WORK, Group.STEP),
        "pass_s": subject.problem.pass_time_s if has_costs else None,
        "deadline_time_s": simulation.time_s if has_costs else None,
        **metrics(Group.STORAGE),
        **_state_facts(subject),
        **metrics(Group.WEAR),
        **{
            metric.key: subject.document.stated_metrics.get(metric.key)
            for metric in metrics_at(Display.REPORT, Group.EFFORT)
        },
        "constraints": [constraint.to_dict() for constraint in subject.constraints],
        "binding": _peak_facts(subject),
        "plan": _plan_facts(subject),
        "decisions": _decision_counts(subject),
        "problem": None if stated_problem is None else _problem_facts(stated_problem, subject),
        "device": _device_facts(subject),
        "versions": _versions(subject),
        "commands": list(reproduction_commands(subject)),
        "step": None if subject.step is None else dict(subject.step),
    }


def treatment_names(graph: Graph) -> list[str]:
    """Return the names of the treatments that tensors of a graph can have."""
    state_treatments = (Treatment.RESIDENT, Treatment.ON_STORAGE, Treatment.REPLACEMENT)
    treatments = [
        treatment
        for treatment in TREATMENT_NAMES
        if graph.state_tensors or treatment not in state_treatments
    ]
    return [TREATMENT_NAMES[treatment] for treatment in treatments]


def graph_facts(subject: Checked) -> dict[str, Any]:
    """Return the facts about the graph, which all schedules of a report share.

    Keep-all peak and minimum RAM of a compiled step include reserved bytes. The minimum RAM is that
    of the problem: for a graph with state it depends on storage and paging.
    """
    graph, min_ram = subject.graph, subject.problem.floor
    state = {"tensors": len(graph.state_tensors), "bytes": graph.state_bytes}
    return {
        "name": graph.name,
        "sha256": graph.sha256,
        "nodes": len(graph.nodes),
        "tensors": len(graph.tensors),
        "edges": graph.n_edges,
        "flops": graph.flops,
        "batch_size": graph.batch_size,
        "dtype": graph.dtype,
        "checkpoint_all_peak_bytes": subject.keep_all_bytes,
        "floor_bytes": min_ram.bytes + subject.reserved_bytes,
        "floor_node": graph.nodes[min_ram.node].name,
        "resident_bytes": dict(graph.resident_bytes),
        **({"state": state} if graph.state_tensors else {}),
    }


def _bound_facts(subject: Checked) -> dict[str, Any]:
    """Return bounds, objective, gap tolerance and gaps over time of the file, and the gap.

    ``gap`` is that of the minimized quantity. If this is not energy, ``bound_j`` and
    ``overhead_bound_j`` are None unless the stated bound on the overhead is above 0.
    """
    stated_metrics, simulation = subject.document.stated_metrics, subject.simulation
    overhead_j, overhead_bound_j = simulation.overhead_j, stated_metrics.get("overhead_bound_j")
    problem, objective_entry = subject.document.problem, subject.document.objective
    minimizes_energy = objective_entry is None or objective_entry.minimize == "energy"
    gap = None if objective_entry is None or minimizes_energy else objective_entry.gap
    if minimizes_energy and None not in (subject.costs, overhead_j, overhead_bound_j):
        gap = relative_gap(overhead_j or 0.0, overhead_bound_j or 0.0)
    is_bound_known = minimizes_energy or bool(overhead_bound_j)
    return {
        "bound_j": stated_metrics.get("bound_j") if is_bound_known else None,
        "overhead_bound_j": overhead_bound_j if is_bound_known else None,
        "gap": gap,
        "requested_gap": None if problem is None else problem.gap,
        "gap_over_time": [list(pair) for pair in gap_over_time(subject.document.history)] or None,
        "objective": None
        if objective_entry is None
        else objective_entry.model_dump(exclude_unset=True),
    }


def _problem_facts(stated: ProblemEntry, subject: Checked) -> dict[str, Any]:
    """Return the stated problem; the budget of a compiled step includes the reserved bytes."""
    values = stated.model_dump()
    values["ram_budget_bytes"] += subject.reserved_bytes
    return {key: value for key, value in values.items() if value not in ([], {})}


def _peak_facts(subject: Checked) -> dict[str, Any]:
    """Return the first step with the simulated peak RAM, and its tensors in RAM, largest first.

    ``ram_bytes`` includes reserved bytes. ``other_bytes`` is the rest, such as workspace; it is
    negative if outputs overwrite more bytes in place.
    """
    graph, simulation = subject.graph, subject.simulation
    peak = simulation.peak
    peak_tensors = sorted(simulation.peak_tensors, key=lambda i: (-graph.tensor_bytes[i], i))
    return {
        "stage": peak.stage,
        "node": graph.nodes[peak.node].name if graph.nodes else "",
        "ram_bytes": peak.ram_bytes + subject.reserved_bytes,
        "other_bytes": subject.reserved_bytes
        + peak.ram_bytes
        - sum(graph.tensor_bytes[i] for i in peak_tensors),
        "tensors": [
            {"name": graph.tensors[i].name, "bytes": graph.tensor_bytes[i]} for i in peak_tensors
        ],
    }


def _state_facts(subject: Checked) -> dict[str, Any]:
    """Return ``state`` and ``in_place`` of a schedule, each only if its graph has any."""
    state_values, values = state_metrics(subject.graph, subject.simulation), {}
    if state_values is not None:
        values["state"] = state_values
    if any(subject.graph.in_place_of):
        saved_bytes = saved_in_place_bytes(subject.problem, subject.schedule, subject.simulation)
        n_uses = len(in_place_uses(subject.graph, subject.schedule))
        values["in_place"] = {"uses": n_uses, "saved_at_peak_bytes": saved_bytes}
    return values


def _plan_facts(subject: Checked) -> dict[str, Any] | None:
    """Return the facts about the plan; the peak includes reserved bytes. None without a plan."""
    if subject.planned is None:
        return None
    plan, check = subject.planned.plan, subject.planned.check
    return {
        "mode": str(plan.mode),
        "instructions": len(plan.program),
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "energy_j": check.energy_j,
        "peak_ram_bytes": check.peak_ram_bytes + subject.reserved_bytes,
        "violations": list(check.violations),
    }


def _decision_counts(subject: Checked) -> dict[str, Any]:
    """Return numbers of tensors by treatment, of recomputations, page-outs and page-ins."""
    counts = Counter(row["choice"] for row in decision_rows(subject.problem, subject.schedule))
    schedule = subject.schedule
    return {
        "tensors": {choice: counts[choice] for choice in treatment_names(subject.graph)},
        "recomputations": sum(k < t for t, k in schedule.R),
        "page_outs": sum(subject.simulation.page_outs.values()),
        "page_ins": sum(subject.simulation.page_ins.values()),
    }


def _device_facts(subject: Checked) -> dict[str, Any] | None:
    """Return the source of the costs, and all fields of the device; None without costs.

    Without a device, its fields are absent, except ``name``, which is None. ``cycles`` is a text
    about the cycles of the compute times.
    """
    costs = subject.costs
    if costs is None:
        return None
    values: dict[str, Any] = {"costs": costs.source or None, "name": None}
    if costs.cycles is not None:
        values["cycles"] = costs.cycles.text
    device = costs.device
    if device is None:
        return values
    texts = {key: getattr(device, key) or None for key in ("key", "core", "source")}
    return {**values, **asdict(device), **texts}


def _versions(subject: Checked) -> dict[str, str]:
    stated_problem = subject.document.problem
    backend = (stated_problem and stated_problem.backend) or ""
    packages = (backend_class(backend).package,) if backend in backend_names() else ()
    names = ("poetmodel", *packages)
    return {name: version for name in names if (version := installed_version(name))}


def reproduction_commands(subject: Checked) -> Iterator[str]:
    """Yield the POSIX shell commands that solve a problem again and verify the schedule.

    Limits have all digits. Without a stated problem or costs, only the verification remains. For a
    compiled step, yields one text with lines of Python.
    """
    if subject.step is not None:
        yield f"step = {subject.step['call']}\nprint(step.verify().summary())"
        return
    case, stated_problem = subject.case, subject.document.problem
    if case.device is None:
        case = replace(case, device=subject.document.device)
    if stated_problem is not None and subject.costs is not None:
        case = _stated_case(case, stated_problem)
        limited = Problem.from_limits(subject.graph, subject.costs, case.limits)
        own_names = {row.name for row in limited.constraints}
        rows = [row for row in stated_problem.constraints if row.name not in own_names]
        if rows or stated_problem.minimize == USER_OBJECTIVE:
            case = replace(case, constraint_files=(_constraints_file(subject.file),))
            lines = "\n".join(_constraint_lines(rows, stated_problem))
            yield f"cat > {shlex.quote(case.constraint_files[0])} <<'TOML'\n{lines}\nTOML"
        yield case.command("solve", out=subject.file)
    yield case.verification_command(subject.file)


def _stated_case(case: Case, stated: ProblemEntry) -> Case:
    """Return the case of a stated problem, without user-defined sums."""
    minimize = None if stated.minimize in ("energy", USER_OBJECTIVE) else stated.minimize
    default = SearchOptions()
    return replace(
        case,
        limits=replace(stated.limits(), minimize=minimize),
        search=SearchOptions(
            method=stated.method,
            formulation=stated.formulation,
            backend=default.backend if stated.backend is None else stated.backend,
            time_limit_s=default.time_limit_s
            if stated.time_limit_s is None
            else stated.time_limit_s,
            gap=default.gap if stated.gap is None else stated.gap,
            solver_options=stated.solver_options,
        ),
    )


def _constraints_file(file: str) -> str:
    """Return the path of a constraints file next to the schedule file, with the same stem."""
    return f"{file.removesuffix('.json').removesuffix('.schedule')}.constraints.toml"


def _constraint_lines(rows: Sequence[ConstraintEntry], stated: ProblemEntry) -> Iterator[str]:
    """Yield the lines of a TOML file for ``--constraints``, a user-defined objective last."""
    for row in rows:
        limits_by_key = {"at_least": row.lower, "at_most": row.upper}
        if row.lower == row.upper:
            limits_by_key = {"equals": row.upper}
        yield "[[constraint]]"
        yield f"name = {_format_toml(row.name)}"
        yield f"sum = {_format_toml(row.terms)}"
        yield from (
            f"{key} = {limit!r}" for key, limit in limits_by_key.items() if limit is not None
        )
    if stated.minimize == USER_OBJECTIVE:
        yield "[objective]"
        yield f"sum = {_format_toml(stated.weights)}"


def _format_toml(value: str | Mapping[str, float]) -> str:
    """Return a text or a table of numbers as a TOML value on one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{{{', '.join(f'{_format_toml(key)} = {number!r}' for key, number in value.items())}}}"


def decision_rows(problem: Problem, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yield one row of decisions for each tensor, in the order of the graph.

    ``last_stage`` is the last stage with the tensor in RAM, ``ram_stages`` the number of stages
    that begin with it there. Of the tensors of a node, only the first has the cost of recomputing
    the node, so that the energies sum to the overhead (without idle power if transfers overlap).
    """
    graph = problem.graph
    resident = set(schedule.resident)
    n_ram_stages: Counter[int] = Counter()
    for i, first, last in schedule.kept:
        n_ram_stages[i] += last - first + 1
    for decision in find_decisions(problem, schedule):
        i = decision.tensor
        k = graph.node_of[i]
        n_uncounted = 0 if graph.outputs_of[k][0] == i else len(decision.recomputed)
        yield {
            "tensor": graph.tensors[i].name,
            "node": graph.nodes[k].name,
            "size_bytes": graph.tensor_bytes[i],
            "choice": TREATMENT_NAMES[decision.treatment],
            "first_stage": k,
            "last_stage": decision.in_ram[-1][1] if decision.in_ram else k,
            "ram_stages": len(graph.nodes) if i in resident else n_ram_stages[i],
            "recomputed": len(decision.recomputed),
            "paged_out": len(decision.paged_out),
            "paged_in": len(decision.paged_in),
            "energy_j": decision.energy_j - n_uncounted * problem.energy.coefficients.compute[k],
            "time_s": decision.time_s - n_uncounted * problem.table.compute_time_s[k],
        }
