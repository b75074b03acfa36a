"""Snapshots: quick to say that all is as it was, and never wrong about it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from kit.quick import quick  # noqa: E402
from kit.traced_models import rows  # noqa: E402
from poetmodel.torch.guards import Guards  # noqa: E402
from poetmodel.torch.joint import capture  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

nn = torch.nn
pytestmark = pytest.mark.torch


def guarded() -> tuple[Any, Guards, tuple[Any, ...]]:
    """Return a model of four kinds of layers, its guards, and flat inputs."""
    model, loss_fn, inputs = rows(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4))
    )
    joint = capture(model, loss_fn, inputs)
    return model, Guards(joint), joint.flat_inputs(inputs)


def is_current(guards: Guards) -> bool:
    """Return what the quick check says."""
    return guards._snapshot is not None and guards._snapshot.is_current()


def swap_names(model: Any) -> None:
    """Let the two layers of one kind change places."""
    model[0], model[3][0] = model[3][0], model[0]


CHANGES: tuple[Callable[[Any], Any], ...] = (
    lambda model: setattr(model[0].weight, "data", model[0].weight.data.double()),
    lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
    lambda model: setattr(model[3][0], "weight", model[0].weight),
    swap_names,
    lambda model: model.eval(),
    lambda model: model[2].eval(),
    lambda model: model[0].weight.requires_grad_(requires_grad=False),
    lambda model: model[0].weight.register_hook(lambda gradient: gradient),
    lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda _: None),
    lambda model: model[2].register_forward_hook(lambda *_: None),
    lambda model: model[2].register_full_backward_pre_hook(lambda *_: None),
    lambda model: setattr(model[2], "p", 0.25),
    lambda model: delattr(model[2], "p"),
    lambda model: model.append(model[2]),
    lambda model: model[2].add_module("more", nn.ReLU()),
    lambda model: model[3].__delitem__(0),
    lambda model: delattr(model[0], "bias"),
    lambda model: setattr(model[0], "bias", None),
    lambda model: setattr(model[1], "running_mean", torch.zeros(5)),
)


@pytest.mark.parametrize("change", quick(CHANGES, CHANGES[::3]))
def test_no_change_goes_unnoticed(change: Callable[[Any], Any]) -> None:
    """What the full check may refuse, the quick one never takes for current."""
    model, guards, _ = guarded()
    assert is_current(guards)
    change(model)
    assert not is_current(guards)


def test_training_leaves_a_snapshot_current() -> None:
    """Steps, new gradients, loaded states and new values are no changes."""
    model, guards, _ = guarded()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model[0].weight.data = torch.zeros(4, 4)
    assert is_current(guards)


def test_an_equal_parameter_in_place_of_another_is_compared_once() -> None:
    """The full check finds it to be the same, and a snapshot is taken anew."""
    model, guards, flat = guarded()
    model[0].weight = nn.Parameter(torch.zeros(4, 4))
    assert not is_current(guards)
    assert guards.hold(flat)
    assert is_current(guards)


def test_modes_around_a_step_are_seen() -> None:
    """Autocast, and inference mode."""
    _, guards, _ = guarded()
    with torch.autocast("cpu"):
        assert not is_current(guards)
    with torch.inference_mode():
        assert not is_current(guards)
    with torch.no_grad():
        assert is_current(guards)


def test_tensors_in_places_of_their_own_are_compared_in_full() -> None:
    """No snapshot is taken of a weight that is a plain attribute; the step holds all the same."""
    model, guards, flat = guarded()
    weight = model[0].weight.detach().requires_grad_()
    del model[0].weight
    model[0].weight = weight
    assert guards.hold(flat)
    assert not is_current(guards)
    assert guards.hold(flat)
