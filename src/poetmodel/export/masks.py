"""What the backward pass reads of activations: bits and bytes, where it needs no values.

ReLU and its kind pass a gradient or not, a maximum has a place in its window, and dropout keeps an
element or drops it. The step then holds a bit or a byte where PyTorch holds a number. Losses,
gradients and state have the same bits.
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

_RESULTS: Final = {"pm_hardtanh_backward": "pm_clamp", "pm_leaky_relu_backward": "pm_leaky_relu"}
"""Gradients that read what the activation read, and may read the result of this kernel."""
_HARDSIGMOID: Final = (-3.0, 3.0)
"""Between which numbers the slope of hardsigmoid is not 0."""
_HARDSIGMOID_SLOPE: Final = 0.1666666716337204
"""1/6 as a float: see ``pm_hardsigmoid_backward``."""
_PLACES: Final = 2**8
"""How many elements a window may have, for a byte to say which."""


def masked(step: LoweredStep) -> LoweredStep:
    """Return a step that saves no more of its activations than its gradients read.

    A mask is a node of its own, which a schedule may compute again. It is made only where no
    gradient reads the values: where a weight gradient does, they are kept anyway.
    """
    for rewrite in (_read_results, _ask_once, _draw_bits, _number_places):
        step = rewrite(step)
    return step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """What takes the place of nodes of a step, and what is new in it."""

    step: LoweredStep
    replaced: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """For a node another one, with its only call."""
    added: dict[int, tuple[Node, Call]] = field(default_factory=dict)
    """For a node a new one beside it, with its only call."""
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def made(self, *, before: bool = False) -> LoweredStep:
        """Return the changed step; new nodes come after those that they are added to, or before."""
        nodes: list[Node] = []
        calls: list[tuple[Call, ...]] = []
        for k, kept in enumerate(zip(self.step.graph.nodes, self.step.calls, strict=True)):
            node, call = self.replaced.get(k, (None, None))
            here = [kept if node is None or call is None else (node, (call,))]
            if k in self.added:
                new, asking = self.added[k]
                here.insert(0 if before else 1, (new, (asking,)))
            nodes += [node for node, _ in here]
            calls += [calls for _, calls in here]
        return self.step.with_nodes(nodes, calls, buffers={**self.step.buffers, **self.buffers})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loop:
    """A shape table: how a kernel goes through its tensors, see ``pm_each.h``."""

    sizes: tuple[int, ...]
    """Of the dimensions, the innermost first."""
    steps: tuple[tuple[int, ...], ...]
    """For each tensor its steps in the dimensions [elements]."""

    @classmethod
    def of(cls, shape: Argument) -> _Loop:
        """Read the argument of a call."""
        sizes, *steps = table_columns(shape)
        return cls(sizes=sizes, steps=tuple(steps))

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    def over(self, *tensors: int) -> tuple[int, ...]:
        """Return the table of some of the tensors, whose elements come in the same order."""
        columns = (self.sizes, *(self.steps[k] for k in tensors))
        return (len(self.sizes), *(n for row in zip(*columns, strict=True) for n in row))

    def is_in_order(self, tensor: int) -> bool:
        """Return whether the elements of a tensor come in the order in which they lie."""
        lengths = accumulate(self.sizes, mul, initial=1)
        dimensions = zip(self.sizes, self.steps[tensor], lengths, strict=False)
        return all(size == 1 or step == length for size, step, length in dimensions)


def _bits(elements: int) -> Buffer:
    return Buffer(elements=-(-elements // 8), type=DataType.UINT8)


def _takes_less(new: Buffer, old: Tensor) -> bool:
    """Return whether a buffer takes less memory than a tensor, where both are aligned."""
    return -(-new.bytes // ALIGNMENT) < -(-old.bytes // ALIGNMENT)


def _has_mask(step: LoweredStep, tensor: str, shape: Argument) -> bool:
    """Return whether bits of a tensor take less memory than it."""
    old = step.graph.tensors[step.graph.tensor_index[tensor]]
    return _takes_less(_bits(_Loop.of(shape).elements), old)


def _only_call(step: LoweredStep, k: int) -> Call:
    """Return the call of a node that has one alone; else one of no kernel."""
    calls = step.calls[k]
    return calls[0] if len(calls) == 1 else Call("", ())


def _is_backward(node: Node) -> bool:
    return node.phase in (Phase.BACKWARD, Phase.UPDATE)


def _reading(node: Node, old: str, new: str) -> Node:
    """Return a node that reads one tensor in place of another."""
    names = dict.fromkeys(new if name == old else name for name in node.inputs)
    pairs = tuple(pair for pair in node.in_place if pair[1] != old)
    return replace(node, inputs=tuple(names), in_place=pairs, bytes_moved=None)


# -- activations ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slope:
    """The gradient of an activation whose slope has two values: it asks one question of x."""

    x: Ref
    loop: _Loop
    """Over the gradient that it makes, the one that arrives, and x."""
    asks: str
    """The kernel that writes the answers."""
    limits: tuple[float, ...]
    """What that compares x with, and whether the answer for NaN is yes."""
    applies: str
    """The kernel that reads the bits."""
    factor: float
    """What that multiplies by."""

    def asking(self, mask: str) -> Call:
        """Return the call that writes a bit for each answer."""
        return Call(self.asks, (Ref(mask), self.x, self.loop.over(2), *self.limits))


def _slope(call: Call) -> _Slope | None:
    """Return what the gradient of an activation asks; None for any other call."""
    asks, limits = "pm_above_bits", tuple[float, ...]()
    applies, factor = "pm_bits_scale", 1.0
    match call:
        case Call("pm_threshold_backward", (Ref(), Ref(), Ref() as x, shape, float(number))):
            limits = (number, 1)
        case Call("pm_leaky_relu_backward", (Ref(), Ref(), Ref() as x, shape, float(factor))):
            limits, applies = (0.0, 0), "pm_bits_slope"
        case Call("pm_hardtanh_backward", (Ref(), Ref(), Ref() as x, shape, float(a), float(b))):
            asks, limits = "pm_between_bits", (a, b, 1)
        case Call("pm_hardsigmoid_backward", (Ref(), Ref(), Ref() as x, shape)):
            asks, limits = "pm_between_bits", (*_HARDSIGMOID, 0)
            factor = _HARDSIGMOID_SLOPE
        case _:
            return None
    loop = _Loop.of(shape)
    return _Slope(x=x, loop=loop, asks=asks, limits=limits, applies=applies, factor=factor)


def _slopes(step: LoweredStep, tensor: str) -> dict[int, _Slope]:
    """Return the gradients that read a tensor of the forward pass, if all of them ask questions."""
    graph = step.graph
    i = graph.tensor_index.get(tensor)
    if i is None or graph.nodes[graph.node_of[i]].phase not in (Phase.FORWARD, Phase.LOSS):
        return {}
    slopes: dict[int, _Slope] = {}
    for k in graph.users_of[i]:
        if not _is_backward(graph.nodes[k]):
            continue
        call = _only_call(step, k)
        named = [a.buffer for a in call.arguments if isinstance(a, Ref)]
        slope = _slope(call)
        if slope is None or slope.x.buffer != tensor or named.count(tensor) > 1:
            return {}
        slopes[k] = slope
    return slopes


def _read_results(step: LoweredStep) -> LoweredStep:
    """Let gradients read what an activation made, where that answers as what it read does.

    The next layer keeps it for its weights, or nobody does; what the activation read is free.
    """
    changes = _Changes(step=step)
    for k, node in enumerate(step.graph.nodes):
        match _only_call(step, k):
            case Call(kernel, (out, arriving, Ref() as x, shape, *numbers)) if kernel in _RESULTS:
                slopes = _slopes(step, x.buffer)
                if not slopes or not (len(slopes) == 1 or _has_mask(step, x.buffer, shape)):
                    continue  # others keep it
                result = _result(step, _RESULTS[kernel], x, _Loop.of(shape), tuple(numbers))
                if result is not None:
                    y, loop = result
                    call = Call(kernel, (out, arriving, y, loop.over(0, 1, 2), *numbers))
                    changes.replaced[k] = (_reading(node, x.buffer, y.buffer), call)
    return changes.made()


def _result(
    step: LoweredStep, kernel: str, x: Ref, loop: _Loop, numbers: tuple[Argument, ...]
) -> tuple[Ref, _Loop] | None:
    """Return what a kernel made of x in the forward pass, and the loop with that in place of x.

    None where there is none, or where it does not tell the sign of x.
    """
    graph = step.graph
    for k in graph.users_of[graph.tensor_index[x.buffer]]:
        if _is_backward(graph.nodes[k]):
            continue
        match _only_call(step, k):
            case Call(made, (Ref() as y, Ref() as read, shape, *given)):
                other = _Loop.of(shape) if made == kernel else None
            case _:
                continue
        if other is None or read != x or tuple(given) != numbers:
            continue
        falls = kernel == "pm_leaky_relu" and not (isinstance(given[0], float) and given[0] >= 0)
        if not falls and (other.sizes, other.steps[1]) == (loop.sizes, loop.steps[2]):
            return y, replace(loop, steps=(*loop.steps[:2], other.steps[0]))
    return None


def _ask_once(step: LoweredStep) -> LoweredStep:
    """Make a mask of one bit for each element whose value no gradient reads."""
    graph, changes = step.graph, _Changes(step=step)
    for i, tensor in enumerate(graph.tensors):
        slopes = _slopes(step, tensor.name)
        name, maker = f"{tensor.name}.mask", graph.node_of[i]
        questions = {slope.asking(name) for slope in slopes.values()}
        if len(questions) != 1:
            continue
        elements = next(iter(slopes.values())).loop.elements
        bits = _bits(elements)
        taken = name in graph.tensor_index or maker in changes.added
        if taken or elements == 0 or not _takes_less(bits, tensor):
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
        changes.added[maker] = (mask, questions.pop())
        for k, slope in slopes.items():
            out, arriving = _only_call(step, k).arguments[:2]
            shape = slope.loop.over(0, 1)
            call = Call(slope.applies, (out, arriving, Ref(name), shape, slope.factor))
            changes.replaced[k] = (_reading(graph.nodes[k], tensor.name, name), call)
    return changes.made()


# -- dropout -------------------------------------------------------------------------------------


def _draw_bits(step: LoweredStep) -> LoweredStep:
    """Draw the mask of dropout by a node of its own, one bit for an element.

    It reads nothing and draws the same again within a step. Forward and backward apply it alike.
    """
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _only_call(step, k):
            case Call("pm_dropout", (out, Ref(name, 0), x, shape, *drawn, factor)):
                loop = _Loop.of(shape)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        applied = {user: _applied(_only_call(step, user), name) for user in users}
        loops = [other for other in applied.values() if other is not None]
        sizes = {other.elements for other in loops} | {loop.elements}
        if len(loops) != len(users) or len(sizes) != 1 or not loop.is_in_order(1):
            continue
        bits = _bits(loop.elements)
        tensor = Tensor(name=name, bytes=bits.bytes)
        mask = Node(
            name=f"{node.name}.mask",
            op="mask",
            phase=node.phase,
            outputs=(tensor,),
            flops=loop.elements,
        )
        changes.buffers[name] = bits
        changes.added[k] = (mask, Call("pm_dropout_bits", (Ref(name), loop.elements, *drawn)))
        others = tuple(tensor for tensor in node.outputs if tensor.name != name)
        applies = replace(node, inputs=(*node.inputs, name), outputs=others, bytes_moved=None)
        call = Call("pm_bits_scale", (out, x, Ref(name), loop.over(0, 2), factor))
        changes.replaced[k] = (applies, call)
        for user, other in zip(users, loops, strict=True):
            out, arriving, _, _, factor = _only_call(step, user).arguments
            call = Call("pm_bits_scale", (out, arriving, Ref(name), other.over(0, 1), factor))
            changes.replaced[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.made(before=True)


def _applied(call: Call, mask: str) -> _Loop | None:
    """Return the loop of a call that applies a mask in its order; None for any other call."""
    match call:
        case Call("pm_mask_scale", (_, _, Ref(name, 0), shape, _)) if name == mask:
            loop = _Loop.of(shape)
            return loop if loop.is_in_order(2) else None
    return None


# -- maxima --------------------------------------------------------------------------------------


def _number_places(step: LoweredStep) -> LoweredStep:
    """Say by a byte where in its window a maximum was, where only its gradient asks for that."""
    graph, changes = step.graph, _Changes(step=step)
    for k, node in enumerate(graph.nodes):
        match _only_call(step, k):
            case Call("pm_max_pool2d", (out, Ref(name) as places, x, rows, columns, *rest)):
                steps, batch, channels, height, width, _, *apart = rest
                windows = (rows, columns)
            case _:
                continue
        users = graph.users_of[graph.tensor_index[name]]
        calls = {user: _only_call(step, user) for user in users}
        if _largest(windows, apart) > _PLACES or not all(
            call.kernel == "pm_max_pool2d_backward" and call.arguments[2] == places
            for call in calls.values()
        ):
            continue
        number = replace(step.buffers[name], type=DataType.UINT8)
        changes.buffers[name] = number
        outputs = tuple(
            replace(tensor, bytes=number.bytes) if tensor.name == name else tensor
            for tensor in node.outputs
        )
        call = Call(
            "pm_max_pool2d_places",
            (out, places, x, *windows, steps, batch, channels, height, width, *apart),
        )
        changes.replaced[k] = (replace(node, outputs=outputs, bytes_moved=None), call)
        for user, backward in calls.items():
            given, sizes = backward.arguments[:3], backward.arguments[3:]
            call = Call("pm_max_pool2d_places_backward", (*given, *windows, *sizes, *apart))
            changes.replaced[user] = (replace(graph.nodes[user], bytes_moved=None), call)
    return changes.made()


def _largest(windows: tuple[Argument, Argument], apart: list[Argument]) -> int:
    """Return how many elements the largest window of a pool has."""
    sides = []
    for bounds, step in zip(windows, apart, strict=True):
        if not isinstance(bounds, tuple) or not isinstance(step, int):
            raise TypeError(bounds)
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        sides.append(max(-(-(end - begin) // step) for begin, end in pairs))
    return math.prod(sides)
