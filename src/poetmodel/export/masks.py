"""Masks in place of saved activations, for gradients that do not need the values.

The gradient of ReLU and similar activations needs one bit per element, as does dropout; that of a
maximum needs the position in its window, a byte. PyTorch saves a number for each. Losses, gradients
and state have the same bits.
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
"""The kernel of an activation, by gradient kernel that may read its output instead."""
_HARDSIGMOID: Final = (-3.0, 3.0)
"""Interval in which the slope of hardsigmoid is not 0."""
_HARDSIGMOID_SLOPE: Final = 0.1666666716337204
"""1/6 as a float: see ``pm_hardsigmoid_backward``."""
_MAX_WINDOW: Final = 2**8
"""Max. elements of a window whose positions fit a byte."""


def mask_activations(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read masks in place of activations where possible.

    A mask is the output of a separate node, which a schedule may recompute. An activation has no
    mask if a gradient, such as that of a weight, reads its values.
    """
    for rewrite in (_read_outputs, _add_bit_masks, _draw_dropout_bits, _store_byte_positions):
        step = rewrite(step)
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """Replaced and new nodes of a step, collected before all are applied."""

    step: LoweredStep
    replaced: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """By index of a node, its replacement with the only call of this replacement."""
    added: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """By index of a node, a new node next to it with its only call."""
    buffers: dict[str, Buffer] = field(default_factory=dict)
    """New buffers, and buffers with a new type."""

    def apply(self, *, before: bool = False) -> LoweredStep:
        """Return the changed step. New nodes follow the nodes of their indices, or precede them."""
        nodes: list[Node] = []
        calls: list[tuple[Call, ...]] = []
        for k, entry in enumerate(zip(self.step.graph.nodes, self.step.calls, strict=True)):
            node, call = self.replaced.get(k, (None, None))
            entries = [entry if node is None or call is None else (node, (call,))]
            if k in self.added:
                new_node, mask_call = self.added[k]
                entries.insert(0 if before else 1, (new_node, (mask_call,)))
            nodes += [node for node, _ in entries]
            calls += [calls for _, calls in entries]
        return self.step.with_nodes(nodes, calls, buffers={**self.step.buffers, **self.buffers})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A shape table: loop sizes and strides of the tensors of a kernel, see ``pm_each.h``."""

    sizes: tuple[int, ...]
    """Sizes of the dimensions, the innermost first."""
    steps: tuple[tuple[int, ...], ...]
    """For each tensor, its strides in the dimensions [elements]."""

    @classmethod
    def of(cls, shape: Argument) -> _Loop:
        """Parse the shape argument of a call."""
        sizes, *steps = table_columns(shape)
        return cls(sizes=sizes, steps=tuple(steps))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def table_for(self, *tensors: int) -> tuple[int, ...]:
        """Return the table for some of the tensors, with loops in the same order."""
        columns = (self.sizes, *(self.steps[k] for k in tensors))
        return (len(self.sizes), *(n for row in zip(*columns, strict=True) for n in row))

    def is_in_order(self, tensor: int) -> bool:
        """Return whether the loop accesses the elements of a tensor in memory order."""
        lengths = accumulate(self.sizes, mul, initial=1)
        dimensions = zip(self.sizes, self.steps[tensor], lengths, strict=False)
        return all(size == 1 or step == length for size, step, length in dimensions)


def _bit_buffer(elements: int) -> Buffer:
    return Buffer(elements=-(-elements // 8), type=DataType.UINT8)


def _is_smaller(new: Buffer, old: Tensor) -> bool:
    """Return whether a buffer has fewer aligned bytes than a tensor."""
    return -(-new.bytes // ALIGNMENT) < -(-old.bytes // ALIGNMENT)


def _has_mask(step: LoweredStep, tensor: str, shape: Argument) -> bool:
    """Return whether one bit per element of a tensor uses less memory than the tensor."""
    old = step.graph.tensors[step.graph.tensor_index[tensor]]
    return _is_smaller(_bit_buffer(_Loop.of(shape).elements), old)


def _only_call(step: LoweredStep, k: int) -> Call:
    """Return the call of a node with exactly one; otherwise a call without kernel."""
    calls = step.calls[k]
    return calls[0] if len(calls) == 1 else Call("", ())


def _is_backward(node: Node) -> bool:
    return node.phase in (Phase.BACKWARD, Phase.UPDATE)


def _replace_input(node: Node, old: str, new: str) -> Node:
    """Return a node in which tensor `new` replaces input `old`."""
    names = dict.fromkeys(new if name == old else name for name in node.inputs)
    pairs = tuple(pair for pair in node.in_place if pair[1] != old)
    return replace(node, inputs=tuple(names), in_place=pairs, bytes_moved=None)


# -- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slope:
    """The gradient of an activation whose slope has two values: one comparison of x selects it."""

    x: Ref
    loop: _Loop
    """Loop over the computed gradient, the incoming gradient, and x."""
    mask_kernel: str
    """The kernel that compares x and writes one bit per element."""
    limits: tuple[float, ...]
    """Bounds for x, and the bit for NaN: the last arguments of `mask_kernel`."""
    apply_kernel: str
    """The kernel that applies the bits to the incoming gradient."""
    factor: float
    """The number by which `apply_kernel` multiplies."""

    def mask_call(self, mask: str) -> Call:
        """Return the call that writes the bits to buffer `mask`."""
        return Call(self.mask_kernel, (Ref(mask), self.x, self.loop.table_for(2), *self.limits))


def _parse_slope(call: Call) -> _Slope | None:
    """Parse the gradient of an activation with a two-valued slope; None for any other call."""
    mask_kernel, limits = "pm_above_bits", tuple[float, ...]()
    apply_kernel, factor = "pm_bits_scale", 1.0
    match call:
        case Call(
            "pm_threshold_backward", (Ref(), Ref(), Ref() as x, shape, float(position_buffer))
        ):
            limits = (position_buffer, 1)
        case Call("pm_leaky_relu_backward", (Ref(), Ref(), Ref() as x, shape, float(factor))):
            limits, apply_kernel = (0.0, 0), "pm_bits_slope"
        case Call("pm_hardtanh_backward", (Ref(), Ref(), Ref() as x, shape, float(a), float(b))):
            mask_kernel, limits = "pm_between_bits", (a, b, 1)
        case Call("pm_hardsigmoid_backward", (Ref(), Ref(), Ref() as x, shape)):
            mask_kernel, limits = "pm_between_bits", (*_HARDSIGMOID, 0)
            factor = _HARDSIGMOID_SLOPE
        case _:
            return None
    loop = _Loop.of(shape)
    return _Slope(
        x=x,
        loop=loop,
        mask_kernel=mask_kernel,
        limits=limits,
        apply_kernel=apply_kernel,
        factor=factor,
    )


def _slopes_by_reader(step: LoweredStep, tensor: str) -> dict[int, _Slope]:
    """Return the slope of each backward node that reads a forward tensor, by index of the node.

    Empty if the tensor is not of the forward pass, or one of its readers needs the values.
    """
    graph = step.graph
    i = graph.tensor_index.get(tensor)
    if i is None or graph.nodes[graph.node_of[i]].phase not in (Phase.FORWARD, Phase.LOSS):
        return {}
    slopes: dict[int, _Slope] = {}
    for k in graph.users_of[i]:
        if not _is_backward(graph.nodes[k]):
            continue
        call = _only_call(step, k)
        operands = [a.buffer for a in call.arguments if isinstance(a, Ref)]
        slope = _parse_slope(call)
        if slope is None or slope.x.buffer != tensor or operands.count(tensor) > 1:
            return {}
        slopes[k] = slope
    return slopes


def _read_outputs(step: LoweredStep) -> LoweredStep:
    """Make gradients read an activation's output instead of its input, if both select equal slopes.

    The next layer often saves the output for its weights; the input then need not be saved.
    """
    changes = _Changes(step=step)
    for k, node in enumerate(step.graph.nodes):
        match _only_call(step, k):
            case Call(kernel, (out, incoming, Ref() as x, shape, *numbers)) if (
                kernel in _FORWARD_KERNELS
            ):
                slopes = _slopes_by_reader(step, x.buffer)
                if not slopes or not (len(slopes) == 1 or _has_mask(step, x.buffer, shape)):
                    continue  # other gradients save it
                result = _find_output(
                    step, _FORWARD_KERNELS[kernel], x, _Loop.of(shape), tuple(numbers)
                )
                if result is not None:
                    y, loop = result
                    call = Call(kernel, (out, incoming, y, loop.table_for(0, 1, 2), *numbers))
                    changes.replaced[k] = (_replace_input(node, x.buffer, y.buffer), call)
    return changes.apply()


def _find_output(
    step: LoweredStep, kernel: str, x: Ref, loop: _Loop, numbers: tuple[Argument, ...]
) -> tuple[Ref, _Loop] | None:
    """Return the output of a kernel for x in the forward pass, and `loop` with that in place of x.

    None if no node calls the kernel with x, or the output does not have the sign of x.
    """
    graph = step.graph
    for k in graph.users_of[graph.tensor_index[x.buffer]]:
        if _is_backward(graph.nodes[k]):
            continue
        match _only_call(step, k):
            case Call(apply, (Ref() as y, Ref() as read, shape, *own_numbers)):
                other = _Loop.of(shape) if apply == kernel else None
            case _:
                continue
        if other is None or read != x or tuple(own_numbers) != numbers:
            continue
        is_decreasing = kernel == "pm_leaky_relu" and not (
            isinstance(own_numbers[0], float) and own_numbers[0] >= 0
        )
        if not is_decreasing and (other.sizes, other.steps[1]) == (loop.sizes, loop.steps[2]):
            return y, replace(loop, steps=(*loop.steps[:2], other.steps[0]))
    return None


def _add_bit_masks(step: LoweredStep) -> LoweredStep:
    """Add a node with a mask of one bit per element for each tensor whose values no gradient reads.

    Its gradients read the mask. All of them need the same comparison.
    """
    graph, changes = step.graph, _Changes(step=step)
    for i, tensor in enumerate(graph.tensors):
        slopes = _slopes_by_reader(step, tensor.name)
        name, maker = f"{tensor.name}.mask", graph.node_of[i]
        mask_calls = {slope.mask_call(name) for slope in slopes.values()}
        if len(mask_calls) != 1:
            continue
        elements = next(iter(slopes.values())).loop.elements
        bits = _bit_buffer(elements)
        has_name = name in graph.tensor_index or maker in changes.added
        if has_name or elements == 0 or not _is_smaller(bits, tensor):
            continue
        mask = Node(
            name=name,
            op="mask",
            phase=graph.nodes[maker].phase,
            inputs=(tensor.name,),
            outputs=(Tensor(name=name, bytes=bits.bytes),),
            flops=elements,
        )
        changes.buffers[name] = bits
        changes.added[maker] = (mask, mask_calls.pop())
        for k, slope in slopes.items():
            out, incoming = _only_call(step, k).arguments[:2]
            shape = slope.loop.table_for(0, 1)
            call = Call(slope.apply_kernel, (out, incoming, Ref(name), shape, slope.factor))
            changes.replaced[k] = (_replace_input(graph.nodes[k], tensor.name, name), call)
    return changes.apply()


# -- dropout -------------------------------------------------------------------------------------


def _draw_dropout_bits(step: LoweredStep) -> LoweredStep:
    """Split each dropout into a node that draws a mask of one bit per element, and its application.

    The new node has no inputs, and draws the same mask if a step recomputes it. Forward and
    backward passes apply the mask with the same kernel.
    """
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _only_call(step, k):
            case Call("pm_dropout", (out, Ref(name, 0), x, shape, *random_numbers, factor)):
                loop = _Loop.of(shape)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        loop_of_user = {user: _mask_loop(_only_call(step, user), name) for user in users}
        loops = [user_loop for user_loop in loop_of_user.values() if user_loop is not None]
        sizes = {user_loop.elements for user_loop in loops} | {loop.elements}
        if len(loops) != len(users) or len(sizes) != 1 or not loop.is_in_order(1):
            continue
        bits = _bit_buffer(loop.elements)
        tensor = Tensor(name=name, bytes=bits.bytes)
        mask = Node(
            name=f"{node.name}.mask",
            op="mask",
            phase=node.phase,
            outputs=(tensor,),
            flops=loop.elements,
        )
        changes.buffers[name] = bits
        changes.added[k] = (
            mask,
            Call("pm_dropout_bits", (Ref(name), loop.elements, *random_numbers)),
        )
        other_outputs = tuple(tensor for tensor in node.outputs if tensor.name != name)
        applying_node = replace(
            node, inputs=(*node.inputs, name), outputs=other_outputs, bytes_moved=None
        )
        call = Call("pm_bits_scale", (out, x, Ref(name), loop.table_for(0, 2), factor))
        changes.replaced[k] = (applying_node, call)
        for user, user_loop in zip(users, loops, strict=True):
            out, incoming, _, _, factor = _only_call(step, user).arguments
            call = Call(
                "pm_bits_scale", (out, incoming, Ref(name), user_loop.table_for(0, 1), factor)
            )
            changes.replaced[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.apply(before=True)


def _mask_loop(call: Call, mask: str) -> _Loop | None:
    """Return the loop of a call that applies `mask` in memory order; None for any other call."""
    match call:
        case Call("pm_mask_scale", (_, _, Ref(name, 0), shape, _)) if name == mask:
            loop = _Loop.of(shape)
            return loop if loop.is_in_order(2) else None
    return None


# -- maxima --------------------------------------------------------------------------------------


def _store_byte_positions(step: LoweredStep) -> LoweredStep:
    """Store the positions of maxima as bytes within the window, if only gradients read them."""
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _only_call(step, k):
            case Call("pm_max_pool2d", (out, Ref(name) as positions, x, rows, columns, *rest)):
                steps, batch, channels, height, width, _, *dilations = rest
                windows = (rows, columns)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        calls = {user: _only_call(step, user) for user in users}
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
            (out, positions, x, *windows, steps, batch, channels, height, width, *dilations),
        )
        changes.replaced[k] = (replace(node, outputs=outputs, bytes_moved=None), call)
        for user, backward in calls.items():
            operands, sizes = backward.arguments[:3], backward.arguments[3:]
            call = Call("pm_max_pool2d_places_backward", (*operands, *windows, *sizes, *dilations))
            changes.replaced[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.apply()


def _max_window_elements(windows: tuple[Argument, Argument], dilations: list[Argument]) -> int:
    """Return the number of elements of the largest window of a pool."""
    sides = []
    for bounds, step in zip(windows, dilations, strict=True):
        if not isinstance(bounds, tuple) or not isinstance(step, int):
            raise TypeError(bounds)
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        sides.append(max(-(-(end - begin) // step) for begin, end in pairs))
    return math.prod(sides)
