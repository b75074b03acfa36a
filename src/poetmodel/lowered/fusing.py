"""Fusion of weight gradients with their updates, and the split of fused nodes into two.

The gradient of a fused update is no tensor: each element is summed in a register and applied to the
weight. The result is bitwise equal to that of two nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, Ref
from poetmodel.lowered.kernels import parameter_names, written_refs
from poetmodel.lowered.loops import named_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import LoweredStep

UPDATE_FLOPS: Final = 2
"""FLOP per element of a plain SGD update: the product with the learning rate and the difference."""
FUSED_KERNELS: Final = {
    "pm_mm": "pm_mm_sgd",
    "pm_conv2d_dw": "pm_conv2d_dw_sgd",
    "pm_depthwise_dw": "pm_depthwise_dw_sgd",
}
"""Kernels of weight gradients, each with the kernel that also updates the weights."""
INT8_GRADIENT_KERNELS: Final = ("pm_q8_pointwise_dw", "pm_q8_conv2d_dw", "pm_q8_depthwise_dw")
"""Kernels of the gradients of int8 weights; gradients have the layout of the weights."""
INT8_UPDATE_KERNELS: Final = {"pm_q8_sgd": ("w", "residual"), "pm_q8_stochastic": ("w",)}
"""Kernels that update int8 weights by a gradient in memory, with their first parameters: the
state."""
FUSED_INT8_KERNELS: Final = {
    (kernel, update): f"{kernel}_{update.removeprefix('pm_q8_')}"
    for kernel in INT8_GRADIENT_KERNELS
    for update in INT8_UPDATE_KERNELS
}
"""Kernels that compute the gradient of int8 weights and update these, by the (gradient, update)
kernels that they replace."""
_SEPARATE_KERNELS: Final = {fused: kernel for kernel, fused in FUSED_KERNELS.items()}
_SEPARATE_INT8_KERNELS: Final = {fused: pair for pair, fused in FUSED_INT8_KERNELS.items()}
_N_NON_SIZE_PARAMETERS: Final = 4
"""Number of parameters of a kernel of `INT8_GRADIENT_KERNELS` that are no sizes, scales or zero
points: pointers and count."""


def fuse_updates(step: LoweredStep) -> LoweredStep:
    """Return a step in which each SGD update computes its weight gradient itself, if possible.

    That is possible for the weight of a matrix product or a convolution, if one call writes the
    whole gradient in the layout of the weight, only the update reads the gradient, the step does
    not return it, and no state that the call reads is replaced before or by the update. The fused
    node has the name and position of the update, so the gradient's operands stay in memory until
    then. Updates of float convolutions are fused only if the gradient is at least as large as each
    operand. Otherwise fusion would only remove a stage, and with the stage an opportunity to
    recompute, since a stage computes a node once. For int8 weights that is no condition, because
    their gradients are four times as large as the weights. Returns `step` itself if no update is
    fused.
    """
    gradient_nodes = dict(_find_fusible_pairs(step))
    if not gradient_nodes:
        return step
    graph, removed_nodes = step.graph, set(gradient_nodes.values())
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    for k, node in enumerate(graph.nodes):
        if k in removed_nodes:
            continue
        if k in gradient_nodes:
            gradient_node = graph.nodes[gradient_nodes[k]]
            gradient = gradient_node.outputs[0].name
            further_inputs = (name for name in node.inputs if name != gradient)
            node = replace(  # noqa: PLW2901 - the fused node
                node,
                inputs=tuple(dict.fromkeys((*gradient_node.inputs, *further_inputs))),
                flops=gradient_node.flops + node.flops,
                bytes_moved=None,
            )
            calls.append((_make_fused_call(step, gradient_nodes[k], k),))
        else:
            calls.append(step.calls[k])
        nodes.append(node)
    gradients = {graph.nodes[k].outputs[0].name for k in removed_nodes}
    return step.with_nodes(
        nodes,
        calls,
        buffers={name: buffer for name, buffer in step.buffers.items() if name not in gradients},
    )


def split_fused_updates(step: LoweredStep) -> LoweredStep:
    """Return a step in which a separate node computes the gradient of each fused update.

    The gradient is then a tensor, so that weights can be divided together with their gradients.
    `fuse_updates` can fuse the pieces again. The new node and its tensor have the name of the
    update and ``.gradient``. Always returns a new step.
    """
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    buffers = dict(step.buffers)
    for node, call in zip(step.graph.nodes, step.calls, strict=True):
        match call:
            case (Call(kernel, (Ref(weight, 0) as w, *operands, rate, sign, decay)),) if (
                kernel in _SEPARATE_KERNELS
            ):
                name = f"{node.name}.gradient"
                buffers[name] = step.buffers[weight]
                count = buffers[name].elements
                nodes += _split_node(
                    node, (weight,), Tensor(name=name, bytes=buffers[name].bytes), count
                )
                calls.append((_make_gradient_call(_SEPARATE_KERNELS[kernel], Ref(name), operands),))
                calls.append((Call("pm_sgd", (w, Ref(name), count, rate, sign, decay)),))
            case (Call(kernel) as fused_call,) if kernel in _SEPARATE_INT8_KERNELS:
                name = f"{node.name}.gradient"
                gradient_call, update = _split_int8_call(fused_call, name)
                weight, *further_inputs = (ref.buffer for ref in written_refs(fused_call))
                count = step.buffers[weight].elements
                buffers[name] = Buffer(elements=count, type=DataType.REAL)
                gradient = Tensor(name=name, bytes=buffers[name].bytes)
                nodes += _split_node(node, (weight, *further_inputs), gradient, count)
                calls += [(gradient_call,), (update,)]
            case _:
                nodes.append(node)
                calls.append(call)
    return step.with_nodes(nodes, calls, buffers=buffers)


def _make_gradient_call(kernel: str, gradient: Ref, operands: Sequence[Argument]) -> Call:
    """Return the call of `kernel` that writes `gradient`, its first argument.

    The `operands` of a fused call follow. For ``pm_mm``, a 0 is appended, the flag that it does not
    add to `gradient`. For other kernels, the last operand, the batch stride of the input, is
    dropped.
    """
    if kernel == "pm_mm":
        return Call(kernel, (gradient, *operands, 0))
    return Call(kernel, (gradient, *operands[:-1]))


def _split_int8_call(fused_call: Call, gradient: str) -> tuple[Call, Call]:
    """Split a fused call into the call that writes buffer `gradient`, and the update that reads it.

    Neither call has a condition, even if `fused_call` has one.
    """
    kernel, update = _SEPARATE_INT8_KERNELS[fused_call.kernel]
    n_state, n_size_arguments = (
        len(INT8_UPDATE_KERNELS[update]),
        len(parameter_names(kernel)) - _N_NON_SIZE_PARAMETERS,
    )
    state, (output_gradient, x, scale, *remaining_arguments) = (
        fused_call.arguments[:n_state],
        fused_call.arguments[n_state:],
    )
    size_arguments, further_inputs = (
        remaining_arguments[:n_size_arguments],
        remaining_arguments[n_size_arguments:],
    )
    operands = named_arguments(fused_call)
    sizes = ConvolutionSizes(*operands["shape"]) if "shape" in operands else None
    if sizes is not None and "depthwise" in kernel:
        weights_per_result, results = 1, sizes.channels
        count = results
    else:
        count = operands["count"]
        weights_per_result = (
            operands["in"] if sizes is None else sizes.group_channels * sizes.window
        )
        results = count // weights_per_result
    gradient_call = Call(kernel, (Ref(gradient), output_gradient, x, *size_arguments, count))
    return gradient_call, Call(
        update, (*state, Ref(gradient), scale, results, weights_per_result, *further_inputs)
    )


def _split_node(
    node: Node, state: tuple[str, ...], gradient: Tensor, count: int
) -> tuple[Node, Node]:
    """Split a fused node into the node of a gradient and the node of the update of `state`.

    The update reads `state` and the gradient, the node of the gradient all other inputs. The update
    has `UPDATE_FLOPS` for each of `count` elements, at most all FLOP of the node; the gradient has
    the remaining FLOP. All other fields of the update are those of `node`; the node of the gradient
    is a backward ``mm`` with the only output `gradient`, without workspace.
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
    """Yield the node indices (update, gradient) of each update that can compute its gradient.

    Pairs are in the order of the updates; `fuse_updates` states the conditions.
    """
    graph = step.graph
    returned_names = step.returned_buffers
    for update_index, calls in enumerate(step.calls):
        match calls:
            case (Call("pm_sgd", (Ref(weight, 0), Ref(gradient, 0), int(count), *_)),):
                pass
            case (Call(kernel, (Ref(weight, 0), *further_inputs)),) if (
                kernel in INT8_UPDATE_KERNELS
            ):
                gradient_argument = further_inputs[len(INT8_UPDATE_KERNELS[kernel]) - 1]
                gradient = (
                    gradient_argument.buffer
                    if isinstance(gradient_argument, Ref) and not gradient_argument.offset
                    else ""
                )
                count = step.buffers[weight].elements
            case _:
                continue
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

    The node must consist of one call of a supported kernel, with one output, no workspace and no
    in-place pairs. The buffers of gradient and weight must have `count` elements, those of the
    update. The gradient of a float convolution must also have at least the bytes of each tensor
    that the node reads.
    """
    node = step.graph.nodes[k]
    if len(node.outputs) != 1 or node.workspace_bytes or node.in_place:
        return False
    if any(step.buffers[name].elements != count for name in (gradient, weight)):
        return False
    match step.calls[k]:
        case (Call(kernel, (Ref(out, 0), *_)),) if kernel in INT8_GRADIENT_KERNELS:
            return out == gradient
        case (Call("pm_mm", (Ref(out, 0), Ref(), Ref(), int(m), int(), int(n), int(row), *_, 0)),):
            return out == gradient and row == n and m * n == count
        case (Call(kernel, (Ref(out, 0), Ref(), Ref(), tuple(shape), _, _, int(result_count), _)),):
            sizes = ConvolutionSizes(*shape)
            weights_per_result = sizes.group_channels * sizes.window
            is_whole = (
                kernel in FUSED_KERNELS
                and out == gradient
                and result_count * weights_per_result == count
            )
            return is_whole and is_gradient_largest(step, k)
    return False


def is_gradient_largest(step: LoweredStep, k: int) -> bool:
    """Return whether the outputs of node `k` together have at least the bytes of each input tensor.

    Inputs of the step and constants are no tensors. Raises `ValueError` if the node reads none.
    """
    graph = step.graph
    return graph.nodes[k].output_bytes >= max(graph.tensor_bytes[i] for i in graph.inputs_of[k])


def _reads_replaced_state(step: LoweredStep, k: int, update_index: int) -> bool:
    """Return whether state that node `k` reads is replaced in node `update_index` or before."""
    graph = step.graph
    replacements = (graph.replacement_of.get(i) for i in graph.inputs_of[k])
    return any(new is not None and graph.node_of[new] <= update_index for new in replacements)


def _make_fused_call(step: LoweredStep, k: int, update_index: int) -> Call:
    """Return the call that computes the gradient of node `k` and updates the weight with it.

    It replaces the only calls of node `k` and of the update, node `update_index`.
    """
    (gradient_call,), (update,) = step.calls[k], step.calls[update_index]
    if gradient_call.kernel in INT8_GRADIENT_KERNELS:
        n_state = len(INT8_UPDATE_KERNELS[update.kernel])
        state, (_, scale, _, _, *further_inputs) = (
            update.arguments[:n_state],
            update.arguments[n_state:],
        )
        # The last argument is the number of weights, which `further_inputs` contain, too.
        _, output_gradient, x, *size_arguments, _ = gradient_call.arguments
        arguments = (*state, output_gradient, x, scale, *size_arguments, *further_inputs)
        return Call(FUSED_INT8_KERNELS[gradient_call.kernel, update.kernel], arguments)
    weight, _, _, *update_arguments = update.arguments
    _, *operands = gradient_call.arguments
    match operands:
        case _, _, tuple(shape), *_:
            sizes = ConvolutionSizes(*shape)
            # The stride of the input from one sample to the next.
            operands.append(sizes.channels * sizes.plane)
        case _:
            del operands[-1]  # the flag that adds the product to the output
    return Call(FUSED_KERNELS[gradient_call.kernel], (weight, *operands, *update_arguments))
