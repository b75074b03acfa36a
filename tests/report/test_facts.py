"""The facts and answers of a report: commands, decisions on each tensor, figures, words."""

import shlex
from dataclasses import replace

import pytest

from kit.report_subjects import certificate, step_values, subject, training_problem
from kit.worked import even_costs, skip_graph, skip_problem
from poetmodel.problem import Constraint, Problem
from poetmodel.report.facts import decision_rows, graph_facts, reproduction_commands, schedule_facts
from poetmodel.report.presenter import value_at_path
from poetmodel.report.table_rows import measured_rows, metric_sections, step_sections
from poetmodel.report.wording import REMEDY, schedule_answers, step_answers
from poetmodel.schedule import Schedule, simulate
from poetmodel.solver import solve


def test_commands_state_the_whole_problem():
    """All limits with all digits, all choices that are not the default; names are quoted.

    A file without a problem has no command of a solve.
    """
    limits = {"deadline": 33.1, "energy_budget": 20.7, "aux_bytes": 50, "recompute": False}
    again, verify = reproduction_commands(subject(skip_problem(**limits)))
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
    assert [command.split()[1] for command in reproduction_commands(bare)] == ["verify"]


def test_commands_state_commits_once():
    """``--commit-every`` adds its constraint itself; a file has the user's ones."""
    problem = replace(training_problem(1140), commit=5)
    again, _ = reproduction_commands(subject(problem))
    words = shlex.split(again)
    assert words[words.index("--commit-every") + 1] == "5"
    assert "--constraints" not in words
    limit = Constraint(name="wear", terms={"bytes_written": 1}, upper=10_000)
    file, again, _ = reproduction_commands(subject(replace(problem, constraints=(limit,))))
    assert file.count("[[constraint]]") == file.count('name = "wear"') == 1
    assert "--constraints" in shlex.split(again)


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
    found = schedule_facts(one)
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
    """A row per value, a cell per schedule; values that no schedule has, have no row."""
    both = [
        schedule_facts(subject(skip_problem())),
        schedule_facts(subject(skip_problem(recompute=False))),
    ]
    rows = {row[0].key: row for _, part in metric_sections(both) for row in part}
    assert [fact.value for fact in rows["energy_j"]] == [11.0, 12.0]
    assert rows["peak_ram_bytes"][0].text == f"{both[0]['peak_ram_bytes']} B"
    assert "problem.deadline_s" not in rows
    assert value_at_path(both[0], "problem.missing.more") is None


def test_rows_carry_the_values_of_the_step():
    """Each cell has its key and the value there, in only one unit.

    Reserve, recomputations, solve and costs of compiling are included.
    """
    values = step_values(skip_problem())
    rows = {row[0].name: row for row in measured_rows(values)}
    assert list(rows) == ["peak RAM", "paged out", "paged in", "time of a step"]
    cells = [fact for row in rows.values() for fact in row if fact.value is not None]
    assert len(cells) == 10
    for fact in cells:
        assert value_at_path({"step": values}, fact.key) == fact.value
    assert rows["paged out"][-1].value is None
    parts = dict(step_sections([{"step": step_values(skip_problem()), "status": "optimal"}]))
    texts = {row[0].key: row[0].text for rows in parts.values() for row in rows}
    assert texts["step.reserved_bytes"] == "6 B"
    assert (texts["step.graph.scheduled_tensors"], texts["step.compile_s"]) == ("4", "1.5 s")
    assert texts["status"] == "optimal"
    assert "gap" not in texts


# -- answers -------------------------------------------------------------------------------------
WEAR = Constraint(name="wear", terms={"bytes_written": 1}, upper=4)
OWN = {"minimize": "own", "user_objective": (("energy_j", 1), ("page_ins:a", 0.5))}
BROKEN = Schedule(R=((0, 0), (1, 1), (2, 2), (3, 3)), S_RAM=((1, 0), (2, 1)))


def lines(found):
    """Return answers with their mood, one a line."""
    return "\n".join(f"{answer.mood}: {answer.word}: {answer.text}" for answer in found)


@pytest.mark.parametrize(
    ("limits", "changes"),
    [
        pytest.param({}, {}, id="proven"),
        pytest.param({}, {"status": "feasible", "gap": 0.25}, id="a gap"),
        pytest.param({}, {"status": "feasible", "gap": 1.0}, id="a bound of nothing"),
        pytest.param({}, {"gap": None, "bound_j": None}, id="no bound"),
        pytest.param({"deadline": "120%"}, {}, id="deadline"),
        pytest.param({"minimize": "ram"}, {}, id="least RAM"),
    ],
)
def test_answers_about_a_schedule(limits, changes, told):
    """It fits in 13 B and costs 1 J on 10 J; an unproven schedule is not called optimal."""
    told(lines(schedule_answers(schedule_facts(subject(skip_problem(**limits))) | changes)))


def test_rejected_schedules_and_own_wishes_are_told(told):
    """Of an invalid one, nothing is claimed; user-defined objectives have weights and a value."""
    told(lines(schedule_answers(schedule_facts(subject(skip_problem(), BROKEN)))), "rejected")
    problem = replace(skip_problem(), constraints=(WEAR,), **OWN)
    told(lines(schedule_answers(schedule_facts(subject(problem)))), "own")


def test_a_bound_of_a_model_without_baseline_is_stated():
    """The gap between 1 and a bound of -1 is 2: unlike an overhead, it may be below 0."""
    facts = schedule_facts(subject(skip_problem()))
    objective = {"minimize": "own", "name": "obj", "value": 1.0, "bound": -1.0}
    found = schedule_answers(facts | {"status": "feasible", "gap": 2.0, "objective": objective})[1]
    assert found.word == "Not proven"
    assert "objective 'obj' of the model has the bound -1" in found.text


@pytest.mark.parametrize("name", ["obj", None])
def test_an_own_objective_without_a_bound_is_not_proven(name):
    """Of an unbounded variable or a solver's time limit, there is a value alone."""
    facts = schedule_facts(subject(skip_problem()))
    objective = {"minimize": "own", "name": name, "value": 1.0, "bound": None}
    found = schedule_answers(facts | {"status": "feasible", "gap": 1.0, "objective": objective})[1]
    assert (found.word, found.mood) == ("Not proven", "warn")


def test_without_costs_nothing_is_said_of_energy():
    """Unknown stays unknown.

    A schedule that costs more than the file's gets the larger gap, to the stated bound.
    """
    found = schedule_facts(replace(subject(skip_problem()), costs=None))
    assert found["energy_j"] is found["makespan_s"] is found["gap"] is None
    assert [answer.word for answer in schedule_answers(found)] == ["Fits", "Unknown", "Unknown"]
    problem = skip_problem()
    paging = subject(skip_problem(recompute=False)).schedule
    found = schedule_facts(subject(problem, paging))
    assert (found["overhead_j"], found["overhead_bound_j"], found["gap"]) == (2.0, 1.0, 0.5)


LOSS = {"name": "loss", "largest": 0.5, "text": "by up to 0.5", "op": "loss/nll"}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="good"),
        pytest.param(
            {"equal": False, "differences": [LOSS], "random_equal": False, "within_budget": False},
            id="different and above",
        ),
        pytest.param({"equal": False, "random_equal": False}, id="random state alone"),
    ],
)
def test_answers_about_a_step(changes, told):
    """Equal, kept, and the times side by side; differences and excess are not called good."""
    told(lines(step_answers(step_values(skip_problem(), certificate=certificate(**changes)))))


@pytest.mark.parametrize("device", ["Small Board", None])
def test_a_plan_for_another_device_is_called_so(device, told):
    """Its time is not that of the host where the step was measured."""
    values = step_values(skip_problem())
    values["plan"]["device"] = device
    if device is None:
        del values["plan"]["device"]
    told(step_answers(values)[2].text)


def test_a_step_that_was_not_verified_says_how(told):
    """No claim; the values of the plan are given as such."""
    values = step_values(skip_problem(), certificate=None)
    found = step_answers(values)
    told(lines(found))
    assert found[0].text == REMEDY
    for measured, _, eager in measured_rows(values):
        assert measured.value is None
        assert eager.value is None
