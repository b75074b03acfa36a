"""Plan files, ``*.plan.json``: reading and validation with pydantic models."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, LiteralString

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from poetmodel.errors import PlanError, convert_errors
from poetmodel.files import read_text
from poetmodel.plan.alignment import check_alignment
from poetmodel.plan.versions import VERSION, VERSION_WITH_STATE
from poetmodel.schedule.instructions import Instruction, Op
from poetmodel.schedule.io import (
    GraphFile,
    Index,
    Strict,
    add_metric_fields,
    parse_file,
)
from poetmodel.schedule.machine import BEFORE, Content
from poetmodel.schedule.metrics import Display, Metric, metrics_at

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OFFSET_LENGTH: Final = 4
"""Number of values in an entry of ``offsets``: the fields of `poetmodel.plan.arena.CopyOffset`."""
OpName = Literal["compute", "page_in", "page_out", "wait", "free"]
"""Value of a member of `Op`."""


def _list_validator(length: int, description: LiteralString) -> BeforeValidator:
    """Return a validator that converts lists of `length` items (`description`) to tuples."""

    def check(value: object) -> object:
        if not isinstance(value, list) or len(value) != length:
            raise PydanticCustomError("list", f"expected a list of {description}")
        return tuple(value)

    return BeforeValidator(check)


InstructionEntry = Annotated[
    tuple[OpName, Index], _list_validator(len(Instruction._fields), "an operation and an index")
]
Position = Annotated[int, Field(ge=BEFORE)]
"""Position of an instruction, or `BEFORE` for resident state."""
OffsetEntry = Annotated[
    tuple[Position, Literal["output", "workspace"], Index, Index],
    _list_validator(_OFFSET_LENGTH, "a position, 'output' or 'workspace', an index, an offset"),
]


class ArenaEntry(Strict):
    """The arena in a plan file; its fields are those of `poetmodel.plan.arena.Arena`."""

    bytes: Index
    lower_bound_bytes: Index
    alignment: Annotated[int, Field(ge=1)]
    offsets: list[OffsetEntry]


class PlanFile(GraphFile):
    """The content of a plan file, with the fields of `Plan`; a subclass has a field per metric."""

    format_versions: ClassVar[tuple[int, ...]] = (VERSION, VERSION_WITH_STATE)
    format: Literal["poetmodel-plan"]
    mode: Literal["blocking", "dma"]
    ram_budget_bytes: Annotated[int, Field(ge=1)] | None = None
    program: list[InstructionEntry]
    resident: list[Index] | None = None
    memory_mapped: bool = False
    commit: Annotated[int, Field(ge=1)] | None = None
    arena: ArenaEntry | None = None


@cache
def _make_plan_file_type(metrics: tuple[Metric, ...]) -> type[PlanFile]:
    return add_metric_fields(PlanFile, metrics)


def load_file(path: str | Path, content: bytes | None = None) -> PlanFile:
    """Read a plan file, or its `content`; raise `PlanError` if that fails or it is invalid."""
    with convert_errors(PlanError):
        text = read_text(path, content)
    with convert_errors(PlanError, str(path)):
        file = parse_file(_make_plan_file_type(metrics_at(Display.PLAN_FILE)), text, kind="plan")
        faults = list(_content_faults(file))
        if faults:
            raise PlanError(faults)
    return file


def _content_faults(document: PlanFile) -> Iterator[str]:
    """Yield an error for each key that contradicts another key."""
    if (document.resident is None) != (document.version == VERSION):
        yield (
            f"resident: a file of version {VERSION_WITH_STATE} lists the state whose home is RAM, "
            f"one of version {VERSION} does not"
        )
    if document.memory_mapped and document.resident is None:
        yield f"memory_mapped: expected in a file of version {VERSION_WITH_STATE} only"
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


def _arena_faults(document: PlanFile, arena: ArenaEntry) -> Iterator[str]:
    """Yield an error for a wrong alignment, and for each position or index out of range."""
    try:
        check_alignment(arena.alignment)
    except PlanError as error:
        yield f"arena.{error}"
    for number, (position, content, index, _) in enumerate(arena.offsets):
        kind = "tensors" if Content(content) == Content.OUTPUT else "nodes"
        count = len(getattr(document, kind))
        if position >= len(document.program):
            yield (
                f"arena.offsets[{number}][0]: expected a position in the program of "
                f"{len(document.program)} instructions, got {position}"
            )
        if index >= count:
            yield (
                f"arena.offsets[{number}][2]: expected the number of one of the {count} {kind}, "
                f"got {index}"
            )
