"""``choose``: select the layers of a model to train on a device, with a bound on the score."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.backends.registry import backend as find_backend
from poetmodel.budgets import TileChoice
from poetmodel.case.case import Case
from poetmodel.case.solving import (
    MIN_TIME_LIMIT_S,
    LoadedCase,
    Remainder,
    Stages,
    solve_case,
)
from poetmodel.choosing.freezing import Freezable, graph_signature
from poetmodel.choosing.relaxation import costs_for, find_estimate_device
from poetmodel.choosing.scores import load_scores
from poetmodel.choosing.search import (
    GRADIENT_NORM,
    LayerSet,
    check_layer_names,
    check_scores,
    group_by_layer,
    rename_costs,
    select_layers,
)
from poetmodel.clock import now_s
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError, join_names
from poetmodel.graph.catalogue import Variant
from poetmodel.problem import Limits
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity
from poetmodel.solver.request import SearchOptions
from poetmodel.tiling.choice import choose_tiles, needed_bytes, parse_tile
from poetmodel.torch.capturing.inputs import find_loss, positional_inputs, takes_keywords
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.errors import CaptureError, convert_exceptions
from poetmodel.torch.int8.front import QuantizedFront
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.lowering.step import lower
from poetmodel.torch.step.optimizers import make_optimizer
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from poetmodel.backends import OptionValue
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.solver.request import Request
    from poetmodel.solver.tile_trials import TileTrial

    Loss = Callable[..., torch.Tensor] | None

SELECTION_RATIO: Final = 0.8
"""Fraction of the time limit for trials of tile sizes and the selection; the rest is for the
schedule of the selected set."""

_NO_COSTS: Final = "no costs: set device, such as nrf52840, or profile, a file of costs"
_NO_BOARD: Final = "tile: needs a device; set device, such as nrf52840"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The selected layers, a bound on the score of every set, and a schedule."""

    selection: LayerSet
    """The selected layers with score and bound."""
    parameters: tuple[str, ...]
    """Names of the parameters of the selected layers; all other parameters are frozen."""
    scores: Mapping[str, float]
    """Score of each layer."""
    result: SolveResult
    """The solve of the step that trains only the selected layers. If no set of layers was found,
    its `reason` explains why."""
    step: LoweredStep | None
    """The step of `result`, without masks; None if no set of layers was found."""
    note: str = ""
    """Text for display: the steps for which ``infeasible`` is proved, if not all, or that no bound
    on other sets is proved. Empty otherwise."""
    tile_bytes: int | None = None
    """The tile size of all steps [B]; None without tiles."""
    tile_trials: tuple[TileTrial, ...] = ()
    """Trials of tile sizes; empty unless ``auto`` has tried several sizes."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers to train, in the order of the model; empty if no set was found."""
        return self.selection.layers

    @property
    def score(self) -> float:
        """The sum of the scores of the trained layers."""
        return self.selection.score

    @property
    def bound(self) -> float:
        """Upper bound on the score of every set within the limits."""
        return self.selection.bound

    @property
    def gap(self) -> float:
        """(bound - score) / bound; 0 if both are 0."""
        return self.selection.gap

    @property
    def status(self) -> Status:
        """Status of the selection: ``optimal`` within the requested gap, otherwise ``feasible``.

        ``infeasible`` means that no layer can be trained within the limits, ``unknown`` that no set
        was found in time.
        """
        return self.selection.status

    def freeze(self, model: torch.nn.Module) -> None:
        """Set ``requires_grad`` of all parameters of a model: True only for the chosen ones.

        Parameters of a loss module are not changed.
        """
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return the result of the solve, with the selection under ``choice``, as plain values."""
        return self.result.to_dict() | {
            "choice": {
                "status": str(self.status),
                "layers": list(self.layers),
                "parameters": list(self.parameters),
                "score": self.score,
                "bound": self.bound,
                "gap": self.gap,
                "scores": dict(self.scores),
                "note": self.note,
                "tile_bytes": self.tile_bytes,
                "tile_trials": [trial.to_dict() for trial in self.tile_trials],
                "statistics": dict(self.selection.statistics),
            }
        }


def choose(  # noqa: PLR0913 - one entry point; all parameters except four have defaults
    model: torch.nn.Module,
    loss_fn: Loss,
    inputs: Sequence[Any],
    *,
    scores: Mapping[str, float] | str | Path,
    batch: Sequence[Any] | None = None,
    per: str = "layer",
    device: str | Device | None = None,
    profile: str | Path | Costs | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    name: str | None = None,
    tile: str | int | TileChoice | None = None,
    backend: str = "highs",
    time_limit: float = 60.0,
    gap: float = 1e-4,
    threads: int = 1,
    seed: int = 0,
    solver_options: Mapping[str, OptionValue] | None = None,
    **limits: Any,
) -> Choice:
    """Select the layers with the highest sum of scores that can be trained within the limits.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `export`. Parameters that do not require a gradient stay frozen.
    scores : mapping, path or 'gradient-norm'
        The score of training each layer, 0 or more; a CSV file with lines ``name,score``; or
        ``gradient-norm``, the norm of the gradients of the layer's parameters.
    batch : sequence, optional
        For ``gradient-norm``: the inputs of the forward and backward pass. Default: `inputs`.
    per : {'layer', 'tensor'}
        The unit that is trained or frozen: all parameters of a module, or each parameter.
    device : str or Device, optional
        The device with costs, storage and RAM.
    profile : str, Path or Costs, optional
        Measured costs of the step that trains all layers, instead of the device's estimates.
    optimizer : torch.optim.Optimizer, optional
        An optimizer of all parameters. Default: SGD.
    name : str, optional
        Name of the step; by default the class of `model`.
    tile : str or int, optional
        Maximum tensor size, such as ``32KiB``: the steps are divided into tiles, as in `export`.
        ``auto`` divides only a step that does not fit: it tries at most four sizes that fit, within
        a fraction of the time limit. It uses the size with the smallest minimized value for the
        step that trains all layers. With a `profile` it uses the largest size that fits, without
        trials. If none fits, it uses the size that needs the least RAM. Default: no tiles.
    backend, time_limit, gap, threads, seed, solver_options
        As for `poetmodel.solve`. The gap applies to the score, and to the schedule of the set. The
        time limit includes neither the capture that trains all layers nor gradient norms.
    **limits
        Limits as for `poetmodel.Problem`: ``ram``, ``deadline``, ``deadline_counts``,
        ``aux_bytes``, ``energy_budget``, ``commit``, ``recompute``, ``paging``, and ``minimize``.
        Percentages refer to the step that trains all layers; those of RAM, to this step without
        tiles.

    Returns
    -------
    Choice
        The set, its score, the bound, and a schedule; if no set or no schedule is found, `result`
        has the reason. ``requires_grad`` of all parameters is unchanged. ``gradient-norm`` may
        change the state of the random generator.

    Raises
    ------
    CaptureError
        If the step cannot be captured or executed, an operator has no kernel, or the profile lacks
        costs of the step that trains the selected layers.
    InputError
        If an option is invalid, a score is missing, invalid, or of an unknown or int8 layer, or all
        scores are 0.

    Notes
    -----
    A frozen layer has ``requires_grad_(False)``: its weights are constants. Modules stay in their
    modes, so a batch norm in training mode still updates its statistics.

    The sets are compared on graphs derived from one capture, and the step of the selected set is
    captured again; with tiles it is derived, too. All these graphs are without masks, because the
    best masks depend on the trained layers. PyTorch may capture other operators if a weight is
    frozen (for example for batched products). Then the bound is the sum of all scores, and
    `Choice.note` explains it.
    """
    return choose_layers(
        model,
        loss_fn,
        inputs,
        scores=scores,
        batch=batch,
        per=per,
        device=device,
        profile=profile,
        optimizer=optimizer,
        name=name,
        tile=tile,
        limits=Limits(**limits),
        search=SearchOptions(
            backend=backend,
            time_limit_s=time_limit,
            gap=gap,
            threads=threads,
            seed=seed,
            solver_options=dict(solver_options or {}),
        ),
    )


def choose_layers(  # noqa: PLR0913 - those of `choose`
    model: torch.nn.Module,
    loss_fn: Loss,
    inputs: Sequence[Any],
    *,
    scores: Mapping[str, float] | str | Path,
    batch: Sequence[Any] | None,
    per: str,
    device: str | Device | None,
    profile: str | Path | Costs | None,
    optimizer: torch.optim.Optimizer | None,
    name: str | None,
    tile: str | int | TileChoice | None,
    limits: Limits,
    search: SearchOptions,
) -> Choice:
    """Choose layers as `choose` does."""
    sources = _Sources.read(scores, per, device, profile, tile, limits)
    if isinstance(model, torch.nn.Module):
        sources.check_scores(model, loss_fn, per)
    if optimizer is None:
        optimizer = make_optimizer("sgd", model, loss_fn)
    step = lower(model, loss_fn, inputs, name=name, optimizer=optimizer, masks=False)
    request = search.start()
    find_backend(request.backend).check_options(request.solver_options)
    case = Case(
        shape=Variant(tile=None if sources.tile.is_whole else str(sources.tile)),
        limits=limits,
        search=search,
        step=step,
        board=sources.device,
        costs=sources.profile,
    )
    selection = _Selection(
        training=_Training(model, loss_fn, inputs, name=name, optimizer=optimizer),
        step=step,
        sources=sources,
        batch=inputs if batch is None else batch,
        per=per,
        request=request,
    )
    result = solve_case(LoadedCase.read(case), request, stages=selection).result
    return replace(selection.require_choice(), result=result)


@dataclass(frozen=True)
class _Training:
    """What is captured."""

    model: torch.nn.Module
    loss_fn: Loss
    inputs: Sequence[Any]
    name: str | None = field(kw_only=True)
    optimizer: torch.optim.Optimizer = field(kw_only=True)

    def lower(self, parameters: Collection[str]) -> LoweredStep:
        """Capture the step that trains only some parameters."""
        with _train_only(_captured_parameters(self.model, self.loss_fn), parameters):
            return lower(
                self.model,
                self.loss_fn,
                self.inputs,
                name=self.name,
                optimizer=self.optimizer,
                masks=False,
            )


@dataclass(kw_only=True)
class _Selection(Stages):
    """Selects the layers once the tiles are chosen; the schedule is that of their step."""

    training: _Training
    step: LoweredStep
    """The step that trains all layers, without tiles."""
    sources: _Sources
    batch: Sequence[Any]
    """Inputs for gradient norms."""
    per: str
    request: Request
    """The whole search."""
    choice: Choice | None = None
    """The choice, its result without the schedule; None before `settle`."""

    def require_choice(self) -> Choice:
        """Return the choice; only after `settle`."""
        if self.choice is None:
            raise RuntimeError("the layers are not selected yet")
        return self.choice

    def settle(self, remainder: Remainder) -> Remainder:
        """Select the layers; return the problem of their step, or the result without a set."""
        tiles = remainder.require_tiles()
        request = remainder.request if tiles.is_interrupted else self.request
        elapsed_s, problem = request.elapsed_s(), remainder.problem
        freezable = Freezable(step=tiles.step)
        layers = group_by_layer(freezable.parameters, self.per)
        scores = self.sources.layer_scores(
            layers, self.training.model, self.training.loss_fn, self.batch
        )
        request = replace(request, started_s=now_s() - elapsed_s)
        selection = select_layers(
            freezable,
            problem,
            layers,
            scores,
            request=replace(request, time_limit_s=SELECTION_RATIO * request.time_limit_s),
        )
        parameters = tuple(name for layer in selection.layers for name in layers[layer])
        no_result = _make_empty_result(problem, selection, request)
        choice = Choice(
            selection=selection,
            parameters=parameters,
            scores=scores,
            result=no_result,
            step=None,
            tile_bytes=tiles.tile_bytes,
            tile_trials=tiles.trials,
        )
        if not parameters:
            note = _proof_scope(self.step, problem, tiles.tile_bytes, selection.status)
            self.choice = replace(choice, note=note)
            return replace(remainder, result=no_result)
        if tiles.tile_bytes is None:
            chosen_step = self.training.lower(parameters)
            compared_graph = freezable.graph_for(parameters)
        else:
            chosen_step = freezable.step_for(parameters)
            compared_graph = chosen_step.graph
        request = request.restart(max(request.remaining_s(), MIN_TIME_LIMIT_S))
        remainder = replace(remainder, request=request, result=None)
        self.choice, remainder = _with_step(choice, chosen_step, compared_graph, remainder)
        return remainder


@dataclass(frozen=True, kw_only=True)
class _Sources:
    """Scores, costs and tile sizes of a choice, each read once."""

    scores: dict[str, float] | None
    """The stated scores, unchecked if a mapping; None for gradient norms."""
    source: str
    """Origin of the scores, for messages."""
    device: Device | None
    profile: Costs | None
    """Measured costs; None to estimate those of `device`."""
    tile: TileChoice

    @classmethod
    def read(
        cls,
        scores: Mapping[str, float] | str | Path,
        per: str,
        device: str | Device | None,
        profile: str | Path | Costs | None,
        tile: str | int | TileChoice | None,
        limits: Limits,
    ) -> _Sources:
        """Read the sources; refuse the first invalid option, except layers and values of scores."""
        group_by_layer((), per)
        values, source = None, GRADIENT_NORM
        if not isinstance(scores, str | Path):
            values, source = dict(scores), "scores"
        elif scores != GRADIENT_NORM:
            values, source = load_scores(Path(scores)), str(scores)
        board = Device.load(device) if isinstance(device, str) else device
        if isinstance(profile, str | Path):
            profile = Costs.load(profile, device=board)
        elif profile is not None and board is not None:
            profile = profile.for_device(board)
        if profile is None and board is None:
            raise InputError(_NO_COSTS)
        tile_choice = parse_tile(tile)
        if not tile_choice.is_whole and board is None:
            raise InputError(_NO_BOARD)
        limits.check()
        return cls(scores=values, source=source, device=board, profile=profile, tile=tile_choice)

    def check_scores(self, model: torch.nn.Module, loss_fn: Loss, per: str) -> None:
        """Refuse stated scores of unknown or int8 layers."""
        if self.scores is None:
            return
        _check_not_quantized(self.scores, model, self.source)
        parameters = _captured_parameters(model, loss_fn).items()
        trained_names = (name for name, parameter in parameters if parameter.requires_grad)
        check_layer_names(self.scores, group_by_layer(trained_names, per), self.source)

    def layer_scores(
        self,
        layers: Mapping[str, Sequence[str]],
        model: torch.nn.Module,
        loss_fn: Loss,
        batch: Sequence[Any],
    ) -> dict[str, float]:
        """Return the score of each layer: the user's, maybe all 0, or gradient norms."""
        values = self.scores
        if values is None:
            values = gradient_norms(layers, model, loss_fn, batch)
        _check_not_quantized(values, model, self.source)
        check_scores(values, layers, self.source)
        return {layer: float(values[layer]) for layer in layers}


def _proof_scope(
    whole_step: LoweredStep, problem: Problem, tile_bytes: int | None, status: Status
) -> str:
    """Return tile sizes, as text, of a proof that no layer can be trained; "" if none or all."""
    device = problem.costs.device
    if status != Status.INFEASIBLE:
        return ""
    if tile_bytes is not None:
        return f"proved only for tiles of {format_bytes(tile_bytes)}"
    if device is None:
        return ""
    auto_tile_bytes, tiled_step = choose_tiles(
        whole_step, TileChoice.AUTO, device, ram_bytes=0, paging=problem.can_page
    )
    if auto_tile_bytes is None:
        return ""
    min_ram = format_bytes(needed_bytes(tiled_step, device, paging=problem.can_page))
    return (
        f"proved only without tiles; with --tile {auto_tile_bytes}B no node needs more than "
        f"{min_ram}"
    )


def gradient_norms(
    layers: Mapping[str, Sequence[str]],
    model: torch.nn.Module,
    loss_fn: Loss,
    batch: Sequence[Any],
) -> dict[str, float]:
    """Return the 2-norm of the gradients of each layer; 0 if the loss does not depend on it.

    `layers` has the names of each layer's parameters, which must require gradients. Works on a
    copy, but the state of the random generator may change.
    """
    model_copy, loss_copy = copy.deepcopy((with_fronts(model), loss_fn))
    parameters = _captured_parameters(model_copy, loss_copy)
    model_copy.zero_grad()
    example_inputs = positional_inputs(batch)
    arguments = example_inputs if loss_copy is None else example_inputs[:-1]
    parameter_names = [name for names in layers.values() for name in names]
    with convert_exceptions(GRADIENT_NORM):
        if takes_keywords(model_copy, batch if loss_copy is None else arguments):
            output = model_copy(**arguments[0])
        else:
            output = model_copy(*arguments)
        loss = find_loss(
            GRADIENT_NORM, output if loss_copy is None else loss_copy(output, example_inputs[-1])
        )
        gradients = torch.autograd.grad(
            loss, [parameters[name] for name in parameter_names], allow_unused=True
        )
    gradients_by_name = dict(zip(parameter_names, gradients, strict=True))
    norms = {}
    for layer, names in layers.items():
        layer_gradients = [
            gradients_by_name[name] for name in names if gradients_by_name[name] is not None
        ]
        norms[layer] = (
            float(torch.nn.utils.get_total_norm(layer_gradients)) if layer_gradients else 0.0
        )
    return norms


def _check_not_quantized(scores: Mapping[str, float], model: torch.nn.Module, source: str) -> None:
    """Refuse a score of a layer in an int8 front, which is frozen."""
    converted_model = with_fronts(model)
    front_paths = [
        path
        for path, module in converted_model.named_modules()
        if isinstance(module, QuantizedFront)
    ]
    trainable_names = [name for name, _ in converted_model.named_parameters()]
    for name in scores:
        if any(f"{parameter}.".startswith(f"{name}.") for parameter in trainable_names):
            continue
        for path in front_paths:
            if f"{name}.".startswith(f"{path}." if path else ""):
                raise InputError(
                    f"{source}: {name} is part of the int8 front {path!r}, which cannot be "
                    "trained; leave its score out"
                )


def _captured_parameters(model: torch.nn.Module, loss_fn: Loss) -> dict[str, torch.nn.Parameter]:
    """Return all parameters by name in a capture; only names of a loss have a prefix, ``loss.``."""
    parameter_of_name = dict(model.named_parameters())
    if isinstance(loss_fn, torch.nn.Module):
        parameter_of_name |= {
            f"{LOSS}.{name}": parameter for name, parameter in loss_fn.named_parameters()
        }
    return parameter_of_name


@contextmanager
def _train_only(
    parameters: Mapping[str, torch.nn.Parameter], chosen_names: Collection[str]
) -> Iterator[None]:
    """Context manager in which ``requires_grad`` is True for only the chosen parameters."""
    old_flags = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen_names)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(old_flags[name])


def _make_empty_result(problem: Problem, selection: LayerSet, request: Request) -> SolveResult:
    """Return the result of a `selection` without layers, which has no schedule.

    Unless infeasible, the termination is the time limit, also after Ctrl-C.
    """
    is_proved = selection.status == Status.INFEASIBLE
    return SolveResult(
        problem=problem,
        status=selection.status,
        termination=Termination.PROVED if is_proved else Termination.TIME_LIMIT,
        reason=selection.reason,
        backend=request.backend,
        time_limit_s=request.time_limit_s,
        requested_gap=request.gap,
        solve_s=request.elapsed_s(),
    )


def _with_step(
    choice: Choice, step: LoweredStep, compared_graph: Graph, remainder: Remainder
) -> tuple[Choice, Remainder]:
    """Return a choice with `step`, and its schedule's problem, stated so far for all layers.

    `compared_graph` is that on which the sets were compared; its nodes may have other names. If
    `step` differs from it, the bound is trivial: the sum of the scores of all layers. Estimated
    costs are needed then, because a profile lacks the new nodes.
    """
    selection, problem = choice.selection, remainder.problem.resolved()
    start = None if selection.result is None else selection.result.schedule
    choice = replace(choice, step=step)
    if graph_signature(compared_graph) != graph_signature(step.graph):
        if find_estimate_device(problem) is None:
            raise CaptureError(
                f"{step.graph.name}: the profile has no costs for nodes of the step that trains "
                f"only {join_names(selection.layers)}; leave the profile out"
            )
        bound = float(sum(choice.scores.values()))
        choice = replace(
            choice,
            selection=replace(selection, bound=bound, status=Status.FEASIBLE),
            note=(
                "PyTorch captures other operators if only the chosen layers train: the schedule is "
                "that of the chosen step, and no bound on other sets is proved"
            ),
        )
        compared_graph, start = step.graph, None
    costs = rename_costs(costs_for(compared_graph, problem), compared_graph, step.graph)
    if start is not None:
        start = replace(start, identity=GraphIdentity.from_graph(step.graph))
    problem = replace(problem, graph=step.graph, costs=costs)
    return choice, replace(remainder, problem=problem, start=start)
