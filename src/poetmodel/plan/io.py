"""Reading plan files, ``*.plan.json``."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal, LiteralString

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from poetmodel.device import StorageMode
from poetmodel.errors import PlanError, raised_as
from poetmodel.files import read_text
from poetmodel.plan.arena import Arena, Placed, check_alignment
from poetmodel.plan.program import VERSION, VERSION_OF_STATE, Plan
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.schedule.io import GraphFile, Index, Strict, exactly, parse_file, with_metrics
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.schedule.metrics import Display, Metric, metrics_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OpName = Literal["compute", "page_in", "page_out", "wait", "free"]


def _listed(length: int, content: LiteralString) -> BeforeValidator:
    def check(value: object) -> object:
        if not isinstance(value, list) or len(value) != length:
            raise PydanticCustomError("list", f"expected a list of {content}")
        return tuple(value)

    return BeforeValidator(check)


Step = Annotated[
    tuple[OpName, Index], _listed(len(Instruction._fields), "an operation and an index")
]
Position = Annotated[int, Field(ge=BEFORE)]
Placement = Annotated[
    tuple[Position, Literal["output", "workspace"], Index, Index],
    _listed(len(Placed._fields), "a position, 'output' or 'workspace', an index, an offset"),
]


class _ArenaEntry(Strict):
    """The addresses of a plan file."""

    bytes: Index
    lower_bound_bytes: Index
    alignment: Annotated[int, Field(ge=1)]
    offsets: list[Placement]


class _PlanFile(GraphFile):
    """A plan file without its metrics."""

    format: Literal["poetmodel-plan"]
    version: Annotated[int, exactly(VERSION, VERSION_OF_STATE)]
    mode: Literal["blocking", "dma"]
    ram_budget_bytes: Annotated[int, Field(ge=1)] | None = None
    program: list[Step]
    resident: list[Index] | None = None
    memory_mapped: bool = False
    commit: Annotated[int, Field(ge=1)] | None = None
    arena: _ArenaEntry | None = None


@cache
def _plan_file(metrics: tuple[Metric, ...]) -> type[_PlanFile]:
    return with_metrics(_PlanFile, metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A whole plan file: the plan, and the figures it states."""

    plan: Plan
    """The program, with the identity of its graph."""
    stated: dict[str, float | None]
    """The figures, by key."""
    arena: Arena | None = None
    """The addresses, where the file has them."""


def load_document(path: str | Path) -> PlanDocument:
    """Read a plan file; `PlanError` names every fault found."""
    with raised_as(PlanError):
        text = read_text(path)
    return parse_document(text, source=str(path))


def parse_document(text: str, *, source: str) -> PlanDocument:
    """Read the text of a plan file; `source` names it in errors."""
    metrics = metrics_at(Display.PLAN_FILE)
    with raised_as(PlanError, source):
        document = parse_file(_plan_file(metrics), text, kind="plan")
        faults = list(_faults(document))
        if faults:
            raise PlanError(faults)
    plan = Plan(
        program=tuple(Instruction(Op(op), index) for op, index in document.program),
        mode=StorageMode(document.mode),
        identity=document.identity(),
        ram_budget_bytes=document.ram_budget_bytes,
        device=document.device,
        resident=None if document.resident is None else tuple(document.resident),
        memory_mapped=document.memory_mapped,
        commit=document.commit,
    )
    stated = {metric.key: getattr(document, metric.key) for metric in metrics}
    return PlanDocument(plan=plan, stated=stated, arena=_arena(document.arena))


def _arena(entry: _ArenaEntry | None) -> Arena | None:
    if entry is None:
        return None
    return Arena(
        bytes=entry.bytes,
        lower_bound_bytes=entry.lower_bound_bytes,
        alignment=entry.alignment,
        offsets=tuple(Placed(p, Content(content), k, at) for p, content, k, at in entry.offsets),
    )


def _faults(document: _PlanFile) -> Iterator[str]:
    if (document.resident is None) != (document.version == VERSION):
        yield (
            f"resident: a file of version {VERSION_OF_STATE} lists the state whose home is RAM, "
            f"one of version {VERSION} does not"
        )
    if document.memory_mapped and document.resident is None:
        yield f"memory_mapped: expected in a file of version {VERSION_OF_STATE} only"
    for position, index in enumerate(document.resident or ()):
        if index >= len(document.tensors):
            yield (
                f"resident[{position}]: expected the number of one of the "
                f"{len(document.tensors)} tensors, got {index}"
            )
    for position, (op, index) in enumerate(document.program):
        kind = "nodes" if Op(op) == Op.COMPUTE else "tensors"
        count = len(getattr(document, kind))
        if index >= count:
            yield (
                f"program[{position}][1]: expected the number of one of the {count} {kind}, "
                f"got {index}"
            )
    if document.arena is not None:
        yield from _arena_faults(document, document.arena)


def _arena_faults(document: _PlanFile, arena: _ArenaEntry) -> Iterator[str]:
    try:
        check_alignment(arena.alignment)
    except PlanError as error:
        yield f"arena.{error}"
    for n, (position, content, index, _) in enumerate(arena.offsets):
        kind = "tensors" if Content(content) == Content.OUTPUT else "nodes"
        count = len(getattr(document, kind))
        if position >= len(document.program):
            yield (
                f"arena.offsets[{n}][0]: expected a position in the program of "
                f"{len(document.program)} instructions, got {position}"
            )
        if index >= count:
            yield (
                f"arena.offsets[{n}][2]: expected the number of one of the {count} {kind}, "
                f"got {index}"
            )
