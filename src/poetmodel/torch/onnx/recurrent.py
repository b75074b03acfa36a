"""Recurrent operators, step by step as PyTorch's own are captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import OnnxNode, operator, tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Cell = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    Function = Callable[[torch.Tensor], torch.Tensor]

_FUNCTIONS: Final[dict[str, Function]] = {
    "Relu": functional.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}


class _Weights:
    """The weights of one direction: what goes to the inputs, what to the state."""

    def __init__(self, w: torch.Tensor, r: torch.Tensor, b: torch.Tensor | None) -> None:
        self.inputs, self.state, self.hidden = w, r, r.shape[-1]
        self.biases: tuple[torch.Tensor | None, ...] = (None, None)
        if b is not None:
            self.biases = b.chunk(2)


def _run(
    node: OnnxNode,
    x: torch.Tensor,
    given: tuple[Any, ...],
    *,
    first: tuple[Any, ...],
    lengths: Any,
    cell: Callable[[_Weights, tuple[Function, ...]], Cell],
) -> Any:
    """Run the directions of a recurrent operator: Y, and the last value of each state."""
    _check(node, lengths, len(x))
    names = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    ways = names[node.get("direction", "forward")]
    w, r, b = (
        (None,) * len(ways) if value is None else tensor(value, x).unbind(0) for value in given
    )
    outputs, last = [], []
    for direction, backward in enumerate(ways):
        weights = _Weights(w[direction], r[direction], b[direction])
        functions = _functions(node, direction, len(ways))
        step = cell(weights, functions)
        state = tuple(
            x.new_zeros(x.shape[1], weights.hidden) if h is None else tensor(h, x)[direction]
            for h in first
        )
        every = functional.linear(x, weights.inputs, weights.biases[0]).unbind(0)
        seen = []
        for now in every[:: -1 if backward else 1]:
            state = step(now, state)
            seen.append(state[0])
        outputs.append(torch.stack(seen[:: -1 if backward else 1]))
        last.append(state)
    y = torch.stack(outputs, 1)
    ends = [torch.stack([state[k] for state in last]) for k in range(len(first))]
    return y if node.wanted == 1 else (y, *ends)[: node.wanted]


def _check(node: OnnxNode, lengths: Any, steps: int) -> None:
    constant = lengths if isinstance(lengths, tuple) else (None,)
    if lengths is not None and any(length != steps for length in constant):
        raise node.refused(
            "its sequences have lengths of their own; expected all of one length, without "
            "sequence_lens"
        )
    for attribute in ("clip", "input_forget", "layout"):
        if node.get(attribute, 0):
            raise node.refused(f"{attribute} is not known; leave it out")


_DEFAULTS: Final = {
    "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)
}  # fmt: skip


def _functions(node: OnnxNode, direction: int, directions: int) -> tuple[Function, ...]:
    names = node.get("activations") or _DEFAULTS[node.operator] * directions
    per_direction = len(names) // directions
    named = names[direction * per_direction : (direction + 1) * per_direction]
    unknown = [name for name in named if name not in _FUNCTIONS]
    if unknown:
        raise node.refused(f"its activation {unknown[0]} is not known; expected Tanh or Sigmoid")
    return tuple(_FUNCTIONS[name] for name in named)


@operator("RNN", weights=(1, 2, 3))
def _rnn(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    def cell(weights: _Weights, functions: tuple[Function, ...]) -> Cell:
        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            old = functional.linear(state[0], weights.state, weights.biases[1])
            return (functions[0](given + old),)

        return step

    return _run(node, x, (w, r, b), first=(h,), lengths=lengths, cell=cell)


@operator("GRU", weights=(1, 2, 3))
def _gru(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Run a GRU; gates are in the order of ONNX: update, reset, new."""

    def cell(weights: _Weights, functions: tuple[Function, ...]) -> Cell:
        gate, new = functions

        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            (h,) = state
            to_z, to_reset, to_new = given.chunk(3, 1)
            old = functional.linear(h, weights.state, weights.biases[1])
            of_z, of_reset, of_new = old.chunk(3, 1)
            z, reset = gate(to_z + of_z), gate(to_reset + of_reset)
            candidate = new(to_new + reset * of_new)
            return (candidate + z * (h - candidate),)

        return step

    if not node.get("linear_before_reset", 0):
        raise node.refused(
            "linear_before_reset is 0, which is not known; expected 1, as in PyTorch"
        )
    return _run(node, x, (w, r, b), first=(h,), lengths=lengths, cell=cell)


@operator("LSTM", weights=(1, 2, 3))
def _lstm(
    node: OnnxNode,
    x: Any,
    w: Any,
    r: Any,
    b: Any = None,
    lengths: Any = None,
    h: Any = None,
    c: Any = None,
    peepholes: Any = None,
) -> Any:
    """Run an LSTM; gates are in the order of ONNX: input, output, forget, cell."""
    if peepholes is not None:
        raise node.refused("peepholes are not known; leave them out")

    def cell(weights: _Weights, functions: tuple[Function, ...]) -> Cell:
        gate, new, out = functions

        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            h, c = state
            total = given + functional.linear(h, weights.state, weights.biases[1])
            i, o, f, g = total.chunk(4, 1)
            c = gate(f) * c + gate(i) * new(g)
            return gate(o) * out(c), c

        return step

    return _run(node, x, (w, r, b), first=(h, c), lengths=lengths, cell=cell)
