"""``poetmodel choose``: which layers to train on a device, proved."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poetmodel.cli import options
from poetmodel.cli.failures import print_faults, print_room_warnings, print_warnings, status_of
from poetmodel.cli.inputs import NO_COSTS, check_outputs, device_warnings, read_device
from poetmodel.cli.output import figures, live_line, print_json, print_written, show
from poetmodel.errors import InputError
from poetmodel.report.presenter import Fact, percent, plural, row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device
    from poetmodel.torch.choosing import Choice
    from poetmodel.torch.target import OnnxStep

_score = partial(options.option, rich_help_panel="What to train")


class Per(StrEnum):
    """Values of ``--per``."""

    LAYER = "layer"
    TENSOR = "tensor"


@options.group
class ChoiceOptions:
    """Layers to choose from, and their values."""

    what: str = options.argument(
        options.REQUIRED, "MODULE:FUNCTION|ONNX", "As for 'poetmodel export'."
    )
    scores: str = _score(
        options.REQUIRED,
        "--scores FILE|gradient-norm",
        "What it is worth to train each layer: a CSV file with the columns name,score, or the norm "
        "of the gradient of its parameters.",
    )
    batch_of: str | None = _score(
        None,
        "--batch-of MODULE:FUNCTION",
        "A function without arguments that returns the inputs whose gradient counts. Default: "
        "those of the step.",
    )
    per: Per = _score(
        Per.LAYER,
        "--per",
        "What is trained or frozen as a whole: all parameters of a module, or each one.",
    )
    optimizer: options.OptimizerName = options.option(
        options.OptimizerName.SGD,
        "--optimizer",
        "What updates the parameters, with PyTorch's defaults (momentum: SGD with 0.9).",
    )
    tile: str | None = options.option(
        None,
        "--tile SIZE|auto",
        "Compare steps in tiles: larger parameters and activations are in slices of channels, such "
        "as 32KiB; auto tries sizes that fit, and takes that of the best schedule of the step that "
        "trains all.",
    )
    name: str | None = options.option(
        None, "--name NAME", "Name of the step. Default: the class of the model."
    )


@options.group
class ChoiceFiles:
    """The files that are written, if there is a set."""

    out: Path | None = options.output(
        None, "--out FILE", "Write the schedule to this file, *.schedule.json."
    )
    step: Path | None = options.output(
        None,
        "--step FILE",
        "Write the step in which all else is frozen, *.step.json: the graph of the schedule, and "
        "what 'poetmodel export' makes C of.",
    )


@options.command("poetmodel choose train:step --device nrf52840 --scores gradient-norm")
def choose(
    context: typer.Context,
    wanted: ChoiceOptions,
    onnx: options.OnnxOptions,
    costing: options.CostOptions,
    limits: Annotated[options.LimitOptions, options.without("count_parameters", "constraints")],
    search: Annotated[options.SearchOptions, options.without("method", "formulation")],
    files: ChoiceFiles,
    output: options.OutputOptions,
) -> None:
    """Choose the layers to train: the highest sum of scores within the limits, proved."""
    from poetmodel.choosing.search import GRADIENT_NORM

    called_s = context.obj or time.monotonic()
    device = read_device(costing.device)
    if device is None and costing.profile is None:
        raise InputError(NO_COSTS)
    if wanted.batch_of is not None and wanted.scores != GRADIENT_NORM:
        raise InputError(f"--batch-of: is for --scores {GRADIENT_NORM}; leave it out")
    check_outputs(
        ("--out", files.out),
        ("--step", files.step),
        inputs=(wanted.scores, costing.device, costing.profile),
    )
    _check_options(wanted, costing, limits, device)
    if device is not None:
        print_warnings(device_warnings(device))
    with live_line(wanted=not output.json, doing="choosing"):
        choice = _chosen(wanted, onnx.step(), costing, limits, search)
    _deliver(choice, files, json=output.json, total_s=time.monotonic() - called_s)
    _print_reason(choice)
    raise typer.Exit(status_of(choice.result))


def _check_options(
    wanted: ChoiceOptions,
    costing: options.CostOptions,
    limits: options.LimitOptions,
    device: Device | None,
) -> None:
    """Raise for each option that is wrong for every step, before PyTorch is loaded."""
    from poetmodel.choosing.search import GRADIENT_NORM
    from poetmodel.device import Costs
    from poetmodel.lowered.io import load_scores
    from poetmodel.problem.parse import check_limits
    from poetmodel.tiling.choice import parse_tile

    check_limits(
        ram=limits.ram,
        deadline=limits.deadline,
        aux_bytes=limits.aux,
        energy_budget=limits.energy_budget,
    )
    parse_tile(wanted.tile)
    if wanted.scores != GRADIENT_NORM:
        load_scores(Path(wanted.scores))
    if costing.profile is not None:
        Costs.load(costing.profile, device=device)


def _chosen(
    wanted: ChoiceOptions,
    onnx: OnnxStep,
    costing: options.CostOptions,
    limits: options.LimitOptions,
    search: options.SearchOptions,
) -> Choice:
    """Return the best set; what the model prints goes to stderr."""
    from poetmodel import torch as pmt
    from poetmodel.problem import Quantity
    from poetmodel.torch.errors import require_torch
    from poetmodel.torch.target import default_name, load_batch, load_step

    require_torch()
    from poetmodel.torch.step.optimizers import named_optimizer

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_step(wanted.what, onnx)
        batch = None if wanted.batch_of is None else load_batch(wanted.batch_of)
        return pmt.choose(
            model,
            loss_fn,
            inputs,
            scores=wanted.scores,
            batch=batch,
            per=wanted.per.value,
            device=costing.device,
            profile=costing.profile,
            optimizer=named_optimizer(wanted.optimizer, model, loss_fn),
            name=wanted.name or default_name(wanted.what),
            tile=wanted.tile,
            backend=search.backend,
            time_limit=search.time_limit,
            gap=search.gap,
            threads=search.threads,
            solver_options=search.solver_options,
            ram=limits.ram,
            deadline=limits.deadline,
            deadline_counts=limits.deadline_counts,
            aux_bytes=limits.aux,
            energy_budget=limits.energy_budget,
            commit=limits.steps_to_commit,
            recompute=not limits.no_recompute,
            paging=not limits.no_paging,
            minimize=limits.minimize or Quantity.ENERGY,
        )


def _deliver(choice: Choice, files: ChoiceFiles, *, json: bool, total_s: float) -> None:
    """Write the files and print the choice."""
    if json:
        print_json(choice.to_dict())
    elif choice.result.schedule is not None:
        from poetmodel.cli.summary import result_table

        table = result_table(choice.result, total_s=total_s, read_s=0.0)
        show(figures("What to train", _facts(choice)), table)
    print_room_warnings(choice.result.room)
    print_warnings([choice.note] if choice.note else [])
    if files.step is not None and choice.step is not None:
        from poetmodel.lowered.io import save_step

        save_step(choice.step, files.step)
        print_written(files.step)
    if files.out is not None and choice.result.schedule is not None:
        choice.result.save(files.out)
        print_written(files.out)


def _facts(choice: Choice) -> Iterator[Fact]:
    from poetmodel.cli.summary import tile_facts

    whole = sum(choice.scores.values())
    yield row(
        "choice", str(choice.status), f"{plural(choice.selection.statistics['sets'], 'set')} tried"
    )
    yield row("score", f"{choice.score:.6g}", f"{percent(choice.score / whole)} of all scores")
    yield row("proven bound", f"{choice.bound:.6g}", "no set scores more in steps without masks")
    yield row("gap", percent(choice.gap, digits=3), "of the bound")
    yield row("trained", plural(len(choice.layers), "layer"), ", ".join(choice.layers))
    yield from tile_facts(choice.tile_bytes, choice.tile_trials, choice.result.problem)
    frozen = [layer for layer in choice.scores if layer not in choice.layers]
    yield row("frozen", plural(len(frozen), "layer"), ", ".join(frozen))


def _print_reason(choice: Choice) -> None:
    """Print on stderr why nothing was chosen, if so."""
    from poetmodel.result import Status

    if choice.result.schedule is None:
        infeasible = choice.result.status == Status.INFEASIBLE
        reason = choice.result.reason or "no schedule was found within the limit"
        print_faults([f"infeasible: {reason}" if infeasible else reason])
