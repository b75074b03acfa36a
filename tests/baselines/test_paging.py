"""Methods that page: gaps and their loads, demand paging, offloading, and what Capuchin swaps."""

from dataclasses import replace

import pytest

from kit.baseline_checks import graph_of, valid_or_refused
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
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all, simulate


@pytest.mark.parametrize("page", [True, False])
def test_a_gap_is_paged_or_recomputed(page):
    """The tensor is out of RAM in the gap, and comes back in the way that the plan says."""
    (gap,) = gaps_of(skip_graph())
    assert gap == Gap(0, 1, 3)
    schedule = execute_gaps(skip_problem(), {gap: page})
    assert (2, 0) not in schedule.S_RAM
    assert schedule.M_in == (((3, 0),) if page else ())
    assert ((3, 0) in schedule.R) is not page


def test_without_gaps_every_stage_holds_its_working_set():
    """With every tensor on storage in every gap the peak is the minimum RAM.

    Where that does not fit, the reason names the peak, its node and the budget.
    """
    for problem in random_instances(40, (3, 8), seed=42, zero_bytes=False):
        graph = problem.graph
        schedule = execute_gaps(problem, dict.fromkeys(gaps_of(graph), True))
        assert simulate(graph, None, schedule).peak_ram_bytes == floor(graph).bytes
    graph = skip_graph()
    schedule = checkpoint_all(graph)
    assert within_budget(Problem(graph, even_costs(graph), ram=15), schedule) is schedule
    with pytest.raises(MethodNotApplicableError, match="needs 15 B at 'c', and tensors may use 14"):
        within_budget(Problem(graph, even_costs(graph), ram=14), schedule)


# -- demand paging ---------------------------------------------------------------------------------
def test_lru_hand_trace():
    """What was used longest ago goes, comes back when read, and the peak is the budget.

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
    graph = graph_of("trace", "a 2; b 2; c 2 a; d 3; e 1 a b; f 1 c d e")
    schedule = lru_paging(Problem(graph, even_costs(graph), ram=8))
    assert (schedule.M_in, schedule.M_out) == (((4, 1), (5, 2)), ((1, 1), (2, 2)))
    kept = {1: (0,), 2: (0, 1), 3: (0, 2), 4: (0, 3), 5: (3, 4)}
    assert tuple((t, i) for t, inside in kept.items() for i in inside) == schedule.S_RAM
    assert all(t == k for t, k in schedule.R)
    assert simulate(graph, None, schedule).peak_ram_bytes == 8
    # It writes two tensors of 2 bytes: 4 bytes of storage are enough, 3 are not.
    assert lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=4)).M_in
    with pytest.raises(MethodNotApplicableError, match="the step 'b' on the way to 'e'"):
        lru_paging(Problem(graph, even_costs(graph), ram=8, aux_bytes=3))


# -- offloading ------------------------------------------------------------------------------------
def test_offload_hand_trace():
    """Of three forward tensors two wait for their backward node, on storage; peak 4 + 4.

    What the forward pass itself holds is not moved: where that is too much, it says how much.
    """
    graph = comb_graph(3)
    schedule = offload_all(Problem(graph, even_costs(graph), ram=8))
    assert (schedule.M_out, schedule.M_in) == (((0, 0), (1, 1)), ((4, 1), (5, 0)))
    assert schedule.S_RAM == ((1, 0), (2, 1), (3, 2), (4, 3), (5, 4))
    assert simulate(graph, None, schedule).peak_ram_bytes == 8
    graph = graph_of("residual", "a 4; b 4 a; c 4 b; d 1 a c; g 1 d @backward")
    costs = even_costs(graph)
    assert offload_all(Problem(graph, costs, ram=12)).M_in == ()
    with pytest.raises(MethodNotApplicableError, match=r"needs 12 B at 'c'.* 11"):
        offload_all(Problem(graph, costs, ram=11))


@pytest.mark.parametrize(
    ("workspace", "page_ins"),
    [
        (2, ((2, 0),)),  # `h` takes 1 + 1 + 2 beside `f`: 8 bytes
        (3, ((2, 0), (4, 0))),  # 9 bytes: `f` must leave for it
    ],
)
def test_a_tensor_comes_in_once_or_for_each_reader(workspace, page_ins):
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
    assert (schedule.M_out, schedule.M_in) == (((0, 0),), page_ins)


def test_offload_schedules_keep_the_budget_or_are_refused():
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


def _two_gaps(transfer_s, *, ram=9, **limits):
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


def _left(problem, rule="published"):
    """Return which tensors a schedule swaps, and which it recomputes."""
    schedule = capuchin(problem, rule)
    return [i for _, i in schedule.M_in], [k for t, k in schedule.R if k < t]


def test_swaps_worked_by_hand():
    """With 5.5 s `b` waits 1 s, as recomputing it takes: a swap. With 6 s it would wait 2 s.

    With 5 s on one channel both must go. `a` swaps: out 1..6 s, in 7..12 s of its 12 s; free time
    12 - 10 = 2. The gap of `b`, 2..12 s, has 4 + 5 s of that: 10 - 9 - 10 = -9, so recomputing
    in 1 s is less. The published rule sees a free time of 10 - 10 = 0, and swaps it, too. Where
    transfers block, that rule pays 4 s more than the least of the three, which is taken for
    each problem.
    """
    assert _left(_two_gaps(5.5, ram=5)) == ([1, 0], [])
    assert _left(_two_gaps(6, ram=5)) == ([0], [1])
    problem = _two_gaps(5, ram=5, deadline_counts="overlap")
    assert _left(problem, "time") == ([0], [1])
    assert _left(problem, "published") == ([1, 0], [])
    problem = _two_gaps(1, deadline_counts="serial", minimize="time")
    by_rule = {
        rule: verify(problem, capuchin(problem, rule)).simulation.time_s
        for rule in ("published", "time", "energy")
    }
    assert by_rule == {"published": 16.0, "time": 15.0, "energy": 15.0}
    assert verify(problem, capuchin(problem)).simulation.time_s == 15.0


def test_recomputation_that_does_not_fit_becomes_a_swap():
    """`b` is recomputed in no time, but its workspace leaves no room for that beside `a`.

    Saving beyond the budget does not count: of `a` and `b`, 8 and 4 bytes, one must leave while `c`
    is 3 bytes above it. All bytes for 3 J and 2 J of recomputation: 8 / 3 J before 4 / 2 J;
    needed are 3 bytes, and `b` saves these for less.
    """
    graph = graph_of("transient", "b 4+6; a 4; c 5; d 1 a b")
    seconds = [0.0, 9.0, 1.0, 1.0]
    pages = [(9.0, 1.0)] * 4
    costs = Costs.from_arrays(
        graph, compute_time_s=seconds, compute_energy_j=seconds, page_in=pages, page_out=pages
    )
    problem = Problem(graph, costs, ram=10)
    assert _left(problem) == ([0], [])
    roomy = Graph(name="roomy", nodes=(operation("b", output_bytes=4), *graph.nodes[1:]))
    assert _left(Problem(roomy, costs, ram=10)) == ([], [0])
    graph = graph_of("needed", "a 8; b 4; c 5; d 1 b; e 1 a")
    costs = Costs.from_arrays(
        graph, compute_time_s=[3.0, 2, 1, 1, 1], compute_energy_j=[3, 2, 1, 1, 1]
    )
    problem = Problem(graph, costs, ram=14, paging=False)
    assert _left(problem, "published") == ([], [0])
    assert _left(problem, "energy") == ([], [1])


@pytest.mark.parametrize(("ram", "again"), [(9, [0, 1]), (8, [0, 1, 0])])
def test_what_is_recomputed_for_others_stays_where_there_is_room(ram, again):
    """`d` needs `b`, and `b` needs `a`: with 4 + 4 + 1 bytes `a` stays until `e` reads it."""
    graph = graph_of("collective", "a 4; b 4 a; c 6; d 1 b; e 1 a")
    problem = Problem(graph, even_costs(graph), ram=ram, paging=False)
    assert _left(problem) == ([], again)
    alone = capuchin(problem, refined=False)
    assert [k for t, k in alone.R if k < t] == [0, 1, 0]
