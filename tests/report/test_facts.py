"""The facts of a report: commands that reproduce it, decisions on each tensor, and figures."""

import shlex
from dataclasses import replace

import pytest

from kit.report_steps import step_values
from kit.report_subjects import subject, training_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.problem import Problem
from poetmodel.report.facts import commands, decision_rows, facts, graph_facts
from poetmodel.report.figures import figures, measured_rows, step_figures
from poetmodel.report.presenter import look_up
from poetmodel.schedule import Schedule, simulate
from poetmodel.solver import solve


def test_commands_state_the_whole_problem():
    """Every limit with all digits, every choice that is not the default; names are quoted.

    A file that states no problem has nothing to solve.
    """
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
    one = subject(skip_problem())
    bare = replace(one, document=replace(one.document, problem=None))
    assert [command.split()[1] for command in commands(bare)] == ["verify"]


def test_recomputed_tensor_bears_its_price():
    """`a` leaves RAM and is computed again for d: 1 J and 1 s; the others are kept or unread.

    Prices add up to the overhead: a node of several tensors is paid for once.
    """
    problem = skip_problem()
    a, b, c, d = decision_rows(problem, solve(problem).require_schedule())
    assert (a["choice"], a["recomputed"], a["energy_j"], a["time_s"]) == ("recomputed", 1, 1.0, 1.0)
    assert (b["choice"], b["energy_j"], b["first_stage"], b["last_stage"]) == ("kept", 0.0, 1, 2)
    assert (c["choice"], c["size_bytes"]) == ("kept", 5)
    assert d["choice"] == "never read"
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
    made = list(decision_rows(problem, schedule))
    assert sum(one["energy_j"] for one in made) == pytest.approx(found.overhead_j)
    for cost in ("energy_j", "time_s"):  # of a first computation a recomputation takes nothing
        assert [one[cost] for one in made] == [1.0, 2.0, 3.0, 0.0, 0.0]


def test_state_is_told_by_its_home():
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
    assert (table["w1"]["paged_out"], table["w1+"]["choice"]) == (1, "replacement")
    counts = found["decisions"]["tensors"]
    assert (counts["resident"], counts["on storage"], counts["replacement"]) == (1, 1, 2)
    assert found["decisions"]["page_ins"] == sum(row["paged_in"] for row in table.values())
    assert found["decisions"]["page_outs"] == sum(row["paged_out"] for row in table.values())
    graph = graph_facts(one)
    assert graph["state"] == {"tensors": 2, "bytes": 500}
    assert graph["floor_bytes"] == 600


# -- figures of a report ---------------------------------------------------------------------------
def test_figures_stand_beside_each_other():
    """A row per figure, a cell per schedule; what nobody states has no row."""
    both = [facts(subject(skip_problem())), facts(subject(skip_problem(recompute=False)))]
    rows = {row[0].key: row for _, part in figures(both) for row in part}
    assert [fact.value for fact in rows["energy_j"]] == [11.0, 12.0]
    assert rows["peak_ram_bytes"][0].text == f"{both[0]['peak_ram_bytes']} B"
    assert "problem.deadline_s" not in rows
    assert look_up(both[0], "problem.missing.more") is None


def test_rows_carry_the_values_of_the_step():
    """Each cell has its key and the value there; nothing is shown twice in another unit.

    Coarsening, reserve, recomputations, solve and costs of compiling are there.
    """
    values = step_values(skip_problem())
    rows = {row[0].name: row for row in measured_rows(values)}
    assert list(rows) == ["peak RAM", "of which tensors", "paged out", "paged in", "time of a step"]
    cells = [fact for row in rows.values() for fact in row if fact.value is not None]
    assert len(cells) == 11
    for fact in cells:
        assert look_up({"step": values}, fact.key) == fact.value
    first, *others = rows["of which tensors"]
    assert (first.key, first.text) == ("step.certificate.storage_peak_bytes", "70 B")
    assert [fact.value for fact in others] == [None, None]
    parts = dict(step_figures([{"step": step_values(skip_problem()), "status": "optimal"}]))
    texts = {row[0].key: row[0].text for rows in parts.values() for row in rows}
    assert (texts["step.reserved_bytes"], texts["step.graph.threshold_bytes"]) == ("6 B", "4 B")
    assert (texts["step.graph.scheduled_tensors"], texts["step.compile_s"]) == ("4", "1.5 s")
    assert texts["status"] == "optimal"
    assert "gap" not in texts
