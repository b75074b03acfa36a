"""An FX graph as operations that make memory, and as the nodes of a training graph.

A tensor of the training graph is one storage, whatever number of views look at it. An operation
makes at least one, or has an effect. Views and the picking of one output of several are not
scheduled: whoever reads a view makes it again from the storage behind it, so that letting a tensor
go is letting one thing go. The schemas of operators do not tell which outputs are new memory; their
profiles do.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.operators import module_of, operator_name
from poetmodel.torch.graph.profiles import OpProfile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import fx

    from poetmodel.torch.graph.profiles import TensorLayout

RESULTS: Final = "results"
"""Name of the node that stands for the end of a step, where results are handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStorage:
    """A tensor of the training graph: one piece of memory that an operation makes."""

    index: int
    """Its number, as in the training graph."""
    name: str
    operation: int
    """The operation that makes it."""
    bytes: int
    layouts: tuple[TensorLayout, ...]
    """The outputs of the operation that lie in it, nearly always one."""
    replaces: int | None = None
    """The state that it is the next value of, and in whose memory it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Sources of the values of some nodes."""

    storages: tuple[int, ...]
    """Numbers of the storages behind them, ascending."""
    views: tuple[fx.Node, ...]
    """Nodes to run again, in order; none of them makes memory that lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that is scheduled: one node of the training graph."""

    index: int
    """Its number, as in the training graph."""
    name: str
    """Unique: module path and operator, such as ``layer1.0.conv1/convolution``."""
    op: str
    """The operator, such as ``convolution``."""
    phase: Phase
    node: fx.Node
    reads: Reads
    storages: tuple[int, ...]
    """Numbers of what it makes."""
    profile: OpProfile
    in_place: tuple[tuple[int, int], ...] = ()
    """Output that may take over the memory of an input: numbers of both."""

    @property
    def is_random(self) -> bool:
        """Whether its operator is tagged as drawing numbers: restored state makes it repeatable.

        `dropout_mask` and operators of edge programs carry no tag.
        """
        return torch.Tag.nondeterministic_seeded in getattr(self.node.target, "tags", ())

    @property
    def is_source(self) -> bool:
        """Whether it stands for what is there before the step: state, or an input."""
        return self.phase in (Phase.STATE, Phase.INPUT)


class StepGraph(ABC):
    """The operations and storages of an FX graph, by the profiles of its nodes.

    Subclasses say of which phase a node is and what is there before the step, and make the training
    graph of `node` and `end`, where they say what may be recomputed.

    Parameters
    ----------
    graph : torch.fx.Graph
        Functional: but for `effects`, no operation changes a tensor in place.
    profiles : mapping
        Profiles of nodes, in the order of execution; a node that makes nothing is a view.
    name : str
        Its name in errors.
    effects : collection of torch.fx.Node
        Nodes that make nothing and are scheduled all the same.
    is_inlined : callable, optional
        Whether a node of so many bytes is computed inside of each of its readers and never has
        memory, told also the sizes of what it reads; by default none is.
    """

    def __init__(
        self,
        graph: fx.Graph,
        profiles: Mapping[fx.Node, OpProfile],
        *,
        name: str,
        effects: Collection[fx.Node] = (),
        is_inlined: Callable[[fx.Node, int, list[int]], bool] | None = None,
    ) -> None:
        self.graph = graph
        self.name = name
        self._order = {node: k for k, node in enumerate(graph.nodes)}
        self._names: Counter[str] = Counter()
        self._makers: set[fx.Node] = set()
        self.operations: list[Operation] = []
        """In the order of execution."""
        self.storages: list[TensorStorage] = []
        """In the order of their operations."""
        self.direct: dict[fx.Node, tuple[int, int]] = {}
        """Nodes that stand for an output as it is: number of storage, and of layout."""
        self._add_sources()
        for node, profile in profiles.items():
            if not profile.sizes_bytes and node not in effects:
                continue
            reads = self.reading(node.all_input_nodes)
            sizes = [self.storages[number].bytes for number in reads.storages]
            if node in effects or not (
                is_inlined and is_inlined(node, sum(profile.sizes_bytes), sizes)
            ):
                self._add(node, reads, profile)

    @abstractmethod
    def phase_of(self, node: fx.Node) -> Phase:
        """Return the phase of an operation."""

    def path_of(self, node: fx.Node) -> str:
        """Return the path of the module that an operation is of."""
        return module_of(node)

    def _add_sources(self) -> None:  # noqa: B027 - there may be none
        """Add operations for the values that exist before the first one; none by default."""

    def _add(self, node: fx.Node, reads: Reads, profile: OpProfile) -> None:
        """Add an operation with what it makes."""
        first = len(self.storages)
        layouts: list[list[TensorLayout]] = [[] for _ in profile.sizes_bytes]
        for number, layout in profile.outputs:
            pick = (operator.getitem, layout.position)
            picked = [user for user in node.users if (user.target, *user.args[1:]) == pick]
            here = (first + number, len(layouts[number]))
            self.direct.update(dict.fromkeys([node] if layout.position is None else picked, here))
            layouts[number].append(layout)
        op, path = operator_name(node), self.path_of(node)
        name = self._unique(f"{path}/{op}" if path else op)
        made = [
            (f"{name}:{number}" if len(layouts) > 1 else name, size_bytes, tuple(layouts[number]))
            for number, size_bytes in enumerate(profile.sizes_bytes)
        ]
        self._makers.add(node)
        self._append(node, name, op, self.phase_of(node), reads, profile, made)

    def add_source(
        self,
        node: fx.Node,
        *,
        name: str,
        op: str,
        phase: Phase,
        layout: TensorLayout,
        size_bytes: int,
    ) -> None:
        """Add a storage that is there before the step, and what stands for it."""
        self._names[name] += 1
        self.direct[node] = (len(self.storages), 0)
        made = [(name, size_bytes, (layout,))]
        self._append(node, name, op, phase, Reads(storages=(), views=()), OpProfile(), made)

    def _append(
        self,
        node: fx.Node,
        name: str,
        op: str,
        phase: Phase,
        reads: Reads,
        profile: OpProfile,
        made: Iterable[tuple[str, int, tuple[TensorLayout, ...]]],
    ) -> None:
        """Add an operation, and names, sizes and layouts of the storages that it makes."""
        first, index = len(self.storages), len(self.operations)
        for number, (own, size_bytes, layouts) in enumerate(made, first):
            self.storages.append(
                TensorStorage(
                    index=number, name=own, operation=index, bytes=size_bytes, layouts=layouts
                )
            )
        self.operations.append(
            Operation(
                index=index,
                name=name,
                op=op,
                phase=phase,
                node=node,
                reads=reads,
                storages=tuple(range(first, len(self.storages))),
                profile=profile,
            )
        )

    def _unique(self, name: str) -> str:
        """Return a name with a number where it repeats."""
        self._names[name] += 1
        count = self._names[name]
        return f"{name}#{count}" if count > 1 else name

    def reading(self, nodes: Iterable[fx.Node]) -> Reads:
        """Follow values back to the storages behind them, and the views between."""
        storages: set[int] = set()
        views: set[fx.Node] = set()
        pending = list(nodes)
        while pending:
            node = pending.pop()
            if node in self.direct:
                storages.add(self.direct[node][0])
            elif node not in views and node.op == "call_function":
                views.add(node)
                if node.target is operator.getitem and node.args[0] in self._makers:
                    pending.extend(self.returned_input(node))
                else:
                    pending.extend(node.all_input_nodes)
        order = sorted(views, key=self._order.__getitem__)
        return Reads(storages=tuple(sorted(storages)), views=tuple(order))

    def returned_input(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return the old memory that an output may show; raise `CaptureError` if unknown."""
        raise CaptureError(
            f"{self.name}: {node.args[0].target} returns one of its inputs beside something new, "
            "and cannot be scheduled; leave it out of the step"
        )

    # -- as a training graph -----------------------------------------------------------------------

    def node(self, operation: Operation, **changes: Any) -> Node:
        """Return the node of an operation, with other values of some fields."""
        storages = self.storages
        made = [storages[number] for number in operation.storages]
        own = Node(
            name=operation.name,
            op=operation.op,
            phase=operation.phase,
            inputs=tuple(storages[number].name for number in operation.reads.storages),
            outputs=tuple(
                Tensor(
                    name=storage.name,
                    bytes=storage.bytes,
                    replaces=None if storage.replaces is None else storages[storage.replaces].name,
                )
                for storage in made
            ),
            workspace_bytes=operation.profile.workspace_bytes,
            flops=operation.profile.flops,
            bytes_moved=operation.profile.moved_bytes,
            in_place=tuple(
                (storages[output].name, storages[read].name) for output, read in operation.in_place
            ),
        )
        return replace(own, **changes)

    def end(self, storages: Iterable[int], *, workspace_bytes: int = 0) -> Node:
        """Return the node that stands for the end of a step, which reads its results."""
        return Node(
            name=RESULTS,
            op=RESULTS,
            phase=self.operations[-1].phase if self.operations else Phase.FORWARD,
            inputs=tuple(self.storages[k].name for k in storages),
            outputs=(),
            workspace_bytes=workspace_bytes,
            recomputable=False,
            bytes_moved=0,
        )
