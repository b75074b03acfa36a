"""Every method there is, on the same problems, with the same verifier."""

import inspect
import itertools
from functools import cache, partial
from math import sqrt

import pytest
from hypothesis import given, settings

from kit.baseline_checks import check_method
from kit.instances import make_rng, random_instance, random_instances, random_training_graph
from kit.rotation import mark_seeds_except, parametrize_parts
from kit.strategies import graphs
from kit.worked import (
    chain_costs,
    even_costs,
    parse_graph,
    skip_graph,
    skip_problem,
    training_chain,
)
from poetmodel.baselines import METHODS, run
from poetmodel.baselines.capuchin import capuchin
from poetmodel.baselines.checkpointing import rotor
from poetmodel.baselines.dtr import HEURISTICS, dtr, dtr_paging
from poetmodel.baselines.paging import lru_paging, offload_all
from poetmodel.baselines.pofo import pofo
from poetmodel.baselines.saved_sets import (
    CutNetwork,
    chen_greedy,
    chen_sqrt,
    min_cut,
    recompute_once,
)
from poetmodel.baselines.swap_advisor import swap_advisor
from poetmodel.device import Costs, Device
from poetmodel.errors import MethodNotApplicableError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.graph.zoo import mlp
from poetmodel.heuristics.execution import evictable_tensors, first_backward_node
from poetmodel.planner import verify
from poetmodel.problem import Problem
from poetmodel.schedule import check_schedule, checkpoint_all, simulate


def _problems():
    found = {}
    for share in (100, 85, 70):
        chain = training_chain([3, 5, 2, 4, 6, 1, 3], gradient_bytes=2)
        costs = chain_costs(chain, seconds=[1 + k % 4 for k in range(len(chain.nodes))])
        found[f"chain {share}%"] = Problem(chain, costs, ram=f"{share}%", deadline_counts="serial")
        for seed in range(2):
            network = random_training_graph(make_rng(f"methods/{seed}"), 5)
            found[f"network {seed} {share}%"] = Problem(
                network, chain_costs(network), ram=f"{share}%", deadline_counts="compute"
            )
    step = mlp(state="momentum", in_place=True, tile="128KiB")
    for share in (100, 55):
        costs = Costs.estimate(step, Device.load("nrf52840"))
        found[f"state {share}%"] = Problem(step, costs, ram=f"{share}%")
    for seed in range(5):
        fixed = {"minimize": "energy", "deadline": None}
        found[f"random {seed}"] = random_instance(make_rng(f"any/{seed}"), (3, 6), **fixed)
    return found


PROBLEMS = _problems()


@cache
def best(name):
    """Return the proven optimum of one of the problems."""
    return run(PROBLEMS[name], "optimal", **_options(name))


def _options(name):
    """Return the time limit of a problem's solve, longer for long proofs."""
    return {"time_limit": 20.0, "gap": 0.01} if name.startswith("state") else {"gap": 1e-4}


@pytest.mark.parametrize(
    "problem",
    mark_seeds_except(
        PROBLEMS,
        ("chain 70%", "network 1 85%", "random 0"),
    ),
)
@pytest.mark.parametrize("entry", METHODS.values(), ids=METHODS)
def test_schedule_is_valid_or_refused_and_never_beats_the_optimum(entry, problem):
    """The verifier accepts it, within all limits; its energy is no less than the proven bound."""
    stated = PROBLEMS[problem]
    try:
        result = run(stated, entry.name, **(_options(problem) if entry.uses_solver else {}))
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
            (partial(dtr, heuristic=score), [(240, (3, 9), {"seed": 51})], -1, 10)
            for score in ("full", "eq", "liveness")
        ),
        *(
            pytest.param(
                partial(dtr, heuristic=score),
                [(240, (3, 9), {"seed": 51})],
                -1,
                10,
                marks=pytest.mark.seeds,
            )
            for score in sorted(set(HEURISTICS) - {"full", "eq", "liveness"})
        ),
        (dtr_paging, [(300, (3, 9), {"seed": 52})], 10, 10),
        (lru_paging, [(300, (3, 9), {"seed": 61})], 20, None),
        (capuchin, [(125, (3, 9), {"seed": 91, "storage": s}) for s in (True, False)], 4, 4),
        (swap_advisor, [(110, (3, 8), {"seed": 82})], 10, None),
    ],
)
@parametrize_parts(4)
def test_schedules_keep_the_budget_or_are_refused(
    method, drawn, least_paged, least_recomputed, part
):
    """For any graph, the schedule is valid, within RAM and storage, or there is a reason.

    The storage of the search over swap sets has a separate test.
    """
    paged = again = 0
    for count, sizes, options in drawn:
        for problem in part.select(random_instances(count, sizes, **DRAWN, **options)):
            schedule = check_method(method, problem)
            if schedule is None:
                continue
            paged += bool(schedule.M_in)
            again += len(schedule.R) > len(problem.graph.nodes)
            limit = problem.aux_limit_bytes
            written = sum(problem.graph.tensor_bytes[i] for _, i in schedule.M_out)
            assert method is swap_advisor or limit is None or written <= limit
            assert least_recomputed is not None or all(t == k for t, k in schedule.R)
    assert paged > part.divide(least_paged)
    assert again > part.divide(-1 if least_recomputed is None else least_recomputed)


@pytest.mark.parametrize(
    "method", [lru_paging, capuchin, swap_advisor, dtr, partial(dtr, liveness=True), dtr_paging]
)
@settings(max_examples=8)
@given(graph=graphs(max_nodes=10, on_aux=True))
def test_minimum_ram_is_enough(method, graph):
    """With storage a budget of the largest working set is always kept, the same way each time.

    Methods that recompute may refuse it, the same way each time too; they get more.
    """
    least, scarce = floor(graph).bytes, method in (lru_paging, capuchin, swap_advisor)
    ram = least if scarce else (least + checkpoint_all_peak_bytes(graph)) // 2
    problem = Problem(graph, even_costs(graph), ram=max(1, ram))
    found = check_method(method, problem)
    assert found == check_method(method, problem)
    assert found is not None or not scarce


@pytest.mark.parametrize("method", [rotor, pofo])
@pytest.mark.parametrize("seed", mark_seeds_except(range(8), range(3)))
def test_chains_of_steps_keep_the_budget(method, seed):
    """Networks with skips are divided into steps of several nodes; schedules are valid and fit."""
    graph = random_training_graph(make_rng(f"{method.__name__} steps/{seed}"), 7)
    for share in (100, 85, 70):
        problem = Problem(graph, chain_costs(graph), ram=f"{share}%", deadline_counts="overlap")
        schedule = check_method(method, problem)
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
    """The reason names the step that does not fit with the missing bytes, or a forbidden action."""
    with pytest.raises(MethodNotApplicableError, match=words):
        method(skip_problem(**limits))


# -- saved sets ----------------------------------------------------------------------------------
def problem_of(graph, ram="100%"):
    """Return a problem over a graph whose nodes take a second each."""
    return Problem(graph, chain_costs(graph), ram=ram)


def test_square_root_of_nine_layers():
    """Worked by hand: nine layers and the loss, ten candidates, one in four is kept.

    Kept are f4 and f8, and f9 and the loss, with which the backward pass begins; f1..f3 and f5..f7
    are made once more.
    """
    graph = training_chain([1] * 10)
    schedule = chen_sqrt(problem_of(graph))
    names = [graph.nodes[k].name for t, k in schedule.R if k < t]
    assert sorted(names) == ["f1", "f2", "f3", "f5", "f6", "f7"]
    begin = graph.node_index["gl"]
    kept = {graph.tensors[i].name for t, i in schedule.S_RAM if t == begin}
    assert kept == {"x", "f4", "f8", "f9", "loss"}


@pytest.mark.parametrize("length", [16, 64, 144])
def test_peak_grows_with_the_root_of_the_length(length):
    """On a chain of unit tensors the peak is at most two roots and a few tensors."""
    graph = training_chain([1] * (length + 1))
    schedule = chen_sqrt(problem_of(graph))
    peak = simulate(graph, None, schedule).peak_ram_bytes
    assert peak <= 2 * sqrt(length + 1) + 7
    counts = [k for t, k in schedule.R if k < t]
    assert len(counts) == len(set(counts))


def test_greedy_keeps_what_fits():
    """At 100 %, no node is recomputed; less RAM costs more computations, down to the refusal."""
    graph = training_chain([2, 1, 3, 1, 2, 4, 1, 1, 3, 1])
    extra = []
    for share in (100, 80, 70):
        problem = problem_of(graph, f"{share}%")
        schedule = chen_greedy(problem)
        assert check_schedule(problem, schedule).valid
        extra.append(len(schedule.R) - len(graph.nodes))
    assert extra[0] == 0
    assert extra == sorted(extra)
    assert extra[-1] > 0
    with pytest.raises(MethodNotApplicableError, match="need at least"):
        chen_greedy(problem_of(graph, "45%"))


def test_outputs_that_are_still_read_are_kept_together():
    """The second output of a kept node is kept with the first."""
    graph = training_chain([1] * 10, tapes=[1] * 9)
    schedule = chen_sqrt(problem_of(graph))
    begin = graph.node_index["gl"]
    kept = {graph.tensors[i].name for t, i in schedule.S_RAM if t == begin}
    assert {"f4", "f4.tape", "f8", "f8.tape"} <= kept


def spares(graph, saved, once):
    """Return whether all that the backward pass reads can be made without the nodes of `once`."""
    free = evictable_tensors(graph)
    todo = {
        i for k in range(first_backward_node(graph), len(graph.nodes)) for i in graph.inputs_of[k]
    }
    while todo:
        i = todo.pop()
        if i not in free or i in saved:
            continue
        if graph.node_of[i] in once:
            return False
        todo.update(graph.inputs_of[graph.node_of[i]])
    return True


@pytest.mark.parametrize("seed", range(12))
def test_no_smaller_set_spares_the_same_nodes(seed):
    """Among all sets of tensors, none of fewer bytes spares the nodes that must not run again."""
    rng = make_rng(f"cut/{seed}")
    graph = random_training_graph(rng, 6, reads=0.2)
    free = sorted(evictable_tensors(graph))
    once = {graph.node_of[i] for i in free if rng.random() < 0.3}
    sizes = graph.tensor_bytes
    every = itertools.chain.from_iterable(
        itertools.combinations(free, count) for count in range(len(free) + 1)
    )
    least = min(sum(sizes[i] for i in s) for s in every if spares(graph, set(s), once))
    found = CutNetwork(graph).find_saved_tensors(once)
    assert spares(graph, set(found), once)
    assert sum(sizes[i] for i in found) == least
    schedule = recompute_once(graph, found)
    assert simulate(graph, None, schedule).valid
    again = [k for t, k in schedule.R if k < t]
    assert len(again) == len(set(again))


def test_bytes_count_and_not_tensors():
    """A layer of nine bytes read by two of one byte: the two are saved, not the one."""
    graph = parse_graph("x 1 @input; wide 9 x; a 1 wide; b 1 wide; g 1 a b @backward")
    saved = CutNetwork(graph).find_saved_tensors({graph.node_index["wide"]})
    assert {graph.tensors[i].name for i in saved} == {"a", "b"}


def test_nothing_to_save_is_no_error():
    """A graph whose forward pass is its sample alone has no tensor that could be dropped."""
    nodes = (
        operation("x", output_bytes=4, phase="input"),
        operation("g", output_bytes=1, phase="backward", inputs=("x",)),
    )
    assert CutNetwork(Graph(name="sample", nodes=nodes)).find_saved_tensors(()) == frozenset()


def test_less_ram_recomputes_more():
    """No recomputation at 100 %, cheap layers first below, and a reason if no schedule fits."""
    graph = training_chain([2] * 9)
    seconds = [1] * len(graph.nodes)
    seconds[graph.node_index["f4"]] = 50
    costs = chain_costs(graph, seconds=seconds)
    extra = []
    for share in (100, 90, 75):
        problem = Problem(graph, costs, ram=f"{share}%")
        schedule = min_cut(problem)
        assert check_schedule(problem, schedule).valid
        assert graph.node_index["f4"] not in {k for t, k in schedule.R if k < t}
        extra.append(len(schedule.R) - len(graph.nodes))
    assert extra[0] == 0 < extra[1] <= extra[2]
    with pytest.raises(MethodNotApplicableError, match="saved sets need at least"):
        min_cut(Problem(graph, costs, ram="45%"))
