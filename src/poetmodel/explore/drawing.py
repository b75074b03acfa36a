"""Drawings of a point: charts, decisions and texts, as in a report; and files about it."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from poetmodel.case.opening import Checked
from poetmodel.errors import PlanError, VerificationError
from poetmodel.explore.answer import NO_PROOF
from poetmodel.explore.tasks import (
    Frame,
    JobContext,
    load_job_case,
    load_prepared_case,
    to_gzipped_json,
    unpack_schedule,
)
from poetmodel.graph import Phase
from poetmodel.planner import verify
from poetmodel.problem import Problem, Quantity
from poetmodel.problem.infeasibility import infeasibility_reasons
from poetmodel.report.charts import gauge_chart, map_chart
from poetmodel.report.facts import decision_rows, reproduction_commands, schedule_facts
from poetmodel.report.folding import decision_table
from poetmodel.report.timeline import timeline_chart
from poetmodel.report.wording import schedule_answers
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule.relations import format_document

if TYPE_CHECKING:
    from poetmodel.schedule import Verdict


def draw_point(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: draw the schedule of a point; return the drawing as gzipped JSON."""
    subject = open_point(job, context)
    report_facts = schedule_facts(subject)
    charts = {
        "timeline": timeline_chart(subject),
        "map": map_chart(subject.graph, subject.schedule),
        "decisions": decision_table(decision_rows(subject.problem, subject.schedule)),
        "gauge": gauge_chart([subject]),
    }
    values = {
        "charts": {name: chart for name, chart in charts.items() if chart is not None},
        "answers": [asdict(answer) for answer in schedule_answers(report_facts)],
        "facts": report_facts,
        "command": point_commands(job, context, subject),
    }
    return Frame(body=to_gzipped_json(values))


def point_commands(job: dict[str, Any], context: JobContext, subject: Checked) -> list[str]:
    """Return shell commands that reproduce a point, or for a step file, if possible, export it."""
    from poetmodel.export.reserves import parse_stack, reserved_bytes

    prepared = load_prepared_case(job, context)
    settings, step = prepared.settings, prepared.step
    if step is None:
        return list(reproduction_commands(subject))
    reserved_stack_bytes = parse_stack(None, commit=settings.limits.commit is not None)
    extra_bytes = reserved_bytes(replace(step, inference=None), reserved_stack_bytes)
    case = replace(
        prepared.loaded.case.with_tile(None),
        limits=replace(
            settings.limits,
            ram=job["ram_bytes"] + extra_bytes,
            deadline=job["deadline_s"],
            minimize=None
            if prepared.loaded.problem.minimize == Quantity.ENERGY
            else settings.limits.minimize,
        ),
        search=job["search"],
    )
    if case.device is None or not case.is_exportable:
        return list(reproduction_commands(subject))
    folder = f"{file_stem(prepared.loaded.problem.graph.name)}-c"
    return [case.command("export", out=folder, options={"--tile": settings.shape.tile or "none"})]


def verified_result(job: dict[str, Any], context: JobContext) -> tuple[SolveResult, Verdict]:
    """Verify the schedule of a job; return a result with the schedule, and the verdict.

    The bound is the baseline plus the proof's bound on the overhead, at most the value.
    """
    problem, answer, search = load_job_case(job, context).problem, job["answer"], job["search"]
    proof = answer.proof or NO_PROOF
    schedule = unpack_schedule(context.body)
    verdict = verify(problem, schedule)
    if not verdict.valid:  # the page shows only verified schedules
        raise VerificationError(verdict.violations)
    objective = problem.objective
    bound = min(answer.bound, objective.overhead_of(verdict.simulation))
    result = SolveResult(
        problem=problem,
        status=Status(answer.status),
        termination=Termination(proof.termination),
        schedule=schedule,
        simulation=verdict.simulation,
        objective_bound=min(objective.baseline + bound, objective.value_of(verdict.simulation)),
        overhead_bound_j=bound if problem.minimize == Quantity.ENERGY else 0.0,
        formulation="lazy",
        backend=search.backend,
        solver_options=search.solver_options,
        time_limit_s=search.time_limit_s,
        requested_gap=search.gap,
        build_s=proof.build_s,
        solve_s=proof.solve_s,
        versions=proof.versions,
    )
    return result, verdict


def open_point(job: dict[str, Any], context: JobContext, *, has_addresses: bool = False) -> Checked:
    """Return the schedule of a point, with its plan if there is one.

    Addresses are chosen only for a plan without violations of a finished point.
    """
    result, verdict = verified_result(job, context)
    prepared = load_prepared_case(job, context)
    checked = Checked.of_result(
        result,
        case=prepared.loaded.case,
        file=f"{file_stem(prepared.loaded.problem.graph.name)}.schedule.json",
        verdict=verdict,
    )
    return checked.with_plan(has_addresses=has_addresses and job["answer"].proof is not None)


def file_stem(name: str) -> str:
    """Return a name with dashes for all characters but ASCII letters, digits and ``.-_``."""
    return "".join(
        character if character.isascii() and (character.isalnum() or character in ".-_") else "-"
        for character in name
    )


# -- reasons for infeasibility -----------------------------------------------------------------


def explain_infeasibility(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: return each limit that no schedule meets even alone, and tensors of the minimum RAM.

    Does not solve, so it may miss limits. The keys are those of the API.
    """
    problem = load_job_case(job, context).problem
    graph, min_ram = problem.graph, problem.floor
    node = graph.nodes[min_ram.node]
    excluded_tensors = set(graph.state_of)
    state_in_ram_bytes = 0 if problem.can_page else graph.state_bytes
    if state_in_ram_bytes or problem.reads_in_place:
        excluded_tensors.update(graph.state_tensors)
    node_tensors = dict.fromkeys((*graph.inputs_of[min_ram.node], *graph.outputs_of[min_ram.node]))
    tensors_in_ram = [
        {
            "tensor": graph.tensors[i].name,
            "index": i,
            "bytes": graph.tensor_bytes[i],
            "role": "output" if graph.node_of[i] == min_ram.node else "input",
        }
        for i in node_tensors
        if i not in excluded_tensors
    ]
    needed_bytes = min_ram.bytes + problem.resident_bytes
    reasons = list(infeasibility_reasons(problem))
    return Frame(
        values={
            "text": "; ".join(reasons) or _no_reason_text(problem, needed_bytes),
            "reasons": reasons,
            "node": node.name,
            "phase": str(Phase(node.phase)),
            "min_ram_bytes": needed_bytes,
            "missing_bytes": max(0, needed_bytes - problem.ram_budget_bytes),
            "tensors_in_ram": sorted(tensors_in_ram, key=lambda tensor: -tensor["bytes"]),
            "workspace_bytes": node.workspace_bytes,
            "state_bytes": state_in_ram_bytes,
            "shared_bytes": graph.shared_bytes(min_ram.node, graph.inputs_of[min_ram.node]),
            "resident_bytes": problem.resident_bytes,
            "single_pass_s": problem.pass_time_s,
        }
    )


def _no_reason_text(problem: Problem, needed_bytes: int) -> str:
    node = problem.graph.nodes[problem.floor.node].name
    return (
        f"no limit alone excludes a schedule: step {node!r} needs {needed_bytes:,} B, the minimum "
        "RAM; only a solve can determine whether the limits can be met together"
    )


# -- files -------------------------------------------------------------------------------------


def export_point(job: dict[str, Any], context: JobContext) -> Frame:
    """Task: return a file about a point: content as body, name and media type as values."""
    return _EXPORTERS[job["kind"]](job, context)


def _file_frame(name: str, media: str, body: bytes) -> Frame:
    return Frame(values={"name": name, "media": media}, body=body)


def _schedule_file(job: dict[str, Any], context: JobContext) -> Frame:
    result, _ = verified_result(job, context)
    name = f"{file_stem(result.problem.graph.name)}.schedule.json"
    return _file_frame(name, "application/json", format_document(result.to_dict()).encode())


def _plan_file(job: dict[str, Any], context: JobContext) -> Frame:
    """Return the plan file of a point, without an arena, even if the plan has violations."""
    subject = open_point(job, context)
    planned = subject.planned
    if planned is None:
        raise PlanError("; ".join(subject.notes) or "this schedule has no plan")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{file_stem(subject.graph.name)}.plan.json"
        planned.plan.save(path, planned.check, None)
        return _file_frame(path.name, "application/json", path.read_bytes())


def _report_file(job: dict[str, Any], context: JobContext) -> Frame:
    from poetmodel.report.page import report_page

    subject = open_point(job, context, has_addresses=True)
    page = report_page([subject]).encode("utf-8", "replace")
    return _file_frame(f"{file_stem(subject.graph.name)}.html", "text/html; charset=utf-8", page)


def _command_file(job: dict[str, Any], context: JobContext) -> Frame:
    lines = "\n".join(point_commands(job, context, open_point(job, context)))
    return _file_frame("command.sh", "text/x-shellscript; charset=utf-8", f"{lines}\n".encode())


_EXPORTERS = {
    "schedule": _schedule_file,
    "plan": _plan_file,
    "report": _report_file,
    "command": _command_file,
}
"""Functions that make a file, by the ``kind`` of a job."""
