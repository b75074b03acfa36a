"""``poetmodel inspect``, ``models``, ``devices``, ``state``: graphs, devices, exported state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import completion
from poetmodel.cli.inputs import (
    device_warnings,
    extra_ram_bytes,
    read_device,
    read_given_step,
    read_graph,
    warn_about_kernels,
)
from poetmodel.cli.options import (
    REQUIRED,
    GraphOptions,
    OutputOptions,
    argument,
    command,
    graph_option,
    group,
)
from poetmodel.cli.output import fact_table, listing
from poetmodel.cli.reply import Reply
from poetmodel.device.hardware import device_quantities
from poetmodel.device.ram import DeviceRam, floor_ram_use, keep_all_ram_use, make_gauge
from poetmodel.report.presenter import (
    Fact,
    format_count,
    format_device_quantity,
    format_items,
    gauge_fact,
    text_fact,
    value_at_path,
)
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from poetmodel.device import Device
    from poetmodel.graph import Graph


MAX_TENSORS: Final = 8
"""Maximum number of tensors that a table lists as largest, as inputs or as outputs."""


@group
class DeviceOption:
    """The device on which the graph is to be trained."""

    device: str | None = graph_option(
        None,
        "--device NAME|FILE",
        "Also show how much RAM of this device the keep-all peak and the minimum RAM use.",
    )


@command("poetmodel inspect resnet18-cifar")
def inspect(
    source: GraphOptions,
    device_option: DeviceOption,
    output: OutputOptions,  # noqa: ARG001 - read where replies are printed
) -> Reply:
    """Show the size of a graph, its keep-all peak and its minimum RAM."""
    step, device = read_given_step(source), read_device(device_option.device)
    graph = read_graph(source) if step is None else step.graph
    warn_about_kernels(graph, device)
    reserved_values = {} if step is None else {"reserved_bytes": extra_ram_bytes(step)}
    return Reply(
        document=lambda: graph_values(graph, device) | reserved_values,
        text=_graph_text(graph, device, reserved_values),
    )


def _graph_text(
    graph: Graph, device: Device | None, reserved_values: dict[str, int]
) -> Iterator[str | RenderableType]:
    yield from graph_tables(graph, device)
    if reserved_values:
        reserved_text = format_bytes(reserved_values["reserved_bytes"])
        yield (
            f"graph of the exported kernels; its C needs {reserved_text} more for inputs, stack "
            "and runtime, which --ram of 'poetmodel export' includes"
        )


@group
class FolderArgument:
    """The exported program."""

    folder: Path = argument(REQUIRED, "FOLDER", "A folder that 'poetmodel export' made.")


@command("poetmodel state firmware")
def state(
    folder_argument: FolderArgument,
    output: OutputOptions,  # noqa: ARG001 - read where replies are printed
) -> Reply:
    """List the state tensors of exported C, in the order of its C functions and state files."""
    from poetmodel.export.state import load_state_tensors

    tensors = load_state_tensors(folder_argument.folder)
    keys = ("name", "shape", "dtype", "bytes", "home")
    heads = ("name", "home", "type", "shape", "size")
    lines = (
        (
            tensor.name,
            tensor.home,
            tensor.dtype,
            "x".join(map(str, tensor.shape)),
            format_bytes(tensor.bytes),
        )
        for tensor in tensors
    )
    total_bytes = sum(tensor.bytes for tensor in tensors)
    return Reply(
        document=[{key: getattr(tensor, key) for key in keys} for tensor in tensors],
        text=(
            listing(f"State of {folder_argument.folder}", heads, lines, n_text_columns=3),
            f"{format_items(len(tensors), 'tensor')}, {format_bytes(total_bytes)}",
        ),
    )


@group
class ModelArgument:
    """The network to show."""

    name: str | None = argument(
        None, "NAME", "A built-in network.", autocompletion=completion.complete_models
    )


@command("poetmodel models resnet18-cifar")
def models(
    model_argument: ModelArgument,
    output: OutputOptions,  # noqa: ARG001 - read where replies are printed
) -> Reply:
    """List the built-in networks, or show one."""
    from poetmodel.graph.catalogue import describe_model, load_model, model_names

    names = model_names() if model_argument.name is None else (model_argument.name,)
    entries = [
        {"model": name, "description": describe_model(name), **graph_values(load_model(name))}
        for name in names
    ]
    if model_argument.name is not None:
        text = (entries[0]["description"], *graph_tables(load_model(model_argument.name)))
        return Reply(document=entries[0], text=text)
    heads = ("model", "nodes", "parameters", "keep-all", "minimum RAM")
    lines = (
        (
            entry["model"],
            f"{entry['nodes']}",
            format_count(entry["parameters"]),
            format_bytes(entry["checkpoint_all_peak_bytes"]),
            format_bytes(entry["floor_bytes"]),
        )
        for entry in entries
    )
    table = listing("Models", heads, lines)
    return Reply(document=entries, text=(table, "'poetmodel models NAME' shows one of them."))


def graph_values(graph: Graph, device: Device | None = None) -> dict[str, Any]:
    """Return the facts about a graph as JSON values; None for facts that the graph does not state.

    With a device, the minimum RAM is that with state read in place if the device can do so, and its
    name and gauges are included.
    """
    from poetmodel.graph import checkpoint_all_profile, floor, inference_profile

    is_memory_mapped = device is not None and device.is_memory_mapped
    minimum, keep_all_ram = (
        floor(graph, memory_mapped=is_memory_mapped),
        checkpoint_all_profile(graph),
    )
    inference_ram = inference_profile(graph)
    inference_peak_node = (
        None if inference_ram is None else max(inference_ram, key=inference_ram.__getitem__)
    )
    return {
        "name": graph.name,
        "sha256": graph.sha256,
        "nodes": len(graph.nodes),
        "tensors": len(graph.tensors),
        "edges": graph.n_edges,
        "batch_size": graph.batch_size,
        "dtype": graph.dtype,
        "parameters": graph.parameters,
        "forward_macs": graph.forward_macs,
        "flops": graph.flops,
        "resident_bytes": dict(graph.resident_bytes),
        **({"state_bytes": graph.state_bytes} if graph.version > 1 else {}),
        "tensor_bytes": sum(graph.tensor_bytes),
        "checkpoint_all_peak_bytes": max(keep_all_ram),
        "checkpoint_all_peak_node": graph.nodes[keep_all_ram.index(max(keep_all_ram))].name,
        "inference_peak_bytes": None if inference_ram is None else max(inference_ram.values()),
        "inference_peak_node": None
        if inference_peak_node is None
        else graph.nodes[inference_peak_node].name,
        "floor_bytes": minimum.bytes,
        "floor_node": graph.nodes[minimum.node].name,
        "floor_inputs": [graph.tensors[i].name for i in graph.inputs_of[minimum.node]],
        "floor_outputs": [tensor.name for tensor in graph.nodes[minimum.node].outputs],
        "phases": _phase_totals(graph),
        **_gauge_values(graph, device),
    }


def compare_device_ram(graph: Graph, device: Device) -> tuple[DeviceRam | None, DeviceRam | None]:
    """Return the use of device RAM by (keep-all with all state in RAM, the minimum RAM)."""
    min_ram = floor_ram_use(graph, memory_mapped=device.is_memory_mapped)
    return DeviceRam.compare(device, graph, keep_all_ram_use(graph)), DeviceRam.compare(
        device, graph, min_ram
    )


def _gauge_values(graph: Graph, device: Device | None) -> dict[str, Any]:
    """Return the name of a device and its gauges for keep-all and for the minimum RAM, or {}.

    The key ``trains`` of the minimum is None if it fits, because no schedule is known.
    """
    if device is None:
        return {}
    keep_all, min_ram = map(make_gauge, compare_device_ram(graph, device))
    unknown_verdict = {} if min_ram is None or not min_ram["trains"] else {"trains": None}
    return {
        "device": device.short_name,
        "device_ram": {"keep_all": keep_all, "floor": (min_ram or {}) | unknown_verdict},
    }


def graph_tables(graph: Graph, device: Device | None = None) -> tuple[RenderableType, ...]:
    """Return the tables of a graph with a blank line between: its facts, its largest tensors."""
    facts = [*_graph_facts(graph, graph_values(graph, device), device)]
    facts_table = fact_table(graph.name, facts)
    return (facts_table, "", _largest_tensors(graph)) if graph.tensors else (facts_table,)


def _phase_totals(graph: Graph) -> dict[str, dict[str, int]]:
    """Return numbers of nodes, bytes of outputs, and FLOP, by the name of the phase."""
    phases: dict[str, dict[str, int]] = {}
    for node in graph.nodes:
        entry = phases.setdefault(str(node.phase), {"nodes": 0, "output_bytes": 0, "flops": 0})
        entry["nodes"] += 1
        entry["output_bytes"] += node.output_bytes
        entry["flops"] += node.flops
    return phases


def _graph_facts(graph: Graph, values: dict[str, Any], device: Device | None) -> Iterator[Fact]:
    """Yield the `graph_values` of a graph for a table, with gauges if a device is given."""
    yield text_fact("batch", f"{graph.batch_size}", f"elements are {graph.dtype}")
    sizes = f"{values['tensors']:,} tensors, {values['edges']:,} edges"
    yield text_fact("nodes", f"{values['nodes']:,}", sizes)
    for phase, entry in values["phases"].items():
        totals_text = (
            f"{format_bytes(entry['output_bytes'])} of outputs, {format_count(entry['flops'])}FLOP"
        )
        yield text_fact(f"  {phase}", f"{entry['nodes']:,}", totals_text)
    yield text_fact(
        "FLOP", format_count(values["flops"]), "of a single pass: every node computed once"
    )
    yield text_fact(
        "forward MACs", format_count(values["forward_macs"]), "convolutions and matrix products"
    )
    yield text_fact("parameters", format_count(values["parameters"]))
    kind_texts = ", ".join(
        f"{kind} {format_bytes(size)}" for kind, size in values["resident_bytes"].items() if size
    )
    yield text_fact("resident RAM", format_bytes(graph.total_resident_bytes), kind_texts)
    if "state_bytes" in values:
        update_text = f"{len(graph.state_tensors):,} tensors, {len(graph.replacement_of):,} updated"
        yield text_fact("state", format_bytes(values["state_bytes"]), update_text)
    peak_bytes = values["checkpoint_all_peak_bytes"]
    yield text_fact(
        "keep-all",
        format_bytes(peak_bytes),
        f"peak if every tensor is kept until its last use, at {values['checkpoint_all_peak_node']}",
    )
    yield text_fact("inference", *_inference_texts(values))
    ratio_text = (
        f", {values['floor_bytes'] / peak_bytes:.1%} of the keep-all peak" if peak_bytes else ""
    )
    condition_text = ", but for state on memory-mapped storage" if graph.state_tensors else ""
    if device is not None and graph.state_tensors:
        condition_text = ", state read in place" if device.is_memory_mapped else ""
    note = f"no schedule needs less{ratio_text}{condition_text}"
    yield text_fact("minimum RAM", format_bytes(values["floor_bytes"]), note)
    yield text_fact("  needed by", "", values["floor_node"])
    for label, names in (
        ("  reads", values["floor_inputs"]),
        ("  writes", values["floor_outputs"]),
    ):
        for name in names[:MAX_TENSORS]:
            i = graph.tensor_index[name]
            memory_remark = (
                _mapped_remark(graph, i, device)
                if label == "  reads"
                else _shared_memory_remark(graph, i)
            )
            yield text_fact(label, format_bytes(graph.tensor_bytes[i]), name + memory_remark)
        if len(names) > MAX_TENSORS:
            yield text_fact(label, "", f"and {len(names) - MAX_TENSORS:,} more")
    workspace_bytes = graph.nodes[graph.node_index[values["floor_node"]]].workspace_bytes
    if workspace_bytes:
        yield text_fact("  workspace", format_bytes(workspace_bytes))
    if device is not None:
        yield from _gauge_facts(graph, device)


def _mapped_remark(graph: Graph, i: int, device: Device | None) -> str:
    """Return a remark on state that the core reads in place from storage, else ""."""
    is_mapped = device is not None and device.is_memory_mapped and i in graph.state_tensors
    return ", read in place" if is_mapped else ""


def _shared_memory_remark(graph: Graph, i: int) -> str:
    """Return a remark on an output that can overwrite an input or replaces state, else ""."""
    in_place_pairs = graph.in_place_of[graph.node_of[i]]
    overwritten_tensor = {**dict(in_place_pairs), **graph.state_of}.get(i)
    return (
        ""
        if overwritten_tensor is None
        else f", in the memory of {graph.tensors[overwritten_tensor].name}"
    )


def _gauge_facts(graph: Graph, device: Device) -> Iterator[Fact]:
    """Yield the RAM of a device with a verdict, and its use by keep-all and the minimum RAM."""
    keep_all, min_ram = compare_device_ram(graph, device)
    verdict = "keep-all does not fit, a schedule may"
    if min_ram is not None and not min_ram.fits:
        verdict = "no schedule fits"
    elif keep_all is not None and keep_all.fits:
        verdict = "keep-all fits"
    yield text_fact("device RAM", format_bytes(device.ram_bytes), verdict)
    yield gauge_fact("", "  keep-all", keep_all)
    yield gauge_fact("", "  minimum", min_ram)


def _inference_texts(values: dict[str, Any]) -> tuple[str, str]:
    """Return the peak RAM of the forward pass alone, and a note with the node of this peak."""
    inference_bytes, peak_bytes = (
        values["inference_peak_bytes"],
        values["checkpoint_all_peak_bytes"],
    )
    if inference_bytes is None:
        return "unknown", "the phases of the nodes do not mark the forward pass"
    ratio_text = ""
    if inference_bytes:
        ratio_text = f"; training takes {peak_bytes / inference_bytes:.3g} times as much"
    return (
        format_bytes(inference_bytes),
        f"peak of the forward pass alone, at {values['inference_peak_node']}{ratio_text}",
    )


def _largest_tensors(graph: Graph) -> Table:
    """Return a table of the `MAX_TENSORS` largest tensors with producer, phase and readers."""
    largest = sorted(range(len(graph.tensors)), key=lambda i: (-graph.tensor_bytes[i], i))[
        :MAX_TENSORS
    ]
    lines = (
        (
            graph.tensors[i].name,
            graph.nodes[graph.node_of[i]].op,
            str(graph.nodes[graph.node_of[i]].phase),
            format_bytes(graph.tensor_bytes[i]),
            f"{len(graph.users_of[i])}",
        )
        for i in largest
    )
    heads = ("tensor", "made by", "phase", "size", "readers")
    return listing("Largest tensors", heads, lines, n_text_columns=3, whole_names=False)


# -- devices -----------------------------------------------------------------------------------


@group
class DeviceArgument:
    """The device to show."""

    name: str | None = argument(
        None,
        "NAME",
        "A built-in device, or a device file, *.toml.",
        autocompletion=completion.complete_devices,
    )


@command("poetmodel devices rpi4b")
def devices(
    device_argument: DeviceArgument,
    output: OutputOptions,  # noqa: ARG001 - read where replies are printed
) -> Reply:
    """List the built-in devices, or show one or a device file."""
    from poetmodel.device import Device
    from poetmodel.device.io import device_names

    if device_argument.name is None:
        loaded_devices = [Device.load(key) for key in device_names()]
        heads = ("device", "core", "RAM", "computes", "transfers")
        table = listing("Devices", heads, map(_device_row, loaded_devices), n_text_columns=2)
        return Reply(document=[device_dict(device) for device in loaded_devices], text=(table,))
    device = Device.load(device_argument.name)
    return Reply(
        document=device_dict(device), text=_device_text(device), warnings=device_warnings(device)
    )


def _device_text(device: Device) -> Iterator[Table | Text]:
    """Yield the table of a device, and the sources of its values."""
    from rich.text import Text

    yield fact_table(device.name, _device_facts(device))
    if device.source:
        yield from map(Text, ("", "Sources of the values:", device.source.strip()))
    if device.cycle_model is not None and device.cycle_model.core is not None:
        core = device.cycle_model.core
        yield Text(f"{core.name}, instructions a cycle: {core.source}.")


def device_dict(device: Device) -> dict[str, Any]:
    """Return a device as JSON values: ``key`` (name or path it was loaded by), then its fields."""
    from dataclasses import asdict

    values = asdict(device)
    return {"key": values.pop("key"), **values}


def _device_row(device: Device) -> tuple[str, ...]:
    """Return key, core, RAM, speed and transfer mode of a device as texts."""
    storage = device.storage
    return (
        device.key,
        device.core,
        format_bytes(device.ram_bytes),
        f"{format_count(device.compute.flops_per_s)}FLOP/s",
        "no storage" if storage is None else str(storage.mode),
    )


def _device_facts(device: Device) -> Iterator[Fact]:
    """Yield the known properties of a device for a table, with their units."""
    yield text_fact("key", device.key, "the name for --device")
    yield text_fact("core", device.core)
    model = device.cycle_model
    if model is not None:
        yield text_fact("exported C", model.rate_text, f"{model.origin}; {model.label}")
    values = device_dict(device)
    compute, storage = device.compute, device.storage
    notes = {"compute.cache_line_bytes": "of the data cache"}
    if compute.flops_per_j is not None:
        implied_w = compute.flops_per_s / compute.flops_per_j
        notes["compute.flops_per_j"] = f"implies {implied_w:.3g} W"
    for value_path, quantity in device_quantities():
        value = value_at_path(values, value_path)
        if value is not None:
            yield text_fact(
                quantity.name,
                format_device_quantity(value, unit=quantity.unit),
                notes.get(value_path, ""),
            )
    if storage is None:
        yield text_fact("transfers", "none", "there is no storage")
        return
    if device.aux_bytes is None:
        yield text_fact("storage", "unlimited")
    flags_by_trait = (
        ("memory-mapped", storage.memory_mapped),
        ("lost without power", storage.volatile),
    )
    traits = [
        trait
        for trait, is_set in (*flags_by_trait, ("in the flash", device.stores_in_flash))
        if is_set
    ]
    yield text_fact("transfers", str(storage.mode), ", ".join(traits))
