"""Where decisions can matter: events and dominance."""

import pytest

from kit.instances import random_instances
from kit.worked import (
    bench_device,
    costs_of,
    even_costs,
    skip_graph,
    skip_problem,
)
from poetmodel.graph import Graph, Node, Tensor, operation
from poetmodel.model import build
from poetmodel.model.events import (
    find_events,
    is_storage_limiting,
    paging_dominates,
    recomputable_nodes,
)
from poetmodel.problem import Problem
from poetmodel.result import Status
from poetmodel.solver import solve


def events_of(problem, *, dominance=True):
    """Return the events of a problem, one stage a group."""
    n = len(problem.graph.nodes)
    chosen = recomputable_nodes(problem, dominance=dominance)
    return find_events(problem, range(n), recomputable=chosen)


# -- events ------------------------------------------------------------------------------------
def test_events_are_consistent_on_random_problems():
    """Uses, recomputations and events fit together."""
    for problem in random_instances(150, (3, 9), seed=41):
        graph = problem.graph
        found = events_of(problem)
        for k, again in enumerate(found.recompute_groups):
            assert list(again) == sorted(set(again))
            assert all(k < t for t in again)
            for p in graph.inputs_of[k]:
                assert set(again) <= set(found.use_groups[p])
                inside = {e for e in found.use_groups[p] if again and k < e < again[-1]}
                assert inside <= set(again)
        for i, k in enumerate(graph.node_of):
            readers = set(graph.users_of[i]).union(
                *(found.recompute_groups[j] for j in graph.users_of[i])
            )
            assert set(found.use_groups[i]) == readers
            last = max(readers, default=-1)
            expected = readers | {t for t in found.recompute_groups[k] if t <= last}
            assert found.event_groups[i] == tuple(sorted(expected))
            assert found.page_in_groups[i] == (found.use_groups[i] if problem.can_page else ())


# -- dominance ---------------------------------------------------------------------------------
def one_node(
    *,
    compute=(5.0, 2.0),
    page=(1.0, 1.0),
    idle_power_w=0.0,
    on_aux=False,
    unread=False,
    storage=True,
    **limits,
):
    """Return a problem whose first node has these costs of computing and of one transfer.

    By default, computing takes 5 s and 2 J, paging out and in 1 + 1 s and 1 + 1 J: equal
    energy, less time. With `unread`, a second output without readers costs 100 to page.
    """
    outputs = [Tensor(name="a", bytes=4)]
    outputs += [Tensor(name="a.b", bytes=4)] if unread else []
    first = Node(name="a", op="op", phase="input", outputs=tuple(outputs), on_aux=on_aux)
    graph = Graph(
        name="one",
        nodes=(
            first,
            operation("b", output_bytes=4),
            operation("c", output_bytes=1, inputs=("a", "b")),
        ),
    )
    pages = [page, *([(100.0, 100.0)] if unread else []), (9.0, 9.0), (9.0, 9.0)]
    costs = costs_of(
        graph,
        [compute[0], 1, 1],
        [compute[1], 1, 1],
        pages if storage else None,
        device=bench_device(idle_power_w=idle_power_w, has_storage=storage),
    )
    return Problem(graph, costs, **{"ram": 20, **limits})


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        pytest.param({}, True, id="as dear as paging"),
        pytest.param({"compute": (5.0, 1.99)}, False, id="cheaper than paging"),
        pytest.param({"paging": False}, False, id="no paging"),
        pytest.param({"storage": False}, False, id="no storage"),
        pytest.param({"minimize": "writes"}, False, id="writes are minimized"),
        pytest.param({"aux_bytes": 8}, True, id="storage for every read tensor"),
        pytest.param({"aux_bytes": 7}, False, id="storage is limiting"),
        pytest.param({"compute": (1.0, 2.0)}, True, id="time without a deadline"),
        pytest.param({"compute": (1.0, 2.0), "deadline": 99}, False, id="slower, serial deadline"),
        pytest.param({"deadline": 99}, True, id="quicker, serial deadline"),
        pytest.param(
            {"compute": (1.0, 2.0), "deadline": 99, "deadline_counts": "compute"},
            True,
            id="transfers do not count",
        ),
        pytest.param({"deadline": 99, "deadline_counts": "overlap"}, False, id="overlap deadline"),
        pytest.param({"deadline_counts": "overlap"}, True, id="overlap without a deadline"),
        pytest.param({"minimize": "time", "compute": (2.0, 0.0)}, True, id="time alone counts"),
        pytest.param({"minimize": "time", "compute": (1.9, 9.0)}, False, id="slower to page"),
        pytest.param(
            {"minimize": "time", "compute": (0.0, 0.0), "deadline_counts": "compute"},
            True,
            id="paging takes no counted time",
        ),
        pytest.param(
            {"minimize": "time", "compute": (5.0, 1.0), "energy_budget": 99},
            False,
            id="energy is limited",
        ),
        pytest.param({"minimize": "ram", "compute": (0.0, 0.0)}, True, id="only RAM counts"),
        pytest.param(
            {"minimize": "ram", "compute": (0.0, 2.0), "deadline": 99}, False, id="RAM and time"
        ),
        pytest.param(
            {"minimize": "ram", "compute": (5.0, 1.0), "energy_budget": 99},
            False,
            id="RAM and energy",
        ),
        pytest.param({"on_aux": True, "compute": (5.0, 1.0)}, True, id="lies on storage"),
        pytest.param({"on_aux": True, "compute": (5.0, 0.9)}, False, id="lies there, but cheap"),
        pytest.param({"unread": True}, True, id="pages of unread outputs do not count"),
        pytest.param({"idle_power_w": 1.0}, True, id="idle power over 5 s against 2 s"),
        pytest.param(
            {"idle_power_w": 1.0, "compute": (1.0, 2.5)}, False, id="idle power over 1 s and 2 s"
        ),
        pytest.param(
            {"idle_power_w": 1.0, "compute": (1.0, 1.0), "deadline_counts": "compute"},
            True,
            id="idle power over compute time only",
        ),
        pytest.param(
            {"idle_power_w": 1.0, "compute": (9.0, 1.9), "deadline_counts": "overlap"},
            False,
            id="no idle power in the objective of overlap",
        ),
    ],
)
def test_dominance(choices, expected):
    """Paging replaces recomputation only where it is no worse in all that counts."""
    problem = one_node(**choices)
    assert paging_dominates(problem, 0) is expected
    assert recomputable_nodes(problem)[0] is not expected


def test_dominance_can_be_left_aside():
    """Every node that may be recomputed and is read stays; none that problem or graph forbid."""
    problem = one_node()
    assert recomputable_nodes(problem, dominance=False) == (True, True, False)
    assert recomputable_nodes(problem)[0] is False
    assert recomputable_nodes(skip_problem(recompute=False)) == (False,) * 4
    graph = skip_graph(recomputable=False)
    problem = Problem(graph, even_costs(graph, page_in=(9, 9)), ram=13)
    assert recomputable_nodes(problem) == (False, True, True, False)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"aux_bytes": 14}, True),
        ({"aux_bytes": 15}, False),
        ({}, False),
        ({"aux_bytes": 0, "paging": False}, False),
    ],
)
def test_storage_is_limiting_below_all_read_tensors(limits, expected):
    """`a`, `b` and `c` (4 + 6 + 5 bytes) can be wanted on storage at once; `d` is never read."""
    assert is_storage_limiting(skip_problem(**limits)) is expected


def test_tensors_that_lie_on_storage_take_no_room_there():
    """An input on storage is never written there; `d`, never read, counts if rows reward it."""
    graph = skip_graph(on_aux=True)
    costs = even_costs(graph)
    assert not is_storage_limiting(Problem(graph, costs, ram=13, aux_bytes=11))
    assert is_storage_limiting(Problem(graph, costs, ram=13, aux_bytes=10))
    problem = skip_problem(aux_bytes=15)
    assert not is_storage_limiting(problem)
    assert is_storage_limiting(problem.subject_to(out=lambda v: v.page_outs["d"] >= 1))


# -- own constraints and objectives ----------------------------------------------------------------
def best(problem, **choices):
    """Return the schedule of the reduced model, which the open one confirms."""
    result = solve(build(problem), gap=0.0, **choices)
    confirmed = solve(build(problem, reductions=False), gap=0.0)
    assert result.status == confirmed.status
    if confirmed.value is not None:
        assert result.value == pytest.approx(confirmed.value, abs=1e-9)
    return result


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        pytest.param(lambda v: v.page_ins["a"] <= 9, False, id="page-ins are limited"),
        pytest.param(lambda v: v.recomputations["a"] <= 9, True, id="recomputations are limited"),
        pytest.param(
            lambda v: v.recomputations["a"] >= 2 * v.page_ins["a"], False, id="they are wanted"
        ),
        pytest.param(
            lambda v: v.recomputations["a"] + v.page_outs["a"] <= 2 * v.page_ins["a"],
            True,
            id="a page-in that may not come takes nothing off",
        ),
        pytest.param(lambda v: v.page_ins["a"] >= 1, True, id="page-ins are wanted"),
        pytest.param(lambda v: v.bytes_written <= 100, False, id="writes are limited"),
        pytest.param(lambda v: v.page_ins["b"] <= 1, True, id="another tensor"),
    ],
)
def test_dominance_holds_in_every_row(rule, expected):
    """Paging replaces recomputation only where no row loses by it, rewards left aside."""
    graph = skip_graph()
    dear = even_costs(graph, page_in=(0.25, 0.25), page_out=(0.25, 0.25))
    problem = Problem(graph, dear, ram=13).subject_to(own=rule)
    assert paging_dominates(problem, 0) is expected
    assert recomputable_nodes(problem)[0] is not expected
    assert best(problem).status == Status.OPTIMAL


def test_an_equality_of_sums_that_cancel_holds_whatever_is_decided():
    """Three times the time is the energy, but for rounding errors of both sums."""
    graph = skip_graph()
    times = [0.1, 0.2, 0.3, 0.7]
    costs = costs_of(graph, times, [3 * value for value in times])
    problem = Problem(graph, costs, ram=13).subject_to(even=lambda v: v.energy_j == 3 * v.compute_s)
    assert best(problem).overhead_j == pytest.approx(0.3)
    assert not any(any(column) for column in problem.rewards)
