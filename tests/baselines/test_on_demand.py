"""What all methods keep that let tensors leave where room is needed, and have them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings

from kit.baseline_checks import valid_or_refused
from kit.instances import random_instances
from kit.strategies import graphs
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.dtr import dtr, dtr_paging
from poetmodel.baselines.paging import lru_paging
from poetmodel.baselines.swap_advisor import swap_advisor
from poetmodel.graph import Graph, floor
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from poetmodel.schedule import Schedule

    Run = Callable[[Problem], Schedule]


@pytest.mark.parametrize("paging", [True, False])
@pytest.mark.parametrize("method", [dtr, dtr_paging, lru_paging, capuchin, swap_advisor])
def test_nothing_leaves_at_full_ram(method: Run, paging: bool) -> None:
    """At the keep-all peak the schedule is keep-all, with or without storage."""
    problem = skip_problem(ram="100%", paging=paging)
    assert method(problem) == checkpoint_all(problem.graph)


@pytest.mark.parametrize(
    ("method", "recomputable", "page_in", "limits"),
    [
        (dtr_paging, True, (0.5, 0.5), {}),
        (lru_paging, True, None, {"aux_bytes": 0}),
        (capuchin, False, None, {}),
        (swap_advisor, True, None, {}),
    ],
)
def test_samples_on_storage_need_no_page_out(
    method: Run, recomputable: bool, page_in: tuple[float, float] | None, limits: dict[str, int]
) -> None:
    """A tensor that lies on storage from the start is dropped and paged in."""
    graph = skip_graph(on_aux=True, recomputable=recomputable)
    costs = even_costs(graph) if page_in is None else even_costs(graph, page_in=page_in)
    schedule = method(Problem(graph, costs, ram=13, **limits))
    assert (schedule.M_out, schedule.M_in) == ((), ((3, 0),))


DRAWN: dict[str, Any] = {"resident": True, "below_floor": True}


@pytest.mark.parametrize(
    ("method", "drawn", "least_paged", "least_recomputed"),
    [
        (dtr_paging, [(300, (3, 9), {"seed": 52})], 10, 10),
        (lru_paging, [(300, (3, 9), {"seed": 61})], 20, None),
        (capuchin, [(250, (3, 9), {"seed": 91, "storage": s}) for s in (True, False)], 20, 20),
        (swap_advisor, [(100, (3, 8), {"seed": 82})], 10, None),
    ],
)
def test_schedules_keep_the_budget_or_are_refused(
    method: Run, drawn: list[Any], least_paged: int, least_recomputed: int | None
) -> None:
    """Whatever the graph, the schedule is valid, within RAM and storage, or there is a reason.

    The storage that the search over swap sets takes is held by a test of its own.
    """
    paged = again = 0
    for count, sizes, options in drawn:
        for problem in random_instances(count, sizes, **DRAWN, **options):
            schedule = valid_or_refused(method, problem)
            if schedule is None:
                continue
            paged += bool(schedule.M_in)
            again += len(schedule.R) > len(problem.graph.nodes)
            limit = problem.aux_limit_bytes
            written = sum(problem.graph.tensor_bytes[i] for _, i in schedule.M_out)
            assert method is swap_advisor or limit is None or written <= limit
            assert least_recomputed is not None or all(t == k for t, k in schedule.R)
    assert paged > least_paged
    assert again > (-1 if least_recomputed is None else least_recomputed)


@pytest.mark.parametrize("method", [lru_paging, capuchin])
@settings(max_examples=40)
@given(graph=graphs(max_nodes=10, on_aux=True))
def test_minimum_ram_is_enough(method: Run, graph: Graph) -> None:
    """With storage a budget of the largest working set is always kept, the same way each time."""
    problem = Problem(graph, even_costs(graph), ram=max(1, floor(graph).bytes))
    assert valid_or_refused(method, problem) == method(problem)
