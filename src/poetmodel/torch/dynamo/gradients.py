"""Gradients that the backward graph adds to ``.grad`` itself, instead of returning them.

Autograd gets None instead of these gradients and accumulates none. Recent versions of PyTorch call
post-accumulation hooks nevertheless. Cases whose sums could differ from those of autograd are
refused.

The first check of a backward pass covers all its calls, so that a refusal leaves ``.grad``
unchanged. Autograd has no list of the nodes of a pass, so this check reads the outputs from the
Python frame that called the engine. If another thread called the engine, as for passes on GPUs,
each call is checked alone, and earlier calls may have added gradients before a refusal.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import fx
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.fx.node import has_side_effect

from poetmodel.torch.dynamo.wrappers import active_ddp
from poetmodel.torch.errors import CaptureError
from poetmodel.torch.graph.tensors import fake_storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import FrameType

OPTION_NAME: Final = "add_gradients"
"""Name of the option of the back end."""
_LEAVE_OUT: Final = f"or leave {OPTION_NAME} out"
WRAPPER_ERROR: Final = (
    f"{OPTION_NAME}: DistributedDataParallel and fully_shard reduce gradients that autograd "
    f"returns: leave {OPTION_NAME} out"
)


def add_gradient(parameter: torch.Tensor, gradient: torch.Tensor, *, is_owned: bool) -> None:
    """Add a gradient to ``parameter.grad`` in place; if that is None, set it.

    A gradient that `is_owned` (no other operation reads its memory) becomes the new ``.grad``
    itself if it has autograd's layout and fills its storage; otherwise ``.grad`` is a copy.
    """
    if not (parameter.is_leaf and parameter.requires_grad):
        raise AssertionError("autograd saved another tensor instead of a parameter")

    old_gradient = parameter.grad
    if old_gradient is not None:
        old_gradient.add_(gradient)
        return
    layout = torch.empty_like(parameter, device="meta")
    fills_storage = gradient.untyped_storage().nbytes() == gradient.nbytes
    if is_owned and fills_storage and gradient.stride() == layout.stride():
        parameter.grad = gradient.detach()
    else:
        parameter.grad = torch.empty_like(parameter).copy_(gradient)


has_side_effect(add_gradient)


def trained_parameters(inputs: Sequence[Any], names: Mapping[int, str]) -> dict[int, str]:
    """Return the name of each trained parameter by position in `inputs`, or ``parameter 3``."""
    return {
        position: names.get(position) or f"parameter {position}"
        for position, value in enumerate(inputs)
        if isinstance(value, torch.nn.Parameter) and value.requires_grad
    }


def insert_additions(graph: fx.Graph, parameters: Mapping[int, str]) -> None:
    """Replace gradients in the results of a joint graph by operations that add them to ``.grad``.

    `parameters` has names by input position; gradients of other inputs stay results. Each operation
    directly follows the computation of its gradient.
    """
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput

    (output,) = graph.find_nodes(op="output")
    arguments = {node.meta.get("desc"): node for node in graph.find_nodes(op="placeholder")}
    results = list(output.args[0])
    for position, descriptor in enumerate(output.meta.get("desc", ())):
        gradient = results[position]
        if not isinstance(descriptor, GradAOTOutput) or not isinstance(gradient, fx.Node):
            continue
        parameter = descriptor.grad_of
        if not isinstance(parameter, PlainAOTInput) or parameter.idx not in parameters:
            continue
        is_computed = gradient.op == "call_function"
        with graph.inserting_before(gradient.next if is_computed else output):
            node = graph.call_function(
                add_gradient, (arguments[parameter], gradient), {"is_owned": False}
            )
        node.meta = {"val": None, "desc": descriptor}
        for key in ("nn_module_stack", "fwd_nn_module_stack"):
            if key in gradient.meta:
                node.meta[key] = gradient.meta[key]
        results[position] = node
    output.args = (tuple(results),)
    _set_ownership(graph)


def is_addition(node: Any) -> bool:
    """Return whether a node adds a gradient to ``.grad``."""
    return isinstance(node, fx.Node) and node.target is add_gradient


def _set_ownership(graph: fx.Graph) -> None:
    """Set `is_owned` of each `add_gradient` node: no other node except views reads its memory."""
    readers: dict[int | None, set[fx.Node]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            key = fake_storage_key(source)
            if key != fake_storage_key(node):
                readers.setdefault(key, set()).add(node)
    for node in filter(is_addition, graph.nodes):
        gradient: Any = node.args[1]
        is_owned = gradient.op == "call_function" and readers[fake_storage_key(gradient)] == {node}
        node.kwargs = {"is_owned": is_owned}


class AdditionChecks:
    """Checks in each backward pass that gradients may be added to ``.grad`` by the graph.

    `parameters` are by position among the arguments of the function.
    """

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        _calls_hooks()  # caches the result, which cannot be computed in a backward pass

    def add_checks(
        self, compiled_function: Callable[..., Any], find_node: Callable[[Any], Any]
    ) -> Any:
        """Wrap a compiled function, so that it registers a check of each call's backward pass.

        `find_node` returns a weak reference to the autograd node that made given results.
        """

        def call_compiled(*arguments: Any) -> Any:
            """Call the function, and make `_check_pass` a prehook of its node."""
            if not torch.is_grad_enabled():
                return compiled_function(*arguments)
            if active_ddp() is not None:
                raise CaptureError(WRAPPER_ERROR)
            if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # noqa: FBT003, SLF001 - no other way
                raise CaptureError(
                    f"{OPTION_NAME}: hooks of saved tensors, as those of torch.utils.checkpoint, "
                    f"hide parameters: call the function without them, {_LEAVE_OUT}"
                )
            results = compiled_function(*arguments)
            node = find_node(results)
            if node is not None:
                names = {
                    id(arguments[position]): name for position, name in self._parameters.items()
                }
                node().metadata[_NAMES_KEY] = names
                node().register_prehook(lambda _: _check_pass(node()))
            elif any(getattr(value, "requires_grad", False) for value in results):
                raise CaptureError(
                    f"{OPTION_NAME}: no result has the call's autograd node: return a copy"
                )
            return results

        return call_compiled


_ADDED_KEY: Final = "poetmodel.added"
"""Key under an AccumulateGrad node's metadata: id of the backward pass that added a gradient."""
_NAMES_KEY: Final = "poetmodel.names"
"""Key under a call node's metadata: names of its parameters by their ``id``."""
_CHECKED_KEY: Final = "poetmodel.checked"
"""Key under a call node's metadata: id of the backward pass in which the node was checked."""


def _check_pass(node: Any) -> None:
    """Check all calls of a backward pass; a prehook of `node`.

    The first check covers all calls, so that an error leaves ``.grad`` unchanged; if another thread
    called the engine, only this call. Then registers a `_GradientWatch` per parameter.
    """
    if torch.is_grad_enabled():
        raise CaptureError(
            f"{OPTION_NAME}: backward(create_graph=True) needs differentiable gradients: "
            f"leave {OPTION_NAME} out"
        )
    pass_id = _current_pass_id()
    if node.metadata.get(_CHECKED_KEY) != pass_id:
        _check_calls(pass_id, _find_executed_nodes() or [node])
    targets = _find_targets(node)
    for target, name in targets:
        error = _find_error(target.variable, target, name)
        if error is not None:
            raise CaptureError(f"{OPTION_NAME}: {error}")
    for target, name in targets:
        target.metadata[_ADDED_KEY] = pass_id
        _GradientWatch(target, name)


def _current_pass_id() -> int:
    """Return the id of the running backward pass."""
    return int(torch._C._current_graph_task_id())  # noqa: SLF001 - no other way


def _find_targets(node: Any) -> list[tuple[Any, str]]:
    """Return (AccumulateGrad node, name) of each parameter of the call with autograd node `node`.

    The call stored the names in the node's metadata. Only direct successors of the node count.
    """
    names = node.metadata[_NAMES_KEY]
    return [
        (target, names[id(target.variable)])
        for target, _ in node.next_functions
        if _is_leaf(target) and id(target.variable) in names
    ]


def _is_leaf(node: Any) -> bool:
    """Return whether a node accumulates the gradient of a leaf."""
    return type(node).__name__ == "AccumulateGrad"


def _check_calls(pass_id: int, nodes: Sequence[Any]) -> None:
    """Fail at the first error of any call among `nodes`; mark the calls as checked in the pass."""
    calls = [node for node in nodes if _NAMES_KEY in node.metadata]
    n_sources = Counter(leaf_id for node in nodes for leaf_id in _leaf_ids(node))
    for node in calls:
        for target, name in _find_targets(node):
            variable = target.variable
            error = _find_error(variable, target, name)
            if error is None and n_sources[id(variable)] > 1:
                error = _sources_message(name)
            if error is not None:
                raise CaptureError(f"{OPTION_NAME}: {error}")
    for node in calls:
        node.metadata[_CHECKED_KEY] = pass_id


def _leaf_ids(node: Any) -> set[int]:
    """Return the ``id`` of each leaf whose gradient `node` computes or accumulates."""
    targets = [node, *(target for target, _ in node.next_functions)]
    return {id(target.variable) for target in targets if _is_leaf(target)}


def _find_executed_nodes() -> list[Any]:
    """Return the nodes that the running backward pass executes, from the engine's Python frame.

    AccumulateGrad nodes are omitted unless the pass begins at them. Empty if another thread called
    the engine, as for passes on GPUs.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - no other way
    while frame is not None and frame.f_code is not _engine_run_backward.__code__:
        frame = frame.f_back
    if frame is None:
        return []
    nodes: list[Any] = [
        output.node if isinstance(output, GradientEdge) else get_gradient_edge(output).node
        for output in frame.f_locals["t_outputs"]
    ]
    visited = set(nodes)
    for node in nodes:  # grows in the loop
        for source, _ in node.next_functions:
            if source is None or source in visited or _is_leaf(source):
                continue
            if torch._C._will_engine_execute_node(source):  # noqa: SLF001 - no other way
                visited.add(source)
                nodes.append(source)
    return nodes


class _GradientWatch:
    """A prehook that fails if autograd gets another gradient of a parameter in this pass."""

    def __init__(self, target: Any, name: str) -> None:
        self._name = name
        self._pass_id = _current_pass_id()
        self._handle = target.register_prehook(self)

    def __call__(self, gradients: Sequence[Any]) -> None:
        """Remove the prehook; raise `CaptureError` if a gradient is accumulated in its pass."""
        self._handle.remove()
        if self._pass_id == _current_pass_id() and any(
            gradient is not None for gradient in gradients
        ):
            raise CaptureError(f"{OPTION_NAME}: {_sources_message(self._name)}")


def _sources_message(name: str) -> str:
    return (
        f"{name} also gets gradients from elsewhere in this backward pass, and their sum would "
        "have other bits: compile the function that makes all of them, call backward() for each, "
        f"{_LEAVE_OUT}"
    )


def _find_error(parameter: Any, target: Any, name: str) -> str | None:
    """Return the reason not to add a gradient of `parameter`, with node `target`; None if none."""
    if not _is_accumulated(target):
        return (
            f"torch.autograd.grad, and backward(inputs=...) without {name}, need gradients that "
            f"are not for .grad: leave {OPTION_NAME} out"
        )
    if target.metadata.get(_ADDED_KEY) == _current_pass_id():
        return _sources_message(name)
    if parameter._backward_hooks:  # noqa: SLF001 - no other way
        return (
            f"{name} has a hook of register_hook, which autograd calls with the gradient: use "
            f"register_post_accumulate_grad_hook, {_LEAVE_OUT}"
        )
    if getattr(parameter, "_post_accumulate_grad_hooks", None) and not _calls_hooks():
        return (
            f"{name} has a hook of register_post_accumulate_grad_hook, which this version of "
            f"PyTorch calls only for returned gradients: update PyTorch, {_LEAVE_OUT}"
        )
    if parameter.grad is not None and parameter.grad.layout is not torch.strided:
        return f"{name}.grad is sparse: set it to None, {_LEAVE_OUT}"
    return None


class _NoGradient(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """A function whose backward pass returns None as gradient."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.sum()

    @staticmethod
    def backward(_: Any, __: Any) -> Any:
        return None


@cache
def _calls_hooks() -> bool:
    """Return whether autograd calls post-accumulation hooks even if the gradient is None."""
    calls: list[object] = []
    with torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        leaf.register_post_accumulate_grad_hook(calls.append)
        _NoGradient.apply(leaf).backward()
    return bool(calls)


def _is_accumulated(target: Any) -> bool:
    """Return whether the running backward pass accumulates the gradient of a leaf."""
    try:
        return bool(torch._C._will_engine_execute_node(target))  # noqa: SLF001 - no other way
    except RuntimeError:  # the leaf's gradient is captured for torch.autograd.grad
        return False
