"""Fixtures of all tests of PyTorch: the same random numbers, and nothing measured twice."""

import sys
from functools import cache

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)


@pytest.fixture(autouse=True)
def _measured_once():
    # Without a cache each plan measures the machine, which takes longer than most plans.
    costs = sys.modules.get("poetmodel.torch.dynamo.costs")
    if costs is not None and not hasattr(costs._measure_rates, "cache_clear"):
        costs._measure_rates = cache(costs._measure_rates)
    # After each capture Dynamo overwrites the caches of the processor to log how long guards take.
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0
