"""Why a problem has no schedule: what is in the way, and the nearest problems that have one."""

import re
from dataclasses import replace

import pyomo.environ as pyo
import pytest

from kit.instances import random_costs, random_graph, random_instances, random_step, seeded
from kit.oracle import optimum
from kit.own_rows import constrained
from kit.rotation import parts
from kit.worked import bench_device, even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.device.io import load_device
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.graph.zoo import MODELS
from poetmodel.model import build
from poetmodel.problem import Constraint, Problem
from poetmodel.problem.infeasibility import obstacle
from poetmodel.result import Status
from poetmodel.solver import solve
from poetmodel.solver.sensitivity import Change, explain_infeasible, variants


def explained(problem):
    """Return the explanation of an infeasible problem."""
    result = solve(problem)
    assert result.status == Status.INFEASIBLE
    return explain_infeasible(result)


def changed(problem, change, amount):
    """Return a problem with one of its amounts as an explanation says."""
    name = {"ram": "ram", "time": "deadline", "energy": "energy_budget", "storage": "aux_bytes"}
    return replace(problem, **{name[change]: amount})


KEPT = "feasible from 15 bytes of RAM, which 'c' takes with a, b, c in RAM"
TIME = "feasible from 11 s as the deadline"
ENERGY = "feasible from 11 J as the energy budget"
STORAGE = "feasible from 4 bytes of storage"
TOO_SLOW = (
    "deadline 9 s: a single pass over all nodes already takes 10 s, without any transfer; "
    "no schedule is faster"
)
TWO = "no single limit is enough to change: at least two must give way"


@pytest.mark.parametrize(
    ("limits", "sentences"),
    [
        ({"ram": 11}, ["feasible from 12 bytes of RAM"]),
        ({"deadline": 9}, [TIME]),
        ({"deadline": 10.5}, [KEPT, TIME]),
        ({"aux_bytes": 3, "recompute": False}, [KEPT, STORAGE, "feasible with recomputation"]),
        (
            {"paging": False, "recompute": False},
            [KEPT, "feasible with paging", "feasible with recomputation"],
        ),
        ({"energy_budget": 10.5}, [KEPT, ENERGY]),
        ({"ram": 11, "deadline": 9}, [TOO_SLOW, TWO]),
    ],
)
def test_each_case_is_told_in_plain_words(limits, sentences):
    """Floor, deadline, storage, energy, what is forbidden, two at once: each with what would do."""
    assert list(explained(skip_problem(**limits)).sentences()) == sentences


@parts(2)
def test_nearest_problem_has_a_schedule_and_no_nearer_one_has(part):
    """What is said to work does, what is said to be proven is, and "does not help" is true."""
    works = []
    tight = {"recompute": False, "aux_bytes": 2, "deadline": "102%", "below_floor": True}
    for problem in part.of(random_instances(40, (4, 5), seed=11, **tight)):
        result = solve(problem)
        if result.status == Status.INFEASIBLE:
            works += [_checked(problem, remedy) for remedy in explain_infeasible(result).remedies]
    assert works.count(True) >= part.share(10)
    assert works.count(False) >= part.share(2)


@pytest.mark.parametrize("seed", [9, 113, 367])
def test_limit_as_it_is_is_part_of_the_proof(seed):
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
        assert remedy.bound >= (remedy.allowed or 0) + (remedy.change == Change.RAM)


@pytest.mark.parametrize("meaning", ["compute", "serial", "overlap"])
def test_amounts_as_they_are_printed_have_a_schedule(meaning):
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
            amount = int(words[1]) if words[2] == "bytes" else float(words[1])
            found = solve(changed(problem, remedy.change, amount))
            assert found.schedule is not None, (remedy, problem)
            assert not found.violations
            followed += 1
    assert followed >= 5


def test_graphs_beyond_the_largest_size_are_explained():
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


def test_sentences_about_ram():
    """The floor is told once, however many limits are missed, a wide step with a few tensors.

    What is more than the board has is said to be; a nearest budget holds what is resident.
    """
    found = explained(skip_problem(ram=11, deadline=9, energy_budget=9))
    whole = found.whole_reason
    for words in ("RAM budget 11 B", "deadline 9 s", "energy budget 9 J", "12 B"):
        assert whole.count(words) == 1
    assert "give at least" not in whole
    assert not any("RAM budget" in hint for hint in found.hints())
    sources = [operation(f"s{i}", output_bytes=4) for i in range(3000)]
    sink = operation("sink", output_bytes=4, inputs=tuple(node.name for node in sources))
    graph = Graph(name="wide", nodes=(*sources, sink))
    sentence = obstacle(Problem(graph, even_costs(graph), ram=8))
    assert len(sentence) < 300
    assert "s0 (4 B), s1 (4 B)" in sentence
    assert "and 2,996 more" in sentence
    graph = skip_graph()
    board = replace(load_device("rpi4b"), ram_bytes=11)
    found = explained(Problem(graph, even_costs(graph, device=board)))
    assert "feasible from 12 bytes of RAM" in found.hints()
    assert any("more than the 11 B of RAM that device" in hint for hint in found.hints())
    graph = Graph(name="heavy", nodes=skip_graph().nodes, resident_bytes={"parameters": 100})
    found = explained(Problem(graph, even_costs(graph), ram=105, count_parameters=True))
    assert found.remedies[0].nearest == 112
    assert any("100 bytes (100 B) are counted" in sentence for sentence in found.sentences())


def _checked(problem, remedy):
    """Hold a remedy against the oracle; return whether it works."""
    assert remedy.works is not None
    if remedy.allowed is None:
        return remedy.works
    if not remedy.works:
        assert optimum(changed(problem, remedy.change, 2**40)) is None
        return False
    assert remedy.nearest > remedy.allowed
    assert remedy.proven
    assert optimum(changed(problem, remedy.change, remedy.nearest)) is not None
    whole = remedy.change in (Change.RAM, Change.STORAGE)
    nearer = remedy.nearest - 1 if whole else remedy.nearest * (1 - 1e-6)
    if nearer > 0:
        assert optimum(changed(problem, remedy.change, nearer)) is None
    return True


def test_a_batch_is_told_of_where_ram_is_too_small():
    """A graph that is made for a smaller one takes less."""
    graph = MODELS["mlp"](batch_size=8)
    problem = Problem(graph, Costs.estimate(graph, load_device("rpi4b")), ram=20_000)
    assert any("a batch of 8" in sentence for sentence in explained(problem).sentences())


def test_what_was_added_to_a_model_is_named():
    """Constraints of a model whose problem has a schedule, or fixed variables; else the limits."""
    model = build(skip_problem(recompute=False))
    model.few_pages = pyo.Constraint(expr=sum(model.paged_out.values()) <= 0)
    model.harmless = pyo.Constraint(expr=sum(model.paged_out.values()) <= 3)
    found = explain_infeasible(solve(model), model=model)
    assert list(found.sentences()) == [
        "without what was added to the model (constraints few_pages, harmless) there is a schedule"
    ]
    model = build(skip_problem())
    model.R[3, 0].fix(0)
    model.M_in[3, 0].fix(0)
    found = explain_infeasible(solve(model), model=model)
    assert any("variables that are fixed" in sentence for sentence in found.sentences())
    model = build(skip_problem(deadline=10.5))
    model.few = pyo.Constraint(expr=sum(model.recomputed.values()) <= 1)
    found = explain_infeasible(solve(model), model=model)
    assert [remedy.change for remedy in found.in_the_way] == [Change.RAM, Change.TIME]


def test_what_is_not_proved_is_said_to_be_open(monkeypatch):
    """Without time nothing is claimed; a schedule without its proof works, but is not the least."""
    real = variants.solve

    def loose(*arguments, **options):
        return replace(real(*arguments, **options), objective_bound=10.0)

    result = solve(skip_problem(deadline=9))
    monkeypatch.setattr(variants, "solve", loose)
    found = explain_infeasible(result)
    assert next(found.sentences()) == (
        "feasible with 11 s as the deadline; less than 10 s is proven infeasible, the rest is open"
    )
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


@pytest.mark.slow
def test_least_storage_counts_the_homes_of_state():
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


# -- own constraints ------------------------------------------------------------------------------
def upper(name, limit, **terms):
    """Return a row with an upper limit; a key has ``__`` for its colon."""
    keys = {key.replace("__", ":"): weight for key, weight in terms.items()}
    return Constraint(name=name, terms=keys, upper=limit)


def with_rows(*rows, **limits):
    """Return the worked problem with rows: in less than 15 B, a (4 B) is paged or recomputed."""
    return replace(skip_problem(**limits), constraints=rows)


WEAR = upper("wear", 3, bytes_written=1)
ONCE = upper("once", 0, recomputations__a=1)
PAGES = [upper(f"pages[{name}]", 0, **{f"page_outs__{name}": 1}) for name in ("a", "b", "c")]
MANY = [upper(f"other {number}", 100, energy_j=1) for number in range(5)]


@pytest.mark.parametrize(
    ("problem", "hints"),
    [
        (
            with_rows(WEAR, recompute=False),
            [KEPT, "feasible with recomputation", "feasible without constraint 'wear'"],
        ),
        (
            with_rows(*PAGES, ONCE),
            [
                *(KEPT, "feasible without constraints 'pages[a]', 'pages[b]', 'pages[c]'"),
                "feasible without constraint 'once'",
                "feasible without constraints 'pages[a]', 'pages[b]', 'pages[c]', 'once'",
            ],
        ),
        (
            with_rows(WEAR, ONCE, *MANY),
            [KEPT, "feasible without constraints 'wear', 'once', 'other 0' and 4 more"],
        ),
        (with_rows(WEAR, ram=11), ["feasible from 12 bytes of RAM"]),
        (with_rows(WEAR, ram=11, deadline=9), [TWO]),
    ],
    ids=["one", "rules and all", "many together", "no part", "two limits"],
)
def test_own_constraints_are_left_out(problem, hints):
    """Rule by rule, or all of many together; those that take no part do not help."""
    assert list(explained(problem).hints()) == hints


def test_json_names_the_constraints_that_are_left_out():
    """A change of theirs has their names; those of other limits have none."""
    changes = explained(with_rows(WEAR, recompute=False)).to_dict()["changes"]
    assert changes[-1]["change"] == "constraint"
    assert (changes[-1]["constraints"], changes[-1]["works"]) == (["wear"], True)
    assert "constraints" not in changes[0]


@pytest.mark.slow
def test_what_is_said_of_own_constraints_is_true():
    """The oracle finds a schedule without those that are said to help, and none without others."""
    said = []
    for number, base in enumerate(random_instances(120, n=(3, 4))):
        problem = constrained(seeded(number), base)
        if optimum(problem) is not None:
            continue
        for remedy in explain_infeasible(solve(problem), time_limit=20).remedies:
            if remedy.change == Change.CONSTRAINT:
                rows = [row for row in problem.constraints if row.name not in remedy.constraints]
                without = optimum(replace(problem, constraints=tuple(rows)))
                assert remedy.works is (without is not None)
                said.append(remedy.works)
    assert said.count(True) >= 10
    assert said.count(False) >= 1
