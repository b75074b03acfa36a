"""``poetmodel export``: a training step of a PyTorch module as a folder of C."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import redirect_stdout
from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer  # noqa: TC002 - typer itself reads the annotation

from poetmodel.budgets import Budget
from poetmodel.cli import options
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import check_outputs, read_device
from poetmodel.cli.output import figures, live_line, print_json, print_text, print_written, show
from poetmodel.errors import InputError, listed, raised_as
from poetmodel.report.presenter import Fact, percent, plural, row, wear_fact
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Device
    from poetmodel.export.deployment import Deployment
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.torch.target import OnnxStep


class WeightsChoice(StrEnum):
    """Values of ``--weights``."""

    C = "c"
    BINARY = "binary"


class ExportTarget(StrEnum):
    """Values of ``--target``."""

    C = "c"
    STEP = "step"
    EXECUTORCH = "executorch"


@options.group
class ExportOptions:
    """Exported step, and its folder."""

    what: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX|STEP",
        "As for 'poetmodel trace'; or a step file, *.step.json, as --target step writes it.",
    )
    target: ExportTarget = options.output(
        ExportTarget.C,
        "--target",
        "c is a folder of C; step is a file of what was captured, with its weights, from which "
        "a machine without PyTorch makes C; executorch is a program of ExecuTorch, *.pte.",
    )
    out: Path = options.output(
        options.REQUIRED, "--out FOLDER", "Write the folder; for other targets the file."
    )
    name: str | None = options.option(
        None, "--name NAME", "Name of the step. Default: the class of the model."
    )
    optimizer: options.OptimizerName | None = options.option(
        None,
        "--optimizer",
        "Update the parameters, with PyTorch's defaults (momentum: SGD with 0.9). Default: hand "
        "out the gradients.",
    )
    accumulate: int = options.option(
        1,
        "--accumulate N",
        "Sum the gradients of N batches before an update, each divided by N: a step takes one "
        "batch, and each N-th updates.",
        parser=options.whole_number(),
    )
    infer: bool = options.option(
        False,
        "--infer",
        "Export pm_infer too: the forward pass of the model in evaluation mode, without the loss.",
    )
    evaluate: bool = options.option(
        False,
        "--evaluate",
        "Export pm_evaluate too: loss and correct classes of a batch in evaluation mode; with "
        "--commit also pm_keep_best and pm_restore_best.",
    )
    replay: int | None = options.option(
        None,
        "--replay N",
        "Keep up to N samples on storage, as the outputs of the frozen front with their labels: "
        "pm_keep_sample stores one, pm_step_stored trains behind the front.",
        parser=options.whole_number(),
    )
    migrate_from: Path | None = options.option(
        None,
        "--migrate-from FOLDER",
        "Take over the state that an earlier export has left on storage, tensors of equal names, "
        "shapes and types, by pm_migrate. Needs --commit of both.",
    )
    byte_input: str | None = options.option(
        None,
        "--byte-input NAME=TYPE[:SCALE[:OFFSET]]",
        "Take an input of real numbers as bytes, such as 'inputs[0]=uint8:0.0039': integers times "
        "a scale, plus an offset; for each channel with commas, 0.01,0.02,0.01. Several with "
        "semicolons.",
    )
    prefix: str = options.option(
        "pm",
        "--prefix NAME",
        "What all names of C begin with, such as kws for kws_step: two networks link into one "
        "firmware.",
    )
    weights: WeightsChoice = options.option(
        WeightsChoice.C,
        "--weights",
        "Whether the weights are an array of C, or a file that the assembler includes.",
    )

    shared_kernels: Path | None = options.option(
        None,
        "--shared-kernels FOLDER",
        "Write the kernels to a folder that the networks of a firmware share.",
    )


@options.group
class DeviceOptions(options.CommitOptions):
    """The device, and what the step may take and do there."""

    device: str = options.what(
        "nrf52840",
        "--device NAME|FILE",
        "A built-in device (see 'poetmodel devices'), or a device file, *.toml. For ExecuTorch "
        "rpi4b unless it is given.",
    )
    profile: str | None = options.what(
        None, "--profile FILE", "Measured costs, *.csv. They replace the device's estimates."
    )
    ram: str | None = options.limit(
        None,
        "--ram SIZE",
        "All RAM of the step, stack and inputs included, such as 256KiB; or 50% of the keep-all "
        "peak, and stack and inputs on top. Default: the device's. For ExecuTorch the arena, "
        "without a default.",
    )
    stack: str | None = options.limit(
        None, "--stack SIZE", "What to reserve for the stack. Default: 1536B, 2048B with --commit."
    )
    tile: str | None = options.limit(
        "auto",
        "--tile SIZE|auto|none",
        "Cut what is larger, parameters and activations, in slices of channels, such as 32KiB; "
        "auto chooses the size. Default: auto where the step needs it to fit.",
    )
    deadline: str | None = options.limit(
        None,
        "--deadline TIME",
        "Time limit of a step: 1.5s, 20ms, or 110% of a single pass over all nodes.",
    )
    no_paging: bool = options.limit(False, "--no-paging", "Do not page, only recompute.")
    no_recompute: bool = options.limit(False, "--no-recompute", "Do not recompute, only page.")
    no_checksum: bool = options.limit(
        False, "--no-checksum", "Keep committed state without checksums."
    )
    time_limit: float = options.how(
        60.0,
        "--time-limit TIME",
        "Wall-clock limit, seconds or a time such as 5min, from the start of the command on, or, "
        "where a step is captured, from then on. It is for reading a step file, all solves, plans "
        "and addresses, those of pm_infer and pm_evaluate too; writing the files comes on top. "
        "The best that was found by then is written.",
        parser=options.seconds,
    )
    gap: float = options.how(
        0.01,
        "--gap FRACTION",
        "Gap tolerance, as a fraction of the energy overhead. It is wider than that of 'poetmodel "
        "solve', since a step is solved again until its tensors have addresses.",
        parser=options.number("a fraction from 0, such as 0.01 for 1 %", positive=False),
    )

    def given(self) -> dict[str, Any]:
        """Return them as `export_step` takes them."""
        return {
            "device": self.device,
            "profile": self.profile,
            "ram": self.ram,
            "stack": self.stack,
            "tile": self.tile,
            "deadline": self.deadline,
            "paging": not self.no_paging,
            "recompute": not self.no_recompute,
            "commit": self.commit,
            "commit_every": self.commit_every or 1,
            "checksum": not self.no_checksum,
            "time_limit": self.time_limit,
            "gap": self.gap,
        }


@options.command("poetmodel export train:step --ram 256KiB --out firmware")
def export(
    context: typer.Context,
    wanted: ExportOptions,
    onnx: options.OnnxOptions,
    planned: DeviceOptions,
    output: options.OutputOptions,
) -> None:
    """Make a folder of C that trains on a device, or a program of ExecuTorch."""
    called_s = context.obj or time.monotonic()
    from poetmodel.export.folder import check_folder
    from poetmodel.torch.target import is_captured

    captured = is_captured(wanted.what)
    if wanted.target != ExportTarget.C:
        if not captured:
            raise InputError(
                f"--target {wanted.target}: {wanted.what} is no MODULE:FUNCTION or ONNX file to "
                "capture"
            )
        check_outputs(("--out", wanted.out))
    else:
        with raised_as(InputError, "--out"):
            check_folder(wanted.out)
    if wanted.target != ExportTarget.C:
        _refuse_others(context, wanted.target)
    if wanted.target == ExportTarget.EXECUTORCH:
        _write_program(context, wanted, onnx.step(), planned, output)
        return
    shown = not output.json
    given: dict[str, Any] = planned.given() | {
        "infer": wanted.infer,
        "evaluate": wanted.evaluate,
        "replay": wanted.replay or 0,
        "migrate_from": wanted.migrate_from,
        "byte_inputs": _byte_inputs(wanted.byte_input),
        "prefix": wanted.prefix,
        "weights": wanted.weights,
        "shared_kernels": wanted.shared_kernels,
    }
    board = None
    if wanted.target == ExportTarget.C and captured:
        from poetmodel.export.exporting import check_export

        board = check_export(wanted.out, **given)
    elif captured:
        from poetmodel.lowered.tables import parse_byte_inputs

        parse_byte_inputs(given["byte_inputs"])
    with live_line(wanted=shown, doing="capturing" if captured else "reading"):
        step = step_of(
            wanted.what,
            onnx.step(),
            name=wanted.name,
            optimizer=wanted.optimizer,
            accumulate=wanted.accumulate,
            infer=wanted.infer,
            evaluate=wanted.evaluate,
            device=board,
        )
    if wanted.target == ExportTarget.STEP:
        from poetmodel.export.codes import fuse_byte_quantization
        from poetmodel.lowered.io import save_step
        from poetmodel.lowered.tables import with_byte_inputs

        save_step(fuse_byte_quantization(with_byte_inputs(step, given["byte_inputs"])), wanted.out)
        print_written(wanted.out)
        return
    from poetmodel.export.exporting import export_step
    from poetmodel.export.flash import flash_warning, ram_warning

    command = shlex.join(["poetmodel", *sys.argv[1:]])
    if not captured:
        given["time_limit"] = max(given["time_limit"] - (time.monotonic() - called_s), 1.0)
    with live_line(wanted=shown, doing="solving, planning and placing") as on_progress:
        deployment = export_step(
            step,
            wanted.out,
            command=command,
            on_progress=on_progress,
            **given,
        )
    print_warnings(filter(None, (ram_warning(deployment), flash_warning(deployment))))
    facts = list(_facts(deployment))
    if output.json:
        from poetmodel.export.folder import summarize

        print_json(summarize(deployment))
    else:
        show(figures(f"{deployment.step.graph.name} as C", facts))
    print_written(wanted.out)


def _byte_inputs(text: str | None) -> dict[str, str]:
    """Return what bytes of inputs mean, by the names of these."""
    pairs = [] if text is None else [part.partition("=") for part in text.split(";")]
    for name, _, meaning in pairs:
        if not meaning:
            raise InputError(
                f"--byte-input: expected NAME=TYPE, such as inputs[0]=uint8:0.0039, got {name!r}"
            )
    return {name.strip(): meaning.strip() for name, _, meaning in pairs}


_GROUPS: Final = (options.OnnxOptions, options.OutputOptions)
_TAKEN: Final = {
    ExportTarget.STEP: ("a step file", ("name", "accumulate", "infer", "evaluate", "byte_input")),
    ExportTarget.EXECUTORCH: (
        "a program of ExecuTorch",
        ("ram", "device", "no_paging", "time_limit", "gap"),
    ),
}
"""What another target than C is, and the options that it takes beside those of all."""


def _stated(context: typer.Context) -> dict[str, str]:
    """Return the options on the command line, by the names of their values."""
    return {
        str(parameter.name): parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(str(parameter.name)))
        and source.name == "COMMANDLINE"
    }


def _refuse_others(context: typer.Context, target: ExportTarget) -> None:
    """Raise if an option is given that a target does not take."""
    what, own = _TAKEN[target]
    shared = (entry.name for group in _GROUPS for entry in fields(group))
    taken = {"what", "target", "out", "optimizer", *own, *shared}
    for name, option in _stated(context).items():
        if name not in taken:
            raise InputError(f"{option}: {what} is made without; leave it out")


def _write_program(
    context: typer.Context,
    wanted: ExportOptions,
    onnx: OnnxStep,
    planned: DeviceOptions,
    output: options.OutputOptions,
) -> None:
    """Write a program of ExecuTorch, and say what it takes."""
    if planned.ram is None:
        raise InputError("--ram: expected the budget of the arena, such as 256KiB or 60%")
    Budget.parse(planned.ram)
    read_device(planned.device)
    from poetmodel import torch as pmt
    from poetmodel.torch.target import load_step

    to_executorch = pmt.to_executorch  # refused before anything is captured
    from poetmodel.torch.step.optimizers import named_optimizer

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_step(wanted.what, onnx)
    chosen = wanted.optimizer and named_optimizer(wanted.optimizer, model, loss_fn)
    device: dict[str, Any] = {"device": planned.device} if "device" in _stated(context) else {}
    with live_line(wanted=not output.json, doing="solving and placing") as on_progress:
        program = to_executorch(
            model,
            loss_fn,
            inputs,
            ram=planned.ram,
            path=wanted.out,
            optimizer=chosen,
            time_limit=planned.time_limit,
            gap=planned.gap,
            on_progress=on_progress,
            **device,
        )
    if output.json:
        print_json(program.to_dict())
    else:
        print_text(str(program))
        if program.sgd is not None:
            print_text(f"get_sgd_optimizer takes {dict(program.sgd)} beside the parameters")
    print_written(wanted.out)


def step_of(
    what: str,
    onnx: OnnxStep,
    *,
    name: str | None,
    optimizer: options.OptimizerName | None,
    accumulate: int = 1,
    infer: bool = False,
    evaluate: bool = False,
    device: Device | None = None,
) -> LoweredStep:
    """Capture what ``module:function`` returns or an ONNX file has, or read a step file.

    Output goes to stderr. Raises `FlashError` before the capture if the weights exceed the flash of
    the device.
    """
    from poetmodel.torch.target import is_captured

    if not is_captured(what):
        from poetmodel.lowered.io import load_step

        step = load_step(what)  # refuses what is no step before its options
        given = (
            *(["--optimizer"] if optimizer else []),
            *(["--name"] if name else []),
            *(["--accumulate"] if accumulate > 1 else []),
            *onnx.given_options,
        )
        if given:
            option = given[0]
            raise InputError(
                f"{option}: {what} was captured already; give it when the step is captured"
            )
        return step
    from poetmodel.torch.errors import require_torch

    require_torch()
    from poetmodel.torch.target import default_name, trained_weight_bytes
    from poetmodel.torch.target import load_step as load_target

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_target(what, onnx)
        if device is not None:
            from poetmodel.export.checks import check_weight_bytes

            check_weight_bytes(trained_weight_bytes(model), device)
        from poetmodel.torch.lowering import inference  # loads PyTorch's compiler
        from poetmodel.torch.lowering.step import lower
        from poetmodel.torch.step.optimizers import named_optimizer

        name = name or default_name(what)
        chosen = None if optimizer is None else named_optimizer(optimizer, model, loss_fn)
        step = lower(model, loss_fn, inputs, name=name, optimizer=chosen, accumulate=accumulate)
        if infer:
            step = inference.with_inference(step, model, loss_fn, inputs)
        return inference.with_evaluation(step, model, loss_fn, inputs) if evaluate else step


def _facts(deployment: Deployment) -> Iterator[Fact]:
    from poetmodel.cli.summary import proof_facts, tile_facts, time_facts
    from poetmodel.plan import Op

    plan, result, graph = deployment.plan, deployment.result, deployment.step.graph
    if result is not None and result.simulation is not None:
        yield from proof_facts(result)
        yield from time_facts(result.problem, result.simulation)
    times = {op: sum(step.op == op for step in plan.program) for op in Op}
    again = plural(times[Op.COMPUTE] - len(graph.nodes), "recomputation")
    yield row("nodes", str(len(graph.nodes)), again)
    if result is not None:
        yield from tile_facts(deployment.tile_bytes, deployment.tile_trials, result.problem)
    first = plan.first_reads(graph)  # of state, a page-in like any other
    times[Op.PAGE_IN] += sum(op == Op.COMPUTE and k in first for op, k in plan.program)
    yield row("page-outs, page-ins", f"{times[Op.PAGE_OUT]}, {times[Op.PAGE_IN]}", str(plan.mode))
    sizes = deployment.ram_map()
    used_bytes = deployment.ram_bytes - sizes.pop("free")
    share = percent(used_bytes / deployment.ram_bytes, digits=3)
    yield row(
        "peak RAM", format_bytes(used_bytes), f"{share} of {format_bytes(deployment.ram_bytes)}"
    )
    gaps = f"{deployment.arena.fragmentation:.1%} in gaps"
    for what, size in sizes.items():
        yield row(f"  {what}", format_bytes(size), gaps if what == "the rest of the arena" else "")
    if deployment.written_bytes:
        yield wear_fact(deployment.steps_until_worn, deployment.written_bytes)
    yield from _replay_facts(deployment)
    if deployment.migration is not None:
        taken, anew = deployment.migration.taken, deployment.migration.anew
        note = f"{plural(len(anew), 'tensor')} anew{': ' * bool(anew)}{listed(anew)}"
        yield row("state taken over", plural(len(taken), "tensor"), note)
    slots = len(deployment.slots)
    yield row(
        "slots on storage", str(slots), format_bytes(deployment.stored_bytes) if slots else ""
    )
    yield from _flash_facts(deployment)


def _replay_facts(deployment: Deployment) -> Iterator[Fact]:
    """Yield what stored samples take, and the instructions of both kinds of steps."""
    from poetmodel.export.replay import program_instructions

    replay = deployment.replay
    if replay is None:
        return
    stored = f"{format_bytes(replay.stored_bytes)} of storage, {replay.sample_bytes:,} B a sample"
    yield row("stored samples", f"{replay.samples:,}", stored)
    step, plan = deployment.step, deployment.plan
    whole, behind = (program_instructions(step, plan, nodes) for nodes in ((), replay.front.nodes))
    yield row("  instructions", f"{behind:,}", f"of a step on one, estimated; on a batch {whole:,}")


def _flash_facts(deployment: Deployment) -> Iterator[Fact]:
    """Yield what takes how much of the flash of the device, where its size is known."""
    sizes = deployment.flash_map()
    if not sizes:
        return
    free = sizes.pop("free")
    used_bytes = sum(sizes.values())
    share = percent(used_bytes / (used_bytes + free), digits=3)
    yield row("flash", format_bytes(used_bytes), f"{share} of {format_bytes(used_bytes + free)}")
    notes = {"code": "estimated, as by -O2 on a Cortex-M4; without the application"}
    for what, taken in sizes.items():
        yield row(f"  {what}", format_bytes(taken), notes.get(what, ""))
