"""An FX graph as operations that allocate memory, and as the nodes of a training graph.

A tensor of the training graph is one storage with all its views. An operation allocates at least
one storage, or has an effect. Views, inlined nodes, and nodes that select one of several outputs
are not scheduled: each reader executes them again, so that freeing a storage frees all its views.
Operator schemas do not state which outputs are new memory; profiles do.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.operators import is_random, module_path, operator_name
from poetmodel.torch.graph.profiles import OpProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import fx

    from poetmodel.torch.graph.profiles import TensorLayout

RESULTS: Final = "results"
"""Name of the node at the end of a step that returns the results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStorage:
    """A tensor of the training graph: one storage that an operation allocates."""

    index: int
    """Index of the tensor in the training graph."""
    name: str
    operation: int
    """Index of the operation that allocates the storage."""
    bytes: int
    layouts: tuple[TensorLayout, ...]
    """Layouts of the operation's outputs in this storage, usually one."""
    replaces: int | None = None
    """Index of the state storage whose next value this tensor is, in the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Storages and views from which the values of some nodes are read."""

    storages: tuple[int, ...]
    """Indices of the storages, ascending."""
    views: tuple[fx.Node, ...]
    """Views and inlined nodes, in graph order: each reader executes them without lasting memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A scheduled operation: one node of the training graph."""

    index: int
    """Index of the node in the training graph."""
    name: str
    """Unique: module path and operator, such as ``layer1.0.conv1/convolution``."""
    op: str
    """The operator, such as ``convolution``."""
    phase: Phase
    node: fx.Node
    reads: Reads
    storages: tuple[int, ...]
    """Indices of the storages that the operation allocates."""
    profile: OpProfile
    in_place: tuple[tuple[int, int], ...] = ()
    """(output, input) storage indices of each output that may overwrite an input."""

    @property
    def is_random(self) -> bool:
        """Whether PyTorch tags the operator as random.

        The operator repeats its output if the state of the generator is restored.
        `dropout_mask` and operators of edge programs have no tag.
        """
        return is_random(self.node.target)

    @property
    def is_source(self) -> bool:
        """Whether the operation has the phase of state or of inputs: values from before the step.

        False in an `EdgeGraph`, whose inputs belong to the forward pass.
        """
        return self.phase in (Phase.STATE, Phase.INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Where the values of an FX graph's nodes are: in storages, or in views of them."""

    name: str
    """Name of the graph, for messages."""
    positions: Mapping[fx.Node, int]
    output_keys: Mapping[fx.Node, tuple[int, int]]
    """(storage index, layout index) of each node that is an output of an operation, no view."""
    makers: Collection[fx.Node]
    """Nodes of operations, without sources."""
    may_alias: bool
    """Whether an output beside new storages may be in the memory of any input; else refused."""

    def find_reads(self, nodes: Iterable[fx.Node]) -> Reads:
        """Return the storages and views from which the values of nodes are read.

        Skips placeholders and attributes that are not in `output_keys`.
        """
        storages: set[int] = set()
        views: set[fx.Node] = set()
        pending_nodes = list(nodes)
        while pending_nodes:
            node = pending_nodes.pop()
            if node in self.output_keys:
                storages.add(self.output_keys[node][0])
            elif node not in views and node.op == "call_function":
                views.add(node)
                pending_nodes.extend(self._inputs_of_view(node))
        order = sorted(views, key=self.positions.__getitem__)
        return Reads(storages=tuple(sorted(storages)), views=tuple(order))

    def _inputs_of_view(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the nodes whose memory a view may show; raise `CaptureError` if it is unknown."""
        maker: Any = node.args[0] if node.target is operator.getitem else None
        inputs: list[fx.Node] = node.all_input_nodes
        if maker not in self.makers:
            return inputs
        if not self.may_alias:
            raise CaptureError(
                f"{self.name}: {maker.target} returns an input together with new memory, and "
                "cannot be scheduled; leave it out of the step"
            )
        return list(maker.all_input_nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepGraph:
    """The operations and storages of an FX graph, as a `GraphReader` finds them.

    Except nodes that are scheduled for their effect, no operation changes a tensor in place.
    """

    operations: tuple[Operation, ...]
    """The scheduled operations, in execution order."""
    storages: tuple[TensorStorage, ...]
    """The storages, in the order of the operations that allocate them."""
    values: Values

    @property
    def name(self) -> str:
        """Name of the graph."""
        return self.values.name

    @property
    def output_keys(self) -> Mapping[fx.Node, tuple[int, int]]:
        """(storage index, layout index) of each node that is an output of an operation, no view."""
        return self.values.output_keys

    def find_reads(self, nodes: Iterable[fx.Node]) -> Reads:
        """Return the storages and views from which the values of nodes are read."""
        return self.values.find_reads(nodes)

    @cached_property
    def last_uses(self) -> tuple[int, ...]:
        """For each storage the index of the last operation that computes or reads it."""
        last_uses = [storage.operation for storage in self.storages]
        for operation in self.operations:
            for storage_index in operation.reads.storages:
                last_uses[storage_index] = max(last_uses[storage_index], operation.index)
        return tuple(last_uses)

    def training_node(self, operation: Operation, **overrides: Any) -> Node:
        """Return the training-graph node of an operation; `overrides` replace its fields."""
        storages = self.storages
        output_storages = [storages[storage_index] for storage_index in operation.storages]
        graph_node = Node(
            name=operation.name,
            op=operation.op,
            phase=operation.phase,
            inputs=tuple(
                storages[storage_index].name for storage_index in operation.reads.storages
            ),
            outputs=tuple(
                Tensor(
                    name=storage.name,
                    bytes=storage.bytes,
                    replaces=None if storage.replaces is None else storages[storage.replaces].name,
                )
                for storage in output_storages
            ),
            workspace_bytes=operation.profile.workspace_bytes,
            flops=operation.profile.flops,
            bytes_moved=operation.profile.moved_bytes,
            in_place=tuple(
                (storages[output].name, storages[overwritten].name)
                for output, overwritten in operation.in_place
            ),
        )
        return replace(graph_node, **overrides)

    def results_node(self, storage_indices: Iterable[int], *, workspace_bytes: int = 0) -> Node:
        """Return the node at the end of a step, which reads the storages of the results.

        It has the phase of the last operation, or forward without operations. It cannot be
        recomputed, and moves 0 bytes.
        """
        return Node(
            name=RESULTS,
            op=RESULTS,
            phase=self.operations[-1].phase if self.operations else Phase.FORWARD,
            inputs=tuple(self.storages[i].name for i in storage_indices),
            outputs=(),
            workspace_bytes=workspace_bytes,
            recomputable=False,
            bytes_moved=0,
        )


class GraphReader:
    """Reads an FX graph as a `StepGraph`: first `add_source` for each value, then `read`."""

    def __init__(
        self,
        graph: fx.Graph,
        *,
        name: str,
        phase_of: Callable[[fx.Node], Phase],
        path_of: Callable[[fx.Node], str] = module_path,
        may_alias: bool = False,
    ) -> None:
        self.storages: list[TensorStorage] = []
        self.output_keys: dict[fx.Node, tuple[int, int]] = {}
        self._phase_of, self._path_of = phase_of, path_of
        self._names: Counter[str] = Counter()
        self._makers: set[fx.Node] = set()
        self._operations: list[Operation] = []
        self._values = Values(
            name=name,
            positions={node: i for i, node in enumerate(graph.nodes)},
            output_keys=self.output_keys,
            makers=self._makers,
            may_alias=may_alias,
        )

    def read(
        self,
        profiles: Mapping[fx.Node, OpProfile],
        *,
        effects: Collection[fx.Node] = (),
        is_inlined: Callable[[fx.Node, int, list[int]], bool] | None = None,
    ) -> StepGraph:
        """Return the graph with an operation for each profile with new storages, or effect.

        A node without new storages is a view. `is_inlined(node, output bytes, sizes of the storages
        read)` returns whether each reader computes the node itself, so that it has no memory.
        """
        for node, profile in profiles.items():
            if not profile.sizes_bytes and node not in effects:
                continue
            reads = self._values.find_reads(node.all_input_nodes)
            sizes = [self.storages[storage_index].bytes for storage_index in reads.storages]
            if node in effects or not (
                is_inlined and is_inlined(node, sum(profile.sizes_bytes), sizes)
            ):
                self._add_operation(node, reads, profile)
        return StepGraph(
            operations=tuple(self._operations), storages=tuple(self.storages), values=self._values
        )

    def _add_operation(self, node: fx.Node, reads: Reads, profile: OpProfile) -> None:
        """Append a node's operation and storages, and register its outputs in `output_keys`."""
        first_storage = len(self.storages)
        layouts: list[list[TensorLayout]] = [[] for _ in profile.sizes_bytes]
        for number, layout in profile.outputs:
            item_call = (operator.getitem, layout.position)
            output_nodes = [
                user for user in node.users if (user.target, *user.args[1:]) == item_call
            ]
            output = (first_storage + number, len(layouts[number]))
            self.output_keys.update(
                dict.fromkeys([node] if layout.position is None else output_nodes, output)
            )
            layouts[number].append(layout)
        op, path = operator_name(node), self._path_of(node)
        name = self._unique_name(f"{path}/{op}" if path else op)
        outputs = [
            (f"{name}:{number}" if len(layouts) > 1 else name, size_bytes, tuple(layouts[number]))
            for number, size_bytes in enumerate(profile.sizes_bytes)
        ]
        self._makers.add(node)
        self._append_operation(node, name, op, reads, profile, outputs)

    def add_source(
        self,
        node: fx.Node,
        *,
        name: str,
        op: str,
        layout: TensorLayout,
        size_bytes: int,
    ) -> None:
        """Append an operation and its storage for a value that exists before the step.

        Registers `node` in `output_keys`, and `name`, from which the names of later operations will
        differ. `name` itself is not made unique.
        """
        self._names[name] += 1
        self.output_keys[node] = (len(self.storages), 0)
        outputs = [(name, size_bytes, (layout,))]
        self._append_operation(node, name, op, Reads(storages=(), views=()), OpProfile(), outputs)

    def _append_operation(
        self,
        node: fx.Node,
        name: str,
        op: str,
        reads: Reads,
        profile: OpProfile,
        new_storages: Iterable[tuple[str, int, tuple[TensorLayout, ...]]],
    ) -> None:
        """Append an operation with (name, bytes, layouts) storages; registers no names or keys."""
        first_storage, index = len(self.storages), len(self._operations)
        for storage_index, (storage_name, size_bytes, layouts) in enumerate(
            new_storages, first_storage
        ):
            self.storages.append(
                TensorStorage(
                    index=storage_index,
                    name=storage_name,
                    operation=index,
                    bytes=size_bytes,
                    layouts=layouts,
                )
            )
        self._operations.append(
            Operation(
                index=index,
                name=name,
                op=op,
                phase=self._phase_of(node),
                node=node,
                reads=reads,
                storages=tuple(range(first_storage, len(self.storages))),
                profile=profile,
            )
        )

    def _unique_name(self, name: str) -> str:
        """Register and return a name that no operation has yet: ``name``, ``name#2`` and so on."""
        self._names[name] += 1
        count = self._names[name]
        return f"{name}#{count}" if count > 1 else name
