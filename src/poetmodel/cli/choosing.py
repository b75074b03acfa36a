"""``poetmodel choose``: select the layers to train on a device, with a bound on the score."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer  # noqa: TC002 - read from the annotations of commands

from poetmodel.case.case import NO_COSTS
from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings, result_exit_status
from poetmodel.cli.inputs import check_outputs, device_warnings, read_device
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError
from poetmodel.problem import Limits
from poetmodel.report.presenter import Fact, format_items, format_percent, text_fact
from poetmodel.solver.request import SearchOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from poetmodel.device import Device
    from poetmodel.torch.choosing import Choice
    from poetmodel.torch.target import OnnxStep

_score_option = partial(options.option, rich_help_panel="What to train")


class Per(StrEnum):
    """Values of ``--per``."""

    LAYER = "layer"
    TENSOR = "tensor"


@options.group
class ChoiceOptions:
    """The step with its optimizer, tiles and name; the unit and the scores of its layers."""

    step_source: str = options.argument(
        options.REQUIRED, "MODULE:FUNCTION|ONNX", "As for 'poetmodel trace'."
    )
    scores: str = _score_option(
        options.REQUIRED,
        "--scores FILE|gradient-norm",
        "Score of each layer: a CSV file with the columns name,score, or the norm "
        "of the gradient of its parameters.",
    )
    batch_of: str | None = _score_option(
        None,
        "--batch-of MODULE:FUNCTION",
        "A function without arguments that returns the inputs for the gradient norm. Default: "
        "the inputs of the step.",
    )
    per: Per = _score_option(
        Per.LAYER,
        "--per",
        "Unit that is trained or frozen: all parameters of a module, or each parameter.",
    )
    optimizer: options.OptimizerName = options.option(
        options.OptimizerName.SGD,
        "--optimizer",
        "Optimizer of the parameters, with PyTorch's defaults (momentum: SGD with 0.9).",
    )
    tile: str | None = options.option(
        None,
        "--tile SIZE|auto",
        "Compare steps in tiles: larger parameters and activations are split into slices of "
        "channels, such as 32KiB; "
        "auto tries up to four sizes that fit, and uses the one with the best schedule of the step "
        "that trains all layers.",
    )
    name: str | None = options.option(
        None,
        "--name NAME",
        "Name of the step. Default: the class of the model, or the name of the ONNX file.",
    )


@options.group
class ChoiceFiles:
    """Output files: `step` is written if a set of layers was found, `out` with a schedule."""

    out: Path | None = options.output_option(
        None, "--out FILE", "Write the schedule to this file, *.schedule.json."
    )
    step: Path | None = options.output_option(
        None,
        "--step FILE",
        "Write the step in which all other layers are frozen, *.step.json: the graph of the "
        "schedule, and the input of 'poetmodel export'.",
    )


@options.command("poetmodel choose train:step --device nrf52840 --scores gradient-norm")
def choose(
    context: typer.Context,
    request: ChoiceOptions,
    onnx: options.OnnxOptions,
    costing: options.CostOptions,
    limits: Annotated[Limits, options.without("count_parameters")],
    search: Annotated[SearchOptions, options.without("method", "formulation")],
    files: ChoiceFiles,
    output: options.OutputOptions,
) -> Reply:
    """Choose the layers to train: the highest sum of scores within the limits, with a bound."""
    from poetmodel.choosing.search import GRADIENT_NORM

    start_s = context.obj or time.monotonic()
    device = read_device(costing.device)
    if device is None and costing.profile is None:
        raise InputError(NO_COSTS)
    if request.batch_of is not None and request.scores != GRADIENT_NORM:
        raise InputError(f"--batch-of: is for --scores {GRADIENT_NORM}; leave it out")
    check_outputs(
        ("--out", files.out),
        ("--step", files.step),
        inputs=(request.scores, costing.device, costing.profile),
    )
    _check_options(request, costing, limits, device)
    if device is not None:
        print_warnings(device_warnings(device))
    with live_line(enabled=not output.json, activity="choosing"):
        choice = _choose_layers(request, onnx.onnx_step(), costing, limits, search)
    return Reply(
        document=choice.to_dict,
        text=_choice_tables(choice, total_s=time.monotonic() - start_s),
        device_rams=(choice.result.device_ram,),
        warnings=[choice.note] if choice.note else (),
        written=_save(choice, files),
        errors=_failure_reason(choice),
        status=result_exit_status(choice.result),
    )


def _check_options(
    request: ChoiceOptions,
    costing: options.CostOptions,
    limits: Limits,
    device: Device | None,
) -> None:
    """Raise `InputError` for an invalid limit, tile, score file or profile; imports no PyTorch."""
    from poetmodel.choosing.scores import load_scores
    from poetmodel.choosing.search import GRADIENT_NORM
    from poetmodel.device import Costs
    from poetmodel.tiling.choice import parse_tile

    limits.check()
    parse_tile(request.tile)
    if request.scores != GRADIENT_NORM:
        load_scores(Path(request.scores))
    if costing.profile is not None:
        Costs.load(costing.profile, device=device)


def _choose_layers(
    request: ChoiceOptions,
    onnx: OnnxStep,
    costing: options.CostOptions,
    limits: Limits,
    search: SearchOptions,
) -> Choice:
    """Choose the layers and schedule their step; output of the user's model goes to stderr."""
    from poetmodel.torch.errors import require_torch
    from poetmodel.torch.target import default_name, load_batch, load_step

    require_torch()
    from poetmodel.torch.choosing import choose_layers
    from poetmodel.torch.step.optimizers import make_optimizer

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_step(request.step_source, onnx)
        batch = None if request.batch_of is None else load_batch(request.batch_of)
        return choose_layers(
            model,
            loss_fn,
            inputs,
            scores=request.scores,
            batch=batch,
            per=request.per.value,
            device=costing.device,
            profile=costing.profile,
            optimizer=make_optimizer(request.optimizer, model, loss_fn),
            name=request.name or default_name(request.step_source),
            tile=request.tile,
            limits=limits,
            search=search,
        )


def _choice_tables(choice: Choice, *, total_s: float) -> Iterator[Table]:
    """Yield the tables of a choice with a schedule; `total_s` is the time of the command [s]."""
    from poetmodel.cli.summary import result_table

    if choice.result.schedule is not None:
        yield fact_table("What to train", _choice_facts(choice))
        yield result_table(choice.result, total_s=total_s, read_s=0.0)


def _save(choice: Choice, files: ChoiceFiles) -> Iterator[Path]:
    """Write the step if a set of layers was found, and the schedule if there is one."""
    if files.step is not None and choice.step is not None:
        from poetmodel.lowered.io import save_step

        save_step(choice.step, files.step)
        yield files.step
    if files.out is not None and choice.result.schedule is not None:
        choice.result.save(files.out)
        yield files.out


def _choice_facts(choice: Choice) -> Iterator[Fact]:
    """Yield score, bound and gap of a choice, and the layers that are trained and frozen."""
    from poetmodel.cli.summary import tile_facts

    total_score = sum(choice.scores.values())
    yield text_fact(
        "choice",
        str(choice.status),
        f"{format_items(choice.selection.statistics['sets'], 'set')} tried",
    )
    yield text_fact(
        "score",
        f"{choice.score:.6g}",
        f"{format_percent(choice.score / total_score)} of all scores",
    )
    yield text_fact(
        "proven bound", f"{choice.bound:.6g}", "no set scores more in steps without masks"
    )
    yield text_fact("gap", format_percent(choice.gap, digits=3), "of the bound")
    yield text_fact("trained", format_items(len(choice.layers), "layer"), ", ".join(choice.layers))
    yield from tile_facts(choice.tile_bytes, choice.tile_trials, choice.result.problem)
    frozen = [layer for layer in choice.scores if layer not in choice.layers]
    yield text_fact("frozen", format_items(len(frozen), "layer"), ", ".join(frozen))


def _failure_reason(choice: Choice) -> Iterator[str]:
    from poetmodel.result import Status

    if choice.result.schedule is None:
        is_infeasible = choice.result.status == Status.INFEASIBLE
        reason = choice.result.reason or "no schedule was found within the limit"
        yield f"infeasible: {reason}" if is_infeasible else reason
