"""Cases: a command line states each field of limits and search, and every door hands it on."""

import shlex
from dataclasses import fields, replace
from inspect import signature

import pytest
import typer
from typer.testing import CliRunner

from kit.worked import bench_device, even_costs, skip_graph
from poetmodel.case.case import Case
from poetmodel.case.spelling import EXPORTED_LIMITS, LIMIT_ROWS, SEARCH_ROWS
from poetmodel.cli import options
from poetmodel.explore.settings import Catalogue, ExplorerSettings
from poetmodel.export.options import ExportKeywords, ExportOptions
from poetmodel.problem import Limits, Problem
from poetmodel.schedule.io import ProblemEntry
from poetmodel.solver.request import SearchOptions

LIMITS = Limits(
    ram=30,
    deadline=40.0,
    deadline_counts="compute",
    aux_bytes=60,
    recompute=False,
    paging=False,
    minimize="time",
    energy_budget=50.0,
    count_parameters=True,
    commit=7,
)
SEARCH = SearchOptions(
    method="chen-sqrt",
    formulation="compact",
    backend="scip",
    time_limit_s=5.5,
    gap=0.125,
    threads=3,
    solver_options={"effort": 0.25, "deep": True, "nodes": 12, "mode": "fast"},
)


def parse(arguments):
    """Return limits and search that a command of all their options gets."""
    found = []

    @options.command("x")
    def solve(limits: Limits, search: SearchOptions) -> None:
        found.extend((limits, search))

    app = typer.Typer()
    app.command()(solve.run)
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    return found


def named(stated):
    """Return the fields by name."""
    return {entry.name: getattr(stated, entry.name) for entry in fields(stated)}


def resolved(limits):
    """Return the JSON of a problem on a board."""
    graph = skip_graph()
    costs = even_costs(graph, device=bench_device())
    return Problem.from_limits(graph, costs, limits).to_dict()


@pytest.mark.parametrize(
    ("stated", "rows", "unspelled"),
    [(LIMITS, LIMIT_ROWS, {"constraints"}), (SEARCH, SEARCH_ROWS, {"seed"})],
)
def test_each_field_has_an_option(stated, rows, unspelled):
    """A new field without a row fails here, and one whose example is its default."""
    assert {row.field for row in rows} | unspelled == set(named(stated))
    default = named(type(stated)())
    assert {name for name, value in named(stated).items() if value == default[name]} == unspelled


def test_commands_state_what_they_were_made_from():
    """All digits of numbers, each entry of a mapping; flags state the other choice."""
    case = Case(source="skip.json", limits=LIMITS, search=SEARCH)
    words = shlex.split(case.command("solve", out="x.json"))
    assert (words[:3], words[-2:]) == (["poetmodel", "solve", "skip.json"], ["--out", "x.json"])
    limits, search = parse(words[3:-2])
    assert search == SEARCH
    assert resolved(limits) == resolved(LIMITS)


def test_defaults_are_not_stated():
    """Except options that have another default in an export."""
    words = shlex.split(Case(source="mlp").command("solve", out="x.json"))
    assert words[3:-2] == ["--backend", "highs", "--time-limit", "60.0", "--gap", "0.0001"]
    assert parse([]) == [Limits(), SearchOptions()]


@pytest.mark.parametrize(
    ("arguments", "commit"),
    [(["--commit"], 1), (["--commit", "--commit-every", "5"], 5), (["--commit-every", "2"], 2)],
)
def test_a_later_row_of_a_field_wins(arguments, commit):
    """``--commit`` alone is every step."""
    assert parse(arguments)[0].commit == commit


def test_export_is_offered_where_it_solves_the_same_problem():
    """It has no option for parameters, an objective or another solver."""
    limits = Limits(ram=LIMITS.ram, **{name: getattr(LIMITS, name) for name in EXPORTED_LIMITS})
    case = Case(source="net.step.json", limits=limits)
    assert case.is_exportable
    words = shlex.split(case.command("export", out="c", options={"--tile": "none"}))
    assert {"--aux", "--deadline-counts", "--commit-every", "--tile"} <= set(words)
    assert "--backend" not in words
    assert not replace(case, limits=LIMITS).is_exportable
    assert not replace(case, search=SEARCH).is_exportable


def test_files_and_the_explorer_hand_each_limit_on():
    """All limits of a file, and all limits of the explorer except those of its sliders."""
    entry = ProblemEntry(**resolved(LIMITS))
    assert resolved(entry.limits()) == resolved(LIMITS)
    settings = ExplorerSettings(model="mlp", device="rpi4b", limits=LIMITS)
    shown = settings.to_dict()
    assert named(LIMITS).items() - shown.items() == {
        (name, getattr(LIMITS, name))
        for name in ("ram", "deadline", "energy_budget", "constraints")
    }
    limits = Catalogue().case(ExplorerSettings.model_validate(shown)).limits
    assert limits == replace(LIMITS, ram=None, deadline=None, energy_budget=None)


def test_exports_name_their_keywords():
    """The typed keywords are those that are parsed, and state all limits that the row table has."""
    parsed, settings = (
        set(signature(function).parameters) - {"folder", "infer", "evaluate"}
        for function in (ExportOptions.parse, ExportOptions.of_limits)
    )
    assert set(ExportKeywords.__annotations__) == (parsed | settings) - {
        *("settings", "limits", "search")
    }
    assert set(EXPORTED_LIMITS) <= parsed


def test_a_new_limit_reaches_problems():
    """Problems have the fields of limits, in their order."""
    names = [entry.name for entry in fields(Problem)]
    assert names[: len(fields(Limits)) + 2] == ["graph", "costs", *named(Limits())]
