"""The figures of a report as plain values, for ``--json`` and for the page."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.device.ram import device_ram_metrics
from poetmodel.files import installed_version
from poetmodel.problem import USER_OBJECTIVE, Problem
from poetmodel.problem.parse import COMMIT_CONSTRAINT
from poetmodel.report.presenter import document, metric_facts, state_figures
from poetmodel.result import gap_over_time, relative_gap
from poetmodel.schedule.decisions import (
    Treatment,
    find_decisions,
    in_place_uses,
    saved_in_place_bytes,
)
from poetmodel.schedule.metrics import Display, Group, metrics_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from poetmodel.graph import Graph
    from poetmodel.report.subject import Sources, Subject
    from poetmodel.schedule import Schedule
    from poetmodel.schedule.io import ConstraintEntry, ProblemEntry

CHOICES: Final = {
    **{choice: str(choice) for choice in Treatment},
    Treatment.BOTH: "recomputed and paged",
    Treatment.UNUSED: "never read",
}
"""The decisions on tensors, as a report calls them."""


def facts(subject: Subject) -> dict[str, Any]:
    """Return all facts of a report about one schedule, plain values in SI units.

    Energies and times are None without costs. Figures come from the simulator; bounds are those
    that the file states.
    """
    simulation, timed = subject.simulation, subject.costs is not None
    stated = subject.document.problem

    def metrics(*groups: Group) -> dict[str, Any]:
        return document(metric_facts(Display.REPORT, simulation, *groups, timed=timed))

    return {
        "label": subject.label,
        "file": subject.sources.schedule,
        "status": subject.document.status,
        "valid": subject.verdict.valid,
        "violations": list(subject.verdict.violations),
        "notes": [*filter(None, (subject.graph.exactness,)), *subject.notes],
        **metrics(Group.ENERGY),
        **_proof(subject),
        "asks_energy": subject.problem.uses_energy,
        **metrics(Group.MEMORY),
        "peak_ram_bytes": subject.peak_ram_bytes,
        "budget_bytes": subject.budget_bytes,
        **device_ram_metrics(subject.room),
        **metrics(Group.WORK, Group.STEP),
        "pass_s": subject.problem.pass_time_s if timed else None,
        "deadline_time_s": simulation.time_s if timed else None,
        **metrics(Group.STORAGE),
        **_homes(subject),
        **metrics(Group.WEAR),
        **{
            metric.key: subject.document.stated.get(metric.key)
            for metric in metrics_at(Display.REPORT, Group.EFFORT)
        },
        "constraints": [constraint.to_dict() for constraint in subject.constraints],
        "binding": _binding(subject),
        "plan": _plan(subject),
        "decisions": _counts(subject),
        "problem": None if stated is None else _problem(stated, subject),
        "device": _device(subject),
        "versions": _versions(subject),
        "commands": list(commands(subject)),
        "step": None if subject.step is None else dict(subject.step),
    }


def choices_of(graph: Graph) -> list[str]:
    """Return the decisions that there may be on tensors of a graph, as a report calls them."""
    of_state = (Treatment.RESIDENT, Treatment.ON_STORAGE, Treatment.REPLACEMENT)
    choices = [choice for choice in CHOICES if graph.state_tensors or choice not in of_state]
    return [CHOICES[choice] for choice in choices]


def graph_facts(subject: Subject) -> dict[str, Any]:
    """Return the facts about the graph, which all schedules share.

    Of a compiled step, its RAM figures are those of the step, reserved bytes included. With state
    the minimum RAM is that of the problem: storage may be memory-mapped, or not allowed.
    """
    graph, lowest = subject.graph, subject.problem.floor
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
        "floor_bytes": lowest.bytes + subject.reserved_bytes,
        "floor_node": graph.nodes[lowest.node].name,
        "resident_bytes": dict(graph.resident_bytes),
        **({"state": state} if graph.state_tensors else {}),
    }


def _proof(subject: Subject) -> dict[str, Any]:
    """Return the bounds that the file states, and the gap of what was minimized.

    For energy it is that between the stated bound and what is simulated here. Where something else
    was minimized, a file may say of the energy only what every schedule pays: that is no bound.
    """
    stated, simulation = subject.document.stated, subject.simulation
    overhead_j, bound_j = simulation.overhead_j, stated.get("overhead_bound_j")
    problem, objective = subject.document.problem, subject.document.objective
    of_energy = objective is None or objective.minimize == "energy"
    gap = None if objective is None or of_energy else objective.gap
    if of_energy and None not in (subject.costs, overhead_j, bound_j):
        gap = relative_gap(overhead_j or 0.0, bound_j or 0.0)
    is_known = of_energy or bool(bound_j)
    return {
        "bound_j": stated.get("bound_j") if is_known else None,
        "overhead_bound_j": bound_j if is_known else None,
        "gap": gap,
        "requested_gap": None if problem is None else problem.gap,
        "gap_over_time": [list(pair) for pair in gap_over_time(subject.document.history)] or None,
        "objective": None if objective is None else objective.model_dump(exclude_unset=True),
    }


def _problem(stated: ProblemEntry, subject: Subject) -> dict[str, Any]:
    """Return the stated problem; own constraints and weights only where there are any.

    The budget of a compiled step is that of the step.
    """
    values = stated.model_dump()
    values["ram_budget_bytes"] += subject.reserved_bytes
    return {
        key: value
        for key, value in values.items()
        if value or key not in {"constraints", "weights", "solver_options"}
    }


def _binding(subject: Subject) -> dict[str, Any]:
    graph, simulation = subject.graph, subject.simulation
    peak = simulation.peak
    held = sorted(simulation.peak_tensors, key=lambda i: (-graph.tensor_bytes[i], i))
    return {
        "stage": peak.stage,
        "node": graph.nodes[peak.node].name if graph.nodes else "",
        "ram_bytes": peak.ram_bytes + subject.reserved_bytes,
        "other_bytes": subject.reserved_bytes
        + peak.ram_bytes
        - sum(graph.tensor_bytes[i] for i in held),
        "tensors": [{"name": graph.tensors[i].name, "bytes": graph.tensor_bytes[i]} for i in held],
    }


def _homes(subject: Subject) -> dict[str, Any]:
    """Return the facts on state and on operators in place, if there are any."""
    state, sizes = state_figures(subject.graph, subject.simulation), {}
    if state is not None:
        sizes["state"] = state
    if any(subject.graph.in_place_of):
        saved = saved_in_place_bytes(subject.problem, subject.schedule, subject.simulation)
        uses = len(in_place_uses(subject.graph, subject.schedule))
        sizes["in_place"] = {"uses": uses, "saved_at_peak_bytes": saved}
    return sizes


def _plan(subject: Subject) -> dict[str, Any] | None:
    plan, check = subject.plan, subject.check
    if plan is None or check is None:
        return None
    return {
        "mode": str(plan.mode),
        "instructions": len(plan.program),
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "energy_j": check.energy_j,
        "peak_ram_bytes": check.peak_ram_bytes + subject.reserved_bytes,
        "violations": list(check.violations),
    }


def _counts(subject: Subject) -> dict[str, Any]:
    counts = Counter(row["choice"] for row in decision_rows(subject.problem, subject.schedule))
    schedule = subject.schedule
    return {
        "tensors": {choice: counts[choice] for choice in choices_of(subject.graph)},
        "recomputations": sum(k < t for t, k in schedule.R),
        "page_outs": sum(subject.simulation.page_outs.values()),
        "page_ins": sum(subject.simulation.page_ins.values()),
    }


def _device(subject: Subject) -> dict[str, Any] | None:
    costs = subject.costs
    if costs is None:
        return None
    values: dict[str, Any] = {"costs": costs.source or None, "name": None}
    if costs.cycles is not None:
        values["cycles"] = costs.cycles.text
    device = costs.device
    if device is None:
        return values
    words = {key: getattr(device, key) or None for key in ("key", "core", "source")}
    return {**values, **asdict(device), **words}


def _versions(subject: Subject) -> dict[str, str]:
    """Return the installed versions of poetmodel and of the packages of the back end."""
    stated = subject.document.problem
    backend = (stated and stated.backend) or ""
    packages = (backend_class(backend).package,) if backend in backend_names() else ()
    names = ("poetmodel", *packages)
    return {name: version for name in names if (version := installed_version(name))}


def commands(subject: Subject) -> Iterator[str]:
    """Yield the commands that solve the problem of a schedule again and verify the schedule.

    They are lines for a POSIX shell, limits with all digits; for a compiled PyTorch step, lines of
    Python. Without a stated problem or without costs a schedule can only be verified.
    """
    if subject.step is not None:
        yield f"step = {subject.step['call']}\nprint(step.verify().summary())"
        return
    sources, stated = subject.sources, subject.document.problem
    device = sources.device if sources.device is not None else subject.document.device
    costs = [*_option("--device", device), *_option("--profile", sources.profile)]
    if stated is not None and subject.costs is not None:
        if _states_own_sums(stated):
            lines = "\n".join(_own_sums(stated))
            yield f"cat > {shlex.quote(_rows_file(sources))} <<'TOML'\n{lines}\nTOML"
        yield shlex.join(_solve(sources, stated, costs))
    verify = ["poetmodel", "verify", sources.schedule, "--graph", sources.graph]
    yield shlex.join([*verify, *sources.shape.options, *costs])


def _solve(sources: Sources, stated: ProblemEntry, costs: list[str]) -> list[str]:
    deadline = None if stated.deadline_s is None else f"{stated.deadline_s!r}s"
    energy = None if stated.energy_budget_j is None else f"{stated.energy_budget_j!r}J"
    switches = {
        "--no-recompute": not stated.recompute,
        "--no-paging": not stated.paging,
        "--count-parameters": stated.count_parameters,
    }
    return [
        *("poetmodel", "solve", sources.graph, *sources.shape.options, *costs),
        *_option("--ram", stated.ram_budget_bytes),
        *_option("--aux", stated.aux_bytes),
        *_option("--deadline", deadline),
        *_option("--deadline-counts", stated.deadline_counts),
        *_option(
            "--minimize", None if stated.minimize in ("energy", USER_OBJECTIVE) else stated.minimize
        ),
        *_option("--commit-every", stated.commit),
        *_option("--constraints", _rows_file(sources) if _states_own_sums(stated) else None),
        *_option("--energy-budget", energy),
        *(switch for switch, wanted in switches.items() if wanted),
        *_option("--method", None if stated.method == "optimal" else stated.method),
        *_option("--formulation", stated.formulation or None),
        *_option("--backend", stated.backend or None),
        *_option("--time-limit", stated.time_limit_s),
        *_option("--gap", stated.gap),
        *(
            word
            for name, value in stated.solver_options.items()
            for word in ("--solver-option", f"{name}={value}")
        ),
        *("--out", sources.schedule),
    ]


def _rows_file(sources: Sources) -> str:
    """Return the path of the constraints of a schedule: beside it."""
    return f"{sources.schedule.removesuffix('.json').removesuffix('.schedule')}.constraints.toml"


def _own_rows(stated: ProblemEntry) -> list[ConstraintEntry]:
    """Return the constraints of a problem except the one that ``--commit-every`` adds."""
    return [
        row for row in stated.constraints if row.name != COMMIT_CONSTRAINT or stated.commit is None
    ]


def _states_own_sums(stated: ProblemEntry) -> bool:
    return bool(_own_rows(stated)) or stated.minimize == USER_OBJECTIVE


def _own_sums(stated: ProblemEntry) -> Iterator[str]:
    """Yield the lines of a file with the constraints and the own objective of a problem."""
    for row in _own_rows(stated):
        limits = {"at_least": row.lower, "at_most": row.upper}
        if row.lower == row.upper:
            limits = {"equals": row.upper}
        yield "[[constraint]]"
        yield f"name = {_toml(row.name)}"
        yield f"sum = {_toml(row.terms)}"
        yield from (f"{key} = {limit!r}" for key, limit in limits.items() if limit is not None)
    if stated.minimize == USER_OBJECTIVE:
        yield "[objective]"
        yield f"sum = {_toml(stated.weights)}"


def _toml(value: str | Mapping[str, float]) -> str:
    """Return a text or a table of numbers as TOML has them, on one line."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{{{', '.join(f'{_toml(key)} = {number!r}' for key, number in value.items())}}}"


def _option(option: str, value: object) -> tuple[str, ...]:
    """Return an option with its value; nothing without a value."""
    return () if value is None else (option, f"{value}")


def decision_rows(problem: Problem, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yield a row for each tensor, in the order of the graph.

    If a node has several tensors, the first one has the cost of recomputing the node, so that
    energies add up to the overhead (without idle power during overlapping transfers).
    """
    graph = problem.graph
    resident = set(schedule.resident)
    starts_in_ram: Counter[int] = Counter()
    for i, first, last in schedule.kept:
        starts_in_ram[i] += last - first + 1
    for decision in find_decisions(problem, schedule):
        i = decision.tensor
        k = graph.node_of[i]
        not_its_own = 0 if graph.outputs_of[k][0] == i else len(decision.recomputed)
        yield {
            "tensor": graph.tensors[i].name,
            "node": graph.nodes[k].name,
            "size_bytes": graph.tensor_bytes[i],
            "choice": CHOICES[decision.choice],
            "first_stage": k,
            "last_stage": decision.in_ram[-1][1] if decision.in_ram else k,
            "ram_stages": len(graph.nodes) if i in resident else starts_in_ram[i],
            "recomputed": len(decision.recomputed),
            "paged_out": len(decision.paged_out),
            "paged_in": len(decision.paged_in),
            "energy_j": decision.energy_j - not_its_own * problem.energy.coefficients.compute[k],
            "time_s": decision.time_s - not_its_own * problem.table.compute_time_s[k],
        }
