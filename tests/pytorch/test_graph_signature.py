"""Lookups find what is there at the time of the call, whatever module it lies in."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from poetmodel.torch.graph_signature import Lookup  # noqa: E402

nn = torch.nn
pytestmark = pytest.mark.torch


def test_all_parameters_and_buffers_are_found() -> None:
    """In the order of the paths, whatever that is; each module on the way is fetched once."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    paths = sorted(named, reverse=True)
    found = Lookup(paths)(model)
    assert [tensor is named[path] for tensor, path in zip(found, paths, strict=True)] == [
        True
    ] * len(paths)
    model.alone = nn.Parameter(torch.zeros(1))
    assert Lookup(["alone"])(model)[0] is model.alone


def test_replaced_modules_and_tensors_are_seen() -> None:
    """Nothing is remembered between two calls."""
    model = nn.Sequential(nn.Linear(2, 2))
    lookup = Lookup(["0.weight"])
    assert lookup(model)[0] is model[0].weight
    model[0] = nn.Linear(2, 2)
    assert lookup(model)[0] is model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    assert lookup(model)[0] is model[0].weight
