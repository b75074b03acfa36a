"""The training graph: operations in execution order."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, shown
from poetmodel.graph.conversion import digraph_to_dict, to_networkx
from poetmodel.graph.io import (
    FORMAT,
    VERSIONS,
    canonical_json,
    graph_defaults,
    graph_fields,
    node_to_dict,
    read_document,
    settings_of,
    write_document,
)
from poetmodel.graph.node import Node
from poetmodel.graph.validation import structure_faults, value_faults
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    import networkx

    from poetmodel.graph.node import Tensor

INT8_FRONT: Final = "int8 front: exact against its definition, not against float"
"""What results of a network say whose first layers are quantized."""
INT8_WEIGHTS: Final = (
    "int8 weights, trained by quantization-aware scaling: not the numbers of float training"
)
"""Label of results of a network whose int8 weights train."""
_INT8: Final = "q8_"
"""How the operators of layers in int8 begin."""
_OF_INT8_WEIGHTS: Final = frozenset(
    ("quantized_sgd", "q8_pointwise_weight_gradient", "q8_depthwise_weight_gradient",
     "q8_convolution_weight_gradient")
)  # fmt: skip
"""Operators of layers whose int8 weights train."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A training graph: nodes in one fixed topological order.

    Nodes are numbered by position, tensors in the order of their nodes, then outputs. With one
    output each, tensor ``i`` is node ``i`` (POET, ICML 2022, section 5.1).

    Raises
    ------
    GraphError
        With every fault found: names used twice, inputs that are unknown or come later, sizes
        outside 0..2^53, and so on.

    Examples
    --------
    >>> from poetmodel.graph import operation
    >>> graph = Graph(name="pair", nodes=(operation("a", output_bytes=8),
    ...                                   operation("b", output_bytes=4, inputs=("a",))))
    >>> graph.inputs_of[1], graph.users_of[0]
    ((0,), (1,))
    """

    name: str
    """Name for users."""
    nodes: tuple[Node, ...]
    """The operations in execution order."""
    batch_size: int = 1
    """Samples per training step."""
    dtype: str = "float32"
    """Element type of the tensors, for people."""
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory held for the whole step, by kind: parameters, gradients, optimizer [B]."""
    parameters: int | None = None
    """Number of trainable parameters, where known."""
    forward_macs: int | None = None
    """Multiply-accumulates of the forward pass: convolutions, linear layers, matrix products."""
    kernels: str | None = None
    """Whose kernels compute it: ``pytorch``, ``exported`` (the C of `poetmodel.export`), or None
    where that is not known. No part of its identity."""

    def __post_init__(self) -> None:
        self._freeze()
        faults = value_faults(self.to_dict(defaults=True)) or structure_faults(self.nodes)
        if faults:
            raise GraphError(faults)

    @classmethod
    def of_valid(cls, **values: Any) -> Graph:
        """Make a graph of all its fields, in which `poetmodel.graph.validation` found no fault."""
        graph = object.__new__(cls)
        for name, value in values.items():
            object.__setattr__(graph, name, value)
        graph._freeze()
        return graph

    def _freeze(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        object.__setattr__(self, "resident_bytes", MappingProxyType(dict(self.resident_bytes)))

    def __hash__(self) -> int:
        return hash((self.name, self.nodes))

    def __repr__(self) -> str:
        size = format_bytes(sum(self.tensor_bytes))
        counts = f"{len(self.nodes)} nodes, {len(self.tensors)} tensors of {size}"
        return brief(self, shown(self.name), counts, f"batch {self.batch_size}")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["resident_bytes"] = dict(self.resident_bytes)
        return partial(type(self).of_valid, **values), ()

    @property
    def exactness(self) -> str:
        """Label of results whose numbers are not those of a float network; empty for others."""
        if any(node.op in _OF_INT8_WEIGHTS for node in self.nodes):
            return INT8_WEIGHTS
        return INT8_FRONT if any(node.op.startswith(_INT8) for node in self.nodes) else ""

    # -- numbering ---------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of their nodes, then outputs."""
        return tuple(tensor for node in self.nodes for tensor in node.outputs)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Size of each tensor [B]."""
        return tuple(tensor.bytes for tensor in self.tensors)

    @cached_property
    def node_index(self) -> Mapping[str, int]:
        """Position of each node, by name."""
        return MappingProxyType({node.name: k for k, node in enumerate(self.nodes)})

    @cached_property
    def tensor_index(self) -> Mapping[str, int]:
        """Number of each tensor, by name."""
        return MappingProxyType({tensor.name: i for i, tensor in enumerate(self.tensors)})

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """For each tensor the node that makes it (``node(i)`` of the notation)."""
        return tuple(k for k, node in enumerate(self.nodes) for _ in node.outputs)

    @cached_property
    def outputs_of(self) -> tuple[tuple[int, ...], ...]:
        """For each node the tensors it makes (``out(k)``)."""
        outputs: list[tuple[int, ...]] = []
        first = 0
        for node in self.nodes:
            outputs.append(tuple(range(first, first + len(node.outputs))))
            first += len(node.outputs)
        return tuple(outputs)

    @cached_property
    def inputs_of(self) -> tuple[tuple[int, ...], ...]:
        """For each node the tensors it reads, each once, in the order named (``in(k)``)."""
        index = self.tensor_index
        return tuple(
            tuple(dict.fromkeys(index[name] for name in node.inputs)) for node in self.nodes
        )

    @cached_property
    def users_of(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor the nodes that read it, ascending."""
        users: list[list[int]] = [[] for _ in self.tensors]
        for k, inputs in enumerate(self.inputs_of):
            for i in inputs:
                users[i].append(k)
        return tuple(tuple(nodes) for nodes in users)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """For each node all its outputs together [B]."""
        return tuple(node.output_bytes for node in self.nodes)

    @cached_property
    def step_bytes(self) -> tuple[int, ...]:
        """For each node its working set: inputs, outputs and workspace together [B].

        A replacement takes no room of its own, and every output that may take over the memory of an
        input does.
        """
        sizes = self.tensor_bytes
        return tuple(
            sum(sizes[i] for i in inputs) + made_bytes + node.workspace_bytes - sum(shared.values())
            for node, inputs, made_bytes, shared in zip(
                self.nodes, self.inputs_of, self.made_bytes, self.shared_bytes_of, strict=True
            )
        )

    # -- state and in-place operators (graphs of version 2) ------------------------------------

    @cached_property
    def version(self) -> int:
        """Version of the file that can hold it: 2 with state or in-place operators, else 1."""
        return 2 if any(node.needs_version_2 for node in self.nodes) else 1

    @cached_property
    def state_tensors(self) -> tuple[int, ...]:
        """The tensors whose values outlive the step, ascending."""
        return tuple(i for i, k in enumerate(self.node_of) if self.nodes[k].is_state)

    @cached_property
    def starts_on_storage(self) -> tuple[bool, ...]:
        """For each tensor whether it lies on storage from the start: a sample there, or state.

        Of state that holds where it is not resident.
        """
        return tuple(self.nodes[k].on_aux or self.nodes[k].is_state for k in self.node_of)

    @cached_property
    def on_aux(self) -> frozenset[int]:
        """The tensors of nodes that are `Node.on_aux`: samples on storage."""
        return frozenset(i for i, k in enumerate(self.node_of) if self.nodes[k].on_aux)

    @cached_property
    def replacement_of(self) -> Mapping[int, int]:
        """For each state tensor that has one, the tensor that replaces it."""
        index = self.tensor_index
        return MappingProxyType(
            {
                index[tensor.replaces]: i
                for i, tensor in enumerate(self.tensors)
                if tensor.replaces is not None
            }
        )

    @cached_property
    def last_stages(self) -> tuple[int, ...]:
        """For each node the last stage in which it may run: where state that it reads is replaced.

        For a node that holds state, that in which the state is replaced.
        """
        last = [len(self.nodes) - 1] * len(self.nodes)
        for old, new in self.replacement_of.items():
            for k in (self.node_of[old], *self.users_of[old]):
                last[k] = min(last[k], self.node_of[new])
        return tuple(last)

    def last_page_in(self, i: int) -> int:
        """Return the last stage in which tensor `i` may be paged in: that of its replacement."""
        k = self.node_of[i]
        return self.last_stages[k] if self.nodes[k].is_state else len(self.nodes) - 1

    @cached_property
    def state_of(self) -> Mapping[int, int]:
        """For each replacement, the state tensor that it replaces."""
        return MappingProxyType({new: old for old, new in self.replacement_of.items()})

    @cached_property
    def in_place_of(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each node the outputs that may take over the memory of an input, each with it."""
        index = self.tensor_index
        return tuple(tuple((index[y], index[x]) for y, x in node.in_place) for node in self.nodes)

    @cached_property
    def made_bytes(self) -> tuple[int, ...]:
        """For each node its outputs less its replacements, which take no room of their own [B]."""
        return tuple(
            sum(tensor.bytes for tensor in node.outputs if tensor.replaces is None)
            for node in self.nodes
        )

    @property
    def state_bytes(self) -> int:
        """All state tensors together [B]."""
        return sum(self.tensor_bytes[i] for i in self.state_tensors)

    @cached_property
    def shared_bytes_of(self) -> tuple[Mapping[int, int], ...]:
        """For each node what writing over inputs that die at its step saves, by input [B]."""
        sizes = self.tensor_bytes
        return tuple(
            {x: min(sizes[x], sizes[y]) for y, x in pairs if sizes[x] and sizes[y]}
            for pairs in self.in_place_of
        )

    def shared_bytes(self, k: int, dying: Collection[int]) -> int:
        """Return the bytes that step `k` saves in place if these tensors die there [B]."""
        return sum(size for x, size in self.shared_bytes_of[k].items() if x in dying)

    @property
    def n_edges(self) -> int:
        """Number of (tensor, reader) pairs."""
        return sum(len(inputs) for inputs in self.inputs_of)

    @property
    def flops(self) -> int:
        """FLOP of a single pass."""
        return sum(node.flops for node in self.nodes)

    @property
    def total_resident_bytes(self) -> int:
        """All resident bytes together [B]."""
        return sum(self.resident_bytes.values())

    # -- files and other libraries -------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a ``*.graph.json`` file, or the graph in a ``*.step.json`` file.

        Raises
        ------
        GraphError
            If the file is missing or is no such file; with every fault found in it, each with its
            place.
        """
        document, source, repeated = read_document(path)
        return cls.from_dict(document, source=source, faults=repeated)

    @classmethod
    def from_dict(
        cls, document: object, *, source: str = "graph", faults: Iterable[str] = ()
    ) -> Graph:
        """Make a graph from the content of a graph file, as `to_dict` returns it.

        Parameters
        ----------
        document : object
            The content.
        source : str
            Starts every message.
        faults : iterable of str
            Faults that are known already.

        Raises
        ------
        GraphError
            With every fault found.
        """
        stated = graph_fields(document, source=source, faults=faults)
        return cls.of_valid(**{**graph_defaults(cls), **stated})

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Return the content of a graph file, with or without the keys that have their `defaults`.

        It is made of what JSON knows only, and nothing in it is shared with the graph.
        """
        nodes: tuple[object, ...] = self.nodes  # not checked yet
        newer = any(isinstance(node, Node) and node.needs_version_2 for node in nodes)
        document: dict[str, Any] = {"format": FORMAT, "version": VERSIONS[newer], "name": self.name}
        document |= settings_of(self, graph_defaults(type(self)), defaults=defaults)
        if "resident_bytes" in document:
            document["resident_bytes"] = dict(self.resident_bytes)
        document["nodes"] = [node_to_dict(node, defaults=defaults) for node in nodes]
        return document

    def save(self, path: str | Path) -> None:
        """Write a ``*.graph.json`` file; where it cannot be written, nothing is changed."""
        write_document(self.to_dict(), path)

    @classmethod
    def from_networkx(cls, digraph: networkx.DiGraph[Any]) -> Graph:
        """Read a `networkx.DiGraph`; see `poetmodel.graph.conversion.digraph_to_dict`."""
        return cls.from_dict(digraph_to_dict(digraph), source="digraph")

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """Write a `networkx.DiGraph`; see `poetmodel.graph.conversion.to_networkx`."""
        return to_networkx(self.to_dict(defaults=True), self.nodes)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON (UTF-8), hexadecimal."""
        return hashlib.sha256(
            canonical_json(self.to_dict(defaults=True)).encode("utf-8")
        ).hexdigest()
