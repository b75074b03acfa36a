"""The options of commands, in groups: a group is a frozen dataclass, one parameter of a command."""

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

from poetmodel.backends.registry import backend_names
from poetmodel.baselines.lookup import method
from poetmodel.baselines.registry import DEFAULT
from poetmodel.cli.completion import COMPLETED
from poetmodel.cli.output import set_quiet
from poetmodel.errors import InputError, OwnMethodError
from poetmodel.graph.catalogue import Variant
from poetmodel.problem import DeadlineCounts, Problem, Quantity
from poetmodel.units import parse_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.torch.target import OnnxStep

_Group = TypeVar("_Group")

REQUIRED: Final = MISSING
"""The default of an option or argument that must be given."""
MAX_THREADS: Final = 1024
MAX_SIZE: Final = 1_000_000
"""Largest size of a network's input that can be requested."""


class Command(NamedTuple):
    """A command of the application."""

    name: str
    run: Callable[..., None]
    epilog: str


def command(example: str) -> Callable[[Callable[..., None]], Command]:
    """Return a decorator that makes a function a command.

    The parameters of the function are groups of options, which the command line takes one by one.
    ``Annotated[Group, without("field")]`` leaves options out: their fields keep the defaults. A
    parameter ``context`` gets typer's context. The help ends with the example, a call.
    """

    def decorate(function: Callable[..., None]) -> Command:
        groups: dict[str, tuple[Callable[..., object], list[str]]] = {}
        parameters: list[inspect.Parameter] = []
        for name, hint in get_type_hints(function, include_extras=True).items():
            if hint is typer.Context:
                parameters.append(_parameter(name, inspect.Parameter.empty, hint))
            elif name != "return":
                options, *left_out = get_args(hint) or (hint,)
                kept = [p for p in _options(options) if p.name not in frozenset().union(*left_out)]
                groups[name] = (options, [parameter.name for parameter in kept])
                parameters += kept

        @wraps(function)
        def run(**given: Any) -> None:
            for name, (options, names) in groups.items():
                given[name] = options(**{key: given.pop(key) for key in names})
            function(**given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return Command(function.__name__, run, f"Example: {example}")

    return decorate


@dataclass_transform(frozen_default=True, kw_only_default=True)
def group(cls: type[_Group]) -> type[_Group]:
    """Make a class a group of options.

    Every call of the program makes all groups: methods that dataclasses compile would cost it
    milliseconds.
    """

    def take(self: object, **given: object) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            setattr(self, option.name, given.pop(option.name, option.default))
        if given:
            raise TypeError(f"{cls.__name__} has no {', '.join(given)}")

    wrapped = dataclass(init=False, eq=False, repr=False)(cls)
    wrapped.__init__ = take  # type: ignore[method-assign]
    return wrapped


@cache
def _options(group: type) -> tuple[inspect.Parameter, ...]:
    """Return the options of a group as parameters of a command."""
    kinds = get_type_hints(group)
    return tuple(
        _parameter(f.name, f.default, Annotated[kinds[f.name], f.metadata["typer"]])
        for f in fields(group)
    )


def _parameter(name: str, default: object, hint: object) -> inspect.Parameter:
    if default is REQUIRED:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def without(*names: str) -> frozenset[str]:
    """Return the fields of a group that a command does not take."""
    return frozenset(names)


def option(default: object, spelling: str, text: str, **more: Any) -> Any:
    """Return the field of a group that is an option.

    `spelling` is the option, and what it takes: ``--ram SIZE``. `text` is its help, and `more` what
    `typer.Option` takes beside these.
    """
    name, _, metavar = spelling.partition(" ")
    more.setdefault("autocompletion", COMPLETED.get(name, COMPLETED.get(metavar)))
    information = typer.Option(name, metavar=metavar or None, help=text, **more)
    return field(default=default, metadata={"typer": information})


def argument(default: object, metavar: str, text: str, **more: Any) -> Any:
    """Return the field of a group that is an argument: its default, what it is, and its help."""
    more.setdefault("autocompletion", COMPLETED.get(metavar))
    information = typer.Argument(metavar=metavar, help=text, **more)
    return field(default=default, metadata={"typer": information})


what = partial(option, rich_help_panel="What to schedule")
limit = partial(option, rich_help_panel="Limits")
how = partial(option, rich_help_panel="How to solve")
output = partial(option, rich_help_panel="Output")
onnx = partial(option, rich_help_panel="An ONNX file")


# -- what options take -------------------------------------------------------------------------


def number(wanted: str, *, positive: bool) -> Callable[[str | float], float]:
    """Return a parser of finite numbers, from 0 or above 0; `wanted` says what it accepts."""

    def parse(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise typer.BadParameter(f"expected {wanted}, got {str(text)!r}")
        return value

    return parse


def seconds(text: str | float) -> float:
    """Parse a time limit: a number of seconds above 0, or a time with a unit, such as 5min."""
    try:
        value = float(text)
    except ValueError:
        try:
            value = parse_time(text, field="--time-limit")
        except InputError:
            value = math.nan
    if not math.isfinite(value) or value <= 0:
        expected = "expected seconds above 0, such as 60, or a time with a unit, such as 5min"
        raise typer.BadParameter(f"{expected}, got {str(text)!r}")
    return value


def whole_number(most: int | None = None, *, least: int = 1) -> Callable[[str | int], int]:
    """Return a parser of whole numbers from `least`, to `most` if there is a limit."""

    def parse(text: str | int) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            to = "" if most is None else f" to {most}"
            expected = f"expected a whole number from {least}{to}"
            raise typer.BadParameter(f"{expected}, got {str(text)!r}")
        return value

    return parse


input_size = whole_number(MAX_SIZE)
"""Parse a size of a network's input."""


def _method_name(text: str) -> str:
    try:
        return method(text).name
    except (InputError, OwnMethodError) as error:
        raise typer.BadParameter(str(error)) from error


def backend_name(text: str) -> str:
    """Parse the name of a back end."""
    known = backend_names()
    if text not in known:
        names = ", ".join(map(repr, known))
        raise typer.BadParameter(f"{text!r} is not one of {names}.")
    return text


def _option_value(text: str) -> bool | int | float | str:
    """Return the value of a solver's option: true or false, a number, or else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _completed_backends(incomplete: str) -> list[str]:
    return [name for name in backend_names() if name.startswith(incomplete)]


class FormulationName(StrEnum):
    """The formulations that ``--formulation`` names."""

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
    """The optimizers of `--optimizer`."""

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
    """The graph that a schedule or plan is for, where its file does not say enough."""

    graph: str | None = what(
        None,
        "--graph FILE|MODEL",
        "The graph that the schedule is for: a file, or a built-in network. Default: the "
        "built-in network that the file names.",
    )
    batch: int | None = what(
        None,
        "--batch N",
        "Samples of a step, for built-in networks. Default: 1.",
        parser=input_size,
    )
    image: int | None = what(
        None,
        "--image N",
        "Side of square images in pixels, for built-in networks.",
        parser=input_size,
    )
    sequence: int | None = what(
        None, "--sequence N", "Tokens of a sample, for built-in networks.", parser=input_size
    )

    state: StateName | None = what(
        None,
        "--state",
        "Put parameters and the state of this optimizer into the graph, or parameters that are "
        "only read, for built-in networks.",
    )
    in_place: bool = what(
        False, "--in-place", "Let operators write over their inputs, for built-in networks."
    )
    tile: str | None = what(
        None,
        "--tile SIZE",
        "With --state: split larger parameters along their output channels, such as 32KiB. Of step "
        "files, and for 'profile' with --target qemu, activations too. For 'solve' also auto: it "
        "tries sizes that fit and takes the best schedule. For 'limits' and 'explore' auto is the "
        "largest that fits.",
    )
    train: str | None = what(
        None,
        "--train WHAT",
        "Train only last-N layers, biases, or the parameters or layers that match a pattern, with "
        "--state. Default: all.",
    )

    @property
    def shape(self) -> Variant:
        """The sizes of the input, and what of its state is in the graph."""
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
    """The graph of a command: a built-in network, for some size of its input, or a file."""

    graph: str | None = what(None, "--graph FILE", "A graph file, *.graph.json, or a step file.")
    model: str | None = argument(
        None,
        "MODEL",
        "A built-in network (see 'poetmodel models'), a graph file, or a step file, *.step.json: "
        "the graph of its exported kernels.",
    )


def _dimension(text: str) -> tuple[str, int]:
    name, _, size = text.rpartition("=")
    if not name or not size.isdecimal() or not 0 < int(size) <= MAX_SIZE:
        raise InputError(f"--dim: expected NAME=N, such as sequence=32, got {text!r}")
    return name, int(size)


@group
class OnnxOptions:
    """Facts on a training step that an ONNX file lacks."""

    loss: str | None = onnx(
        None,
        "--loss NAME|MODULE:FUNCTION",
        "The loss of an ONNX file: cross-entropy, mse, bce, nll, l1, or a function of an output "
        "and a target.",
    )
    batch: int | None = onnx(
        None,
        "--batch N",
        "Samples of a step, where the ONNX file leaves them open.",
        parser=input_size,
    )
    dim: list[str] | None = onnx(
        None,
        "--dim NAME=N",
        "Another dimension that the ONNX file leaves open; may be repeated.",
    )

    def step(self, batch: int | None = None) -> OnnxStep:
        """Return the statements about the step; another option may have stated the batch."""
        from poetmodel.torch.target import OnnxStep

        dims = tuple(map(_dimension, self.dim or ()))
        return OnnxStep(loss=self.loss, batch=batch or self.batch, dims=dims)


@group
class CostOptions:
    """The device, and measured costs in place of its estimates."""

    device: str | None = what(
        None,
        "--device NAME|FILE",
        "A built-in device (see 'poetmodel devices'), or a device file, *.toml.",
    )
    profile: str | None = what(
        None, "--profile FILE", "Measured costs, *.csv. They replace the device's estimates."
    )

    @property
    def any(self) -> bool:
        """Whether one of them is given."""
        return self.device is not None or self.profile is not None


@group
class CommitOptions:
    """When state is written to storage."""

    commit: bool = limit(
        False,
        "--commit",
        "Write all state that a step replaces to storage in every step, so that a power cut loses "
        "none.",
    )
    commit_every: int | None = limit(
        None,
        "--commit-every N",
        "The same in every N-th step, at 1/N of the cost; with N above 1 the state stays in RAM.",
        parser=whole_number(),
    )

    @property
    def steps_to_commit(self) -> int | None:
        """After how many steps state is written to storage."""
        return self.commit_every or (1 if self.commit else None)


@group
class LimitOptions(CommitOptions):
    """The limits of a step, what is minimized, and which decisions are allowed."""

    ram: str | None = limit(
        None,
        "--ram SIZE",
        "RAM budget: 256KiB, 1.5MB, or 50% of the keep-all peak. Default: the device's.",
    )
    aux: str | None = limit(
        None,
        "--aux SIZE",
        "Storage for paged tensors. Default: the device's, else unlimited.",
    )
    deadline: str | None = limit(
        None,
        "--deadline TIME",
        "Time limit of a step: 1.5s, 20ms, or 110% of a single pass over all nodes.",
    )
    deadline_counts: DeadlineCounts | None = limit(
        None,
        "--deadline-counts",
        "Which time the deadline limits. Default: by the device's storage mode, else serial.",
    )
    minimize: Quantity | None = limit(
        None, "--minimize", "What to minimize. Default: energy, or the objective of --constraints."
    )
    energy_budget: str | None = limit(
        None,
        "--energy-budget ENERGY",
        "Energy limit of a step: 2.5J, 1.2Wh, or 105% of the baseline.",
    )
    no_paging: bool = limit(False, "--no-paging", "Do not page, only recompute.")
    no_recompute: bool = limit(False, "--no-recompute", "Do not recompute, only page.")
    count_parameters: bool = limit(
        False,
        "--count-parameters",
        "Count parameters, gradients and optimizer state in the RAM budget.",
    )
    constraints: list[str] | None = limit(
        None,
        "--constraints FILE",
        "Own constraints on what is recomputed, paged and written, and an own objective, *.toml; "
        "may be repeated.",
    )

    @property
    def given(self) -> list[str]:
        """The options that are given."""
        return [
            "--" + entry.name.replace("_", "-")
            for entry in fields(self)
            if getattr(self, entry.name) not in (entry.default, [])
        ]

    def problem(
        self,
        graph: Graph,
        costs: Costs,
        *,
        ram: str | int | None = None,
        deadline: float | None = None,
        energy_budget: float | None = None,
    ) -> Problem:
        """Return the problem with these limits; a deadline or budget replaces that of a step."""
        stated = Problem(
            graph,
            costs,
            ram=self.ram if ram is None else ram,
            deadline=self.deadline if deadline is None else deadline,
            deadline_counts=self.deadline_counts,
            aux_bytes=self.aux,
            recompute=not self.no_recompute,
            paging=not self.no_paging,
            minimize=self.minimize or Quantity.ENERGY,
            energy_budget=self.energy_budget if energy_budget is None else energy_budget,
            count_parameters=self.count_parameters,
            commit=self.steps_to_commit,
        )
        if not self.constraints:
            return stated
        from poetmodel.problem.io import load_constraints

        stating = None if self.minimize is None else f"--minimize {self.minimize}"
        for file in self.constraints:
            constraints = load_constraints(file, stated)
            if constraints.own_objective != stated.own_objective:
                if stating is not None:
                    raise InputError(
                        f"{stating}: {file} has an [objective] of its own; leave out one of them"
                    )
                stating = file
            stated = constraints
        return stated


@group
class SearchOptions:
    """How to find a schedule."""

    method: str = how(
        DEFAULT,
        "--method NAME",
        "How to find the schedule: optimal, an earlier method to compare with, such as "
        "checkpoint-all, chen-sqrt, rotor or dtr, or FILE.py:FUNCTION of your own.",
        parser=_method_name,
    )
    formulation: FormulationName | None = how(
        None, "--formulation", "The formulation to solve. Default: lazy."
    )
    backend: str = how(
        backend_names()[0],
        f"--backend <{'|'.join(backend_names())}>",
        "The solver.",
        parser=backend_name,
        autocompletion=_completed_backends,
    )
    time_limit: float = how(
        60.0,
        "--time-limit TIME",
        "Wall-clock limit for building and solving: seconds, or a time such as 5min.",
        parser=seconds,
    )
    gap: float = how(
        1e-4,
        "--gap FRACTION",
        "Gap tolerance, as a fraction of the overhead of what is minimized: stop when the gap is "
        "at most this.",
        parser=number("a fraction from 0, such as 0.01 for 1 %", positive=False),
    )
    threads: int = how(
        1,
        "--threads N",
        "Threads. With 2 or more, `lazy` runs a primal worker beside the proof.",
        parser=whole_number(MAX_THREADS),
    )
    solver_option: list[str] | None = how(
        None,
        "--solver-option NAME=VALUE",
        "An option of the solver by its own name, such as mip_heuristic_effort=0.2 of HiGHS; may "
        "be repeated.",
    )

    @property
    def solver_options(self) -> dict[str, bool | int | float | str]:
        """The options of the solver with their values."""
        options: dict[str, bool | int | float | str] = {}
        for text in self.solver_option or ():
            name, given, value = text.partition("=")
            if not (name and given):
                raise InputError(f"--solver-option: expected NAME=VALUE, got {text!r}")
            if name in options:
                raise InputError(f"--solver-option: {name} is given twice")
            options[name] = _option_value(value)
        return options


@group
class OutputOptions:
    """Output settings."""

    json: bool = output(False, "--json", "Print JSON on stdout, and nothing else.")
    quiet: bool = output(
        False,
        "--quiet",
        "Print nothing but errors, and JSON with --json.",
        callback=set_quiet,
    )
