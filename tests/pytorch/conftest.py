"""Fixtures of all tests of PyTorch: the same random numbers."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
