"""``poetmodel trace`` and ``profile``: capture PyTorch steps as graphs, and measure their costs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from poetmodel.cli import inspect, options
from poetmodel.cli.exporting import read_or_capture_step
from poetmodel.cli.inputs import check_outputs, read_device
from poetmodel.cli.output import fact_table, live_line
from poetmodel.cli.reply import Reply
from poetmodel.errors import InputError, convert_errors
from poetmodel.graph.catalogue import read_model_or_file
from poetmodel.report.presenter import Fact, to_json_object
from poetmodel.units import format_bytes, format_joules, format_seconds, parse_power

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import RenderableType

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.torch.step.trace import Trace
    from poetmodel.torch.target import OnnxStep

_measuring_option = partial(options.option, rich_help_panel="How to measure")


@options.group
class CostingOptions:
    """The name and device of a captured step, and options of the measurement of its costs."""

    name: str | None = options.option(
        None,
        "--name NAME",
        "Name of the graph. Default: the class of the model, or the name of the ONNX file.",
    )
    device: str | None = options.option(
        None,
        "--device NAME|FILE",
        "Estimate the costs on this device from FLOP and bytes instead of measuring.",
    )
    power_from: str | None = _measuring_option(
        None,
        "--power-from NAME|FILE",
        "Device whose power converts measured times to energies. Default: a nominal 1 W.",
    )
    power: float | None = _measuring_option(
        None,
        "--power POWER",
        "Power that converts measured times to energies, such as 20mW or 2.5W.",
        parser=options.amount_parser(
            parse_power, "--power", "a power above 0 with its unit, such as 20mW, or watts"
        ),
    )
    folder: Path = _measuring_option(
        Path(), "--folder FOLDER", "Folder for paged tensors; page times are measured there."
    )
    repeats: int = _measuring_option(
        5,
        "--repeats N",
        "Number of timed steps, of which the fastest counts, and of transfers of each page.",
        parser=options.integer_parser(),
    )
    threads: int | None = _measuring_option(
        None,
        "--threads N",
        "Compute threads. Default: PyTorch's setting.",
        parser=options.integer_parser(),
    )

    def capture(self, target: str, onnx: OnnxStep, optimizer: str | None = None) -> Trace:
        """Capture the step of a function or an ONNX file; output of its code goes to stderr."""
        from poetmodel.torch import trace
        from poetmodel.torch.step.optimizers import make_optimizer
        from poetmodel.torch.target import default_name, load_step

        with redirect_stdout(sys.stderr):
            model, loss_fn, inputs = load_step(target, onnx)
            user_optimizer = (
                None if optimizer is None else make_optimizer(optimizer, model, loss_fn)
            )
            name = self.name or default_name(target)
            return trace(model, loss_fn, inputs, name=name, optimizer=user_optimizer)

    def check_power(self, *, is_emulated: bool = False) -> None:
        """Raise `InputError` for two power options, or one where this host measures no times."""
        power_options = [
            option
            for option, value in (("--power-from", self.power_from), ("--power", self.power))
            if value is not None
        ]
        if len(power_options) > 1:
            raise InputError("--power-from and --power both state a power; give only one")
        if power_options and is_emulated:
            raise InputError(
                f"{power_options[0]}: is for times of this host; with --target qemu --device has "
                "the power"
            )
        if power_options and self.device is not None:
            raise InputError(
                f"{power_options[0]}: is for measured times, and --device {self.device} estimates "
                "energies too; give only one of the two"
            )
        read_device(self.power_from)

    def check_folder(self) -> None:
        """Raise `InputError` if costs are measured, and the folder is not writable."""
        if self.device is None:
            from poetmodel.files import check_writable

            with convert_errors(InputError, "--folder"):
                check_writable(self.folder / ".poetmodel-paging")

    def find_costs(self, trace: Trace) -> tuple[Costs, tuple[str, ...]]:
        """Estimate the costs of a trace for ``--device``, else measure; return costs and notes."""
        if self.device is not None:
            return estimate_costs(trace.graph, self.device)
        from poetmodel.torch.runtime.profiling import Power, measure

        device = read_device(self.power_from)
        power = None if device is None else Power.from_device(device)
        if self.power is not None:
            power = Power.from_watts(self.power)
        with redirect_stdout(sys.stderr):
            profile = measure(
                trace,
                folder=self.folder,
                repeats=self.repeats,
                threads=self.threads,
                power=power,
            )
        return profile.costs, profile.notes


def estimate_costs(graph: Graph, device: str) -> tuple[Costs, tuple[str, ...]]:
    """Return the estimated costs of a graph on a device, and one note on their origin."""
    from poetmodel.device import Costs, Device

    costs = Costs.estimate(graph, Device.load(device))
    if costs.cycles is not None:
        cycles = f"instructions of exported C, {costs.cycles.text}"
        return costs, (f"compute times for device {device}: {cycles}",)
    note = f"costs: estimated for device {device} from FLOP and bytes; no cost was measured"
    return costs, (note,)


def _cost_facts(graph: Graph, costs: Costs) -> Iterator[Fact]:
    """Yield time and energy of a single pass, and times to page each tensor once, or None."""
    table = costs.table(graph)
    has_storage = table.has_storage
    compute_note = "of a single pass: every node computed once"
    for key, name, format_value, note in (
        ("compute_time_s", "compute time", format_seconds, compute_note),
        ("compute_energy_j", "compute energy", format_joules, ""),
        ("page_in_time_s", "page-in time", format_seconds, "of every tensor, once"),
        ("page_out_time_s", "page-out time", format_seconds, "of every tensor, once"),
    ):
        is_known = has_storage or key.startswith("compute")
        yield Fact(key, sum(getattr(table, key)) if is_known else None, name, format_value, note)


# -- trace -------------------------------------------------------------------------------------


@options.group
class TraceOptions:
    """The step to capture, and the output files."""

    target: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX",
        "A function without arguments that returns (model, loss_fn, inputs), with the target "
        "as the last input. MODULE may be path/file.py. Or an ONNX file, *.onnx, with --loss.",
    )
    out: Path | None = options.output_option(
        None,
        "--out FILE",
        "Write the graph file, *.graph.json, and its costs next to it, *.profile.csv.",
    )
    optimizer: options.OptimizerName | None = options.option(
        None,
        "--optimizer",
        "Include the step of an optimizer in the graph, with PyTorch's defaults (momentum: SGD "
        "with 0.9): parameters and optimizer state are state tensors, the learning rate is an "
        "input.",
    )
    profile_out: Path | None = options.output_option(
        None,
        "--profile-out FILE",
        "Write the costs, *.csv: measured on this host, or estimated for --device. "
        "Default: next to the graph.",
    )


@options.command("poetmodel trace train:step --out net.graph.json")
def trace(
    costing: CostingOptions,
    request: TraceOptions,
    onnx: options.OnnxOptions,
    output: options.OutputOptions,
) -> Reply:
    """Capture a training step of a PyTorch module: forward pass, loss and backward pass."""
    read_device(costing.device)
    costing.check_power()
    out, profile_out = request.out, request.profile_out
    if out is not None and out.suffix != ".json":
        raise InputError(f"--out {out}: expected a name that ends in .graph.json")
    if out is not None and profile_out is None:
        # By default, the costs are written next to the graph.
        profile_out = _profile_path(out)
    inputs = (costing.device, costing.power_from)
    check_outputs(("--out", out), ("--profile-out", profile_out), inputs=inputs)
    if profile_out is not None:
        costing.check_folder()
    with live_line(enabled=not output.json, activity="capturing"):
        step_trace = costing.capture(request.target, onnx.onnx_step(), request.optimizer)
    if out is not None:
        step_trace.graph.save(out)
    costs: Costs | None = None
    notes: tuple[str, ...] = ()
    if costing.device is not None or profile_out is not None:
        with live_line(enabled=not output.json, activity="measuring"):
            costs, notes = costing.find_costs(step_trace)
    if profile_out is not None and costs is not None:
        costs.save(profile_out)
    graph, facts = step_trace.graph, []
    if costs is not None:
        facts = list(_cost_facts(graph, costs))
    written_paths = [path for path in (out, profile_out) if path is not None]
    hint = "nothing written; pass --out FILE to save the graph"
    return Reply(
        document=inspect.graph_values(graph)
        | {"held_bytes": step_trace.held_bytes, "notes": list(notes)}
        | ({"costs": to_json_object(facts)} if facts else {}),
        text=_trace_text(step_trace, facts, notes),
        warnings=() if written_paths else (hint,),
        written=written_paths,
    )


KERNELS_NOTE: Final = (
    "graph of PyTorch's kernels; exported C has other kernels: 'poetmodel export --target step' "
    "writes a file with their graph, for 'inspect', 'limits', 'solve' and other commands"
)
"""Note on the kernels of a traced graph."""


def _profile_path(graph: Path) -> Path:
    stem = graph.name.removesuffix(".json").removesuffix(".graph")
    return graph.with_name(f"{stem}.profile.csv")


def _trace_text(
    step_trace: Trace, facts: Sequence[Fact], notes: Sequence[str]
) -> Iterator[str | RenderableType]:
    """Yield graph, bytes of results, costs (if any) and notes."""
    yield from inspect.graph_tables(step_trace.graph)
    yield KERNELS_NOTE
    if step_trace.held_bytes:
        yield (
            f"results of a step take {format_bytes(step_trace.held_bytes)} until its end (the "
            "loss, new buffer values); 'solve' does not count these: reduce --ram by "
            f"{step_trace.held_bytes:,} B"
        )
    if facts:
        yield fact_table("Costs", facts)
        yield from notes


# -- profile -----------------------------------------------------------------------------------


class ProfileTarget(StrEnum):
    """Values of ``--target`` of ``profile``."""

    HOST = "host"
    QEMU = "qemu"


class CoreName(StrEnum):
    """Values of ``--core``: cores that are emulated."""

    M3 = "m3"
    M4 = "m4"
    M7 = "m7"


_emulating_option = partial(options.option, rich_help_panel="How to emulate")


@options.group
class EmulationOptions:
    """Options of the emulated board: its core, instructions per cycle, and the step's optimizer."""

    target: ProfileTarget = _emulating_option(
        ProfileTarget.HOST,
        "--target",
        "Where the step runs: on this host, or as exported C on a board that QEMU emulates. Then "
        "--device (default: nrf52840) gives clock, power and storage.",
    )
    core: CoreName | None = _emulating_option(
        None, "--core", "Cortex core for which the C is built; default: the device's, else m4."
    )
    instructions_per_cycle: float | None = _emulating_option(
        None,
        "--instructions-per-cycle NUMBER",
        "Average without waits for memory; default: 0.79 for Cortex-M4, 1.05 for Cortex-M7, 1 "
        "for other cores.",
        parser=options.number_parser("a number above 0, such as 0.8", positive=True),
    )
    optimizer: options.OptimizerName | None = _emulating_option(
        None, "--optimizer", "As for 'poetmodel export'."
    )

    def check(self) -> None:
        """Raise `InputError` if an option of the emulation is given without ``--target qemu``."""
        if self.target == ProfileTarget.QEMU:
            return
        for option, value in {
            "--optimizer": self.optimizer,
            "--core": self.core,
            "--instructions-per-cycle": self.instructions_per_cycle,
        }.items():
            if value is not None:
                raise InputError(f"{option}: is for --target qemu; give that too")

    def measure(
        self, step_source: str, onnx: OnnxStep, costing: CostingOptions, tile: str | None
    ) -> tuple[Graph, Costs, tuple[str, ...]]:
        """Export a step in tiles, execute it on the emulated board; return graph, costs, notes."""
        from poetmodel.export.measuring import measure_emulated, parse_emulation
        from poetmodel.export.options import DEFAULT_DEVICE
        from poetmodel.tiling.choice import divide_step, parse_tile

        device = costing.device or DEFAULT_DEVICE
        instructions_per_cycle = self.instructions_per_cycle
        tile_choice = parse_tile(tile)
        tile_choice.require_size()
        parse_emulation(device, instructions_per_cycle=instructions_per_cycle, core=self.core)
        step = divide_step(
            read_or_capture_step(step_source, onnx, name=costing.name, optimizer=self.optimizer),
            tile_choice,
        )
        profile = measure_emulated(
            step,
            device=device,
            instructions_per_cycle=instructions_per_cycle,
            core=self.core,
        )
        return step.graph, profile.costs, profile.notes


@options.group
class ProfileOptions:
    """The step to measure, and the output file."""

    step_source: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX|GRAPH|STEP",
        "As for 'poetmodel trace'. With --target qemu also a step file; otherwise with --device "
        "also a graph file, a step file or a built-in network.",
    )
    out: Path | None = options.output_option(None, "--out FILE", "Write the profile, *.csv.")


def _step_properties(
    step_source: str, onnx: options.OnnxOptions, sizes: options.FileGraphOptions
) -> tuple[OnnxStep, options.FileGraphOptions]:
    """Return the options of ``profile`` for an ONNX file, and those for the sizes of a graph."""
    from poetmodel.torch.target import is_onnx, needs_capture

    if is_onnx(step_source):
        return onnx.onnx_step(sizes.batch), replace(sizes, batch=None)
    onnx_step = onnx.onnx_step()
    if onnx_step.given_options and not needs_capture(step_source):
        raise InputError(
            f"{onnx_step.given_options[0]}: only applies to ONNX files; {step_source} is not one"
        )
    return onnx_step, sizes


@options.command("poetmodel profile mlp --device mkr1000 --out mlp.csv")
def profile(
    sizes: Annotated[options.FileGraphOptions, options.without("graph")],
    costing: CostingOptions,
    emulation: EmulationOptions,
    request: ProfileOptions,
    onnx: Annotated[options.OnnxOptions, options.without("batch")],
    output: options.OutputOptions,
) -> Reply:
    """Measure the costs of a training step on this host or an emulated board, or estimate them."""
    emulation.check()
    step_source, out = request.step_source, request.out
    from poetmodel.torch.target import needs_capture

    onnx_step, sizes = _step_properties(step_source, onnx, sizes)
    is_emulated, tile = emulation.target == ProfileTarget.QEMU, sizes.tile
    if is_emulated:
        sizes = replace(sizes, tile=None)
    if (is_emulated or needs_capture(step_source)) and sizes.variant.overrides:
        raise InputError(
            f"{step_source}, {' '.join(sizes.variant.options)}: does not apply to a "
            "captured step or a step file; leave the option out"
        )
    read_device(costing.device)
    costing.check_power(is_emulated=is_emulated)
    check_outputs(("--out", out), inputs=(step_source, costing.device, costing.power_from))
    if needs_capture(step_source) and not is_emulated:
        costing.check_folder()
    if is_emulated:
        with live_line(enabled=not output.json, activity="building and running"):
            graph, costs, notes = emulation.measure(step_source, onnx_step, costing, tile)
    elif needs_capture(step_source):
        with live_line(enabled=not output.json, activity="capturing and measuring"):
            step_trace = costing.capture(step_source, onnx_step)
            graph = step_trace.graph
            costs, notes = costing.find_costs(step_trace)
    elif costing.device is not None:
        graph = read_model_or_file(step_source, sizes.variant)
        costs, notes = estimate_costs(graph, costing.device)
    else:
        raise InputError(
            f"{step_source}: a graph cannot be run; give the MODULE:FUNCTION that it was traced "
            "from, or --device to estimate its costs"
        )
    if out is not None:
        costs.save(out)
    facts = list(_cost_facts(graph, costs))
    graph_entry = {"graph": {"name": graph.name, "sha256": graph.sha256}}
    return Reply(
        document=graph_entry | to_json_object(facts) | {"notes": list(notes)},
        text=(fact_table(f"Costs of {graph.name}", facts), *notes),
        written=() if out is None else (out,),
    )
