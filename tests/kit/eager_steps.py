"""A compiled step and eager PyTorch side by side; needs PyTorch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from poetmodel.torch import compile

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.torch import Step

Results = dict[str, torch.Tensor]


def keep_all(*step: Any, **options: Any) -> Step:
    """Return a step compiled to keep everything, by the figures of a board: nothing is measured."""
    return compile(*step, **{"ram": "100%", "device": "rpi4b"} | options)


def eager_step(model: torch.nn.Module, loss_fn: Any, inputs: tuple[Any, ...]) -> torch.Tensor:
    """Run forward pass, loss and backward pass as PyTorch does."""
    loss = model(*inputs) if loss_fn is None else loss_fn(model(*inputs[:-1]), inputs[-1])
    loss.backward()
    return loss.detach()


def outcome(model: torch.nn.Module, loss: torch.Tensor) -> Results:
    """Return copies of all that a step leaves: loss, gradients, buffers, random state."""
    found = {"loss": loss.clone(), "random": torch.get_rng_state()}
    for name, parameter in model.named_parameters():
        found[f"parameter {name}"] = parameter.detach().clone()
        if parameter.grad is not None:
            found[f"gradient {name}"] = parameter.grad.clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    return found


def unequal(one: Results, other: Results) -> list[str]:
    """Return the names of the results that are not equal bit for bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


def differing(
    step: Callable[..., torch.Tensor], model: torch.nn.Module, loss_fn: Any, inputs: tuple[Any, ...]
) -> list[str]:
    """Run eager on a copy and a step on the model itself; return which results differ."""
    twin, own_inputs = copy.deepcopy(model), copy.deepcopy(inputs)
    for mine, its in zip(twin.parameters(), model.parameters(), strict=True):
        mine.grad = None if its.grad is None else its.grad.clone()
    state = torch.get_rng_state()
    expected = outcome(twin, eager_step(twin, loss_fn, own_inputs))
    torch.set_rng_state(state)
    return unequal(expected, outcome(model, step(*inputs)))
