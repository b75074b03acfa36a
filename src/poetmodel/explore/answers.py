"""Views of a point on a page: charts, decisions and words, by the report's own functions."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import PlanError, VerificationError
from poetmodel.explore.tasks import (
    Frame,
    StatedProblem,
    Talk,
    gzipped,
    read_choice,
    read_problem,
    unpack_schedule,
)
from poetmodel.graph import Phase
from poetmodel.planner import make_plan, verify
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reasons
from poetmodel.problem.objective import transfer_mode
from poetmodel.report.charts import address_chart, gauge_chart, map_chart
from poetmodel.report.facts import commands, decision_rows, facts
from poetmodel.report.folding import decision_table
from poetmodel.report.subject import Sources, Subject, document_of
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import answers
from poetmodel.result import SolveResult, Status, Termination

if TYPE_CHECKING:
    from poetmodel.explore.choice import Catalogue
    from poetmodel.schedule import Verdict

LABEL: Final = "A"
"""The label of the one schedule."""


def draw(job: dict[str, Any], talk: Talk) -> Frame:
    """Draw the schedule that came along; reply with the answer, gzipped JSON."""
    subject = subject_of(job, talk)
    stated = facts(subject)
    charts = {
        "timeline": timeline_chart(subject),
        "map": map_chart(subject.graph, subject.schedule),
        "decisions": decision_table(decision_rows(subject.problem, subject.schedule)),
        "gauge": gauge_chart([subject]),
    }
    if job["proof"]["final"]:
        charts["addresses"] = address_chart(subject)
    drawn = {
        "charts": {name: chart for name, chart in charts.items() if chart is not None},
        "answers": [asdict(answer) for answer in answers(stated)],
        "facts": stated,
        "command": lines_of(job, talk, subject),
    }
    return Frame(body=gzipped(drawn))


def lines_of(job: dict[str, Any], talk: Talk, subject: Subject) -> list[str]:
    """Return the lines that reproduce a point: of a step file those that make its C, if they can.

    The RAM of the point is that for tensors; stack, inputs and runtime come on top of it.
    """
    from poetmodel.export.deployment import reserved_bytes, stack_bytes

    known, search, deadline_s = read_choice(job, talk), job["search"], job["deadline_s"]
    step, choice = known.source.step, known.choice
    device, profile = talk.catalogue.cost_options(choice)
    if step is None or choice.minimize != "energy" or device is None:
        return list(commands(subject))
    stack = stack_bytes(None, commit=choice.commit is not None)
    given = {
        "--device": device,
        "--profile": profile,
        "--ram": job["ram_bytes"] + reserved_bytes(replace(step, inference=None), stack),
        "--commit-every": choice.commit,
        "--deadline": None if deadline_s is None else f"{deadline_s!r}s",
        "--time-limit": search["time_limit"],
        "--gap": search["gap"],
        "--out": f"{file_stem(known.source.graph.name)}-c",
    }
    words = [f"{word}" for pair in given.items() if pair[1] is not None for word in pair]
    switches = [f"--no-{name}" for name in ("paging", "recompute") if not getattr(choice, name)]
    return [shlex.join(["poetmodel", "export", known.source.name, *words, *switches])]


def result_of(job: dict[str, Any], talk: Talk) -> tuple[SolveResult, Verdict]:
    """Return the result of a point, from the schedule that came along, and what verifies it."""
    problem, proof, search = read_problem(job, talk), job["proof"], job["search"]
    schedule = unpack_schedule(talk.body)
    verdict = verify(problem, schedule)
    if not verdict.valid:  # nothing unverified is shown
        raise VerificationError(verdict.violations)
    objective = problem.objective
    bound = min(proof["bound"], objective.overhead_of(verdict.simulation))
    result = SolveResult(
        problem=problem,
        status=Status(proof["status"]),
        termination=Termination(proof["termination"]),
        schedule=schedule,
        simulation=verdict.simulation,
        objective_bound=min(objective.baseline + bound, objective.value_of(verdict.simulation)),
        overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
        formulation="lazy",
        backend=search["backend"],
        solver_options=search.get("solver_options") or {},
        time_limit_s=search["time_limit"],
        requested_gap=search["gap"],
        build_s=proof["build_s"],
        solve_s=proof["solve_s"],
        versions=proof["versions"],
    )
    return result, verdict


def subject_of(job: dict[str, Any], talk: Talk) -> Subject:
    """Return the subject of a report: the schedule with its plan and its addresses."""
    from poetmodel.placement import place
    from poetmodel.plan import check_arena, check_plan

    result, verdict = result_of(job, talk)
    problem, schedule = result.problem, result.require_schedule()
    graph, costs = problem.graph, problem.costs
    known = read_choice(job, talk)
    notes, plan, check, places = [], None, None, None
    try:
        plan = make_plan(
            graph,
            costs,
            schedule,
            mode=transfer_mode(costs.device, problem.deadline_counts),
            ram_budget_bytes=problem.usable_ram_bytes,
        )
        check = check_plan(graph, costs, plan, aux_bytes=problem.aux_limit_bytes)
        if job["proof"]["final"] and not check.violations:
            places = check_arena(graph, plan, place(graph, plan))
    except PlanError as error:
        notes.append(f"there is no plan: {error}")
    return Subject(
        document=document_of(result),
        schedule=schedule,
        problem=problem,
        costs=costs,
        verdict=verdict,
        notes=tuple(notes),
        label=LABEL,
        sources=sources_of(known, talk.catalogue),
        plan=plan,
        check=check,
        places=places,
    )


def sources_of(known: StatedProblem, catalogue: Catalogue) -> Sources:
    """Return the command-line names of the parts of a choice."""
    device, profile = catalogue.cost_options(known.choice)
    return Sources(
        schedule=f"{file_stem(known.source.graph.name)}.schedule.json",
        graph=known.source.name,
        shape=known.source.shape,
        device=device,
        profile=profile,
    )


def file_stem(name: str) -> str:
    """Return a name as that of a file: letters, digits, dots and dashes alone."""
    return "".join(c if c.isascii() and (c.isalnum() or c in ".-_") else "-" for c in name)


# -- why not less ------------------------------------------------------------------------------


def why(job: dict[str, Any], talk: Talk) -> Frame:
    """Say which limits of a point no schedule can keep, and what the minimum RAM consists of."""
    problem = read_problem(job, talk)
    graph, least = problem.graph, problem.floor
    node = graph.nodes[least.node]
    apart = set(graph.state_of)
    resident = 0 if problem.can_page else graph.state_bytes
    if resident or problem.reads_in_place:
        apart.update(graph.state_tensors)
    used = dict.fromkeys((*graph.inputs_of[least.node], *graph.outputs_of[least.node]))
    held = [
        {
            "tensor": graph.tensors[i].name,
            "index": i,
            "bytes": graph.tensor_bytes[i],
            "role": "output" if graph.node_of[i] == least.node else "input",
        }
        for i in used
        if i not in apart
    ]
    needs = least.bytes + problem.resident_bytes
    reasons = list(infeasibility_reasons(problem))
    return Frame(
        values={
            "text": "; ".join(reasons) or _open(problem, needs),
            "reasons": reasons,
            "node": node.name,
            "phase": str(Phase(node.phase)),
            "least_bytes": needs,
            "missing_bytes": max(0, needs - problem.ram_budget_bytes),
            "held": sorted(held, key=lambda tensor: -tensor["bytes"]),
            "workspace_bytes": node.workspace_bytes,
            "state_bytes": resident,
            "shared_bytes": graph.shared_bytes(least.node, graph.inputs_of[least.node]),
            "resident_bytes": problem.resident_bytes,
            "single_pass_s": problem.pass_time_s,
        }
    )


def _open(problem: Problem, needs: int) -> str:
    node = problem.graph.nodes[problem.floor.node].name
    return (
        f"nothing forbids a schedule at once: step {node!r} needs {needs:,} B, the minimum RAM; "
        "what the limits rule out together only a solve can tell"
    )
