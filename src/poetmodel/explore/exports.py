"""Exports of a point: schedule, plan, report, command, and C."""

from __future__ import annotations

import io
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any, Final

from poetmodel.errors import InputError, PlanError
from poetmodel.explore.answers import (
    export_options,
    file_stem,
    lines_of,
    result_of,
    subject_of,
)
from poetmodel.explore.tasks import Frame, Talk, read_choice
from poetmodel.schedule.relations import dump

LEAST_RATIO: Final = 0.25
"""Share of the time limit that C gets however long it waited for a worker."""


def export(job: dict[str, Any], talk: Talk) -> Frame:
    """Reply with a file, its name and its type; `InputError` where there is none."""
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


def _c(job: dict[str, Any], talk: Talk) -> Frame:
    """Solve the captured step again, as ``poetmodel export`` does, and pack the folder.

    The time limit is for the wait until a worker was free, too; a part is left in any case.
    """
    from poetmodel.export.exporting import export_step

    known = read_choice(job, talk)
    given = export_options(job, talk, known)
    step = known.source.step
    if step is None:
        raise InputError("there is no captured step")
    name = file_stem(step.graph.name)
    limit_s, waited_s = given["time_limit"], time.time() - job["asked_s"]
    given["time_limit"] = max(limit_s - waited_s, LEAST_RATIO * limit_s)
    with tempfile.TemporaryDirectory() as folder:
        export_step(step, Path(folder), **given)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(Path(folder).rglob("*")):
                if path.is_file():
                    archive.write(path, f"{name}/{path.relative_to(folder)}")
    return _file(f"{name}.zip", "application/zip", packed.getvalue())


_KINDS = {"schedule": _schedule, "plan": _plan, "report": _report, "command": _command, "c": _c}
