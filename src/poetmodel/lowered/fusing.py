"""Gradients of weights and their updates in one node, where nothing else reads the gradient.

The gradient is no tensor then: each of its elements is summed in a register and goes into the
weight, with the bits of two nodes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, ConvolutionSizes, DataType, Ref
from poetmodel.lowered.kernels import changed, parameter_names
from poetmodel.lowered.loops import named_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import LoweredStep

UPDATE_FLOPS: Final = 2
"""Of an element: the product with the rate, and the difference."""
FUSED: Final = {
    "pm_mm": "pm_mm_sgd",
    "pm_conv2d_dw": "pm_conv2d_dw_sgd",
    "pm_depthwise_dw": "pm_depthwise_dw_sgd",
}
"""Kernels that make gradients of weights, and those that update the weights too."""
QUANTIZED: Final = ("pm_q8_pointwise_dw", "pm_q8_conv2d_dw", "pm_q8_depthwise_dw")
"""Kernels that make gradients of int8 weights, which lie as these do."""
QUANTIZED_UPDATES: Final = {"pm_q8_sgd": ("w", "residual"), "pm_q8_stochastic": ("w",)}
"""Kernels that update int8 weights by a gradient in memory, and the state that they begin with."""
QUANTIZED_FUSED: Final = {
    (kernel, update): f"{kernel}_{update.removeprefix('pm_q8_')}"
    for kernel in QUANTIZED
    for update in QUANTIZED_UPDATES
}
"""Kernels that do both."""
_PARTS: Final = {fused: kernel for kernel, fused in FUSED.items()}
_QUANTIZED_PARTS: Final = {fused: pair for pair, fused in QUANTIZED_FUSED.items()}
_NOT_SIZES: Final = 4
"""Parameters of a kernel of `QUANTIZED` that are not sizes, scales or zeros: pointers, count."""


def fused(step: LoweredStep) -> LoweredStep:
    """Return a step in which the update of a weight by SGD makes its gradient, where it can.

    The weight is that of a product of matrices or of a convolution, its gradient one call that
    only the update reads. The joined node is where the update was: what the gradient is made of
    stays to then. A convolution's is joined where the gradient takes as much as each tensor that it
    is made of: a stage less leaves less room for recomputing, which computes a node once a stage.
    Gradients of int8 weights are four times as large as these: they are always joined.
    """
    makers = dict(_pairs(step))
    if not makers:
        return step
    graph, gone = step.graph, set(makers.values())
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    for k, node in enumerate(graph.nodes):
        if k in gone:
            continue
        if k in makers:
            maker = graph.nodes[makers[k]]
            gradient = maker.outputs[0].name
            others = (name for name in node.inputs if name != gradient)
            node = replace(  # noqa: PLW2901 - the node that takes its place
                node,
                inputs=tuple(dict.fromkeys((*maker.inputs, *others))),
                flops=maker.flops + node.flops,
                bytes_moved=None,
            )
            calls.append((_joined(step, makers[k], k),))
        else:
            calls.append(step.calls[k])
        nodes.append(node)
    gradients = {graph.nodes[k].outputs[0].name for k in gone}
    return step.with_nodes(
        nodes,
        calls,
        buffers={name: buffer for name, buffer in step.buffers.items() if name not in gradients},
    )


def parted(step: LoweredStep) -> LoweredStep:
    """Return a step in which each gradient is a tensor again, made right before its update.

    So that weights can be split, with their gradients: what was parted is fused again then.
    """
    nodes: list[Node] = []
    calls: list[tuple[Call, ...]] = []
    buffers = dict(step.buffers)
    for node, call in zip(step.graph.nodes, step.calls, strict=True):
        match call:
            case (Call(kernel, (Ref(weight, 0) as w, *given, rate, sign, decay)),) if (
                kernel in _PARTS
            ):
                name = f"{node.name}.gradient"
                buffers[name] = step.buffers[weight]
                count = buffers[name].elements
                nodes += _two(node, (weight,), Tensor(name=name, bytes=buffers[name].bytes), count)
                calls.append((_gradient_call(_PARTS[kernel], Ref(name), given),))
                calls.append((Call("pm_sgd", (w, Ref(name), count, rate, sign, decay)),))
            case (Call(kernel) as joined,) if kernel in _QUANTIZED_PARTS:
                name = f"{node.name}.gradient"
                made, update = _quantized_parts(joined, name)
                weight, *others = (ref.buffer for ref in changed(joined))
                count = step.buffers[weight].elements
                buffers[name] = Buffer(elements=count, type=DataType.REAL)
                gradient = Tensor(name=name, bytes=buffers[name].bytes)
                nodes += _two(node, (weight, *others), gradient, count)
                calls += [(made,), (update,)]
            case _:
                nodes.append(node)
                calls.append(call)
    return step.with_nodes(nodes, calls, buffers=buffers)


def _gradient_call(kernel: str, gradient: Ref, given: Sequence[Argument]) -> Call:
    """Return the call that makes a gradient, of what a joined one is given beside numbers."""
    if kernel == "pm_mm":
        return Call(kernel, (gradient, *given, 0))
    return Call(kernel, (gradient, *given[:-1]))


def _quantized_parts(joined: Call, gradient: str) -> tuple[Call, Call]:
    """Return the call that writes `gradient`, and the update that reads it, of a joined call."""
    kernel, update = _QUANTIZED_PARTS[joined.kernel]
    size, last = len(QUANTIZED_UPDATES[update]), len(parameter_names(kernel)) - _NOT_SIZES
    state, (of_result, x, scale, *rest) = joined.arguments[:size], joined.arguments[size:]
    numbers, others = rest[:last], rest[last:]
    given = named_arguments(joined)
    sizes = ConvolutionSizes(*given["shape"]) if "shape" in given else None
    if sizes is not None and "depthwise" in kernel:
        inner, results = 1, sizes.channels
        count = results
    else:
        count = given["count"]
        inner = given["in"] if sizes is None else sizes.group_channels * sizes.window
        results = count // inner
    made = Call(kernel, (Ref(gradient), of_result, x, *numbers, count))
    return made, Call(update, (*state, Ref(gradient), scale, results, inner, *others))


def _two(node: Node, state: tuple[str, ...], gradient: Tensor, count: int) -> tuple[Node, Node]:
    """Return the node of a gradient and that of the update of `state`, with some of their FLOP."""
    flops = min(node.flops, UPDATE_FLOPS * count)
    maker = Node(
        name=gradient.name,
        op="mm",
        phase=Phase.BACKWARD,
        inputs=tuple(name for name in node.inputs if name not in state),
        outputs=(gradient,),
        flops=node.flops - flops,
    )
    return maker, replace(node, inputs=(*state, gradient.name), flops=flops)


def _pairs(step: LoweredStep) -> Iterator[tuple[int, int]]:
    """Yield each update that can make its gradient, with the node that makes it now."""
    graph = step.graph
    handed_out = step.handed_out
    for u, calls in enumerate(step.calls):
        match calls:
            case (Call("pm_sgd", (Ref(weight, 0), Ref(gradient, 0), int(count), *_)),):
                pass
            case (Call(kernel, (Ref(weight, 0), *others)),) if kernel in QUANTIZED_UPDATES:
                made = others[len(QUANTIZED_UPDATES[kernel]) - 1]
                gradient = made.buffer if isinstance(made, Ref) and not made.offset else ""
                count = step.buffers[weight].elements
            case _:
                continue
        i = graph.tensor_index.get(gradient)
        if i is None or graph.users_of[i] != (u,) or gradient in handed_out:
            continue
        k = graph.node_of[i]
        if _makes_alone(step, k, gradient, weight, count) and not _is_stale(step, k, u):
            yield u, k


def _makes_alone(step: LoweredStep, k: int, gradient: str, weight: str, count: int) -> bool:
    """Return whether a node is one product that writes a gradient as the weight lies."""
    node = step.graph.nodes[k]
    if len(node.outputs) != 1 or node.workspace_bytes or node.in_place:
        return False
    if any(step.buffers[name].elements != count for name in (gradient, weight)):
        return False
    match step.calls[k]:
        case (Call(kernel, (Ref(out, 0), *_)),) if kernel in QUANTIZED:
            return out == gradient
        case (Call("pm_mm", (Ref(out, 0), Ref(), Ref(), int(m), int(), int(n), int(row), *_, 0)),):
            return out == gradient and row == n and m * n == count
        case (Call(kernel, (Ref(out, 0), Ref(), Ref(), tuple(shape), _, _, int(made), _)),):
            sizes = ConvolutionSizes(*shape)
            one = sizes.group_channels * sizes.window
            whole = kernel in FUSED and out == gradient and made * one == count
            return whole and saves_memory(step, k)
    return False


def saves_memory(step: LoweredStep, k: int) -> bool:
    """Return whether a gradient takes as much as each tensor that it is made of."""
    graph = step.graph
    return graph.nodes[k].output_bytes >= max(graph.tensor_bytes[i] for i in graph.inputs_of[k])


def _is_stale(step: LoweredStep, k: int, u: int) -> bool:
    """Return whether something that a node reads has a new value before an update."""
    graph = step.graph
    news = (graph.replacement_of.get(i) for i in graph.inputs_of[k])
    return any(new is not None and graph.node_of[new] <= u for new in news)


def _joined(step: LoweredStep, k: int, u: int) -> Call:
    """Return the call that makes a gradient and updates the weight with it."""
    (made,), (update,) = step.calls[k], step.calls[u]
    if made.kernel in QUANTIZED:
        size = len(QUANTIZED_UPDATES[update.kernel])
        state, (_, scale, _, _, *others) = update.arguments[:size], update.arguments[size:]
        _, gradient, x, *rest, _ = made.arguments  # the update has a number of weights, too
        arguments = (*state, gradient, x, scale, *rest, *others)
        return Call(QUANTIZED_FUSED[made.kernel, update.kernel], arguments)
    weight, _, _, *numbers = update.arguments
    _, *given = made.arguments
    match given:
        case _, _, tuple(shape), *_:
            sizes = ConvolutionSizes(*shape)
            given.append(
                sizes.channels * sizes.plane
            )  # the input, from one of the batch to the next
        case _:
            del given[-1]  # whether it adds to what is there
    return Call(FUSED[made.kernel], (weight, *given, *numbers))
