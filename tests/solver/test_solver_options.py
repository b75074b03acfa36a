"""Options of the solver itself: to every solve, checked by the solver, recorded."""

import json
from dataclasses import replace
from inspect import signature

import pytest

from kit.commands import invoke
from kit.instances import scarce_problem
from kit.worked import skip_problem
from poetmodel.backends.highs import Highs
from poetmodel.baselines import run
from poetmodel.errors import InputError, UnknownOptionError
from poetmodel.schedule.document import load_document
from poetmodel.solver import fit_arena, solve
from poetmodel.solver.request import SearchKeywords, SolveKeywords
from poetmodel.solver.sensitivity import find_limits

OPTIONS = {"mip_heuristic_effort": 0.25, "mip_max_leaves": 100_000, "presolve": "choose"}


@pytest.fixture
def seen(monkeypatch):
    """Return the options of all solves of HiGHS, in order."""
    calls, solved = [], Highs.solve

    def solve_seen(self, form, limits, **more):
        calls.append(dict(limits.options))
        return solved(self, form, limits, **more)

    monkeypatch.setattr(Highs, "solve", solve_seen)
    return calls


WAYS = {
    "lazy": lambda given: solve(scarce_problem("options/1", (7, 9)), **given),
    "compact": lambda given: solve(skip_problem(), formulation="compact", **given),
    "method": lambda given: run(skip_problem(), "recompute-only", **given),
    "arena": lambda given: fit_arena(skip_problem(), mode="blocking", **given).result,
    "limits": lambda given: find_limits(skip_problem(), **given)[0].result,
}


@pytest.mark.parametrize("way", WAYS)
def test_options_reach_every_solve_and_are_recorded(seen, way):
    """For any formulation and caller; the result records the options."""
    result = WAYS[way]({"solver_options": OPTIONS})
    assert seen
    assert [options for options in seen if options != OPTIONS] == []
    assert result.solver_options == OPTIONS
    assert result.to_dict()["problem"]["solver_options"] == OPTIONS


def test_without_options_nothing_is_stated(seen):
    """Files are as they were."""
    result = solve(skip_problem())
    assert set(map(len, seen)) <= {0}
    assert "solver_options" not in result.to_dict()["problem"]


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *(("time_limit", "time_limit"), ("threads", "threads"), ("random_seed", "seed")),
        *(("mip_rel_gap", "gap"), ("mip_abs_gap", "gap"), ("log_file", "log")),
        ("Time_Limit", "time_limit"),
    ],
)
def test_our_own_settings_are_refused_by_name(seen, name, parameter):
    """The error names the parameter to use; nothing is solved."""
    with pytest.raises(InputError, match=f"'{name}' is set by {parameter}"):
        solve(skip_problem(), solver_options={name: 1})
    assert seen == []


@pytest.mark.parametrize("formulation", [None, "compact"])
def test_an_unknown_option_is_one_clear_error(formulation):
    """Also where a heuristic finds and proves the answer without the solver."""
    roomy = replace(skip_problem(), ram="100%")
    for problem in (skip_problem(), roomy):
        with pytest.raises(UnknownOptionError, match="does not know the option 'effort'"):
            solve(problem, formulation=formulation, solver_options={"effort": 1})


def test_a_method_without_a_solver_refuses_options():
    """They would have no effect."""
    with pytest.raises(InputError, match="solver_options: method 'checkpoint-all' needs no solver"):
        run(skip_problem(), "checkpoint-all", solver_options=OPTIONS)


def test_the_command_takes_and_records_them(tmp_path, monkeypatch):
    """Values are parsed by type, recorded in the file, and in the reproducing command."""
    monkeypatch.chdir(tmp_path)
    how = ("solve", "mlp", "--device", "mkr1000", "--ram", "80%")
    given = [
        word for pair in OPTIONS.items() for word in ("--solver-option", "{}={}".format(*pair))
    ]
    found = invoke(*how, *given, "--out", "a.schedule.json", "--json", status=0).json
    assert found["problem"]["solver_options"] == OPTIONS
    written = json.loads((tmp_path / "a.schedule.json").read_text())
    assert written["problem"] == found["problem"]
    assert load_document("a.schedule.json").problem.solver_options == OPTIONS
    pytest.importorskip("plotly")
    page = ("report", "a.schedule.json", "--graph", "mlp", "--device", "mkr1000", "--out", "a.html")
    lines = invoke(*page, "--json", status=0).json["schedules"][0]["commands"]
    assert "--solver-option mip_heuristic_effort=0.25" in " ".join(lines)
    assert "mip_max_leaves=100000" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("effort=0.2",), "does not know the option 'effort'"),
        (("threads=2",), "'threads' is set by threads"),
        (("presolve",), "expected NAME=VALUE, got 'presolve'"),
        (("presolve=on", "presolve=off"), "presolve is given twice"),
    ],
)
def test_the_command_says_what_is_wrong(given, words):
    """In one sentence, with the status of bad input."""
    options = [word for text in given for word in ("--solver-option", text)]
    outcome = invoke("solve", "mlp", "--device", "mkr1000", "--ram", "80%", *options)
    assert outcome.status == 2
    assert words in outcome.err
    assert outcome.err.count("error:") == 1


def test_keywords_are_declared_once():
    """The typed keywords of each entry point are those of its function."""
    of_solve = [*signature(solve).parameters][1:]
    assert sorted(SolveKeywords.__annotations__) == sorted(of_solve)
    assert set(SolveKeywords.__annotations__) - set(SearchKeywords.__annotations__) == {
        "time_limit"
    }
    for door in (run, fit_arena):
        assert "Unpack" in str(signature(door).parameters["options"].annotation)


def test_unknown_keywords_name_the_known_ones():
    """Also those of methods, which accept the keywords of `solve`."""
    with pytest.raises(TypeError, match=r"'limit'.*time_limit"):
        run(skip_problem(), "checkpoint-all", limit=3)
