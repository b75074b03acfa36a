"""Doors: what options, files, the explorer and sweeps state reaches the fields of a problem."""

import re
from dataclasses import fields, replace
from inspect import getsource, signature

import pytest

import poetmodel as pm
from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.baselines import run
from poetmodel.cli import choosing
from poetmodel.cli.options import CommitOptions, LimitOptions
from poetmodel.explore.settings import Catalogue, ExplorerSettings
from poetmodel.export.options import ExportKeywords, ExportOptions
from poetmodel.problem import Problem
from poetmodel.schedule.io import ProblemEntry
from poetmodel.solver import fit_arena, solve
from poetmodel.solver.request import SearchKeywords, SolveKeywords

LIMITS = {
    "ram_budget_bytes": 30,
    "deadline_s": 40.0,
    "deadline_counts": "compute",
    "recompute": False,
    "paging": False,
    "minimize": "time",
    "energy_budget_j": 50.0,
    "aux_bytes": 60,
    "count_parameters": True,
    "commit": 7,
}
"""A value of each limit and choice that is not its default."""


def stated(**changes):
    """Return a problem on a board; the defaults of its fields unless changed."""
    graph = skip_graph()
    return Problem(graph, even_costs(graph, device=bench_device()), **changes)


def test_no_value_is_a_default():
    """What the doors are tested with differs from what a problem without limits has."""
    plain = stated().to_dict()
    assert set(plain) | {"commit"} == set(LIMITS)
    assert [key for key, value in LIMITS.items() if plain.get(key) == value] == []


def test_options_of_commands_reach_the_problem():
    """Each option of a limit is the field of its name; a job replaces deadline and energy."""
    options = LimitOptions(
        ram="30B",
        aux="60B",
        deadline="40s",
        deadline_counts="compute",
        minimize="time",
        energy_budget="50J",
        no_paging=True,
        no_recompute=True,
        count_parameters=True,
        commit_every=7,
    )
    problem = options.build_problem(stated().graph, stated().costs)
    assert problem.to_dict() == LIMITS
    job = options.build_problem(problem.graph, stated().costs, deadline=45.0, energy_budget=55.0)
    assert job.to_dict() == LIMITS | {"deadline_s": 45.0, "energy_budget_j": 55.0}


def test_entries_of_files_reach_the_problem():
    """Each key of the problem in a schedule file."""
    problem = ProblemEntry(**LIMITS).to_problem(stated().graph, stated().costs)
    assert problem.to_dict() == LIMITS


def test_choices_of_the_explorer_reach_the_problem():
    """All but RAM, deadline and energy budget, which the page does not ask for there."""
    asked = {
        key: value
        for key, value in LIMITS.items()
        if key not in ("ram_budget_bytes", "deadline_s", "energy_budget_j")
    }
    choice = ExplorerSettings(model="mlp", device="rpi4b", **asked)
    problem = Catalogue().build_problem(choice, stated().graph, stated().costs)
    assert {key: problem.to_dict()[key] for key in asked} == asked


def test_a_replaced_field_is_resolved_anew():
    """Percentages are taken of the new graph; choices and numbers are members and floats."""
    problem = stated(ram="50%", deadline="150%", minimize="time")
    assert (problem.minimize, problem.deadline_counts) == ("time", "serial")
    again = replace(problem, ram="100%", deadline_counts="compute")
    assert (problem.ram_budget_bytes, again.ram_budget_bytes) == (7, 15)
    assert (problem.deadline_s, again.deadline_s) == (15.0, 15.0)
    with pytest.raises(pm.errors.InputError, match="minimize"):
        replace(problem, minimize="beauty")


def test_keywords_are_declared_once():
    """The typed keywords of each door are those of the function that takes them."""
    of_solve = [*signature(solve).parameters][1:]
    assert sorted(SolveKeywords.__annotations__) == sorted(of_solve)
    assert set(SolveKeywords.__annotations__) - set(SearchKeywords.__annotations__) == {
        "time_limit"
    }
    of_export = set(signature(ExportOptions.parse).parameters) - {"folder", "infer", "evaluate"}
    assert set(ExportKeywords.__annotations__) == of_export
    for door in (run, fit_arena):
        assert "Unpack" in str(signature(door).parameters["options"].annotation)


def test_unknown_keywords_name_the_known_ones():
    """Of methods, too, which take those of `solve`."""
    with pytest.raises(TypeError, match=r"'limit'.*time_limit"):
        run(stated(), "checkpoint-all", limit=3)


def test_choose_passes_each_limit_on():
    """An option of limits that ``choose`` offers is read by it; a new one would else be ignored."""
    source = getsource(choosing)
    excluded = re.search(r"LimitOptions, options\.without\((.*?)\)", source)[1]
    commits = {field.name for field in fields(CommitOptions)}  # read as `steps_to_commit`
    offered = {field.name for field in fields(LimitOptions)} - set(re.findall(r"\w+", excluded))
    assert offered - commits | {"steps_to_commit"} <= set(re.findall(r"\blimits\.(\w+)", source))
