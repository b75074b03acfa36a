"""Options of commands, in groups: dataclasses, each of which is one parameter of a command."""

from __future__ import annotations

import inspect
import math
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cache, partial, wraps
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

import typer

from poetmodel.backends.registry import backend_class, backend_names
from poetmodel.baselines.lookup import method
from poetmodel.case.case import Case
from poetmodel.case.spelling import LIMIT_ROWS, SEARCH_ROWS, OptionRow
from poetmodel.cli.completion import COMPLETERS
from poetmodel.cli.output import set_quiet
from poetmodel.errors import BackendError, InputError, UserMethodError
from poetmodel.graph.catalogue import Variant
from poetmodel.problem import DeadlineCounts, Limits, Quantity
from poetmodel.solver.request import SearchOptions
from poetmodel.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from poetmodel.cli.reply import Reply
    from poetmodel.torch.target import OnnxStep

_Group = TypeVar("_Group")
_Value = TypeVar("_Value")

REQUIRED: Final = MISSING
"""Default of required options and arguments."""
MAX_THREADS: Final = 1024
"""Largest number of threads that can be requested."""
MAX_SIZE: Final = 1_000_000
"""Largest input size or dimension of a network that can be requested."""


class Command(NamedTuple):
    """A command of the application."""

    name: str
    run: Callable[..., None]
    """Function with one parameter for each option and argument."""
    epilog: str
    """Last line of the help: an example."""


def command(example: str) -> Callable[[Callable[..., Reply | None]], Command]:
    """Return a decorator that turns a function into a command with the name of the function.

    The parameters are groups of options, which become separate options on the command line.
    ``Annotated[Group, without("field")]`` excludes options, whose fields then have their defaults;
    ``only("field")`` excludes all others. `example` ends the help.
    """

    def decorate(function: Callable[..., Reply | None]) -> Command:
        """Return the command of a function, with the options of all its groups."""
        groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
        parameters: list[inspect.Parameter] = []
        for name, hint in get_type_hints(function, include_extras=True).items():
            if hint is typer.Context:
                parameters.append(_parameter(name, inspect.Parameter.empty, hint))
            elif name != "return":
                group_class, *selections = get_args(hint) or (hint,)
                included_parameters = [
                    parameter
                    for field_name, parameter in _group_parameters(group_class)
                    if all(is_included(field_name) for is_included in selections)
                ]
                make_group = _ROW_GROUPS.get(group_class, group_class)
                groups[name] = (make_group, [parameter.name for parameter in included_parameters])
                parameters += included_parameters

        @wraps(function)
        def run(**values: Any) -> None:
            for name, (make_group, names) in groups.items():
                values[name] = make_group(**{key: values.pop(key) for key in names})
            reply = function(**values)
            if reply is not None:
                reply.print(json=any(getattr(value, "json", False) for value in values.values()))

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return Command(function.__name__, run, f"Example: {example}")

    return decorate


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(cls: type[_Group]) -> type[_Group]:
    """Decorate a class as a group of options: a dataclass without generated methods.

    Each start of the program creates all these classes, and compiling their methods would take
    milliseconds. An omitted field gets its default, `REQUIRED` if it is required.
    """

    def init(self: object, **values: object) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            setattr(self, entry.name, values.pop(entry.name, entry.default))
        if values:
            raise TypeError(f"{cls.__name__} has no {', '.join(values)}")

    group_class = dataclass(init=False, eq=False, repr=False)(cls)
    group_class.__init__ = init  # type: ignore[method-assign]
    return group_class


@cache
def _group_parameters(group_class: type) -> tuple[tuple[str, inspect.Parameter], ...]:
    """Return the field and the parameter of each option of a group, in the order of the help."""
    if group_class in _ROW_GROUPS:
        return tuple(_row_parameters(group_class))
    hints = get_type_hints(group_class)
    return tuple(
        (
            entry.name,
            _parameter(
                entry.name, entry.default, Annotated[hints[entry.name], entry.metadata["typer"]]
            ),
        )
        for entry in fields(group_class)
    )


def _parameter(name: str, default: object, hint: object) -> inspect.Parameter:
    if default is REQUIRED:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def only(*names: str) -> Callable[[str], bool]:
    """Return which fields to include of a group, for the group's `Annotated` type."""
    return frozenset(names).__contains__


def without(*names: str) -> Callable[[str], bool]:
    """Return which fields remain of a group, for the group's `Annotated` type."""
    return lambda name: name not in names


def option(default: object, spelling: str, text: str, **typer_options: Any) -> Any:
    """Return the dataclass field of an option, with its `typer.Option` as ``metadata["typer"]``."""
    name, _, metavar = spelling.partition(" ")
    typer_options.setdefault("autocompletion", COMPLETERS.get(name, COMPLETERS.get(metavar)))
    information = typer.Option(name, metavar=metavar or None, help=text, **typer_options)
    return field(default=default, metadata={"typer": information})


def argument(default: object, metavar: str, text: str, **typer_options: Any) -> Any:
    """Return the dataclass field of a positional argument, like `option` with a placeholder."""
    typer_options.setdefault("autocompletion", COMPLETERS.get(metavar))
    information = typer.Argument(metavar=metavar, help=text, **typer_options)
    return field(default=default, metadata={"typer": information})


graph_option = partial(option, rich_help_panel="What to schedule")
limit_option = partial(option, rich_help_panel="Limits")
solve_option = partial(option, rich_help_panel="How to solve")
output_option = partial(option, rich_help_panel="Output")
onnx_option = partial(option, rich_help_panel="An ONNX file")


# -- values of options -------------------------------------------------------------------------


def _parse_plain_number(text: object, number_type: type[_Value]) -> _Value:
    """Parse a number as people write it; raise `ValueError` for Python's ``1_000``, too."""
    if "_" in str(text):
        raise ValueError(text)
    return number_type(text)  # type: ignore[call-arg]


def number_parser(expected: str, *, positive: bool) -> Callable[[str | float], float]:
    """Return a parser of finite numbers from 0, above 0 if `positive`; errors state `expected`."""

    def parse(text: str | float) -> float:
        """Parse a number; raise `typer.BadParameter` unless it is in the accepted range."""
        try:
            value = _parse_plain_number(text, float)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise typer.BadParameter(f"expected {expected}, got {str(text)!r}")
        return value

    return parse


def amount_parser(
    parse_amount: Callable[..., float], option: str, expected: str
) -> Callable[[str | float], float]:
    """Return a parser of positive SI numbers and of amounts with units; errors state `expected`."""

    def parse(text: str | float) -> float:
        """Parse a number or an amount; raise `typer.BadParameter` unless it is above 0."""
        try:
            value = _parse_plain_number(text, float)
        except ValueError:
            try:
                value = parse_amount(text, field=option)
            except InputError:
                value = math.nan
        if not math.isfinite(value) or value <= 0:
            raise typer.BadParameter(f"expected {expected}, got {str(text)!r}")
        return value

    return parse


parse_seconds = amount_parser(
    parse_time,
    "--time-limit",
    "seconds above 0, such as 60, or a time with a unit, such as 5min",
)
"""Parse a time limit: a positive number of seconds, or a time with a unit, such as 5min."""


def integer_parser(
    max_value: int | None = None, *, min_value: int = 1
) -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `min_value`, to `max_value` if it is given."""

    def parse(text: str | int) -> int:
        """Parse a whole number; raise `typer.BadParameter` outside the accepted range."""
        try:
            value = _parse_plain_number(text, int)
        except ValueError:
            value = min_value - 1
        if value < min_value or (max_value is not None and value > max_value):
            range_end = "" if max_value is None else f" to {max_value}"
            expected = f"expected a whole number from {min_value}{range_end}"
            raise typer.BadParameter(f"{expected}, got {str(text)!r}")
        return value

    return parse


parse_input_size = integer_parser(MAX_SIZE)
"""Parse an input size of a network, from 1 to `MAX_SIZE`."""


def _parse_method(text: str) -> str:
    """Return `text` if it names a method; import the file of ``FILE.py:FUNCTION``."""
    try:
        return method(text).name
    except (InputError, UserMethodError) as error:
        raise typer.BadParameter(str(error)) from error


def parse_backend_name(text: str) -> str:
    """Return `text` if it names a back end; import the file of ``FILE.py:CLASS``."""
    if text in backend_names():  # without an import of its module
        return text
    try:
        backend_class(text)
    except (InputError, BackendError) as error:
        raise typer.BadParameter(str(error)) from error
    return text


def _parse_option(text: str) -> tuple[str, bool | int | float | str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise InputError(f"--solver-option: expected NAME=VALUE, got {text!r}")
    return name, _parse_option_value(value)


def _parse_option_value(text: str) -> bool | int | float | str:
    """Parse the value of a solver option: true or false in any case, a number, or else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def _complete_backend(incomplete: str) -> list[str]:
    return [name for name in backend_names() if name.startswith(incomplete)]


class FormulationName(StrEnum):
    """Values of ``--formulation``."""

    LAZY = "lazy"
    COMPACT = "compact"
    PAPER = "paper"


class StateName(StrEnum):
    """Values of ``--state``."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMAX = "adamax"
    RADAM = "radam"
    FROZEN = "frozen"


class OptimizerName(StrEnum):
    """Values of ``--optimizer``."""

    SGD = "sgd"
    MOMENTUM = "momentum"
    ADAM = "adam"
    ADAMW = "adamw"
    NADAM = "nadam"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    ADAMAX = "adamax"
    RADAM = "radam"


# -- the groups --------------------------------------------------------------------------------


@group
class FileGraphOptions:
    """Options of a graph: name, input sizes, state, in-place operators, tiles, layers to train.

    For a schedule or a plan, none is needed if its file identifies a built-in network.
    """

    graph: str | None = graph_option(
        None,
        "--graph FILE|MODEL",
        "Graph of the schedule: a file, or a built-in network. Default: the "
        "built-in network that the file names.",
    )
    batch: int | None = graph_option(
        None,
        "--batch N",
        "Samples of a step, for built-in networks. Default: 1.",
        parser=parse_input_size,
    )
    image: int | None = graph_option(
        None,
        "--image N",
        "Side of square images in pixels, for built-in networks.",
        parser=parse_input_size,
    )
    sequence: int | None = graph_option(
        None, "--sequence N", "Tokens of a sample, for built-in networks.", parser=parse_input_size
    )

    state: StateName | None = graph_option(
        None,
        "--state",
        "Put parameters and the state of this optimizer into the graph, for built-in networks; "
        "with frozen, parameters that are only read.",
    )
    in_place: bool = graph_option(
        False, "--in-place", "Allow operators to overwrite their inputs, for built-in networks."
    )
    tile: str | None = graph_option(
        None,
        "--tile SIZE",
        "With --state: split larger parameters along their output channels, such as 32KiB. Also "
        "splits activations of step files, and for 'profile' with --target qemu. auto, "
        "for step files: no tiles if the step fits; otherwise 'solve' tries up to four sizes that "
        "fit and returns the best schedule, and 'limits' and 'explore' use the largest size that "
        "fits.",
    )
    train: str | None = graph_option(
        None,
        "--train PATTERN",
        "Train only last-N layers, biases, or the parameters or layers that match a pattern, with "
        "--state. Default: all.",
    )

    @property
    def graph_name(self) -> str | None:
        """The option ``--graph``; None without it."""
        return self.graph

    def case(
        self,
        costing: CostOptions | None = None,
        *,
        limits: Limits | None = None,
        own: ConstraintOptions | None = None,
        search: SearchOptions | None = None,
    ) -> Case:
        """Return the case that the options state."""
        return Case(
            source=self.graph_name,
            shape=self.variant,
            device=None if costing is None else costing.device,
            profile=None if costing is None else costing.profile,
            limits=limits or Limits(),
            constraint_files=() if own is None else own.files,
            search=search or SearchOptions(),
        )

    @property
    def variant(self) -> Variant:
        """The options for sizes, state, in-place operators, tiles (unparsed), layers to train."""
        return Variant(
            batch=self.batch,
            image=self.image,
            sequence=self.sequence,
            state=None if self.state is None else str(self.state),
            in_place=self.in_place,
            tile=self.tile,
            train=self.train,
        )


@group
class GraphOptions(FileGraphOptions):
    """The graph of a command: a built-in network with input sizes, or a file."""

    graph: str | None = graph_option(
        None, "--graph FILE", "A graph file, *.graph.json, or a step file."
    )
    model: str | None = argument(
        None,
        "MODEL",
        "A built-in network (see 'poetmodel models'), a graph file, or a step file, *.step.json: "
        "the graph of its exported kernels.",
    )

    @property
    def graph_name(self) -> str | None:
        """The MODEL argument or ``--graph``, which has priority; None without both."""
        return self.model if self.graph is None else self.graph


def collect_unique(option: str, pairs: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
    """Return the values of a repeated option by name; raise `InputError` for repeated names."""
    values: dict[str, _Value] = {}
    for name, value in pairs:
        if name in values:
            raise InputError(f"{option}: {name} is given twice")
        values[name] = value
    return values


def _parse_dimension(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) <= MAX_SIZE:
        raise InputError(f"--dim: expected NAME=N, such as sequence=32, got {text!r}")
    return name, int(size)


@group
class OnnxOptions:
    """Properties of a training step that an ONNX file does not contain."""

    loss: str | None = onnx_option(
        None,
        "--loss NAME|MODULE:FUNCTION",
        "The loss of an ONNX file: cross-entropy, mse, bce, nll, l1, or a function of an output "
        "and a target.",
    )
    batch: int | None = onnx_option(
        None,
        "--batch N",
        "Samples of a step, if the ONNX file does not fix them.",
        parser=parse_input_size,
    )
    dim: list[str] | None = onnx_option(
        None,
        "--dim NAME=N",
        "Another dimension that the ONNX file does not fix; may be repeated.",
    )

    def onnx_step(self, batch: int | None = None) -> OnnxStep:
        """Return the options as properties of a step; a `batch` overrides ``--batch``."""
        from poetmodel.torch.target import OnnxStep

        dims = collect_unique("--dim", map(_parse_dimension, self.dim or ()))
        return OnnxStep(loss=self.loss, batch=batch or self.batch, dims=tuple(dims.items()))


@group
class CostOptions:
    """The device, and measured costs that replace its estimates."""

    device: str | None = graph_option(
        None,
        "--device NAME|FILE",
        "A built-in device (see 'poetmodel devices'), or a device file, *.toml.",
    )
    profile: str | None = graph_option(
        None, "--profile FILE", "Measured costs, *.csv. They replace the device's estimates."
    )

    @property
    def is_given(self) -> bool:
        """Whether a device or a profile is given."""
        return self.device is not None or self.profile is not None


@group
class ConstraintOptions:
    """Files of user-defined constraints and objectives."""

    constraints: list[str] | None = limit_option(
        None,
        "--constraints FILE",
        "User-defined constraints and objective on recomputation, paging and writes, *.toml; "
        "may be repeated.",
    )

    @property
    def files(self) -> tuple[str, ...]:
        """The paths."""
        return tuple(self.constraints or ())


# -- limits and search: the rows of `poetmodel.case` as options --------------------------------

_TYPES: Final[dict[str, Any]] = {
    "--deadline-counts": DeadlineCounts | None,
    "--minimize": Quantity | None,
    "--formulation": FormulationName | None,
    "--solver-option": list[str] | None,
}
"""Type of an option; by default that of the field's default, str for None."""
_PARSERS: Final[dict[str, Callable[..., Any]]] = {
    "--method": _parse_method,
    "--backend": parse_backend_name,
    "--time-limit": parse_seconds,
    "--gap": number_parser("a fraction from 0, such as 0.01 for 1 %", positive=False),
    "--threads": integer_parser(MAX_THREADS),
}
"""Parsers of options whose values are no plain texts."""


def _row_parameters(group_class: type) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield field and parameter of each row of `Limits` or `SearchOptions`, in order of rows."""
    rows, make_option = (
        (LIMIT_ROWS, limit_option) if group_class is Limits else (SEARCH_ROWS, solve_option)
    )
    defaults: dict[str, Any] = {entry.name: entry.default for entry in fields(group_class)}
    for row in rows:
        default: Any = False if row.states is not None else defaults[row.field]
        default = None if default is MISSING else default
        hint: Any = str | None if default is None else type(default)
        spelling, more = row.spelling, {}
        if row.option in _PARSERS:
            more["parser"] = _PARSERS[row.option]
        elif row.spelling.endswith(" N"):
            hint, more["parser"] = int | None, integer_parser()
        if row.option == "--backend":
            spelling = f"--backend <{'|'.join(backend_names())}|FILE.py:CLASS>"
            more["autocompletion"] = _complete_backend
        entry = make_option(default, spelling, row.text, **more)
        hint = _TYPES.get(row.option, hint)
        annotation: Any = Annotated[hint, entry.metadata["typer"]]
        yield row.field, _parameter(row.parameter, default, annotation)


def make_limits(**values: Any) -> Limits:
    """Return the limits that the parameters of `LIMIT_ROWS` state."""
    return Limits(**_stated_fields(LIMIT_ROWS, values))


def make_search(**values: Any) -> SearchOptions:
    """Return the options of a search that the parameters of `SEARCH_ROWS` state."""
    return SearchOptions(**_stated_fields(SEARCH_ROWS, values))


def _stated_fields(rows: Iterable[OptionRow], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stated fields from values by parameter; of rows of one field, the last counts."""
    stated: dict[str, Any] = {}
    for row in rows:
        value = values.get(row.parameter)
        if row.states is not None:
            if value:
                stated[row.field] = row.states
        elif isinstance(value, list):
            stated[row.field] = collect_unique(row.option, map(_parse_option, value))
        elif value is not None:
            stated[row.field] = value.value if isinstance(value, StrEnum) else value
    return stated


_ROW_GROUPS: Final[dict[type, Callable[..., object]]] = {
    Limits: make_limits,
    SearchOptions: make_search,
}
"""Functions that make the groups whose options are rows."""


@group
class OutputOptions:
    """Output settings."""

    json: bool = output_option(False, "--json", "Print JSON on stdout, and nothing else.")
    quiet: bool = output_option(
        False,
        "--quiet",
        "Print only errors, and JSON with --json.",
        callback=set_quiet,
    )
