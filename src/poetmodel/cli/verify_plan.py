"""``poetmodel verify`` on a plan: the verifier simulates the program."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import graphs
from poetmodel.cli.failures import print_room_warning
from poetmodel.cli.output import figures, print_json, print_text, room_alarms, room_row, show
from poetmodel.data import as_text
from poetmodel.device import StorageMode
from poetmodel.device.room import DeviceRoom, room_figures
from poetmodel.errors import InputError
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.graph.catalogue import InputShape
    from poetmodel.plan import PlanCheck
    from poetmodel.plan.io import PlanDocument


MAX_VIOLATIONS: Final = 20
"""Most violations that are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanJudgement:
    """What the verifier found, with the costs that it is for."""

    graph: Graph
    """The graph."""
    document: PlanDocument
    """The plan and what its file states."""
    check: PlanCheck
    """What the simulation found."""
    violations: tuple[str, ...]
    """Every rule or limit that is broken and every figure that is wrong, in words."""
    costs: Costs | None
    """Costs for times and energies; None if they were not checked."""
    notes: tuple[str, ...]
    """What was assumed or not checked."""

    @property
    def room(self) -> DeviceRoom | None:
        """What the plan takes of the device's RAM, where there is a device."""
        device = None if self.costs is None else self.costs.device
        return DeviceRoom.of(device, self.graph, self.check.peak_ram_bytes)

    @property
    def valid(self) -> bool:
        """Whether there is no violation."""
        return not self.violations


def is_plan(content: bytes) -> bool:
    """Return whether the content of a file is a plan, binary or JSON."""
    from poetmodel.plan.binary import is_coded
    from poetmodel.plan.program import FORMAT

    if is_coded(content):
        return True
    if FORMAT.encode() not in content:
        return False
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # the reader of plans says what is wrong
        return True
    return isinstance(document, dict) and document.get("format") == FORMAT


def read_plan(
    content: bytes, graph: str | None, shape: InputShape, *, source: str
) -> tuple[PlanDocument, Graph]:
    """Return the plan in the content of a file, and the graph that it is for.

    Parameters
    ----------
    content : bytes
        The file.
    graph : str, optional
        A graph file or a built-in network; without it, the built-in network that the plan names.
    shape : InputShape
        Sizes of the input of a built-in network.
    source : str
        Name of the file in error messages.

    Raises
    ------
    PlanError
        If it is damaged or belongs to another graph.
    InputError
        If it is neither text nor a binary plan, or its graph cannot be found.
    """
    from poetmodel.plan import decode
    from poetmodel.plan.binary import is_coded
    from poetmodel.plan.io import PlanDocument, parse_document

    if not is_coded(content):
        document = parse_document(as_text(content, source=source), source=source)
        return document, graphs.graph_of(graph, shape, document.plan.identity, source=source).graph
    try:
        coded_for = graphs.graph_of_code(graph, shape, content, source=source)
        return PlanDocument(plan=decode(coded_for, content), stated={}), coded_for
    except InputError as error:
        raise error.within(source) from None


def judge_plan(
    document: PlanDocument, graph: Graph, costs: Costs | None, notes: list[str]
) -> PlanJudgement:
    """Simulate a plan and compare the figures with those of its file.

    Raises
    ------
    PlanError
        If it belongs to another graph.
    """
    from poetmodel.plan import check_plan
    from poetmodel.plan.simulation import false_claims

    check = check_plan(graph, costs, document.plan)
    if document.plan.ram_budget_bytes is None:
        notes = [*notes, "the plan states no RAM budget: its peak was not checked"]
    return PlanJudgement(
        graph=graph,
        document=document,
        check=check,
        violations=(*check.violations, *false_claims(check, document.stated)),
        costs=costs,
        notes=tuple(notes),
    )


def tell(judgement: PlanJudgement, *, as_json: bool) -> None:
    """Print the verdict as tables or as JSON."""
    if as_json:
        print_json(as_dict(judgement))
        print_room_warning(judgement.room)
        return
    violations = judgement.violations
    if violations:
        many = "1 violation" if len(violations) == 1 else f"{len(violations)} violations"
        more = len(violations) - MAX_VIOLATIONS
        rest = (f"and {more:,} more; --json has them all",) if more > 0 else ()
        print_text(f"not valid: {many}", *violations[:MAX_VIOLATIONS], *rest, "")
    else:
        print_text("valid: the plan keeps every rule and limit that was checked", "")
    rows, alarms = _rows(judgement), room_alarms(judgement.room)
    show(figures(f"Plan for {judgement.graph.name}", rows, alarms=alarms))
    print_room_warning(judgement.room)


def as_dict(judgement: PlanJudgement) -> dict[str, Any]:
    """Return a verdict as plain values; without costs, times and energies are None."""
    check, graph, costs = judgement.check, judgement.graph, judgement.costs
    plan = judgement.document.plan
    return {
        "valid": judgement.valid,
        "violations": list(judgement.violations),
        "notes": list(judgement.notes),
        "graph": {"name": graph.name, "sha256": graph.sha256},
        "costs": costs.source if costs is not None else None,
        "mode": str(plan.mode),
        "ram_budget_bytes": plan.ram_budget_bytes,
        "instructions": len(plan.program),
        "makespan_s": check.makespan_s,
        "stall_s": check.stall_s,
        "compute_s": check.compute_s,
        "transfer_s": check.transfer_s,
        "energy_j": check.energy_j,
        "peak_ram_bytes": check.peak_ram_bytes,
        **room_figures(judgement.room),
        "peak_instruction": check.peak_position,
        "aux_used_bytes": check.aux_used_bytes,
        "written_bytes": check.written_bytes,
        "read_bytes": check.read_bytes,
    }


def _rows(judgement: PlanJudgement) -> Iterator[tuple[str, str, str]]:
    check, plan = judgement.check, judgement.document.plan
    yield "instructions", f"{len(plan.program):,}", f"{plan.mode} transfers"
    if judgement.costs is not None:
        stalls = plan.mode == StorageMode.DMA
        remark = f"stall {format_seconds(check.stall_s or 0.0)}" if stalls else ""
        yield "makespan", format_seconds(check.makespan_s or 0.0), remark
        yield "energy", format_joules(check.energy_j or 0.0), ""
        yield "compute time", format_seconds(check.compute_s or 0.0), ""
        yield "transfer time", format_seconds(check.transfer_s or 0.0), ""
    at = "" if check.peak_position is None else f"at instruction {check.peak_position}"
    yield "peak RAM", format_bytes(check.peak_ram_bytes), at
    yield from room_row(judgement.room)
    yield "paged out", format_bytes(check.written_bytes), ""
    yield "paged in", format_bytes(check.read_bytes), ""
    yield "storage used", format_bytes(check.aux_used_bytes), ""
