"""Options of commands, in groups.

A group is a dataclass, which type checkers treat as frozen, and one parameter of a command.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import MISSING, dataclass, field, fields, replace
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

from poetmodel.backends.registry import backend_names
from poetmodel.baselines.lookup import method
from poetmodel.baselines.registry import DEFAULT
from poetmodel.cli.completion import COMPLETERS
from poetmodel.cli.output import set_quiet
from poetmodel.errors import InputError, UserMethodError
from poetmodel.graph.catalogue import Variant
from poetmodel.problem import DeadlineCounts, Limits, Problem, Quantity
from poetmodel.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
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


def command(example: str) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that turns a function into a command with the name of the function.

    The parameters of the function are groups of options, which become separate options on the
    command line. ``Annotated[Group, without("field")]`` excludes options, whose fields then have
    their defaults. A parameter of type ``typer.Context`` gets typer's context. The help ends with
    the example call.
    """

    def decorate(function: Callable[..., None]) -> Command:
        """Return the command of a function, with the options of all its groups."""
        groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
        parameters: list[inspect.Parameter] = []
        for name, hint in get_type_hints(function, include_extras=True).items():
            if hint is typer.Context:
                parameters.append(_parameter(name, inspect.Parameter.empty, hint))
            elif name != "return":
                group_class, *excluded = get_args(hint) or (hint,)
                included_parameters = [
                    parameter
                    for parameter in _group_parameters(group_class)
                    if parameter.name not in frozenset().union(*excluded)
                ]
                groups[name] = (group_class, [parameter.name for parameter in included_parameters])
                parameters += included_parameters

        @wraps(function)
        def run(**values: Any) -> None:
            for name, (group_class, names) in groups.items():
                values[name] = group_class(**{key: values.pop(key) for key in names})
            function(**values)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return Command(function.__name__, run, f"Example: {example}")

    return decorate


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(cls: type[_Group]) -> type[_Group]:
    """Decorate a class as a group of options.

    The class becomes a dataclass without generated methods: each start of the program creates all
    these classes, and compiling their methods would take milliseconds. Its `__init__` takes the
    fields as keywords, and raises `TypeError` for an unknown one. A field that is omitted gets its
    default, `REQUIRED` if it is required.
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
def _group_parameters(group_class: type) -> tuple[inspect.Parameter, ...]:
    """Return the options of a group as parameters of a command, in the order of its fields."""
    hints = get_type_hints(group_class)
    return tuple(
        _parameter(entry.name, entry.default, Annotated[hints[entry.name], entry.metadata["typer"]])
        for entry in fields(group_class)
    )


def _parameter(name: str, default: object, hint: object) -> inspect.Parameter:
    if default is REQUIRED:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def without(*names: str) -> frozenset[str]:
    """Return the names of fields to exclude from a group, for the group's `Annotated` type."""
    return frozenset(names)


def option(default: object, spelling: str, text: str, **typer_options: Any) -> Any:
    """Return the dataclass field of an option, with its `typer.Option` as ``metadata["typer"]``.

    `spelling` is the option with its value: ``--ram SIZE``. `text` is its help, and `typer_options`
    are further keywords of `typer.Option`. The default of ``autocompletion`` is the entry of
    `COMPLETERS` for ``--ram``, else for ``SIZE``, else None.
    """
    name, _, metavar = spelling.partition(" ")
    typer_options.setdefault("autocompletion", COMPLETERS.get(name, COMPLETERS.get(metavar)))
    information = typer.Option(name, metavar=metavar or None, help=text, **typer_options)
    return field(default=default, metadata={"typer": information})


def argument(default: object, metavar: str, text: str, **typer_options: Any) -> Any:
    """Return the dataclass field of a positional argument; see `option`.

    `metavar` is its placeholder and `text` its help; `typer_options` are further keywords of
    `typer.Argument`. The default of ``autocompletion`` is the entry of `COMPLETERS` for `metavar`,
    else None.
    """
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
    """Return a parser of finite numbers of at least 0, or above 0 if `positive`.

    The parser raises `typer.BadParameter` for other texts; `expected` describes the accepted values
    in its message.
    """

    def parse(text: str | float) -> float:
        """Parse a finite number; raise `typer.BadParameter` for other texts, or if it is too small.

        See `number_parser`.
        """
        try:
            value = _parse_plain_number(text, float)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise typer.BadParameter(f"expected {expected}, got {str(text)!r}")
        return value

    return parse


def parse_seconds(text: str | float) -> float:
    """Parse a time limit: a positive number of seconds, or a time with a unit, such as 5min.

    Return seconds; raise `typer.BadParameter` for other texts.
    """
    try:
        value = _parse_plain_number(text, float)
    except ValueError:
        try:
            value = parse_time(text, field="--time-limit")
        except InputError:
            value = math.nan
    if not math.isfinite(value) or value <= 0:
        expected = "expected seconds above 0, such as 60, or a time with a unit, such as 5min"
        raise typer.BadParameter(f"{expected}, got {str(text)!r}")
    return value


def integer_parser(
    max_value: int | None = None, *, min_value: int = 1
) -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `min_value`, to `max_value` if it is given.

    The parser raises `typer.BadParameter` for other texts.
    """

    def parse(text: str | int) -> int:
        """Parse a whole number; raise `typer.BadParameter` for other texts and outside the range.

        See `integer_parser`.
        """
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
    """Return `text` if it is the name of a method for `poetmodel.baselines.method`.

    Imports the file of ``FILE.py:FUNCTION``. Raises `typer.BadParameter` if the name is unknown, or
    if the import fails.
    """
    try:
        return method(text).name
    except (InputError, UserMethodError) as error:
        raise typer.BadParameter(str(error)) from error


def parse_backend_name(text: str) -> str:
    """Return the name of a back end; raise `typer.BadParameter` for an unknown name."""
    backends = backend_names()
    if text not in backends:
        names = ", ".join(map(repr, backends))
        raise typer.BadParameter(f"{text!r} is not one of {names}.")
    return text


def _parse_option(text: str) -> tuple[str, bool | int | float | str]:
    """Parse a value of ``--solver-option``; raise `InputError` unless it is ``NAME=VALUE``."""
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise InputError(f"--solver-option: expected NAME=VALUE, got {text!r}")
    return name, _parse_option_value(value)


def _parse_option_value(text: str) -> bool | int | float | str:
    """Parse the value of a solver option: true or false in any case, a number, or else text.

    ``inf`` and ``nan`` are numbers.
    """
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
    """Parse a value of ``--dim``, NAME=N; raise `InputError` unless N is from 1 to `MAX_SIZE`."""
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
        """Return the options as properties of a step; `batch`, unless None, overrides ``--batch``.

        Raises `InputError` for a ``--dim`` without a name or a valid size, and for repeated names.
        """
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
class CommitOptions:
    """Options of commits, which write replaced state to storage."""

    commit: bool = limit_option(
        False,
        "--commit",
        "Write all state that a step replaces to storage in every step, so that no state is lost "
        "in a power cut.",
    )
    commit_every: int | None = limit_option(
        None,
        "--commit-every N",
        "Write the state in every N-th step, at 1/N of the cost; with N above 1 the state stays "
        "in RAM.",
        parser=integer_parser(),
    )

    @property
    def steps_to_commit(self) -> int | None:
        """Number of steps from one commit to the next; None without commits."""
        return self.commit_every or (1 if self.commit else None)


@group
class LimitOptions(CommitOptions):
    """Limits of a step, the minimized quantity, and the allowed decisions."""

    ram: str | None = limit_option(
        None,
        "--ram SIZE",
        "RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the device's.",
    )
    aux: str | None = limit_option(
        None,
        "--aux SIZE",
        "Storage for paged tensors. Default: the device's, else unlimited.",
    )
    deadline: str | None = limit_option(
        None,
        "--deadline TIME",
        "Time limit of a step: 1.5s, 20ms, or 110% of a single pass over all nodes.",
    )
    deadline_counts: DeadlineCounts | None = limit_option(
        None,
        "--deadline-counts",
        "Time that the deadline limits. Default: by the device's storage mode, else serial.",
    )
    minimize: Quantity | None = limit_option(
        None, "--minimize", "What to minimize. Default: energy, or the objective of --constraints."
    )
    energy_budget: str | None = limit_option(
        None,
        "--energy-budget ENERGY",
        "Energy limit of a step: 2.5J, 1.2Wh, or 105% of the baseline.",
    )
    no_paging: bool = limit_option(False, "--no-paging", "Do not page; only recompute.")
    no_recompute: bool = limit_option(False, "--no-recompute", "Do not recompute; only page.")
    count_parameters: bool = limit_option(
        False,
        "--count-parameters",
        "Count parameters, gradients and optimizer state in the RAM budget.",
    )
    constraints: list[str] | None = limit_option(
        None,
        "--constraints FILE",
        "User-defined constraints and objective on recomputation, paging and writes, *.toml; "
        "may be repeated.",
    )

    @property
    def changed_options(self) -> list[str]:
        """Names of the options that differ from their defaults, such as ``--ram``."""
        return [
            "--" + entry.name.replace("_", "-")
            for entry in fields(self)
            if getattr(self, entry.name) not in (entry.default, [])
        ]

    @property
    def stated(self) -> Limits:
        """The limits that the options state, without those of ``--constraints``."""
        return Limits(
            ram=self.ram,
            deadline=self.deadline,
            deadline_counts=self.deadline_counts,
            aux_bytes=self.aux,
            recompute=not self.no_recompute,
            paging=not self.no_paging,
            minimize=self.minimize,
            energy_budget=self.energy_budget,
            count_parameters=self.count_parameters,
            commit=self.steps_to_commit,
        )

    def build_problem(
        self,
        graph: Graph,
        costs: Costs,
        *,
        ram: str | int | None = None,
        deadline: float | None = None,
        energy_budget: float | None = None,
    ) -> Problem:
        """Return the problem with these limits, and with user-defined constraints and objective.

        `ram` [B, or text], `deadline` [s] and `energy_budget` [J] override the options unless None.
        The default RAM is that of the device. Raises `InputError` for invalid limits, files or
        costs, for a missing RAM without a device, and for two objectives (``--minimize`` is one).
        """
        stated = replace(
            self.stated,
            ram=self.ram if ram is None else ram,
            deadline=self.deadline if deadline is None else deadline,
            energy_budget=self.energy_budget if energy_budget is None else energy_budget,
        )
        problem = Problem.from_limits(graph, costs, stated)
        if not self.constraints:
            return problem
        from poetmodel.problem.io import load_constraints

        objective_source = None if self.minimize is None else f"--minimize {self.minimize}"
        for file in self.constraints:
            constrained_problem = load_constraints(file, problem)
            if constrained_problem.user_objective != problem.user_objective:
                if objective_source is not None:
                    raise InputError(
                        f"{objective_source}: {file} states an objective, too; leave out one"
                    )
                objective_source = file
            problem = constrained_problem
        return problem


@group
class SearchOptions:
    """Options of the search for a schedule."""

    method: str = solve_option(
        DEFAULT,
        "--method NAME",
        "Method: optimal; an earlier method for comparison, such as checkpoint-all, chen-sqrt, "
        "rotor or dtr; or FILE.py:FUNCTION, a user-defined method.",
        parser=_parse_method,
    )
    formulation: FormulationName | None = solve_option(
        None, "--formulation", "The formulation to solve. Default: lazy."
    )
    backend: str = solve_option(
        backend_names()[0],
        f"--backend <{'|'.join(backend_names())}>",
        "The solver.",
        parser=parse_backend_name,
        autocompletion=_complete_backend,
    )
    time_limit: float = solve_option(
        60.0,
        "--time-limit TIME",
        "Wall-clock limit for building and solving: seconds, or a time such as 5min.",
        parser=parse_seconds,
    )
    gap: float = solve_option(
        1e-4,
        "--gap FRACTION",
        "Gap tolerance, as a fraction of the overhead in the minimized quantity: stop when the gap "
        "is at most this.",
        parser=number_parser("a fraction from 0, such as 0.01 for 1 %", positive=False),
    )
    threads: int = solve_option(
        1,
        "--threads N",
        "Threads. With 2 or more, `lazy` runs a primal worker in parallel with the proof.",
        parser=integer_parser(MAX_THREADS),
    )
    solver_option: list[str] | None = solve_option(
        None,
        "--solver-option NAME=VALUE",
        "An option of the solver by its own name, such as mip_heuristic_effort=0.2 of HiGHS; may "
        "be repeated.",
    )

    @property
    def solver_options(self) -> dict[str, bool | int | float | str]:
        """Options of the solver, by name, with values parsed by `_parse_option_value`.

        Raises `InputError` for options other than ``NAME=VALUE``, and for repeated names.
        """
        return collect_unique("--solver-option", map(_parse_option, self.solver_option or ()))


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
