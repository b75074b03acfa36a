"""A captured step as a graph of operations, and what it hands out."""

from __future__ import annotations

from dataclasses import dataclass
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
    shown_path,
)
from poetmodel.torch.capturing.replay import profiles_on_inputs
from poetmodel.torch.graph.profiles import OpProfiler
from poetmodel.torch.graph.step_graph import StepGraph

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import fx

    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """When and from what a result is handed out."""

    result: OutputSpec
    reads: Reads
    after: int | None
    """The operation after which it is there; None where it is an argument or a view of one."""

    @property
    def held(self) -> bool:
        """Whether it is handed out at the end of the step, as the loss and new buffers are."""
        return self.result.kind is not OutputKind.GRADIENT


class CapturedGraph(StepGraph):
    """The operations of a captured step, found by running it once on the inputs of the capture.

    A backward operation belongs to the module of the forward operation whose sequence number it
    carries. A sum of gradients carries none of its own: it belongs to the innermost module that
    holds all that it adds. Raises `CaptureError` if an operation fails, or returns an input beside
    something new. The profiles that are `known` of an earlier capture of the same graph, by place
    there, spare the run. Workspaces are 0 unless they are `measured`.
    """

    def __init__(
        self, joint: Joint, *, known: Mapping[int, OpProfile] | None = None, measured: bool = True
    ) -> None:
        self._joint = joint
        self._paths = _all_paths(joint)
        self._backward = _behind_tangents(joint)
        nodes = list(joint.graph_module.graph.nodes)
        if known is None:
            found = profiles_on_inputs(joint, self._profiler(measured=measured))
            known = {k: found[n] for k, n in enumerate(nodes) if n in found}
        self.profiles = {k: profile for k, profile in known.items() if profile.sizes_bytes}
        """Profiles of the operations, by their place in the captured graph."""
        super().__init__(
            joint.graph_module.graph,
            {nodes[k]: profile for k, profile in self.profiles.items()},
            name=joint.name,
        )
        self._end()
        self.outputs: list[StepOutput] = []
        """One per result, in the order in which they come; those of arguments at the end."""
        for result in joint.results:
            reads = self.reading((result.node,))
            after = max((self.storages[k].operation for k in reads.storages), default=None)
            self.outputs.append(StepOutput(result=result, reads=reads, after=after))
        self.outputs.sort(key=lambda o: len(self.operations) if o.after is None else o.after)

    def _profiler(self, *, measured: bool) -> OpProfiler:
        """Return the profiler that runs the operations."""
        return OpProfiler(measured=measured)

    def _end(self) -> None:
        """Do what comes after the operations, and before their results are looked for."""

    def phase_of(self, node: fx.Node) -> Phase:
        """Return the phase of an operation."""
        if _is_tagged_backward(node) or node in self._backward:
            return Phase.BACKWARD
        path = self._paths.get(node, BODY)
        return Phase.FORWARD if path.partition(".")[0] == BODY else Phase.LOSS

    def path_of(self, node: fx.Node) -> str:
        """Return the path of the module that an operation is of."""
        path = self._paths.get(node, BODY)
        return shown_path(path) if path else LOSS


# -- names and phases ---------------------------------------------------------------------------


def _all_paths(joint: Joint) -> dict[fx.Node, str]:
    """Return the path of the module of each operation, where it is known."""
    by_number: dict[int, str] = {}
    paths: dict[fx.Node, str] = {}
    for node in joint.graph_module.graph.nodes:
        path = node.meta.get("custom", {}).get(ANNOTATION)
        number = node.meta.get("seq_nr")
        if path is None and node.meta.get("is_gradient_acc", False):
            path = _common([paths[source] for source in node.all_input_nodes if source in paths])
        elif path is None:
            path = by_number.get(number)
        elif number is not None and not _is_tagged_backward(node):
            by_number.setdefault(number, path)
        if path is not None:
            paths[node] = path
    return paths


def _common(paths: Sequence[str]) -> str | None:
    """Return the innermost module that holds all of some modules."""
    parts = [path.split(".") for path in paths]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return ".".join(shared) or None


def _behind_tangents(joint: Joint) -> frozenset[fx.Node]:
    """Return the nodes that depend on the gradient that the backward pass starts from."""
    reached = {argument.node for argument in joint.of(InputKind.TANGENT)}
    for node in joint.graph_module.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    return frozenset(reached)


def _is_tagged_backward(node: fx.Node) -> bool:
    return bool(node.meta.get("partitioner_tag") == "is_backward")
