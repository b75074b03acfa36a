"""Capuchin: what is swapped, what is recomputed, and the budget."""

from __future__ import annotations

import pytest

from kit.worked import skip_problem
from poetmodel.baselines.capuchin import capuchin
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, operation
from poetmodel.problem import Problem


def _two_gaps(transfer_s: float, *, ram: int = 9, **limits: object) -> Problem:
    """State a problem in which tensors must be out while `c` is computed.

    ====  =====  =====  =========  =================================================
    node  bytes  reads  computed   free time with transfers of x seconds each way
    ====  =====  =====  =========  =================================================
    a     4             0..1 s     until `e`: 13 - x - (1 + x) = 12 - 2 x
    b     4             1..2 s     until `d`: 12 - x - (2 + x) = 10 - 2 x
    c     5             2..12 s
    d     1      b      12..13 s
    e     1      a      13..14 s
    ====  =====  =====  =========  =================================================
    """
    graph = Graph(
        name="gaps",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4),
            operation("c", output_bytes=5),
            operation("d", output_bytes=1, inputs=("b",)),
            operation("e", output_bytes=1, inputs=("a",)),
        ),
    )
    seconds = [1.0, 1.0, 10.0, 1.0, 1.0]
    pages = [(transfer_s, 1.0)] * 5
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, ram=ram, **limits)  # type: ignore[arg-type]


def _left(problem: Problem) -> tuple[list[int], list[int]]:
    """Return which tensors a schedule swaps, and which it recomputes."""
    schedule = capuchin(problem)
    return [i for _, i in schedule.M_in], [k for t, k in schedule.R if k < t]


@pytest.mark.parametrize(
    ("transfer_s", "swapped", "again"),
    [
        (1, [0], []),  # free times 10 and 8: `a`, the longer one
        (6, [0], []),  # 0 and -2: `a` is just hidden, though recomputing it takes only 1 s
        (7, [], [0]),  # -2 and -4: recomputing holds up 1 s, swapping 2; 4 bytes in 1 s each
    ],
)
def test_one_gap_worked_by_hand(transfer_s: float, swapped: list[int], again: list[int]) -> None:
    """The longest free time is swapped while it is hidden, else the lesser overhead decides."""
    assert _left(_two_gaps(transfer_s)) == (swapped, again)


def test_both_gaps_worked_by_hand() -> None:
    """With 5.5 s `b` waits 1 s, as recomputing it takes: a swap. With 6 s it would wait 2 s."""
    assert _left(_two_gaps(5.5, ram=5)) == ([1, 0], [])
    assert _left(_two_gaps(6, ram=5)) == ([0], [1])


def test_more_saving_per_second_goes_first() -> None:
    """Without recomputation the swap that waits less goes: 4 bytes in 2 s before 4 bytes in 4 s."""
    assert _left(_two_gaps(7, recompute=False)) == ([0], [])


def test_overhead_of_a_recomputation_includes_its_inputs() -> None:
    """`b` alone takes 1 s but needs `p`, which is gone, 9 s more: `a` of 5 s is recomputed."""
    graph = Graph(
        name="inputs",
        nodes=(
            operation("p", output_bytes=1),
            operation("b", output_bytes=4, inputs=("p",)),
            operation("a", output_bytes=4),
            operation("c", output_bytes=5),
            operation("d", output_bytes=1, inputs=("a", "b")),
        ),
    )
    seconds = [9.0, 1.0, 5.0, 1.0, 1.0]
    costs = Costs.from_arrays(graph, compute_time_s=seconds, compute_energy_j=seconds)
    assert _left(Problem(graph, costs, ram=9)) == ([], [2])


def test_recomputation_that_does_not_fit_becomes_a_swap() -> None:
    """`b` is recomputed in no time, but its workspace leaves no room for that beside `a`."""
    graph = Graph(
        name="transient",
        nodes=(
            operation("b", output_bytes=4, workspace_bytes=6),
            operation("a", output_bytes=4),
            operation("c", output_bytes=5),
            operation("d", output_bytes=1, inputs=("a", "b")),
        ),
    )
    seconds = [0.0, 9.0, 1.0, 1.0]
    pages = [(9.0, 1.0)] * 4
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    problem = Problem(graph, costs, ram=10)
    assert _left(problem) == ([0], [])
    roomy = Graph(name="roomy", nodes=(operation("b", output_bytes=4), *graph.nodes[1:]))
    assert _left(Problem(roomy, costs, ram=10)) == ([], [0])


def test_refused_with_the_stage_that_does_not_fit() -> None:
    """Where nothing may leave, the reason names the node and what is missing."""
    with pytest.raises(MethodNotApplicableError, match="at 'c' 2 B more"):
        capuchin(skip_problem(paging=False, recompute=False))
