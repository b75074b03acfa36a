"""The random problems that other tests rest on: reproducible, and as asked for."""

from __future__ import annotations

from kit.instances import random_graph, random_instances, random_schedule, seeded
from poetmodel.graph import checkpoint_all_peak_bytes, floor
from poetmodel.schedule import simulate


def test_the_same_seed_gives_the_same_problem() -> None:
    """A problem depends on its seed and number alone, not on how many come before it."""
    first, again = (list(random_instances(20, (1, 6), seed=3)) for _ in range(2))
    assert [p.graph for p in first] == [p.graph for p in again]
    assert [p.to_dict() for p in first] == [p.to_dict() for p in again]
    fewer = list(random_instances(5, (1, 6), seed=3))
    assert [p.to_dict() for p in fewer] == [p.to_dict() for p in first[:5]]
    other = list(random_instances(20, (1, 6), seed=4))
    assert [p.graph for p in other] != [p.graph for p in first]


def test_everything_occurs_by_default() -> None:
    """Among some hundred problems there is each feature, limit and switch."""
    problems = list(random_instances(300))
    nodes = [node for problem in problems for node in problem.graph.nodes]
    assert {len(problem.graph.nodes) for problem in problems} == {3, 4, 5, 6}
    assert {len(node.outputs) for node in nodes} == {0, 1, 2}
    assert any(node.workspace_bytes for node in nodes)
    assert any(node.on_aux for node in nodes)
    assert not all(node.recomputable for node in nodes)
    assert any(made.bytes == 0 for node in nodes for made in node.outputs)
    assert any(0 in problem.table.compute_energy_j for problem in problems)
    for key in ("deadline_s", "aux_bytes", "energy_budget_j"):
        assert {problem.to_dict()[key] is None for problem in problems} == {True, False}
    for key in ("recompute", "paging"):
        assert {problem.to_dict()[key] for problem in problems} == {True, False}
    assert len({problem.minimize for problem in problems}) == 4
    assert len({problem.idle_power_w for problem in problems}) == 4


def test_what_is_switched_off_does_not_occur() -> None:
    """Keywords go to graph, costs, limits or `Problem`, and hold."""
    problems = random_instances(
        100, 4, two_outputs=False, no_outputs=False, workspace=False, on_aux=False,
        non_recomputable=False, zero_bytes=False, zero_cost=False, idle=False, deadline=False,
        aux_limit=False, energy_budget=False, switches=False, minimize="time",
    )  # fmt: skip
    for problem in problems:
        for node in problem.graph.nodes:
            assert len(node.outputs) == 1
            assert node.output_bytes > 0
            assert node.workspace_bytes == 0
            assert node.recomputable
            assert not node.on_aux
        assert min(problem.table.compute_energy_j + problem.table.page_in_time_s) > 0
        stated = problem.to_dict()
        assert {stated[key] for key in ("deadline_s", "aux_bytes", "energy_budget_j")} == {None}
        assert (problem.minimize, problem.recompute, problem.paging) == ("time", True, True)
        assert problem.idle_power_w == 0
        whole = checkpoint_all_peak_bytes(problem.graph)
        assert floor(problem.graph).bytes <= problem.ram_budget_bytes <= whole


def test_random_schedules_are_valid_and_do_everything() -> None:
    """Some hundred random schedules keep every rule, and recompute, page, and waste."""
    pairs = {"R": 0, "M_in": 0, "M_out": 0}
    for seed in range(200):
        rng = seeded(seed)
        graph = random_graph(rng, (3, 7))
        schedule = random_schedule(rng, graph)
        assert simulate(graph, None, schedule).violations == ()
        pairs["R"] += len(schedule.R) - len(graph.nodes)
        pairs["M_in"] += len(schedule.M_in)
        pairs["M_out"] += len(schedule.M_out)
        plain = random_schedule(rng, graph, recompute=False, paging=False)
        assert len(plain.R) == len(graph.nodes)
        assert plain.M_in == plain.M_out == ()
        assert simulate(graph, None, plain).violations == ()
    assert min(pairs.values()) > 100
