"""Operations of a joint graph that make memory, and the storages that they make."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.utils import _pytree

from poetmodel.torch.capturing.replay import kernel_of, storage_key, tensors_in
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.known_steps import is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHOSEN: Final = "poetmodel.chosen"
"""Key under a node's ``meta``: its target, and what to call in place of it. PyTorch copies ``meta``
to other operators, which must not be replaced."""

TANGENTS: Final = "tangents"
"""How the names begin of arguments that are gradients of results."""


def function_of(node: fx.Node) -> Callable[..., Any]:
    """Return the function for a node: its target, or a replacement for it."""
    target, chosen = node.meta.get(CHOSEN, (None, None))
    function: Callable[..., Any] = chosen if target is node.target else node.target
    return function


def fake(node: fx.Node) -> Any:
    """Return the output of a node, without its memory, as the capture predicts it."""
    return node.meta.get("val")


def storage_of(node: fx.Node) -> int | None:
    """Return the key of the storage that a node shows; None where it is no tensor, or several."""
    value = fake(node)
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def is_effect(node: fx.Node) -> bool:
    """Return whether a node is there for what it does: writes an argument, or checks values."""
    return node.target is torch.ops.aten.copy_.default or (
        node.op == "call_function" and fake(node) is None and node.is_impure()
    )


def operator_name(node: fx.Node) -> str:
    """Return the name of the operator of a node, without its overload."""
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        return str(schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def node_names(nodes: Iterable[fx.Node]) -> list[str]:
    """Return a name of each node: its module and operator, with a number where it repeats."""
    seen = Counter[str]()
    names = []
    for node in nodes:
        module, operator_ = module_of(node), operator_name(node)
        stem = f"{module}/{operator_}" if module else operator_
        seen[stem] += 1
        names.append(f"{stem}#{seen[stem]}" if seen[stem] > 1 else stem)
    return names


def module_of(node: fx.Node) -> str:
    """Return the path of the module that an operation of the forward or backward pass is of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str(next(reversed(stack.values()))[0]) if stack else ""
    return path.removeprefix("L['self']").replace("L['model']", "").strip(".")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """An operation that makes memory: one node of the training graph."""

    node: fx.Node
    makes: tuple[int, ...]
    """Keys of its storages."""
    reads: tuple[int, ...]
    """Keys of the storages behind its arguments."""
    is_backward: bool

    @property
    def is_repeatable(self) -> bool:
        """Whether it gives the same again: it draws no random numbers, and has no other effect.

        Nobody knows that of an operator of a user's own.
        """
        target = self.node.target
        is_random = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
        is_unknown = target is dropout_mask or is_foreign(target)
        return not (is_random or is_unknown or is_effect(self.node))


class Operations:
    """The operations of a graph, forward pass first, and the storages that they make.

    Parameters
    ----------
    graph : torch.fx.Graph
        A joint graph, or that of a forward pass alone; every node has its predicted value.
    forward_outputs : int, optional
        How many of the results are those of the forward pass; by default all.
    is_inlined : callable, optional
        Whether a node of so many bytes is computed inside of each of its readers and never has
        memory, told also the sizes of what it reads; by default none is.

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
        is_inlined: Callable[[fx.Node, int, list[int]], bool] = lambda *_: False,
    ) -> None:
        _check(graph)
        self._is_inlined = is_inlined
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
        """Arguments that are gradients of results, which the backward pass begins with."""
        self.owner: dict[int, fx.Node | None] = {}
        """The node that shows a storage as it was made, by its key; None where nobody reads it."""
        self.bytes: dict[int, int] = {}
        self._inlined: dict[int, tuple[int, ...]] = {}
        """Inputs of values that are computed inside of their readers: keys by key."""
        self.tuples: dict[fx.Node, set[int]] = {}
        """Keys of the results of operations with several results."""
        self.operations: list[Operation] = []
        written = [
            node for node in graph.nodes if node.meta.get("partitioner_tag") == "must_be_in_forward"
        ]
        self.forward = ancestors([*self.results[:count], *written])
        """All nodes of the forward pass."""
        self._add()
        self.held = self.behind(node for node in self.results if isinstance(node, fx.Node))
        """Keys of what is handed over at the end."""

    def _add(self) -> None:
        calls = [node for node in self.graph.nodes if node.op == "call_function"]
        there = {storage_of(node) for node in self.arguments}
        for node in sorted(calls, key=lambda node: node not in self.forward):
            if node.target is operator.getitem and node.args[0] in self.tuples:
                key = storage_of(node)
                if key in self.tuples[node.args[0]] and self.owner[key] is None:
                    self.owner[key] = node
                continue
            value = fake(node)
            fresh = {
                storage_key(tensor): tensor.untyped_storage().nbytes()
                for tensor in tensors_in(value)
                if storage_key(tensor) not in there | self.owner.keys() | self._inlined.keys()
            }
            if not fresh and not is_effect(node):
                continue  # a view, which is made again where it is read
            reads = self.behind(node.all_input_nodes)
            sizes = [self.bytes[key] for key in reads]
            if fresh and self._is_inlined(node, sum(fresh.values()), sizes):
                self._inlined.update(dict.fromkeys(fresh, reads))
                continue
            if isinstance(value, tuple | list):
                self.tuples[node] = set(fresh)
            self.owner.update(dict.fromkeys(fresh, None if node in self.tuples else node))
            self.bytes.update(fresh)
            operation = Operation(
                node=node,
                makes=tuple(fresh),
                reads=reads,
                is_backward=node not in self.forward,
            )
            self.operations.append(operation)

    def behind(self, nodes: Iterable[fx.Node]) -> tuple[int, ...]:
        """Return the keys of the storages of the graph that some nodes show, or are made of."""
        shown = (key for key in map(storage_of, nodes) if key is not None)
        keys = (key for own in shown for key in self._inlined.get(own, (own,)))
        return tuple(dict.fromkeys(key for key in keys if key in self.owner))

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
        """Keys of the results of a forward pass that a backward pass follows.

        The caller has them meanwhile: to let one go and make it again frees nothing.
        """
        if self.is_inference:
            return frozenset()
        results = self.results[: self.forward_outputs]
        return frozenset(self.behind(node for node in results if isinstance(node, fx.Node)))

    @cached_property
    def copied_bytes(self) -> int:
        """The size of the gradients that autograd copies when it hands them over [B].

        It takes one as it is that lies as its parameter does, and that is handed over once.
        """
        from torch._functorch._aot_autograd.descriptors import GradAOTOutput

        given = {node.meta.get("desc"): node for node in self.arguments}
        gradients = self.results[self.forward_outputs :]
        kinds = self.output.meta.get("desc", ())[self.forward_outputs :]
        total, taken = 0, set[fx.Node]()
        for node, kind in zip(gradients, kinds, strict=False):
            if not isinstance(node, fx.Node) or not isinstance(kind, GradAOTOutput):
                continue
            like = fake(given[kind.grad_of])
            if node in taken or storage_of(node) not in self.owner or not _lie_alike(node, like):
                total += like.nbytes
            taken.add(node)
        return total


def _lie_alike(node: fx.Node, like: torch.Tensor) -> bool:
    """Return whether a gradient has the strides that autograd wants it to have."""
    strides = zip(fake(node).stride(), torch.empty_like(like).stride(), like.shape, strict=True)
    return all(own == wanted for own, wanted, size in strides if size != 1)


def _check(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = fake(node)
        if node.op == "get_attr" and value is None:
            user = next(iter(node.users), node)
            raise CaptureError(
                f"{module_of(user) or user.name}: {operator_name(user)} takes a function, whose "
                "memory cannot be planned; leave it out, or use torch.where"
            )
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) or any(
            not all(isinstance(size, int) for size in tensor.shape) for tensor in tensors_in(value)
        ):
            raise CaptureError(
                f"{module_of(node) or node.name}: its sizes are not known before the step runs, "
                "and memory cannot be planned without; pass dynamic=False to torch.compile"
            )
        for tensor in tensors_in(value):
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"{module_of(node) or node.name}: {node.name} is a tensor of layout "
                    f"{str(tensor.layout).removeprefix('torch.')}, whose memory cannot be planned; "
                    "make it dense before the compiled function"
                )


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


# -- dropout: its mask is drawn once, and what it drops is computed again --------------------------


def dropout_mask(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draw which elements of a tensor dropout keeps, as eager PyTorch does."""
    if p == 1:
        return torch.zeros_like(x, dtype=torch.bool)
    return torch.empty_like(x).bernoulli_(1 - p).to(torch.bool)


def dropped(x: torch.Tensor, mask: torch.Tensor, p: float) -> torch.Tensor:
    """Return a tensor after dropout with a mask: the bits of eager PyTorch."""
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype, device=x.device))
    noise = mask.to(x.dtype).div_(1 - p)
    return noise.mul_(x) if noise.stride() == x.stride() else x * noise


def split_dropout(graph: fx.Graph) -> None:
    """Take dropout apart into its mask, which is drawn once, and what can be computed again.

    The backward pass gets the kernel that gives eager's bits.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        node.meta[CHOSEN] = (node.target, kernel_of(node))
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        x, p, train = node.args
        if train is False or fake(x).numel() == 0:
            continue
        output, kept = fake(node)
        with graph.inserting_before(node):
            mask = graph.call_function(dropout_mask, (x, p))
            result = graph.call_function(dropped, (x, mask, p))
        for new, value in ((mask, kept), (result, output)):
            new.meta = dict(node.meta) | {"val": value}
        for user in list(node.users):
            user.replace_all_uses_with(result if user.args[1] == 0 else mask)
            graph.erase_node(user)
        graph.erase_node(node)
