"""Limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from poetmodel.backends import Limits
from poetmodel.errors import InputError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_s", 0.0),
        ("time_s", -1.0),
        ("time_s", math.inf),
        ("time_s", math.nan),
        ("rel_gap", -1e-9),
        ("rel_gap", math.inf),
        ("rel_gap", math.nan),
        ("abs_gap", -1.0),
        ("threads", 0),
        ("threads", 1.5),
        ("threads", True),
        ("threads", math.nan),
        ("seed", -1),
        ("seed", 2**31),
        ("objective_stop", math.nan),
        ("objective_cutoff", math.inf),
        ("tolerance", 0.0),
        ("tolerance", 0.1),
    ],
)
def test_limits_refuse(name: str, value: Any) -> None:
    """Numbers that make no sense are refused by name and value."""
    with pytest.raises(InputError, match=f"^{name}: expected .*, got "):
        Limits(**{name: value})


def test_limits_gather_faults() -> None:
    """All faults are reported at once."""
    with pytest.raises(InputError) as caught:
        Limits(time_s=-1.0, threads=0, rel_gap=math.nan)
    assert len(caught.value.faults) == 3
