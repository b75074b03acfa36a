"""The training graph: operations in execution order and the tensors they produce."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from poetmodel.errors import GraphError, shown
from poetmodel.units import brief, format_bytes

if TYPE_CHECKING:
    from pathlib import Path

    import networkx

INT8_FRONT: Final = "int8 front: exact against its definition, not against float"
"""What results of a network say whose first layers are quantized."""
_INT8: Final = "q8_"
"""How the operators of such layers begin."""


class Phase(StrEnum):
    """The part of a training step that an operation belongs to."""

    INPUT = "input"
    """Reads a sample or a label."""
    FORWARD = "forward"
    """Forward pass."""
    LOSS = "loss"
    """Computes the loss."""
    BACKWARD = "backward"
    """Backward pass: gradients of inputs or weights."""
    UPDATE = "update"
    """Optimizer step."""
    STATE = "state"
    """Holds a state tensor, a value that outlives the step, and computes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One output of an operation."""

    name: str
    """Unique among all tensors of the graph."""
    bytes: int
    """Size [B], 0 to 2^53."""
    replaces: str | None = None
    """Name of the state tensor whose next value it is, and in whose memory it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator execution."""

    name: str
    """Unique among all nodes of the graph."""
    op: str
    """The operator, such as ``conv2d``."""
    phase: str
    """One of `Phase`."""
    inputs: tuple[str, ...] = ()
    """Names of the tensors it reads; a name that comes twice counts once."""
    outputs: tuple[Tensor, ...] = ()
    """The tensors it makes, none, one or several."""
    workspace_bytes: int = 0
    """Memory needed only while it runs [B]."""
    flops: int = 0
    """Floating-point operations (1 MAC = 2 FLOP)."""
    recomputable: bool = True
    """Whether it may be computed more than once."""
    on_aux: bool = False
    """Whether its tensors lie on auxiliary storage from the start (a sample on the SD card)."""
    bytes_moved: int | None = None
    """Memory traffic of one execution [B]; None means the bytes of its inputs and outputs."""
    instructions: int | None = None
    """Instructions of one execution of exported C on a Cortex-M with an FPU, estimated; None for
    other kernels. No part of the identity of a graph."""
    in_place: tuple[tuple[str, str], ...] = ()
    """Pairs of an output and the input whose memory it may take over; a mapping is taken too."""

    def __post_init__(self) -> None:
        pairs: object = self.in_place
        if isinstance(pairs, Mapping):
            pairs = tuple(pairs.items())
        # What is no pairs of names is left as it is, for the validation to find.
        if isinstance(pairs, tuple) and all(map(_is_pair_of_names, pairs)):
            object.__setattr__(self, "in_place", tuple(sorted(pairs)))
        if self.is_state and self.recomputable is True:
            object.__setattr__(self, "recomputable", False)

    @property
    def is_state(self) -> bool:
        """Whether it holds a state tensor and computes nothing."""
        return self.phase == Phase.STATE

    @property
    def needs_version_2(self) -> bool:
        """Whether only a graph of version 2 can have it: state, replaced or held, or in place."""
        if self.is_state or self.in_place:
            return True
        outputs: object = self.outputs
        return isinstance(outputs, tuple) and any(
            isinstance(tensor, Tensor) and tensor.replaces is not None for tensor in outputs
        )

    def __repr__(self) -> str:
        counts = f"reads {len(self.inputs)}, makes {format_bytes(self.output_bytes)}"
        return brief(self, shown(self.name), f"{self.op}, {self.phase}, {counts}")

    @property
    def output_bytes(self) -> int:
        """Bytes of all its outputs together [B]."""
        return sum(tensor.bytes for tensor in self.outputs)


def _is_pair_of_names(pair: object) -> bool:
    match pair:
        case (str(), str()):
            return isinstance(pair, tuple)
    return False


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
        from poetmodel.graph.io import graph_to_dict
        from poetmodel.graph.validation import structure_faults, value_faults

        self._freeze()
        faults = value_faults(graph_to_dict(self, defaults=True)) or structure_faults(self.nodes)
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
        """What its results are exact against, where that is not float; else nothing."""
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

    # -- files and other libraries (implemented next door, imported on use) -------------------

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """Read a ``*.graph.json`` file, or the graph in a ``*.step.json`` file.

        Raises
        ------
        GraphError
            If the file is missing or is no such file; with every fault found in it, each with its
            place.
        """
        from poetmodel.graph.io import load_graph

        return load_graph(path)

    def save(self, path: str | Path) -> None:
        """Write a ``*.graph.json`` file; where it cannot be written, nothing is changed."""
        from poetmodel.graph.io import save_graph

        save_graph(self, path)

    @classmethod
    def from_networkx(cls, digraph: networkx.DiGraph[Any]) -> Graph:
        """Read a `networkx.DiGraph`; see `poetmodel.graph.conversion.from_networkx`."""
        from poetmodel.graph.conversion import from_networkx

        return from_networkx(digraph)

    def to_networkx(self) -> networkx.DiGraph[Any]:
        """Write a `networkx.DiGraph`; see `poetmodel.graph.conversion.to_networkx`."""
        from poetmodel.graph.conversion import to_networkx

        return to_networkx(self)

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON (UTF-8), hexadecimal."""
        from poetmodel.graph.io import canonical_json

        return hashlib.sha256(canonical_json(self).encode("utf-8")).hexdigest()


def operation(
    name: str,
    *,
    output_bytes: int,
    op: str = "op",
    phase: str = "forward",
    inputs: tuple[str, ...] | list[str] = (),
    **attributes: Any,
) -> Node:
    """Make a node with one output tensor of the node's own name.

    Parameters
    ----------
    name : str
        Name of the node and of its tensor.
    output_bytes : int
        Size of the tensor [B].
    op, phase, inputs, **attributes
        As the fields of `Node`.
    """
    outputs = (Tensor(name=name, bytes=output_bytes),)
    return Node(name=name, op=op, phase=phase, inputs=tuple(inputs), outputs=outputs, **attributes)
