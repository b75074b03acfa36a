"""What every test of PyTorch starts from: the same random numbers."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _seeded():
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)
