"""Inputs of commands: graphs, devices, costs, and schedule files with the problem they state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.cli.failures import print_warnings
from poetmodel.clock import infrequent_gc
from poetmodel.errors import InputError, ScheduleError
from poetmodel.graph.catalogue import (
    DEFAULT_SHAPE,
    InputShape,
    Variant,
    find_model_by_hash,
    load_file,
    load_model,
    model_names,
    read_model_or_file,
)
from poetmodel.units import MAX_BYTES, format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from poetmodel.cli.options import CostOptions, FileGraphOptions, GraphOptions, LimitOptions
    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Problem
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule import GraphIdentity
    from poetmodel.schedule.document import ScheduleDocument

LEAST_PYTORCH_BYTES: Final = 2**26
"""Devices with less RAM do not run PyTorch [B]."""
NO_COSTS: Final = (
    "no costs: give --device NAME|FILE ('poetmodel devices' lists the names) or --profile FILE"
)
"""Message if neither is given."""
MEASURED_COSTS: Final = "; give --profile if it was solved with measured costs"
"""Remedy if the costs of a file are taken from its device."""


# -- graphs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGraph:
    """A graph, the network or file that it comes from, and the sizes of its input."""

    graph: Graph
    name: str
    shape: InputShape = DEFAULT_SHAPE


def read_named(name: str, shape: Variant) -> Graph:
    """Return the shipped model of this name and shape, else the graph of a graph or a step file.

    The graph of a step file is that of the exported kernels, with larger parameters in tiles where
    that is all that is asked for.
    """
    step = read_step(name, shape) if "tile" in shape.overrides else None
    return read_model_or_file(name, shape) if step is None else step.graph


def read_step(name: str | None, shape: Variant) -> LoweredStep | None:
    """Return the content of a step file, in tiles of the given size; None for another file."""
    if name is None or not is_step_file(name) or shape.overrides.keys() - {"tile"}:
        return None
    from poetmodel.lowered.io import load_step
    from poetmodel.tiling.choice import in_tiles

    return in_tiles(load_step(name), shape.tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTiles:
    """The sizes of tiles of a step file that fit the RAM of its tensors."""

    candidates: Sequence[tuple[int | None, LoweredStep]]
    """Sizes [B], each with the step in them; first the largest that fits, or the least need."""
    room_bytes: int
    """RAM of tensors [B]."""
    device: Device
    paging: bool

    def print_choice(self, tile_bytes: int | None, step: LoweredStep) -> str:
        """Return ``--tile`` of a size as text, and print it as a hint."""
        from poetmodel.budgets import TileChoice
        from poetmodel.tiling.choice import needed_bytes

        tile = str(TileChoice(size_bytes=tile_bytes))
        found = f"--tile {tile} is what auto chooses for {format_bytes(self.room_bytes)} of tensors"
        least = needed_bytes(step, self.device, paging=self.paging)
        if least > self.room_bytes:
            found += "; no tiles fit, and with these it needs the least: " + format_bytes(least)
        print_warnings([found], kind="hint")
        return tile


def auto_tiles(
    source: GraphOptions, costing: CostOptions, limits: LimitOptions
) -> AutoTiles | None:
    """Return the sizes of tiles for ``--tile auto`` of a step file; None for another graph or tile.

    A percentage of RAM is of the whole step.
    """
    from poetmodel.budgets import Budget, TileChoice
    from poetmodel.graph import checkpoint_all_peak_bytes
    from poetmodel.lowered.io import load_step
    from poetmodel.tiling.choice import fitting_tiles

    name = source.model if source.graph is None else source.graph
    if name is None or not is_step_file(name) or not TileChoice.parse(source.tile).is_auto:
        return None
    device = read_device(costing.device)
    if device is None:
        return None
    step = load_step(name)
    budget = Budget.from_bytes(device.ram_bytes) if limits.ram is None else Budget.parse(limits.ram)
    room_bytes = budget.resolve(checkpoint_all_peak_bytes(step.graph))
    paging = not limits.no_paging and device.storage is not None
    candidates = fitting_tiles(
        step,
        TileChoice.AUTO,
        device,
        room_bytes=room_bytes,
        paging=paging,
        names_nodes=costing.profile is not None or bool(limits.constraints),
    )
    return AutoTiles(candidates=candidates, room_bytes=room_bytes, device=device, paging=paging)


def in_sizes(
    source: GraphOptions, costing: CostOptions, limits: LimitOptions
) -> tuple[GraphOptions, LimitOptions]:
    """Return options on a step in tiles in which tiles and RAM are sizes.

    A percentage of RAM is of the whole step; ``auto``, of a step file, is the largest size that
    fits.
    """
    tiles = auto_tiles(source, costing, limits)
    if tiles is not None:
        source = replace(source, tile=tiles.print_choice(*tiles.candidates[0]))
    return source, ram_in_bytes(source, limits)


def ram_in_bytes(source: GraphOptions, limits: LimitOptions) -> LimitOptions:
    """Return limits in which the RAM of the graph, if that is in tiles, is a size."""
    name = source.model if source.graph is None else source.graph
    return limits if name is None else in_bytes(limits, name, source.shape)


def in_bytes(limits: LimitOptions, name: str, shape: Variant) -> LimitOptions:
    """Return limits in which the RAM of a graph in tiles is a size.

    A percentage is of the keep-all peak of the whole graph.
    """
    from poetmodel.budgets import Budget
    from poetmodel.graph import checkpoint_all_peak_bytes

    if shape.tile is None or limits.ram is None or Budget.parse(limits.ram).share is None:
        return limits
    whole = checkpoint_all_peak_bytes(read_named(name, replace(shape, tile=None)))
    return replace(limits, ram=str(Budget.parse(limits.ram).in_bytes(whole)))


def given_step(given: GraphOptions) -> LoweredStep | None:
    """Return the step file of a MODEL argument or a ``--graph`` option; None for other graphs."""
    names = [name for name in (given.model, given.graph) if name is not None]
    return read_step(names[0], given.shape) if len(names) == 1 else None


def beside_bytes(step: LoweredStep, *, commit: bool = False) -> int:
    """Return the RAM that exported C takes beside its tensors: inputs, stack, runtime [B].

    An inference, whose outputs come on top, is exported where it is asked for.
    """
    from poetmodel.export.deployment import reserved_bytes, stack_bytes

    return reserved_bytes(replace(step, inference=None), stack_bytes(None, commit=commit))


def is_step_file(name: str | None) -> bool:
    """Whether a name is that of a step file, which holds the graph of exported kernels."""
    return name is not None and name.endswith(".step.json")


def read_graph(given: GraphOptions) -> Graph:
    """Return the graph of a MODEL argument or a ``--graph`` option."""
    if given.model is not None and given.graph is not None:
        raise InputError(
            f"MODEL {given.model!r} and --graph {given.graph!r} exclude each other: give only one"
        )
    if given.graph is not None:
        tiled = is_step_file(given.graph)
        return (read_named if tiled else load_file)(given.graph, given.shape)
    if given.model is None:
        raise InputError(
            "missing graph: give a MODEL such as resnet18-cifar ('poetmodel models' lists them) or "
            "--graph FILE"
        )
    return read_named(given.model, given.shape)


def graph_of(
    given: FileGraphOptions, identity: GraphIdentity | None, *, source: str | Path
) -> NamedGraph:
    """Return the graph of a schedule or plan: the given one, or else the built-in one of its name.

    `identity` is what the file `source` says about its graph.
    """
    name, shape = given.graph, given.shape
    if name is None:
        if identity is None or identity.name not in model_names():
            known = "" if identity is None else f", {identity.name!r}"
            raise InputError(
                f"missing graph: pass --graph FILE|MODEL with the graph of {source}{known}"
            )
        name = identity.name
        if not shape.overrides:
            match = find_model_by_hash(name, identity.sha256)
            if match is None:
                raise InputError(_of_other_sizes(identity, source))
            return NamedGraph(graph=match[0], name=name, shape=match[1])
    graph = read_named(name, shape)
    if identity is not None and identity.name == name and identity.sha256 != graph.sha256:
        raise InputError(_of_other_sizes(identity, source))
    return NamedGraph(graph=graph, name=name, shape=shape)


def graph_of_binary(given: FileGraphOptions, data: bytes, *, source: str | Path) -> Graph:
    """Return the graph of a binary plan: the given one, or the built-in one of its fingerprint."""
    if given.graph is not None:
        return read_named(given.graph, given.shape)
    from poetmodel.plan.binary import stored_fingerprint

    sha256 = stored_fingerprint(data).hex()
    for name in model_names():
        try:
            graph = load_model(name, given.shape)
        except InputError:  # the network has no such sizes
            continue
        if graph.sha256.startswith(sha256):
            return graph
    raise InputError(
        f"missing graph: {source} is for no built-in network (sha256 {sha256}...); give --graph "
        "FILE|MODEL, its sizes with --batch, --image or --sequence, or its state with --state, "
        "--in-place, --tile and --train"
    )


def _of_other_sizes(identity: GraphIdentity, source: str | Path) -> str:
    return (
        f"{source}: is for another {identity.name!r} (sha256 {identity.sha256[:12]}...) than the "
        "built-in network; give its sizes with --batch, --image or --sequence, its state with "
        "--state, --in-place, --tile and --train, or give --graph FILE"
    )


def check_names(identity: GraphIdentity | None, graph: Graph) -> None:
    """Raise unless the nodes and tensors that a file lists are those of a graph."""
    if identity is None:
        return
    for key, actual, wanted in (
        ("nodes", identity.nodes, tuple(node.name for node in graph.nodes)),
        ("tensors", identity.tensors, tuple(tensor.name for tensor in graph.tensors)),
    ):
        if actual == wanted:
            continue
        if len(actual) != len(wanted):
            difference = f"expected {len(wanted)} names, got {len(actual)}"
        else:
            k = next(k for k, name in enumerate(actual) if name != wanted[k])
            difference = f"entry {k}: expected {wanted[k]!r}, got {actual[k]!r}"
        raise ScheduleError(
            f"{key}: {difference}; the list must name the {key} of graph {graph.name!r} in order"
        )


# -- devices and costs -------------------------------------------------------------------------


def read_device(device: str | None) -> Device | None:
    """Return the device of a ``--device`` option: a built-in one, or that of a file."""
    if device is None:
        return None
    from poetmodel.device import Device

    return Device.load(device)


def device_warnings(device: Device) -> tuple[str, ...]:
    """Return the doubtful values of a device, as sentences."""
    from poetmodel.device.sanity import sanity_warnings

    return tuple(f"device {device.short_name}: {text}" for text in sanity_warnings(device))


def warn_of_kernels(graph: Graph, device: Device | None) -> None:
    """Warn where a graph is of PyTorch's kernels, and the device runs those of exported C."""
    if device is None or graph.kernels != "pytorch" or device.ram_bytes >= LEAST_PYTORCH_BYTES:
        return
    print_warnings(
        [
            f"{graph.name} is a graph of PyTorch's kernels, and {device.short_name} runs "
            "those of exported C, which need other RAM: ask about the step file that 'poetmodel "
            "export --target step' writes"
        ]
    )


def read_costs(graph: Graph, given: CostOptions, *, named: str | None = None) -> Costs:
    """Return the measured costs of a profile, or else the estimates of a device.

    `named` is the device where none is given. A device that cannot run the kernels of the graph is
    warned of.
    """
    from poetmodel.device import Costs

    device = read_device(named if given.device is None else given.device)
    warn_of_kernels(graph, device)
    if given.profile is not None:
        from poetmodel.device import Costs

        return Costs.load(given.profile, device=device)
    if device is None:
        raise InputError(NO_COSTS)
    return Costs.estimate(graph, device)


def costs_of_file(named: str | None, graph: Graph, given: CostOptions) -> tuple[Costs, list[str]]:
    """Return the costs for a file that may name a device, and a note where its device is taken."""
    known = known_device(named)
    costs = read_costs(graph, given, named=known)
    if known is None or given.any:
        return costs, []
    return costs, [f"costs are the estimates of device {known}, which the file names"]


def costs_to_verify(
    named: str | None, graph: Graph, given: CostOptions
) -> tuple[Costs | None, list[str]]:
    """Return the costs for a file as `costs_of_file`, None where there are none, and notes."""
    if known_device(named) is None and not given.any:
        return None, [
            "times and energies were not checked: give --device or --profile for the costs"
        ]
    costs, notes = costs_of_file(named, graph, given)
    return costs, [note + MEASURED_COSTS for note in notes]


def known_device(name: str | None) -> str | None:
    """Return the device that a file names, if it can be found."""
    from poetmodel.device.io import device_names

    return name if name is None or name in device_names() or Path(name).is_file() else None


# -- schedule files ----------------------------------------------------------------------------


def verify_document(
    document: ScheduleDocument,
    graph: Graph,
    given: CostOptions,
    limits: LimitOptions | None = None,
) -> VerifiedSchedule:
    """Verify a schedule file against its figures, and its problem or that of given limits.

    Without given costs they are those of the device that the file names, if it can be found;
    otherwise times and energies are not checked.
    """
    from poetmodel.planner import verify
    from poetmodel.report.subject import VerifiedSchedule, in_graph
    from poetmodel.schedule import check_identity

    check_identity(graph, document.schedule)
    check_names(document.schedule.identity, graph)
    costs, notes = costs_to_verify(document.device, graph, given)
    stated = document.claims
    if limits is not None and limits.given:
        if costs is None:
            raise InputError(NO_COSTS)
        notes.append(f"{', '.join(limits.given)}: the limits of the file were not checked")
        problem = limits.problem(graph, costs)
        same = document.problem is None or all(  # energy depends on both
            getattr(document.problem, name) == getattr(problem, name)
            for name in ("deadline_counts", "commit")
        )
        stated = document.stated if same else _of_memory(document.stated)
    else:
        if document.problem is None:
            notes.append("the file states no problem: no budget and no deadline were checked")
        problem = _stated_problem(document, graph, costs)
    if costs is None:
        stated = _of_memory(stated)
    schedule = document.schedule
    with infrequent_gc():
        verdict = verify(problem, schedule, stated=stated)
    return VerifiedSchedule(
        document=document,
        schedule=schedule if verdict.valid else in_graph(graph, schedule),
        problem=problem,
        costs=None if costs is None else problem.costs,
        verdict=verdict,
        notes=tuple(notes),
    )


def _of_memory(stated: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the figures of a file that need no costs."""
    from poetmodel.schedule.metrics import Display, Group, metrics_at

    return {m.key: stated.get(m.key) for m in metrics_at(Display.FILE, Group.MEMORY)}


def _stated_problem(document: ScheduleDocument, graph: Graph, costs: Costs | None) -> Problem:
    """Return the problem that a file states; without costs, all times and energies are 0."""
    from poetmodel.problem import Problem
    from poetmodel.report.subject import free_costs

    stated = document.problem
    if costs is None:
        costs = free_costs(graph)
        if stated is not None:
            kept = [row for row in stated.constraints if not row.needs_costs]
            limits = {"deadline_s": None, "energy_budget_j": None, "constraints": kept}
            stated = stated.model_copy(update=limits)
    if stated is None:
        return Problem(graph, costs, ram=MAX_BYTES, aux_bytes=MAX_BYTES)
    return stated.problem(graph, costs)


def read_valid(path: Path, given: FileGraphOptions, costing: CostOptions) -> VerifiedSchedule:
    """Read a schedule file with its problem and its costs, and verify the schedule."""
    from poetmodel.planner import verify
    from poetmodel.problem import Problem
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.document import load_document

    document = load_document(path)
    graph = graph_of(given, document.schedule.identity, source=path).graph
    try:
        check_identity(graph, document.schedule)
        costs, notes = costs_of_file(document.device, graph, costing)
        if document.problem is not None:
            problem = document.problem.problem(graph, costs)
        else:
            notes.append("the file states no problem: only the limits of the device hold")
            problem = Problem(graph, costs, ram=MAX_BYTES if costs.device is None else None)
        verdict = verify(problem, document.schedule)
    except ScheduleError as error:
        raise error.within(str(path)) from None
    if verdict.violations:
        raise ScheduleError(f"{path}: is not valid: {fault}" for fault in verdict.violations)
    return VerifiedSchedule(
        document=document,
        schedule=document.schedule,
        problem=problem,
        costs=problem.costs,
        verdict=verdict,
        notes=tuple(f"{path}: {note}" for note in notes),
    )


# -- files to write ----------------------------------------------------------------------------


def check_outputs(*outputs: tuple[str, Path | None], inputs: tuple[str | None, ...] = ()) -> None:
    """Raise unless the files of options can be written, and are neither inputs nor the same.

    That of ``--plot`` must be a known kind of picture.
    """
    from poetmodel.files import check_writable

    taken: dict[str, str] = {}
    for name, path in outputs:
        if path is None:
            continue
        if name == "--plot":
            from poetmodel.report.drawing import check_picture

            check_picture(path)
        place = realpath(path)
        if place in taken:
            raise InputError(
                f"{name} {path}: {taken[place]} already names this file; give another name"
            )
        for read in inputs:
            if read is not None and path.exists() and Path(read).exists() and path.samefile(read):
                raise InputError(f"{name} {path}: this is an input file; give another name")
        check_writable(path)
        taken[place] = name
