"""Recurrent operators, step by step as PyTorch's own are captured."""

from __future__ import annotations

from functools import partial
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

_REFUSES: Final = "`clip`; activations other than Relu, Sigmoid and Tanh"


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
    cell: Callable[[_Weights, tuple[Function, ...], int], Cell],
) -> Any:
    """Return Y, and the last value of each state, of all directions of a recurrent operator.

    `cell` makes the function of one time step from the weights, activations and number of a
    direction.
    """
    batch_first = bool(node.get("layout", 0))
    if batch_first:
        x = x.transpose(0, 1)
        first = tuple(None if h is None else tensor(h, x).transpose(0, 1) for h in first)
    for attribute in ("clip", "input_forget"):
        if node.get(attribute, 0):
            raise node.refused(f"{attribute} is not known; leave it out")
    active = _active(lengths, x)
    names = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    ways = names[node.get("direction", "forward")]
    w, r, b = (
        (None,) * len(ways) if value is None else tensor(value, x).unbind(0) for value in given
    )
    outputs, last = [], []
    for direction, backward in enumerate(ways):
        weights = _Weights(w[direction], r[direction], b[direction])
        functions = _functions(node, direction, len(ways))
        step = cell(weights, functions, direction)
        state = tuple(
            x.new_zeros(x.shape[1], weights.hidden) if h is None else tensor(h, x)[direction]
            for h in first
        )
        every = functional.linear(x, weights.inputs, weights.biases[0]).unbind(0)
        found: list[Any] = [None] * len(every)
        for k in reversed(range(len(every))) if backward else range(len(every)):
            after = step(every[k], state)
            if active is not None:
                after = tuple(map(partial(torch.where, active[k]), after, state))
            state, found[k] = after, after[0]
        outputs.append(torch.stack(found))
        last.append(state)
    y = torch.stack(outputs, 1)
    if active is not None:
        y = torch.where(active.unsqueeze(1), y, 0.0)
    ends = [torch.stack([state[k] for state in last]) for k in range(len(first))]
    if batch_first:
        y, ends = y.permute(2, 0, 1, 3), [h.transpose(0, 1) for h in ends]
    return y if node.wanted == 1 else (y, *ends)[: node.wanted]


def _active(lengths: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return which sequences still run at each time step, as a column; None if all always do."""
    steps = len(x)
    if lengths is None or (isinstance(lengths, tuple) and set(lengths) == {steps}):
        return None
    return torch.arange(steps, device=x.device).reshape(-1, 1, 1) < tensor(lengths, x).reshape(
        -1, 1
    )


_DEFAULTS: Final = {
    "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)
}  # fmt: skip


def _functions(node: OnnxNode, direction: int, directions: int) -> tuple[Function, ...]:
    names = node.get("activations") or _DEFAULTS[node.operator] * directions
    per_direction = len(names) // directions
    named = names[direction * per_direction : (direction + 1) * per_direction]
    unknown = [name for name in named if name not in _FUNCTIONS]
    if unknown:
        raise node.refused(
            f"its activation {unknown[0]} is not known; expected Relu, Sigmoid or Tanh"
        )
    return tuple(_FUNCTIONS[name] for name in named)


@operator("RNN", weights=(1, 2, 3), refuses=_REFUSES)
def _rnn(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    def cell(weights: _Weights, functions: tuple[Function, ...], _: int) -> Cell:
        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            old = functional.linear(state[0], weights.state, weights.biases[1])
            return (functions[0](given + old),)

        return step

    return _run(node, x, (w, r, b), first=(h,), lengths=lengths, cell=cell)


@operator("GRU", weights=(1, 2, 3), refuses=_REFUSES)
def _gru(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Run a GRU; gates are in the order of ONNX: update, reset, new."""

    def cell(weights: _Weights, functions: tuple[Function, ...], _: int) -> Cell:
        gate, new = functions
        parts = (2 * weights.hidden, weights.hidden)

        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            (h,) = state
            to_z, to_reset, to_new = given.chunk(3, 1)
            old = functional.linear(h, weights.state, weights.biases[1])
            of_z, of_reset, of_new = old.chunk(3, 1)
            z, reset = gate(to_z + of_z), gate(to_reset + of_reset)
            candidate = new(to_new + reset * of_new)
            return (candidate + z * (h - candidate),)

        def step_reset_first(
            given: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            (h,) = state
            of_gates, of_new = weights.state.split(parts)
            bias = weights.biases[1]
            gates_bias, new_bias = (None, None) if bias is None else bias.split(parts)
            to_z, to_reset, to_new = given.chunk(3, 1)
            of_z, of_reset = functional.linear(h, of_gates, gates_bias).chunk(2, 1)
            z, reset = gate(to_z + of_z), gate(to_reset + of_reset)
            candidate = new(to_new + functional.linear(reset * h, of_new, new_bias))
            return (candidate + z * (h - candidate),)

        return step if node.get("linear_before_reset", 0) else step_reset_first

    return _run(node, x, (w, r, b), first=(h,), lengths=lengths, cell=cell)


@operator("LSTM", weights=(1, 2, 3, 7), refuses=f"{_REFUSES}; `input_forget`")
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

    def cell(weights: _Weights, functions: tuple[Function, ...], direction: int) -> Cell:
        gate, new, out = functions
        own = None if peepholes is None else tensor(peepholes, x)[direction].chunk(3)

        def with_peephole(part: torch.Tensor, k: int, c: torch.Tensor) -> torch.Tensor:
            """Return a gate's sum with the cell's share: ONNX orders input, output, forget."""
            return part if own is None else part + own[k] * c

        def step(given: torch.Tensor, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            h, c = state
            total = given + functional.linear(h, weights.state, weights.biases[1])
            i, o, f, g = total.chunk(4, 1)
            c = gate(with_peephole(f, 2, c)) * c + gate(with_peephole(i, 0, c)) * new(g)
            return gate(with_peephole(o, 1, c)) * out(c), c

        return step

    return _run(node, x, (w, r, b), first=(h, c), lengths=lengths, cell=cell)
