"""Fusion of weight gradients with their updates, and the split of fused nodes into two.

The gradient of a fused update is no tensor: each element is summed in a register and applied to the
weight. The result is bitwise equal to that of two nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, Ref
from poetmodel.lowered.catalogue import CATALOGUE, find_form
from poetmodel.lowered.forms import MATRIX_PRODUCT, Q8_DEPTHWISE_DW
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.step import LoweredNode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import LoweredStep

UPDATE_FLOPS: Final = 2
"""FLOP per element of a plain SGD update: the product with the learning rate and the difference."""
_FUSED_KERNELS: Final = {row.fuses: name for name, row in CATALOGUE.items() if row.fuses}
"""The kernel that replaces the kernels of a gradient and of its update."""
_UPDATE_KERNELS: Final = frozenset(update for _, update in _FUSED_KERNELS)


def fuse_updates(step: LoweredStep) -> LoweredStep:
    """Return a step in which each SGD update computes its weight gradient itself, if possible.

    Operands stay in memory until the update. A float gradient must have at least the bytes of each
    operand: otherwise fusion only removes a stage, and so a chance to recompute. int8 weights need
    no such condition: gradients have 4 times their bytes.
    """
    gradient_nodes = dict(_find_fusible_pairs(step))
    if not gradient_nodes:
        return step
    graph = step.graph
    replacements: dict[int, list[LoweredNode]] = {k: [] for k in gradient_nodes.values()}
    gradients = {graph.nodes[k].outputs[0].name for k in replacements}
    for update, k in gradient_nodes.items():
        node, gradient_node = graph.nodes[update], graph.nodes[k]
        inputs = (*gradient_node.inputs, *(name for name in node.inputs if name not in gradients))
        fused_node = replace(
            node,
            inputs=tuple(dict.fromkeys(inputs)),
            flops=gradient_node.flops + node.flops,
            bytes_moved=None,
        )
        replacements[update] = [LoweredNode(fused_node, (_make_fused_call(step, k, update),))]
    buffers = {name: buffer for name, buffer in step.buffers.items() if name not in gradients}
    return step.edit(replacements, buffers=buffers)


def split_fused_updates(step: LoweredStep) -> LoweredStep:
    """Return a step in which a separate node computes the gradient of each fused update.

    Weights can then be divided together with their gradients; `fuse_updates` can fuse the pieces.
    The new node and its tensor are named after the update: ``UPDATE.gradient``.
    """
    buffers = dict(step.buffers)
    replacements: dict[int, Iterable[LoweredNode]] = {}
    for k, (node, calls) in enumerate(step.operations):
        if len(calls) != 1 or CATALOGUE[calls[0].kernel].fuses is None:
            continue
        (fused_call,) = calls
        state = tuple(ref.buffer for ref in fused_call.writes)
        name, count = f"{node.name}.gradient", buffers[state[0]].elements
        buffers[name] = Buffer(elements=count, type=DataType.REAL)
        gradient = Tensor(name=name, bytes=buffers[name].bytes)
        nodes = _split_node(node, state, gradient, count)
        split_calls = _split_call(fused_call, name, count)
        replacements[k] = [
            LoweredNode(new_node, (call,))
            for new_node, call in zip(nodes, split_calls, strict=True)
        ]
    return step.edit(replacements, buffers=buffers)


def _split_call(fused_call: Call, gradient: str, count: int) -> tuple[Call, Call]:
    """Split a fused call: one call writes `gradient`, of `count` elements, the update reads it."""
    gradient_kernel, update_kernel = CATALOGUE[fused_call.kernel].fuses or ("", "")
    known = fused_call.named_arguments
    result, *_ = find_kernel(gradient_kernel).index_of
    own = {result: Ref(gradient), "out_row": known.get("w_row", 0), "accumulate": 0}
    new: dict[str, Argument] = {"gradient": Ref(gradient), "n": count}
    if "scale" in known:  # int8
        n_rows, row_elements = _find_filters(fused_call)
        own["count"] = n_rows if _is_depthwise(fused_call) else n_rows * row_elements
        new |= {"results": n_rows, "inner": row_elements}
    return (
        _make_call(gradient_kernel, {**known, **own}),
        _make_call(update_kernel, {**known, **new}),
    )


def _find_filters(call: Call) -> tuple[int, int]:
    """Return (number of rows, weights per row) of int8 weights; each row has one scale."""
    if "shape" not in call:
        return call["count"] // call["in"], call["in"]
    sizes = ConvolutionSizes(*call["shape"])
    if _is_depthwise(call):
        return sizes.channels, 1
    row_elements = sizes.group_channels * sizes.window
    return call["count"] // row_elements, row_elements


def _is_depthwise(fused_call: Call) -> bool:
    """Return whether a fused call is of int8 weights whose channels are last."""
    gradient_kernel, _ = CATALOGUE[fused_call.kernel].fuses or (fused_call.kernel, "")
    return CATALOGUE[gradient_kernel].form is Q8_DEPTHWISE_DW


def _make_call(kernel: str, known: Mapping[str, Argument]) -> Call:
    """Return the call of a kernel with those of the known arguments that it has."""
    return Call.by_name(kernel, **{name: known[name] for name in find_kernel(kernel).index_of})


def _split_node(
    node: Node, state: tuple[str, ...], gradient: Tensor, count: int
) -> tuple[Node, Node]:
    """Split a fused node into the node of a gradient and the node of the update of `state`.

    The update has `UPDATE_FLOPS` for each of `count` elements, at most all FLOP of the node.
    """
    flops = min(node.flops, UPDATE_FLOPS * count)
    gradient_node = Node(
        name=gradient.name,
        op="mm",
        phase=Phase.BACKWARD,
        inputs=tuple(name for name in node.inputs if name not in state),
        outputs=(gradient,),
        flops=node.flops - flops,
    )
    return gradient_node, replace(node, inputs=(*state, gradient.name), flops=flops)


def _find_fusible_pairs(step: LoweredStep) -> Iterator[tuple[int, int]]:
    """Yield the node indices (update, gradient) of each update that can compute its gradient."""
    graph = step.graph
    returned_names = step.returned_buffers
    for update_index, calls in enumerate(step.calls):
        if len(calls) != 1 or calls[0].kernel not in _UPDATE_KERNELS:
            continue
        weight, gradient_ref = calls[0]["w"], calls[0]["gradient"]
        if weight.offset or gradient_ref.offset:
            continue
        weight, gradient = weight.buffer, gradient_ref.buffer
        count = calls[0]["n"] if "n" in calls[0] else step.buffers[weight].elements
        i = graph.tensor_index.get(gradient)
        if i is None or graph.users_of[i] != (update_index,) or gradient in returned_names:
            continue
        k = graph.node_of[i]
        if _is_fusible_gradient(step, k, gradient, weight, count) and not _reads_replaced_state(
            step, k, update_index
        ):
            yield update_index, k


def _is_fusible_gradient(step: LoweredStep, k: int, gradient: str, weight: str, count: int) -> bool:
    """Return whether node `k` only computes the whole gradient of a weight, in the weight's layout.

    For float convolutions, `is_gradient_largest` must hold, too.
    """
    node = step.graph.nodes[k]
    if len(node.outputs) != 1 or node.workspace_bytes or node.in_place:
        return False
    if any(step.buffers[name].elements != count for name in (gradient, weight)):
        return False
    if len(step.calls[k]) != 1:
        return False
    (call,) = step.calls[k]
    if call.kernel not in {gradient_kernel for gradient_kernel, _ in _FUSED_KERNELS}:
        return False
    if Ref(gradient) not in call.writes:
        return False
    if find_form(call) is MATRIX_PRODUCT:
        is_dense = call["out_row"] == call["n"] and call["m"] * call["n"] == count
        return is_dense and not call["accumulate"]
    if step.buffers[weight].type is DataType.INT8:
        return True
    sizes = ConvolutionSizes(*call["shape"])
    is_whole = call["count"] * sizes.group_channels * sizes.window == count
    return is_whole and is_gradient_largest(step, k)


def is_gradient_largest(step: LoweredStep, k: int) -> bool:
    """Return whether the outputs of node `k` together have at least the bytes of each input tensor.

    Inputs of the step and constants are no tensors; the node must read a tensor.
    """
    graph = step.graph
    return graph.nodes[k].output_bytes >= max(graph.tensor_bytes[i] for i in graph.inputs_of[k])


def _reads_replaced_state(step: LoweredStep, k: int, update_index: int) -> bool:
    """Return whether state that node `k` reads is replaced in node `update_index` or before."""
    graph = step.graph
    replacements = (graph.replacement_of.get(i) for i in graph.inputs_of[k])
    return any(new is not None and graph.node_of[new] <= update_index for new in replacements)


def _make_fused_call(step: LoweredStep, k: int, update_index: int) -> Call:
    """Return the call that computes the gradient of node `k` and updates the weight with it."""
    (gradient_call,), (update,) = step.calls[k], step.calls[update_index]
    state = {"w", "residual", "scale", "first", "count", "lr", "sign", "decay"}
    known = {**update.named_arguments, **gradient_call.named_arguments}
    known |= {name: x for name, x in update.named_arguments.items() if name in state}
    if find_form(gradient_call) is MATRIX_PRODUCT:
        known["w_row"] = known["out_row"]
    elif "shape" in known:
        sizes = ConvolutionSizes(*known["shape"])
        known["x_step"] = sizes.channels * sizes.plane
    return _make_call(_FUSED_KERNELS[gradient_call.kernel, update.kernel], known)
