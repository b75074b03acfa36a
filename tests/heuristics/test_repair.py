"""Drafts that are made feasible and cheaper, without forbidden decisions."""

from dataclasses import replace
from itertools import pairwise

import pytest

from kit.instances import (
    make_rng,
    random_instance,
    random_instances,
    random_state_problems,
    scarce_problem,
)
from kit.oracle import optimum
from kit.own_rows import add_measured_rows
from kit.rotation import parametrize_parts
from kit.worked import skip_problem
from poetmodel.device import Costs, Device
from poetmodel.graph import Graph, floor, operation, zoo
from poetmodel.graph.catalogue import load_model
from poetmodel.graph.node import Phase
from poetmodel.heuristics import neighbourhood
from poetmodel.heuristics.execution import recompute_once
from poetmodel.heuristics.greedy import construct, refit
from poetmodel.heuristics.neighbourhood import LargeNeighbourhoodSearch
from poetmodel.heuristics.partial_schedule import PartialSchedule
from poetmodel.heuristics.penalties import WORST, PenalizedObjective, total_price
from poetmodel.heuristics.repair import Repair, RepairStyle
from poetmodel.heuristics.restorations import (
    PAGE_IN,
    PAGE_OUT,
    RECOMPUTE,
    Restoration,
    list_restorations,
)
from poetmodel.heuristics.user_rows import UserRows
from poetmodel.problem import Problem, Quantity, weighted_sum
from poetmodel.schedule import check_schedule, simulate
from poetmodel.solver import solve
from poetmodel.solver.outcome import make_candidate


def repair_of(problem, partial, **choices):
    """Return a repair at the problem's prices and budget."""
    return Repair(
        problem,
        partial,
        PenalizedObjective(problem).prices(0.0),
        problem.usable_ram_bytes,
        **choices,
    )


@pytest.mark.parametrize(("limits", "made"), [({}, [(3, 0)]), ({"until_s": 0.0}, [])])
def test_the_worked_example(limits, made):
    """`a` is recomputed for `d`: the cheaper way to free it in stage 2. Without time, it is not."""
    partial = PartialSchedule(skip_problem().graph)
    assert repair_of(skip_problem(), partial, **limits).fit() == bool(made)
    assert partial.restorations() == [Restoration(t, k, RECOMPUTE) for t, k in made]


def test_what_fits_keeps_budget_and_storage_and_does_only_what_is_allowed():
    """The verifier only finds exceeded deadlines and energies; no needless decision is left."""
    fitting = 0
    for number, problem in enumerate(random_instances(200, (4, 14), seed=92)):
        partial = PartialSchedule(problem.graph)
        repair = repair_of(problem, partial, rng=make_rng(number) if number % 2 else None)
        if not repair.fit():
            continue
        fitting += 1
        before = total_price(repair.prices, partial)
        repair.drop_unneeded()
        assert total_price(repair.prices, partial) <= before + 1e-12
        violations = make_candidate(problem, partial.schedule()).violations
        assert all(v.startswith(("time", "energy")) for v in violations), violations
        for restoration in partial.restorations():
            if restoration.kind != RECOMPUTE:
                mark = partial.mark()
                partial.remove(restoration)
                assert not partial.fits(problem.usable_ram_bytes)
                partial.undo(mark)
    assert fitting > 120


def test_room_for_one_large_tensor_goes_to_several_small_ones():
    """With `work`, either `large` fits, or three tensors that cost nearly as much each.

    If `large` is expensive, the three are paged in its place: the price per byte decides.
    """
    sizes = {"large": 6, "small0": 2, "small1": 2, "small2": 2}
    nodes = [operation(name, output_bytes=size) for name, size in sizes.items()]
    work = operation("work", output_bytes=1, workspace_bytes=8)
    end = operation("end", output_bytes=1, phase="backward", inputs=("work", *sizes))
    graph = Graph(name="side by side", nodes=(*nodes, work, end))
    one = [1.0] * len(graph.nodes)
    pages = [Restoration(5, i, PAGE_IN) for i in range(4)]

    def problem_of(large_j):
        page = [(1.0, large_j), *[(1.0, 1.02)] * 5]
        costs = Costs.from_arrays(
            graph, compute_time_s=one, compute_energy_j=one, page_in=page, page_out=page
        )
        return Problem(graph, costs, ram=15, recompute=False)

    partial = PartialSchedule(graph, pages)
    repair_of(problem_of(1.06), partial).drop_unneeded()
    assert partial.restorations() == pages[:1]
    partial = PartialSchedule(graph)
    assert repair_of(problem_of(99.0), partial).fit()
    assert partial.restorations() == pages[1:]


def test_what_could_not_be_dropped_is_once_there_is_room():
    """Repairs of one partial schedule record failed drops, and repeat them with more RAM."""
    problem, obstacles = skip_problem(), {}
    partial = PartialSchedule(problem.graph, [Restoration(3, 0, RECOMPUTE)])
    for limit_bytes, left in ((14, 1), (14, 1), (15, 0)):
        repair = repair_of(problem, partial, obstacles=obstacles)
        repair.limit_bytes = limit_bytes
        repair.drop_unneeded()
        assert len(partial.restorations()) == left


def test_any_partial_schedule_can_be_repaired_where_everything_may_be_paged():
    """From random recomputations too, down to the floor."""
    for number, problem in enumerate(
        random_instances(
            80, (4, 12), seed=94, deadline=False, aux_limit=False, energy_budget=False, paging=True
        )
    ):
        graph, rng = problem.graph, make_rng(f"repair/{number}")
        partial = PartialSchedule(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k):
                partial.add(Restoration(t, k, RECOMPUTE))
        repair = repair_of(problem, partial)
        repair.limit_bytes = floor(graph).bytes
        assert repair.fit()
        assert partial.peaks().max() <= floor(graph).bytes


def test_without_pages_nothing_is_paged_and_long_chains_are_found():
    """Each style restores tensors in its own way; its result fits, if it has one."""
    ways = {"pages": 0, "chains": 0}
    for problem in random_instances(60, (6, 14), seed=96, paging=True):
        for style in (RepairStyle(may_page=False), RepairStyle(max_chain=0)):
            partial = PartialSchedule(problem.graph)
            if not repair_of(problem, partial, style=style).fit():
                continue
            if style.may_page:
                ways["pages"] += sum(partial.page_ins)
                assert not any(partial.recomputed) or not problem.can_page
            else:
                ways["chains"] += sum(map(len, partial.recomputed))
                assert not any(partial.page_ins)
    assert ways["pages"] > 0
    assert ways["chains"] > 0


# -- prices and penalties ----------------------------------------------------------------------
@pytest.mark.parametrize("minimize", list(Quantity))
def test_value_and_limits_are_those_of_the_verifier(minimize):
    """For 80 problems with every limit and a few random restorations each."""
    exceeding = 0
    for number, problem in enumerate(random_instances(80, (3, 8), seed=91, minimize=minimize)):
        rng = make_rng(f"value/{number}")
        graph = problem.graph
        partial = PartialSchedule(graph)
        for t in range(1, len(graph.nodes)):
            k = rng.randrange(t)
            if problem.may_recompute(k) and rng.random() < 0.4:
                partial.add(Restoration(t, k, RECOMPUTE))
            for i in graph.outputs_of[k]:
                if problem.can_page and rng.random() < 0.4:
                    partial.add(Restoration(t, i, PAGE_IN))
        score = PenalizedObjective(problem).score(partial)
        candidate = make_candidate(problem, partial.schedule())
        assert score.value == pytest.approx(candidate.value, abs=1e-9)
        others = ("peak RAM", "storage used")
        broken = [v for v in candidate.violations if not v.startswith(others)]
        assert (score.excess > 0) == bool(broken), candidate.violations
        exceeding += bool(broken)
    assert exceeding > 5


def test_the_penalty_moves_prices_from_the_objective_to_the_limits():
    """Without limits, the penalty has no effect; with them, their use has a price.

    Prices sum up.
    """
    free, bound = PenalizedObjective(skip_problem()), PenalizedObjective(skip_problem(deadline=12))
    assert free.prices(0.0) == free.prices(5.0)
    partial = PartialSchedule(skip_problem().graph, [Restoration(3, 0, RECOMPUTE)])
    cheap, dear = (total_price(bound.prices(penalty), partial) for penalty in (0.0, 1.0))
    assert cheap < dear
    assert bound.balance(partial) > 0
    assert not check_schedule(skip_problem(deadline=12, ram=15), partial.schedule()).violations
    problem = skip_problem()
    once = problem.energy.coefficients
    twice = weighted_sum((once, 1.0), (once, 1.0))
    partial = PartialSchedule(problem.graph, [Restoration(3, 0, RECOMPUTE)])
    assert total_price(once, partial) > 0
    assert total_price(twice, partial) == pytest.approx(2 * total_price(once, partial))
    assert total_price(weighted_sum((once, 0.0)), partial) == 0


# -- local search ----------------------------------------------------------------------------------
def searched(problem, turns, seed=0, start=()):
    """Search from keep-all, or from a schedule, for some turns."""
    search = LargeNeighbourhoodSearch(problem, seed=seed)
    search.consider(list(start))
    for _ in range(turns):
        search.iterate()
    return search


@pytest.mark.parametrize("kind", [*Quantity, "state"])
@parametrize_parts(3)
def test_what_it_finds_is_valid_worth_what_it_says_and_no_better_than_the_best(part, kind):
    """On 60 problems of a quantity, with all limits, and on 60 steps with state, of any."""
    if kind == "state":
        problems = random_state_problems(60, (3, 7), seed=97)
    else:
        problems = random_instances(60, (3, 5), seed=95, minimize=kind)
    feasible = found = optimal = 0
    for problem in part.select(problems):
        best = solve(problem, formulation="compact", gap=0.0).schedule
        search = searched(problem, 25)
        schedule = search.schedule()
        feasible += best is not None
        if schedule is None:
            continue
        found += 1
        least, candidate = (make_candidate(problem, each) for each in (best, schedule))
        assert not candidate.violations
        assert search.best_score.value == pytest.approx(candidate.value, abs=1e-9)
        assert candidate.value >= least.value - 1e-9
        optimal += candidate.value <= least.value + 1e-9
    assert found > part.divide(30)
    assert optimal > (0.9 * feasible if kind == "state" else 0.8 * found)


def test_it_goes_on_from_a_schedule_and_never_returns_a_worse_one():
    """The greedy schedules of 30 scarce problems, some of them made better."""
    better = 0
    for number in range(30):
        problem = scarce_problem(f"improve/{number}", (8, 14))
        start = construct(problem)
        if start is None:
            continue
        search = searched(problem, 30, start=list_restorations(problem.graph, start))
        before, after = (make_candidate(problem, s).value for s in (start, search.schedule()))
        assert after <= before + 1e-9
        better += after < before - 1e-9
    assert better > 0


def test_the_seed_determines_the_course():
    """Two searches with one seed agree in the end; the search reaches beyond greedy."""
    problem = shipped("paper/resnet18-cifar", "paper-m4", "20%")
    one, two = searched(problem, 25, seed=3), searched(problem, 25, seed=3)
    assert (one.best_score, one.schedule()) == (two.best_score, two.schedule())
    assert one.best_score.value < make_candidate(problem, construct(problem)).value


def test_without_time_it_finds_nothing(monkeypatch):
    """Without time, the result is None, not an invalid schedule.

    Without styles that page, no schedule pages. A schedule within a budget is repaired for a
    smaller one, if one exists.
    """
    search = LargeNeighbourhoodSearch(skip_problem())
    search.until_s = 0.0
    assert not search.consider([])
    assert search.best_score == WORST
    assert search.schedule() is None
    monkeypatch.setattr(neighbourhood, "STYLES", (RepairStyle(may_page=False),))
    assert not searched(shipped("resnet18-cifar", "nrf52840", "60%"), 10).schedule().M_in
    more = shipped("paper/resnet18-cifar", "paper-m4", "60%", paging=False)
    less = shipped("paper/resnet18-cifar", "paper-m4", "50%", paging=False)
    schedule = construct(more)
    assert make_candidate(less, schedule).violations
    assert not make_candidate(less, refit(less, schedule)).violations
    assert refit(replace(less, ram=less.floor.bytes - 1), schedule) is None


def shipped(model, device, ram, **limits):
    """State a problem of a shipped model on a device."""
    graph = load_model(model)
    return Problem(graph, Costs.estimate(graph, Device.load(device)), ram=ram, **limits)


@pytest.mark.parametrize(
    ("turns", "above"), [(60, 0.22), pytest.param(500, 0.19, marks=pytest.mark.seeds)]
)
def test_long_chains_are_found_where_pages_are_dear(turns, above):
    """On a board with expensive pages, one chain recomputes tensors that others would page.

    With only the style that prefers pages, the search stays above 0.24 J here.
    """
    assert searched(shipped("resnet18-cifar", "nrf52840", "35%"), turns).best_score.value < above


# -- own rows ------------------------------------------------------------------------------------
def tight_problem(rule=None, **choices):
    """Return a chain that reads everything again at its end, within half of its keep-all peak."""
    names = ("a", "b", "c", "d", "e", "f")
    nodes = [operation("a", output_bytes=4)]
    nodes += [operation(name, output_bytes=4, inputs=(before,)) for before, name in pairwise(names)]
    nodes += [
        operation(f"{name}'", output_bytes=1, inputs=(name,)) for name in reversed(names[:-1])
    ]
    graph = Graph(name="tight", nodes=tuple(nodes))
    ones = [1] * len(nodes)
    costs = Costs.from_arrays(
        graph, compute_time_s=ones, compute_energy_j=ones,
        page_in=[(1, 2)] * len(nodes), page_out=[(1, 2)] * len(nodes),
    )  # fmt: skip
    problem = Problem(graph, costs, ram=16, deadline_counts="compute", **choices)
    return problem if rule is None else problem.subject_to(own=rule)


def made_of(problem):
    """Return the decisions of the greedy schedule of a problem."""
    schedule = construct(problem)
    assert not make_candidate(problem, schedule).violations
    return simulate(problem.graph, problem.costs, schedule)


def test_without_own_constraints_there_are_no_rows():
    """An objective with rewards has rows; rewarded page-outs are added."""
    problem = tight_problem()
    assert UserRows.from_problem(problem) is None
    assert UserRows.from_problem(problem.minimizing(lambda v: v.energy_j)) is None
    assert (
        UserRows.from_problem(problem.minimizing(lambda v: v.energy_j - 3 * v.page_outs["a"]))
        is not None
    )
    problem = tight_problem().minimizing(
        lambda v: v.recomputations["a"] - sum(v.page_outs.values())
    )
    assert len(made_of(problem).page_outs) == len(problem.graph.tensors)


@parametrize_parts(3)
def test_rows_are_counted_as_the_simulator_counts_them(part):
    """After any additions, drops and undos, the counted use is that of the verified schedule."""
    for number in part.select(range(60)):
        rng = make_rng(f"own rows/{number}")
        problem = add_measured_rows(rng, random_instance(rng, (3, 6)))
        objective = PenalizedObjective(problem)
        if objective.rows is None:
            continue
        partial = objective.make_partial()
        graph = problem.graph
        for _ in range(20):
            t = rng.randrange(len(graph.nodes))
            i = rng.randrange(len(graph.tensors)) if graph.tensors else 0
            made = Restoration(t, rng.randrange(t), RECOMPUTE) if t else None
            paged = Restoration(t, i, PAGE_IN) if graph.tensors else None
            out = Restoration.at_its_node(graph, i, PAGE_OUT) if graph.tensors else None
            for one in (made, paged, out):
                if one is None or (one.kind == PAGE_IN and one.stage <= graph.node_of[one.item]):
                    continue
                mark = partial.mark()
                partial.drop(one) if one in partial else partial.add(one)
                if rng.random() < 0.3:
                    partial.undo(mark)
        for limit, used in zip(objective.rows.limits, partial.row_use, strict=True):
            assert used == pytest.approx(total_price(limit.coefficients, partial), abs=1e-9)


@parametrize_parts(3)
def test_greedy_and_search_return_only_what_keeps_all_rows_and_mostly_the_best(part):
    """On random problems with own constraints, beside exhaustive search."""
    found = best = feasible = 0
    for number in part.select(range(60)):
        rng = make_rng(f"own/{number}")
        problem = add_measured_rows(rng, random_instance(rng, (3, 5)))
        least = optimum(problem)
        feasible += least is not None
        search = LargeNeighbourhoodSearch(problem)
        start = construct(problem)
        if start is not None:
            assert not make_candidate(problem, start).violations
            tidy = PartialSchedule.from_schedule(problem.graph, start, problem.rewards).schedule()
            assert not make_candidate(problem, tidy).violations
        search.consider([])
        for _ in range(30):
            search.iterate()
        schedule = search.schedule()
        if schedule is None:
            continue
        candidate = make_candidate(problem, schedule)
        assert not candidate.violations
        assert candidate.value == pytest.approx(search.best_score.value)
        found += 1
        best += problem.objective.value_of(candidate.simulation) <= least.value + 1e-9
    assert found >= 0.9 * feasible
    assert best >= 0.8 * found


@pytest.mark.parametrize("wanted", ["home", "away", "read", "rewarded"])
def test_rows_on_homes_of_state_are_kept(wanted):
    """State that must stay in RAM, or must not, or is read twice, or is paid for being there."""
    found = 0
    for problem in random_state_problems(40, (4, 8), seed=98, aux_bytes=None, deadline=None):
        state = problem.graph.state_tensors
        if not state:
            continue

        def homes(v, state=state):
            return sum(v.resident[i] for i in state)

        stated = {
            "home": lambda p, one=state[-1]: p.subject_to(row=lambda v: v.resident[one] >= 1),
            "away": lambda p, s=state: p.subject_to(row=lambda v: 2 * homes(v) <= len(s)),
            "read": lambda p, one=state[0]: p.subject_to(row=lambda v: v.page_ins[one] >= 2),
            "rewarded": lambda p: p.minimizing(lambda v: v.energy_j - 3 * homes(v)),
        }[wanted](problem)
        schedule = construct(stated)
        if schedule is not None:
            assert not make_candidate(stated, schedule).violations
            found += 1
    assert found > (5 if wanted == "read" else 10)


def test_both_transfers_of_a_restoration_count_in_one_row():
    """A page-in that needs a page-out counts twice in a sum with limit 1."""
    problem = tight_problem().subject_to(t=lambda v: v.page_ins["a"] + v.page_outs["a"] <= 1)
    rows = UserRows.from_problem(problem)
    assert rows is not None
    assert rows.permits([0.0], [(0, 1.0)])
    assert not rows.permits([0.0], [(0, 1.0), (0, 1.0)])


def test_state_does_not_end_the_forward_pass():
    """A network with its updates recomputes as many nodes as the one without them."""
    counts = [
        sum(k < t for t, k in recompute_once(zoo.mlp(batch_size=64, **state), ()).R)
        for state in ({}, {"state": "sgd"})
    ]
    assert counts[0] == counts[1] > 0


def test_running_statistics_do_not_end_the_forward_pass():
    """Updates of batch norms are in the forward pass, and only the backward pass recomputes."""
    graph = zoo.resnet8(state="sgd")
    first = next(k for k, node in enumerate(graph.nodes) if node.phase == Phase.BACKWARD)
    assert any(node.phase == Phase.UPDATE for node in graph.nodes[:first])
    forward = {k for k, node in enumerate(graph.nodes[:first]) if node.phase == Phase.FORWARD}
    again = [(t, k) for t, k in recompute_once(graph, ()).R if k < t]
    assert len(forward.intersection(k for _, k in again)) > len(forward) / 2
    assert min(t for t, _ in again) >= first
    assert len(again) == len({k for _, k in again})


def test_each_position_is_a_neighbourhood():
    """A position that no iteration could draw would be dead code."""
    positions = {name for name in vars(neighbourhood) if name.endswith("_position")}
    assert positions == {position.__name__ for position in neighbourhood.NEIGHBOURHOODS}
