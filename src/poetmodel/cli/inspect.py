"""``poetmodel inspect``: the size of a graph and the RAM that it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from poetmodel.cli import graphs, options
from poetmodel.cli.output import count, figures, listing, print_json, show
from poetmodel.graph.catalogue import InputShape
from poetmodel.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer
    from rich.console import RenderableType
    from rich.table import Table

    from poetmodel.graph import Graph

EPILOG: Final = "Example: poetmodel inspect resnet18-cifar"

LARGEST: Final = 8
"""Most tensors in a list."""


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("inspect", epilog=EPILOG)(inspect)


def inspect(
    model: options.ModelArgument = None,
    *,
    graph: options.GraphOption = None,
    batch: graphs.BatchOption = None,
    image: graphs.ImageOption = None,
    sequence: graphs.SequenceOption = None,
    json: options.JsonOption = False,
    quiet: options.QuietOption = False,  # noqa: ARG001 - acts while it is parsed
) -> None:
    """Show the size of a graph, its keep-all peak and its minimum RAM."""
    training_graph = graphs.read_graph(
        model, graph, InputShape(batch=batch, image=image, sequence=sequence)
    )
    if json:
        print_json(as_dict(training_graph))
        return
    show(*tables(training_graph))


def as_dict(graph: Graph) -> dict[str, Any]:
    """Return the facts of a graph as plain values, None where its file does not state them."""
    from poetmodel.graph import checkpoint_all_profile, floor, inference_profile

    lowest, profile = floor(graph), checkpoint_all_profile(graph)
    forward = inference_profile(graph)
    fullest = None if forward is None else max(forward, key=forward.__getitem__)
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
        "tensor_bytes": sum(graph.tensor_bytes),
        "checkpoint_all_peak_bytes": max(profile),
        "checkpoint_all_peak_node": graph.nodes[profile.index(max(profile))].name,
        "inference_peak_bytes": None if forward is None else max(forward.values()),
        "inference_peak_node": None if fullest is None else graph.nodes[fullest].name,
        "floor_bytes": lowest.bytes,
        "floor_node": graph.nodes[lowest.node].name,
        "floor_inputs": [graph.tensors[i].name for i in graph.inputs_of[lowest.node]],
        "floor_outputs": [tensor.name for tensor in graph.nodes[lowest.node].outputs],
        "phases": _phases(graph),
    }


def tables(graph: Graph) -> tuple[RenderableType, ...]:
    """Return the tables about a graph, for people."""
    size = figures(graph.name, _figures(graph, as_dict(graph)))
    return (size, "", _largest_tensors(graph)) if graph.tensors else (size,)


def _phases(graph: Graph) -> dict[str, dict[str, int]]:
    """Return the nodes, output bytes and FLOP of each phase of a graph, in execution order."""
    phases: dict[str, dict[str, int]] = {}
    for node in graph.nodes:
        entry = phases.setdefault(str(node.phase), {"nodes": 0, "output_bytes": 0, "flops": 0})
        entry["nodes"] += 1
        entry["output_bytes"] += node.output_bytes
        entry["flops"] += node.flops
    return phases


def _figures(graph: Graph, facts: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    yield "batch", f"{graph.batch_size}", f"elements are {graph.dtype}"
    yield "nodes", f"{facts['nodes']:,}", f"{facts['tensors']:,} tensors, {facts['edges']:,} edges"
    for phase, entry in facts["phases"].items():
        yield (
            f"  {phase}",
            f"{entry['nodes']:,}",
            f"{format_bytes(entry['output_bytes'])} of outputs, {count(entry['flops'])}FLOP",
        )
    yield "FLOP", count(facts["flops"]), "of a single pass: every node computed once"
    yield "forward MACs", count(facts["forward_macs"]), "convolutions and matrix products"
    yield "parameters", count(facts["parameters"]), ""
    kinds = ", ".join(
        f"{kind} {format_bytes(b)}" for kind, b in facts["resident_bytes"].items() if b
    )
    yield "resident RAM", format_bytes(graph.total_resident_bytes), kinds
    peak_bytes = facts["checkpoint_all_peak_bytes"]
    yield (
        "keep-all",
        format_bytes(peak_bytes),
        f"peak if every tensor is kept until its last use, at {facts['checkpoint_all_peak_node']}",
    )
    yield "inference", *_inference(facts)
    share = f", {facts['floor_bytes'] / peak_bytes:.1%} of the keep-all peak" if peak_bytes else ""
    yield "minimum RAM", format_bytes(facts["floor_bytes"]), f"no schedule needs less{share}"
    yield "  needed by", "", facts["floor_node"]
    node = graph.nodes[graph.node_index[facts["floor_node"]]]
    for verb, names in (
        ("  reads", facts["floor_inputs"]),
        ("  writes", [tensor.name for tensor in node.outputs]),
    ):
        for name in names[:LARGEST]:
            yield verb, format_bytes(graph.tensor_bytes[graph.tensor_index[name]]), name
        if len(names) > LARGEST:
            yield verb, "", f"and {len(names) - LARGEST:,} more"
    if node.workspace_bytes:
        yield "  workspace", format_bytes(node.workspace_bytes), ""


def _inference(facts: dict[str, Any]) -> tuple[str, str]:
    """Return the peak of the forward pass alone, and how many times as much training takes."""
    inference_bytes, peak_bytes = facts["inference_peak_bytes"], facts["checkpoint_all_peak_bytes"]
    if inference_bytes is None:
        return "unknown", "the phases of the nodes do not mark the forward pass"
    times = ""
    if inference_bytes:
        times = f"; training takes {peak_bytes / inference_bytes:.3g} times as much"
    return (
        format_bytes(inference_bytes),
        f"peak of the forward pass alone, at {facts['inference_peak_node']}{times}",
    )


def _largest_tensors(graph: Graph) -> Table:
    ranked = sorted(range(len(graph.tensors)), key=lambda i: (-graph.tensor_bytes[i], i))[:LARGEST]
    rows = (
        (
            graph.tensors[i].name,
            graph.nodes[graph.node_of[i]].op,
            str(graph.nodes[graph.node_of[i]].phase),
            format_bytes(graph.tensor_bytes[i]),
            f"{len(graph.users_of[i])}",
        )
        for i in ranked
    )
    heads = ("tensor", "made by", "phase", "size", "readers")
    return listing("Largest tensors", heads, rows, left=3, whole_names=False)
