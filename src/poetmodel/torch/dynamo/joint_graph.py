"""A joint graph of AOTAutograd as operations in execution order, with the sizes of storages."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointPolicy

from poetmodel.graph import Graph, Phase
from poetmodel.torch.dynamo.gradients import is_addition
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.dropout import dropout_mask
from poetmodel.torch.graph.operators import (
    has_effect,
    is_foreign,
    is_random,
    is_wait,
    module_path,
    operator_name,
)
from poetmodel.torch.graph.profiles import predict_profile
from poetmodel.torch.graph.step_graph import GraphReader
from poetmodel.torch.graph.tensors import fake_storage_key, fake_value, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from poetmodel.graph import Node
    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Operation, StepGraph

ARGUMENT_NAME: Final = "poetmodel.source"
"""Key under a placeholder's ``meta``: its name in the compiled function."""
_RECOMPUTE_POLICIES: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
"""Policies by which a model's ``torch.utils.checkpoint`` recomputes an operation."""
MIDDLE: Final = "between both passes"
"""Name of the node between the forward and the backward pass."""
_FRAME_PATTERN: Final = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.+)')
"""A frame of a stack trace: file, line number, and text of the line."""
TANGENTS: Final = "tangents"
"""Prefix of the names of tangents: arguments that are gradients of results."""


class JointGraph:
    """A joint graph and its operations, forward pass first, with predicted or measured sizes.

    Each node of `graph` has its fake value. `forward_outputs` counts the results that precede
    gradients; None for a graph without a backward pass. `GraphReader.read` describes `is_inlined`.
    The fake value of a wait becomes that of its input.
    """

    step_graph: StepGraph

    def __init__(
        self,
        graph: fx.Graph,
        forward_outputs: int | None = None,
        *,
        is_inlined: Callable[[fx.Node, int, list[int]], bool] | None = None,
    ) -> None:
        _check_plannable(graph)
        for node in graph.nodes:
            if is_wait(node.target):  # a wait returns its input tensor
                node.meta["val"] = node.all_input_nodes[0].meta["val"]
        self.graph = graph
        (self.output,) = graph.find_nodes(op="output")
        self.results: list[Any] = _pytree.tree_leaves(self.output.args)
        count = len(self.results) if forward_outputs is None else forward_outputs
        self.forward_outputs = count
        self.is_inference = forward_outputs is None
        self.arguments = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
        self.tangents = [
            node
            for node in self.arguments
            if node.op == "placeholder" and str(node.target).startswith(TANGENTS)
        ]
        """Arguments that are gradients of results; the backward pass starts from them."""
        written_nodes = [
            node for node in graph.nodes if node.meta.get("partitioner_tag") == "must_be_in_forward"
        ]
        self.forward_nodes = find_ancestors([*self.results[:count], *written_nodes])
        """Nodes of the forward pass, and arguments that they read."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        independent_nodes = _independent_nodes(calls, self.forward_nodes, self.tangents)
        self.forward_nodes |= _saved_copies(independent_nodes, self.forward_nodes)
        calls.sort(key=lambda node: node not in self.forward_nodes)
        backward_nodes = (node for node in independent_nodes if node not in self.forward_nodes)
        calls = list(_execution_order(calls, backward_nodes))
        reader = GraphReader(graph, name="captured", phase_of=self._phase_of, may_alias=True)
        self.step_graph = reader.read(
            {node: predict_profile(node) for node in calls},
            effects=frozenset(filter(has_effect, calls)),
            is_inlined=is_inlined,
        )
        self.final_results = self.find_storages(
            node for node in self.results if not is_addition(node)
        )
        """Indices of the storages of results of both passes, without additions to ``.grad``."""

    def _phase_of(self, node: fx.Node) -> Phase:
        return Phase.FORWARD if node in self.forward_nodes else Phase.BACKWARD

    def find_storages(self, nodes: Iterable[Any]) -> tuple[int, ...]:
        """Return the ascending indices of the storages from which `nodes` are read."""
        return self.step_graph.find_reads(
            node for node in nodes if isinstance(node, fx.Node)
        ).storages

    def apply_profiles(self, profiles: Sequence[OpProfile]) -> None:
        """Replace the profiles of all operations, and the sizes of their storages.

        An output that a profile lacks has 0 bytes: kernels may omit unused gradients.
        """
        operations, storages = [], list(self.step_graph.storages)
        for operation, profile in zip(self.step_graph.operations, profiles, strict=True):
            sizes = {
                layout.position: profile.sizes_bytes[storage_index]
                for storage_index, layout in profile.outputs
            }
            for number in operation.storages:
                storage = storages[number]
                output_sizes = (sizes.get(layout.position, 0) for layout in storage.layouts)
                storages[number] = replace(storage, bytes=max(output_sizes))
            operations.append(replace(operation, profile=profile))
        self.step_graph = replace(
            self.step_graph, operations=tuple(operations), storages=tuple(storages)
        )

    @property
    def has_loss_outside(self) -> bool:
        """Whether results need gradients, but none of them has one element, as a loss would."""
        return bool(self.tangents) and all(fake_value(node).numel() != 1 for node in self.tangents)

    @property
    def has_zero_tangents(self) -> bool:
        """Whether larger results than a scalar one need gradients, which are then probably 0."""
        are_scalars = [fake_value(node).numel() == 1 for node in self.tangents]
        return any(are_scalars) and not all(are_scalars)

    @cached_property
    def tangents_bytes(self) -> int:
        """Bytes of the tangents [B]."""
        return sum(storage_sizes(self.tangents).values())

    def checkpointed_peak_bytes(self, graph: Graph) -> int | None:
        """Return the peak RAM with the checkpoints of the model itself [B]; None without any.

        Tensors that nodes outside of a checkpoint read in the forward pass are kept. At the first
        backward read of another one, the checkpoint is recomputed.
        """
        checkpoint_of = {
            operation.index: operation.node.meta.get("ac_graph_id")
            for operation in self.step_graph.operations
            if operation.phase is Phase.FORWARD
            and operation.node.meta.get("recompute") in _RECOMPUTE_POLICIES
        }
        if not checkpoint_of:
            return None
        begin = sum(operation.phase is Phase.FORWARD for operation in self.step_graph.operations)
        backward = range(begin, len(graph.nodes))
        kept_tensors = {
            i
            for k in range(backward.start)
            for i in graph.inputs_of[k]
            if checkpoint_of.get(graph.node_of[i]) != checkpoint_of.get(k)
        }
        recompute_tensors = {
            i for k in backward for i in graph.inputs_of[k] if graph.node_of[i] in checkpoint_of
        }
        recompute_tensors -= kept_tensors
        last_node_of_checkpoint: dict[Hashable, int] = {}
        for k in sorted(graph.node_of[i] for i in recompute_tensors):
            last_node_of_checkpoint[checkpoint_of[k]] = k
        # (node, whether it is recomputed), in execution order.
        computations = [(k, False) for k in range(backward.start)]
        recomputed_checkpoints = set[Any]()
        for k in backward:
            checkpoints = {
                checkpoint_of[graph.node_of[i]]
                for i in graph.inputs_of[k]
                if i in recompute_tensors
            } - recomputed_checkpoints
            computations += [
                (j, True)
                for j, checkpoint in checkpoint_of.items()
                if checkpoint in checkpoints and j <= last_node_of_checkpoint[checkpoint]
            ]
            recomputed_checkpoints |= checkpoints
            computations.append((k, False))
        # The key of `last_use` is (tensor, position of the computation of this copy).
        last_computation: dict[int, int] = {}
        last_use: dict[tuple[int, int], int] = {}
        for position, (k, _) in enumerate(computations):
            for i in graph.inputs_of[k]:
                last_use[i, last_computation[i]] = position
            for i in graph.outputs_of[k]:
                last_computation[i] = position
                last_use[i, position] = position
        freed_bytes: dict[int, int] = dict.fromkeys(range(len(computations)), 0)
        for (i, _), position in last_use.items():
            freed_bytes[position] += graph.tensor_bytes[i]
        live_bytes = peak_bytes = 0
        for position, (k, _) in enumerate(computations):
            live_bytes += graph.allocated_bytes[k]
            peak_bytes = max(peak_bytes, live_bytes + graph.nodes[k].workspace_bytes)
            live_bytes -= freed_bytes[position]
        return peak_bytes

    def is_repeatable(self, operation: Operation) -> bool:
        """Return whether an operation may be recomputed: pure, no collective, not ``MUST_SAVE``."""
        if self.policy_of(operation) is CheckpointPolicy.MUST_SAVE:
            return False
        target = operation.node.target
        is_unknown = target is dropout_mask or is_foreign(target)
        return not (operation.is_random or is_unknown or has_effect(operation.node))

    def policy_of(self, operation: Operation) -> CheckpointPolicy | None:
        """Return an operation's checkpoint policy; None without one, or in the backward pass."""
        if operation.phase is not Phase.FORWARD:
            return None
        policy: CheckpointPolicy | None = operation.node.meta.get("recompute")
        return policy

    @property
    def must_recompute_storages(self) -> frozenset[int]:
        """Indices of the recomputable storages with policy ``MUST_RECOMPUTE``, without results."""
        forbidden_storages = (
            number
            for operation in self.step_graph.operations
            if self.policy_of(operation) is CheckpointPolicy.MUST_RECOMPUTE
            and self.is_repeatable(operation)
            for number in operation.storages
        )
        return frozenset(forbidden_storages) - self.forward_results

    def training_graph(self, *, outside_bytes: int = 0, middle_bytes: int | None = None) -> Graph:
        """Return the training graph: a node for each operation, then one for `final_results`.

        `outside_bytes` are of other code between both passes [B]. `middle_bytes` is the workspace
        of a node there [B]; None for no such node. Equal graphs have equal hashes.
        """
        results_node = self.step_graph.results_node(
            self.final_results, workspace_bytes=self.copied_bytes
        )
        nodes = [
            self._make_node(operation, outside_bytes) for operation in self.step_graph.operations
        ]
        if middle_bytes is not None:
            count = sum(
                operation.phase is Phase.FORWARD for operation in self.step_graph.operations
            )
            inserted_node = replace(
                self.step_graph.results_node((), workspace_bytes=middle_bytes),
                name=MIDDLE,
                op=MIDDLE,
            )
            nodes.insert(count, replace(inserted_node, phase=Phase.FORWARD))
        return Graph(name="captured", nodes=(*nodes, results_node), kernels="pytorch")

    def _make_node(self, operation: Operation, outside_bytes: int) -> Node:
        """Return the node of an operation; `forward_results`, which the caller holds, get 0 bytes.

        Forward results among several outputs count as workspace: a recomputation allocates them
        again. `outside_bytes` is workspace of the first backward node.
        """
        caller_storages = self.forward_results.intersection(operation.storages)
        workspace_bytes = operation.profile.workspace_bytes
        if len(operation.storages) > 1:  # recomputing makes a second copy
            workspace_bytes += sum(
                self.step_graph.storages[number].bytes for number in caller_storages
            )
        # The memory that other code uses between the passes is freed by the first backward node.
        if operation.node is self._first_backward_node:
            output_bytes = sum(
                self.step_graph.storages[number].bytes for number in operation.storages
            )
            workspace_bytes = max(
                workspace_bytes, outside_bytes - self.tangents_bytes - output_bytes
            )
        accessed_storages = (*operation.storages, *operation.reads.storages)
        graph_node = self.step_graph.training_node(
            operation,
            workspace_bytes=workspace_bytes,
            bytes_moved=sum(self.step_graph.storages[number].bytes for number in accessed_storages),
            recomputable=self.is_repeatable(operation),
        )
        outputs = zip(operation.storages, graph_node.outputs, strict=True)
        return replace(
            graph_node,
            outputs=tuple(
                replace(tensor, bytes=0) if number in caller_storages else tensor
                for number, tensor in outputs
            ),
        )

    @cached_property
    def _first_backward_node(self) -> fx.Node | None:
        """Node of the first operation of the backward pass; None without one."""
        phases = ((operation.phase, operation.node) for operation in self.step_graph.operations)
        return next((node for phase, node in phases if phase is Phase.BACKWARD), None)

    @cached_property
    def overwritten_arguments(self) -> frozenset[fx.Node]:
        """Arguments that the forward pass overwrites at its end, such as batch norm statistics."""
        from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

        written_nodes = {
            node.args[0]
            for node in self.graph.find_nodes(
                op="call_function", target=torch.ops.aten.copy_.default
            )
        }
        overwritten_inputs = {
            descriptor.mutated_input
            for descriptor in self.output.meta.get("desc", ())
            if isinstance(descriptor, InputMutationAOTOutput)
        }
        return frozenset(
            node
            for node in self.arguments
            if node in written_nodes or node.meta.get("desc") in overwritten_inputs
        )

    @cached_property
    def forward_results(self) -> frozenset[int]:
        """Storages, no arguments, that the caller holds: evicting them frees no RAM."""
        if self.is_inference:
            return frozenset()
        return frozenset(self.find_storages(self.results[: self.forward_outputs]))

    @cached_property
    def added_bytes(self) -> int:
        """Bytes of the gradients that the backward pass adds to ``.grad`` [B]."""
        return sum(fake_value(node.args[0]).nbytes for node in self.results if is_addition(node))

    @cached_property
    def copied_bytes(self) -> int:
        """Bytes of the gradients that autograd copies when they are returned [B].

        Not copied is a gradient in new memory with its parameter's strides, at its first return.
        """
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput

        arguments = {node.meta.get("desc"): node for node in self.arguments}
        gradients = self.results[self.forward_outputs :]
        gradient_descriptors = self.output.meta.get("desc", ())[self.forward_outputs :]
        new_keys = set(map(fake_storage_key, self.step_graph.output_keys))
        copied_bytes, returned_nodes = 0, set[fx.Node]()
        for node, descriptor in zip(gradients, gradient_descriptors, strict=False):
            if not isinstance(node, fx.Node) or not isinstance(descriptor, GradAOTOutput):
                continue
            if is_addition(node):
                continue
            parameter = fake_value(arguments[descriptor.grad_of])
            is_new = node not in returned_nodes and fake_storage_key(node) in new_keys
            if not is_new or not _has_gradient_strides(node, parameter):
                copied_bytes += parameter.nbytes
            returned_nodes.add(node)
        return copied_bytes


def _has_gradient_strides(node: fx.Node, parameter: torch.Tensor) -> bool:
    """Return whether a gradient has the strides that autograd stores without a copy."""
    required_strides = torch.empty_like(parameter).stride()
    strides = zip(fake_value(node).stride(), required_strides, parameter.shape, strict=True)
    return all(stride == required_stride for stride, required_stride, size in strides if size != 1)


def _independent_nodes(
    calls: Iterable[fx.Node], forward_nodes: Collection[fx.Node], tangents: Iterable[fx.Node]
) -> list[fx.Node]:
    """Return pure backward nodes that depend on no tangent, such as casts and copies of slices."""
    dependent_nodes: set[fx.Node] = set(tangents)
    independent_nodes = []
    for node in calls:
        if not dependent_nodes.isdisjoint(node.all_input_nodes):
            dependent_nodes.add(node)
        elif node not in forward_nodes and _is_pure(node):
            independent_nodes.append(node)
    return independent_nodes


def _saved_copies(
    independent_nodes: Sequence[fx.Node], forward_nodes: Collection[fx.Node]
) -> set[fx.Node]:
    """Return `independent_nodes` to compute in the forward pass instead, and all their ancestors.

    Saving their outputs instead of the larger storage that only they read needs less RAM.
    """
    readers: dict[int, set[fx.Node]] = {}
    sizes: dict[int, int] = {}
    candidates = set(independent_nodes)
    views = {
        node for node in candidates if fake_storage_key(node) in _storage_keys(node.all_input_nodes)
    }
    candidates_and_forward = (*candidates, *forward_nodes)
    for node in {
        *candidates,
        *forward_nodes,
        *(user for member in candidates_and_forward for user in member.users),
    }:
        if node.op == "call_function" and node not in views:
            input_sizes = storage_sizes(
                source for source in node.all_input_nodes if source.op == "call_function"
            )
            sizes |= input_sizes
            for key in input_sizes:
                readers.setdefault(key, set()).add(node)
    saved_nodes = set[fx.Node]()
    for key, nodes in readers.items():
        backward_readers = {node for node in nodes if node not in forward_nodes}
        copies = backward_readers & candidates
        if (
            copies
            and copies == backward_readers
            and all(_storage_keys(member.all_input_nodes) == {key} for member in copies)
        ):
            output_bytes = sum(
                tensor.nbytes for member in copies for tensor in tensors_in(fake_value(member))
            )
            if output_bytes < sizes[key]:
                saved_nodes |= copies
    return find_ancestors(saved_nodes)


def _execution_order(
    calls: Sequence[fx.Node], independent_nodes: Iterable[fx.Node]
) -> Iterator[fx.Node]:
    """Yield `calls`, but delay expanding independent nodes up to their first reader.

    The outputs of expanding nodes are at least as large as their inputs. At the start of the
    backward pass, all of them would be in RAM at the same time.
    """
    delayed_nodes = {
        node: position for position, node in enumerate(filter(_is_expanding, independent_nodes))
    }
    for node in calls:
        if node in delayed_nodes:
            continue
        needed_nodes, pending = set[fx.Node](), [node]
        while pending:
            sources = [
                source
                for source in pending.pop().all_input_nodes
                if source in delayed_nodes and source not in needed_nodes
            ]
            needed_nodes.update(sources)
            pending += sources
        yield from sorted(needed_nodes, key=delayed_nodes.__getitem__)
        for source in needed_nodes:
            del delayed_nodes[source]
        yield node
    yield from delayed_nodes


def _storage_keys(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Return the storage keys of `nodes`; None stands for nodes whose output is not one tensor."""
    return {fake_storage_key(node) for node in nodes}


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node may move: not random, no effect, no foreign or user function."""
    target = node.target
    return not (is_random(target) or has_effect(node) or is_foreign(target) or node.is_impure())


def _is_expanding(node: fx.Node) -> bool:
    """Return whether a node's outputs are at least as large as its inputs, arguments excluded."""
    sources = (source for source in node.all_input_nodes if source.op == "call_function")
    read_bytes = sum(storage_sizes(sources).values())
    output_bytes: int = sum(tensor.nbytes for tensor in tensors_in(fake_value(node)))
    return output_bytes >= read_bytes


def _check_plannable(graph: fx.Graph) -> None:
    """Refuse symbolic sizes, unstrided tensors, functions as operands and ``MUST_CPU_OFFLOAD``."""
    for node in graph.nodes:
        value = fake_value(node)
        if getattr(node.meta.get("recompute"), "name", "") == "MUST_CPU_OFFLOAD":
            raise CaptureError(
                f"{module_path(node) or node.name}: MUST_CPU_OFFLOAD: plans page to files only: "
                "return PREFER_SAVE, and pass a folder as storage="
            )
        if node.op == "get_attr" and value is None:
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{module_path(user) or user.name}: {operator_name(user)} takes a function, whose "
                "memory cannot be planned; leave it out, or use torch.where"
            )
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or any(
            not all(isinstance(size, int) for size in tensor.shape) for tensor in tensors_in(value)
        ):
            if node.meta.get("unbacked_bindings") or free_unbacked_symbols(value):
                raise CaptureError(
                    f"{_find_line(node)}: a size, or another Python number, is read from a tensor "
                    f"({operator_name(node)}), and memory cannot be planned before it is known; "
                    "compute it outside and pass it as a number, or use pmt.compile, which checks "
                    "such values before each step"
                )
            raise CaptureError(
                f"{module_path(node) or _display_name(node)}: its sizes are unknown before the "
                "step runs, and memory cannot be planned without; pass dynamic=False to "
                "torch.compile"
            )
        for tensor in tensors_in(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{module_path(node) or _display_name(node)}: {_display_name(node)} is a "
                    f"tensor of layout {str(tensor.layout).removeprefix('torch.')}, whose memory "
                    "cannot be planned; "
                    "make it dense before the compiled function"
                )


def _display_name(node: fx.Node) -> str:
    """Return a node's name for display; for an argument, its name in the compiled function."""
    return str(node.meta.get(ARGUMENT_NAME, node.name))


def _find_line(node: fx.Node) -> str:
    """Return the innermost line outside of PyTorch that created a node, or else a path."""
    traces = (
        near_node.meta.get("stack_trace")
        for near_node in (node, *node.users, *node.all_input_nodes)
    )
    frames = _FRAME_PATTERN.findall(next(filter(None, traces), ""))
    torch_folder = Path(torch.__file__).parent
    outside_frames = [frame for frame in frames if not Path(frame[0]).is_relative_to(torch_folder)]
    if not outside_frames:
        return module_path(node) or _display_name(node)
    path, line, text = outside_frames[-1]
    return f"{path}:{line} ({text})"


def storage_sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Return the size of each whole storage with a tensor of `nodes`, by storage key [B]."""
    keys = ((fake_storage_key(node), node) for node in nodes)
    return {
        key: fake_value(node).untyped_storage().nbytes() for key, node in keys if key is not None
    }


def find_ancestors(values: Iterable[Any]) -> set[fx.Node]:
    """Return the nodes among `values`, and all their ancestors in the graph."""
    pending = [node for node in values if isinstance(node, fx.Node)]
    visited: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending.extend(node.all_input_nodes)
    return visited
