"""Replace saved activations by masks, for gradients that do not need the values.

The gradient of ReLU and similar activations needs one bit per element, as does dropout; that of a
maximum needs the position in its window, a byte. PyTorch saves a byte (dropout) or a number of
several bytes for each element. Losses, gradients and state have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Final

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.loops import table_columns
from poetmodel.lowered.step import ALIGNMENT, LoweredNode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.lowered.calls import Argument
    from poetmodel.lowered.step import LoweredStep

_FORWARD_KERNELS: Final = {
    "pm_hardtanh_backward": "pm_clamp",
    "pm_leaky_relu_backward": "pm_leaky_relu",
}
"""The activation of each gradient kernel that may read the output in place of the input."""
_HARDSIGMOID_INTERVAL: Final = (-3.0, 3.0)
"""Interval in which the slope of hardsigmoid is not 0."""
_HARDSIGMOID_SLOPE: Final = 0.1666666716337204
"""1/6 as a float: see ``pm_hardsigmoid_backward``."""
_MAX_WINDOW: Final = 2**8
"""Maximum number of elements of a window whose positions fit a byte."""


def mask_activations(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read masks in place of activations where that saves memory.

    A mask of bits is the output of a separate node, which a schedule may recompute; byte positions
    of maxima remain an output of their pool.
    """
    for rewrite in (_use_outputs, _add_bit_masks, _draw_dropout_bits, _store_byte_positions):
        step = rewrite(step)
    return step


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
    """Return whether a mask, one bit per iteration of the shape table, is smaller than a tensor."""
    old = step.graph.tensors[step.graph.tensor_index[tensor]]
    return _is_smaller(_make_bit_buffer(_LoopTable.parse(shape).elements), old)


def _find_only_call(step: LoweredStep, k: int, *kernels: str) -> Call | None:
    """Return the only call of node `k`, if it has exactly one, of one of the kernels if given."""
    if len(step.calls[k]) != 1:
        return None
    (call,) = step.calls[k]
    return call if not kernels or call.kernel in kernels else None


def _is_backward(node: Node) -> bool:
    return node.phase in (Phase.BACKWARD, Phase.UPDATE)


def _replace_input(node: Node, old: str, new: str) -> Node:
    """Return a node in which tensor `new` replaces input `old`, without in-place pairs of `old`."""
    names = dict.fromkeys(new if name == old else name for name in node.inputs)
    pairs = tuple(pair for pair in node.in_place if pair[1] != old)
    return replace(node, inputs=tuple(names), in_place=pairs, bytes_moved=None)


# -- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slope:
    """The gradient of an activation whose slope has two values, selected by a comparison of x."""

    call: Call
    """The call of the gradient."""
    loop: _LoopTable
    """Loop over the computed gradient, the incoming gradient, and x."""
    mask_kernel: str
    """The kernel that compares x and writes one bit per element."""
    limits: Mapping[str, float]
    """Bounds for x, and the bit for NaN: the numbers of `mask_kernel`."""
    apply_kernel: str
    """The kernel that applies the bits to the incoming gradient."""
    factor: Mapping[str, float]
    """The number by which it multiplies: `factor` if the bit is 1, `slope` if it is 0."""

    @property
    def x(self) -> Ref:
        """The compared tensor."""
        x: Ref = self.call["x"]
        return x

    def make_mask_call(self, mask: str) -> Call:
        """Return the call that writes the bits to buffer `mask`."""
        tensors = {"bits": Ref(mask), "x": self.x, "shape": self.loop.make_table(2)}
        return Call.by_name(self.mask_kernel, **tensors, **self.limits)


def _parse_slope(call: Call) -> _Slope | None:
    """Parse the gradient of threshold, leaky ReLU, hardtanh or hardsigmoid, otherwise None."""
    mask_kernel, apply_kernel, factor = "pm_above_bits", "pm_bits_scale", {"factor": 1.0}
    match call.kernel:
        case "pm_threshold_backward":
            limits = {"number": call["threshold"], "unordered": 1}
        case "pm_leaky_relu_backward":
            limits = {"number": 0.0, "unordered": 0}
            apply_kernel, factor = "pm_bits_slope", {"slope": call["slope"]}
        case "pm_hardtanh_backward":
            mask_kernel = "pm_between_bits"
            limits = {"low": call["low"], "high": call["high"], "unordered": 1}
        case "pm_hardsigmoid_backward":
            mask_kernel, factor = "pm_between_bits", {"factor": _HARDSIGMOID_SLOPE}
            low, high = _HARDSIGMOID_INTERVAL
            limits = {"low": low, "high": high, "unordered": 0}
        case _:
            return None
    return _Slope(
        call=call,
        loop=_LoopTable.parse(call["shape"]),
        mask_kernel=mask_kernel,
        limits=limits,
        apply_kernel=apply_kernel,
        factor=factor,
    )


def _find_slopes(step: LoweredStep, tensor: str) -> dict[int, _Slope]:
    """Find the `_Slope` of each backward node that reads a forward tensor, by index of the node.

    Returns {} unless each of these nodes is a slope that reads the tensor only once, as x.
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
        slope = None if call is None else _parse_slope(call)
        if slope is None or slope.x.buffer != tensor:
            return {}
        if sum(ref.buffer == tensor for ref in slope.call.refs) > 1:
            return {}
        slopes[k] = slope
    return slopes


def _use_outputs(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read outputs of activations in place of their inputs.

    Applies to hardtanh and leaky ReLU. The next layer often saves the output for the gradient of
    its weights; then the input need not be saved.
    """
    replacements = {}
    for k, node in enumerate(step.graph.nodes):
        call = _find_only_call(step, k)
        if call is None or call.kernel not in _FORWARD_KERNELS:
            continue
        x = call["x"]
        slopes = _find_slopes(step, x.buffer)
        if not slopes or not (len(slopes) == 1 or _bits_save_memory(step, x.buffer, call["shape"])):
            continue  # other gradients would still read x
        output_and_loop = _find_output(step, call)
        if output_and_loop is not None:
            y, loop = output_and_loop
            new_call = call.with_arguments(x=y, shape=loop.make_table(0, 1, 2))
            new_node = _replace_input(node, x.buffer, y.buffer)
            replacements[k] = [LoweredNode(new_node, (new_call,))]
    return step.edit(replacements)


def _find_output(step: LoweredStep, gradient_call: Call) -> tuple[Ref, _LoopTable] | None:
    """Return the activation's output that can replace x in a gradient, and the loop with it."""
    graph, x, loop = step.graph, gradient_call["x"], _LoopTable.parse(gradient_call["shape"])
    kernel = _FORWARD_KERNELS[gradient_call.kernel]
    numbers = [name for name in ("low", "high", "slope") if name in gradient_call]
    for k in graph.users_of[graph.tensor_index[x.buffer]]:
        call = _find_only_call(step, k)
        if _is_backward(graph.nodes[k]) or call is None or call.kernel != kernel or call["x"] != x:
            continue
        if any(call[name] != gradient_call[name] for name in numbers):
            continue
        output_loop = _LoopTable.parse(call["shape"])
        is_decreasing = "slope" in numbers and not call["slope"] >= 0
        is_equal = (output_loop.sizes, output_loop.strides[1]) == (loop.sizes, loop.strides[2])
        if is_equal and not is_decreasing:
            return call["out"], replace(loop, strides=(*loop.strides[:2], output_loop.strides[0]))
    return None


def _add_bit_masks(step: LoweredStep) -> LoweredStep:
    """Return a step with a node for each mask of one bit per element, which gradients read."""
    graph, buffers = step.graph, dict(step.buffers)
    gradients: dict[int, LoweredNode] = {}
    masks: dict[int, LoweredNode] = {}
    for i, tensor in enumerate(graph.tensors):
        slopes = _find_slopes(step, tensor.name)
        name, producer_index = f"{tensor.name}.mask", graph.node_of[i]
        mask_calls = {slope.make_mask_call(name) for slope in slopes.values()}
        if len(mask_calls) != 1:
            continue
        elements = next(iter(slopes.values())).loop.elements
        bit_buffer = _make_bit_buffer(elements)
        is_taken = name in graph.tensor_index or producer_index in masks
        if is_taken or elements == 0 or not _is_smaller(bit_buffer, tensor):
            continue
        mask = Node(
            name=name,
            op="mask",
            phase=graph.nodes[producer_index].phase,
            inputs=(tensor.name,),
            outputs=(Tensor(name=name, bytes=bit_buffer.bytes),),
            flops=elements,
        )
        buffers[name] = bit_buffer
        masks[producer_index] = LoweredNode(mask, (mask_calls.pop(),))
        for k, slope in slopes.items():
            call = Call.by_name(
                slope.apply_kernel,
                out=slope.call["out"],
                x=slope.call["gradient"],
                bits=Ref(name),
                shape=slope.loop.make_table(0, 1),
                **slope.factor,
            )
            new_node = _replace_input(graph.nodes[k], tensor.name, name)
            gradients[k] = LoweredNode(new_node, (call,))
    replacements = {k: [operation] for k, operation in gradients.items()}
    for k, mask_operation in masks.items():
        replacements[k] = [gradients.get(k, step.operations[k]), mask_operation]
    return step.edit(replacements, buffers=buffers)


# -- dropout -------------------------------------------------------------------------------------


def _draw_dropout_bits(step: LoweredStep) -> LoweredStep:
    """Return a step in which a separate node draws each dropout's mask, one bit per element.

    The mask node has no inputs, and draws the same mask if a step recomputes it.
    """
    graph, buffers = step.graph, dict(step.buffers)
    replacements: dict[int, list[LoweredNode]] = {}
    for k, node in enumerate(graph.nodes):
        call = _find_only_call(step, k, "pm_dropout")
        if call is None or call["mask"].offset:
            continue
        loop, name = _LoopTable.parse(call["shape"]), call["mask"].buffer
        users = graph.users_of[graph.tensor_index[name]]
        user_calls = [_find_only_call(step, user, "pm_mask_scale") for user in users]
        applications = [
            (user, user_call, _LoopTable.parse(user_call["shape"]))
            for user, user_call in zip(users, user_calls, strict=True)
            if user_call is not None and user_call["mask"] == Ref(name)
        ]
        if len(applications) != len(users) or not loop.is_in_order(1):
            continue
        if any(
            user_loop.elements != loop.elements or not user_loop.is_in_order(2)
            for _, _, user_loop in applications
        ):
            continue
        bit_buffer = _make_bit_buffer(loop.elements)
        mask = Node(
            name=f"{node.name}.mask",
            op="mask",
            phase=node.phase,
            outputs=(Tensor(name=name, bytes=bit_buffer.bytes),),
            flops=loop.elements,
        )
        buffers[name] = bit_buffer
        numbers = {"n": loop.elements, "site": call["site"], "threshold": call["threshold"]}
        mask_call = Call.by_name("pm_dropout_bits", bits=Ref(name), **numbers)
        other_outputs = tuple(tensor for tensor in node.outputs if tensor.name != name)
        applying_node = replace(
            node, inputs=(*node.inputs, name), outputs=other_outputs, bytes_moved=None
        )
        replacements[k] = [
            LoweredNode(mask, (mask_call,)),
            LoweredNode(applying_node, (_apply_bits(call, loop.make_table(0, 2)),)),
        ]
        for user, user_call, user_loop in applications:
            bits_call = _apply_bits(user_call, user_loop.make_table(0, 1))
            new_node = replace(graph.nodes[user], bytes_moved=None)
            replacements[user] = [LoweredNode(new_node, (bits_call,))]
    return step.edit(replacements, buffers=buffers)


def _apply_bits(call: Call, shape: tuple[int, ...]) -> Call:
    """Return the call that applies a mask of bits as `call` draws or applies one of bytes."""
    arguments = {name: call[name] for name in ("out", "x", "factor")}
    return Call.by_name("pm_bits_scale", **arguments, bits=call["mask"], shape=shape)


# -- maxima --------------------------------------------------------------------------------------


def _store_byte_positions(step: LoweredStep) -> LoweredStep:
    """Return a step with positions of maxima in small windows as bytes, counted in the window."""
    graph, buffers = step.graph, dict(step.buffers)
    replacements: dict[int, list[LoweredNode]] = {}
    for k, node in enumerate(graph.nodes):
        call = _find_only_call(step, k, "pm_max_pool2d")
        if call is None or "indices" not in call.pointers:
            continue
        name = call["indices"].buffer
        users = graph.users_of[graph.tensor_index[name]]
        user_calls = [_find_only_call(step, user, "pm_max_pool2d_backward") for user in users]
        gradient_calls = [
            user_call
            for user_call in user_calls
            if user_call is not None and user_call["indices"] == call["indices"]
        ]
        if _max_window_elements(call) > _MAX_WINDOW or len(gradient_calls) != len(users):
            continue
        position_buffer = replace(step.buffers[name], type=DataType.UINT8)
        buffers[name] = position_buffer
        outputs = tuple(
            replace(tensor, bytes=position_buffer.bytes) if tensor.name == name else tensor
            for tensor in node.outputs
        )
        new_node = replace(node, outputs=outputs, bytes_moved=None)
        replacements[k] = [LoweredNode(new_node, (_count_in_window(call, call),))]
        for user, gradient_call in zip(users, gradient_calls, strict=True):
            new_node = replace(graph.nodes[user], bytes_moved=None)
            replacements[user] = [LoweredNode(new_node, (_count_in_window(gradient_call, call),))]
    return step.edit(replacements, buffers=buffers)


def _count_in_window(call: Call, pool: Call) -> Call:
    """Return the call of a pool, or of its gradient, with positions counted within the window."""
    windows = {name: pool[name] for name in ("rows", "columns", "row_step", "column_step")}
    known = {**call.named_arguments, **windows, "places": call["indices"]}
    kernel = call.kernel.replace("max_pool2d", "max_pool2d_places")
    return Call.by_name(kernel, **{name: known[name] for name in find_kernel(kernel).index_of})


def _max_window_elements(pool: Call) -> int:
    max_sizes = []
    for axis in ("row", "column"):
        bounds = pool[f"{axis}s"]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        max_sizes.append(max(-(-(end - begin) // pool[f"{axis}_step"]) for begin, end in pairs))
    return math.prod(max_sizes)
