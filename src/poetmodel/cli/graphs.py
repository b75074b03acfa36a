"""The graph of a command: a built-in network, for some size of its input, or a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from poetmodel.cli import completion
from poetmodel.cli.options import WHAT, whole_number
from poetmodel.errors import InputError
from poetmodel.graph.catalogue import (
    OWN_SHAPE,
    InputShape,
    find_model,
    load_file,
    load_model,
    model_names,
    read_model_or_file,
)

if TYPE_CHECKING:
    from poetmodel.graph import Graph
    from poetmodel.schedule import GraphIdentity

MAX_SIZE: Final = 1_000_000
"""Largest size of a network's input that can be requested."""


def size(text: str | int) -> int:
    """Return the size of a network's input that an option states."""
    return whole_number(text, MAX_SIZE)


def _size_option(option: str, text: str) -> Any:
    return typer.Option(
        option, metavar="N", parser=size, help=text, rich_help_panel=WHAT, show_default=False
    )


BatchOption = Annotated[
    int | None,
    _size_option("--batch", "Samples of a step, for built-in networks. Default: 1."),
]
ImageOption = Annotated[
    int | None,
    _size_option("--image", "Side of square images in pixels, for built-in networks."),
]
SequenceOption = Annotated[
    int | None, _size_option("--sequence", "Tokens of a sample, for built-in networks.")
]
GraphOption = Annotated[
    str | None,
    typer.Option(
        "--graph",
        metavar="FILE|MODEL",
        autocompletion=completion.one(completion.models),
        help="The graph that the schedule is for: a file, or a built-in network. Default: the "
        "built-in network that the file names.",
        rich_help_panel=WHAT,
        show_default=False,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGraph:
    """A graph and how the command line names it."""

    graph: Graph
    """The graph."""
    name: str
    """A built-in network, or a file."""
    shape: InputShape = OWN_SHAPE
    """Sizes of the network's input."""


def read_graph(model: str | None, graph: str | None, shape: InputShape = OWN_SHAPE) -> Graph:
    """Return the graph of a MODEL argument or a ``--graph`` option.

    Parameters
    ----------
    model : str, optional
        Name of a built-in network, or a graph file.
    graph : str, optional
        A graph file.
    shape : InputShape
        Sizes of the input of a built-in network.

    Raises
    ------
    InputError
        If both or neither are given, or the graph cannot be read.
    """
    if model is not None and graph is not None:
        msg = f"MODEL {model!r} and --graph {graph!r} exclude each other: give only one"
        raise InputError(msg)
    if graph is not None:
        return load_file(graph, shape)
    if model is None:
        msg = (
            "no graph: give a MODEL such as resnet18-cifar ('poetmodel models' lists them) or "
            "--graph FILE"
        )
        raise InputError(msg)
    return read_model_or_file(model, shape)


def graph_of(
    graph: str | None, shape: InputShape, identity: GraphIdentity | None, *, source: str
) -> NamedGraph:
    """Return the graph of a schedule or plan: the given one, or else the built-in one of its name.

    Parameters
    ----------
    graph : str, optional
        The ``--graph`` of a command that reads the file.
    shape : InputShape
        Sizes of the input, as given.
    identity : GraphIdentity
        What the file says about its graph.
    source : str
        The file.

    Raises
    ------
    InputError
        If no graph is given and no built-in network is the graph of the file.
    """
    if graph is not None:
        made = read_model_or_file(graph, shape)
        if identity is not None and identity.name == graph and identity.sha256 != made.sha256:
            raise InputError(_of_other_sizes(identity, source))
        return NamedGraph(graph=made, name=graph, shape=shape)
    if identity is None or identity.name not in model_names():
        name = "" if identity is None else f", {identity.name!r}"
        msg = f"no graph: give --graph FILE|MODEL, the graph that {source} is for{name}"
        raise InputError(msg)
    if shape.given:
        return graph_of(identity.name, shape, identity, source=source)
    found = find_model(identity.name, identity.sha256)
    if found is None:
        raise InputError(_of_other_sizes(identity, source))
    return NamedGraph(graph=found[0], name=identity.name, shape=found[1])


def _of_other_sizes(identity: GraphIdentity, source: str) -> str:
    return (
        f"{source}: is for another {identity.name!r} (sha256 {identity.sha256[:12]}...) than the "
        "built-in network; give its sizes with --batch, --image or --sequence, or give --graph FILE"
    )


def graph_of_code(graph: str | None, shape: InputShape, data: bytes, *, source: str) -> Graph:
    """Return the graph of a binary plan: the given one, or the built-in one of its fingerprint.

    Raises
    ------
    InputError
        If no graph is given and no built-in network has the fingerprint.
    """
    if graph is not None:
        return read_model_or_file(graph, shape)
    from poetmodel.plan.binary import stored_fingerprint

    sha256 = stored_fingerprint(data).hex()
    for name in model_names():
        try:
            made = load_model(name, shape)
        except InputError:  # it has no such size
            continue
        if made.sha256.startswith(sha256):
            return made
    msg = (
        f"no graph: {source} is for no built-in network (sha256 {sha256}...); give --graph "
        "FILE|MODEL, or its sizes with --batch, --image or --sequence"
    )
    raise InputError(msg)
