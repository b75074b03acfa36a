"""Plan files, ``*.plan.json``, in and out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from poetmodel.data import parse_json, read_text, write_text
from poetmodel.device import StorageMode
from poetmodel.errors import InputError, PlanError
from poetmodel.plan.program import Instruction, Op, Plan
from poetmodel.schedule import GraphIdentity
from poetmodel.schedule.document import dump
from poetmodel.schedule.io import (
    Finite,
    FormatVersion,
    GraphEntry,
    Index,
    Strict,
    faults_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from poetmodel.plan.simulation import PlanCheck

FORMAT: Final = "poetmodel-plan"
VERSION: Final = 1

STATED: Final = (
    "makespan_s",
    "stall_s",
    "transfer_s",
    "compute_s",
    "energy_j",
    "peak_ram_bytes",
)
"""The figures of a plan file."""

OpName = Literal["compute", "page_in", "page_out", "wait", "free"]


def _is_pair(value: object) -> object:
    if not isinstance(value, list) or len(value) != len(Instruction._fields):
        raise PydanticCustomError("step", "expected a list of an operation and an index")
    return tuple(value)


Step = Annotated[tuple[OpName, Index], BeforeValidator(_is_pair)]


class _PlanFile(Strict):
    format: Literal["poetmodel-plan"]
    version: FormatVersion
    graph: GraphEntry
    device: str | None = None
    mode: Literal["blocking", "dma"]
    ram_budget_bytes: Annotated[int, Field(ge=1)] | None = None
    nodes: list[str]
    tensors: list[str]
    program: list[Step]
    makespan_s: Finite | None = None
    stall_s: Finite | None = None
    transfer_s: Finite | None = None
    compute_s: Finite | None = None
    energy_j: Finite | None = None
    peak_ram_bytes: Index | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A whole plan file: the plan, and the figures it states."""

    plan: Plan
    """The program, with the identity of its graph."""
    stated: dict[str, float | None]
    """The figures, by key."""


def plan_to_dict(plan: Plan, check: PlanCheck | None = None) -> dict[str, Any]:
    """Return the content of a plan file as plain values.

    Parameters
    ----------
    plan : Plan
        The plan.
    check : PlanCheck, optional
        What `check_plan` found; gives the figures. Without it the file has none.
    """
    identity = plan.identity
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "graph": identity and {"name": identity.name, "sha256": identity.sha256},
        "device": plan.device,
        "mode": str(plan.mode),
        "ram_budget_bytes": plan.ram_budget_bytes,
        "nodes": list(identity.nodes) if identity else None,
        "tensors": list(identity.tensors) if identity else None,
        "program": [[str(op), index] for op, index in plan.program],
    }
    if check is not None:
        document.update((key, getattr(check, key)) for key in STATED)
    return document


def save_plan(plan: Plan, path: str | Path, check: PlanCheck | None = None) -> None:
    """Write a plan file.

    Raises
    ------
    PlanError
        If the plan does not say which graph it belongs to.
    """
    if plan.identity is None:
        msg = "the plan names no graph; make it with identity=GraphIdentity.of(graph)"
        raise PlanError(msg)
    write_text(path, dump(plan_to_dict(plan, check)))


def load_plan(path: str | Path) -> Plan:
    """Read the plan of a plan file."""
    return load_document(path).plan


def load_document(path: str | Path) -> PlanDocument:
    """Read a plan file.

    Raises
    ------
    PlanError
        If the file cannot be read, with every fault found.
    """
    try:
        text = read_text(path)
    except InputError as error:
        raise PlanError(error.faults) from None
    return parse_document(text, source=str(path))


def parse_document(text: str, *, source: str) -> PlanDocument:
    """Read the text of a plan file; `source` names it in errors."""
    try:
        document = _PlanFile.model_validate(parse_json(text, expected=FORMAT))
    except ValidationError as error:
        raise PlanError(faults_of(error, kind="plan")).within(source) from None
    except InputError as error:
        raise PlanError(error.faults).within(source) from None
    faults = list(_index_faults(document))
    if faults:
        raise PlanError(faults).within(source)
    plan = Plan(
        program=tuple(Instruction(Op(op), index) for op, index in document.program),
        mode=StorageMode(document.mode),
        identity=GraphIdentity(
            name=document.graph.name,
            sha256=document.graph.sha256,
            nodes=tuple(document.nodes),
            tensors=tuple(document.tensors),
        ),
        ram_budget_bytes=document.ram_budget_bytes,
        device=document.device,
    )
    return PlanDocument(plan=plan, stated={key: getattr(document, key) for key in STATED})


def _index_faults(document: _PlanFile) -> Iterator[str]:
    for position, (op, index) in enumerate(document.program):
        names, kind = document.tensors, "tensors"
        if Op(op) == Op.COMPUTE:
            names, kind = document.nodes, "nodes"
        if index >= len(names):
            yield (
                f"program[{position}][1]: expected the number of one of the {len(names)} {kind}, "
                f"got {index}"
            )
