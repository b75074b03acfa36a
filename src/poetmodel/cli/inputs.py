"""Inputs of commands: graphs, devices, costs, and schedule files with their problems.

Also checks that output files can be written, before a command starts to compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from os.path import realpath
from pathlib import Path
from typing import TYPE_CHECKING, Final

from poetmodel.cli import options
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
    from collections.abc import Sequence

    from poetmodel.cli.options import (
        ConstraintOptions,
        CostOptions,
        FileGraphOptions,
        GraphOptions,
    )
    from poetmodel.device import Costs, Device
    from poetmodel.graph import Graph
    from poetmodel.lowered.step import LoweredStep
    from poetmodel.problem import Limits, Problem
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule import GraphIdentity
    from poetmodel.schedule.document import ScheduleDocument

MIN_PYTORCH_BYTES: Final = 2**26
"""RAM below which a device cannot run PyTorch [B]."""
NO_COSTS: Final = (
    "no costs: give --device NAME|FILE ('poetmodel devices' lists the names) or --profile FILE"
)
"""Error message if neither ``--device`` nor ``--profile`` is given."""
MEASURED_COSTS: Final = "; give --profile if it was solved with measured costs"
"""Suffix of a note that the costs are estimates for the device that the file states."""


# -- graphs ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGraph:
    """A graph with the command-line name of its network or file, and its input sizes."""

    graph: Graph
    name: str
    shape: InputShape = DEFAULT_SHAPE


def read_graph_by_name(name: str, shape: Variant) -> Graph:
    """Return the built-in network of this name and shape, else that of a graph or step file."""
    step = read_step(name, shape) if "tile" in shape.overrides else None
    return read_model_or_file(name, shape) if step is None else step.graph


def read_step(name: str | None, shape: Variant) -> LoweredStep | None:
    """Return the step of a step file, in tiles of the size in `shape`.

    None if the name is no step file, or if `shape` has settings besides tiles.
    """
    if name is None or not is_step_file(name) or shape.overrides.keys() - {"tile"}:
        return None
    from poetmodel.lowered.io import load_step
    from poetmodel.tiling.choice import divide_step

    return divide_step(load_step(name), shape.tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTiles:
    """Tile sizes of a step file to try for ``--tile auto``."""

    candidates: Sequence[tuple[int | None, LoweredStep]]
    """(tile size [B], step in tiles), from one to four, in the order of `candidate_tiles`.

    Only the step without tiles, with size None, if it fits; otherwise the largest sizes that fit,
    largest first, or only the first of these if a profile or constraints name nodes. If none fits,
    only the pair with the smallest minimum RAM."""
    ram_bytes: int
    """RAM budget of tensors [B]."""
    device: Device
    paging: bool
    """Whether tensors may be paged."""

    def print_choice(self, tile_bytes: int | None, step: LoweredStep) -> str:
        """Print the chosen ``--tile`` on stderr, unless quiet, and return its value as text."""
        from poetmodel.budgets import TileChoice
        from poetmodel.tiling.choice import needed_bytes

        tile = str(TileChoice(size_bytes=tile_bytes))
        hint = f"auto chooses --tile {tile} for {format_bytes(self.ram_bytes)} of tensors"
        needed_ram_bytes = needed_bytes(step, self.device, paging=self.paging)
        if needed_ram_bytes > self.ram_bytes:
            hint += "; no tile size fits, and this one needs the least RAM: " + format_bytes(
                needed_ram_bytes
            )
        print_warnings([hint], kind="hint")
        return tile


def find_auto_tiles(
    source: GraphOptions, costing: CostOptions, limits: Limits, constraint_files: Sequence[str]
) -> AutoTiles | None:
    """Return the tile sizes to try for ``--tile auto`` of a step file, largest first.

    None for all other graphs and tile options, and without ``--device``. The budget is ``--ram`` or
    the device's RAM; a percentage is of the keep-all peak without tiles.
    """
    from poetmodel.budgets import Budget, TileChoice
    from poetmodel.graph import checkpoint_all_peak_bytes
    from poetmodel.lowered.io import load_step
    from poetmodel.tiling.choice import candidate_tiles

    name = source.graph_name
    if name is None or not is_step_file(name) or not TileChoice.parse(source.tile).is_auto:
        return None
    device = read_device(costing.device)
    if device is None:
        return None
    step = load_step(name)
    ram_budget = Budget.parse(device.ram_bytes if limits.ram is None else limits.ram)
    ram_bytes = ram_budget.resolve(checkpoint_all_peak_bytes(step.graph))
    paging = limits.paging and device.storage is not None
    candidates = candidate_tiles(
        step,
        TileChoice.AUTO,
        device,
        ram_bytes=ram_bytes,
        paging=paging,
        names_nodes=costing.profile is not None or bool(constraint_files),
    )
    return AutoTiles(candidates=candidates, ram_bytes=ram_bytes, device=device, paging=paging)


def resolve_sizes(
    source: GraphOptions,
    costing: CostOptions,
    limits: Limits,
    constraint_files: Sequence[str] = (),
) -> tuple[GraphOptions, Limits]:
    """Return the options with ``--tile auto`` and a percentage of RAM replaced by sizes.

    ``auto`` is replaced for a step file and a device, with a hint on stderr; a percentage only with
    ``--tile``, since it refers to the keep-all peak without tiles.
    """
    tiles = find_auto_tiles(source, costing, limits, constraint_files)
    if tiles is not None:
        source = replace(source, tile=tiles.print_choice(*tiles.candidates[0]))
    return source, resolve_ram(source, limits)


def resolve_ram(source: FileGraphOptions, limits: Limits) -> Limits:
    """Return the limits, with a percentage (of the keep-all peak without tiles) as a size."""
    from poetmodel.budgets import Budget
    from poetmodel.graph import checkpoint_all_peak_bytes

    name, shape = source.graph_name, source.variant
    if name is None or shape.tile is None or limits.ram is None:
        return limits
    budget = Budget.parse(limits.ram)
    if budget.fraction is None:
        return limits
    keep_all_bytes = checkpoint_all_peak_bytes(read_graph_by_name(name, replace(shape, tile=None)))
    return replace(limits, ram=str(budget.to_size(keep_all_bytes)))


def read_given_step(graph_options: GraphOptions) -> LoweredStep | None:
    """Return the step of a MODEL argument or ``--graph`` option that is a step file, else None."""
    names = [name for name in (graph_options.model, graph_options.graph) if name is not None]
    return read_step(names[0], graph_options.variant) if len(names) == 1 else None


def extra_ram_bytes(step: LoweredStep, *, commit: bool = False) -> int:
    """Return the RAM of exported C in addition to its tensors: inputs, stack, runtime [B].

    The output of ``pm_infer`` is not included.
    """
    from poetmodel.export.reserves import parse_stack, reserved_bytes

    return reserved_bytes(replace(step, inference=None), parse_stack(None, commit=commit))


def is_step_file(name: str | None) -> bool:
    """Return whether a name has the suffix of step files, whose graphs have exported kernels."""
    return name is not None and name.endswith(".step.json")


def read_graph(graph_options: GraphOptions) -> Graph:
    """Return the graph of a MODEL argument (network or file) or a ``--graph`` option (file)."""
    if graph_options.model is not None and graph_options.graph is not None:
        raise InputError(
            f"MODEL {graph_options.model!r} and --graph {graph_options.graph!r} exclude each "
            "other: give only one"
        )
    if graph_options.graph is not None:
        is_step = is_step_file(graph_options.graph)
        return (read_graph_by_name if is_step else load_file)(
            graph_options.graph, graph_options.variant
        )
    if graph_options.model is None:
        raise InputError(
            "missing graph: give a MODEL such as resnet18-cifar ('poetmodel models' lists them) or "
            "--graph FILE"
        )
    return read_graph_by_name(graph_options.model, graph_options.variant)


def resolve_graph(
    graph_options: FileGraphOptions, identity: GraphIdentity | None, *, source: str | Path
) -> NamedGraph:
    """Return the graph of a schedule or plan: ``--graph``, else the built-in network it names.

    Without options of the graph, the variant of the network is found by its hash. A graph of the
    name, but not of the hash, is refused; one of another name is not compared.
    """
    name, shape = graph_options.graph, graph_options.variant
    if name is None:
        if identity is None or identity.name not in model_names():
            name_text = "" if identity is None else f", {identity.name!r}"
            raise InputError(
                f"missing graph: pass --graph FILE|MODEL with the graph of {source}{name_text}"
            )
        name = identity.name
        if not shape.overrides:
            match = find_model_by_hash(name, identity.sha256)
            if match is None:
                raise InputError(_other_sizes_message(identity, source))
            return NamedGraph(graph=match[0], name=name, shape=match[1])
    graph = read_graph_by_name(name, shape)
    if identity is not None and identity.name == name and identity.sha256 != graph.sha256:
        raise InputError(_other_sizes_message(identity, source))
    return NamedGraph(graph=graph, name=name, shape=shape)


def resolve_binary_graph(
    graph_options: FileGraphOptions, data: bytes, *, source: str | Path
) -> Graph:
    """Return the graph of a binary plan: ``--graph``, else the first built-in one that matches."""
    if graph_options.graph is not None:
        return read_graph_by_name(graph_options.graph, graph_options.variant)
    from poetmodel.plan.binary import stored_fingerprint

    sha256 = stored_fingerprint(data).hex()
    for name in model_names():
        try:
            graph = load_model(name, graph_options.variant)
        except InputError:  # the network does not support these sizes or this state
            continue
        if graph.sha256.startswith(sha256):
            return graph
    raise InputError(
        f"missing graph: {source} is for no built-in network (sha256 {sha256}...); give --graph "
        "FILE|MODEL, its sizes with --batch, --image or --sequence, or its state with --state, "
        "--in-place, --tile and --train"
    )


def _other_sizes_message(identity: GraphIdentity, source: str | Path) -> str:
    return (
        f"{source}: is for another {identity.name!r} (sha256 {identity.sha256[:12]}...) than the "
        "built-in network; give its sizes with --batch, --image or --sequence, its state with "
        "--state, --in-place, --tile and --train, or give --graph FILE"
    )


def check_names(identity: GraphIdentity | None, graph: Graph) -> None:
    """Raise `ScheduleError` unless a file lists the nodes and tensors of a graph, in their order.

    A file without an `identity` passes.
    """
    if identity is None:
        return
    for key, actual, expected in (
        ("nodes", identity.nodes, tuple(node.name for node in graph.nodes)),
        ("tensors", identity.tensors, tuple(tensor.name for tensor in graph.tensors)),
    ):
        if actual == expected:
            continue
        if len(actual) != len(expected):
            difference = f"expected {len(expected)} names, got {len(actual)}"
        else:
            i = next(i for i, name in enumerate(actual) if name != expected[i])
            difference = f"entry {i}: expected {expected[i]!r}, got {actual[i]!r}"
        raise ScheduleError(
            f"{key}: {difference}; the list must name the {key} of graph {graph.name!r} in order"
        )


# -- devices and costs -------------------------------------------------------------------------


def read_device(device: str | None) -> Device | None:
    """Return the device of ``--device``, a built-in device or a file; None without the option."""
    if device is None:
        return None
    from poetmodel.device import Device

    return Device.load(device)


def device_warnings(device: Device) -> tuple[str, ...]:
    """Return warnings about implausible values of a device."""
    from poetmodel.device.sanity import sanity_warnings

    return tuple(f"device {device.short_name}: {text}" for text in sanity_warnings(device))


def warn_about_kernels(graph: Graph, device: Device | None) -> None:
    """Print a warning if a graph has PyTorch's kernels, for which the device has too little RAM."""
    if device is None or graph.kernels != "pytorch" or device.ram_bytes >= MIN_PYTORCH_BYTES:
        return
    print_warnings(
        [
            f"{graph.name} is a graph of PyTorch's kernels, and {device.short_name} runs "
            "those of exported C, whose RAM differs: use the step file that 'poetmodel export "
            "--target step' writes"
        ]
    )


def read_costs(
    graph: Graph, cost_options: CostOptions, *, default_device: str | None = None
) -> Costs:
    """Return the measured costs of ``--profile``, else the estimates for ``--device``.

    `default_device` replaces a missing ``--device``, also as the device of a profile.
    """
    from poetmodel.device import Costs

    device = read_device(default_device if cost_options.device is None else cost_options.device)
    warn_about_kernels(graph, device)
    if cost_options.profile is not None:
        return Costs.load(cost_options.profile, device=device)
    if device is None:
        raise InputError(NO_COSTS)
    return Costs.estimate(graph, device)


def read_file_costs(
    device_name: str | None, graph: Graph, cost_options: CostOptions
) -> tuple[Costs, list[str]]:
    """Return the costs for a file, and notes: one if no option states the costs, else [].

    Without such an option, the costs are estimates for `device_name`, the device that the file
    states. With ``--profile`` alone, this is the device of the profile.
    """
    default_device = find_named_device(device_name)
    costs = read_costs(graph, cost_options, default_device=default_device)
    if default_device is None or cost_options.is_given:
        return costs, []
    return costs, [f"costs are the estimates of device {default_device}, which the file names"]


def costs_for_verification(
    device_name: str | None, graph: Graph, cost_options: CostOptions
) -> tuple[Costs | None, list[str]]:
    """Return the costs for a file, and notes; None and a note if no costs are known."""
    if find_named_device(device_name) is None and not cost_options.is_given:
        return None, [
            "times and energies were not checked: give --device or --profile for the costs"
        ]
    costs, notes = read_file_costs(device_name, graph, cost_options)
    return costs, [note + MEASURED_COSTS for note in notes]


def find_named_device(name: str | None) -> str | None:
    """Return the name of a device if it is built-in or an existing file, else None."""
    from poetmodel.device.io import device_names

    return name if name is None or name in device_names() or Path(name).is_file() else None


# -- schedule files ----------------------------------------------------------------------------


def verify_document(
    document: ScheduleDocument,
    graph: Graph,
    cost_options: CostOptions,
    limits: Limits,
    own: ConstraintOptions,
) -> VerifiedSchedule:
    """Verify a schedule file against its problem and its statements (`ScheduleDocument.claims`).

    Changed `limits` replace the problem of the file; then only metrics are compared, and only those
    of RAM if costs, counted time or commits differ. Violations are in the verdict; pairs that the
    graph lacks are dropped from the returned schedule.
    """
    from poetmodel.planner import verify
    from poetmodel.report.subject import VerifiedSchedule, drop_unknown_pairs
    from poetmodel.schedule import check_identity

    check_identity(graph, document.schedule)
    check_names(document.schedule.identity, graph)
    costs, notes = costs_for_verification(document.device, graph, cost_options)
    notes[:0] = document.notes
    stated_metrics = document.claims
    changed_options = options.changed_options(limits, own)
    if changed_options:
        if costs is None:
            raise InputError(NO_COSTS)
        notes.append(f"{', '.join(changed_options)}: the limits of the file were not checked")
        from poetmodel.problem.io import state_problem

        problem = state_problem(graph, costs, limits, own.files)
        has_same_terms = document.problem is None or all(  # energy depends on both
            getattr(document.problem, name) == getattr(problem, name)
            for name in ("deadline_counts", "commit")
        )
        stated_metrics = document.stated_metrics if has_same_terms else document.memory_claims()
    else:
        if document.problem is None:
            notes.append("the file states no problem: no budget and no deadline were checked")
        problem = _stated_problem(document, graph, costs)
    schedule, claims = document.schedule, stated_metrics
    has_other_costs = costs is not None and document.has_other_costs(problem)
    if costs is None or has_other_costs:
        stated_metrics = document.memory_claims()
    with infrequent_gc():
        verdict = verify(problem, schedule, stated=stated_metrics)
    if costs is not None:
        notes += document.compare_claims(problem, verdict.simulation, claims)
    return VerifiedSchedule(
        document=document.without_proofs() if has_other_costs else document,
        schedule=schedule if verdict.valid else drop_unknown_pairs(graph, schedule),
        problem=problem,
        costs=None if costs is None else problem.costs,
        verdict=verdict,
        notes=tuple(notes),
    )


def _stated_problem(document: ScheduleDocument, graph: Graph, costs: Costs | None) -> Problem:
    """Return the problem stated in a file, or one without limits if the file states none.

    Without costs, all times and energies are 0; limits and constraints on them are dropped.
    """
    from poetmodel.problem import Problem
    from poetmodel.report.subject import zero_costs

    problem_entry = document.problem
    if costs is None:
        costs = zero_costs(graph)
        if problem_entry is not None:
            checkable_rows = [row for row in problem_entry.constraints if not row.needs_costs]
            limits = {"deadline_s": None, "energy_budget_j": None, "constraints": checkable_rows}
            problem_entry = problem_entry.model_copy(update=limits)
    if problem_entry is None:
        return Problem(graph, costs, ram=MAX_BYTES, aux_bytes=MAX_BYTES)
    return problem_entry.to_problem(graph, costs)


def read_valid_schedule(
    path: Path, graph_options: FileGraphOptions, costing: CostOptions
) -> VerifiedSchedule:
    """Read a schedule file, and verify the schedule with its problem and costs.

    Metrics that may be of other costs are only compared in the notes; the document then has no
    proofs. Without a stated problem, the limits are the RAM and storage of the device, if any.
    """
    from poetmodel.planner import verify
    from poetmodel.problem import Problem
    from poetmodel.report.subject import VerifiedSchedule
    from poetmodel.schedule import check_identity
    from poetmodel.schedule.document import load_document

    document = load_document(path)
    graph = resolve_graph(graph_options, document.schedule.identity, source=path).graph
    try:
        check_identity(graph, document.schedule)
        costs, notes = read_file_costs(document.device, graph, costing)
        if document.problem is not None:
            problem = document.problem.to_problem(graph, costs)
        else:
            notes.append("the file states no problem: only the limits of the device hold")
            problem = Problem(graph, costs, ram=MAX_BYTES if costs.device is None else None)
        verdict = verify(problem, document.schedule)
    except ScheduleError as error:
        raise error.with_prefix(str(path)) from None
    if verdict.violations:
        raise ScheduleError(f"{path}: is not valid: {fault}" for fault in verdict.violations)
    notes[:0] = document.notes
    cost_notes = list(document.compare_claims(problem, verdict.simulation, document.claims))
    notes += cost_notes
    return VerifiedSchedule(
        document=document.without_proofs() if cost_notes else document,
        schedule=document.schedule,
        problem=problem,
        costs=problem.costs,
        verdict=verdict,
        notes=tuple(f"{path}: {note}" for note in notes),
    )


# -- files to write ----------------------------------------------------------------------------


def check_outputs(*outputs: tuple[str, Path | None], inputs: tuple[str | None, ...] = ()) -> None:
    """Raise `InputError` unless output files can be written and differ from inputs and each other.

    `inputs` are paths or other names; only existing files are compared. A file of ``--plot`` must
    have the suffix of a picture whose libraries are installed.
    """
    from poetmodel.files import check_writable

    option_by_path: dict[str, str] = {}
    for option, path in outputs:
        if path is None:
            continue
        if option == "--plot":
            from poetmodel.report.drawing import check_picture

            check_picture(path)
        real_path = realpath(path)
        if real_path in option_by_path:
            raise InputError(
                f"{option} {path}: {option_by_path[real_path]} already names this file; give "
                "another name"
            )
        for input_path in inputs:
            if (
                input_path is not None
                and path.exists()
                and Path(input_path).exists()
                and path.samefile(input_path)
            ):
                raise InputError(f"{option} {path}: this is an input file; give another name")
        check_writable(path)
        option_by_path[real_path] = option
