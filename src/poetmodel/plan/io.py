"""Reading plan files, ``*.plan.json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from poetmodel.data import read_text
from poetmodel.device import StorageMode
from poetmodel.errors import PlanError, raised_as
from poetmodel.plan.program import STATED, Instruction, Op, Plan
from poetmodel.schedule.io import Finite, GraphFile, Index, parse_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OpName = Literal["compute", "page_in", "page_out", "wait", "free"]


def _is_pair(value: object) -> object:
    if not isinstance(value, list) or len(value) != len(Instruction._fields):
        raise PydanticCustomError("step", "expected a list of an operation and an index")
    return tuple(value)


Step = Annotated[tuple[OpName, Index], BeforeValidator(_is_pair)]


class _PlanFile(GraphFile):
    format: Literal["poetmodel-plan"]
    mode: Literal["blocking", "dma"]
    ram_budget_bytes: Annotated[int, Field(ge=1)] | None = None
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


def load_document(path: str | Path) -> PlanDocument:
    """Read a plan file; `PlanError` names every fault found."""
    with raised_as(PlanError):
        text = read_text(path)
    return parse_document(text, source=str(path))


def parse_document(text: str, *, source: str) -> PlanDocument:
    """Read the text of a plan file; `source` names it in errors."""
    with raised_as(PlanError, source):
        document = parse_file(_PlanFile, text, kind="plan")
        faults = list(_index_faults(document))
        if faults:
            raise PlanError(faults)
    plan = Plan(
        program=tuple(Instruction(Op(op), index) for op, index in document.program),
        mode=StorageMode(document.mode),
        identity=document.identity(),
        ram_budget_bytes=document.ram_budget_bytes,
        device=document.device,
    )
    return PlanDocument(plan=plan, stated={key: getattr(document, key) for key in STATED})


def _index_faults(document: _PlanFile) -> Iterator[str]:
    for position, (op, index) in enumerate(document.program):
        kind = "nodes" if Op(op) == Op.COMPUTE else "tensors"
        count = len(getattr(document, kind))
        if index >= count:
            yield (
                f"program[{position}][1]: expected the number of one of the {count} {kind}, "
                f"got {index}"
            )
