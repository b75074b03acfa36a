"""Reasons for infeasibility: limits in conflict, and the nearest feasible problems."""

import re
from dataclasses import replace

import numpy as np
import pyomo.environ as pyo
import pytest

from kit.instances import make_rng, random_costs, random_graph, random_instances, random_step
from kit.oracle import optimum
from kit.own_rows import add_measured_rows
from kit.rotation import parametrize_parts
from kit.worked import bench_device, comb_problem, even_costs, skip_graph, skip_problem
from poetmodel.backends.standard_form import StandardForm
from poetmodel.device import Costs, Device
from poetmodel.errors import InputError, TimeLimitError
from poetmodel.graph import Graph, checkpoint_all_peak_bytes, floor, operation
from poetmodel.graph.zoo import MODELS
from poetmodel.model import build
from poetmodel.problem import Constraint, Problem
from poetmodel.problem.infeasibility import infeasibility_reason
from poetmodel.result import Status, Termination
from poetmodel.solver import solve
from poetmodel.solver.facade import execute
from poetmodel.solver.sensitivity import Change, conflict, explain_infeasible, variants
from poetmodel.solver.sensitivity.conflict import (
    Conflict,
    find_conflict,
    find_conflicting_rows,
    find_minimal_conflict,
)
from poetmodel.solver.sensitivity.remedies import constraint_name, stated_limits, without_limits


def explained(problem):
    """Return the explanation of an infeasible problem."""
    result = solve(problem)
    assert result.status == Status.INFEASIBLE
    return explain_infeasible(result)


def changed(problem, change, amount):
    """Return a problem with a limit that an explanation recommends."""
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
TWO = "no change of a single limit suffices: at least two must change"


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
    """Floor, deadline, storage, energy, forbidden decisions, two at once: each with a remedy."""
    assert list(explained(skip_problem(**limits)).sentences()) == sentences


@parametrize_parts(2)
def test_nearest_problem_has_a_schedule_and_no_nearer_one_has(part):
    """Recommended limits are feasible, proven ones are minimal, and "does not help" is true."""
    works = []
    tight = {"recompute": False, "aux_bytes": 2, "deadline": "102%", "below_floor": True}
    for problem in part.select(random_instances(40, (4, 5), seed=11, **tight)):
        result = solve(problem)
        if result.status == Status.INFEASIBLE:
            works += [_checked(problem, remedy) for remedy in explain_infeasible(result).remedies]
    assert works.count(True) >= part.divide(10)
    assert works.count(False) >= part.divide(2)


@pytest.mark.parametrize("seed", [9, 113, 367])
def test_limit_as_it_is_is_part_of_the_proof(seed):
    """No bound is below the limit that is proven infeasible: only values above it are open."""
    rng = make_rng(f"bs/{seed}")
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
        for remedy in explain_infeasible(result).working_remedies:
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
    """Tensors of more than 2^53 B in total: storage may be enough, or no RAM at all."""
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
    """The floor is stated once, for any number of limits, a wide step with few tensors.

    Values above the board's RAM are marked; a nearest budget includes resident bytes.
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
    sentence = infeasibility_reason(Problem(graph, even_costs(graph), ram=8))
    assert len(sentence) < 300
    assert "s0 (4 B), s1 (4 B)" in sentence
    assert "and 2,996 more" in sentence
    graph = skip_graph()
    board = replace(Device.load("rpi4b"), ram_bytes=11)
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


def test_smaller_batch_is_tried_where_the_network_can_be_made():
    """A network of the zoo with batches of 8 is made again with 1; other graphs only get a word."""
    device = Device.load("rpi4b")
    graph = MODELS["mlp"](batch_size=8)
    problem = Problem(graph, Costs.estimate(graph, device), ram=20_000)
    found = explained(problem)
    assert [remedy.change for remedy in found.working_remedies] == [Change.RAM, Change.BATCH]
    assert "feasible with batch size 1" in found.sentences()
    own = Graph(name="own", nodes=graph.nodes, batch_size=8)
    found = explained(Problem(own, Costs.estimate(own, device), ram=20_000))
    assert [remedy.change for remedy in found.remedies] == [Change.RAM]
    assert any("a batch of 8" in sentence for sentence in found.sentences())


@pytest.mark.parametrize("whole", [True, False], ids=["needs integrality", "does not"])
def test_own_constraints_are_named(whole):
    """Those that contradict are named with the limit they contradict; the others are not."""
    model = build(skip_problem(recompute=whole))
    model.few_pages = pyo.Constraint(expr=sum(model.paged_out.values()) <= (0.5 if whole else 0))
    model.harmless = pyo.Constraint(expr=sum(model.paged_out.values()) <= 3)
    if whole:
        model.no_work = pyo.ConstraintList()
        model.no_work.add(sum(model.recomputed.values()) <= 0.5)
    found = explain_infeasible(solve(model), model=model)
    assert set(found.added_constraints) == ({"few_pages", "no_work[1]"} if whole else {"few_pages"})
    assert "the RAM budget" in found.limits
    text = " ".join(found.sentences())
    assert "these added constraints cannot be met together with" in text
    assert "without the additions to the model, a schedule exists" in text
    assert found.to_dict()["constraints"] == list(found.added_constraints)


def at_most(rows, upper):
    """Return binaries with rows ``<= upper``."""
    return StandardForm.from_arrays(
        np.array(rows), np.zeros(len(rows[0])), upper=1.0, row_upper=upper, integer=True
    )


@pytest.mark.parametrize(
    ("rows", "upper", "conflict"),
    [
        ([[-1, -1, 0], [0, 1, 1], [1, -1, 0]], [-2, 2, -0.5], [0, 2]),
        ([[2, 2, 0], [-2, -2, 0], [0, 1, 1]], [1, -1, 1], [0, 1]),
        ([[1, 0], [1, 1]], [1, -1], [1]),
        ([[1, 1]], [1], []),
    ],
    ids=["linearly", "through integrality", "with its bounds", "not at all"],
)
def test_rows_that_contradict_are_found(rows, upper, conflict):
    """Each of them is necessary: the others are feasible. Without time, nothing is claimed."""
    form = at_most(rows, upper)
    found = find_conflicting_rows(form, 10)
    assert found == (Conflict(needed=conflict) if conflict else None)
    assert find_conflicting_rows(form, 0) is None


def test_no_added_constraint_is_blamed_where_none_takes_part():
    """Then fixed variables conflict, or the problem alone has no schedule."""
    model = build(skip_problem())
    model.R[3, 0].fix(0)
    model.M_in[3, 0].fix(0)
    found = explain_infeasible(solve(model), model=model)
    assert found.added_constraints == ()
    assert any("variables that are fixed" in sentence for sentence in found.sentences())
    model = build(skip_problem(deadline=10.5))
    model.few = pyo.Constraint(expr=sum(model.recomputed.values()) <= 1)
    found = explain_infeasible(solve(model), model=model)
    assert found.added_constraints == ()
    assert [remedy.change for remedy in found.working_remedies] == [Change.RAM, Change.TIME]


def test_what_is_not_proved_is_said_to_be_open(monkeypatch):
    """Without time, nothing is claimed; a schedule without a proof is feasible, but not minimal."""

    def loose(*arguments):
        return replace(execute(*arguments), objective_bound=10.0)

    result = solve(skip_problem(deadline=9))
    monkeypatch.setattr(variants, "execute", loose)
    found = explain_infeasible(result)
    assert next(found.sentences()) == (
        "feasible with 11 s as the deadline; less than 10 s is proven infeasible, the rest is open"
    )
    result = solve(skip_problem(deadline=10.5))
    undecided = replace(result, status=Status.UNKNOWN)
    monkeypatch.setattr(variants, "execute", lambda *_, **__: undecided)
    found = explain_infeasible(result)
    assert [remedy.works for remedy in found.remedies] == [None, None]
    assert not any(remedy.proven for remedy in found.remedies)
    assert list(found.sentences()) == [
        "whether more RAM alone would suffice was not decided in time",
        "whether a later deadline alone would suffice was not decided in time",
    ]


@pytest.mark.slow
def test_least_storage_counts_the_homes_of_state():
    """With the named storage, there is a schedule, with a byte less there is none.

    State that is only read needs its bytes, too.
    """
    rng, checked = make_rng("least storage of state"), 0
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


# -- own constraints in conflict -------------------------------------------------------------------
def upper(name, limit, **terms):
    """Return a row with an upper limit; a key has ``__`` for its colon."""
    keys = {key.replace("__", ":"): weight for key, weight in terms.items()}
    return Constraint(name=name, terms=keys, upper=limit)


def with_rows(*rows, **limits):
    """Return the worked problem with rows: in less than 15 B, a (4 B) is paged or recomputed."""
    return replace(skip_problem(**limits), constraints=rows)


WEAR = upper("wear", 3, bytes_written=1)
MORE_WEAR = "feasible with constraint 'wear' at most 4 bytes"
TOGETHER = "cannot be met together with the RAM budget"


@pytest.mark.parametrize(
    ("problem", "hints"),
    [
        (
            with_rows(WEAR, recompute=False),
            [
                f"constraint 'wear' {TOGETHER} and no recomputation",
                *(KEPT, "feasible with recomputation", MORE_WEAR),
            ],
        ),
        (
            with_rows(WEAR, upper("idle", 100, energy_j=1), upper("once", 0, recomputations__a=1)),
            [
                f"constraints 'wear' and 'once' {TOGETHER}",
                *(KEPT, MORE_WEAR, "feasible with constraint 'once' at most 1"),
            ],
        ),
        (
            with_rows(upper("thrift", 10.5, energy_j=1)),
            [
                f"constraint 'thrift' {TOGETHER}",
                *(KEPT, "feasible with constraint 'thrift' at most 11 J"),
            ],
        ),
        (with_rows(WEAR, ram=11), ["feasible from 12 bytes of RAM"]),
    ],
)
def test_rows_in_conflict_are_named(problem, hints):
    """With the limits in conflict, and remedies; rows outside of the conflict are not listed."""
    assert list(explained(problem).hints()) == hints


def test_json_has_what_is_in_conflict_and_the_nearest_limit():
    """Names of rows beside limits in words; a change names the limit of a row.

    A rule outside of the conflict is not in the reason; an impossible limit is the reason.
    Without time, all members stay in the set, and none is called necessary.
    """
    found = explained(with_rows(WEAR, recompute=False)).to_dict()
    assert found["constraints"] == ["wear"]
    assert found["limits"] == ["the RAM budget", "no recomputation"]
    change = found["changes"][-1]
    expected = {"change": "constraint", "constraint": "wear", "side": "upper", "unit": "bytes"}
    assert {key: change[key] for key in expected} == expected
    assert (change["allowed"], change["nearest"], change["bound"]) == (3, 4, 4)
    assert change["proven"] is True
    assert "constraint" not in found["changes"][0]
    idle = upper("idle", 100, energy_j=1)
    late = explained(with_rows(idle, deadline="100%")).to_dict()
    assert (late["constraints"], late["limits"]) == ([], ["the RAM budget", "the deadline"])
    assert "idle" not in late["reason"]
    small = explained(with_rows(idle, ram=11))
    assert small.reason in small.obstacles
    found = find_conflict(with_rows(WEAR, idle), 0)
    assert (found.needed, len(found.unchecked)) == ([], 3)


def test_rows_are_left_out_and_named_as_a_whole():
    """An equality has no nearest limit; of one rule, few rows are named singly, many together.

    If a constraint of the model is in conflict, so is one of the problem.
    """
    row = Constraint(name="same", terms={"page_ins:a": 1, "page_outs:b": -1}, lower=-1)
    row = replace(row, upper=-1)
    found = explained(with_rows(row, upper("few", 0, page_outs__b=1)))
    sentences = list(found.sentences())
    assert "feasible without constraint 'same'" in sentences
    assert "feasible with constraint 'few' at most 1" in sentences
    every = [upper(f"each[{name}]", 0, **{f"page_outs__{name}": 1}) for name in ("a", "b", "c")]
    problem = with_rows(*every, upper("once", 0, recomputations__a=1))
    assert f"constraints 'each[a]' and 'once' {TOGETHER}" in list(explained(problem).hints())
    rows = [upper(f"each[f{k}]", 0, **{f"page_outs__f{k}": 1}) for k in range(8)]
    comb = comb_problem(teeth=8, ram=30, recompute=False)  # any of f0 to f5 could leave
    hints = list(explained(replace(comb, constraints=tuple(rows))).hints())
    assert hints[0] == f"constraint 'each[...]' {TOGETHER} and no recomputation"
    assert "feasible without constraint 'each[...]'" in hints
    model = build(with_rows(WEAR))
    model.mine = pyo.Constraint(expr=sum(model.R[t, 0] for t in range(1, 4)) <= 0)
    found = explain_infeasible(solve(model), model=model)
    assert found.added_constraints == ("mine",)
    assert "constraint 'wear'" in found.limits


def test_ctrl_c_ends_the_search(monkeypatch):
    """No further solve."""
    calls = []

    def interrupted(problem, *arguments):
        calls.append(problem)
        return replace(execute(problem, *arguments), termination=Termination.INTERRUPTED)

    monkeypatch.setattr(conflict, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_conflict(with_rows(WEAR, recompute=False), 10)
    assert len(calls) == 1


def undecided_after(monkeypatch, solves):
    """Let the search for a conflict decide in its first solves alone, as if time ended then.

    Later solves end without an answer, or with the error of a time that is over.
    """
    left = iter(range(solves))

    def limited_solve(*arguments):
        result = execute(*arguments)
        if next(left, None) is not None:
            return result
        if solves % 2:
            raise TimeLimitError("the time limit has passed")
        return replace(result, status=Status.UNKNOWN, schedule=None, simulation=None)

    monkeypatch.setattr(conflict, "execute", limited_solve)


@pytest.mark.parametrize("solves", range(6))
def test_no_harmless_constraint_is_named_when_time_ends(monkeypatch, solves):
    """Constraints without a proof of conflict are named separately, wherever the search ends."""
    rows = [WEAR, *(upper(f"once[{name}]", 0, **{f"recomputations__{name}": 1}) for name in "ab")]
    rows.insert(1, upper("harmless", 100, bytes_written=1))
    result = solve(with_rows(*rows, upper("idle", 100, energy_j=1)))
    undecided_after(monkeypatch, solves)
    found = explain_infeasible(result)
    needed, unchecked = {"wear", "once[...]"}, set(found.unchecked)
    assert set(found.user_constraints) <= needed | {"once[a]"}
    if not unchecked:
        assert {row.partition("[")[0] for row in found.user_constraints} == {"wear", "once"}
    named = [*found.sentences(), found.reason]
    told = [sentence for sentence in named if "harmless" in sentence or "idle" in sentence]
    apart = [sentence for sentence in named if sentence.startswith("not decided in time")]
    assert set(told) <= set(apart)
    assert len(apart) == (len(unchecked) > 0)
    assert found.to_dict()["unchecked"] == list(found.unchecked)


def test_a_conflict_is_minimal_where_all_is_decided_and_honest_where_not():
    """Members 2 and 5 conflict; without member 3, no solve is decided."""
    assert find_minimal_conflict(lambda kept: {2, 5} <= set(kept), list(range(8))) == Conflict(
        needed=[2, 5]
    )

    def conflicts(kept):
        return {2, 5} <= set(kept) if 3 in kept else None

    found = find_minimal_conflict(conflicts, list(range(8)))
    assert (found.needed, found.unchecked) == ([2, 5], [3])


def limited(problem, remedy, limit):
    """Return a problem with another limit for the row that a remedy is about."""
    changed = [
        replace(row, **{str(remedy.side): limit}) if row.name == remedy.constraint else row
        for row in problem.constraints
    ]
    return replace(problem, constraints=tuple(changed))


@pytest.mark.slow
def test_conflicts_are_irreducible_and_nearest_limits_exact():
    """The oracle finds no schedule for a conflict, and one without any of its members.

    A limit that works has a schedule, and the next nearer one has none.
    """
    infeasible = checked = 0
    for number, base in enumerate(random_instances(120, n=(3, 4))):
        problem = add_measured_rows(make_rng(number), base)
        if optimum(problem) is not None:
            continue
        infeasible += 1
        conflicting = find_conflict(problem, 20)
        assert not conflicting.unchecked
        found = conflicting.needed
        rows = {row for each in found if isinstance(each, tuple) for row in each}
        others = [each for each in stated_limits(problem) if each not in found]
        others += [(row,) for row in problem.constraints if row not in rows]
        assert optimum(without_limits(problem, *others)) is None
        for each in found:
            assert optimum(without_limits(problem, *others, each)) is not None
        result = solve(problem)
        for remedy in explain_infeasible(result, time_limit=20).remedies:
            if remedy.change != Change.CONSTRAINT:
                continue
            (rows,) = (
                each
                for each in found
                if isinstance(each, tuple) and constraint_name(each) == remedy.constraint
            )
            assert (optimum(without_limits(problem, rows)) is not None) is remedy.works
            if remedy.nearest is None:
                continue
            checked += 1
            assert remedy.proven
            assert optimum(limited(problem, remedy, remedy.nearest)) is not None
            step = 1 if isinstance(remedy.nearest, int) else 1e-6 * max(1, abs(remedy.nearest))
            nearer = remedy.nearest + (step if remedy.side == "lower" else -step)
            assert optimum(limited(problem, remedy, nearer)) is None
    assert infeasible > 15
    assert checked > 5


def test_a_problem_in_place_of_its_result_is_one_sentence():
    """The error states that the solve comes first."""
    with pytest.raises(InputError, match=r"got a Problem; give pm.solve\(problem\)"):
        explain_infeasible(comb_problem(teeth=8, ram=1))
