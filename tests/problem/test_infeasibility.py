"""What rules a problem out before any solver: true sentences, and the limits as a phrase."""

import re
from dataclasses import replace

import pytest

from kit.commands import training_step, write_graph
from kit.instances import random_instances, random_step, seeded
from kit.worked import bench_device, even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.graph import Graph, floor, zoo
from poetmodel.problem import Problem
from poetmodel.problem.infeasibility import limits_in_words, obstacle, unit_remark


def test_a_feasible_problem_has_no_obstacle():
    """Budgets at the floor, at one pass and at the baseline are in order."""
    assert obstacle(skip_problem(ram=12, deadline=10, energy_budget=10)) is None
    assert obstacle(skip_problem(deadline=10 * (1 - 5e-10))) is None


@pytest.mark.parametrize(
    ("limits", "subject"),
    [
        ({"ram": 11}, "RAM budget 11 B"),
        ({"deadline": 9.999}, "deadline 9.999 s"),
        ({"deadline": 10 * (1 - 5e-9)}, "deadline"),
        ({"energy_budget": 9.999}, "energy budget 9.999 J"),
    ],
)
def test_each_limit_is_held_against_what_every_schedule_pays(limits, subject):
    """The sentence begins with the limit that is too small."""
    sentence = obstacle(skip_problem(**limits))
    assert sentence.startswith(subject)


def test_the_workspace_of_the_step_is_named():
    """`d` needs 12 bytes; with 9 bytes of workspace `b` needs more."""
    graph = skip_graph(workspace=True)
    assert floor(graph).node == 3
    sentence = obstacle(Problem(graph, even_costs(graph), ram=10))
    assert sentence is not None
    assert "workspace" not in sentence
    problem = skip_problem(ram=1)
    for limited in random_instances(60, (3, 5), seed=81, below_floor=True):
        step = limited.graph.nodes[floor(limited.graph).node]
        words = obstacle(limited)
        if words is not None and words.startswith("RAM"):
            assert ("workspace (" in words) == (step.workspace_bytes > 0)
            problem = limited
    assert problem.graph.name == "random"


def test_limits_in_words():
    """Every limit that there is, and no other; own constraints by name, of many the first."""
    assert limits_in_words(skip_problem()) == "the RAM budget of 13 B"
    problem = skip_problem(
        ram=12345, deadline=20, deadline_counts="compute", energy_budget=30, aux_bytes=7,
        recompute=False,
    )  # fmt: skip
    assert limits_in_words(problem) == (
        "the RAM budget of 12,345 B, the deadline of 20 s (compute), the energy budget of 30 J, "
        "the storage of 7 B, no recomputation"
    )
    unpaged = skip_problem(paging=False, aux_bytes=7)
    assert limits_in_words(unpaged) == "the RAM budget of 13 B, no paging"
    problem = skip_problem().subject_to(few=lambda v: v.bytes_written <= 8)
    assert limits_in_words(problem).endswith("the constraint 'few' (at most 8 B)")
    many = problem.subject_to(each=lambda v: [v.page_ins[i] <= 1 for i in range(4)] * 2)
    assert limits_in_words(many).endswith("'each[3]' (at most 1) and 4 more")


@pytest.mark.parametrize(
    ("rule", "limits", "sentence"),
    [
        (
            lambda v: v.energy_j <= 9,
            {},
            "constraint 'own', at most 9 J: schedules come to 10 J, as a single pass does, and "
            "never to less",
        ),
        (
            lambda v: v.page_ins["a"] >= 1,
            {"paging": False},
            "constraint 'own', at least 1: schedules come to 0, as a single pass does, and never "
            "to more",
        ),
        (
            lambda v: v.recomputations["a"] >= 4,
            {},
            "constraint 'own', at least 4: schedules come to 3 at most",
        ),
        (
            lambda v: v.compute_s - 2 * v.page_outs["a"] <= 7,
            {},
            "constraint 'own', at most 7: schedules come to 8 at least",
        ),
        (lambda v: v.recomputations["a"] >= 3, {}, None),
        (lambda v: v.compute_s - 2 * v.page_outs["a"] <= 8, {}, None),
        (lambda v: v.energy_j == v.compute_s, {}, None),
    ],
)
def test_an_own_constraint_that_nothing_can_keep(rule, limits, sentence):
    """What the most that takes off cannot bring within its limit, no schedule can."""
    assert obstacle(skip_problem(**limits).subject_to(own=rule)) == sentence


@pytest.mark.parametrize(
    ("given", "least", "remark"),
    [
        (40, 200_000, "; 40 is 40 bytes: did you mean 40% or 40KiB?"),
        (256, 200_000, "; 256 is 256 bytes: did you mean 256KiB?"),
        (40, 700, ""),
        (150_000, 10**9, ""),
    ],
)
def test_a_size_without_its_unit_is_noticed(given, least, remark):
    """Where it is far below the least, the words say that it is bytes, and what may be meant."""
    assert unit_remark(given, least) == remark


def test_a_budget_without_its_unit_is_noticed():
    """In the words about the minimum RAM."""
    graph = zoo.mlp()
    problem = Problem(graph, Costs.estimate(graph, bench_device()), ram=40)
    assert (obstacle(problem) or "").endswith("; 40 is 40 bytes: did you mean 40% or 40KiB?")
    plain = obstacle(replace(problem, ram=problem.floor.bytes - 1))
    assert "did you mean" not in (plain or "did you mean")


def test_what_the_least_ram_is_needed_for_adds_up(tmp_path):
    """State counts where it takes RAM, replacements never, and what is in place less."""
    graph = Graph.load(write_graph(tmp_path / "step.graph.json", training_step()))
    costs = Costs.estimate(graph, bench_device())
    sentence = obstacle(Problem(graph, costs, ram=599))
    assert sentence.endswith("step 'u2' needs for w2 (300 B), dw2 (300 B)")
    sentence = obstacle(Problem(graph, costs, ram=900, paging=False))
    assert "the minimum RAM is 940 B" in sentence
    assert sentence.endswith(
        "'dw2' needs for g2 (40 B), r (100 B), dw2 (300 B), all state (500 B), which without "
        "paging stays in RAM"
    )
    rng = seeded("what the least RAM is needed for")
    for _ in range(200):
        step = random_step(rng)
        paging = rng.random() < 0.5
        costs = Costs.estimate(step, bench_device())
        problem = Problem(step, costs, ram=1, paging=paging)
        words = obstacle(problem)
        if words is None or not words.startswith("RAM") or " more" in words:
            continue
        needed = words.split(" needs for ")[1]
        parts = sum(int(size) for size in re.findall(r"\((\d+) B\)", needed))
        less = sum(int(size) for size in re.findall(r"(\d+) B less", needed))
        assert parts - less == problem.floor.bytes
