"""Several schedules on common axes: RAM over the time of plans, and the RAM of their device."""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from poetmodel.device.room import DeviceRoom, RamUse, gauge, keep_all_use
from poetmodel.plan import Op
from poetmodel.report.charts import line_colours
from poetmodel.report.pictures import rounded, size_unit, time_unit
from poetmodel.report.presenter import escaped
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from poetmodel.graph import Graph
    from poetmodel.plan import Plan, PlanCheck
    from poetmodel.report.subject import Subject

LEAST: Final = 2
"""Plans that are worth common axes."""


def overlay_chart(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """Return the RAM curves of schedules over one time axis; None unless two have plans.

    ``curves``: label and name of each, the corners of its curve (from a time on so much RAM), and
    its budget.
    """
    planned = [
        (subject, subject.plan, subject.check)
        for subject in subjects
        if subject.plan is not None and subject.check is not None
    ]
    if len(planned) < LEAST:
        return None
    factor, unit = time_unit(max(check.makespan_s or 0.0 for _, _, check in planned))
    sizes = [
        max(check.peak_ram_bytes, plan.ram_budget_bytes or 0) + subject.reserved_bytes
        for subject, plan, check in planned
    ]
    scale, size = size_unit(max(sizes))
    curves = []
    for subject, plan, check in planned:
        corners = list(_corners(subject.graph, plan, check))
        base, budget = subject.reserved_bytes, plan.ram_budget_bytes
        budget = None if budget is None else budget + base
        curves.append(
            {
                "label": subject.label,
                "name": escaped(subject.sources.schedule),
                "x": [rounded(time / factor) for time, _ in corners],
                "y": [rounded((base + ram) / scale) for _, ram in corners],
                "budget": None if budget is None else rounded(budget / scale),
                "budget_name": "" if budget is None else format_bytes(budget),
            }
        )
    return {"curves": curves, "time": unit, "size": size, "colours": line_colours()}


def gauge_chart(subjects: Sequence[Subject]) -> dict[str, Any] | None:
    """Return what schedules take of the RAM of their device, and what keep-all would take.

    None where no device is known. ``rows``: label, RAM, parts, and what is free or missing [B];
    ``keep_all``: the same of keep-all on each device that the schedules have.
    """
    known = [each for each in subjects if each.room is not None and each.verdict.valid]
    if not known:
        return None
    rows = [_gauge(each.label, each.room) for each in known]
    rooms: dict[str, dict[str, Any]] = {}
    for each in known:
        device, graph = each.problem.costs.device, each.graph
        room = DeviceRoom.of(device, graph, keep_all_use(graph))
        if room is not None:
            rooms[room.device] = _gauge("keep-all", room)
    return {"rows": rows, "keep_all": list(rooms.values())}


def _gauge(label: str, room: DeviceRoom | None) -> dict[str, Any]:
    found: Mapping[str, Any] = gauge(room) or {}
    return {
        "label": label,
        "device": "" if room is None else room.device,
        "ram": found["ram_bytes"],
        "parts": [found[part.name] for part in fields(RamUse)],
        "free": found["free_bytes"],
        "missing": found["missing_bytes"],
    }


def _corners(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[tuple[float, int]]:
    """Yield from when on how much RAM is in use, wherever that changes.

    What is there for no time at all, such as a peak within a free, is a point before what stays.
    """
    before = -1
    end_s = check.makespan_s or 0.0
    for time_s, levels in groupby(_levels(graph, plan, check), key=itemgetter(0)):
        found = [ram for _, ram in levels]
        if max(found) > max(found[-1], before):
            yield time_s, max(found)
        if found[-1] != before or time_s == end_s:
            yield time_s, found[-1]
        before = found[-1]


def _levels(graph: Graph, plan: Plan, check: PlanCheck) -> Iterator[tuple[float, int]]:
    yield 0.0, sum(graph.tensor_bytes[i] for i in plan.resident or ())
    first_reads = plan.first_reads(graph)
    for (op, index), moment in zip(plan.program, check.moments, strict=True):
        computes = op == Op.COMPUTE and index not in first_reads
        yield moment.issued_s, moment.high_bytes
        yield (moment.end_s if computes else moment.issued_s), moment.ram_bytes
    if check.moments:
        yield check.makespan_s or 0.0, check.moments[-1].ram_bytes
