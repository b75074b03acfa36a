"""``poetmodel export``: a training step as a folder of C, a step file, or an ExecuTorch program."""

from __future__ import annotations

import shlex
import sys
import time
from contextlib import redirect_stdout
from dataclasses import fields, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer  # noqa: TC002 - typer itself reads the annotation

from poetmodel.budgets import Budget
from poetmodel.case.spelling import EXPORTED_LIMITS
from poetmodel.cli import options
from poetmodel.cli.inputs import check_outputs, read_device
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError, convert_errors, join_names
from poetmodel.problem import Limits
from poetmodel.report.presenter import Fact, format_items, format_percent, text_fact, wear_fact
from poetmodel.solver.request import SearchOptions
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from poetmodel.device import Device
    from poetmodel.export.deployment import Deployment
    from poetmodel.export.options import ExportOptions
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
class ExportArguments:
    """The step to export, its target and file, and options of the capture and of the exported C."""

    step_source: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX|STEP",
        "As for 'poetmodel trace'; or a step file, *.step.json, as --target step writes it.",
    )
    target: ExportTarget = options.output_option(
        ExportTarget.C,
        "--target",
        "c is a folder of C; step is a file of the captured step with its weights, from which "
        "a machine without PyTorch makes C; executorch is a program of ExecuTorch, *.pte.",
    )
    out: Path = options.output_option(
        options.REQUIRED, "--out FOLDER", "Write the folder; for other targets the file."
    )
    name: str | None = options.option(
        None,
        "--name NAME",
        "Name of the step. Default: the class of the model, or the name of the ONNX file.",
    )
    optimizer: options.OptimizerName | None = options.option(
        None,
        "--optimizer",
        "Update the parameters, with PyTorch's defaults (momentum: SGD with 0.9). Default: return "
        "the gradients.",
    )
    accumulate: int = options.option(
        1,
        "--accumulate N",
        "Sum the gradients of N batches before an update, each divided by N: a step takes one "
        "batch, and each N-th updates.",
        parser=options.integer_parser(),
    )
    infer: bool = options.option(
        False,
        "--infer",
        "Also export pm_infer: the forward pass of the model in evaluation mode, without the loss.",
    )
    evaluate: bool = options.option(
        False,
        "--evaluate",
        "Also export pm_evaluate: loss and correct classes of a batch in evaluation mode; with "
        "--commit also pm_keep_best and pm_restore_best.",
    )
    replay: int | None = options.option(
        None,
        "--replay N",
        "Store up to N samples on storage, as the outputs of the frozen front with their labels: "
        "pm_keep_sample stores one, pm_step_stored trains the layers behind the front.",
        parser=options.integer_parser(),
    )
    replay_cut: str | None = options.option(
        None,
        "--replay-cut NODE",
        "The last node of the frozen front for --replay, such as 3/relu. Default: the node with "
        "the smallest output; the export lists bytes and instructions of other nodes.",
    )
    migrate_from: Path | None = options.option(
        None,
        "--migrate-from FOLDER",
        "Load the state that an earlier export left on storage with pm_migrate: tensors of equal "
        "names, shapes and types. Both exports need --commit.",
    )
    byte_input: list[str] | None = options.option(
        None,
        "--byte-input NAME=TYPE[:SCALE[:OFFSET]]",
        "Read an input of real numbers as bytes, such as 'inputs[0]=uint8:0.0039': integers times "
        "a scale, plus an offset. Commas separate the scales of channels, 0.01,0.02,0.01; "
        "semicolons separate inputs. May be repeated.",
    )
    prefix: str = options.option(
        "pm",
        "--prefix NAME",
        "Prefix of all C names, such as kws for kws_step, so that two networks can be linked "
        "into one firmware.",
    )
    weights: WeightsChoice = options.option(
        WeightsChoice.C,
        "--weights",
        "Format of the weights: an array of C, or a file that the assembler includes.",
    )

    shared_kernels: Path | None = options.option(
        None,
        "--shared-kernels FOLDER",
        "Write the kernels to a folder that the networks of a firmware share.",
    )


@options.group
class DeviceOptions:
    """The device, the limits of the step on it, and the limits of its solve."""

    device: str = options.graph_option(
        "nrf52840",
        "--device NAME|FILE",
        "A built-in device (see 'poetmodel devices'), or a device file, *.toml. For ExecuTorch "
        "rpi4b unless it is given.",
    )
    profile: str | None = options.graph_option(
        None, "--profile FILE", "Measured costs, *.csv. They replace the device's estimates."
    )
    ram: str | None = options.limit_option(
        None,
        "--ram SIZE",
        "All RAM of the step, stack and inputs included, such as 256KiB; or 50% of the keep-all "
        "peak, plus stack and inputs. Default: the device's. For ExecuTorch the size of the arena, "
        "without a default.",
    )
    stack: str | None = options.limit_option(
        None, "--stack SIZE", "Bytes to reserve for the stack. Default: 1536B, 2048B with --commit."
    )
    tile: str | None = options.limit_option(
        "auto",
        "--tile SIZE|auto|none",
        "Split larger parameters and activations into slices of channels, such as 32KiB; "
        "auto chooses a size if the step does not fit otherwise. Default: auto.",
    )
    no_checksum: bool = options.limit_option(
        False, "--no-checksum", "Store committed state without checksums."
    )
    time_limit_s: float = options.solve_option(
        60.0,
        "--time-limit TIME",
        "Wall-clock limit: seconds, or a time such as 5min. It begins at the start of the "
        "command, or after a capture. It covers reading a step file and all solves, plans and "
        "addresses, also of pm_infer and pm_evaluate, but not writing the files. The best "
        "solution found is written.",
        parser=options.parse_seconds,
    )
    gap: float = options.solve_option(
        0.01,
        "--gap FRACTION",
        "Gap tolerance, as a fraction of the energy overhead. The default exceeds that of "
        "'poetmodel solve', because a step is solved again until its tensors have addresses.",
        parser=options.number_parser("a fraction from 0, such as 0.01 for 1 %", positive=False),
    )

    @property
    def search(self) -> SearchOptions:
        """Time limit and gap tolerance of the solves."""
        return SearchOptions(time_limit_s=self.time_limit_s, gap=self.gap)


@options.command("poetmodel export train:step --ram 256KiB --out firmware")
def export(
    context: typer.Context,
    request: ExportArguments,
    onnx: options.OnnxOptions,
    device_options: DeviceOptions,
    limits: Annotated[Limits, options.only(*EXPORTED_LIMITS)],
    output: options.OutputOptions,
) -> Reply:
    """Make a folder of C that trains on a device, a step file, or a program of ExecuTorch."""
    start_s = context.obj or time.monotonic()
    from poetmodel.export.paths import check_folder
    from poetmodel.torch.target import needs_capture

    has_capture = needs_capture(request.step_source)
    if request.target != ExportTarget.C:
        if not has_capture:
            raise InputError(
                f"--target {request.target}: {request.step_source} is no "
                "MODULE:FUNCTION or ONNX file to capture"
            )
        check_outputs(("--out", request.out))
    else:
        with convert_errors(InputError, "--out"):
            check_folder(request.out)
    if request.target != ExportTarget.C:
        _check_target_options(context, request.target)
    if request.target == ExportTarget.EXECUTORCH:
        return _write_program(
            context, request, onnx.onnx_step(), device_options, output, paging=limits.paging
        )
    show_progress = not output.json
    byte_inputs = _parse_byte_inputs(request.byte_input or ())
    parse = partial(_parse_options, request, device_options, limits, byte_inputs)
    parsed = None
    if request.target == ExportTarget.C and has_capture:
        parsed = parse(device_options.search)
        parsed.check_ram()
    elif has_capture:
        from poetmodel.lowered.tables import parse_byte_inputs

        parse_byte_inputs(byte_inputs)
    with live_line(enabled=show_progress, activity="capturing" if has_capture else "reading"):
        step = read_or_capture_step(
            request.step_source,
            onnx.onnx_step(),
            name=request.name,
            optimizer=request.optimizer,
            accumulate=request.accumulate,
            infer=request.infer,
            evaluate=request.evaluate,
            device=None if parsed is None else parsed.device,
        )
    if request.target == ExportTarget.STEP:
        from poetmodel.lowered.io import save_step
        from poetmodel.lowered.tables import with_byte_inputs

        save_step(with_byte_inputs(step, byte_inputs), request.out)
        return Reply(written=(request.out,))
    from poetmodel.export.checks import flash_warning, ram_warning
    from poetmodel.export.exporting import export_with

    if parsed is None:
        left_s = device_options.time_limit_s - (time.monotonic() - start_s)
        parsed = parse(replace(device_options.search, time_limit_s=max(left_s, 1.0)))
    command = shlex.join(["poetmodel", *sys.argv[1:]])
    with live_line(enabled=show_progress, activity="solving, planning and placing") as on_progress:
        deployment = export_with(step, replace(parsed, command=command, on_progress=on_progress))
    from poetmodel.export.summary import summarize

    facts = list(_deployment_facts(deployment))
    return Reply(
        document=partial(summarize, deployment),
        text=(fact_table(f"{deployment.step.graph.name} as C", facts),),
        warnings=filter(None, (ram_warning(deployment), flash_warning(deployment))),
        written=(request.out,),
    )


def _parse_options(
    request: ExportArguments,
    device_options: DeviceOptions,
    limits: Limits,
    byte_inputs: Mapping[str, str],
    search: SearchOptions,
) -> ExportOptions:
    """Return the checked options of an export as C."""
    from poetmodel.export.options import ExportOptions

    return ExportOptions.of_limits(
        request.out,
        replace(limits, ram=device_options.ram),
        search,
        device=device_options.device,
        profile=device_options.profile,
        stack=device_options.stack,
        tile=device_options.tile,
        checksum=not device_options.no_checksum,
        infer=request.infer,
        evaluate=request.evaluate,
        replay=request.replay or 0,
        replay_cut=request.replay_cut,
        migrate_from=request.migrate_from,
        byte_inputs=byte_inputs,
        prefix=request.prefix,
        weights=request.weights,
        shared_kernels=request.shared_kernels,
    )


def _parse_byte_inputs(texts: Iterable[str]) -> dict[str, str]:
    """Parse values of ``--byte-input``: ``"a=i8;b=u8:0.5"`` -> ``{"a": "i8", "b": "u8:0.5"}``."""
    items = (item for text in texts for item in text.split(";"))
    return options.collect_unique("--byte-input", map(_parse_byte_input, items))


def _parse_byte_input(item: str) -> tuple[str, str]:
    """Return the name of a byte input and the text after it; raise `InputError` without a text."""
    name, _, meaning = item.partition("=")
    if not meaning:
        raise InputError(
            f"--byte-input: expected NAME=TYPE, such as inputs[0]=uint8:0.0039, got {name!r}"
        )
    return name.strip(), meaning.strip()


_COMMON_GROUPS: Final = (options.OnnxOptions, options.OutputOptions)
"""Groups of options that apply to all targets."""
_TARGET_OPTIONS: Final = {
    ExportTarget.STEP: ("a step file", ("name", "accumulate", "infer", "evaluate", "byte_input")),
    ExportTarget.EXECUTORCH: (
        "a program of ExecuTorch",
        ("ram", "device", "no_paging", "time_limit_s", "gap"),
    ),
}
"""(description, names of options) of each target other than C.

All targets also have the source, ``--target``, ``--out``, ``--optimizer`` and the options of
`_COMMON_GROUPS`."""


def _options_on_command_line(context: typer.Context) -> dict[str, str]:
    """Return the options and arguments on the command line: spelling by parameter name."""
    return {
        str(parameter.name): parameter.opts[0]
        for parameter in context.command.params
        if (source := context.get_parameter_source(str(parameter.name)))
        and source.name == "COMMANDLINE"
    }


def _check_target_options(context: typer.Context, target: ExportTarget) -> None:
    """Raise `InputError` for an option on the command line that a target does not have."""
    description, target_options = _TARGET_OPTIONS[target]
    common_options = (
        common_field.name for group in _COMMON_GROUPS for common_field in fields(group)
    )
    allowed_options = {
        "step_source",
        "target",
        "out",
        "optimizer",
        *target_options,
        *common_options,
    }
    for name, spelling in _options_on_command_line(context).items():
        if name not in allowed_options:
            raise InputError(f"{spelling}: does not apply to {description}; leave it out")


def _write_program(
    context: typer.Context,
    request: ExportArguments,
    onnx: OnnxStep,
    device_options: DeviceOptions,
    output: options.OutputOptions,
    *,
    paging: bool,
) -> Reply:
    """Capture and solve a step, write it as a program of ExecuTorch, and reply its metrics."""
    if device_options.ram is None:
        raise InputError("--ram: expected the budget of the arena, such as 256KiB or 60%")
    Budget.parse(device_options.ram)
    read_device(device_options.device)
    from poetmodel import torch as pmt
    from poetmodel.torch.target import load_step

    to_executorch = pmt.to_executorch  # raises before the capture if ExecuTorch is missing
    from poetmodel.torch.step.optimizers import make_optimizer

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_step(request.step_source, onnx)
    user_optimizer = request.optimizer and make_optimizer(request.optimizer, model, loss_fn)
    device_keywords: dict[str, Any] = (
        {"device": device_options.device} if "device" in _options_on_command_line(context) else {}
    )
    with (
        live_line(enabled=not output.json, activity="solving and placing") as on_progress,
        redirect_stdout(sys.stderr),
    ):
        program = to_executorch(
            model,
            loss_fn,
            inputs,
            ram=device_options.ram,
            path=request.out,
            optimizer=user_optimizer,
            time_limit=device_options.time_limit_s,
            gap=device_options.gap,
            on_progress=on_progress,
            paging=False if not paging else None,
            **device_keywords,
        )
    text = [str(program)]
    if program.sgd is not None:
        text.append(f"pass {dict(program.sgd)} and the parameters to get_sgd_optimizer")
    return Reply(document=program.to_dict(), text=text, written=(request.out,))


def read_or_capture_step(
    step_source: str,
    onnx: OnnxStep,
    *,
    name: str | None,
    optimizer: options.OptimizerName | None,
    accumulate: int = 1,
    infer: bool = False,
    evaluate: bool = False,
    device: Device | None = None,
) -> LoweredStep:
    """Read a step file, or capture the step of ``module:function`` or of an ONNX file.

    On a step file, `infer`, `evaluate` and `device` have no effect. Output of the user's code goes
    to stderr. A device whose flash is too small for the nonzero trained weights is reported before
    a capture.
    """
    from poetmodel.torch.target import needs_capture

    if not needs_capture(step_source):
        from poetmodel.lowered.io import load_step

        step = load_step(step_source)  # raises for other files first
        capture_options = (
            *(["--optimizer"] if optimizer else []),
            *(["--name"] if name else []),
            *(["--accumulate"] if accumulate > 1 else []),
            *onnx.given_options,
        )
        if capture_options:
            option = capture_options[0]
            raise InputError(
                f"{option}: {step_source} was captured already; give the option at the capture"
            )
        return step
    from poetmodel.torch.errors import require_torch

    require_torch()
    from poetmodel.torch.target import default_name, trained_weight_bytes
    from poetmodel.torch.target import load_step as load_target

    with redirect_stdout(sys.stderr):
        model, loss_fn, inputs = load_target(step_source, onnx)
        if device is not None:
            from poetmodel.export.checks import check_weight_bytes

            check_weight_bytes(trained_weight_bytes(model), device)
        from poetmodel.torch.lowering import inference  # imports PyTorch's compiler
        from poetmodel.torch.lowering.step import lower
        from poetmodel.torch.step.optimizers import make_optimizer

        name = name or default_name(step_source)
        user_optimizer = None if optimizer is None else make_optimizer(optimizer, model, loss_fn)
        step = lower(
            model, loss_fn, inputs, name=name, optimizer=user_optimizer, accumulate=accumulate
        )
        if infer:
            step = inference.with_inference(step, model, loss_fn, inputs)
        return inference.with_evaluation(step, model, loss_fn, inputs) if evaluate else step


def _deployment_facts(deployment: Deployment) -> Iterator[Fact]:
    """Yield proof, times, plan, RAM, state on storage and flash of exported C, for a table."""
    from poetmodel.cli.summary import proof_facts, tile_facts, time_facts
    from poetmodel.plan import Op

    plan, result, graph = deployment.plan, deployment.result, deployment.step.graph
    if result.simulation is not None:
        yield from proof_facts(result)
        yield from time_facts(result.problem, result.simulation)
    counts = {op: sum(instruction.op == op for instruction in plan.program) for op in Op}
    recomputations_text = format_items(counts[Op.COMPUTE] - len(graph.nodes), "recomputation")
    yield text_fact("nodes", str(len(graph.nodes)), recomputations_text)
    yield from tile_facts(deployment.tile_bytes, deployment.tile_trials, result.problem)
    first_reads = plan.first_reads(graph)  # their nodes page in state
    counts[Op.PAGE_IN] += sum(op == Op.COMPUTE and node in first_reads for op, node in plan.program)
    yield text_fact(
        "page-outs, page-ins", f"{counts[Op.PAGE_OUT]}, {counts[Op.PAGE_IN]}", str(plan.mode)
    )
    sizes = deployment.ram_map()
    used_bytes = deployment.ram_bytes - sizes.pop("free")
    fraction_text = format_percent(used_bytes / deployment.ram_bytes, digits=3)
    yield text_fact(
        "peak RAM",
        format_bytes(used_bytes),
        f"{fraction_text} of {format_bytes(deployment.ram_bytes)}",
    )
    fragmentation = f"the arena is {deployment.arena.fragmentation_ratio:.1%} above its lower bound"
    for region, size in sizes.items():
        yield text_fact(
            f"  {region}",
            format_bytes(size),
            fragmentation if region == "the rest of the arena" else "",
        )
    if deployment.written_bytes:
        yield wear_fact(deployment.steps_until_worn, deployment.written_bytes)
    yield from _replay_facts(deployment)
    if deployment.migration is not None:
        migrated, reset = deployment.migration.migrated, deployment.migration.reset
        note = f"{format_items(len(reset), 'tensor')} reset{': ' * bool(reset)}{join_names(reset)}"
        yield text_fact("migrated state", format_items(len(migrated), "tensor"), note)
        if deployment.migration.source.samples:
            is_taken = deployment.migration.takes_samples
            yield text_fact("migrated samples", "all" if is_taken else "none")
    n_slots = len(deployment.slots)
    yield text_fact(
        "slots on storage", str(n_slots), format_bytes(deployment.stored_bytes) if n_slots else ""
    )
    yield from _flash_facts(deployment)


def _replay_facts(deployment: Deployment) -> Iterator[Fact]:
    """Yield number, bytes and instructions of stored samples; no facts without ``--replay``."""
    from poetmodel.export.replay import list_cuts, program_instructions
    from poetmodel.lowered.ranges import number_check_instructions

    replay = deployment.replay
    if replay is None:
        return
    storage_text = (
        f"{format_bytes(replay.stored_bytes)} of storage, {replay.sample_bytes:,} B a sample"
    )
    yield text_fact("stored samples", f"{replay.max_samples:,}", storage_text)
    lowered_step, plan = deployment.step, deployment.plan
    batch_instructions, stored_sample_instructions = (
        program_instructions(lowered_step, plan, nodes) for nodes in ((), replay.front.nodes)
    )
    batch_instructions += number_check_instructions(lowered_step)
    yield text_fact(
        "  instructions",
        f"{stored_sample_instructions:,}",
        f"of a step on a stored sample, estimated; {batch_instructions:,} on a batch",
    )
    for cut in list_cuts(replay, lowered_step, plan):
        saved_text = format_percent(1 - cut.instructions / max(1, batch_instructions), digits=3)
        choice = "chosen" if cut.is_chosen else f"--replay-cut {shlex.quote(cut.node)}"
        yield text_fact(
            f"  cut {cut.node}",
            f"{cut.sample_bytes:,} B a sample",
            f"{format_bytes(cut.stored_bytes)} of storage; saves {saved_text} of the instructions; "
            f"{choice}",
        )


def _flash_facts(deployment: Deployment) -> Iterator[Fact]:
    """Yield the flash in use [B], and each region of it; no facts if the flash is unknown."""
    sizes = deployment.flash_map()
    if not sizes:
        return
    free_bytes = sizes.pop("free")
    used_bytes = sum(sizes.values())
    fraction_text = format_percent(used_bytes / (used_bytes + free_bytes), digits=3)
    yield text_fact(
        "flash",
        format_bytes(used_bytes),
        f"{fraction_text} of {format_bytes(used_bytes + free_bytes)}",
    )
    notes = {"code": "estimated, as by -O2 on a Cortex-M4; without the application"}
    for region, size in sizes.items():
        yield text_fact(f"  {region}", format_bytes(size), notes.get(region, ""))
