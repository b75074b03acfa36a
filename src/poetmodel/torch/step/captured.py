"""A captured step as a graph of operations and its results."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from poetmodel.graph import Phase
from poetmodel.torch.capturing.joint import LOSS
from poetmodel.torch.capturing.joint_graph import (
    ANNOTATION,
    BODY,
    InputKind,
    Joint,
    OutputKind,
    OutputSpec,
    format_path,
)
from poetmodel.torch.graph.step_graph import StepGraph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """A result of a step, the storages that contain it, and the last operation that computes it."""

    result: OutputSpec
    reads: Reads
    last_operation: int | None
    """Index of the operation after which the result is complete: the last one that allocates a
    storage of the result. None if no operation does: the result is an argument without a source
    operation, or a view of one."""

    @property
    def is_returned_at_end(self) -> bool:
        """Whether the result is returned at the end of the step, as are all but gradients."""
        return self.result.kind is not OutputKind.GRADIENT


class CapturedGraph(StepGraph):
    """The operations of a captured step, by the profiles of its nodes.

    `outputs` has an entry per result, sorted by `StepOutput.last_operation`, None last. A backward
    operation belongs to the module of the forward operation with its sequence number, a sum of
    gradients to the innermost common module of its summands.
    """

    def __init__(self, joint: Joint, profiles: Mapping[fx.Node, OpProfile]) -> None:
        self._joint = joint
        self._paths = _module_paths(joint)
        self._backward = _tangent_descendants(joint)
        super().__init__(joint.graph_module.graph, profiles, name=joint.name)
        self._finish_operations()
        self.outputs: list[StepOutput] = []
        """One output per result, ordered by `last_operation`; outputs without one are last."""
        for result in joint.results:
            result_reads = self.find_reads((result.node,))
            last_operation = max(
                (self.storages[index].operation for index in result_reads.storages), default=None
            )
            self.outputs.append(
                StepOutput(result=result, reads=result_reads, last_operation=last_operation)
            )
        self.outputs.sort(
            key=lambda output: (
                len(self.operations) if output.last_operation is None else output.last_operation
            )
        )

    def _finish_operations(self) -> None:
        """Change operations before the outputs are found; by default none are changed."""

    def phase_of(self, node: fx.Node) -> Phase:
        """Return the phase of a node: BACKWARD, LOSS or, also for unknown modules, FORWARD."""
        if _is_tagged_backward(node) or node in self._backward:
            return Phase.BACKWARD
        path = self._paths.get(node, BODY)
        return Phase.FORWARD if path.partition(".")[0] == BODY else Phase.LOSS

    def path_of(self, node: fx.Node) -> str:
        """Return a module path for display; "" for the user's module, `LOSS` for other code."""
        path = self._paths.get(node, BODY)
        return format_path(path) if path else LOSS


# -- names and phases ---------------------------------------------------------------------------


def _module_paths(joint: Joint) -> dict[fx.Node, str]:
    """Return the path of each node's module; nodes without a known module are omitted."""
    path_of_sequence: dict[int, str] = {}
    paths: dict[fx.Node, str] = {}
    for node in joint.graph_module.graph.nodes:
        path = node.meta.get("custom", {}).get(ANNOTATION)
        sequence_number = node.meta.get("seq_nr")
        if path is None and node.meta.get("is_gradient_acc", False):
            path = _common_module(
                [paths[source] for source in node.all_input_nodes if source in paths]
            )
        elif path is None:
            path = path_of_sequence.get(sequence_number)
        elif sequence_number is not None and not _is_tagged_backward(node):
            path_of_sequence.setdefault(sequence_number, path)
        if path is not None:
            paths[node] = path
    return paths


def _common_module(paths: Sequence[str]) -> str | None:
    """Return the path of the innermost module that contains all `paths`; None if none does."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    common_names = takewhile(lambda names_at_depth: len(set(names_at_depth)) == 1, names)
    return ".".join(names_at_depth[0] for names_at_depth in common_names) or None


def _tangent_descendants(joint: Joint) -> frozenset[fx.Node]:
    """Return the tangents, which start the backward pass, and the nodes that depend on them."""
    descendants = {argument.node for argument in joint.arguments_of(InputKind.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in descendants for source in node.all_input_nodes):
            descendants.add(node)
    return frozenset(descendants)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
