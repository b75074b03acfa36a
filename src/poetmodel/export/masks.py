"""Replace saved activations by masks, for gradients that do not need the values.

The gradient of ReLU and similar activations needs one bit per element, as does dropout; that of a
maximum needs the position in its window, a byte. PyTorch saves a byte (dropout) or a number of
several bytes for each element. Losses, gradients and state have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.loops import table_columns
from poetmodel.lowered.step import ALIGNMENT

if TYPE_CHECKING:
    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import LoweredStep

_FORWARD_KERNELS: Final = {
    "pm_hardtanh_backward": "pm_clamp",
    "pm_leaky_relu_backward": "pm_leaky_relu",
}
"""The activation of each gradient kernel that may read the output in place of the input."""
_HARDSIGMOID: Final = (-3.0, 3.0)
"""Interval in which the slope of hardsigmoid is not 0."""
_HARDSIGMOID_SLOPE: Final = 0.1666666716337204
"""1/6 as a float: see ``pm_hardsigmoid_backward``."""
_MAX_WINDOW: Final = 2**8
"""Maximum number of elements of a window whose positions fit a byte."""


def mask_activations(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read masks in place of activations where possible.

    Some gradients read the output of an activation in place of its input (`_use_outputs`). Masks of
    dropout become bits, too, and positions of maxima bytes. A mask of bits is the output of a
    separate node, which a schedule may recompute; positions of maxima remain an output of their
    pool. An activation has no mask if a gradient, such as that of a weight, reads its values, or if
    the mask is not smaller.
    """
    for rewrite in (_use_outputs, _add_bit_masks, _draw_dropout_bits, _store_byte_positions):
        step = rewrite(step)
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Replaced and new nodes of a step, collected before all changes are applied."""

    step: LoweredStep
    replacements: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """Replacement of a node with its only call, by index of the replaced node."""
    new_nodes: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """New node with its only call, by index of the node next to which it is inserted."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    """New buffers, and buffers with a new type."""

    def apply(self, *, new_nodes_first: bool = False) -> LoweredStep:
        """Return the changed step.

        New nodes follow the nodes of their indices, or precede them if `new_nodes_first`.
        """
        nodes: list[Node] = []
        calls: list[tuple[Call, ...]] = []
        for k, entry in enumerate(zip(self.step.graph.nodes, self.step.calls, strict=True)):
            node, call = self.replacements.get(k, (None, None))
            entries = [entry if node is None or call is None else (node, (call,))]
            if k in self.new_nodes:
                new_node, new_call = self.new_nodes[k]
                entries.insert(0 if new_nodes_first else 1, (new_node, (new_call,)))
            nodes += [node for node, _ in entries]
            calls += [calls for _, calls in entries]
        return self.step.with_nodes(nodes, calls, buffers={**self.step.buffers, **self.buffers})


@dataclass(frozen=True, slots=True, kw_only=True)
class _LoopTable:
    """A shape table: loop sizes and strides of the tensors of a kernel, see ``pm_each.h``."""

    sizes: tuple[int, ...]
    """Sizes of the dimensions, the innermost first."""
    strides: tuple[tuple[int, ...], ...]
    """For each tensor, its strides in the dimensions [elements]."""

    @classmethod
    def parse(cls, shape: Argument) -> _LoopTable:
        """Parse the shape table of a call."""
        sizes, *strides = table_columns(shape)
        return cls(sizes=sizes, strides=tuple(strides))

    @property
    def elements(self) -> int:
        """Number of iterations of all loops."""
        return math.prod(self.sizes)

    def make_table(self, *tensors: int) -> tuple[int, ...]:
        """Return the shape table of tensors with these indices, with loops in the same order."""
        columns = (self.sizes, *(self.strides[k] for k in tensors))
        return (len(self.sizes), *(number for row in zip(*columns, strict=True) for number in row))

    def is_in_order(self, tensor: int) -> bool:
        """Return whether the loop accesses adjacent elements of a tensor, in memory order."""
        lengths = accumulate(self.sizes, mul, initial=1)
        dimensions = zip(self.sizes, self.strides[tensor], lengths, strict=False)
        return all(size == 1 or stride == length for size, stride, length in dimensions)


def _make_bit_buffer(elements: int) -> Buffer:
    return Buffer(elements=-(-elements // 8), type=DataType.UINT8)


def _is_smaller(new: Buffer, old: Tensor) -> bool:
    """Return whether a buffer has fewer aligned bytes than a tensor."""
    return -(-new.bytes // ALIGNMENT) < -(-old.bytes // ALIGNMENT)


def _bits_save_memory(step: LoweredStep, tensor: str, shape: Argument) -> bool:
    """Return whether a mask takes less memory than a tensor.

    The mask has one bit per iteration of the loops of the shape table `shape`.
    """
    old = step.graph.tensors[step.graph.tensor_index[tensor]]
    return _is_smaller(_make_bit_buffer(_LoopTable.parse(shape).elements), old)


def _find_only_call(step: LoweredStep, k: int) -> Call:
    """Return the call of node `k` if it has exactly one, otherwise a call without kernel."""
    calls = step.calls[k]
    return calls[0] if len(calls) == 1 else Call("", ())


def _is_backward(node: Node) -> bool:
    """Return whether a node is part of the backward pass or of an update."""
    return node.phase in (Phase.BACKWARD, Phase.UPDATE)


def _replace_input(node: Node, old: str, new: str) -> Node:
    """Return a node in which tensor `new` replaces input `old`.

    Drops in-place pairs with `old`, the stated memory traffic, and a second input `new`.
    """
    names = dict.fromkeys(new if name == old else name for name in node.inputs)
    pairs = tuple(pair for pair in node.in_place if pair[1] != old)
    return replace(node, inputs=tuple(names), in_place=pairs, bytes_moved=None)


# -- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slope:
    """The gradient of an activation whose slope has two values, selected by a comparison of x.

    The compared tensor `x` is the input or the output of the activation.
    """

    x: Ref
    loop: _LoopTable
    """Loop over the computed gradient, the incoming gradient, and x."""
    mask_kernel: str
    """The kernel that compares x and writes one bit per element."""
    limits: tuple[float, ...]
    """Bounds for x, and the bit for NaN: the last arguments of `mask_kernel`."""
    apply_kernel: str
    """The kernel that applies the bits to the incoming gradient."""
    factor: float
    """The number by which ``pm_bits_scale`` multiplies if the bit is 1, ``pm_bits_slope`` if 0."""

    def make_mask_call(self, mask: str) -> Call:
        """Return the call that writes the bits to buffer `mask`."""
        return Call(self.mask_kernel, (Ref(mask), self.x, self.loop.make_table(2), *self.limits))


def _parse_slope(call: Call) -> _Slope | None:
    """Parse the gradient of threshold, leaky ReLU, hardtanh or hardsigmoid, otherwise None."""
    mask_kernel, limits = "pm_above_bits", tuple[float, ...]()
    apply_kernel, factor = "pm_bits_scale", 1.0
    match call:
        case Call("pm_threshold_backward", (Ref(), Ref(), Ref() as x, shape, float(threshold))):
            limits = (threshold, 1)
        case Call("pm_leaky_relu_backward", (Ref(), Ref(), Ref() as x, shape, float(factor))):
            limits, apply_kernel = (0.0, 0), "pm_bits_slope"
        case Call("pm_hardtanh_backward", (Ref(), Ref(), Ref() as x, shape, float(a), float(b))):
            mask_kernel, limits = "pm_between_bits", (a, b, 1)
        case Call("pm_hardsigmoid_backward", (Ref(), Ref(), Ref() as x, shape)):
            mask_kernel, limits = "pm_between_bits", (*_HARDSIGMOID, 0)
            factor = _HARDSIGMOID_SLOPE
        case _:
            return None
    loop = _LoopTable.parse(shape)
    return _Slope(
        x=x,
        loop=loop,
        mask_kernel=mask_kernel,
        limits=limits,
        apply_kernel=apply_kernel,
        factor=factor,
    )


def _find_slopes(step: LoweredStep, tensor: str) -> dict[int, _Slope]:
    """Find the `_Slope` of each backward node that reads a forward tensor, by index of the node.

    The result is empty if the tensor is not of the forward pass or loss, or unless each of these
    nodes has a single call, which uses the tensor only for one comparison.
    """
    graph = step.graph
    i = graph.tensor_index.get(tensor)
    if i is None or graph.nodes[graph.node_of[i]].phase not in (Phase.FORWARD, Phase.LOSS):
        return {}
    slopes: dict[int, _Slope] = {}
    for k in graph.users_of[i]:
        if not _is_backward(graph.nodes[k]):
            continue
        call = _find_only_call(step, k)
        operands = [argument.buffer for argument in call.arguments if isinstance(argument, Ref)]
        slope = _parse_slope(call)
        if slope is None or slope.x.buffer != tensor or operands.count(tensor) > 1:
            return {}
        slopes[k] = slope
    return slopes


def _use_outputs(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read outputs of activations in place of their inputs.

    Applies to hardtanh and leaky ReLU where output and input select equal slopes, and no gradient
    reads values of the input. If several gradients compare the input, applies only if a mask is
    smaller than the input: `_add_bit_masks` can then replace the input in gradients that do not
    read the output. The next layer often saves the output for the gradient of its weights; then the
    input need not be saved.
    """
    changes = _Changes(step=step)
    for k, node in enumerate(step.graph.nodes):
        match _find_only_call(step, k):
            case Call(kernel, (out, incoming, Ref() as x, shape, *number_arguments)) if (
                kernel in _FORWARD_KERNELS
            ):
                slopes = _find_slopes(step, x.buffer)
                if not slopes or not (len(slopes) == 1 or _bits_save_memory(step, x.buffer, shape)):
                    continue  # other gradients would still read x
                output_and_loop = _find_output(
                    step,
                    _FORWARD_KERNELS[kernel],
                    x,
                    _LoopTable.parse(shape),
                    tuple(number_arguments),
                )
                if output_and_loop is not None:
                    y, loop = output_and_loop
                    call = Call(
                        kernel, (out, incoming, y, loop.make_table(0, 1, 2), *number_arguments)
                    )
                    changes.replacements[k] = (_replace_input(node, x.buffer, y.buffer), call)
    return changes.apply()


def _find_output(
    step: LoweredStep, kernel: str, x: Ref, loop: _LoopTable, number_arguments: tuple[Argument, ...]
) -> tuple[Ref, _LoopTable] | None:
    """Return the output of the activation of `x`, and `loop` over that output in place of `x`.

    The activation is the first forward node whose only call is `kernel` with `x`,
    `number_arguments`, and the loop sizes and strides of x in `loop`. None if there is no such
    node, or if a negative slope reverses the order of values.
    """
    graph = step.graph
    for k in graph.users_of[graph.tensor_index[x.buffer]]:
        if _is_backward(graph.nodes[k]):
            continue
        match _find_only_call(step, k):
            case Call(called_kernel, (Ref() as y, Ref() as input_ref, shape, *forward_numbers)):
                output_loop = _LoopTable.parse(shape) if called_kernel == kernel else None
            case _:
                continue
        if output_loop is None or input_ref != x or tuple(forward_numbers) != number_arguments:
            continue
        is_decreasing = kernel == "pm_leaky_relu" and not (
            isinstance(forward_numbers[0], float) and forward_numbers[0] >= 0
        )
        if not is_decreasing and (output_loop.sizes, output_loop.strides[1]) == (
            loop.sizes,
            loop.strides[2],
        ):
            return y, replace(loop, strides=(*loop.strides[:2], output_loop.strides[0]))
    return None


def _add_bit_masks(step: LoweredStep) -> LoweredStep:
    """Return a step with a node for each mask of one bit per element, which gradients read.

    A tensor has a mask if gradients only compare it, all in the same way, and the mask is smaller.
    Only the first output of a node that meets these conditions has one. A tensor has no mask if
    another tensor already has the name of the mask, ``TENSOR.mask``.
    """
    graph, changes = step.graph, _Changes(step=step)
    for i, tensor in enumerate(graph.tensors):
        slopes = _find_slopes(step, tensor.name)
        name, producer_index = f"{tensor.name}.mask", graph.node_of[i]
        mask_calls = {slope.make_mask_call(name) for slope in slopes.values()}
        if len(mask_calls) != 1:
            continue
        elements = next(iter(slopes.values())).loop.elements
        bit_buffer = _make_bit_buffer(elements)
        has_name = name in graph.tensor_index or producer_index in changes.new_nodes
        if has_name or elements == 0 or not _is_smaller(bit_buffer, tensor):
            continue
        mask = Node(
            name=name,
            op="mask",
            phase=graph.nodes[producer_index].phase,
            inputs=(tensor.name,),
            outputs=(Tensor(name=name, bytes=bit_buffer.bytes),),
            flops=elements,
        )
        changes.buffers[name] = bit_buffer
        changes.new_nodes[producer_index] = (mask, mask_calls.pop())
        for k, slope in slopes.items():
            out, incoming = _find_only_call(step, k).arguments[:2]
            shape = slope.loop.make_table(0, 1)
            call = Call(slope.apply_kernel, (out, incoming, Ref(name), shape, slope.factor))
            changes.replacements[k] = (_replace_input(graph.nodes[k], tensor.name, name), call)
    return changes.apply()


# -- dropout -------------------------------------------------------------------------------------


def _draw_dropout_bits(step: LoweredStep) -> LoweredStep:
    """Return a step in which a separate node draws the mask of each dropout, one bit per element.

    The mask node has no inputs, and draws the same mask if a step recomputes it. Forward and
    backward passes apply the mask with the same kernel. A dropout is unchanged if a node reads its
    mask other than to apply it to all elements, or if the elements are not in memory order.
    """
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _find_only_call(step, k):
            case Call("pm_dropout", (out, Ref(name, 0), x, shape, *random_numbers, factor)):
                loop = _LoopTable.parse(shape)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        loop_of_user = {user: _parse_mask_loop(_find_only_call(step, user), name) for user in users}
        loops = [user_loop for user_loop in loop_of_user.values() if user_loop is not None]
        sizes = {user_loop.elements for user_loop in loops} | {loop.elements}
        if len(loops) != len(users) or len(sizes) != 1 or not loop.is_in_order(1):
            continue
        bit_buffer = _make_bit_buffer(loop.elements)
        tensor = Tensor(name=name, bytes=bit_buffer.bytes)
        mask = Node(
            name=f"{node.name}.mask",
            op="mask",
            phase=node.phase,
            outputs=(tensor,),
            flops=loop.elements,
        )
        changes.buffers[name] = bit_buffer
        changes.new_nodes[k] = (
            mask,
            Call("pm_dropout_bits", (Ref(name), loop.elements, *random_numbers)),
        )
        other_outputs = tuple(tensor for tensor in node.outputs if tensor.name != name)
        applying_node = replace(
            node, inputs=(*node.inputs, name), outputs=other_outputs, bytes_moved=None
        )
        call = Call("pm_bits_scale", (out, x, Ref(name), loop.make_table(0, 2), factor))
        changes.replacements[k] = (applying_node, call)
        for user, user_loop in zip(users, loops, strict=True):
            out, incoming, _, _, factor = _find_only_call(step, user).arguments
            call = Call(
                "pm_bits_scale", (out, incoming, Ref(name), user_loop.make_table(0, 1), factor)
            )
            changes.replacements[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.apply(new_nodes_first=True)


def _parse_mask_loop(call: Call, mask: str) -> _LoopTable | None:
    """Return the loop of a call that applies `mask` in memory order; None for any other call."""
    match call:
        case Call("pm_mask_scale", (_, _, Ref(name, 0), shape, _)) if name == mask:
            loop = _LoopTable.parse(shape)
            return loop if loop.is_in_order(2) else None
    return None


# -- maxima --------------------------------------------------------------------------------------


def _store_byte_positions(step: LoweredStep) -> LoweredStep:
    """Return a step with the positions of maxima as bytes, counted within the window.

    A pool is unchanged if it has windows of more than `_MAX_WINDOW` elements, or if a node other
    than a gradient of the pool reads the positions.
    """
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _find_only_call(step, k):
            case Call(
                "pm_max_pool2d", (out, Ref(name) as positions, x, rows, columns, *size_arguments)
            ):
                strides, batch, channels, height, width, _, *dilations = size_arguments
                windows = (rows, columns)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        calls = {user: _find_only_call(step, user) for user in users}
        if _max_window_elements(windows, dilations) > _MAX_WINDOW or not all(
            call.kernel == "pm_max_pool2d_backward" and call.arguments[2] == positions
            for call in calls.values()
        ):
            continue
        position_buffer = replace(step.buffers[name], type=DataType.UINT8)
        changes.buffers[name] = position_buffer
        outputs = tuple(
            replace(tensor, bytes=position_buffer.bytes) if tensor.name == name else tensor
            for tensor in node.outputs
        )
        call = Call(
            "pm_max_pool2d_places",
            (out, positions, x, *windows, strides, batch, channels, height, width, *dilations),
        )
        changes.replacements[k] = (replace(node, outputs=outputs, bytes_moved=None), call)
        for user, gradient_call in calls.items():
            operands, sizes = gradient_call.arguments[:3], gradient_call.arguments[3:]
            call = Call("pm_max_pool2d_places_backward", (*operands, *windows, *sizes, *dilations))
            changes.replacements[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.apply()


def _max_window_elements(windows: tuple[Argument, Argument], dilations: list[Argument]) -> int:
    """Return the number of elements of the largest window of a pool.

    `windows` has the (begin, exclusive end) pairs of all windows along input rows, and along input
    columns, each as a flat tuple; `dilations` has the steps within a window along both. Raises
    `TypeError` if `windows` contains no tuples, or a dilation is no integer.
    """
    max_sizes = []
    for bounds, dilation in zip(windows, dilations, strict=True):
        if not isinstance(bounds, tuple) or not isinstance(dilation, int):
            raise TypeError(bounds)
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        max_sizes.append(max(-(-(end - begin) // dilation) for begin, end in pairs))
    return math.prod(max_sizes)
