"""Methods that page: gaps and their loads, demand paging, offloading, and what Capuchin swaps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kit.baseline_checks import valid_or_refused
from kit.instances import random_instances
from kit.worked import comb_graph, even_costs, gap_graph, skip_graph, skip_problem
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.paging import (
    Gap,
    execute_gaps,
    gaps_of,
    lru_paging,
    offload_all,
    within_budget,
)
from poetmodel.device import Costs
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, floor, operation
from poetmodel.graph.catalogue import load_model
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate


def test_gaps_worked_by_hand() -> None:
    """Only `a` is unused for a stage or more."""
    assert gaps_of(skip_graph()) == [Gap(0, 1, 3)]


def test_a_plan_without_gaps_is_keep_all() -> None:
    """What never leaves is kept to its last use."""
    for problem in random_instances(40, (3, 8), seed=41):
        assert execute_gaps(problem, {}) == checkpoint_all(problem.graph)


@pytest.mark.parametrize("page", [True, False])
def test_a_gap_is_paged_or_recomputed(page: bool) -> None:
    """The tensor is out of RAM in the gap, and comes back in the way that the plan says."""
    schedule = execute_gaps(skip_problem(), {Gap(0, 1, 3): page})
    assert (2, 0) not in schedule.S_RAM
    assert schedule.M_in == (((3, 0),) if page else ())
    assert ((3, 0) in schedule.R) is not page


def test_without_gaps_every_stage_holds_its_working_set() -> None:
    """With every tensor on storage in every gap the peak is the minimum RAM."""
    for problem in random_instances(40, (3, 8), seed=42, zero_bytes=False):
        graph = problem.graph
        schedule = execute_gaps(problem, dict.fromkeys(gaps_of(graph), True))
        assert simulate(graph, None, schedule).peak_ram_bytes == floor(graph).bytes


def test_what_does_not_fit_is_refused() -> None:
    """The reason names the peak, its node and the budget."""
    graph = skip_graph()
    schedule = checkpoint_all(graph)
    assert within_budget(Problem(graph, even_costs(graph), ram=15), schedule) is schedule
    with pytest.raises(MethodNotApplicableError, match="needs 15 B at 'c', and tensors may use 14"):
        within_budget(Problem(graph, even_costs(graph), ram=14), schedule)


# -- demand paging ---------------------------------------------------------------------------------


def _trace_graph() -> Graph:
    """Make a graph whose evictions in 8 bytes are worked by hand.

    ====  =====  =======  ===================================================================
    node  bytes  reads    in 8 bytes
    ====  =====  =======  ===================================================================
    a     2
    b     2
    c     2      a
    d     3               6 + 3: `b` goes, used in step 2; `a` was read in step 3
    e     1      a b      `b` comes: 7 + 2, `c` goes (step 3; `d` is of step 4); 7 + 1
    f     1      c d e    `c` comes: 4 + 2; 6 + 1
    ====  =====  =======  ===================================================================
    """
    return Graph(
        name="trace",
        nodes=(
            operation("a", output_bytes=2),
            operation("b", output_bytes=2),
            operation("c", output_bytes=2, inputs=("a",)),
            operation("d", output_bytes=3),
            operation("e", output_bytes=1, inputs=("a", "b")),
            operation("f", output_bytes=1, inputs=("c", "d", "e")),
        ),
    )


def test_lru_hand_trace() -> None:
    """What was used longest ago goes, comes back when read, and the peak is the budget."""
    graph = _trace_graph()
    schedule = lru_paging(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_in == ((4, 1), (5, 2))
    assert schedule.M_out == ((1, 1), (2, 2))
    assert schedule.S_RAM == (
        (1, 0),
        (2, 0),
        (2, 1),
        (3, 0),
        (3, 2),
        (4, 0),
        (4, 3),
        (5, 3),
        (5, 4),
    )
    assert all(t == k for t, k in schedule.R)
    assert simulate(graph, None, schedule).peak_ram_bytes == 8


def test_lru_storage_limit_counts_all_that_was_written() -> None:
    """The trace writes two tensors of 2 bytes: 4 bytes of storage are enough, 3 are not."""
    graph = _trace_graph()
    assert lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=4)).M_in
    with pytest.raises(MethodNotApplicableError, match="the step 'b' on the way to 'e'"):
        lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=3))


def test_lru_refused_without_room_on_storage() -> None:
    """With 3 bytes of storage for the 4 of `a`, or none at all, the step `c` does not fit."""
    for limits in ({"aux_bytes": 3}, {"paging": False}):
        with pytest.raises(MethodNotApplicableError, match="the step 'c'"):
            lru_paging(skip_problem(**limits))


# -- offloading ------------------------------------------------------------------------------------


def test_offload_hand_trace() -> None:
    """Of three forward tensors two wait for their backward node, on storage; peak 4 + 4."""
    graph = comb_graph(3)
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_out == ((0, 0), (1, 1))
    assert schedule.M_in == ((4, 1), (5, 0))
    assert schedule.S_RAM == ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4))
    assert simulate(graph, None, schedule).peak_ram_bytes == 8


@pytest.mark.parametrize(
    ("workspace", "page_ins"),
    [
        (2, ((2, 0),)),  # `h` takes 1 + 1 + 2 beside `f`: 8 bytes
        (3, ((2, 0), (4, 0))),  # 9 bytes: `f` must leave for it
    ],
)
def test_a_tensor_comes_in_once_or_for_each_reader(workspace: int, page_ins: object) -> None:
    """It stays from its first reader in the backward pass to the last if `h` has room beside it."""
    graph = Graph(
        name="twice",
        nodes=(
            operation("f", output_bytes=4),
            operation("loss", output_bytes=1, phase="loss"),
            operation("g", output_bytes=1, phase="backward", inputs=("f", "loss")),
            operation(
                "h", output_bytes=1, phase="backward", inputs=("g",), workspace_bytes=workspace
            ),
            operation("w", output_bytes=1, phase="update", inputs=("f", "h")),
        ),
    )
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert schedule.M_out == ((0, 0),)
    assert schedule.M_in == page_ins


def test_offload_budget_is_not_bent() -> None:
    """What the forward pass itself holds is not moved: where that is too much, it says how much."""
    graph = Graph(
        name="residual",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4, inputs=("a",)),
            operation("c", output_bytes=4, inputs=("b",)),
            operation("d", output_bytes=1, inputs=("a", "c")),
            operation("g", output_bytes=1, phase="backward", inputs=("d",)),
        ),
    )
    costs = even_costs(graph)
    assert offload_all(Problem(graph, costs, ram=12)).M_in == ()
    with pytest.raises(MethodNotApplicableError, match=r"needs 12 B at 'c'.* 11"):
        offload_all(Problem(graph, costs, ram=11))


def test_offload_does_not_apply_without_storage_or_backward_pass() -> None:
    """Each of the two reasons is said."""
    graph = comb_graph(3)
    with pytest.raises(MethodNotApplicableError, match="allows no paging"):
        offload_all(Problem(graph, even_costs(graph), ram="100%", paging=False))
    with pytest.raises(MethodNotApplicableError, match="no backward nodes"):
        offload_all(skip_problem())


def test_offload_schedules_keep_the_budget_or_are_refused() -> None:
    """On random graphs whose second half is a backward pass: valid and within RAM, or a reason."""
    paged = 0
    for problem in random_instances(200, (4, 9), seed=71, resident=True):
        nodes = problem.graph.nodes
        half = len(nodes) // 2
        halves = (*nodes[:half], *(replace(node, phase="backward") for node in nodes[half:]))
        graph = replace(problem.graph, nodes=halves)
        costs = even_costs(graph)
        schedule = valid_or_refused(
            offload_all, Problem(graph, costs, ram=problem.ram_budget_bytes, paging=problem.paging)
        )
        paged += schedule is not None and bool(schedule.M_in)
    assert paged > 20


def test_all_saved_tensors_of_a_network_go_out() -> None:
    """In a real training graph everything the backward pass reads later is paged, once out."""
    graph = load_model("mlp")
    schedule = offload_all(Problem(graph, even_costs(graph), ram="100%"))
    phases = [node.phase for node in graph.nodes]
    late = {
        i
        for i, users in enumerate(graph.users_of)
        for k in users
        if graph.tensor_bytes[i]
        and phases[graph.node_of[i]] in ("input", "forward", "loss")
        and phases[k] in ("backward", "update")
        and all(u >= k or k - u > 1 for u in (graph.node_of[i], *users))
    }
    assert {i for _, i in schedule.M_in} == late
    assert late


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
    graph = gap_graph()
    seconds = [1.0, 1.0, 10.0, 1.0, 1.0]
    pages = [(transfer_s, 1.0)] * 5
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    return Problem(graph, costs, ram=ram, **limits)  # type: ignore[arg-type]


def _left(problem: Problem, rule: str = "published") -> tuple[list[int], list[int]]:
    """Return which tensors a schedule swaps, and which it recomputes."""
    schedule = capuchin(problem, rule)
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


def test_transfers_that_block_are_charged_by_hand() -> None:
    """Where nothing hides them, 1 s out and 1 s in are more than recomputing either in 1 s.

    With 0.4 s each way, 0.8 s are less, and the first of equal gaps goes.
    """
    assert _left(_two_gaps(1, deadline_counts="serial"), "time") == ([], [0])
    assert _left(_two_gaps(0.4, deadline_counts="serial"), "time") == ([0], [])
    assert _left(_two_gaps(7, deadline_counts="compute"), "time") == ([0], [])


def test_energy_is_charged_by_hand() -> None:
    """Pages take 1 J each way, recomputing `a` or `b` 1 J: the latter, however quick pages are."""
    assert _left(_two_gaps(0.1, deadline_counts="overlap"), "energy") == ([], [0])


def test_transfers_wait_for_the_channel_by_hand() -> None:
    """Both must go. `a` swaps: out 1..6 s, in 7..12 s of its 12 s; free time 12 - 10 = 2.

    The gap of `b`, 2..12 s, has 4 + 5 s of that: 10 - 9 - 10 = -9, so recomputing in 1 s is less.
    The published rule sees a free time of 10 - 10 = 0, and swaps it, too.
    """
    problem = _two_gaps(5, ram=5, deadline_counts="overlap")
    assert _left(problem, "time") == ([0], [1])
    assert _left(problem, "published") == ([1, 0], [])


def test_best_rule_is_taken_for_each_problem() -> None:
    """Where transfers block, the published rule pays 4 s more than the least of the three."""
    problem = _two_gaps(1, deadline_counts="serial", minimize="time")
    by_rule = {
        rule: verify(problem, capuchin(problem, rule)).simulation.time_s
        for rule in ("published", "time", "energy")
    }
    assert by_rule == {"published": 16.0, "time": 15.0, "energy": 15.0}
    assert verify(problem, capuchin(problem)).simulation.time_s == 15.0


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


def test_saving_beyond_the_budget_does_not_count_by_hand() -> None:
    """Of `a` and `b`, 8 and 4 bytes, one must leave while `c` is 3 bytes above the budget.

    All bytes for 3 J and 2 J of recomputation: 8 / 3 J before 4 / 2 J. Needed are 3 bytes, and
    `b` saves these for less.
    """
    graph = Graph(
        name="needed",
        nodes=(
            operation("a", output_bytes=8),
            operation("b", output_bytes=4),
            operation("c", output_bytes=5),
            operation("d", output_bytes=1, inputs=("b",)),
            operation("e", output_bytes=1, inputs=("a",)),
        ),
    )
    costs = Costs.from_arrays(
        graph, compute_time_s=[3.0, 2, 1, 1, 1], compute_energy_j=[3, 2, 1, 1, 1]
    )
    problem = Problem(graph, costs, ram=14, paging=False)
    assert _left(problem, "published") == ([], [0])
    assert _left(problem, "energy") == ([], [1])


@pytest.mark.parametrize(("ram", "again"), [(9, [0, 1]), (8, [0, 1, 0])])
def test_what_is_recomputed_for_others_stays_where_there_is_room(
    ram: int, again: list[int]
) -> None:
    """`d` needs `b`, and `b` needs `a`: with 4 + 4 + 1 bytes `a` stays until `e` reads it."""
    graph = Graph(
        name="collective",
        nodes=(
            operation("a", output_bytes=4),
            operation("b", output_bytes=4, inputs=("a",)),
            operation("c", output_bytes=6),
            operation("d", output_bytes=1, inputs=("b",)),
            operation("e", output_bytes=1, inputs=("a",)),
        ),
    )
    problem = Problem(graph, even_costs(graph), ram=ram, paging=False)
    assert _left(problem) == ([], again)
    alone = capuchin(problem, refined=False)
    assert [k for t, k in alone.R if k < t] == [0, 1, 0]


def test_refused_with_the_stage_that_does_not_fit() -> None:
    """Where nothing may leave, the reason names the node and what is missing."""
    with pytest.raises(MethodNotApplicableError, match="at 'c' 2 B more"):
        capuchin(skip_problem(paging=False, recompute=False))
