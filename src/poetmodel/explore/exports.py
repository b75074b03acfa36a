"""Exports of a point: schedule, plan, report and command."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from poetmodel.errors import PlanError
from poetmodel.explore.answers import (
    file_stem,
    lines_of,
    result_of,
    subject_of,
)
from poetmodel.explore.tasks import Frame, Talk
from poetmodel.schedule.relations import dump


def export(job: dict[str, Any], talk: Talk) -> Frame:
    """Reply with a file, its name and its type."""
    return _KINDS[job["kind"]](job, talk)


def _file(name: str, media: str, body: bytes) -> Frame:
    return Frame(values={"name": name, "media": media}, body=body)


def _schedule(job: dict[str, Any], talk: Talk) -> Frame:
    result, _ = result_of(job, talk)
    name = f"{file_stem(result.problem.graph.name)}.schedule.json"
    return _file(name, "application/json", dump(result.to_dict()).encode())


def _plan(job: dict[str, Any], talk: Talk) -> Frame:
    subject = subject_of(job, talk)
    if subject.plan is None or subject.check is None:
        raise PlanError("; ".join(subject.notes) or "this schedule has no plan")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{file_stem(subject.graph.name)}.plan.json"
        subject.plan.save(path, subject.check, None)
        return _file(path.name, "application/json", path.read_bytes())


def _report(job: dict[str, Any], talk: Talk) -> Frame:
    from poetmodel.report.page import report_page

    subject = subject_of(job, talk)
    page = report_page([subject]).encode("utf-8", "replace")
    return _file(f"{file_stem(subject.graph.name)}.html", "text/html; charset=utf-8", page)


def _command(job: dict[str, Any], talk: Talk) -> Frame:
    lines = "\n".join(lines_of(job, talk, subject_of(job, talk)))
    return _file("command.sh", "text/x-shellscript; charset=utf-8", f"{lines}\n".encode())


_KINDS = {"schedule": _schedule, "plan": _plan, "report": _report, "command": _command}
