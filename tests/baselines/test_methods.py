"""Every method there is, on the same problems, with the same verifier."""

import inspect
from functools import cache, partial

import pytest
from hypothesis import given, settings

from kit.baseline_checks import valid_or_refused
from kit.instances import random_instance, random_instances, random_training_graph, seeded
from kit.rotation import quick
from kit.strategies import graphs
from kit.worked import chain_costs, even_costs, skip_graph, skip_problem, training_chain
from poetmodel.baselines import METHODS, run
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.checkpointing import rotor
from poetmodel.baselines.dtr import HEURISTICS, dtr, dtr_paging
from poetmodel.baselines.paging import lru_paging, offload_all
from poetmodel.baselines.pofo import pofo
from poetmodel.baselines.swap_advisor import swap_advisor
from poetmodel.device import Costs, Device
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import floor
from poetmodel.graph.zoo import mlp
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import checkpoint_all


def _problems():
    found = {}
    for share in (100, 85, 70):
        chain = training_chain([3, 5, 2, 4, 6, 1, 3], gradient_bytes=2)
        costs = chain_costs(chain, seconds=[1 + k % 4 for k in range(len(chain.nodes))])
        found[f"chain {share}%"] = Problem(chain, costs, ram=f"{share}%", deadline_counts="serial")
        for seed in range(2):
            network = random_training_graph(seeded(f"methods/{seed}"), 5)
            found[f"network {seed} {share}%"] = Problem(
                network, chain_costs(network), ram=f"{share}%", deadline_counts="compute"
            )
    step = mlp(state="momentum", in_place=True, tile="128KiB")
    for share in (100, 55):
        costs = Costs.estimate(step, Device.load("nrf52840"))
        found[f"state {share}%"] = Problem(step, costs, ram=f"{share}%")
    for seed in range(5):
        fixed = {"minimize": "energy", "deadline": None}
        found[f"random {seed}"] = random_instance(seeded(f"any/{seed}"), (3, 6), **fixed)
    return found


PROBLEMS = _problems()


@cache
def best(name):
    """Return the proven optimum of one of the problems."""
    return run(PROBLEMS[name], "optimal", **_options(name))


def _options(name):
    """Return how long a solve of a problem may take, where the proof takes long."""
    return {"time_limit": 20.0, "gap": 0.01} if name.startswith("state") else {"gap": 1e-4}


@pytest.mark.parametrize(
    "problem",
    quick(
        PROBLEMS,
        ("chain 85%", "chain 70%", "network 0 70%", "network 1 85%", "random 0", "random 1"),
    ),
)
@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_schedule_is_valid_or_refused_and_never_beats_the_optimum(entry, problem):
    """The verifier accepts it, within all limits; its energy is no less than the proven bound."""
    stated = PROBLEMS[problem]
    try:
        result = run(stated, entry.name, **(_options(problem) if entry.by_solver else {}))
    except MethodNotApplicableError as error:
        assert str(error).startswith(f"{entry.name}: ")  # noqa: PT017 - either outcome is fine
        return
    optimum = best(problem)
    assert (result.schedule is None) == (optimum.schedule is None)
    if result.schedule is None or optimum.bound_j is None:
        return
    assert verify(stated, result.schedule).valid
    assert result.energy_j >= optimum.bound_j * (1 - 1e-9)
    assert entry.pages or not (result.schedule.M_in or result.schedule.M_out)
    assert entry.recomputes or all(t == k for t, k in result.schedule.R)


@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_entry_is_complete(entry):
    """Each has a function with a docstring, a source and its assumptions."""
    function = entry.function()
    assert next(iter(inspect.signature(function).parameters)) == "problem"
    assert inspect.getdoc(function)
    assert entry.summary
    assert entry.source
    assert entry.assumptions


# -- Methods that let tensors leave where room is needed -------------------------------------------
@pytest.mark.parametrize("paging", [True, False])
@pytest.mark.parametrize("method", [dtr, dtr_paging, lru_paging, capuchin, swap_advisor])
def test_nothing_leaves_at_full_ram(method, paging):
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
def test_samples_on_storage_need_no_page_out(method, recomputable, page_in, limits):
    """A tensor that lies on storage from the start is dropped and paged in."""
    graph = skip_graph(on_aux=True, recomputable=recomputable)
    costs = even_costs(graph) if page_in is None else even_costs(graph, page_in=page_in)
    schedule = method(Problem(graph, costs, ram=13, **limits))
    assert (schedule.M_out, schedule.M_in) == ((), ((3, 0),))


DRAWN = {"resident": True, "below_floor": True}


@pytest.mark.parametrize(
    ("method", "drawn", "least_paged", "least_recomputed"),
    [
        *(
            (partial(dtr, heuristic=score), [(120, (3, 9), {"seed": 51})], -1, 5)
            for score in ("full", "eq", "liveness")
        ),
        *(
            pytest.param(
                partial(dtr, heuristic=score),
                [(120, (3, 9), {"seed": 51})],
                -1,
                5,
                marks=pytest.mark.slow,
            )
            for score in sorted(set(HEURISTICS) - {"full", "eq", "liveness"})
        ),
        (dtr_paging, [(300, (3, 9), {"seed": 52})], 10, 10),
        (lru_paging, [(300, (3, 9), {"seed": 61})], 20, None),
        (capuchin, [(125, (3, 9), {"seed": 91, "storage": s}) for s in (True, False)], 10, 10),
        (swap_advisor, [(100, (3, 8), {"seed": 82})], 10, None),
    ],
)
def test_schedules_keep_the_budget_or_are_refused(method, drawn, least_paged, least_recomputed):
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


@pytest.mark.parametrize("method", [lru_paging, capuchin, swap_advisor])
@settings(max_examples=40)
@given(graph=graphs(max_nodes=10, on_aux=True))
def test_minimum_ram_is_enough(method, graph):
    """With storage a budget of the largest working set is always kept, the same way each time."""
    problem = Problem(graph, even_costs(graph), ram=max(1, floor(graph).bytes))
    assert valid_or_refused(method, problem) == method(problem)


@pytest.mark.parametrize("method", [rotor, pofo])
@pytest.mark.parametrize("seed", range(8))
def test_chains_of_steps_keep_the_budget(method, seed):
    """Networks with skips are cut into steps of several nodes; what comes out is valid and fits."""
    graph = random_training_graph(seeded(f"{method.__name__} steps/{seed}"), 7)
    for share in (100, 85, 70):
        problem = Problem(graph, chain_costs(graph), ram=f"{share}%", deadline_counts="overlap")
        schedule = valid_or_refused(method, problem)
        assert schedule is None or verify(problem, schedule).valid
        assert method is pofo or schedule is None or schedule.M_in == schedule.M_out == ()


@pytest.mark.parametrize(
    ("method", "limits", "words"),
    [
        (dtr, {"recompute": False}, r"the step 'c' .* no tensor may leave RAM"),
        (dtr_paging, {"recompute": False, "aux_bytes": 3}, "leave RAM"),
        (lru_paging, {"aux_bytes": 3}, "the step 'c'"),
        (lru_paging, {"paging": False}, "the step 'c'"),
        (capuchin, {"paging": False, "recompute": False}, "at 'c' 2 B more"),
        (swap_advisor, {"paging": False}, "no paging"),
        (swap_advisor, {"ram": 11}, "12 B"),
        (offload_all, {"paging": False}, "no paging"),
        (offload_all, {}, "no backward nodes"),
    ],
)
def test_refusal_names_what_is_in_the_way(method, limits, words):
    """The step that does not fit and what it lacks, or what the problem does not allow."""
    with pytest.raises(MethodNotApplicableError, match=words):
        method(skip_problem(**limits))
