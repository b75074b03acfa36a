"""Profiles of the operations of a graph, cached by all values that they depend on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from poetmodel.torch.cache import NoKeyError, digest, host_key, plain_operations, plain_value
from poetmodel.torch.graph.profiles import OpProfile
from poetmodel.torch.graph.tensors import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from poetmodel.torch.cache import Cache

_ENTRIES: Final = TypeAdapter(list[tuple[int, OpProfile]])
"""Position of each node, and its profile."""


def find_graph_key(graph: fx.Graph, describe: Callable[[], list[Any]]) -> str | None:
    """Return the key of a graph on this host, with the plain values that `describe` returns.

    Shapes are part of it: they may depend on values that a model reads, such as masks. None if
    a value has no key.
    """
    shapes = [
        [tuple(tensor.shape) for tensor in tensors_in(node.meta.get("val"))] for node in graph.nodes
    ]
    with suppress(NoKeyError):
        return digest(host_key(), plain_operations(graph), plain_value(shapes, {}), describe())
    return None


def load_or_measure(
    cache: Cache,
    key: str | None,
    graph: fx.Graph,
    measure: Callable[[], dict[fx.Node, OpProfile]],
) -> dict[fx.Node, OpProfile]:
    """Return the profiles of a graph with a `find_graph_key`: cached, or measured and then cached.

    The cache has those of nodes by their positions. Without a key, nothing is cached.
    """
    nodes = list(graph.nodes)
    content = None if key is None else cache.read("profiles", key)
    with suppress(ValidationError):  # absent or damaged
        entries = _ENTRIES.validate_python(content)
        return {nodes[position]: profile for position, profile in entries}
    profiles = measure()
    if key is not None:
        positions = {node: position for position, node in enumerate(nodes)}
        entries = [(positions[node], profile) for node, profile in profiles.items()]
        cache.write("profiles", key, _ENTRIES.dump_python(entries, mode="json"))
    return profiles
