"""Percentages of RAM in PyTorch: of the keep-all peak of each entry point."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import poetmodel.torch as pmt
from poetmodel.budgets import Budget
from poetmodel.errors import InputError


def training():
    """Return a model and its inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    return model, (torch.randn(16, 8), torch.randint(64, (16,)))


@pytest.mark.parametrize("text", ["95%", pytest.param(" 95 % ", marks=pytest.mark.slow)])
def test_a_share_is_of_the_peak_with_everything_kept(text):
    """Compiled steps and back ends print that peak beside their budget."""
    model, inputs = training()
    step = pmt.compile(model, functional.cross_entropy, inputs, ram=text, gap=0.5).compiled
    back = pmt.backend(text, cache=False, gap=0.5)
    compiled = torch.compile(
        lambda x, y: functional.cross_entropy(model(x), y), backend=back, fullgraph=True
    )
    compiled(*inputs).backward()
    (plan,) = back.plans
    assert step.budget_bytes == Budget.parse(text).resolve(step.keep_all_bytes)
    assert plan.ram_budget_bytes == Budget.parse(text).resolve(plan.keep_all_bytes)


def test_a_wrong_budget_is_refused_alike():
    """With the same sentence, for all entry points."""
    model, inputs = training()
    refusals = []
    for door in (
        lambda ram: pmt.compile(model, functional.cross_entropy, inputs, ram=ram),
        lambda ram: pmt.backend(ram, cache=False),
        lambda ram: pmt.export(model, functional.cross_entropy, inputs, ram=ram, folder="c"),
        lambda ram: pmt.choose(
            model, functional.cross_entropy, inputs, ram=ram, scores="gradient-norm",
            device="nrf52840",
        ),
    ):  # fmt: skip
        with pytest.raises(InputError) as caught:
            door("60 XB")
        refusals.append(caught.value.faults)
    assert refusals == [refusals[0]] * 4
