"""The facts of a report: the commands that reproduce it, and what was decided for each tensor."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from kit.report_subjects import subject, training_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.device import Costs
from poetmodel.problem import Problem
from poetmodel.report.facts import commands, decision_rows, facts, graph_facts
from poetmodel.schedule import Schedule, simulate
from poetmodel.solver import solve


def test_commands_state_the_whole_problem() -> None:
    """Every limit with all digits, every choice that is not the default; names are quoted."""
    limits = {"deadline": 33.1, "energy_budget": 20.7, "aux_bytes": 50, "recompute": False}
    again, verify = commands(subject(skip_problem(**limits)))
    words = shlex.split(again)
    assert words[:3] == ["poetmodel", "solve", "skip.json"]
    for option, value in (
        ("--profile", "skip costs.csv"),
        ("--ram", "13"),
        ("--deadline", "33.1s"),
        ("--deadline-counts", "serial"),
        ("--energy-budget", "20.7J"),
        ("--aux", "50"),
        ("--backend", "highs"),
        ("--out", "x.json"),
    ):
        assert words[words.index(option) + 1] == value
    assert "--no-recompute" in words
    assert "--no-paging" not in words
    assert "--minimize" not in words
    assert shlex.split(verify)[:5] == ["poetmodel", "verify", "x.json", "--graph", "skip.json"]


def test_bare_relations_can_only_be_judged() -> None:
    """A file that states no problem has nothing to solve."""
    one = subject(skip_problem())
    bare = replace(one, document=replace(one.document, problem=None))
    assert [command.split()[1] for command in commands(bare)] == ["verify"]


def rows(problem: Problem, schedule: Schedule) -> list[dict[str, Any]]:
    """Return the rows of the table."""
    return list(decision_rows(problem, schedule))


def test_recomputed_tensor_bears_its_price() -> None:
    """`a` leaves RAM and is computed again for d: 1 J and 1 s; the others are kept or unread."""
    problem = skip_problem()
    a, b, c, d = rows(problem, solve(problem).require_schedule())
    assert (a["choice"], a["recomputed"], a["energy_j"], a["time_s"]) == ("recomputed", 1, 1.0, 1.0)
    assert (b["choice"], b["energy_j"], b["first_stage"], b["last_stage"]) == ("kept", 0.0, 1, 2)
    assert (c["choice"], c["size_bytes"]) == ("kept", 5)
    assert d["choice"] == "never read"


def test_paged_tensor_bears_both_transfers() -> None:
    """Without recomputation `a` is moved out and in: 1 J each, in RAM to the end of stage 1."""
    problem = skip_problem(recompute=False)
    a = rows(problem, solve(problem).require_schedule())[0]
    assert (a["choice"], a["paged_out"], a["paged_in"]) == ("paged", 1, 1)
    assert (a["energy_j"], a["time_s"], a["last_stage"]) == (2.0, 2.0, 3)


def test_prices_add_up_to_the_overhead() -> None:
    """A node of several tensors is paid for once."""
    graph = skip_graph(mask=True)
    problem = Problem(graph, even_costs(graph), ram=40)
    schedule = Schedule(
        R=((0, 0), (1, 1), (2, 2), (3, 1), (3, 2), (3, 3)),
        S_RAM=((1, 0), (2, 0), (2, 1), (3, 0)),
        M_out=((0, 0),),
        S_AUX=((1, 0), (2, 0), (3, 0)),
    )
    found = simulate(graph, problem.costs, schedule)
    assert found.violations == ()
    made = rows(problem, schedule)
    assert sum(one["energy_j"] for one in made) == pytest.approx(found.overhead_j)
    assert [one["energy_j"] for one in made] == [1.0, 2.0, 3.0, 0.0, 0.0]


def test_costs_without_storage() -> None:
    """Where nothing can be paged there are no page columns to read."""
    graph = skip_graph()
    costs = Costs.from_arrays(graph, compute_time_s=[1] * 4, compute_energy_j=[1] * 4)
    problem = Problem(graph, costs, ram=13)
    assert rows(problem, solve(problem).require_schedule())[0]["recomputed"] == 1


def test_state_is_told_by_its_home() -> None:
    """Each state tensor has a home and its costs, replacements none; the figures add up."""
    one = subject(training_problem(900))
    found = facts(one)
    assert found["state"] == {
        "tensors": 2,
        "resident": 1,
        "resident_bytes": 300,
        "on_storage_bytes": 200,
        "read_bytes": 400,
        "written_back_bytes": 200,
    }
    assert found["in_place"]["uses"] == 2
    table = {row["tensor"]: row for row in decision_rows(one.problem, one.schedule)}
    assert (table["w2"]["choice"], table["w2"]["ram_stages"]) == ("resident", 13)
    assert (table["w1"]["choice"], table["w1"]["paged_in"]) == ("on storage", 2)
    assert table["w1"]["paged_out"] == 1
    assert table["w1+"]["choice"] == "replacement"
    counts = found["decisions"]["tensors"]
    assert (counts["resident"], counts["on storage"], counts["replacement"]) == (1, 1, 2)
    assert found["decisions"]["page_ins"] == sum(row["paged_in"] for row in table.values())
    assert found["decisions"]["page_outs"] == sum(row["paged_out"] for row in table.values())
    graph = graph_facts(one)
    assert graph["state"] == {"tensors": 2, "bytes": 500}
    assert graph["floor_bytes"] == 600


def test_without_state_nothing_is_said_of_it() -> None:
    """Graphs of version 1 have the facts that they always had."""
    one = subject(skip_problem())
    found = facts(one)
    assert not {"state", "in_place"} & set(found)
    assert "resident" not in found["decisions"]["tensors"]
    assert "state" not in graph_facts(one)
