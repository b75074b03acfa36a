"""Checkmate's rounding: computations that rounded checkpoints need, and possible results."""

import itertools

import numpy as np
import pytest

from kit.baseline_checks import check_method
from kit.instances import make_rng, random_instance, random_instances, random_training_graph
from kit.worked import chain_costs, training_chain
from poetmodel.baselines import rounding, run
from poetmodel.baselines.rounding import ROUNDING_RULES, checkmate_rounding, complete_schedule
from poetmodel.errors import MethodNotApplicableError, NoScheduleError
from poetmodel.graph import floor
from poetmodel.problem import Problem
from poetmodel.schedule import simulate


def closed_sets(graph, t, checkpoints):
    """Yield every set of nodes up to `t` that stage `t` may compute with some checkpoints."""
    here = set(np.flatnonzero(checkpoints[t]))
    after = set(np.flatnonzero(checkpoints[t + 1])) if t + 1 < len(checkpoints) else set()
    wanted = {t, *(graph.node_of[i] for i in after - here)}
    for chosen in itertools.product([False, True], repeat=t):
        nodes = {k for k, taken in enumerate(chosen) if taken} | {t}
        made = {i for k in nodes for i in graph.outputs_of[k]}
        read = {i for k in nodes for i in graph.inputs_of[k]}
        if wanted <= nodes and read <= here | made:
            yield nodes


@pytest.mark.parametrize("seed", range(10))
def test_checkpoints_are_completed_by_the_fewest_computations(seed, monkeypatch):
    """Each stage computes only nodes that every completion computes, for any rounding."""
    monkeypatch.setattr(rounding, "PartialSchedule", _Untouched)
    rng = make_rng(f"complete/{seed}")
    problem = random_instance(rng, (3, 7))
    graph = problem.graph
    shape = (len(graph.nodes), len(graph.tensors))
    stages, made = np.arange(shape[0])[:, None], np.array(graph.node_of)
    for share in (0.2, 0.5, 0.8):
        up = np.array([[rng.random() < share for _ in range(shape[1])] for _ in range(shape[0])])
        checkpoints = up & (stages > made)
        schedule = complete_schedule(graph, checkpoints)
        for t in range(shape[0]):
            computed = {k for stage, k in schedule.R if stage == t}
            every = list(closed_sets(graph, t, checkpoints))
            assert computed in every
            assert all(computed <= nodes for nodes in every)


@pytest.fixture
def few_draws(monkeypatch):
    """Draw a tenth of the randomized roundings."""
    monkeypatch.setattr(rounding, "DRAWS", 10)


class _Untouched:
    """A substitute for a tidied schedule: this one is not changed."""

    @staticmethod
    def from_schedule(_graph, schedule):
        found = _Untouched()
        found.schedule = lambda: schedule
        return found


def problems():
    """Yield random training networks and a chain at several budgets."""
    for seed in range(2):
        rng = make_rng(f"rounding/{seed}")
        graph = random_training_graph(rng, 5)
        costs = chain_costs(graph, seconds=[rng.randint(1, 9) for _ in graph.nodes])
        for share in (90, 75):
            yield Problem(graph, costs, ram=f"{share}%", deadline_counts="compute")
    chain = training_chain([3, 5, 2, 4, 6, 1, 3], gradient_bytes=2)
    for share in (90, 75, 60):
        costs = chain_costs(chain, seconds=[1 + k % 4 for k in range(len(chain.nodes))])
        yield Problem(chain, costs, ram=f"{share}%", deadline_counts="compute")


def outcome(problem, rule=""):
    """Return the compute time of a rounding, infinite where it is refused."""
    try:
        schedule = checkmate_rounding(problem, rule)
    except MethodNotApplicableError:
        return float("inf")
    return simulate(problem.graph, problem.costs, schedule).compute_s


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_no_rounding_is_quicker_than_the_program_and_all_are_no_slower_than_one():
    """The program of Checkmate is a bound, which roundings reach; the best of the rules counts."""
    reached = solved = 0
    for problem in problems():
        best = outcome(problem)
        for rule in ROUNDING_RULES:
            assert best <= outcome(problem, rule) * (1 + 1e-9)
        assert outcome(problem, "deterministic") <= outcome(problem, "published")
        try:
            exact = run(problem, "checkmate").require_schedule()
        except (MethodNotApplicableError, NoScheduleError):
            assert best == float("inf")
            continue
        least = simulate(problem.graph, problem.costs, exact).compute_s
        assert best >= least * (1 - 1e-9)
        solved += best < float("inf")
        reached += best <= least * (1 + 1e-9)
    assert solved > 3
    assert reached > 2


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("rule", [pytest.param("", marks=pytest.mark.slow), *ROUNDING_RULES])
def test_schedules_keep_the_budget_or_are_refused(rule):
    """For any graph, the schedule is valid within RAM and pages nothing, or has a reason."""
    again = 0
    drawn = random_instances(8, (3, 9), resident=True, below_floor=True, seed=83)
    for problem in itertools.chain(drawn, problems()):
        schedule = check_method(lambda each: checkmate_rounding(each, rule), problem)
        if schedule is not None:
            assert schedule.M_in == schedule.M_out == ()
            again += len(schedule.R) > len(problem.graph.nodes)
            assert all(t == k or problem.graph.nodes[k].recomputable for t, k in schedule.R)
    assert again > 1


def test_own_objective_does_not_stop_the_relaxation():
    """The relaxation minimizes time, whatever the problem minimizes."""
    problem = list(problems())[1]
    own = problem.minimizing(lambda values: values.energy_j + values.compute_s)
    assert outcome(own, "published") == outcome(problem, "published")


def test_same_seed_has_the_same_schedule():
    """Draws are those of a seed, without another one of 0."""
    problem = list(problems())[1]
    first = checkmate_rounding(problem, "randomized")
    assert first == checkmate_rounding(problem, "randomized", seed=0)
    assert first == run(problem, "checkmate-rounding:randomized").schedule


def test_relaxation_without_a_solution_is_named():
    """At the least RAM the budget less the allowance has no solution; the whole one may have."""
    chain = training_chain([3, 5, 2, 4], gradient_bytes=2)
    problem = Problem(chain, chain_costs(chain), ram=floor(chain).bytes)
    with pytest.raises(MethodNotApplicableError, match="linear relaxation has no solution within"):
        checkmate_rounding(problem, "published")
