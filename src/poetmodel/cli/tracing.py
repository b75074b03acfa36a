"""``poetmodel trace`` and ``poetmodel profile``: PyTorch steps as graphs, and their costs."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from poetmodel.cli import inspect, options
from poetmodel.cli.exporting import step_of
from poetmodel.cli.failures import print_warnings
from poetmodel.cli.inputs import check_outputs, read_device
from poetmodel.cli.output import figures, live_line, print_json, print_text, print_written, show
from poetmodel.errors import InputError, raised_as
from poetmodel.graph.catalogue import read_model_or_file
from poetmodel.report.presenter import Fact, document
from poetmodel.units import format_bytes, format_joules, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poetmodel.device import Costs
    from poetmodel.graph import Graph
    from poetmodel.torch.step.trace import Trace
    from poetmodel.torch.target import OnnxStep

_measuring = partial(options.option, rich_help_panel="How to measure")


@options.group
class CostingOptions:
    """How the costs of a traced step are found."""

    name: str | None = options.option(
        None, "--name NAME", "Name of the graph. Default: the class of the model."
    )
    device: str | None = options.option(
        None,
        "--device NAME|FILE",
        "Do not measure: estimate the costs on this device from FLOP and bytes.",
    )
    power_from: str | None = _measuring(
        None,
        "--power-from NAME|FILE",
        "The device whose power turns measured times into energies. Default: a nominal 1 W.",
    )
    power: float | None = _measuring(
        None,
        "--power WATTS",
        "The power that turns measured times into energies, such as 2.5.",
        parser=options.number("a number of watts above 0, such as 2.5", positive=True),
    )
    folder: Path = _measuring(
        Path(), "--folder FOLDER", "Folder for pages; page times are measured there."
    )
    repeats: int = _measuring(
        5,
        "--repeats N",
        "Number of timed steps; the least time counts.",
        parser=options.whole_number(),
    )
    threads: int | None = _measuring(
        None,
        "--threads N",
        "Compute threads. Default: as PyTorch is set.",
        parser=options.whole_number(),
    )

    def trace(self, target: str, onnx: OnnxStep, optimizer: str | None = None) -> Trace:
        """Trace what ``module:function`` returns, or an ONNX file; output goes to stderr."""
        from poetmodel.torch import trace
        from poetmodel.torch.step.optimizers import named_optimizer
        from poetmodel.torch.target import default_name, load_step

        with redirect_stdout(sys.stderr):
            model, loss_fn, inputs = load_step(target, onnx)
            chosen = None if optimizer is None else named_optimizer(optimizer, model, loss_fn)
            name = self.name or default_name(target)
            return trace(model, loss_fn, inputs, name=name, optimizer=chosen)

    def check_power(self, *, emulated: bool = False) -> None:
        """Raise unless at most one option gives a power, of times that are measured here."""
        given = [
            option
            for option, value in (("--power-from", self.power_from), ("--power", self.power))
            if value is not None
        ]
        if len(given) > 1:
            raise InputError("--power-from and --power both state a power; give only one")
        if given and emulated:
            raise InputError(
                f"{given[0]}: is for times of this host; with --target qemu --device has the power"
            )
        if given and self.device is not None:
            raise InputError(
                f"{given[0]}: is for measured times, and --device {self.device} estimates energies "
                "too; give only one of both"
            )
        read_device(self.power_from)

    def check_folder(self) -> None:
        """Raise if costs are measured, and pages cannot be written to their folder."""
        if self.device is None:
            from poetmodel.files import check_writable

            with raised_as(InputError, "--folder"):
                check_writable(self.folder / ".poetmodel-paging")

    def costs(self, trace: Trace) -> tuple[Costs, tuple[str, ...]]:
        """Estimate or measure the costs of a trace, and return notes; output goes to stderr."""
        if self.device is not None:
            return estimate(trace.graph, self.device)
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


def estimate(graph: Graph, device: str) -> tuple[Costs, tuple[str, ...]]:
    """Return the estimates of a device, and a note on them."""
    from poetmodel.device import Costs, Device

    costs = Costs.estimate(graph, Device.load(device))
    if costs.cycles is not None:
        cycles = f"instructions of exported C, {costs.cycles.text}"
        return costs, (f"compute times for device {device}: {cycles}",)
    note = f"costs: estimated for device {device} from FLOP and bytes; nothing was measured"
    return costs, (note,)


def _cost_facts(graph: Graph, costs: Costs) -> Iterator[Fact]:
    """Yield the sums of costs; those of pages are None without storage."""
    table = costs.table(graph)
    paged = table.has_storage
    single = "of a single pass: every node computed once"
    for key, name, unit, note in (
        ("compute_time_s", "compute time", format_seconds, single),
        ("compute_energy_j", "compute energy", format_joules, ""),
        ("page_in_time_s", "page-in time", format_seconds, "of every tensor, once"),
        ("page_out_time_s", "page-out time", format_seconds, "of every tensor, once"),
    ):
        known = paged or key.startswith("compute")
        yield Fact(key, sum(getattr(table, key)) if known else None, name, unit, note)


# -- trace -------------------------------------------------------------------------------------


@options.group
class TraceOptions:
    """Traced step, and the files to write."""

    target: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX",
        "A function without arguments that returns (model, loss_fn, inputs), with the target "
        "as the last input. MODULE may be path/file.py. Or an ONNX file, *.onnx, with --loss.",
    )
    out: Path | None = options.output(
        None,
        "--out FILE",
        "Write the graph file, *.graph.json, and its costs next to it, *.profile.csv.",
    )
    optimizer: options.OptimizerName | None = options.option(
        None,
        "--optimizer",
        "Make the step of an optimizer a part of the graph, with PyTorch's defaults (momentum: SGD "
        "with 0.9): parameters and its state are state tensors, the learning rate is an input.",
    )
    profile_out: Path | None = options.output(
        None,
        "--profile-out FILE",
        "Write the costs, *.csv: measured on this host, or estimated for --device. "
        "Default: next to the graph.",
    )


@options.command("poetmodel trace train:step --out net.graph.json")
def trace(
    costing: CostingOptions,
    wanted: TraceOptions,
    onnx: options.OnnxOptions,
    output: options.OutputOptions,
) -> None:
    """Capture a training step of a PyTorch module: forward pass, loss and backward pass."""
    read_device(costing.device)
    costing.check_power()
    out, profile_out = wanted.out, wanted.profile_out
    if out is not None and out.suffix != ".json":
        raise InputError(f"--out {out}: expected a name that ends in .graph.json")
    if out is not None and profile_out is None:
        profile_out = _beside(out)
    inputs = (costing.device, costing.power_from)
    check_outputs(("--out", out), ("--profile-out", profile_out), inputs=inputs)
    if profile_out is not None:
        costing.check_folder()
    with live_line(wanted=not output.json, doing="capturing"):
        traced = costing.trace(wanted.target, onnx.step(), wanted.optimizer)
    if out is not None:
        traced.graph.save(out)
    costs: Costs | None = None
    notes: tuple[str, ...] = ()
    if costing.device is not None or profile_out is not None:
        with live_line(wanted=not output.json, doing="measuring"):
            costs, notes = costing.costs(traced)
    if profile_out is not None and costs is not None:
        costs.save(profile_out)
    _show(traced, costs, notes, json=output.json)
    written = [path for path in (out, profile_out) if path is not None]
    for path in written:
        print_written(path)
    if not written:
        print_warnings(["nothing written; pass --out FILE to save the graph"])


KERNELS: Final = (
    "graph of PyTorch's kernels; exported C has others: 'poetmodel export --target step' writes "
    "a file of these, whose graph 'inspect', 'limits', 'solve' and the others take too"
)
"""Whose kernels a traced graph is of."""


def _beside(graph: Path) -> Path:
    """Return the default profile file of a graph file."""
    stem = graph.name.removesuffix(".json").removesuffix(".graph")
    return graph.with_name(f"{stem}.profile.csv")


def _show(traced: Trace, costs: Costs | None, notes: tuple[str, ...], *, json: bool) -> None:
    graph = traced.graph
    facts = [] if costs is None else list(_cost_facts(graph, costs))
    if json:
        values: dict[str, Any] = inspect.as_dict(graph)
        values |= {"held_bytes": traced.held_bytes, "notes": list(notes)}
        print_json(values | ({"costs": document(facts)} if facts else {}))
        return
    show(*inspect.tables(graph))
    print_text(KERNELS)
    if traced.held_bytes:
        print_text(
            f"a step holds {format_bytes(traced.held_bytes)} of results to its end (the loss, new "
            f"buffer values); 'solve' does not count them: reduce --ram by {traced.held_bytes:,} B"
        )
    if facts:
        show(figures("Costs", facts))
        print_text(*notes)


# -- profile -----------------------------------------------------------------------------------


class ProfileTarget(StrEnum):
    """Kinds of ``--target`` of a profile."""

    HOST = "host"
    QEMU = "qemu"


class CoreName(StrEnum):
    """The cores that are emulated."""

    M3 = "m3"
    M4 = "m4"
    M7 = "m7"


_emulating = partial(options.option, rich_help_panel="How to emulate")


@options.group
class EmulationOptions:
    """Emulated board of a measurement, and the rates that turn its instructions into time."""

    target: ProfileTarget = _emulating(
        ProfileTarget.HOST,
        "--target",
        "Where the step runs: on this host, or as exported C on a board that QEMU emulates. Then "
        "--device (default: nrf52840) gives clock, power and storage.",
    )
    core: CoreName | None = _emulating(
        None, "--core", "The Cortex that the C is built for; default: the device's, else m4."
    )
    instructions_per_cycle: float | None = _emulating(
        None,
        "--instructions-per-cycle NUMBER",
        "On average, without waits for memory; default: 0.79 for Cortex-M4, 1.05 for Cortex-M7, 1 "
        "for cores without a figure.",
        parser=options.number("a number above 0, such as 0.8", positive=True),
    )
    optimizer: options.OptimizerName | None = _emulating(
        None, "--optimizer", "As for 'poetmodel export'."
    )

    def check(self) -> None:
        """Raise if something is given that only emulation takes."""
        if self.target != ProfileTarget.QEMU and self.optimizer is not None:
            raise InputError("--optimizer: is for --target qemu; give that too")

    def measured(
        self, what: str, onnx: OnnxStep, costing: CostingOptions, tile: str | None
    ) -> tuple[Graph, Costs, tuple[str, ...]]:
        """Export a step, run it on the emulated board, and return graph, costs and notes."""
        from poetmodel.export.exporting import DEVICE
        from poetmodel.export.measuring import emulated_board, emulated_profile
        from poetmodel.tiling.choice import divide_step, parse_tile

        device = costing.device or DEVICE
        rate = self.instructions_per_cycle
        choice = parse_tile(tile)
        choice.require_size()
        emulated_board(device, instructions_per_cycle=rate, core=self.core)
        step = divide_step(step_of(what, onnx, name=costing.name, optimizer=self.optimizer), choice)
        profile = emulated_profile(
            step,
            device=device,
            instructions_per_cycle=rate,
            core=self.core,
        )
        return step.graph, profile.costs, profile.notes


@options.group
class ProfileOptions:
    """Measured or estimated step, and the file to write."""

    what: str = options.argument(
        options.REQUIRED,
        "MODULE:FUNCTION|ONNX|GRAPH|STEP",
        "As for 'poetmodel trace'; with --device also a graph file or a built-in network; with "
        "--target qemu also a step file.",
    )
    out: Path | None = options.output(None, "--out FILE", "Write the profile, *.csv.")


def _step_facts(
    what: str, onnx: options.OnnxOptions, sizes: options.FileGraphOptions
) -> tuple[OnnxStep, options.FileGraphOptions]:
    """Return the facts on the step of an ONNX file, its batch too, and those of a network."""
    from poetmodel.torch.target import is_captured, is_onnx

    if is_onnx(what):
        return onnx.step(sizes.batch), replace(sizes, batch=None)
    said = onnx.step()
    if said.given_options and not is_captured(what):
        raise InputError(f"{said.given_options[0]}: only applies to ONNX files; {what} is not one")
    return said, sizes


@options.command("poetmodel profile mlp --device mkr1000 --out mlp.csv")
def profile(
    sizes: Annotated[options.FileGraphOptions, options.without("graph")],
    costing: CostingOptions,
    emulating: EmulationOptions,
    wanted: ProfileOptions,
    onnx: Annotated[options.OnnxOptions, options.without("batch")],
    output: options.OutputOptions,
) -> None:
    """Measure a training step, on this host or an emulated board: times and energies."""
    emulating.check()
    what, out = wanted.what, wanted.out
    from poetmodel.torch.target import is_captured

    said, sizes = _step_facts(what, onnx, sizes)
    emulated, tile = emulating.target == ProfileTarget.QEMU, sizes.tile
    if emulated:
        sizes = replace(sizes, tile=None)
    if (emulated or is_captured(what)) and sizes.shape.overrides:
        raise InputError(
            f"{what}, {' '.join(sizes.shape.options)}: the function gives the inputs of a step; "
            "leave the option out"
        )
    read_device(costing.device)
    costing.check_power(emulated=emulated)
    check_outputs(("--out", out), inputs=(what, costing.device, costing.power_from))
    if is_captured(what) and not emulated:
        costing.check_folder()
    if emulated:
        with live_line(wanted=not output.json, doing="building and running"):
            graph, costs, notes = emulating.measured(what, said, costing, tile)
    elif is_captured(what):
        with live_line(wanted=not output.json, doing="capturing and measuring"):
            traced = costing.trace(what, said)
            graph = traced.graph
            costs, notes = costing.costs(traced)
    elif costing.device is not None:
        graph = read_model_or_file(what, sizes.shape)
        costs, notes = estimate(graph, costing.device)
    else:
        raise InputError(
            f"{what}: a graph cannot be run; give the MODULE:FUNCTION that it was traced from, or "
            "--device to estimate its costs"
        )
    if out is not None:
        costs.save(out)
    facts = list(_cost_facts(graph, costs))
    if output.json:
        named = {"graph": {"name": graph.name, "sha256": graph.sha256}}
        print_json(named | document(facts) | {"notes": list(notes)})
    else:
        show(figures(f"Costs of {graph.name}", facts))
        print_text(*notes)
    if out is not None:
        print_written(out)
