"""Recurrent ONNX operators, computed one time step after another."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn import functional

from poetmodel.torch.onnx.operators import OnnxNode, register_operator, to_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    # From (inputs times their weights, plus bias; states) to the next states.
    TimeStep = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    Activation = Callable[[torch.Tensor], torch.Tensor]

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "Relu": functional.relu,
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
}

_UNSUPPORTED_FEATURES: Final = "`clip`; activations other than Relu, Sigmoid and Tanh"


class _Weights(NamedTuple):
    """The weights of one direction for the inputs and for the hidden state, and both biases."""

    input_weight: torch.Tensor
    state_weight: torch.Tensor
    biases: tuple[torch.Tensor | None, ...]

    @property
    def hidden_size(self) -> int:
        return int(self.state_weight.shape[-1])


def _compute_directions(
    node: OnnxNode,
    x: torch.Tensor,
    parameters: tuple[Any, ...],
    *,
    initial_states: tuple[Any, ...],
    lengths: Any,
    make_step: Callable[[_Weights, tuple[Activation, ...], int], TimeStep],
) -> Any:
    """Compute the outputs of a recurrent operator for all directions: Y, then the final states.

    `parameters` are W, R and B. `make_step` returns the function of one time step from the weights,
    activations and index of a direction. Beyond a sequence's end, Y is 0 and states are unchanged.
    """
    is_batch_first = bool(node.get("layout", 0))
    if is_batch_first:
        x = x.transpose(0, 1)
        initial_states = tuple(
            None if h is None else to_tensor(h, x).transpose(0, 1) for h in initial_states
        )
    for attribute in ("clip", "input_forget"):
        if node.get(attribute, 0):
            raise node.unsupported_error(f"{attribute} is not supported; leave it out")
    active_mask = _active_mask(lengths, x)
    reversals_by_name = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    reversals = reversals_by_name[node.get("direction", "forward")]
    w, r, b = (
        (None,) * len(reversals) if value is None else to_tensor(value, x).unbind(0)
        for value in parameters
    )
    outputs, final_states = [], []
    for direction, is_reversed in enumerate(reversals):
        bias = b[direction]
        biases = (None, None) if bias is None else bias.chunk(2)
        weights = _Weights(w[direction], r[direction], biases)
        activations = _find_activations(node, direction, len(reversals))
        compute_time_step = make_step(weights, activations, direction)
        state = tuple(
            x.new_zeros(x.shape[1], weights.hidden_size)
            if h is None
            else to_tensor(h, x)[direction]
            for h in initial_states
        )
        projected_inputs = functional.linear(x, weights.input_weight, weights.biases[0]).unbind(0)
        hidden_states: list[Any] = [None] * len(projected_inputs)
        step_indices = range(len(projected_inputs))
        for step_index in reversed(step_indices) if is_reversed else step_indices:
            next_state = compute_time_step(projected_inputs[step_index], state)
            if active_mask is not None:
                next_state = tuple(
                    map(partial(torch.where, active_mask[step_index]), next_state, state)
                )
            state, hidden_states[step_index] = next_state, next_state[0]
        outputs.append(torch.stack(hidden_states))
        final_states.append(state)
    y = torch.stack(outputs, 1)
    if active_mask is not None:
        y = torch.where(active_mask.unsqueeze(1), y, 0.0)
    stacked_states = [
        torch.stack([state[k] for state in final_states]) for k in range(len(initial_states))
    ]
    if is_batch_first:
        y, stacked_states = y.permute(2, 0, 1, 3), [h.transpose(0, 1) for h in stacked_states]
    return y if node.output_count == 1 else (y, *stacked_states)[: node.output_count]


def _active_mask(lengths: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return whether sequences include time steps (steps, batch, 1); None if all are full."""
    step_count = len(x)
    if lengths is None or (isinstance(lengths, tuple) and set(lengths) == {step_count}):
        return None
    return torch.arange(step_count, device=x.device).reshape(-1, 1, 1) < to_tensor(
        lengths, x
    ).reshape(-1, 1)


_DEFAULT_ACTIVATIONS: Final = {
    "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh"), "RNN": ("Tanh",)
}  # fmt: skip


def _find_activations(node: OnnxNode, direction: int, n_directions: int) -> tuple[Activation, ...]:
    """Return the activations of a direction: attribute ``activations``, or ONNX's defaults."""
    names = node.get("activations") or _DEFAULT_ACTIVATIONS[node.operator] * n_directions
    count = len(names) // n_directions
    direction_names = names[direction * count : (direction + 1) * count]
    unknown_names = [name for name in direction_names if name not in _ACTIVATIONS]
    if unknown_names:
        raise node.unsupported_error(
            f"its activation {unknown_names[0]} is not supported; expected Relu, Sigmoid or Tanh"
        )
    return tuple(_ACTIVATIONS[name] for name in direction_names)


@register_operator("RNN", weights=(1, 2, 3), unsupported_features=_UNSUPPORTED_FEATURES)
def _compute_rnn(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Compute a plain RNN, whose next state is activation(W x + R h + biases)."""

    def make_step(weights: _Weights, activations: tuple[Activation, ...], _: int) -> TimeStep:
        """Return the function of one RNN time step, which returns the next hidden state."""

        def compute_time_step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            projected_state = functional.linear(state[0], weights.state_weight, weights.biases[1])
            return (activations[0](projected + projected_state),)

        return compute_time_step

    return _compute_directions(
        node, x, (w, r, b), initial_states=(h,), lengths=lengths, make_step=make_step
    )


@register_operator("GRU", weights=(1, 2, 3), unsupported_features=_UNSUPPORTED_FEATURES)
def _compute_gru(
    node: OnnxNode, x: Any, w: Any, r: Any, b: Any = None, lengths: Any = None, h: Any = None
) -> Any:
    """Compute a GRU, with weights in ONNX's order of the gates: update, reset, new."""

    def make_step(weights: _Weights, activations: tuple[Activation, ...], _: int) -> TimeStep:
        """Return the function of one GRU time step.

        The reset gate multiplies the projected state if ``linear_before_reset``, else the state.
        """
        activate_gate, activate_new = activations
        split_sizes = (2 * weights.hidden_size, weights.hidden_size)

        def compute_time_step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Return the next state of a GRU whose reset gate multiplies the projected state."""
            (h,) = state
            input_update, input_reset, input_new = projected.chunk(3, 1)
            projected_state = functional.linear(h, weights.state_weight, weights.biases[1])
            state_update, state_reset, state_new = projected_state.chunk(3, 1)
            update, reset = (
                activate_gate(input_update + state_update),
                activate_gate(input_reset + state_reset),
            )
            candidate = activate_new(input_new + reset * state_new)
            return (candidate + update * (h - candidate),)

        def compute_reset_first(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Compute a GRU's time step whose reset gate multiplies the unprojected state."""
            (h,) = state
            gates_weight, new_weight = weights.state_weight.split(split_sizes)
            bias = weights.biases[1]
            gates_bias, new_bias = (None, None) if bias is None else bias.split(split_sizes)
            input_update, input_reset, input_new = projected.chunk(3, 1)
            state_update, state_reset = functional.linear(h, gates_weight, gates_bias).chunk(2, 1)
            update, reset = (
                activate_gate(input_update + state_update),
                activate_gate(input_reset + state_reset),
            )
            candidate = activate_new(input_new + functional.linear(reset * h, new_weight, new_bias))
            return (candidate + update * (h - candidate),)

        return compute_time_step if node.get("linear_before_reset", 0) else compute_reset_first

    return _compute_directions(
        node, x, (w, r, b), initial_states=(h,), lengths=lengths, make_step=make_step
    )


@register_operator(
    "LSTM", weights=(1, 2, 3, 7), unsupported_features=f"{_UNSUPPORTED_FEATURES}; `input_forget`"
)
def _compute_lstm(
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
    """Compute an LSTM, with weights in ONNX's order of the gates: input, output, forget, cell."""

    def make_step(
        weights: _Weights, activations: tuple[Activation, ...], direction: int
    ) -> TimeStep:
        """Return the function of one LSTM time step, with any peephole weights of `direction`."""
        activate_gate, activate_new, activate_output = activations
        peephole_weights = (
            None if peepholes is None else to_tensor(peepholes, x)[direction].chunk(3)
        )

        def add_peephole(gate_sum: torch.Tensor, gate_index: int, c: torch.Tensor) -> torch.Tensor:
            """Return a gate's sum with its peephole term for the cell state `c`, if any."""
            return (
                gate_sum
                if peephole_weights is None
                else gate_sum + peephole_weights[gate_index] * c
            )

        def compute_time_step(
            projected: torch.Tensor, state: tuple[torch.Tensor, ...]
        ) -> tuple[torch.Tensor, ...]:
            """Return the next hidden and cell state of an LSTM."""
            h, c = state
            gate_sums = projected + functional.linear(h, weights.state_weight, weights.biases[1])
            input_gate, output_gate, forget_gate, cell = gate_sums.chunk(4, 1)
            c = activate_gate(add_peephole(forget_gate, 2, c)) * c + activate_gate(
                add_peephole(input_gate, 0, c)
            ) * activate_new(cell)
            return activate_gate(add_peephole(output_gate, 1, c)) * activate_output(c), c

        return compute_time_step

    return _compute_directions(
        node, x, (w, r, b), initial_states=(h, c), lengths=lengths, make_step=make_step
    )
