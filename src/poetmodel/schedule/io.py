"""Schedule files, ``*.schedule.json``: reading and validation with pydantic models."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    field_validator,
)
from pydantic_core import PydanticCustomError

from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError, ScheduleError, convert_errors, quote
from poetmodel.files import format_location, parse_json, read_text
from poetmodel.headers import WRITTEN_BY, check_version, describe_writer, ignored_keys_note
from poetmodel.problem import USER_OBJECTIVE, Constraint, Limits, Problem
from poetmodel.problem.parse import user_sum_faults
from poetmodel.problem.totals import UNITS, is_finite_number
from poetmodel.schedule.identity import RELATIONS, VERSION, GraphIdentity
from poetmodel.schedule.metrics import Display, Metric, MetricUnit, metrics_at
from poetmodel.units import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from poetmodel.device import Costs
    from poetmodel.graph import Graph

_LOG: Final = logging.getLogger(__name__)

MAX_FAULTS: Final = 20
"""Maximum number of validation errors of one file that are listed; further ones are counted."""


def _require_finite(value: object) -> object:
    """Return a finite number unchanged; raise a validation error otherwise."""
    if not is_finite_number(value):
        raise PydanticCustomError("number", "expected a finite number")
    return value


Finite = Annotated[float, Field(allow_inf_nan=False)]
"""A finite float."""
Number = Annotated[Any, BeforeValidator(_require_finite)]
"""A finite number; integers stay integers, which are exact."""


def _parse_history_entry(value: object) -> object:
    """Return a list [seconds >= 0, value or None, bound or None] of finite numbers as a tuple."""
    if isinstance(value, list) and len(value) == 3 and is_finite_number(value[0]):  # noqa: PLR2004
        seconds, *pair = value
        if seconds >= 0 and all(entry is None or is_finite_number(entry) for entry in pair):
            return tuple(value)
    raise PydanticCustomError("moment", "expected [seconds, value, bound]")


HistoryEntry = Annotated[Any, BeforeValidator(_parse_history_entry)]
"""Seconds, incumbent and bound in the history of a solve."""
Index = Annotated[int, Field(ge=0)]
"""An integer, 0 or more."""
Pair = Annotated[list[Index], Field(min_length=2, max_length=2)]
"""Stage and index of a node or tensor."""
Pairs = list[Pair]
"""The pairs of a relation."""

File = TypeVar("File", bound=BaseModel)
"""Model of a file."""

_METRIC_TYPES: Final[Mapping[MetricUnit, Any]] = {
    **dict.fromkeys(MetricUnit, Finite),
    MetricUnit.BYTES: Index,
    MetricUnit.COUNT: Index,
}
"""Types of metrics in files, by unit."""


class Strict(BaseModel):
    """An object in a file: exact types, and no unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid")


class JsonFile(Strict):
    """The content of a JSON file; unknown keys at its top level are ignored."""

    model_config = ConfigDict(extra="allow")

    format_versions: ClassVar[tuple[int, ...]] = (VERSION,)
    """Versions of the format that can be read."""
    format: str
    """First field, so that for a file of another format the first error is about the format."""
    version: int
    written_by: str | None = None
    """The version of poetmodel that wrote the file; None if the file does not state it."""

    @field_validator("version", mode="before")
    @classmethod
    def _check_version(cls, value: object) -> object:
        """Accept only the integers in `format_versions`, but no equal bool or float."""
        if value not in cls.format_versions or isinstance(value, bool | float):
            expected = " or ".join(map(str, cls.format_versions))
            raise PydanticCustomError("version", "expected {expected}", {"expected": expected})
        return value

    @property
    def notes(self) -> tuple[str, ...]:
        """A note on unknown keys; none if the file has no such key."""
        unknown_keys = self.model_extra
        return (ignored_keys_note(unknown_keys, vars(self)),) if unknown_keys else ()


class Digest(Strict):
    """Identity of content that a file does not contain."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class GraphEntry(Digest):
    """The graph that a file belongs to."""

    name: str


class ConstraintEntry(Strict):
    """A user-defined constraint in a schedule file."""

    name: Annotated[str, Field(min_length=1)]
    terms: dict[str, Number]
    lower: Number | None = None
    upper: Number | None = None

    @property
    def needs_costs(self) -> bool:
        """Whether the constraint contains times or energies."""
        return any(UNITS.get(key) in ("s", "J") for key in self.terms)

    def to_constraint(self) -> Constraint:
        """Return the entry as a constraint; raise `InputError` if `Constraint` refuses a value."""
        return Constraint(name=self.name, terms=self.terms, lower=self.lower, upper=self.upper)


class ProblemEntry(Strict):
    """The stated problem of a schedule file."""

    ram_budget_bytes: Annotated[int, Field(ge=1)]
    deadline_s: Finite | None = None
    deadline_counts: Literal["compute", "serial", "overlap"]
    recompute: bool
    paging: bool
    minimize: Literal["energy", "time", "ram", "writes", "own"] = "energy"
    energy_budget_j: Finite | None = None
    aux_bytes: Index | None = None
    """Limit on the storage used [B]; None for no limit."""
    count_parameters: bool = False
    commit: Annotated[int, Field(ge=1)] | None = None
    """Number of steps between commits; None for no commits."""
    constraints: list[ConstraintEntry] = []
    weights: dict[str, Number] = {}
    """The user-defined objective: coefficients by total; empty for another objective."""
    method: str = "optimal"
    formulation: str | None = None
    backend: str | None = None
    time_limit_s: Finite | None = None
    gap: Finite | None = None
    """Gap tolerance of the solve."""
    solver_options: dict[str, bool | int | Finite | str] = {}

    def limits(self) -> Limits:
        """Return the limits that the file states, without its constraints."""
        return Limits(
            ram=self.ram_budget_bytes,
            deadline=self.deadline_s,
            deadline_counts=self.deadline_counts,
            aux_bytes=self.aux_bytes,
            recompute=self.recompute,
            paging=self.paging,
            minimize=self.minimize,
            energy_budget=self.energy_budget_j,
            count_parameters=self.count_parameters,
            commit=self.commit,
        )

    def without_costs(self) -> ProblemEntry:
        """Return the entry without limits on times and energies, for unknown costs."""
        rows = [row for row in self.constraints if not row.needs_costs]
        return self.model_copy(
            update={"deadline_s": None, "energy_budget_j": None, "constraints": rows}
        )

    def to_problem(self, graph: Graph, costs: Costs) -> Problem:
        """Return the problem for its graph and costs; `ScheduleError` for sums that do not fit."""
        with convert_errors(ScheduleError, "problem"):
            rows = tuple(row.to_constraint() for row in self.constraints)
            faults = list(user_sum_faults(graph, rows, tuple(self.weights.items())))
            if self.minimize == USER_OBJECTIVE and not self.weights:
                faults.append("weights: missing, but minimize is 'own'")
            if faults:
                raise InputError(faults)
        limits = self.limits()
        unlimited = MAX_BYTES if limits.aux_bytes is None else limits.aux_bytes
        return Problem.from_limits(
            graph,
            costs,
            replace(limits, aux_bytes=unlimited, constraints=rows),
            user_objective=tuple(self.weights.items()),
        )


class ObjectiveEntry(Strict):
    """The objective of a schedule file: the problem's, or that of a user's model."""

    minimize: Literal["energy", "time", "ram", "writes", "own"]
    value: Finite | None
    """Value for the schedule; None if the solve found no schedule."""
    bound: Finite | None
    """Proven bound on the value; None if no bound is proven."""
    gap: Finite | None
    name: str | None = None
    """Name of the objective of a user's model; None for the problem's objective."""
    sense: Literal["minimize", "maximize"] | None = None
    """Direction of the objective of a user's model."""


class GraphFile(JsonFile):
    """A file for one graph, with the names of its nodes and tensors."""

    graph: GraphEntry
    device: str | None = None
    costs: Digest | None = None
    """The costs that the stated metrics were computed with; None if the file does not state it."""
    nodes: list[str]
    tensors: list[str]

    @property
    def costs_sha256(self) -> str | None:
        """Digest of the costs that the stated metrics were computed with (`digest_costs`)."""
        return None if self.costs is None else self.costs.sha256

    def identity(self) -> GraphIdentity:
        """Return the graph's name and hash, and the names of nodes and tensors, from the file."""
        return GraphIdentity(
            name=self.graph.name,
            sha256=self.graph.sha256,
            nodes=tuple(self.nodes),
            tensors=tuple(self.tensors),
        )


class GaugeEntry(Strict):
    """RAM of the device at the peak, by kind."""

    ram_bytes: Index
    state_bytes: Index
    activation_bytes: Index
    gradient_bytes: Index
    workspace_bytes: Index
    free_bytes: Index
    missing_bytes: Index
    trains: bool
    """Whether the step fits in the RAM."""


class ScheduleFile(GraphFile):
    """The content of a schedule file; a subclass has a field for each metric."""

    format: Literal["poetmodel-schedule"]
    problem: ProblemEntry | None = None
    status: Literal["optimal", "feasible", "infeasible", "unknown"] | None = None
    violations: list[str] = []
    """Messages of the verifier; empty for a valid schedule."""
    reduction: str | None = None
    """Description of how the formulation simplified the graph; None if it did not."""
    objective: ObjectiveEntry | None = None
    resident_bytes: Index | None = None
    device_ram_bytes: Index | None = None
    fits_device: bool | None = None
    device_ram: GaugeEntry | None = None
    history: list[HistoryEntry] = []
    R: Pairs | None = None
    S_RAM: Pairs | None = None
    S_AUX: Pairs | None = None
    M_in: Pairs | None = None
    M_out: Pairs | None = None
    resident: list[Index] = []


def add_metric_fields(model: type[File], metrics: Iterable[Metric]) -> type[File]:
    """Return a subclass of a file model with an optional field for each metric."""
    fields: dict[str, Any] = {
        metric.key: (_METRIC_TYPES[metric.unit] | None, None) for metric in metrics
    }
    return create_model(model.__name__, __base__=model, **fields)


@cache
def _schedule_file(metrics: tuple[Metric, ...]) -> type[ScheduleFile]:
    """Return the model of schedule files with an optional field for each metric."""
    return add_metric_fields(ScheduleFile, metrics)


def load_file(path: str | Path, content: bytes | None = None) -> ScheduleFile:
    """Read a schedule file, or its `content`; `ScheduleError` if it states no valid schedule."""
    with convert_errors(ScheduleError):
        text = read_text(path, content)
    source, model = str(path), _schedule_file(metrics_at(Display.FILE))
    with infrequent_gc(), convert_errors(ScheduleError, source):
        values = parse_json(text, expected="poetmodel-schedule")
        file = validate_model(model, values, kind="schedule")
    if file.R is None:
        raise ScheduleError(
            f"{source}: R: the file contains no schedule (status {file.status or 'unknown'})"
        )
    missing_relations = [name for name in RELATIONS if getattr(file, name) is None]
    if missing_relations:
        raise ScheduleError(f"{name}: missing" for name in missing_relations).with_prefix(source)
    return file


def log_notes(file: JsonFile, path: str | Path) -> None:
    """Log a warning for each note on a file that was read from `path`."""
    for note in file.notes:
        _LOG.warning("%s: %s", path, note)


def parse_file(model: type[File], text: str, *, kind: str, as_json: bool = False) -> File:
    """Parse the text of a `kind` of file (``schedule``) as `model`; `InputError` if invalid.

    With `as_json`, fields may have types that JSON lacks, such as tuples.
    """
    values = parse_json(text, expected=f"poetmodel-{kind}")
    return validate_model(model, values, kind=kind, text=text if as_json else None)


def validate_model(
    model: type[File], values: object, *, kind: str, text: str | None = None
) -> File:
    """Validate the JSON content of a file as `model`; `kind` is a word for it in messages.

    `text` is the same content as JSON text, required if fields have types that JSON lacks.

    Raises `InputError`; for a `JsonFile` of a later version with this error only.
    """
    if issubclass(model, JsonFile):
        check_version(values, model.format_versions)
    try:
        return model.model_validate(values) if text is None else model.model_validate_json(text)
    except ValidationError as error:
        writer = ""
        if isinstance(values, dict) and WRITTEN_BY in values:
            writer = describe_writer(values)
        raise InputError(validation_messages(error, kind=kind, writer=writer)) from None


def validation_messages(error: ValidationError, *, kind: str, writer: str = "") -> list[str]:
    """Return at most `MAX_FAULTS` messages of a pydantic error, and a count of further errors.

    `kind` is a word for the file, such as ``schedule``; `writer` ends those on unknown keys.
    """
    faults = []
    errors = error.errors(include_url=False, include_context=False)
    for details in errors[:MAX_FAULTS]:
        expected = details["msg"].replace("Input should be", "expected")
        unknown = filter(None, (f"unknown key; accepted are the keys of a {kind} file", writer))
        message = {
            **dict.fromkeys(("extra_forbidden", "unexpected_keyword_argument"), "; ".join(unknown)),
            "model_type": f"expected an object, got {quote(details['input'])}",
            "missing": "missing",
        }.get(details["type"], f"{expected}, got {quote(details['input'])}")
        faults.append(f"{format_location(details['loc']) or 'document'}: {message}")
    if len(errors) > MAX_FAULTS:
        faults.append(f"and {len(errors) - MAX_FAULTS} more errors")
    return faults
