"""A joint graph of AOTAutograd as operations, results and gradients."""

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
    is_effect,
    is_foreign,
    is_wait,
    module_of,
    operator_name,
)
from poetmodel.torch.graph.profiles import predicted
from poetmodel.torch.graph.step_graph import StepGraph
from poetmodel.torch.graph.tensors import fake, storage_of, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence

    from poetmodel.graph import Node
    from poetmodel.torch.graph.profiles import OpProfile
    from poetmodel.torch.graph.step_graph import Operation

SOURCE: Final = "poetmodel.source"
"""Key under an argument's ``meta``: what the compiled function calls it."""
_CHECKPOINTED: Final = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
"""What a model with ``torch.utils.checkpoint`` says of operations."""
TURN: Final = "between both passes"
"""Name of the node between the forward and the backward pass."""
_FRAME: Final = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.+)')
TANGENTS: Final = "tangents"
"""How the names begin of arguments that are gradients of results."""


class JointGraph(StepGraph):
    """The operations of a joint graph, forward pass first, by what PyTorch predicts that they make.

    Parameters
    ----------
    graph : torch.fx.Graph
        A joint graph, or that of a forward pass alone; every node has its predicted value.
    forward_outputs : int, optional
        How many of the results are those of the forward pass; by default all.
    is_inlined : callable, optional
        As in `StepGraph`.

    Raises
    ------
    CaptureError
        If sizes are not known, or a value is no dense tensor: says what to do.
    """

    def __init__(
        self,
        graph: fx.Graph,
        forward_outputs: int | None = None,
        *,
        is_inlined: Callable[[fx.Node, int, list[int]], bool] | None = None,
    ) -> None:
        _check(graph)
        for node in graph.nodes:
            if is_wait(node.target):  # it returns the tensor that it waits for
                node.meta["val"] = node.all_input_nodes[0].meta["val"]
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
        """Arguments that are gradients of results, which the backward pass begins with."""
        written = [
            node for node in graph.nodes if node.meta.get("partitioner_tag") == "must_be_in_forward"
        ]
        self.forward = ancestors([*self.results[:count], *written])
        """All nodes of the forward pass."""
        calls = [node for node in graph.nodes if node.op == "call_function"]
        independent = _independent(calls, self.forward, self.tangents)
        self.forward |= _saved_parts(independent, self.forward)
        calls.sort(key=lambda node: node not in self.forward)
        late = (node for node in independent if node not in self.forward)
        calls = list(_execution_order(calls, late))
        super().__init__(
            graph,
            {node: predicted(node) for node in calls},
            name="captured",
            effects=frozenset(filter(is_effect, calls)),
            is_inlined=is_inlined,
        )
        self.held = self.behind(node for node in self.results if not is_addition(node))
        """Numbers of what is handed over at the end."""
        self.outside_bytes = 0
        """What others take at most between the forward and the backward pass [B]."""

    def phase_of(self, node: fx.Node) -> Phase:
        """Return the phase of an operation."""
        return Phase.FORWARD if node in self.forward else Phase.BACKWARD

    def returned_input(self, node: fx.Node) -> Iterable[fx.Node]:
        """Return what an output may show that is an input of its operation."""
        inputs: Iterable[fx.Node] = node.args[0].all_input_nodes
        return inputs

    def behind(self, nodes: Iterable[Any]) -> tuple[int, ...]:
        """Return the numbers of the storages behind some results."""
        return self.reading(node for node in nodes if isinstance(node, fx.Node)).storages

    def apply(self, profiles: Sequence[OpProfile]) -> None:
        """Give operations what they were seen to make and take.

        What is predicted of a gradient that nobody wants, kernels may leave out.
        """
        for operation, seen in zip(self.operations, profiles, strict=True):
            sizes = {layout.position: seen.sizes_bytes[k] for k, layout in seen.outputs}
            for number in operation.storages:
                storage = self.storages[number]
                made = (sizes.get(layout.position, 0) for layout in storage.layouts)
                self.storages[number] = replace(storage, bytes=max(made))
            self.operations[operation.index] = replace(operation, profile=seen)

    @property
    def has_loss_outside(self) -> bool:
        """Whether gradients come in, and none of them is that of a number: of a loss."""
        return bool(self.tangents) and all(fake(node).numel() != 1 for node in self.tangents)

    @property
    def has_zeros(self) -> bool:
        """Whether gradients of a loss come in and others, which are probably zeros."""
        numbers = [fake(node).numel() == 1 for node in self.tangents]
        return any(numbers) and not all(numbers)

    @cached_property
    def tangents_bytes(self) -> int:
        """The size of the gradients that come in [B]."""
        return sum(sizes_of(self.tangents).values())

    def own_peak_bytes(self, graph: Graph) -> int | None:
        """Return the peak of a model by its own checkpoints [B]; None where it has none.

        Of a region stays what others read in the forward pass. When the backward pass first needs
        something else of it, it is computed again up to the last thing that is needed.
        """
        region_of = {
            operation.index: operation.node.meta.get("ac_graph_id")
            for operation in self.operations
            if operation.phase is Phase.FORWARD
            and operation.node.meta.get("recompute") in _CHECKPOINTED
        }
        if not region_of:
            return None
        begin = sum(operation.phase is Phase.FORWARD for operation in self.operations)
        backward = range(begin, len(graph.nodes))
        passed_on = {
            i
            for k in range(backward.start)
            for i in graph.inputs_of[k]
            if region_of.get(graph.node_of[i]) != region_of.get(k)
        }
        needed = {i for k in backward for i in graph.inputs_of[k] if graph.node_of[i] in region_of}
        needed -= passed_on
        last: dict[Hashable, int] = {}
        for k in sorted(graph.node_of[i] for i in needed):
            last[region_of[k]] = k
        steps, again = [(k, False) for k in range(backward.start)], set[Any]()
        for k in backward:
            regions = {
                region_of[graph.node_of[i]] for i in graph.inputs_of[k] if i in needed
            } - again
            steps += [(j, True) for j, r in region_of.items() if r in regions and j <= last[r]]
            again |= regions
            steps.append((k, False))
        # A value is a tensor and which of its computations made it.
        made: dict[int, int] = {}
        last_use: dict[tuple[int, int], int] = {}
        for step, (k, _) in enumerate(steps):
            for i in graph.inputs_of[k]:
                last_use[i, made[i]] = step
            for i in graph.outputs_of[k]:
                made[i] = step
                last_use[i, step] = step
        dying: dict[int, int] = dict.fromkeys(range(len(steps)), 0)
        for (i, _), step in last_use.items():
            dying[step] += graph.tensor_bytes[i]
        live = peak = 0
        for step, (k, _) in enumerate(steps):
            live += graph.made_bytes[k]
            peak = max(peak, live + graph.nodes[k].workspace_bytes)
            live -= dying[step]
        return peak

    def is_repeatable(self, operation: Operation) -> bool:
        """Return whether it may run again: it draws nothing, and has no other effect.

        Operators of a user's own are taken not to, and ``MUST_SAVE`` forbids it.
        """
        if self.policy_of(operation) is CheckpointPolicy.MUST_SAVE:
            return False
        target = operation.node.target
        is_unknown = target is dropout_mask or is_foreign(target)
        return not (operation.is_random or is_unknown or is_effect(operation.node))

    def policy_of(self, operation: Operation) -> CheckpointPolicy | None:
        """Return the policy of selective checkpointing for an operation; None without one."""
        if operation.phase is not Phase.FORWARD:
            return None
        policy: CheckpointPolicy | None = operation.node.meta.get("recompute")
        return policy

    @property
    def must_recompute(self) -> frozenset[int]:
        """Numbers of the storages that ``MUST_RECOMPUTE`` keeps from being saved.

        What cannot run again is saved all the same, and the caller has results.
        """
        made = (
            number
            for operation in self.operations
            if self.policy_of(operation) is CheckpointPolicy.MUST_RECOMPUTE
            and self.is_repeatable(operation)
            for number in operation.storages
        )
        return frozenset(made) - self.handed_early

    def training_graph(self, *, turn_bytes: int | None = None) -> Graph:
        """Return the training graph.

        Its name says nothing, so that one that is captured again is known.

        Parameters
        ----------
        turn_bytes : int, optional
            Workspace of a node between both passes that makes nothing; by default there is none.
        """
        end = self.end(self.held, workspace_bytes=self.copied_bytes)
        nodes = list(map(self._node, self.operations))
        if turn_bytes is not None:
            count = sum(operation.phase is Phase.FORWARD for operation in self.operations)
            turn = replace(self.end((), workspace_bytes=turn_bytes), name=TURN, op=TURN)
            nodes.insert(count, replace(turn, phase=Phase.FORWARD))
        return Graph(name="captured", nodes=(*nodes, end), kernels="pytorch")

    def _node(self, operation: Operation) -> Node:
        """Return the node of an operation; results that the caller has meanwhile take no room."""
        handed = self.handed_early.intersection(operation.storages)
        workspace_bytes = operation.profile.workspace_bytes
        if len(operation.storages) > 1:  # made again beside what the caller has
            workspace_bytes += sum(self.storages[number].bytes for number in handed)
        if operation.node is self._first_backward:  # what is there then was there outside
            made_bytes = sum(self.storages[number].bytes for number in operation.storages)
            outside_bytes = self.outside_bytes - self.tangents_bytes - made_bytes
            workspace_bytes = max(workspace_bytes, outside_bytes)
        touched = (*operation.storages, *operation.reads.storages)
        own = self.node(
            operation,
            workspace_bytes=workspace_bytes,
            bytes_moved=sum(self.storages[number].bytes for number in touched),
            recomputable=self.is_repeatable(operation),
        )
        outputs = zip(operation.storages, own.outputs, strict=True)
        return replace(
            own, outputs=tuple(replace(t, bytes=0) if k in handed else t for k, t in outputs)
        )

    @cached_property
    def _first_backward(self) -> fx.Node | None:
        """The operation that the backward pass begins with, after all that is made again for it."""
        phases = ((operation.phase, operation.node) for operation in self.operations)
        return next((node for phase, node in phases if phase is Phase.BACKWARD), None)

    @cached_property
    def mutated(self) -> frozenset[fx.Node]:
        """Arguments that are written at the end of the forward pass, as buffers of batch norm."""
        from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

        written = {
            node.args[0]
            for node in self.graph.find_nodes(
                op="call_function", target=torch.ops.aten.copy_.default
            )
        }
        kinds = {
            descriptor.mutated_input
            for descriptor in self.output.meta.get("desc", ())
            if isinstance(descriptor, InputMutationAOTOutput)
        }
        return frozenset(
            node for node in self.arguments if node in written or node.meta.get("desc") in kinds
        )

    @cached_property
    def handed_early(self) -> frozenset[int]:
        """Numbers of the results of a forward pass that a backward pass follows.

        The caller has them meanwhile: to let one go and make it again frees nothing.
        """
        if self.is_inference:
            return frozenset()
        return frozenset(self.behind(self.results[: self.forward_outputs]))

    @cached_property
    def added_bytes(self) -> int:
        """The size of the gradients that the backward pass adds to ``.grad`` [B]."""
        return sum(fake(node.args[0]).nbytes for node in self.results if is_addition(node))

    @cached_property
    def copied_bytes(self) -> int:
        """The size of the gradients that autograd copies when it hands them over [B].

        It takes one as it is that lies as its parameter does, and that is handed over once.
        """
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput

        given = {node.meta.get("desc"): node for node in self.arguments}
        gradients = self.results[self.forward_outputs :]
        kinds = self.output.meta.get("desc", ())[self.forward_outputs :]
        own = set(map(storage_of, self.direct))
        total, taken = 0, set[fx.Node]()
        for node, kind in zip(gradients, kinds, strict=False):
            if not isinstance(node, fx.Node) or not isinstance(kind, GradAOTOutput):
                continue
            if is_addition(node):
                continue
            like = fake(given[kind.grad_of])
            if node in taken or storage_of(node) not in own or not _lie_alike(node, like):
                total += like.nbytes
            taken.add(node)
        return total


def _lie_alike(node: fx.Node, like: torch.Tensor) -> bool:
    """Return whether a gradient has the strides that autograd wants it to have."""
    strides = zip(fake(node).stride(), torch.empty_like(like).stride(), like.shape, strict=True)
    return all(own == wanted for own, wanted, size in strides if size != 1)


def _independent(
    calls: Iterable[fx.Node], forward: Collection[fx.Node], tangents: Iterable[fx.Node]
) -> list[fx.Node]:
    """Return pure nodes that the backward pass alone reads and that depend on no gradient.

    AOTAutograd traces them in the forward pass: copies of parts that autograd saves, casts.
    """
    dependent: set[fx.Node] = set(tangents)
    found = []
    for node in calls:
        if not dependent.isdisjoint(node.all_input_nodes):
            dependent.add(node)
        elif node not in forward and _is_pure(node):
            found.append(node)
    return found


def _saved_parts(independent: Sequence[fx.Node], forward: Collection[fx.Node]) -> set[fx.Node]:
    """Return those of some nodes that save RAM if the forward pass computes them.

    These are all that the backward pass reads of a storage, and smaller together than it.
    """
    readers: dict[int, set[fx.Node]] = {}
    sizes: dict[int, int] = {}
    among = set(independent)
    views = {node for node in among if storage_of(node) in _keys(node.all_input_nodes)}
    for node in {*among, *forward, *(user for n in (*among, *forward) for user in n.users)}:
        if node.op == "call_function" and node not in views:
            own = sizes_of(s for s in node.all_input_nodes if s.op == "call_function")
            sizes |= own
            for key in own:
                readers.setdefault(key, set()).add(node)
    found = set[fx.Node]()
    for key, nodes in readers.items():
        late = {node for node in nodes if node not in forward}
        copies = late & among
        if copies and copies == late and all(_keys(n.all_input_nodes) == {key} for n in copies):
            made_bytes = sum(tensor.nbytes for n in copies for tensor in tensors_in(fake(n)))
            if made_bytes < sizes[key]:
                found |= copies
    return ancestors(found) if found else found


def _execution_order(calls: Sequence[fx.Node], independent: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield nodes in their order, but some independent ones right before their first reader.

    At the beginning of the backward pass all of these would be in RAM at once. Those that make less
    than they read keep their places.
    """
    late = {node: k for k, node in enumerate(filter(_is_expanding, independent))}
    for node in calls:
        if node in late:
            continue
        needed, pending = set[fx.Node](), [node]
        while pending:
            sources = [s for s in pending.pop().all_input_nodes if s in late and s not in needed]
            needed.update(sources)
            pending += sources
        yield from sorted(needed, key=late.__getitem__)
        for source in needed:
            del late[source]
        yield node
    yield from late


def _keys(nodes: Iterable[fx.Node]) -> set[int | None]:
    """Return the storages of some nodes."""
    return {storage_of(node) for node in nodes}


def _is_pure(node: fx.Node) -> bool:
    """Return whether a node may be computed at another time: draws nothing, and has no effect."""
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return not (draws or is_effect(node) or is_foreign(node.target) or node.is_impure())


def _is_expanding(node: fx.Node) -> bool:
    """Return whether a node makes at least as many bytes as it reads of other nodes."""
    read_bytes = sum(sizes_of(s for s in node.all_input_nodes if s.op == "call_function").values())
    made_bytes: int = sum(tensor.nbytes for tensor in tensors_in(fake(node)))
    return made_bytes >= read_bytes


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = fake(node)
        if getattr(node.meta.get("recompute"), "name", "") == "MUST_CPU_OFFLOAD":
            raise CaptureError(
                f"{module_of(node) or node.name}: MUST_CPU_OFFLOAD: a plan pages to files alone: "
                "return PREFER_SAVE, and give storage= a folder"
            )
        if node.op == "get_attr" and value is None:
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{module_of(user) or user.name}: {operator_name(user)} takes a function, whose "
                "memory cannot be planned; leave it out, or use torch.where"
            )
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or any(
            not all(isinstance(size, int) for size in tensor.shape) for tensor in tensors_in(value)
        ):
            if node.meta.get("unbacked_bindings") or free_unbacked_symbols(value):
                raise CaptureError(
                    f"{_line_of(node)}: a size, or another number of Python, is read from a tensor "
                    f"({operator_name(node)}), and memory cannot be planned before it is known; "
                    "compute it outside and pass it as a number, or use pmt.compile, which checks "
                    "such values before each step"
                )
            raise CaptureError(
                f"{module_of(node) or _name(node)}: its sizes are not known before the step runs, "
                "and memory cannot be planned without; pass dynamic=False to torch.compile"
            )
        for tensor in tensors_in(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{module_of(node) or _name(node)}: {_name(node)} is a tensor of layout "
                    f"{str(tensor.layout).removeprefix('torch.')}, whose memory cannot be planned; "
                    "make it dense before the compiled function"
                )


def _name(node: fx.Node) -> str:
    """Return the name of a node for people: of an argument that which the function gives it."""
    return str(node.meta.get(SOURCE, node.name))


def _line_of(node: fx.Node) -> str:
    """Return the innermost line of the model that made a node, outside of PyTorch."""
    traces = (near.meta.get("stack_trace") for near in (node, *node.users, *node.all_input_nodes))
    found = _FRAME.findall(next(filter(None, traces), ""))
    inner = Path(torch.__file__).parent
    own = [frame for frame in found if not Path(frame[0]).is_relative_to(inner)]
    if not own:
        return module_of(node) or _name(node)
    path, line, text = own[-1]
    return f"{path}:{line} ({text})"


def sizes_of(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Return the size of each storage that some nodes show, by its key [B]."""
    keys = ((storage_of(node), node) for node in nodes)
    return {key: fake(node).untyped_storage().nbytes() for key, node in keys if key is not None}


def ancestors(results: Iterable[Any]) -> set[fx.Node]:
    """Return nodes with all that they are computed from."""
    pending = [node for node in results if isinstance(node, fx.Node)]
    reached: set[fx.Node] = set()
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending.extend(node.all_input_nodes)
    return reached
