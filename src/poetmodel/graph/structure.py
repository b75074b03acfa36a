"""The training graph: nodes in execution order, with indices of nodes and tensors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, quote
from poetmodel.graph.conversion import digraph_to_dict, to_networkx
from poetmodel.graph.io import (
    FORMAT,
    canonical_json,
    graph_defaults,
    node_to_dict,
    optional_keys,
    parse_graph_fields,
    read_document,
    write_document,
)
from poetmodel.graph.validation import field_faults, structure_faults
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    import networkx

    from poetmodel.graph.node import Node, Tensor

INT8_FRONT: Final = "int8 front: exact against its definition, not against float"
"""Label of results of a network whose first layers are quantized."""
INT8_WEIGHTS: Final = (
    "int8 weights, trained by quantization-aware scaling: not the numbers of float training"
)
"""Label of results of a network that trains int8 weights."""
_INT8_PREFIX: Final = "q8_"
"""Prefix of the names of int8 operators."""
_INT8_WEIGHT_OPERATORS: Final = frozenset(
    ("quantized_sgd", "q8_pointwise_weight_gradient", "q8_depthwise_weight_gradient",
     "q8_convolution_weight_gradient")
)  # fmt: skip
"""Operators that train int8 weights."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A training graph: nodes in one fixed topological order.

    A node's index is its position. Tensors are numbered by node, then by output. If every node has
    one output, tensor ``i`` is the output of node ``i`` (POET, ICML 2022, section 5.1).

    Raises
    ------
    GraphError
        Lists every invalid value, such as a size outside 0..2^53, or, if there is none, every error
        between nodes: duplicate names, inputs that are unknown or made later, and so on.

    Examples
    --------
    >>> from poetmodel.graph import operation
    >>> graph = Graph(name="pair", nodes=(operation("a", output_bytes=8),
    ...                                   operation("b", output_bytes=4, inputs=("a",))))
    >>> graph.inputs_of[1], graph.users_of[0]
    ((0,), (1,))
    """

    name: str
    """Name for display; part of `sha256`."""
    nodes: tuple[Node, ...]
    """The nodes in execution order."""
    batch_size: int = 1
    """Samples per training step."""
    dtype: str = "float32"
    """Element type of the tensors, for display; part of `sha256`."""
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    """Memory in use during a whole training step, by kind [B]: parameters, gradients, optimizer."""
    parameters: int | None = None
    """Number of trainable parameters; None if unknown."""
    forward_macs: int | None = None
    """Multiply-accumulates of the convolutions, linear layers and matrix products in the forward
    pass; None if unknown."""
    kernels: str | None = None
    """Kernels that compute the graph: ``pytorch``, ``exported`` (the C of `poetmodel.export`), or
    None if unknown. Excluded from `sha256`."""

    def __post_init__(self) -> None:
        self._freeze()
        faults = field_faults(self, self.nodes, self.resident_bytes)
        faults = faults or structure_faults(self.nodes)
        if faults:
            raise GraphError(faults)

    @classmethod
    def from_valid(cls, **values: Any) -> Graph:
        """Make a graph of valid values of all fields (`poetmodel.graph.validation`), unchecked."""
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
        return brief(self, quote(self.name), counts, f"batch {self.batch_size}")

    def __reduce__(self) -> tuple[Any, ...]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["resident_bytes"] = dict(self.resident_bytes)
        return partial(type(self).from_valid, **values), ()

    @property
    def exactness(self) -> str:
        """Label that distinguishes the results from those of a float network.

        `INT8_WEIGHTS` with an operator that trains int8 weights, else `INT8_FRONT` with an int8
        operator, else "".
        """
        if any(node.op in _INT8_WEIGHT_OPERATORS for node in self.nodes):
            return INT8_WEIGHTS
        return INT8_FRONT if any(node.op.startswith(_INT8_PREFIX) for node in self.nodes) else ""

    # -- numbering ---------------------------------------------------------------------------

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, ordered by node, then by output."""
        return tuple(tensor for node in self.nodes for tensor in node.outputs)

    @cached_property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Size of each tensor [B]."""
        return tuple(tensor.bytes for tensor in self.tensors)

    @cached_property
    def node_index(self) -> Mapping[str, int]:
        """Index of each node, by name."""
        return MappingProxyType({node.name: k for k, node in enumerate(self.nodes)})

    @cached_property
    def tensor_index(self) -> Mapping[str, int]:
        """Index of each tensor, by name."""
        return MappingProxyType({tensor.name: i for i, tensor in enumerate(self.tensors)})

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """Index of the node that makes each tensor (``node(i)`` of the notation)."""
        return tuple(k for k, node in enumerate(self.nodes) for _ in node.outputs)

    @cached_property
    def outputs_of(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the tensors that each node makes (``out(k)``)."""
        outputs: list[tuple[int, ...]] = []
        first_index = 0
        for node in self.nodes:
            outputs.append(tuple(range(first_index, first_index + len(node.outputs))))
            first_index += len(node.outputs)
        return tuple(outputs)

    @cached_property
    def inputs_of(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the distinct tensors that each node reads (``in(k)``), as in `Node.inputs`."""
        index = self.tensor_index
        return tuple(
            tuple(dict.fromkeys(index[name] for name in node.inputs)) for node in self.nodes
        )

    @cached_property
    def users_of(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the nodes that read each tensor (its users), ascending."""
        users: list[list[int]] = [[] for _ in self.tensors]
        for k, inputs in enumerate(self.inputs_of):
            for i in inputs:
                users[i].append(k)
        return tuple(tuple(nodes) for nodes in users)

    @cached_property
    def output_bytes(self) -> tuple[int, ...]:
        """Size of all outputs of each node together [B]."""
        return tuple(node.output_bytes for node in self.nodes)

    @cached_property
    def step_bytes(self) -> tuple[int, ...]:
        """Working set of each node: inputs, outputs and workspace together [B].

        A replacement uses the memory of its state tensor. An output that may overwrite an input
        adds only the bytes by which it is larger than the input.
        """
        sizes = self.tensor_bytes
        return tuple(
            sum(sizes[i] for i in inputs)
            + allocated_bytes
            + node.workspace_bytes
            - sum(shared_bytes.values())
            for node, inputs, allocated_bytes, shared_bytes in zip(
                self.nodes, self.inputs_of, self.allocated_bytes, self.shared_bytes_of, strict=True
            )
        )

    # -- state and in-place operators (graphs of version 2) ------------------------------------

    @cached_property
    def keep_all_bytes(self) -> tuple[int, ...]:
        """RAM in use at each node if all tensors are kept until their last use [B]."""
        return self.bytes_of_computing(range(len(self.nodes)))

    def bytes_of_computing(self, node_indices: Sequence[int]) -> tuple[int, ...]:
        """Return the RAM at each of the `node_indices` nodes, if only these are computed [B]."""
        sizes, computed_nodes = self.tensor_bytes, frozenset(node_indices)
        state = frozenset(self.state_tensors)
        never_freed = state.union(self.state_of)
        freed_after: dict[int, list[int]] = {k: [] for k in node_indices}
        for i, k in enumerate(self.node_of):
            if k in computed_nodes and i not in never_freed:
                last_user = max(
                    (user for user in self.users_of[i] if user in computed_nodes), default=k
                )
                freed_after[last_user].append(i)
        live_bytes = sum(sizes[i] for i in state if self.node_of[i] in computed_nodes)
        profile = []
        for k in node_indices:
            live_bytes += 0 if self.nodes[k].is_state else self.allocated_bytes[k]
            saved_bytes = self.shared_bytes(k, freed_after[k])
            profile.append(live_bytes + self.nodes[k].workspace_bytes - saved_bytes)
            live_bytes -= sum(sizes[i] for i in freed_after[k])
        return tuple(profile)

    @cached_property
    def version(self) -> int:
        """Lowest file format version for a graph: 2 with state or in-place operators, else 1."""
        return 2 if any(node.needs_version_2 for node in self.nodes) else 1

    @cached_property
    def state_tensors(self) -> tuple[int, ...]:
        """Indices of the state tensors, ascending."""
        return tuple(i for i, k in enumerate(self.node_of) if self.nodes[k].is_state)

    @cached_property
    def starts_on_storage(self) -> tuple[bool, ...]:
        """Whether each tensor is on storage when the training step begins.

        True for tensors of nodes with `Node.on_aux` and for all state, also state that a schedule
        makes resident.
        """
        return tuple(self.nodes[k].on_aux or self.nodes[k].is_state for k in self.node_of)

    @cached_property
    def on_aux(self) -> frozenset[int]:
        """Indices of the tensors of nodes with `Node.on_aux`, such as samples on storage."""
        return frozenset(i for i, k in enumerate(self.node_of) if self.nodes[k].on_aux)

    @cached_property
    def replacement_of(self) -> Mapping[int, int]:
        """Index of the replacement of each state tensor that has one, by index of the tensor."""
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
        """Last stage in which each node may be computed, by node.

        For readers of state with a replacement, and for the node of this state tensor itself, the
        first stage in which any of this state is replaced; for all other nodes, the last stage of
        the training step.
        """
        last_stages = [len(self.nodes) - 1] * len(self.nodes)
        for old, new in self.replacement_of.items():
            for k in (self.node_of[old], *self.users_of[old]):
                last_stages[k] = min(last_stages[k], self.node_of[new])
        return tuple(last_stages)

    def last_page_in_stage(self, i: int) -> int:
        """Return the last stage in which tensor `i` may be paged in.

        For state, the stage of its replacement (if it has one); for other tensors, the last stage
        of the training step.
        """
        k = self.node_of[i]
        return self.last_stages[k] if self.nodes[k].is_state else len(self.nodes) - 1

    @cached_property
    def state_of(self) -> Mapping[int, int]:
        """Index of the replaced state tensor, by index of the tensor that replaces it."""
        return MappingProxyType({new: old for old, new in self.replacement_of.items()})

    @cached_property
    def in_place_of(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each node, pairs (output, input) of indices: the output may overwrite the input."""
        index = self.tensor_index
        return tuple(
            tuple((index[output], index[source]) for output, source in node.in_place)
            for node in self.nodes
        )

    @cached_property
    def allocated_bytes(self) -> tuple[int, ...]:
        """Memory that each node's outputs allocate [B]: replacements allocate none.

        Outputs that may overwrite an input count in full; see `shared_bytes_of`.
        """
        return tuple(
            sum(tensor.bytes for tensor in node.outputs if tensor.replaces is None)
            for node in self.nodes
        )

    @property
    def state_bytes(self) -> int:
        """Size of all state tensors together [B]."""
        return sum(self.tensor_bytes[i] for i in self.state_tensors)

    @cached_property
    def shared_bytes_of(self) -> tuple[Mapping[int, int], ...]:
        """For each node, the bytes saved by overwriting an input [B], by the input's tensor index.

        They are the smaller size of output and input. A step saves them only if it is the last use
        of the input's copy, which depends on the schedule. Omits pairs that save 0 bytes.
        """
        sizes = self.tensor_bytes
        return tuple(
            {
                source: min(sizes[source], sizes[output])
                for output, source in pairs
                if sizes[source] and sizes[output]
            }
            for pairs in self.in_place_of
        )

    def shared_bytes(self, k: int, dying_tensors: Collection[int]) -> int:
        """Return the bytes that a step of node `k` saves by overwriting inputs [B].

        Counts only inputs among `dying_tensors`, the tensors whose last use is that step.
        """
        return sum(size for i, size in self.shared_bytes_of[k].items() if i in dying_tensors)

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
        """Sum of the resident bytes of all kinds [B]."""
        return sum(self.resident_bytes.values())

    # -- files and other libraries -------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a ``*.graph.json`` file, or the graph in a ``*.step.json`` file.

        Logs a warning on unknown keys at the top level of a graph file, which are ignored.

        Raises
        ------
        GraphError
            If the file cannot be read, or has another format or version. Otherwise lists, with
            locations, every repeated or invalid key and every invalid value or, if there is none,
            every error between nodes.
        """
        document, source, faults = read_document(path)
        return cls.from_dict(document, source=source, faults=faults)

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
            Prefix of every error message.
        faults : iterable of str
            Errors found earlier, to report with those found here.

        Raises
        ------
        GraphError
            If the content has another format or version. Otherwise with `faults` and every invalid
            key and value or, if there are none, every error between nodes.
        """
        graph_values = parse_graph_fields(document, source=source, faults=faults)
        return cls.from_valid(**{**graph_defaults(cls), **graph_values})

    def to_dict(self, *, defaults: bool = False) -> dict[str, Any]:
        """Return the content of a graph file.

        With `defaults`, also include keys whose values are their defaults, except None, an empty
        ``in_place``, and the keys in `STATE_DEFAULTS` of nodes that hold state; a valid graph has
        only the defaults there. The content has only JSON types and shares no mutable object with
        the graph.
        """
        document: dict[str, Any] = {"format": FORMAT, "version": self.version, "name": self.name}
        document |= optional_keys(self, graph_defaults(type(self)), defaults=defaults)
        if "resident_bytes" in document:
            document["resident_bytes"] = dict(self.resident_bytes)
        document["nodes"] = [node_to_dict(node, defaults=defaults) for node in self.nodes]
        return document

    def save(self, path: str | Path) -> None:
        """Write a ``*.graph.json`` file atomically: on failure, an existing file is unchanged.

        Raises `poetmodel.InputError` if the file cannot be written.
        """
        write_document(self.to_dict(), path)

    @classmethod
    def from_networkx(cls, digraph: networkx.DiGraph[Any]) -> Graph:
        """Make a graph from a digraph; see `poetmodel.graph.conversion.digraph_to_dict`.

        Raises `poetmodel.GraphError` if the digraph is invalid.
        """
        return cls.from_dict(digraph_to_dict(digraph), source="digraph")

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """Return the graph as a digraph; see `poetmodel.graph.conversion.to_networkx`."""
        return to_networkx(self.to_dict(defaults=True), self.nodes)

    @cached_property
    def sha256(self) -> str:
        """SHA-256, in hexadecimal, of `poetmodel.graph.io.canonical_json` (UTF-8)."""
        return hashlib.sha256(
            canonical_json(self.to_dict(defaults=True)).encode("utf-8")
        ).hexdigest()
