"""Why a problem has no schedule: what is in the way, and the nearest problems that have one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo
import pytest

from kit.instances import random_costs, random_graph, random_instances, random_step, seeded
from kit.oracle import optimum
from kit.rotation import Part, parts
from kit.worked import bench_device, even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.device.io import load_device
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.graph.zoo import MODELS
from poetmodel.model import build
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import Change, explain_infeasible, variants

if TYPE_CHECKING:
    from poetmodel.solver.sensitivity import Explanation, Remedy


def explained(problem: Problem) -> Explanation:
    """Return the explanation of an infeasible problem."""
    result = solve(problem)
    assert result.status == Status.INFEASIBLE
    return explain_infeasible(result)


def changed(problem: Problem, change: Change, amount: float) -> Problem:
    """Return a problem with one of its amounts as an explanation says."""
    name = {"ram": "ram", "time": "deadline", "energy": "energy_budget", "storage": "aux_bytes"}
    return replace(problem, **{name[change]: amount})


@pytest.mark.parametrize(
    ("limits", "sentences"),
    [
        ({"ram": 11}, ["feasible from 12 bytes of RAM"]),
        ({"deadline": 9}, ["feasible from 11 s as the deadline"]),
        (
            {"deadline": 10.5},
            [
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible from 11 s as the deadline",
            ],
        ),
        (
            {"aux_bytes": 3, "recompute": False},
            [
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible from 4 bytes of storage",
                "feasible with recomputation",
            ],
        ),
        (
            {"paging": False, "recompute": False},
            [
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible with paging",
                "feasible with recomputation",
            ],
        ),
        (
            {"energy_budget": 10.5},
            [
                "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM",
                "feasible from 11 J as the energy budget",
            ],
        ),
        (
            {"ram": 11, "deadline": 9},
            [
                "deadline 9 s: a single pass over all nodes already takes 10 s, without any "
                "transfer; no schedule is faster",
                "no single limit is enough to change: at least two must give way",
            ],
        ),
    ],
)
def test_each_case_is_told_in_plain_words(limits: dict[str, Any], sentences: list[str]) -> None:
    """Floor, deadline, storage, energy, what is forbidden, two at once: each with what would do."""
    assert list(explained(skip_problem(**limits)).sentences()) == sentences


@parts(2)
def test_nearest_problem_has_a_schedule_and_no_nearer_one_has(part: Part) -> None:
    """What is said to work does, what is said to be proven is, and "does not help" is true."""
    works: list[bool] = []
    tight = {"recompute": False, "aux_bytes": 2, "deadline": "102%", "below_floor": True}
    for problem in part.of(random_instances(40, (4, 5), seed=11, **tight)):
        result = solve(problem)
        if result.status == Status.INFEASIBLE:
            works += [_checked(problem, remedy) for remedy in explain_infeasible(result).remedies]
    assert works.count(True) >= part.share(10)
    assert works.count(False) >= part.share(2)


@pytest.mark.parametrize("seed", [9, 113, 367])
def test_limit_as_it_is_is_part_of_the_proof(seed: int) -> None:
    """No bound is below the limit that is known to be infeasible: what is open lies above it."""
    rng = seeded(f"bs/{seed}")
    graph = random_graph(rng, (5, 8))
    costs = random_costs(rng, graph, mode="dma", idle=False)
    ram = rng.randint(floor(graph).bytes, checkpoint_all_peak_bytes(graph) - 1)
    problem = Problem(graph, costs, ram=ram, deadline_counts="overlap")
    tight = replace(problem, deadline=problem.pass_time_s * rng.choice((1.0, 1.02, 1.1)))
    amounts = [r for r in explained(tight).remedies if r.works and r.allowed is not None]
    assert amounts
    for remedy in amounts:
        assert remedy.bound is not None
        assert remedy.bound >= (remedy.allowed or 0) + (remedy.change == Change.RAM)


@pytest.mark.parametrize("meaning", ["compute", "serial", "overlap"])
def test_amounts_as_they_are_printed_have_a_schedule(meaning: str) -> None:
    """The figure in the sentence, read as a limit, is enough: a solve with it finds a schedule."""
    followed = 0
    tight = {"recompute": False, "deadline": "102%", "below_floor": True}
    for given in random_instances(25, (4, 6), seed=12, **tight):
        problem = replace(given, deadline_counts=meaning)
        result = solve(problem)
        if result.status != Status.INFEASIBLE:
            continue
        for remedy in explain_infeasible(result).in_the_way:
            if remedy.allowed is None:
                continue
            words = re.search(r"feasible (?:from|with) (\S+) (bytes|s|J)", remedy.sentence())
            assert words is not None
            amount = int(words[1]) if words[2] == "bytes" else float(words[1])
            found = solve(changed(problem, remedy.change, amount))
            assert found.schedule is not None, (remedy, problem)
            assert not found.violations
            followed += 1
    assert followed >= 5


def test_graphs_beyond_the_largest_size_are_explained() -> None:
    """Tensors that take more than 2^53 B together: storage may be enough, or no RAM at all."""
    size = 2**52
    graph = Graph(
        name="large",
        nodes=(
            operation("a", output_bytes=size),
            operation("b", output_bytes=size, inputs=("a",)),
            operation("c", output_bytes=size, inputs=("b",)),
            operation("d", output_bytes=0, inputs=("c", "a")),
        ),
    )
    problem = Problem(graph, even_costs(graph), ram=2**53, aux_bytes=0, recompute=False)
    enough = [r for r in explained(problem).remedies if r.change == Change.STORAGE]
    assert [(remedy.works, remedy.nearest) for remedy in enough] == [(True, size)]
    wide = replace(graph.nodes[2], workspace_bytes=1)
    graph = replace(graph, nodes=(*graph.nodes[:2], wide, graph.nodes[3]))
    assert list(explained(Problem(graph, even_costs(graph), ram=2**53)).sentences()) == [
        "more RAM alone does not help"
    ]


def test_two_limits_are_blamed_once_each() -> None:
    """The whole reason says the floor, one pass and the baseline once, however many are missed."""
    found = explained(skip_problem(ram=11, deadline=9, energy_budget=9))
    whole = found.whole_reason
    for words in ("RAM budget 11 B", "deadline 9 s", "energy budget 9 J", "12 B"):
        assert whole.count(words) == 1
    assert "give at least" not in whole
    assert not any("RAM budget" in hint for hint in found.hints())


def test_endless_steps_are_named_in_short() -> None:
    """A step that reads thousands of tensors is told with a few of them, and their number."""
    sources = [operation(f"s{i}", output_bytes=4) for i in range(3000)]
    sink = operation("sink", output_bytes=4, inputs=tuple(node.name for node in sources))
    graph = Graph(name="wide", nodes=(*sources, sink))
    sentence = obstacle(Problem(graph, even_costs(graph), ram=8))
    assert sentence is not None
    assert len(sentence) < 300
    assert "s0 (4 B), s1 (4 B)" in sentence
    assert "and 2,996 more" in sentence


def test_ram_beyond_the_device_is_said_to_be() -> None:
    """What would do may be more than the board has: then that is said."""
    graph = skip_graph()
    board = replace(load_device("rpi4b"), ram_bytes=11)
    found = explained(Problem(graph, even_costs(graph, device=board)))
    assert "feasible from 12 bytes of RAM" in found.hints()
    assert any("more than the 11 B of RAM that device" in hint for hint in found.hints())


def _checked(problem: Problem, remedy: Remedy) -> bool:
    """Hold a remedy against the oracle; return whether it works."""
    assert remedy.works is not None
    if remedy.allowed is None:
        return remedy.works
    if not remedy.works:
        assert optimum(changed(problem, remedy.change, 2**40)) is None
        return False
    assert remedy.nearest is not None
    assert remedy.nearest > remedy.allowed
    assert remedy.proven
    assert optimum(changed(problem, remedy.change, remedy.nearest)) is not None
    whole = remedy.change in (Change.RAM, Change.STORAGE)
    nearer = remedy.nearest - 1 if whole else remedy.nearest * (1 - 1e-6)
    if nearer > 0:
        assert optimum(changed(problem, remedy.change, nearer)) is None
    return True


def test_counted_parameters_are_part_of_the_budget_that_works() -> None:
    """The nearest budget holds what is resident, and the explanation says how much that is."""
    graph = Graph(name="heavy", nodes=skip_graph().nodes, resident_bytes={"parameters": 100})
    found = explained(Problem(graph, even_costs(graph), ram=105, count_parameters=True))
    assert found.remedies[0].nearest == 112
    assert any("100 bytes (100 B) are counted" in sentence for sentence in found.sentences())


def test_smaller_batch_is_tried_where_the_network_can_be_made() -> None:
    """A network of the zoo with batches of 8 is made again with 1; other graphs only get a word."""
    device = load_device("rpi4b")
    graph = MODELS["mlp"](batch_size=8)
    problem = Problem(graph, Costs.estimate(graph, device), ram=20_000)
    found = explained(problem)
    assert [remedy.change for remedy in found.in_the_way] == [Change.RAM, Change.BATCH]
    assert "feasible with batch size 1" in found.sentences()
    own = Graph(name="own", nodes=graph.nodes, batch_size=8)
    found = explained(Problem(own, Costs.estimate(own, device), ram=20_000))
    assert [remedy.change for remedy in found.remedies] == [Change.RAM]
    assert any("a batch of 8" in sentence for sentence in found.sentences())


@pytest.mark.parametrize("whole", [True, False], ids=["needs integrality", "does not"])
def test_own_constraints_are_named(whole: bool) -> None:
    """Those that contradict are named with the limit they contradict; the others are not."""
    problem = skip_problem() if whole else skip_problem(recompute=False)
    model = build(problem)
    model.few_pages = pyo.Constraint(expr=sum(model.paged_out.values()) <= (0.5 if whole else 0))
    model.harmless = pyo.Constraint(expr=sum(model.paged_out.values()) <= 3)
    if whole:
        model.no_work = pyo.ConstraintList()
        model.no_work.add(sum(model.recomputed.values()) <= 0.5)
    if whole:
        pytest.importorskip("pyscipopt")
    result = solve(model)
    found = explain_infeasible(result, model=model)
    assert set(found.constraints) == ({"few_pages", "no_work[1]"} if whole else {"few_pages"})
    assert "the RAM budget" in found.limits
    text = " ".join(found.sentences())
    assert "these added constraints cannot hold together with" in text
    assert "without what was added to the model there is a schedule" in text
    assert found.to_dict()["constraints"] == list(found.constraints)


def test_fixed_variables_are_hinted_at() -> None:
    """Where no added constraint takes part, fixed variables are what to look at."""
    model = build(skip_problem())
    model.R[3, 0].fix(0)
    model.M_in[3, 0].fix(0)
    found = explain_infeasible(solve(model), model=model)
    assert found.constraints == ()
    assert any("variables that are fixed" in sentence for sentence in found.sentences())


def test_model_of_an_infeasible_problem_is_explained_by_the_problem() -> None:
    """Where the problem alone has no schedule, no added constraint is blamed."""
    problem = skip_problem(deadline=10.5)
    model = build(problem)
    model.few = pyo.Constraint(expr=sum(model.recomputed.values()) <= 1)
    found = explain_infeasible(solve(model), model=model)
    assert found.constraints == ()
    assert [remedy.change for remedy in found.in_the_way] == [Change.RAM, Change.TIME]


def test_what_is_not_decided_is_said_to_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the time to decide, nothing is claimed."""
    result = solve(skip_problem(deadline=10.5))
    undecided = replace(result, status=Status.UNKNOWN)
    monkeypatch.setattr(variants, "solve", lambda *_, **__: undecided)
    found = explain_infeasible(result)
    assert [remedy.works for remedy in found.remedies] == [None, None]
    assert not any(remedy.proven for remedy in found.remedies)
    assert list(found.sentences()) == [
        "whether more RAM alone would do was not decided in time",
        "whether a later deadline alone would do was not decided in time",
    ]


def test_unproven_amounts_come_with_what_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A schedule without its proof works, and the words do not call it the least."""
    real = variants.solve

    def loose(*arguments: Any, **options: Any) -> Any:
        return replace(real(*arguments, **options), objective_bound=10.0)

    result = solve(skip_problem(deadline=9))
    monkeypatch.setattr(variants, "solve", loose)
    found = explain_infeasible(result)
    assert next(found.sentences()) == (
        "feasible with 11 s as the deadline; less than 10 s is proven infeasible, the rest is open"
    )


@pytest.mark.slow
def test_least_storage_counts_the_homes_of_state() -> None:
    """With the storage named there is a schedule, with a byte less there is none.

    State that is only read takes its room, too.
    """
    rng, checked = seeded("least storage of state"), 0
    for _ in range(60):
        graph = random_step(rng, (5, 8), flops=1_000_000)
        problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=10**6)
        ram = rng.randint(problem.floor.bytes, max(1, checkpoint_all_peak_bytes(graph)))
        tight = replace(problem, ram=max(1, ram), aux_bytes=0)
        if not graph.state_tensors or solve(tight).schedule is not None:
            continue
        (storage,) = (each for each in explained(tight).remedies if each.change == Change.STORAGE)
        if not storage.works:
            continue
        assert storage.proven
        least = int(storage.nearest or 0)
        checked += 1
        for amount, status in ((least, Status.OPTIMAL), (least - 1, Status.INFEASIBLE)):
            stated = replace(tight, aux_bytes=amount)
            assert solve(stated, formulation="compact", gap=1.0).status == status
    assert checked > 10
