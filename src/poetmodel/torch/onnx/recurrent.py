"""Recurrent operators, one time step after another, as captures of PyTorch's modules."""

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
    """The weights of one direction, for the inputs and for the state, and the two biases."""

    def __init__(
        self, input_weight: torch.Tensor, recurrent_weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Store the weights, and split the bias into those of inputs and of state."""
        self.inputs, self.state, self.hidden = (
            input_weight,
            recurrent_weight,
            recurrent_weight.shape[-1],
        )
        self.biases: tuple[torch.Tensor | None, ...] = (None, None)
        if bias is not None:
            self.biases = bias.chunk(2)


def _run_directions(
    node: OnnxNode,
    x: torch.Tensor,
    parameters: tuple[Any, ...],
    *,
    initial_states: tuple[Any, ...],
    lengths: Any,
    cell: Callable[[_Weights, tuple[Function, ...], int], Cell],
) -> Any:
    """Compute Y and the last value of each state, for all directions of a recurrent operator.

    `cell` creates the function of one time step from the weights, activations and index of a
    direction. `parameters` are input weights, recurrent weights and biases of all directions.
    `initial_states` has None for states of zeros. `lengths` are the lengths of the sequences; None
    if all are full.
    """
    batch_first = bool(node.get("layout", 0))
    if batch_first:
        x = x.transpose(0, 1)
        initial_states = tuple(
            None if h is None else tensor(h, x).transpose(0, 1) for h in initial_states
        )
    for attribute in ("clip", "input_forget"):
        if node.get(attribute, 0):
            raise node.unsupported(f"{attribute} is not supported; leave it out")
    is_active = _active_mask(lengths, x)
    reversals_by_name = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    reversals = reversals_by_name[node.get("direction", "forward")]
    w, r, b = (
        (None,) * len(reversals) if value is None else tensor(value, x).unbind(0)
        for value in parameters
    )
    outputs, final_states = [], []
    for direction, is_reversed in enumerate(reversals):
        weights = _Weights(w[direction], r[direction], b[direction])
        functions = _functions(node, direction, len(reversals))
        step = cell(weights, functions, direction)
        state = tuple(
            x.new_zeros(x.shape[1], weights.hidden) if h is None else tensor(h, x)[direction]
            for h in initial_states
        )
        projected_inputs = functional.linear(x, weights.inputs, weights.biases[0]).unbind(0)
        hidden_states: list[Any] = [None] * len(projected_inputs)
        for k in (
            reversed(range(len(projected_inputs))) if is_reversed else range(len(projected_inputs))
        ):
            next_state = step(projected_inputs[k], state)
            if is_active is not None:
                next_state = tuple(map(partial(torch.where, is_active[k]), next_state, state))
            state, hidden_states[k] = next_state, next_state[0]
        outputs.append(torch.stack(hidden_states))
        final_states.append(state)
    y = torch.stack(outputs, 1)
    if is_active is not None:
        y = torch.where(is_active.unsqueeze(1), y, 0.0)
    stacked_states = [
        torch.stack([state[k] for state in final_states]) for k in range(len(initial_states))
    ]
    if batch_first:
        y, stacked_states = y.permute(2, 0, 1, 3), [h.transpose(0, 1) for h in stacked_states]
    return y if node.output_count == 1 else (y, *stacked_states)[: node.output_count]


def _active_mask(lengths: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return for each time step a column of flags: whether each sequence has not ended yet.

    Returns None if all sequences have the full length.
    """
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
    """Return the activations of a direction; raise `InputError` if one is not supported."""
    names = node.get("activations") or _DEFAULTS[node.operator] * directions
    per_direction = len(names) // directions
    direction_names = names[direction * per_direction : (direction + 1) * per_direction]
    unknown = [name for name in direction_names if name not in _FUNCTIONS]
    if unknown:
        raise node.unsupported(
            f"its activation {unknown[0]} is not supported; expected Relu, Sigmoid or Tanh"
        )
    return tuple(_FUNCTIONS[name] for name in direction_names)


@operator("RNN", weights=(1, 2, 3), refuses=_REFUSES)
def _rnn(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Compute an RNN."""

    def cell(weights: _Weights, functions: tuple[Function, ...], _: int) -> Cell:
        """Return the function of one time step."""

        def step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            projected_state = functional.linear(state[0], weights.state, weights.biases[1])
            return (functions[0](projected + projected_state),)

        return step

    return _run_directions(node, x, (w, r, b), initial_states=(h,), lengths=lengths, cell=cell)


@operator("GRU", weights=(1, 2, 3), refuses=_REFUSES)
def _gru(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Compute a GRU. ONNX orders the gates: update, reset, new."""

    def cell(weights: _Weights, functions: tuple[Function, ...], _: int) -> Cell:
        """Return the function of one time step."""
        gate, new = functions
        split_sizes = (2 * weights.hidden, weights.hidden)

        def step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Compute a time step whose reset gate multiplies the projected state."""
            (h,) = state
            input_z, input_reset, input_new = projected.chunk(3, 1)
            projected_state = functional.linear(h, weights.state, weights.biases[1])
            state_z, state_reset, state_new = projected_state.chunk(3, 1)
            z, reset = gate(input_z + state_z), gate(input_reset + state_reset)
            candidate = new(input_new + reset * state_new)
            return (candidate + z * (h - candidate),)

        def step_reset_first(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Compute a time step whose reset gate multiplies the state before its projection."""
            (h,) = state
            gates_weight, state_new = weights.state.split(split_sizes)
            bias = weights.biases[1]
            gates_bias, new_bias = (None, None) if bias is None else bias.split(split_sizes)
            input_z, input_reset, input_new = projected.chunk(3, 1)
            state_z, state_reset = functional.linear(h, gates_weight, gates_bias).chunk(2, 1)
            z, reset = gate(input_z + state_z), gate(input_reset + state_reset)
            candidate = new(input_new + functional.linear(reset * h, state_new, new_bias))
            return (candidate + z * (h - candidate),)

        return step if node.get("linear_before_reset", 0) else step_reset_first

    return _run_directions(node, x, (w, r, b), initial_states=(h,), lengths=lengths, cell=cell)


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
    """Compute an LSTM. ONNX orders the gates: input, output, forget, cell."""

    def cell(weights: _Weights, functions: tuple[Function, ...], direction: int) -> Cell:
        """Return the function of one time step."""
        gate, new, out = functions
        peephole_weights = None if peepholes is None else tensor(peepholes, x)[direction].chunk(3)

        def with_peephole(gate_sum: torch.Tensor, k: int, c: torch.Tensor) -> torch.Tensor:
            """Return a gate's sum with the cell's share: ONNX orders input, output, forget."""
            return gate_sum if peephole_weights is None else gate_sum + peephole_weights[k] * c

        def step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Return the next hidden and cell state."""
            h, c = state
            total = projected + functional.linear(h, weights.state, weights.biases[1])
            i, o, f, g = total.chunk(4, 1)
            c = gate(with_peephole(f, 2, c)) * c + gate(with_peephole(i, 0, c)) * new(g)
            return gate(with_peephole(o, 1, c)) * out(c), c

        return step

    return _run_directions(node, x, (w, r, b), initial_states=(h, c), lengths=lengths, cell=cell)
