"""What is requested of a solve, and what it reports on the way."""

from __future__ import annotations

import pytest

from poetmodel.errors import InputError
from poetmodel.solver import SolveProgress
from poetmodel.solver.request import Request


@pytest.mark.parametrize(
    ("incumbent", "bound", "gap"),
    [
        (4.0, 3.0, 0.25),
        (4.0, 4.0, 0.0),
        (4.0, 5.0, 0.0),
        (0.0, 0.0, 0.0),
        (4.0, 0.0, 1.0),
        (None, 1.0, None),
        (4.0, None, None),
    ],
)
def test_gap_of_progress(incumbent: float | None, bound: float | None, gap: float | None) -> None:
    """A fraction of the incumbent; None while either side is missing."""
    assert SolveProgress(seconds=1.0, incumbent=incumbent, bound=bound).gap == gap


def test_time_runs_from_the_request_on() -> None:
    """What is left is never negative."""
    assert Request(time_limit_s=1000.0).remaining_s() > 900.0
    assert Request(time_limit_s=1e-9).remaining_s() == 0.0
    assert Request().elapsed_s() >= 0.0


def test_defaults_of_a_request() -> None:
    """HiGHS, a minute, one thread, a gap of 0.01 % of what can be decided."""
    request = Request()
    assert (request.backend, request.time_limit_s) == ("highs", 60.0)
    assert (request.gap, request.threads, request.seed) == (1e-4, 1, 0)


@pytest.mark.parametrize("bad", [{"time_limit_s": True}, {"gap": "1%"}, {"seed": 0.5}])
def test_a_request_checks_its_kinds(bad: dict[str, object]) -> None:
    """Neither bools nor strings pass for numbers."""
    with pytest.raises(InputError):
        Request(**bad)  # type: ignore[arg-type]
