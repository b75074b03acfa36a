"""Exports of a point: schedule, plan, report and command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from poetmodel.errors import PlanError
from poetmodel.explore.answers import (
    file_stem,
    open_point,
    point_commands,
    verified_result,
)
from poetmodel.explore.tasks import Frame, JobContext
from poetmodel.schedule.relations import format_document


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
