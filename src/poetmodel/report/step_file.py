"""Compiled PyTorch steps as a report takes them: plain values, checked and verified again.

This module knows no PyTorch. What it reads is what ``step.report()`` of `poetmodel.torch` returns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError

from poetmodel.device import Costs, Device, StorageMode
from poetmodel.device.io import device_names
from poetmodel.errors import InputError
from poetmodel.files import parse_json
from poetmodel.graph.io import STEP_FORMAT, graph_from_dict
from poetmodel.plan import check_plan
from poetmodel.planner import make_plan, verify
from poetmodel.report.subject import Sources, Subject, in_graph
from poetmodel.schedule import check_identity
from poetmodel.schedule.io import (
    Finite,
    Index,
    Strict,
    document_from,
    exactly,
    faults_of,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from poetmodel.graph import Graph


FORMAT: Final = "poetmodel-compiled-step"
VERSION: Final = 2
"""Version 1 had the format's name of `poetmodel.export.io`, whose files have no ``call``."""
BULKY: Final = ("scheduled", "result")
"""Parts of a step from which the figures of its schedule are made; a page does not repeat them."""


class _Graph(Strict):
    nodes: Index
    tensors: Index
    scheduled_tensors: Index
    threshold_bytes: Index
    batch_size: Index
    resident_bytes: dict[str, Index]


class _StepPlan(Strict):
    mode: Literal["blocking", "dma"]
    device: str | None = None
    instructions: Index
    recomputed: Index
    peak_bytes: Index
    written_bytes: Index
    read_bytes: Index
    compute_s: Finite | None
    transfer_s: Finite | None
    stall_s: Finite | None
    makespan_s: Finite | None
    energy_j: Finite | None


class _Difference(Strict):
    name: str
    largest: Finite | None
    told: str
    op: str


class _Certificate(Strict):
    name: str
    compared: Index
    differences: list[_Difference]
    random_equal: bool
    budget_bytes: Index
    plan_peak_bytes: Index
    storage_peak_bytes: Index
    heap_peak_bytes: Index
    eager_heap_peak_bytes: Index
    second_gradients_bytes: Index
    written_bytes: Index
    read_bytes: Index
    plan_written_bytes: Index
    plan_read_bytes: Index
    time_s: Finite
    plan_time_s: Finite | None
    plan_device: str | None = None
    eager_time_s: Finite
    threads: Index | None = None
    updates: bool = False
    state_on_storage_bytes: Index = 0
    mirrored_bytes: Index = 0
    reasons: list[str] = Field(default_factory=list)
    equal: bool
    within_budget: bool


class _Costs(Strict):
    compute_time_s: list[Finite]
    compute_energy_j: list[Finite]
    page_in_time_s: list[Finite]
    page_in_energy_j: list[Finite]
    page_out_time_s: list[Finite]
    page_out_energy_j: list[Finite]
    has_storage: bool


class _Scheduled(Strict):
    graph: dict[str, Any]
    costs: _Costs


class _StepEntry(Strict):
    format: Literal["poetmodel-compiled-step"]
    version: Annotated[int, exactly(VERSION)]
    name: str
    torch: str
    call: str
    graph: _Graph
    costs: list[str]
    budget_bytes: Annotated[int, Field(ge=1)]
    keep_all_bytes: Index
    reserved_bytes: Index
    reserves: dict[str, Index] = Field(default_factory=dict)
    plan: _StepPlan
    compile_s: Finite
    certificate: _Certificate | None
    result: dict[str, Any]
    scheduled: _Scheduled


def parse_step(text: str) -> dict[str, Any] | None:
    """Return the values of a step that a text holds as JSON; None where it holds something else.

    A text that is no JSON, or no object, is something else too: whoever reads it next says so.
    Files of version 1 are returned as those of the newest version.
    """
    try:
        values = parse_json(text, expected=FORMAT)
    except InputError:
        return None
    if not isinstance(values, dict):
        return None
    is_first_version = values.get("format") == STEP_FORMAT and "call" in values
    if is_first_version and values.get("version") == 1 and type(values["version"]) is int:
        return values | {"format": FORMAT, "version": VERSION}
    return values if is_first_version or values.get("format") == FORMAT else None


def step_subject(values: dict[str, Any], *, source: str, label: str = "A") -> Subject:
    """Verify and plan the schedule of a compiled step, with the graph and the costs of the step.

    `values` is what ``step.report()`` returns; `source` names the step on the page and in errors.
    """
    try:
        step = _StepEntry.model_validate(values)
    except ValidationError as error:
        raise InputError(faults_of(error, kind="step")).within(source) from None
    try:
        return _subject(step, Sources(schedule=source, graph=source), label)
    except InputError as error:
        raise error.within(source) from None


def _step_facts(step: _StepEntry) -> dict[str, Any]:
    """Return the facts on a step; whether it has updates is among them only if it has."""
    values = step.model_dump(exclude=set(BULKY))
    certificate = values["certificate"]
    if certificate is not None and not certificate["updates"]:
        for name in ("updates", "state_on_storage_bytes", "mirrored_bytes"):
            del certificate[name]
    return values


def _subject(step: _StepEntry, sources: Sources, label: str) -> Subject:
    graph = graph_from_dict(step.scheduled.graph, source="scheduled.graph")
    document = document_from(step.result, source="result")
    check_identity(graph, document.schedule)
    stated = document.problem
    if stated is None:
        raise InputError("result.problem: missing")
    device = Device.load(document.device) if document.device in device_names() else None
    problem = stated.problem(graph, _costs(step.scheduled.costs, graph, device))
    usable = problem.usable_ram_bytes
    figures = document.stated
    notes = []
    if document.device is not None and device is None:
        figures = {key: value for key, value in figures.items() if not key.endswith("_j")}
        notes.append(f"energies were not compared with those of device {document.device}")
    verdict = verify(problem, document.schedule, stated=figures)
    plan = check = None
    if not verdict.simulation.violations:
        plan = make_plan(
            graph,
            problem.costs,
            document.schedule,
            mode=StorageMode(step.plan.mode),
            ram_budget_bytes=usable,
        )
        check = check_plan(graph, problem.costs, plan, ram_budget_bytes=usable)
        if check.peak_ram_bytes + step.reserved_bytes != step.plan.peak_bytes:
            notes.append("the plan made for this page has another peak than the one that ran")
    if step.reserved_bytes:
        of = ", ".join(f"{what} {format_bytes(size)}" for what, size in step.reserves.items())
        notes.append(
            f"{format_bytes(step.reserved_bytes)} of the step's RAM are reserved"
            f"{f': {of}' if of else ''}; all RAM on this page includes them"
        )
    return Subject(
        label=label,
        sources=sources,
        document=document,
        schedule=in_graph(graph, document.schedule),
        problem=problem,
        costs=problem.costs,
        verdict=verdict,
        notes=tuple(notes),
        plan=plan,
        check=check,
        step=_step_facts(step),
    )


def _costs(costs: _Costs, graph: Graph, device: Device | None) -> Costs:
    into = list(zip(costs.page_in_time_s, costs.page_in_energy_j, strict=False))
    out = list(zip(costs.page_out_time_s, costs.page_out_energy_j, strict=False))
    try:
        return Costs.from_arrays(
            graph,
            compute_time_s=costs.compute_time_s,
            compute_energy_j=costs.compute_energy_j,
            page_in=into if costs.has_storage else None,
            page_out=out if costs.has_storage else None,
            device=device,
        )
    except InputError:
        raise
    except ValueError:
        raise InputError(
            "scheduled.costs: expected a figure for each node and tensor of scheduled.graph"
        ) from None
