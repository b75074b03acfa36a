"""``choose``: which layers of a model to train on a device, proved."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.backends.registry import backend as find_backend
from poetmodel.budgets import Budget, TileChoice
from poetmodel.choosing.freezing import Freezable, shape_of
from poetmodel.choosing.relaxation import costs_for
from poetmodel.choosing.search import (
    GRADIENT_NORM,
    LayerSet,
    check_names,
    check_scores,
    layers_of,
    renamed,
    select,
)
from poetmodel.clock import now_s
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError, listed
from poetmodel.graph import checkpoint_all_peak_bytes
from poetmodel.lowered.io import load_scores
from poetmodel.problem import Problem
from poetmodel.problem.parse import check_limits
from poetmodel.result import SolveResult, Status, Termination
from poetmodel.schedule import GraphIdentity
from poetmodel.solver import solve
from poetmodel.solver.request import Request
from poetmodel.solver.tile_trials import ChosenTiles, TileTrial, cheapest_tiles
from poetmodel.tiling.choice import chosen_tiles, fitting_tiles, needed_bytes, parse_tile
from poetmodel.torch.capturing.inputs import positional_inputs
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.errors import CaptureError, explained
from poetmodel.torch.int8.front import QuantizedFront
from poetmodel.torch.int8.reading import with_fronts
from poetmodel.torch.lowering.step import lower
from poetmodel.torch.step.optimizers import named_optimizer
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from poetmodel.backends import OptionValue
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.schedule import Schedule

    Loss = Callable[..., torch.Tensor] | None

SELECTION_RATIO: Final = 0.8
"""Share of the time limit for the choice; the rest is for the schedule of the chosen set."""


_NO_COSTS: Final = "no costs: give device, such as nrf52840, or profile, a file of costs"
_NO_BOARD: Final = "tile: is for a device; give device, such as nrf52840"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A set of layers to train, what is proved of all others, and a schedule for it."""

    selection: LayerSet
    """The layers, and the proof."""
    parameters: tuple[str, ...]
    """The parameters of these layers; all others are frozen."""
    scores: Mapping[str, float]
    """Value of each layer."""
    result: SolveResult
    """The schedule of the step in which all else is frozen; without a set, why."""
    step: LoweredStep | None
    """That step, captured without masks; None without a set."""
    note: str = ""
    """Of what something is proved, in words, where that is not all steps: of tiles of a size, of
    the whole step, or of nothing, where the sets were compared on graphs of other nodes."""
    tile_bytes: int | None = None
    """The size of the tiles of all steps [B]; None where they are whole."""
    tile_trials: tuple[TileTrial, ...] = ()
    """Sizes of tiles that were tried for ``auto``; empty where there was no choice."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Layers to train, in the order of the model; none if no set was found."""
        return self.selection.layers

    @property
    def score(self) -> float:
        """The sum of the scores of what is trained."""
        return self.selection.score

    @property
    def bound(self) -> float:
        """No set that keeps the limits has a higher sum."""
        return self.selection.bound

    @property
    def gap(self) -> float:
        """(bound - score) / bound, 0 where both are 0."""
        return self.selection.gap

    @property
    def status(self) -> Status:
        """Proved claim: ``optimal`` within the gap that was asked for.

        ``infeasible`` means that nothing can be trained.
        """
        return self.selection.status

    def freeze(self, model: torch.nn.Module) -> None:
        """Let a model train what was chosen: set ``requires_grad`` of all its parameters."""
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return the result of a solve, with the set under ``choice``, as plain values."""
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


def choose(  # noqa: PLR0913 - one way in, and all but four of its parameters have defaults
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
    """Choose the layers whose training has the highest sum of scores within the limits, proved.

    Parameters
    ----------
    model, loss_fn, inputs
        As for `export`. What does not require a gradient stays frozen.
    scores : mapping, path or 'gradient-norm'
        What it is worth to train each layer, 0 or more; a CSV file ``name,score``; or the norm of
        the gradient of its parameters.
    batch : sequence, optional
        For ``gradient-norm``: the inputs whose gradient counts. Default: `inputs`.
    per : {'layer', 'tensor'}
        What is trained or frozen as a whole: the parameters of a module, or each one.
    device : str or Device, optional
        Whose costs, storage and RAM count.
    profile : str, Path or Costs, optional
        Measured costs of the step that trains all, in place of the device's estimates.
    optimizer : torch.optim.Optimizer, optional
        Of all parameters. Default: SGD.
    name : str, optional
        Name of the step; by default the class of `model`.
    tile : str or int, optional
        Largest tensor, such as ``32KiB``: the steps are in tiles, as those of `export`; with
        ``auto`` of the size with the best schedule for the step that trains all, of those that fit
        and are tried in a share of the time. Default: whole ones.
    backend, time_limit, gap, threads, seed
        As for `poetmodel.solve`. The gap is that of the score, and of the schedule of the set.
        Capturing comes on top of the time.
    **limits
        Limits as for `poetmodel.Problem`: ``ram``, ``deadline``, ``deadline_counts``,
        ``aux_bytes``, ``energy_budget``, ``commit``, ``recompute``, ``paging``, and what to
        ``minimize``. Percentages are of the step that trains all, not in tiles.

    Returns
    -------
    Choice
        The set, its score, the bound, and a schedule. All parameters require gradients as before.

    Raises
    ------
    CaptureError
        If the step cannot be captured, or an operator has no kernel.
    InputError
        If a score is missing, wrong, or of something that is not there.

    Notes
    -----
    To freeze a layer is ``requires_grad_(False)``: its weights are constants. Modules stay in their
    modes, so that a batch norm in training mode goes on to renew its statistics.

    The sets are compared on graphs that are derived from one capture, and the chosen one is
    captured again; in tiles it is derived too. Both are without masks, since which masks pay
    depends on what is trained.
    PyTorch may choose other operators where a weight is frozen (such as for products of batches);
    then the bound is the sum of all scores, and `Choice.note` says so.
    """
    _check_options(scores, per, device, profile, tile, limits)
    Request(backend=backend, time_limit_s=time_limit, gap=gap, threads=threads, seed=seed)
    if isinstance(model, torch.nn.Module) and scores != GRADIENT_NORM:
        given, source = _given_scores(scores)
        _refuse_quantized(given, model, source)
        named = _parameters(model, loss_fn).items()
        check_names(given, layers_of((name for name, p in named if p.requires_grad), per), source)
    if optimizer is None:
        optimizer = named_optimizer("sgd", model, loss_fn)
    whole = lower(model, loss_fn, inputs, name=name, optimizer=optimizer, masks=False)
    clock = Request(
        backend=backend,
        time_limit_s=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        solver_options=dict(solver_options or {}),
    )
    find_backend(backend).check_options(clock.solver_options)
    tiles, limits = _in_tiles(whole, parse_tile(tile), device, profile, limits, clock)
    used_s = time_limit if tiles.interrupted else clock.elapsed_s()
    tile_bytes, step = tiles.tile_bytes, tiles.step
    freezable = Freezable(step=step)
    layers = layers_of(freezable.parameters, per)
    worth = _scores(scores, layers, model, loss_fn, inputs if batch is None else batch)
    problem = Problem(step.graph, _costs(step, device, profile), **limits)
    clock = replace(clock, started_s=now_s() - used_s)
    selection = select(
        freezable,
        problem,
        layers,
        worth,
        request=replace(clock, time_limit_s=SELECTION_RATIO * time_limit),
    )
    chosen = tuple(name for layer in selection.layers for name in layers[layer])
    if not chosen:
        return Choice(
            selection=selection,
            parameters=(),
            scores=worth,
            result=_without_set(problem, selection, clock),
            step=None,
            note=_proved_of(whole, problem, tile_bytes, selection.status),
            tile_bytes=tile_bytes,
            tile_trials=tiles.trials,
        )
    start = None if selection.result is None else selection.result.schedule
    if tile_bytes is not None:
        derived_step = freezable.trained_step(chosen)
        derived = derived_step.graph
        return Choice(
            selection=selection,
            parameters=chosen,
            scores=worth,
            result=_scheduled(derived_step, derived, problem.resolved(), clock, start),
            step=derived_step,
            tile_bytes=tile_bytes,
            tile_trials=tiles.trials,
        )
    with _training(_parameters(model, loss_fn), chosen):
        captured = lower(model, loss_fn, inputs, name=name, optimizer=optimizer, masks=False)
    derived = freezable.trained(chosen)
    if shape_of(derived) != shape_of(captured.graph):
        return _without_proof(captured, problem.resolved(), clock, selection, chosen, worth)
    result = _scheduled(captured, derived, problem.resolved(), clock, start)
    return Choice(
        selection=selection, parameters=chosen, scores=worth, result=result, step=captured
    )


def _check_options(
    scores: Mapping[str, float] | str | Path,
    per: str,
    device: str | Device | None,
    profile: str | Path | Costs | None,
    tile: str | int | TileChoice | None,
    limits: Mapping[str, Any],
) -> None:
    """Raise for each option that is wrong for every step, before a capture."""
    layers_of((), per)
    if scores != GRADIENT_NORM:
        _given_scores(scores)
    board = Device.load(device) if isinstance(device, str) else device
    if isinstance(profile, str | Path):
        Costs.load(profile, device=board)
    elif profile is None and board is None:
        raise InputError(_NO_COSTS)
    if not parse_tile(tile).is_whole and board is None:
        raise InputError(_NO_BOARD)
    amounts = ("ram", "deadline", "aux_bytes", "energy_budget")
    check_limits(**{name: limits[name] for name in amounts if name in limits})


def _in_tiles(
    step: LoweredStep,
    choice: TileChoice,
    device: str | Device | None,
    profile: str | Path | Costs | None,
    limits: Mapping[str, Any],
    clock: Request,
) -> tuple[ChosenTiles, dict[str, Any]]:
    """Return the tiles of a step, and limits whose RAM is that of the whole one."""
    if choice.is_whole:
        return ChosenTiles(tile_bytes=None, step=step), dict(limits)
    board = Device.load(device) if isinstance(device, str) else device
    if board is None:
        raise InputError(_NO_BOARD)
    ram, whole_bytes = limits.get("ram"), checkpoint_all_peak_bytes(step.graph)
    budget = Budget.from_bytes(board.ram_bytes) if ram is None else Budget.parse(ram)
    own = {**limits, "ram": budget.in_bytes(whole_bytes)}
    candidates = fitting_tiles(
        step,
        choice,
        board,
        room_bytes=budget.resolve(whole_bytes),
        paging=board.storage is not None and limits.get("paging", True),
        names_nodes=profile is not None,
    )

    def stated(step: LoweredStep) -> Problem:
        return Problem(step.graph, _costs(step, device, profile), **own)

    return cheapest_tiles(candidates, stated, clock), own


def _proved_of(whole: LoweredStep, problem: Problem, tile_bytes: int | None, status: Status) -> str:
    """Return of which step it is proved that nothing can be trained, where tiles may fit."""
    device = problem.costs.device
    if status != Status.INFEASIBLE:
        return ""
    if tile_bytes is not None:
        return f"proved of the step in tiles of {format_bytes(tile_bytes)}"
    if device is None:
        return ""
    size, found = chosen_tiles(
        whole, TileChoice.AUTO, device, room_bytes=0, paging=problem.can_page
    )
    if size is None:
        return ""
    least = format_bytes(needed_bytes(found, device, paging=problem.can_page))
    return f"proved of the step whole; with --tile {size}B no node of it needs more than {least}"


def gradient_norms(
    layers: Mapping[str, Sequence[str]],
    model: torch.nn.Module,
    loss_fn: Loss,
    batch: Sequence[Any],
) -> dict[str, float]:
    """Return the norm of the gradients of the parameters of each layer together.

    The model, its buffers and its gradients stay as they are.
    """
    own, own_loss = copy.deepcopy((with_fronts(model), loss_fn))
    parameters = _parameters(own, own_loss)
    own.zero_grad()
    given = positional_inputs(batch)
    wanted = [name for names in layers.values() for name in names]
    with explained(GRADIENT_NORM):
        output = own(*(given if own_loss is None else given[:-1]))
        loss = output if own_loss is None else own_loss(output, given[-1])
        gradients = torch.autograd.grad(
            loss, [parameters[name] for name in wanted], allow_unused=True
        )
    of = dict(zip(wanted, gradients, strict=True))
    norms = {}
    for layer, names in layers.items():
        there = [of[name] for name in names if of[name] is not None]
        norms[layer] = float(torch.nn.utils.get_total_norm(there)) if there else 0.0
    return norms


def _scores(
    given: Mapping[str, float] | str | Path,
    layers: Mapping[str, Sequence[str]],
    model: torch.nn.Module,
    loss_fn: Loss,
    batch: Sequence[Any],
) -> dict[str, float]:
    if given == GRADIENT_NORM:
        values = gradient_norms(layers, model, loss_fn, batch)
        source = GRADIENT_NORM
    else:
        values, source = _given_scores(given)
    _refuse_quantized(values, model, source)
    check_scores(values, layers, source)
    return {layer: float(values[layer]) for layer in layers}


def _given_scores(given: Mapping[str, float] | str | Path) -> tuple[dict[str, float], str]:
    """Return stated scores, and the words for their source."""
    if isinstance(given, str | Path):
        return load_scores(Path(given)), str(given)
    return dict(given), "scores"


def _refuse_quantized(scores: Mapping[str, float], model: torch.nn.Module, source: str) -> None:
    """Raise where a score is that of a frozen layer in int8."""
    own = with_fronts(model)
    fronts = [path for path, module in own.named_modules() if isinstance(module, QuantizedFront)]
    trainable = [name for name, _ in own.named_parameters()]
    for name in scores:
        if any(f"{each}.".startswith(f"{name}.") for each in trainable):
            continue
        for path in fronts:
            if f"{name}.".startswith(f"{path}." if path else ""):
                raise InputError(
                    f"{source}: {name} is a part of the int8 front {path!r}, which cannot be "
                    "trained; leave its score out"
                )


def _costs(
    step: LoweredStep, device: str | Device | None, profile: str | Path | Costs | None
) -> Costs:
    board = Device.load(device) if isinstance(device, str) else device
    if isinstance(profile, Costs):
        return profile if board is None else replace(profile, device=board)
    if profile is not None:
        return Costs.load(profile, device=board)
    if board is None:
        raise InputError(_NO_COSTS)
    return Costs.estimate(step.graph, board)


def _parameters(model: torch.nn.Module, loss_fn: Loss) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of a step by the names that a capture gives them."""
    parameters = dict(model.named_parameters())
    if isinstance(loss_fn, torch.nn.Module):
        parameters |= {f"{LOSS}.{name}": p for name, p in loss_fn.named_parameters()}
    return parameters


@contextmanager
def _training(
    parameters: Mapping[str, torch.nn.Parameter], chosen: Collection[str]
) -> Iterator[None]:
    """Freeze all but some parameters inside."""
    before = {name: p.requires_grad for name, p in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in chosen)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(before[name])


def _without_set(problem: Problem, selection: LayerSet, clock: Request) -> SolveResult:
    proved = selection.status == Status.INFEASIBLE
    return SolveResult(
        problem=problem,
        status=selection.status,
        termination=Termination.PROVED if proved else Termination.TIME_LIMIT,
        reason=selection.reason,
        backend=clock.backend,
        time_limit_s=clock.time_limit_s,
        requested_gap=clock.gap,
        solve_s=clock.elapsed_s(),
    )


def _scheduled(
    step: LoweredStep, derived: Graph, problem: Problem, clock: Request, start: Schedule | None
) -> SolveResult:
    """Return the schedule of a step whose graph is a derived one, but for names."""
    costs = costs_for(derived, problem)
    stated = replace(problem, graph=step.graph, costs=renamed(costs, derived, step.graph))
    result = solve(
        stated,
        backend=clock.backend,
        time_limit=max(clock.remaining_s(), 1e-2),
        gap=clock.gap,
        threads=clock.threads,
        seed=clock.seed,
        start=start and replace(start, identity=GraphIdentity.of(step.graph)),
    )
    return replace(result, time_limit_s=clock.time_limit_s)


def _without_proof(
    step: LoweredStep,
    problem: Problem,
    clock: Request,
    selection: LayerSet,
    chosen: tuple[str, ...],
    scores: Mapping[str, float],
) -> Choice:
    """Return a choice whose step has other nodes than those that the sets were compared on."""
    costs = problem.costs
    if costs.device is None or costs != Costs.estimate(problem.graph, costs.device):
        raise CaptureError(
            f"{step.graph.name}: the step that trains {listed(selection.layers)} has other nodes "
            "than the step whose costs the profile has; leave the profile out"
        )
    unproved = replace(selection, bound=float(sum(scores.values())), status=Status.FEASIBLE)
    return Choice(
        selection=unproved,
        parameters=chosen,
        scores=scores,
        result=_scheduled(step, step.graph, problem, clock, None),
        step=step,
        note=(
            "PyTorch captures the chosen step with other operators than the one that trains all: "
            "the schedule is that of the chosen step, and nothing is proved of other sets"
        ),
    )
