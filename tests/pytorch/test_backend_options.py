"""The back end as people write it: its arguments, its name, and what it says of them."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed

import poetmodel.torch as pmt
from poetmodel.errors import InputError
from poetmodel.torch.dynamo import backend as backends

GROUP = "torch_dynamo_backends"


def network(depth=4, width=64):
    """Return a chain of layers."""
    layers = (layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU()))
    return nn.Sequential(*layers, nn.Linear(width, 10))


@pytest.mark.parametrize(
    "options",
    [
        {"ram": "lots"}, {"ram": None}, {"ram": 0.6}, {"ram": True}, {"ram": "-1MiB"}, {"ram": 0},
        {"time_limit": -1}, {"time_limit": "x"}, {"gap": -3}, {"gap": None},
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_when_they_are_given(options):
    """Not at the first batch, where PyTorch would wrap what is said."""
    with pytest.raises(InputError, match=next(iter(options)).replace("_", " ")):
        pmt.backend(**{"ram": "60%", **options})


def test_what_was_probably_meant_is_asked():
    """A number of bytes that is a percentage; a device that is a place; all faults at once."""
    with pytest.raises(InputError, match=r"did you mean 60% or 60KiB\?"):
        pmt.backend(ram=60)
    with pytest.raises(InputError, match="figures estimate times") as refused:
        pmt.backend(ram="lots", device="cuda:0", gap=-3)
    assert len(refused.value.faults) == 3
    pmt.backend(ram="60B")


@pytest.fixture
def by_name(monkeypatch):
    """Return a function that compiles by the name that the package registers with PyTorch."""
    torch._dynamo.reset()
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    ((name, value),) = project["project"]["entry-points"][GROUP].items()
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, value, GROUP))
    registry.list_backends()  # PyTorch's own
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    monkeypatch.setattr(backends, "_NAMED", [])
    yield lambda function, **given: torch.compile(
        function, backend=name, fullgraph=True, dynamic=False, **given
    )
    registry._COMPILER_FNS.pop(name, None)


def test_a_name_and_options_are_a_back_end(by_name):
    """With the bits of eager; equal options are one back end, whose records can be had."""
    model, x = network(), torch.randn(256, 64)
    for scale in (1, 2):
        options = {"ram": "80%", "cache": False}
        by_name(lambda x, scale=scale: scale * model(x).square().mean(), options=options)(x)
    by_name(model, options={"ram": "90%", "cache": False})(x).square().mean().backward()
    assert [record.name for record in pmt.plans()] == ["graph 0", "graph 1", "graph 0"]
    assert pmt.summary().splitlines() == list(map(str, pmt.plans()))
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"options": {"ram": "lots"}}, "ram: expected a size"),
        ({"options": {"rams": "60%"}}, "rams: unknown key; did you mean ram"),
        ({}, "expected a budget"),
        ({"mode": "reduce-overhead"}, "mode: "),
    ],
)
def test_wrong_options_of_the_name_are_refused(by_name, given, told):
    """When PyTorch hands them over."""
    with pytest.raises(BackendCompilerFailed, match=told) as refused:
        by_name(nn.Linear(4, 4), **given)(torch.randn(2, 4))
    assert isinstance(refused.value.inner_exception, InputError)
    assert pmt.plans() == []
