"""Replace saved activations by masks, for gradients that do not need the values.

The gradient of ReLU and similar activations needs one bit per element, as does dropout; that of a
maximum needs the position in its window, a byte. PyTorch saves a byte (dropout) or a number of
several bytes for each element. Losses, gradients and state have the same bits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from poetmodel.graph import Node, Phase, Tensor
from poetmodel.lowered.calls import Buffer, Call, DataType, Ref
from poetmodel.lowered.catalogue import CATALOGUE
from poetmodel.lowered.forms import ELEMENTWISE, contiguous_strides
from poetmodel.lowered.kernels import find_kernel
from poetmodel.lowered.loops import join_rows
from poetmodel.lowered.step import ALIGNMENT, LoweredNode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from poetmodel.lowered.catalogue import Slope
    from poetmodel.lowered.loops import Loops, Numbers
    from poetmodel.lowered.step import LoweredStep

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


def _make_table(loops: Loops, *parameters: str) -> tuple[int, ...]:
    """Return the shape table of the tensors of some parameters, with loops in the same order."""
    return join_rows(zip(loops.sizes, *map(loops.strides_of, parameters), strict=True))


def _is_in_order(loops: Loops, parameter: str) -> bool:
    """Return whether loops access adjacent elements of a tensor, in memory order."""
    rows = zip(
        loops.sizes, loops.strides_of(parameter), contiguous_strides(loops.sizes), strict=True
    )
    return all(size == 1 or stride == distance for size, stride, distance in rows)


def _make_bit_buffer(elements: int) -> Buffer:
    return Buffer(elements=-(-elements // 8), type=DataType.UINT8)


def _is_smaller(new: Buffer, old: Tensor) -> bool:
    """Return whether a buffer has fewer aligned bytes than a tensor."""
    return -(-new.bytes // ALIGNMENT) < -(-old.bytes // ALIGNMENT)


def _bits_save_memory(step: LoweredStep, tensor: str, call: Call) -> bool:
    """Return whether a mask, one bit per iteration of a call, is smaller than a tensor."""
    old = step.graph.tensors[step.graph.tensor_index[tensor]]
    return _is_smaller(_make_bit_buffer(math.prod(ELEMENTWISE.read(call).sizes)), old)


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


class _Gradient(NamedTuple):
    """The call of a gradient that has a `Slope`."""

    call: Call
    loops: Loops
    slope: Slope

    def make_mask_call(self, mask: str) -> Call:
        """Return the call that writes the bits to buffer `mask`."""
        tensors = {"bits": Ref(mask), "x": self.call["x"], "shape": _make_table(self.loops, "x")}
        return Call.by_name(self.slope.mask, **tensors, **self._find_numbers(self.slope.limits))

    def make_applying_call(self, mask: str) -> Call:
        """Return the call that applies the bits in buffer `mask`."""
        return Call.by_name(
            self.slope.apply,
            out=self.call["out"],
            x=self.call["gradient"],
            bits=Ref(mask),
            shape=_make_table(self.loops, "out", "gradient"),
            **self._find_numbers(self.slope.factor),
        )

    def _find_numbers(self, terms: Mapping[str, float | str]) -> dict[str, Any]:
        pairs = terms.items()
        return {name: self.call[term] if isinstance(term, str) else term for name, term in pairs}


def _parse_gradient(call: Call) -> _Gradient | None:
    """Return a call as a gradient whose slope has two values; None for others."""
    slope = CATALOGUE[call.kernel].slope
    return None if slope is None else _Gradient(call, ELEMENTWISE.read(call), slope)


def _find_gradients(step: LoweredStep, tensor: str) -> dict[int, _Gradient]:
    """Find the `_Gradient` of each backward node that reads a forward tensor, by index of the node.

    Returns {} unless each of these nodes is one that reads the tensor only once, as x.
    """
    graph = step.graph
    i = graph.tensor_index.get(tensor)
    if i is None or graph.nodes[graph.node_of[i]].phase not in (Phase.FORWARD, Phase.LOSS):
        return {}
    gradients: dict[int, _Gradient] = {}
    for k in graph.users_of[i]:
        if not _is_backward(graph.nodes[k]):
            continue
        call = _find_only_call(step, k)
        gradient = None if call is None else _parse_gradient(call)
        if gradient is None or gradient.call["x"].buffer != tensor:
            return {}
        if sum(ref.buffer == tensor for ref in gradient.call.refs) > 1:
            return {}
        gradients[k] = gradient
    return gradients


def _use_outputs(step: LoweredStep) -> LoweredStep:
    """Return a step whose gradients read outputs of activations in place of their inputs.

    Applies to hardtanh and leaky ReLU. The next layer often saves the output for the gradient of
    its weights; then the input need not be saved.
    """
    replacements = {}
    for k, node in enumerate(step.graph.nodes):
        call = _find_only_call(step, k)
        gradient = None if call is None else _parse_gradient(call)
        if gradient is None or gradient.slope.activation is None:
            continue
        x = gradient.call["x"]
        readers = _find_gradients(step, x.buffer)
        if not readers or not (
            len(readers) == 1 or _bits_save_memory(step, x.buffer, gradient.call)
        ):
            continue  # other gradients would still read x
        output = _find_output(step, gradient)
        if output is not None:
            y, y_strides = output
            strides = (
                *(gradient.loops.strides_of(name) for name in ("out", "gradient")),
                y_strides,
            )
            shape = join_rows(zip(gradient.loops.sizes, *strides, strict=True))
            new_call = gradient.call.with_arguments(x=y, shape=shape)
            new_node = _replace_input(node, x.buffer, y.buffer)
            replacements[k] = [LoweredNode(new_node, (new_call,))]
    return step.edit(replacements)


def _find_output(step: LoweredStep, gradient: _Gradient) -> tuple[Ref, Numbers] | None:
    """Return the activation's output that can replace x in a gradient, and its strides."""
    graph, x = step.graph, gradient.call["x"]
    numbers = [name for name in ("low", "high", "slope") if name in gradient.call]
    for k in graph.users_of[graph.tensor_index[x.buffer]]:
        call = _find_only_call(step, k, gradient.slope.activation or "")
        if _is_backward(graph.nodes[k]) or call is None or call["x"] != x:
            continue
        if any(call[name] != gradient.call[name] for name in numbers):
            continue
        loops = ELEMENTWISE.read(call)
        is_decreasing = "slope" in numbers and not call["slope"] >= 0
        rows = ((each.sizes, each.strides_of("x")) for each in (loops, gradient.loops))
        if len({*rows}) == 1 and not is_decreasing:
            return call["out"], loops.strides_of("out")
    return None


def _add_bit_masks(step: LoweredStep) -> LoweredStep:
    """Return a step with a node for each mask of one bit per element, which gradients read."""
    graph, buffers = step.graph, dict(step.buffers)
    applications: dict[int, LoweredNode] = {}
    masks: dict[int, LoweredNode] = {}
    for i, tensor in enumerate(graph.tensors):
        gradients = _find_gradients(step, tensor.name)
        name, producer_index = f"{tensor.name}.mask", graph.node_of[i]
        mask_calls = {gradient.make_mask_call(name) for gradient in gradients.values()}
        if len(mask_calls) != 1:
            continue
        elements = math.prod(next(iter(gradients.values())).loops.sizes)
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
        for k, gradient in gradients.items():
            new_node = _replace_input(graph.nodes[k], tensor.name, name)
            applications[k] = LoweredNode(new_node, (gradient.make_applying_call(name),))
    replacements = {k: [operation] for k, operation in applications.items()}
    for k, mask_operation in masks.items():
        replacements[k] = [applications.get(k, step.operations[k]), mask_operation]
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
        loops, name = ELEMENTWISE.read(call), call["mask"].buffer
        users = graph.users_of[graph.tensor_index[name]]
        user_calls = [_find_only_call(step, user, "pm_mask_scale") for user in users]
        applications = [
            (user, user_call, ELEMENTWISE.read(user_call))
            for user, user_call in zip(users, user_calls, strict=True)
            if user_call is not None and user_call["mask"] == Ref(name)
        ]
        if len(applications) != len(users) or not _is_in_order(loops, "mask"):
            continue
        elements = math.prod(loops.sizes)
        if any(
            math.prod(user_loops.sizes) != elements or not _is_in_order(user_loops, "mask")
            for _, _, user_loops in applications
        ):
            continue
        bit_buffer = _make_bit_buffer(elements)
        mask = Node(
            name=f"{node.name}.mask",
            op="mask",
            phase=node.phase,
            outputs=(Tensor(name=name, bytes=bit_buffer.bytes),),
            flops=elements,
        )
        buffers[name] = bit_buffer
        numbers = {"n": elements, "site": call["site"], "threshold": call["threshold"]}
        mask_call = Call.by_name("pm_dropout_bits", bits=Ref(name), **numbers)
        other_outputs = tuple(tensor for tensor in node.outputs if tensor.name != name)
        applying_node = replace(
            node, inputs=(*node.inputs, name), outputs=other_outputs, bytes_moved=None
        )
        replacements[k] = [
            LoweredNode(mask, (mask_call,)),
            LoweredNode(applying_node, (_apply_bits(call, loops),)),
        ]
        for user, user_call, user_loops in applications:
            bits_call = _apply_bits(user_call, user_loops)
            new_node = replace(graph.nodes[user], bytes_moved=None)
            replacements[user] = [LoweredNode(new_node, (bits_call,))]
    return step.edit(replacements, buffers=buffers)


def _apply_bits(call: Call, loops: Loops) -> Call:
    """Return the call that applies a mask of bits as `call` draws or applies one of bytes."""
    arguments = {name: call[name] for name in ("out", "x", "factor")}
    shape = _make_table(loops, "out", "x")
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
